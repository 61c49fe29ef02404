"""Spans of values of variable length -> ranges of heaps, and where each value's bytes go. Pure: no I/O.

Values that are wanted and lie close together are covered by one range, as rows are; what is read twice is asked for
once. Everything is in terms of a heap's own bytes, numbered through its chunks, until it is cut into chunks at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from td_datapipes.plan import ReadPlan
from td_datapipes.read_spec import TRAILER_BYTES, Rows, frame_headers
from td_datapipes.slabs import Ranges, Spacing

__all__ = ["HeapSlab", "WantedValues", "plan_values"]


@dataclass(frozen=True, kw_only=True)
class WantedValues:
    """Values of one heap that are read, and where in a field's memory each goes.

    Attributes:
        group: the number that stands for the heap in chunk keys.
        output: number of the field's memory.
        chunk_bytes: of the heap.
        rows: whose they are, ``[n]``; only for messages.
        starts: the heap's byte where each begins, ``[n]``.
        nbytes: of each, ``[n]``.
        targets: where each begins in the memory, in bytes, ``[n]``.
    """

    group: int
    output: int
    chunk_bytes: int
    rows: Rows
    starts: Rows
    nbytes: Rows
    targets: Rows


@dataclass(frozen=True, kw_only=True)
class HeapSlab:
    """Ranges of one heap, all in one shard (a `td_datapipes.slabs.Slab`).

    Attributes:
        values: some of which it has bytes of.
        covered: the ranges.
        stream_bytes, num_bytes: of the reply stream, and of what is asked for.
        origins: where each stretch of bytes stands in the reply stream, ``[m]``.
        targets: where it goes in the field's memory, ``[m]``.
        lengths: its bytes, ``[m]``.
    """

    values: WantedValues
    covered: Ranges
    stream_bytes: int
    num_bytes: int
    origins: Rows
    targets: Rows
    lengths: Rows
    prefix: bytes = b""
    sources: None = None
    held: None = None

    @property
    def positions(self) -> slice:
        """It fills no rows of records."""
        return slice(0, 0)

    @property
    def rows(self) -> Rows:
        return self.values.rows

    def rows_of(self, index: int) -> Rows:
        """The rows that have bytes in one of the ranges, ascending."""
        values, covered = self.values, self.covered
        start = int(covered.chunks[index]) * values.chunk_bytes + int(covered.starts[index])
        stop = start + int(covered.lengths[index])
        touched = (values.starts < stop) & (values.starts + values.nbytes > start) & (values.nbytes > 0)
        return np.unique(values.rows[touched])

    @property
    def num_ranges(self) -> int:
        return len(self.covered.lengths)

    def ranges(self) -> Ranges:
        return self.covered

    def segment_offsets(self, segment: int) -> Spacing | Rows:
        raise TypeError(f"a slab of a heap has no segment {segment}")


def plan_values(
    wanted: Iterable[WantedValues], *, num_rows: int, max_gap_bytes: int, slab_bytes: int, num_shards: int
) -> ReadPlan:
    """How to read values of variable length: one pipelined round for all fields. About n log n.

    Args:
        wanted: one a field.
        num_rows: of the batch.
        max_gap_bytes: values that are no further apart are covered by one range.
        slab_bytes: about how much is received before it is copied out.
        num_shards: chunk ``c`` lies in shard ``c % num_shards``; a slab is of one shard.
    """
    slabs = [slab for values in wanted for slab in _slabs(values, max_gap_bytes, slab_bytes, num_shards)]
    return ReadPlan(num_rows=num_rows, slabs=tuple(slabs), strategy="covering")


def _slabs(values: WantedValues, max_gap_bytes: int, slab_bytes: int, num_shards: int) -> Iterator[HeapSlab]:
    some = np.flatnonzero(values.nbytes)
    if not len(some):
        return
    low = values.starts[some]
    high = low + values.nbytes[some]
    starts, stops = _cut(*_covering(low, high, max_gap_bytes), values.chunk_bytes, slab_bytes)
    if num_shards > 1:
        order = np.argsort(starts // values.chunk_bytes % num_shards, kind="stable")
    else:
        order = np.arange(len(starts))
    moves = _moves(low, high, values.targets[some], starts, stops)
    # Where each range stands in the order of asking, and which slab has it.
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    move_places = place[moves.ranges]
    if num_shards > 1 or not bool((move_places[1:] >= move_places[:-1]).all()):
        sorting = np.argsort(move_places, kind="stable")
        moves, move_places = moves.take(sorting), move_places[sorting]
    starts, stops = starts[order], stops[order]
    bounds = _slab_bounds(starts, stops, values.chunk_bytes, slab_bytes, num_shards)
    for first, last in pairwise(bounds):
        part = slice(*np.searchsorted(move_places, [first, last]).tolist())
        within = move_places[part] - first
        yield _slab(values, starts[first:last], stops[first:last], moves.take(part), within)


def _covering(low: Rows, high: Rows, max_gap_bytes: int) -> tuple[Rows, Rows]:
    """Disjoint ascending stretches that hold all values, gaps of at most so many bytes closed."""
    if not bool((low[1:] >= low[:-1]).all()):
        order = np.argsort(low, kind="stable")
        low, high = low[order], high[order]
    reached = np.maximum.accumulate(high)
    fresh = np.ones(len(low), dtype=bool)
    fresh[1:] = low[1:] - reached[:-1] > max_gap_bytes
    heads = np.flatnonzero(fresh)
    return low[heads], reached[np.append(heads[1:], len(low)) - 1]


def _cut(starts: Rows, stops: Rows, chunk_bytes: int, slab_bytes: int) -> tuple[Rows, Rows]:
    """The same stretches cut at the borders of chunks, and so that none is much longer than a slab."""
    if not bool(((starts // chunk_bytes != (stops - 1) // chunk_bytes) | (stops - starts > 2 * slab_bytes)).any()):
        return starts, stops
    borders: list[npt.NDArray[np.int64]] = []
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        at = start
        while at < stop:
            end = min(stop, (at // chunk_bytes + 1) * chunk_bytes)
            borders.append(np.arange(at, end, slab_bytes if end - at > 2 * slab_bytes else end - at))
            at = end
    begins = np.concatenate(borders)
    # Each piece ends where the next one begins, or where its stretch does.
    ends = np.minimum(np.append(begins[1:], stops[-1]), stops[np.searchsorted(starts, begins, side="right") - 1])
    return begins, ends


@dataclass(frozen=True)
class _Moves:
    """Bytes that are copied: out of which range, how far into it, where to and how many."""

    ranges: Rows
    distances: Rows
    targets: Rows
    lengths: Rows

    def take(self, which: slice | Rows) -> _Moves:
        """Some of them."""
        return _Moves(self.ranges[which], self.distances[which], self.targets[which], self.lengths[which])


def _moves(low: Rows, high: Rows, targets: Rows, starts: Rows, stops: Rows) -> _Moves:
    """Where each value's bytes come from, neighbours that stay neighbours as one."""
    first = np.searchsorted(starts, low, side="right") - 1
    last = np.searchsorted(starts, high, side="left") - 1
    counts = last - first + 1
    value: slice | Rows = slice(None)
    if int(counts.max()) == 1:
        ranges = first
        begin, end = low, high
    else:
        total = int(counts.sum())
        value = np.repeat(np.arange(len(low)), counts)
        ranges = np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(total)
        begin, end = np.maximum(low[value], starts[ranges]), np.minimum(high[value], stops[ranges])
    targets = targets[value] + begin - low[value]
    fresh = np.ones(len(begin), dtype=bool)
    fresh[1:] = (ranges[1:] != ranges[:-1]) | (begin[1:] != end[:-1])
    fresh[1:] |= targets[1:] - targets[:-1] != (end - begin)[:-1]
    heads = np.flatnonzero(fresh)
    last_of = np.append(heads[1:], len(begin)) - 1
    return _Moves(ranges[heads], begin[heads] - starts[ranges[heads]], targets[heads], end[last_of] - begin[heads])


def _slab_bounds(starts: Rows, stops: Rows, chunk_bytes: int, slab_bytes: int, num_shards: int) -> Sequence[int]:
    """Where to cut ranges into slabs."""
    slab_of = (np.cumsum(stops - starts) - 1) // slab_bytes
    fresh = slab_of[1:] != slab_of[:-1]
    if num_shards > 1:
        shards = starts // chunk_bytes % num_shards
        fresh |= shards[1:] != shards[:-1]
    bounds: list[int] = [0, *(np.flatnonzero(fresh) + 1).tolist(), len(starts)]
    return bounds


def _slab(values: WantedValues, starts: Rows, stops: Rows, moves: _Moves, within: Rows) -> HeapSlab:
    lengths = stops - starts
    ends = np.cumsum(frame_headers(lengths) + lengths + TRAILER_BYTES)
    data = ends - lengths - TRAILER_BYTES
    covered = Ranges(
        groups=np.full(len(starts), values.group, dtype=np.int64),
        chunks=starts // values.chunk_bytes,
        starts=starts % values.chunk_bytes,
        lengths=lengths,
    )
    return HeapSlab(
        values=values,
        covered=covered,
        stream_bytes=int(ends[-1]),
        num_bytes=int(lengths.sum()),
        origins=data[within] + moves.distances,
        targets=moves.targets,
        lengths=moves.lengths,
    )
