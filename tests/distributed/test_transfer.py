"""`send_dtensors` and `recv_dtensors` on real ranks: what arrives is what was sent, bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transfer_cases as cases
from worlds import Worlds

SHAPES = [(5, 3), (1,), (), (2, 0), (7, 2, 3)]
SQUARE = [[0, 1], [2, 3]]
ROUTES: list[tuple[int, Any, Any, str]] = [
    (4, [0, 1], [2, 3], "optimal"),
    (4, [0, 1], [2, 3], "redistribute"),
    (4, [0, 1], [2, 3], "materialize"),
    (6, [0, 1], [2, 3, 4, 5], "optimal"),
    (6, [0, 1], [2, 3, 4, 5], "materialize"),
    (6, [0, 1, 2, 3], [4, 5], "optimal"),
    (6, [5, 1, 2, 3], [4, 0], "optimal"),
    (6, [0], [1, 2, 3, 4], "optimal"),
    (8, SQUARE, [4, 5, 6, 7], "optimal"),
    (8, SQUARE, [4, 5, 6, 7], "materialize"),
    (8, SQUARE, [[4, 5], [6, 7]], "optimal"),
    (8, SQUARE, [[4, 5], [6, 7]], "redistribute"),
    # Ranks on both sides.
    (4, [0, 1], [1, 2], "optimal"),
    (4, [0, 1], [1, 2], "redistribute"),
    (4, [0, 1], [1, 2], "materialize"),
    (4, SQUARE, SQUARE, "optimal"),
    (4, SQUARE, SQUARE, "redistribute"),
    (4, SQUARE, [3, 2, 1, 0], "optimal"),
    (4, [0, 1, 2, 3], [2, 1], "optimal"),
]


def numel(mesh: Any) -> list[int]:
    return torch.tensor(mesh).flatten().tolist()


@pytest.mark.parametrize(("size", "src", "dst", "strategy"), ROUTES)
def test_every_placement_arrives(worlds: Worlds, size: int, src: Any, dst: Any, strategy: str) -> None:
    shapes = [shape for shape in SHAPES if len(shape) < 3 or size < 8]
    axes = torch.tensor(src).ndim + torch.tensor(dst).ndim
    compared = sum((1 + len(shape)) ** axes for shape in shapes)
    counts = worlds.of(size).run(cases.grid, src, dst, strategy, shapes, seconds=80)
    assert counts == [compared if rank in numel(dst) else 0 for rank in range(size)]


@pytest.mark.parametrize("strategy", ["optimal", "redistribute", "materialize"])
def test_long_slices_with_and_without_gaps(worlds: Worlds, strategy: str) -> None:
    worlds.of(4).run(cases.long_slices, [0, 1], [2, 3], strategy, seconds=60)


def test_long_slices_to_another_mesh(worlds: Worlds) -> None:
    worlds.of(4).run(cases.long_slices, [[0, 1], [2, 3]], [3, 0, 1, 2], "optimal", seconds=60)


@pytest.mark.parametrize("strategy", ["auto", "optimal", "redistribute", "materialize"])
def test_trees_of_all_kinds_of_leaves(worlds: Worlds, strategy: str) -> None:
    texts = worlds.of(4).run(cases.tree, [0, 1], [2, 3], strategy)
    chosen = "optimal" if strategy == "auto" else strategy
    assert texts == [chosen] * 4


def test_trees_to_a_receiver_without_a_mesh(worlds: Worlds) -> None:
    assert worlds.of(4).run(cases.tree_without_mesh, [0, 1], 3) == ["materialize", "materialize", "", "materialize"]


def test_partial_and_strided_placements(worlds: Worlds) -> None:
    assert worlds.of(4).run(cases.odd_placements) == [["redistribute", "materialize", "materialize"]] * 4


def test_schemas_are_described_once(worlds: Worlds) -> None:
    # Two schemas by turns, ten transfers.
    assert worlds.of(4).run(cases.many_batches, [0, 1], [2, 3]) == [2] * 4


def test_small_fields_travel_together(worlds: Worlds) -> None:
    # 20 fields of 3 KB, and one of 96 KB that goes by itself.
    assert worlds.of(4).run(cases.count_messages, [0, 1], [2, 3]) == [2, 2, 0, 0]


@pytest.mark.parametrize(("strategy", "wanted"), [("optimal", 0), ("optimal", 1), ("redistribute", 0)])
def test_a_sender_needs_little_more_than_its_shard(worlds: Worlds, strategy: str, wanted: int) -> None:
    peaks = worlds.of(4).run(cases.peak_of_sender, [0, 1], [2, 3], strategy, wanted)
    for peak in peaks[:2]:
        assert 1 <= peak <= 1.2


def test_materialising_needs_the_whole_batch_beside_the_shard(worlds: Worlds) -> None:
    # Shows too that the test above measures something.
    for peak in worlds.of(4).run(cases.peak_of_sender, [0, 1], [2, 3], "materialize", 0)[:2]:
        assert 2.9 <= peak <= 8


@pytest.mark.parametrize("strategy", ["optimal", "materialize"])
def test_a_receiver_without_rows_gets_an_empty_shard(worlds: Worlds, strategy: str) -> None:
    shapes = worlds.of(6).run(cases.five_rows, [0, 1], [2, 3, 4, 5], strategy)
    assert shapes[2:] == [[(rows,), (rows, 3), (rows, 0)] for rows in (2, 2, 1, 0)]
