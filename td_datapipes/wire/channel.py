"""One connection for bulk data: requests go out and reply streams come in at the same time, in order."""

from __future__ import annotations

import select
import socket
import ssl
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from td_datapipes.errors import ServerTimeoutError, ServerUnavailableError

__all__ = ["Channel", "Exchange"]

_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError, InterruptedError)
_MAX_WAIT_SECONDS = 3600.0
_JOIN_BYTES = 256 * 1024
_EARLY_BYTES = 2048
"""Of requests: as many keep a server busy for longer than it takes to wake it once more."""
_STREAM_BYTES = 48 * 1024
"""Of a request that is made part by part: sent while the rest is still to be made."""
_LONG_PART_BYTES = 8192
"""Parts that are longer on average are sent from where they lie rather than joined."""
_MAX_PARTS = 512
"""Of one system call: Linux takes up to 1024."""
_WINDOW_BYTES = 4 << 20
"""Of paced replies that are asked for and not received: what a network of 25 Gbit/s holds in 1.3 ms."""
_BUSY_LOW_WATER_BYTES, _WAITING_LOW_WATER_BYTES = _WINDOW_BYTES, 1
"""Linux acknowledges at once what comes to a socket that holds less than its low-water mark, and keeps room for that
much. What comes beyond it, while nobody reads, is acknowledged as late as by the next read: a sender whose congestion
window is short, as BBR's is, sends no more than about 1 MB and stops. But who waits is woken above the mark only."""


class Exchange(Protocol):
    """A request and what becomes of its reply. Sans-I/O: it is asked where bytes go and told how many came."""

    @property
    def request(self) -> Iterable[bytes | memoryview]:
        """The request's bytes, in parts, taken once; a memoryview must not change until the reply is complete."""

    @property
    def part_bytes(self) -> int:
        """Of the reply to each part of the request, about; 0 where the whole request may be sent at once."""

    def target(self) -> memoryview | list[memoryview]:
        """Where the next bytes go; empty once the reply is complete. Several places only where `Channel.scatters`."""

    def received(self, count: int) -> None:
        """That many bytes were put into `target`."""

    def stalled(self) -> None:
        """Nothing more is there for now. Raises where what came already shows that the rest will not come."""


@dataclass(slots=True)
class _Awaited:
    """An exchange whose reply is not complete.

    Attributes:
        parts: of its request, that were not sent.
        due: bytes of its reply that are asked for and not received, where its parts are paced.
    """

    exchange: Exchange
    parts: Iterator[bytes | memoryview]
    due: int = 0


class Channel:
    """Takes over an authenticated redis-py connection and moves bytes over its socket.

    Requests and replies are duplex: whatever can be sent is sent whenever the channel is pumped, so neither side can
    fill up while it waits for the other. Requests whose parts have long replies are paced: a server that is asked for
    more than fits its processor's cache at once takes longer. A channel on which anything failed must be closed, never
    used again.

    Args:
        connection: a connected redis-py connection with nothing outstanding.
        address: for messages.
    """

    def __init__(self, connection: Any, address: str) -> None:
        self._connection = connection  # keeps the socket alive
        self._socket = connection._sock
        self._address = address
        self._socket.settimeout(0)
        self._has_low_water = sys.platform == "linux" and self._socket.family in (socket.AF_INET, socket.AF_INET6)
        self._low_water = _WAITING_LOW_WATER_BYTES
        self._poll = select.poll()
        self._awaits = select.POLLIN
        self._poll.register(self._socket.fileno(), self._awaits)
        self._unsent: deque[memoryview] = deque()
        self._awaited: deque[_Awaited] = deque()
        self._unasked: deque[_Awaited] = deque()
        self._in_flight = 0

    @property
    def scatters(self) -> bool:
        """Whether one receive can fill several places: not over TLS."""
        return not isinstance(self._socket, ssl.SSLSocket)

    @property
    def num_awaited(self) -> int:
        """Exchanges whose replies are not complete."""
        return len(self._awaited)

    def submit(self, *exchanges: Exchange) -> None:
        """Queue exchanges and send what the socket takes now. Their replies are received by `advance`, in order."""
        idle = not self._awaited
        waiting = [_Awaited(exchange, iter(exchange.request)) for exchange in exchanges]
        self._awaited.extend(waiting)
        self._unasked.extend(waiting)
        self._ask(idle=idle)
        self._set_low_water(_BUSY_LOW_WATER_BYTES)

    def _ask(self, *, idle: bool = False) -> None:
        """Send what of the requests may be sent by now.

        Args:
            idle: the server has nothing to do.
        """
        parts: list[bytes | memoryview] = []
        held, enough = 0, _STREAM_BYTES
        while self._unasked and self._in_flight < _WINDOW_BYTES:
            first = self._unasked[0]
            part = next(first.parts, None)
            if part is None:
                self._unasked.popleft()
                continue
            first.due += first.exchange.part_bytes
            self._in_flight += first.exchange.part_bytes
            parts.append(part)
            held += len(part)
            early = idle and len(parts) == 1 and (held >= _EARLY_BYTES or first.exchange.part_bytes > 0)
            if early or held >= enough:
                # The server gets this part while the others are made; at once where it has nothing to do.
                self._queue(parts, held)
                parts, held, idle = [], 0, False
                enough = enough if early else min(2 * enough, _JOIN_BYTES)
        if parts:
            self._queue(parts, held)

    def _queue(self, parts: list[bytes | memoryview], num_bytes: int) -> None:
        """Send what the socket takes of these parts, behind what is unsent."""
        long = self.scatters and num_bytes >= _LONG_PART_BYTES * len(parts)
        if len(parts) > 1 and num_bytes <= 2 * _JOIN_BYTES and not long:
            # One system call: each would wake the server, which then competes with us for the processor.
            parts = [b"".join(parts)]
        self._unsent.extend(memoryview(part) for part in parts if len(part))
        self._send()

    def push(self) -> None:
        """Send what the socket takes now of what waits to be sent; no reply is received.

        Raises:
            ServerUnavailableError: the connection broke.
        """
        if self._unsent:
            self._send()

    def advance(self, deadline: float, doing: str) -> None:
        """Complete the oldest exchange.

        Args:
            deadline: on `time.monotonic`'s clock.
            doing: for messages.

        Raises:
            ServerTimeoutError: the deadline passed.
            ServerUnavailableError: the connection broke.
        """
        while not self.pump(doing):
            self._wait(deadline, doing)

    def pump(self, doing: str) -> bool:
        """Move what can be moved now, without waiting, and say whether that completed the oldest exchange.

        Raises as `advance`, but for the time-out.
        """
        first = self._awaited[0]
        exchange = first.exchange
        if self._unsent:
            self._send()
        while len(target := exchange.target()):
            try:
                if isinstance(target, list):
                    count = self._socket.recvmsg_into(target)[0]
                else:
                    count = self._socket.recv_into(target)
            except _WOULD_BLOCK:
                exchange.stalled()
                return False
            except OSError as error:
                raise self._broken(f"broke while {doing}: {error}") from error
            if count == 0:
                raise self._broken(f"was closed while {doing}")
            exchange.received(count)
            if exchange.part_bytes:
                first.due -= count
                self._in_flight -= count
            if self._unasked:
                self._ask()
            if self._unsent:
                self._send()
        self._awaited.popleft()
        self._in_flight -= first.due  # its last part was shorter
        if self._awaited:
            self._set_low_water(_BUSY_LOW_WATER_BYTES)  # who asked may turn to other things now
        return True

    def waits_for(self) -> tuple[int, int]:
        """The socket's number, and for which events of ``poll`` to wait, now, before pumping again."""
        self._set_low_water(_WAITING_LOW_WATER_BYTES)
        return self._socket.fileno(), select.POLLIN | (select.POLLOUT if self._unsent else 0)

    def _set_low_water(self, num_bytes: int) -> None:
        if self._has_low_water and self._low_water != num_bytes:
            self._low_water = num_bytes
            with suppress(OSError):  # a broken connection's, which shows when it is used
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)

    def _send(self) -> None:
        while self._unsent:
            try:
                if len(self._unsent) > 1 and self.scatters:
                    count = self._socket.sendmsg(islice(self._unsent, _MAX_PARTS))
                else:
                    count = self._socket.send(self._unsent[0])
            except _WOULD_BLOCK:
                return
            except OSError as error:
                raise self._broken(f"broke while sending a request: {error}") from error
            while count and count >= len(self._unsent[0]):
                count -= len(self._unsent.popleft())
            if count:
                self._unsent[0] = self._unsent[0][count:]

    def _broken(self, how: str) -> ServerUnavailableError:
        """The same causes however it shows: what is sent to a server that has closed the connection resets it."""
        return ServerUnavailableError(
            f"the connection to {self._address} {how}. The server ended, was told to close it (CLIENT KILL), or more "
            f"was asked for than its client-output-buffer-limit allows"
        )

    def _wait(self, deadline: float, doing: str) -> None:
        """Sleep until the socket can be read (or written, while requests are unsent)."""
        left = min(deadline - time.monotonic(), _MAX_WAIT_SECONDS)
        if left <= 0:
            raise ServerTimeoutError(
                f"{self._address} did not answer in time while {doing}; it may be stopped, busy or far away "
                f"(raise it with ?socket_timeout=SECONDS in the URL)"
            )
        number, awaits = self.waits_for()
        if awaits != self._awaits:
            self._poll.modify(number, awaits)
            self._awaits = awaits
        self._poll.poll(left * 1000 + 1)

    def abort(self) -> None:
        """Shut the connection down, so that another thread's wait on it ends. Not for a forked child."""
        with suppress(OSError, AttributeError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Drop the connection, in this process only: the socket is closed, not shut down."""
        self._unsent.clear()
        self._unasked.clear()
        self._awaited.clear()
        sock, self._socket = self._socket, None
        if sock is not None:
            self._connection._sock = None
            sock.close()
