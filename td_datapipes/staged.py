"""Taking up writes that were interrupted: whose they were, how far they got, and making them one's own.

A write that can be taken up keeps its chunks when it is interrupted. Its note on the server then has the fingerprint of
what it was reading; which of its chunks arrived, the chunks tell, and the checksums of most of them are kept beside.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from td_datapipes.checksums import crc32
from td_datapipes.garbage import StagedWrite, process_is_gone, writer_note
from td_datapipes.keys import NAMES_KEY, name_from_encoded, staged_key, superseded_key
from td_datapipes.manifest import SPARE_BYTES, Manifest
from td_datapipes.wire.scripts import load_script
from td_datapipes.wire.server import Server

__all__ = [
    "arrived_checksums",
    "claim",
    "count_full",
    "count_rows",
    "going_on",
    "is_abandoned",
    "names_in_use",
    "superseded_generations",
]

_KEYS_PER_ASK = 512
_own: set[str] = set()
"""The ids of this process's own writes that are going on."""


@contextmanager
def going_on(staged_id: str) -> Iterator[None]:
    """While this lasts, nobody in this process takes that write for an abandoned one."""
    _own.add(staged_id)
    try:
        yield
    finally:
        _own.discard(staged_id)


def is_abandoned(write: StagedWrite) -> bool:
    """Whether its writer was a process of this machine that is gone, or one of this process that has ended."""
    if write.pid == os.getpid():
        return write.id not in _own
    return process_is_gone(write.host, write.pid)


def claim(server: Server, name: str, write: StagedWrite) -> bool:
    """Make an interrupted write this process's own, in one step.

    Returns:
        False where somebody else has taken it over, or removed it.
    """
    if write.manifest is None:
        return False
    source = load_script("claim").source
    note = writer_note(write.manifest, write.started, write.fingerprint)
    answer = server.call(
        f"taking up the write of {name!r}",
        lambda client: client.eval(source, 1, staged_key(name), write.id, write.note, note),
    )
    return bool(answer == b"OK")


def count_rows(server: Server, manifest: Manifest, limit: int) -> int:
    """How many rows from the first on have all their chunks, whole, on the server; at most `limit`.

    They end where a chunk ends in every group: none is gone on with from its middle.
    """
    rows = limit
    for group, layout in enumerate(manifest.layouts):
        if layout.stride_bytes:
            chunks, _ = count_full(
                server,
                partial(manifest.chunk_key, group),
                partial(_sent_bytes, manifest, group),
                layout.num_chunks(limit),
            )
            # A chunk that is not full is the last one of the rows.
            rows = min(rows, chunks // layout.pieces * layout.records_per_chunk)
    step = math.lcm(*(layout.records_per_chunk for layout in manifest.layouts if layout.stride_bytes))
    return rows // step * step


def count_full(
    server: Server, key_of: Callable[[int], bytes], bytes_of: Callable[[int], int], limit: int
) -> tuple[int, int]:
    """How many chunks from the first on are full, at most `limit`, and how many bytes the one behind them has.

    Args:
        server: where.
        key_of: a chunk's key.
        bytes_of: its bytes where it is full.
        limit: how many there may be.
    """
    for first in range(0, limit, _KEYS_PER_ASK):
        chunks = range(first, min(first + _KEYS_PER_ASK, limit))
        keys = [key_of(chunk) for chunk in chunks]

        def command(client: Any, keys: list[bytes] = keys) -> list[int]:
            with client.pipeline(transaction=False) as pipeline:
                for key in keys:
                    pipeline.strlen(key)
                return list(pipeline.execute())

        lengths = server.call("looking for what has arrived", command, repeats=True)
        for chunk, length in zip(chunks, lengths, strict=True):
            if length != bytes_of(chunk):
                return chunk, length
    return limit, 0


def _sent_bytes(manifest: Manifest, group: int, chunk: int) -> int:
    return _full_bytes(manifest, group, chunk) + SPARE_BYTES


def _full_bytes(manifest: Manifest, group: int, chunk: int) -> int:
    """Bytes of records in a chunk that is full."""
    layout = manifest.layouts[group]
    return layout.chunk_bytes(chunk, (chunk // layout.pieces + 1) * layout.records_per_chunk)


def arrived_checksums(server: Server, manifest: Manifest) -> list[list[int]]:
    """The checksums of the full chunks of each group, then of each heap: as they were kept; the rest are read.

    Args:
        server: where.
        manifest: has the rows and values that have arrived.
    """
    found = []
    full = [*manifest.chunk_counts[: len(manifest.layouts)], *(h.nbytes // h.chunk_bytes for h in manifest.heaps)]
    for group, count in enumerate(full):
        key = manifest.checksums_key(group)

        def command(client: Any, key: bytes = key, count: int = count) -> bytes:
            data: bytes = client.getrange(key, 0, 4 * count - 1) if count else b""
            return data

        data = server.call("reading checksums", command, repeats=True)
        sums: list[int] = np.frombuffer(data[: len(data) // 4 * 4], "<u4").tolist()
        sums += [_read_checksum(server, manifest, group, chunk) for chunk in range(len(sums), count)]
        found.append(sums)
    return found


def _read_checksum(server: Server, manifest: Manifest, group: int, chunk: int) -> int:
    stop = manifest.chunk_bytes(group, chunk) - 1

    def command(client: Any) -> bytes:
        data: bytes = client.getrange(manifest.chunk_key(group, chunk), 0, stop)
        return data

    return crc32(server.call("reading a chunk", command, repeats=True))


def names_in_use(server: Server) -> list[str]:
    """All names, also those of which nothing was ever published."""
    raw: Any = server.call("listing the names", lambda client: client.smembers(NAMES_KEY), repeats=True)
    return sorted(map(name_from_encoded, raw))


def superseded_generations(server: Server, name: str) -> list[dict[str, Any]]:
    """The earlier generations of a name that are still kept, the oldest first: number, rows, id, and for how long."""

    def command(client: Any) -> list[bytes]:
        found: list[bytes] = client.hvals(superseded_key(name))
        return found

    found = []
    for value in server.call(f"looking for earlier generations of {name!r}", command, repeats=True):
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
