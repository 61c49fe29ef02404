"""Fields, dtypes and where each lies in a record; TensorDict <-> schema. Pure: no I/O.

A *field* is one leaf of a TensorDict. A *group* is the fields that share one record a row; a schema has one group or
more. A *node* is a TensorDict below the root, which may have batch dims beyond the row dim and names for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase, is_tensor_collection

from td_datapipes.errors import FieldNotFoundError, SchemaError
from td_datapipes.varying import Kind, Varying, gather_rows, varying_of

__all__ = [
    "ALIGNMENT_BYTES",
    "Field",
    "Group",
    "Key",
    "Node",
    "Schema",
    "dtype_from_name",
    "dtype_name",
    "format_key",
    "leaves",
    "new_tensordict",
    "normalise_key",
    "schema_of",
]

ALIGNMENT_BYTES = 16
"""Records start at multiples of this in their chunk, so that any dtype can be viewed where it lies."""

Key = tuple[str, ...]
"""The path of a leaf or a node: ``("next", "observation")``. The root is ``()``."""

_DTYPE_NAMES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _DTYPE_NAMES if hasattr(torch, name)}
_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in _DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``"bfloat16"``. Raises SchemaError for a dtype without plain bytes (quantized, packed)."""
    try:
        return _NAMES[dtype]
    except KeyError:
        raise SchemaError(f"dtype {dtype} cannot be stored; the dtypes that can are {', '.join(_DTYPES)}") from None


def dtype_from_name(name: str) -> torch.dtype:
    """``"bfloat16"`` -> ``torch.bfloat16``. Raises SchemaError for a name this version of torch does not have."""
    try:
        return _DTYPES[name]
    except KeyError:
        raise SchemaError(
            f"dtype {name!r} is not known to torch {torch.__version__}; known: {', '.join(_DTYPES)}"
        ) from None


def format_key(key: Key) -> str:
    """How messages show a key: ``'a.b'`` for a flat one, ``('a', 'b')`` for a nested one, so that the two differ."""
    return repr(key[0]) if len(key) == 1 else repr(key)


def normalise_key(key: str | Sequence[Any]) -> Key:
    """A user's key, a string or nested tuples of strings, as a flat tuple of strings."""
    if isinstance(key, str):
        return (key,)
    if not isinstance(key, Sequence) or not key:
        raise SchemaError(f"a field is named by a string or a non-empty tuple of strings, not by {key!r}")
    return tuple(part for item in key for part in normalise_key(item))


@dataclass(frozen=True, kw_only=True)
class Field:
    """One leaf: what a row of it looks like and where that row's bytes start in the record.

    Attributes:
        key: its path in the TensorDict.
        dtype: its dtype.
        shape: the shape of one row (the TensorDict's leading dim left out).
        offset_bytes: where it starts in its group's record; a multiple of its item size.
        varying: what its values are, where they differ in length from row to row. They lie in a heap beside the
            records then, and what the record has is two integers: the heap's byte where the row's begin, and how many
            items they are (see `td_datapipes.varying`). `dtype` and `shape` are those of the integers.
    """

    key: Key
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset_bytes: int
    varying: Varying | None = None

    @cached_property
    def nbytes(self) -> int:
        """Bytes of one row; 0 where a dim is 0."""
        return math.prod(self.shape) * self.dtype.itemsize

    def to_json(self) -> dict[str, Any]:
        """As the manifest stores it."""
        data = {
            "key": list(self.key),
            "dtype": dtype_name(self.dtype),
            "shape": list(self.shape),
            "offset_bytes": self.offset_bytes,
        }
        return data if self.varying is None else {**data, "varying": _varying_to_json(self.varying)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Field:
        """The inverse of `to_json`."""
        return cls(
            key=tuple(data["key"]),
            dtype=dtype_from_name(data["dtype"]),
            shape=tuple(data["shape"]),
            offset_bytes=data["offset_bytes"],
            varying=_varying_from_json(data["varying"]) if "varying" in data else None,
        )

    def __str__(self) -> str:
        if self.varying is not None and self.varying.kind != "tensor":
            return f"{format_key(self.key)}: {self.varying.kind}"
        items = self.varying or self
        shape = ", ".join(map(str, items.shape if self.varying is None else ("*", *items.shape)))
        return f"{format_key(self.key)}: {dtype_name(items.dtype)}[{shape}]"


def _varying_to_json(varying: Varying) -> dict[str, Any]:
    return {"kind": varying.kind, "dtype": dtype_name(varying.dtype), "shape": list(varying.shape)}


def _varying_from_json(data: Mapping[str, Any]) -> Varying:
    return Varying(kind=data["kind"], dtype=dtype_from_name(data["dtype"]), shape=tuple(data["shape"]))


@dataclass(frozen=True, kw_only=True)
class Group:
    """Fields stored side by side in one record a row.

    Attributes:
        fields: in the TensorDict's own order.
        record_bytes: from the record's start to the end of its last field.
        stride_bytes: from one record to the next; a multiple of `ALIGNMENT_BYTES` (0 where no field has bytes).
    """

    fields: tuple[Field, ...]
    record_bytes: int
    stride_bytes: int

    @classmethod
    def pack(cls, fields: Iterable[tuple[Key, torch.dtype, tuple[int, ...]] | Field]) -> Group:
        """Lay fields out one after the other, each at the next multiple of its item size."""
        placed, end = [], 0
        for item in fields:
            if not isinstance(item, Field):
                item = Field(key=item[0], dtype=item[1], shape=item[2], offset_bytes=0)
            start = _round_up(end, item.dtype.itemsize)
            field = replace(item, offset_bytes=start)
            placed.append(field)
            end = start + field.nbytes if field.nbytes else end
        return cls(fields=tuple(placed), record_bytes=end, stride_bytes=_round_up(end, ALIGNMENT_BYTES))


@dataclass(frozen=True, kw_only=True)
class Node:
    """A TensorDict of the tree (the root has the key ``()``).

    Attributes:
        key: its path.
        batch_shape: its batch size without the row dim.
        names: names of all its batch dims, the row dim first; None where it has none.
        type: of a tensorclass, its module and name; empty for a TensorDict.
    """

    key: Key
    batch_shape: tuple[int, ...] = ()
    names: tuple[str | None, ...] | None = None
    type: str = ""

    def to_json(self) -> dict[str, Any]:
        """As the manifest stores it."""
        names = None if self.names is None else list(self.names)
        data = {"key": list(self.key), "batch_shape": list(self.batch_shape), "names": names}
        return {**data, "type": self.type} if self.type else data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Node:
        """The inverse of `to_json`."""
        names = None if data["names"] is None else tuple(data["names"])
        key, shape = tuple(data["key"]), tuple(data["batch_shape"])
        return cls(key=key, batch_shape=shape, names=names, type=str(data.get("type", "")))


@dataclass(frozen=True, kw_only=True)
class Schema:
    """What one row of a data set is: its groups of fields, and the tree of nodes they hang in (root first)."""

    groups: tuple[Group, ...]
    nodes: tuple[Node, ...]

    @cached_property
    def fields(self) -> dict[Key, Field]:
        """Every field by its key, group after group."""
        return {field.key: field for group in self.groups for field in group.fields}

    @cached_property
    def varying_fields(self) -> tuple[Field, ...]:
        """The fields of variable length; each has a heap."""
        return tuple(field for field in self.fields.values() if field.varying is not None)

    def require_dense(self, holder: str) -> None:
        """Refuse fields of variable length.

        Raises:
            SchemaError: names the first, and `holder`, which has no room for it.
        """
        for field in self.varying_fields:
            raise SchemaError(
                f"field {field} is of variable length, for which {holder} has no room; make it a tensor of which all "
                f"rows have one shape (padded, say), or leave it out"
            )

    def decided_by(self, other: Schema) -> Schema:
        """The same; fields without a value so far are of the kind that those of a later batch are of."""
        if not any(field.varying is not None and field.varying.kind == "null" for field in self.varying_fields):
            return self
        groups = [replace(g, fields=tuple(_decided(f, other.fields.get(f.key)) for f in g.fields)) for g in self.groups]
        return replace(self, groups=tuple(groups))

    def without_nulls(self) -> Schema:
        """The same; fields that have no value at all are of JSON values."""
        groups = [replace(g, fields=tuple(_decided(f, None, "json") for f in g.fields)) for g in self.groups]
        return replace(self, groups=tuple(groups)) if self.varying_fields else self

    @property
    def root(self) -> Node:
        """The root node."""
        return self.nodes[0]

    def select(self, wanted: Iterable[str | Sequence[Any]] | None) -> tuple[Field, ...]:
        """The fields of those keys in the schema's order; a node's key selects all below it, None selects all.

        Raises:
            FieldNotFoundError: for a key that names neither, with the keys that exist.
        """
        if wanted is None:
            return tuple(self.fields.values())
        if isinstance(wanted, str):
            raise FieldNotFoundError(
                f"fields takes a list of field names, not the string {wanted!r}; write [{wanted!r}]"
            )
        chosen: set[Key] = set()
        for item in wanted:
            key = normalise_key(item)
            below = [name for name in self.fields if name[: len(key)] == key]
            if not below:
                known = ", ".join(format_key(name) for name in self.fields)
                raise FieldNotFoundError(f"there is no field {format_key(key)}; the fields are {known}")
            chosen.update(below)
        return tuple(field for key, field in self.fields.items() if key in chosen)

    def same_rows(self, other: Schema) -> bool:
        """Whether a row of one is a row of the other: fields, dtypes, shapes and nodes, wherever they lie."""
        return self._row() == other._row()

    def _row(self) -> object:
        return {key: (f.dtype, f.shape, f.varying) for key, f in self.fields.items()}, {n.key: n for n in self.nodes}

    def difference(self, other: Schema) -> str:
        """In words, the first field (or node) in which two schemas differ; empty where they hold the same rows."""
        for key in (*self.fields, *other.fields):
            mine, theirs = self.fields.get(key), other.fields.get(key)
            if mine is None or theirs is None:
                return f"field {format_key(key)} is {'missing here' if mine is None else 'missing there'}"
            if (mine.dtype, mine.shape, mine.varying) != (theirs.dtype, theirs.shape, theirs.varying):
                return f"{mine} here, {theirs} there"
        if not self.same_rows(other):
            return "the nested nodes' batch sizes or names differ"
        return ""

    def __str__(self) -> str:
        return "\n".join(str(field) for field in self.fields.values())


def _decided(field: Field, other: Field | None, otherwise: Kind = "null") -> Field:
    if field.varying is None or field.varying.kind != "null":
        return field
    found = Varying(kind=otherwise) if other is None or other.varying is None else other.varying
    return field if found.kind == "tensor" else replace(field, varying=found)


def leaves(td: TensorDictBase, prefix: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Every entry that is no plain node, with its path: depth first, non-tensor entries included."""
    for name in td.keys():  # noqa: SIM118 - a TensorDict iterates over rows, not over keys
        value = _entry(td, (*prefix, name))
        if is_tensor_collection(value) and not isinstance(value, NonTensorData | NonTensorStack):
            yield from leaves(value, (*prefix, name))
        else:
            yield (*prefix, name), value


def schema_of(td: Any, like: Schema | None = None) -> Schema:
    """The schema of a TensorDict whose leading batch dim counts rows, as one group.

    Args:
        td: batch size ``[rows, ...]``.
        like: of earlier batches: whether a field is of variable length does not always show in one batch.

    Raises:
        SchemaError: no batch dim, or a leaf that cannot be stored: sparse, DTensor, quantized, values that JSON cannot
            hold, rows that differ in more than their first dim.
    """
    if not isinstance(td, TensorDictBase):
        if is_tensor_collection(td):
            return schema_of(td.to_tensordict(retain_none=False), like)
        raise SchemaError(
            f"rows are a TensorDict, not {type(td).__name__}; wrap a dict: TensorDict(data, batch_size=[rows])"
        )
    if td.batch_dims == 0:
        raise SchemaError("the TensorDict has batch_size=[]: its leading dim must count rows; set batch_size=[rows]")
    known = {} if like is None else like.fields
    fields = [_field_of(key, value, known.get(key)) for key, value in leaves(td)]
    return Schema(groups=(Group.pack(fields),), nodes=tuple(_nodes(td, ())))


def _nodes(td: TensorDictBase, key: Key) -> Iterator[Node]:
    names = tuple(td.names) if any(td.names) else None
    yield Node(key=key, batch_shape=tuple(td.batch_size[1:]), names=names)
    for name in td.keys():  # noqa: SIM118
        value = _entry(td, (*key, name))
        if is_tensor_collection(value) and not isinstance(value, NonTensorData | NonTensorStack):
            yield from _nodes(value, (*key, name))


def _entry(td: TensorDictBase, key: Key) -> Any:
    """The entry of that path; `td` is the node it is in."""
    try:
        return td.get(key[-1])
    except RuntimeError as error:  # a lazy stack whose rows differ
        reason: Exception = error
        try:
            if (rows := gather_rows(td, key[-1])) is not None:
                return rows
        except SchemaError as known:
            reason = known
        raise SchemaError(
            f"the rows of field {format_key(key)} cannot be put together ({reason}): all rows need one dtype, and one "
            f"shape but for their first dim; pad it, or leave it out with td.exclude"
        ) from error


def _field_of(key: Key, value: Any, like: Field | None) -> tuple[Key, torch.dtype, tuple[int, ...]] | Field:
    try:
        varying = varying_of(value, None if like is None else like.varying)
        if varying is not None:
            dtype_name(varying.dtype)
            return Field(key=key, dtype=torch.int64, shape=(2,), offset_bytes=0, varying=varying)
    except SchemaError as error:
        raise SchemaError(f"field {format_key(key)}: {error}") from error
    if not isinstance(value, torch.Tensor):
        raise SchemaError(
            f"field {format_key(key)} is a {type(value).__name__}, neither a tensor nor a NonTensorStack; make it one, "
            f"or leave it out with td.exclude"
        )
    if kind := _kind_without_plain_bytes(value):
        raise SchemaError(
            f"field {format_key(key)} is a {kind} tensor: only dense tensors with one shape for all rows can be "
            f"stored; make it one, or leave it out with td.exclude"
        )
    if type(value) not in (torch.Tensor, torch.nn.Parameter) and hasattr(value, "to_local"):
        raise SchemaError(f"field {format_key(key)} is a DTensor; store its full_tensor() or each rank's to_local()")
    try:
        dtype_name(value.dtype)
    except SchemaError as error:
        raise SchemaError(f"field {format_key(key)}: {error}") from None
    return key, value.dtype, tuple(value.shape[1:])


def _kind_without_plain_bytes(value: torch.Tensor) -> str:
    """What keeps a tensor's rows from being so many bytes each; empty for a dense one."""
    if value.layout != torch.strided:
        return str(value.layout)
    if value.is_quantized:
        return "quantized"
    return "meta (it has no values)" if value.is_meta else ""


def new_tensordict(values: Mapping[Key, Any], nodes: Sequence[Node], rows: int | None) -> TensorDict:
    """Put leaves into the tree their schema describes. No leaf is copied or checked: this runs once a batch.

    Args:
        values: leaves by key, each of shape ``[rows, ...]`` (``[...]`` where `rows` is None).
        nodes: the tree, parents before children; nodes without any entry are kept.
        rows: the leading batch size; None for a single row.
    """
    lead = () if rows is None else (rows,)
    contents: dict[Key, dict[str, Any]] = {node.key: {} for node in nodes}
    for key, value in values.items():
        contents[key[:-1]][key[-1]] = value
    for node in nodes[:0:-1]:  # children first, so that a parent takes them finished
        contents[node.key[:-1]][node.key[-1]] = _node_tensordict(contents[node.key], node, lead)
    return _node_tensordict(contents[()], nodes[0], lead)


def _node_tensordict(contents: dict[str, Any], node: Node, lead: tuple[int, ...]) -> TensorDict:
    names = node.names if lead or node.names is None else node.names[1:]
    return TensorDict(contents, batch_size=(*lead, *node.batch_shape), names=list(names) if names else None)  # type: ignore[arg-type]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
