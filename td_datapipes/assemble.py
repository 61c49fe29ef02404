"""Bytes -> tensors: where a batch's bytes go as its slabs arrive. Pure: no I/O.

Two shapes of a batch:

`ContiguousBatch` (the default) copies every field out of a staging buffer that is reused at once; the copies are
memory moves of whole rows, in any order and with repeats, from any byte offset.

`StridedBatch` receives the reply stream itself into one buffer and gives views of it, nothing is copied; where the
plan does not deliver one record a row in order (repeats, covering ranges), records are moved into such a buffer first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from operator import itemgetter
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from td_datapipes.memory import MemoryPool
from td_datapipes.plan import ReadPlan
from td_datapipes.read_spec import Copy, Output, ReadSpec, Rows
from td_datapipes.schema import ALIGNMENT_BYTES, Key
from td_datapipes.slabs import CoveringSlab, PeriodicSlab, RunSlab, Slab, Spacing

__all__ = [
    "LONG_BYTES",
    "BatchSink",
    "ContiguousBatch",
    "Place",
    "StridedBatch",
    "copy_rows",
    "make_sink",
    "new_field",
    "repeats",
]

Bytes = npt.NDArray[np.uint8]

Place = tuple[int, memoryview]
"""Where in a reply stream bytes start that go elsewhere, and where they go."""

_NUMPY_DTYPES = {
    torch.bool: np.dtype(np.bool_),
    torch.uint8: np.dtype(np.uint8),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
}
"""The common dtypes that numpy has too: a tensor of them is made in one step."""

LONG_BYTES = 4096
"""What is at least so long is received where it belongs; shorter fields are cheaper to copy."""

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

    def places(self, slab: Slab) -> list[Place] | None:
        """Stretches of the reply stream that may be received where they belong, in order; None where none pays."""

    def placed(self, slab: Slab, stream: Bytes) -> None:
        """The slab has arrived whole: `stream` is its reply stream, but for the bytes that are in their places."""

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
    """One contiguous tensor a field, each with memory of its own.

    Args:
        num_rows: rows of the batch.
        spec: what each row is.
        pool: gives fields their memory.
        pin_memory: take page-locked memory in its place.
        left_out: outputs that are kept elsewhere.
    """

    def __init__(
        self,
        num_rows: int,
        spec: ReadSpec,
        pool: MemoryPool,
        *,
        pin_memory: bool,
        left_out: frozenset[int] = frozenset(),
    ) -> None:
        self.tensors: dict[Key, torch.Tensor] = {}
        self._spec = spec
        self._memories: list[Bytes] = []
        for number, output in enumerate(spec.outputs):
            rows = 0 if number in left_out else num_rows
            self.tensors[output.key], memory = new_field(rows, output, pool, pin_memory=pin_memory)
            self._memories.append(memory)
        self._copies = [(copy, self._rows_of(copy)) for copy in spec.copies]
        self._placed: tuple[Slab | None, list[Copy]] = None, []

    def target(self, slab: Slab) -> None:
        """Always staging."""

    def places(self, slab: Slab) -> list[Place] | None:
        """Long fields where they belong first, if most of the slab is long fields."""
        long = self._placed_of(slab)
        if 4 * len(slab.rows) * sum(copy.nbytes for copy in long) < 3 * slab.stream_bytes:
            return None
        found = [place for copy in long for place in self._places_of(copy, slab)]
        return found if len(long) == 1 else sorted(found, key=itemgetter(0))

    def placed(self, slab: Slab, stream: Bytes) -> None:
        """Copy the short fields, and the long ones of rows that are wanted more than once to where else they go."""
        again, long = repeats(slab), self._placed_of(slab)
        for copy, rows in self._copies_of(slab):
            if copy in long:
                self._repeat(copy, again)
            else:
                copy_rows(slab, copy.segment, copy.segment_start, stream, rows)

    def take(self, slab: Slab, stream: Bytes) -> None:
        """Copy the slab's rows out, field by field."""
        for copy, rows in self._copies_of(slab):
            copy_rows(slab, copy.segment, copy.segment_start, stream, rows)

    def _rows_of(self, copy: Copy) -> npt.NDArray[np.void]:
        return _items(
            self._memories[copy.output], copy.nbytes, copy.output_start, self._spec.outputs[copy.output].nbytes
        )

    def _copies_of(self, slab: Slab) -> Iterator[tuple[Copy, npt.NDArray[np.void]]]:
        held = slab.held
        return (pair for pair in self._copies if held is None or pair[0].segment in held)

    def _placed_of(self, slab: Slab) -> list[Copy]:
        """What of the slab may be received where it belongs."""
        if self._placed[0] is not slab:
            copies = [copy for copy, _ in self._copies_of(slab)]
            self._placed = slab, [c for c in copies if c.nbytes >= LONG_BYTES or self._is_one_stretch(c, slab)]
        return self._placed[1]

    def _is_one_stretch(self, copy: Copy, slab: Slab) -> bool:
        """Whether rows follow each other in the field as they do in the reply stream, with nothing in between."""
        if not isinstance(slab, RunSlab | CoveringSlab) or not isinstance(slab.positions, slice):
            return False
        offsets = slab.segment_offsets(copy.segment)
        if not isinstance(offsets, Spacing) or slab.sources is not None:
            return False
        return self._spec.outputs[copy.output].nbytes == copy.nbytes == offsets.step

    def _places_of(self, copy: Copy, slab: Slab) -> Iterable[Place]:
        """Where each row of the slab goes first."""
        offsets = slab.segment_offsets(copy.segment)
        if isinstance(offsets, Spacing):
            if isinstance(slab.positions, slice) and self._is_one_stretch(copy, slab):
                return self._stretches(copy, offsets.first + copy.segment_start, slab.positions)
            starts: Iterable[int] = count(offsets.first + copy.segment_start, offsets.step)
        else:
            starts = (offsets + copy.segment_start).tolist()
        return list(zip(starts, self._targets(copy, _first_positions(slab)), strict=False))

    def _stretches(self, copy: Copy, first: int, positions: slice) -> Iterable[Place]:
        """Rows that follow each other in the field too, from that byte of the stream on."""
        memory, step = self._memories[copy.output].data, copy.nbytes
        return [(first, memory[positions.start * step : positions.stop * step])]

    def _targets(self, copy: Copy, positions: Rows) -> list[memoryview]:
        """The memory of these rows of the batch."""
        memory, step = self._memories[copy.output].data, self._spec.outputs[copy.output].nbytes
        return [memory[at : at + copy.nbytes] for at in (positions * step + copy.output_start).tolist()]

    def _repeat(self, copy: Copy, again: tuple[Rows, Rows]) -> None:
        """Copy rows that are there to their further places."""
        further, first = again
        if len(further):
            rows = self._rows_of(copy)
            rows[further] = rows[first]

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
        self._runs = bool(plan.slabs) and all(isinstance(slab, RunSlab) and slab.only is None for slab in plan.slabs)
        self._direct = spec.aligned and all(
            isinstance(slab, PeriodicSlab) and slab.sources is None and slab.held is None for slab in plan.slabs
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

    def places(self, slab: Slab) -> list[Place] | None:
        """A run of records is a stretch of the batch."""
        if not self._runs or not isinstance(slab, RunSlab):
            return None
        start = slab.positions.start * self._period
        return [(slab.header_bytes, self._bytes.data[start : start + slab.length])]

    def placed(self, slab: Slab, stream: Bytes) -> None:
        """They are where they belong."""

    def take(self, slab: Slab, stream: Bytes) -> None:
        """Nothing where the stream is the batch; else move the records, segment by segment."""
        if self._direct and not self._runs and isinstance(slab.positions, slice):
            return
        held = slab.held
        for number, segment in enumerate(self._spec.segments):
            if held is not None and number not in held:
                continue
            rows = _items(self._bytes, segment.nbytes, self._segments[number], self._period)
            copy_rows(slab, number, 0, stream, rows)

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


def _positions(slab: Slab) -> Rows:
    positions = slab.positions
    return np.arange(positions.start, positions.stop) if isinstance(positions, slice) else positions


def _first_positions(slab: Slab) -> Rows:
    """The first place in the batch of each of the slab's rows."""
    positions = _positions(slab)
    if slab.sources is None:
        return positions
    first = np.empty(len(slab.rows), dtype=np.int64)
    first[slab.sources[::-1]] = positions[::-1]  # of several values for one index numpy keeps the last
    return first


def repeats(slab: Slab) -> tuple[Rows, Rows]:
    """The further places of rows that are wanted more than once, and the first place of the row of each."""
    if slab.sources is None:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    positions, first = _positions(slab), _first_positions(slab)[slab.sources]
    again = positions != first
    return positions[again], first[again]


def copy_rows(slab: Slab, segment: int, start: int, stream: Bytes, rows: npt.NDArray[np.void]) -> None:
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


def new_field(num_rows: int, output: Output, pool: MemoryPool, *, pin_memory: bool) -> tuple[torch.Tensor, Bytes]:
    """A contiguous field and its memory. numpy allocates it, which is quicker than a view of torch's."""
    if pin_memory:
        return _pinned_field(num_rows, output)
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
