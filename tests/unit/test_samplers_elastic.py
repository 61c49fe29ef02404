"""Elastic cursors: another number of ranks, batch size or workers gets every row left, each once."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest

from td_datapipes.errors import StateError
from td_datapipes.samplers import BlockShuffleBatchSampler, CoalescingBatchSampler, RowSampler, SliceBatchSampler
from td_datapipes.shares import Cursor

ROWS = 203
Make = Callable[..., Any]

MAKERS: dict[str, Make] = {
    "block": lambda batch_size, **ranks: BlockShuffleBatchSampler(
        range(ROWS), batch_size, block_rows=5, buffer_blocks=6, **ranks
    ),
    "rows": lambda batch_size, **ranks: CoalescingBatchSampler(RowSampler(range(ROWS), **ranks), batch_size),
    "replacement": lambda batch_size, **ranks: CoalescingBatchSampler(
        RowSampler(range(ROWS), replacement=True, **ranks), batch_size
    ),
    "slices": lambda batch_size, **ranks: SliceBatchSampler(range(ROWS), 2, batch_size, offsets=[0, 90, 203], **ranks),
}


def all_ranks(make: Make, world_size: int, batch_size: int) -> list[Any]:
    return [make(batch_size, rank=rank, world_size=world_size) for rank in range(world_size)]


def real_rows(steps: list[tuple[Any, ...]]) -> list[int]:
    return [row for step in steps for batch in step for row in list(batch)[: len(batch) - batch.padded]]


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(("before", "after"), [((2, 4), (1, 4)), ((1, 4), (4, 3)), ((4, 3), (3, 5))])
@pytest.mark.parametrize("place", [0, 1, 7])
def test_another_number_of_ranks_gets_the_rows_left(
    name: str, before: tuple[int, int], after: tuple[int, int], place: int
) -> None:
    make = MAKERS[name]
    alone = make(1)
    epochs = [[row for batch in alone for row in batch] for _ in range(2)]
    saving = all_ranks(make, *before)
    taken = real_rows(list(zip(*(islice(sampler, place) for sampler in saving), strict=True)))
    cursors = {json.dumps(sampler.cursor().to_dict()) for sampler in saving}
    assert len(cursors) == 1

    loading = all_ranks(make, *after)
    for sampler in loading:
        sampler.load_cursor(json.loads(next(iter(cursors))))
    steps = list(zip(*loading, strict=True))
    assert sorted(taken + real_rows(steps)) == sorted(epochs[0])
    assert {batch.ordinal for batch in steps[0]} == {0}
    assert len(steps) == -(-(len(epochs[0]) - len(taken)) // (after[0] * after[1] * (2 if name == "slices" else 1)))
    # From the next epoch on all is as if nothing had happened.
    assert sorted(real_rows(list(zip(*loading, strict=True)))) == sorted(epochs[1])


@pytest.mark.parametrize("name", MAKERS)
def test_rows_left_come_in_the_global_order(name: str) -> None:
    whole = [row for batch in MAKERS[name](1) for row in batch]
    saving = all_ranks(MAKERS[name], 2, 4)
    taken = real_rows(list(zip(*(islice(sampler, 5) for sampler in saving), strict=True)))
    alone = MAKERS[name](4)
    alone.load_cursor(saving[0].cursor())
    assert [row for batch in alone for row in batch] == whole[len(taken) :]


@pytest.mark.parametrize("name", MAKERS)
def test_a_resumed_epoch_can_be_saved_again(name: str) -> None:
    make = MAKERS[name]
    whole = [row for batch in make(1) for row in batch]
    first = make(4)
    taken = [row for batch in islice(first, 6) for row in batch]

    def resumed_ranks() -> list[Any]:
        samplers = all_ranks(make, 2, 3)
        for sampler in samplers:
            sampler.load_cursor(first.cursor())
        return samplers

    second = resumed_ranks()
    taken += real_rows(list(zip(*(islice(sampler, 4) for sampler in second), strict=True)))
    # With as many ranks a sampler's own state will do,
    again = make(3, rank=1, world_size=2)
    again.load_state_dict(second[1].state_dict())
    assert list(again) == list(resumed_ranks()[1])[4:]
    # and another cursor for yet another number.
    alone = make(7)
    alone.load_cursor(second[0].cursor())
    rest = [row for batch in alone for row in batch]
    assert rest == whole[len(taken) :]
    assert sorted(taken) == sorted(whole[: len(taken)])


@pytest.mark.parametrize("name", MAKERS)
def test_at_the_end_of_an_epoch(name: str) -> None:
    sampler = MAKERS[name](4)
    batches = len(sampler)
    whole = list(islice(sampler, batches))
    at_the_end = sampler.cursor()
    assert (at_the_end.epoch, at_the_end.rows_consumed) == (0, sum(map(len, whole)))
    fresh = MAKERS[name](5, rank=0, world_size=1)
    fresh.load_cursor(at_the_end)
    assert list(fresh) == []
    reference = MAKERS[name](5)
    reference.set_epoch(1)
    assert list(fresh) == list(reference)

    list(sampler)
    behind = sampler.cursor()
    assert (behind.epoch, behind.rows_consumed) == (1, 0)


def test_a_cursor_of_another_order_is_refused() -> None:
    cursor = BlockShuffleBatchSampler(range(ROWS), 4, block_rows=5).cursor()
    with pytest.raises(StateError, match=r"block_rows=5, .* block_rows=6"):
        BlockShuffleBatchSampler(range(ROWS), 4, block_rows=6).load_cursor(cursor)
    with pytest.raises(StateError, match=r"rows=203.*rows=204"):
        BlockShuffleBatchSampler(range(ROWS + 1), 4, block_rows=5).load_cursor(cursor)
    with pytest.raises(StateError, match=r"consumed 500 rows, but an epoch of this order has 203"):
        BlockShuffleBatchSampler(range(ROWS), 4, block_rows=5).load_cursor(
            Cursor(seed=0, epoch=0, rows=ROWS, rows_consumed=500, fingerprint=cursor.fingerprint)
        )


def test_the_cursors_seed_is_taken_over() -> None:
    cursor = RowSampler(range(ROWS), seed=1).cursor()
    sampler = RowSampler(range(ROWS), seed=2)
    sampler.load_cursor(cursor)
    assert list(sampler) == list(RowSampler(range(ROWS), seed=1))
