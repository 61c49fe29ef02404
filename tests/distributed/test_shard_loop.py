"""Loader ranks feed trainer ranks, out of a real server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import loop_cases as cases
import pytest
import torch
from rows_in_memory import random_rows
from servers import ServerProcess
from tensordict import TensorDict
from worlds import World, Worlds

from td_datapipes import write_dataset

ROWS = 43
BATCHES = 12
"""Two epochs: 43 rows over 2 loaders, 4 rows each a batch."""


@pytest.fixture
def data(valkey_server: ServerProcess, unique_name: str) -> tuple[str, TensorDict]:
    """URL and rows."""
    fields: dict[Any, Any] = {"tokens": (torch.int16, (5,)), ("next", "state"): (torch.bfloat16, (3, 2))}
    rows = random_rows(ROWS, fields)
    rows["row"] = torch.arange(ROWS)
    write_dataset(rows, valkey_server.url(unique_name), chunk_bytes=1024)
    return valkey_server.url(unique_name), rows


@pytest.mark.parametrize("strategy", ["auto", "redistribute", "materialize"])
def test_two_loaders_feed_two_trainers(worlds: Worlds, data: tuple[str, TensorDict], strategy: str) -> None:
    found = worlds.of(4).run(cases.feed, *data, [0, 1], [2, 3], {"strategy": strategy})
    assert found == [(BATCHES, "optimal" if strategy == "auto" else strategy)] * 4


@pytest.mark.parametrize(
    ("size", "src", "dst"), [(6, [0, 1], [2, 3, 4, 5]), (6, [4, 5], [[0, 1], [2, 3]]), (4, [2], [0, 1, 3])]
)
def test_other_numbers_of_ranks(
    worlds: Worlds, data: tuple[str, TensorDict], size: int, src: list[int], dst: Any
) -> None:
    found = worlds.of(size).run(cases.feed, *data, src, dst, {})
    batches = 2 * -(-ROWS // (4 * len(src)))
    assert found == [(batches, "optimal")] * size


def test_a_group_of_its_own_within_a_larger_world(worlds: Worlds, data: tuple[str, TensorDict]) -> None:
    found = worlds.of(6).run(cases.feed, *data, [5, 1], [2, 4], {}, False, [1, 2, 4, 5])
    assert found == [(0, ""), *[(BATCHES, "optimal")] * 2, (0, ""), *[(BATCHES, "optimal")] * 2]


def test_through_a_dataloader_and_the_collate_hook(worlds: Worlds, data: tuple[str, TensorDict]) -> None:
    found = worlds.of(4).run(cases.feed, *data, [0, 1], [2, 3], {"strategy": "redistribute"}, True)
    assert found == [(BATCHES, "redistribute")] * 4


@pytest.mark.parametrize("kind", ["DataLoader", "StatefulDataLoader"])
@pytest.mark.parametrize(("consumed", "past_end"), [(1, False), (3, False), (6, False), (6, True), (8, False)])
def test_trainers_go_on_behind_what_they_consumed(
    worlds: Worlds, data: tuple[str, TensorDict], consumed: int, past_end: bool, kind: str
) -> None:
    assert worlds.of(4).run(cases.resume, *data, consumed, past_end, kind) == [0, 0, BATCHES, BATCHES]


def test_a_long_pause_of_training_is_no_timeout(worlds: Worlds, data: tuple[str, TensorDict]) -> None:
    found = worlds.of(4).run(cases.busy_trainers, data[0])
    assert [batches for _, batches in found] == [0, 0, 6, 6]


def test_trainers_may_stop_early(worlds: Worlds) -> None:
    found = worlds.of(4).run(cases.trainers_stop_early)
    assert {transfers for transfers, _ in found} <= {2, 3, 4, 5}
    assert len({transfers for transfers, _ in found}) == 1


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("lost", "rank 1: chunk 3 of field 'x' is missing"),
        ("key", "rank 1 failed: KeyError: 'no such column'"),
    ],
)
def test_what_a_loader_meets_is_raised_everywhere(worlds: Worlds, tmp_path: Path, kind: str, error: str) -> None:
    found = worlds.of(4).run(cases.one_loader_fails, kind, str(tmp_path), spoils=True)
    for rank in (0, 2, 3):
        text, seen = found[rank]
        assert text.startswith("PeerError" if kind == "key" else "DataLossError")
        assert text.endswith(error)
        assert seen == ([0, 1, 2] if rank in (2, 3) else [])  # at the same step
    assert ("KeyError" if kind == "key" else "DataLossError") in found[1][0]


def test_a_killed_loader_gives_every_trainer_a_named_error(tmp_path: Path) -> None:
    world = World(4)
    with pytest.raises(AssertionError) as failed:
        world.run(cases.one_loader_fails, "killed", str(tmp_path), seconds=20)
    assert "rank 1: the process ended" in str(failed.value)
    assert "rank 2:" not in str(failed.value)
    for rank in (0, 2, 3):
        text, seen = json.loads((tmp_path / f"{rank}.json").read_text())
        assert text.startswith("PeerTimeoutError")
        assert "rank 1" in text
        assert seen in ([], [0], [0, 1], [0, 1, 2])


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("placements", "the ranks disagree about the wanted placements: rank 0 has (Shard(dim=0),)"),
        ("strategy", "the ranks disagree about the strategy: rank 0 has optimal, rank 2 redistribute"),
        ("batches", "rank 1 has come to the end of its epoch, and rank 0 sends another batch"),
        ("states", "rank 2 from epoch 0, batch 2, rank 3 from epoch 0, batch 3"),
        ("no state", "the trainers go on from epoch 0, batch 1, and loader rank"),
        ("trainer", "the checkpoint is gone"),
    ],
)
def test_ends_that_do_not_fit_raise_on_all_ranks(worlds: Worlds, kind: str, error: str) -> None:
    for text in worlds.of(4).run(cases.ends_disagree, kind, spoils=True):
        assert error in text
