"""Names and manifests on a server: look up, list, publish, drop. No bulk data moves here."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice
from types import MappingProxyType
from typing import Any

import redis

from td_datapipes.errors import DataLossError, DatasetExistsError, DatasetNotFoundError, InterruptedWriteError
from td_datapipes.keys import (
    NAMES_KEY,
    appender_key,
    appends_key,
    encode_name,
    manifest_key,
    name_from_encoded,
    staged_key,
    superseded_key,
)
from td_datapipes.manifest import Manifest
from td_datapipes.server import open_embedded
from td_datapipes.wire.retry import RetryPolicy
from td_datapipes.wire.scripts import load_script
from td_datapipes.wire.server import Server
from td_datapipes.wire.url import ServerURL

__all__ = [
    "APPEND_PREFIX",
    "SUPERSEDED_SECONDS",
    "chunk_keys",
    "collect",
    "confirm_chunks",
    "confirm_published",
    "connect",
    "discard",
    "drop",
    "find_manifest",
    "list_names",
    "load_manifest",
    "publish",
    "retire",
    "stage",
    "sweep_appends",
    "sweep_chunks",
    "unlink_keys",
    "unstage",
]

SUPERSEDED_SECONDS = 3600.0
"""How long a superseded generation stays readable for those who have it open."""
_KEYS_PER_UNLINK = 1000
_CHUNKS_PER_SWEEP = 64
APPEND_PREFIX = "append-"
"""What the staged ids of appends begin with. Their notes hold the manifest they began from."""


def connect(url: str | ServerURL, *, require_name: bool = True, retry: RetryPolicy | None = None) -> Server:
    """A server by URL. Nothing is sent yet, but an embedded server is started with the first command."""
    parsed = url if isinstance(url, ServerURL) else ServerURL.parse(url, require_name=require_name)
    return Server(parsed, open_embedded, retry)


def find_manifest(server: Server, name: str) -> Manifest | None:
    """What is published under a name, or None."""
    text = server.call(f"reading the manifest of {name!r}", lambda client: client.get(manifest_key(name)), repeats=True)
    return None if text is None else Manifest.from_json(text)


def load_manifest(server: Server, name: str) -> Manifest:
    """What is published under a name.

    Raises:
        InterruptedWriteError: it was being written but never published.
        DatasetNotFoundError: it does not exist; the message lists the names that do.
    """
    manifest = find_manifest(server, name)
    if manifest is not None:
        return manifest
    staged = server.call("looking for interrupted writes", lambda client: client.hlen(staged_key(name)), repeats=True)
    if staged:
        raise InterruptedWriteError(
            f"data set {name!r} at {server.address} was never published: its write is still going on "
            f"or was interrupted; write it again"
        )
    names = list_names(server)
    known = ", ".join(map(repr, names[:20])) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
    raise DatasetNotFoundError(f"there is no data set {name!r} at {server.address}; it has {known or 'none'}")


def list_names(server: Server) -> list[str]:
    """The names of all published data sets, sorted."""

    def command(client: Any) -> list[str]:
        names = sorted(name_from_encoded(raw) for raw in client.smembers(NAMES_KEY))
        exists = [bool(client.exists(manifest_key(name))) for name in names]
        return [name for name, there in zip(names, exists, strict=True) if there]

    return server.call("listing the data sets", command, repeats=True)


def stage(
    server: Server, name: str, staged_id: str, note: str, strings: Mapping[bytes, bytes] = MappingProxyType({})
) -> None:
    """Say that a write of `name` has begun, before its first byte: what a crash leaves behind can then be found.

    Args:
        server, name, staged_id, note: which write.
        strings: what it writes, where that is little enough to go along in the same round trip.
    """

    def command(client: redis.Redis) -> None:
        # The name first: a name without a manifest is harmless, a manifest without its name could not be listed.
        pipe: Any = client.pipeline(transaction=False)
        pipe.sadd(NAMES_KEY, encode_name(name))
        pipe.hset(staged_key(name), staged_id, note)
        for key, value in strings.items():
            pipe.set(key, value)
        answers = pipe.execute(raise_on_error=False)
        failed = [answer for answer in answers if isinstance(answer, Exception)]
        if failed:
            if answers[1] == 1:  # The note is new: a user who may do one thing but not the other leaves none behind.
                with suppress(redis.ResponseError):
                    unlink_keys(client, strings)
                    client.hdel(staged_key(name), staged_id)
            raise failed[0]

    server.call(f"beginning to write {name!r}", command, repeats=True)


def unstage(server: Server, name: str, staged_id: str, keys: Iterable[bytes], *, forget: bool = True) -> None:
    """Take back a write that was not published: its chunks, and the word about it unless more chunks may yet come."""

    def command(client: redis.Redis) -> None:
        unlink_keys(client, keys)
        if forget:
            client.hdel(staged_key(name), staged_id)

    server.call(f"taking back what was staged of {name!r}", command, repeats=True)


def discard(server: Server, manifest: Manifest, staged_id: str, *, forget: bool = True) -> int:
    """Take back a write whose manifest names all its keys, as that of a replay buffer does, and was not published.

    What is published under its name, or was and is superseded since, stays: a restore writes to a buffer that is there.

    Args:
        server: where.
        manifest: what would have been published.
        staged_id: the write's own id; off the list first, so that nobody can publish it any more.
        forget: False leaves it on the list: more may yet come of it, which is then collected.

    Returns:
        How many chunks were removed.
    """
    name = manifest.name
    if forget:
        unstage(server, name, staged_id, ())
    if (current := find_manifest(server, name)) is not None and current.id == manifest.id:
        return 0

    def command(client: Any) -> int:
        labels = client.hkeys(superseded_key(name))
        if any(label.split(b" ")[0] == manifest.id.encode() for label in labels):
            return 0
        unlink_keys(client, _keys_beside_chunks(manifest))
        return unlink_keys(client, chunk_keys(manifest))

    return server.call(f"taking back what was staged of {name!r}", command, repeats=True)


def _keys_beside_chunks(manifest: Manifest) -> list[bytes]:
    """What a generation keeps on the server beside its chunks."""
    return [*manifest.fence_keys, *manifest.ring_keys]


def publish(server: Server, manifest: Manifest, found: Manifest | None, staged_id: str) -> None:
    """Make a manifest what its name stands for, in one step.

    Args:
        server: where.
        manifest: the new one.
        found: what was published when the write began, or None.
        staged_id: the write's own id; it counts as staged no longer.

    Raises:
        DatasetExistsError: somebody else published under the name since.
        InterruptedWriteError: the write fell silent for so long that what it had staged was collected.
    """
    script = load_script("publish")
    keys = [manifest_key(manifest.name), staged_key(manifest.name), superseded_key(manifest.name)]
    expected = "" if found is None else f"{found.id} {found.generation}"
    arguments: list[Any] = [manifest.to_json(), expected, staged_id, repr(time.time())]
    answer = server.call(
        f"publishing {manifest.name!r}",
        lambda client: client.eval(script.source, len(keys), *keys, *arguments),
        repeats=True,
    )
    if answer == b"GONE":
        raise InterruptedWriteError(
            f"what this write of {manifest.name!r} at {server.address} had staged was removed, because its writer had "
            f"not been heard of for long; nothing was published: write it again"
        )
    if answer != b"OK":
        raise DatasetExistsError(
            f"data set {manifest.name!r} at {server.address} was published by another writer while this one wrote; "
            f"nothing of this write was kept. Open what is there, or write again with overwrite=True"
        )
    if found is not None and found.id != manifest.id:
        retire(server, found)


def retire(server: Server, manifest: Manifest) -> None:
    """Remove a `mutable` data set in whose place another was published: nobody may go on writing to it."""
    if manifest.kind != "mutable":
        return
    # What its writers look at before they write goes first.
    keys = chain([manifest.structure_key], chunk_keys(manifest))
    server.call(f"removing the former {manifest.name!r}", lambda client: unlink_keys(client, keys))


def confirm_chunks(server: Server, manifest: Manifest, before: Manifest | None = None) -> None:
    """On a cluster, make sure before they are published that chunks are still there, and with replicas.

    Masters confirm a write before their replicas have it; what a master had not passed on when it failed is gone.

    Args:
        server: where.
        manifest: what is to be published.
        before: the generation it was appended to; what only that one's rows are in has been published before.

    Raises:
        DataLossError: a chunk is gone. It is not published, and can be written again.
    """
    server.wait_replicated()
    if server.cluster() is None:
        return
    wanted: list[tuple[bytes, int]] = []
    for group, layout in enumerate(manifest.layouts):
        first_row = before.rows if before is not None and layout.stride_bytes else 0
        first = first_row // layout.records_per_chunk * layout.pieces
        for chunk in range(first, layout.num_chunks(manifest.rows)):
            wanted.append((manifest.chunk_key(group, chunk), layout.chunk_bytes(chunk, manifest.rows)))
    for number, heap in enumerate(manifest.heaps):
        first = 0 if before is None else before.heaps[number].nbytes // heap.chunk_bytes
        for chunk in range(first, heap.num_chunks):
            nbytes = min(heap.chunk_bytes, heap.nbytes - chunk * heap.chunk_bytes)
            wanted.append((manifest.chunk_key(len(manifest.layouts) + number, chunk), nbytes))
    for start in range(0, len(wanted), _KEYS_PER_UNLINK):
        some = wanted[start : start + _KEYS_PER_UNLINK]

        def command(client: Any, some: Sequence[tuple[bytes, int]] = some) -> list[int]:
            with client.pipeline(transaction=False) as pipeline:
                for key, _ in some:
                    pipeline.strlen(key)
                return list(pipeline.execute())

        found = server.call(f"confirming chunks of {manifest.name!r}", command, repeats=True)
        for (key, nbytes), length in zip(some, found, strict=True):
            if length < nbytes:
                raise DataLossError(
                    f"chunk {key.decode()} of {manifest.name!r} at {server.address} was lost while it was written: "
                    f"{nbytes} bytes confirmed, {length} there; a master has failed over to a replica that lacked it. "
                    f"Nothing was published; write again"
                )


def confirm_published(server: Server, manifest: Manifest, again: Callable[[], None]) -> None:
    """On a cluster, make sure that a failover has not undone what was published.

    Args:
        server: where.
        manifest: what was published.
        again: publishes it once more; nothing happens where it is there.
    """
    server.wait_replicated()
    if server.cluster() is None:
        return
    while (current := find_manifest(server, manifest.name)) is None or current.generation < manifest.generation:
        again()
        server.wait_replicated()


def collect(server: Server, name: str, older_than_seconds: float = SUPERSEDED_SECONDS) -> int:
    """Remove superseded generations of a name; chunks that a later generation of the same id shares are kept.

    Returns:
        How many generations were removed.
    """

    def command(client: Any) -> int:
        current = find_manifest(server, name)
        removed = 0
        for label, value in client.hgetall(superseded_key(name)).items():
            since, text = value.split(b" ", 1)
            if time.time() - float(since) < older_than_seconds:
                continue
            old = Manifest.from_json(text)
            if current is None or old.id != current.id:
                unlink_keys(client, chain(chunk_keys(old), _keys_beside_chunks(old)))
            client.hdel(superseded_key(name), label)
            removed += 1
        return removed

    return server.call(f"removing old generations of {name!r}", command, repeats=True)


def drop(server: Server, name: str) -> None:
    """Remove a data set with all its generations. Whoever has it open gets a `DataLossError` from then on.

    Raises:
        DatasetNotFoundError: there is none of that name.
    """
    manifest = load_manifest(server, name)

    def command(client: redis.Redis) -> None:
        client.delete(manifest_key(name))
        unlink_keys(client, chain(chunk_keys(manifest), _keys_beside_chunks(manifest)))
        unlink_keys(client, [appender_key(name), appends_key(name)])

    server.call(f"removing {name!r}", command, repeats=True)
    sweep_appends(server, name, None)
    collect(server, name, older_than_seconds=0)
    server.call(f"removing {name!r}", lambda client: client.srem(NAMES_KEY, encode_name(name)), repeats=True)


def sweep_appends(server: Server, name: str, current: Manifest | None) -> None:
    """Remove the chunks that appends which ended without publishing left behind the published rows.

    Args:
        server: where.
        name: of the data set.
        current: what is published now.
    """

    def command(client: Any) -> None:
        for staged_id, note in client.hgetall(staged_key(name)).items():
            if not staged_id.startswith(APPEND_PREFIX.encode()):
                continue
            begun = Manifest.from_json(json.dumps(json.loads(note)["manifest"]))
            manifest = current if current is not None and current.id == begun.id else begun
            _sweep(client, manifest)
            client.hdel(staged_key(name), staged_id)

    server.call(f"removing what interrupted appends to {name!r} left", command, repeats=True)


def sweep_chunks(server: Server, manifest: Manifest) -> int:
    """Remove the chunks behind the last row of a manifest, and say how many there were.

    Args:
        server: where.
        manifest: of a write that was not published: it has 0 rows, and all its chunks go.
    """

    def command(client: Any) -> int:
        return _sweep(client, manifest)

    return server.call(f"removing what an interrupted write of {manifest.name!r} left", command, repeats=True)


def _sweep(client: Any, manifest: Manifest) -> int:
    removed = 0
    for group, first in enumerate(manifest.chunk_counts):
        # Chunks are written in order, so the first run of missing ones is behind the last.
        while found := client.unlink(
            *(manifest.chunk_key(group, chunk) for chunk in range(first, first + _CHUNKS_PER_SWEEP))
        ):
            removed += found
            first += _CHUNKS_PER_SWEEP
    if not manifest.rows:
        for group in range(len(manifest.chunk_counts)):
            client.unlink(manifest.checksums_key(group))
    return removed


def chunk_keys(manifest: Manifest) -> Iterator[bytes]:
    """The key of every chunk of a generation, and of what else holds its rows."""
    for group, layout in enumerate(manifest.layouts):
        for chunk in range(layout.num_chunks(manifest.rows)):
            yield manifest.chunk_key(group, chunk)
    for number, heap in enumerate(manifest.heaps, len(manifest.layouts)):
        for chunk in range(heap.num_chunks):
            yield manifest.chunk_key(number, chunk)
    yield from manifest.checksums_keys
    for value in manifest.values:
        yield manifest.value_key(value)
    if manifest.kind == "mutable":
        yield manifest.structure_key


def unlink_keys(client: Any, keys: Iterable[bytes]) -> int:
    """Remove keys, many at a time; the server frees their memory behind the scenes. Says how many there were."""
    removed = 0
    rest = iter(keys)
    while batch := list(islice(rest, _KEYS_PER_UNLINK)):
        removed += client.unlink(*batch)
    return removed
