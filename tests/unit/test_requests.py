"""Requests, read back as a server reads them."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from chunks_in_memory import ChunksInMemory
from hypothesis import given, settings
from hypothesis import strategies as st
from rows_in_memory import random_rows

from td_datapipes.cost import ReadCost
from td_datapipes.manifest import SPARE_BYTES, ChunkLayout
from td_datapipes.plan import ReadPlan, Strategy, plan_read
from td_datapipes.read_spec import Copy, Output, ReadSpec, Segment
from td_datapipes.slabs import Slab
from td_datapipes.wire.requests import EARLY_RANGES, MAX_EARLY_RANGES, MAX_TABLE_ENTRIES, RequestBuilder, bulk
from td_datapipes.wire.scripts import load_script

CHUNKS = ChunksInMemory(
    random_rows(50, {"a": (torch.uint8, (5,)), "b": (torch.float32, (200,)), "c": (torch.int64, (300,))}),
    chunk_bytes=800 * 5,
    groups=[[("a",), ("c",)], [("b",)]],
)


def commands(data: bytes) -> list[list[bytes]]:
    """The commands of a request, parsed as RESP2 arrays of strings; nothing may be left over."""
    found, at = [], 0

    def line() -> bytes:
        nonlocal at
        end = data.index(b"\r\n", at)
        text, at = data[at:end], end + 2
        return text

    while at < len(data):
        head = line()
        assert head[:1] == b"*"
        arguments = []
        for _ in range(int(head[1:])):
            size = line()
            assert size[:1] == b"$"
            arguments.append(data[at : at + int(size[1:])])
            at += int(size[1:]) + 2
            assert data[at - 2 : at] == b"\r\n"
        found.append(arguments)
    return found


def request_of(builder: RequestBuilder, plan: ReadPlan, slab: Slab) -> bytes:
    """A slab's request, its parts joined."""
    return b"".join(builder.for_plan(plan)(slab))


def asked_by(builder: RequestBuilder, plan: ReadPlan) -> list[tuple[bytes, int, int]]:
    """Key, first byte and length of every range that the requests of a plan ask for, in order."""
    asked = []
    for slab in plan.slabs:
        for command in commands(request_of(builder, plan, slab)):
            if command[0] == b"GETRANGE":
                _, key, first, last = command
                asked.append((key, int(first), int(last) - int(first) + 1))
            else:
                asked += script_ranges(command)
    return asked


def script_ranges(command: list[bytes]) -> list[tuple[bytes, int, int]]:
    """The ranges of a call of read_ranges.lua or read_columns.lua, by their header comments."""
    assert command[0] == b"EVALSHA"
    number = int(command[2])
    if command[1] == load_script("read_columns").sha.encode():
        rows, columns = np.frombuffer(command[3 + number], dtype="<u4").tolist(), command[4 + number]
        assert len(command) == 5 + number
        assert len(columns) == 12 * number
        return [
            (key, row * stride + first, length)
            for key, (stride, first, length) in zip(
                command[3 : 3 + number], struct.Struct("<III").iter_unpack(columns), strict=True
            )
            for row in rows
        ]
    assert command[1] == load_script("read_ranges").sha.encode()
    keys, packed = command[3 : 3 + number], command[3 + number]
    assert len(command) == 4 + number
    assert len(set(keys)) == number
    entry = struct.Struct("<III")
    return [(keys[key], first, last - first + 1) for key, first, last in entry.iter_unpack(packed)]


def expected(chunks: ChunksInMemory, plan: ReadPlan) -> list[tuple[bytes, int, int]]:
    return [
        (chunks.layout.chunk_key(group, chunk), start, length)
        for slab in plan.slabs
        for group, chunk, start, length in chunks.requests(slab)
    ]


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.integers(0, 49), min_size=1, max_size=30),
    keys=st.sampled_from([None, ["a"], ["b"], ["a", "b"], ["c"]]),
    strategy=st.sampled_from(["pipelined", "covering", "lua"]),
    slab_bytes=st.sampled_from([1, 5000, 1 << 20]),
)
def test_requests_ask_for_the_plans_ranges_in_order(
    rows: list[int], keys: list[str] | None, strategy: Strategy, slab_bytes: int
) -> None:
    builder = RequestBuilder(CHUNKS.layout.chunk_key)
    spec = CHUNKS.spec(keys)
    # Twice: from empty tables and from filled ones.
    for order in (1, -1):
        plan = plan_read(np.array(rows)[::order], spec, ReadCost(), strategy=strategy, slab_bytes=slab_bytes)
        assert asked_by(builder, plan) == expected(CHUNKS, plan)


def test_pieces_are_asked_for_by_their_own_keys() -> None:
    chunks = ChunksInMemory(random_rows(5, {"x": (torch.float64, (100,))}), chunk_bytes=256)
    builder = RequestBuilder(chunks.layout.chunk_key)
    for strategy in ("pipelined", "covering", "lua"):
        plan = plan_read(np.array([4, 1]), chunks.spec(), ReadCost(), strategy=strategy, slab_bytes=1 << 20)
        asked = asked_by(builder, plan)
        assert asked == expected(chunks, plan)
        assert {int(key.rpartition(b":")[2], 16) for key, _, _ in asked} == {4, 5, 6, 7, 16, 17, 18, 19}


def spec_of_16_bytes(records_per_chunk: int, stride_bytes: int = 16) -> ReadSpec:
    return ReadSpec(
        segments=(Segment(group=0, piece=0, start_bytes=0, stop_bytes=16),),
        copies=(Copy(output=0, output_start=0, segment=0, segment_start=0, nbytes=16),),
        outputs=(Output(key=("x",), dtype=torch.uint8, shape=(16,), nbytes=16),),
        layouts=(ChunkLayout.for_stride(stride_bytes, records_per_chunk * stride_bytes, records_per_chunk),),
        spare_bytes=SPARE_BYTES,
    )


@pytest.mark.parametrize(
    ("num_rows", "counts"),
    [(255, [255]), (256, [64, 192]), (511, [127, 384]), (512, [256, 256]), (1000, [500, 500]), (3000, [512, 2488])],
)
def test_a_request_for_many_rows_can_be_sent_before_it_is_whole(num_rows: int, counts: list[int]) -> None:
    assert (EARLY_RANGES, MAX_EARLY_RANGES) == (64, 512)
    builder = RequestBuilder(lambda _group, chunk: b"k%d" % chunk)
    rows = np.arange(0, 2 * num_rows, 2)[::-1]
    plan = plan_read(rows, spec_of_16_bytes(8000), ReadCost(), strategy="pipelined", slab_bytes=1 << 30)
    (slab,) = plan.slabs
    parts = list(builder.for_plan(plan)(slab))
    assert [len(commands(part)) for part in parts] == counts
    starts = [int(command[2]) for part in parts for command in commands(part)]
    assert starts == [16 * row for row in rows]


def test_tables_that_are_full_start_over() -> None:
    num_rows = 2 * MAX_TABLE_ENTRIES + 100
    builder = RequestBuilder(lambda _group, chunk: b"k%d" % chunk)
    plan = plan_read(
        np.arange(num_rows)[::-1], spec_of_16_bytes(1), ReadCost(), strategy="pipelined", slab_bytes=1 << 30
    )
    for _ in range(2):
        asked = asked_by(builder, plan)
        assert [key for key, _, _ in asked] == [b"k%d" % row for row in reversed(range(num_rows))]
        assert {(first, length) for _, first, length in asked} == {(0, 25)}


@pytest.mark.parametrize("num_chunks", [20_000, 70_000])
def test_one_snapshot_may_span_any_number_of_chunks(num_chunks: int) -> None:
    plan = plan_read(
        np.arange(num_chunks), spec_of_16_bytes(1), ReadCost(), strategy="lua", slab_bytes=1 << 20, atomic=True
    )
    asked = asked_by(RequestBuilder(lambda _group, chunk: b"k%d" % chunk), plan)
    assert asked == [(b"k%d" % chunk, 0, 16) for chunk in range(num_chunks)]


def test_far_ranges_of_many_groups_keep_apart() -> None:
    builder = RequestBuilder(lambda group, chunk: b"%d:%d" % (group, chunk))
    spec = spec_of_16_bytes(1 << 14, 1 << 14)
    rows = np.array([0, (1 << 14) - 1, 1 << 14, (1 << 34) - 1])
    for strategy in ("pipelined", "covering", "lua"):
        plan = plan_read(rows, spec, ReadCost(), strategy=strategy, slab_bytes=1 << 30)
        found = [(key, first) for key, first, _ in asked_by(builder, plan)]
        top = ((1 << 14) - 1) << 14
        assert found == [(b"0:0", 0), (b"0:0", top), (b"0:1", 0), (b"0:%d" % ((1 << 20) - 1), top)]


def test_an_argument_travels_with_its_length() -> None:
    assert bulk(b"") == b"$0\r\n\r\n"
    assert bulk(b"a\r\nb") == b"$4\r\na\r\nb\r\n"


def test_scripts_are_named_by_the_digest_of_their_source() -> None:
    script = load_script("read_ranges")
    assert script.source.startswith("-- ")
    assert len(script.sha) == 40
    assert load_script("read_ranges") is script
    assert load_script("publish").sha != script.sha
