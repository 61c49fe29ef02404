"""Ten thousand reply streams tampered with: the right batch or an error, never a hang, never much memory."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from chunks_in_memory import ChunksInMemory
from hypothesis import given, settings
from hypothesis import strategies as st
from rows_in_memory import bytes_of, random_rows
from scripted_stream import ScriptedStream

from td_datapipes.assemble import BatchSink, make_sink
from td_datapipes.cost import ReadCost
from td_datapipes.errors import ProtocolError, ServerTimeoutError, ServerUnavailableError
from td_datapipes.memory import MemoryPool
from td_datapipes.plan import ReadPlan, Strategy, plan_read
from td_datapipes.wire.faults import RangeFault
from td_datapipes.wire.reader import PlanReader, ReadStats
from td_datapipes.wire.requests import RequestBuilder

CHUNKS = ChunksInMemory(
    random_rows(30, {"a": (torch.uint8, (3,)), "b": (torch.float32, (2,)), "c": (torch.uint8, (70,))}, seed=5),
    chunk_bytes=96 * 4,
)
SPEC = CHUNKS.spec()
NAMED = (RangeFault, ProtocolError, ServerUnavailableError, ServerTimeoutError)
MAX_BYTES = 1 << 20
"""The longest announced string is a thousand times as long."""
SPLICES = [
    *(b"", b"\r\n", b"$", b"$-1\r\n", b"*-1\r\n", b"*0\r\n", b"-ERR x\r\n", b"+OK\r\n", b":1\r\n", b"-", b"$3\r\nab"),
    *(
        b"$99999999999\r\n",
        b"$999999999999999999999\r\n",
        b"*4000000000\r\n",
        b"$1073741824\r\n",
        b"$96\n",
        b"$0x60\r\n",
    ),
    *(b"$-2\r\n", b"$ 96\r\n", b"$+96\r\n", b"$096\r\n", b"_\r\n", b"%1\r\n", b"\0" * 20, b"\xff" * 5, b"x" * 3000),
    *(b"HTTP/1.1 200 OK\r\n\r\n", b"-MOVED 1 h:1\r\n", b"-LOADING\r\n", b">3\r\n", b"$" * 100, b"\n" * 7),
]


Case = tuple[ReadPlan, bytes, list[bytes], str]


def tampered(seed: int) -> Case:
    """A plan, its reply stream, and in pieces one that is it but for a few splices, cuts and flipped bytes.

    Drawn from a generator of our own: ten thousand of them are a matter of seconds then.
    """
    draw = random.Random(seed)
    rows = [draw.randrange(30) for _ in range(draw.randint(1, 12))]
    strategy: Strategy = draw.choice(["pipelined", "covering", "lua", "auto"])  # type: ignore[arg-type]
    plan = plan_read(np.array(rows), SPEC, ReadCost(), strategy=strategy, slab_bytes=draw.choice([150, 1 << 20]))
    right = b"".join(CHUNKS.reply(plan, slab) for slab in plan.slabs)
    stream = bytearray(right)
    for _ in range(draw.randint(0, 3)):
        at, new = draw.randint(0, len(stream)), draw.choice(SPLICES)
        kind = draw.choice(["splice", "replace", "flip", "cut", "random"])
        if kind == "splice":
            stream[at:at] = new
        elif kind == "replace":
            stream[at : at + len(new)] = new
        elif kind == "flip" and at < len(stream):
            stream[at] ^= 1 << draw.randrange(8)
        elif kind == "cut":
            del stream[at : at + draw.randint(1, 200)]
        else:
            stream[at : at + 8] = draw.randbytes(draw.randint(0, 16))
    bounds = [0, *sorted(draw.randint(0, len(stream)) for _ in range(draw.randint(0, 4))), len(stream)]
    pieces = [bytes(stream[low:high]) for low, high in pairwise(bounds)]
    return plan, right, pieces, draw.choice([*["close"] * 8, "reset", "silence"])


def new_sink(plan: ReadPlan, *, strided: bool) -> BatchSink:
    return make_sink(plan, SPEC, MemoryPool(), strided=strided, pin_memory=False)


def framing(plan: ReadPlan) -> Iterator[int]:
    """Where in the stream the bytes stand that are no values."""
    at = 0
    for slab in plan.slabs:
        yield from range(at, at + len(slab.prefix))
        at += len(slab.prefix)
        for length in slab.ranges().lengths.tolist():
            header = len(b"$%d\r\n" % length)
            yield from range(at, at + header)
            at += header + length
            yield from range(at, at + 2)
            at += 2


def check(plan: ReadPlan, right: bytes, pieces: list[bytes], then: str, *, strided: bool) -> bool:
    """Whether the stream was taken; if so, the batch is what the stream's bytes say, and it is framed as it must be."""
    stream = b"".join(pieces)
    script = ScriptedStream(pieces, then=then)  # type: ignore[arg-type]
    reader = PlanReader(script.channel, RequestBuilder(CHUNKS.layout.chunk_key), ReadStats())
    try:
        job = reader.start(plan)
        job.sink = new_sink(plan, strided=strided)
        reader.finish(job, time.monotonic() + 0.01, "fuzzing")
    except NAMED:
        assert reader.idle
        return False
    finally:
        reader.close()
        script.close()
    assert all(stream[at] == right[at] for at in framing(plan))
    expected = new_sink(plan, strided=strided)
    at = 0
    for slab in plan.slabs:
        part = np.frombuffer(stream, dtype=np.uint8, count=slab.stream_bytes, offset=at).copy()
        own = expected.target(slab)
        if own is not None:
            own[:] = part
        expected.take(slab, part if own is None else own)
        at += slab.stream_bytes
    expected.seal()
    for key, tensor in expected.tensors.items():
        assert bytes_of(job.sink.tensors[key]) == bytes_of(tensor)
    return True


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_streams_that_were_tampered_with_give_the_right_batch_or_an_error() -> None:
    outcomes: Counter[bool] = Counter()

    @settings(max_examples=10_000, deadline=None, database=None)
    @given(seed=st.integers(0, 1 << 64), strided=st.booleans())
    def fuzz(seed: int, strided: bool) -> None:
        outcomes[check(*tampered(seed), strided=strided)] += 1

    fuzz()
    assert outcomes[True] > 1000  # untouched, or touched within the values only
    assert outcomes[False] > 3000


def test_announced_lengths_take_no_memory() -> None:
    plan = plan_read(np.arange(12), SPEC, ReadCost(), strategy="pipelined", slab_bytes=1 << 20)
    right = b"".join(CHUNKS.reply(plan, slab) for slab in plan.slabs)
    for announced in (b"$1073741824\r\n", b"$99999999999\r\n", b"*4000000000\r\n", b"x" * 3000):
        tracemalloc.start()
        try:
            assert not check(plan, right, [right[:100] + announced + right[100:]], "close", strided=False)
            assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
        finally:
            tracemalloc.stop()
