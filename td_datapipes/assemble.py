"""Bytes -> tensors: where a batch's bytes go as its slabs arrive. Pure: no I/O.

Two shapes of a batch:

`ContiguousBatch` (the default) copies every field out of a staging buffer that is reused at once; the copies are
memory moves of whole rows, in any order and with repeats, from any byte offset.

`StridedBatch` receives the reply stream itself into one buffer and gives views of it, nothing is copied; where the
plan does not deliver one record a row in order (repeats, covering ranges), records are moved into such a buffer first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from td_datapipes.memory import MemoryPool
from td_datapipes.plan import ReadPlan
from td_datapipes.read_spec import Copy, Output, ReadSpec, Rows
from td_datapipes.schema import ALIGNMENT_BYTES, Key
from td_datapipes.slabs import PeriodicSlab, RunSlab, Slab, Spacing

__all__ = ["BatchSink", "ContiguousBatch", "StridedBatch", "make_sink"]

Bytes = npt.NDArray[np.uint8]

_NUMPY_DTYPES = {
    torch.bool: np.dtype(np.bool_),
    torch.uint8: np.dtype(np.uint8),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
}
"""The common dtypes that numpy has too: a tensor of them is made in one step."""

_LONG_BYTES = 4096
"""Fields of a row at least so long are received where they belong; shorter ones are cheaper to copy."""

_RUN_BYTES = 16 * 1024
"""Runs that are longer on average are moved one by one; shorter ones cost less to gather all at once."""


class BatchSink(Protocol):
    """Takes the slabs of one plan and ends up holding the batch.

    Attributes:
        tensors: the fields of the batch, each ``[rows, ...]``. They exist from the start, so the batch can be put
            together while its bytes are on the way; their values are there after `seal`.
    """

    @property
    def tensors(self) -> dict[Key, torch.Tensor]: ...

    def target(self, slab: Slab) -> Bytes | None:
        """The stretch of the batch's own memory that the slab's reply stream is received into; None for staging."""

    def places(self, run: RunSlab) -> list[memoryview] | None:
        """Where the range of a run may be received piece by piece, uncopied; None where that does not pay."""

    def placed(self, run: RunSlab) -> None:
        """The run's bytes are in the places that were given for it."""

    def take(self, slab: Slab, stream: Bytes) -> None:
        """The slab has arrived whole: `stream` is its reply stream, checked. It may be overwritten afterwards."""

    def seal(self) -> None:
        """Every slab was taken: what is left to do before `tensors` are right."""


def make_sink(plan: ReadPlan, spec: ReadSpec, pool: MemoryPool, *, strided: bool, pin_memory: bool) -> BatchSink:
    """The sink for a plan.

    Args:
        plan: what will arrive.
        spec: what each row is.
        pool: gives contiguous fields their memory.
        strided: views of one buffer in place of contiguous fields. Such a buffer is never used again by us.
        pin_memory: take page-locked memory from torch's host allocator (needs an accelerator), never from the pool.
    """
    if strided:
        return StridedBatch(plan, spec, pin_memory=pin_memory)
    return ContiguousBatch(plan.num_rows, spec, pool, pin_memory=pin_memory)


class ContiguousBatch:
    """One contiguous tensor a field, each with memory of its own."""

    def __init__(self, num_rows: int, spec: ReadSpec, pool: MemoryPool, *, pin_memory: bool) -> None:
        self.tensors: dict[Key, torch.Tensor] = {}
        self._spec = spec
        self._memories: list[Bytes] = []
        self._direct: _DirectFields | None = None
        for output in spec.outputs:
            made = _pinned_field(num_rows, output) if pin_memory else _new_field(num_rows, output, pool)
            self.tensors[output.key], memory = made
            self._memories.append(memory)
        self._copies = [
            (
                copy,
                _items(self._memories[copy.output], copy.nbytes, copy.output_start, spec.outputs[copy.output].nbytes),
            )
            for copy in spec.copies
        ]

    def target(self, slab: Slab) -> None:
        """Always staging."""

    def places(self, run: RunSlab) -> list[memoryview] | None:
        """Long fields where they belong; what lies between them aside, for `placed` to copy."""
        if self._direct is None:
            self._direct = _DirectFields.of(self._spec, self._memories)
        return self._direct.places(run) if self._direct.worthwhile else None

    def placed(self, run: RunSlab) -> None:
        """Copy the short fields."""
        if self._direct is not None:
            self._direct.placed(run)

    def take(self, slab: Slab, stream: Bytes) -> None:
        """Copy the slab's rows out, field by field."""
        for copy, rows in self._copies:
            _copy_rows(slab, copy.segment, copy.segment_start, stream, rows)

    def seal(self) -> None:
        """Nothing is left to do."""


class StridedBatch:
    """Fields as strided views of one buffer that is never reused by us.

    A field that cannot be a view, because a record's cut or a sharded placement leaves it in parts, is copied together.
    """

    def __init__(self, plan: ReadPlan, spec: ReadSpec, *, pin_memory: bool) -> None:
        self._spec = spec
        self._num_rows = plan.num_rows
        self._pin_memory = pin_memory
        self._runs = bool(plan.slabs) and all(isinstance(slab, RunSlab) for slab in plan.slabs)
        self._direct = spec.aligned and all(
            isinstance(slab, PeriodicSlab) and slab.sources is None for slab in plan.slabs
        )
        if self._runs:
            first = spec.segments[0]
            self._base, self._period = 0, spec.layouts[first.group].stride_bytes
            self._segments = [segment.start_bytes - first.start_bytes for segment in spec.segments]
        elif self._direct:
            self._base, self._period = spec.pad_bytes, spec.period_bytes
            self._segments = [start + self._base for start in spec.segment_starts]
        else:
            lengths = [-(-segment.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for segment in spec.segments]
            self._base, self._period = 0, sum(lengths)
            self._segments = np.cumsum([0, *lengths[:-1]]).tolist()
        nbytes = self._base + self._num_rows * self._period
        rounded = -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self._buffer = torch.empty(rounded, dtype=torch.uint8, pin_memory=pin_memory)
        self._bytes: Bytes = self._buffer.numpy()
        self._in_parts: list[tuple[torch.Tensor, int, list[Copy]]] = []
        copies: dict[int, list[Copy]] = {}
        for copy in spec.copies:
            copies.setdefault(copy.output, []).append(copy)
        self.tensors = {
            output.key: self._tensor(output, copies.get(number, [])) for number, output in enumerate(spec.outputs)
        }

    def target(self, slab: Slab) -> Bytes | None:
        """The stretch of the buffer where the slab's periods lie, if the stream is the batch itself."""
        if self._runs or not self._direct or not isinstance(slab.positions, slice):
            return None
        start = self._base + slab.positions.start * self._period
        return self._bytes[start : start + slab.stream_bytes]

    def places(self, run: RunSlab) -> list[memoryview] | None:
        """A run of records is a stretch of the batch."""
        if not self._runs:
            return None
        start = run.positions.start * self._period
        return [self._bytes.data[start : start + run.length]]

    def placed(self, run: RunSlab) -> None:
        """They are where they belong."""

    def take(self, slab: Slab, stream: Bytes) -> None:
        """Nothing where the stream is the batch; else move the records, segment by segment."""
        if self._direct and not self._runs and isinstance(slab.positions, slice):
            return
        for number, segment in enumerate(self._spec.segments):
            rows = _items(self._bytes, segment.nbytes, self._segments[number], self._period)
            _copy_rows(slab, number, 0, stream, rows)

    def seal(self) -> None:
        """Copy together the fields that lie in parts."""
        for tensor, nbytes, copies in self._in_parts:
            target = tensor.view(-1).view(torch.uint8).numpy()
            for copy in copies:
                offset = self._segments[copy.segment] + copy.segment_start
                shape, dtype = (self._num_rows,), f"V{copy.nbytes}"
                found = np.ndarray(shape, dtype, self._bytes, offset, (self._period,))
                _items(target, copy.nbytes, copy.output_start, nbytes)[:] = found

    def _tensor(self, output: Output, copies: list[Copy]) -> torch.Tensor:
        shape = (self._num_rows, *output.shape)
        if self._num_rows and len(copies) == 1 and self._viewable(output, copies[0]):
            size = output.dtype.itemsize
            offset = self._segments[copies[0].segment] + copies[0].segment_start
            flat = self._buffer.view(output.dtype)
            return flat.as_strided(shape, (self._period // size, *_strides(output.shape)), offset // size)
        tensor = torch.empty(shape, dtype=output.dtype, pin_memory=self._pin_memory)
        if self._num_rows and copies:
            self._in_parts.append((tensor, output.nbytes, copies))
        return tensor

    def _viewable(self, output: Output, copy: Copy) -> bool:
        size = output.dtype.itemsize
        offset = self._segments[copy.segment] + copy.segment_start
        return copy.nbytes == output.nbytes and offset % size == 0 and self._period % size == 0


@dataclass(frozen=True, kw_only=True)
class _DirectFields:
    """Splits the bytes of adjacent records into long fields, received in place, and the rest, received aside.

    Attributes:
        spec: what each row is.
        long: copies whose fields are received in place, with the fields' memory, in the order of the record.
        short: the other copies, and where each lies in a row's rest.
        low: where a row's bytes start in the record.
        stride_bytes: from record to record.
        rest_bytes: bytes of a record that are in no long field.
        aside: the rest of each run, by its first position.
    """

    spec: ReadSpec
    long: tuple[tuple[int, Copy, Bytes], ...]
    short: tuple[tuple[int, Copy, Bytes], ...]
    low: int
    stride_bytes: int
    rest_bytes: int
    aside: dict[int, Bytes]

    @classmethod
    def of(cls, spec: ReadSpec, memories: Sequence[Bytes]) -> _DirectFields:
        """For the fields of a batch whose memory that is."""
        low = spec.segments[0].start_bytes
        placed = sorted(
            (spec.segments[copy.segment].start_bytes - low + copy.segment_start, copy.output, copy)
            for copy in spec.copies
        )
        stride_bytes = spec.layouts[spec.segments[0].group].stride_bytes
        long, short, passed = [], [], 0
        for at, output, copy in placed:
            if copy.nbytes >= _LONG_BYTES:
                long.append((at, copy, memories[output]))
                passed += copy.nbytes
            else:
                short.append((at - passed, copy, memories[output]))
        return cls(
            spec=spec,
            long=tuple(long),
            short=tuple(short),
            low=low,
            stride_bytes=stride_bytes,
            rest_bytes=stride_bytes - passed,
            aside={},
        )

    @property
    def worthwhile(self) -> bool:
        """Whether most bytes are in long fields."""
        return bool(self.long) and 4 * self.rest_bytes <= self.stride_bytes

    def places(self, run: RunSlab) -> list[memoryview]:
        """The run's bytes piece by piece, long fields and what lies between them in turn."""
        first, count = run.positions.start, len(run.rows)
        if not self.rest_bytes and len(self.long) == 1:  # rows follow each other in the field as they do in the chunk
            nbytes = self.stride_bytes
            return [self.long[0][2].data[first * nbytes : (first + count) * nbytes]]
        rest = np.empty(count * self.rest_bytes, dtype=np.uint8)
        self.aside[first] = rest
        aside, pieces, taken, left = rest.data, [], 0, run.length
        fields = [(at, copy, memory.data, self.spec.outputs[copy.output].nbytes) for at, copy, memory in self.long]
        at_now = 0  # of the run's bytes
        for row in range(count):
            for at, copy, memory, step in fields:
                gap = row * self.stride_bytes + at - at_now
                if gap:
                    pieces.append(aside[taken : taken + gap])
                    taken += gap
                place = (first + row) * step + copy.output_start
                pieces.append(memory[place : place + copy.nbytes])
                at_now += gap + copy.nbytes
        if left > at_now:
            pieces.append(aside[taken : taken + left - at_now])
        return pieces

    def placed(self, run: RunSlab) -> None:
        """Copy the short fields out of what was received aside."""
        rest = self.aside.pop(run.positions.start, None)
        if rest is None:
            return
        for at, copy, memory in self.short:
            rows = _items(memory, copy.nbytes, copy.output_start, self.spec.outputs[copy.output].nbytes)
            found = np.ndarray((len(run.rows),), rows.dtype, rest, at, (self.rest_bytes,))
            rows[run.positions] = found


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for dim in reversed(shape):
        strides.append(step)
        step *= dim
    return tuple(reversed(strides))


def _items(memory: Bytes, nbytes: int, offset: int, stride: int) -> npt.NDArray[np.void]:
    """Blocks of `nbytes` bytes, one every `stride` from `offset` on, as opaque items that numpy moves whole."""
    if len(memory) < offset + nbytes:  # no rows
        return np.empty(0, dtype=f"V{nbytes}")
    count = (len(memory) - offset - nbytes) // stride + 1
    return np.ndarray((count,), f"V{nbytes}", memory, offset, (stride,))


def _copy_rows(slab: Slab, segment: int, start: int, stream: Bytes, rows: npt.NDArray[np.void]) -> None:
    """Move bytes of every row of the slab, from `start` in a segment on, to its place in `rows`."""
    offsets = slab.segment_offsets(segment)
    if isinstance(offsets, Spacing):
        first, step = offsets.first + start, offsets.step
        found = np.ndarray((len(slab.rows),), rows.dtype, stream, first, (step,))
        rows[slab.positions] = found if slab.sources is None else found[slab.sources]
        return
    offsets = offsets + start
    if slab.sources is not None:
        offsets = offsets[slab.sources]
    breaks = np.flatnonzero(np.diff(offsets, 2)) + 2
    if len(offsets) * rows.dtype.itemsize >= _RUN_BYTES * (len(breaks) + 1):
        _copy_runs(offsets, breaks, slab.positions, stream, rows)
        return
    # Overlapping windows, one at every byte: indexing them gathers from any offsets, and numpy moves each as a block.
    windows = np.ndarray((len(stream) - rows.dtype.itemsize + 1,), rows.dtype, stream, 0, (1,))
    rows[slab.positions] = windows[offsets]


def _copy_runs(offsets: Rows, breaks: Rows, positions: slice | Rows, stream: Bytes, rows: npt.NDArray[np.void]) -> None:
    """Move evenly spaced runs of rows, each without a temporary: for rows so long that copying twice would show.

    `breaks` holds where the second difference of `offsets` is not 0: a run may begin there, or one row before.
    """
    places = np.arange(positions.start, positions.stop) if isinstance(positions, slice) else positions
    begin = 0
    for end in [*breaks.tolist(), len(offsets)]:
        if end <= begin:
            continue
        step = int(offsets[begin + 1] - offsets[begin]) if end - begin > 1 else rows.dtype.itemsize
        shape, first = (end - begin,), int(offsets[begin])
        rows[places[begin:end]] = np.ndarray(shape, rows.dtype, stream, first, (step,))
        begin = end


def _new_field(num_rows: int, output: Output, pool: MemoryPool) -> tuple[torch.Tensor, Bytes]:
    """A contiguous field and its memory. numpy allocates it, which is quicker than a view of torch's."""
    if not num_rows * output.nbytes:
        return torch.empty((num_rows, *output.shape), dtype=output.dtype), np.empty(0, dtype=np.uint8)
    memory = pool.take(num_rows * output.nbytes)
    kind = _NUMPY_DTYPES.get(output.dtype)
    if kind is None:
        return torch.from_numpy(memory).view(output.dtype).view(num_rows, *output.shape), memory
    return torch.from_numpy(np.ndarray((num_rows, *output.shape), kind, memory)), memory


def _pinned_field(num_rows: int, output: Output) -> tuple[torch.Tensor, Bytes]:
    """The same in page-locked memory, from torch's host allocator."""
    tensor = torch.empty((num_rows, *output.shape), dtype=output.dtype, pin_memory=True)
    return tensor, tensor.view(-1).view(torch.uint8).numpy()
