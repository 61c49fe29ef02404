"""Slabs: ranges that are asked for together, and where each row's bytes stand in their reply stream. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np

from td_datapipes.read_spec import (
    HEADER_EXTRA_BYTES,
    TRAILER_BYTES,
    ReadSpec,
    Rows,
    Segment,
    frame_headers,
    segment_addresses,
)

__all__ = ["ColumnSlab", "CoveringSlab", "PeriodicSlab", "Ranges", "RunSlab", "Slab", "Spacing"]


class Slab(Protocol):
    """Ranges that are asked for together and land in one stretch of memory, and who gets which bytes of them.

    Attributes:
        rows: the rows it holds, each once.
        prefix: bytes of the reply before the first range's header (a Lua table's ``*n`` line, a
            transaction's answers to its commands).
        stream_bytes: length of the whole reply stream when nothing is missing.
        num_ranges: ranges it asks for.
        num_bytes: payload bytes it asks for.
        positions: the batch rows filled from it: a slice, or one index a row filled.
        sources: which row of the slab fills each of `positions`; None where they go one to one, in order.
        held: the numbers of the segments it holds of each row; None where it holds them all.
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
    @property
    def held(self) -> tuple[int, ...] | None: ...

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

    def part(self, first: int, stop: int) -> Ranges:
        """Some that are next to each other."""
        columns = (self.groups, self.chunks, self.starts, self.lengths)
        groups, chunks, starts, lengths = (column[first:stop] for column in columns)
        return Ranges(groups=groups, chunks=chunks, starts=starts, lengths=lengths)


@dataclass(frozen=True, kw_only=True)
class PeriodicSlab:
    """A range of its own for every row and segment: the replies are one period a row, in order (a `Slab`).

    Attributes:
        spec: of the segments it holds.
    """

    rows: Rows
    spec: ReadSpec
    positions: slice | Rows
    sources: Rows | None
    prefix: bytes = b""
    held: tuple[int, ...] | None = None

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
            chunks[:, j], starts[:, j] = segment_addresses(self.rows, segment, self.spec.layouts[segment.group])
        groups = np.array([segment.group for segment in self.spec.segments], dtype=np.int64)
        return Ranges(
            groups=np.tile(groups, n),
            chunks=chunks.reshape(-1),
            starts=starts.reshape(-1),
            lengths=np.tile(self.spec.wire_lengths, n),
        )

    def segment_offsets(self, segment: int) -> Spacing:
        number = segment if self.held is None else self.held.index(segment)
        return Spacing(self.spec.segment_starts[number], self.spec.period_bytes)

    @property
    def row_step_bytes(self) -> int:
        """Bytes of the reply stream from row to row."""
        return self.spec.period_bytes

    def whole_rows(self, received_bytes: int) -> int:
        """How many rows are there whole once so much of the stream is."""
        return received_bytes // self.spec.period_bytes

    def part(self, begin: int, stop: int) -> PeriodicSlab:
        """Rows ``[begin, stop)`` of a slab that goes one to one; its stream starts `begin` steps later."""
        positions = self.positions
        if isinstance(positions, slice):
            kept: slice | Rows = slice(positions.start + begin, positions.start + stop)
        else:
            kept = positions[begin:stop]
        return PeriodicSlab(rows=self.rows[begin:stop], spec=self.spec, positions=kept, sources=None, held=self.held)


@dataclass(frozen=True, kw_only=True)
class ColumnSlab:
    """One Lua call that gives each segment's bytes of all rows as one string (a `Slab`).

    For groups that have all their rows in one chunk: a reply a segment in place of one a row and segment.
    """

    rows: Rows
    spec: ReadSpec
    positions: slice | Rows
    sources: Rows | None
    held: None = None

    @property
    def prefix(self) -> bytes:
        return b"*%d\r\n" % len(self.spec.segments)

    @cached_property
    def lengths(self) -> Rows:
        """Of each segment's reply."""
        return np.array([len(self.rows) * segment.nbytes for segment in self.spec.segments], dtype=np.int64)

    @cached_property
    def _ends(self) -> Rows:
        framed: Rows = frame_headers(self.lengths) + self.lengths + TRAILER_BYTES
        return np.cumsum(framed) + len(self.prefix)

    @property
    def stream_bytes(self) -> int:
        return int(self._ends[-1])

    @property
    def num_ranges(self) -> int:
        return len(self.rows) * len(self.spec.segments)

    @property
    def num_bytes(self) -> int:
        return int(self.lengths.sum())

    def ranges(self) -> Ranges:
        """One a segment, as long as its reply; where its rows are is up to `rows`."""
        groups = np.array([segment.group for segment in self.spec.segments], dtype=np.int64)
        return Ranges(groups=groups, chunks=np.zeros_like(groups), starts=np.zeros_like(groups), lengths=self.lengths)

    def segment_offsets(self, segment: int) -> Spacing:
        start = int(self._ends[segment] - TRAILER_BYTES - self.lengths[segment])
        return Spacing(start, self.spec.segments[segment].nbytes)


@dataclass(frozen=True, kw_only=True)
class RunSlab:
    """One range over adjacent rows of one chunk: what reading in order is made of (a `Slab`).

    Attributes:
        only: the number of the one segment it holds, where each group has one; None where it holds them all.
    """

    rows: Rows
    spec: ReadSpec
    chunk: int
    start: int
    length: int
    positions: slice
    sources: None = None
    prefix: bytes = b""
    num_ranges: int = 1
    only: int | None = None

    @property
    def held(self) -> tuple[int, ...] | None:
        return None if self.only is None else (self.only,)

    @property
    def segments(self) -> Sequence[Segment]:
        """What it holds of each row."""
        return self.spec.segments if self.only is None else (self.spec.segments[self.only],)

    @property
    def group(self) -> int:
        """The group all its bytes are of."""
        return self.segments[0].group

    @property
    def header_bytes(self) -> int:
        """Bytes before the range's own."""
        return len(str(self.length)) + HEADER_EXTRA_BYTES

    @property
    def stream_bytes(self) -> int:
        return self.header_bytes + self.length + TRAILER_BYTES

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
        first = self.header_bytes + self.spec.segments[segment].start_bytes - self.segments[0].start_bytes
        return Spacing(first, self.row_step_bytes)

    @property
    def row_step_bytes(self) -> int:
        """Bytes of the reply stream from row to row."""
        return self.spec.layouts[self.group].stride_bytes

    def whole_rows(self, received_bytes: int) -> int:
        """How many rows are there whole once so much of the stream is."""
        row_bytes = self.segments[-1].stop_bytes - self.segments[0].start_bytes
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
        offsets: for each segment, where it starts in the reply stream: evenly spaced, or one offset a row; of one that
            it does not hold, anything.
    """

    rows: Rows
    covered: Ranges
    prefix: bytes
    stream_bytes: int
    num_bytes: int
    offsets: tuple[Spacing | Rows, ...]
    positions: slice | Rows
    sources: Rows | None
    held: tuple[int, ...] | None = None

    @property
    def num_ranges(self) -> int:
        return len(self.covered.lengths)

    def ranges(self) -> Ranges:
        return self.covered

    def segment_offsets(self, segment: int) -> Spacing | Rows:
        return self.offsets[segment]
