"""Rows -> ranges, and where each row's bytes stand in the reply stream. Pure: no I/O, no server, no tensor.

A `ReadSpec` says once what a row of the wanted fields is: *segments*, the byte intervals of its records that are
read, and *copies*, which bytes of a segment are which bytes of an output field. `plan_read` turns rows into a
`ReadPlan`: *slabs* that are asked for and received one after the other. Each slab lists its ranges in the order of
their replies, so the position of every byte in the reply stream is known before the first one arrives (RESP2 frames
a bulk reply of s bytes as ``$s\\r\\n`` + s bytes + ``\\r\\n``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch

from td_datapipes.cost import ReadCost
from td_datapipes.manifest import ChunkLayout
from td_datapipes.schema import ALIGNMENT_BYTES, Key

__all__ = [
    "STRATEGIES",
    "Copy",
    "CoveringSlab",
    "Output",
    "PeriodicSlab",
    "Ranges",
    "ReadPlan",
    "ReadSpec",
    "RunSlab",
    "Segment",
    "Slab",
    "Spacing",
    "Strategy",
    "frame_headers",
    "plan_read",
    "wire_length",
]

Strategy = Literal["auto", "covering", "pipelined", "lua"]
STRATEGIES: tuple[Strategy, ...] = ("auto", "covering", "pipelined", "lua")
Rows = npt.NDArray[np.int64]

MAX_LUA_RANGES = 4096
"""Ranges of one Lua call. Lua's stack holds about 8,000 values, and a call blocks the server while it runs."""

_HEADER_EXTRA = 3  # "$", CR, LF
_TRAILER = 2  # CR, LF


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A byte interval of every record of a group that is read.

    Attributes:
        group: the group's number.
        piece: which piece of the record, 0 where records are not cut.
        start_bytes: from the start of that piece.
        stop_bytes: exclusive.
    """

    group: int
    piece: int
    start_bytes: int
    stop_bytes: int

    @property
    def nbytes(self) -> int:
        """Its length."""
        return self.stop_bytes - self.start_bytes


@dataclass(frozen=True, kw_only=True)
class Output:
    """A field as the batch will hold it: key, dtype and the shape of the part of one row that is kept."""

    key: Key
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Copy:
    """Bytes ``[output_start, output_start + nbytes)`` of a row of an output come from a segment, `segment_start` on."""

    output: int
    output_start: int
    segment: int
    segment_start: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class ReadSpec:
    """What is read of each row.

    Attributes:
        segments: in the order in which a row's replies stand.
        copies: every non-empty output is filled exactly once.
        outputs: in the schema's order.
        layouts: how each group is cut into chunks.
        spare_bytes: how far a range may reach past its chunk's records.
    """

    segments: tuple[Segment, ...]
    copies: tuple[Copy, ...]
    outputs: tuple[Output, ...]
    layouts: tuple[ChunkLayout, ...]
    spare_bytes: int

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a row that are read."""
        return sum(segment.nbytes for segment in self.segments)

    @cached_property
    def wire_lengths(self) -> Rows:
        """The length each segment is asked for when it is read on its own: see `wire_length`."""
        return np.array([wire_length(s.nbytes, self.spare_bytes) for s in self.segments], dtype=np.int64)

    @cached_property
    def period_bytes(self) -> int:
        """Bytes of the reply stream a row takes when every segment is read on its own."""
        return int((frame_headers(self.wire_lengths) + self.wire_lengths + _TRAILER).sum())

    @cached_property
    def wire_bytes(self) -> int:
        """Bytes asked for a row when every segment is read on its own."""
        return int(self.wire_lengths.sum())

    @cached_property
    def segment_starts(self) -> list[int]:
        """Where each segment's bytes start within that period."""
        headers = frame_headers(self.wire_lengths)
        ends = np.cumsum(headers + self.wire_lengths + _TRAILER)
        return [int(start) for start in np.concatenate([[0], ends[:-1]]) + headers]

    def closed(self, max_gap_bytes: int) -> bool:
        """Whether adjacent rows are best read as one range: all in one group, whole records, no wide gap."""
        first, last = self.segments[0], self.segments[-1]
        layout = self.layouts[first.group]
        gaps = [after.start_bytes - before.stop_bytes for before, after in pairwise(self.segments)]
        gaps.append(layout.stride_bytes - last.stop_bytes + first.start_bytes)
        one_group = all(segment.group == first.group for segment in self.segments)
        return one_group and layout.pieces == 1 and max(gaps) <= max_gap_bytes

    @cached_property
    def aligned(self) -> bool:
        """Whether every copy of a periodic stream can be viewed in its dtype, once the stream starts at `pad_bytes`."""
        bases = [start + self.pad_bytes for start in self.segment_starts]
        return all(
            (bases[copy.segment] + copy.segment_start) % itemsize == 0
            and self.period_bytes % itemsize == 0
            and copy.nbytes == self.outputs[copy.output].nbytes
            for copy in self.copies
            for itemsize in [self.outputs[copy.output].dtype.itemsize]
        )

    @cached_property
    def pad_bytes(self) -> int:
        """Bytes to leave in front of a stream so that its first record starts at a multiple of 16."""
        return -self.segment_starts[0] % ALIGNMENT_BYTES if self.segments else 0


class Slab(Protocol):
    """Ranges that are asked for together and land in one stretch of memory, and who gets which bytes of them.

    Attributes:
        rows: the rows it holds, each once.
        prefix: bytes of the reply before the first range's header (a Lua table's ``*n`` line).
        stream_bytes: length of the whole reply stream when nothing is missing.
        num_ranges: ranges it asks for.
        num_bytes: payload bytes it asks for.
        positions: the batch rows filled from it: a slice, or one index a row filled.
        sources: which row of the slab fills each of `positions`; None where they go one to one, in order.
    """

    @property
    def rows(self) -> Rows: ...
    @property
    def prefix(self) -> bytes: ...
    @property
    def stream_bytes(self) -> int: ...
    @property
    def num_ranges(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def positions(self) -> slice | Rows: ...
    @property
    def sources(self) -> Rows | None: ...

    def ranges(self) -> Ranges:
        """The ranges in the order of their replies."""

    def segment_offsets(self, segment: int) -> Spacing | Rows:
        """Where that segment of each row starts in the reply stream; evenly spaced, or one offset a row."""


@dataclass(frozen=True)
class Spacing:
    """Offsets ``first + step * i``."""

    first: int
    step: int


@dataclass(frozen=True, kw_only=True)
class Ranges:
    """Byte ranges of chunks, one entry each in four arrays: group, chunk, first byte, length."""

    groups: Rows
    chunks: Rows
    starts: Rows
    lengths: Rows


@dataclass(frozen=True, kw_only=True)
class PeriodicSlab:
    """A range of its own for every row and segment: the replies are one period a row, in order (a `Slab`)."""

    rows: Rows
    spec: ReadSpec
    positions: slice | Rows
    sources: Rows | None
    prefix: bytes = b""

    @property
    def stream_bytes(self) -> int:
        return len(self.rows) * self.spec.period_bytes

    @property
    def num_ranges(self) -> int:
        return len(self.rows) * len(self.spec.segments)

    @property
    def num_bytes(self) -> int:
        return len(self.rows) * self.spec.wire_bytes

    def ranges(self) -> Ranges:
        n, k = len(self.rows), len(self.spec.segments)
        chunks, starts = np.empty((n, k), dtype=np.int64), np.empty((n, k), dtype=np.int64)
        for j, segment in enumerate(self.spec.segments):
            chunks[:, j], starts[:, j] = _addresses(self.rows, segment, self.spec.layouts[segment.group])
        groups = np.array([segment.group for segment in self.spec.segments], dtype=np.int64)
        return Ranges(
            groups=np.tile(groups, n),
            chunks=chunks.reshape(-1),
            starts=starts.reshape(-1),
            lengths=np.tile(self.spec.wire_lengths, n),
        )

    def segment_offsets(self, segment: int) -> Spacing:
        return Spacing(self.spec.segment_starts[segment], self.spec.period_bytes)

    @property
    def row_step_bytes(self) -> int:
        """Bytes of the reply stream from row to row."""
        return self.spec.period_bytes

    def whole_rows(self, received_bytes: int) -> int:
        """How many rows are there whole once so much of the stream is."""
        return received_bytes // self.spec.period_bytes

    def part(self, begin: int, stop: int) -> PeriodicSlab:
        """Rows ``[begin, stop)`` of a slab that goes one to one; its stream starts `begin` steps later."""
        first = cast(slice, self.positions).start
        return replace(self, rows=self.rows[begin:stop], positions=slice(first + begin, first + stop))


@dataclass(frozen=True, kw_only=True)
class RunSlab:
    """One range over adjacent rows of one chunk: what reading in order is made of (a `Slab`)."""

    rows: Rows
    spec: ReadSpec
    chunk: int
    start: int
    length: int
    positions: slice
    sources: None = None
    prefix: bytes = b""
    num_ranges: int = 1

    @property
    def group(self) -> int:
        """The group all its bytes are of."""
        return self.spec.segments[0].group

    @property
    def header_bytes(self) -> int:
        """Bytes before the range's own."""
        return len(str(self.length)) + _HEADER_EXTRA

    @property
    def stream_bytes(self) -> int:
        return self.header_bytes + self.length + _TRAILER

    @property
    def num_bytes(self) -> int:
        return self.length

    def ranges(self) -> Ranges:
        return Ranges(
            groups=np.array([self.group]),
            chunks=np.array([self.chunk]),
            starts=np.array([self.start]),
            lengths=np.array([self.length]),
        )

    def segment_offsets(self, segment: int) -> Spacing:
        segments = self.spec.segments
        first = self.header_bytes + segments[segment].start_bytes - segments[0].start_bytes
        return Spacing(first, self.row_step_bytes)

    @property
    def row_step_bytes(self) -> int:
        """Bytes of the reply stream from row to row."""
        return self.spec.layouts[self.group].stride_bytes

    def whole_rows(self, received_bytes: int) -> int:
        """How many rows are there whole once so much of the stream is."""
        row_bytes = self.spec.segments[-1].stop_bytes - self.spec.segments[0].start_bytes
        rows = (received_bytes - self.header_bytes - row_bytes) // self.row_step_bytes + 1
        return min(max(rows, 0), len(self.rows))

    def part(self, begin: int, stop: int) -> RunSlab:
        """Rows ``[begin, stop)``, with the header's length as it is; its stream starts `begin` steps later."""
        first = self.positions.start
        return replace(self, rows=self.rows[begin:stop], positions=slice(first + begin, first + stop))


@dataclass(frozen=True, kw_only=True)
class CoveringSlab:
    """Ranges that each cover several rows and the gaps between them (a `Slab`).

    Attributes:
        offsets: for each segment, where it starts in the reply stream: evenly spaced, or one offset a row.
    """

    rows: Rows
    covered: Ranges
    prefix: bytes
    stream_bytes: int
    num_bytes: int
    offsets: tuple[Spacing | Rows, ...]
    positions: slice | Rows
    sources: Rows | None

    @property
    def num_ranges(self) -> int:
        return len(self.covered.lengths)

    def ranges(self) -> Ranges:
        return self.covered

    def segment_offsets(self, segment: int) -> Spacing | Rows:
        return self.offsets[segment]


@dataclass(frozen=True, kw_only=True)
class ReadPlan:
    """How a batch is read.

    Attributes:
        num_rows: rows of the batch, repeats counted.
        slabs: in the order they are to be asked for.
        strategy: what was chosen: ``covering``, ``pipelined`` or ``lua``.
    """

    num_rows: int
    slabs: tuple[Slab, ...]
    strategy: Strategy

    @property
    def num_ranges(self) -> int:
        """Ranges over all slabs."""
        return sum(slab.num_ranges for slab in self.slabs)

    @property
    def num_bytes(self) -> int:
        """Payload bytes over all slabs."""
        return sum(slab.num_bytes for slab in self.slabs)


def frame_headers(lengths: Rows) -> Rows:
    """Bytes of the ``$<length>\\r\\n`` header of each bulk reply."""
    digits = np.ones_like(lengths)
    bound, top = 10, int(lengths.max(initial=0))
    while bound <= top:
        digits += lengths >= bound
        bound *= 10
    return digits + _HEADER_EXTRA


def wire_length(nbytes: int, spare_bytes: int) -> int:
    """The shortest length from `nbytes` on whose framed reply is a multiple of 16; `nbytes` where spare is too little.

    Replies that follow each other then all start at the same alignment, and their records can be viewed in place.
    The step from 3 to 4 digits leaves a multiple of 16 out, so up to 30 bytes are needed (985 becomes 1015), else 15.
    """
    for length in range(nbytes, nbytes + spare_bytes + 1):
        if (len(str(length)) + _HEADER_EXTRA + length + _TRAILER) % ALIGNMENT_BYTES == 0:
            return length
    return nbytes


def plan_read(
    rows: Rows,
    spec: ReadSpec,
    cost: ReadCost,
    *,
    strategy: Strategy,
    slab_bytes: int,
    atomic: bool = False,
) -> ReadPlan:
    """How to read `rows`, in the order given and repeats kept. Pure, no I/O; about n log n.

    Each wanted byte is asked for once, however often its row is repeated. A plan that covers gaps asks for at most
    ``cost.max_gap_bytes`` more a range it saves.

    Args:
        rows: row numbers, all within the data set, ``[n]``.
        spec: what of each row is read.
        cost: the server's constants.
        strategy: ``auto`` takes the cheapest of ``covering`` and ``pipelined``; the others force one.
        slab_bytes: about how much is received before it is copied out; at least one row.
        atomic: put everything into one slab.
    """
    if len(rows) == 0 or not spec.segments:
        return ReadPlan(num_rows=len(rows), slabs=(), strategy="pipelined")
    if atomic:
        slab_bytes = 1 << 62
    max_gap_bytes = cost.max_gap_bytes
    if strategy in ("auto", "covering") and _adjacent(rows) and spec.closed(max_gap_bytes):
        return ReadPlan(num_rows=len(rows), slabs=tuple(_run_slabs(rows, spec, slab_bytes)), strategy="covering")
    ordered = np.sort(rows)
    if strategy == "auto":
        strategy = _choose(ordered, spec, max_gap_bytes)
    if strategy == "pipelined":
        slabs = _pipelined_slabs(rows, ordered, spec, slab_bytes)
    else:
        most = MAX_LUA_RANGES if strategy == "lua" and not atomic else None
        slabs = _covering_slabs(rows, spec, max_gap_bytes, slab_bytes, most, as_table=strategy == "lua")
    return ReadPlan(num_rows=len(rows), slabs=tuple(slabs), strategy=strategy)


def _adjacent(rows: Rows) -> bool:
    return int(rows[-1]) - int(rows[0]) == len(rows) - 1 and bool((rows[1:] > rows[:-1]).all())


def _run_slabs(rows: Rows, spec: ReadSpec, slab_bytes: int) -> Iterator[Slab]:
    """Adjacent rows, one range a slab."""
    layout = spec.layouts[spec.segments[0].group]
    low, high = spec.segments[0].start_bytes, spec.segments[-1].stop_bytes
    most = max(1, slab_bytes // layout.stride_bytes)
    first, at = int(rows[0]), 0
    while at < len(rows):
        chunk, within = divmod(first + at, layout.records_per_chunk)
        count = min(len(rows) - at, most, layout.records_per_chunk - within)
        yield RunSlab(
            rows=rows[at : at + count],
            spec=spec,
            chunk=chunk,
            start=within * layout.stride_bytes + low,
            length=(count - 1) * layout.stride_bytes + high - low,
            positions=slice(at, at + count),
        )
        at += count


def _choose(ordered: Rows, spec: ReadSpec, max_gap_bytes: int) -> Strategy:
    """Covering if it saves a quarter of the ranges: it pays a sort, and finer copies, for what it saves.

    Scattered batches are the common case, so this looks at sorted neighbours only: a gap that can be closed is one
    range less. Chunk borders and gaps within a row, which it leaves out, hardly ever decide.
    """
    if len(ordered) == 1:
        return "covering"
    widest = max(layout.stride_bytes for layout in spec.layouts)
    closable = np.count_nonzero(ordered[1:] - ordered[:-1] <= (max_gap_bytes + spec.row_bytes) // widest)
    return "covering" if 4 * int(closable) >= len(ordered) else "pipelined"


def _sorted_unique(rows: Rows) -> tuple[Rows | None, Rows]:
    """A stable sorting order (None where the rows are strictly increasing) and the distinct rows, ascending."""
    if len(rows) < 2 or bool((rows[1:] > rows[:-1]).all()):
        return None, rows
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    first = np.ones(len(rows), dtype=bool)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return order, ordered[first]


def _addresses(rows: Rows, segment: Segment, layout: ChunkLayout) -> tuple[Rows, Rows]:
    """Chunk of each row's segment and where it starts there."""
    chunk, within = np.divmod(rows, layout.records_per_chunk)
    return chunk * layout.pieces + segment.piece, within * layout.stride_bytes + segment.start_bytes


def _pipelined_slabs(rows: Rows, ordered: Rows, spec: ReadSpec, slab_bytes: int) -> Iterator[Slab]:
    """One range a row and segment, in the order asked for; a repeated row is asked for where it first appears."""
    asked, fills = rows, None
    if bool((ordered[1:] == ordered[:-1]).any()):
        distinct, first, which = np.unique(rows, return_index=True, return_inverse=True)
        appearance = np.argsort(first)
        asked, fills = distinct[appearance], np.argsort(appearance)[which]
    step = max(1, slab_bytes // spec.period_bytes)
    for start in range(0, len(asked), step):
        part = asked[start : start + step]
        positions: slice | Rows = slice(start, start + len(part))
        sources = None
        if fills is not None:
            positions = np.nonzero((fills >= start) & (fills < start + step))[0]
            sources = fills[positions] - start
        yield PeriodicSlab(rows=part, spec=spec, positions=positions, sources=sources)


@dataclass(frozen=True, kw_only=True)
class _Merged:
    """Ranges of one group, and for each (row, segment) of it the range it lies in and its distance from that start."""

    columns: Sequence[int]
    group: int
    chunks: Rows
    starts: Rows
    lengths: Rows
    range_of: Rows
    distance: Rows


def _merge(unique: Rows, spec: ReadSpec, max_gap_bytes: int) -> Iterator[_Merged]:
    """Close the gaps between the segments of ascending rows, group by group."""
    for group, layout in enumerate(spec.layouts):
        columns = [j for j, segment in enumerate(spec.segments) if segment.group == group]
        if not columns:
            continue
        chunks = np.empty((len(unique), len(columns)), dtype=np.int64)
        starts = np.empty_like(chunks)
        for position, j in enumerate(columns):
            chunks[:, position], starts[:, position] = _addresses(unique, spec.segments[j], layout)
        lengths = np.array([spec.segments[j].nbytes for j in columns], dtype=np.int64)
        flat_chunks, flat_starts = chunks.reshape(-1), starts.reshape(-1)
        stops = (starts + lengths).reshape(-1)
        # Rows ascend and so do the segments of a row, so the intervals ascend too: comparing neighbours is enough.
        fresh = np.ones(len(flat_starts), dtype=bool)
        fresh[1:] = (flat_chunks[1:] != flat_chunks[:-1]) | (flat_starts[1:] - stops[:-1] > max_gap_bytes)
        heads = np.nonzero(fresh)[0]
        last = np.append(heads[1:], len(fresh)) - 1
        range_of = np.cumsum(fresh) - 1
        yield _Merged(
            columns=columns,
            group=group,
            chunks=flat_chunks[heads],
            starts=flat_starts[heads],
            lengths=stops[last] - flat_starts[heads],
            range_of=range_of.reshape(chunks.shape),
            distance=(flat_starts - flat_starts[heads][range_of]).reshape(chunks.shape),
        )


def _covering_slabs(
    rows: Rows, spec: ReadSpec, max_gap_bytes: int, slab_bytes: int, max_ranges: int | None, *, as_table: bool
) -> Iterator[Slab]:
    """Ascending rows cut into slabs, the gaps within each closed."""
    order, unique = _sorted_unique(rows)
    ordered = rows if order is None else rows[order]
    for start, stop in pairwise(_cut_rows(unique, spec, max_gap_bytes, slab_bytes, max_ranges)):
        part = unique[start:stop]
        positions: slice | Rows = slice(start, stop)
        sources = None
        if order is not None:
            low, high = np.searchsorted(ordered, [part[0], part[-1] + 1])
            positions = order[low:high]
            if high - low > len(part):  # repeats
                sources = np.searchsorted(part, ordered[low:high])
        yield _covering_slab(part, spec, max_gap_bytes, positions, sources, as_table=as_table)


def _cut_rows(unique: Rows, spec: ReadSpec, max_gap_bytes: int, slab_bytes: int, max_ranges: int | None) -> list[int]:
    """Where to cut ascending rows so that a slab has about `slab_bytes` and at most `max_ranges` ranges."""
    stride = sum(layout.stride_bytes for layout in spec.layouts)
    span = (int(unique[-1] - unique[0]) + 1) * stride
    if span <= slab_bytes and max_ranges is None:
        return [0, len(unique)]
    gaps = np.minimum(np.diff(unique, prepend=unique[:1]) * stride, max_gap_bytes + spec.row_bytes)
    # Every slab holds at least one row: a row that is longer than a slab makes a slab of its own.
    slab_of = np.cumsum(np.maximum(gaps, spec.row_bytes)) // max(slab_bytes, spec.row_bytes)
    cuts = np.nonzero(np.diff(slab_of))[0] + 1
    bounds = [0, *cuts.tolist(), len(unique)]
    if max_ranges is None:
        return bounds
    step = max(1, max_ranges // len(spec.segments))
    fine = [range(low, high, step) for low, high in pairwise(bounds)]
    return [*(cut for part in fine for cut in part), len(unique)]


def _covering_slab(
    rows: Rows,
    spec: ReadSpec,
    max_gap_bytes: int,
    positions: slice | Rows,
    sources: Rows | None,
    *,
    as_table: bool,
) -> Slab:
    covered, offsets, prefix, stream_bytes = _merged_ranges(rows, spec, max_gap_bytes, as_table=as_table)
    return CoveringSlab(
        rows=rows,
        covered=covered,
        prefix=prefix,
        stream_bytes=stream_bytes,
        num_bytes=int(covered.lengths.sum()),
        offsets=tuple(offsets),
        positions=positions,
        sources=sources,
    )


def _merged_ranges(
    rows: Rows, spec: ReadSpec, max_gap_bytes: int, *, as_table: bool
) -> tuple[Ranges, list[Rows], bytes, int]:
    """The ranges of ascending rows, each segment's offsets in the reply stream, its prefix and its length."""
    merged = list(_merge(rows, spec, max_gap_bytes))
    lengths = np.concatenate([ranges.lengths for ranges in merged])
    prefix = b"*%d\r\n" % len(lengths) if as_table else b""
    ends = np.cumsum(frame_headers(lengths) + lengths + _TRAILER) + len(prefix)
    data = ends - lengths - _TRAILER
    offsets: list[Rows] = [rows] * len(spec.segments)
    first = 0
    for ranges in merged:
        for position, column in enumerate(ranges.columns):
            offsets[column] = data[first + ranges.range_of[:, position]] + ranges.distance[:, position]
        first += len(ranges.lengths)
    covered = Ranges(
        groups=np.repeat([ranges.group for ranges in merged], [len(ranges.lengths) for ranges in merged]),
        chunks=np.concatenate([ranges.chunks for ranges in merged]),
        starts=np.concatenate([ranges.starts for ranges in merged]),
        lengths=lengths,
    )
    return covered, offsets, prefix, int(ends[-1])
