"""Append rows to a published data set: bytes behind the published ones first, the next generation's manifest last.

One writer appends at a time. It holds a lease that it renews while it writes, and a number that grows with every
writer. Each shard keeps the number of the latest one beside its chunks and takes nothing from an earlier one, so a
writer that fell silent and wakes up again cannot touch rows that its successor has published: the server compares the
numbers in the same step in which it writes. (M. Kleppmann, "How to do distributed locking", 2016, on fencing tokens.)
"""

from __future__ import annotations

import os
import platform
import secrets
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

from tensordict import TensorDictBase

from td_datapipes.blocks import RowBlock
from td_datapipes.catalog import (
    APPEND_PREFIX,
    confirm_chunks,
    confirm_published,
    connect,
    load_manifest,
    stage,
    sweep_appends,
)
from td_datapipes.errors import (
    AppendConflictError,
    AuthenticationError,
    ConfigurationError,
    DataLossError,
    SchemaError,
    ServerError,
    TDDatapipesError,
)
from td_datapipes.garbage import process_is_gone, writer_note
from td_datapipes.group_chunks import GroupChunks
from td_datapipes.heap_writer import HeapWriter
from td_datapipes.integrity import store_checksums
from td_datapipes.keys import appender_key, appends_key, manifest_key, staged_key
from td_datapipes.manifest import Manifest
from td_datapipes.progress import progress_bar
from td_datapipes.room import check_room
from td_datapipes.upstream import open_description
from td_datapipes.wire.scripts import load_script
from td_datapipes.wire.server import Server
from td_datapipes.wire.url import ServerURL
from td_datapipes.writer import iterate_batches, persist

__all__ = ["LEASE_SECONDS", "append_dataset", "append_rows"]

LEASE_SECONDS = 10.0
"""How long a writer that stops answering keeps others from appending."""
_POLL_SECONDS = 0.05


def append_dataset(
    data: TensorDictBase | Iterable[TensorDictBase],
    url: str | ServerURL,
    *,
    complete: bool = False,
    wait_seconds: float = 0.0,
    progress: bool | None = None,
) -> Manifest:
    """Append rows to a data set and publish them in one step, all or nothing.

    No byte below the old number of rows is altered and no chunk is copied: whoever has the data set open reads on, and
    sees the new rows after `RedisTDDataset.refresh`, or at once with ``follow=True``. A writer that crashes leaves
    bytes behind the published rows that nobody reads and the next one writes over.

    Args:
        data: a TensorDict of batch size ``[rows, ...]``, or an iterable of them; the fields are the data set's.
        url: server and name.
        complete: this is the end of it. Who follows the data set stops there, and nothing can be appended any more.
        wait_seconds: how long to wait for another writer that is appending.
        progress: show a progress bar; by default on a terminal only.

    Returns:
        What was published; what was there before where there was nothing to append.

    Raises:
        DatasetNotFoundError: there is no such data set yet; `write_dataset` makes it.
        SchemaError: a batch differs from the data set; it names the field and both dtypes and shapes.
        AppendConflictError: another writer is appending, or took over from this one.
        ConfigurationError: the data set is complete, or of a kind that is not appended to.
        DataLossError: the chunk to be extended has lost published rows.
        ServerFullError, ServerUnavailableError, AuthenticationError: what the server said.
            Nothing was published then, and the rows that were there are as they were.
    """
    server = connect(url)
    try:
        total, blocks = iterate_batches(data)
        return append_rows(server, total, blocks, complete=complete, wait_seconds=wait_seconds, progress=progress)
    finally:
        server.close()


def append_rows(
    server: Server,
    total: int | None,
    blocks: Iterable[RowBlock],
    *,
    complete: bool,
    wait_seconds: float,
    progress: bool | None,
) -> Manifest:
    """As `append_dataset`, from blocks of rows (`total` in all, where that is known) to the server URL's name."""
    found = open_description(server, server.url.name)  # before anything is written under the name
    if not isinstance(found, Manifest):
        raise ConfigurationError(
            f"{server.url.name!r} at {server.address} was written by TensorDictStore, whose strings have a fixed "
            f"length: rows cannot be appended; convert it to records, and append to that"
        )
    append = _Append(server, wait_seconds)
    try:
        return append.run(total, blocks, complete=complete, progress=progress)
    finally:
        append.end()


class _Append:
    """One writer's turn: from the lease to the manifest."""

    def __init__(self, server: Server, wait_seconds: float) -> None:
        self._server, self._name = server, server.url.name
        self._holder = f"{platform.node()} {os.getpid()} {secrets.token_hex(4)}"
        self._number = self._begin(time.monotonic() + wait_seconds)
        self._renewed = time.monotonic()
        self._staged_id = f"{APPEND_PREFIX}{self._number}"
        self._manifest: Manifest

    def _begin(self, deadline: float) -> int:
        replaceable = b""
        while True:
            keys = [appender_key(self._name), appends_key(self._name)]
            answer = self._run("append_begin", keys, self._holder, int(LEASE_SECONDS * 1000), replaceable)
            if isinstance(answer, int):
                return answer
            holder, left_ms = answer
            host, pid, _ = holder.decode().rsplit(" ", 2)
            replaceable = holder if process_is_gone(host, int(pid)) else b""
            if replaceable:
                continue
            if time.monotonic() >= deadline:
                raise AppendConflictError(
                    f"process {pid} on {host} is appending to {self._name!r} at {self._server.address}; if it has "
                    f"died, others may append in {left_ms / 1000:.1f} s. Pass wait_seconds to wait for it"
                )
            time.sleep(_POLL_SECONDS)

    def run(self, total: int | None, blocks: Iterable[RowBlock], *, complete: bool, progress: bool | None) -> Manifest:
        """Write and publish."""
        server = self._server
        # Read under the lease: no earlier appender can change any more what is published.
        self._manifest = manifest = load_manifest(server, self._name)
        self._check_kind()
        for fence in manifest.fence_keys:
            self._expect_ok(self._run("append_fence", [fence], self._number))
        sweep_appends(server, self._name, manifest)
        if total is not None:
            check_room(server, manifest.schema, total)
        stage(server, self._name, self._staged_id, writer_note(manifest, time.time()))
        try:
            with progress_bar(f"appending to {self._name}", total, progress) as advance:
                rows, heap_bytes = self._write(blocks, advance)
            persist(server)
            confirm_chunks(server, manifest.with_rows(rows, heap_bytes=heap_bytes), manifest)
        except BaseException:
            self._undo()
            raise
        if rows == manifest.rows and not complete:
            self._undo()
            return manifest
        last = (*(group.last_checksum for group in self._groups), *self._heaps.last_checksums)
        last_checksums = None if manifest.last_checksums is None else last
        published = manifest.with_rows(rows, complete=complete, last_checksums=last_checksums, heap_bytes=heap_bytes)
        try:
            self._publish(published)
        except (AppendConflictError, ServerError, AuthenticationError):
            self._undo()
            raise
        # After any other failure it may have been published: its chunks stay, and the staged entry tells of them.
        persist(server)
        confirm_published(server, published, lambda: self._publish(published))
        return published

    def _check_kind(self) -> None:
        if self._manifest.kind != "frozen":
            raise ConfigurationError(
                f"data set {self._name!r} is {self._manifest.kind}: only frozen ones, as write_dataset makes them, "
                "are appended to"
            )
        if self._manifest.complete:
            raise ConfigurationError(
                f"data set {self._name!r} is complete with {self._manifest.rows} rows: its last writer said that "
                "nothing follows. Write it anew with write_dataset(..., overwrite=True)"
            )

    def _write(self, blocks: Iterable[RowBlock], advance: Any) -> tuple[int, list[int]]:
        """Send the rows; how many the data set has with them, and how many bytes each heap."""
        manifest, schema = self._manifest, self._manifest.schema
        begun = manifest.last_checksums or (0,) * len(schema.groups)
        self._groups = groups = [
            GroupChunks(manifest, number, self._put, manifest.rows, begun[number])
            for number in range(len(schema.groups))
        ]
        self._heaps = heaps = HeapWriter(manifest, self._put)
        rows = manifest.rows
        for block in blocks:
            found = block.schema_like(schema)
            if not found.same_rows(schema):
                raise SchemaError(
                    f"the batch does not fit the data set {self._name!r}: {schema.difference(found)} "
                    "(here: the data set, there: the batch); nothing was appended"
                )
            dense = block.dense(heaps, schema)
            for group in groups:
                group.add(dense)
            rows += block.rows
            advance(block.rows)
        for number, group in enumerate(groups):
            group.flush()
            if manifest.last_checksums is not None:
                store_checksums(self._server, manifest, number, group.first_chunk, group.checksums)
        heaps.flush()
        for number, first, sums in heaps.checksums if manifest.last_checksums is not None else ():
            store_checksums(self._server, manifest, number, first, sums)
        return rows, heaps.nbytes

    def _put(self, group: int, chunk: int, start_bytes: int, parts: Sequence[memoryview | bytes], /) -> None:
        if time.monotonic() - self._renewed > LEASE_SECONDS / 3:
            keys = [appender_key(self._name), appends_key(self._name)]
            self._expect_ok(self._run("append_renew", keys, self._holder, int(LEASE_SECONDS * 1000), self._number))
            self._renewed = time.monotonic()
        keys = [self._manifest.chunk_key(group, chunk), self._manifest.fence_key(group, chunk)]
        answer = self._run("append_chunk", keys, self._number, start_bytes, b"".join(parts))
        if answer.startswith(b"SHORT"):
            raise DataLossError(
                f"data set {self._name!r} at {self._server.address}, chunk {keys[0].decode()}: {start_bytes} bytes "
                f"of published rows expected, {answer.split()[1].decode()} found: it was deleted, evicted or lost in "
                "a restart. Nothing was appended; write the data set again"
            )
        self._expect_ok(answer)

    def _publish(self, manifest: Manifest) -> None:
        name, began = self._name, self._manifest
        keys = [manifest_key(name), staged_key(name), appender_key(name), appends_key(name)]
        expected = f"{began.id} {began.generation}"
        answer = self._run("append_publish", keys, manifest.to_json(), expected, self._staged_id, self._number)
        if answer.startswith(b"CONFLICT"):
            raise AppendConflictError(
                f"data set {name!r} at {self._server.address} was written anew or removed while rows were appended "
                f"to it (generation {began.generation} of {began.id}); nothing was appended"
            )
        self._expect_ok(answer)

    def _expect_ok(self, answer: bytes) -> None:
        if answer != b"OK":
            raise AppendConflictError(
                f"another writer has begun to append to {self._name!r} at {self._server.address} after this one had "
                f"not been heard of for {LEASE_SECONDS:.0f} s; nothing of this append was published: append again"
            )

    def _undo(self) -> None:
        """Remove what was written, if nobody has taken over; if somebody has, it is theirs to write over."""
        with suppress(TDDatapipesError):
            fences = [self._run("append_fence", [fence], self._number) for fence in self._manifest.fence_keys]
            if all(answer == b"OK" for answer in fences):
                sweep_appends(self._server, self._name, self._manifest)

    def end(self) -> None:
        """Let others append."""
        with suppress(TDDatapipesError):
            self._run("append_end", [appender_key(self._name)], self._holder)

    def _run(self, script: str, keys: Sequence[bytes], *arguments: Any) -> Any:
        source = load_script(script).source
        return self._server.call(
            f"appending to {self._name!r}",
            lambda client: client.eval(source, len(keys), *chain(keys, arguments)),
            repeats=True,
        )
