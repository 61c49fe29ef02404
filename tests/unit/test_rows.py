"""What selects rows, against numpy's own indexing, and what does not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from td_datapipes.errors import RowIndexError
from td_datapipes.rows import resolve_index

NUM_ROWS = 12
REFERENCE = np.arange(NUM_ROWS)
MASK = [row % 3 == 0 for row in range(NUM_ROWS)]


@pytest.mark.parametrize(
    "index",
    [
        0,
        11,
        -1,
        -12,
        np.int8(-3),
        np.uint64(5),
        torch.tensor(7),
        torch.tensor(4, dtype=torch.uint16),
        [],
        [3],
        [7, 2, 2, 9, 0],
        [-1, 0],
        [torch.tensor(1), 2, np.int16(3)],
        range(2, 9, 3),
        range(0),
        np.array([5, 5, -12]),
        np.array([[1, 2, 3], [-1, -2, -3]], dtype=np.int32),
        torch.tensor([[0], [11]]),
        torch.tensor([4, 4, 1], dtype=torch.int8),
        [[1, 2], [3, 4]],
        np.zeros((2, 0), dtype=int),
        np.zeros((0,)),
        MASK,
        np.array(MASK),
        torch.tensor(MASK),
        [False] * NUM_ROWS,
        slice(None),
        slice(3, 9),
        slice(None, None, -2),
        slice(-3, None),
        slice(100, 200),
        slice(torch.tensor(2), np.int64(6)),
        np.arange(NUM_ROWS)[::-3],
    ],
    ids=str,
)
def test_an_index_selects_what_it_selects_in_numpy(index: Any) -> None:
    plain = np.asarray(index) if not isinstance(index, slice) else index
    expected = REFERENCE[plain if isinstance(index, slice) or plain.dtype == bool else plain.astype(np.int64)]
    rows, shape = resolve_index(index, NUM_ROWS, "name")
    assert rows.dtype == np.int64
    assert shape == expected.shape
    assert rows.tolist() == expected.reshape(-1).tolist()


@given(st.slices(NUM_ROWS))
def test_any_slice_selects_what_it_selects_of_a_list(index: slice) -> None:
    assert resolve_index(index, NUM_ROWS, "name")[0].tolist() == list(range(NUM_ROWS))[index]


@pytest.mark.parametrize("index", [12, -13, [0, 12], torch.tensor([-13]), np.array([2**40]), np.uint64(12), range(13)])
def test_a_row_outside_the_data_set_is_named_with_the_bounds(index: Any) -> None:
    bad = int(np.asarray(index).reshape(-1)[-1])
    with pytest.raises(RowIndexError, match=rf"row {bad} is not in \[-12, 12\) of 'name'"):
        resolve_index(index, NUM_ROWS, "name")


@pytest.mark.parametrize("index", [2**63, 2**70, np.uint64(2**63), np.array([1, 2**64 - 1], dtype=np.uint64)])
def test_a_row_beyond_any_integer_is_named(index: Any) -> None:
    with pytest.raises(RowIndexError, match=r"row \d{19,} is not in"):
        resolve_index(index, NUM_ROWS, "name")


@pytest.mark.parametrize(
    "index",
    [
        1.0,
        [1.0, 2.0],
        np.array([0.5]),
        torch.tensor([1.0]),
        torch.tensor([1.0], dtype=torch.bfloat16),
        torch.tensor([1j]),
        "3",
        b"3",
        "",
        ["a"],
        {"a": 1},
        {1, 2},
        pytest.param(object(), id="object"),
        [None],
        [[1, 2], [3]],
        [1, "2"],
        torch.eye(2).to_sparse(),
        np.array(["2020-01-01"], dtype="datetime64[D]"),
    ],
    ids=repr,
)
def test_what_is_no_row_number_is_refused_by_its_kind(index: Any) -> None:
    with pytest.raises(RowIndexError, match=f"'name' is indexed by row numbers, not by {type(index).__name__}"):
        resolve_index(index, NUM_ROWS, "name")


@pytest.mark.parametrize("index", [None, ..., (), (1, 2), (slice(None), 0)])
def test_more_than_rows_is_refused_with_the_way_to_do_it(index: Any) -> None:
    with pytest.raises(RowIndexError, match="indexed by rows alone.*index the batch it gives"):
        resolve_index(index, NUM_ROWS, "name")


@pytest.mark.parametrize(
    "index", [True, [True], [True] * 13, np.ones((12, 1), dtype=bool), torch.ones(0, dtype=torch.bool)]
)
def test_a_mask_of_another_length_is_refused_with_both_lengths(index: Any) -> None:
    with pytest.raises(RowIndexError, match=r"a mask has one entry a row: 12 for 'name', not shape"):
        resolve_index(index, NUM_ROWS, "name")


@pytest.mark.parametrize("index", [slice(0.5, 2), slice("a", None), slice(0, 5, 0), slice(None, None, 1.0)], ids=str)
def test_a_slice_that_is_none_is_refused(index: slice) -> None:
    with pytest.raises(RowIndexError, match="'name' cannot be cut by slice"):
        resolve_index(index, NUM_ROWS, "name")


def test_a_data_set_without_rows_has_only_empty_selections() -> None:
    for index in ([], slice(None), slice(5), range(0), np.zeros(0, dtype=bool), []):
        assert resolve_index(index, 0, "name")[0].tolist() == []
    for index in (0, -1, [0]):
        with pytest.raises(RowIndexError):
            resolve_index(index, 0, "name")


def test_a_tensordict_is_no_index() -> None:
    with pytest.raises(RowIndexError):
        resolve_index(TensorDict({"a": torch.zeros(2)}, [2]), NUM_ROWS, "name")
