"""Ranks read their shards of what ``TensorDictStore`` wrote as they do of data sets of ours."""

from __future__ import annotations

from typing import Any

import placement_cases as cases
import pytest
import torch
from placement_cases import S0, S1, S2, R
from rows_in_memory import random_rows
from servers import ServerProcess
from stores import write_store
from tensordict import TensorDict
from worlds import Worlds

ROWS = 43
SHARDED = {"tokens": (S0, S1), "image": (S0, S2), ("next", "state"): (S0, S1)}


@pytest.fixture
def store(valkey_server: ServerProcess, unique_name: str) -> tuple[str, TensorDict]:
    """URL and rows. Dims of 5 and 3 do not divide."""
    fields: dict[Any, Any] = {
        "tokens": (torch.int16, (5,)),
        "image": (torch.uint8, (3, 7)),
        ("next", "state"): (torch.float16, (5, 2)),
        "label": (torch.bool, ()),
    }
    td = random_rows(ROWS, fields)
    td["row"] = torch.arange(ROWS)
    return write_store(valkey_server, td, unique_name), td


@pytest.mark.parametrize(
    ("mesh", "placements", "sampler"),
    [((2,), None, "block"), ((2,), {"tokens": (S1,), "image": (S2,)}, "rows"), ((2, 2), SHARDED, "block")],
)
@pytest.mark.parametrize("options", [{}, {"prefetch_bytes": 0, "strategy": "pipelined"}, {"strategy": "lua"}], ids=str)
def test_what_the_ranks_read_is_the_global_batch(
    worlds: Worlds,
    store: tuple[str, TensorDict],
    mesh: tuple[int, ...],
    placements: Any,
    sampler: str,
    options: dict[str, Any],
) -> None:
    if placements is not None:
        whole = tuple(R if axis else placement for axis, placement in enumerate(placements["tokens"]))
        others = (R,) * len(mesh) if whole[0] is S1 else (S0, R)
        placements = dict.fromkeys(("label", "row", ("next", "state")), others) | placements
    size = torch.Size(mesh).numel()
    worlds.of(size).run(cases.fetch_shards, *store, mesh, placements, sampler, options)


def test_one_rank_of_a_replica_group_reads(worlds: Worlds, store: tuple[str, TensorDict]) -> None:
    counted = worlds.of(2).run(cases.read_once, *store, (1, 2), "tp", 1 << 20)
    assert [rank for rank, count in enumerate(counted) if count] == [0]
