"""Which ranges of heaps are asked for, and where each byte of them goes: against the heap in memory."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from td_datapipes.heap_plan import HeapSlab, WantedValues, plan_values
from td_datapipes.plan import ReadPlan

HEAP = np.random.default_rng(0).integers(0, 256, 700, dtype=np.uint8)


def wanted(spans: list[tuple[int, int]], chunk_bytes: int) -> WantedValues:
    """Values ``(start, nbytes)``, to be put one behind the other."""
    starts = np.array([start for start, _ in spans], dtype=np.int64)
    nbytes = np.array([length for _, length in spans], dtype=np.int64)
    targets = np.cumsum(nbytes) - nbytes
    rows = np.arange(len(spans))[::-1].copy()
    return WantedValues(
        group=3, output=0, chunk_bytes=chunk_bytes, rows=rows, starts=starts, nbytes=nbytes, targets=targets
    )


def stream_of(slab: HeapSlab, chunk_bytes: int) -> bytes:
    """What a server that has the heap would answer."""
    ranges, replies = slab.ranges(), []
    for chunk, start, length in zip(ranges.chunks, ranges.starts, ranges.lengths, strict=True):
        held = HEAP[chunk * chunk_bytes : (chunk + 1) * chunk_bytes]
        data = held[start : start + length].tobytes()
        assert len(data) == length > 0
        replies.append(b"$%d\r\n%b\r\n" % (length, data))
    return b"".join(replies)


def received(plan: ReadPlan, nbytes: int, chunk_bytes: int) -> bytes:
    """The memory of the field, once all slabs came."""
    memory, filled = bytearray(nbytes), bytearray(nbytes)
    for slab in plan.slabs:
        assert isinstance(slab, HeapSlab)
        stream = stream_of(slab, chunk_bytes)
        assert len(stream) == slab.stream_bytes
        for origin, target, length in zip(slab.origins, slab.targets, slab.lengths, strict=True):
            memory[target : target + length] = stream[origin : origin + length]
            filled[target : target + length] = bytes([1]) * length
    assert all(filled)
    return bytes(memory)


SPANS = st.lists(st.tuples(st.integers(0, 600), st.integers(0, 100)), max_size=30)


@given(SPANS, st.sampled_from([16, 48, 112, 4096]), st.sampled_from([0, 5, 64]), st.sampled_from([8, 50, 1 << 20]))
def test_every_value_arrives_whole_wherever_chunks_and_slabs_are_cut(
    spans: list[tuple[int, int]], chunk_bytes: int, gap: int, slab_bytes: int
) -> None:
    values = wanted(spans, chunk_bytes)
    for num_shards in (1, 3):
        plan = plan_values(
            [values], num_rows=len(spans), max_gap_bytes=gap, slab_bytes=slab_bytes, num_shards=num_shards
        )
        expected = b"".join(HEAP[start : start + length].tobytes() for start, length in spans)
        assert received(plan, len(expected), chunk_bytes) == expected
        asked = []
        for slab in plan.slabs:
            ranges = slab.ranges()
            assert len(set((ranges.chunks % num_shards).tolist())) == 1
            assert ((ranges.starts + ranges.lengths) <= chunk_bytes).all()
            begins = ranges.chunks * chunk_bytes + ranges.starts
            asked += [byte for b, n in zip(begins, ranges.lengths, strict=True) for byte in range(b, b + n)]
        assert len(set(asked)) == len(asked), "a byte was asked for twice"
        needed = {byte for start, length in spans for byte in range(start, start + length)}
        assert needed <= set(asked)
        if gap == 0:
            assert needed == set(asked)


def test_adjacent_rows_in_order_are_one_range_and_one_move() -> None:
    spans = [(10 * row, 10) for row in range(50)]
    (slab,) = plan_values([wanted(spans, 4096)], num_rows=50, max_gap_bytes=0, slab_bytes=1 << 20, num_shards=1).slabs
    assert isinstance(slab, HeapSlab)
    assert (slab.num_ranges, slab.num_bytes, slab.lengths.tolist()) == (1, 500, [500])


def test_scattered_rows_are_a_range_each_and_a_gap_is_closed_where_that_is_cheaper() -> None:
    spans = [(100, 10), (300, 10), (115, 10)]
    ranges = {
        gap: plan_values([wanted(spans, 4096)], num_rows=3, max_gap_bytes=gap, slab_bytes=1 << 20, num_shards=1)
        for gap in (0, 5, 200)
    }
    assert {gap: (plan.num_ranges, plan.num_bytes) for gap, plan in ranges.items()} == {
        0: (3, 30),
        5: (2, 35),
        200: (1, 210),
    }


def test_a_range_tells_whose_values_it_has() -> None:
    spans = [(0, 10), (40, 10), (5, 0), (8, 4)]
    (slab,) = plan_values([wanted(spans, 4096)], num_rows=4, max_gap_bytes=3, slab_bytes=1 << 20, num_shards=1).slabs
    assert isinstance(slab, HeapSlab)
    assert [slab.rows_of(index).tolist() for index in range(slab.num_ranges)] == [[0, 3], [2]]


def test_values_without_bytes_ask_for_nothing() -> None:
    plan = plan_values([wanted([(5, 0)] * 3, 64)], num_rows=3, max_gap_bytes=0, slab_bytes=64, num_shards=1)
    assert plan.slabs == ()
