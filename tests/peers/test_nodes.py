"""What torchdata.nodes promises of a source, kept by `RedisTDReader` under each of its nodes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from servers import ServerProcess
from tensordict import TensorDict
from torchdata.nodes import (
    BaseNode,
    Batcher,
    IterableWrapper,
    Loader,
    Mapper,
    MultiNodeWeightedSampler,
    ParallelMapper,
    Prefetcher,
    StopCriteria,
    Unbatcher,
)

from td_datapipes import RedisTDIterableDataset, RedisTDReader, write_dataset
from td_datapipes.errors import StateError

# A mapper of torchdata's that dies in its own thread joins that thread: it raises, and nobody is harmed.
pytestmark = pytest.mark.filterwarnings(
    r"ignore:Exception ignored in. <function _SingleThreadedMapper\.__del__:pytest.PytestUnraisableExceptionWarning"
)

ROWS = 50
OPTIONS: dict[str, Any] = {"shuffle": True, "seed": 1, "block_rows": 3, "buffer_blocks": 4}


@pytest.fixture(scope="module")
def url(valkey_server: ServerProcess) -> Iterator[str]:
    name = valkey_server.url("noded")
    write_dataset(TensorDict({"i": torch.arange(ROWS)}, [ROWS]), name, chunk_bytes=160, overwrite=True)
    yield name
    valkey_server.flush()


def numbers(batch: Any) -> list[int]:
    if isinstance(batch, list):
        return [int(row["i"]) for row in batch]
    return batch["i"].reshape(-1).tolist()  # type: ignore[no-any-return]


def reader(url: str, **options: Any) -> RedisTDReader:
    return RedisTDReader(url, **{"batch_size": 4, **OPTIONS, **options})


PIPELINES: dict[str, Callable[[str], BaseNode[Any]]] = {
    "alone": lambda url: Mapper(reader(url), numbers),
    "prefetched": lambda url: Prefetcher(Mapper(reader(url), numbers), 3),
    "mapped in threads": lambda url: ParallelMapper(reader(url), numbers, num_workers=2, snapshot_frequency=1),
    "rarely saved": lambda url: ParallelMapper(reader(url), numbers, num_workers=2, snapshot_frequency=4),
    "batched": lambda url: Mapper(Batcher(reader(url, batch_size=None), 3, drop_last=False), numbers),
    "unbatched": lambda url: Mapper(Batcher(Unbatcher(reader(url)), 3, drop_last=False), numbers),
    "wrapped": lambda url: Mapper(IterableWrapper(RedisTDIterableDataset(url, batch_size=4, **OPTIONS)), numbers),
}


@pytest.mark.parametrize("name", PIPELINES)
class TestPipelines:
    def test_each_epoch_has_every_row_once_in_an_order_of_its_own(self, url: str, name: str) -> None:
        loader = Loader(PIPELINES[name](url))
        epochs = [[row for batch in loader for row in batch] for _ in range(3)]
        assert all(sorted(epoch) == list(range(ROWS)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) == 3

    def test_it_resumes_mid_epoch_and_goes_on_with_the_next(self, url: str, name: str) -> None:
        loader = Loader(PIPELINES[name](url))
        reference = [list(loader) for _ in range(3)]
        loader = Loader(PIPELINES[name](url))
        list(loader)
        iterator = iter(loader)
        assert list(islice(iterator, 5)) == reference[1][:5]
        state = json.loads(json.dumps(loader.state_dict()))
        assert list(iterator) == reference[1][5:]
        resumed = Loader(PIPELINES[name](url))
        resumed.load_state_dict(state)
        assert [list(resumed) for _ in range(2)] == [reference[1][5:], reference[2]]

    def test_a_state_at_the_epochs_end_begins_the_next(self, url: str, name: str) -> None:
        loader = Loader(PIPELINES[name](url))
        reference = [list(loader) for _ in range(2)]
        loader = Loader(PIPELINES[name](url))
        list(loader)
        resumed = Loader(PIPELINES[name](url))
        resumed.load_state_dict(loader.state_dict())
        assert list(resumed) == reference[1]

    def test_a_state_before_the_first_item_begins_at_the_beginning(self, url: str, name: str) -> None:
        reference = list(Loader(PIPELINES[name](url)))
        state = Loader(PIPELINES[name](url)).state_dict()
        resumed = Loader(PIPELINES[name](url))
        resumed.load_state_dict(state)
        assert list(resumed) == reference


def test_reset_begins_the_next_epoch_only_after_something_was_asked_for(url: str) -> None:
    node = reader(url)
    node.reset()
    node.reset()
    first = [numbers(batch) for batch in node]
    node.reset()
    second = [numbers(batch) for batch in islice(node, 3)]
    node.reset()
    third = [numbers(batch) for batch in node]
    reference = reader(url)
    epochs = []
    for _ in range(3):
        reference.reset()
        epochs.append([numbers(batch) for batch in reference])
    assert [first, second, third] == [epochs[0], epochs[1][:3], epochs[2]]
    with pytest.raises(StopIteration):
        next(node)


def test_the_state_is_a_few_integers_and_each_a_new_object(url: str) -> None:
    node = reader(url)
    before = node.state_dict()
    next(node)
    after = node.state_dict()
    assert (before["batch"], after["batch"]) == (0, 1)
    assert all(isinstance(value, int | str) for value in after.values())


def test_set_epoch_overrides(url: str) -> None:
    node = reader(url)
    epochs = []
    for _ in range(2):
        node.reset()
        epochs.append([numbers(batch) for batch in node])
    node.set_epoch(0)
    node.reset()
    assert [numbers(batch) for batch in node] == epochs[0]


@pytest.mark.parametrize(
    "criteria",
    [
        StopCriteria.ALL_DATASETS_EXHAUSTED,
        StopCriteria.FIRST_DATASET_EXHAUSTED,
        StopCriteria.CYCLE_UNTIL_ALL_DATASETS_EXHAUSTED,
    ],
)
def test_a_weighted_sampler_mixes_two_and_resumes(url: str, criteria: str) -> None:
    def make() -> Loader[Any]:
        nodes = {"short": Mapper(reader(url, batch_size=25), numbers), "long": Mapper(reader(url, seed=2), numbers)}
        return Loader(MultiNodeWeightedSampler(nodes, {"short": 0.3, "long": 0.7}, stop_criteria=criteria, seed=3))

    loader = make()
    reference = [list(loader) for _ in range(2)]
    if criteria == StopCriteria.ALL_DATASETS_EXHAUSTED:
        assert Counter(row for batch in reference[0] for row in batch) == Counter(dict.fromkeys(range(ROWS), 2))
    loader = make()
    iterator = iter(loader)
    taken = list(islice(iterator, 2))
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    assert taken + list(resumed) == reference[0]
    assert list(resumed) == reference[1]


def test_ranks_share_the_rows(url: str) -> None:
    parts = [[row for batch in reader(url, rank=rank, world_size=2) for row in numbers(batch)] for rank in range(2)]
    assert sorted(parts[0] + parts[1]) == list(range(ROWS))
    node = reader(url, rank=0, world_size=2)
    next(node)
    with pytest.raises(StateError, match="world_size 2, this sampler has 1"):
        reader(url).reset(node.state_dict())
    cursor = node.cursor_of(node.state_dict())
    whole = reader(url)
    whole.load_cursor(cursor)
    rest = [row for batch in whole for row in numbers(batch)]
    assert len(rest) == ROWS - 8
