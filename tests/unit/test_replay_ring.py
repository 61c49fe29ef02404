"""What a ring says of itself, without a server."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from td_datapipes.errors import ConfigurationError, SchemaError
from td_datapipes.replay.options import LinearSchedule, NStep, RateLimit, Slices, Trajectories
from td_datapipes.replay.ring import WRITE_NUMBER, Ring, RingOptions, last_named, new_ring, split_index
from td_datapipes.schema import schema_of

ROWS = schema_of(TensorDict({"x": torch.zeros(2, 3), "id": torch.zeros(2, dtype=torch.int64)}, [2]))


def ring_of(**options: object) -> Ring:
    return new_ring("name", ROWS, RingOptions(**options), 4096)


def test_the_write_number_comes_first_and_users_do_not_see_it() -> None:
    ring = ring_of(capacity=10)
    assert ring.manifest.schema.fields[WRITE_NUMBER].offset_bytes == 0
    assert set(ring.schema.fields) == {("x",), ("id",)}
    assert ring.schema.same_rows(ROWS)


def test_a_manifest_tells_all_that_a_ring_was_made_with() -> None:
    ring = ring_of(
        capacity=12,
        prioritized=False,
        trajectories=Trajectories(id="id", step="id"),
        rate_limit=RateLimit(samples_per_insert=2.0, min_size=3),
    )
    again = Ring(type(ring.manifest).from_json(ring.manifest.to_json()))
    assert again.options == ring.options
    assert again.schema.same_rows(ring.schema)


@given(
    numbers=st.lists(st.integers(1, 2**40), min_size=1, max_size=20),
    stripes=st.integers(1, 7),
    incarnation=st.integers(0, 2**14),
)
def test_an_index_names_incarnation_stripe_and_write_number(numbers: list[int], stripes: int, incarnation: int) -> None:
    ring = ring_of(capacity=stripes * 5, stripes=stripes)
    for stripe in range(stripes):
        index = ring.indices_of(stripe, np.array(numbers), incarnation)
        found = split_index(index, stripes)
        assert [part.tolist() for part in found] == [
            [incarnation] * len(numbers),
            [stripe] * len(numbers),
            numbers,
        ]


@pytest.mark.parametrize(("capacity", "levels"), [(1, 1), (16, 1), (17, 2), (256, 2), (257, 3), (1_000_000, 5)])
def test_levels_of_the_tree(capacity: int, levels: int) -> None:
    assert ring_of(capacity=capacity).levels == levels


def test_slots_of_all_stripes_are_distinct_rows_of_the_chunks() -> None:
    ring = new_ring("name", ROWS, RingOptions(capacity=30, stripes=3), 160)
    numbers = np.arange(1, 11)
    rows = np.concatenate([ring.rows_of(stripe, numbers) for stripe in range(3)])
    assert len(set(rows.tolist())) == 30
    assert rows.max() < ring.manifest.rows
    for stripe in range(3):
        keys = {
            ring.manifest.chunk_key(0, row // ring.layout.records_per_chunk) for row in ring.rows_of(stripe, numbers)
        }
        assert all(key.startswith(ring.prefix(stripe)) for key in keys)
        assert keys <= set(ring.keys(stripe))


def test_what_cannot_work_is_refused() -> None:
    for options, message in (
        ({"capacity": 10, "stripes": 3}, "take 9"),
        ({"capacity": 2, "stripes": 3}, "a row or more a stripe"),
        ({"capacity": 4, "stripes": 2, "rate_limit": RateLimit(samples_per_insert=1.0, min_size=1)}, "stripes=1"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            RingOptions(**options)
    with pytest.raises(SchemaError, match="'nothing'"):
        ring_of(capacity=10, trajectories=Trajectories(id="nothing", step="id"))
    with pytest.raises(SchemaError, match="one value a row"):
        ring_of(capacity=10, trajectories=Trajectories(id="x", step="id"))
    with pytest.raises(ConfigurationError, match="error_buffer must be at least 8"):
        RateLimit(samples_per_insert=8.0, min_size=1, error_buffer=2.0)
    with pytest.raises(ConfigurationError, match="2 steps or more"):
        Slices(length=1)
    with pytest.raises(ConfigurationError, match="gamma"):
        NStep(gamma=1.5)


def test_a_linear_schedule_stays_at_its_end() -> None:
    schedule = LinearSchedule(0.4, 1.0, 10)
    assert [schedule(n) for n in (0, 5, 10, 99)] == pytest.approx([0.4, 0.7, 1.0, 1.0])


@given(
    steps=st.lists(st.tuples(st.sampled_from(["write", "take over"]), st.integers(0, 9)), max_size=30),
    asked=st.integers(0, 20),
)
def test_an_index_names_a_row_for_as_long_as_nobody_took_over_without_it(
    steps: list[tuple[str, int]], asked: int
) -> None:
    rows: list[int] = []  # under which incarnation each was written
    incarnation, former = 0, b""
    for what, number in steps:
        if what == "write":
            rows += [incarnation] * number
        else:
            rows = rows[: max(0, len(rows) - number)]
            former += b"%d %d;" % (incarnation, len(rows))
            incarnation += 1
    found = last_named(asked, len(rows), incarnation, former)
    # Any incarnation from a row's own on named it, and the rows it named are the first ones.
    assert found == (None if asked > incarnation else sum(its <= asked for its in rows))


def long_ring(capacity: int, row_bytes: int, **options: object) -> Ring:
    rows = schema_of(TensorDict({"x": torch.zeros(2, row_bytes, dtype=torch.uint8)}, [2]))
    return new_ring("name", rows, RingOptions(capacity=capacity, **options), 4 << 20)


def test_chunks_of_long_rows_are_short_and_a_power_of_two() -> None:
    assert long_ring(10_000, 28_000).layout.records_per_chunk == 8
    assert long_ring(10_000, 8_000).layout.records_per_chunk == 32
    assert long_ring(10_000, 300_000).layout.records_per_chunk == 1
    assert long_ring(5, 28_000).layout.records_per_chunk == 5
    assert not long_ring(10_000, 1_000).stages
    assert long_ring(10_000, 1_000).layout.records_per_chunk > 1000


@given(
    capacity=st.integers(1, 100), slot=st.integers(0, 99), rows=st.integers(1, 200), row_bytes=st.integers(1, 40_000)
)
def test_rows_are_staged_only_where_they_are_whole_chunks(capacity: int, slot: int, rows: int, row_bytes: int) -> None:
    ring, slot = long_ring(capacity, row_bytes), slot % capacity
    staged, chunk = ring.staged_rows(slot, rows), ring.layout.records_per_chunk
    assert 0 <= staged <= min(rows, capacity - slot)
    assert staged % chunk == 0
    if staged:
        assert ring.layout.stride_bytes >= 4096
        assert slot % chunk == 0
        assert staged * ring.layout.stride_bytes <= 8 << 20
    elif ring.layout.stride_bytes >= 4096 and slot % chunk == 0:
        assert min(rows, capacity - slot) < chunk
