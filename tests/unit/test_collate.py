"""torch's default collate passes a data set's batch on as it is, and stacks single rows."""

from __future__ import annotations

import pickle
import runpy
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader, Dataset, default_collate, default_convert
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from td_datapipes import collate
from td_datapipes.collate import collate_tensordicts, register_collate

register_collate()


def batch_of(rows: int) -> TensorDict:
    return TensorDict({"x": torch.arange(rows), "n": TensorDict({"y": torch.ones(rows, 2)}, [rows])}, [rows])


def test_a_batch_is_passed_on_untouched() -> None:
    batch = batch_of(5)
    assert default_collate(batch) is batch
    assert collate_tensordicts(batch) is batch


def test_rows_are_stacked() -> None:
    whole = batch_of(4)
    stacked = default_collate([whole[i] for i in (3, 0, 3)])
    assert stacked.batch_size == torch.Size([3])
    assert stacked["x"].tolist() == [3, 0, 3]
    assert stacked["n"].batch_size == torch.Size([3])
    assert stacked["n", "y"].shape == (3, 2)


def test_what_is_no_tensordict_is_collated_as_ever() -> None:
    assert default_collate([{"a": 1}, {"a": 2}])["a"].tolist() == [1, 2]
    assert default_collate([1.0, 2.0]).tolist() == [1.0, 2.0]


def test_pairs_of_rows_and_labels_are_collated() -> None:
    whole = batch_of(2)
    rows, labels = default_collate([(whole[0], 5), (whole[1], 6)])
    assert rows["x"].tolist() == [0, 1]
    assert labels.tolist() == [5, 6]


def test_registering_again_changes_nothing() -> None:
    before = dict(default_collate_fn_map)
    register_collate()
    assert default_collate_fn_map == before


def test_what_a_loader_does_not_batch_is_passed_on_too() -> None:
    whole = batch_of(6)
    batches = list(DataLoader([whole[:4], whole[4:]], batch_size=None))  # type: ignore[arg-type]
    assert [batch["x"].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5]]
    assert isinstance(batches[0], TensorDict)
    (others,) = DataLoader([{"a": [np.zeros(2), 3]}], batch_size=None)  # type: ignore[arg-type]
    assert isinstance(others["a"][0], torch.Tensor)


class Point(NamedTuple):
    """A type that torch converts item by item."""

    x: Any
    y: Any


def test_what_is_no_tensordict_is_converted_by_torch_alone() -> None:
    """Also where it holds TensorDicts, which torch would look up by row numbers."""
    converted = torch_collate.default_convert(Point(np.zeros(2), {"row": batch_of(2), "text": "a"}))
    assert type(converted) is Point
    assert isinstance(converted.x, torch.Tensor)
    assert converted.y["text"] == "a"
    assert isinstance(converted.y["row"], TensorDict)
    for other in (3, "a", b"a", None, torch.ones(2)):
        assert torch_collate.default_convert(other) is other
    assert default_convert is not torch_collate.default_convert, "torch's public name is its own function"
    assert isinstance(default_convert((np.zeros(1), 2))[0], torch.Tensor)


def test_torchs_own_function_still_goes_to_worker_processes() -> None:
    assert pickle.loads(pickle.dumps(default_convert)) is default_convert
    assert pickle.loads(pickle.dumps(torch_collate.default_convert)) is torch_collate.default_convert
    again = runpy.run_path(collate.__file__)["convert_tensordicts"]  # a module that is loaded once more
    assert isinstance(again([np.zeros(1)])[0], torch.Tensor)


class Counting(Dataset[Any]):
    """Counts how it is asked."""

    def __init__(self, rows: int) -> None:
        self.rows, self.single, self.batched = batch_of(rows), 0, 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> TensorDict:
        self.single += 1
        return self.rows[row]

    def __getitems__(self, rows: list[int]) -> TensorDict:
        self.batched += 1
        return self.rows[rows]


@pytest.fixture
def counting() -> Iterator[Counting]:
    return Counting(10)


def test_a_loader_asks_once_a_batch(counting: Counting) -> None:
    batches = list(DataLoader(counting, batch_size=4))
    assert [batch["x"].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert (counting.single, counting.batched) == (0, 3)
