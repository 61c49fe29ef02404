"""SliceBatchSampler: contiguous slices that stay within a trajectory, each start once."""

from __future__ import annotations

from collections import Counter
from itertools import islice, pairwise
from typing import Any

import numpy as np
import pytest

from td_datapipes.errors import ConfigurationError, StateError
from td_datapipes.samplers import RowBatch, SliceBatchSampler

OFFSETS = [0, 5, 5, 9, 20, 21, 40]


def slices(batches: list[RowBatch], slice_len: int) -> list[list[int]]:
    return [batch[at : at + slice_len] for batch in batches for at in range(0, len(batch), slice_len)]


def valid_slices(offsets: list[int], slice_len: int, stride: int = 1) -> list[list[int]]:
    return [
        list(range(start, start + slice_len))
        for first, stop in pairwise(offsets)
        for start in range(first, stop - slice_len + 1, stride)
    ]


class TestSlices:
    @pytest.mark.parametrize("slice_len", [1, 2, 4, 11])
    @pytest.mark.parametrize("stride", [1, 3])
    @pytest.mark.parametrize("batch_slices", [1, 4])
    def test_each_valid_start_comes_once(self, slice_len: int, stride: int, batch_slices: int) -> None:
        sampler = SliceBatchSampler(
            range(40), slice_len, batch_slices, offsets=OFFSETS, short="skip", stride=stride, seed=1
        )
        expected = valid_slices(OFFSETS, slice_len, stride)
        for _ in range(2):
            assert sorted(slices(list(sampler), slice_len)) == expected
        assert sampler.num_slices == len(expected)
        assert len(sampler) == -(-len(expected) // batch_slices)

    def test_epochs_differ_and_follow_from_the_seed(self) -> None:
        def make(seed: int) -> SliceBatchSampler:
            return SliceBatchSampler(range(40), 3, 4, offsets=OFFSETS, short="skip", seed=seed)

        sampler = make(1)
        first, second = list(sampler), list(sampler)
        assert first != second
        assert list(make(1)) == first
        assert list(make(2)) != first

    def test_every_start_is_equally_likely_to_come_first(self) -> None:
        firsts = Counter(
            next(iter(SliceBatchSampler(range(20), 4, 1, offsets=[0, 6, 20], seed=seed)))[0] for seed in range(2800)
        )
        # 3 starts in the first trajectory, 11 in the second: 200 each; 6 standard deviations.
        assert set(firsts) == {0, 1, 2, *range(6, 17)}
        assert max(abs(count - 200) for count in firsts.values()) < 6 * 200**0.5

    def test_without_shuffle_in_order_of_rows(self) -> None:
        sampler = SliceBatchSampler(range(40), 2, 3, offsets=OFFSETS, short="skip", shuffle=False)
        assert slices(list(sampler), 2) == valid_slices(OFFSETS, 2)

    def test_no_rows_no_batches(self) -> None:
        assert list(SliceBatchSampler([], 2, 2, ends=[])) == []
        assert list(SliceBatchSampler([], 2, 2, offsets=[0])) == []


class TestBoundaries:
    def test_three_ways_to_say_the_same(self) -> None:
        ends = np.zeros(10, bool)
        ends[[3, 9]] = True
        ways: list[dict[str, Any]] = [
            {"offsets": [0, 4, 10]},
            {"ends": ends},
            {"trajectories": ["a"] * 4 + ["b"] * 6},
            {"trajectories": [7, 7, 7, 7, 5, 5, 5, 5, 5, 5]},
        ]
        batches = [list(SliceBatchSampler(range(10), 3, 2, **way)) for way in ways]
        assert batches[0] == batches[1] == batches[2] == batches[3]

    def test_the_last_trajectory_may_be_unfinished(self) -> None:
        sampler = SliceBatchSampler(range(6), 2, 1, ends=[False, False, True, False, False, False], shuffle=False)
        assert list(sampler) == [[0, 1], [1, 2], [3, 4], [4, 5]]

    def test_offsets_may_leave_rows_out(self) -> None:
        sampler = SliceBatchSampler(range(100), 2, 1, offsets=[10, 12, 15], shuffle=False)
        assert list(sampler) == [[10, 11], [12, 13], [13, 14]]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({}, "exactly one of offsets, ends and trajectories, got none"),
            ({"offsets": [0, 10], "ends": [True] * 10}, "exactly one"),
            ({"ends": [True] * 9}, r"ends is an array of shape \[10\], got \(9,\)"),
            ({"offsets": [[0, 10]]}, r"shape \[trajectories \+ 1\]"),
            ({"offsets": [0, 11]}, r"within \[0, 10\]"),
            ({"offsets": [0, 8, 4]}, "not rising"),
            ({"offsets": [0.0, 10.0]}, "integer"),
            ({"offsets": [0, 2, 10]}, "1 trajectories have fewer than slice_len=3 rows, the first is number 0 with 2"),
            ({"offsets": [0, 10], "short": "pad"}, "'error' or 'skip', got 'pad'"),
            ({"offsets": [0, 10], "stride": 0}, "stride must be"),
        ],
    )
    def test_impossible_ones_are_refused(self, arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            SliceBatchSampler(range(10), 3, 2, **arguments)


class TestRanksAndState:
    @pytest.mark.parametrize("world_size", [2, 3])
    def test_ranks_part_each_global_batch(self, world_size: int) -> None:
        arguments: dict[str, Any] = {"offsets": OFFSETS, "short": "skip", "seed": 4}
        whole = slices(list(SliceBatchSampler(range(40), 3, 2 * world_size, **arguments)), 3)
        parts = [
            list(SliceBatchSampler(range(40), 3, 2, rank=rank, world_size=world_size, **arguments))
            for rank in range(world_size)
        ]
        real = [
            found
            for step in zip(*parts, strict=True)
            for batch in step
            for found in slices([batch[: len(batch) - batch.padded]], 3)  # type: ignore[list-item]
        ]
        assert real == whole
        assert all(batch.padded % 3 == 0 for part in parts for batch in part)

    def test_windows_announce_rows(self) -> None:
        batches = list(SliceBatchSampler(range(40), 3, 2, offsets=OFFSETS, short="skip", window=4))
        for batch in batches:
            first = batch.ordinal // 4 * 4
            assert [rows.tolist() for rows in batch.window.batches] == batches[first : first + 4]
            if batch.window.next is not None:
                assert batch.window.next.batches is batches[first + 4].window.batches

    def test_resumes_at_any_batch(self) -> None:
        def make() -> SliceBatchSampler:
            return SliceBatchSampler(range(40), 3, 2, offsets=OFFSETS, short="skip", seed=4)

        sampler = make()
        whole, following = list(sampler), list(sampler)
        for place in range(len(whole) + 1):
            running = make()
            list(islice(running, place))
            fresh = make()
            fresh.load_state_dict(running.state_dict())
            assert list(fresh) == whole[place:]
            assert list(fresh) == following if place else True

    def test_a_cursor_counts_rows(self) -> None:
        sampler = SliceBatchSampler(range(40), 3, 2, offsets=OFFSETS, short="skip")
        list(islice(sampler, 4))
        assert sampler.cursor().rows_consumed == 4 * 2 * 3

    def test_other_boundaries_are_refused(self) -> None:
        state = SliceBatchSampler(range(40), 3, 2, offsets=[0, 20, 40]).state_dict()
        with pytest.raises(StateError, match="offsets="):
            SliceBatchSampler(range(40), 3, 2, offsets=[0, 21, 40]).load_state_dict(state)
