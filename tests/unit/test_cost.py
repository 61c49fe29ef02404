"""The cost model: its prior, its bounds, and that it learns a server's constants from reads."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest

from td_datapipes.cost import CostModel, ReadCost


def test_the_prior_breaks_even_at_about_two_kilobytes() -> None:
    cost = CostModel().cost
    assert cost == ReadCost()
    assert 1500 <= cost.max_gap_bytes <= 3000
    # Closing a gap of just that length costs what another range does.
    closed, skipped = cost.seconds(1, 2 * 1024 + cost.max_gap_bytes), cost.seconds(2, 2 * 1024)
    assert closed == pytest.approx(skipped, rel=1e-3)


@pytest.mark.parametrize(
    ("range_seconds", "byte_seconds", "gap"), [(1e-6, 1e-9, 1000), (1e-9, 1e-6, 256), (1e-3, 1e-10, 65536)]
)
def test_the_gap_is_their_ratio_within_its_bounds(range_seconds: float, byte_seconds: float, gap: int) -> None:
    assert ReadCost(range_seconds=range_seconds, byte_seconds=byte_seconds).max_gap_bytes == pytest.approx(gap, abs=1)


@pytest.mark.parametrize(
    ("trip", "per_range", "per_byte"),
    [(50e-6, 2e-6, 1e-9), (30e-6, 4e-6, 5e-10), (100e-6, 1e-6, 4e-9), (30e-6, 1e-5, 4e-10), (2e-3, 1.5e-6, 8e-9)],
)
def test_varied_reads_move_the_gap_from_the_prior_to_the_servers(
    trip: float, per_range: float, per_byte: float
) -> None:
    generator = np.random.default_rng(0)
    model = CostModel()
    while not model.settled:
        most = int(generator.choice([32, 2000]))
        ranges, length = int(generator.integers(1, most)), int(generator.integers(16, 30_000))
        seconds = trip + ranges * per_range + ranges * length * per_byte
        model.observe(ranges, ranges * length, seconds * float(generator.uniform(0.95, 1.05)))
    true_gap = per_range / per_byte
    prior, learnt = (abs(math.log(cost.max_gap_bytes / true_gap)) for cost in (ReadCost(), model.cost))
    assert learnt <= max(prior, 0.05)
    assert learnt <= math.log(4)


def test_reads_that_are_all_alike_leave_the_constants_within_their_bounds() -> None:
    model = CostModel()
    for _ in range(1000):
        model.observe(256, 256 * 1024, 1.5e-3)
    assert model.observations == 48  # no more is learnt from reads of this kind
    assert not model.settled
    assert model.cost.seconds(256, 256 * 1024) == pytest.approx(1.5e-3, rel=0.1)
    assert 256 <= model.cost.max_gap_bytes <= 65536


@pytest.mark.parametrize("seconds", [1e-12, 1e6])
def test_absurd_timings_do_not_lead_to_absurd_plans(seconds: float) -> None:
    model = CostModel()
    for ranges in range(1, 100):
        model.observe(ranges, ranges * 100, seconds)
    assert 256 <= model.cost.max_gap_bytes <= 65536
    assert model.cost.seconds(1, 1) > 0


def test_reads_of_nothing_teach_nothing() -> None:
    model = CostModel()
    model.observe(0, 0, 1.0)
    model.observe(5, 100, 0.0)
    model.observe(5, 100, -1.0)
    assert model.observations == 0
    assert model.cost == ReadCost()


def test_what_was_learnt_travels_to_workers() -> None:
    model = CostModel()
    for ranges in (1, 2, 10, 20, 30):
        model.observe(ranges, ranges * 512, 1e-4 + ranges * 3e-6)
    assert model.cost != ReadCost()
    data = pickle.dumps(model)
    copied = pickle.loads(data)
    assert copied.cost == model.cost
    assert copied.observations == 5
    assert len(data) < 2000
    copied.observe(25, 25 * 100, 5e-4)
    model.observe(25, 25 * 100, 5e-4)
    assert copied.cost == model.cost


def learnt_from_whole_reads() -> CostModel:
    model = CostModel()
    for _ in range(200):
        for ranges, nbytes in ((1, 2_500_000), (5, 12_800_000), (5, 1_280)):
            model.observe(ranges, nbytes, 50e-6 + ranges * 1e-6 + nbytes * 2e-10)
    return model


def test_reads_of_few_ranges_say_nothing_of_what_a_range_costs() -> None:
    model = learnt_from_whole_reads()
    assert model.cost.byte_seconds == pytest.approx(2e-10, rel=0.2)
    assert model.cost.max_gap_bytes <= ReadCost().max_gap_bytes + 1
    assert not model.settled
    for _ in range(20):
        model.observe(1280, 327_680, 1e-3)
    assert model.cost.range_seconds == pytest.approx(0.75e-6, rel=0.25)


def test_the_first_reads_of_a_kind_are_not_learnt_from() -> None:
    model = CostModel()
    for _ in range(4):
        model.observe(256, 256 * 100, 10e-3)
    assert model.cost == ReadCost()


def test_many_covering_ranges_teach_nothing() -> None:
    model = learnt_from_whole_reads()
    known = model.cost
    for _ in range(100):
        model.observe(600, 2_500_000, 3e-3, covering=True)
    assert model.cost == known
    model.observe(3, 2_500_000, 3e-3, covering=True)  # few are as good as any
    assert model.observations == 48  # of few ranges, as many as are learnt from
