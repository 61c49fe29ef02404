"""Plans for a layout whose fields lie each in one string: against plain Python, as `test_plan` does for records."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from chunks_in_memory import StoreInMemory
from hypothesis import given, settings
from hypothesis import strategies as st
from rows_in_memory import assert_same_tensor, random_rows
from test_plan import check_batch, check_economy, cost_with_gap, rows_of
from test_requests import asked_by, expected

from td_datapipes.assemble import make_sink
from td_datapipes.cost import CostModel, ReadCost
from td_datapipes.errors import ConfigurationError
from td_datapipes.manifest import ChunkLayout
from td_datapipes.memory import MemoryPool
from td_datapipes.plan import MAX_LUA_RANGES, RUN_BYTES, STRATEGIES, Strategy, plan_read
from td_datapipes.read_spec import Copy, Output, ReadSpec, Segment
from td_datapipes.slabs import ColumnSlab, PeriodicSlab
from td_datapipes.wire.requests import RequestBuilder

STORE = StoreInMemory(
    random_rows(
        300,
        {
            "a": (torch.uint8, (3,)),
            "b": (torch.float32, (64,)),
            ("n", "c"): (torch.float32, (64,)),
            ("n", "d"): (torch.bfloat16, ()),
            "none": (torch.int8, (0, 4)),
            "long": (torch.int16, (400,)),
        },
        seed=3,
    )
)
ROWS = st.one_of(
    st.lists(st.integers(0, 299), min_size=1, max_size=90),
    st.builds(lambda start, count: list(range(start, start + count)), st.integers(0, 200), st.integers(1, 100)),
)
FIELDS = st.sampled_from([None, ["a"], ["b", "n"], ["n"], ["a", "long"], ["none", "a"]])


@settings(max_examples=120, deadline=None)
@given(
    rows=ROWS,
    keys=FIELDS,
    strategy=st.sampled_from(STRATEGIES),
    slab_bytes=st.sampled_from([1, 6000, 1 << 20]),
    strided=st.booleans(),
    atomic=st.booleans(),
    gap=st.sampled_from([256, 2000]),
)
def test_a_batch_equals_the_reference(
    rows: list[int], keys: Any, strategy: Strategy, slab_bytes: int, strided: bool, atomic: bool, gap: int
) -> None:
    spec = STORE.spec(keys, gap)
    strategy = "lua" if atomic else strategy
    plan = plan_read(rows_of(rows), spec, cost_with_gap(gap), strategy=strategy, slab_bytes=slab_bytes, atomic=atomic)
    check_batch(STORE, plan, spec, rows, strided=strided)
    check_economy(STORE, plan, spec, rows, gap)
    if atomic:
        assert len(plan.slabs) == 1


@settings(max_examples=100, deadline=None)
@given(rows=ROWS, keys=FIELDS, strategy=st.sampled_from(STRATEGIES), slab_bytes=st.sampled_from([1, 6000, 1 << 20]))
def test_requests_ask_for_the_plans_ranges_in_order(
    rows: list[int], keys: Any, strategy: Strategy, slab_bytes: int
) -> None:
    builder = RequestBuilder(STORE.layout.chunk_key)
    for order in (1, -1):
        plan = plan_read(
            np.array(rows)[::order], STORE.spec(keys), ReadCost(), strategy=strategy, slab_bytes=slab_bytes
        )
        assert asked_by(builder, plan) == expected(STORE, plan)


def test_one_builder_writes_the_requests_of_any_choice_of_fields() -> None:
    builder = RequestBuilder(STORE.layout.chunk_key)
    for keys in (["a"], ["b", "n"], None, ["a"]):
        plan = plan_read(np.arange(0, 300, 2), STORE.spec(keys), ReadCost(), strategy="pipelined", slab_bytes=1 << 30)
        asked = asked_by(builder, plan)
        assert len(asked) >= 150
        assert asked == expected(STORE, plan)


def test_adjacent_rows_are_one_range_a_field() -> None:
    spec = STORE.spec()
    plan = plan_read(np.arange(20, 60), spec, ReadCost(), strategy="auto", slab_bytes=1 << 20)
    assert plan.strategy == "covering"
    lengths = sorted(length for slab in plan.slabs for _, _, _, length in STORE.requests(slab))
    assert lengths == [40 * 2, 40 * 3, 40 * 256, 40 * 256, 40 * 800]


@pytest.mark.parametrize(("slab_bytes", "num_slabs"), [(1 << 20, 1), (40 * 1317, 1), (40 * 1317 - 1, 5)])
def test_short_adjacent_rows_are_one_slab_and_received_where_they_belong(slab_bytes: int, num_slabs: int) -> None:
    spec, rows = STORE.spec(), np.arange(20, 60)
    assert spec.row_bytes == 1317
    plan = plan_read(rows, spec, ReadCost(), strategy="auto", slab_bytes=slab_bytes)
    assert len(plan.slabs) == num_slabs
    sink = make_sink(plan, spec, MemoryPool(), strided=False, pin_memory=False)
    for slab in plan.slabs:
        stream = np.frombuffer(STORE.reply(plan, slab), dtype=np.uint8)
        places = sink.places(slab) or []
        assert sum(len(place) for _, place in places) == slab.num_bytes
        for start, place in places:
            place[:] = stream[start : start + len(place)].data
        sink.placed(slab, np.zeros_like(stream))
    for key, tensor in sink.tensors.items():
        assert_same_tensor(tensor, STORE.td.get(key)[20:60], key)


def test_long_runs_are_cut() -> None:
    rows = 3 * RUN_BYTES // 1000 + 100
    spec = column_spec([1000], rows)
    plan = plan_read(np.arange(rows), spec, ReadCost(), strategy="auto", slab_bytes=1 << 20)
    lengths = [slab.num_bytes for slab in plan.slabs]
    assert sum(lengths) == rows * 1000
    assert max(lengths) <= RUN_BYTES
    assert len(lengths) == 4


def column_spec(sizes: list[int], rows: int) -> ReadSpec:
    """One field a group, of that many bytes a row, all rows in one chunk."""
    numbered = list(enumerate(sizes))
    return ReadSpec(
        segments=tuple(Segment(group=i, piece=0, start_bytes=0, stop_bytes=n) for i, n in numbered),
        copies=tuple(Copy(output=i, output_start=0, segment=i, segment_start=0, nbytes=n) for i, n in numbered),
        outputs=tuple(Output(key=(str(i),), dtype=torch.uint8, shape=(n,), nbytes=n) for i, n in numbered),
        layouts=tuple(
            ChunkLayout(stride_bytes=n, records_per_chunk=rows, pieces=1, piece_bytes=n) for _, n in numbered
        ),
        spare_bytes=0,
    )


def test_scattered_rows_are_asked_for_at_their_exact_length() -> None:
    plan = plan_read(
        np.array([5, 250, 5, 90]), STORE.spec(["b", "a"]), ReadCost(), strategy="pipelined", slab_bytes=9000
    )
    (slab,) = plan.slabs
    assert isinstance(slab, PeriodicSlab)
    assert slab.rows.tolist() == [5, 250, 90]
    assert [length for *_, length in STORE.requests(slab)] == [3, 256] * 3
    assert slab.stream_bytes == 3 * (len("$3\r\n") + 3 + 2 + len("$256\r\n") + 256 + 2)


def test_lua_gives_a_string_a_field() -> None:
    plan = plan_read(np.array([9, 2, 9]), STORE.spec(["b", "a"]), ReadCost(), strategy="lua", slab_bytes=1 << 20)
    (slab,) = plan.slabs
    assert isinstance(slab, ColumnSlab)
    assert slab.prefix == b"*2\r\n"
    assert slab.lengths.tolist() == [6, 512]
    reply = STORE.reply(plan, slab)
    assert reply.startswith(
        b"*2\r\n$6\r\n" + STORE.get_range(0, 0, 27, 3) + STORE.get_range(0, 0, 6, 3) + b"\r\n$512\r\n"
    )
    assert slab.stream_bytes == len(reply)


@pytest.mark.parametrize("fields", [2, 5, 9000])
def test_lua_calls_are_split_below_the_limit_on_ranges(fields: int) -> None:
    spec = column_spec([8] * fields, 20_000)
    rows = np.arange(0, 20_000, 20)
    plan = plan_read(rows, spec, ReadCost(), strategy="lua", slab_bytes=1 << 30)
    assert max(slab.num_ranges for slab in plan.slabs) <= max(MAX_LUA_RANGES, fields)
    assert sum(slab.num_ranges for slab in plan.slabs) == len(rows) * fields
    whole = plan_read(rows, spec, ReadCost(), strategy="lua", slab_bytes=1 << 20, atomic=True)
    assert len(whole.slabs) == 1


def test_fields_without_bytes_are_planned_without_a_range() -> None:
    plan = plan_read(np.arange(10), STORE.spec(["none"]), ReadCost(), strategy="auto", slab_bytes=1 << 20)
    assert (plan.slabs, plan.num_bytes) == ((), 0)


def test_rows_beyond_what_text_can_say_are_asked_for_all_the_same() -> None:
    rows = np.array([0, 10**6, 4 * 10**6 - 1, *range(100)])
    spec = column_spec([1000, 300], 4 * 10**6)
    builder = RequestBuilder(lambda group, chunk: b"%d:%d" % (group, chunk))
    plan = plan_read(rows, spec, ReadCost(), strategy="pipelined", slab_bytes=1 << 30)
    distinct = list(dict.fromkeys(rows.tolist()))
    assert asked_by(builder, plan) == [
        item for row in distinct for item in ((b"0:0", row * 1000, 1000), (b"1:0", row * 300, 300))
    ]


def test_a_script_that_cannot_reach_a_range_is_not_asked() -> None:
    spec = column_spec([1 << 20], 1 << 13)
    builder = RequestBuilder(lambda group, chunk: b"%d:%d" % (group, chunk))
    for last, reachable in (((1 << 12) - 1, True), (1 << 12, False)):
        plan = plan_read(np.array([3, last]), spec, ReadCost(), strategy="lua", slab_bytes=1 << 30)
        if reachable:
            assert asked_by(builder, plan)[-1] == (b"0:0", last << 20, 1 << 20)
        else:
            with pytest.raises(ConfigurationError, match="reach the first 4 GiB of a server string"):
                asked_by(builder, plan)


def test_long_ranges_that_have_to_be_read_in_one_step_are_a_transaction() -> None:
    spec, rows = column_spec([4096, 1024], 1000), np.array([900, 20, 500])
    plan = plan_read(rows, spec, ReadCost(), strategy="lua", slab_bytes=64, atomic=True)
    (slab,) = plan.slabs
    assert slab.num_ranges == 6
    assert slab.prefix == b"+OK\r\n" + 6 * b"+QUEUED\r\n" + b"*6\r\n"
    framed = 3 * (len("$4096\r\n") + 4096 + 2 + len("$1024\r\n") + 1024 + 2)
    assert slab.stream_bytes == len(slab.prefix) + framed
    request = b"".join(RequestBuilder(lambda group, chunk: b"k%d" % (group + chunk)).for_plan(plan)(slab))
    assert request.startswith(b"*1\r\n$5\r\nMULTI\r\n*4\r\n$8\r\nGETRANGE\r\n$2\r\nk0\r\n")
    assert request.endswith(b"*1\r\n$4\r\nEXEC\r\n")
    assert request.count(b"GETRANGE") == 6
    short = plan_read(rows, column_spec([40, 10], 1000), ReadCost(), strategy="lua", slab_bytes=64, atomic=True)
    assert [slab.prefix for slab in short.slabs] == [b"*2\r\n"]


def scattered(num_rows: int, wanted: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).choice(num_rows, wanted, replace=False).astype(np.int64)


def test_what_was_learnt_from_whole_reads_does_not_cover_scattered_rows() -> None:
    model = CostModel()
    for _ in range(100):
        model.observe(1, 2_560_000, 0.8e-3)
        model.observe(5, 12_800_000, 4e-3)
    plan = plan_read(
        scattered(10_000, 256), column_spec([256] * 5, 10_000), model.cost, strategy="auto", slab_bytes=1 << 20
    )
    assert (plan.strategy, plan.num_ranges) == ("pipelined", 5 * 256)


def test_short_columns_come_as_one_range_beside_long_ones() -> None:
    spec, rows = column_spec([68, 4, 900, 8], 50_000), scattered(50_000, 256)
    plan = plan_read(rows, spec, cost_with_gap(5000), strategy="auto", slab_bytes=1 << 20)
    *singly, together = plan.slabs
    assert all(isinstance(slab, PeriodicSlab) for slab in singly)
    assert plan.num_ranges == 2 * 256 + 2
    assert (together.held, together.num_ranges) == ((1, 3), 2)
    span = int(rows.max() - rows.min())
    assert together.num_bytes == span * 4 + 4 + span * 8 + 8
    forced = plan_read(rows, spec, cost_with_gap(5000), strategy="pipelined", slab_bytes=1 << 20)
    assert forced.num_ranges == 4 * 256


def test_a_column_is_not_read_whole_for_few_rows_or_many_bytes() -> None:
    for sizes, wanted in (([4, 900], 20), ([64, 900], 256)):
        spec = column_spec(sizes, 50_000)
        plan = plan_read(scattered(50_000, wanted), spec, ReadCost(), strategy="auto", slab_bytes=1 << 20)
        assert plan.num_ranges == 2 * wanted


@settings(max_examples=80, deadline=None)
@given(
    rows=st.lists(st.integers(0, 299), min_size=40, max_size=90),
    keys=st.sampled_from([None, ["a"], ["a", "long"], ["n"], ["none", "a"]]),
    slab_bytes=st.sampled_from([700, 6000, 1 << 20]),
    strided=st.booleans(),
    step=st.sampled_from([1, 7]),
)
def test_spans_give_the_references_rows(rows: list[int], keys: Any, slab_bytes: int, strided: bool, step: int) -> None:
    rows = [row // step * step for row in rows]
    spec = STORE.spec(keys)
    for gap in (256, 700, 3000):
        plan = plan_read(rows_of(rows), spec, cost_with_gap(gap), strategy="auto", slab_bytes=slab_bytes)
        check_batch(STORE, plan, spec, rows, strided=strided)
        distinct = len(set(rows))
        extra = plan.num_bytes - distinct * spec.row_bytes
        assert extra <= gap * (distinct * len(spec.segments) - plan.num_ranges)
