"""How far an interrupted write with heaps came: which of its rows have all their values of variable length there."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from td_datapipes.catalog import sweep_chunks, unlink_keys
from td_datapipes.heap_spans import read_span
from td_datapipes.manifest import Heap, Manifest
from td_datapipes.schema import Field
from td_datapipes.staged import count_full
from td_datapipes.wire.server import Server

__all__ = ["Arrived", "find_arrived", "forget_rest"]

_NO_LIMIT = 1 << 62


@dataclass(frozen=True, kw_only=True)
class Arrived:
    """What of an interrupted write is gone on with.

    Attributes:
        rows: how many, from the first on: whole chunks of records, and all their values.
        heaps: with the values of those rows.
        heads: of each heap the bytes of the chunk that comes next which are those rows' already.
    """

    rows: int
    heaps: tuple[Heap, ...] = ()
    heads: tuple[bytes, ...] = ()


def find_arrived(server: Server, manifest: Manifest, rows: int) -> Arrived:
    """Of the rows that have records, those whose values of variable length are there, too.

    A row's values never end before those of an earlier one, so a few spans tell.

    Args:
        server: where.
        manifest: of the write; its heaps are empty.
        rows: that have records, see `count_rows`.
    """
    fields = manifest.schema.varying_fields
    if not fields or not rows:
        return Arrived(rows=rows, heaps=manifest.heaps, heads=(b"",) * len(manifest.heaps))
    staged = [_count_bytes(server, manifest, field) for field in fields]
    step = math.lcm(*(layout.records_per_chunk for layout in manifest.layouts if layout.stride_bytes))
    low, high = 0, rows // step
    ends = [0] * len(fields)
    while low < high:
        middle = (low + high + 1) // 2
        found = [_end_of(server, manifest, field, middle * step - 1) for field in fields]
        if all(0 <= end <= there for end, there in zip(found, staged, strict=True)):
            low, ends = middle, found
        else:
            high = middle - 1
    return Arrived(
        rows=low * step,
        heaps=tuple(replace(heap, nbytes=end) for heap, end in zip(manifest.heaps, ends, strict=True)),
        heads=tuple(_head(server, manifest, field, end) for field, end in zip(fields, ends, strict=True)),
    )


def forget_rest(server: Server, manifest: Manifest, arrived: Arrived) -> None:
    """Remove what else there is of a write that is taken up.

    Where rows share values, other bytes may be written in its place: a further interruption must not find both.

    Args:
        server: where.
        manifest: of the write, which is this process's own by now.
        arrived: what is gone on with.
    """
    if not arrived.heaps:
        return
    sweep_chunks(server, replace(manifest, rows=arrived.rows, heaps=arrived.heaps))

    def command(client: Any) -> None:
        # Of chunks that may come to hold other bytes, and not be summed before the next interruption.
        unlink_keys(client, map(manifest.checksums_key, range(len(manifest.chunk_counts))))
        for number, (heap, head) in enumerate(zip(arrived.heaps, arrived.heads, strict=True), len(manifest.layouts)):
            if head:
                client.set(manifest.chunk_key(number, heap.nbytes // heap.chunk_bytes), head)

    server.call("removing what has not arrived whole", command, repeats=True)


def _count_bytes(server: Server, manifest: Manifest, field: Field) -> int:
    """Bytes of a heap that are on the server, from the first on."""
    number, heap = manifest.heap_of(field.key)
    full, rest = count_full(
        server, lambda chunk: manifest.chunk_key(number, chunk), lambda _: heap.chunk_bytes, _NO_LIMIT
    )
    return full * heap.chunk_bytes + min(rest, heap.chunk_bytes)


def _end_of(server: Server, manifest: Manifest, field: Field, row: int) -> int:
    """Where a row's value ends in its heap, as its record says; -1 where that is no span."""
    span = read_span(server, manifest, field, row)
    return -1 if span is None else span[1]


def _head(server: Server, manifest: Manifest, field: Field, end: int) -> bytes:
    """The bytes before `end` of the chunk that it falls in."""
    number, heap = manifest.heap_of(field.key)
    chunk, count = divmod(end, heap.chunk_bytes)

    def command(client: Any) -> bytes:
        data: bytes = client.getrange(manifest.chunk_key(number, chunk), 0, count - 1) if count else b""
        return data

    return server.call("reading what has arrived", command, repeats=True)
