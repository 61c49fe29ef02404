"""Bytes in, replies out (sans-I/O): check a stream whose shape is known, or parse one reply by reply.

`StreamCheck` is the fast path. The plan knows the length of every reply, so the whole reply stream is received into
one buffer and only the bytes between the values are looked at, all at once, as they arrive. `ReplyParser` is the slow
path, taken on the first byte that is not as expected: it reads RESP2 replies one by one and says what came instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from td_datapipes.errors import ProtocolError
from td_datapipes.plan import Rows, Slab, frame_headers

__all__ = ["NEED_DATA", "BulkReply", "ErrorReply", "NeedData", "OtherReply", "Reply", "ReplyParser", "StreamCheck"]

MAX_LINE_BYTES = 64 * 1024
"""A reply line (an error's text, a length) longer than this is no reply of a server we know."""


@lru_cache(maxsize=4096)
def _token(length: int) -> bytes:
    """What stands between the value before and a value of `length` bytes."""
    return b"\r\n$%d\r\n" % length


class StreamCheck:
    """Compares the framing bytes of a slab's reply stream with what they must be.

    Args:
        slab: the ranges asked for.
    """

    def __init__(self, slab: Slab) -> None:
        headers = frame_headers(slab.lengths)
        # What stands before each value, the CRLF of the value before it included; last, the final CRLF.
        widths = headers + 2
        widths[0] += len(slab.prefix) - 2
        starts = slab.ends - slab.lengths - 2 - headers - 2
        starts[0] = 0
        if slab.periodic:
            width = slab.offsets.shape[1]
            tokens = b"".join(map(_token, slab.lengths[:width].tolist())) * len(slab.rows)
        else:
            tokens = b"".join(map(_token, slab.lengths.tolist()))
        text = slab.prefix + tokens[2:] + b"\r\n"
        total = int(widths.sum())
        firsts = np.cumsum(widths) - widths
        positions = np.arange(total, dtype=np.int64) + np.repeat(starts - firsts, widths)
        self._positions: Rows = np.append(positions, [slab.stream_bytes - 2, slab.stream_bytes - 1])
        self._expected: npt.NDArray[np.uint8] = np.frombuffer(text, dtype=np.uint8)
        self._checked = 0

    def matches(self, stream: npt.NDArray[np.uint8], received: int) -> bool:
        """Whether the first `received` bytes are framed as expected. Bytes that passed are not looked at again."""
        upto = int(np.searchsorted(self._positions, received))
        part = slice(self._checked, upto)
        if not np.array_equal(stream[self._positions[part]], self._expected[part]):
            return False
        self._checked = upto
        return True


@dataclass(frozen=True)
class BulkReply:
    """A string; None for the null reply."""

    data: bytes | None


@dataclass(frozen=True)
class ErrorReply:
    """An error, without the leading ``-``."""

    text: str


@dataclass(frozen=True)
class OtherReply:
    """A status, an integer, or an array's head (``*<n>``), as the line says it."""

    line: str


Reply = BulkReply | ErrorReply | OtherReply


class NeedData:
    """The type of `NEED_DATA`."""

    def __repr__(self) -> str:
        return "NEED_DATA"


NEED_DATA = NeedData()


class ReplyParser:
    """An incremental RESP2 parser: `feed` bytes, take replies with `next_reply`.

    Args:
        max_bulk_bytes: the longest string that may come; a longer one announced is refused before it is stored.
    """

    def __init__(self, max_bulk_bytes: int) -> None:
        self._max_bulk_bytes = max_bulk_bytes
        self._buffer = bytearray()
        self._at = 0

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Add bytes as they came."""
        if self._at:
            del self._buffer[: self._at]
            self._at = 0
        self._buffer += data

    @property
    def pending(self) -> bool:
        """Whether bytes of an incomplete reply are held."""
        return len(self._buffer) > self._at

    def next_reply(self) -> Reply | NeedData:
        """The next reply, or `NEED_DATA` while it is incomplete.

        Raises:
            ProtocolError: bytes that are no RESP2 reply.
        """
        end = self._buffer.find(b"\r\n", self._at, self._at + MAX_LINE_BYTES + 2)
        if end < 0:
            if len(self._buffer) - self._at > MAX_LINE_BYTES:
                raise ProtocolError(f"no line end within {MAX_LINE_BYTES} bytes: this is no RESP2 reply")
            return NEED_DATA
        line = bytes(self._buffer[self._at : end])
        kind, rest = line[:1], line[1:]
        if kind == b"$":
            return self._bulk(end + 2, _length(rest))
        self._at = end + 2
        if kind == b"-":
            return ErrorReply(rest.decode("utf-8", "replace"))
        if kind in (b"+", b":", b"*"):
            return OtherReply(line.decode("utf-8", "replace"))
        raise ProtocolError(f"a RESP2 reply starts with one of + - : $ *, this one with {line[:20]!r}")

    def _bulk(self, start: int, length: int) -> BulkReply | NeedData:
        if length < 0:
            self._at = start
            return BulkReply(None)
        if length > self._max_bulk_bytes:
            raise ProtocolError(
                f"a string of {length} bytes is announced, at most {self._max_bulk_bytes} were asked for"
            )
        stop = start + length
        if len(self._buffer) < stop + 2:
            return NEED_DATA
        if self._buffer[stop : stop + 2] != b"\r\n":
            raise ProtocolError(f"a string of {length} bytes does not end where it must")
        self._at = stop + 2
        return BulkReply(bytes(self._buffer[start:stop]))

    def replies(self) -> Iterator[Reply]:
        """All replies that are complete now."""
        while not isinstance(reply := self.next_reply(), NeedData):
            yield reply


def _length(text: bytes) -> int:
    digits = text[1:] if text[:1] == b"-" else text
    if not digits.isdigit() or len(digits) > 12 or (text[:1] == b"-" and digits != b"1"):
        raise ProtocolError(f"a string's length cannot be {text[:20]!r}")
    return int(text)
