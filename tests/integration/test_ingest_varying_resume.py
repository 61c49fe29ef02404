"""An ingest of values of variable length that was killed half way goes on, and leaves what an undisturbed one does."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from servers import ClusterProcess, ServerProcess
from tensordict import NonTensorData, NonTensorStack, TensorDict

from td_datapipes import RedisTDDataset
from td_datapipes import writer as writer_module
from td_datapipes.catalog import chunk_keys, connect
from td_datapipes.errors import SchemaError
from td_datapipes.garbage import collect_garbage, staged_writes
from td_datapipes.group_chunks import GroupChunks
from td_datapipes.ingest import ingest
from td_datapipes.integrity import verify_dataset
from td_datapipes.keys import staged_key
from td_datapipes.manifest import Manifest

FORK = multiprocessing.get_context("fork")
ROWS = 1000
CHUNK_BYTES = 320
TEXTS = [None if row % 11 == 3 else "aé漢"[row % 3] * (row % 23) for row in range(ROWS)]
BLOBS = [None if row % 13 == 5 else bytes([row % 256]) * (row * 7 % 90) for row in range(ROWS)]
LISTS = [list(range(row, row + row % 9)) for row in range(ROWS)]
BIG = [b"z" * 1500 if row % 50 == 7 else b"" for row in range(ROWS)]  # one value a few chunks
RARE = ["rare" if row % 400 == 1 else None for row in range(ROWS)]  # never a full chunk
PARTS = [f"part {row // 25} " * 8 for row in range(ROWS)]
TABLE = {
    "id": pa.array(range(ROWS), pa.int64()),
    "text": pa.array(TEXTS, pa.string()),
    "blob": pa.array(BLOBS, pa.binary()),
    "tokens": pa.array(LISTS, pa.list_(pa.int32())),
    "big": pa.array(BIG, pa.binary()),
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A file of `TABLE`."""
    pq.write_table(pa.table(TABLE), tmp_path / "in.parquet", row_group_size=70)
    return tmp_path / "in.parquet"


@pytest.fixture
def rare(tmp_path: Path) -> Path:
    """The same beside a column with few values."""
    pq.write_table(pa.table({**TABLE, "rare": pa.array(RARE, pa.string())}), tmp_path / "r.parquet", row_group_size=70)
    return tmp_path / "r.parquet"


def die_after(chunks: int) -> None:
    """Let this process end when it has sent so many chunks of records."""
    plain, sent = GroupChunks.flush, iter(range(1, chunks + 1))

    def flush(self: GroupChunks) -> None:
        plain(self)
        if next(sent, None) == chunks:
            os._exit(9)

    GroupChunks.flush = flush  # type: ignore[method-assign]


def interrupt(source: Any, url: str, chunks: int, *, heartbeat: float = 10.0, **options: Any) -> None:
    """Ingest in a process of its own, which is killed on the way."""

    def child() -> None:
        torch.set_num_threads(1)
        writer_module.HEARTBEAT_SECONDS = heartbeat
        die_after(chunks)
        ingest(source, url, chunk_bytes=CHUNK_BYTES, **options)

    process = FORK.Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == 9


@pytest.fixture
def first_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From which row on each write of this process writes."""
    found: list[int] = []
    begin = writer_module._Staging.__init__

    def noted(self: Any, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        found.append(self.first_row)

    monkeypatch.setattr(writer_module._Staging, "__init__", noted)
    return found


def contents(server: ServerProcess, manifest: Manifest) -> list[bytes]:
    """Of all its chunks, and their checksums."""
    return [server.execute("GET", key) for key in chunk_keys(manifest)]


def assert_is_table(url: str, rare: list[Any] | None = None) -> None:
    with RedisTDDataset(url) as dataset:
        found = dataset[:]
    assert found["id"].tolist() == list(range(ROWS))
    assert (found["text"], found["blob"], found["big"]) == (TEXTS, BLOBS, BIG)
    assert [row.tolist() for row in found["tokens"].unbind()] == LISTS
    if rare is not None:
        assert found["rare"] == rare


def data_keys(server: ServerProcess) -> set[bytes]:
    return set(server.execute("KEYS", "td:*:*:*"))


@pytest.mark.parametrize("chunks", [20, 133, 249])
def test_one_that_was_killed_goes_on_with_what_is_staged(
    server: ServerProcess, source: Path, first_rows: list[int], chunks: int
) -> None:
    interrupt(source, server.url("r"), chunks)
    before = data_keys(server)
    manifest = ingest(source, server.url("r"), chunk_bytes=CHUNK_BYTES)
    # All but what had not arrived when it was killed, and rows whose values had not.
    per_chunk = manifest.layouts[0].records_per_chunk
    assert first_rows[0] % per_chunk == 0
    assert (chunks - 20) * per_chunk <= first_rows[0] <= chunks * per_chunk
    assert first_rows[0] > 0 or chunks == 20
    assert_is_table(server.url("r"))
    assert verify_dataset(server.url("r")).bad == ()
    assert before <= set(chunk_keys(manifest))
    assert data_keys(server) == set(chunk_keys(manifest))
    assert server.execute("HLEN", staged_key("r")) == 0
    other = ingest(source, server.url("other"), chunk_bytes=CHUNK_BYTES)
    assert first_rows[1] == 0
    assert contents(server, manifest) == contents(server, other)
    assert [heap.nbytes for heap in manifest.heaps] == [heap.nbytes for heap in other.heaps]


def test_it_may_be_killed_again_and_again(server: ServerProcess, source: Path, first_rows: list[int]) -> None:
    for _ in range(4):
        interrupt(source, server.url("r"), 60)
    manifest = ingest(source, server.url("r"), chunk_bytes=CHUNK_BYTES)
    assert first_rows[0] > 3 * 40 * manifest.layouts[0].records_per_chunk
    assert_is_table(server.url("r"))


@pytest.mark.parametrize("heartbeat", [0.0, 1000.0])
def test_values_too_few_for_a_chunk_are_kept_whenever_it_says_that_it_goes_on(
    server: ServerProcess, rare: Path, first_rows: list[int], heartbeat: float
) -> None:
    interrupt(rare, server.url("r"), 150, heartbeat=heartbeat)
    ingest(rare, server.url("r"), chunk_bytes=CHUNK_BYTES)
    assert (first_rows[0] > 0) == (heartbeat == 0.0)
    assert_is_table(server.url("r"), RARE)


def test_ctrl_c_keeps_all_that_was_taken(
    server: ServerProcess, rare: Path, first_rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, sent = GroupChunks.flush, iter(range(150))

    def flush(self: GroupChunks) -> None:
        plain(self)
        if next(sent, None) == 149:
            raise KeyboardInterrupt

    monkeypatch.setattr(GroupChunks, "flush", flush)
    with pytest.raises(KeyboardInterrupt):
        ingest(rare, server.url("r"), chunk_bytes=CHUNK_BYTES)
    monkeypatch.setattr(GroupChunks, "flush", plain)
    manifest = ingest(rare, server.url("r"), chunk_bytes=CHUNK_BYTES)
    assert first_rows == [0, 150 * manifest.layouts[0].records_per_chunk]
    assert_is_table(server.url("r"), RARE)


@pytest.mark.parametrize("harm", ["DEL", "SHORT"])
def test_values_that_are_gone_meanwhile_are_written_again(
    server: ServerProcess, source: Path, first_rows: list[int], harm: str
) -> None:
    interrupt(source, server.url("r"), 200)
    host = connect(server.url("r"))
    (write,) = staged_writes(host, "r")
    host.close()
    assert write.manifest is not None
    key = write.manifest.chunk_key(write.manifest.heap_of(("blob",))[0], 10)
    _ = server.execute("DEL", key) if harm == "DEL" else server.execute("SET", key, "short")
    # The rows of which blobs end within ten chunks.
    ends, rows = 0, 0
    for blob in BLOBS:
        ends += len(blob or b"")
        rows += ends <= 10 * CHUNK_BYTES + (5 if harm == "SHORT" else 0)
    ingest(source, server.url("r"), chunk_bytes=CHUNK_BYTES)
    per_chunk = write.manifest.layouts[0].records_per_chunk
    assert first_rows == [rows // per_chunk * per_chunk]
    assert_is_table(server.url("r"))


def test_records_that_are_no_spans_are_not_believed(server: ServerProcess, source: Path, first_rows: list[int]) -> None:
    interrupt(source, server.url("r"), 100)
    host = connect(server.url("r"))
    (write,) = staged_writes(host, "r")
    host.close()
    manifest = write.manifest
    assert manifest is not None
    for chunk in range(100):
        key = manifest.chunk_key(0, chunk)
        server.execute("SETRANGE", key, 0, b"\xee" * (server.execute("STRLEN", key) - 8))
    ingest(source, server.url("r"), chunk_bytes=CHUNK_BYTES)
    assert first_rows == [0]
    assert_is_table(server.url("r"))


def test_one_that_goes_on_and_fails_takes_everything_away(
    server: ServerProcess, source: Path, first_rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(source, server.url("r"), 200)
    assert len(data_keys(server)) > 200

    def refuse(self: Any, block: Any) -> None:
        raise SchemaError("no")

    monkeypatch.setattr(GroupChunks, "add", refuse)
    with pytest.raises(SchemaError, match="no"):
        ingest(source, server.url("r"), chunk_bytes=CHUNK_BYTES)
    assert first_rows[0] > 0
    assert data_keys(server) == set()


def test_what_nobody_takes_up_is_collected(server: ServerProcess, rare: Path) -> None:
    interrupt(rare, server.url("r"), 100, heartbeat=0.0)
    host = connect(server.url("r"))
    assert collect_garbage(host, "r", older_than_seconds=0).writes == 1
    host.close()
    assert data_keys(server) == set()


def test_another_size_of_chunks_begins_anew(server: ServerProcess, source: Path, first_rows: list[int]) -> None:
    interrupt(source, server.url("r"), 100)
    ingest(source, server.url("r"), chunk_bytes=2 * CHUNK_BYTES)
    interrupt(source, server.url("q"), 100)
    ingest(source, server.url("q"), chunk_bytes=CHUNK_BYTES, resume=False)
    assert first_rows == [0, 0]
    assert_is_table(server.url("r"))
    assert_is_table(server.url("q"))


def batches() -> Iterator[TensorDict]:
    for start in range(0, ROWS, 25):
        rows = range(start, start + 25)
        td = TensorDict({"id": torch.tensor(rows)}, [25])
        td["text"] = NonTensorStack(*(TEXTS[row] for row in rows))
        td["part"] = NonTensorData(PARTS[start], batch_size=[25])
        yield td


def test_an_iterable_that_promises_the_same_rows(server: ServerProcess, first_rows: list[int]) -> None:
    interrupt(batches(), server.url("r"), 150, heartbeat=0.0, same_as="these")
    ingest(batches(), server.url("r"), chunk_bytes=CHUNK_BYTES, same_as="these")
    assert first_rows[0] > 0
    with RedisTDDataset(server.url("r")) as dataset:
        found = dataset[:]
    assert found["id"].tolist() == list(range(ROWS))
    assert (found["text"], found["part"]) == (TEXTS, PARTS)


def shared_batches() -> Iterator[TensorDict]:
    """A value that the rows of a batch share fills a chunk; those of `slow` take many rows for that."""
    for start in range(0, ROWS, 25):
        td = TensorDict({"id": torch.arange(start, start + 25)}, [25])
        td["slow"] = NonTensorStack(*(f"{row:03}" for row in range(start, start + 25)))
        td["part"] = NonTensorData(f"part {start:03} " * 32, batch_size=[25])
        yield td


@pytest.mark.parametrize("chunks", [10, 16, 17, 30])
def test_what_two_interrupted_writes_sent_is_not_mixed(
    server: ServerProcess, first_rows: list[int], chunks: int
) -> None:
    interrupt(shared_batches(), server.url("r"), 120, same_as="these")
    host = connect(server.url("r"))
    (write,) = staged_writes(host, "r")
    host.close()
    assert write.manifest is not None
    server.execute("DEL", write.manifest.chunk_key(write.manifest.heap_of(("slow",))[0], 2))
    # It goes on within a batch, of which the rest then has its value once more: all behind lies elsewhere.
    interrupt(shared_batches(), server.url("r"), chunks, same_as="these")
    manifest = ingest(shared_batches(), server.url("r"), chunk_bytes=CHUNK_BYTES, same_as="these")
    assert 200 <= first_rows[0] <= 640
    with RedisTDDataset(server.url("r"), verify=True) as dataset:
        found = dataset[:]
    assert found["slow"] == [f"{row:03}" for row in range(ROWS)]
    assert found["part"] == [f"part {row // 25 * 25:03} " * 32 for row in range(ROWS)]
    assert verify_dataset(server.url("r")).bad == ()
    assert data_keys(server) == set(chunk_keys(manifest))


def test_an_iterable_whose_first_batch_has_no_value_begins_anew(server: ServerProcess, first_rows: list[int]) -> None:
    def late() -> Iterator[TensorDict]:
        for start in range(0, 200, 25):
            values = [f"v{start}" if 25 <= start < 150 else None for _ in range(25)]
            yield TensorDict({"id": torch.arange(25), "s": NonTensorStack(*values)}, [25])

    interrupt(late(), server.url("r"), 10, heartbeat=0.0, same_as="these")
    ingest(late(), server.url("r"), chunk_bytes=CHUNK_BYTES, same_as="these")
    assert first_rows == [0]
    with RedisTDDataset(server.url("r")) as dataset:
        assert dataset[:]["s"] == [f"v{row // 25 * 25}" if 25 <= row < 150 else None for row in range(200)]


def test_on_a_cluster(cluster: ClusterProcess, source: Path, first_rows: list[int], unique_name: str) -> None:
    interrupt(source, cluster.url(unique_name), 150)
    ingest(source, cluster.url(unique_name), chunk_bytes=CHUNK_BYTES)
    assert first_rows[0] > 0
    assert_is_table(cluster.url(unique_name))


def test_records_in_pieces(server: ServerProcess, tmp_path: Path, first_rows: list[int]) -> None:
    wide = pa.FixedSizeListArray.from_arrays(pa.array(range(64 * 100), pa.int64()), 64)
    pq.write_table(pa.table({"wide": wide, "s": pa.array(TEXTS[:100])}), tmp_path / "w.parquet", row_group_size=7)
    interrupt(tmp_path / "w.parquet", server.url("w"), 70, heartbeat=0.0)
    ingest(tmp_path / "w.parquet", server.url("w"), chunk_bytes=CHUNK_BYTES)
    assert 0 < first_rows[0] <= 70
    with RedisTDDataset(server.url("w")) as dataset:
        found = dataset[:]
    assert found["wide"].flatten().tolist() == list(range(6400))
    assert found["s"] == TEXTS[:100]
