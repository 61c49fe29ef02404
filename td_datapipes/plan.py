"""Rows -> ranges: how a batch is read. Pure: no I/O, no server, no tensor.

`plan_read` turns rows into a `ReadPlan`: slabs that are asked for and received one after the other. Each slab lists its
ranges in the order of their replies, so the position of every byte in the reply stream is known before the first one
arrives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Literal

import numpy as np

from td_datapipes.column_spans import run_slab, span_slab, spanned_segments
from td_datapipes.cost import ReadCost
from td_datapipes.read_spec import TRAILER_BYTES, ReadSpec, Rows, frame_headers, segment_addresses
from td_datapipes.slabs import ColumnSlab, CoveringSlab, PeriodicSlab, Ranges, RunSlab, Slab

__all__ = ["STRATEGIES", "ReadPlan", "Strategy", "plan_read"]

Strategy = Literal["auto", "covering", "pipelined", "lua"]
STRATEGIES: tuple[Strategy, ...] = ("auto", "covering", "pipelined", "lua")

RUN_BYTES = 4 << 20
"""A range over adjacent rows may be as long as a chunk: long ones cost the server least, and nothing is copied."""
MAX_LUA_RANGES = 4096
"""Ranges of one Lua call. Lua's stack holds about 8,000 values, and a call blocks the server while it runs."""


MIN_TRANSACTION_RANGE_BYTES = 512
"""Ranges that have to be read in one step and are longer on average are read in a transaction: Lua copies more."""
Envelope = Literal["", "table", "transaction"]
"""What ranges come in: nothing, a Lua table, or, for longer ranges that have to be one step, a transaction."""


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
    if strategy in ("auto", "covering") and _adjacent(rows):
        if spec.closed(max_gap_bytes):
            return ReadPlan(num_rows=len(rows), slabs=tuple(_run_slabs(rows, spec, slab_bytes)), strategy="covering")
        if spec.closed_singly(max_gap_bytes):
            runs = _column_runs(rows, spec, slab_bytes)
            return ReadPlan(num_rows=len(rows), slabs=tuple(runs), strategy="covering")
    ordered = np.sort(rows)
    spanned: tuple[int, ...] = ()
    if strategy == "auto":
        strategy = _choose(ordered, spec, max_gap_bytes)
        if strategy == "pipelined":
            spanned = spanned_segments(ordered, spec, max_gap_bytes, slab_bytes)
    if strategy == "pipelined":
        slabs = _pipelined_slabs(rows, ordered, spec, slab_bytes, spanned)
    elif strategy == "lua" and _has_columns(rows, spec, int(ordered[-1]), atomic=atomic):
        slabs = _column_slabs(rows, ordered, spec, slab_bytes, atomic=atomic)
    else:
        most = MAX_LUA_RANGES if strategy == "lua" and not atomic else None
        envelope: Envelope = "" if strategy != "lua" else "transaction" if atomic else "table"
        slabs = _covering_slabs(rows, spec, max_gap_bytes, slab_bytes, most, envelope)
    return ReadPlan(num_rows=len(rows), slabs=tuple(slabs), strategy=strategy)


def _has_columns(rows: Rows, spec: ReadSpec, last_row: int, *, atomic: bool) -> bool:
    """Whether one reply a segment pays; where it has to be one call, a transaction is better for longer segments."""
    short = not atomic or spec.row_bytes < MIN_TRANSACTION_RANGE_BYTES * len(spec.segments)
    return short and spec.has_columns(last_row) and not _adjacent(rows)


def _adjacent(rows: Rows) -> bool:
    return int(rows[-1]) - int(rows[0]) == len(rows) - 1 and bool((rows[1:] > rows[:-1]).all())


def _column_runs(rows: Rows, spec: ReadSpec, slab_bytes: int) -> Iterable[Slab]:
    """Adjacent rows of segments each in a group of its own: short ones as one slab, as every slab costs something."""
    if len(rows) * spec.row_bytes <= slab_bytes and spec.has_columns(int(rows[-1])):
        return [run_slab(rows, spec)]
    return chain.from_iterable(_run_slabs(rows, spec, slab_bytes, only) for only in range(len(spec.segments)))


def _run_slabs(rows: Rows, spec: ReadSpec, slab_bytes: int, only: int | None = None) -> Iterator[Slab]:
    """Adjacent rows, one range a slab."""
    segments = spec.segments if only is None else spec.segments[only : only + 1]
    layout = spec.layouts[segments[0].group]
    low, high = segments[0].start_bytes, segments[-1].stop_bytes
    most = max(1, max(slab_bytes, RUN_BYTES) // layout.stride_bytes)
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
            only=only,
        )
        at += count


def _choose(ordered: Rows, spec: ReadSpec, max_gap_bytes: int) -> Strategy:
    """Covering if it saves two fifths of what ranges cost: it pays a sort, and finer copies, for what it saves.

    Longer ranges cost a server more than short ones, too. And a sixteenth of the time: beside long rows, what a range
    costs is little. Scattered batches are the common case, so this looks at sorted neighbours only: a gap that can be
    closed is one range less, and its bytes more. Chunk borders and gaps within a row, which it leaves out, hardly ever
    decide.
    """
    if len(ordered) == 1:
        return "covering"
    widest = max(layout.stride_bytes for layout in spec.layouts)
    steps = ordered[1:] - ordered[:-1]
    closable = steps[steps <= (max_gap_bytes + spec.row_bytes) // widest]
    # A range is worth the bytes of the longest gap that pays.
    saved = len(closable) * (max_gap_bytes + spec.row_bytes) - int(closable.sum()) * widest
    pays = 16 * saved >= len(ordered) * (max_gap_bytes + spec.row_bytes)
    return "covering" if pays and 5 * saved >= 2 * len(ordered) * max_gap_bytes else "pipelined"


def _sorted_unique(rows: Rows) -> tuple[Rows | None, Rows]:
    """A stable sorting order (None where the rows are strictly increasing) and the distinct rows, ascending."""
    if len(rows) < 2 or bool((rows[1:] > rows[:-1]).all()):
        return None, rows
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    first = np.ones(len(rows), dtype=bool)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return order, ordered[first]


def _pipelined_slabs(
    rows: Rows, ordered: Rows, spec: ReadSpec, slab_bytes: int, spanned: tuple[int, ...]
) -> Iterator[Slab]:
    """One range a row and segment, in the order asked for; a repeated row is asked for where it first appears.

    Segments that are `spanned` come behind them, one range each.
    """
    held, singly = spec.without(spanned) if spanned else (None, spec)
    if singly.segments:
        for part, positions, sources in _cut_as_asked(rows, ordered, max(1, slab_bytes // singly.period_bytes)):
            yield PeriodicSlab(rows=part, spec=singly, positions=positions, sources=sources, held=held)
    if spanned:
        for part, positions, sources in _cut_as_asked(rows, ordered, len(rows)):
            yield span_slab(part, positions, sources, spec, spanned)


def _column_slabs(rows: Rows, ordered: Rows, spec: ReadSpec, slab_bytes: int, *, atomic: bool) -> Iterator[Slab]:
    """One reply a segment, the rows in the order asked for."""
    step = max(1, slab_bytes // spec.row_bytes)
    if not atomic:
        step = min(step, max(1, MAX_LUA_RANGES // len(spec.segments)))
    for part, positions, sources in _cut_as_asked(rows, ordered, step):
        yield ColumnSlab(rows=part, spec=spec, positions=positions, sources=sources)


def _cut_as_asked(rows: Rows, ordered: Rows, step: int) -> Iterator[tuple[Rows, slice | Rows, Rows | None]]:
    """Distinct rows in the order of their first appearance, so many at a time, and the positions they fill."""
    asked, fills = rows, None
    if bool((ordered[1:] == ordered[:-1]).any()):
        distinct, first, which = np.unique(rows, return_index=True, return_inverse=True)
        appearance = np.argsort(first)
        asked, fills = distinct[appearance], np.argsort(appearance)[which]
    for start in range(0, len(asked), step):
        part = asked[start : start + step]
        positions: slice | Rows = slice(start, start + len(part))
        sources = None
        if fills is not None:
            positions = np.nonzero((fills >= start) & (fills < start + step))[0]
            sources = fills[positions] - start
        yield part, positions, sources


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
    alike: dict[object, _Merged] = {}
    for group, layout in enumerate(spec.layouts):
        columns = [j for j, segment in enumerate(spec.segments) if segment.group == group]
        if not columns:
            continue
        # Groups whose records are cut alike have the same ranges: one string a field often means fields of one length.
        cuts = tuple((s.piece, s.start_bytes, s.stop_bytes) for s in map(spec.segments.__getitem__, columns))
        found = alike.get((layout, cuts))
        if found is None:
            found = alike[layout, cuts] = _merge_group(unique, spec, group, columns, max_gap_bytes)
        yield found if found.group == group else replace(found, columns=columns, group=group)


def _merge_group(unique: Rows, spec: ReadSpec, group: int, columns: Sequence[int], max_gap_bytes: int) -> _Merged:
    layout = spec.layouts[group]
    if len(columns) == 1 and layout.pieces == 1 and int(unique[-1]) < layout.records_per_chunk:
        return _merge_column(unique, spec, group, columns, max_gap_bytes)
    chunks = np.empty((len(unique), len(columns)), dtype=np.int64)
    starts = np.empty_like(chunks)
    for position, j in enumerate(columns):
        chunks[:, position], starts[:, position] = segment_addresses(unique, spec.segments[j], layout)
    lengths = np.array([spec.segments[j].nbytes for j in columns], dtype=np.int64)
    flat_chunks, flat_starts = chunks.reshape(-1), starts.reshape(-1)
    stops = (starts + lengths).reshape(-1)
    # Rows ascend and so do the segments of a row, so the intervals ascend too: comparing neighbours is enough.
    fresh = np.ones(len(flat_starts), dtype=bool)
    fresh[1:] = (flat_chunks[1:] != flat_chunks[:-1]) | (flat_starts[1:] - stops[:-1] > max_gap_bytes)
    heads = np.nonzero(fresh)[0]
    last = np.append(heads[1:], len(fresh)) - 1
    range_of = np.cumsum(fresh) - 1
    return _Merged(
        columns=columns,
        group=group,
        chunks=flat_chunks[heads],
        starts=flat_starts[heads],
        lengths=stops[last] - flat_starts[heads],
        range_of=range_of.reshape(chunks.shape),
        distance=(flat_starts - flat_starts[heads][range_of]).reshape(chunks.shape),
    )


def _merge_column(unique: Rows, spec: ReadSpec, group: int, columns: Sequence[int], max_gap_bytes: int) -> _Merged:
    """The same for one segment whose rows are all in the first chunk: the rows themselves tell."""
    segment, stride = spec.segments[columns[0]], spec.layouts[group].stride_bytes
    fresh = np.ones(len(unique), dtype=bool)
    np.greater(unique[1:] - unique[:-1], (max_gap_bytes + segment.nbytes) // stride, out=fresh[1:])
    heads = fresh.nonzero()[0]
    first = unique[heads]
    last = np.empty_like(first)
    last[:-1], last[-1] = unique[heads[1:] - 1], unique[-1]
    range_of = fresh.cumsum() - 1
    return _Merged(
        columns=columns,
        group=group,
        chunks=np.zeros_like(first),
        starts=first * stride + segment.start_bytes,
        lengths=(last - first) * stride + segment.nbytes,
        range_of=range_of[:, None],
        distance=((unique - first[range_of]) * stride)[:, None],
    )


def _covering_slabs(
    rows: Rows, spec: ReadSpec, max_gap_bytes: int, slab_bytes: int, max_ranges: int | None, envelope: Envelope
) -> Iterator[Slab]:
    """Ascending rows cut into slabs, the gaps within each closed."""
    order, unique = _sorted_unique(rows)
    ordered = rows if order is None else rows[order]
    repeats = len(ordered) > len(unique)
    cuts = _cut_rows(unique, spec, max_gap_bytes, slab_bytes, max_ranges)
    parts: Iterable[_Covered]
    if len(spec.segments) == 1 and not envelope:
        parts = _cover_segment(unique, cuts, spec, max_gap_bytes)
    else:
        parts = (_cover(unique[start:stop], spec, max_gap_bytes, envelope) for start, stop in pairwise(cuts))
    for (start, stop), covered in zip(pairwise(cuts), parts, strict=True):
        part = unique[start:stop]
        positions: slice | Rows = slice(start, stop)
        sources = None
        if order is not None:
            low, high = np.searchsorted(ordered, [part[0], part[-1] + 1]) if repeats else (start, stop)
            positions = order[low:high]
            if high - low > len(part):
                sources = np.searchsorted(part, ordered[low:high])
        yield CoveringSlab(
            rows=part,
            covered=covered.ranges,
            prefix=covered.prefix,
            stream_bytes=covered.stream_bytes,
            num_bytes=int(covered.ranges.lengths.sum()),
            offsets=tuple(covered.offsets),
            positions=positions,
            sources=sources,
        )


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


@dataclass(frozen=True, kw_only=True)
class _Covered:
    """The ranges over some rows, each segment's offsets in the reply stream, its prefix and its length."""

    ranges: Ranges
    offsets: Sequence[Rows]
    prefix: bytes
    stream_bytes: int


def _cover_segment(unique: Rows, cuts: Sequence[int], spec: ReadSpec, max_gap_bytes: int) -> Iterator[_Covered]:
    """What `_cover` gives for each part of ascending rows of one segment; what is alike is done for all at once."""
    segment = spec.segments[0]
    chunks, starts = segment_addresses(unique, segment, spec.layouts[segment.group])
    stops = starts + segment.nbytes
    fresh = np.ones(len(unique), dtype=bool)
    fresh[1:] = (chunks[1:] != chunks[:-1]) | (starts[1:] - stops[:-1] > max_gap_bytes)
    fresh[cuts[:-1]] = True
    heads = np.flatnonzero(fresh)
    lengths = stops[np.append(heads[1:], len(fresh)) - 1] - starts[heads]
    ends = np.cumsum(frame_headers(lengths) + lengths + TRAILER_BYTES)
    offsets = starts + (ends - lengths - TRAILER_BYTES - starts[heads])[np.cumsum(fresh) - 1]
    columns = (np.full(len(heads), segment.group), chunks[heads], starts[heads], lengths)
    borders = np.searchsorted(heads, cuts).tolist()  # each part begins with a range of its own
    for (begin, stop), (low, high) in zip(pairwise(cuts), pairwise(borders), strict=True):
        groups, in_chunks, froms, nbytes = (column[low:high] for column in columns)
        before = int(ends[low - 1]) if low else 0
        yield _Covered(
            ranges=Ranges(groups=groups, chunks=in_chunks, starts=froms, lengths=nbytes),
            offsets=[offsets[begin:stop] - before],
            prefix=b"",
            stream_bytes=int(ends[high - 1]) - before,
        )


def _cover(rows: Rows, spec: ReadSpec, max_gap_bytes: int, envelope: Envelope) -> _Covered:
    covered, range_of, distance = (_one_row if len(rows) == 1 else _all_rows)(rows, spec, max_gap_bytes)
    lengths = covered.lengths
    prefix = b"*%d\r\n" % len(lengths) if envelope else b""
    if envelope == "transaction" and int(lengths.sum()) >= MIN_TRANSACTION_RANGE_BYTES * len(lengths):
        prefix = b"+OK\r\n" + b"+QUEUED\r\n" * len(lengths) + prefix
    ends = np.cumsum(frame_headers(lengths) + lengths + TRAILER_BYTES) + len(prefix)
    data = ends - lengths - TRAILER_BYTES
    offsets = [data[which] + apart for which, apart in zip(range_of, distance, strict=True)]
    return _Covered(ranges=covered, offsets=offsets, prefix=prefix, stream_bytes=int(ends[-1]))


_MergedRows = tuple[Ranges, list[Rows], list[Rows]]
"""Ranges of ascending rows, and for each segment which range each row lies in and how far from its start."""


def _all_rows(rows: Rows, spec: ReadSpec, max_gap_bytes: int) -> _MergedRows:
    merged = list(_merge(rows, spec, max_gap_bytes))
    range_of: list[Rows] = [rows] * len(spec.segments)
    distance = range_of.copy()
    first = 0
    for ranges in merged:
        for position, column in enumerate(ranges.columns):
            range_of[column] = ranges.range_of[:, position] + first
            distance[column] = ranges.distance[:, position]
        first += len(ranges.lengths)
    covered = Ranges(
        groups=np.repeat([ranges.group for ranges in merged], [len(ranges.lengths) for ranges in merged]),
        chunks=np.concatenate([ranges.chunks for ranges in merged]),
        starts=np.concatenate([ranges.starts for ranges in merged]),
        lengths=np.concatenate([ranges.lengths for ranges in merged]),
    )
    return covered, range_of, distance


def _one_row(rows: Rows, spec: ReadSpec, max_gap_bytes: int) -> _MergedRows:
    """The same without numpy, which takes a microsecond for each step."""
    row = int(rows[0])
    found: list[tuple[int, int, int, int]] = []  # group, chunk, first byte and stop
    range_of, distance = [0] * len(spec.segments), [0] * len(spec.segments)
    for j in sorted(range(len(spec.segments)), key=lambda j: spec.segments[j].group):
        segment = spec.segments[j]
        layout = spec.layouts[segment.group]
        chunk, within = divmod(row, layout.records_per_chunk)
        where = (segment.group, chunk * layout.pieces + segment.piece)
        start = within * layout.stride_bytes + segment.start_bytes
        if not found or found[-1][:2] != where or start - found[-1][3] > max_gap_bytes:
            found.append((*where, start, start + segment.nbytes))
        else:
            found[-1] = (*where, found[-1][2], start + segment.nbytes)
        range_of[j], distance[j] = len(found) - 1, start - found[-1][2]
    groups, chunks, starts, stops = np.array(found, dtype=np.int64).T
    covered = Ranges(groups=groups, chunks=chunks, starts=starts, lengths=stops - starts)
    return covered, list(np.array(range_of)[:, None]), list(np.array(distance)[:, None])
