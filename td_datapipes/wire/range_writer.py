"""Writes ranges of chunks if nothing has changed that they depend on, all of them or none, in one round trip.

Short ranges are written by one Lua call, unless they are many. Longer ones would be copied twice more there, and each
range costs the server more than in a SETRANGE of its own, so a Lua call only looks, and the ranges follow in a
transaction that the same call can keep from being carried out.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import numpy as np

from td_datapipes.errors import ServerUnavailableError
from td_datapipes.wire.channel import Channel
from td_datapipes.wire.faults import error_from_text
from td_datapipes.wire.range_parts import RangeWrite
from td_datapipes.wire.requests import bulk
from td_datapipes.wire.scripts import load_script

__all__ = ["RangeWriter"]

MAX_SCRIPT_RANGES = 64
"""So many short ranges are written by Lua; more cost the server more than a transaction costs both."""
SHORT_RANGE_BYTES = 256
"""Ranges that are shorter than this on average are short."""
SHORT_BYTES = 4096
"""All in all, that are written by Lua even if each of them is long."""
_ATTEMPTS = 8
_MULTI = b"*1\r\n$5\r\nMULTI\r\n"
_EXEC = b"*1\r\n$4\r\nEXEC\r\n"


class _Lines:
    """A request whose replies are lines (an `Exchange`)."""

    part_bytes = 0

    def __init__(self, request: Iterable[bytes | memoryview], num_lines: int) -> None:
        self.request = request
        self.text = b""
        self._missing = num_lines
        self._scratch = memoryview(bytearray(1 << 14))

    def target(self) -> memoryview:
        # Nothing else is awaited on this channel, so whatever comes belongs to this reply.
        return self._scratch if self._missing > 0 else self._scratch[:0]

    def received(self, count: int) -> None:
        lines = bytes(self._scratch[:count])
        self.text += lines
        self._missing -= lines.count(b"\n")
        if self._missing > 0 and self.text.endswith(b"\r\n") and _refused(self.text):
            self._missing = 0

    def stalled(self) -> None:
        """Lines are counted as they come."""


def _refused(text: bytes) -> bool:
    """Whether a transaction was answered by one line: it was not carried out."""
    last = text[text.rfind(b"\n", 0, -1) + 1 :]
    return last.startswith((b"*-1", b"-EXECABORT", b"-ERR EXEC"))


class RangeWriter:
    """Writes ranges, over a connection that is dialled when it is first needed. Safe for threads and forks.

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

    def write(self, writes: RangeWrite, guards: Sequence[tuple[bytes, bytes]], token: bytes, doing: str) -> bool:
        """Write the ranges.

        Args:
            writes: what goes where.
            guards: keys, and what ``write_ranges.lua`` compares them with.
            token: begins a key that nobody uses, in the slot of the others.
            doing: for messages.

        Returns:
            Whether they were written; nothing was if a guard or a chunk is not as it must be.

        Raises:
            TDDatapipesError: the server or the connection failed. If the answer did not come, nobody knows whether
                they were written.
        """
        if self._pid != os.getpid():
            self._reset()
        num_bytes, num_ranges = writes.num_bytes, writes.num_ranges
        short = num_bytes < max(num_ranges * SHORT_RANGE_BYTES, SHORT_BYTES)
        by_script = short and num_ranges <= MAX_SCRIPT_RANGES
        with self._lock:
            for _ in range(_ATTEMPTS):
                if by_script:
                    text = self._ask(partial(_by_script, writes, guards, known=True), 1, doing)
                    if text.startswith(b"-NOSCRIPT"):
                        text = self._ask(partial(_by_script, writes, guards, known=False), 1, doing)
                else:
                    mine = token + secrets.token_hex(4).encode()
                    text = self._ask(partial(_by_transaction, writes, guards, mine), 4 + 2 * num_ranges, doing)
                lines = text.split(b"\r\n", 2)
                answer = lines[0] if by_script else lines[1]
                if b"\r\n-" in text or text.startswith(b"-"):
                    self._fail(text, doing)
                if not answer.startswith(b"+OK"):
                    return False
                if by_script or b"\r\n*-1\r\n" not in text:
                    return True
                # Somebody wrote what was watched, and left it as it was or not: look again.
        return False

    def _fail(self, text: bytes, doing: str) -> None:
        error = next(line for line in text.split(b"\r\n") if line.startswith(b"-"))
        self._drop()
        raise error_from_text(error[1:].decode("utf-8", "replace"), self._address, doing)

    def _ask(self, request: Callable[[], Iterable[bytes | memoryview]], num_lines: int, doing: str) -> bytes:
        fresh = self._channel is None
        try:
            try:
                return self._exchange(request(), num_lines, doing)
            except ServerUnavailableError:
                self._drop()
                if fresh:
                    raise
                # A connection that lay idle may have been closed meanwhile. Writing the same again changes nothing.
                return self._exchange(request(), num_lines, doing)
        except BaseException:
            self._drop()
            raise

    def _exchange(self, request: Iterable[bytes | memoryview], num_lines: int, doing: str) -> bytes:
        if self._channel is None:
            self._channel = self._dial()
        exchange = _Lines(request, num_lines)
        self._channel.submit(exchange)
        self._channel.advance(time.monotonic() + self._timeout_seconds, doing)
        return exchange.text

    def _drop(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def close(self) -> None:
        """Drop the connection."""
        if self._pid == os.getpid():
            with self._lock:
                self._drop()


def _script_call(
    name: bytes,
    script: bytes,
    writes: RangeWrite,
    guards: Sequence[tuple[bytes, bytes]],
    token: bytes | None,
    packed: bytes,
) -> bytes:
    """A call of the script, up to its fifth argument."""
    keys = [*writes.keys, *(key for key, _ in guards), *([] if token is None else [token])]
    needed = np.array(writes.needed, dtype="<u4").tobytes()
    return b"".join(
        [
            b"*%d\r\n" % (8 + len(keys) + len(guards)),
            bulk(name),
            bulk(script),
            bulk(b"%d" % len(keys)),
            *map(bulk, keys),
            bulk(b"%d" % len(writes.keys)),
            bulk(b"%d" % len(guards)),
            bulk(needed),
            bulk(packed),
        ]
    )


def _by_script(writes: RangeWrite, guards: Sequence[tuple[bytes, bytes]], *, known: bool) -> list[bytes | memoryview]:
    script = load_script("write_ranges")
    name, text = (b"EVALSHA", script.sha) if known else (b"EVAL", script.source)
    head = _script_call(name, text.encode(), writes, guards, None, writes.packed)
    tail = b"".join([b"\r\n", *(bulk(expected) for _, expected in guards)])
    return [head + b"$%d\r\n" % len(writes.data), writes.data, tail]


def _by_transaction(
    writes: RangeWrite, guards: Sequence[tuple[bytes, bytes]], token: bytes
) -> Iterator[bytes | memoryview]:
    """Watch, look, and write; the source is sent along, as nothing may be written unless the script has looked."""
    source = load_script("write_ranges").source.encode()
    watched = [*(key for key, _ in guards), token]
    watch = b"*%d\r\n$5\r\nWATCH\r\n" % (1 + len(watched)) + b"".join(map(bulk, watched))
    look = _script_call(b"EVAL", source, writes, guards, token, b"") + bulk(b"")
    expected = b"".join(bulk(value) for _, value in guards)
    yield watch
    yield b"".join([look, expected, _MULTI])
    yield from writes.commands()
    yield _EXEC
