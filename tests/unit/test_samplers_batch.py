"""RowBatch and Window: plain lists to everybody, announcements that travel."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from torch.utils.data import Dataset, Subset

from td_datapipes.samplers import BlockShuffleBatchSampler, RowBatch, RowSampler, Window
from td_datapipes.samplers.coalescing import CoalescingBatchSampler


def window_rows(window: Window | None) -> list[list[int]]:
    return [] if window is None else [rows.tolist() for rows in window.batches]


class TestRowBatch:
    def test_is_a_list_in_its_own_order(self) -> None:
        batch = RowBatch([7, 2, 2, 9, 0], ordinal=3, padded=1)
        assert batch == [7, 2, 2, 9, 0]
        assert isinstance(batch, list)
        assert (batch.ordinal, batch.padded, batch.window) == (3, 1, None)

    @pytest.mark.parametrize("travel", [lambda batch: pickle.loads(pickle.dumps(batch)), copy.copy, copy.deepcopy])
    def test_attributes_travel(self, travel: object) -> None:
        following = Window(7, (np.array([5]), np.array([6, 6])))
        window = Window(3, (np.array([7, 2, 2]), np.array([4]), np.array([1, 0])), following)
        again = travel(RowBatch([7, 2, 2], ordinal=3, window=window, padded=1))  # type: ignore[operator]
        assert type(again) is RowBatch
        assert again == [7, 2, 2]
        assert all(type(row) is int for row in again)
        assert (again.ordinal, again.padded) == (3, 1)
        assert (again.window.first_ordinal, again.window.stop_ordinal) == (3, 6)
        assert window_rows(again.window) == [[7, 2, 2], [4], [1, 0]]
        assert again.window.batches[0].dtype == np.int64
        assert window_rows(again.window.next) == [[5], [6, 6]]
        assert again.window.next.next is None

    def test_empty_ones_travel(self) -> None:
        assert pickle.loads(pickle.dumps(RowBatch([], ordinal=1))) == []

    def test_a_window_travels_as_bytes(self) -> None:
        batch = next(iter(CoalescingBatchSampler(RowSampler(range(1_000_000)), 256)))
        # Two windows of 8 batches of 256 rows of 8 bytes, and little else.
        assert 2 * 8 * 256 * 8 < len(pickle.dumps(batch)) < 2 * 8 * 256 * 8 + 256 * 8 + 1000

    def test_a_buffers_window_travels_as_its_recipe(self) -> None:
        batch = next(iter(BlockShuffleBatchSampler(range(1_000_000), 256)))
        assert len(batch.window) > 100
        assert len(pickle.dumps(batch)) < 256 * 8 + 1000
        again = pickle.loads(pickle.dumps(batch))
        assert window_rows(again.window)[0] == batch
        assert window_rows(again.window) == window_rows(batch.window)

    def test_subset_drops_attributes_without_harm(self) -> None:
        class Squares(Dataset[int]):
            def __getitem__(self, row: int) -> int:
                return row * row

        subset = Subset(Squares(), [3, 4, 5, 6])
        assert subset.__getitems__(RowBatch([2, 0, 2], ordinal=1)) == [25, 9, 25]


class TestWindow:
    def test_cannot_be_changed(self) -> None:
        window = Window(0, (np.array([1]),))
        with pytest.raises(AttributeError):
            window.first_ordinal = 3  # type: ignore[misc]
