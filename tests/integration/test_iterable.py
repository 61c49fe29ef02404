"""Iterable fronts share the rows among workers and ranks: each comes once, whatever their number, read by windows."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rows_in_memory import assert_same_rows, random_rows
from servers import ServerProcess
from tensordict import TensorDict
from torch.utils.data import DataLoader

from td_datapipes import RedisTDIterableDataset, RedisTDIterDataPipe, RedisTDReader, append_dataset, write_dataset
from td_datapipes.catalog import connect, drop
from td_datapipes.errors import (
    ConfigurationError,
    DataLossError,
    DatasetChangedError,
    DatasetNotFoundError,
    FieldNotFoundError,
    SchemaError,
)

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create.*")

FRONTS: dict[str, Any] = {
    "iterable": RedisTDIterableDataset,
    "pipe": RedisTDIterDataPipe,
    "node": RedisTDReader,
}


def write(server: ServerProcess, rows: int, name: str = "streamed", chunk_bytes: int = 160) -> str:
    """Row i holds i; ten rows a chunk."""
    url = server.url(name)
    write_dataset(TensorDict({"i": torch.arange(rows)}, [rows]), url, chunk_bytes=chunk_bytes, overwrite=True)
    return url


def numbers(batches: Any) -> list[Any]:
    return [batch["i"].tolist() for batch in batches]


def together(batches: Any) -> list[int]:
    return [row for batch in numbers(batches) for row in batch]


@pytest.fixture(scope="module")
def url(valkey_server: ServerProcess) -> Iterator[str]:
    yield write(valkey_server, 100)
    valkey_server.flush()


@pytest.mark.parametrize("front", FRONTS)
class TestOneProcess:
    def test_batches_are_the_rows_in_order(self, url: str, front: str) -> None:
        stream = FRONTS[front](url, batch_size=32)
        assert len(stream) == 4
        batches = list(stream)
        assert [batch.batch_size for batch in batches] == [(32,), (32,), (32,), (4,)]
        assert together(batches) == list(range(100))

    def test_rows_come_one_by_one_without_a_batch_size(self, url: str, front: str) -> None:
        stream = FRONTS[front](url, read_rows=7)
        assert len(stream) == 100
        rows = list(stream)
        assert {row.batch_size for row in rows} == {torch.Size([])}
        assert numbers(rows) == list(range(100))

    def test_a_shuffled_epoch_is_a_permutation_and_the_next_another(self, url: str, front: str) -> None:
        stream = FRONTS[front](url, batch_size=8, shuffle=True, seed=3, block_rows=5, buffer_blocks=4)
        first, second = together(stream), None
        if front == "node":
            stream.reset()
        second = together(stream)
        assert sorted(first) == sorted(second) == list(range(100))
        assert len({tuple(first), tuple(second), tuple(range(100))}) == 3
        again = FRONTS[front](url, batch_size=8, shuffle=True, seed=3, block_rows=5, buffer_blocks=4)
        again.set_epoch(1)
        assert together(again) == second

    @pytest.mark.parametrize("shuffle", [False, True])
    @pytest.mark.parametrize(("rows", "batch_size", "world_size"), [(101, 2, 2), (10, 4, 3), (2, 4, 3), (9, 3, 3)])
    @pytest.mark.parametrize("drop_last", [False, True])
    def test_ranks_get_equally_many_batches_and_repeats_are_flagged(
        self,
        valkey_server: ServerProcess,
        front: str,
        rows: int,
        batch_size: int,
        world_size: int,
        drop_last: bool,
        shuffle: bool,
    ) -> None:
        name = write(valkey_server, rows, "ranks")
        streams = [
            FRONTS[front](
                name,
                batch_size=batch_size,
                drop_last=drop_last,
                shuffle=shuffle,
                mark_padding="padded",
                rank=rank,
                world_size=world_size,
            )
            for rank in range(world_size)
        ]
        parts = [list(stream) for stream in streams]
        assert len({len(part) for part in parts}) == 1
        assert {len(stream) for stream in streams} == {len(parts[0])}
        own = [row for part in parts for batch in part for row in batch["i"][~batch["padded"]].tolist()]
        padded = sum(int(batch["padded"].sum()) for part in parts for batch in part)
        assert len(set(own)) == len(own)
        if drop_last:
            assert padded == 0
            assert len(own) == rows // (batch_size * world_size) * batch_size * world_size
        else:
            assert padded < world_size
            assert sorted(own) == list(range(rows))

    def test_fields_are_chosen_and_nested_rows_come_whole(self, valkey_server: ServerProcess, front: str) -> None:
        td = random_rows(9, {"x": (torch.float32, (3,)), ("n", "y"): (torch.bfloat16, ()), "z": (torch.uint8, (2,))})
        name = valkey_server.url("nested")
        write_dataset(td, name, overwrite=True)
        stream = FRONTS[front](name, batch_size=4, fields=["n", "z"])
        assert_same_rows(torch.cat(list(stream)), td.select(("n", "y"), "z"))  # type: ignore[arg-type]

    def test_several_data_sets_come_one_after_another(self, valkey_server: ServerProcess, front: str) -> None:
        names = [write(valkey_server, rows, f"part{rows}") for rows in (30, 5, 17)]
        stream = FRONTS[front](names, batch_size=8)
        assert together(stream) == [*range(30), *range(5), *range(17)]
        shuffled = FRONTS[front](names, batch_size=8, shuffle=True, block_rows=4, buffer_blocks=3)
        assert sorted(together(shuffled)) == sorted([*range(30), *range(5), *range(17)])

    def test_what_a_server_no_longer_has_is_named(self, valkey_server: ServerProcess, front: str) -> None:
        name = write(valkey_server, 100, "lost")
        stream = FRONTS[front](name, batch_size=10, prefetch_bytes=0)
        iterator = iter(stream)
        next(iterator)
        connection = connect(name)
        drop(connection, "lost")
        connection.close()
        with pytest.raises((DataLossError, DatasetChangedError), match="'lost'"):
            list(iterator)

    @pytest.mark.parametrize(
        ("arguments", "kind", "message"),
        [
            ({"batch_size": 0}, ConfigurationError, "batch_size.*0"),
            ({"batch_size": -3}, ConfigurationError, "batch_size.*-3"),
            ({"batch_size": 4, "fields": ["j"]}, FieldNotFoundError, "'j'.*'i'"),
            ({"batch_size": 4, "shuffle": True, "follow": True}, ConfigurationError, "follow.*shuffle"),
            ({"drop_last": True}, ConfigurationError, "drop_last.*batch_size"),
            ({"read_rows": 0}, ConfigurationError, "read_rows.*0"),
            ({"batch_size": 4, "seed": -1, "shuffle": True}, ConfigurationError, "seed.*-1"),
            ({"batch_size": 4, "timeout_seconds": 1}, ConfigurationError, "timeout_seconds.*follow"),
            ({"follow": True, "timeout_seconds": -1}, ConfigurationError, "timeout_seconds.*-1"),
            ({"batch_size": 4, "mark_padding": "i"}, ConfigurationError, "mark_padding='i'"),
            ({"batch_size": 4, "rank": 3, "world_size": 3}, ConfigurationError, "rank"),
            ({"batch_size": 4, "prefetch_bytes": -1}, ConfigurationError, "prefetch_bytes"),
            ({"batch_size": 4, "windwo": 3}, TypeError, "windwo"),
        ],
    )
    def test_bad_arguments_are_named(
        self, url: str, front: str, arguments: dict[str, Any], kind: type[Exception], message: str
    ) -> None:
        with pytest.raises(kind, match=message):
            FRONTS[front](url, **arguments)

    def test_a_missing_data_set_is_named(self, valkey_server: ServerProcess, front: str) -> None:
        with pytest.raises(DatasetNotFoundError, match="nowhere"):
            FRONTS[front](valkey_server.url("nowhere"), batch_size=4)
        with pytest.raises(ConfigurationError, match="at least one"):
            FRONTS[front]([], batch_size=4)

    def test_the_length_is_pinned_at_opening(self, valkey_server: ServerProcess, front: str) -> None:
        name = write(valkey_server, 10, "pinned")
        stream = FRONTS[front](name, batch_size=4)
        append_dataset(TensorDict({"i": torch.arange(10, 20)}, [10]), name)
        assert together(stream) == list(range(10))

    def test_covering_ranges_are_read_a_window_ahead(self, url: str, front: str) -> None:
        stream = FRONTS[front](url, batch_size=10)
        list(stream)
        # Ten chunks: nothing is asked for twice, and no row by itself.
        assert stream.stats.ranges <= 10
        assert stream.stats.batches == 10


def test_data_sets_of_other_fields_are_not_read_as_one(valkey_server: ServerProcess) -> None:
    first = write(valkey_server, 3, "first")
    other = valkey_server.url("other")
    write_dataset(TensorDict({"i": torch.zeros(3)}, [3]), other, overwrite=True)
    with pytest.raises(SchemaError, match=r"'first'.*'other'.*int64.*float32"):
        RedisTDIterableDataset([first, other], batch_size=2)


@pytest.mark.parametrize("front", ["iterable", "pipe"])
class TestWorkers:
    @pytest.mark.parametrize("num_workers", [0, 1, 3, 4])
    @pytest.mark.parametrize("drop_last", [False, True])
    def test_each_row_once_and_less_than_a_batch_is_dropped(
        self, url: str, front: str, num_workers: int, drop_last: bool
    ) -> None:
        batched = FRONTS[front](url, batch_size=7, drop_last=drop_last)
        got = numbers(DataLoader(batched, batch_size=None, num_workers=num_workers))
        assert got == [list(range(at, min(at + 7, 100))) for at in range(0, 98 if drop_last else 100, 7)]

        by_rows = FRONTS[front](url, read_rows=8)
        loader = DataLoader(by_rows, batch_size=4, num_workers=num_workers, drop_last=drop_last)
        assert sorted(together(loader)) == list(range(100))

    def test_more_workers_than_chunks(self, valkey_server: ServerProcess, front: str) -> None:
        name = write(valkey_server, 25, "few", chunk_bytes=160)  # 3 chunks
        loader = DataLoader(FRONTS[front](name, batch_size=20), batch_size=None, num_workers=4)
        assert [together(loader) for _ in range(2)] == [list(range(25))] * 2

    def test_spawned_workers_share_too(self, url: str, front: str) -> None:
        stream = FRONTS[front](url, batch_size=30, shuffle=True)
        loader = DataLoader(stream, batch_size=None, num_workers=2, multiprocessing_context="spawn")
        assert sorted(together(loader)) == list(range(100))

    def test_a_parent_that_has_read_already_leaves_its_workers_alone(self, url: str, front: str) -> None:
        stream = FRONTS[front](url, batch_size=10)
        assert together(stream) == list(range(100))
        assert together(DataLoader(stream, batch_size=None, num_workers=2)) == list(range(100))
        assert together(stream) == list(range(100))


def test_nothing_is_left_behind_in_the_folder_for_temporary_files(
    url: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    stream = RedisTDIterableDataset(url, batch_size=10)
    list(stream)
    assert os.listdir(tmp_path) == []
    list(DataLoader(stream, batch_size=None, num_workers=2))
    del stream
    gc.collect()  # a pass and its stream know each other
    assert [name for name in os.listdir(tmp_path) if name.startswith("td_datapipes")] == []
