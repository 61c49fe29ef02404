"""Workers that share nothing but a small file agree on the epoch they run."""

from __future__ import annotations

import pickle

import pytest

from td_datapipes.epochs import EpochBoard, Round
from td_datapipes.samplers.states import Position

ROWS = 60


def round_of(number: int, worker: int, num_workers: int = 2) -> Round:
    return Round(id=f"7.{number}", worker=worker, num_workers=num_workers)


@pytest.fixture
def copies() -> list[EpochBoard]:
    board = EpochBoard()
    return [board, *(pickle.loads(pickle.dumps(board)) for _ in range(2))]


def test_without_workers_each_end_is_the_epochs() -> None:
    board = EpochBoard()
    for epoch in range(3):
        assert board.begin(ROWS) == Position(epoch=epoch, rows=ROWS)
        assert board.begin(ROWS).epoch == epoch  # the one before was broken off
        board.end(epoch)


@pytest.mark.parametrize("late", [0, 1])
def test_a_worker_that_begins_after_the_others_end_runs_the_same_epoch(copies: list[EpochBoard], late: int) -> None:
    here, *workers = copies
    early = 1 - late
    for epoch in range(3):
        assert workers[early].begin(ROWS, round_of(epoch, early)).epoch == epoch
        workers[early].end(epoch, round_of(epoch, early))
        assert here.peek(ROWS).epoch == epoch
        assert workers[late].begin(ROWS, round_of(epoch, late)).epoch == epoch
        workers[late].end(epoch, round_of(epoch, late))
        assert here.peek(ROWS).epoch == epoch + 1


def test_a_round_that_is_broken_off_does_not_advance(copies: list[EpochBoard]) -> None:
    _, first, second = copies
    first.begin(ROWS, round_of(0, 0))
    second.begin(ROWS, round_of(0, 1))
    first.end(0, round_of(0, 0))
    assert first.begin(ROWS, round_of(1, 0)).epoch == second.begin(ROWS, round_of(1, 1)).epoch == 0


def test_seeds_that_repeat_begin_another_round(copies: list[EpochBoard]) -> None:
    _, first, second = copies
    for epoch in range(2):
        for worker, board in enumerate((first, second)):
            assert board.begin(ROWS, round_of(0, worker)).epoch == epoch
        for worker, board in enumerate((first, second)):
            board.end(epoch, round_of(0, worker))


def test_a_round_restored_at_its_end_advances_whoever_is_late(copies: list[EpochBoard]) -> None:
    _, first, second = copies
    at_end = Position(epoch=4, rows=ROWS)
    for worker, board in enumerate((first, second)):
        mine = round_of(0, worker)
        board.begin(ROWS, mine)
        for _ in range(2):  # loaders restore a pass, look at it, and restore it again
            board.adopt(at_end, mine)
            board.end(4, mine)
    assert first.begin(ROWS, round_of(1, 0)).epoch == second.begin(ROWS, round_of(1, 1)).epoch == 5


def test_a_restored_place_is_one_rounds() -> None:
    board, place = EpochBoard(), Position(epoch=2, rows=ROWS, batch=3)
    board.restore(place)
    first, second = (pickle.loads(pickle.dumps(board)) for _ in range(2))
    assert first.begin(ROWS, round_of(1, 0)) == second.begin(ROWS, round_of(1, 1)) == place
    assert first.begin(ROWS, round_of(2, 0)) == second.begin(ROWS, round_of(2, 1)) == Position(epoch=2, rows=ROWS)
