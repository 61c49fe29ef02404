"""Batches read together: every row in the right batch, wherever the stream is cut, in memory of the batch's own."""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np
import pytest
import torch
from chunks_in_memory import ChunksInMemory
from hypothesis import given, settings
from hypothesis import strategies as st
from rows_in_memory import assert_same_tensor, random_rows
from scripted_stream import ScriptedStream

from td_datapipes.cost import ReadCost
from td_datapipes.joint_batch import JointBatch
from td_datapipes.memory import MemoryPool
from td_datapipes.plan import Strategy, plan_read
from td_datapipes.wire.reader import PlanReader, ReadStats
from td_datapipes.wire.requests import RequestBuilder

ROWS = 70
TD = random_rows(ROWS, {"a": (torch.uint8, (4999,)), "b": (torch.float32, (3,)), "c": (torch.uint8, (6001,))}, seed=5)
MIXED = ChunksInMemory(TD, chunk_bytes=11_040 * 32)
PLAIN = ChunksInMemory(TD.select("c").apply(lambda field: field[:, :6000]), chunk_bytes=6_000 * 60)
"""Its rows lie in a chunk as in the batch: a run of them is one stretch."""
PIECES = ChunksInMemory(random_rows(9, {"a": (torch.uint8, (30_000,)), "b": (torch.int64, ())}), chunk_bytes=16_384)
"""A row is longer than a chunk: its field comes in several segments."""


def read_jointly(
    chunks: ChunksInMemory, rows: list[int], sizes: list[int], strategy: Strategy, cuts: list[int]
) -> JointBatch:
    plan = plan_read(np.array(rows), chunks.spec(), ReadCost(), strategy=strategy, slab_bytes=1 << 17)
    stream = b"".join(chunks.reply(plan, slab) for slab in plan.slabs)
    parts = [stream[a:b] for a, b in pairwise([0, *sorted(cut % len(stream) for cut in cuts), len(stream)])]
    scripted = ScriptedStream(parts, then="close")
    reader = PlanReader(scripted.channel, RequestBuilder(chunks.layout.chunk_key), ReadStats())
    try:
        job = reader.start(plan)
        sink = JointBatch(sizes, chunks.spec(), MemoryPool(), pin_memory=False)
        job.sink = sink
        reader.finish(job, time.monotonic() + 30, "reading")
        return sink
    finally:
        scripted.close()


def assert_batches(chunks: ChunksInMemory, sink: JointBatch, rows: list[int], sizes: list[int]) -> None:
    bounds = np.cumsum([0, *sizes]).tolist()
    for number, (start, stop) in enumerate(pairwise(bounds)):
        for key, tensor in sink.batch(number).items():
            assert_same_tensor(tensor, chunks.td.get(key)[rows[start:stop]], key)


@settings(max_examples=120, deadline=None)
@given(
    chunks=st.sampled_from([MIXED, PLAIN, PIECES]),
    strategy=st.sampled_from(["auto", "covering", "pipelined", "lua"]),
    data=st.data(),
)
def test_every_row_is_in_its_batch(chunks: ChunksInMemory, strategy: Strategy, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 12), min_size=2, max_size=6), label="sizes")
    count = sum(sizes)
    start = data.draw(st.integers(0, chunks.rows - 1), label="start")
    adjacent = [(start + at) % chunks.rows for at in range(count)]
    drawn = st.lists(st.integers(0, chunks.rows - 1), min_size=count, max_size=count)
    rows = data.draw(st.one_of(st.just(adjacent), st.permutations(adjacent), drawn), label="rows")
    cuts = data.draw(st.lists(st.integers(1, 1 << 30), max_size=4), label="cuts")
    assert_batches(chunks, read_jointly(chunks, rows, sizes, strategy, cuts), rows, sizes)


@pytest.mark.parametrize("strategy", ["covering", "pipelined"])
def test_long_fields_are_each_batchs_own_and_short_ones_are_slices(strategy: Strategy) -> None:
    rows, sizes = list(range(40)), [10, 20, 10]
    sink = read_jointly(MIXED, rows, sizes, strategy, [])
    batches = [sink.batch(number) for number in range(3)]
    assert len({batch["a",].untyped_storage().data_ptr() for batch in batches}) == 3
    assert len({batch["b",].untyped_storage().data_ptr() for batch in batches}) == 1
    assert [batch["a",].untyped_storage().nbytes() for batch in batches] == [size * 4999 for size in sizes]
