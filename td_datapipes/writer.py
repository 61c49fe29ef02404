"""Write a data set: rows into records, records into chunks, and the manifest last."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain
from typing import Any

import redis
from tensordict import TensorDictBase, is_tensor_collection

from td_datapipes.blocks import RowBlock, RowSource, TensorDictBlock
from td_datapipes.catalog import (
    chunk_keys,
    collect,
    confirm_chunks,
    confirm_published,
    connect,
    find_manifest,
    publish,
    stage,
    unstage,
)
from td_datapipes.errors import (
    AuthenticationError,
    ConfigurationError,
    DatasetExistsError,
    InterruptedWriteError,
    SchemaError,
    ServerError,
    ServerTimeoutError,
    TDDatapipesError,
)
from td_datapipes.garbage import staged_writes, writer_note
from td_datapipes.group_chunks import IN_FLIGHT, GroupChunks
from td_datapipes.heap_resume import Arrived, find_arrived, forget_rest
from td_datapipes.heap_writer import HeapWriter, new_heaps
from td_datapipes.integrity import store_checksums
from td_datapipes.manifest import ChunkLayout, Manifest
from td_datapipes.progress import progress_bar
from td_datapipes.room import check_room, longest_chunk, shard_tags
from td_datapipes.schema import Schema
from td_datapipes.server import wait_persisted
from td_datapipes.staged import arrived_checksums, claim, count_rows, going_on, is_abandoned
from td_datapipes.wire.chunk_writer import ChunkWriter
from td_datapipes.wire.retry import RetryPolicy
from td_datapipes.wire.server import Server
from td_datapipes.wire.url import ServerURL

__all__ = [
    "MAX_RECORDS_PER_CHUNK",
    "find_free",
    "iterate_batches",
    "persist",
    "write_dataset",
    "write_rows",
    "write_source",
]

MAX_RECORDS_PER_CHUNK = 16384
"""Keeps the table of range requests small where records are."""
_INTERRUPTIONS = (KeyboardInterrupt, SystemExit, ConnectionError, ServerError, ServerTimeoutError, AuthenticationError)
"""What ends a write and says nothing against its rows."""
HEARTBEAT_SECONDS = 10.0
"""How often a writer says that it goes on."""


def write_dataset(
    data: TensorDictBase | Iterable[TensorDictBase],
    url: str | ServerURL,
    *,
    overwrite: bool = False,
    chunk_bytes: int | None = None,
    shards: int | None = None,
    progress: bool | None = None,
    retry: RetryPolicy | None = None,
) -> Manifest:
    """Write rows to a server and publish them as one data set, all or nothing.

    Args:
        data: a TensorDict (or tensorclass) of batch size ``[rows, ...]``, or an iterable of such batches that together
            may be larger than memory. The first batch decides the schema. Fields may be of variable length: jagged
            nested tensors, lazy stacks of rows that differ in their first dim, and ``NonTensorStack`` of strings, bytes
            or what JSON holds, one value a row.
        url: server and name, as in ``redis://localhost:6379/0#name``.
        overwrite: publish in place of what the name stands for now; those who have that open can read on for an hour.
        chunk_bytes: longest stretch of records, or of values of variable length, in one server string, a multiple of
            16; 4 MiB, or less where the server takes less.
        shards: into how many shards, each of one slot of a cluster, the chunks are dealt. By default 1 on one server
            and 4 for each master of a cluster, which cover the masters evenly. ``atomic=True`` needs 1 on a cluster.
        progress: show a progress bar; by default on a terminal only.
        retry: how what failed is tried again; by default as the URL's ``retry_...`` options say.

    Returns:
        What was published.

    Raises:
        SchemaError: a field that cannot be stored, or a batch that differs from the first; it names the field.
        DatasetExistsError: the name is taken and `overwrite` is not set, or another writer published meanwhile.
        ServerFullError, ValueTooLargeError, ServerUnavailableError, AuthenticationError: what the server said.
            Nothing is published then, and what was staged is removed where the server can still be reached.
    """
    if shards is not None and shards < 1:
        raise ConfigurationError(f"shards must be 1 or more, got {shards}")
    server = connect(url, retry=retry)
    try:
        return write_rows(server, data, overwrite=overwrite, chunk_bytes=chunk_bytes, shards=shards, progress=progress)
    finally:
        server.close()


def write_rows(
    server: Server,
    data: TensorDictBase | Iterable[TensorDictBase],
    *,
    overwrite: bool,
    chunk_bytes: int | None,
    shards: int | None = None,
    progress: bool | None,
    complete: Callable[[Manifest], Manifest] | None = None,
    like: Schema | None = None,
) -> Manifest:
    """As `write_dataset`, on a server that is connected.

    Args:
        server: where, and under which name.
        data, overwrite, chunk_bytes, shards, progress: as for `write_dataset`.
        complete: as for `write_source`.
        like: of which field is of variable length, and of which kind, where the first batch leaves it open.
    """
    found = find_free(server, overwrite=overwrite)
    longest_chunk(server, chunk_bytes)  # refuse what cannot work before the first batch is made
    source = _Batches(data, like)
    return write_source(
        server, source, found, chunk_bytes=chunk_bytes, shards=shards, progress=progress, complete=complete
    )


def find_free(server: Server, *, overwrite: bool) -> Manifest | None:
    """What is published under the URL's name, where it may be replaced.

    Raises:
        DatasetExistsError: something is, and `overwrite` is not set.
    """
    name = server.url.name
    found = find_manifest(server, name)
    if found is not None and not overwrite:
        raise DatasetExistsError(
            f"data set {name!r} exists at {server.address} ({found.rows} rows, generation {found.generation}); "
            f"pass overwrite=True to publish a new generation in its place, or choose another name"
        )
    return found


def write_source(
    server: Server,
    source: RowSource,
    found: Manifest | None,
    *,
    chunk_bytes: int | None,
    progress: bool | None,
    shards: int | None = None,
    resume: bool = True,
    complete: Callable[[Manifest], Manifest] | None = None,
) -> Manifest:
    """Stage the rows of a source and publish them as one data set, all or nothing.

    Args:
        server: where; the name is its URL's.
        source: gives the rows. One with a fingerprint is taken up where a write of it was interrupted on this machine,
            and keeps what it has staged where it is interrupted itself.
        found: what is published under the name (see `find_free`); it is replaced.
        chunk_bytes: as `write_dataset` takes it.
        progress: show a progress bar; by default on a terminal only.
        shards: as `write_dataset` takes it.
        resume: False begins anew in any case.
        complete: gets the manifest when every chunk is confirmed, before it is published; gives the one to publish.
    """
    name = server.url.name
    largest = longest_chunk(server, chunk_bytes)
    if source.num_rows is not None:
        check_room(server, source.schema, source.num_rows)
    staging = _Staging(server, name, source, largest, shards, resume=resume)
    try:
        with going_on(staging.id), progress_bar(f"writing {name}", source.num_rows, progress) as advance:
            advance(staging.first_row)
            for block in source.blocks(staging.first_row):
                staging.add(block)
                advance(block.rows)
        manifest = staging.finish(found)
        if complete is not None:
            manifest = complete(manifest)
        persist(server)
        confirm_chunks(server, manifest)
    except BaseException as error:
        staging.end(error)
        raise
    try:
        publish(server, manifest, found, manifest.id)
    except (DatasetExistsError, InterruptedWriteError, ServerError, AuthenticationError):
        staging.undo()
        raise
    # After any other failure (a time-out, Ctrl-C) it may have been published, or may yet be: its chunks stay, and
    # unless it was, the staged entry tells of them.
    persist(server)
    confirm_published(server, manifest, lambda: publish(server, manifest, found, manifest.id))
    if found is not None:
        collect(server, name)
    return manifest


class _Batches:
    """TensorDicts as a source of rows, which cannot be had a second time."""

    fingerprint = None

    def __init__(self, data: TensorDictBase | Iterable[TensorDictBase], like: Schema | None) -> None:
        self.num_rows, batches = iterate_batches(data)
        first = next(batches, None)
        if first is None:
            raise SchemaError("there is nothing to write: the iterable gave no batch, so there is no schema either")
        self.schema = first.schema_like(like)
        self._blocks = chain([first], batches)

    def blocks(self, start_row: int) -> Iterator[RowBlock]:
        """See `RowSource`."""
        del start_row  # 0
        return self._blocks


def iterate_batches(data: TensorDictBase | Iterable[TensorDictBase]) -> tuple[int | None, Iterator[RowBlock]]:
    """How many rows there are, where that is known, and the batches."""
    if is_tensor_collection(data):
        batch = _plain(data)
        return (batch.batch_size[0] if batch.batch_dims else None), iter([TensorDictBlock(batch)])
    if not isinstance(data, Iterable):
        raise SchemaError(f"rows are a TensorDict or an iterable of TensorDicts, not {type(data).__name__}")
    return None, (TensorDictBlock(_plain(batch)) for batch in data)


def _plain(batch: Any) -> TensorDictBase:
    if isinstance(batch, TensorDictBase):
        return batch
    if is_tensor_collection(batch):
        plain: TensorDictBase = batch.to_tensordict(retain_none=False)
        return plain
    raise SchemaError(
        f"a batch of rows is a TensorDict, not {type(batch).__name__}; wrap a dict: TensorDict(data, batch_size=[rows])"
    )


def persist(server: Server) -> None:
    """On the embedded server, wait until what was written is on disk."""
    if server.url.folder is not None:
        server.call(
            "waiting until the data is on disk",
            lambda client: wait_persisted(client.execute_command, server.timeout_seconds),
        )


class _Staging:
    """A write under way: chunks under an id that nothing refers to until the manifest is published.

    Attributes:
        id: its own.
        first_row: the first one that is still to be written; above 0 where an interrupted write is taken up.
    """

    def __init__(
        self, server: Server, name: str, source: RowSource, chunk_bytes: int, shards: int | None, *, resume: bool
    ) -> None:
        self._server, self._name, self._schema = server, name, source.schema
        self._layouts = tuple(
            ChunkLayout.for_stride(group.stride_bytes, chunk_bytes, MAX_RECORDS_PER_CHUNK)
            for group in source.schema.groups
        )
        self._heaps: HeapWriter | None = None
        self._empty_heaps = new_heaps(source.schema, chunk_bytes)
        # Without a kind nobody knows how the values that are staged were written: that begins anew.
        undecided = any(field.varying and field.varying.kind == "null" for field in source.schema.varying_fields)
        self._fingerprint = None if undecided else source.fingerprint
        self._arrived = Arrived(rows=0)
        self._started, self._said = time.time(), time.monotonic()
        self.first_row = self._rows = 0
        earlier = self._take_up(source) if resume else None
        if earlier is None:
            # Unguessable and new, so that no two writers and no two generations share a chunk's key.
            self.id = secrets.token_hex(5)
            self._tags = shard_tags(server, self.id, shards)
        sums = earlier or []
        self._writer = ChunkWriter(server, IN_FLIGHT)
        start = self._manifest(0, 1)
        self._groups = [
            GroupChunks(start, number, self._put, self.first_row, meanwhile=self._writer.push)
            for number in range(len(self._schema.groups))
        ]
        for group, known in zip(self._groups, sums, strict=False):
            group.first_chunk, group.checksums = 0, known
        try:
            self._say()
        except BaseException:
            self._writer.close()
            raise
        begun = replace(start, heaps=self._arrived.heaps or self._empty_heaps)
        self._heaps = HeapWriter(begun, self._put, self._arrived.heads, sums[len(self._groups) :])

    def _take_up(self, source: RowSource) -> list[list[int]] | None:
        """Go on with an interrupted write of the same rows, if there is one.

        Returns:
            The checksums of the chunks that it has staged, of each group and heap; None where there is none.
        """
        if self._fingerprint is None:
            return None
        for write in staged_writes(self._server, self._name):
            begun = write.manifest
            if begun is None or write.fingerprint != self._fingerprint or not is_abandoned(write):
                continue
            if (begun.layouts, begun.schema, begun.heaps) != (self._layouts, self._schema, self._empty_heaps):
                continue  # it lays rows out otherwise
            limit = (1 << 62) if source.num_rows is None else source.num_rows
            arrived = find_arrived(self._server, begun, count_rows(self._server, begun, limit))
            rows = arrived.rows
            if rows and claim(self._server, self._name, write):
                self.id, self._tags, self._started = write.id, begun.tags, write.started
                self.first_row, self._rows, self._arrived = rows, rows, arrived
                sums = arrived_checksums(self._server, replace(begun, rows=rows, heaps=arrived.heaps))
                forget_rest(self._server, begun, arrived)
                return sums
        return None

    def add(self, block: RowBlock) -> None:
        """Stage some rows."""
        schema = block.schema_like(self._schema)
        self._schema = self._schema.decided_by(schema)
        if not schema.same_rows(self._schema):
            raise SchemaError(
                f"the batch after row {self._rows} differs from the first one: {self._schema.difference(schema)}"
            )
        dense = block if self._heaps is None else block.dense(self._heaps, self._schema)
        for group in self._groups:
            group.add(dense)
        self._rows += block.rows

    def finish(self, found: Manifest | None) -> Manifest:
        """Send what is left; every byte is confirmed by the server afterwards."""
        for group in self._groups:
            group.flush()
        if self._heaps is not None:
            self._heaps.flush()
        self._writer.flush()
        self._writer.close()
        self._schema = self._schema.without_nulls()
        manifest = self._manifest(self._rows, 1 if found is None else found.generation + 1)
        self._store_checksums(manifest)
        heaps = () if self._heaps is None else self._heaps.last_checksums
        last_checksums = (*(group.last_checksum for group in self._groups), *heaps)
        return replace(manifest, last_checksums=last_checksums)

    def _store_checksums(self, manifest: Manifest) -> None:
        for number, group in enumerate(self._groups):
            store_checksums(self._server, manifest, number, group.first_chunk, group.checksums)
        for number, first, sums in self._heaps.checksums if self._heaps is not None else ():
            store_checksums(self._server, manifest, number, first, sums)

    def _put(self, group: int, chunk: int, start_bytes: int, parts: Sequence[memoryview | bytes], /) -> None:
        if start_bytes:
            raise InterruptedWriteError(
                f"chunk {chunk} of group {group} of {self._name!r} would be written from byte {start_bytes} on, "
                "without what came before; write the data set again, not taking the interrupted write up (resume=False)"
            )
        if time.monotonic() - self._said > HEARTBEAT_SECONDS:
            self._say()
        self._writer.set(self._manifest(0, 1).chunk_key(group, chunk), parts)

    def _say(self) -> None:
        """Say that this write goes on: what is not heard of for long is collected."""
        # Nothing is published of it: whoever collects it begins with the first chunk, of heaps too.
        begun = replace(self._manifest(0, 1), heaps=self._empty_heaps)
        stage(self._server, self._name, self.id, writer_note(begun, self._started, self._fingerprint))
        if self._fingerprint is not None:
            self._store_checksums(self._manifest(0, 1))
            self._keep_unsent()
        self._said = time.monotonic()

    def _keep_unsent(self) -> None:
        """Keep what the chunks of heaps have that are not full: one with few values would never be.

        It is the beginning of what is sent later: carried out late, this changes nothing of it.
        """
        start = self._manifest(0, 1)
        for number, chunk, data in self._heaps.unsent() if self._heaps is not None else ():
            key, part = start.chunk_key(number, chunk), bytes(data)

            def command(client: redis.Redis, key: bytes = key, part: bytes = part) -> Any:
                return client.setrange(key, 0, part)

            self._server.call("writing a chunk", command, repeats=True)

    def end(self, error: BaseException) -> None:
        """Keep what was staged where the rows are right and can be had again; else remove it."""
        if self._fingerprint is not None and isinstance(error, _INTERRUPTIONS):
            self._writer.settle()
            with suppress(TDDatapipesError):
                self._say()
        else:
            self.undo()

    def undo(self) -> None:
        """Remove what was staged, as far as the server can be reached; the staged entry tells of the rest."""
        # A chunk that is on its way when its key is removed would be there again afterwards.
        settled = self._writer.settle()
        with suppress(TDDatapipesError):
            begun = replace(self._manifest(self._rows_begun, 1), last_checksums=())
            chunks = chunk_keys(begun)
            unstage(self._server, self._name, self.id, chunks, forget=settled)

    @property
    def _rows_begun(self) -> int:
        return max((group.rows for group in self._groups), default=0)

    def _manifest(self, rows: int, generation: int) -> Manifest:
        return Manifest(
            name=self._name,
            id=self.id,
            kind="frozen",
            generation=generation,
            rows=rows,
            schema=self._schema,
            layouts=self._layouts,
            tags=self._tags,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            heaps=self._empty_heaps if self._heaps is None else self._heaps.heaps(rows),
        )
