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

__all__ = ["Carrier"]

_ALIGNMENT_BYTES = 64


class Carrier:
    """Moves the bytes of transfers over a link; keeps its staging memory from one to the next.

    Args:
        link: to the other ranks.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._pool = MemoryPool()
        self._free: list[torch.Tensor] = []

    def new_targets(self, agreement: Agreement, program: Program) -> list[torch.Tensor]:
        """Memory for what arrives: a contiguous tensor a field, all of them in one stretch."""
        sizes = [
            math.prod(shape) * field.spec.dtype.itemsize
            for field, shape in zip(agreement.fields, program.dst_shapes, strict=bool(program.dst_shapes))
        ]
        starts, end = [], 0
        for size in sizes:
            starts.append(end)
            end += -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if self._link.device.type == "cpu":
            memory = torch.from_numpy(self._pool.take(end))
        else:
            memory = torch.empty(end, dtype=torch.uint8, device=self._link.device)
        of_dtype: dict[torch.dtype, torch.Tensor] = {}
        targets = []
        for field, shape, start, size in zip(agreement.fields, program.dst_shapes, starts, sizes, strict=False):
            dtype = field.spec.dtype
            if not size:  # no bytes cannot be viewed as another dtype
                targets.append(torch.empty(shape, dtype=dtype, device=memory.device))
                continue
            if dtype not in of_dtype:
                of_dtype[dtype] = memory.view(dtype)
            targets.append(of_dtype[dtype].as_strided(shape, contiguous_strides(shape), start // dtype.itemsize))
        return targets

    def carry(
        self,
        agreement: Agreement,
        program: Program,
        sources: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        deadline: float,
    ) -> None:
        """Send and receive all of it.

        Args:
            agreement: of the transfer.
            program: this rank's part.
            sources: its local tensors, contiguous; empty on a rank that only receives.
            targets: to be filled; empty on a rank that only sends.
            deadline: on `time.monotonic`'s clock.

        Raises:
            PeerTimeoutError: a peer did not take part in time, or is gone; names it, the fields and the strategy.
        """
        for copy in program.copies:
            targets[copy.field][_index(copy.dst)].copy_(sources[copy.field][_index(copy.src)])
        posted: deque[_Posted] = deque()
        try:
            for stage in program.stages:
                if len(posted) == WINDOW:
                    posted.popleft().finish(deadline)
                posted.append(_Posted(self, agreement, stage, sources, targets, deadline))
        finally:
            # Also after a failure: no handle is left behind, and no memory that somebody still writes to.
            self._finish_all(posted, deadline)

    def _finish_all(self, posted: deque[_Posted], deadline: float) -> None:
        failed: BaseException | None = None
        while posted:
            try:
                posted.popleft().finish(deadline)
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def take(self, nbytes: int) -> torch.Tensor:
        """Staging memory of at least that size."""
        for place, memory in enumerate(self._free):
            if nbytes <= len(memory):
                return self._free.pop(place)
        return torch.empty(nbytes, dtype=torch.uint8, device=self._link.device)

    def give_back(self, memory: torch.Tensor) -> None:
        """Let it be used again."""
        self._free.append(memory)

    def post(self, operations: Sequence[Operation], deadline: float) -> list[tuple[Operation, Any]]:
        """As the link's."""
        return self._link.post(operations, deadline)

    def finish(self, begun: Sequence[tuple[Operation, Any]], deadline: float) -> None:
        """As the link's."""
        self._link.finish(begun, deadline)


class _Posted:
    """One stage on its way."""

    def __init__(
        self,
        carrier: Carrier,
        agreement: Agreement,
        stage: Stage,
        sources: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        deadline: float,
    ) -> None:
        self._carrier = carrier
        self._agreement = agreement
        self._targets = targets
        self._staging: list[torch.Tensor] = []
        self._arriving: list[tuple[Message, torch.Tensor]] = []
        operations = [self._receiving(peer, message) for peer, message in stage.recvs]
        operations += [self._sending(peer, message, sources) for peer, message in stage.sends]
        self._begun = carrier.post(operations, deadline)

    def finish(self, deadline: float) -> None:
        """Await it, and put what arrived where it belongs."""
        self._carrier.finish(self._begun, deadline)
        for message, staged in self._arriving:
            for part, view in self._parts(message, staged):
                self._targets[part.field][_index(part.dst)].copy_(view)
        for memory in self._staging:
            self._carrier.give_back(memory)

    def _receiving(self, peer: int, message: Message) -> Operation:
        data = self._stretch(message)
        if data is None:
            data = self._staged(message)
            self._arriving.append((message, data))
        return Operation(
            peer=peer, sends=False, data=data, what=partial(_describe, self._agreement, message, "receiving")
        )

    def _stretch(self, message: Message) -> torch.Tensor | None:
        """The memory that a message fills, if its parts lie there one behind the other as they do in the message."""
        (item, *others) = message.items
        where = self._targets[item.field][_index(item.dst)]
        if not where.is_contiguous():
            return None
        end = where.data_ptr() + item.nbytes
        for other in others:
            whole = self._targets[other.field]
            if whole.data_ptr() != end or whole.nbytes != other.nbytes:
                return None
            end += other.nbytes
        return _as_bytes(where).as_strided((message.nbytes,), (1,))

    def _sending(self, peer: int, message: Message, sources: Sequence[torch.Tensor]) -> Operation:
        parts = [
            whole if whole.nbytes == item.nbytes else whole[_index(item.src)]
            for item in message.items
            for whole in (sources[item.field],)
        ]
        if not all(part.is_contiguous() for part in parts):
            data = self._staged(message)
            for part, (_, view) in zip(parts, self._parts(message, data), strict=True):
                view.copy_(part)
        elif len(parts) > 1:
            data = self._staged(message)
            torch.cat([_as_bytes(part) for part in parts], out=data)
        else:
            data = _as_bytes(parts[0])
        return Operation(peer=peer, sends=True, data=data, what=partial(_describe, self._agreement, message, "sending"))

    def _staged(self, message: Message) -> torch.Tensor:
        memory = self._carrier.take(message.nbytes)
        self._staging.append(memory)
        return memory[: message.nbytes]

    def _parts(self, message: Message, staged: torch.Tensor) -> Any:
        start = 0
        for item in message.items:
            dtype = self._agreement.fields[item.field].spec.dtype
            shape = tuple(stop - low for low, stop in item.src)
            yield item, staged[start : start + item.nbytes].view(dtype).view(shape)
            start += item.nbytes


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
