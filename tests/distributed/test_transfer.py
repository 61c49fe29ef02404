"""`send_dtensors` and `recv_dtensors` on real ranks: what arrives is what was sent, bit by bit."""

from __future__ import annotations

import pytest
import transfer_cases as cases
from worlds import Worlds

SHAPES = [(5, 3), (1,), (), (2, 0), (7, 2, 3)]


@pytest.mark.parametrize("strategy", ["optimal", "redistribute", "materialize"])
def test_two_to_two(worlds: Worlds, strategy: str) -> None:
    counts = worlds.of(4).run(cases.grid, [0, 1], [2, 3], strategy, SHAPES)
    assert counts == [0, 0, *[sum((1 + len(shape)) ** 2 for shape in SHAPES)] * 2]
