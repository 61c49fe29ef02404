"""Each rank reads just what it keeps of a batch: rows of its data rank, bytes of its part of a row."""

from __future__ import annotations

from typing import Any

import placement_cases as cases
import pytest
import torch
from placement_cases import S0, S1, S2, R
from rows_in_memory import random_rows
from servers import ServerProcess
from tensordict import TensorDict
from worlds import Worlds

from td_datapipes import write_dataset

ROWS = 43
GRID: list[tuple[tuple[int, ...], Any, str]] = [
    ((2,), None, "block"),
    ((2,), {"tokens": (S1,), "image": (S2,), ("next", "state"): (S1,), "label": (R,), "row": (R,)}, "rows"),
    ((4,), None, "rows"),
    ((2, 2), None, "block"),
    ((2, 2), {"tokens": (S0, S1), "image": (S0, S2), ("next", "state"): (S0, S1)}, "block"),
    ((2, 2), (S0, S0), "rows"),
    ((4,), {"tokens": (S1,), "image": (S1,), ("next", "state"): (S1,), "label": (R,), "row": (R,)}, "block"),
    ((2, 4), {"tokens": (S0, S1), "image": (S0, S1), ("next", "state"): (S0, S1)}, "block"),
    ((2, 2, 2), {"tokens": (S0, S1, R), "image": (S0, S1, S2), ("next", "state"): (S0, S1, S1)}, "rows"),
]


def small_rows() -> TensorDict:
    """Dims of 5 and 3 do not divide; dtypes that collectives refuse."""
    fields: dict[Any, Any] = {
        "tokens": (torch.int16, (5,)),
        "image": (torch.float8_e4m3fn, (3, 7)),
        ("next", "state"): (torch.bfloat16, (5, 2)),
        "label": (torch.bool, ()),
    }
    td = random_rows(ROWS, fields)
    td["row"] = torch.arange(ROWS)
    return td


def large_rows() -> TensorDict:
    """A context of 16 times 8 KB, and a label."""
    return random_rows(24, {"context": (torch.uint8, (4, 4, 8192)), "label": (torch.int64, ())})


@pytest.fixture
def small(valkey_server: ServerProcess, unique_name: str) -> tuple[str, TensorDict]:
    """URL and rows."""
    td = small_rows()
    write_dataset(td, valkey_server.url(unique_name), chunk_bytes=1024)
    return valkey_server.url(unique_name), td


@pytest.fixture
def large(valkey_server: ServerProcess, unique_name: str) -> tuple[str, TensorDict]:
    """URL and rows."""
    td = large_rows()
    write_dataset(td, valkey_server.url(unique_name))
    return valkey_server.url(unique_name), td


@pytest.mark.parametrize(("mesh", "placements", "sampler"), GRID)
def test_what_the_ranks_read_is_the_global_batch(
    worlds: Worlds, small: tuple[str, TensorDict], mesh: tuple[int, ...], placements: Any, sampler: str
) -> None:
    size = torch.Size(mesh).numel()
    worlds.of(size).run(cases.fetch_shards, *small, mesh, placements, sampler, {})


@pytest.mark.parametrize("options", [{"prefetch_bytes": 0}, {"strided": True}, {"strategy": "pipelined"}])
def test_ways_to_read(worlds: Worlds, small: tuple[str, TensorDict], options: dict[str, Any]) -> None:
    placements = {"tokens": (S0, S1), "image": (S0, S2), ("next", "state"): (S0, S1)}
    worlds.of(4).run(cases.fetch_shards, *small, (2, 2), placements, "block", options)


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [
        ((2,), (S0,)),  # whole rows
        ((2, 2), {"context": (S0, S1), "label": (S0, R)}),  # one range a row: half of the leading dim
        ((2, 2), {"context": (S0, S2), "label": (S0, R)}),  # four ranges a row, of 16 KB each
        ((4,), {"context": (S2,), "label": (R,)}),  # of 8 KB
        ((2, 2, 2), {"context": (S0, S1, S2), "label": (S0, R, R)}),
    ],
)
def test_no_rank_reads_more_than_it_keeps(
    worlds: Worlds, large: tuple[str, TensorDict], mesh: tuple[int, ...], placements: Any
) -> None:
    size = torch.Size(mesh).numel()
    options = {"strategy": "pipelined"}
    for read, kept in worlds.of(size).run(cases.fetch_shards, *large, mesh, placements, "rows", options):
        assert kept <= read <= 1.02 * kept


def test_short_ranges_close_gaps_within_the_row(worlds: Worlds, small: tuple[str, TensorDict]) -> None:
    # Half of each of 3 lines of 7 bytes: cheaper read as one range with the gaps between.
    placements = {"image": (S0, S2), "tokens": (S0, S1), ("next", "state"): (S0, S1)}
    row_bytes = 2 * 5 + 3 * 7 + 2 * 10 + 1 + 8
    for read, kept in worlds.of(4).run(
        cases.fetch_shards, *small, (2, 2), placements, "rows", {"strategy": "pipelined"}
    ):
        assert kept < read <= 22 * (row_bytes + 32)


@pytest.mark.parametrize("prefetch_bytes", [0, 1 << 20])
@pytest.mark.parametrize(
    ("mesh", "axis", "reading"), [((2, 2), "tp", [0, 2]), ((1, 2), "tp", [0]), ((2, 1), "tp", [0, 1])]
)
def test_one_rank_of_a_replica_group_reads(
    worlds: Worlds,
    small: tuple[str, TensorDict],
    mesh: tuple[int, ...],
    axis: str,
    reading: list[int],
    prefetch_bytes: int,
) -> None:
    size = torch.Size(mesh).numel()
    counted = worlds.of(size).run(cases.read_once, *small, mesh, axis, prefetch_bytes)
    assert [rank for rank, count in enumerate(counted) if count] == reading


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("other rows", "ConfigurationError (ValueError)", "rank 0 reads 2 rows for rank 1, which asks for 2 others"),
        ("fewer rows", "ConfigurationError (ValueError)", "rank 0 reads 3 rows for rank 1, which asks for 2:"),
        ("lost", "DataLossError", "the chunk is missing or empty"),
        ("sharded", "ConfigurationError (ValueError)", "needs fields that all ranks along that axis hold alike"),
    ],
)
def test_all_ranks_of_a_group_hear_what_is_wrong(
    worlds: Worlds, small: tuple[str, TensorDict], kind: str, error: str, message: str
) -> None:
    for text in worlds.of(2).run(cases.read_once_fails, small[0], kind, seconds=15):
        assert text.startswith(error)
        assert message in text


def test_a_reading_rank_does_not_wait_for_ever(worlds: Worlds, small: tuple[str, TensorDict]) -> None:
    text, _ = worlds.of(2).run(cases.read_once_fails, small[0], "alone", seconds=20, spoils=True)
    assert text.startswith("PeerTimeoutError")
    assert "sharing 1 rows" in text


def test_workers_read_and_the_main_process_places(worlds: Worlds, small: tuple[str, TensorDict]) -> None:
    texts = worlds.of(2).run(cases.in_workers, *small, seconds=60)
    assert [text.count("DTensorCollate places batches in the process that made the mesh") for text in texts] == [2, 1]
    assert [text.count("read_once_per cannot be used in a DataLoader worker") for text in texts] == [1, 1]


def test_a_loader_resumes_where_it_stood(worlds: Worlds, small: tuple[str, TensorDict]) -> None:
    world = worlds.of(4)
    ((whole, _, _), *_) = world.run(cases.epoch_rows, small[0], (2, 2), None, None, None)
    begun = world.run(cases.epoch_rows, small[0], (2, 2), 2, None, None)
    resumed = world.run(cases.epoch_rows, small[0], (2, 2), None, [state for _, state, _ in begun], None)
    assert begun[0][0] + resumed[0][0] == whole
    assert len(whole) == 6  # 43 rows, 8 a global batch
    assert sorted({row for batch in whole for row in batch}) == list(range(ROWS))


def test_another_mesh_goes_on_in_the_same_order(worlds: Worlds, small: tuple[str, TensorDict]) -> None:
    ((first, _, cursor), *_) = worlds.of(2).run(cases.epoch_rows, small[0], (2,), 2, None, None)
    ((rest, _, _), *_) = worlds.of(4).run(cases.epoch_rows, small[0], (4,), None, None, cursor)
    ((alike, _, _), *_) = worlds.of(4).run(cases.epoch_rows, small[0], (2, 2), None, None, cursor)
    seen = [row for batch in first for row in batch]
    left = [row for batch in rest for row in batch]
    assert len(seen) == 16
    assert set(seen) | set(left) == set(range(ROWS))
    assert not set(seen) & set(left[: ROWS - 16])
    # Two data ranks or four: the order of rows is the same, cut into global batches of 8 or of 16.
    assert [sorted(batch) for batch in alike[:2]] == [sorted(alike[0]), sorted(alike[1])]
    assert sorted(rest[0]) == sorted(alike[0] + alike[1])
