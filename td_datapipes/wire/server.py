"""A server as this package dials it: a client of redis-py for commands, and connections for bulk data."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import redis
from redis._parsers import _RESP2Parser
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool

from td_datapipes.errors import (
    ConfigurationError,
    ServerNotReadyError,
    ServerTimeoutError,
    ServerUnavailableError,
    TDDatapipesError,
    URLError,
)
from td_datapipes.keys import manifest_key
from td_datapipes.wire.channel import Channel
from td_datapipes.wire.cluster import Cluster, Node, slot_of
from td_datapipes.wire.embedded import EmbeddedConnection, FolderHold
from td_datapipes.wire.faults import REDIS_ERRORS, translate
from td_datapipes.wire.packing import Packer
from td_datapipes.wire.retry import RetryPolicy
from td_datapipes.wire.url import ServerURL

__all__ = ["Server"]

T = TypeVar("T")
DEFAULT_TIMEOUT_SECONDS = 30.0
ATTEMPT_TIMEOUT_SECONDS = 10.0
"""Where another server may take over: one that is silent is given up while there is time left for the other."""
CONNECT_TIMEOUT_SECONDS = 5.0
_LOG = logging.getLogger("td_datapipes")


class Server:
    """Dials one server, the master that sentinels name, or the nodes of a cluster, which is found by asking.

    Safe for threads; a forked child dials anew by itself.

    Args:
        url: which server.
        open_folder: starts (or finds) the server of a folder; needed for ``embedded://``. It is held while this
            object lives.
        retry: how what failed is tried again; by default as the URL's options say.
    """

    def __init__(
        self,
        url: ServerURL,
        open_folder: Callable[[Path], FolderHold] | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        self.url = url
        self.retry = url.retry if retry is None else retry
        self._open_folder = open_folder
        self._lock = threading.Lock()
        self._hold: FolderHold | None = None
        self._pool: redis.ConnectionPool | None = None
        self._client: redis.Redis | None = None
        self._asked = url.folder is not None or bool(url.sentinels)
        self._cluster: Cluster | None = None

    @property
    def address(self) -> str:
        """Host, port and db, or the socket's path; no credentials."""
        return self.url.address

    def client(self) -> redis.Redis:
        """redis-py's client, for everything but bulk data. Replies are bytes, on RESP2."""
        cluster = self._find_cluster()
        if cluster is not None:
            return cast(redis.Redis, cluster.client())
        pool, client = self._connections(), self._client
        if client is None or client.connection_pool is not pool:  # making one takes as long as a command
            self._client = client = redis.Redis(connection_pool=pool)
        return client

    def cluster(self) -> Cluster | None:
        """The cluster the server is a node of, or None; asked once.

        Raises:
            TDDatapipesError: nobody could be asked.
        """
        if not self._asked:
            self.call("asking whether it is a cluster", lambda client: client, repeats=True)
        return self._cluster

    def call(self, doing: str, command: Callable[[redis.Redis], T], *, repeats: bool = False) -> T:
        """Run commands, and give what goes wrong its name.

        Args:
            doing: for the message, as in "reading the manifest".
            command: gets a client.
            repeats: the commands do the same when they are run again, wholly or from their middle: they are, as the
                retry policy says, where a connection broke or the server says that it cannot serve them now.

        Raises:
            TDDatapipesError: what the server or the connection did; see `errors`.
        """
        tries = self.retry.begin(time.monotonic() + self.deadline_seconds, others_take_over=self.others_take_over)
        while True:
            try:
                return command(self.client())
            except (TDDatapipesError, *REDIS_ERRORS, AttributeError) as error:
                if isinstance(error, AttributeError) and self._cluster is None:
                    raise
                named = error if isinstance(error, TDDatapipesError) else translate(error, self.address, doing)
                cause = None if named is error else error
                if self._cluster is not None:
                    self._cluster.forget_client()
                if not repeats or not self._may_pass(named):
                    raise named from cause
                try:
                    tries.failed(named, passes=isinstance(named, ServerNotReadyError))
                except TDDatapipesError:
                    raise named from cause
                _LOG.info("trying again: %s", named)

    def _may_pass(self, error: TDDatapipesError) -> bool:
        if isinstance(error, ServerNotReadyError) and "READONLY" in str(error):
            return self.others_take_over
        return isinstance(error, ServerUnavailableError | ServerTimeoutError)

    def dial(self, key: bytes | None = None, *, replica: bool = False) -> Channel:
        """A new connection for bulk data, authenticated.

        Args:
            key: on a cluster, to the node that has this key; by default, the manifest's of the URL's name.
            replica: to a replica where there is one.

        Raises:
            TDDatapipesError: no server, wrong password, refused certificate.
        """
        cluster = self.cluster()
        if cluster is not None:
            slots = cluster.refresh()
            return cluster.dial(slots.master(slot_of(key or manifest_key(self.url.name))), replica=replica)
        if replica and not self.url.sentinels:
            raise ConfigurationError(
                f"read_from='replica' needs a cluster or a sentinel URL, which say where the replicas are; "
                f"{self.address} is one server (a replica of it can be given as the URL itself)"
            )
        try:
            pool = self._replicas() if replica else self._connections()
            # Not by the pool's own method, which counts every connection ever made against its limit.
            connection: Any = pool.connection_class(**pool.connection_kwargs)
            connection.connect()
            return Channel(connection, self.address)
        except REDIS_ERRORS as error:
            raise translate(error, self.address, "connecting") from error

    @property
    def timeout_seconds(self) -> float:
        """How long an answer may take: the URL's ``socket_timeout``, else 30 s; 10 s where others take over."""
        default = ATTEMPT_TIMEOUT_SECONDS if self.others_take_over else DEFAULT_TIMEOUT_SECONDS
        return float(self.url.options.get("socket_timeout") or default)

    @property
    def deadline_seconds(self) -> float:
        """How long a read or a command may take with all its repeats."""
        if self.retry.deadline_seconds is not None:
            return self.retry.deadline_seconds
        if self.others_take_over:
            return max(self.timeout_seconds, DEFAULT_TIMEOUT_SECONDS)
        return self.timeout_seconds

    @property
    def others_take_over(self) -> bool:
        """Whether another server takes the place of one that is gone: in a cluster, or with sentinels."""
        return self._cluster is not None or bool(self.url.sentinels)

    def wait_replicated(self) -> None:
        """On a cluster whose masters have replicas, wait until one of each has what was written so far.

        A failover then loses none of it that has not been lost before. Replicas that do not confirm it in time are
        logged, no error.
        """
        cluster = self.cluster()
        if cluster is None:
            return
        late = self.call("waiting for replicas", lambda _: cluster.wait_replicated(self.timeout_seconds), repeats=True)
        if late:
            nodes = ", ".join(map(str, late))
            _LOG.warning("no replica of %s (of %s) has confirmed what was written", nodes, self.address)

    def _find_cluster(self) -> Cluster | None:
        """Ask, the first time. Raises what redis-py raises."""
        if self._asked:
            return self._cluster
        pool = self._connections()
        try:
            reply: Any = redis.Redis(connection_pool=pool).execute_command("CLUSTER SLOTS")  # type: ignore[no-untyped-call]
        except redis.ResponseError as error:
            if str(error).startswith(("BUSY ", "LOADING ", "MASTERDOWN ")):
                raise
            reply = None  # no cluster; or a user who may not ask, who cannot use one
        with self._lock:
            if not self._asked:
                if reply is not None:
                    options = pool.connection_kwargs
                    seed = Node(str(options.get("host") or "localhost"), int(options.get("port") or 6379))
                    dialled = {**options, "connection_class": pool.connection_class}
                    self._cluster = Cluster(dialled, seed, self.address, reply)
                self._asked = True
        return self._cluster

    def _connections(self) -> redis.ConnectionPool:
        with self._lock:
            if self._pool is None:
                options = self._dial_options()
                self._pool = self._sentinel_pool(options) if self.url.sentinels else redis.ConnectionPool(**options)
            return self._pool

    def _replicas(self) -> redis.ConnectionPool:
        return self._sentinel_pool(self._dial_options(), replica=True)

    def _sentinel_pool(self, options: dict[str, Any], *, replica: bool = False) -> redis.ConnectionPool:
        """Connections that ask the sentinels who the master is now whenever they are made."""
        shared = ("socket_timeout", "socket_connect_timeout", "retry", "connection_class")
        asking = {key: value for key, value in options.items() if key in shared or key.startswith("ssl_")}
        secure = asking.pop("connection_class", None) is redis.SSLConnection
        asking |= {"protocol": 2, "socket_timeout": CONNECT_TIMEOUT_SECONDS, **self.url.sentinel_credentials()}
        if secure:
            asking["ssl"] = True
        sentinel = Sentinel(self.url.sentinels, sentinel_kwargs=asking)  # type: ignore[no-untyped-call]
        plain = {key: value for key, value in options.items() if key not in ("host", "port", "connection_class")}
        service = self.url.service
        return SentinelConnectionPool(service, sentinel, is_master=not replica, ssl=secure, **plain)  # type: ignore[no-untyped-call]

    def _dial_options(self) -> dict[str, Any]:
        options = self.url.connection_options()
        if self.url.folder is not None:
            if self._open_folder is None:
                raise URLError(f"{self.address} is an embedded server, which cannot be dialled from here")
            self._hold = self._open_folder(self.url.folder)
            options["connection_class"] = EmbeddedConnection
            options["hold"] = self._hold
        options.setdefault("socket_timeout", self.timeout_seconds)
        if options.get("connection_class") is not redis.UnixDomainSocketConnection:
            options.setdefault("socket_connect_timeout", min(CONNECT_TIMEOUT_SECONDS, options["socket_timeout"]))
        # One attempt: what may be repeated, and for how long, is decided where the whole operation is known.
        options.setdefault("retry", Retry(NoBackoff(), 0))
        # hiredis takes memory for as many elements as a reply announces, before any of them has come.
        options.setdefault("parser_class", _RESP2Parser)
        options.setdefault("command_packer", Packer())
        return {**options, "protocol": 2, "decode_responses": False}

    def close(self) -> None:
        """Drop the connections of this object, and its hold on an embedded server."""
        with self._lock:
            pool, self._pool = self._pool, None
            self._client = None
            hold, self._hold = self._hold, None
        if pool is not None:
            pool.disconnect()
        if self._cluster is not None:
            self._cluster.close()
        if hold is not None:
            hold.close()

    def __copy__(self) -> Server:
        """With connections of its own. The nodes of a cluster stay known: the URL's may be gone by now."""
        copied = Server(self.url, self._open_folder, self.retry)
        with self._lock:
            copied._asked = self._asked
            copied._cluster = None if self._cluster is None else self._cluster.apart()
        return copied

    def __reduce__(self) -> tuple[type[Server], tuple[Any, ...]]:
        return Server, (self.url, self._open_folder, self.retry)

    def __repr__(self) -> str:
        return f"Server({self.address!r})"
