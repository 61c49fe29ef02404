"""Connections to the server of a folder, which may have been started anew since the last one was made."""

from __future__ import annotations

import socket
from typing import Any, Protocol

import redis

__all__ = ["EmbeddedConnection", "FolderHold", "Listening"]


class Listening(Protocol):
    """Where a server listens now."""

    @property
    def socket_path(self) -> str:
        """Its Unix socket."""

    @property
    def port(self) -> int:
        """Of loopback TCP; 0 where it has none."""

    @property
    def password(self) -> str:
        """Of this run of it."""


class FolderHold(Protocol):
    """This process's hold on a server that was started for a folder."""

    def listening(self) -> Listening:
        """Where it listens now. Raises OSError where it does not run."""

    def close(self) -> None:
        """Let go of it."""


class EmbeddedConnection(redis.Connection):
    """Over loopback TCP where that is to be had, else over the Unix socket.

    A Unix socket holds 208 KB on Linux, and the server has to be woken for each of these: batches of 7 MB take
    2.6 times as long as over TCP.
    """

    def __init__(self, *, hold: FolderHold, **options: Any) -> None:
        self._hold = hold
        super().__init__(host="127.0.0.1", **options)  # type: ignore[no-untyped-call]

    def _connect(self) -> socket.socket:
        # Asked each time: a server that was started anew has another port and another password.
        where = self._hold.listening()
        self.port, self.password = where.port, where.password
        if where.port:
            try:
                connected: socket.socket = super()._connect()  # type: ignore[no-untyped-call]
                return connected
            except OSError:
                pass  # another network namespace, say: the folder is shared with a container
        unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            unix.settimeout(self.socket_connect_timeout)
            unix.connect(where.socket_path)
            unix.settimeout(self.socket_timeout)
        except BaseException:
            unix.close()
            raise
        return unix
