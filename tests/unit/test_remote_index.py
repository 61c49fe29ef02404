"""Indices of rows: `whole[index]` is `whole[rows][rest]`, whatever torch takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from td_datapipes.remote.index import split_index

WHOLE = torch.arange(7 * 4 * 3).reshape(7, 4, 3)
MASK = WHOLE[..., 0] % 5 == 0


@pytest.mark.parametrize(
    "index",
    [
        *(0, -7, slice(None), slice(2, 6), slice(-3, None, 2), slice(5, 2), [3, 3, -1], [], range(1, 6, 2)),
        *(torch.tensor(4), torch.tensor([6, 0, 6]), torch.tensor([[1, 2], [3, -4]]), torch.empty(0, dtype=torch.int64)),
        *(np.array([2, 1]), np.int64(5), np.array([True, False] * 3 + [True]), MASK[:, 0], MASK, [True] + [False] * 6),
        *((2,), (2, 1), (2, 1, 0), (slice(1, 5), 2), (slice(None), [1, 1]), ([0, 3], [1, 2]), ([0, 3], slice(None), 1)),
        *(
            (..., 1),
            (2, ..., 1),
            (..., slice(0, 2)),
            (...,),
            (..., MASK[0], 1),
            (None, 3),
            (3, None),
            (None, slice(2), 1),
        ),
        *((slice(1, 3), MASK[0]), (torch.tensor([[0], [1]]), torch.tensor([1, 2]))),
    ],
)
def test_rows_and_rest_select_what_the_index_does(index: Any) -> None:
    split = split_index(index, 7, 3)
    assert split is not None
    assert torch.equal(WHOLE[torch.from_numpy(split.rows)][split.rest], WHOLE[index])
    if split.plain:
        assert torch.equal(WHOLE[torch.from_numpy(split.rows)], WHOLE[index])
    if split.single:
        assert torch.equal(WHOLE[torch.from_numpy(split.rows)][0], WHOLE[index])


@given(st.data())
def test_only_rows_that_are_needed_are_named(data: st.DataObject) -> None:
    start, stop = data.draw(st.integers(-9, 9)), data.draw(st.integers(-9, 9))
    step = data.draw(st.integers(1, 4))
    split = split_index((slice(start, stop, step), 1), 7, 3)
    assert split is not None
    assert split.rows.tolist() == list(range(7))[start:stop:step]


def test_masks_touch_the_rows_that_have_something_in_them() -> None:
    split = split_index(MASK, 7, 3)
    assert split is not None
    assert split.rows.tolist() == [row for row in range(7) if bool(MASK[row].any())]


@pytest.mark.parametrize("index", [None, True, (None,), torch.tensor(True), (True, 2)])
def test_what_selects_no_rows_is_left_to_torch(index: Any) -> None:
    assert split_index(index, 7, 3) is None


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (7, "index 7 is out of bounds for dimension 0 with size 7"),
        (torch.tensor([0, -8]), "index -8 is out of bounds"),
        (torch.zeros(6, dtype=torch.bool), r"mask \[6\] at index 0 does not match the 7 rows"),
        (torch.zeros(2), "integer or bool dtype, got torch.float32"),
        ((..., ...), "single ellipsis"),
        ("a", "not by 'a'"),
    ],
)
def test_what_cannot_be_is_refused(index: Any, message: str) -> None:
    with pytest.raises(IndexError, match=message):
        split_index(index, 7, 3)


def test_slices_backwards_are_refused_as_torch_does() -> None:
    with pytest.raises(ValueError, match="step must be positive"):
        split_index(slice(None, None, -1), 7, 3)
