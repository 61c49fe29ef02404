"""Carries out one rank's program: packs, posts, awaits, unpacks."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from td_datapipes.memory import MemoryPool
from td_datapipes.mesh import Box, contiguous_strides
from td_datapipes.schema import format_key
from td_datapipes.transfer.agreement import Agreement
from td_datapipes.transfer.link import Link, Operation
from td_datapipes.transfer.messages import WINDOW, Message, Program, Stage

__all__ = ["Carrier", "Course"]

_ALIGNMENT_BYTES = 64
_MOST_VIEWS = 64


class Course:
    """What a rank does in every transfer of an agreement, worked out once.

    Args:
        agreement: of all ranks.
        program: this rank's part.
    """

    def __init__(self, agreement: Agreement, program: Program) -> None:
        self.agreement = agreement
        self.program = program
        self._places: list[tuple[torch.dtype, tuple[int, ...], int]] = []
        self.received_nbytes = 0
        for field, shape in zip(agreement.fields, program.dst_shapes, strict=bool(program.dst_shapes)):
            dtype = field.spec.dtype
            self._places.append((dtype, shape, self.received_nbytes))
            size = math.prod(shape) * dtype.itemsize
            self.received_nbytes += -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        targets = self.split(torch.empty(self.received_nbytes, dtype=torch.uint8, device="meta"))
        arriving = [message for stage in program.stages for _, message in stage.recvs]
        self._starts = {id(message): _start_of(message, targets) for message in arriving}

    def split(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """A contiguous tensor a field, all of them in one stretch of memory of `received_nbytes`."""
        of_dtype: dict[torch.dtype, torch.Tensor] = {}
        targets = []
        for dtype, shape, start in self._places:
            if 0 in shape:  # no bytes cannot be viewed as another dtype
                targets.append(torch.empty(shape, dtype=dtype, device=memory.device))
                continue
            if dtype not in of_dtype:
                of_dtype[dtype] = memory.view(dtype)
            targets.append(of_dtype[dtype].as_strided(shape, contiguous_strides(shape), start // dtype.itemsize))
        return targets

    def start_of(self, message: Message) -> int | None:
        """The byte of that memory from which on a message fills it; None if its parts lie otherwise there."""
        return self._starts[id(message)]

    def views(self, message: Message, staged: torch.Tensor) -> list[torch.Tensor]:
        """The parts of a message in staging memory."""
        found, start = [], 0
        for item in message.items:
            dtype = self.agreement.fields[item.field].spec.dtype
            shape = tuple(stop - low for low, stop in item.src)
            found.append(staged[start : start + item.nbytes].view(dtype).view(shape))
            start += item.nbytes
        return found


class Carrier:
    """Moves the bytes of transfers over a link; keeps its staging memory from one to the next.

    Args:
        link: to the other ranks.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self._pool = MemoryPool()
        self._free: list[torch.Tensor] = []
        self._views: dict[tuple[int, int], tuple[Message, torch.Tensor, list[torch.Tensor]]] = {}

    def carry(self, course: Course, sources: Sequence[torch.Tensor], deadline: float) -> list[torch.Tensor]:
        """Send and receive all of it.

        Args:
            course: of the transfer.
            sources: this rank's local tensors, contiguous; empty on a rank that only receives.
            deadline: on `time.monotonic`'s clock.

        Returns:
            What arrived, a local tensor a field; empty on a rank that only sends.

        Raises:
            PeerTimeoutError: a peer did not take part in time, or is gone; names it, the fields and the strategy.
        """
        program = course.program
        memory = self.new_memory(course.received_nbytes)
        targets = course.split(memory)
        for copy in program.copies:
            targets[copy.field][_index(copy.dst)].copy_(sources[copy.field][_index(copy.src)])
        posted: deque[_Posted] = deque()
        try:
            for stage in program.stages:
                if len(posted) == WINDOW:
                    posted.popleft().finish(deadline)
                posted.append(_Posted(self, course, stage, sources, targets, memory, deadline))
        finally:
            # Also after a failure: no handle is left behind, and no memory that somebody still writes to.
            _finish_all(posted, deadline)
        return targets

    def new_memory(self, nbytes: int) -> torch.Tensor:
        """Memory for what arrives."""
        if self.link.device.type == "cpu":
            return torch.from_numpy(self._pool.take(nbytes))
        return torch.empty(nbytes, dtype=torch.uint8, device=self.link.device)

    def take(self, nbytes: int) -> torch.Tensor:
        """Staging memory of at least that size."""
        for place, memory in enumerate(self._free):
            if nbytes <= len(memory):
                return self._free.pop(place)
        return torch.empty(nbytes, dtype=torch.uint8, device=self.link.device)

    def give_back(self, memory: torch.Tensor) -> None:
        """Let it be used again."""
        self._free.append(memory)

    def views(self, course: Course, message: Message, memory: torch.Tensor) -> list[torch.Tensor]:
        """The parts of a message in that staging memory: kept, since making them takes longer than filling them."""
        key = (id(message), id(memory))
        if key not in self._views:
            if len(self._views) == _MOST_VIEWS:
                self._views.clear()
            # The message and the memory with them, so that the ids stay theirs.
            self._views[key] = message, memory, course.views(message, memory)
        return self._views[key][2]


def _finish_all(posted: deque[_Posted], deadline: float) -> None:
    failed: BaseException | None = None
    while posted:
        try:
            posted.popleft().finish(deadline)
        except Exception as error:
            failed = failed or error
    if failed is not None:
        raise failed


class _Posted:
    """One stage on its way."""

    def __init__(
        self,
        carrier: Carrier,
        course: Course,
        stage: Stage,
        sources: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        memory: torch.Tensor,
        deadline: float,
    ) -> None:
        self._carrier = carrier
        self._course = course
        self._targets = targets
        self._memory = memory
        self._staging: list[torch.Tensor] = []
        self._arriving: list[tuple[Message, torch.Tensor]] = []
        operations = [self._receiving(peer, message) for peer, message in stage.recvs]
        operations += [self._sending(peer, message, sources) for peer, message in stage.sends]
        self._begun: list[tuple[Operation, Any]] = carrier.link.post(operations, deadline)

    def finish(self, deadline: float) -> None:
        """Await it, and put what arrived where it belongs."""
        self._carrier.link.finish(self._begun, deadline)
        for message, memory in self._arriving:
            wheres = [self._targets[item.field][_index(item.dst)] for item in message.items]
            torch._foreach_copy_(wheres, self._carrier.views(self._course, message, memory))
        for memory in self._staging:
            self._carrier.give_back(memory)

    def _receiving(self, peer: int, message: Message) -> Operation:
        start = self._course.start_of(message)
        if start is None:
            memory = self._staged(message)
            self._arriving.append((message, memory))
            data = memory[: message.nbytes]
        else:
            data = self._memory[start : start + message.nbytes]
        what = partial(_describe, self._course.agreement, message, "receiving")
        return Operation(peer=peer, sends=False, data=data, what=what)

    def _sending(self, peer: int, message: Message, sources: Sequence[torch.Tensor]) -> Operation:
        parts = [
            whole if whole.nbytes == item.nbytes else whole[_index(item.src)]
            for item in message.items
            for whole in (sources[item.field],)
        ]
        if len(parts) == 1 and parts[0].is_contiguous():
            data = _as_bytes(parts[0])
        else:
            memory = self._staged(message)
            torch._foreach_copy_(self._carrier.views(self._course, message, memory), parts)
            data = memory[: message.nbytes]
        what = partial(_describe, self._course.agreement, message, "sending")
        return Operation(peer=peer, sends=True, data=data, what=what)

    def _staged(self, message: Message) -> torch.Tensor:
        memory = self._carrier.take(message.nbytes)
        self._staging.append(memory)
        return memory


def _start_of(message: Message, targets: Sequence[torch.Tensor]) -> int | None:
    (item, *others) = message.items
    where = targets[item.field][_index(item.dst)]
    if not where.is_contiguous():
        return None
    start = int(where.storage_offset()) * where.itemsize
    end = start + item.nbytes
    for other in others:
        whole = targets[other.field]
        if whole.storage_offset() * whole.itemsize != end or whole.nbytes != other.nbytes:
            return None
        end += other.nbytes
    return start


def _describe(agreement: Agreement, message: Message, doing: str) -> str:
    # No method: what refers to its stage would keep it, and the batch's memory with it, until the garbage collector.
    keys = dict.fromkeys(agreement.fields[item.field].spec.key for item in message.items)
    shown = ", ".join(map(format_key, list(keys)[:8])) + (", ..." if len(keys) > 8 else "")
    return f"strategy {agreement.strategy!r}: {doing} {shown}"


def _index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    # A contiguous tensor may still have odd strides along dims of size 1, which `view` minds.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
