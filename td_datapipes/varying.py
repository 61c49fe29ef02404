"""Values whose number or length differs from row to row: what they are, and their bytes in Arrow's layout. Pure.

A row has so many *items*: a tensor's rows along its first dim, or the bytes of a text. The items of all rows lie one
behind the other; where a row's begin and how many they are is its *span*.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Literal, cast, get_args

import numpy as np
import numpy.typing as npt
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDictBase

from td_datapipes.errors import SchemaError

__all__ = [
    "NULL",
    "EncodedRows",
    "Kind",
    "Varying",
    "decode_texts",
    "encode_rows",
    "gather_rows",
    "varying_of",
]

Kind = Literal["tensor", "str", "bytes", "json", "null"]
"""What a row's value is: a tensor ``[items, ...]``, a string, bytes, or whatever JSON can hold.

``null`` is what batches are of that have no value yet; it ends up as ``json`` where none follows."""

NULL = -1
"""The number of items of a row that has no value."""

_TEXT_TYPES: dict[type, Kind] = {str: "str", bytes: "bytes"}


@dataclass(frozen=True, kw_only=True)
class Varying:
    """What the items of a field of variable length are.

    Attributes:
        kind: what a row's value is.
        dtype: of an item; bytes for all but tensors.
        shape: of an item.
    """

    kind: Kind
    dtype: torch.dtype = torch.uint8
    shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise SchemaError(f"a value of variable length is one of {', '.join(get_args(Kind))}, not {self.kind!r}")

    @cached_property
    def item_bytes(self) -> int:
        """Bytes of an item; 0 where a dim of it is 0."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class EncodedRows:
    """The values of consecutive rows as bytes.

    Attributes:
        data: the items, one behind the other.
        starts: where each row's begin in `data`, ``[rows]``. Rows may share bytes.
        lengths: how many items each row has, `NULL` where it has no value, ``[rows]``.
    """

    data: memoryview
    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]


def varying_of(value: Any, like: Varying | None = None) -> Varying | None:
    """What a leaf's values are, where their length differs from row to row; None for a dense tensor and all else.

    Args:
        value: a leaf of a TensorDict.
        like: what the field was before: an empty batch, or one in which all rows happen to be alike, is that still.

    Raises:
        SchemaError: rows that differ in more than their first dim, or a value that cannot be stored; it says why.
    """
    if isinstance(value, NonTensorData | NonTensorStack):
        return Varying(kind=_kind_of(_texts(value)[0], like))
    if not isinstance(value, torch.Tensor):
        return None
    if value.is_nested:
        found = _of_nested(value)
        same = like is not None and like.kind == "tensor" and not value.size(0) and like.dtype == found.dtype
        return like if same else found
    if like is None or like.kind != "tensor" or value.layout != torch.strided or value.ndim < 2:
        return None
    return like if (value.dtype, tuple(value.shape[2:])) == (like.dtype, like.shape) else None


def _of_nested(value: torch.Tensor) -> Varying:
    if value.layout == torch.jagged:
        if getattr(value, "_ragged_idx", 1) != 1:
            raise SchemaError(
                f"its ragged dim is dim {value._ragged_idx}, and only the first dim of a row may differ: transpose it"  # type: ignore[attr-defined]
            )
        return Varying(kind="tensor", dtype=value.dtype, shape=tuple(value.values().shape[1:]))
    rows = value.unbind(0)
    shapes = {tuple(row.shape[1:]) for row in rows}
    if any(row.ndim == 0 for row in rows) or len(shapes) > 1:
        raise SchemaError(f"its rows are of shapes {_some_shapes(rows)}, and only their first dim may differ")
    return Varying(kind="tensor", dtype=value.dtype, shape=shapes.pop() if shapes else ())


def gather_rows(td: TensorDictBase, name: str) -> torch.Tensor | None:
    """The rows of an entry of a lazy stack that differ in their first dim, as one jagged tensor; None for all else.

    Raises:
        SchemaError: they differ in more than that.
    """
    if not isinstance(td, LazyStackedTensorDict) or td.stack_dim != 0:
        return None
    rows = [part.get(name) for part in td.tensordicts]
    if not all(type(row) is torch.Tensor and not row.is_nested and row.layout == torch.strided for row in rows):
        return None
    if any(row.ndim == 0 for row in rows) or len({(row.dtype, row.shape[1:]) for row in rows}) > 1:
        raise SchemaError(
            f"its rows are of {_some_shapes(rows)}, and only their first dim may differ; all need one dtype"
        )
    offsets = torch.tensor([0, *(row.shape[0] for row in rows)]).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(torch.cat(rows), offsets)


def _some_shapes(rows: Sequence[torch.Tensor]) -> str:
    shown = list(dict.fromkeys(f"{str(row.dtype).removeprefix('torch.')}{list(row.shape)}" for row in rows))
    return ", ".join(shown[:4]) + (", ..." if len(shown) > 4 else "")


def _texts(value: NonTensorData | NonTensorStack) -> tuple[list[Any], bool]:
    """The values of rows, and whether it is one that all of them share."""
    if len(value.batch_size) != 1:
        raise SchemaError(
            f"it has the batch dims {list(value.batch_size)}, and values that are no tensors are stored one a row: "
            f"put it into a node whose only batch dim counts rows"
        )
    if isinstance(value, NonTensorData):
        return [value.data] * min(value.batch_size[0], 1), True
    return list(value.tolist()), False


def _kind_of(values: Sequence[Any], like: Varying | None) -> Kind:
    types = {type(item) for item in values if item is not None}
    if not types and like is None:
        return "null"
    if like is not None and (like.kind == "json" or {_TEXT_TYPES.get(kind) for kind in types} <= {like.kind}):
        return like.kind
    return _TEXT_TYPES.get(types.pop(), "json") if len(types) == 1 else "json"


def encode_rows(value: Any, varying: Varying) -> EncodedRows:
    """The bytes of a leaf's values.

    Args:
        value: what `varying_of` gave `varying` for.
        varying: what it is.

    Raises:
        SchemaError: a value that cannot be stored; it names the row of the batch.
    """
    if varying.kind != "tensor":
        texts, shared = _texts(value)
        return _encode_texts(texts, varying.kind, int(value.batch_size[0]) if shared else None)
    if not value.is_nested:
        count, length = value.shape[0], value.shape[1]
        lengths = np.full(count, length, dtype=np.int64)
        return _encoded(value.reshape(count * length, *varying.shape), lengths, varying)
    if value.layout == torch.jagged and value.lengths() is None:
        offsets = value.offsets().cpu().numpy().astype(np.int64)
        return _encoded(value.values()[int(offsets[0]) : int(offsets[-1])], np.diff(offsets), varying)
    rows = value.unbind(0)
    lengths = np.array([row.shape[0] for row in rows], dtype=np.int64)
    joined = torch.cat(rows) if rows else torch.empty(0, *varying.shape, dtype=varying.dtype)
    return _encoded(joined, lengths, varying)


def _encoded(items: torch.Tensor, lengths: npt.NDArray[np.int64], varying: Varying) -> EncodedRows:
    starts = (np.cumsum(lengths) - lengths) * varying.item_bytes
    # A lazily conjugated or negated tensor's memory is not what it stands for.
    plain = items.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if not plain.numel():
        return EncodedRows(data=memoryview(b""), starts=starts, lengths=lengths)
    # A contiguous tensor may still have odd strides along dims of size 1, which `view` minds.
    flat = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy()
    return EncodedRows(data=memoryview(flat.data), starts=starts, lengths=lengths)


def _encode_texts(values: Sequence[Any], kind: Kind, num_sharing: int | None) -> EncodedRows:
    parts = [_encode_text(item, kind, row) for row, item in enumerate(values)]
    found = [NULL if part is None else len(part) for part in parts]
    lengths = np.array(found, dtype=np.int64)
    if num_sharing is not None:  # once for all rows
        lengths = np.full(num_sharing, found[0] if found else NULL, dtype=np.int64)
        starts = np.zeros_like(lengths)
    else:
        nbytes = np.maximum(lengths, 0)
        starts = np.cumsum(nbytes) - nbytes
    return EncodedRows(data=memoryview(b"".join(part or b"" for part in parts)), starts=starts, lengths=lengths)


def _encode_text(value: Any, kind: Kind, row: int) -> bytes | None:
    if kind == "json":
        return _encode_json(value, row)
    if value is None or kind == "null":
        return None
    if kind == "bytes":
        return cast(bytes, value)
    try:
        return cast(str, value).encode()
    except UnicodeEncodeError as error:
        raise SchemaError(f"the string of row {row} is no valid Unicode ({error}); store it as bytes") from None


def _encode_json(value: Any, row: int) -> bytes:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        if json.loads(text) == value:
            return text.encode()
        reason = "it would come back as something else: JSON has no tuples, and only strings as keys"
    except (TypeError, ValueError) as error:
        reason = str(error)
    raise SchemaError(
        f"the value of row {row} is of type {type(value).__name__}, which JSON cannot hold ({reason}); store strings, "
        f"bytes, tensors or what JSON holds"
    )


def decode_texts(data: memoryview, lengths: npt.NDArray[np.int64], kind: Kind) -> list[Any]:
    """One value a row.

    Args:
        data: the bytes of all rows, one behind the other.
        lengths: of each row, ``[rows]``.
        kind: what they are.

    Raises:
        ValueError: bytes that are no such value.
    """
    decode = _DECODERS[kind]
    values: list[Any] = []
    at = 0
    for length in lengths.tolist():
        if length == NULL:
            values.append(None)
            continue
        values.append(decode(bytes(data[at : at + length])))
        at += length
    return values


_DECODERS: Mapping[str, Any] = {"str": bytes.decode, "bytes": bytes, "json": json.loads, "null": json.loads}
