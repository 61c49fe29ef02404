"""CoalescingBatchSampler: exactly the inner sampler's rows, announced ahead; restored through the inner's own state."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader.sampler import RandomSampler as StatefulRandomSampler
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from td_datapipes.errors import ConfigurationError, StateError
from td_datapipes.samplers import CoalescingBatchSampler, RowSampler

ROWS = range(43)
Make = Callable[[], Iterable[int]]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


INNER: dict[str, Make] = {
    "sequential": lambda: SequentialSampler(ROWS),
    "random": lambda: RandomSampler(ROWS, generator=generator()),
    "with_replacement": lambda: RandomSampler(ROWS, replacement=True, num_samples=30, generator=generator()),
    "weighted": lambda: WeightedRandomSampler([1.0, 2.0, 3.0], 20, generator=generator()),
    "subset": lambda: SubsetRandomSampler([5, 6, 7, 8, 9], generator=generator()),
    "distributed": lambda: DistributedSampler(ROWS, num_replicas=2, rank=1),
    "stateful_random": lambda: StatefulRandomSampler(ROWS, generator=generator()),
    "stateful_distributed": lambda: StatefulDistributedSampler(ROWS, num_replicas=2, rank=1),
    "rows": lambda: RowSampler(ROWS, seed=1),
    "range": lambda: range(3, 40),
    "list": lambda: [7, 2, 2, 9, 0],
    "nothing": list,
}
WITH_STATE = (
    "sequential",
    "distributed",
    "stateful_random",
    "stateful_distributed",
    "rows",
    "range",
    "list",
    "nothing",
)


class TestOrder:
    @pytest.mark.parametrize("name", INNER)
    @pytest.mark.parametrize("drop_last", [False, True])
    @pytest.mark.parametrize("window", [1, 2, 8])
    def test_equals_torchs_batch_sampler(self, name: str, drop_last: bool, window: int) -> None:
        ours = CoalescingBatchSampler(INNER[name](), 4, drop_last, window=window)
        reference = BatchSampler(INNER[name](), 4, drop_last)
        # Several epochs, since generators go on from one to the next.
        for _ in range(3):
            assert list(ours) == list(reference)
        assert len(ours) == len(reference)

    def test_set_epoch_is_forwarded(self) -> None:
        inner = DistributedSampler(ROWS, num_replicas=1, rank=0)
        sampler = CoalescingBatchSampler(inner, 4)
        first = list(sampler)
        sampler.set_epoch(1)
        assert inner.epoch == 1
        assert list(sampler) != first
        CoalescingBatchSampler(SequentialSampler(ROWS), 4).set_epoch(1)

    def test_breaking_off_runs_the_epoch_anew(self) -> None:
        # Drawing ahead has reached the inner sampler's end by then.
        sampler = CoalescingBatchSampler(RowSampler(ROWS), 4)
        first = list(islice(sampler, 2))
        whole = list(sampler)
        assert whole[:2] == first
        assert list(sampler) != whole


class TestWindows:
    def test_each_batch_announces_its_window_and_the_next(self) -> None:
        batches = list(CoalescingBatchSampler(RowSampler(range(41)), 2, window=3))
        assert [batch.ordinal for batch in batches] == list(range(21))
        for ordinal, batch in enumerate(batches):
            first = ordinal // 3 * 3
            assert batch.window.first_ordinal == first
            assert [rows.tolist() for rows in batch.window.batches] == batches[first : first + 3]
            if first + 3 < 21:
                assert batch.window.next.first_ordinal == first + 3
                assert [rows.tolist() for rows in batch.window.next.batches] == batches[first + 3 : first + 6]
                assert batch.window.next.next is None
            else:
                assert batch.window.next is None

    def test_each_row_is_drawn_once(self) -> None:
        drawn = []

        class Counting(Sampler[int]):
            def __iter__(self) -> Iterator[int]:
                for row in range(40):
                    drawn.append(row)
                    yield row

        iterator = iter(CoalescingBatchSampler(Counting(), 4, window=2))
        assert drawn == []
        next(iterator)
        assert len(drawn) == 16
        list(iterator)
        assert drawn == list(range(40))

    def test_a_resumed_window_begins_at_the_next_batch(self) -> None:
        sampler = CoalescingBatchSampler(RowSampler(ROWS), 4, window=4)
        list(islice(sampler, 6))
        fresh = CoalescingBatchSampler(RowSampler(ROWS), 4, window=4)
        fresh.load_state_dict(sampler.state_dict())
        batch = next(iter(fresh))
        assert (batch.ordinal, batch.window.first_ordinal, batch.window.stop_ordinal) == (6, 6, 8)


class TestState:
    @pytest.mark.parametrize("name", WITH_STATE)
    @pytest.mark.parametrize("window", [1, 3, 8])
    def test_resumes_at_any_batch(self, name: str, window: int) -> None:
        reference = CoalescingBatchSampler(INNER[name](), 4, window=window)
        epochs = [list(reference) for _ in range(4)]
        for place in range(len(epochs[1]) + 1):
            running = CoalescingBatchSampler(INNER[name](), 4, window=window)
            list(running)
            iterator = iter(running)
            assert list(islice(iterator, place)) == epochs[1][:place]
            state = pickle.loads(pickle.dumps(running.state_dict()))
            assert list(iterator) == epochs[1][place:]
            fresh = CoalescingBatchSampler(INNER[name](), 4, window=window)
            fresh.load_state_dict(state)
            assert [list(fresh) for _ in range(3)] == [epochs[1][place:], *epochs[2:]]

    @pytest.mark.parametrize("name", WITH_STATE)
    def test_after_the_end_comes_the_next_epoch(self, name: str) -> None:
        running = CoalescingBatchSampler(INNER[name](), 4)
        list(running)
        state = running.state_dict()
        fresh = CoalescingBatchSampler(INNER[name](), 4)
        fresh.load_state_dict(state)
        assert [list(fresh), list(fresh)] == [list(running), list(running)]

    @pytest.mark.parametrize("name", WITH_STATE)
    def test_an_iterator_given_the_end_stops_at_once(self, name: str) -> None:
        running = CoalescingBatchSampler(INNER[name](), 4)
        iterator = iter(running)
        list(iterator)
        state = iterator.state_dict()
        fresh = CoalescingBatchSampler(INNER[name](), 4)
        fresh.load_state_dict(state)
        iterator = iter(fresh)
        iterator.load_state_dict(state)
        assert list(iterator) == []
        assert list(fresh) == list(running)

    def test_a_state_is_a_value(self) -> None:
        sampler = CoalescingBatchSampler(RowSampler(ROWS), 4)
        iterator = iter(sampler)
        next(iterator)
        state = sampler.state_dict()
        kept = pickle.dumps(state)
        next(iterator)
        assert pickle.dumps(state) == kept
        assert sampler.state_dict() != state

    def test_the_window_may_change(self) -> None:
        sampler = CoalescingBatchSampler(RowSampler(ROWS), 4, window=4)
        whole = list(sampler)
        sampler.set_epoch(0)
        list(islice(sampler, 7))
        fresh = CoalescingBatchSampler(RowSampler(ROWS), 4, window=1)
        fresh.load_state_dict(sampler.state_dict())
        assert list(fresh) == whole[7:]

    @pytest.mark.parametrize("make", [RowSampler, lambda rows: DistributedSampler(rows, num_replicas=1, rank=0)])
    def test_set_epoch_keeps_a_place_within_that_epoch(self, make: Callable[[range], Any]) -> None:
        sampler = CoalescingBatchSampler(make(ROWS), 4)
        sampler.set_epoch(2)
        whole = list(sampler)
        sampler.set_epoch(2)
        list(islice(sampler, 3))
        state = sampler.state_dict()
        same = CoalescingBatchSampler(make(ROWS), 4)
        same.load_state_dict(state)
        same.set_epoch(2)
        assert list(same) == whole[3:]
        other = CoalescingBatchSampler(make(ROWS), 4)
        other.load_state_dict(state)
        other.set_epoch(3)
        sampler.set_epoch(3)
        assert list(other) == list(sampler) != whole

    @pytest.mark.parametrize("name", sorted(set(INNER) - set(WITH_STATE)))
    def test_an_order_that_cannot_be_restored_is_not_saved(self, name: str) -> None:
        sampler = CoalescingBatchSampler(INNER[name](), 4)
        inner = type(INNER[name]()).__name__
        with pytest.raises(StateError, match=rf"the order of {inner} cannot be restored.*RowSampler\(dataset, seed="):
            sampler.state_dict()

    def test_another_inner_sampler_or_batch_size_is_refused(self) -> None:
        state = CoalescingBatchSampler(RowSampler(ROWS), 4).state_dict()
        with pytest.raises(StateError, match="of a RowSampler, this sampler wraps a SequentialSampler"):
            CoalescingBatchSampler(SequentialSampler(ROWS), 4).load_state_dict(state)
        with pytest.raises(StateError, match="batch_size 4, this sampler has 8"):
            CoalescingBatchSampler(RowSampler(ROWS), 8).load_state_dict(state)

    def test_fewer_rows_than_the_state_says_are_noticed(self) -> None:
        sampler = CoalescingBatchSampler(SequentialSampler(ROWS), 4)
        list(islice(sampler, 9))
        fresh = CoalescingBatchSampler(SequentialSampler(range(9)), 4)
        fresh.load_state_dict(sampler.state_dict())
        with pytest.raises(StateError, match="at batch 9, but SequentialSampler gave rows for only"):
            next(iter(fresh))

    def test_only_row_samplers_have_an_elastic_cursor(self) -> None:
        with pytest.raises(StateError, match=r"SequentialSampler has no elastic cursor; wrap .*RowSampler"):
            CoalescingBatchSampler(SequentialSampler(ROWS), 4).cursor()


@pytest.mark.parametrize("arguments", [{"batch_size": 0}, {"batch_size": 4, "window": 0}, {"batch_size": True}])
def test_impossible_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="must be an integer of at least 1"):
        CoalescingBatchSampler(SequentialSampler(ROWS), **arguments)
