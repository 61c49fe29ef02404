"""`LengthBatchSampler`: batches within their tokens, every row once, the same order on all ranks and when resumed."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from td_datapipes.errors import ConfigurationError, StateError
from td_datapipes.samplers import LengthBatchSampler


class Data:
    """Rows with lengths, which it counts being asked for."""

    def __init__(self, lengths: list[int], fingerprint: str = "data") -> None:
        self.all, self.asked, self.fingerprint = lengths, [], fingerprint
        self.asked: list[tuple[Any, int]]

    def __len__(self) -> int:
        return len(self.all)

    def lengths(self, field: Any, *, start: int) -> list[int]:
        self.asked.append((field, start))
        return self.all[start:]


def some_lengths(rows: int = 500, seed: int = 0) -> list[int]:
    lengths: list[int] = np.random.default_rng(seed).geometric(0.02, rows).clip(0, 300).tolist()
    return [0, 0, *lengths[2:]]


def sampler_of(data: Data, max_tokens: int = 1000, **options: Any) -> LengthBatchSampler:
    return LengthBatchSampler(data, max_tokens, **{"seed": 1, "rank": 0, "world_size": 1, **options})


@given(
    st.lists(st.integers(0, 60), max_size=80),
    st.integers(60, 300),
    st.sampled_from([0, 0.1, 1.0]),
    st.sampled_from([None, 1, 5]),
    st.booleans(),
)
def test_every_row_comes_once_in_a_batch_that_fits(
    lengths: list[int], max_tokens: int, max_padding: float, max_rows: int | None, shuffle: bool
) -> None:
    sampler = sampler_of(Data(lengths), max_tokens, max_padding=max_padding, max_rows=max_rows, shuffle=shuffle)
    count = len(sampler)
    for _ in range(2):
        batches = [list(batch) for batch in sampler]
        assert len(batches) == count
        assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
        for batch in batches:
            longest, shortest = (kind(lengths[row] for row in batch) for kind in (max, min))
            assert len(batch) * longest <= max_tokens
            assert len(batch) <= (max_rows or max_tokens)
            # A bucket ends at most this much above where it begins; its lengths are whole numbers.
            assert longest <= max(1, (shortest + 1) * (1 + max_padding))


def test_lengths_are_read_once_and_only_of_new_rows_later() -> None:
    data = Data(some_lengths())
    sampler = sampler_of(data, field="tokens")
    for _ in range(3):
        list(sampler)
        sampler.state_dict()
    assert data.asked == [("tokens", 0)]
    data.all = data.all + some_lengths(40, seed=2)
    assert sorted(row for batch in sampler for row in batch) == list(range(540))
    assert data.asked == [("tokens", 0), ("tokens", 500)]


def test_epochs_differ_in_what_is_together_and_seeds_repeat() -> None:
    data = Data(some_lengths())
    sampler = sampler_of(data)
    first, second = [[list(batch) for batch in sampler] for _ in range(2)]
    assert {frozenset(batch) for batch in first} != {frozenset(batch) for batch in second}
    again = sampler_of(data)
    again.set_epoch(1)
    assert [list(batch) for batch in again] == second
    assert [list(batch) for batch in sampler_of(data, seed=2)] != first


def test_without_shuffling_shorter_rows_come_first_and_all_as_they_are_stored() -> None:
    lengths = some_lengths()
    sampler = sampler_of(Data(lengths), shuffle=False, max_padding=0)
    for batches in ([list(batch) for batch in sampler] for _ in range(2)):
        order = [row for batch in batches for row in batch]
        assert order == sorted(range(500), key=lambda row: (max(lengths[row], 1), row))


@pytest.mark.parametrize("world_size", [2, 3, 7])
@pytest.mark.parametrize("drop_last", [True, False])
def test_ranks_share_the_batches_of_one_and_repeats_are_marked(world_size: int, drop_last: bool) -> None:
    data = Data(some_lengths())
    whole = [tuple(batch) for batch in sampler_of(data)]
    ranks = [
        [(tuple(batch), batch.padded) for batch in sampler_of(data, rank=r, world_size=world_size, drop_last=drop_last)]
        for r in range(world_size)
    ]
    steps, rest = divmod(len(whole), world_size)
    assert [len(rank) for rank in ranks] == [steps + (rest > 0 and not drop_last)] * world_size
    own = [batch for rank in ranks for batch, padded in rank if not padded]
    assert sorted(own) == sorted(whole[: steps * world_size] if drop_last else whole)
    repeats = [(batch, padded) for rank in ranks for batch, padded in rank if padded]
    assert len(repeats) == (0 if drop_last or not rest else world_size - rest)
    assert all(padded == len(batch) and batch in whole for batch, padded in repeats)


def test_windows_announce_the_batches_that_come() -> None:
    sampler = sampler_of(Data(some_lengths()), window=4)
    batches = list(sampler)
    for number, batch in enumerate(batches):
        assert batch.ordinal == number
        announced = dict(enumerate(batch.window.batches, batch.window.first_ordinal))
        assert announced[number].tolist() == list(batch)
        first = number // 4 * 4
        assert (batch.window.first_ordinal, len(batch.window)) == (first, min(4, len(batches) - first))


@pytest.mark.parametrize("consumed", [0, 1, 7])
def test_a_saved_place_is_gone_on_from_once(consumed: int) -> None:
    data = Data(some_lengths())
    whole = [list(batch) for batch in sampler_of(data)]
    sampler = sampler_of(data)
    iterator = iter(sampler)
    for _ in range(consumed):
        next(iterator)
    state = json.loads(json.dumps(sampler.state_dict()))
    resumed = sampler_of(data)
    resumed.load_state_dict(state)
    assert [list(batch) for batch in resumed] == whole[consumed:]
    assert len([*resumed]) == len(whole)


def test_a_cursor_goes_on_with_another_number_of_ranks() -> None:
    data = Data(some_lengths())
    whole = [tuple(batch) for batch in sampler_of(data)]
    pair = [iter(sampler_of(data, rank=rank, world_size=2)) for rank in range(2)]
    consumed = [tuple(next(iterator)) for _ in range(3) for iterator in pair]
    cursor = sampler_of(data, rank=0, world_size=2).cursor(pair[0].state_dict())
    left = []
    for rank in range(3):
        sampler = sampler_of(data, rank=rank, world_size=3, drop_last=True)
        sampler.load_cursor(cursor.to_dict())
        left += [tuple(batch) for batch in sampler]
    assert sorted(consumed) == sorted(whole[:6])
    assert len(left) == (len(whole) - 6) // 3 * 3
    assert set(left) <= set(whole[6:])


def test_a_place_in_another_order_is_refused() -> None:
    state = sampler_of(Data(some_lengths())).state_dict()
    for other in (
        sampler_of(Data(some_lengths()), max_tokens=900),
        sampler_of(Data(some_lengths()), max_padding=0.5),
        sampler_of(Data(some_lengths(seed=5))),
        sampler_of(Data(some_lengths()), shuffle=False),
    ):
        with pytest.raises(StateError, match="the state is of LengthBatchSampler"):
            other.load_state_dict(state)


def test_given_lengths_are_taken_without_asking() -> None:
    data = Data(some_lengths())
    asked = [list(batch) for batch in sampler_of(data)]
    data.asked.clear()
    assert [list(batch) for batch in sampler_of(data, lengths=np.array(some_lengths()))] == asked
    assert data.asked == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_tokens": 0}, "max_tokens must be an integer of at least 1"),
        ({"max_tokens": 20}, "row 2 has 21 tokens, more than max_tokens=20.*open the data set with max_length=20"),
        ({"max_rows": 0}, "max_rows must be an integer of at least 1"),
        ({"window": 0}, "window must be an integer of at least 1"),
        ({"max_padding": -1}, "max_padding must be a number from 0 to 8"),
        ({"lengths": [1, 2]}, "3 are needed, got 2"),
        ({"lengths": [[1], [2], [3]]}, r"shape \(rows,\), got \(3, 1\)"),
        ({"lengths": [1, -2, 3]}, "got -2 for row 1"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        len(sampler_of(Data([3, 0, 21]), **options))


def test_a_data_source_without_lengths_is_named() -> None:
    with pytest.raises(ConfigurationError, match="a range does not tell the lengths of its rows; pass lengths="):
        list(LengthBatchSampler(range(3), 10, rank=0, world_size=1))
