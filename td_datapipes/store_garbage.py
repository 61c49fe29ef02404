"""What killed writers in the layout `tensordict_store` leave: noted before the first byte, so that it is found.

Such a store has no place of its own for that, as its keys are `TensorDictStore`'s: one hash has the notes of all names.
"""

from __future__ import annotations

import json
import os
import platform
import time
from typing import Any

from td_datapipes.catalog import SUPERSEDED_SECONDS, unlink_keys
from td_datapipes.garbage import Collected, StagedWrite, parse_notes
from td_datapipes.layouts.tensordict_store import STAGED_NAMESPACE, store_key
from td_datapipes.wire.server import Server

__all__ = ["STAGED_STORES_KEY", "collect_stores", "forget_store", "note_store", "staged_stores"]

STAGED_STORES_KEY = b"td:staged-stores"
_SUFFIXES = ("__batch_size__", "__device__", "__tensorclass__", "__keys__")
"""The list of leaves last: with it goes what tells of the rest."""


def note_store(server: Server, token: str, name: str, td_id: str, started: float) -> None:
    """Say that a store is being written in a namespace of its own, and from time to time that this goes on.

    Args:
        server: where.
        token: of the namespace.
        name: under which it will be published.
        td_id: what stands in its keys.
        started: seconds since 1970.
    """
    who = {"host": platform.node(), "pid": os.getpid(), "started": started, "seen": time.time()}
    note = json.dumps({**who, "name": name, "td_id": td_id})
    server.call(
        f"beginning to write {name!r}", lambda client: client.hset(STAGED_STORES_KEY, token, note), repeats=True
    )


def forget_store(server: Server, token: str) -> None:
    """The store is published, or what was written of it is removed."""
    server.call("ending a write", lambda client: client.hdel(STAGED_STORES_KEY, token), repeats=True)


def staged_stores(server: Server) -> list[tuple[str, StagedWrite]]:
    """The stores that are being written, or whose writers were interrupted: name and write, the oldest first."""
    notes: Any = server.call("looking for writes", lambda client: client.hgetall(STAGED_STORES_KEY), repeats=True)
    writes = sorted(parse_notes(notes), key=lambda write: write.started)
    return [(str(json.loads(write.note).get("name")), write) for write in writes]


def collect_stores(server: Server, older_than_seconds: float = SUPERSEDED_SECONDS) -> Collected:
    """Remove what interrupted writers in the layout `tensordict_store` have staged, and nothing else.

    Args:
        server: where.
        older_than_seconds: writers not heard of for so long. One that was a process of this machine and is gone is
            collected at once.
    """
    writes = keys = 0
    for _, write in staged_stores(server):
        td_id = json.loads(write.note).get("td_id")
        if write.interrupted(older_than_seconds) and isinstance(td_id, str):
            keys += _remove(server, f"{STAGED_NAMESPACE}{write.id}", td_id)
            forget_store(server, write.id)
            writes += 1
    return Collected(generations=0, writes=writes, chunks=keys)


def _remove(server: Server, namespace: str, td_id: str) -> int:
    def command(client: Any) -> int:
        paths = [raw.decode() for raw in client.smembers(store_key(namespace, td_id, "__keys__"))]
        suffixes = [f"{kind}:{path}" for path in paths for kind in "dm"]
        return unlink_keys(client, [store_key(namespace, td_id, suffix) for suffix in (*suffixes, *_SUFFIXES)])

    return server.call("removing what an interrupted write left", command, repeats=True)
