"""Writes that have begun and are not published: which there are, how far they got, and taking them over.

A write that can be taken up again keeps its chunks when it is interrupted. Its note on the server then says what it was
reading (`fingerprint`) and how its rows are cut into chunks (`manifest`); which of them arrived, the chunks tell.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from td_datapipes.catalog import APPEND_PREFIX, find_manifest, sweep_appends, unstage
from td_datapipes.manifest import (
    NAMES_KEY,
    SPARE_BYTES,
    Manifest,
    appender_key,
    name_from_encoded,
    staged_key,
    superseded_key,
)
from td_datapipes.wire.scripts import load_script
from td_datapipes.wire.server import Server

__all__ = [
    "StagedWrite",
    "claim",
    "count_rows",
    "find_staged",
    "going_on",
    "new_note",
    "remove_staged",
    "superseded_generations",
    "sweep_staged",
]

_KEYS_PER_ASK = 512
_own: set[str] = set()
"""The ids of this process's own writes that are going on."""


@dataclass(frozen=True, kw_only=True)
class StagedWrite:
    """A write that has not been published.

    Attributes:
        name: of the data set it writes.
        id: its own.
        note: what its writer said of it, as it stands on the server.
    """

    name: str
    id: str
    note: str = field(repr=False)

    @property
    def facts(self) -> Mapping[str, Any]:
        """The note's entries."""
        found: Mapping[str, Any] = json.loads(self.note)
        return found

    @property
    def is_append(self) -> bool:
        """Whether it appends; its chunks are those of the data set then."""
        return self.id.startswith(APPEND_PREFIX)

    @property
    def fingerprint(self) -> str | None:
        """What it reads, where it can be taken up again."""
        found: str | None = self.facts.get("fingerprint")
        return found

    @property
    def manifest(self) -> Manifest:
        """What it writes; of a write that can be taken up again."""
        return Manifest.from_json(json.dumps(self.facts["manifest"]))

    @property
    def age_seconds(self) -> float:
        """Since it began, or was taken up."""
        return time.time() - float(self.facts.get("started", 0.0))

    @property
    def is_abandoned(self) -> bool:
        """Whether its writer was a process of this machine that is gone. Of other machines nobody can tell."""
        facts = self.facts
        if facts.get("host") != platform.node():
            return False
        if facts["pid"] == os.getpid():
            return self.id not in _own
        try:
            os.kill(int(facts["pid"]), 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return False


@contextmanager
def going_on(staged_id: str) -> Iterator[None]:
    """While this lasts, nobody in this process takes that write for an abandoned one."""
    _own.add(staged_id)
    try:
        yield
    finally:
        _own.discard(staged_id)


def new_note(tags: Iterable[str], fingerprint: str | None, manifest: Manifest | None) -> str:
    """What a writer that begins says of itself."""
    note: dict[str, Any] = {"host": platform.node(), "pid": os.getpid(), "started": time.time(), "tags": list(tags)}
    if fingerprint is not None and manifest is not None:
        note |= {"fingerprint": fingerprint, "token": secrets.token_hex(4), "manifest": json.loads(manifest.to_json())}
    return json.dumps(note)


def find_staged(server: Server, name: str) -> list[StagedWrite]:
    """The writes of a name that have begun and are not published."""

    def command(client: Any) -> dict[bytes, bytes]:
        found: dict[bytes, bytes] = client.hgetall(staged_key(name))
        return found

    notes = server.call(f"looking for interrupted writes of {name!r}", command)
    return [StagedWrite(name=name, id=raw.decode(), note=note.decode()) for raw, note in sorted(notes.items())]


def claim(server: Server, write: StagedWrite, note: str) -> bool:
    """Make an interrupted write this process's own, in one step.

    Returns:
        False where somebody else has taken it over, or removed it.
    """
    source = load_script("claim").source
    answer = server.call(
        f"taking up the write of {write.name!r}",
        lambda client: client.eval(source, 1, staged_key(write.name), write.id, write.note, note),
    )
    return bool(answer == b"OK")


def count_rows(server: Server, manifest: Manifest, limit: int) -> int:
    """How many rows from the first on have all their chunks, whole, on the server; at most `limit`."""
    rows = limit
    for group, layout in enumerate(manifest.layouts):
        if layout.stride_bytes:
            chunks = _count_chunks(server, manifest, group, layout.num_chunks(limit))
            # A chunk that is not full is the last one of the rows.
            rows = min(rows, chunks // layout.pieces * layout.records_per_chunk)
    return rows


def _count_chunks(server: Server, manifest: Manifest, group: int, limit: int) -> int:
    """How many chunks from the first on are full."""
    layout = manifest.layouts[group]
    for first in range(0, limit, _KEYS_PER_ASK):
        chunks = range(first, min(first + _KEYS_PER_ASK, limit))
        keys = [manifest.chunk_key(group, chunk) for chunk in chunks]

        def command(client: Any, keys: list[bytes] = keys) -> list[int]:
            pipeline = client.pipeline(transaction=False)
            for key in keys:
                pipeline.strlen(key)
            lengths: list[int] = pipeline.execute()
            return lengths

        lengths = server.call("looking for what has arrived", command)
        for chunk, length in zip(chunks, lengths, strict=True):
            rows = (chunk // layout.pieces + 1) * layout.records_per_chunk
            if length != layout.chunk_bytes(chunk, rows) + SPARE_BYTES:
                return chunk
    return limit


def remove_staged(server: Server, write: StagedWrite) -> int:
    """Remove the chunks of a write that nobody carries on, and the word about it.

    Returns:
        How many chunks there were.
    """
    tags: list[str] = list(write.facts.get("tags", ()))

    def command(client: Any) -> list[bytes]:
        return [key for tag in tags for key in client.scan_iter(match=b"td:{%s}:*" % tag.encode(), count=1000)]

    keys = server.call(f"looking for what an interrupted write of {write.name!r} left", command)
    unstage(server, write.name, write.id, keys)
    return len(keys)


def sweep_staged(server: Server, older_than_seconds: float, *, dry_run: bool = False) -> list[StagedWrite]:
    """Remove what writers that are gone have left behind, of all names.

    A write that can be taken up again is kept until it is that old; one of a process of this machine that is gone and
    that cannot be taken up goes at once; that of another machine, which may be alive, stays.

    Returns:
        The writes that were removed, or would be.
    """
    gone = []
    for name in _names_in_use(server):
        for write in find_staged(server, name):
            kept = write.fingerprint is not None and write.age_seconds < older_than_seconds
            if kept or not write.is_abandoned or (write.is_append and _is_appending(server, name)):
                continue
            if not dry_run and write.is_append:
                sweep_appends(server, name, find_manifest(server, name))
            elif not dry_run:
                remove_staged(server, write)
            gone.append(write)
    return gone


def _names_in_use(server: Server) -> list[str]:
    """All names, also those of which nothing was ever published."""
    raw: Any = server.call("listing the names", lambda client: client.smembers(NAMES_KEY))
    return sorted(map(name_from_encoded, raw))


def _is_appending(server: Server, name: str) -> bool:
    return bool(server.call(f"asking who appends to {name!r}", lambda client: client.exists(appender_key(name))))


def superseded_generations(server: Server, name: str) -> list[dict[str, Any]]:
    """The earlier generations of a name that are still kept, the oldest first: number, rows, id, and for how long."""

    def command(client: Any) -> list[bytes]:
        found: list[bytes] = client.hvals(superseded_key(name))
        return found

    found = []
    for value in server.call(f"looking for earlier generations of {name!r}", command):
        since, text = value.split(b" ", 1)
        old = Manifest.from_json(text)
        found.append(
            {
                "generation": old.generation,
                "rows": old.rows,
                "id": old.id,
                "superseded_seconds": max(0.0, time.time() - float(since)),
            }
        )
    return sorted(found, key=lambda item: int(str(item["generation"])))
