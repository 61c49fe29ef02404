"""A server as this package dials it: a client of redis-py for commands, and connections for bulk data."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from td_datapipes.errors import TDDatapipesError, URLError
from td_datapipes.wire.channel import Channel
from td_datapipes.wire.faults import translate
from td_datapipes.wire.url import ServerURL

__all__ = ["FolderHold", "Server"]

T = TypeVar("T")
DEFAULT_TIMEOUT_SECONDS = 30.0
CONNECT_TIMEOUT_SECONDS = 5.0


class FolderHold(Protocol):
    """This process's hold on a server that was started for a folder."""

    @property
    def socket_path(self) -> str:
        """The Unix socket it listens on."""

    def close(self) -> None:
        """Let go of it."""


class Server:
    """Dials one server. Safe for threads; a forked child dials anew by itself.

    Args:
        url: which server.
        open_folder: starts (or finds) the server of a folder; needed for ``embedded://``. It is held while this
            object lives.
    """

    def __init__(self, url: ServerURL, open_folder: Callable[[Path], FolderHold] | None = None) -> None:
        self.url = url
        self._open_folder = open_folder
        self._lock = threading.Lock()
        self._hold: FolderHold | None = None
        self._pool: redis.ConnectionPool | None = None

    @property
    def address(self) -> str:
        """Host, port and db, or the socket's path; no credentials."""
        return self.url.address

    def client(self) -> redis.Redis:
        """redis-py's client, for everything but bulk data. Replies are bytes, on RESP2."""
        return redis.Redis(connection_pool=self._connections())

    def call(self, doing: str, command: Callable[[redis.Redis], T]) -> T:
        """Run commands, and give what goes wrong its name.

        Args:
            doing: for the message, as in "reading the manifest".
            command: gets a client.

        Raises:
            TDDatapipesError: what the server or the connection did; see `errors`.
        """
        try:
            return command(self.client())
        except TDDatapipesError:
            raise
        except (redis.RedisError, OSError, TypeError) as error:
            raise translate(error, self.address, doing) from error

    def dial(self) -> Channel:
        """A new connection for bulk data, authenticated.

        Raises:
            TDDatapipesError: no server, wrong password, refused certificate.
        """
        try:
            pool = self._connections()
            # Not the pool's make_connection: that counts what it made against a limit, and never hears of its end.
            connection: Any = pool.connection_class(**pool.connection_kwargs)
            connection.connect()
            return Channel(connection, self.address)
        except (redis.RedisError, OSError, TypeError) as error:
            raise translate(error, self.address, "connecting") from error

    @property
    def timeout_seconds(self) -> float:
        """How long a read or a command may take: the URL's ``socket_timeout``, else 30 s."""
        return float(self.url.options.get("socket_timeout") or DEFAULT_TIMEOUT_SECONDS)

    def _connections(self) -> redis.ConnectionPool:
        with self._lock:
            if self._pool is None:
                self._pool = redis.ConnectionPool(**self._dial_options())
            return self._pool

    def _dial_options(self) -> dict[str, Any]:
        options = self.url.connection_options()
        if self.url.folder is not None:
            if self._open_folder is None:
                raise URLError(f"{self.address} is an embedded server, which cannot be dialled from here")
            self._hold = self._open_folder(self.url.folder)
            options["connection_class"] = redis.UnixDomainSocketConnection
            options["path"] = self._hold.socket_path
        options.setdefault("socket_timeout", DEFAULT_TIMEOUT_SECONDS)
        if options.get("connection_class") is not redis.UnixDomainSocketConnection:
            options.setdefault("socket_connect_timeout", min(CONNECT_TIMEOUT_SECONDS, options["socket_timeout"]))
        # One attempt: what may be repeated, and for how long, is decided where the whole operation is known.
        options.setdefault("retry", Retry(NoBackoff(), 0))
        return {**options, "protocol": 2, "decode_responses": False}

    def close(self) -> None:
        """Drop the connections of this object, and its hold on an embedded server."""
        with self._lock:
            pool, self._pool = self._pool, None
            hold, self._hold = self._hold, None
        if pool is not None:
            pool.disconnect()
        if hold is not None:
            hold.close()

    def __reduce__(self) -> tuple[type[Server], tuple[Any, ...]]:
        return Server, (self.url, self._open_folder)

    def __repr__(self) -> str:
        return f"Server({self.address!r})"
