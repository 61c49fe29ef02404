"""Bytes in, replies out (sans-I/O): check a stream whose shape is known, or parse one reply by reply.

`stream_check` is the fast path. The plan knows the length of every reply, so the whole reply stream is received into
one buffer and only the bytes between the values are looked at, all at once, as they arrive. `ReplyParser` is the slow
path, taken on the first byte that is not as expected: it reads RESP2 replies one by one and says what came instead.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Protocol

import numpy as np
import numpy.typing as npt

from td_datapipes.errors import ProtocolError
from td_datapipes.read_spec import TRAILER_BYTES, Rows
from td_datapipes.slabs import PeriodicSlab, Slab

__all__ = [
    "NEED_DATA",
    "BulkReply",
    "ErrorReply",
    "NeedData",
    "OtherReply",
    "Reply",
    "ReplyParser",
    "StreamCheck",
    "stream_check",
]

MAX_LINE_BYTES = 64 * 1024
"""A reply line (an error's text, a length) longer than this is no reply of a server we know."""
_KINDS = (b"", b"+", b"-", b":", b"$", b"*")


@lru_cache(maxsize=4096)
def _header(length: int) -> bytes:
    return b"$%d\r\n" % length


class StreamCheck(Protocol):
    """Compares the framing bytes of a slab's reply stream with what they must be, as they arrive."""

    def matches(self, stream: npt.NDArray[np.uint8], received: int) -> bool:
        """Whether the first `received` bytes are framed as expected. Bytes that passed are not looked at again."""


def stream_check(slab: Slab) -> StreamCheck:
    """The check for a slab."""
    if isinstance(slab, PeriodicSlab):
        return _PeriodicCheck(
            slab.spec.segment_starts, slab.spec.wire_lengths.tolist(), len(slab.rows), slab.stream_bytes
        )
    if slab.num_ranges == 1 and not slab.prefix:
        start = slab.stream_bytes - slab.num_bytes - TRAILER_BYTES
        return _PeriodicCheck([start], [slab.num_bytes], 1, slab.stream_bytes)
    return _ListCheck(slab)


@lru_cache(maxsize=64)
def _framing(starts: tuple[int, ...], lengths: tuple[int, ...]) -> tuple[list[int], Rows, bytes]:
    """Where the framing bytes of a period are, as a list and as an array, and which they are."""
    headers = [_header(length) for length in lengths]
    marks = zip(headers, starts, lengths, strict=True)
    ranges = [(range(at - len(mark), at), range(at + length, at + length + 2)) for mark, at, length in marks]
    places = list(chain.from_iterable(chain.from_iterable(ranges)))
    return places, np.array(places, dtype=np.int64), b"".join(mark + b"\r\n" for mark in headers)


class _PeriodicCheck:
    """For streams that repeat: the framing bytes of all periods are compared at once.

    Args:
        starts: where the values of the first period start.
        lengths: their lengths.
        count: number of periods.
        stream_bytes: length of all periods.
    """

    def __init__(self, starts: Sequence[int], lengths: Sequence[int], count: int, stream_bytes: int) -> None:
        self._count, self._period = count, stream_bytes // count
        self._places, self._positions, self._expected = _framing(tuple(starts), tuple(lengths))
        self._passed = self._seen = 0  # whole periods, and framing bytes of the one behind them

    def matches(self, stream: npt.NDArray[np.uint8], received: int) -> bool:
        whole = min(received // self._period, self._count)
        if whole > self._passed:
            fresh = whole - self._passed
            periods = np.ndarray((fresh, self._period), np.uint8, stream, self._passed * self._period)
            if periods.take(self._positions, 1).tobytes() != self._expected * fresh:
                return False
            self._passed, self._seen = whole, 0
        start = whole * self._period
        there = bisect_left(self._places, received - start) if whole < self._count else 0
        if there > self._seen:
            found = stream[start + self._positions[self._seen : there]].tobytes()
            if found != self._expected[self._seen : there]:
                return False
            self._seen = there
        return True


class _ListCheck:
    """For any other stream: the framing bytes and their positions are listed once."""

    def __init__(self, slab: Slab) -> None:
        lengths = slab.ranges().lengths
        headers = [_header(length) for length in lengths.tolist()]
        self._expected = np.frombuffer(slab.prefix + b"\r\n".join(headers) + b"\r\n", dtype=np.uint8)
        widths = np.fromiter(map(len, headers), dtype=np.int64, count=len(headers)) + 2
        widths[0] += len(slab.prefix) - 2
        # Before each value stand the line end of the value before it (the prefix, before the first) and its header;
        # the values shift all that follows.
        shifts = np.repeat(np.cumsum(lengths) - lengths, widths)
        end = slab.stream_bytes
        self._positions = np.concatenate([np.arange(len(shifts)) + shifts, [end - 2, end - 1]])
        self._passed = 0

    def matches(self, stream: npt.NDArray[np.uint8], received: int) -> bool:
        upto = int(np.searchsorted(self._positions, received))
        part = slice(self._passed, upto)
        if not np.array_equal(stream[self._positions[part]], self._expected[part]):
            return False
        self._passed = upto
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
        kind = bytes(self._buffer[self._at : self._at + 1])
        if kind not in _KINDS:  # at once: a line end may never come
            start = bytes(self._buffer[self._at : self._at + 20])
            raise ProtocolError(f"a RESP2 reply starts with one of + - : $ *, this one with {start!r}")
        end = self._buffer.find(b"\r\n", self._at, self._at + MAX_LINE_BYTES + 2)
        if end < 0:
            if len(self._buffer) - self._at > MAX_LINE_BYTES:
                raise ProtocolError(f"no line end within {MAX_LINE_BYTES} bytes: this is no RESP2 reply")
            return NEED_DATA
        line = bytes(self._buffer[self._at : end])
        rest = line[1:]
        if kind == b"$":
            return self._bulk(end + 2, _length(rest))
        self._at = end + 2
        if kind == b"-":
            return ErrorReply(rest.decode("utf-8", "replace"))
        return OtherReply(line.decode("utf-8", "replace"))

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
