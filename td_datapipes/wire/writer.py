"""Bulk writes: SET with its payload sent from where it lies, a few in flight."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from td_datapipes.errors import ProtocolError, ServerUnavailableError, TDDatapipesError
from td_datapipes.wire.channel import Channel
from td_datapipes.wire.faults import error_from_text
from td_datapipes.wire.replies import ErrorReply, NeedData, OtherReply, Reply, ReplyParser
from td_datapipes.wire.requests import bulk

__all__ = ["BulkWriter"]


class _SetExchange:
    """``SET key value`` (an `Exchange`)."""

    part_bytes = 0

    def __init__(self, key: bytes, value: Sequence[bytes | memoryview]) -> None:
        nbytes = sum(len(part) for part in value)
        head = b"*3\r\n$3\r\nSET\r\n" + bulk(key) + b"$%d\r\n" % nbytes
        self.request: Sequence[bytes | memoryview] = (head, *value, b"\r\n")
        self.reply: Reply | None = None
        self._parser = ReplyParser(max_bulk_bytes=0)
        # One byte more than "+OK" needs would be the next reply's: read no further than this one.
        self._scratch = memoryview(bytearray(5))

    def target(self) -> memoryview:
        if self.reply is not None:
            return self._scratch[:0]
        return self._scratch[:5] if not self._parser.pending else self._scratch[:1]

    def received(self, count: int) -> None:
        self._parser.feed(self._scratch[:count])
        reply = self._parser.next_reply()
        if not isinstance(reply, NeedData):
            self.reply = reply

    def stalled(self) -> None:
        """Replies are parsed as they come: nothing to look into."""


class BulkWriter:
    """Sets strings on one server, at most `max_in_flight` unanswered.

    Args:
        channel: owned from here on.
        address: for messages.
        timeout_seconds: for each answer.
        max_in_flight: a buffer given to `set` may be reused once that many more were set.
    """

    def __init__(self, channel: Channel, address: str, timeout_seconds: float, max_in_flight: int) -> None:
        self._channel = channel
        self._address = address
        self._timeout_seconds = timeout_seconds
        self._max_in_flight = max_in_flight
        self._unanswered: deque[_SetExchange] = deque()
        self._in_step = True

    def set(self, key: bytes, value: Sequence[bytes | memoryview]) -> None:
        """Set a string made of parts.

        Raises:
            ServerFullError, ServerError, ServerTimeoutError, ServerUnavailableError: for this write or an earlier one.
        """
        while len(self._unanswered) >= self._max_in_flight:
            self._answer()
        exchange = _SetExchange(key, value)
        self._unanswered.append(exchange)
        with self._moving():
            self._channel.submit(exchange)

    def push(self) -> None:
        """Send what the socket takes now: between two calls of `set`, so that the server need not wait for the next.

        Raises:
            ServerUnavailableError: the connection broke; nothing that was not confirmed is known to have arrived.
        """
        with self._moving():
            self._channel.push()

    def flush(self) -> None:
        """Wait until everything set is confirmed. Raises as `set` does."""
        while self._unanswered:
            self._answer()

    def answer_one(self) -> None:
        """Wait until the oldest write is confirmed. Raises as `set` does."""
        self._answer()

    def _answer(self) -> None:
        exchange = self._unanswered[0]
        with self._moving():
            self._channel.advance(time.monotonic() + self._timeout_seconds, "writing a chunk")
        self._unanswered.popleft()
        if isinstance(exchange.reply, ErrorReply):
            raise error_from_text(exchange.reply.text, self._address, "writing a chunk")
        if exchange.reply != OtherReply("+OK"):
            raise ProtocolError(f"{self._address} answered a write with {exchange.reply!r}")

    @contextmanager
    def _moving(self) -> Iterator[None]:
        """Whatever ends this early (a time-out, Ctrl-C) leaves nobody knowing what is still on its way."""
        self._in_step = False
        try:
            yield
        except ServerUnavailableError:  # the server has hung up: it takes no more from this connection
            self._unanswered.clear()
            self._in_step = True
            raise
        self._in_step = True

    def settle(self) -> bool:
        """Wait for what is on its way, whatever comes of it, and drop the connection.

        Returns:
            Whether the server is sure to carry out nothing more of this writer.
        """
        while self._unanswered and self._in_step:
            with suppress(TDDatapipesError):
                self._answer()
        self.close()
        return self._in_step

    def close(self) -> None:
        """Drop the connection; what was not confirmed may or may not have been written, even afterwards."""
        self._channel.close()
