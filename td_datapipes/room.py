"""What a server has room for: how long a chunk may be, in how many shards they lie, whether the rows fit."""

from __future__ import annotations

from typing import Any

import redis

from td_datapipes.errors import ConfigurationError, ServerFullError, ValueTooLargeError
from td_datapipes.manifest import SPARE_BYTES
from td_datapipes.schema import Schema
from td_datapipes.wire.cluster import choose_tags
from td_datapipes.wire.server import Server

__all__ = ["DEFAULT_CHUNK_BYTES", "SHARDS_PER_MASTER", "check_room", "longest_chunk", "shard_tags", "string_limit"]

DEFAULT_CHUNK_BYTES = 4 << 20
_SERVER_STRING_BYTES = 512 << 20
"""What a server takes for one string unless it says otherwise (proto-max-bulk-len)."""
SHARDS_PER_MASTER = 4
"""Of a cluster: a shard cannot be divided when slots are shared out anew, and each is one Lua call."""


def longest_chunk(server: Server, wanted: int | None) -> int:
    """The longest stretch of records a chunk may hold on this server."""
    if wanted is not None and (wanted < 16 or wanted % 16):
        raise ConfigurationError(f"chunk_bytes must be a positive multiple of 16, got {wanted}")
    limit = string_limit(server) - SPARE_BYTES
    if wanted is not None and wanted > limit:
        raise ValueTooLargeError(
            f"chunk_bytes={wanted} is more than {server.address} takes in one string: proto-max-bulk-len leaves "
            f"{limit}; pass chunk_bytes={limit // 16 * 16} or less, or raise the setting"
        )
    return min(wanted or DEFAULT_CHUNK_BYTES, limit // 16 * 16)


def string_limit(server: Server) -> int:
    """The longest string the server takes (``proto-max-bulk-len``)."""

    def command(client: redis.Redis) -> int:
        try:
            answer: Any = client.config_get("proto-max-bulk-len")
        except redis.ResponseError:  # not every user may ask
            return _SERVER_STRING_BYTES
        return int(next(iter(answer.values()), _SERVER_STRING_BYTES))

    return server.call("asking for proto-max-bulk-len", command, repeats=True)


def shard_tags(server: Server, prefix: str, shards: int | None) -> tuple[str, ...]:
    """A hash tag for each shard; on a cluster they cover the masters evenly."""
    cluster = server.cluster()
    if cluster is None:
        return tuple(f"{prefix}.{shard}" for shard in range(shards or 1))
    slots = cluster.refresh()
    return choose_tags(slots, prefix, shards or SHARDS_PER_MASTER * len(slots.nodes))


def check_room(server: Server, schema: Schema, rows: int) -> None:
    """Refuse early what cannot fit; what is close to the limit is left to the server."""
    needed = sum(group.stride_bytes for group in schema.groups) * rows

    def command(client: redis.Redis) -> tuple[int, int]:
        cluster = server.cluster()
        clients = [client] if cluster is None else [one for _, one in cluster.masters()]
        try:
            memories = [one.info("memory") for one in clients]
        except redis.ResponseError:  # not every user may ask
            return 0, 0
        limits = [int(memory.get("maxmemory", 0)) for memory in memories]
        # A node without a limit takes what the others do not: left to the servers.
        return (sum(limits) if all(limits) else 0), sum(int(memory.get("used_memory", 0)) for memory in memories)

    limit, used = server.call("asking for its memory", command, repeats=True)
    if limit and needed > limit - used:
        raise ServerFullError(
            f"{server.address} has maxmemory={limit} bytes of which {used} are used; this data set needs {needed} "
            f"beside them (an older generation stays until the new one is published). "
            "Raise maxmemory or remove data sets"
        )
