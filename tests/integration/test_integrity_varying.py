"""Chunks of values of variable length have checksums, too: what was altered is named, and refused where it is read."""

from __future__ import annotations

import os
import random
import zlib
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ragged_in_memory import RaggedRows
from servers import ClusterProcess, ServerProcess
from tensordict import NonTensorStack, TensorDict
from test_ingest_varying_resume import CHUNK_BYTES, FORK, interrupt, shared_batches
from test_integrity import flip
from torch.utils.data import DataLoader

from td_datapipes import RedisTDDataset, append_dataset, verify_dataset, write_dataset
from td_datapipes.catalog import chunk_keys, connect, drop
from td_datapipes.conversion import convert
from td_datapipes.errors import ChecksumError, DataLossError
from td_datapipes.garbage import collect_garbage
from td_datapipes.ingest import ingest
from td_datapipes.integrity import load_checksums
from td_datapipes.keys import manifest_key
from td_datapipes.manifest import Manifest
from td_datapipes.wire.cluster import slot_of

ROWS = RaggedRows([random.Random(5).randrange(30) for _ in range(120)], seed=2)
MORE = RaggedRows([random.Random(6).randrange(30) for _ in range(37)], seed=3)
CHUNK = 320


@pytest.fixture
def url(server: ServerProcess) -> str:
    write_dataset(ROWS.td(), made := server.url("ragged"), chunk_bytes=CHUNK)
    return made


def manifest_on(server: ServerProcess, name: str = "ragged") -> Manifest:
    return Manifest.from_json(server.execute("GET", manifest_key(name)))


def heap_key(manifest: Manifest, chunk: int, *field: str) -> bytes:
    return manifest.chunk_key(manifest.heap_of(field)[0], chunk)


def assert_summed(server: ServerProcess, url: str, manifest: Manifest) -> None:
    """The checksums kept are those of what lies on the server."""
    host = connect(url)
    sums = load_checksums(host, manifest)
    host.close()
    assert sums is not None
    for number, heap in enumerate(manifest.heaps, len(manifest.layouts)):
        stored = [server.execute("GET", manifest.chunk_key(number, chunk)) for chunk in range(heap.num_chunks)]
        assert sums[number] == [zlib.crc32(data) for data in stored], heap.key
        assert (manifest.last_checksums or ())[number] == (zlib.crc32(stored[-1]) if stored else 0)


def blob_rows(chunk: int) -> tuple[int, int]:
    """The rows ``[first, stop)`` whose blobs have bytes in a chunk, by what was written."""
    ends = list(accumulate(len(blob or b"") for blob in ROWS.blobs))
    begins = [0, *ends[:-1]]
    rows = [row for row in range(120) if begins[row] < (chunk + 1) * CHUNK and ends[row] > chunk * CHUNK]
    return rows[0], rows[-1] + 1


def test_every_chunk_of_values_has_its_checksum(server: ServerProcess, url: str) -> None:
    manifest = manifest_on(server)
    assert_summed(server, url, manifest)
    found = verify_dataset(url, progress=True)
    assert (found.good, found.compared, found.nbytes) == (True, True, manifest.nbytes)
    assert found.chunks == sum(1 for key in chunk_keys(manifest) if b"checksums" not in key)


def test_appending_extends_the_last_chunk_and_its_checksum(server: ServerProcess, url: str) -> None:
    first, host = manifest_on(server), connect(url)
    expected = load_checksums(host, first)
    rows = ROWS
    for part in (RaggedRows([0]), RaggedRows([1, 2], seed=4), MORE):
        append_dataset(part.td(), url)
        rows = rows + part
        assert_summed(server, url, manifest_on(server))
        assert load_checksums(host, first) == expected
    host.close()
    assert verify_dataset(url).good
    with RedisTDDataset(url, verify=True) as dataset:
        found = dataset[:]
    assert list(found["blob"]) == rows.blobs
    assert list(found["text", "name"]) == rows.names
    flip(server, heap_key(manifest_on(server), 0, "tokens"), 3)
    assert [bad.field for bad in verify_dataset(url).bad] == ["'tokens'"]


READS: list[dict[str, Any]] = [{}, {"ragged": "pad"}, {"strings": "arrow"}, {"prefetch_bytes": 0}]


@pytest.mark.parametrize("options", READS, ids=str)
def test_an_altered_chunk_is_refused_by_an_epoch_that_reads_it_whole(
    server: ServerProcess, url: str, options: dict[str, Any]
) -> None:
    manifest = manifest_on(server)
    with RedisTDDataset(url, verify=True, **options) as dataset:
        dataset[:]
        for field in (("blob",), ("tokens",)):
            key = heap_key(manifest, 2, *field)
            flip(server, key, 100)
            message = rf"chunk {key.decode()} .values of field '{field[-1]}'.: its checksum is .*have been altered"
            with pytest.raises(ChecksumError, match=message):
                dataset[:]
            with RedisTDDataset(url, **options) as trusting:
                trusting[:]
            flip(server, key, 100)
        dataset[:]


def test_a_loader_that_reads_ahead_compares(server: ServerProcess, url: str) -> None:
    def read() -> list[Any]:
        with RedisTDDataset(url, verify=True) as dataset:
            return [blob for batch in DataLoader(dataset, batch_size=60) for blob in batch["blob"]]

    assert read() == ROWS.blobs
    flip(server, heap_key(manifest_on(server), 1, "blob"), 0)
    with pytest.raises(ChecksumError, match="values of field 'blob'"):
        read()


def test_what_is_read_in_part_is_not_compared(server: ServerProcess, url: str) -> None:
    manifest = manifest_on(server)
    first, stop = blob_rows(1)
    flip(server, heap_key(manifest, 1, "blob"), 160)
    with RedisTDDataset(url, verify=True) as dataset:
        for row in range(first, stop):
            dataset[[row]]
        with pytest.raises(ChecksumError):
            dataset[first:stop]
    with RedisTDDataset(url, verify=True, fields=["tokens"]) as dataset:
        dataset[:]


def test_chunks_that_come_in_several_ranges_are_compared(server: ServerProcess) -> None:
    blobs = [random.Random(row).randbytes(700_000) for row in range(8)]  # one chunk of 4 MiB, and a part of one
    td = TensorDict({"id": torch.arange(8)}, [8])
    td["blob"] = NonTensorStack(*blobs)
    write_dataset(td, url := server.url("ragged"))
    with RedisTDDataset(url, verify=True) as dataset:
        assert list(dataset[:]["blob"]) == blobs
        for chunk, at in ((0, 4_000_000), (0, 5), (1, 77)):
            key = heap_key(manifest_on(server), chunk, "blob")
            flip(server, key, at)
            with pytest.raises(ChecksumError, match=key.decode()):
                dataset[:]
            flip(server, key, at)


def test_verifying_names_field_chunk_and_rows(server: ServerProcess, url: str) -> None:
    manifest = manifest_on(server)
    keys = [heap_key(manifest, chunk, "blob") for chunk in range(6)]
    flip(server, keys[1], 17)
    server.execute("DEL", keys[3])
    server.execute("SET", keys[4], b"x" * 99)
    server.execute("DEL", keys[5])
    server.execute("RPUSH", keys[5], b"x")
    bad = verify_dataset(url).bad
    assert [(one.key, one.field, one.problem, one.received_bytes) for one in bad] == [
        (keys[1].decode(), "'blob'", "altered", CHUNK),
        (keys[3].decode(), "'blob'", "missing", 0),
        (keys[4].decode(), "'blob'", "short", 99),
        (keys[5].decode(), "'blob'", "missing", 0),
    ]
    assert [(one.first_row, one.stop_row) for one in bad[:3]] == [blob_rows(1), blob_rows(3), blob_rows(4)]
    first, stop = blob_rows(4)
    assert str(bad[2]) == (
        f"{keys[4].decode()} (values of field 'blob', rows {first} to {stop - 1}): short, 99 of 320 bytes"
    )
    with RedisTDDataset(url, verify=True) as dataset, pytest.raises(DataLossError, match="of field 'blob'"):
        dataset[:]


def test_records_that_are_gone_do_not_tell_the_rows(server: ServerProcess, url: str) -> None:
    manifest = manifest_on(server)
    for chunk in range(manifest.chunk_counts[0]):
        server.execute("DEL", manifest.chunk_key(0, chunk))
    flip(server, heap_key(manifest, 1, "blob"), 17)
    bad = verify_dataset(url).bad[-1]
    assert (bad.field, bad.first_row, bad.stop_row) == ("'blob'", 0, 0)
    assert "values of field 'blob', rows its records do not tell" in str(bad)


def test_without_checksums_only_lengths_are_compared(server: ServerProcess, url: str) -> None:
    manifest = manifest_on(server)
    text = manifest.to_json()
    start = text.index(',\n "checksums"')
    plain = Manifest.from_json(text[:start] + text[text.index(',\n "heaps"') :])
    assert plain.last_checksums is None
    server.execute("SET", manifest_key("ragged"), plain.to_json())
    flip(server, heap_key(manifest, 1, "blob"), 17)
    found = verify_dataset(url)
    assert (found.good, found.compared) == (True, False)
    append_dataset(MORE.td(), url)
    server.execute("DEL", heap_key(manifest, 1, "blob"))
    assert [(bad.field, bad.problem) for bad in verify_dataset(url).bad] == [("'blob'", "missing")]


def test_checksums_that_are_gone_are_named(server: ServerProcess, url: str) -> None:
    key = manifest_on(server).checksums_key(2)
    assert key.endswith(b":checksums:crc32:v1")
    server.execute("DEL", key)
    with pytest.raises(DataLossError, match="checksums:crc32:v1 of data set 'ragged'.*they were deleted"):
        verify_dataset(url)


def test_nothing_of_them_stays(server: ServerProcess, url: str) -> None:
    append_dataset(MORE.td(), url)
    write_dataset(ROWS.td(), url, overwrite=True, chunk_bytes=CHUNK)
    host = connect(url)
    collect_garbage(host, "ragged", older_than_seconds=0)
    kept = {key for key in server.execute("KEYS", "*") if b":checksums:" in key}
    assert kept == set(manifest_on(server).checksums_keys)
    assert len(kept) == 1 + 4
    drop(host, "ragged")
    host.close()
    assert server.execute("KEYS", "*") == []


@pytest.mark.parametrize("heartbeat", [0.0, 10.0])
@pytest.mark.parametrize("chunks", [10, 17, 30])
def test_an_ingest_that_was_killed_twice_has_the_checksums_of_what_it_wrote(
    server: ServerProcess, heartbeat: float, chunks: int
) -> None:
    interrupt(shared_batches(), server.url("r"), 120, heartbeat=heartbeat, same_as="these")
    # From where it goes on, other bytes lie in the same chunks: a value that rows share begins anew there.
    interrupt(shared_batches(), server.url("r"), chunks, heartbeat=heartbeat, same_as="these")
    manifest = ingest(shared_batches(), server.url("r"), chunk_bytes=CHUNK_BYTES, same_as="these")
    assert_summed(server, server.url("r"), manifest)
    assert verify_dataset(server.url("r")).good


def test_a_killed_ingest_that_nobody_takes_up_leaves_none(server: ServerProcess) -> None:
    interrupt(shared_batches(), server.url("r"), 120, heartbeat=0.0, same_as="these")
    assert any(b":checksums:crc32:v" in key for key in server.execute("KEYS", "*"))
    host = connect(server.url("r"))
    collect_garbage(host, "r", older_than_seconds=0)
    host.close()
    assert not any(b":checksums:" in key for key in server.execute("KEYS", "*"))


def test_a_killed_append_leaves_the_checksums_of_what_is_published(server: ServerProcess, url: str) -> None:
    def child() -> None:
        def batches() -> Any:
            yield MORE.td()
            os._exit(9)

        append_dataset(batches(), url)

    process = FORK.Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == 9
    assert verify_dataset(url).good
    append_dataset(MORE.td()[:9], url)
    assert_summed(server, url, manifest_on(server))
    assert verify_dataset(url).good


def test_files_and_copies_have_them(server: ServerProcess, tmp_path: Path, url: str) -> None:
    table = {"id": pa.array(range(120), pa.int64()), "blob": pa.array(ROWS.blobs, pa.binary())}
    pq.write_table(pa.table(table), tmp_path / "t.parquet")
    assert_summed(server, server.url("t"), ingest(tmp_path / "t.parquet", server.url("t"), chunk_bytes=CHUNK))
    copied = convert(url, server.url("copy"), layout="records", chunk_bytes=160)
    assert isinstance(copied, Manifest)
    assert_summed(server, server.url("copy"), copied)
    flip(server, heap_key(copied, 3, "text", "name"), 8)
    (bad,) = verify_dataset(server.url("copy")).bad
    assert (bad.field, bad.problem) == ("('text', 'name')", "altered")


def test_on_a_cluster(cluster: ClusterProcess, unique_name: str) -> None:
    write_dataset(ROWS.td(), url := cluster.url(unique_name), chunk_bytes=CHUNK)
    append_dataset(MORE.td(), url)
    assert verify_dataset(url).good
    with RedisTDDataset(url, verify=True) as dataset:
        assert list(dataset[:]["blob"]) == ROWS.blobs + MORE.blobs
        manifest = dataset._reader.manifest
        assert isinstance(manifest, Manifest)
        key = heap_key(manifest, 4, "blob")
        flip(cluster.owner(slot_of(key)), key, 7)
        with pytest.raises(ChecksumError, match=key.decode()):
            dataset[:]
    assert [(bad.key, bad.field) for bad in verify_dataset(url).bad] == [(key.decode(), "'blob'")]
    host = connect(url)
    drop(host, unique_name)
    host.close()
    keys = [key for node in cluster.nodes for key in node.execute("KEYS", "*")]
    assert not [key for key in keys if manifest.id.encode() in key]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    parts=st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=8), min_size=1, max_size=4),
    chunk_bytes=st.sampled_from([64, 160, 1024]),
    pick=st.integers(0, 1 << 30),
)
def test_any_byte_of_any_chunk(server: ServerProcess, parts: list[list[int]], chunk_bytes: int, pick: int) -> None:
    server.flush()
    url = server.url("any")
    write_dataset(RaggedRows([1, 2, *parts[0]]).td(), url, chunk_bytes=chunk_bytes)
    for part in parts[1:]:
        append_dataset(RaggedRows(part, seed=len(part)).td(), url)
    manifest = manifest_on(server, "any")
    assert_summed(server, url, manifest)
    spots = [
        (manifest.chunk_key(number, at // heap.chunk_bytes), at % heap.chunk_bytes)
        for number, heap in enumerate(manifest.heaps, len(manifest.layouts))
        for at in range(heap.nbytes)
    ]
    if not spots:
        return
    key, at = spots[pick % len(spots)]
    flip(server, key, at)
    assert [(bad.key, bad.problem) for bad in verify_dataset(url).bad] == [(key.decode(), "altered")]
    with RedisTDDataset(url, verify=True) as dataset, pytest.raises(ChecksumError, match=key.decode()):
        dataset[:]
