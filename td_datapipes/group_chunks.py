"""Records into chunks: packed stretch by stretch, with the checksum of each chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from td_datapipes.blocks import RowBlock
from td_datapipes.checksums import crc32
from td_datapipes.manifest import SPARE_BYTES, Manifest

__all__ = ["IN_FLIGHT", "PACKED_BYTES", "GroupChunks", "PutChunk"]

_SPARE = bytes(SPARE_BYTES)
PACKED_BYTES = 1 << 20
"""Of records, packed at a time: they are in the processor's cache when their checksum is taken, and the server, which
takes a chunk in while the next one is packed, has not taken in all that the socket holds before it gets more."""
IN_FLIGHT = 2
"""Chunks sent and not yet confirmed."""


class PutChunk(Protocol):
    """Sends the parts of a chunk, from `start_bytes` on. At most `IN_FLIGHT` of them may be unconfirmed."""

    def __call__(self, group: int, chunk: int, start_bytes: int, parts: Sequence[memoryview | bytes], /) -> None: ...


class GroupChunks:
    """Collects one group's records and sends a chunk whenever one is full.

    Args:
        manifest: what is written.
        number: the group's.
        put: sends a chunk.
        first_row: the row that comes next; the chunk it falls in may have earlier ones.
        begun_checksum: of those.
        meanwhile: called again and again while records are packed.

    Attributes:
        rows: the row that comes next.
        first_chunk: the first chunk it sends.
        checksums: of the chunks sent, in order.
    """

    def __init__(
        self,
        manifest: Manifest,
        number: int,
        put: PutChunk,
        first_row: int = 0,
        begun_checksum: int = 0,
        *,
        meanwhile: Callable[[], object] | None = None,
    ) -> None:
        self._number, self._put = number, put
        self._group = manifest.schema.groups[number]
        self._layout = manifest.layouts[number]
        self.rows = first_row
        # One buffer more than may be in flight: a buffer is written to again only when its chunk is confirmed.
        shape = (IN_FLIGHT + 1, self._layout.records_per_chunk, self._group.stride_bytes)
        self._buffers: npt.NDArray[np.uint8] | None = None
        self._shape = shape
        self._turn = 0
        # Records of the chunk being filled: those it had before, and those collected since.
        self._present = first_row % self._layout.records_per_chunk
        self._filled = 0
        self.first_chunk = first_row // self._layout.records_per_chunk * self._layout.pieces
        self.checksums: list[int] = []
        self._begun_checksum = begun_checksum
        # Of the records of the chunk being filled; one that is several chunks long has a checksum for each of those.
        self._checksum = begun_checksum if self._present else 0
        self._meanwhile = meanwhile
        self._step = max(PACKED_BYTES // max(self._group.stride_bytes, 1), 1)

    @property
    def last_checksum(self) -> int:
        """Of the last chunk there is; 0 where there is none."""
        return self.checksums[-1] if self.checksums else self._begun_checksum

    def add(self, block: RowBlock) -> None:
        """Pack some rows."""
        if self._group.stride_bytes == 0:
            return
        if self._buffers is None:
            self._buffers = np.zeros(self._shape, dtype=np.uint8)
        rows, start = block.rows, 0
        while start < rows:
            take = min(rows - start, self._step, self._layout.records_per_chunk - self._present - self._filled)
            out = self._buffers[self._turn, self._filled : self._filled + take]
            block.pack(self._group, start, start + take, out)
            if self._layout.pieces == 1:
                self._checksum = crc32(out.reshape(-1).data, self._checksum)
            if self._meanwhile is not None:
                self._meanwhile()
            self._filled += take
            self.rows += take
            start += take
            if self._present + self._filled == self._layout.records_per_chunk:
                self.flush()

    def flush(self) -> None:
        """Send the chunk being filled, if it has new rows."""
        if self._filled == 0 or self._buffers is None:
            return
        records = self._buffers[self._turn, : self._filled].reshape(-1).data
        first = (self.rows - self._filled) // self._layout.records_per_chunk * self._layout.pieces
        step = self._layout.piece_bytes if self._layout.pieces > 1 else len(records)
        for piece in range(self._layout.pieces):
            part = records[piece * step : (piece + 1) * step]
            self.checksums.append(self._checksum if self._layout.pieces == 1 else crc32(part))
            self._put(self._number, first + piece, self._present * self._group.stride_bytes, [part, _SPARE])
        self._turn = (self._turn + 1) % len(self._buffers)
        self._present = (self._present + self._filled) % self._layout.records_per_chunk
        self._filled = 0
        if not self._present:
            self._checksum = 0
