"""What a buffer object saves of itself, and snapshots of the whole buffer on the server."""

from __future__ import annotations

import io
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np

from td_datapipes.catalog import discard, find_manifest, load_manifest, publish, stage, unstage
from td_datapipes.errors import (
    AuthenticationError,
    ConfigurationError,
    DatasetExistsError,
    InterruptedWriteError,
    ServerError,
    ServerTimeoutError,
    ServerUnavailableError,
    StateError,
    TDDatapipesError,
)
from td_datapipes.garbage import writer_note
from td_datapipes.keys import encode_name
from td_datapipes.manifest import Manifest
from td_datapipes.replay.calls import Caller
from td_datapipes.replay.options import NStep, Sampler
from td_datapipes.replay.picks import Picks
from td_datapipes.replay.ring import Ring
from td_datapipes.room import check_room
from td_datapipes.writer import persist

__all__ = ["STATE_VERSION", "check_state", "held", "hold", "kind_of", "restore", "snapshot"]

STATE_VERSION = 1
HELD_SECONDS = 7 * 86400
_ARRAYS = ("stripes", "numbers", "incarnations", "probability", "links")


def _held_key(name: str, token: str) -> bytes:
    return b"td:{%s}:held:%s" % (encode_name(name).encode(), token.encode())


def hold(caller: Caller, waiting: Sequence[tuple[int, Picks]]) -> str | None:
    """Keep chosen rows' indices on the server for a week.

    Args:
        caller: how the server is called.
        waiting: numbers of batches and their rows.

    Returns:
        A token for `held`; None where there is nothing to keep.
    """
    if not waiting:
        return None
    arrays: dict[str, Any] = {}
    for place, (number, picks) in enumerate(waiting):
        arrays[f"{place}.number"] = np.array([number, picks.rows])
        for name in _ARRAYS:
            if (value := getattr(picks, name)) is not None:
                arrays[f"{place}.{name}"] = value
    packed = io.BytesIO()
    np.savez(packed, **arrays)
    token, name = secrets.token_hex(8), caller.server.url.name
    caller.retry(
        "keeping what was chosen",
        lambda client: client.set(_held_key(name, token), packed.getvalue(), ex=HELD_SECONDS),
        caller.deadline(None),
    )
    return token


def held(caller: Caller, token: str, ring: Ring) -> list[tuple[int, Picks]]:
    """What `hold` kept.

    Raises:
        StateError: it is there no longer.
    """
    key = _held_key(caller.server.url.name, token)
    data: Any = caller.retry("fetching what was chosen", lambda client: client.get(key), caller.deadline(None))
    if data is None:
        raise StateError(
            f"the samples that had been read ahead when this state was saved are no longer kept for {key.decode()}: "
            f"more than {HELD_SECONDS // 86400} days have passed, or the server was restarted without persistence. "
            f"Load the state with strict=False to go on without them"
        )
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        found = []
        for place in range(sum(name.endswith(".number") for name in arrays.files)):
            number, rows = arrays[f"{place}.number"].tolist()
            values: dict[str, Any] = {
                n: arrays[f"{place}.{n}"] if f"{place}.{n}" in arrays.files else None for n in _ARRAYS
            }
            found.append((int(number), Picks(ring=ring, rows=int(rows), **values)))
    return found


def check_state(state: Mapping[str, Any], name: str) -> None:
    """Raises StateError where a saved state is not this buffer's."""
    version = state.get("version")
    if version != STATE_VERSION:
        raise StateError(f"the state has version {version!r}, this release reads {STATE_VERSION}")
    if state.get("name") != name:
        raise StateError(f"the state is of buffer {state.get('name')!r}, this one is {name!r}")


def kind_of(count: int, sampler: Sampler, n_step: NStep | None) -> str:
    """What tells batches that can stand in for each other from others."""
    return f"{count} {type(sampler).__name__} {getattr(sampler, 'length', '')} {n_step}"


def snapshot(caller: Caller, ring: Ring, name: str, *, overwrite: bool) -> Manifest:
    """Copy a ring, as it is at one moment, to another name.

    Raises:
        DatasetExistsError: the name is taken.
        ServerFullError: there is no room for the copy.
    """
    server = caller.server
    found = find_manifest(server, name)
    if found is not None and not overwrite:
        raise DatasetExistsError(f"{name!r} exists at {server.address}; pass overwrite=True, or choose another name")
    check_room(server, ring.manifest.schema, ring.manifest.rows)
    frozen = replace(ring.options, frozen=True)
    copied = _sibling(ring, name, 1 if found is None else found.generation + 1, frozen.to_json())
    _copy_under(caller, ring, copied, frozen=True)
    _publish(caller, copied, found)
    return copied.manifest


def restore(caller: Caller, ring: Ring | None, snapshot_name: str) -> Manifest | None:
    """Put a snapshot in the place of a buffer.

    Args:
        caller: how the server is called.
        ring: the buffer; None where there is none of that name.
        snapshot_name: the snapshot.

    Returns:
        What was published; None where the buffer that was there has been filled with the snapshot.

    Raises:
        DatasetNotFoundError: there is no such snapshot.
        ConfigurationError: it is no snapshot, or one of a buffer made otherwise.
    """
    server = caller.server
    source = Ring(load_manifest(server, snapshot_name))
    if not source.options.frozen:
        raise ConfigurationError(f"{snapshot_name!r} is no snapshot, but a buffer that is written to; take a snapshot")
    options = replace(source.options, frozen=False)
    if ring is None:
        made = _sibling(source, server.url.name, 1, options.to_json())
        _copy_under(caller, source, made, frozen=False)
        _publish(caller, made, None)
        return made.manifest
    if difference := _difference(source, ring):
        raise ConfigurationError(
            f"snapshot {snapshot_name!r} does not fit buffer {server.url.name!r}: {difference}; restore it under "
            f"another name, or drop the buffer first"
        )
    _copy_under(caller, source, ring, frozen=False)
    unstage(server, ring.manifest.name, _staged_id(ring), ())
    persist(server)
    return None


def _difference(source: Ring, target: Ring) -> str:
    if not source.schema.same_rows(target.schema):
        return source.schema.difference(target.schema)
    theirs, ours = source.options.to_json() | {"frozen": False}, target.options.to_json() | {"frozen": False}
    for name, value in theirs.items():
        if ours[name] != value:
            return f"it was made with {name}={value}, the buffer with {ours[name]}"
    return "" if source.manifest.layouts == target.manifest.layouts else "its chunks have another length"


def _sibling(ring: Ring, name: str, generation: int, options: Mapping[str, Any]) -> Ring:
    """A ring of the same slots under another name: its keys have the same hash tags, so copies stay in a shard."""
    token = secrets.token_hex(5)
    # A key's hash tag ends at the first brace: what follows it tells the keys of siblings apart.
    tags = tuple(f"{tag.partition('}')[0]}}}{token}" for tag in ring.manifest.tags)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    manifest = replace(
        ring.manifest, name=name, id=token, generation=generation, tags=tags, created=created, ring=options
    )
    return Ring(manifest)


def _staged_id(target: Ring) -> str:
    return f"copy-{target.manifest.id}"


def _copy_under(caller: Caller, source: Ring, target: Ring, *, frozen: bool) -> None:
    """Copy all stripes. The write stays staged until the copy is published, or is said to be over."""
    note = writer_note(target.manifest, time.time())
    stage(caller.server, target.manifest.name, _staged_id(target), note)
    try:
        _copy_stripes(caller, source, target, frozen=frozen)
    except BaseException as error:
        # A call that was not answered may yet be carried out: what it makes is found by the note.
        known = isinstance(error, TDDatapipesError)
        unanswered = not known or isinstance(error, ServerTimeoutError | ServerUnavailableError)
        with suppress(TDDatapipesError):
            discard(caller.server, target.manifest, _staged_id(target), forget=not unanswered)
        raise


def _copy_stripes(caller: Caller, source: Ring, target: Ring, *, frozen: bool) -> None:
    deadline = caller.deadline(None)
    for stripe in range(source.stripes):
        keys = [source.state_key(stripe), target.state_key(stripe)]
        for pair in zip(source.keys(stripe), target.keys(stripe), strict=True):
            keys += pair
        doing = f"copying {source.manifest.name!r} to {target.manifest.name!r}"
        answer = caller.run("replay_copy", keys, [int(frozen)], doing, deadline)
        if answer[0] == b"GONE":
            raise ConfigurationError(f"{source.manifest.name!r} is gone from {caller.server.address}")


def _publish(caller: Caller, ring: Ring, found: Manifest | None) -> None:
    persist(caller.server)
    try:
        publish(caller.server, ring.manifest, found, _staged_id(ring))
    except (DatasetExistsError, InterruptedWriteError, ServerError, AuthenticationError):
        with suppress(TDDatapipesError):
            discard(caller.server, ring.manifest, _staged_id(ring))
        raise
    persist(caller.server)
