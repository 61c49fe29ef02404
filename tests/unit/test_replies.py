"""Reply streams cut anywhere: what is right passes, whatever else comes does not."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from chunks_in_memory import ChunksInMemory
from hypothesis import given, settings
from hypothesis import strategies as st
from rows_in_memory import random_rows

from td_datapipes.cost import ReadCost
from td_datapipes.errors import ProtocolError
from td_datapipes.plan import ReadPlan, Strategy, plan_read
from td_datapipes.slabs import Slab
from td_datapipes.wire.replies import (
    NEED_DATA,
    BulkReply,
    ErrorReply,
    NeedData,
    OtherReply,
    Reply,
    ReplyParser,
    stream_check,
)

CHUNKS = ChunksInMemory(
    random_rows(30, {"a": (torch.uint8, (5,)), "b": (torch.float32, (2,)), "c": (torch.uint8, (900,))}, seed=5),
    chunk_bytes=960 * 4,
    groups=[[("a",), ("c",)], [("b",)]],
)
ROWS = np.array([3, 29, 4, 4, 0, 17])
STRATEGIES: tuple[Strategy, ...] = ("pipelined", "covering", "lua")


def one_slab(strategy: Strategy, rows: np.ndarray = ROWS) -> tuple[ReadPlan, Slab, np.ndarray]:
    """A plan, its first slab (the only one, unless adjacent rows are read group by group) and that one's replies."""
    plan = plan_read(rows, CHUNKS.spec(), ReadCost(), strategy=strategy, slab_bytes=1 << 30)
    slab = plan.slabs[0]
    return plan, slab, np.frombuffer(CHUNKS.reply(plan, slab), dtype=np.uint8)


def framing(plan: ReadPlan, slab: Slab) -> set[int]:
    """Positions of the stream's bytes that are no value's."""
    positions, at = set(), 0
    if plan.strategy == "lua":
        at = len(b"*%d\r\n" % slab.num_ranges)
        positions |= set(range(at))
    for value in CHUNKS.values_of(slab):
        start = at + len(b"$%d\r\n" % len(value))
        positions |= {*range(at, start), start + len(value), start + len(value) + 1}
        at = start + len(value) + 2
    assert at == slab.stream_bytes
    return positions


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_right_stream_passes_cut_at_every_position(strategy: Strategy) -> None:
    _, slab, stream = one_slab(strategy)
    for cut in range(len(stream) + 1):
        check = stream_check(slab)
        assert check.matches(stream, cut)
        assert check.matches(stream, len(stream))
    trickling = stream_check(slab)
    assert all(trickling.matches(stream, received) for received in range(len(stream) + 1))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_byte_of_the_framing_is_looked_at_and_none_of_the_values(strategy: Strategy) -> None:
    plan, slab, stream = one_slab(strategy)
    frame = framing(plan, slab)
    for at in sorted(frame | set(range(0, len(stream), 7))):
        for flip in (1, stream[at] or 1):  # another byte, and NUL
            wrong = stream.copy()
            wrong[at] ^= flip
            assert stream_check(slab).matches(wrong, len(wrong)) is (at not in frame), at
            # What has not arrived is not judged; what has is judged at once.
            check = stream_check(slab)
            assert check.matches(wrong, at)
            assert check.matches(wrong, at + 1) is (at not in frame), at


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_what_passes_has_the_right_framing_byte_for_byte(data: st.DataObject) -> None:
    rows = np.array(data.draw(st.lists(st.integers(0, 29), min_size=1, max_size=12)))
    plan, slab, stream = one_slab(data.draw(st.sampled_from(STRATEGIES)), rows)
    wrong = stream.copy()
    for at in data.draw(st.lists(st.integers(0, len(wrong) - 1), max_size=4)):
        wrong[at] = data.draw(st.sampled_from([0, 10, 13, 36, 48, 49, 255]))
    frame = sorted(framing(plan, slab))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wrong)), max_size=5)))
    check = stream_check(slab)
    passed = all(check.matches(wrong, cut) for cut in (*cuts, len(wrong)))
    assert passed is bool((wrong[frame] == stream[frame]).all())


REPLIES: list[tuple[bytes, Reply]] = [
    (b"$3\r\nabc\r\n", BulkReply(b"abc")),
    (b"$0\r\n\r\n", BulkReply(b"")),
    (b"$-1\r\n", BulkReply(None)),
    (b"$4\r\n\r\n$1\r\n", BulkReply(b"\r\n$1")),
    (b"-ERR something\xff\r\n", ErrorReply("ERR something�")),
    (b"-\r\n", ErrorReply("")),
    (b"+OK\r\n", OtherReply("+OK")),
    (b":-12\r\n", OtherReply(":-12")),
    (b"*2\r\n", OtherReply("*2")),
    (b"*-1\r\n", OtherReply("*-1")),
]


def test_replies_are_parsed_cut_at_every_position() -> None:
    stream = b"".join(raw for raw, _ in REPLIES)
    expected = [reply for _, reply in REPLIES]
    for cut in range(len(stream) + 1):
        parser = ReplyParser(100)
        parser.feed(stream[:cut])
        found = list(parser.replies())
        assert found == expected[: len(found)]
        parser.feed(stream[cut:])
        assert [*found, *parser.replies()] == expected
        assert not parser.pending


def test_replies_are_parsed_from_single_bytes() -> None:
    parser, found = ReplyParser(100), []
    for raw, _ in REPLIES:
        for byte in raw:
            assert isinstance(parser.next_reply(), NeedData)
            parser.feed(bytes([byte]))
            found += parser.replies()
    assert found == [reply for _, reply in REPLIES]


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 400 Bad Request\r\n",
        b"\r\n",
        b"\0\0\0\0\r\n",
        b"%3\r\n",
        b"_\r\n",
        b">2\r\n",
        b"$\r\n",
        b"$abc\r\n",
        b"$-2\r\n",
        b"$--1\r\n",
        b"$+3\r\nabc\r\n",
        b"$ 3\r\nabc\r\n",
        b"$3 \r\nabc\r\n",
        b"$1.5\r\n",
        "$٣\r\n".encode(),
        b"$3\r\nabcd\r\n",
        b"$3\r\nabc\n\r",
        b"$99999999999999999999\r\n",
    ],
    ids=repr,
)
def test_bytes_that_are_no_reply_are_refused(raw: bytes) -> None:
    parser = ReplyParser(100)
    parser.feed(raw)
    with pytest.raises(ProtocolError):
        list(parser.replies())


def test_a_huge_announced_length_is_refused_before_anything_is_stored() -> None:
    tracemalloc.start()
    try:
        for length in (101, 10**6, 999_999_999_999):
            parser = ReplyParser(100)
            parser.feed(b"$%d\r\n" % length)
            with pytest.raises(
                ProtocolError, match=f"a string of {length} bytes is announced, at most 100 were asked for"
            ):
                parser.next_reply()
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_line_without_an_end_is_refused_once_it_is_too_long() -> None:
    parser = ReplyParser(100)
    parser.feed(b"-" + b"x" * 1000)
    assert parser.next_reply() is NEED_DATA
    parser.feed(b"x" * (1 << 16))
    with pytest.raises(ProtocolError, match="no line end"):
        parser.next_reply()


def test_a_reply_as_long_as_allowed_is_taken() -> None:
    parser = ReplyParser(100)
    parser.feed(b"$100\r\n" + b"x" * 100 + b"\r\n")
    assert parser.next_reply() == BulkReply(b"x" * 100)


def pieces(data: bytes, cuts: list[int]) -> Iterator[bytes]:
    bounds = [0, *sorted(cuts), len(data)]
    yield from (data[a:b] for a, b in itertools.pairwise(bounds))


@settings(max_examples=150, deadline=None)
@given(
    values=st.lists(st.one_of(st.none(), st.binary(max_size=20)), max_size=6),
    cuts=st.lists(st.integers(0, 200), max_size=6),
)
def test_any_values_survive_any_cuts(values: list[bytes | None], cuts: list[int]) -> None:
    stream = b"".join(b"$-1\r\n" if value is None else b"$%d\r\n%b\r\n" % (len(value), value) for value in values)
    parser, found = ReplyParser(20), []
    for piece in pieces(stream, [min(cut, len(stream)) for cut in cuts]):
        parser.feed(piece)
        found += parser.replies()
    assert found == [BulkReply(value) for value in values]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.one_of(st.binary(max_size=12), st.sampled_from([b"$3\r\n", b"\r\n", b"$-1\r\n", b"*1\r\n"])), max_size=8
    )
)
def test_noise_is_parsed_refused_or_waited_on_and_nothing_else(noise: list[bytes]) -> None:
    parser = ReplyParser(20)
    for piece in noise:
        parser.feed(piece)
        try:
            list(parser.replies())
        except ProtocolError:
            return
