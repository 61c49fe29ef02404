"""What of each row is read, and how long it is on the wire. Pure.

A `ReadSpec` says what a row of the wanted fields is: *segments*, the byte intervals of its records that are read, and
*copies*, which bytes of a segment are which bytes of an output field. RESP2 frames a bulk reply of s bytes as
``$s\\r\\n`` + s bytes + ``\\r\\n``, so the length of every reply is known before it is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from td_datapipes.manifest import ChunkLayout
from td_datapipes.schema import ALIGNMENT_BYTES, Key

__all__ = [
    "HEADER_EXTRA_BYTES",
    "TRAILER_BYTES",
    "Copy",
    "Output",
    "ReadSpec",
    "Rows",
    "Segment",
    "frame_headers",
    "segment_addresses",
    "wire_length",
]

Rows = npt.NDArray[np.int64]

HEADER_EXTRA_BYTES = 3
"""Of a bulk reply's header, beside the digits: ``$``, CR, LF."""
TRAILER_BYTES = 2
"""Behind a bulk reply's bytes: CR, LF."""


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
        return int((frame_headers(self.wire_lengths) + self.wire_lengths + TRAILER_BYTES).sum())

    @cached_property
    def wire_bytes(self) -> int:
        """Bytes asked for a row when every segment is read on its own."""
        return int(self.wire_lengths.sum())

    @cached_property
    def segment_starts(self) -> list[int]:
        """Where each segment's bytes start within that period."""
        headers = frame_headers(self.wire_lengths)
        ends = np.cumsum(headers + self.wire_lengths + TRAILER_BYTES)
        return [int(start) for start in np.concatenate([[0], ends[:-1]]) + headers]

    def has_columns(self, last_row: int) -> bool:
        """Whether each of several segments is in a group of its own that has all rows up to that one in one chunk."""
        return last_row < self._column_rows

    @cached_property
    def _column_rows(self) -> int:
        """How many rows the first chunks have of segments that are columns; 0 where they are not."""
        layouts = [self.layouts[segment.group] for segment in self.segments]
        alone = len({segment.group for segment in self.segments}) == len(self.segments) > 1
        uncut = all(layout.pieces == 1 for layout in layouts)
        return min(layout.records_per_chunk for layout in layouts) if alone and uncut else 0

    @cached_property
    def columns(self) -> tuple[int, ...]:
        """Segments that are alone in their group, whose records are not cut: their numbers, the shortest rows first."""
        groups = [segment.group for segment in self.segments]
        alone = [number for number, group in enumerate(groups) if groups.count(group) == 1]
        strides = {number: self.layouts[groups[number]].stride_bytes for number in alone}
        return tuple(sorted((n for n in alone if self.layouts[groups[n]].pieces == 1), key=strides.__getitem__))

    def without(self, numbers: tuple[int, ...]) -> tuple[tuple[int, ...], ReadSpec]:
        """The other segments: their numbers, and a spec of just these, the same each time. It copies nothing."""
        found = self._parts.get(numbers)
        if found is None:
            kept = tuple(number for number in range(len(self.segments)) if number not in numbers)
            segments = tuple(self.segments[number] for number in kept)
            found = self._parts[numbers] = kept, replace(self, segments=segments, copies=())
        return found

    @cached_property
    def _parts(self) -> dict[tuple[int, ...], tuple[tuple[int, ...], ReadSpec]]:
        return {}

    def closed_singly(self, max_gap_bytes: int) -> bool:
        """The same group by group: each has one segment, and next to nothing between the rows' parts of it."""
        groups = [segment.group for segment in self.segments]
        return len(set(groups)) == len(groups) and all(
            self.layouts[segment.group].pieces == 1
            and self.layouts[segment.group].stride_bytes - segment.nbytes <= max_gap_bytes
            for segment in self.segments
        )

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


def frame_headers(lengths: Rows) -> Rows:
    """Bytes of the ``$<length>\\r\\n`` header of each bulk reply."""
    digits = np.ones_like(lengths)
    bound, top = 10, int(lengths.max(initial=0))
    while bound <= top:
        digits += lengths >= bound
        bound *= 10
    return digits + HEADER_EXTRA_BYTES


def wire_length(nbytes: int, spare_bytes: int) -> int:
    """The shortest length from `nbytes` on whose framed reply is a multiple of 16; `nbytes` where spare is too little.

    Replies that follow each other then all start at the same alignment, and their records can be viewed in place.
    The step from 3 to 4 digits leaves a multiple of 16 out, so up to 30 bytes are needed (985 becomes 1015), else 15.
    """
    for length in range(nbytes, nbytes + spare_bytes + 1):
        if (len(str(length)) + HEADER_EXTRA_BYTES + length + TRAILER_BYTES) % ALIGNMENT_BYTES == 0:
            return length
    return nbytes


def segment_addresses(rows: Rows, segment: Segment, layout: ChunkLayout) -> tuple[Rows, Rows]:
    """Chunk of each row's segment and where it starts there."""
    chunk, within = np.divmod(rows, layout.records_per_chunk)
    return chunk * layout.pieces + segment.piece, within * layout.stride_bytes + segment.start_bytes
