"""What is left on a server that nothing refers to: superseded generations, and writes that ended without publishing."""

from __future__ import annotations

import json
import os
import platform
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from td_datapipes.catalog import (
    APPEND_PREFIX,
    SUPERSEDED_SECONDS,
    collect,
    discard,
    find_manifest,
    sweep_appends,
    sweep_chunks,
    unlink_keys,
    unstage,
)
from td_datapipes.errors import SchemaError
from td_datapipes.keys import appender_key, appends_key, encode_name, staged_key, superseded_key
from td_datapipes.manifest import Manifest
from td_datapipes.wire.scripts import load_script
from td_datapipes.wire.server import Server

__all__ = [
    "Collected",
    "StagedWrite",
    "collect_garbage",
    "parse_notes",
    "process_is_gone",
    "staged_writes",
    "writer_note",
]

_TURN_SECONDS = 10.0
_CHUNKS = 256
"""Removed at a time."""


@dataclass(frozen=True, kw_only=True)
class Collected:
    """What was removed.

    Attributes:
        generations: superseded generations.
        writes: writes that had not been published.
        chunks: chunks of those writes.
    """

    generations: int
    writes: int
    chunks: int


@dataclass(frozen=True, kw_only=True)
class StagedWrite:
    """A write that has begun and is not published: it goes on, or was interrupted.

    Attributes:
        id: names it among the staged ones.
        host: where its process runs, or ran.
        pid: that process.
        started: seconds since 1970.
        seen: when it last said that it goes on, seconds since 1970.
        manifest: where its chunks lie; None for a write that keeps other account of them.
        fingerprint: tells what it reads, where it can be taken up by another; None where it cannot.
        note: what its writer said, as it stands on the server.
    """

    id: str
    host: str
    pid: int
    started: float
    seen: float
    manifest: Manifest | None
    fingerprint: str | None = None
    note: bytes = field(default=b"", repr=False)

    @property
    def appends(self) -> bool:
        """Whether it appends to what is published."""
        return self.id.startswith(APPEND_PREFIX)

    def interrupted(self, older_than_seconds: float) -> bool:
        """Whether its process is known to be gone, or has not been heard of for so long.

        One that can be taken up waits for that as long as for a process that may be alive.
        """
        gone = self.fingerprint is None and process_is_gone(self.host, self.pid)
        return gone or time.time() - self.seen >= older_than_seconds


def writer_note(manifest: Manifest, started: float, fingerprint: str | None = None) -> str:
    """What a writer says of itself when it begins, and from time to time."""
    note: dict[str, Any] = {"host": platform.node(), "pid": os.getpid(), "started": started, "seen": time.time()}
    note |= {} if fingerprint is None else {"fingerprint": fingerprint}
    return json.dumps({**note, "tags": manifest.tags, "manifest": json.loads(manifest.to_json())})


def staged_writes(server: Server, name: str) -> list[StagedWrite]:
    """The writes of a name that have begun and are not published, the oldest first."""
    notes = server.call(f"looking for writes of {name!r}", lambda c: c.hgetall(staged_key(name)), repeats=True)
    return sorted(parse_notes(notes), key=lambda write: write.started)


def parse_notes(notes: Any) -> Iterator[StagedWrite]:
    """The writes that a hash of notes tells of; what is no note is passed over."""
    for staged_id, text in notes.items():
        try:
            note = json.loads(text)
            manifest = Manifest.from_json(json.dumps(note["manifest"])) if "manifest" in note else None
            yield StagedWrite(
                id=staged_id.decode(),
                host=str(note["host"]),
                pid=int(note["pid"]),
                started=float(note["started"]),
                seen=float(note.get("seen", note["started"])),
                manifest=manifest,
                fingerprint=note.get("fingerprint"),
                note=text,
            )
        except (ValueError, KeyError, TypeError, SchemaError):
            continue  # not ours to judge, so not ours to remove


def collect_garbage(server: Server, name: str, older_than_seconds: float = SUPERSEDED_SECONDS) -> Collected:
    """Remove superseded generations of a name, and what interrupted writes of it have staged; nothing else.

    Args:
        server: where.
        name: of the data set; it need not be published.
        older_than_seconds: generations superseded, and writers not heard of, for so long. A writer that was a process
            of this machine and is gone is collected at once.

    Returns:
        What was removed.
    """
    generations = collect(server, name, older_than_seconds)
    current = find_manifest(server, name)
    writes = chunks = 0
    for write in staged_writes(server, name):
        if not write.interrupted(older_than_seconds):
            continue
        if write.manifest is None:
            entries = _entries(name, write)
            if entries is None:
                continue
            chunks += _remove_entries(server, name, write.id, entries)
            writes += 1
            continue
        if write.appends:
            if not _sweep_in_turn(server, name, current):
                continue  # somebody appends now: what the other left is swept by that one
        elif write.manifest.kind == "ring":
            chunks += discard(server, write.manifest, write.id)
        else:
            # Off the list first: should the writer be alive after all, it can no longer publish.
            unstage(server, name, write.id, ())
            if current is None or current.id != write.manifest.id:
                chunks += sweep_chunks(server, write.manifest)
        writes += 1
    return Collected(generations=generations, writes=writes, chunks=chunks)


@dataclass(frozen=True, kw_only=True)
class _Entries:
    """What a `RedisTensorDict` staged: labels of groups and of non-tensor values, and its data set's id."""

    id: str
    groups: list[str]
    values: list[str]


def _entries(name: str, write: StagedWrite) -> _Entries | None:
    """What a note without a manifest tells of; None where it is of another kind."""
    note = json.loads(write.note)
    if note.get("tags") != [encode_name(name)] or "structure" not in note:
        return None
    return _Entries(id=str(note["structure"]), groups=list(map(str, note["labels"])), values=list(note["values"]))


def _remove_entries(server: Server, name: str, staged_id: str, entries: _Entries) -> int:
    """Remove what a `RedisTensorDict` staged and did not publish; how many chunks that were."""
    # Off the list first: should the writer be alive after all, it can no longer publish.
    unstage(server, name, staged_id, ())
    current = find_manifest(server, name)
    # What is published has been taken off the list in the same step; looked at all the same.
    used = set() if current is None else {*(current.labels or ()), *(value.label for value in current.values)}
    prefix = b"td:{%s}:" % encode_name(name).encode()

    def command(client: Any) -> int:
        removed = 0
        for label in set(entries.groups) - used:
            first = 0
            while found := unlink_keys(
                client, (b"%s%s:%08x" % (prefix, label.encode(), chunk) for chunk in range(first, first + _CHUNKS))
            ):
                removed, first = removed + found, first + _CHUNKS
        unlink_keys(client, (b"%s%s:json" % (prefix, label.encode()) for label in set(entries.values) - used))
        ids = {label.split(b" ")[0].decode() for label in client.hkeys(superseded_key(name))}
        if entries.id not in ids and (current is None or current.id != entries.id):
            client.unlink(b"%s%s:structure" % (prefix, entries.id.encode()))
        return removed

    return server.call(f"removing what an interrupted write of {name!r} left", command, repeats=True)


def _sweep_in_turn(server: Server, name: str, current: Manifest | None) -> bool:
    """Sweep as the one writer that appends, whose number keeps one that fell silent from publishing afterwards."""
    holder = f"{platform.node()} {os.getpid()} {secrets.token_hex(4)}"
    keys = [appender_key(name), appends_key(name)]

    def run(script: str, *arguments: Any) -> Any:
        source = load_script(script).source
        number = {"append_begin": 2, "append_end": 1}[script]
        return server.call(
            f"removing what interrupted appends to {name!r} left",
            lambda client: client.eval(source, number, *keys[:number], *arguments),
            repeats=True,
        )

    answer = run("append_begin", holder, int(_TURN_SECONDS * 1000), b"")
    if not isinstance(answer, int):
        host, pid, _ = answer[0].decode().rsplit(" ", 2)
        if not process_is_gone(host, int(pid)):
            return False
        answer = run("append_begin", holder, int(_TURN_SECONDS * 1000), answer[0])
    if not isinstance(answer, int):
        return False
    try:
        sweep_appends(server, name, current)
    finally:
        run("append_end", holder)
    return True


def process_is_gone(host: str, pid: int) -> bool:
    """Whether it was a process of this machine that exists no more."""
    if host != platform.node():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    return False
