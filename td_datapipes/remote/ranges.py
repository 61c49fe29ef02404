"""Rows to write -> ranges of chunks and the bytes that go there. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from td_datapipes.layouts.records import row_bytes_view
from td_datapipes.manifest import ChunkLayout
from td_datapipes.read_spec import Rows
from td_datapipes.schema import Field, Group, Key, Schema
from td_datapipes.wire.range_parts import ChunkPart, RangePart, RangeWrite, RowPart

__all__ = ["element_writes", "row_writes", "slice_rows"]

_MAX_COUNTED_CHUNKS = 4096
"""Counting the entries of each is faster than sorting a few hundred of them."""
_Column = tuple[int, npt.NDArray[np.void]]


@dataclass(frozen=True, kw_only=True)
class _Places:
    """Where the records of some rows begin.

    Attributes:
        chunks: each once.
        which: of the chunks each row is in, ``[rows]``.
        starts: first byte of each record in its chunk, ``[rows]``.
        last: first byte of the last record in each of the chunks.
    """

    chunks: Rows
    which: Rows
    starts: Rows
    last: Rows


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Ranges of one group: where each starts in its record, and their bytes."""

    group: int
    rows: Rows
    starts: Rows
    lengths: Rows
    data: npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class _RowPart:
    """One range a row, at the same place of its record: what stands where in it."""

    group: int
    rows: Rows
    start: int
    width: int
    columns: Sequence[_Column]


@dataclass(frozen=True, kw_only=True)
class _WholePart:
    """All rows of a group."""

    group: int
    num_rows: int
    columns: Sequence[_Column]
    spare_bytes: int


def slice_rows(num_rows: int, row_bytes: int, max_bytes: int, max_ranges: int) -> Iterator[slice]:
    """Cut rows so that each part has at most so many bytes and ranges; one row at least."""
    step = max(1, min(max_bytes // max(row_bytes, 1), max_ranges))
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def row_writes(
    schema: Schema,
    layouts: Sequence[ChunkLayout],
    chunk_key: Callable[[int, int], bytes],
    values: Mapping[Key, torch.Tensor],
    rows: Rows | range,
    whole_spare_bytes: int | None = None,
) -> RangeWrite:
    """Write whole fields of rows: the fields of a group that lie side by side as one range a row, adjacent rows as one.

    Args:
        schema, layouts, chunk_key: of the data set.
        values: for each field to write ``[n, *shape]``, of its dtype.
        rows: ``[n]``; of a row that comes twice the last value stays. A range is known to be adjacent rows.
        whole_spare_bytes: given where `rows` is the range of all rows: bytes of a chunk behind its records.
    """
    parts: list[_Part | _RowPart | _WholePart] = []
    adjacent = isinstance(rows, range) or _mostly_adjacent(rows)
    for number, group in enumerate(schema.groups if len(rows) else ()):
        wanted = [field for field in group.fields if field.key in values and field.nbytes]
        for run in _runs(group, wanted):
            parts.append(
                _run_part(number, group, run, values, rows, layouts[number], whole_spare_bytes, adjacent=adjacent)
            )
    return _assemble(parts, layouts, chunk_key)


def _runs(group: Group, wanted: Sequence[Field]) -> Iterator[list[Field]]:
    """Fields with nothing but padding between them."""
    if not wanted:
        return
    ordered = sorted((field for field in group.fields if field.nbytes), key=lambda field: field.offset_bytes)
    run: list[Field] = []
    for field in ordered:
        if field in wanted:
            run.append(field)
        elif run:
            yield run
            run = []
    if run:
        yield run


def _run_part(
    number: int,
    group: Group,
    run: Sequence[Field],
    values: Mapping[Key, torch.Tensor],
    rows: Rows | range,
    layout: ChunkLayout,
    whole_spare_bytes: int | None,
    *,
    adjacent: bool,
) -> _Part | _RowPart | _WholePart:
    low = run[0].offset_bytes
    high = run[-1].offset_bytes + run[-1].nbytes
    complete = low == 0 and len(run) == sum(field.nbytes > 0 for field in group.fields)
    by_row = isinstance(rows, np.ndarray) and not (complete and adjacent)
    if layout.pieces == 1 and (by_row or (complete and whole_spare_bytes is not None)):
        columns = [(field.offset_bytes - low, _items(values[field.key], field.nbytes)) for field in run]
        if isinstance(rows, range):
            return _WholePart(group=number, num_rows=len(rows), columns=columns, spare_bytes=whole_spare_bytes or 0)
        return _RowPart(group=number, rows=rows, start=low, width=high - low, columns=columns)
    if complete:
        high = group.stride_bytes  # so that adjacent rows are one range
    width, n = high - low, len(rows)
    if len(run) == 1 and run[0].nbytes == width:
        records = _bytes(values[run[0].key])
    else:
        records = np.zeros(n * width, dtype=np.uint8)
        for field in run:
            source = row_bytes_view(_plain(values[field.key]), field.nbytes)
            np.ndarray((n,), source.dtype, records, field.offset_bytes - low, (width,))[:] = source
    if isinstance(rows, range):
        # One range a chunk, found without looking at every row.
        step = layout.records_per_chunk if complete else 1
        heads = np.array([*rows[:1], *range((rows.start // step + 1) * step, rows.stop, step)], dtype=np.int64)
        counts = np.diff(np.append(heads, rows.stop))
        return _Part(group=number, rows=heads, starts=np.full(len(heads), low), lengths=counts * width, data=records)
    return _Part(group=number, rows=rows, starts=np.full(n, low), lengths=np.full(n, width), data=records)


def element_writes(
    schema: Schema,
    layouts: Sequence[ChunkLayout],
    chunk_key: Callable[[int, int], bytes],
    values: Mapping[Key, tuple[torch.Tensor, torch.Tensor]],
    rows: Rows,
) -> RangeWrite:
    """Write some elements of rows.

    Args:
        schema, layouts, chunk_key: of the data set.
        values: for each field which elements of ``[n, *shape]``, counted along it, and their new values.
        rows: ``[n]``.
    """
    parts = []
    for number, group in enumerate(schema.groups):
        for field in group.fields:
            if field.key in values and field.nbytes:
                parts.append(_element_part(number, field, *values[field.key], rows))
    return _assemble(parts, layouts, chunk_key)


def _element_part(number: int, field: Field, elements: torch.Tensor, values: torch.Tensor, rows: Rows) -> _Part:
    """Neighbouring elements of a row become one range."""
    size = field.dtype.itemsize
    per_row = field.nbytes // size
    positions = elements.reshape(-1).numpy()
    row, within = np.divmod(positions, per_row)
    fresh = np.ones(len(positions), dtype=bool)
    fresh[1:] = (positions[1:] != positions[:-1] + 1) | (row[1:] != row[:-1])
    heads = np.nonzero(fresh)[0]
    counts = np.diff(np.append(heads, len(positions)))
    return _Part(
        group=number,
        rows=rows[row[heads]],
        starts=field.offset_bytes + within[heads] * size,
        lengths=counts * size,
        data=_bytes(values.reshape(-1)),
    )


def _items(tensor: torch.Tensor, nbytes: int) -> npt.NDArray[np.void]:
    """One opaque item a row, where it lies unless its memory is not what it stands for."""
    try:
        array = tensor.numpy() if tensor.is_contiguous() else None
    except (TypeError, RuntimeError):  # on a device, needs gradients, conjugated, or of a dtype numpy does not have
        array = None
    if array is None:
        return row_bytes_view(_plain(tensor), nbytes)
    return np.ndarray((len(array),), dtype=f"V{nbytes}", buffer=array)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    plain = _plain(tensor)
    if not plain.numel():
        return np.empty(0, dtype=np.uint8)
    flat: npt.NDArray[np.uint8] = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy()
    return flat


def _assemble(
    parts: Iterable[_Part | _RowPart | _WholePart],
    layouts: Sequence[ChunkLayout],
    chunk_key: Callable[[int, int], bytes],
) -> RangeWrite:
    numbers: dict[bytes, int] = {}
    needed: list[int] = []
    made: list[RangePart | RowPart | ChunkPart] = []
    located: dict[ChunkLayout, _Places] = {}
    for part in parts:
        layout = layouts[part.group]
        if isinstance(part, _RowPart):
            places = _located(part, layout, located)
            starts = places.starts + part.start if part.start else places.starts
            distinct, which, longest = places.chunks, places.which, places.last + (part.start + part.width)
        elif isinstance(part, _WholePart):
            distinct = which = np.arange(layout.num_chunks(part.num_rows))
            counts = np.minimum(layout.records_per_chunk, part.num_rows - distinct * layout.records_per_chunk)
            longest = counts * layout.stride_bytes
        else:
            chunks, starts, lengths = _addresses(part, layout)
            distinct, which = _distinct(chunks)
            longest = _longest(starts + lengths, which, len(distinct))
        mine = np.empty(len(distinct), dtype=np.int64)
        for position, (chunk, need) in enumerate(zip(distinct.tolist(), longest.tolist(), strict=True)):
            # Several parts may be of one group, hence of the same chunks.
            number = mine[position] = numbers.setdefault(chunk_key(part.group, chunk), len(needed))
            if number == len(needed):
                needed.append(need)
            needed[number] = max(needed[number], need)
        if isinstance(part, _RowPart):
            made.append(RowPart(keys=mine[which], starts=starts, width=part.width, columns=part.columns))
        elif isinstance(part, _WholePart):
            stride, spare = layout.stride_bytes, part.spare_bytes
            made.append(
                ChunkPart(keys=mine[which], counts=counts, stride_bytes=stride, columns=part.columns, spare_bytes=spare)
            )
        else:
            made.append(RangePart(keys=mine[which], starts=starts, lengths=lengths, data=part.data))
    return RangeWrite(keys=tuple(numbers), needed=tuple(needed), parts=tuple(made))


def _located(part: _RowPart, layout: ChunkLayout, known: dict[ChunkLayout, _Places]) -> _Places:
    """Where its records are; all parts have the same rows, so groups that are cut alike share them."""
    found = known.get(layout)
    if found is not None:
        return found
    rows = part.rows
    if int(rows.max()) < layout.records_per_chunk:
        zeros, starts = np.zeros(len(rows), dtype=np.int64), rows * layout.stride_bytes
        found = _Places(chunks=zeros[:1], which=zeros, starts=starts, last=starts.max(keepdims=True))
    else:
        chunks, within = np.divmod(rows, layout.records_per_chunk)
        starts = within * layout.stride_bytes
        distinct, which = _distinct(chunks)
        found = _Places(chunks=distinct, which=which, starts=starts, last=_longest(starts, which, len(distinct)))
    known[layout] = found
    return found


def _longest(stops: Rows, which: Rows, count: int) -> Rows:
    """The greatest of each of `count` kinds."""
    found = np.zeros(count, dtype=np.int64)
    np.maximum.at(found, which, stops)
    return found


def _mostly_adjacent(rows: Rows) -> bool:
    """Whether many of them follow the one before: one range for several saves more than it costs to find them."""
    return 4 * int(np.count_nonzero(rows[1:] == rows[:-1] + 1)) >= len(rows)


def _distinct(chunks: Rows) -> tuple[Rows, Rows]:
    """The chunks, each once, and which of them each entry is."""
    highest = int(chunks.max()) if len(chunks) else 0
    if highest > _MAX_COUNTED_CHUNKS:
        return np.unique(chunks, return_inverse=True)
    found = np.flatnonzero(np.bincount(chunks, minlength=1))
    if len(found) == 1:
        return found, np.zeros(len(chunks), dtype=np.int64)
    number_of = np.empty(highest + 1, dtype=np.int64)
    number_of[found] = np.arange(len(found))
    return found, number_of[chunks]


def _addresses(part: _Part, layout: ChunkLayout) -> tuple[Rows, Rows, Rows]:
    """Chunk, first byte and length of each range, in the order of their bytes."""
    if layout.pieces > 1:
        return _pieces(part, layout)
    chunks, within = np.divmod(part.rows, layout.records_per_chunk)
    starts = within * layout.stride_bytes + part.starts
    if not len(starts):
        return chunks, starts, part.lengths
    # Ranges that continue each other are one.
    fresh = np.ones(len(starts), dtype=bool)
    fresh[1:] = (chunks[1:] != chunks[:-1]) | (starts[1:] != starts[:-1] + part.lengths[:-1])
    heads = np.nonzero(fresh)[0]
    return chunks[heads], starts[heads], np.add.reduceat(part.lengths, heads)


def _pieces(part: _Part, layout: ChunkLayout) -> tuple[Rows, Rows, Rows]:
    """Ranges of records that are longer than a chunk, cut where a piece ends."""
    found: list[tuple[int, int, int]] = []
    for row, start, length in zip(part.rows.tolist(), part.starts.tolist(), part.lengths.tolist(), strict=True):
        end = start + length
        while start < end:
            piece = start // layout.piece_bytes
            stop = min(end, (piece + 1) * layout.piece_bytes)
            found.append((row * layout.pieces + piece, start - piece * layout.piece_bytes, stop - start))
            start = stop
    array = np.array(found, dtype=np.int64).reshape(-1, 3)
    return array[:, 0], array[:, 1], array[:, 2]
