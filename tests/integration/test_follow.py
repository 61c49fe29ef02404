"""A stream that follows its data set gives every row once, in order, as it is published, and ends when told to."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch
from servers import ServerProcess
from tensordict import TensorDict
from torch.utils.data import DataLoader
from torchdata.nodes import Loader
from torchdata.stateful_dataloader import StatefulDataLoader

from td_datapipes import (
    RedisTDDataset,
    RedisTDIterableDataset,
    RedisTDIterDataPipe,
    RedisTDReader,
    append_dataset,
    write_dataset,
)
from td_datapipes.catalog import connect, drop
from td_datapipes.errors import DatasetChangedError, TDDatapipesError

pytestmark = pytest.mark.filterwarnings("ignore:.*set_vital.*", "ignore:This DataLoader will create.*")

FORK = multiprocessing.get_context("fork")
FRONTS: dict[str, Any] = {
    "iterable": RedisTDIterableDataset,
    "pipe": RedisTDIterDataPipe,
    "node": RedisTDReader,
}
# An endless wait: what ends these streams is said, not waited for.
SAID: dict[str, Any] = {"follow": True, "timeout_seconds": None, "poll_seconds": 0.01}
WAITED: dict[str, Any] = {"follow": True, "timeout_seconds": 0.05, "poll_seconds": 0.01}


def some_rows(start: int, stop: int) -> TensorDict:
    return TensorDict({"i": torch.arange(start, stop)}, [stop - start])


def begin(server: ServerProcess, rows: int) -> str:
    url = server.url("followed")
    write_dataset(some_rows(0, rows), url, chunk_bytes=160, overwrite=True)
    return url


def together(batches: Any) -> list[int]:
    return [row for batch in batches for row in batch["i"].tolist()]


def append_in_parts(url: str, start: int, stop: int) -> None:
    for at in range(start, stop, 3):
        append_dataset(some_rows(at, min(at + 3, stop)), url, complete=at + 3 >= stop)


@pytest.mark.parametrize("front", FRONTS)
class TestFollowing:
    def test_batches_come_as_soon_as_they_are_full(self, server: ServerProcess, front: str) -> None:
        url = begin(server, 10)
        iterator = iter(FRONTS[front](url, batch_size=4, **SAID))
        assert together([next(iterator), next(iterator)]) == list(range(8))
        append_dataset(some_rows(10, 13), url)
        assert next(iterator)["i"].tolist() == [8, 9, 10, 11]
        append_dataset(some_rows(13, 30), url)
        append_dataset(some_rows(30, 31), url)
        assert together(next(iterator) for _ in range(4)) == list(range(12, 28))
        append_dataset([], url, complete=True)
        assert together(iterator) == [28, 29, 30]
        assert list(iterator) == []

    def test_it_ends_when_nothing_came_for_a_while(self, server: ServerProcess, front: str) -> None:
        url = begin(server, 10)
        assert together(FRONTS[front](url, batch_size=4, **WAITED)) == list(range(10))
        dropping = FRONTS[front](url, batch_size=4, drop_last=True, **WAITED)
        assert together(dropping) == list(range(8))
        at_once = FRONTS[front](url, batch_size=4, follow=True, timeout_seconds=0)
        append_dataset(some_rows(10, 12), url)
        assert together(at_once) == list(range(12)), "it looks once before it ends"

    def test_it_may_begin_before_there_are_rows(self, server: ServerProcess, front: str) -> None:
        url = begin(server, 0)
        stream = FRONTS[front](url, batch_size=4, **SAID)
        child = FORK.Process(target=append_in_parts, args=(url, 0, 29))
        child.start()
        assert together(stream) == list(range(29))
        child.join()

    def test_single_rows_do_not_wait_for_others(self, server: ServerProcess, front: str) -> None:
        url = begin(server, 2)
        iterator = iter(FRONTS[front](url, read_rows=1, **SAID))
        assert [int(next(iterator)["i"]) for _ in range(2)] == [0, 1]
        append_dataset(some_rows(2, 3), url)
        assert int(next(iterator)["i"]) == 2

    def test_what_is_emptied_or_written_anew_meanwhile_is_named(self, server: ServerProcess, front: str) -> None:
        url = begin(server, 6)
        iterator = iter(FRONTS[front](url, batch_size=4, **SAID))
        next(iterator)
        write_dataset(some_rows(0, 0), url, overwrite=True)
        with pytest.raises(DatasetChangedError, match=r"'followed'.*6 rows.*0 of"):
            next(iterator)
        iterator = iter(FRONTS[front](begin(server, 6), batch_size=4, **SAID))
        next(iterator)
        connection = connect(url)
        drop(connection, "followed")
        connection.close()
        with pytest.raises(TDDatapipesError, match=r"'followed'.*removed"):
            next(iterator)

    def test_it_resumes_with_rows_that_came_in_between(self, server: ServerProcess, front: str) -> None:
        url = begin(server, 10)
        stream = FRONTS[front](url, batch_size=4, **SAID)
        iterator = iter(stream)
        next(iterator), next(iterator)
        state = stream.state_dict()
        append_dataset(some_rows(10, 18), url, complete=True)
        rest = together(iterator)
        resumed = FRONTS[front](url, batch_size=4, **SAID)
        if front == "node":
            resumed.reset(state)
        else:
            resumed.load_state_dict(state)
        assert together(resumed) == rest == list(range(8, 18))


@pytest.mark.parametrize("front", ["iterable", "pipe"])
@pytest.mark.parametrize("num_workers", [2, 3])
def test_workers_follow_together(valkey_server: ServerProcess, front: str, num_workers: int) -> None:
    url = begin(valkey_server, 5)
    stream = FRONTS[front](url, batch_size=4, **SAID)
    child = FORK.Process(target=append_in_parts, args=(url, 5, 45))
    child.start()
    assert together(DataLoader(stream, batch_size=None, num_workers=num_workers)) == list(range(45))
    child.join()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_resumes_what_it_followed(valkey_server: ServerProcess, num_workers: int) -> None:
    url = begin(valkey_server, 14)

    def make() -> StatefulDataLoader[Any]:
        data = RedisTDIterableDataset(url, batch_size=4, **WAITED)
        return StatefulDataLoader(data, batch_size=None, num_workers=num_workers)

    loader = make()
    iterator = iter(loader)
    assert together([next(iterator), next(iterator)]) == list(range(8))
    state = loader.state_dict()
    del iterator, loader
    append_dataset(some_rows(14, 30), url, complete=True)
    resumed = make()
    resumed.load_state_dict(state)
    assert together(resumed) == list(range(8, 30))


def test_ranks_get_equally_many_batches_where_the_end_is_said(valkey_server: ServerProcess) -> None:
    url = begin(valkey_server, 7)
    streams = [RedisTDIterableDataset(url, batch_size=4, rank=rank, world_size=2, **SAID) for rank in range(2)]
    append_dataset(some_rows(7, 27), url, complete=True)
    parts = [list(stream) for stream in streams]
    assert [[len(batch) for batch in part] for part in parts] == [[4, 4, 4, 2]] * 2
    assert set(together(parts[0]) + together(parts[1])) == set(range(27))


def test_a_node_loader_follows_too(valkey_server: ServerProcess) -> None:
    url = begin(valkey_server, 6)
    loader = Loader(RedisTDReader(url, batch_size=4, **SAID))
    iterator = iter(loader)
    next(iterator)
    append_dataset(some_rows(6, 11), url, complete=True)
    assert together(iterator) == list(range(4, 11))
    assert together(loader) == list(range(11)), "the next epoch begins at the first row"


def test_following_by_hand(valkey_server: ServerProcess) -> None:
    url = begin(valkey_server, 3)
    with RedisTDDataset(url) as dataset:
        append_dataset(some_rows(3, 5), url, complete=True)
        assert (len(dataset), dataset.complete) == (3, False)
        assert (dataset.refresh(), len(dataset), dataset.complete) == (5, 5, True)
