"""Slabs: ranges that are asked for together, and where each row's bytes stand in their reply stream. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from td_datapipes.read_spec import HEADER_EXTRA_BYTES, TRAILER_BYTES, ReadSpec, Rows, segment_addresses

__all__ = ["CoveringSlab", "PeriodicSlab", "Ranges", "RunSlab", "Slab", "Spacing"]


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
            chunks[:, j], starts[:, j] = segment_addresses(self.rows, segment, self.spec.layouts[segment.group])
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
        if not isinstance(self.positions, slice):
            return replace(self, rows=self.rows[begin:stop], positions=self.positions[begin:stop])
        first = self.positions.start
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
