"""StatefulDataLoader over the iterable fronts: it goes on exactly where the consumer stood, whatever was read ahead."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from servers import ServerProcess
from tensordict import TensorDict
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from td_datapipes import RedisTDIterableDataset, RedisTDIterDataPipe, write_dataset
from td_datapipes.errors import StateError

pytestmark = pytest.mark.filterwarnings("ignore:.*set_vital.*", "ignore:This DataLoader will create.*")

ROWS, BATCH = 50, 4
Batches = list[list[int]]
Front = Callable[[str], Any]


def same(batch: TensorDict) -> TensorDict:
    return batch


def even(row: TensorDict) -> bool:
    return int(row["i"]) % 2 == 0


OPTIONS: dict[str, Any] = {"shuffle": True, "seed": 1, "block_rows": 3, "buffer_blocks": 4}
FRONTS: dict[str, tuple[Front, int | None]] = {
    "iterable": (lambda url: RedisTDIterableDataset(url, batch_size=BATCH, **OPTIONS), None),
    "pipe": (lambda url: RedisTDIterDataPipe(url, batch_size=BATCH, **OPTIONS), None),
    "mapped pipe": (lambda url: RedisTDIterDataPipe(url, batch_size=BATCH, **OPTIONS).map(same), None),
    "adapter": (lambda url: RedisTDIterDataPipe(url, batch_size=BATCH, **OPTIONS).stateful(), None),
    "rows": (lambda url: RedisTDIterableDataset(url, read_rows=8, **OPTIONS), BATCH),
    "filtered rows": (lambda url: RedisTDIterDataPipe(url, read_rows=8, **OPTIONS).filter(even), BATCH),
}
WORKERS = [
    pytest.param({"num_workers": 0}, id="in_process"),
    pytest.param({"num_workers": 1}, id="one_worker"),
    pytest.param({"num_workers": 4, "prefetch_factor": 4}, id="four_workers"),
    pytest.param({"num_workers": 2, "persistent_workers": True, "prefetch_factor": 4}, id="persistent_workers"),
]


@pytest.fixture(scope="module")
def url(valkey_server: ServerProcess) -> Iterator[str]:
    name = valkey_server.url("resumed")
    write_dataset(TensorDict({"i": torch.arange(ROWS)}, [ROWS]), name, chunk_bytes=160, overwrite=True)
    yield name
    valkey_server.flush()


def make_loader(front: str, url: str, **options: Any) -> StatefulDataLoader[Any]:
    make, batch_size = FRONTS[front]
    return StatefulDataLoader(make(url), batch_size=batch_size, **options)


def flat(parts: Iterable[list[int]]) -> list[int]:
    return [row for part in parts for row in part]


def numbers(batches: Any) -> Batches:
    return [batch["i"].tolist() for batch in batches]


@pytest.mark.parametrize("options", WORKERS)
@pytest.mark.parametrize("front", FRONTS)
class TestResume:
    def test_mid_epoch_then_two_more(self, url: str, front: str, options: dict[str, Any]) -> None:
        loader = make_loader(front, url, **options)
        reference = [numbers(loader) for _ in range(4)]
        rows = [row for row in range(ROWS) if front != "filtered rows" or row % 2 == 0]
        assert all(sorted(flat(epoch)) == rows for epoch in reference)
        assert len({str(sorted(epoch)) for epoch in reference}) == 4, "each epoch has an order of its own"
        loader = make_loader(front, url, **options)
        list(loader)
        iterator = iter(loader)
        assert numbers(islice(iterator, 2)) == reference[1][:2]
        early = pickle.loads(pickle.dumps(loader.state_dict()))
        assert numbers(islice(iterator, 3)) == reference[1][2:5]
        late = pickle.loads(pickle.dumps(loader.state_dict()))
        assert numbers(iterator) == reference[1][5:]
        del iterator, loader  # workers that are forked beside another loader's inherit its clean-up
        for state, place in ((early, 2), (late, 5)):
            resumed = make_loader(front, url, **options)
            resumed.load_state_dict(state)
            assert [numbers(resumed) for _ in range(3)] == [reference[1][place:], *reference[2:]]

    def test_at_the_epochs_end(self, url: str, front: str, options: dict[str, Any]) -> None:
        loader = make_loader(front, url, **options)
        reference = [numbers(loader) for _ in range(3)]
        loader = make_loader(front, url, **options)
        list(loader)
        state = loader.state_dict()
        del loader
        resumed = make_loader(front, url, **options)
        resumed.load_state_dict(state)
        assert [numbers(resumed) for _ in range(2)] == reference[1:]


@pytest.mark.parametrize("front", ["iterable", "pipe", "rows"])
def test_the_order_is_the_same_with_any_number_of_workers(url: str, front: str) -> None:
    expected = numbers(make_loader(front, url, num_workers=0))
    for num_workers in (1, 3):
        got = numbers(make_loader(front, url, num_workers=num_workers))
        assert sorted(flat(got)) == sorted(flat(expected))
        if front != "rows":  # workers make the batches there, each of its own rows
            assert got == expected


def test_the_state_is_a_few_integers_and_a_string_and_never_the_same_object(url: str) -> None:
    iterator = iter(RedisTDIterableDataset(url, batch_size=BATCH, **OPTIONS))
    states = [iterator.state_dict()]
    for _ in range(3):
        next(iterator)
        states.append(iterator.state_dict())
    assert [state["batch"] for state in states] == [0, 1, 2, 3]
    assert all(isinstance(value, int | str) for state in states for value in state.values())
    assert json.loads(json.dumps(states[-1])) == states[-1]


def test_resuming_reads_nothing_of_what_came_before(url: str) -> None:
    with RedisTDIterableDataset(url, batch_size=BATCH, prefetch_bytes=0, **OPTIONS) as data:
        iterator = iter(data)
        list(islice(iterator, 9))
        state, before = iterator.state_dict(), data.stats.rows
    assert before == 9 * BATCH
    with RedisTDIterableDataset(url, batch_size=BATCH, prefetch_bytes=0, **OPTIONS) as resumed:
        loader = StatefulDataLoader(resumed, batch_size=None)
        resumed.load_state_dict(state)
        next(iter(loader))
        assert resumed.stats.rows == BATCH


def test_another_number_of_workers_is_refused_with_both_named(url: str) -> None:
    loader = make_loader("iterable", url, num_workers=2)
    list(islice(iter(loader), 3))
    state = loader.state_dict()
    del loader
    other = make_loader("iterable", url, num_workers=1)
    other.load_state_dict(state)
    with pytest.raises(StateError, match="is of worker 0 of 2, this is worker 0 of 1"):
        iter(other)


@pytest.mark.parametrize("options", [*WORKERS, pytest.param({"num_workers": 2}, id="two_workers")])
def test_the_elastic_cursor_goes_on_with_any_number_of_workers_or_ranks(url: str, options: dict[str, Any]) -> None:
    data = RedisTDIterableDataset(url, batch_size=BATCH, **OPTIONS)
    loader = StatefulDataLoader(data, batch_size=None, snapshot_every_n_steps=2, **options)
    reference = [numbers(loader), numbers(loader)]
    iterator = iter(loader)
    reference.append(numbers(islice(iterator, 5)))
    cursor = data.cursor_of(loader.state_dict()).to_dict()
    del iterator, loader
    assert (cursor["epoch"], cursor["rows_consumed"]) == (2, 5 * BATCH)
    rest = set(range(ROWS)) - set(flat(reference[2]))
    for num_workers in (0, 3):
        other = RedisTDIterableDataset(url, batch_size=6, **OPTIONS)
        other.load_cursor(cursor)
        resumed = StatefulDataLoader(other, batch_size=None, num_workers=num_workers)
        got = flat(numbers(resumed))
        assert sorted(got) == sorted(rest)
        assert sorted(flat(numbers(resumed))) == list(range(ROWS)), "a loaded place is used once"
    ranks = [RedisTDIterableDataset(url, batch_size=5, rank=rank, world_size=2, **OPTIONS) for rank in (0, 1)]
    for rank in ranks:
        rank.load_cursor(cursor)
    halves = [flat(numbers(rank)) for rank in ranks]
    assert sorted(flat(halves)) == sorted(rest)


def test_a_finished_loaders_cursor_is_the_next_epochs_beginning(url: str) -> None:
    data = RedisTDIterableDataset(url, batch_size=BATCH, **OPTIONS)
    loader = StatefulDataLoader(data, batch_size=None, num_workers=2)
    list(loader)
    cursor = data.cursor_of(loader.state_dict())
    assert (cursor.epoch, cursor.rows_consumed) == (1, 0)


def test_rows_given_one_by_one_have_no_elastic_cursor(url: str) -> None:
    data = RedisTDIterableDataset(url, **OPTIONS)
    loader = StatefulDataLoader(data, batch_size=BATCH)
    list(islice(iter(loader), 2))
    with pytest.raises(StateError, match="give batch_size to the stream"):
        data.cursor_of(loader.state_dict())


@pytest.mark.parametrize("kind", ["DataLoader", "StatefulDataLoader"])
@pytest.mark.parametrize("persistent", [False, True])
def test_epochs_advance_by_themselves_and_set_epoch_reaches_running_workers(
    url: str, kind: str, persistent: bool
) -> None:
    data = RedisTDIterableDataset(url, batch_size=BATCH, **OPTIONS)
    reference = [numbers(data) for _ in range(3)]
    data = RedisTDIterableDataset(url, batch_size=BATCH, **OPTIONS)
    make: Any = {"DataLoader": DataLoader, "StatefulDataLoader": StatefulDataLoader}[kind]
    loader = make(data, batch_size=None, num_workers=3, persistent_workers=persistent)
    assert [numbers(loader) for _ in range(2)] == reference[:2]
    data.set_epoch(1)
    assert numbers(loader) == reference[1]
    assert numbers(loader) == reference[2]


@pytest.mark.parametrize("persistent", [False, True])
def test_seeding_torch_alike_before_each_epoch_does_not_repeat_it(url: str, persistent: bool) -> None:
    data = RedisTDIterableDataset(url, batch_size=BATCH, **OPTIONS)
    loader = DataLoader(data, batch_size=None, num_workers=2, persistent_workers=persistent)
    epochs = []
    for _ in range(3):
        torch.manual_seed(0)
        epochs.append(numbers(loader))
    assert all(sorted(flat(epoch)) == list(range(ROWS)) for epoch in epochs)
    assert len({str(epoch) for epoch in epochs}) == 3


def test_workers_agree_on_the_epoch_after_one_was_broken_off(url: str) -> None:
    data = RedisTDIterableDataset(url, batch_size=20, **OPTIONS)  # 3 batches: some workers are done at once
    loader = DataLoader(data, batch_size=None, num_workers=3, persistent_workers=True)
    for _ in range(4):
        next(iter(loader))
        assert sorted(flat(numbers(loader))) == list(range(ROWS))


def test_three_batches_left_then_whole_epochs_in_persistent_workers(url: str) -> None:
    options: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}
    loader = make_loader("iterable", url, **options)
    whole = numbers(loader)
    list(islice(iter(loader), len(whole) - 3))
    state = loader.state_dict()
    del loader
    resumed = make_loader("iterable", url, **options)
    resumed.load_state_dict(state)
    epochs = [numbers(resumed) for _ in range(3)]
    assert [len(epoch) for epoch in epochs] == [3, len(whole), len(whole)]
    assert epochs[1] != epochs[2]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_pipe_that_keeps_rows_to_itself_makes_the_state_an_error_not_a_lie(url: str, num_workers: int) -> None:
    for pipe in (
        RedisTDIterDataPipe(url, batch_size=BATCH).shuffle(),
        RedisTDIterDataPipe(url).batch(2).unbatch(),
        RedisTDIterDataPipe(url).map(same).sharding_filter(),
    ):
        loader = StatefulDataLoader(pipe, batch_size=None, num_workers=num_workers)
        with pytest.raises(StateError, match=type(pipe).__name__):
            loader.state_dict()
        del loader
        assert len(list(DataLoader(pipe, batch_size=None, num_workers=num_workers))) > 0


def test_other_peoples_pipes_are_left_alone(url: str) -> None:
    from torch.utils.data.datapipes.iter import IterableWrapper

    assert RedisTDIterDataPipe(url, batch_size=BATCH)
    loader = StatefulDataLoader(IterableWrapper(range(10)), batch_size=None)
    assert list(islice(iter(loader), 4)) == [0, 1, 2, 3]
    resumed = StatefulDataLoader(IterableWrapper(range(10)), batch_size=None)
    resumed.load_state_dict(loader.state_dict())
    assert list(resumed) == list(range(4, 10))


def test_a_place_in_another_order_is_refused_with_both_named(url: str) -> None:
    state = RedisTDIterableDataset(url, batch_size=BATCH, **OPTIONS).state_dict()
    with pytest.raises(StateError, match=r"BlockShuffle.*block_rows=3.*InOrder"):
        RedisTDIterableDataset(url, batch_size=BATCH).load_state_dict(state)
    with pytest.raises(StateError, match="batch_size 4, this sampler has 5"):
        RedisTDIterableDataset(url, batch_size=5, **OPTIONS).load_state_dict(state)
