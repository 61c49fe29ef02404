"""A guard's reply is read behind the ranges it vouches for: equal to the last byte, or the read does not count."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from chunks_in_memory import StoreInMemory
from hypothesis import given, settings
from hypothesis import strategies as st
from rows_in_memory import assert_same_tensor
from scripted_stream import ScriptedStream
from test_plan_columns import STORE
from test_requests import commands

from td_datapipes.assemble import make_sink
from td_datapipes.cost import ReadCost
from td_datapipes.errors import ServerUnavailableError
from td_datapipes.memory import MemoryPool
from td_datapipes.plan import ReadPlan, Strategy, plan_read
from td_datapipes.wire.faults import RangeFault
from td_datapipes.wire.guards import Guard, StaleFault
from td_datapipes.wire.reader import MAX_IN_FLIGHT_BYTES, PlanReader, ReadStats
from td_datapipes.wire.replies import NeedData, ReplyParser
from td_datapipes.wire.requests import RequestBuilder

GUARD = Guard.of_hashes([(b"m:b", [(b"shape", b"[300, 64]"), (b"is_non_tensor", None)]), (b"m:a", [(b"dtype", b"u8")])])
REPLY = b"*2\r\n$9\r\n[300, 64]\r\n$-1\r\n*1\r\n$2\r\nu8\r\n"
STRATEGIES: tuple[Strategy, ...] = ("covering", "pipelined", "lua")


def test_hashes_are_asked_for_field_by_field() -> None:
    assert commands(GUARD.request) == [[b"HMGET", b"m:b", b"shape", b"is_non_tensor"], [b"HMGET", b"m:a", b"dtype"]]
    assert GUARD.reply == REPLY


def test_a_string_is_asked_for_as_it_is() -> None:
    guard = Guard.of_string(b"key", b"7")
    assert commands(guard.request) == [[b"GET", b"key"]]
    assert (guard.reply, guard.num_replies) == (b"$1\r\n7\r\n", 1)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.binary(),
            st.lists(st.tuples(st.binary(), st.one_of(st.none(), st.binary())), min_size=1, max_size=4),
        ),
        max_size=4,
    )
)
def test_replies_are_counted_as_a_parser_counts_them(
    wanted: list[tuple[bytes, list[tuple[bytes, bytes | None]]]],
) -> None:
    guard = Guard.of_hashes(wanted)
    parser = ReplyParser(1 << 20)
    parser.feed(guard.reply)
    count = 0
    while not isinstance(parser.next_reply(), NeedData):
        count += 1
    assert count == guard.num_replies
    assert not parser.pending


Read = Callable[..., dict[tuple[str, ...], object]]


@pytest.fixture
def read() -> Iterator[Read]:
    """Reads a plan of `STORE` over a script that sends those pieces."""
    streams: list[ScriptedStream] = []

    def run(plan: ReadPlan, pieces: list[bytes], then: str = "silence", seconds: float = 5.0) -> object:
        streams.append(ScriptedStream(pieces, then=then))  # type: ignore[arg-type]
        dial = streams[-1].channel
        reader = PlanReader(dial, RequestBuilder(STORE.layout.chunk_key), ReadStats(), GUARD)
        job = reader.start(plan)
        job.sink = make_sink(plan, STORE.spec(), MemoryPool(), strided=False, pin_memory=False)
        reader.finish(job, time.monotonic() + seconds, "reading a script")
        assert reader.idle
        return job.sink.tensors, bytes(streams[-1].sent)

    yield run  # type: ignore[misc]
    for stream in streams:
        stream.close()


ROWS = [3, 250, 4, 4, 17]


def plan_of(strategy: Strategy, store: StoreInMemory = STORE) -> ReadPlan:
    return plan_read(np.array(ROWS), store.spec(), ReadCost(), strategy=strategy, slab_bytes=1 << 12)


def stream_of(plan: ReadPlan) -> bytes:
    return b"".join(STORE.reply(plan, slab) for slab in plan.slabs)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rows_count_when_the_guard_is_as_it_was_however_the_stream_is_cut(read: Read, strategy: Strategy) -> None:
    plan = plan_of(strategy)
    stream = stream_of(plan) + REPLY
    for position in (*range(0, len(stream), 501), *range(len(stream) - len(REPLY) - 2, len(stream))):
        tensors, sent = read(plan, [stream[:position], stream[position:]])
        assert sent.endswith(GUARD.request)
        assert sent.count(GUARD.request) == 1
        for key, tensor in tensors.items():
            assert_same_tensor(tensor, STORE.td.get(key)[ROWS], key)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "reply",
    [
        b"*2\r\n$9\r\n[300, 65]\r\n$-1\r\n*1\r\n$2\r\nu8\r\n",
        b"*2\r\n$9\r\n[300, 64]\r\n$1\r\n1\r\n*1\r\n$2\r\nu8\r\n",
        b"*2\r\n$-1\r\n$-1\r\n*1\r\n$-1\r\n",
        b"-WRONGTYPE Operation against a key holding the wrong kind of value\r\n*1\r\n$2\r\nu8\r\n",
        b"*2\r\n$9\r\n[300, 64]\r\n$-1\r\n*1\r\n$2\r\nu9\r\n",
    ],
)
def test_any_other_reply_voids_the_read_at_once(read: Read, strategy: Strategy, reply: bytes) -> None:
    plan = plan_of(strategy)
    for pieces in ([stream_of(plan) + reply], [stream_of(plan), *(bytes([byte]) for byte in reply)]):
        began = time.monotonic()
        with pytest.raises(StaleFault):
            read(plan, pieces, seconds=30.0)
        assert time.monotonic() - began < 15


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_connection_that_ends_before_the_guard_is_an_error(read: Read, strategy: Strategy) -> None:
    plan = plan_of(strategy)
    for end in range(len(REPLY)):
        with pytest.raises(ServerUnavailableError, match="was closed while"):
            read(plan, [stream_of(plan) + REPLY[:end]], then="close")


def test_ranges_that_are_short_are_named_before_the_guard(read: Read) -> None:
    plan = plan_of("pipelined")
    with pytest.raises(RangeFault) as caught:
        read(plan, [b"$0\r\n\r\n" + stream_of(plan) + REPLY])
    assert (caught.value.index, caught.value.received_bytes) == (0, 0)


def test_the_guard_comes_behind_the_last_range_however_many_there_are() -> None:
    """A plan larger than what may be in flight is asked for in parts; the guard stands behind the last."""
    plan = plan_read(np.arange(300), STORE.spec(["b"]), ReadCost(), strategy="pipelined", slab_bytes=2048)
    times = MAX_IN_FLIGHT_BYTES // sum(slab.stream_bytes for slab in plan.slabs) + 2
    slabs = tuple(itertools.chain.from_iterable(itertools.repeat(plan.slabs, times)))
    large = ReadPlan(num_rows=300, slabs=slabs, strategy="pipelined")
    stream = ScriptedStream([b"".join(STORE.reply(plan, slab) for slab in plan.slabs)] * times + [REPLY])
    try:
        reader = PlanReader(stream.channel, RequestBuilder(STORE.layout.chunk_key), ReadStats(), GUARD)
        job = reader.start(large)
        assert GUARD.request not in bytes(stream.sent)
        job.sink = make_sink(large, STORE.spec(["b"]), MemoryPool(), strided=False, pin_memory=False)
        reader.finish(job, time.monotonic() + 60, "reading a script")
        assert bytes(stream.sent).endswith(GUARD.request)
        assert bytes(stream.sent).count(b"HMGET") == 2
        assert_same_tensor(job.sink.tensors["b",], STORE.td["b"])
    finally:
        stream.close()


def test_each_of_two_plans_in_flight_has_a_guard_of_its_own() -> None:
    one, two = plan_of("pipelined"), plan_of("covering")
    other = Guard.of_string(b"key", b"7")
    stream = ScriptedStream([stream_of(one) + REPLY + stream_of(two) + other.reply], then="silence")
    try:
        reader = PlanReader(stream.channel, RequestBuilder(STORE.layout.chunk_key), ReadStats(), GUARD)
        jobs = [reader.start(one)]
        reader.retarget(RequestBuilder(STORE.layout.chunk_key), other)
        jobs.append(reader.start(two))
        for job in jobs:
            job.sink = make_sink(job.plan, STORE.spec(), MemoryPool(), strided=False, pin_memory=False)
        for job in reversed(jobs):
            reader.finish(job, time.monotonic() + 10, "reading a script")
            for key, tensor in job.sink.tensors.items():
                assert_same_tensor(tensor, STORE.td.get(key)[ROWS], key)
    finally:
        stream.close()
