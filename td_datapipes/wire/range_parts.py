"""Ranges to write and where their bytes lie, and the commands for them. Pure: nothing is sent here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from td_datapipes.read_spec import Rows
from td_datapipes.wire.range_text import MAX_END_BYTES, Items, RowText, set_commands

__all__ = ["ChunkPart", "RangePart", "RangeWrite", "RowPart"]

MIN_TEXT_RANGES = 512
"""From so many on, numpy's calls cost less than formatting each range."""
MIN_TEXT_ROWS = 48
"""The same for rows, whose numbers and bytes need no arrays of their own."""
MAX_TEXT_RANGE_BYTES = 1024
"""Longer ranges are better sent from where they are than copied."""
MAX_TEXT_ROW_BYTES = 4096
"""The same for rows, which would be copied only once."""
MAX_TEXT_LENGTHS = 8
"""Numpy is called for each length there is."""
_PART_BYTES = 256 * 1024
_TEXT_BYTES = 128 * 1024
"""Of commands for rows: made while the server works on those before."""
_SETRANGE = b"*4\r\n$8\r\nSETRANGE\r\n"
_PACKED = np.dtype("<u4, <u4, <u4")


@dataclass(frozen=True, kw_only=True)
class RangePart:
    """Ranges of any lengths.

    Attributes:
        keys: number of the key of each, ``[ranges]``.
        starts, lengths: in bytes, ``[ranges]``.
        data: their bytes, one behind the other.
    """

    keys: Rows
    starts: Rows
    lengths: Rows
    data: npt.NDArray[np.uint8]

    @property
    def num_bytes(self) -> int:
        """All in all."""
        return len(self.data)

    def commands(self, heads: Sequence[bytes]) -> Iterator[bytes | memoryview]:
        """One SETRANGE a range; `heads` is what those for each key begin with."""
        if self._fits_text():
            yield from self._texts(heads)
            return
        data = self.data.data
        parts: list[bytes | memoryview] = []
        at = held = 0
        for key, start, length in zip(self.keys.tolist(), self.starts.tolist(), self.lengths.tolist(), strict=True):
            offset = b"%d" % start
            parts.append(b"%b$%d\r\n%b\r\n$%d\r\n" % (heads[key], len(offset), offset, length))
            parts += [data[at : at + length], b"\r\n"]
            at, held = at + length, held + length
            if length >= _PART_BYTES:
                yield b"".join(parts[:-2])
                yield from parts[-2:]
            elif held >= _PART_BYTES:
                yield b"".join(parts)
            else:
                continue
            parts, held = [], 0
        yield b"".join(parts)

    def _fits_text(self) -> bool:
        """Whether `set_commands` writes them faster than one by one."""
        if len(self.keys) < MIN_TEXT_RANGES:
            return False
        longest = int(self.lengths.max())
        if longest > MAX_TEXT_RANGE_BYTES or int(self.starts.max()) >= MAX_END_BYTES:
            return False
        return longest == int(self.lengths.min()) or len(np.unique(self.lengths)) <= MAX_TEXT_LENGTHS

    def _texts(self, heads: Sequence[bytes]) -> Iterator[memoryview]:
        """Some at a time: what is written anew each time should stay in the processor's cache."""
        ends = np.cumsum(self.lengths)
        cuts = [*(np.nonzero(np.diff(ends // _PART_BYTES))[0] + 1).tolist(), len(ends)]
        first = begin = 0
        for cut in cuts:
            end, mine = int(ends[cut - 1]), slice(first, cut)
            used, head_of = np.unique(self.keys[mine], return_inverse=True)
            named = [heads[key] for key in used.tolist()]
            yield set_commands(named, head_of, self.starts[mine], self.lengths[mine], self.data[begin:end].data).data
            first, begin = cut, end


@dataclass(frozen=True, kw_only=True)
class RowPart:
    """Ranges of one length, whose bytes are gathered from where they lie.

    Attributes:
        keys: number of the key of each, ``[ranges]``.
        starts: in bytes, ``[ranges]``.
        width: bytes of each.
        columns: what stands in each range and where: ``(first byte, one item a range)``; between them there are zeros.
    """

    keys: Rows
    starts: Rows
    width: int
    columns: Sequence[tuple[int, Items]]

    @property
    def num_bytes(self) -> int:
        """All in all."""
        return len(self.keys) * self.width

    @property
    def lengths(self) -> Rows:
        """Of each range."""
        return np.full(len(self.keys), self.width)

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """The ranges' bytes, one behind the other."""
        records = np.zeros(len(self.keys) * self.width, dtype=np.uint8)
        for start, items in self.columns:
            np.ndarray((len(items),), items.dtype, records, start, (self.width,))[:] = items
        return records

    def commands(
        self, heads: Sequence[bytes], known: dict[tuple[int, int], RowText] | None = None
    ) -> Iterator[bytes | memoryview]:
        """As of `RangePart`.

        Args:
            heads: what the commands for each key begin with.
            known: texts of other parts, by the identity of their starts and their width; this one's is added.
        """
        if not len(self.keys):
            return
        long = self.width > MAX_TEXT_ROW_BYTES and len(self.columns) == 1
        if long or len(self.keys) < MIN_TEXT_ROWS or int(self.starts.max()) >= MAX_END_BYTES:
            yield from self._singly(heads)
            return
        known, same = {} if known is None else known, (id(self.starts), self.width)
        text = RowText(heads, self.keys, self.starts, self.width, self.columns, known.get(same))
        known[same] = text
        step = max(MIN_TEXT_ROWS, _TEXT_BYTES // (self.width + len(heads[0]) + 24))
        for first in range(0, len(self.keys), step):
            yield text.commands(first, min(first + step, len(self.keys))).data

    def _singly(self, heads: Sequence[bytes]) -> Iterator[bytes | memoryview]:
        only = len(self.columns) == 1 and self.columns[0][1].dtype.itemsize == self.width
        data = (self.columns[0][1].view(np.uint8) if only else self.data).data
        before, width = b"", self.width
        middle = b"\r\n$%d\r\n" % width
        for number, (key, start) in enumerate(zip(self.keys.tolist(), self.starts.tolist(), strict=True)):
            offset = b"%d" % start
            yield b"%b%b$%d\r\n%b%b" % (before, heads[key], len(offset), offset, middle)
            yield data[number * width : (number + 1) * width]
            before = b"\r\n"
        yield before


@dataclass(frozen=True, kw_only=True)
class ChunkPart:
    """Chunks that are written from their first byte to their last: set anew, which saves the server a copy.

    Attributes:
        keys: number of the key of each, ``[chunks]``.
        counts: rows of each, ``[chunks]``.
        stride_bytes: from row to row.
        columns: as of `RowPart`, for the rows of all chunks.
        spare_bytes: zeros at the end of each.
    """

    keys: Rows
    counts: Rows
    stride_bytes: int
    columns: Sequence[tuple[int, Items]]
    spare_bytes: int

    @property
    def starts(self) -> Rows:
        """Of each range."""
        return np.zeros_like(self.counts)

    @property
    def lengths(self) -> Rows:
        """Of each range, without the spare bytes."""
        return self.counts * self.stride_bytes

    @property
    def num_bytes(self) -> int:
        """All in all."""
        return int(self.counts.sum()) * self.stride_bytes

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """The ranges' bytes, one behind the other."""
        return self._records(0, int(self.counts.sum()))

    def commands(self, heads: Sequence[bytes]) -> Iterator[bytes | memoryview]:
        """One SET a chunk; its records are put together some at a time, while the server receives those before.

        Records that need not be put together are one part: the fewer, the less often the server is woken.
        """
        step = int(self.counts.max()) if self._in_place else max(1, _PART_BYTES // self.stride_bytes)
        begin = 0
        for key, count in zip(self.keys.tolist(), self.counts.tolist(), strict=True):
            nbytes = count * self.stride_bytes + self.spare_bytes
            yield b"*3\r\n$3\r\nSET\r\n%b$%d\r\n" % (heads[key][len(_SETRANGE) :], nbytes)
            for first in range(begin, begin + count, step):
                yield self._records(first, min(first + step, begin + count)).data
            yield bytes(self.spare_bytes) + b"\r\n"
            begin += count

    @property
    def _in_place(self) -> bool:
        """Whether the records lie in memory as they will in the chunk."""
        return len(self.columns) == 1 and self.columns[0][1].dtype.itemsize == self.stride_bytes

    def _records(self, first: int, stop: int) -> npt.NDArray[np.uint8]:
        if self._in_place:
            return self.columns[0][1][first:stop].view(np.uint8)
        records = np.zeros((stop - first) * self.stride_bytes, dtype=np.uint8)
        for start, items in self.columns:
            mine = items[first:stop]
            np.ndarray((len(mine),), items.dtype, records, start, (self.stride_bytes,))[:] = mine
        return records


@dataclass(frozen=True, kw_only=True)
class RangeWrite:
    """Ranges of chunks and their bytes, in order.

    Attributes:
        keys: of the chunks, each once.
        needed: how long each chunk has to be, for all its ranges to be within it.
        parts: the ranges.
    """

    keys: tuple[bytes, ...]
    needed: tuple[int, ...]
    parts: tuple[RangePart | RowPart | ChunkPart, ...]

    @property
    def num_ranges(self) -> int:
        """How many ranges."""
        return sum(len(part.keys) for part in self.parts)

    @property
    def num_bytes(self) -> int:
        """All in all."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def packed(self) -> bytes:
        """Number of the key, first byte and length of each range, three little-endian u32."""
        found = []
        for part in self.parts:
            entries = np.empty(len(part.keys), dtype=_PACKED)
            entries["f0"], entries["f1"], entries["f2"] = part.keys, part.starts, part.lengths
            found.append(entries.tobytes())
        return b"".join(found)

    @cached_property
    def data(self) -> memoryview:
        """The ranges' bytes, one behind the other."""
        found = [part.data for part in self.parts]
        whole = found[0] if len(found) == 1 else np.concatenate([*found, np.empty(0, dtype=np.uint8)])
        return whole.data

    def commands(self) -> Iterator[bytes | memoryview]:
        """One command a range."""
        heads = [b"%b$%d\r\n%b\r\n" % (_SETRANGE, len(key), key) for key in self.keys]
        known: dict[tuple[int, int], RowText] = {}
        for part in self.parts:
            if isinstance(part, RowPart):
                yield from part.commands(heads, known)
            elif len(part.keys):
                yield from part.commands(heads)
