"""Checksums of chunks: kept beside the chunks of a frozen data set, and a check of all of them.

A checksum is the CRC-32 of a chunk's records, without its spare bytes, or of the values in a chunk of a heap. Those of
a group or a heap lie in one string, four bytes a chunk, little-endian; that of a generation's last chunk is in its
manifest, because appending extends that chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import redis

from td_datapipes.catalog import connect, load_manifest
from td_datapipes.checksums import crc32
from td_datapipes.errors import ConfigurationError, DataLossError, ServerError
from td_datapipes.heap_spans import rows_within
from td_datapipes.manifest import Manifest
from td_datapipes.progress import progress_bar
from td_datapipes.schema import format_key
from td_datapipes.wire.cluster import slot_of
from td_datapipes.wire.server import Server
from td_datapipes.wire.url import ServerURL

__all__ = [
    "BadChunk",
    "ShardShare",
    "Verification",
    "load_checksums",
    "shard_shares",
    "store_checksums",
    "verify_dataset",
]

_PART_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class BadChunk:
    """A chunk that is not as it was written.

    Attributes:
        key: its key on the server.
        field: whose values it holds, where they are of variable length; else empty: it holds records.
        first_row: its rows ``[first_row, stop_row)``. Both are 0 for values of which the records do not tell the rows.
        stop_row: exclusive.
        problem: ``missing``, ``short``, or ``altered`` where its checksum differs.
        expected_bytes: of its records or values.
        received_bytes: that were there.
    """

    key: str
    field: str = ""
    first_row: int
    stop_row: int
    problem: Literal["missing", "short", "altered"]
    expected_bytes: int
    received_bytes: int

    def __str__(self) -> str:
        return f"{self.key} ({self.holds}): {self.problem}, {self.received_bytes} of {self.expected_bytes} bytes"

    @property
    def holds(self) -> str:
        """Which rows, and which field's values."""
        rows = f"rows {self.first_row:,} to {self.stop_row - 1:,}" if self.stop_row else "rows its records do not tell"
        return f"values of field {self.field}, {rows}" if self.field else rows


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What a check of a data set found.

    Attributes:
        manifest: the generation that was checked.
        chunks: chunks looked at.
        nbytes: bytes of their records and values.
        compared: whether there were checksums to compare with; else only lengths were.
        bad: the chunks that are not as they were written.
    """

    manifest: Manifest
    chunks: int
    nbytes: int
    compared: bool
    bad: tuple[BadChunk, ...]

    @property
    def good(self) -> bool:
        """Whether everything is as it was written."""
        return not self.bad


@dataclass(frozen=True, kw_only=True)
class ShardShare:
    """What lies in one shard.

    Attributes:
        tag: its hash tag.
        slot: its slot on a cluster.
        node: ``host:port`` of the slot's master; None on one server.
        chunks: how many chunks.
        nbytes: bytes of their records and values.
    """

    tag: str
    slot: int
    node: str | None
    chunks: int
    nbytes: int


def store_checksums(server: Server, manifest: Manifest, group: int, first_chunk: int, sums: Sequence[int]) -> None:
    """Keep the checksums of chunks from `first_chunk` on. Nobody looks at them before their manifest is published."""
    data = np.asarray(sums, dtype="<u4").tobytes()
    key = manifest.checksums_key(group)

    def command(client: redis.Redis) -> None:
        for start in range(0, len(data), _PART_BYTES):
            client.setrange(key, 4 * first_chunk + start, data[start : start + _PART_BYTES])

    server.call(f"writing checksums of {manifest.name!r}", command, repeats=True)


def load_checksums(server: Server, manifest: Manifest) -> dict[int, list[int]] | None:
    """The checksum of every chunk of a generation, by group and heap; None where it was written without.

    Raises:
        DataLossError: the server no longer has them.
    """
    if manifest.last_checksums is None:
        return None
    found: dict[int, list[int]] = {}
    for group, count in enumerate(manifest.chunk_counts):
        key = manifest.checksums_key(group)
        data = b"".join(
            server.call(
                f"reading checksums of {manifest.name!r}",
                lambda c, k=key, s=start, n=4 * count: c.getrange(k, s, min(s + _PART_BYTES, n) - 1),  # type: ignore[misc]
                repeats=True,
            )
            for start in range(0, 4 * count, _PART_BYTES)
        )
        if len(data) != 4 * count:
            raise DataLossError(
                f"checksums {key.decode()} of data set {manifest.name!r} at {server.address}: {4 * count} bytes "
                f"expected, {len(data)} received; they were deleted or evicted. Read with verify=False, or write again"
            )
        found[group] = np.frombuffer(data, dtype="<u4").tolist()
        if count:
            found[group][-1] = manifest.last_checksums[group]
    return found


def verify_dataset(url: str | ServerURL, *, progress: bool | None = None) -> Verification:
    """Read every chunk of a frozen data set, of records and of values, and compare it with its checksum.

    Args:
        url: server and name.
        progress: show a progress bar; by default on a terminal only.

    Raises:
        DatasetNotFoundError: there is none of that name.
        ConfigurationError: it is not frozen; what is written in place has no checksums.
        DataLossError: the checksums themselves are gone.
        ServerUnavailableError, ServerTimeoutError, AuthenticationError: the server cannot be reached or refuses.
    """
    server = connect(url)
    try:
        manifest = load_manifest(server, server.url.name)
        if manifest.kind != "frozen":
            raise ConfigurationError(f"data set {manifest.name!r} is {manifest.kind}: only frozen ones have checksums")
        sums = load_checksums(server, manifest)
        bad: list[BadChunk] = []
        chunks = nbytes = 0
        with progress_bar(f"verifying {manifest.name}", manifest.nbytes, progress, "bytes") as advance:
            for group, chunk, length in _chunks(manifest):
                found = _check(server, manifest, group, chunk, length, None if sums is None else sums[group][chunk])
                bad += [] if found is None else [found]
                chunks, nbytes = chunks + 1, nbytes + length
                advance(length)
        return Verification(manifest=manifest, chunks=chunks, nbytes=nbytes, compared=sums is not None, bad=tuple(bad))
    finally:
        server.close()


def _chunks(manifest: Manifest) -> Iterator[tuple[int, int, int]]:
    for group, count in enumerate(manifest.chunk_counts):
        for chunk in range(count):
            yield group, chunk, manifest.chunk_bytes(group, chunk)


def _check(
    server: Server, manifest: Manifest, group: int, chunk: int, length: int, expected: int | None
) -> BadChunk | None:
    key = manifest.chunk_key(group, chunk)

    def command(client: Any) -> bytes:
        try:
            data: bytes = client.getrange(key, 0, length - 1)
        except redis.ResponseError as error:
            if "WRONGTYPE" not in str(error):
                raise
            return b""
        return data

    data = server.call(f"verifying chunk {key.decode()}", command, repeats=True)
    if len(data) == length and (expected is None or crc32(data) == expected):
        return None
    field, first, stop = _contents(server, manifest, group, chunk)
    problem: Literal["missing", "short", "altered"] = (
        "altered" if len(data) == length else "short" if data else "missing"
    )
    return BadChunk(
        key=key.decode(),
        field=field,
        first_row=first,
        stop_row=stop,
        problem=problem,
        expected_bytes=length,
        received_bytes=len(data),
    )


def _contents(server: Server, manifest: Manifest, group: int, chunk: int) -> tuple[str, int, int]:
    """Of which field a chunk holds values, and of which rows ``[first, stop)``."""
    if group < len(manifest.layouts):
        return "", *manifest.layouts[group].rows_of(chunk, manifest.rows)
    number = group - len(manifest.layouts)
    heap, field = manifest.heaps[number], manifest.schema.varying_fields[number]
    start = chunk * heap.chunk_bytes
    rows: tuple[int, int] | None = None
    with suppress(redis.ResponseError, ServerError):  # what stands in the place of records may be no string
        rows = rows_within(server, manifest, field, start, start + heap.bytes_of(chunk))
    return format_key(heap.key), *(rows or (0, 0))


def shard_shares(server: Server, manifest: Manifest) -> list[ShardShare]:
    """What of a data set lies in which shard, and where that is now.

    Raises:
        TDDatapipesError: the server or the cluster cannot be reached.
    """
    cluster = server.cluster()
    slots = None if cluster is None else cluster.refresh()
    chunks = dict.fromkeys(manifest.tags, 0)
    nbytes = dict.fromkeys(manifest.tags, 0)
    for group, chunk, length in _chunks(manifest):
        tag = manifest.tag_of(group, chunk)
        chunks[tag] += 1
        nbytes[tag] += length
    return [
        ShardShare(
            tag=tag,
            slot=slot,
            node=None if slots is None else str(slots.master(slot)),
            chunks=chunks[tag],
            nbytes=nbytes[tag],
        )
        for tag in manifest.tags
        for slot in [slot_of(tag.encode())]
    ]
