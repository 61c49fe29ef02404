"""Slabs -> parts of them, one for each server that holds some of their chunks. Pure: no I/O.

The rows of a slab are dealt out to the owners of their chunks; each part is a slab again, asked for and received like
any other, and fills the same places of the batch. A row has all its bytes at one owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from td_datapipes.errors import SchemaError
from td_datapipes.read_spec import TRAILER_BYTES, Rows, frame_headers, segment_addresses
from td_datapipes.slabs import CoveringSlab, PeriodicSlab, Ranges, Slab, Spacing

__all__ = ["ChunkOwners", "split_slab"]

ChunkOwners = Callable[[int, Rows], Rows]
"""Who has chunks ``[n]`` of a group: a number each, ``[n]``."""
Mask = npt.NDArray[np.bool_]


def split_slab(slab: Slab, owners: ChunkOwners) -> Iterator[tuple[int, Slab]]:
    """The parts of a slab and whose each is, ascending; the slab itself where it is all one owner's.

    Args:
        slab: of a plan.
        owners: says whose a chunk is.

    Raises:
        SchemaError: a row lies with several owners; no data set that this package writes has such.
    """
    if isinstance(slab, PeriodicSlab):
        yield from _split_periodic(slab, owners)
    elif isinstance(slab, CoveringSlab):
        yield from _split_covering(slab, owners)
    else:  # of one chunk, or of chunks that lie together
        ranges = slab.ranges()
        yield int(owners(int(ranges.groups[0]), ranges.chunks[:1])[0]), slab


def _split_periodic(slab: PeriodicSlab, owners: ChunkOwners) -> Iterator[tuple[int, Slab]]:
    whose = _owner_of_rows(slab, owners)
    order = whose.argsort(kind="stable")
    numbers = whose[order]
    if numbers[0] == numbers[-1]:
        yield int(numbers[0]), slab
        return
    bounds = [0, *((numbers[1:] != numbers[:-1]).nonzero()[0] + 1).tolist(), len(numbers)]
    rows, positions, sources = _reordered(slab, order)
    filled = bounds if sources is None else sources.searchsorted(bounds).tolist()
    for (begin, stop), (low, high) in zip(pairwise(bounds), pairwise(filled), strict=True):
        of_part = None if sources is None else sources[low:high] - begin
        part = replace(slab, rows=rows[begin:stop], positions=positions[low:high], sources=of_part)
        yield int(numbers[begin]), part


def _reordered(slab: PeriodicSlab, order: Rows) -> tuple[Rows, Rows, Rows | None]:
    """Rows, positions and sources of the same slab with its rows in another order, and what they fill likewise."""
    positions, sources = slab.positions, slab.sources
    if isinstance(positions, slice):
        positions = np.arange(positions.start, positions.stop)
    if sources is None:
        return slab.rows[order], positions[order], None
    moved = np.empty_like(order)
    moved[order] = np.arange(len(order))
    sources = moved[sources]
    fills = sources.argsort(kind="stable")
    return slab.rows[order], positions[fills], sources[fills]


def _owner_of_rows(slab: PeriodicSlab, owners: ChunkOwners) -> Rows:
    spec = slab.spec
    whose: Rows | None = None
    for segment in {(segment.group, segment.piece): segment for segment in spec.segments}.values():
        found = owners(segment.group, segment_addresses(slab.rows, segment, spec.layouts[segment.group])[0])
        if whose is not None and not np.array_equal(found, whose):
            raise SchemaError("a row of this data set lies in several shards; only one a row can be read on a cluster")
        whose = found
    if whose is None:
        raise SchemaError("a slab without segments has no owner")
    return whose


def _places(slab: CoveringSlab, mask: Mask) -> tuple[slice | Rows, Rows | None]:
    """The batch rows that the chosen rows of a slab fill, and which of the chosen rows fills each."""
    positions, sources = slab.positions, slab.sources
    places = np.arange(positions.start, positions.stop) if isinstance(positions, slice) else positions
    if sources is None:
        return places[mask], None
    kept = mask[sources]
    return places[kept], (np.cumsum(mask) - 1)[sources[kept]]


def _split_covering(slab: CoveringSlab, owners: ChunkOwners) -> Iterator[tuple[int, Slab]]:
    covered = slab.covered
    whose = np.empty(len(covered.chunks), dtype=np.int64)
    for group in np.unique(covered.groups).tolist():
        of_group = covered.groups == group
        whose[of_group] = owners(group, covered.chunks[of_group])
    numbers = np.unique(whose).tolist()
    if len(numbers) == 1:
        yield numbers[0], slab
        return
    lengths = covered.lengths
    starts = np.cumsum(frame_headers(lengths) + lengths + TRAILER_BYTES) + len(slab.prefix) - lengths - TRAILER_BYTES
    offsets = [_listed(spacing, len(slab.rows)) for spacing in slab.offsets]
    range_of = [np.searchsorted(starts, offset, side="right") - 1 for offset in offsets]
    owner_of_row = whose[range_of[0]]
    for other in range_of[1:]:
        if not np.array_equal(whose[other], owner_of_row):
            raise SchemaError("a row of this data set lies in several shards; only one a row can be read on a cluster")
    for number in numbers:
        yield number, _covering_part(slab, starts, offsets, range_of, whose == number, owner_of_row == number)


def _covering_part(
    slab: CoveringSlab, starts: Rows, offsets: list[Rows], range_of: list[Rows], ranges: Mask, rows: Mask
) -> CoveringSlab:
    """The chosen ranges as a slab of its own: what lay before them in the stream is gone."""
    covered = slab.covered
    lengths = covered.lengths[ranges]
    prefix = b"*%d\r\n" % len(lengths) if slab.prefix else b""
    ends = np.cumsum(frame_headers(lengths) + lengths + TRAILER_BYTES) + len(prefix)
    moved = np.zeros_like(starts)
    moved[ranges] = ends - lengths - TRAILER_BYTES
    positions, sources = _places(slab, rows)
    return CoveringSlab(
        rows=slab.rows[rows],
        covered=Ranges(
            groups=covered.groups[ranges], chunks=covered.chunks[ranges], starts=covered.starts[ranges], lengths=lengths
        ),
        prefix=prefix,
        stream_bytes=int(ends[-1]),
        num_bytes=int(lengths.sum()),
        offsets=tuple(
            offset[rows] - starts[which[rows]] + moved[which[rows]]
            for offset, which in zip(offsets, range_of, strict=True)
        ),
        positions=positions,
        sources=sources,
    )


def _listed(offsets: Spacing | Rows, count: int) -> Rows:
    return offsets.first + offsets.step * np.arange(count) if isinstance(offsets, Spacing) else offsets
