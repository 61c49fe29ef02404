"""A socket whose other side is a script: the stream is faked, not the client."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Literal

from td_datapipes.wire.channel import Channel

__all__ = ["ScriptedStream"]


class ScriptedStream:
    """What a `Channel` needs of a non-blocking socket.

    Args:
        pieces: arrive one at a time; after each, nothing more is there for one call.
        then: what follows the last piece: the peer closes the connection, resets it, or says nothing.
        most_sent: bytes the socket takes at a time; every other `send` takes none. 0 takes everything at once.
    """

    def __init__(
        self, pieces: Iterable[bytes], *, then: Literal["close", "reset", "silence"] = "close", most_sent: int = 0
    ) -> None:
        self._pieces = [memoryview(piece) for piece in pieces if piece]
        self._then = then
        self._pause = False
        self._most_sent, self._sends = most_sent, 0
        # Always ready, so that whoever waits for it goes on at once; emptied for a peer that says nothing.
        self._ready, self._write_end = os.pipe()
        os.write(self._write_end, b".")
        self.sent = bytearray()
        self.closed = False
        self.family = socket.AF_UNIX

    def channel(self) -> Channel:
        """A channel over it."""
        return Channel(SimpleNamespace(_sock=self), "script:1")

    def settimeout(self, seconds: float) -> None:
        assert seconds == 0

    def fileno(self) -> int:
        return self._ready

    def recv_into(self, target: memoryview) -> int:
        if self._pause:
            self._pause = False
            raise BlockingIOError
        if not self._pieces:
            return self._end()
        piece = self._pieces[0]
        count = min(len(piece), len(target))
        target[:count] = piece[:count]
        if count == len(piece):
            self._pieces.pop(0)
            self._pause = True
        else:
            self._pieces[0] = piece[count:]
        return count

    def recvmsg_into(self, targets: list[memoryview]) -> tuple[int, list[object], int, None]:
        """Fill one place after the other, as far as the piece reaches."""
        count = self.recv_into(targets[0])
        for target in targets[1:]:
            if self._pause or not self._pieces:
                break
            count += self.recv_into(target)
        return count, [], 0, None

    def _end(self) -> int:
        if self._then == "reset":
            raise ConnectionResetError("Connection reset by peer")
        if self._then == "silence":
            os.set_blocking(self._ready, False)
            with contextlib.suppress(BlockingIOError):
                os.read(self._ready, 1)
            raise BlockingIOError
        return 0

    def send(self, data: memoryview) -> int:
        self._sends += 1
        if self._most_sent and self._sends % 2 == 0:
            raise BlockingIOError
        count = min(len(data), self._most_sent or len(data))
        self.sent += data[:count]
        return count

    def shutdown(self, _how: int) -> None:
        self._pieces.clear()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            os.close(self._ready)
            os.close(self._write_end)
