"""Slabs cut by who has their chunks, and hash tags that cover the masters evenly: nothing is sent."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from chunks_in_memory import ChunksInMemory
from hypothesis import given, settings
from hypothesis import strategies as st
from rows_in_memory import assert_same_tensor, random_rows

from td_datapipes.cost import ReadCost
from td_datapipes.errors import SchemaError, ServerNotReadyError
from td_datapipes.plan import ReadPlan, Strategy, plan_read
from td_datapipes.split import split_slab
from td_datapipes.wire.cluster import NUM_SLOTS, Node, SlotMap, choose_tags, parse_node, slot_of

FIELDS = {"a": (torch.uint8, (3,)), "b": (torch.float32, (2,)), "c": (torch.uint8, (70,)), "e": (torch.int8, (0,))}
TD = random_rows(40, FIELDS, seed=5)
WHOLE = ChunksInMemory(TD, chunk_bytes=96 * 4)
IN_PIECES = ChunksInMemory(TD, chunk_bytes=32)
KEYS = [None, [("a",), ("c",)], [("c",)]]
ASKED = Node("seed", 1)


def cut(plan: ReadPlan, owners: int) -> ReadPlan:
    """The plan as its parts, in the order in which the owners' answers come: the last owner's first."""
    parts = []
    for slab in plan.slabs:
        found = list(split_slab(slab, lambda _, chunks: chunks % owners))
        assert [number for number, _ in found] == sorted({number for number, _ in found})
        for number, part in reversed(found):
            assert set((part.ranges().chunks % owners).tolist()) == {number}
            assert part.stream_bytes > 0
            parts.append(part)
    assert sum(part.num_bytes for part in parts) == plan.num_bytes
    assert sum(part.num_ranges for part in parts) == plan.num_ranges
    return replace(plan, slabs=tuple(parts))


@settings(max_examples=300, deadline=None)
@given(
    rows=st.lists(st.integers(0, 39), min_size=1, max_size=60),
    in_order=st.booleans(),
    strategy=st.sampled_from(["auto", "pipelined", "covering", "lua"]),
    owners=st.integers(1, 5),
    keys=st.sampled_from(KEYS),
    max_gap_bytes=st.sampled_from([0, 40, 2000]),
    slab_bytes=st.sampled_from([200, 1 << 20]),
    strided=st.booleans(),
)
def test_the_parts_of_a_plan_fill_the_batch_that_the_plan_fills(
    rows: list[int],
    in_order: bool,
    strategy: Strategy,
    owners: int,
    keys: list[tuple[str, ...]] | None,
    max_gap_bytes: int,
    slab_bytes: int,
    strided: bool,
) -> None:
    wanted = np.array(sorted(set(rows)) if in_order else rows, dtype=np.int64)
    spec = WHOLE.spec(keys, max_gap_bytes)
    plan = plan_read(wanted, spec, ReadCost(), strategy=strategy, slab_bytes=slab_bytes)
    read = WHOLE.read(cut(plan, owners), spec, strided=strided)
    for output in spec.outputs:
        assert_same_tensor(read[output.key], TD.get(output.key)[wanted], output.key)


@pytest.mark.parametrize("strategy", ["pipelined", "covering"])
def test_all_pieces_of_a_long_row_are_one_owners(strategy: Strategy) -> None:
    pieces = IN_PIECES.manifest.layouts[0].pieces
    assert pieces == 3
    spec = IN_PIECES.spec()
    plan = plan_read(np.array([7, 3, 3, 38]), spec, ReadCost(), strategy=strategy, slab_bytes=1 << 20)
    parts = [part for slab in plan.slabs for _, part in split_slab(slab, lambda _, chunks: chunks // pieces % 2)]
    assert len(parts) == 2
    read = IN_PIECES.read(replace(plan, slabs=tuple(parts)), spec)
    assert_same_tensor(read[("c",)], TD["c"][[7, 3, 3, 38]])
    with pytest.raises(SchemaError, match="in several shards"):
        list(split_slab(plan.slabs[0], lambda _, chunks: chunks % 2))


def slots_of(*shares: tuple[int, int, int]) -> SlotMap:
    """(first, last, port) a range."""
    return SlotMap.from_reply([[first, last, [b"h", port, b"id"]] for first, last, port in shares], ASKED)


def test_slots_and_redirections_are_read_as_servers_write_them() -> None:
    reply = [
        [0, 99, [b"10.0.0.1", 7000, b"a", []], [b"10.0.0.4", 7001, b"d", []]],
        [200, 16383, [b"", 7002, b"b"], [None, 7005, b"f"]],
        [100, 149, [b"10.0.0.1", 7000, b"a"]],
    ]
    slots = SlotMap.from_reply(reply, ASKED)
    first, second = Node("10.0.0.1", 7000), Node("seed", 7002)
    assert slots.nodes == (first, second)
    assert slots.replicas == ((Node("10.0.0.4", 7001),), (Node("seed", 7005),))
    assert [slots.master(slot) for slot in (0, 99, 149, 200, 16383)] == [first, first, first, second, second]
    assert slots.slots_of(first).tolist() == list(range(150))
    with pytest.raises(ServerNotReadyError, match="slot 150 of the cluster is not served"):
        slots.master(150)
    assert parse_node("10.0.0.9:7009", ASKED) == Node("10.0.0.9", 7009)
    assert parse_node(":7009", ASKED) == Node("seed", 7009)
    assert parse_node("fd00::1:7009", ASKED) == Node("fd00::1", 7009)


def test_the_slot_of_a_key_is_that_of_its_tag() -> None:
    # From the cluster specification: CRC16 of "123456789" is 0x31C3.
    assert slot_of(b"123456789") == 0x31C3
    assert slot_of(b"td:{123456789}:0:00000000") == slot_of(b"td:{123456789}:fence") == 0x31C3
    # Nothing between the first braces: all of the key counts, and later braces do not.
    assert slot_of(b"td:{}:x{123456789}") not in (0x31C3, slot_of(b"td:{}:x"))


EVEN = slots_of((0, 5460, 1), (5461, 10922, 2), (10923, 16383, 3))
UNEVEN = slots_of((0, 0, 1), (1, 1000, 2), (1001, 9000, 3), (9001, 9005, 1), (9006, 16383, 4))


@pytest.mark.parametrize("slots", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("count", [1, 3, 12, 50])
def test_tags_cover_the_masters_evenly_and_in_turn(slots: SlotMap, count: int) -> None:
    tags = choose_tags(slots, "0a1b2c3d4e", count)
    assert len(set(tags)) == count
    assert all(tag.startswith(f"0a1b2c3d4e.{shard}") for shard, tag in enumerate(tags))
    masters = [int(slots.owner[slot_of(tag.encode())]) for tag in tags]
    assert masters == [shard % len(slots.nodes) for shard in range(count)]


def test_the_shards_of_a_master_are_spread_over_its_slots() -> None:
    found = sorted(slot_of(tag.encode()) for tag in choose_tags(EVEN, "id", 24))
    # Eight a master, each in an eighth of its slots: after adding three masters, each of six has four.
    assert Counter(slot * 24 // NUM_SLOTS for slot in found) == Counter(range(24))


def test_a_cluster_without_slots_is_named() -> None:
    with pytest.raises(ServerNotReadyError, match="no node that serves slots"):
        choose_tags(SlotMap.from_reply([], ASKED), "id", 3)
