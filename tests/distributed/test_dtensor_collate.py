"""`DTensorCollate` on real ranks: what it makes is what `distribute_tensor` makes, without sending any of it."""

from __future__ import annotations

import placement_cases as cases
import pytest
from worlds import Worlds

MESHES = {2: [(2,), (1, 2)], 4: [(4,), (2, 2)], 8: [(2, 4), (2, 2, 2)]}


@pytest.mark.parametrize("size", [2, 4])
def test_every_placement_is_what_distribute_tensor_gives(worlds: Worlds, size: int) -> None:
    row_shapes = [(), (3,), (2, 5), (4, 0)]
    counts = worlds.of(size).run(cases.collate_grid, MESHES[size], [0, 1, 5, 8], row_shapes)
    assert set(counts) == {sum(4 * sum((2 + len(shape)) ** len(mesh) for shape in row_shapes) for mesh in MESHES[size])}


def test_every_placement_on_eight_ranks(worlds: Worlds) -> None:
    counts = worlds.of(8).run(cases.collate_grid, MESHES[8], [5, 13], [(), (3,)], seconds=60)
    assert set(counts) == {2 * (2**2 + 3**2) + 2 * (2**3 + 3**3)}


def test_nested_and_non_tensor_fields(worlds: Worlds) -> None:
    worlds.of(4).run(cases.collate_tree)


def test_each_rank_keeps_its_own_rows(worlds: Worlds) -> None:
    worlds.of(4).run(cases.collate_own_rows)


@pytest.mark.parametrize(
    ("shape", "total", "expected"),
    [
        ((4,), 5, [2, 2, 1, 0]),
        ((4,), 8, [2, 2, 2, 2]),
        ((4,), 0, [0, 0, 0, 0]),
        ((2, 2), 5, [2, 1, 1, 1]),
    ],
)
def test_uneven_and_empty_shards(worlds: Worlds, shape: tuple[int, ...], total: int, expected: list[int]) -> None:
    for counts in worlds.of(4).run(cases.collate_uneven_rows, shape, total):
        assert counts == expected


def test_a_submesh_is_a_mesh_of_its_own(worlds: Worlds) -> None:
    worlds.of(4).run(cases.collate_on_submesh)


def test_as_collate_fn_as_function_and_as_mapper(worlds: Worlds) -> None:
    worlds.of(2).run(cases.place_with_loaders)


def test_placing_sends_nothing(worlds: Worlds) -> None:
    assert worlds.of(2).run(cases.place_alone, seconds=15) == [4, 0]


@pytest.mark.parametrize(
    ("kind", "sides"),
    [
        ("rows", ["rank 0 (dp=0, tp=0) 4 of a global batch of 8", "rank 2 (dp=1, tp=0) 3 of 6"]),
        ("rows of replicas", ["rank 0 (dp=0, tp=0) 4 of a global batch of 8", "rank 2 (dp=1, tp=0) 3 of 6"]),
        ("dtype", ["rank 0", "'x': float32[] (Shard(0), Replicate())", "rank 2", "'x': float64[]"]),
        ("field", ["rank 0", "'y': float32[2]", "rank 2 (dp=1, tp=0) has no such field"]),
        ("placements", ["(Shard(0), Replicate())", "(Replicate(), Shard(0))"]),
        ("global batch", ["rank 0 (dp=0, tp=0) and rank 2 (dp=1, tp=0)", "axis 'dp'"]),
        ("replicas", ["rank 0 (dp=0, tp=0) and rank 1 (dp=0, tp=1)", "axis 'tp'"]),
        ("error on one", ["rank 2 (dp=1, tp=0) cannot place its batch", "field 'x' is a nested (jagged) tensor"]),
        ("later", ["rank 0 (dp=0, tp=0) 4 of a global batch of 8", "rank 2 (dp=1, tp=0) 2 of 4"]),
    ],
)
def test_every_rank_names_both_sides_of_a_disagreement(worlds: Worlds, kind: str, sides: list[str]) -> None:
    messages = worlds.of(4).run(cases.disagree, kind, seconds=15)
    assert len(set(messages)) == 1
    assert messages[0].startswith("ConfigurationError (ValueError)")
    for side in sides:
        assert side in messages[0]


@pytest.mark.parametrize(
    ("kind", "sides"),
    [
        (
            "seed",
            ['rank 0 (dp=0, tp=0) at {"version": 1, "seed": 0,', 'rank 3 (dp=1, tp=1) at {"version": 1, "seed": 1,'],
        ),
        ("place", ['"rows_consumed": 8', '"rows_consumed": 16']),
        ("epoch", ['"epoch": 0', '"epoch": 3']),
        ("world", ["the sampler deals for rank 0 of 4", "the mesh (dp=2, tp=2) make this rank 0 of 2"]),
    ],
)
def test_samplers_that_disagree_are_named_on_every_rank(worlds: Worlds, kind: str, sides: list[str]) -> None:
    messages = worlds.of(4).run(cases.disagreeing_samplers, kind, seconds=15)
    assert len(set(messages)) == 1
    assert messages[0].startswith("ConfigurationError (ValueError)")
    for side in sides:
        assert side in messages[0]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("axis", "(dp=2, tp=2) has no axis 'cp'"),
        ("mode", "nothing says whether each rank holds the whole batch or its own rows"),
        ("field", "placements name the field 'tokens'; the fields are 'x', 'label'"),
        ("dim", "field 'x' has 1 dims"),
    ],
)
def test_what_cannot_work_is_refused_on_every_rank(worlds: Worlds, kind: str, message: str) -> None:
    for text in worlds.of(4).run(cases.refused_everywhere, kind, seconds=15):
        assert "ConfigurationError (ValueError)" in text
        assert message in text


def test_nobody_waits_for_a_rank_that_stays_away(worlds: Worlds) -> None:
    for text, seconds in worlds.of(4).run(cases.a_rank_stays_away, seconds=20, spoils=True)[:3]:
        assert text.startswith("PeerTimeoutError")
        assert "comparing the batch over the ranks" in text
        assert seconds < 10
