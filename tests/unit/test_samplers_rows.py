"""RowSampler: every row once, or as often as its weight says; any place at once; any number of ranks."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from td_datapipes.errors import ConfigurationError, StateError
from td_datapipes.samplers import BlockShuffleBatchSampler, CoalescingBatchSampler, RowSampler


@pytest.fixture
def group_of_four() -> Iterator[None]:
    """A default process group in which this process is rank 2 of 4 and the others are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
    yield
    dist.destroy_process_group()


def ranks(data: range, world_size: int, **arguments: Any) -> list[list[int]]:
    return [list(RowSampler(data, rank=rank, world_size=world_size, **arguments)) for rank in range(world_size)]


class TestOrders:
    @pytest.mark.parametrize("rows", [0, 1, 2, 5, 1000, 3000])
    def test_a_shuffled_epoch_has_each_row_once(self, rows: int) -> None:
        sampler = RowSampler(range(rows), seed=1)
        first, second = list(sampler), list(sampler)
        assert sorted(first) == sorted(second) == list(range(rows))
        assert all(type(row) is int for row in first)
        if rows > 5:
            assert first != second

    def test_without_shuffle_rows_come_in_order(self) -> None:
        assert list(RowSampler(range(7), shuffle=False)) == list(range(7))
        assert list(RowSampler(range(3), shuffle=False, num_samples=7)) == [0, 1, 2, 0, 1, 2, 0]

    def test_a_longer_epoch_goes_through_the_rows_again_in_another_order(self) -> None:
        rows = list(RowSampler(range(50), seed=3, num_samples=120))
        assert sorted(rows[:50]) == sorted(rows[50:100]) == list(range(50))
        assert len(set(rows[100:])) == 20
        assert rows[:50] != rows[50:100]

    def test_with_replacement_rows_are_independent(self) -> None:
        rows = np.array(list(RowSampler(range(10), replacement=True, num_samples=50_000)))
        counts = np.bincount(rows, minlength=10)
        assert np.abs(counts - 5000).max() < 6 * math.sqrt(50_000 * 0.1 * 0.9)
        pairs = np.bincount(rows[:-1] * 10 + rows[1:], minlength=100)
        assert np.abs(pairs - 500).max() < 6 * math.sqrt(50_000 * 0.01 * 0.99)

    def test_weights_say_how_often(self) -> None:
        weights = [0.0, 3.0, 1.0, 0.0, 4.0, 0.0]
        rows = list(RowSampler(range(6), replacement=True, weights=weights, num_samples=40_000))
        counts = np.bincount(rows, minlength=6)
        expected = np.array(weights) / 8 * 40_000
        assert counts[[0, 3, 5]].tolist() == [0, 0, 0]
        assert (np.abs(counts - expected) <= 6 * np.sqrt(expected)).all()

    def test_the_order_follows_from_seed_and_epoch(self) -> None:
        sampler = RowSampler(range(100), seed=5)
        epochs = [list(sampler) for _ in range(3)]
        again = RowSampler(range(100), seed=5)
        again.set_epoch(2)
        assert list(again) == epochs[2]
        assert list(RowSampler(range(100), seed=6)) != epochs[0]
        again.set_epoch(0)
        assert list(again) == epochs[0]

    def test_breaking_off_runs_the_epoch_anew(self) -> None:
        sampler = RowSampler(range(100))
        begun = list(islice(sampler, 30))
        assert list(sampler)[:30] == begun
        assert sampler.epoch == 1


class TestRanks:
    @pytest.mark.parametrize("world_size", [1, 2, 3, 4])
    @pytest.mark.parametrize("rows", [0, 1, 5, 101, 1500])
    def test_ranks_interleave_to_the_one_order(self, world_size: int, rows: int) -> None:
        whole = list(RowSampler(range(rows), seed=2))
        parts = ranks(range(rows), world_size, seed=2)
        assert {len(part) for part in parts} == {math.ceil(rows / world_size)}
        woven = [row for step in zip(*parts, strict=True) for row in step]
        assert woven[:rows] == whole
        # What divides it repeats the order's beginning.
        assert all(row in whole[:world_size] for row in woven[rows:])

    def test_drop_last_gives_no_repeats(self) -> None:
        parts = ranks(range(101), 2, drop_last=True)
        assert [len(part) for part in parts] == [50, 50]
        assert len(set(parts[0] + parts[1])) == 100

    def test_padding_is_flagged(self) -> None:
        samplers = [RowSampler(range(5), rank=rank, world_size=2) for rank in range(2)]
        assert [iter(sampler).num_padded for sampler in samplers] == [0, 1]
        batches = [list(CoalescingBatchSampler(sampler, 2)) for sampler in samplers]
        assert [[batch.padded for batch in of_rank] for of_rank in batches] == [[0, 0], [0, 1]]

    @pytest.mark.usefixtures("group_of_four")
    def test_the_process_group_is_the_default(self) -> None:
        assert list(RowSampler(range(10), shuffle=False)) == [2, 6, 0]
        sampler = RowSampler(range(10), rank=0, world_size=1)
        assert len(sampler) == 10

    @pytest.mark.parametrize(
        ("rank", "world_size", "message"),
        [
            (0, None, "both rank and world_size or neither"),
            (None, 2, "both rank and world_size or neither"),
            (2, 2, "rank must be in"),
            (-1, 2, "rank must be in"),
            (0, 0, "rank must be in"),
        ],
    )
    def test_impossible_ranks_are_refused(self, rank: int | None, world_size: int | None, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            RowSampler(range(4), rank=rank, world_size=world_size)


class TestState:
    @pytest.mark.parametrize(
        "arguments",
        [
            {},
            {"shuffle": False},
            {"replacement": True},
            {"replacement": True, "weights": [1.0] * 60 + [5.0] * 40},
            {"num_samples": 250},
            {"drop_last": True, "rank": 1, "world_size": 3},
        ],
    )
    def test_resumes_at_any_place(self, arguments: dict[str, Any]) -> None:
        sampler = RowSampler(range(100), seed=8, **arguments)
        list(sampler)
        whole = list(sampler)
        following = list(sampler)
        for place in (0, 1, 17, len(whole) - 1, len(whole)):
            running = RowSampler(range(100), seed=8, **arguments)
            running.set_epoch(1)
            iterator = iter(running)
            assert list(islice(iterator, place)) == whole[:place]
            state = running.state_dict()
            assert state == iterator.state_dict()
            fresh = RowSampler(range(100), seed=8, **arguments)
            fresh.load_state_dict(state)
            assert list(fresh) == whole[place:]
            assert list(fresh) == following

    def test_a_state_is_a_value(self) -> None:
        sampler = RowSampler(range(10))
        iterator = iter(sampler)
        state = sampler.state_dict()
        next(iterator)
        assert state["batch"] == 0
        assert sampler.state_dict()["batch"] == 1
        assert {type(value) for value in state.values()} == {int, str}

    def test_a_place_survives_iter_without_next(self) -> None:
        # torch's DataLoader with workers calls iter() twice.
        sampler = RowSampler(range(10))
        whole = list(sampler)
        sampler.set_epoch(0)
        iterator = iter(sampler)
        taken = list(islice(iterator, 4))
        sampler.load_state_dict(sampler.state_dict())
        iter(sampler)
        assert taken + list(sampler) == whole

    def test_set_epoch_keeps_a_place_within_that_epoch(self) -> None:
        sampler = RowSampler(range(10))
        sampler.set_epoch(3)
        whole = list(sampler)
        sampler.set_epoch(3)
        list(islice(sampler, 4))
        state = sampler.state_dict()
        sampler.set_epoch(4)
        for epoch, left in ((3, whole[4:]), (4, list(sampler))):
            fresh = RowSampler(range(10))
            fresh.load_state_dict(state)
            fresh.set_epoch(epoch)
            assert list(fresh) == left

    def test_the_states_seed_is_taken_over(self) -> None:
        sampler = RowSampler(range(50), seed=1)
        list(islice(sampler, 20))
        state, rest = sampler.state_dict(), list(sampler)[20:]
        other = RowSampler(range(50), seed=2)
        other.load_state_dict(state)
        assert list(other) == rest
        assert list(other) == list(sampler)

    @pytest.mark.parametrize(
        ("other", "message"),
        [
            (RowSampler(range(11)), r"rows=10, .* this sampler is RowSampler\(rows=11"),
            (RowSampler(range(10), shuffle=False), "shuffle=True, .* shuffle=False"),
            (RowSampler(range(10), rank=0, world_size=2), r"world_size 1, this sampler has 2; save cursor\(\)"),
            (RowSampler(range(10), replacement=True, weights=[1.0] * 10), "weights="),
            (BlockShuffleBatchSampler(range(10), 1), r"RowSampler\(.*BlockShuffleBatchSampler\("),
        ],
    )
    def test_another_order_is_refused(self, other: Any, message: str) -> None:
        with pytest.raises(StateError, match=message):
            other.load_state_dict(RowSampler(range(10)).state_dict())

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"version": 7}, "version 1, got 7"),
            ({"batch": 99}, "batch 99 of an epoch of 10"),
            ({"batch": -1}, ">= 0, got -1"),
            ({"epoch": None}, "got None"),
        ],
    )
    def test_a_damaged_state_is_refused(self, change: dict[str, Any], message: str) -> None:
        sampler = RowSampler(range(10))
        with pytest.raises(StateError, match=message):
            sampler.load_state_dict({**sampler.state_dict(), **change})

    def test_appended_rows_wait_for_the_next_epoch(self) -> None:
        class Growing:
            fingerprint = "the same data set"

            def __init__(self, rows: int) -> None:
                self.rows = rows

            def __len__(self) -> int:
                return self.rows

        sampler = RowSampler(Growing(20))
        list(islice(sampler, 5))
        state, rest = sampler.state_dict(), list(sampler)[5:]
        grown = RowSampler(Growing(30))
        grown.load_state_dict(state)
        assert list(grown) == rest
        assert sorted(grown) == list(range(30))
        with pytest.raises(StateError, match="rows=20"):
            RowSampler(Growing(19)).load_state_dict(state)


class TestArguments:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"seed": -1}, "seed must be"),
            ({"seed": 1.5}, "seed must be"),
            ({"replacement": True, "shuffle": False}, "needs shuffle=True"),
            ({"weights": [1.0] * 10}, "replacement=True"),
            ({"weights": [1.0] * 9, "replacement": True}, r"shape \(10,\), got \(9,\)"),
            ({"weights": [-1.0] + [1.0] * 9, "replacement": True}, ">= 0"),
            ({"weights": [0.0] * 10, "replacement": True}, "at least one is above 0"),
            ({"weights": [float("nan")] * 10, "replacement": True}, "finite"),
            ({"num_samples": 0}, "num_samples must be"),
        ],
    )
    def test_impossible_ones_are_refused(self, arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            RowSampler(range(10), **arguments)

    def test_set_epoch_takes_no_negative(self) -> None:
        with pytest.raises(ConfigurationError, match="got -1"):
            RowSampler(range(10)).set_epoch(-1)

    def test_weights_may_be_a_tensor(self) -> None:
        sampler = RowSampler(range(3), replacement=True, weights=torch.tensor([0.0, 1.0, 0.0]))
        assert list(sampler) == [1, 1, 1]


@pytest.mark.parametrize("replacement", [False, True])
def test_a_hundred_million_rows_take_no_memory(replacement: bool) -> None:
    tracemalloc.start()
    sampler = CoalescingBatchSampler(RowSampler(range(100_000_000), replacement=replacement), 256)
    batch = next(iter(sampler))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(batch) == 256
    assert peak_bytes < 10 << 20
