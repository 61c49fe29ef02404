"""Guarded writes as the server's own transactions: WATCH and look, then MULTI, one SETRANGE a range, EXEC.

Where ranges are long this beats a Lua call, which copies every byte twice more. Two round trips.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from td_datapipes.errors import ServerUnavailableError
from td_datapipes.wire.channel import Channel
from td_datapipes.wire.faults import error_from_text
from td_datapipes.wire.guards import Guard
from td_datapipes.wire.replies import ErrorReply, NeedData, OtherReply, ReplyParser
from td_datapipes.wire.requests import bulk

__all__ = ["RangeWrites", "TransactionWriter"]

_MULTI = b"*1\r\n$5\r\nMULTI\r\n"
_EXEC = b"*1\r\n$4\r\nEXEC\r\n"
_UNWATCH = b"*1\r\n$7\r\nUNWATCH\r\n"
_PART_BYTES = 64 * 1024
"""Shorter ranges are joined with their commands; of longer ones the bytes are sent from where they lie."""


class RangeWrites(Protocol):
    """Ranges of chunks and their bytes: see `remote.ranges.Write`."""

    @property
    def keys(self) -> tuple[bytes, ...]: ...
    @property
    def needed(self) -> tuple[int, ...]: ...
    @property
    def packed(self) -> bytes: ...
    @property
    def data(self) -> memoryview: ...


class _Lines:
    """A request that is answered by so many lines (an `Exchange`); strings count as two."""

    def __init__(self, request: Sequence[bytes | memoryview], num_lines: int) -> None:
        self.request = request
        self.text = bytearray()
        self._missing = num_lines
        self._scratch = memoryview(bytearray(1 << 16))

    def target(self) -> memoryview:
        # Nothing else is awaited on this channel, so what comes is this reply's; an error may make it shorter.
        return self._scratch if self._missing > 0 else self._scratch[:0]

    def received(self, count: int) -> None:
        self.text += self._scratch[:count]
        self._missing -= bytes(self._scratch[:count]).count(b"\n")

    def stalled(self) -> None:
        """Lines are counted as they come."""


class TransactionWriter:
    """Writes ranges if nothing has changed that they depend on, all of them or none. Safe for threads.

    Args:
        dial: gives a fresh channel.
        address: for messages.
        timeout_seconds: for each answer.
    """

    def __init__(self, dial: Callable[[], Channel], address: str, timeout_seconds: float) -> None:
        self._dial, self._address, self._timeout_seconds = dial, address, timeout_seconds
        self._reset()

    def _reset(self) -> None:
        self._pid, self._lock = os.getpid(), threading.Lock()
        self._channel: Channel | None = None

    def write(self, writes: RangeWrites, guards: Sequence[tuple[bytes, Guard]], doing: str) -> bool:
        """Write the ranges.

        Args:
            writes: what goes where.
            guards: keys that must not change meanwhile, and what they must hold.
            doing: for messages.

        Returns:
            Whether they were written; nothing was if a guard or a chunk is not as it must be.

        Raises:
            TDDatapipesError: the server or the connection failed.
        """
        if self._pid != os.getpid():
            self._reset()
        with self._lock:
            try:
                return self._write(writes, guards, doing)
            except ServerUnavailableError:
                # Nothing was written: what broke is a connection that lay idle, unless it breaks again.
                self._drop()
                return self._write(writes, guards, doing)
            except BaseException:
                self._drop()
                raise

    def _write(self, writes: RangeWrites, guards: Sequence[tuple[bytes, Guard]], doing: str) -> bool:
        if not self._still_so(writes, guards, doing):
            self._ask([_UNWATCH], 1, doing)
            return False
        ranges = np.frombuffer(writes.packed, dtype="<u4").reshape(-1, 3).tolist()
        heads = [b"*4\r\n$8\r\nSETRANGE\r\n" + bulk(key) for key in writes.keys]
        request: list[bytes | memoryview] = [_MULTI]
        at = 0
        for key, start, length in ranges:
            request.append(b"%b%b$%d\r\n" % (heads[key], bulk(b"%d" % start), length))
            request.append(writes.data[at : at + length])
            request.append(b"\r\n")
            at += length
        request.append(_EXEC)
        text = self._ask(_joined(request), 2 + 2 * len(ranges), doing)
        last = text[text.rindex(b"\r\n*") + 2 :] if b"\r\n*" in text else text
        if b"-" not in text:
            return True
        if last.startswith(b"*-1"):
            return False
        raise error_from_text(text[text.index(b"-") + 1 :].split(b"\r\n")[0].decode(), self._address, doing)

    def _still_so(self, writes: RangeWrites, guards: Sequence[tuple[bytes, Guard]], doing: str) -> bool:
        """Watch the guards and look at them, and at the length of every chunk: one that is gone must not come back."""
        watch = b"*%d\r\n$5\r\nWATCH\r\n" % (1 + len(guards)) + b"".join(bulk(key) for key, _ in guards)
        lengths = [b"*2\r\n$6\r\nSTRLEN\r\n" + bulk(key) for key in writes.keys]
        request = b"".join([watch, *(guard.request for _, guard in guards), *lengths])
        expected = b"+OK\r\n" + b"".join(guard.reply for _, guard in guards)
        # A missing guard is answered by fewer lines: its null is one. Count replies instead.
        text = self._replies(request, 1 + sum(guard.num_replies for _, guard in guards) + len(lengths), doing)
        if not text.startswith(expected):
            return False
        found = [int(line[1:]) for line in text[len(expected) :].split(b"\r\n")[:-1]]
        return all(length >= need for length, need in zip(found, writes.needed, strict=True))

    def _replies(self, request: bytes, count: int, doing: str) -> bytes:
        """The bytes of so many replies, which are parsed as they come."""
        exchange = _Replies(request, count)
        self._move(exchange, doing)
        if exchange.error:
            raise error_from_text(exchange.error, self._address, doing)
        return bytes(exchange.text)

    def _ask(self, request: Sequence[bytes | memoryview], num_lines: int, doing: str) -> bytes:
        exchange = _Lines(request, num_lines)
        self._move(exchange, doing)
        return bytes(exchange.text)

    def _move(self, exchange: _Lines | _Replies, doing: str) -> None:
        if self._channel is None:
            self._channel = self._dial()
        self._channel.submit(exchange)
        self._channel.advance(time.monotonic() + self._timeout_seconds, doing)

    def _drop(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def close(self) -> None:
        """Drop the connection."""
        if self._pid == os.getpid():
            with self._lock:
                self._drop()


class _Replies:
    """A request that is answered by so many replies, list heads counted (an `Exchange`)."""

    def __init__(self, request: bytes, count: int) -> None:
        self.request = (request,)
        self.text = bytearray()
        self.error = ""
        self._missing = count
        self._parser = ReplyParser(1 << 20)
        self._scratch = memoryview(bytearray(1 << 14))

    def target(self) -> memoryview:
        return self._scratch if self._missing > 0 else self._scratch[:0]

    def received(self, count: int) -> None:
        self.text += self._scratch[:count]
        self._parser.feed(self._scratch[:count])
        while not isinstance(reply := self._parser.next_reply(), NeedData):
            self._missing -= 1
            if isinstance(reply, ErrorReply):
                self.error = self.error or reply.text
            elif isinstance(reply, OtherReply) and reply.line.startswith("*-"):
                self._missing = 0

    def stalled(self) -> None:
        """Replies are parsed as they come."""


def _joined(parts: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """Short parts put together: a part costs a system call."""
    made: list[bytes | memoryview] = []
    run: list[bytes | memoryview] = []
    for part in parts:
        if len(part) >= _PART_BYTES:
            made += [b"".join(run), part]
            run = []
        else:
            run.append(part)
    return [*made, b"".join(run)]
