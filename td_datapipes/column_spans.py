"""Columns that are read from the first wanted row to the last: of adjacent rows, or short ones of scattered rows. Pure.

Where each field of a row lies in a string of its own, scattered rows of a short field often cost more as ranges than
all bytes between the first and the last of them as one: 256 of 50,000 rows of 4 bytes lie in 200 KB.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from td_datapipes.read_spec import HEADER_EXTRA_BYTES, TRAILER_BYTES, ReadSpec, Rows
from td_datapipes.slabs import CoveringSlab, Ranges, Spacing

__all__ = ["run_slab", "span_slab", "spanned_segments"]

_MIN_ROWS = 32
"""Fewer cost little however they are read."""
_SHARE = 2
"""A span may cost at most one part in so many of what its ranges would: it is an estimate, and others wait for it."""


def spanned_segments(ordered: Rows, spec: ReadSpec, max_gap_bytes: int, max_bytes: int) -> tuple[int, ...]:
    """The segments that are better read as one range over all wanted rows, by number; the shortest first.

    Args:
        ordered: the wanted rows, ascending.
        spec: what of each row is read.
        max_gap_bytes: the longest gap that is cheaper to read than to skip.
        max_bytes: of all such ranges.
    """
    num_rows = len(ordered)
    if num_rows < _MIN_ROWS:
        return ()
    steps = int(ordered[-1] - ordered[0])
    found: list[int] = []
    for number in spec.columns:
        segment = spec.segments[number]
        layout = spec.layouts[segment.group]
        span = steps * layout.stride_bytes + segment.nbytes
        max_bytes -= span
        worth = num_rows * (max_gap_bytes + segment.nbytes) // _SHARE
        if span > worth or max_bytes < 0 or ordered[-1] >= layout.records_per_chunk:
            break
        found.append(number)
    return tuple(found)


def run_slab(rows: Rows, spec: ReadSpec) -> CoveringSlab:
    """One range a segment over adjacent rows, each segment of a group that has them all in one chunk.

    Args:
        rows: ascending, without a gap.
        spec: what of each row is read.
    """
    columns = _Columns.of(spec, range(len(spec.segments)), int(rows[0]), int(rows[-1]))
    offsets = map(Spacing, columns.heads, columns.strides)
    return columns.slab(rows=rows, offsets=tuple(offsets), positions=slice(0, len(rows)), sources=None)


def span_slab(
    rows: Rows,
    positions: slice | Rows,
    sources: Rows | None,
    spec: ReadSpec,
    numbers: tuple[int, ...],
) -> CoveringSlab:
    """One range a segment, over all rows.

    Args:
        rows: each once, in any order.
        positions, sources: as of `Slab`.
        spec: what of each row is read.
        numbers: of the segments.
    """
    first = int(rows.min())
    columns = _Columns.of(spec, numbers, first, int(rows.max()))
    offsets: list[Rows] = [rows] * len(spec.segments)
    for number, stride, head in zip(numbers, columns.strides, columns.heads, strict=True):
        offsets[number] = (rows - first) * stride + head
    return columns.slab(rows=rows, offsets=tuple(offsets), positions=positions, sources=sources, held=numbers)


@dataclass(frozen=True, kw_only=True)
class _Columns:
    """Ranges of several segments, each from a first row to a last one, whose replies follow each other.

    Attributes:
        ranges: one a segment.
        strides: bytes from row to row.
        spans: bytes of each.
        heads: where the first row's bytes start in the reply stream.
        stream_bytes: its length.
    """

    ranges: Ranges
    strides: list[int]
    spans: list[int]
    heads: list[int]
    stream_bytes: int

    @classmethod
    def of(cls, spec: ReadSpec, numbers: Iterable[int], first: int, last: int) -> _Columns:
        segments = [spec.segments[number] for number in numbers]
        strides = [spec.layouts[segment.group].stride_bytes for segment in segments]
        spans = [(last - first) * stride + segment.nbytes for stride, segment in zip(strides, segments, strict=True)]
        starts = [first * stride + segment.start_bytes for stride, segment in zip(strides, segments, strict=True)]
        ranges = Ranges(
            groups=np.array([segment.group for segment in segments]),
            chunks=np.zeros(len(segments), dtype=np.int64),
            starts=np.array(starts),
            lengths=np.array(spans),
        )
        heads, end = [], 0
        for span in spans:  # a handful, for which numpy would take three times as long
            heads.append(end + len(str(span)) + HEADER_EXTRA_BYTES)
            end = heads[-1] + span + TRAILER_BYTES
        return cls(ranges=ranges, strides=strides, spans=spans, heads=heads, stream_bytes=end)

    def slab(self, **rest: Any) -> CoveringSlab:
        """A slab of these ranges, and who gets what of them."""
        num_bytes = sum(self.spans)
        return CoveringSlab(
            covered=self.ranges, prefix=b"", stream_bytes=self.stream_bytes, num_bytes=num_bytes, **rest
        )
