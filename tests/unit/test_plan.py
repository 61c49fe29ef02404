"""Plans against plain Python: the ranges are carried out on chunks held in memory, and the batch is compared."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise, product
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from chunks_in_memory import ChunksInMemory
from hypothesis import given, settings
from hypothesis import strategies as st
from rows_in_memory import assert_same_tensor, random_rows
from tensordict import TensorDict

from td_datapipes.cost import ReadCost
from td_datapipes.layouts import FieldPart, build_read_spec
from td_datapipes.manifest import SPARE_BYTES, ChunkLayout
from td_datapipes.plan import RUN_BYTES, STRATEGIES, ReadPlan, Strategy, plan_read
from td_datapipes.read_spec import Copy, Output, ReadSpec, Segment, frame_headers, wire_length
from td_datapipes.schema import Key

FIELDS: dict[str | tuple[str, ...], tuple[torch.dtype, tuple[int, ...]]] = {
    "pixels": (torch.uint8, (3, 7)),
    "reward": (torch.float64, ()),
    "done": (torch.bool, ()),
    ("next", "state"): (torch.bfloat16, (5,)),
    "nothing": (torch.float32, (0, 2)),
    "pad": (torch.uint8, (700,)),
    "last": (torch.complex64, (2,)),
}
FORCED: tuple[Strategy, ...] = ("covering", "pipelined", "lua")
SLABS = (1, 200, 5000, 1 << 30)


def cost_with_gap(max_gap_bytes: int) -> ReadCost:
    """A cost whose break-even gap is as given (from 256 on)."""
    return ReadCost(range_seconds=max_gap_bytes * 1e-9, byte_seconds=1e-9)


def rows_of(numbers: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(numbers, dtype=np.int64)


def check_batch(
    chunks: ChunksInMemory, plan: ReadPlan, spec: ReadSpec, rows: Sequence[int], *, strided: bool = False
) -> None:
    """The batch is the reference's rows, bit by bit."""
    for scatters in (False, True):
        got = chunks.read(plan, spec, strided=strided, scatters=scatters)
        assert set(got) == {output.key for output in spec.outputs}
        for key, value in got.items():
            assert_same_tensor(value, chunks.td.get(key)[torch.tensor(rows, dtype=torch.int64)], key)


def wanted_bytes(spec: ReadSpec, rows: Sequence[int]) -> Counter[tuple[int, int, int]]:
    """Group, chunk and position of every byte of the segments of the distinct rows."""
    wanted: Counter[tuple[int, int, int]] = Counter()
    for row, segment in product(set(rows), spec.segments):
        layout = spec.layouts[segment.group]
        chunk = row // layout.records_per_chunk * layout.pieces + segment.piece
        base = row % layout.records_per_chunk * layout.stride_bytes
        wanted.update((segment.group, chunk, base + at) for at in range(segment.start_bytes, segment.stop_bytes))
    return wanted


def fetched_bytes(chunks: ChunksInMemory, plan: ReadPlan) -> Counter[tuple[int, int, int]]:
    return Counter(
        (group, chunk, at)
        for slab in plan.slabs
        for group, chunk, start, length in chunks.requests(slab)
        for at in range(start, start + length)
    )


def check_economy(chunks: ChunksInMemory, plan: ReadPlan, spec: ReadSpec, rows: Sequence[int], max_gap: int) -> None:
    """Every wanted byte is asked for; once where ranges are merged; and no more beside it than was promised."""
    wanted, fetched = wanted_bytes(spec, rows), fetched_bytes(chunks, plan)
    assert not wanted - fetched, "wanted bytes are not asked for"
    num_wanted_ranges = len(set(rows)) * len(spec.segments)
    extra = sum(fetched.values()) - len(wanted)
    if plan.strategy == "pipelined":
        assert plan.num_ranges == num_wanted_ranges
        assert extra <= 30 * num_wanted_ranges
        requests = [request for slab in plan.slabs for request in chunks.requests(slab)]
        assert len(set(requests)) == len(requests)
    else:
        assert max(fetched.values()) == 1, "a byte is asked for twice"
        assert extra <= max_gap * (num_wanted_ranges - plan.num_ranges)
        check_gaps(chunks, plan, wanted, max_gap)


def check_gaps(
    chunks: ChunksInMemory, plan: ReadPlan, wanted: Counter[tuple[int, int, int]], max_gap_bytes: int
) -> None:
    """No run of unwanted bytes within a range is longer than `max_gap_bytes`, and none is at its ends."""
    for slab in plan.slabs:
        for group, chunk, start, length in chunks.requests(slab):
            needed = [at for at in range(start, start + length) if (group, chunk, at) in wanted]
            assert (needed[0], needed[-1]) == (start, start + length - 1)
            assert max((b - a - 1 for a, b in pairwise(needed)), default=0) <= max_gap_bytes


@pytest.fixture(scope="module")
def table() -> ChunksInMemory:
    return ChunksInMemory(random_rows(60, FIELDS, seed=1), chunk_bytes=800 * 16)


@pytest.mark.parametrize("slab_bytes", SLABS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "rows",
    [
        [],
        [0],
        [59],
        [7, 2, 2, 9, 0],
        [5, 5, 5],
        list(range(60)),
        list(range(59, -1, -1)),
        [*range(10, 20), *range(40, 50)],
        [0, 59, 0, 59, 30, 31],
        [3, 0, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9],
    ],
    ids=lambda rows: "-".join(map(str, rows[:6])) or "none",
)
def test_a_batch_equals_the_reference_whatever_the_strategy_and_the_slab_size(
    table: ChunksInMemory, rows: list[int], strategy: Strategy, slab_bytes: int
) -> None:
    spec = table.spec()
    for strided in (False, True):
        plan = plan_read(rows_of(rows), spec, ReadCost(), strategy=strategy, slab_bytes=slab_bytes)
        check_batch(table, plan, spec, rows, strided=strided)
    if rows:
        check_economy(table, plan, spec, rows, ReadCost().max_gap_bytes)


@pytest.mark.parametrize("gap_rows", [0, 3])
@pytest.mark.parametrize("strategy", FORCED)
def test_gaps_of_rows_are_merged_or_skipped_and_each_byte_is_fetched_once(strategy: Strategy, gap_rows: int) -> None:
    chunks = ChunksInMemory(random_rows(40, {"x": (torch.float32, (24,))}))
    rows = [10, *range(11 + gap_rows, 15 + gap_rows), 11 + gap_rows]
    plan = plan_read(rows_of(rows), spec := chunks.spec(), cost_with_gap(300), strategy=strategy, slab_bytes=1 << 20)
    check_batch(chunks, plan, spec, rows)
    check_economy(chunks, plan, spec, rows, 300)
    # Three records of 96 bytes are 288 bytes: a gap of at most 300.
    assert plan.num_ranges == (5 if strategy == "pipelined" else 1)


def test_a_gap_one_byte_too_wide_is_skipped() -> None:
    chunks = ChunksInMemory(random_rows(9, {"x": (torch.uint8, (100,))}))  # a stride of 112, gaps of 112 k + 12
    for max_gap_bytes, num_ranges in ((348, 1), (347, 2)):
        plan = plan_read(
            rows_of([0, 4]), chunks.spec(), cost_with_gap(max_gap_bytes), strategy="covering", slab_bytes=1 << 20
        )
        assert plan.num_ranges == num_ranges


@pytest.mark.parametrize("strategy", FORCED)
@pytest.mark.parametrize("chunk_bytes", [16, 64, 752])
def test_records_longer_than_a_chunk_are_read_from_their_pieces(strategy: Strategy, chunk_bytes: int) -> None:
    chunks = ChunksInMemory(random_rows(7, FIELDS, seed=3), chunk_bytes=chunk_bytes)
    assert all(layout.pieces > 1 for layout in chunks.manifest.layouts)
    rows = [6, 0, 3, 3, 1]
    for keys in (None, [("pad",)], [("reward",), ("last",)]):
        spec = chunks.spec(keys)
        for slab_bytes, strided in product(SLABS, (False, True)):
            plan = plan_read(rows_of(rows), spec, ReadCost(), strategy=strategy, slab_bytes=slab_bytes)
            check_batch(chunks, plan, spec, rows, strided=strided)
        check_economy(chunks, plan, spec, rows, ReadCost().max_gap_bytes)


@st.composite
def tables(draw: st.DrawFn) -> ChunksInMemory:
    """Random fields in one or more groups, cut into chunks or pieces of random length."""
    dtypes = st.sampled_from([torch.uint8, torch.int16, torch.float32, torch.float64, torch.complex128, torch.bool])
    shapes = st.sampled_from([(), (1,), (3,), (2, 5), (0,), (40,), (300,), (17, 9), (4200,)])
    kinds = draw(st.lists(st.tuples(dtypes, shapes), min_size=1, max_size=6))
    td = random_rows(draw(st.integers(1, 25)), {f"f{i}": kind for i, kind in enumerate(kinds)}, seed=7)
    keys: list[Key] = [(f"f{i}",) for i in range(len(kinds))]
    cut = draw(st.integers(0, len(keys) - 1))
    groups = [keys[cut:], keys[:cut]] if cut else [keys]
    return ChunksInMemory(
        td,
        groups=groups,
        chunk_bytes=16 * draw(st.integers(1, 300)),
        records_per_chunk=draw(st.sampled_from([1, 3, 1 << 14])),
    )


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_random_tables_rows_and_plans_equal_the_reference(data: st.DataObject) -> None:
    chunks = data.draw(tables())
    rows = data.draw(st.lists(st.integers(0, chunks.rows - 1), max_size=40))
    if data.draw(st.booleans()):  # as many adjacent ones
        rows = list(range(chunks.rows))[: len(rows)]
    keys = data.draw(st.one_of(st.none(), st.sets(st.sampled_from(list(chunks.manifest.schema.fields)), min_size=1)))
    strategy = data.draw(st.sampled_from(STRATEGIES))
    slab_bytes = data.draw(st.sampled_from(SLABS))
    max_gap = data.draw(st.sampled_from([256, 700, 4000]))
    spec = chunks.spec(keys, max_gap)
    atomic = data.draw(st.booleans()) and strategy == "lua"
    plan = plan_read(
        rows_of(rows), spec, cost_with_gap(max_gap), strategy=strategy, slab_bytes=slab_bytes, atomic=atomic
    )
    check_batch(chunks, plan, spec, rows, strided=data.draw(st.booleans()))
    if rows and spec.segments:
        check_economy(chunks, plan, spec, rows, max_gap)
        assert len(plan.slabs) == 1 or not atomic


@settings(max_examples=60, deadline=None)
@given(cuts=st.lists(st.integers(0, 120), min_size=2, max_size=8, unique=True), chunk_bytes=st.sampled_from([48, 4096]))
def test_parts_of_a_field_arrive_side_by_side(cuts: list[int], chunk_bytes: int) -> None:
    chunks = ChunksInMemory(
        random_rows(5, {"a": (torch.int16, (3,)), "x": (torch.uint8, (120,))}), chunk_bytes=chunk_bytes
    )
    bounds = sorted(cuts)[: len(cuts) // 2 * 2]
    ranges = tuple(zip(bounds[::2], bounds[1::2], strict=True))
    length = sum(stop - start for start, stop in ranges)
    part = FieldPart(field=chunks.manifest.schema.fields["x",], shape=(length,), byte_ranges=ranges)
    spec = build_read_spec(chunks.layout, [part], 256)
    rows = [4, 1, 1, 0]
    whole = chunks.td["x"][rows]
    expected = torch.cat([whole[:, start:stop] for start, stop in ranges], 1)
    for strategy, strided in product(FORCED, (False, True)):
        plan = plan_read(rows_of(rows), spec, ReadCost(), strategy=strategy, slab_bytes=1 << 20)
        assert torch.equal(chunks.read(plan, spec, strided=strided)["x",], expected)


def test_a_field_alone_is_read_without_its_neighbours() -> None:
    td = TensorDict(
        {"a": torch.zeros(8, 1000), "b": torch.ones(8, 3, dtype=torch.int16), "c": torch.zeros(8, 2000)}, batch_size=[8]
    )
    chunks = ChunksInMemory(td)
    spec = chunks.spec(["b"])
    assert [(s.start_bytes, s.stop_bytes) for s in spec.segments] == [(4000, 4006)]  # 4000 is a multiple of 16
    assert spec.row_bytes == 6
    # "c" starts at 4008: the segment starts at the multiple of 16 before it.
    assert [(s.start_bytes, s.stop_bytes) for s in chunks.spec(["c"]).segments] == [(4000, 12008)]
    # Fields further apart than a gap that pays are segments of their own.
    assert [(s.start_bytes, s.stop_bytes) for s in chunks.spec(["a", "c"]).segments] == [(0, 12008)]
    far = ChunksInMemory(td.select("a", "c", "b"))
    assert len(far.spec(["a", "b"], max_gap_bytes=7999).segments) == 2
    assert len(far.spec(["a", "b"], max_gap_bytes=8000).segments) == 1


def test_the_header_of_a_framed_reply_is_counted_exactly() -> None:
    lengths = [0, 1, 9, 10, 99, 100, 999, 1000, 12345, 999999, 1000000, (1 << 29)]
    assert frame_headers(rows_of(lengths)).tolist() == [len(b"$%d\r\n" % length) for length in lengths]
    assert frame_headers(rows_of([])).tolist() == []


@given(st.one_of(st.integers(1, 20000), st.sampled_from([10**k + d for k in range(1, 9) for d in range(-30, 31)])))
def test_a_wire_length_frames_to_a_multiple_of_sixteen_and_is_the_shortest(nbytes: int) -> None:
    nbytes = max(nbytes, 1)
    length = wire_length(nbytes, 30)
    framed = [len(b"$%d\r\n" % candidate) + candidate + 2 for candidate in range(nbytes, length + 1)]
    assert framed[-1] % 16 == 0
    assert all(total % 16 for total in framed[:-1])
    assert nbytes <= length <= nbytes + 30 <= nbytes + SPARE_BYTES


def test_without_room_to_spare_a_wire_length_is_what_was_asked_for() -> None:
    assert wire_length(100, 0) == 100
    assert wire_length(105, 0) == 105
    assert wire_length(104, 0) == 104  # "$104\r\n" + 104 + 2 = 112
    assert [wire_length(n, 30) for n in (104, 105, 985, 9)] == [104, 120, 1015, 25]


def rows_of_bytes(nbytes: int) -> ReadSpec:
    """What is read of rows of one field of so many bytes, in chunks of 4 MiB."""
    layout = ChunkLayout.for_stride(nbytes, 4 << 20, 1 << 14)
    return ReadSpec(
        segments=(Segment(group=0, piece=0, start_bytes=0, stop_bytes=nbytes),),
        copies=(Copy(output=0, output_start=0, segment=0, segment_start=0, nbytes=nbytes),),
        outputs=(Output(key=("x",), dtype=torch.uint8, shape=(nbytes,), nbytes=nbytes),),
        layouts=(layout,),
        spare_bytes=SPARE_BYTES,
    )


@pytest.fixture(scope="module")
def kilobytes() -> ReadSpec:
    """What is read of rows of 1 KiB."""
    return rows_of_bytes(1024)


def test_two_distant_rows_of_100k_cost_two_short_ranges(kilobytes: ReadSpec) -> None:
    for strategy in STRATEGIES:
        plan = plan_read(rows_of([0, 99_999]), kilobytes, ReadCost(), strategy=strategy, slab_bytes=1 << 20)
        assert plan.num_ranges == 2
        assert 2048 <= plan.num_bytes <= 2 * (1024 + 30)


def test_4096_random_rows_of_100k_cost_at_most_a_closed_gap_a_range(kilobytes: ReadSpec) -> None:
    rows = np.random.default_rng(0).integers(0, 100_000, 4096)
    distinct = len(set(rows.tolist()))
    for strategy in STRATEGIES:
        plan = plan_read(rows, kilobytes, ReadCost(), strategy=strategy, slab_bytes=1 << 20)
        assert plan.num_ranges <= distinct
        bound = 30 * distinct + ReadCost().max_gap_bytes * (distinct - plan.num_ranges)
        assert 1024 * distinct <= plan.num_bytes <= 1024 * distinct + bound


def test_all_of_100k_rows_cost_no_byte_more_than_they_have(kilobytes: ReadSpec) -> None:
    for rows in (np.arange(100_000), np.arange(100_000)[::-1], np.random.default_rng(0).permutation(100_000)):
        plan = plan_read(rows, kilobytes, ReadCost(), strategy="auto", slab_bytes=1 << 20)
        assert plan.strategy == "covering"
        assert plan.num_bytes == 100_000 * 1024
        # 98 slabs of a mebibyte and the borders of 25 chunks.
        assert plan.num_ranges <= 98 + 25
        # Adjacent rows are handed over while they arrive, so they may be asked for by the chunk.
        longest = RUN_BYTES if rows[0] == 0 else 1 << 20
        assert max(slab.num_bytes for slab in plan.slabs) <= longest + 1024


def test_a_slab_is_about_as_long_as_asked_whatever_the_gaps(kilobytes: ReadSpec) -> None:
    for strategy, step in product(FORCED, (1, 2, 3, 50)):
        rows = np.arange(0, 50_000, step)
        plan = plan_read(rows, kilobytes, ReadCost(), strategy=strategy, slab_bytes=64 << 10)
        adjacent = strategy == "covering" and step == 1
        assert max(slab.stream_bytes for slab in plan.slabs) <= (RUN_BYTES + 1024 if adjacent else 2 * (64 << 10))


def calls_while_planning(spec: ReadSpec, num_rows: int, strategy: Strategy) -> int:
    rows = np.random.default_rng(0).permutation(num_rows)
    calls = 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        plan_read(rows, spec, ReadCost(), strategy=strategy, slab_bytes=1 << 20)
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_planning_calls_nothing_once_a_row(kilobytes: ReadSpec, strategy: Strategy) -> None:
    # Ten times the rows are ten times the slabs, and a slab takes a bounded number of calls.
    few, many = (calls_while_planning(kilobytes, rows, strategy) for rows in (10_000, 100_000))
    assert many <= 11 * few
    assert many < 100_000 / 4


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_range_leaves_its_chunk_by_more_than_the_spare_bytes(table: ChunksInMemory, strategy: Strategy) -> None:
    for keys in (None, ["last"], ["done", "pad"]):
        plan = plan_read(np.arange(60), table.spec(keys), ReadCost(), strategy=strategy, slab_bytes=4096)
        for slab in plan.slabs:
            for group, chunk, start, length in table.requests(slab):
                assert start + length <= len(table.values[group, chunk])


def test_lua_calls_are_split_below_the_limit_on_ranges_unless_one_snapshot_is_asked_for() -> None:
    layout = ChunkLayout.for_stride(4096, 64 << 10, 1 << 14)
    spec = ReadSpec(
        segments=(Segment(group=0, piece=0, start_bytes=0, stop_bytes=16),),
        copies=(Copy(output=0, output_start=0, segment=0, segment_start=0, nbytes=16),),
        outputs=(Output(key=("x",), dtype=torch.uint8, shape=(16,), nbytes=16),),
        layouts=(layout,),
        spare_bytes=SPARE_BYTES,
    )
    rows = np.random.default_rng(0).permutation(20_000)
    split = plan_read(rows, spec, ReadCost(), strategy="lua", slab_bytes=1 << 30)
    assert split.num_ranges == 20_000
    assert max(slab.num_ranges for slab in split.slabs) < 8000
    whole = plan_read(rows, spec, ReadCost(), strategy="lua", slab_bytes=1 << 20, atomic=True)
    assert [slab.num_ranges for slab in whole.slabs] == [20_000]


def test_auto_covers_neighbours_and_asks_for_scattered_rows_one_by_one(kilobytes: ReadSpec) -> None:
    choose = {
        "covering": [np.arange(256), np.arange(0, 512, 2), rows_of([7])],
        "pipelined": [np.arange(0, 25_600, 100), np.random.default_rng(0).integers(0, 100_000, 256)],
    }
    for strategy, cases in choose.items():
        for rows in cases:
            assert plan_read(rows, kilobytes, ReadCost(), strategy="auto", slab_bytes=1 << 20).strategy == strategy


def test_auto_covers_neighbours_only_where_a_range_costs_much_beside_its_bytes() -> None:
    rows = np.random.default_rng(0).permutation(200)[:100]  # about half of them have their next one among them
    strategies = [
        plan_read(rows, rows_of_bytes(length), ReadCost(), strategy="auto", slab_bytes=1 << 20).strategy
        for length in (256, 4096, 32_768)
    ]
    assert strategies == ["covering", "covering", "pipelined"]


def test_fields_without_bytes_are_planned_without_a_range() -> None:
    td = random_rows(4, {"a": (torch.float32, (10, 0)), "b": (torch.int64, (0, 3)), ("c", "d"): (torch.bool, (2, 0))})
    chunks = ChunksInMemory(td)
    spec = chunks.spec()
    assert spec.segments == ()
    assert spec.row_bytes == 0
    for strategy, strided in product(STRATEGIES, (False, True)):
        plan = plan_read(rows_of([3, 3, 0]), spec, ReadCost(), strategy=strategy, slab_bytes=1 << 20)
        assert (plan.num_ranges, plan.num_bytes, plan.num_rows) == (0, 0, 3)
        check_batch(chunks, plan, spec, [3, 3, 0], strided=strided)
