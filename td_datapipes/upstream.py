"""What ``tensordict.store`` wrote on a server: find it by name and read what describes it. No bulk data moves here."""

from __future__ import annotations

import json
import time
from typing import Any

import redis

from td_datapipes.catalog import find_manifest, load_manifest
from td_datapipes.errors import AuthenticationError, DatasetNotFoundError, InterruptedWriteError
from td_datapipes.layouts.tensordict_store import (
    STAGED_NAMESPACE,
    StoreDescription,
    describe_store,
    parse_leaf,
    store_candidates,
    store_key,
    store_name,
)
from td_datapipes.manifest import Manifest
from td_datapipes.wire.server import Server

__all__ = ["Description", "describe", "find_description", "find_store", "list_stores", "open_description"]

Description = Manifest | StoreDescription
"""What is known of a data set, whichever layout it is in."""

_GLOBALS = ("__batch_size__", "__type__", "__count__", "__stack_dim__", "__inner_batch_size__", "__device__")
_SEARCH_SECONDS = 1.0
_SHOWN_STORES = 20


def open_description(server: Server, name: str) -> Description:
    """What a name stands for: a data set of ours, or else what ``TensorDictStore`` wrote under that id.

    Raises:
        DatasetNotFoundError, InterruptedWriteError: neither is there.
        SchemaError: it cannot be read as rows; the message names the leaf.
    """
    found = find_description(server, name)
    if found is not None:
        return found
    try:
        return load_manifest(server, name)
    except InterruptedWriteError:
        raise
    except DatasetNotFoundError as error:
        stores = list_stores(server)
        known = ", ".join(map(repr, stores[:_SHOWN_STORES])) + (", ..." if len(stores) > _SHOWN_STORES else "")
        raise type(error)(f"{error}; TensorDictStore wrote {known}" if stores else str(error)) from None


def find_description(server: Server, name: str) -> Description | None:
    """As `open_description`; None where there is neither."""
    return find_manifest(server, name) or find_store(server, name)


def find_store(server: Server, name: str) -> StoreDescription | None:
    """What ``TensorDictStore`` wrote under a name (``td_id`` or ``namespace:td_id``), or None."""
    candidates = list(store_candidates(name))

    def command(client: redis.Redis) -> list[int]:
        pipe: Any = client.pipeline(transaction=False)
        for candidate in candidates:
            pipe.exists(store_key(*candidate, "__batch_size__"))
            pipe.exists(store_key(*candidate, "__type__"))
        answers = pipe.execute()
        return [number for number in range(len(candidates)) if answers[2 * number] or answers[2 * number + 1]]

    try:
        found = server.call(f"looking for {name!r}", command, repeats=True)
    except AuthenticationError:  # a user of this package's keys alone has no such store
        return None
    return describe(server, name, *candidates[found[0]]) if found else None


def list_stores(server: Server) -> list[str]:
    """Names of what ``TensorDictStore`` wrote, sorted. It keeps no list, so keys are looked through for a second."""
    until = time.monotonic() + _SEARCH_SECONDS

    def command(client: Any) -> list[str]:
        cluster, names = server.cluster(), set[str]()
        for one in [client] if cluster is None else [master for _, master in cluster.masters()]:
            cursor = 0
            while True:
                cursor, keys = one.scan(cursor, match="*:{*}:__*__", count=1000)
                found = filter(None, map(store_name, keys))
                names |= {name for name in found if not name.startswith(STAGED_NAMESPACE)}
                if not cursor or time.monotonic() > until:
                    break
        return sorted(names)

    try:
        return server.call("looking for what TensorDictStore wrote", command, repeats=True)
    except AuthenticationError:  # not every user may search; it is for a message
        return []


def describe(server: Server, name: str, namespace: str, td_id: str) -> StoreDescription | None:
    """Read a store's description, or None where it is not there.

    Raises:
        SchemaError: it cannot be read as rows.
    """

    def command(client: redis.Redis) -> tuple[list[bytes | None], list[str], list[dict[bytes, bytes]]]:
        pipe: Any = client.pipeline(transaction=False)
        for suffix in (*_GLOBALS, "__tensorclass__"):
            pipe.get(store_key(namespace, td_id, suffix))
        pipe.smembers(store_key(namespace, td_id, "__keys__"))
        *values, raw_paths = pipe.execute()
        paths = sorted(raw.decode() for raw in raw_paths)
        pipe = client.pipeline(transaction=False)
        for path in paths:
            pipe.hgetall(store_key(namespace, td_id, f"m:{path}"))
        return values, paths, pipe.execute() if paths else []

    values, paths, metadata = server.call(f"reading what describes {name!r}", command, repeats=True)
    stored = dict(zip((*_GLOBALS, "__tensorclass__"), values, strict=True))
    if stored["__batch_size__"] is None and stored["__type__"] is None:
        return None
    batch_size, stack_dim = _batch_size(stored)
    # A leaf that was deleted in between has no metadata any more.
    found = [(path, entry) for path, entry in zip(paths, metadata, strict=True) if entry]
    return describe_store(
        name,
        namespace,
        td_id,
        batch_size=batch_size,
        stack_dim=stack_dim,
        leaves=tuple(parse_leaf(path, entry, batch_size, stack_dim) for path, entry in found),
        device=(stored["__device__"] or b"").decode(),
        tensorclass=(stored["__tensorclass__"] or b"").decode(),
    )


def _batch_size(stored: dict[str, bytes | None]) -> tuple[tuple[int, ...], int | None]:
    """The batch size, and the stack dim of a lazy stack."""
    if stored["__type__"] is None:
        return tuple(json.loads(stored["__batch_size__"] or b"[]")), None
    inner = list(json.loads(stored["__inner_batch_size__"] or b"[]"))
    count, stack_dim = int(stored["__count__"] or 0), int(stored["__stack_dim__"] or 0)
    position = stack_dim if stack_dim >= 0 else max(len(inner) + stack_dim, 0)
    return (*inner[:position], count, *inner[position:]), position
