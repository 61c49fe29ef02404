"""Memory for batches, used again once nobody holds them: fresh memory costs more in page faults than filling it."""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
import numpy.typing as npt

__all__ = ["MemoryPool"]

Bytes = npt.NDArray[np.uint8]

_POOLED_BYTES = 1 << 20
"""The allocator reuses what is smaller by itself."""
_FREE_BYTES = 128 << 20
"""What may lie idle, as between two epochs, when all that was read ahead has been used; two stretches always may."""


class _Loan:
    """Owns a stretch of memory while it is lent.

    numpy lets an array that is made from another refer to the object that owns the memory, not to the array it was
    made from. As that owner is this object, whoever can look at the memory keeps it alive, by whatever way.
    """

    __slots__ = ("__array_interface__", "__weakref__", "memory")

    def __init__(self, memory: Bytes, nbytes: int) -> None:
        self.memory = memory
        self.__array_interface__ = memory[:nbytes].__array_interface__


class MemoryPool:
    """Lends stretches of memory that come back by themselves.

    Arrays made from what `take` returns, and tensors made from those with ``torch.from_numpy``, keep the loan alive as
    long as any tensor shares the storage. When it dies, nobody can look at the memory any more, and it is lent again.
    Safe for threads: borrowed memory may come back in any of them.
    """

    def __init__(self) -> None:
        self._free: deque[Bytes] = deque()
        self._lent: dict[int, weakref.ref[_Loan]] = {}

    def take(self, nbytes: int) -> Bytes:
        """Uninitialised memory of exactly that many bytes."""
        if nbytes < _POOLED_BYTES:
            return np.empty(nbytes, dtype=np.uint8)
        memory = self._fitting(nbytes)
        if memory is None:
            # Windows of an epoch differ a little in length: with some room to spare they fit the same memory.
            memory = np.empty(nbytes + nbytes // 16, dtype=np.uint8)
        loan, key = _Loan(memory, nbytes), id(memory)

        def give_back(_: object, memory: Bytes = memory) -> None:
            self._lent.pop(key, None)
            self._free.append(memory)
            self._trim()

        self._lent[key] = weakref.ref(loan, give_back)
        return np.asarray(loan)

    def _trim(self) -> None:
        while len(free := self._free.copy()) > 2 and sum(map(len, free)) > _FREE_BYTES:
            try:
                self._free.popleft()
            except IndexError:  # another thread took what there was
                return

    def _fitting(self, nbytes: int) -> Bytes | None:
        for _ in range(len(self._free)):
            try:
                memory = self._free.popleft()
            except IndexError:
                return None
            if nbytes <= len(memory) <= nbytes + nbytes // 4:
                return memory
            self._free.append(memory)
        return None
