"""Loaders, samplers, reading ahead and resuming work on what ``TensorDictStore`` wrote as on data sets of ours."""

from __future__ import annotations

import pickle
from itertools import islice
from typing import Any

import pytest
import torch
from rows_in_memory import assert_same_rows, random_rows
from servers import ServerProcess
from stores import write_lazy_store, write_store
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack
from test_prefetch import SAMPLERS as EVERY_SAMPLER
from test_resume import SAMPLERS, WORKERS, epochs_of, expected_epochs, make_loader, resume, rows_of
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from td_datapipes import RedisTDDataset, RedisTDIterableDataset, RedisTDIterDataPipe, RedisTDMixture, RedisTDReader
from td_datapipes.plan import STRATEGIES, Strategy
from td_datapipes.samplers import BlockShuffleBatchSampler, CoalescingBatchSampler, RowSampler

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*set_vital.*"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]

ROWS = 200


def tensor_rows(rows: int = ROWS) -> TensorDict:
    nested: dict[Any, Any] = {
        "x": (torch.float32, (9,)),
        ("n", "y"): (torch.uint8, (5,)),
        ("n", "z"): (torch.float16, ()),
    }
    td = random_rows(rows, nested)
    td["row"] = torch.arange(rows)
    return td


def word_of(row: int) -> str:
    return f"word {row % 17}"


def rows_with_words(rows: int = ROWS) -> TensorDict:
    td = tensor_rows(rows)
    td["word"] = NonTensorStack(*(NonTensorData(word_of(row)) for row in range(rows)))
    td["task"] = NonTensorData("pong", batch_size=[rows])
    return td


def assert_rows_with_words(batch: Any, rows: list[int]) -> None:
    assert batch["row"].tolist() == rows
    assert batch.get("word").tolist() == [word_of(row) for row in rows]
    assert batch.get("task").data == "pong"
    assert_same_rows(batch.exclude("word", "task"), tensor_rows()[rows])


@pytest.fixture
def url(server: ServerProcess) -> str:
    return write_store(server, tensor_rows(), "store")


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("prefetch_bytes", [0, 4096, 1 << 20])
def test_batches_are_the_rows_that_samplers_ask_for(
    server: ServerProcess, prefetch_bytes: int, strategy: Strategy, strided: bool
) -> None:
    reference = tensor_rows(300)
    url = write_store(server, reference, "store")
    with RedisTDDataset(url, strategy=strategy, strided=strided, prefetch_bytes=prefetch_bytes) as dataset:
        for name, make in EVERY_SAMPLER.items():
            expected = list(make(dataset))
            batches = list(DataLoader(dataset, batch_sampler=make(dataset)))
            assert len(batches) == len(expected), name
            for batch, rows in zip(batches, expected, strict=True):
                assert_same_rows(batch, reference[rows])


def test_a_window_is_read_at_once_a_field(server: ServerProcess) -> None:
    td = tensor_rows()
    with RedisTDDataset(write_store(server, td, "store")) as dataset:
        # One window of all rows: each byte once, in a handful of ranges.
        loader = DataLoader(dataset, batch_sampler=BlockShuffleBatchSampler(dataset, 16, block_rows=ROWS))
        assert sorted(row for batch in loader for row in batch["row"].tolist()) == list(range(ROWS))
        assert dataset.stats.bytes == ROWS * (36 + 5 + 2 + 8)
        assert dataset.stats.ranges == 4


@pytest.mark.parametrize("options", WORKERS)
@pytest.mark.parametrize("name", ["rows", "block"])
def test_a_loader_goes_on_where_it_stopped(url: str, name: str, options: dict[str, Any]) -> None:
    expected, reference = expected_epochs(url, name, 3), tensor_rows()
    loader = make_loader(url, name, **options)
    assert rows_of(loader) == expected[0]
    assert rows_of(islice(loader, 5)) == expected[1][:5]
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    loader.dataset.close()
    resumed = resume(url, name, state, **options)
    for batch, rows in zip(resumed, expected[1][5:], strict=True):
        assert_same_rows(batch, reference[rows])
    assert epochs_of(resumed, 1) == expected[2:]


@pytest.mark.parametrize("prefetch_bytes", [0, 1 << 20])
@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}], ids=["in process", "two workers"])
def test_values_come_with_their_rows_through_loaders(
    server: ServerProcess, workers: dict[str, Any], prefetch_bytes: int
) -> None:
    with RedisTDDataset(write_store(server, rows_with_words(), "store"), prefetch_bytes=prefetch_bytes) as dataset:
        for name in ("rows", "block"):
            expected = [list(rows) for rows in SAMPLERS[name](dataset)]
            loader = StatefulDataLoader(dataset, batch_sampler=SAMPLERS[name](dataset), **workers)
            for batch, rows in zip(loader, expected, strict=True):
                assert_rows_with_words(batch, rows)
        for batch in DataLoader(dataset, batch_size=32, shuffle=True, **workers):
            assert_rows_with_words(batch, batch["row"].tolist())


@pytest.mark.heavy
def test_spawned_workers_read_values_too(valkey_server: ServerProcess) -> None:
    valkey_server.flush()
    with RedisTDDataset(write_store(valkey_server, rows_with_words(), "store")) as dataset:
        dataset[0]
        options: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "spawn"}
        seen = []
        for batch in DataLoader(dataset, batch_sampler=BlockShuffleBatchSampler(dataset, 32), **options):
            assert_rows_with_words(batch, batch["row"].tolist())
            seen += batch["row"].tolist()
        assert sorted(seen) == list(range(ROWS))


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}], ids=["in process", "two workers"])
def test_rows_that_differ_in_shape_go_through_loaders(server: ServerProcess, workers: dict[str, Any]) -> None:
    rows = [TensorDict({"x": torch.full((i % 5, 2), i), "row": torch.tensor(i)}, []) for i in range(60)]
    with RedisTDDataset(write_lazy_store(server, lazy_stack(rows), "store")) as dataset:
        sampler = CoalescingBatchSampler(RowSampler(dataset, seed=1), 8, window=2)
        seen = []
        for batch in DataLoader(dataset, batch_sampler=sampler, **workers):
            for row in batch.unbind(0):
                assert_same_rows(row, rows[int(row["row"])])
                seen.append(int(row["row"]))
        assert sorted(seen) == list(range(60))


@pytest.mark.parametrize("front", [RedisTDIterableDataset, RedisTDIterDataPipe, RedisTDReader])
def test_iterable_fronts_stream_stores(server: ServerProcess, front: Any) -> None:
    url = write_store(server, rows_with_words(), "store")
    seen = []
    for batch in front(url, batch_size=16, shuffle=True, seed=3):
        assert_rows_with_words(batch, batch["row"].tolist())
        seen += batch["row"].tolist()
    assert sorted(seen) == list(range(ROWS))
    assert seen != sorted(seen)


def test_stores_are_joined_and_mixed(server: ServerProcess) -> None:
    whole = rows_with_words()
    urls = [
        write_store(server, TensorDict(source=dict(part.items()), batch_size=part.batch_size), name)
        for name, part in (("one", whole[:80]), ("two", whole[80:]))
    ]
    for fields in (None, ["row", "word"]):
        seen = []
        for batch in RedisTDIterableDataset(urls, batch_size=32, fields=fields):
            assert batch.get("word").tolist() == [word_of(row) for row in batch["row"].tolist()]
            seen += batch["row"].tolist()
        assert seen == list(range(ROWS))
    with RedisTDMixture([(urls[0], 0.25), (urls[1], 0.75)], seed=1, fields=["row"]) as mixture:
        rows = [row for batch in islice(mixture.batch_sampler(8), 20) for row in mixture[batch]["row"].tolist()]
        assert sum(row < 80 for row in rows) == 40
