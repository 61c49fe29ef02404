"""Records collected into chunks: packed in stretches, with checksums that are those of the chunks as they were sent."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from rows_in_memory import random_rows
from scripted_stream import ScriptedStream
from tensordict import TensorDict

from td_datapipes import group_chunks
from td_datapipes.blocks import TensorDictBlock
from td_datapipes.errors import ServerUnavailableError
from td_datapipes.group_chunks import GroupChunks
from td_datapipes.manifest import ChunkLayout, Manifest
from td_datapipes.schema import schema_of
from td_datapipes.wire.writer import BulkWriter

ROWS = random_rows(300, {"x": (torch.float32, (5,)), "y": (torch.int16, ())}, seed=3)


def manifest_of(rows: TensorDict, chunk_bytes: int) -> Manifest:
    schema = schema_of(rows)
    layouts = tuple(ChunkLayout.for_stride(group.stride_bytes, chunk_bytes, 1 << 14) for group in schema.groups)
    return Manifest(
        name="x", id="x", kind="frozen", generation=1, rows=0, schema=schema, layouts=layouts, tags=("t",), created=""
    )


class Sent:
    """What was put, the spare bytes cut off, and how often something could be done meanwhile."""

    def __init__(self) -> None:
        self.chunks: list[bytes] = []
        self.meanwhile = 0

    def put(self, group: int, chunk: int, start_bytes: int, parts: Sequence[memoryview | bytes], /) -> None:
        assert (group, chunk, start_bytes) == (0, len(self.chunks), 0)
        self.chunks.append(bytes(parts[0]))

    def count(self) -> None:
        self.meanwhile += 1


@pytest.mark.parametrize("packed_bytes", [1, 100, 1 << 20])
@pytest.mark.parametrize("batch", [7, 300])
def test_checksums_are_those_of_the_chunks_however_records_are_packed(
    packed_bytes: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_chunks, "PACKED_BYTES", packed_bytes)
    manifest, sent = manifest_of(ROWS, 1600), Sent()
    chunks = GroupChunks(manifest, 0, sent.put, meanwhile=sent.count)
    for start in range(0, 300, batch):
        chunks.add(TensorDictBlock(ROWS[start : start + batch]))
    chunks.flush()
    assert chunks.checksums == [zlib.crc32(chunk) for chunk in sent.chunks]
    stride, per_chunk = manifest.layouts[0].stride_bytes, manifest.layouts[0].records_per_chunk
    assert [len(chunk) for chunk in sent.chunks[:-1]] == [per_chunk * stride] * (len(sent.chunks) - 1)
    records = b"".join(sent.chunks)
    x = torch.frombuffer(bytearray(records), dtype=torch.uint8).reshape(300, stride)
    place = manifest.schema.fields[("x",)].offset_bytes
    assert torch.equal(x[:, place : place + 20], ROWS["x"].view(torch.uint8))
    if packed_bytes == 1:
        assert sent.meanwhile == 300, "a record is packed at a time"


def test_a_record_of_several_chunks_has_a_checksum_for_each() -> None:
    rows, sent = random_rows(3, {"x": (torch.uint8, (100,))}, seed=1), Sent()
    chunks = GroupChunks(manifest_of(rows, 48), 0, sent.put)
    chunks.add(TensorDictBlock(rows))
    assert len(sent.chunks) > 3
    assert chunks.checksums == [zlib.crc32(chunk) for chunk in sent.chunks]


def test_a_chunk_that_is_appended_to_has_the_checksum_of_all_its_records() -> None:
    manifest, sent = manifest_of(ROWS, 1600), Sent()
    whole = GroupChunks(manifest, 0, sent.put)
    whole.add(TensorDictBlock(ROWS))
    whole.flush()
    half, rest = GroupChunks(manifest, 0, Sent().put), []
    half.add(TensorDictBlock(ROWS[:130]))
    half.flush()

    def put(_group: int, chunk: int, start_bytes: int, parts: Sequence[memoryview | bytes], /) -> None:
        rest.append((chunk, start_bytes, bytes(parts[0])))

    again = GroupChunks(manifest, 0, put, 130, half.last_checksum)
    again.add(TensorDictBlock(ROWS[130:]))
    again.flush()
    first = again.first_chunk
    assert rest[0] == (first, (130 - first * manifest.layouts[0].records_per_chunk) * 32, rest[0][2])
    assert half.checksums[:first] + again.checksums == whole.checksums


def bulk_writer(stream: ScriptedStream) -> BulkWriter:
    return BulkWriter(stream.channel(), "script:1", 5.0, 2)


def test_what_the_socket_did_not_take_is_pushed_later_without_waiting() -> None:
    stream = ScriptedStream([b"+OK\r\n"], most_sent=20)
    bulk = bulk_writer(stream)
    bulk.set(b"k", [b"v" * 100, b"w"])
    sent = len(stream.sent)
    assert sent < 100
    for _ in range(30):
        bulk.push()
    assert stream.sent == b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$101\r\n" + b"v" * 100 + b"w\r\n"
    bulk.flush()
    bulk.close()


def test_a_connection_that_breaks_while_pushing_has_nothing_more_on_its_way() -> None:
    stream: Any = ScriptedStream([], most_sent=20)
    bulk = bulk_writer(stream)
    bulk.set(b"k", [b"v" * 100])

    def broken(_data: memoryview) -> int:
        raise BrokenPipeError("Broken pipe")

    stream.send = broken
    with pytest.raises(ServerUnavailableError, match="broke while sending a request"):
        bulk.push()
    assert bulk.settle()
