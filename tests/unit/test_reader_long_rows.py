"""Long rows over scripted connections: received piece by piece, or handed over while they arrive, and still checked."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from chunks_in_memory import ChunksInMemory
from hypothesis import given, settings
from hypothesis import strategies as st
from rows_in_memory import assert_same_tensor, random_rows
from scripted_stream import ScriptedStream

from td_datapipes.assemble import make_sink
from td_datapipes.cost import ReadCost
from td_datapipes.errors import ProtocolError, ServerUnavailableError
from td_datapipes.memory import MemoryPool
from td_datapipes.plan import ReadPlan, Strategy, plan_read
from td_datapipes.wire.faults import RangeFault
from td_datapipes.wire.reader import PlanReader, ReadStats
from td_datapipes.wire.requests import RequestBuilder

ROWS = 70
TD = random_rows(ROWS, {"a": (torch.uint8, (4999,)), "b": (torch.float32, (3,)), "c": (torch.uint8, (6001,))}, seed=5)
MIXED = ChunksInMemory(TD, chunk_bytes=11_040 * 32)
PLAIN = ChunksInMemory(TD.select("c").apply(lambda field: field[:, :6000]), chunk_bytes=6_000 * 60)
"""Its stride is the length of its one field: rows lie in a chunk as in the batch."""

IN_ORDER, FROM_WITHIN, SCATTERED = list(range(ROWS)), list(range(3, 66)), [*range(0, ROWS, 2), 69, 1]
MIXED_UP = [int(row) for row in np.random.default_rng(2).permutation(ROWS)]
REPEATED = [*MIXED_UP[:40], 5, 5, *MIXED_UP[20:], 5]
CASES: list[tuple[list[int], Strategy]] = [
    (IN_ORDER, "covering"),
    (FROM_WITHIN, "auto"),
    (SCATTERED, "pipelined"),
    (MIXED_UP, "covering"),
    (MIXED_UP[:40], "covering"),
    (IN_ORDER, "pipelined"),
    ([*IN_ORDER, 5], "covering"),
    (IN_ORDER, "lua"),
    (REPEATED, "pipelined"),
    (REPEATED, "covering"),
]


def read(
    chunks: ChunksInMemory, plan: ReadPlan, stream: Sequence[bytes], *, strided: bool, then: str = "close"
) -> dict[tuple[str, ...], torch.Tensor]:
    """Read a plan from what a peer sends."""
    scripted = ScriptedStream(stream, then=then)  # type: ignore[arg-type]
    reader = PlanReader(scripted.channel, RequestBuilder(chunks.layout.chunk_key), ReadStats())
    try:
        job = reader.start(plan)
        job.sink = make_sink(plan, chunks.spec(), MemoryPool(), strided=strided, pin_memory=False)
        reader.finish(job, time.monotonic() + 30, "reading")
        return job.sink.tensors
    finally:
        scripted.close()


def plan_of(chunks: ChunksInMemory, rows: list[int], strategy: Strategy) -> ReadPlan:
    return plan_read(np.array(rows), chunks.spec(), ReadCost(), strategy=strategy, slab_bytes=1 << 20)


def assert_rows(chunks: ChunksInMemory, tensors: dict[tuple[str, ...], torch.Tensor], rows: list[int]) -> None:
    for key, tensor in tensors.items():
        assert_same_tensor(tensor, chunks.td.get(key)[rows], key)


def cut(data: bytes, positions: Sequence[int]) -> list[bytes]:
    return [data[a:b] for a, b in pairwise([0, *sorted(positions), len(data)])]


def edges(chunks: ChunksInMemory, plan: ReadPlan) -> list[int]:
    """Where headers, values and line ends of the whole stream begin."""
    found, at = [], 0
    for slab in plan.slabs:
        at += len(b"*%d\r\n" % slab.num_ranges) if plan.strategy == "lua" else 0
        for value in chunks.values_of(slab):
            header = len(b"$%d\r\n" % len(value))
            found += [at, at + header, at + header + len(value)]
            at += header + len(value) + 2
    return found


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("chunks", [MIXED, PLAIN], ids=["mixed", "plain"])
@pytest.mark.parametrize(("rows", "strategy"), CASES)
def test_the_rows_are_right_wherever_the_stream_is_cut(
    chunks: ChunksInMemory, rows: list[int], strategy: Strategy, strided: bool
) -> None:
    plan = plan_of(chunks, rows, strategy)
    stream = b"".join(chunks.reply(plan, slab) for slab in plan.slabs)
    generator = np.random.default_rng(0)
    for positions in (
        [],
        range(1000, len(stream), 1000),
        range(1, len(stream), 200_000),
        generator.integers(0, len(stream), 100).tolist(),
        [min(edge + shift, len(stream)) for edge in edges(chunks, plan) for shift in (0, 1)],
    ):
        assert_rows(chunks, read(chunks, plan, cut(stream, list(positions)), strided=strided), rows)


@pytest.mark.parametrize("strategy", ["covering", "pipelined"])
def test_a_row_that_is_wanted_again_is_received_once_and_where_it_belongs(strategy: Strategy) -> None:
    plan = plan_of(MIXED, REPEATED, strategy)
    sink = make_sink(plan, MIXED.spec(), MemoryPool(), strided=False, pin_memory=False)
    places = [place for slab in plan.slabs for place in sink.places(slab) or []]
    assert len(places) == 2 * len(set(REPEATED))  # of the two long fields


@pytest.mark.parametrize("strategy", ["covering", "pipelined"])
def test_many_short_rows_are_handed_over_only_when_they_are_whole(strategy: Strategy) -> None:
    fields = {"a": (torch.uint8, (90,)), "b": (torch.float32, (2,))}
    chunks = ChunksInMemory(random_rows(6000, fields, seed=8))
    rows = list(range(6000))
    plan = plan_of(chunks, rows, strategy)
    stream = b"".join(chunks.reply(plan, slab) for slab in plan.slabs)
    for step in (1001, 70_003, 199_999, len(stream) // 2 + 50):
        pieces = cut(stream, range(step, len(stream), step))
        assert_rows(chunks, read(chunks, plan, pieces, strided=False), rows)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("chunks", [MIXED, PLAIN], ids=["mixed", "plain"])
@pytest.mark.parametrize(("rows", "strategy"), CASES[:4])
def test_a_reply_that_is_not_as_asked_is_named(
    chunks: ChunksInMemory, rows: list[int], strategy: Strategy, strided: bool
) -> None:
    plan = plan_of(chunks, rows, strategy)
    numbers = [(slab, index) for slab in range(len(plan.slabs)) for index in range(plan.slabs[slab].num_ranges)]
    for slab, index in {numbers[0], numbers[len(numbers) // 2], numbers[-1]}:
        values = [chunks.values_of(each) for each in plan.slabs]
        whole = values[slab][index]
        for wrong, received in ((whole[:-1], len(whole) - 1), (whole[:7], 7), (b"", 0), (None, None)):
            replies = [[b"$%d\r\n%b\r\n" % (len(value), value) for value in each] for each in values]
            replies[slab][index] = b"-ERR gone\r\n" if wrong is None else b"$%d\r\n%b\r\n" % (len(wrong), wrong)
            stream = b"".join(b"".join(each) for each in replies)
            for positions in ([], range(1000, len(stream), 30_000)):
                with pytest.raises(RangeFault) as caught:
                    read(chunks, plan, cut(stream, list(positions)), strided=strided, then="silence")
                fault = caught.value
                assert (fault.slab, fault.index, fault.received_bytes) == (slab, index, received)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_tampered_framing_is_never_taken_for_right(data: st.DataObject) -> None:
    rows, strategy = data.draw(st.sampled_from(CASES))
    chunks = data.draw(st.sampled_from([MIXED, PLAIN]))
    plan = plan_of(chunks, rows, strategy)
    right = b"".join(chunks.reply(plan, slab) for slab in plan.slabs)
    stream = bytearray(right)
    # Two bytes from there on are framing: a header's first, or a line end.
    starts = [edge for number, edge in enumerate(edges(chunks, plan)) if number % 3 != 1]
    at = data.draw(st.sampled_from(starts)) + data.draw(st.integers(0, 1))
    kind = data.draw(st.sampled_from(["replace", "insert", "delete", "none"]))
    noise = data.draw(st.sampled_from([b"\0", b"\r", b"\n", b"-", b"+", b"0", b"9"]))
    if kind != "none":
        stream[at : at + (kind != "insert")] = b"" if kind == "delete" else noise
    positions = data.draw(st.lists(st.integers(0, len(stream)), max_size=8))
    try:
        tensors = read(chunks, plan, cut(bytes(stream), positions), strided=data.draw(st.booleans()))
    except (RangeFault, ProtocolError, ServerUnavailableError):
        assert bytes(stream) != right
    else:
        assert bytes(stream[: len(right)]) == right
        assert_rows(chunks, tensors, rows)


class Watched(ScriptedStream):
    """Also notes how many bytes of replies were asked for and not received whenever something is."""

    def __init__(self, stream: bytes, piece: int, reply_bytes: int) -> None:
        super().__init__(cut(stream, range(piece, len(stream), piece)))
        self._reply_bytes = reply_bytes
        self._received = 0
        self.due: list[int] = []

    def recv_into(self, target: memoryview) -> int:
        self.due.append(self.sent.count(b"GETRANGE") * self._reply_bytes - self._received)
        count = super().recv_into(target)
        self._received += count
        return count


@pytest.mark.parametrize("piece", [9_973, 150_001, 1 << 20])
def test_long_rows_are_asked_for_as_they_come(piece: int) -> None:
    chunks = ChunksInMemory(random_rows(800, {"x": (torch.uint8, (30_000,))}, seed=3), chunk_bytes=1 << 18)
    rows = [int(row) for row in np.random.default_rng(1).integers(0, 800, 600)]
    plans = [plan_of(chunks, rows[:250], "pipelined"), plan_of(chunks, rows[250:], "pipelined")]
    replies = [chunks.reply(plan, slab) for plan in plans for slab in plan.slabs]
    reply_bytes = sum(map(len, replies)) // sum(plan.num_ranges for plan in plans)
    stream = Watched(b"".join(replies), piece, reply_bytes)
    reader = PlanReader(stream.channel, RequestBuilder(chunks.layout.chunk_key), ReadStats())
    jobs = [reader.start(plan) for plan in plans]
    for job, wanted in zip(jobs, (rows[:250], rows[250:]), strict=True):
        job.sink = make_sink(job.plan, chunks.spec(), MemoryPool(), strided=False, pin_memory=False)
        reader.finish(job, time.monotonic() + 30, "reading")
        assert_rows(chunks, job.sink.tensors, wanted)
    stream.close()
    # Parts are asked for while fewer bytes are on their way than the limit: never so few that the server has to wait.
    # What is too short to be asked for in parts, such as the rest of a plan, comes on top.
    assert (4 << 20) - (1 << 18) < max(stream.due) < (4 << 20) + (1 << 18) + (1 << 19)
    assert min(stream.due[: len(stream.due) // 2]) > 2 << 20
    assert stream.sent.count(b"GETRANGE") == sum(plan.num_ranges for plan in plans)


def test_covering_ranges_are_asked_for_as_they_come() -> None:
    chunks = ChunksInMemory(random_rows(800, {"x": (torch.uint8, (30_000,))}, seed=3), chunk_bytes=1 << 21)
    rows = [row for start in range(0, 800, 10) for row in range(start, start + 1 + start // 100)]
    plan = plan_read(np.array(rows), chunks.spec(), ReadCost(), strategy="covering", slab_bytes=4 << 20)
    stream = b"".join(chunks.reply(plan, slab) for slab in plan.slabs)
    scripted = Watched(stream, 100_003, len(stream) // plan.num_ranges)
    reader = PlanReader(scripted.channel, RequestBuilder(chunks.layout.chunk_key), ReadStats())
    job = reader.start(plan)
    begun = scripted.sent.count(b"GETRANGE")
    job.sink = make_sink(plan, chunks.spec(), MemoryPool(), strided=False, pin_memory=False)
    reader.finish(job, time.monotonic() + 30, "reading")
    scripted.close()
    assert_rows(chunks, job.sink.tensors, rows)
    assert 1 < begun < plan.num_ranges == scripted.sent.count(b"GETRANGE")
