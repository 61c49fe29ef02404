"""Chunks to wherever they belong: one server, or the node of a cluster that has their slot."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import redis

from td_datapipes.errors import ServerTimeoutError, ServerUnavailableError, TDDatapipesError
from td_datapipes.wire.cluster import Cluster, Node, slot_of
from td_datapipes.wire.server import Server
from td_datapipes.wire.writer import BulkWriter

__all__ = ["ChunkWriter"]

_LOG = logging.getLogger("td_datapipes")


class ChunkWriter:
    """Sets strings under keys that nobody else uses, at most `max_in_flight` unanswered over all nodes.

    A key is set to one value only, so a write whose answer was lost may be repeated. One that fails in a way that
    passes (a broken connection, a slot that moved, a node that is replaced) is sent again by redis-py's client, as the
    server's retry policy says.

    Args:
        server: where.
        max_in_flight: a buffer given to `set` may be reused once that many more were set.
    """

    def __init__(self, server: Server, max_in_flight: int) -> None:
        self._server = server
        self._max_in_flight = max_in_flight
        self._cluster: Cluster | None = server.cluster()
        self._writers: dict[Node | None, BulkWriter] = {}
        self._unanswered: deque[tuple[Node | None, BulkWriter, bytes, Sequence[bytes | memoryview]]] = deque()
        if self._cluster is None:
            # Refused here, before anything is said to be staged.
            server.call("connecting", lambda _: self._writer(None), repeats=True)

    def set(self, key: bytes, value: Sequence[bytes | memoryview]) -> None:
        """Set a string made of parts.

        Raises:
            ServerFullError, ServerError, ServerTimeoutError, ServerUnavailableError: for this write or an earlier one.
        """
        while len(self._unanswered) >= self._max_in_flight:
            self._answer()
        node: Node | None = None
        try:
            if self._cluster is not None:
                node = self._cluster.slots.master(slot_of(key))
            writer = self._writer(node)
            writer.set(key, value)
        except (ServerUnavailableError, ServerTimeoutError) as error:
            self._drop(node)
            self.flush()  # or the buffers of those before it would be used again too early
            self._set_again(key, value, error)
            return
        self._unanswered.append((node, writer, key, value))

    def push(self) -> None:
        """Send what the sockets take now, without waiting: for whoever makes the next value meanwhile."""
        for node, writer in list(self._writers.items()):
            try:
                writer.push()
            except ServerUnavailableError as error:
                # What was on its way there is sent again when its answer is waited for.
                _LOG.info("writing again: %s", error)
                self._drop(node)

    def flush(self) -> None:
        """Wait until everything set is confirmed. Raises as `set` does."""
        while self._unanswered:
            self._answer()

    def _answer(self) -> None:
        node, writer, key, value = self._unanswered.popleft()
        if self._writers.get(node) is not writer:  # its connection broke, with this on its way
            self._set_again(key, value, None)
            return
        try:
            writer.answer_one()
        except (ServerUnavailableError, ServerTimeoutError) as error:
            self._drop(node)
            self._set_again(key, value, error)

    def _set_again(self, key: bytes, value: Sequence[bytes | memoryview], error: TDDatapipesError | None) -> None:
        if error is not None:
            if self._cluster is None and isinstance(error, ServerTimeoutError):
                raise error
            _LOG.info("writing again: %s", error)
        whole = b"".join(value)

        def command(client: redis.Redis) -> Any:
            return client.set(key, whole)

        self._server.call("writing a chunk", command, repeats=True)
        if self._cluster is not None:
            self._cluster.refresh()

    def _writer(self, node: Node | None) -> BulkWriter:
        if node not in self._writers:
            cluster = self._cluster
            channel = self._server.dial() if cluster is None or node is None else cluster.dial(node)
            address, seconds = self._server.address, self._server.timeout_seconds
            self._writers[node] = BulkWriter(channel, address, seconds, self._max_in_flight)
        return self._writers[node]

    def _drop(self, node: Node | None) -> None:
        writer = self._writers.pop(node, None)
        if writer is not None:
            writer.close()

    def settle(self) -> bool:
        """Wait for what is on its way, whatever comes of it, and drop the connections.

        Returns:
            Whether the servers are sure to carry out nothing more of this writer.
        """
        settled = True
        self._unanswered.clear()
        for writer in self._writers.values():
            with suppress(TDDatapipesError):
                settled = writer.settle() and settled
        self._writers.clear()
        return settled

    def close(self) -> None:
        """Drop the connections; what was not confirmed may or may not have been written, even afterwards."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()
        self._unanswered.clear()
