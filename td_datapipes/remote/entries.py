"""What a user sets -> leaves and nodes to put into a tree, and values to write at an index. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_non_tensor, is_tensor_collection

from td_datapipes.remote.index import RowIndex
from td_datapipes.remote.tree import Entry
from td_datapipes.remote.values import plain_values
from td_datapipes.schema import Key, Node, normalise_key

__all__ = [
    "Additions",
    "ElementValues",
    "class_path",
    "collect",
    "element_values",
    "node_of",
    "row_values",
    "zeros_like",
]

ElementValues = tuple[torch.Tensor, torch.Tensor]
"""Which elements of some rows, counted along them, and their new values."""


@dataclass
class Additions:
    """Leaves and nodes by key, from the root on.

    Attributes:
        entries: leaves.
        nodes: parents before children.
    """

    entries: dict[Key, Entry] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)


def class_path(value: Any) -> str:
    """Where a tensorclass is defined; empty for a TensorDict."""
    kind = type(value)
    return "" if isinstance(value, TensorDictBase) else f"{kind.__module__}.{kind.__qualname__}"


def node_of(key: Key, td: Any, *, unbatched: bool) -> Node:
    """What is kept of a TensorDict beside its entries."""
    shape = tuple(td.batch_size)
    names = tuple(td.names) if any(td.names) else None
    if unbatched:  # its one row has a nameless dim in storage
        return Node(key=key, batch_shape=shape, names=None if names is None else (None, *names), type=class_path(td))
    return Node(key=key, batch_shape=shape[1:], names=names, type=class_path(td))


def collect(made: Additions, key: Key, value: Any, *, num_rows: int | None) -> None:
    """Add a validated value, and all below it.

    Args:
        made: added to.
        key: from the root on.
        value: a tensor, a TensorDict, non-tensor data.
        num_rows: the leading dim of everything; None where there are no batch dims.
    """
    if isinstance(value, torch.Tensor):
        made.entries[key] = value
    elif is_tensor_collection(value) and not is_non_tensor(value):
        made.nodes.append(node_of(key, value, unbatched=num_rows is None))
        for name, item in items_of(value):
            collect(made, (*key, name), item, num_rows=num_rows)
    else:
        made.entries[key] = plain_values(key, value, num_rows)


def items_of(value: Any) -> Iterator[tuple[str, Any]]:
    """The entries of a TensorDict, tensorclass or mapping, one level of them."""
    if isinstance(value, Mapping) and not is_tensor_collection(value):
        yield from value.items()
        return
    td = value if isinstance(value, TensorDictBase) else value._tensordict
    for name in td.keys():  # noqa: SIM118 - a TensorDict iterates over rows
        yield name, td._get_str(name, None)


def zeros_like(value: torch.Tensor, indexed_dims: int, batch_size: torch.Size) -> torch.Tensor:
    """A whole entry of zeros, some rows of which `value` is: `indexed_dims` of its dims are what an index gave."""
    return torch.zeros((*batch_size, *value.shape[indexed_dims:]), dtype=value.dtype)


def row_values(value: Any, index: RowIndex, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Whole rows from what is assigned to a plain index, broadcast and cast as torch does.

    Args:
        value: what is assigned.
        index: a plain one.
        shape: of a row.
        dtype: of the entry.

    Raises:
        RuntimeError: torch's, where the value does not fit.
    """
    whole = (len(index.rows), *shape)
    if isinstance(value, torch.Tensor) and tuple(value.shape) == whole and value.dtype == dtype:
        return value
    made = torch.empty(whole, dtype=dtype)
    made[index.rest] = value if not isinstance(value, torch.Tensor) else value.detach().cpu()
    return made


def element_values(value: Any, rest: Any, whole: tuple[int, ...], dtype: torch.dtype) -> ElementValues:
    """The elements that an index selects of rows ``[n, *shape]``, and what they become.

    Args:
        value: what is assigned.
        rest: the index.
        whole: ``(n, *shape)``.
        dtype: of the entry.

    Raises:
        RuntimeError, IndexError: torch's, where value or index do not fit.
    """
    made = torch.zeros(whole, dtype=dtype)
    made[rest] = value if not isinstance(value, torch.Tensor) else value.detach().cpu()
    count = 1
    for size in whole:
        count *= size
    places = torch.arange(count).reshape(whole)[rest].reshape(-1)
    return places, made.reshape(-1)[places]


def as_dict(value: Any) -> TensorDictBase:
    """A TensorDict from whatever may be assigned as one."""
    if isinstance(value, TensorDictBase):
        return value
    if is_tensor_collection(value):
        inner: TensorDictBase = value._tensordict
        return inner
    return TensorDict({normalise_key(key): item for key, item in value.items()}, batch_size=[])
