"""What a user sets -> leaves and nodes to put into a tree, and values to write at an index. Pure: no I/O."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, is_non_tensor, is_tensor_collection
from torch._C._functorch import is_functorch_wrapped_tensor

from td_datapipes.errors import RemoteOperationError, SchemaError
from td_datapipes.remote.index import RowIndex
from td_datapipes.remote.tree import Entry
from td_datapipes.remote.values import encode_value, plain_values
from td_datapipes.schema import Key, Node, format_key, normalise_key

__all__ = [
    "Additions",
    "ElementValues",
    "as_dict",
    "check_history",
    "class_path",
    "collect",
    "element_values",
    "items_of",
    "loaded_class",
    "node_of",
    "row_texts",
    "row_values",
    "unselected",
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


def check_history(key: Key, value: Any) -> None:
    """Before an entry is set: in memory it would keep what a server cannot.

    Raises:
        RemoteOperationError: a tensor within ``torch.vmap``, or with a history of gradients.
    """
    if not isinstance(value, torch.Tensor):
        return
    if is_functorch_wrapped_tensor(value):
        raise RemoteOperationError(
            f"{format_key(key)} is set within torch.vmap, where its values are not known: call what does that on "
            f"to_local(), or on rows, and write back with update() what should be kept"
        )
    if value.grad_fn is not None:
        raise RemoteOperationError(
            f"{format_key(key)} is set to a tensor with a history of gradients, which a server does not keep: detach() "
            f"it or compute it under torch.no_grad(); to train on it, call what sets it on to_local() or on rows"
        )


def items_of(value: Any) -> Iterator[tuple[str, Any]]:
    """The entries of a TensorDict, tensorclass or mapping, one level of them."""
    if isinstance(value, Mapping) and not is_tensor_collection(value):
        yield from value.items()
        return
    td = value if isinstance(value, TensorDictBase) else value._tensordict
    for name in td.keys():  # noqa: SIM118 - a TensorDict iterates over rows
        yield name, td._get_str(name, None)


def unselected(structure: Any, wanted: Iterable[Key], at: Key = ()) -> Iterator[Key]:
    """What `select` leaves out of a tree, the topmost keys of it.

    Args:
        structure: the tree, or the node of it at `at`.
        wanted: what stays, with all that is below.
        at: where.
    """
    kept = set(wanted)
    for name, value in items_of(structure):
        key = (*at, name)
        if any(key[:depth] in kept for depth in range(1, len(key) + 1)):
            continue
        above = is_tensor_collection(value) and any(want[: len(key)] == key for want in kept)
        if above:
            yield from unselected(value, kept, key)
        else:
            yield key


def zeros_like(value: torch.Tensor, indexed_dims: int, batch_size: torch.Size) -> torch.Tensor:
    """A whole entry of zeros, some rows of which `value` is: `indexed_dims` of its dims are what an index gave."""
    return torch.zeros((*batch_size, *value.shape[indexed_dims:]), dtype=value.dtype)


def row_values(value: Any, index: RowIndex, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Whole rows from what is assigned to a plain index, broadcast and cast as torch does.

    Args:
        value: what is assigned.
        index: a plain one, or of a single row.
        shape: of a row.
        dtype: of the entry.

    Raises:
        RuntimeError: torch's, where the value does not fit.
    """
    if index.single and isinstance(value, torch.Tensor):
        value = value.unsqueeze(0)
    whole = (len(index.rows), *shape)
    if isinstance(value, torch.Tensor) and tuple(value.shape) == whole and value.dtype == dtype:
        return value
    made = torch.empty(whole, dtype=dtype)
    made[...] = value if not isinstance(value, torch.Tensor) else value.detach().cpu()
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


def row_texts(key: Key, value: Any, index: RowIndex) -> dict[int, Any]:
    """The values that are assigned to rows of a non-tensor entry; of a row that comes twice the last stays.

    Raises:
        SchemaError: the index goes beyond the leading dim, the value is not one a row, or JSON cannot hold it.
    """
    rows = index.rows.tolist()
    picked = index.rest[0]
    if len(index.rest) > 1 or picked is None or (isinstance(picked, torch.Tensor) and picked.dtype == torch.bool):
        raise SchemaError(f"{format_key(key)} is no tensor and is written row by row: index the leading dim alone")
    if isinstance(value, NonTensorData):
        given = [value.data] * len(rows)
    elif index.single:
        given = [value.tolist() if is_non_tensor(value) else value]
    else:
        given = value.tolist() if is_non_tensor(value) else value
        for _ in range(picked.ndim - 1 if isinstance(picked, torch.Tensor) else 0):
            given = [item for part in given for item in part]
        if not isinstance(given, list | tuple) or (len(given) != len(rows) and not is_non_tensor(value)):
            given = [value] * len(rows)
    if len(given) != len(rows):
        raise SchemaError(f"{len(given)} values are assigned to {len(rows)} rows of {format_key(key)}")
    for item in given:
        if isinstance(item, torch.Tensor):
            raise SchemaError(
                f"{format_key(key)} holds values, or rows of different shapes: no tensor can be written to some of its "
                f"rows; set it as a whole"
            )
        encode_value(key, item)
    return dict(zip(rows, given, strict=True))


def loaded_class(path: str) -> Any:
    """A tensorclass by its path, if its module is loaded: nothing is imported because a server says so."""
    module, _, name = path.rpartition(".")
    found: Any = sys.modules.get(module)
    for part in name.split(".") if found is not None else ():
        found = getattr(found, part, None)
    return found if isinstance(found, type) and hasattr(found, "_from_tensordict") else None


def as_dict(value: Any) -> TensorDictBase:
    """A TensorDict from whatever may be assigned as one."""
    if isinstance(value, TensorDictBase):
        return value
    if is_tensor_collection(value):
        inner: TensorDictBase = value._tensordict
        return inner
    return TensorDict({normalise_key(key): item for key, item in value.items()}, batch_size=[])
