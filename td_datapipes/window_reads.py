"""Announced batches as reads: which are read together, and how each is gathered out of what was read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from tensordict import TensorDict

from td_datapipes.plan import CoveringSlab, Ranges, ReadPlan, Rows, Slab, Spacing
from td_datapipes.store import RowReader
from td_datapipes.wire.reader import PlanReader, ReadJob

__all__ = ["BatchRead", "ReadGroup", "WindowBuffers", "group_reads"]

Bytes = npt.NDArray[np.uint8]

_NONE = np.empty(0, dtype=np.int64)
_NO_RANGES = Ranges(groups=_NONE, chunks=_NONE, starts=_NONE, lengths=_NONE)


@dataclass(eq=False)
class BatchRead:
    """One announced batch on its way.

    Attributes:
        ordinal: which batch of the epoch.
        rows: its rows, in order, ``[n]``.
        nbytes: what it counts for while it is on its way.
        ready: the batch, once it is put together.
        counted: whether its bytes are counted.
        handed_over: whether it is the consumer's (or nobody's) by now.
        failed: it will not become ready.
    """

    ordinal: int
    rows: Rows
    nbytes: int
    ready: TensorDict | None = None
    counted: bool = False
    handed_over: bool = False
    failed: bool = False


class WindowBuffers:
    """Memory that windows are received into, used again: fresh memory costs more than filling it."""

    def __init__(self) -> None:
        self._free: list[Bytes] = []

    def take(self, nbytes: int) -> Bytes:
        """A buffer of at least that many bytes."""
        for index, buffer in enumerate(self._free):
            if nbytes <= len(buffer) <= 2 * nbytes:
                return self._free.pop(index)
        self._free.clear()
        # Windows of an epoch differ a little in length: with some room to spare they fit the same buffer.
        return np.empty(nbytes + nbytes // 8, dtype=np.uint8)

    def give(self, buffer: Bytes) -> None:
        """Take a buffer back; nothing may look at it any more."""
        if len(self._free) < 2:
            self._free.append(buffer)


class ReadGroup:
    """Batches that one plan reads: a scattered one by itself, or those of a window whose rows lie close together.

    Args:
        batches: in the order they will be asked for.
        plan: reads the one batch as it is, or the distinct rows of all of them in ascending order.
        together: whether batches are gathered out of a common buffer.
    """

    def __init__(self, batches: list[BatchRead], plan: ReadPlan, *, together: bool) -> None:
        self.batches = batches
        self.plan = plan
        self.job: ReadJob | None = None
        self.nbytes = sum(batch.nbytes for batch in batches)
        self._together = together
        self._sink: _BufferSink | None = None
        self._pending: TensorDict | None = None

    def start(self, plans: PlanReader, reader: RowReader, buffers: WindowBuffers) -> None:
        """Send the requests, as far as the limit on bytes in flight lets it."""
        self.job = plans.start(self.plan)
        if self._together:
            memory = buffers.take(sum(slab.stream_bytes for slab in self.plan.slabs))
            self._sink = _BufferSink(self.plan, len(reader.spec.segments), memory)
            self.job.sink = self._sink
        else:
            self.job.sink, self._pending = reader.new_batch(self.plan)

    def finish(self) -> bool:
        """Everything has arrived. Returns whether the batch is ready; False where batches are to be gathered."""
        if self._together:
            return False
        self.batches[0].ready = self._pending
        return True

    def gather(self, batch: BatchRead, reader: RowReader) -> TensorDict:
        """One batch out of the common buffer."""
        if self._sink is None:
            raise RuntimeError("a group is gathered from after it was started")
        whole = ReadPlan(num_rows=len(batch.rows), slabs=(self._sink.slab_of(batch.rows),), strategy=self.plan.strategy)
        sink, made = reader.new_batch(whole)
        sink.take(whole.slabs[0], self._sink.memory)
        sink.seal()
        return made

    def release(self, buffers: WindowBuffers) -> None:
        """Give the common buffer back: every batch was gathered."""
        if self._sink is not None:
            buffers.give(self._sink.memory)
            self._sink = None


class _BufferSink:
    """Receives the reply streams of a plan one behind the other into one buffer (a `BatchSink` without tensors)."""

    def __init__(self, plan: ReadPlan, num_segments: int, memory: Bytes) -> None:
        self.tensors: dict[Any, Any] = {}
        self.memory = memory
        starts = np.cumsum([0, *(slab.stream_bytes for slab in plan.slabs)]).tolist()
        placed = list(zip(plan.slabs, starts, strict=False))
        self._starts = {id(slab): start for slab, start in placed}
        self._rows: Rows = np.concatenate([slab.rows for slab in plan.slabs])
        self._offsets = [
            np.concatenate([_offsets(slab, segment, start) for slab, start in placed])
            for segment in range(num_segments)
        ]

    def target(self, slab: Slab) -> Bytes:
        """The slab's own stretch of the buffer."""
        start = self._starts[id(slab)]
        return self.memory[start : start + slab.stream_bytes]

    def take(self, slab: Slab, stream: Bytes) -> None:
        """It stays where it is."""

    def seal(self) -> None:
        """Nothing is left to do."""

    def slab_of(self, rows: Rows) -> Slab:
        """Those rows (all within the plan) as a slab whose reply stream is the whole buffer."""
        at = np.searchsorted(self._rows, rows)
        return CoveringSlab(
            rows=rows,
            covered=_NO_RANGES,
            prefix=b"",
            stream_bytes=len(self.memory),
            num_bytes=0,
            offsets=tuple(offsets[at] for offsets in self._offsets),
            positions=slice(0, len(rows)),
            sources=None,
        )


def _offsets(slab: Slab, segment: int, start: int) -> Rows:
    offsets = slab.segment_offsets(segment)
    if isinstance(offsets, Spacing):
        return start + offsets.first + offsets.step * np.arange(len(slab.rows), dtype=np.int64)
    return offsets + start


def group_reads(reader: RowReader, batches: list[BatchRead], max_bytes: int) -> list[ReadGroup]:
    """How announced batches are read.

    Args:
        reader: plans.
        batches: in the order they will be asked for.
        max_bytes: of batches that are read together.
    """
    groups: list[ReadGroup] = []
    for part in _parts(batches, max_bytes):
        singly = [reader.plan(batch.rows) for batch in part]
        plan = _plan_together(reader, part) if len(part) > 1 else None
        if plan is not None and _saves(plan, singly):
            groups.append(ReadGroup(part, plan, together=True))
        else:
            groups += [ReadGroup([batch], plan, together=False) for batch, plan in zip(part, singly, strict=True)]
    return groups


def _plan_together(reader: RowReader, part: list[BatchRead]) -> ReadPlan | None:
    return reader.plan_together(np.unique(np.concatenate([batch.rows for batch in part])))


def _saves(together: ReadPlan, singly: list[ReadPlan]) -> bool:
    """Whether a common plan has clearly fewer ranges, or bytes: batches of adjacent rows are best read one by one."""
    ranges, num_bytes = sum(plan.num_ranges for plan in singly), sum(plan.num_bytes for plan in singly)
    return 4 * together.num_ranges < 3 * ranges or 4 * together.num_bytes < 3 * num_bytes


def _parts(batches: list[BatchRead], max_bytes: int) -> Iterator[list[BatchRead]]:
    part: list[BatchRead] = []
    total = 0
    for batch in batches:
        if part and total + batch.nbytes > max_bytes:
            yield part
            part, total = [], 0
        part.append(batch)
        total += batch.nbytes
    if part:
        yield part
