"""torch's DataLoader on a data set: every row once, in workers too, and no row touched by itself."""

from __future__ import annotations

import os
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from rows_in_memory import assert_same_rows, random_rows
from servers import ServerProcess, wait_until
from tensordict import TensorDict, TensorDictBase
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, RandomSampler, SequentialSampler, Subset

from td_datapipes import RedisTDDataset, write_dataset
from td_datapipes.collate import collate_tensordicts
from td_datapipes.errors import DataLossError, RowIndexError
from td_datapipes.keys import manifest_key
from td_datapipes.manifest import Manifest

NUM_ROWS = 50
FIELDS: dict[Any, Any] = {
    "x": (torch.float32, (6,)),
    ("n", "y"): (torch.bfloat16, (2, 3)),
    ("n", "d", "z"): (torch.bool, ()),
}


def some_rows(rows: int = NUM_ROWS, seed: int = 0) -> TensorDict:
    td = random_rows(rows, FIELDS, seed)
    td["row"] = torch.arange(rows)
    return td


TD = some_rows()


@pytest.fixture
def dataset(server: ServerProcess) -> Iterator[RedisTDDataset]:
    write_dataset(TD, url := server.url("loaded"), chunk_bytes=640)
    with RedisTDDataset(url) as opened:
        yield opened


def check_epoch(batches: Sequence[TensorDictBase], sizes: Sequence[int], *, shuffled: bool) -> None:
    """Batches of those sizes that hold every row of `TD` once, equal to it."""
    assert [batch.batch_size[0] for batch in batches] == list(sizes)
    rows = torch.cat([batch["row"] for batch in batches])
    assert_same_rows(torch.cat(list(batches)), TD[rows])
    if shuffled:
        assert Counter(rows.tolist()) == Counter(range(NUM_ROWS))
        assert rows.tolist() != list(range(NUM_ROWS))
    else:
        assert rows.tolist() == list(range(NUM_ROWS))


def workers(number: int, how: str = "fork", **more: Any) -> dict[str, Any]:
    return {"num_workers": number, "multiprocessing_context": how, **more}


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("options", [{}, workers(1), workers(2)], ids=["0", "1 forked", "2 forked"])
def test_a_loader_gives_every_row_once(dataset: RedisTDDataset, options: dict[str, Any], shuffle: bool) -> None:
    loader = DataLoader(dataset, batch_size=8, shuffle=shuffle, **options)
    for _ in range(2):
        check_epoch(list(loader), [8] * 6 + [2], shuffled=shuffle)
    assert len(loader) == 7


@pytest.mark.heavy
def test_spawned_workers_give_every_row_once(valkey_server: ServerProcess, unique_name: str) -> None:
    write_dataset(TD, url := valkey_server.url(unique_name))
    with RedisTDDataset(url) as dataset:
        dataset[0]
        loader = DataLoader(dataset, batch_size=8, shuffle=True, **workers(2, "spawn", persistent_workers=True))
        for _ in range(2):
            check_epoch(list(loader), [8] * 6 + [2], shuffled=True)
        assert_same_rows(dataset[[3, 1]], TD[[3, 1]])


def test_drop_last_loses_the_last_rows_only(dataset: RedisTDDataset) -> None:
    batches = list(DataLoader(dataset, batch_size=8, drop_last=True))
    assert_same_rows(torch.cat(batches), TD[:48])


def connections_of(server: ServerProcess) -> set[int]:
    """Ids of the server's connections but the asking one."""
    reply = server.client().client_list()
    own = server.client().client_id()
    return {int(entry["id"]) for entry in reply} - {own}


def test_forked_workers_dial_their_own_connections_and_the_parents_goes_on(
    server: ServerProcess, dataset: RedisTDDataset
) -> None:
    assert_same_rows(dataset[7], TD[7])
    parents = connections_of(server)
    loader = DataLoader(dataset, batch_size=4, shuffle=True, **workers(2, persistent_workers=True))
    batches = list(loader)
    check_epoch(batches, [4] * 12 + [2], shuffled=True)
    both = connections_of(server)
    assert parents <= both
    assert len(both - parents) >= 2, "each worker has a connection of its own"
    # While the workers live, the parent reads on its own connection, and they on theirs.
    for _ in range(3):
        assert_same_rows(dataset[[5, 4, 5]], TD[[5, 4, 5]])
        check_epoch(list(loader), [4] * 12 + [2], shuffled=True)
    assert connections_of(server) == both
    del loader, batches
    wait_until(lambda: connections_of(server) == parents, "the workers' connections to end")
    assert_same_rows(dataset[[49, 0]], TD[[49, 0]])


def test_a_forked_child_that_ends_leaves_the_parents_connection_alone(dataset: RedisTDDataset) -> None:
    assert_same_rows(dataset[[1]], TD[[1]])
    for _ in range(3):
        if (child := os.fork()) == 0:
            status = 1
            try:
                assert_same_rows(dataset[[8, 2]], TD[[8, 2]])
                dataset.close()
                status = 0
            finally:
                os._exit(status)
        assert_same_rows(dataset[[3, 30]], TD[[3, 30]])
        assert os.waitpid(child, 0)[1] == 0
        assert_same_rows(dataset[[4, 40]], TD[[4, 40]])


class Counting(RedisTDDataset):
    """Counts how it is asked."""

    singles = 0
    batches = 0

    def __getitem__(self, index: Any) -> TensorDict:
        if isinstance(index, int):
            self.singles += 1
        return super().__getitem__(index)

    def __getitems__(self, rows: Sequence[int]) -> TensorDict:
        self.batches += 1
        return super().__getitems__(rows)


def test_the_default_collate_takes_a_batch_as_it_is(server: ServerProcess, dataset: RedisTDDataset) -> None:
    del dataset
    with Counting(server.url("loaded"), strategy="pipelined") as counting:
        check_epoch(list(DataLoader(counting, batch_size=8)), [8] * 6 + [2], shuffled=False)
        assert (counting.singles, counting.batches) == (0, 7)
        stats = counting.stats
        assert (stats.rows, stats.batches, stats.ranges, stats.commands) == (50, 7, 50, 50)


def test_the_numbers_of_a_known_read_are_exact(server: ServerProcess, unique_name: str) -> None:
    write_dataset(random_rows(60, {"x": (torch.uint8, (96,))}), url := server.url(unique_name), chunk_bytes=96 * 20)
    for strategy, ranges, nbytes in (("pipelined", 60, 60 * 104), ("covering", 4 * 1 + 2, 60 * 96)):
        # Batches of 15 rows in order: chunks of 20 rows cut the second and the third in two.
        with RedisTDDataset(url, strategy=strategy) as dataset:  # type: ignore[arg-type]
            for _ in DataLoader(dataset, batch_size=15):
                pass
            stats = dataset.stats
            assert (stats.rows, stats.batches) == (60, 4)
            assert (stats.ranges, stats.commands, stats.bytes) == (ranges, ranges, nbytes)
            assert 0 < stats.wait_seconds < 60


def test_a_collate_function_of_the_users_gets_the_batch(dataset: RedisTDDataset) -> None:
    def collate(batch: TensorDict) -> tuple[torch.Size, list[int]]:
        return batch.batch_size, batch["row"].tolist()

    found = list(DataLoader(dataset, batch_size=20, collate_fn=collate))
    assert found == [
        (torch.Size([20]), list(range(20))),
        (torch.Size([20]), list(range(20, 40))),
        (torch.Size([10]), list(range(40, 50))),
    ]


def test_samplers_of_torchs_own_are_followed(dataset: RedisTDDataset) -> None:
    by_batch = DataLoader(dataset, batch_sampler=BatchSampler(RandomSampler(dataset), 8, drop_last=False))
    check_epoch(list(by_batch), [8] * 6 + [2], shuffled=True)
    # A batch sampler as the sampler, without automatic batches: the data set is indexed with lists.
    # torch then converts what it got instead of collating it, and takes a TensorDict for a dictionary.
    alone: dict[str, Any] = {"batch_size": None, "collate_fn": collate_tensordicts}
    by_list = DataLoader(dataset, sampler=BatchSampler(SequentialSampler(dataset), 8, drop_last=False), **alone)
    check_epoch(list(by_list), [8] * 6 + [2], shuffled=False)
    by_row = list(DataLoader(dataset, **alone))
    assert by_row[0].batch_size == torch.Size([])
    check_epoch([row.unsqueeze(0) for row in by_row], [1] * 50, shuffled=False)


@pytest.mark.parametrize("options", [{}, workers(2)], ids=["0", "2 forked"])
def test_subsets_and_their_subsets_are_read_in_batches(
    server: ServerProcess, dataset: RedisTDDataset, options: dict[str, Any]
) -> None:
    del dataset
    chosen = [40, 3, 3, 17, 21, 0, 49, 8]
    with Counting(server.url("loaded")) as counting:
        subset = Subset(Subset(counting, range(0, 50, 1)), chosen)
        batches = list(DataLoader(subset, batch_size=3, **options))
        assert_same_rows(torch.cat(batches), TD[chosen])
        assert counting.singles == 0


def test_data_sets_are_concatenated(server: ServerProcess, dataset: RedisTDDataset) -> None:
    other = some_rows(10, seed=9)
    write_dataset(other, server.url("other"))
    with RedisTDDataset(server.url("other")) as second:
        both = ConcatDataset([dataset, second])
        assert len(both) == 60
        batches = list(DataLoader(both, batch_size=8))
        assert [len(batch) for batch in batches] == [8] * 7 + [4]
        assert_same_rows(torch.cat(batches), torch.cat([TD, other]))


@pytest.mark.filterwarnings("ignore:'pin_memory' argument")
@pytest.mark.parametrize("options", [{}, workers(1)], ids=["0", "1 forked"])
def test_asking_to_pin_memory_keeps_the_batch_what_it_is(dataset: RedisTDDataset, options: dict[str, Any]) -> None:
    batches = list(DataLoader(dataset, batch_size=8, pin_memory=True, **options))
    for batch in batches:
        assert isinstance(batch, TensorDict)
        assert batch["n"].batch_size == batch.batch_size
        assert batch["n", "d"].batch_size == batch.batch_size
    check_epoch(batches, [8] * 6 + [2], shuffled=False)


@pytest.mark.parametrize(
    "options", [{"strided": True}, {"strategy": "lua"}, {"atomic": True}, {"fields": ["row", "n"]}]
)
def test_workers_read_as_the_data_set_was_told_to(
    server: ServerProcess, dataset: RedisTDDataset, options: dict[str, Any]
) -> None:
    del dataset
    with RedisTDDataset(server.url("loaded"), **options) as told:
        batches = list(DataLoader(told, batch_size=8, **workers(1)))
        expected = TD.select("row", "n") if "fields" in options else TD
        assert_same_rows(torch.cat(batches), expected)


@pytest.mark.parametrize("options", [{}, workers(1)], ids=["0", "1 forked"])
def test_a_workers_error_arrives_with_its_name_and_message(
    server: ServerProcess, dataset: RedisTDDataset, options: dict[str, Any]
) -> None:
    key = Manifest.from_json(server.execute("GET", manifest_key("loaded"))).chunk_key(0, 1)
    server.execute("DEL", key)
    assert next(iter(DataLoader(dataset, batch_size=5, **options)))["row"].tolist() == list(range(5))
    message = error_of(DataLoader(dataset, batch_size=5, **options), DataLossError)
    for part in ("data set 'loaded'", key.decode(), "is missing or empty"):
        assert part in message
    assert "row 50 is not in" in error_of(DataLoader(dataset, sampler=[0, 50], batch_size=2, **options), RowIndexError)


def error_of(loader: DataLoader[TensorDict], kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        list(loader)
    message = str(caught.value)
    # The frames refer to the iterator: left to the garbage collector, its workers take seconds to end.
    traceback.clear_frames(caught.tb)
    return message


def test_workers_of_several_epochs_and_data_sets_do_not_mix_rows(
    server: ServerProcess, dataset: RedisTDDataset
) -> None:
    other = some_rows(30, seed=5)
    write_dataset(other, server.url("other"))
    with RedisTDDataset(server.url("other")) as second:
        mine, theirs = (DataLoader(each, batch_size=10, **workers(1)) for each in (dataset, second))
        for epoch in range(2):
            pairs = list(zip(mine, theirs, strict=False))
            assert len(pairs) == 3, epoch
            assert_same_rows(torch.cat([pair[0] for pair in pairs]), TD[:30])
            assert_same_rows(torch.cat([pair[1] for pair in pairs]), other)
