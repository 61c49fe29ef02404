"""A cluster of servers: which node owns which slot, and connections to the nodes.

Commands go through redis-py's cluster client, which follows redirections. Bulk data go over connections of our own, by
the slot map kept here; whoever is redirected has it asked for anew.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode
from redis.crc import key_slot
from redis.retry import Retry

from td_datapipes.errors import ServerNotReadyError, ServerUnavailableError
from td_datapipes.wire.channel import Channel
from td_datapipes.wire.faults import REDIS_ERRORS, translate

__all__ = ["NUM_SLOTS", "Cluster", "Node", "SlotMap", "Slots", "choose_tags", "parse_node", "slot_of"]

NUM_SLOTS = 16384
Slots = npt.NDArray[np.int64]
_PROBE_SECONDS = 2.0
"""For a node to say which slots it knows of: another one can be asked."""


def slot_of(key: bytes) -> int:
    """The slot of a key: of what is between its first braces, or of all of it."""
    return int(key_slot(key))


@dataclass(frozen=True, order=True)
class Node:
    """One server of a cluster."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def parse_node(text: str, asked: Node) -> Node:
    """A node as redirections name it: ``host:port``. Without a host it is the one that was asked."""
    host, _, port = text.rpartition(":")
    return Node(host or asked.host, int(port.partition("@")[0]))


@dataclass(frozen=True, kw_only=True)
class SlotMap:
    """Who has which slot, as one node saw it.

    Attributes:
        nodes: the masters that own slots, sorted.
        owner: for each slot the number of its master in `nodes`, -1 where nobody has it, ``[16384]``.
        replicas: of each master.
    """

    nodes: tuple[Node, ...]
    owner: Slots
    replicas: tuple[tuple[Node, ...], ...]

    @classmethod
    def from_reply(cls, reply: Sequence[Any], asked: Node) -> SlotMap:
        """What CLUSTER SLOTS answers: ``[first, last, master, replica, ...]`` a range; nodes as ``[host, port]``."""
        found: dict[Node, set[Node]] = {}
        ranges: list[tuple[int, int, Node]] = []
        for first, last, *servers in reply:
            master, *replicas = [_node_of(server, asked) for server in servers]
            found.setdefault(master, set()).update(replicas)
            ranges.append((int(first), int(last), master))
        nodes = tuple(sorted(found))
        owner = np.full(NUM_SLOTS, -1, dtype=np.int64)
        for first, last, master in ranges:
            owner[first : last + 1] = nodes.index(master)
        return cls(nodes=nodes, owner=owner, replicas=tuple(tuple(sorted(found[node])) for node in nodes))

    @cached_property
    def complete(self) -> bool:
        """Whether every slot is somebody's."""
        return bool((self.owner >= 0).all())

    def master(self, slot: int) -> Node:
        """Who owns a slot.

        Raises:
            ServerNotReadyError: nobody does.
        """
        number = int(self.owner[slot])
        if number < 0:
            raise ServerNotReadyError(f"slot {slot} of the cluster is not served by any node now")
        return self.nodes[number]

    def slots_of(self, node: Node) -> Slots:
        """The slots of a master, ascending."""
        found: Slots = np.flatnonzero(self.owner == self.nodes.index(node))
        return found


def _node_of(server: Sequence[Any], asked: Node) -> Node:
    host = server[0].decode() if isinstance(server[0], bytes) else str(server[0] or "")
    return Node(host if host not in ("", "?") else asked.host, int(server[1]))


def choose_tags(slots: SlotMap, prefix: str, count: int) -> tuple[str, ...]:
    """Hash tags that cover the masters evenly, and the slots of each master evenly too.

    Shard ``i`` is with master ``i % masters``, so that consecutive chunks lie with different masters. The shards of one
    master are spread over its slots, so that about half of them move when half of its slots do.

    Args:
        slots: who owns what now.
        prefix: what the tags begin with: the data set's id.
        count: how many.
    """
    tags: list[str] = []
    masters = [node for node in slots.nodes if len(slots.slots_of(node))]
    if not masters:
        raise ServerNotReadyError("the cluster has no node that serves slots")
    owned = {node: slots.slots_of(node) for node in masters}
    for shard in range(count):
        turn, number = divmod(shard, len(masters))
        mine = owned[masters[number]]
        turns = -(-(count - number) // len(masters))
        low, high = len(mine) * turn // turns, len(mine) * (turn + 1) // turns
        wanted = set(mine[low : max(high, low + 1)].tolist())
        tags.append(next(tag for tag in _candidates(f"{prefix}.{shard}") if slot_of(tag.encode()) in wanted))
    return tuple(tags)


def _candidates(tag: str) -> Iterator[str]:
    yield tag
    number = 0
    while True:
        yield f"{tag}.{number:x}"
        number += 1


class Cluster:
    """Dials the nodes of one cluster. Safe for threads; a forked child dials anew by itself.

    Args:
        options: keyword arguments of redis-py's connections; where to is left out.
        seed: the node the cluster was found by.
        address: for messages.
        reply: what CLUSTER SLOTS answered there.
    """

    def __init__(self, options: Mapping[str, Any], seed: Node, address: str, reply: Sequence[Any]) -> None:
        skipped = ("host", "port", "db", "path")
        self._options = {key: value for key, value in options.items() if key not in skipped}
        if self._options.get("connection_class") is redis.UnixDomainSocketConnection:
            del self._options["connection_class"]
        self._seed, self._address = seed, address
        self._lock = threading.Lock()
        self._pools: dict[Node, redis.ConnectionPool] = {}
        self._client: redis.RedisCluster | None = None
        self._slots = SlotMap.from_reply(reply, seed)

    def apart(self) -> Cluster:
        """The same cluster, as far as it is known by now, with connections of its own."""
        other = Cluster(self._options, self._seed, self._address, ())
        other._slots = self._slots
        return other

    @property
    def slots(self) -> SlotMap:
        """Who owns what, as last heard."""
        return self._slots

    @property
    def address(self) -> str:
        """For messages."""
        return self._address

    def refresh(self, prefer: Node | None = None) -> SlotMap:
        """Ask who owns what now.

        Args:
            prefer: asked first: the node a redirection named knows best.

        Raises:
            ServerUnavailableError: no node of it answers.
        """
        last: Exception | None = None
        for node in self._known(prefer):
            try:
                found = SlotMap.from_reply(self._ask_slots(node), node)
            except REDIS_ERRORS as error:
                last = error
                continue
            if found.nodes:
                self._slots = found
                return found
        if last is not None and isinstance(named := translate(last, self._address, "asking for its slots"), OSError):
            raise ServerUnavailableError(f"no node of the cluster at {self._address} answers; {named}") from last
        raise ServerNotReadyError(f"the cluster at {self._address} serves no slots now")

    def _known(self, prefer: Node | None) -> list[Node]:
        nodes = [*self._slots.nodes, *(node for replicas in self._slots.replicas for node in replicas)]
        random.shuffle(nodes)
        first = [] if prefer is None else [prefer]
        return list(dict.fromkeys([*first, *nodes, self._seed]))

    def _ask_slots(self, node: Node) -> Sequence[Any]:
        seconds = min(float(self._options.get("socket_timeout") or _PROBE_SECONDS), _PROBE_SECONDS)
        short = {**self._options, "socket_timeout": seconds, "socket_connect_timeout": seconds}
        pool = redis.ConnectionPool(host=node.host, port=node.port, **short)
        try:
            reply: Sequence[Any] = redis.Redis(connection_pool=pool).execute_command("CLUSTER SLOTS")  # type: ignore[no-untyped-call]
            return reply
        finally:
            pool.disconnect()

    def dial(self, node: Node, *, replica: bool = False) -> Channel:
        """A new connection for bulk data to a master, or to one of its replicas where it has any.

        Raises:
            TDDatapipesError: nobody answers there, wrong password, refused certificate.
        """
        if replica:
            others = self._slots.replicas[self._slots.nodes.index(node)] if node in self._slots.nodes else ()
            node = others[os.getpid() % len(others)] if others else node
        try:
            connection = self._connection(node)
            connection.connect()
            if replica:
                connection.send_command("READONLY")
                connection.read_response()
            return Channel(connection, f"{node} of {self._address}")
        except REDIS_ERRORS as error:
            raise translate(error, f"{node} of {self._address}", "connecting") from error

    def ask(self, node: Node, request: bytes, skipped: int) -> Any:
        """The reply to a call, or a transaction, at a node that a moving slot goes to, which serves who says ASKING.

        Args:
            node: that node.
            request: the call.
            skipped: replies that come before the one that is wanted: a transaction's.

        Raises:
            redis.RedisError, OSError: what redis-py raises.
        """
        connection = self._connection(node)
        try:
            connection.connect()
            connection.send_packed_command([b"*1\r\n$6\r\nASKING\r\n" + request])
            for _ in range(1 + skipped):
                connection.read_response()
            return connection.read_response()
        finally:
            connection.disconnect()

    def masters(self) -> Iterable[tuple[Node, redis.Redis]]:
        """A client of each master."""
        for node in self._slots.nodes:
            yield node, redis.Redis(connection_pool=self._pool(node))

    def everyone(self) -> Iterable[tuple[Node, redis.Redis]]:
        """A client of each master and each replica."""
        for node in self._known(None):
            yield node, redis.Redis(connection_pool=self._pool(node))

    def client(self) -> redis.RedisCluster:
        """redis-py's cluster client, for everything but bulk data. Replies are bytes, on RESP2."""
        with self._lock:
            if self._client is None:
                options = dict(self._options)
                secure = options.pop("connection_class", None) is redis.SSLConnection
                # One attempt: what may be repeated, and for how long, is decided where the whole operation is known.
                options["retry"] = Retry(NoBackoff(), 0)
                nodes = [ClusterNode(node.host, node.port) for node in self._known(None)]  # type: ignore[no-untyped-call]
                if secure:
                    options["ssl"] = True
                self._client = redis.RedisCluster(startup_nodes=nodes, **options)
            return self._client

    def forget_client(self) -> None:
        """Something went wrong: the next client asks for the cluster's shape anew."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def wait_replicated(self, timeout_seconds: float) -> list[Node]:
        """Wait until what was written so far is with a replica of each master that has any.

        Returns:
            The masters whose replicas did not confirm it in time.
        """
        late: list[Node] = []
        self.refresh()
        for number, (node, client) in enumerate(self.masters()):
            if not self._slots.replicas[number]:
                continue
            with client.client() as one:  # type: ignore[no-untyped-call]
                one.ping()
                if not one.wait(1, int(timeout_seconds * 1000)):
                    late.append(node)
        return late

    def _connection(self, node: Node) -> Any:
        """A connection that no pool counts."""
        pool = self._pool(node)
        return pool.connection_class(**pool.connection_kwargs)

    def _pool(self, node: Node) -> redis.ConnectionPool:
        with self._lock:
            if node not in self._pools:
                self._pools[node] = redis.ConnectionPool(host=node.host, port=node.port, **self._options)
            return self._pools[node]

    def close(self) -> None:
        """Drop all connections."""
        self.forget_client()
        with self._lock:
            pools, self._pools = self._pools, {}
        for pool in pools.values():
            pool.disconnect()
