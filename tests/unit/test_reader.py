"""Plans read over scripted connections: right streams in any pieces, and every way a stream can be wrong."""

from __future__ import annotations

import gc
import itertools
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator

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
from td_datapipes.errors import ProtocolError, ServerTimeoutError, ServerUnavailableError
from td_datapipes.memory import MemoryPool
from td_datapipes.plan import ReadPlan, Strategy, plan_read
from td_datapipes.wire.faults import RangeFault
from td_datapipes.wire.reader import MAX_IN_FLIGHT_BYTES, PlanReader, ReadJob, ReadStats
from td_datapipes.wire.requests import RequestBuilder

CHUNKS = ChunksInMemory(
    random_rows(30, {"a": (torch.uint8, (3,)), "b": (torch.float32, (2,)), "c": (torch.uint8, (70,))}, seed=5),
    chunk_bytes=96 * 4,
)
SPEC = CHUNKS.spec()
ROWS = [3, 29, 4, 4, 17]
STRATEGIES: tuple[Strategy, ...] = ("pipelined", "covering", "lua")
WRONG = (RangeFault, ProtocolError, ServerUnavailableError, ServerTimeoutError)


def plan_of(rows: list[int], strategy: Strategy = "pipelined", slab_bytes: int = 1 << 30) -> ReadPlan:
    return plan_read(np.array(rows, dtype=np.int64), SPEC, ReadCost(), strategy=strategy, slab_bytes=slab_bytes)


def stream_of(plan: ReadPlan) -> bytes:
    return b"".join(CHUNKS.reply(plan, slab) for slab in plan.slabs)


class Connections:
    """A `PlanReader` whose connections are given streams, one after the other."""

    def __init__(self, *streams: ScriptedStream) -> None:
        self.dialled: list[ScriptedStream] = []
        self._streams = iter(streams)
        self.reader = PlanReader(self._dial, RequestBuilder(CHUNKS.layout.chunk_key), ReadStats())

    def _dial(self):  # type: ignore[no-untyped-def]
        self.dialled.append(next(self._streams))
        return self.dialled[-1].channel()

    def start(self, plan: ReadPlan, *, strided: bool = False) -> ReadJob:
        job = self.reader.start(plan)
        job.sink = make_sink(plan, SPEC, MemoryPool(), strided=strided, pin_memory=False)
        return job

    def finish(self, job: ReadJob, seconds: float = 30.0) -> dict[tuple[str, ...], torch.Tensor]:
        self.reader.finish(job, time.monotonic() + seconds, "reading rows of a script")
        return job.sink.tensors

    def read(self, plan: ReadPlan, *, strided: bool = False) -> dict[tuple[str, ...], torch.Tensor]:
        return self.finish(self.start(plan, strided=strided))


Connect = Callable[..., Connections]


@pytest.fixture
def connect() -> Iterator[Connect]:
    made: list[ScriptedStream] = []

    def start(*streams: ScriptedStream) -> Connections:
        made.extend(streams)
        return Connections(*streams)

    yield start
    for stream in made:
        stream.close()


def assert_rows(tensors: dict[tuple[str, ...], torch.Tensor], rows: list[int]) -> None:
    for key, tensor in tensors.items():
        assert_same_tensor(tensor, CHUNKS.td.get(key)[rows], key)


def cut(data: bytes, positions: Iterable[int]) -> list[bytes]:
    bounds = [0, *sorted(positions), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(bounds)]


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_right_stream_gives_the_rows_cut_at_every_position(
    connect: Connect, strategy: Strategy, strided: bool
) -> None:
    plan = plan_of(ROWS, strategy)
    stream = stream_of(plan)
    for position in range(0, len(stream), 7 if strided else 3):
        connections = connect(ScriptedStream(cut(stream, [position])))
        assert_rows(connections.read(plan, strided=strided), ROWS)
    trickle = connect(ScriptedStream([bytes([byte]) for byte in stream]))
    assert_rows(trickle.read(plan, strided=strided), ROWS)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_requests_go_out_whole_however_little_the_socket_takes(connect: Connect, strategy: Strategy) -> None:
    plan = plan_of(ROWS, strategy, slab_bytes=200)
    whole = ScriptedStream([stream_of(plan)])
    slow = ScriptedStream(cut(stream_of(plan), range(1, 400, 5)), most_sent=3)
    for stream in (whole, slow):
        assert_rows(connect(stream).read(plan), ROWS)
    assert slow.sent == whole.sent
    assert whole.sent.count(b"EVALSHA" if strategy == "lua" else b"GETRANGE") >= len(plan.slabs)


@pytest.mark.parametrize("slab_bytes", [1, 200, 1 << 20])
def test_reads_started_together_finish_in_order(connect: Connect, slab_bytes: int) -> None:
    plans = [
        plan_of(rows, strategy, slab_bytes) for rows, strategy in zip(([1, 2, 9], [7], [5, 5]), STRATEGIES, strict=True)
    ]
    connections = connect(ScriptedStream(cut(b"".join(map(stream_of, plans)), range(11, 900, 50))))
    jobs = [connections.start(plan) for plan in plans]
    assert_rows(connections.finish(jobs[1]), [7])
    assert not jobs[0].unfinished, "an earlier read completes on the way"
    assert_rows(jobs[0].sink.tensors, [1, 2, 9])
    assert_rows(connections.finish(jobs[2]), [5, 5])
    assert len(connections.dialled) == 1
    assert connections.reader.idle


def replies_of(plan: ReadPlan) -> tuple[bytes, list[bytes]]:
    """The head and the framed replies of a plan of one slab."""
    (slab,) = plan.slabs
    values = [b"$%d\r\n%b\r\n" % (len(value), value) for value in CHUNKS.values_of(slab)]
    return (b"*%d\r\n" % len(values) if plan.strategy == "lua" else b""), values


def resized(reply: bytes, change: int) -> bytes:
    value = reply.partition(b"\r\n")[2][:-2]
    value = value[:change] if change < 0 else value + b"x" * change
    return b"$%d\r\n%b\r\n" % (len(value), value)


FAULTS: dict[str, tuple[Callable[[bytes], bytes], Callable[[int], int | None], str]] = {
    "error": (lambda _: b"-WRONGTYPE no string\r\n", lambda _: None, "WRONGTYPE no string"),
    "empty": (lambda _: b"$0\r\n\r\n", lambda _: 0, ""),
    "null": (lambda _: b"$-1\r\n", lambda _: 0, ""),
    "short by one": (lambda reply: resized(reply, -1), lambda length: length - 1, ""),
    "short": (lambda reply: resized(reply, -60), lambda length: length - 60, ""),
    "long by one": (lambda reply: resized(reply, 1), lambda length: length + 1, ""),
    "long": (lambda reply: resized(reply, 1000), lambda length: length + 1000, ""),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", FAULTS)
def test_the_first_reply_that_is_not_as_asked_is_named(connect: Connect, kind: str, strategy: Strategy) -> None:
    make, received, text = FAULTS[kind]
    plan = plan_of([3, 29, 17], strategy)
    head, replies = replies_of(plan)
    lengths = plan.slabs[0].ranges().lengths.tolist()
    for index in range(len(replies)):
        wrong = [*replies[:index], make(replies[index]), *replies[index + 1 :]]
        stream = head + b"".join(wrong)
        for positions in ([], [len(head) + sum(map(len, wrong[:index])) + 2], range(1, len(stream), 9)):
            # A peer that goes on to say nothing: nobody may wait for bytes that will not come.
            connections = connect(ScriptedStream(cut(stream, positions), then="silence"))
            with pytest.raises(RangeFault) as caught:
                connections.read(plan)
            fault = caught.value
            assert (fault.slab, fault.index, fault.expected_bytes) == (0, index, lengths[index])
            assert (fault.received_bytes, fault.text) == (received(lengths[index]), text)
            assert connections.dialled[0].closed


def test_an_error_in_place_of_a_lua_table_is_named(connect: Connect) -> None:
    connections = connect(ScriptedStream([b"-NOSCRIPT No matching script.\r\n"], then="silence"))
    with pytest.raises(RangeFault) as caught:
        connections.read(plan_of(ROWS, "lua"))
    assert caught.value.text == "NOSCRIPT No matching script."


def test_a_fault_in_a_later_slab_is_named_by_its_number(connect: Connect) -> None:
    plan = plan_of([0, 8, 16, 24], slab_bytes=1)
    streams = [CHUNKS.reply(plan, slab) for slab in plan.slabs]
    connections = connect(ScriptedStream([*streams[:2], b"$0\r\n\r\n"], then="silence"))
    with pytest.raises(RangeFault) as caught:
        connections.read(plan)
    assert (caught.value.slab, caught.value.index, caught.value.received_bytes) == (2, 0, 0)


@pytest.mark.parametrize(
    "noise",
    [
        b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
        b"\0" * 500,
        b"$-7\r\n",
        b"$999999999999\r\n",
        b"$99999\r\n",
        b"+OK\r\n",
        b":3\r\n",
        b">2\r\n$10\r\ninvalidate\r\n*0\r\n",
        b"x" * 70_000,
        b"\r\n",
    ],
    ids=lambda noise: repr(noise[:12]),
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_noise_is_a_protocol_error(connect: Connect, noise: bytes, strategy: Strategy) -> None:
    plan = plan_of(ROWS, strategy)
    head, replies = replies_of(plan)
    stream = head + replies[0] + noise
    connections = connect(ScriptedStream([stream], then="silence"))
    with pytest.raises(ProtocolError):
        connections.read(plan)
    assert connections.dialled[0].closed


def test_a_huge_announced_length_allocates_nothing(connect: Connect) -> None:
    connections = connect(ScriptedStream([b"$999999999999\r\n"], then="silence"))
    plan = plan_of(ROWS)
    gc.collect()
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match="a string of 999999999999 bytes is announced"):
            connections.read(plan)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("then", ["close", "reset"])
def test_a_connection_that_ends_early_is_unavailable_wherever_it_ends(connect: Connect, then: str) -> None:
    plan = plan_of([3, 29, 17], "covering")
    stream = stream_of(plan)
    for length in range(0, len(stream), 5):
        connections = connect(ScriptedStream([stream[:length]], then=then))
        with pytest.raises(ServerUnavailableError, match="script:1"):
            connections.read(plan)
        assert connections.dialled[0].closed


@pytest.mark.parametrize("part", [0, 2, 50])
def test_silence_is_a_timeout_that_says_what_was_waited_for(connect: Connect, part: int) -> None:
    plan = plan_of(ROWS)
    connections = connect(ScriptedStream([stream_of(plan)[:part]], then="silence"))
    with pytest.raises(ServerTimeoutError, match="script:1 did not answer in time while reading rows of a script"):
        connections.finish(connections.start(plan), seconds=0.02)
    assert connections.dialled[0].closed


def test_after_a_fault_the_next_read_dials_anew_and_is_right(connect: Connect) -> None:
    plan, following = plan_of(ROWS), plan_of([1, 2], "covering")
    stale = stream_of(plan)
    connections = connect(
        ScriptedStream([stale[:40]], then="silence"),
        ScriptedStream([b"-ERR no\r\n", stale]),
        ScriptedStream([stale[:10]]),
        ScriptedStream([stream_of(following), stream_of(plan)]),
    )
    for kind in (ServerTimeoutError, RangeFault, ServerUnavailableError):
        with pytest.raises(kind):
            connections.finish(connections.start(plan), seconds=0.02)
    assert_rows(connections.read(following), [1, 2])
    assert_rows(connections.read(plan), ROWS)
    assert [stream.closed for stream in connections.dialled] == [True, True, True, False]


def test_a_fault_voids_what_was_started_after_it(connect: Connect) -> None:
    first, second = plan_of(ROWS), plan_of([1, 2])
    connections = connect(
        ScriptedStream([b"$0\r\n\r\n", stream_of(second)], then="silence"), ScriptedStream([stream_of(second)])
    )
    jobs = [connections.start(first), connections.start(second)]
    with pytest.raises(RangeFault):
        connections.finish(jobs[0])
    with pytest.raises(ServerUnavailableError):
        connections.finish(jobs[1])
    assert_rows(connections.read(second), [1, 2])


def test_a_batch_that_could_not_be_made_does_not_harm_the_next_read(connect: Connect) -> None:
    plan = plan_of(ROWS)
    connections = connect(ScriptedStream([stream_of(plan)] * 2), ScriptedStream([stream_of(plan)]))
    connections.reader.start(plan)  # no memory for its batch: it never gets a sink
    with pytest.raises(WRONG):
        connections.read(plan)
    assert_rows(connections.read(plan), ROWS)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_stream_that_was_tampered_with_is_never_taken_for_right(data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, 29), min_size=1, max_size=6))
    plan = plan_of(rows, data.draw(st.sampled_from(STRATEGIES)), data.draw(st.sampled_from([1, 250, 1 << 20])))
    right = stream_of(plan)
    stream = bytearray(right)
    frame = framing_of(plan)
    for _ in range(data.draw(st.integers(0, 2))):
        at = data.draw(st.sampled_from(frame))
        kind = data.draw(st.sampled_from(["replace", "insert", "delete"]))
        noise = data.draw(
            st.sampled_from([b"\0", b"\r", b"\n", b"$", b"-", b"+", b"*", b"0", b"1", b"5", b"9", b"\xff"])
        )
        stream[at : at + (kind != "insert")] = b"" if kind == "delete" else noise
    positions = data.draw(st.lists(st.integers(0, len(stream)), max_size=6))
    scripted = ScriptedStream(cut(bytes(stream), positions), then=data.draw(st.sampled_from(["close", "reset"])))
    connections = Connections(scripted)
    try:
        tensors = connections.read(plan)
    except WRONG:
        assert bytes(stream) != right
    else:
        assert bytes(stream[: len(right)]) == right
        assert_rows(tensors, rows)
    finally:
        scripted.close()


def framing_of(plan: ReadPlan) -> list[int]:
    """Positions in the whole stream that belong to no value."""
    frame, at = [], 0
    for slab in plan.slabs:
        parts = [b"*%d\r\n" % slab.num_ranges] if plan.strategy == "lua" else []
        frame += [at + i for part in parts for i in range(len(part))]
        at += sum(map(len, parts))
        for value in CHUNKS.values_of(slab):
            header = len(b"$%d\r\n" % len(value))
            frame += [*range(at, at + header), at + header + len(value), at + header + len(value) + 1]
            at += header + len(value) + 2
    return frame


def test_no_more_is_asked_for_ahead_than_the_limit() -> None:
    big = ChunksInMemory(random_rows(40, {"x": (torch.uint8, (1 << 20,))}))
    spec = big.spec()
    plan = plan_read(np.arange(0, 40), spec, ReadCost(), strategy="pipelined", slab_bytes=1 << 20)
    stream = ScriptedStream([], then="silence")
    reader = PlanReader(stream.channel, RequestBuilder(big.layout.chunk_key), ReadStats())
    job = reader.start(plan)
    job.sink = make_sink(plan, spec, MemoryPool(), strided=False, pin_memory=False)
    asked = bytes(stream.sent).count(b"GETRANGE")
    # Of long rows less is in flight than has been made ready to be asked for.
    assert 1 < asked <= reader.stats.ranges <= MAX_IN_FLIGHT_BYTES // (1 << 20) + 1
    with pytest.raises(ServerTimeoutError):
        reader.finish(job, time.monotonic(), "reading")
    assert stream.closed


def test_what_was_moved_is_counted(connect: Connect) -> None:
    plans = [plan_of(ROWS), plan_of(list(range(30)), "covering"), plan_of(ROWS, "lua", 100)]
    connections = connect(ScriptedStream(list(map(stream_of, plans))))
    for plan in plans:
        connections.read(plan)
    stats = connections.reader.stats
    assert stats.ranges == sum(plan.num_ranges for plan in plans)
    assert stats.bytes == sum(plan.num_bytes for plan in plans)
    assert stats.commands == plans[0].num_ranges + plans[1].num_ranges + len(plans[2].slabs)
    assert 0 < stats.wait_seconds < 30
