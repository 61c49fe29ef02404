"""Transfers that cannot be: both sides say so, in time, and what can go on afterwards does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transfer_fault_cases as cases
from worlds import World, Worlds

MISMATCHES = [
    ("missing key", "the receivers expect 'y': float32[4]"),
    ("more keys", "the senders hold 'y': float32[4] with (Shard(dim=0),), the receivers expect no such field"),
    ("shape", "the senders hold 'x': float32[6] with (Shard(dim=0),), the receivers expect 'x': float32[7]"),
    ("dtype", "the senders hold 'x': float32[6] with (Shard(dim=0),), the receivers expect 'x': float64[6]"),
    ("senders' shapes", "rank 0 has 'x': float32[6] with (Shard(dim=0),), rank 1 'x': float32[8] with (Shard(dim=0),)"),
    ("senders' keys", "rank 0 has no such field, rank 1 'y': float32[4] with (Shard(dim=0),)"),
    ("strategies", "the ranks disagree about the strategy: rank 0 has optimal, rank 2 materialize"),
    ("placements", "the ranks disagree about the wanted placements: rank 2 has (Shard(dim=0),)"),
    ("named", "the receivers expect 'z'; the senders hold 'x'"),
    ("dim", "field 'x' has 1 dims"),
    ("counts", "the 2 senders have (0=2), the 1 receivers (0=1); use 'optimal'"),
    ("values", "the senders hold different non-tensor values: rank 1's are not those of rank 0"),
    ("mesh shapes", "nothing says how it is to lie on the receivers' mesh (0=1)"),
    ("jagged", "field 'y' is a nested (jagged) tensor"),
    ("object", "field 'y' holds a set; non-tensor values travel as JSON"),
]


@pytest.mark.parametrize(("kind", "message"), MISMATCHES)
def test_sides_that_do_not_fit_raise_on_both_and_can_go_on(worlds: Worlds, kind: str, message: str) -> None:
    texts = worlds.of(4).run(cases.mismatch, kind)
    taking_part = [rank for rank, text in enumerate(texts) if text]
    assert taking_part == ([0, 1, 2] if kind in ("counts", "mesh shapes") else [0, 1, 2, 3])
    for rank in taking_part:
        assert message in texts[rank]
        assert texts[rank].startswith(("ConfigurationError (ValueError)", "SchemaError"))


@pytest.mark.parametrize("kind", ["strategy", "timeout", "both sides", "no mesh", "like"])
def test_arguments_are_checked_before_anything_is_sent(worlds: Worlds, kind: str) -> None:
    for text in worlds.of(4).run(cases.refused, kind, spoils=kind == "like"):
        assert text.startswith("ConfigurationError (ValueError)")


def test_who_does_not_come_is_named(worlds: Worlds) -> None:
    texts = worlds.of(4).run(cases.stay_away, spoils=True)
    for rank in (0, 1, 3):
        assert texts[rank].startswith("PeerTimeoutError")
    assert all("rank 2 did not" in text for text in texts if text), texts


def test_who_sends_something_else_is_named(worlds: Worlds) -> None:
    text, _, _, _ = worlds.of(4).run(cases.sends_garbage, spoils=True)
    assert text.startswith("ProtocolError")
    assert "rank 3 sent b'xxxxxxxx" in text


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_many_ranks_meet_in_a_tree(worlds: Worlds, ranks: int) -> None:
    assert worlds.of(ranks).run(cases.meet_in_a_tree) == [[100 + rank for rank in range(ranks)]] * ranks


def test_ranks_at_different_transfers_are_named(worlds: Worlds) -> None:
    first, second, _, _ = worlds.of(4).run(cases.count_differently, spoils=True)
    assert "rank 1 is at transfer 2 of the ranks (0,) to (1,), rank 0 at 1" in first
    assert "rank 0 is at transfer 1" in second


@pytest.mark.parametrize("strategy", ["optimal", "redistribute"])
def test_who_is_killed_amid_the_bytes_is_named_with_field_and_strategy(tmp_path: Path, strategy: str) -> None:
    world = World(4)
    with pytest.raises(AssertionError, match="rank 1: the process ended") as failed:
        world.run(cases.killed_amid, strategy, str(tmp_path), seconds=20)
    assert "rank 2:" not in str(failed.value)
    for rank in (2, 3):
        # Rank 2 has nothing from rank 1 itself where its part is redistributed among the receivers.
        text = json.loads((tmp_path / f"{rank}.json").read_text())
        assert text.startswith("PeerTimeoutError")
        assert f"strategy '{strategy}': receiving 'x' from rank 1" in text


@pytest.mark.parametrize("fails", [False, True])
def test_every_handle_is_awaited(worlds: Worlds, fails: bool) -> None:
    for made, awaited in worlds.of(4).run(cases.count_handles, fails, spoils=fails):
        assert made == awaited
        assert made >= (2 if fails else 4)
