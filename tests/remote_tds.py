"""RedisTensorDicts to test, and a comparison with what they should hold."""

from __future__ import annotations

from typing import Any

import torch
from rows_in_memory import assert_same_tensor, random_rows
from servers import ServerProcess
from tensordict import NonTensorData, NonTensorStack, TensorDict, is_non_tensor, is_tensor_collection

from td_datapipes import RedisTensorDict

__all__ = ["LAYOUTS", "assert_same", "remote", "sample"]

LAYOUTS = ("records", "tensordict_store")


def sample(rows: int = 12, seed: int = 0) -> TensorDict:
    """Leaves of several dtypes and shapes, at three depths."""
    fields: dict[Any, Any] = {
        "a": (torch.float32, (3,)),
        "b": (torch.int64, ()),
        ("n", "x"): (torch.bfloat16, (2, 2)),
        ("n", "deep", "flag"): (torch.bool, ()),
        ("n", "deep", "none"): (torch.int16, (0, 2)),
    }
    return random_rows(rows, fields, seed)


def remote(td: Any, server: ServerProcess, layout: str, name: str = "td") -> Any:
    """The same on a server."""
    return RedisTensorDict.from_tensordict(td, server.url(name), layout=layout, overwrite=True)  # type: ignore[arg-type]


def plain(value: Any) -> Any:
    """What a non-tensor entry is, without what wraps it."""
    if isinstance(value, NonTensorStack):
        return value.tolist()
    return value.data if isinstance(value, NonTensorData) else value


def assert_same(got: Any, expected: Any, path: tuple[str, ...] = ()) -> None:
    """Same tree, and at each node the same type of collection, batch size and entries."""
    assert got.batch_size == expected.batch_size, path
    assert set(got.keys()) == set(expected.keys()), (path, set(got.keys()) ^ set(expected.keys()))
    for name in expected.keys():  # noqa: SIM118 - a TensorDict iterates over rows
        mine, theirs = got.get(name), expected.get(name)
        where = (*path, name)
        if is_non_tensor(theirs) or not (is_tensor_collection(theirs) or isinstance(theirs, torch.Tensor)):
            assert plain(mine) == plain(theirs), where
        elif is_tensor_collection(theirs):
            assert_same(mine, theirs, where)
        else:
            assert_same_tensor(mine, theirs, where)
