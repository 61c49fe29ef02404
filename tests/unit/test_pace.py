"""Whether the thread or the consumer reads ahead: told by how long the consumer was away lately."""

from __future__ import annotations

import pytest

from td_datapipes.pace import AWAY_SECONDS, NAP_SECONDS, Pace


def visit(pace: Pace, now: float, *, away: float, times: int) -> float:
    """Leave and come back so many times; the time afterwards."""
    for _ in range(times):
        pace.left(now)
        now += away
        pace.came(now)
    pace.left(now)
    return now


def test_a_consumer_that_nobody_knows_leaves_the_work_to_the_thread() -> None:
    pace = Pace()
    assert pace.is_slow
    pace.left(5.0)
    assert pace.nap_seconds(5.0) == 0


def test_one_that_comes_back_at_once_does_the_work_itself() -> None:
    pace = Pace()
    now = visit(pace, 1.0, away=AWAY_SECONDS / 20, times=10)
    assert not pace.is_slow
    assert pace.nap_seconds(now) == pytest.approx(NAP_SECONDS)


def test_one_that_stays_away_unexpectedly_is_waited_for_once() -> None:
    pace = Pace()
    now = visit(pace, 1.0, away=AWAY_SECONDS / 20, times=10)
    assert 0 < pace.nap_seconds(now + NAP_SECONDS / 2) < NAP_SECONDS
    assert pace.nap_seconds(now + 2 * NAP_SECONDS) == 0


def test_a_single_long_absence_is_no_habit_for_long() -> None:
    pace = Pace()
    now = visit(pace, 1.0, away=1e-5, times=10)
    now = visit(pace, now, away=3600.0, times=1)
    assert pace.is_slow
    visit(pace, now, away=1e-5, times=10)
    assert not pace.is_slow


def test_long_absences_are_a_habit() -> None:
    pace = Pace()
    now = visit(pace, 1.0, away=1e-5, times=10)
    visit(pace, now, away=2 * AWAY_SECONDS, times=10)
    assert pace.is_slow
