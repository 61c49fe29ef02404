"""Arrow tables -> rows: which columns become which fields, and record batches -> records. Pure: no I/O.

Columns are copied into records without touching a row in Python, some `BLOCK_BYTES` of records at a time: the records
stay in the processor's cache while column after column is written between what is there already.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow.types as pt
import torch

from td_datapipes.blocks import Heaps
from td_datapipes.errors import ConfigurationError, SchemaError
from td_datapipes.ingest.kinds import Cells, Converter, RowFault, converter_of, supported_types
from td_datapipes.schema import Field, Group, Key, Node, Schema, format_key
from td_datapipes.varying import NULL, EncodedRows, Varying

__all__ = ["BLOCK_BYTES", "METADATA_KEY", "ArrowBlock", "Column", "ColumnOptions", "RowPlan", "plan_columns"]

BLOCK_BYTES = 512 << 10
"""Records written at a time: with the columns they come from, less than a core's own cache."""
METADATA_KEY = b"td_datapipes"
"""Where `export` says what the fields were that Arrow has no type for."""
Value = TypeVar("Value")
_TENSOR_OF_ANY_SHAPE = "datasets.features.features.Array"
"""How Hugging Face names its extension types of a fixed shape."""


@dataclass(frozen=True, kw_only=True)
class ColumnOptions:
    """What the user wants of a table's columns. A nested one is named by its path: ``("n", "y")`` or ``"n.y"``.

    Attributes:
        columns: only these; None takes all.
        drop: none of these.
        fill: what stands for null, by column; the entry ``None`` is for all others. Without one, a null is an error.
        shapes: what shape all rows of a column have, where its type does not say it.
    """

    columns: Sequence[str | tuple[str, ...]] | None = None
    drop: Sequence[str | tuple[str, ...]] = ()
    fill: Mapping[str | tuple[str, ...] | None, float | bool] = field(default_factory=dict)
    shapes: Mapping[str | tuple[str, ...], tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column, or a column of a struct, that becomes a field.

    Attributes:
        path: its name, behind those of the structs it is in.
        arrow_type: its type.
        converter: how it becomes elements.
        fill: what stands for null, of the elements' own dtype; None where a null is an error.
    """

    path: Key
    arrow_type: Any
    converter: Converter
    fill: npt.NDArray[Any] | None


@dataclass(frozen=True, kw_only=True)
class RowPlan:
    """What a row is, and the columns it is made of."""

    schema: Schema
    columns: tuple[Column, ...]

    @property
    def names(self) -> list[str]:
        """The names of the table's columns that are read."""
        return list(dict.fromkeys(column.path[0] for column in self.columns))


def plan_columns(schema: Any, options: ColumnOptions, label: str) -> RowPlan:
    """Decide on the fields of a table.

    Args:
        schema: the Arrow table's.
        options: what the user wants.
        label: what the table is, for messages.

    Raises:
        SchemaError: two columns of one name, no column left, or a type that cannot be stored; it is named together
            with what can be, and how to leave it out.
        ConfigurationError: an option for a column that is not there, or a fill that its dtype cannot hold.
    """
    _check_unique(schema.names, label)
    leaves: list[tuple[Key, Any]] = []
    nodes = [Node(key=())]
    for column in schema:
        leaves += _leaves(column, (column.name,), nodes, label)
    paths = [path for path, _ in leaves]
    wanted = paths if options.columns is None else _resolve(options.columns, paths, "columns", label)
    dropped = _resolve(options.drop, paths, "drop", label)
    shapes = _by_path(options.shapes, paths, "shape", label)
    fills = _by_path({name: fill for name, fill in options.fill.items() if name}, paths, "fill", label)
    chosen = [leaf for leaf in leaves if leaf[0] in wanted and leaf[0] not in dropped]
    if not chosen and leaves:
        raise SchemaError(f"no column of {label} is left to be read; it has {_names(paths)}")
    columns = []
    for path, column in chosen:
        shape = shapes.get(path, _shape_in_metadata(column))
        converter = converter_of(column.type, shape)
        if converter is None:
            raise SchemaError(_unsupported(path, column.type, shape, label))
        fill = _fill(path, converter, fills.get(path, options.fill.get(None)), strict=path in fills)
        columns.append(Column(path=path, arrow_type=column.type, converter=converter, fill=fill))
    kept = {path[:depth] for path, _ in chosen for depth in range(len(path))}
    fields = [_field_of(column) for column in columns]
    left = tuple(node for node in nodes if not node.key or node.key in kept)
    found = Schema(groups=(Group.pack(fields),), nodes=left)
    everything = len(chosen) == len(leaves)
    return RowPlan(schema=_as_exported(schema, found, everything=everything), columns=tuple(columns))


def _field_of(column: Column) -> Field:
    found = column.converter
    if found.kind is None:
        return Field(key=column.path, dtype=found.dtype, shape=found.shape, offset_bytes=0)
    varying = Varying(kind=found.kind, dtype=found.dtype, shape=found.shape)
    return Field(key=column.path, dtype=torch.int64, shape=(2,), offset_bytes=0, varying=varying)


def _leaves(column: Any, path: Key, nodes: list[Node], label: str) -> Iterator[tuple[Key, Any]]:
    """Every column that is no struct, depth first; the structs become nodes."""
    if not pt.is_struct(column.type):
        yield path, column
        return
    nodes.append(Node(key=path))
    children = [column.type.field(number) for number in range(column.type.num_fields)]
    _check_unique([child.name for child in children], f"struct {format_key(path)} of {label}")
    for child in children:
        yield from _leaves(child, (*path, child.name), nodes, label)


def _check_unique(names: Sequence[str], label: str) -> None:
    twice = [name for number, name in enumerate(names) if name in names[:number]]
    if twice:
        raise SchemaError(
            f"{label} has {names.count(twice[0])} columns of the name {twice[0]!r}; rename one of them: a field has "
            "one name"
        )


def _resolve(wanted: Iterable[str | tuple[str, ...]], paths: Sequence[Key], option: str, label: str) -> set[Key]:
    """The paths that are meant: a struct's name stands for all below it."""
    found: set[Key] = set()
    for name in wanted:
        choices = [tuple(name)] if not isinstance(name, str) else [(name,), tuple(name.split("."))]
        for key in choices:
            below = [path for path in paths if path[: len(key)] == key]
            if below:
                found.update(below)
                break
        else:
            raise ConfigurationError(f"{option} names {name!r}, which {label} does not have; it has {_names(paths)}")
    return found


def _by_path(
    values: Mapping[str | tuple[str, ...], Value], paths: Sequence[Key], option: str, label: str
) -> dict[Key, Value]:
    return {path: value for name, value in values.items() for path in _resolve([name], paths, option, label)}


def _names(paths: Sequence[Key]) -> str:
    shown = ", ".join(format_key(path) for path in paths[:30])
    return (shown or "no column") + (f" and {len(paths) - 30} more" if len(paths) > 30 else "")


def _unsupported(path: Key, arrow_type: Any, shape: tuple[int, ...] | None, label: str) -> str:
    name = ".".join(path)
    text = f"column {format_key(path)} of {label} is {arrow_type}, which cannot be stored"
    if shape is not None:
        return f"{text} with rows of shape {list(shape)}; give the shape that they have, or drop it: --drop {name}"
    if pt.is_list(arrow_type) or pt.is_large_list(arrow_type):
        text += f" as rows of any length, whatever its items are; if all have one shape, say which: --shape {name}=768"
        text += (
            ". Or keep each row's list as a JSON value: write_dataset takes TensorDicts with a NonTensorStack of them"
        )
    return f"{text}. Leave it out: --drop {name}. Supported: struct, {supported_types()}"


def _shape_in_metadata(column: Any) -> tuple[int, ...] | None:
    """The shape that Hugging Face's extension types keep where only their library looks."""
    metadata = column.metadata or {}
    if not metadata.get(b"ARROW:extension:name", b"").startswith(_TENSOR_OF_ANY_SHAPE.encode()):
        return None
    try:
        shape = tuple(json.loads(metadata[b"ARROW:extension:metadata"])[0])
    except (ValueError, LookupError, TypeError):
        return None
    return shape if shape and all(isinstance(size, int) and size > 0 for size in shape) else None


def _fill(path: Key, converter: Converter, value: Any, *, strict: bool) -> npt.NDArray[Any] | None:
    """The fill as an element; None where there is none. One meant for all columns is left out where it does not fit."""
    if value is None:
        return None
    if converter.kind not in (None, "tensor"):
        if not strict:
            return None
        raise ConfigurationError(f"column {format_key(path)} is not filled: null is a value of {converter.kind} fields")
    dtype = torch.empty(0, dtype=converter.dtype).numpy().dtype
    with np.errstate(all="ignore"):
        try:
            filled = np.asarray(value).astype(dtype)
            lossless = bool(filled == value) or (value != value and dtype.kind == "f")
        except (TypeError, ValueError, OverflowError):
            lossless = False
    # A float is as near as its dtype allows.
    if lossless or (dtype.kind == "f" and isinstance(value, int | float) and np.isfinite(filled)):
        return filled
    if not strict:
        return None
    raise ConfigurationError(f"column {format_key(path)} is {dtype} and cannot be filled with {value!r}")


def _as_exported(schema: Any, found: Schema, *, everything: bool) -> Schema:
    """What the fields were before `export` wrote them, where it did and nobody has changed the columns since."""
    text = (schema.metadata or {}).get(METADATA_KEY)
    if text is None:
        return found
    try:
        data = json.loads(text)
        fields = [Field.from_json(item) for item in data["fields"]]
        nodes = [Node.from_json(item) for item in data["nodes"]]
    except (ValueError, LookupError, TypeError):
        return found
    stored = {item.key: _bytes_of_row(item) for item in found.fields.values()}
    # Fields without bytes have no column.
    kept = [item for item in fields if item.key in stored or (everything and not item.nbytes)]
    if {item.key: _bytes_of_row(item) for item in kept if item.nbytes} != {key: n for key, n in stored.items() if n}:
        return found
    parents = {item.key[:depth] for item in kept for depth in range(len(item.key))}
    nodes = [node for node in nodes if everything or not node.key or node.key in parents]
    return Schema(
        groups=(Group.pack(kept),),
        nodes=tuple(nodes),
    )


def _bytes_of_row(item: Field) -> int | tuple[str, int]:
    """How many bytes a row has; of one of variable length, what its items are and how many bytes each has."""
    if item.varying is None:
        return item.nbytes
    # JSON is a column of strings.
    kind = "str" if item.varying.kind == "json" else item.varying.kind
    return kind, item.varying.item_bytes


class ArrowBlock:
    """The rows of a record batch.

    Args:
        batch: has the columns of `plan`, maybe among others.
        plan: what they become.
        first_row: the number of the batch's first row, for messages.
        label: where it comes from, for messages.

    Raises:
        SchemaError: a null without a fill, or a list of another length than the shape says; it names column and row.
    """

    def __init__(self, batch: Any, plan: RowPlan, first_row: int, label: str) -> None:
        self.rows: int = batch.num_rows
        self.schema = plan.schema
        self._values: dict[Key, npt.NDArray[Any]] = {}
        self._varying: dict[Key, EncodedRows] = {}
        for column in plan.columns:
            try:
                cells = column.converter.cells(_array_at(batch, column.path))
                if cells.lengths is None:
                    self._values[column.path] = _elements(cells, column)
                else:
                    self._varying[column.path] = _encoded(cells, cells.lengths, column)
            except RowFault as fault:
                raise SchemaError(
                    f"column {format_key(column.path)} {fault.text} in row {first_row + fault.row} of {label}"
                    + _remedy(column)
                ) from None

    def schema_like(self, like: Schema | None) -> Schema:
        """See `RowBlock`: columns leave nothing open."""
        del like
        return self.schema

    def dense(self, heaps: Heaps, schema: Schema) -> ArrowBlock:
        """See `RowBlock`."""
        del schema
        if not self._varying:
            return self
        found = copy.copy(self)
        found._values = self._values | {key: heaps.add(key, rows) for key, rows in self._varying.items()}
        return found

    def pack(self, group: Group, start: int, stop: int, out: npt.NDArray[np.uint8]) -> None:
        """See `RowBlock`."""
        rows, stride = stop - start, group.stride_bytes
        if not rows:
            return
        copies = [_copy_of(self._values[item.key], item, stride, out) for item in group.fields if item.nbytes]
        step = max(BLOCK_BYTES // stride, 1)
        for low in range(0, rows, step):
            high = min(low + step, rows)
            for source, target in copies:
                target[low:high] = source[start + low : start + high]


def _array_at(batch: Any, path: Key) -> Any:
    array = batch.column(batch.schema.get_field_index(path[0]))
    for name in path[1:]:
        # Flattened children have the nulls of their parents.
        array = array.flatten()[array.type.get_field_index(name)]
    return array


def _elements(cells: Cells, column: Column) -> npt.NDArray[Any]:
    if cells.nulls is None or not cells.nulls.any():
        return cells.data
    if column.fill is None:
        raise RowFault(int(cells.nulls.argmax()) // math.prod(column.converter.shape), "is null")
    return np.where(cells.nulls, column.fill, cells.data)


def _encoded(cells: Cells, lengths: npt.NDArray[np.int64], column: Column) -> EncodedRows:
    """Values of variable length as the bytes of their items."""
    per_item = math.prod(column.converter.shape)
    missing = lengths == NULL
    data, present = cells.data, np.where(missing, 0, lengths)
    if cells.nulls is not None and cells.nulls.any():
        if column.fill is None:
            item = int(cells.nulls.argmax()) // per_item
            raise RowFault(int(np.searchsorted(np.cumsum(present), item, side="right")), "has an item that is null")
        data = np.where(cells.nulls, column.fill, data)
    if column.converter.kind == "tensor" and missing.any():
        if column.fill is None:
            raise RowFault(int(missing.argmax()), "is null")
        # A row that is null becomes one item.
        lengths = present = np.where(missing, 1, lengths)
        filled = np.full((int(lengths.sum()), per_item), column.fill, data.dtype)
        filled[~np.repeat(missing, lengths)] = data.reshape(-1, per_item) if per_item else 0
        data = filled.reshape(-1)
    item_bytes = per_item * column.converter.dtype.itemsize
    flat = np.ascontiguousarray(data)
    return EncodedRows(
        data=memoryview(flat.view(np.uint8).data) if flat.size else memoryview(b""),
        starts=(np.cumsum(present) - present) * item_bytes,
        lengths=lengths,
    )


def _remedy(column: Column) -> str:
    name = ".".join(column.path)
    return f"; fill nulls (--fill {name}=0), filter the rows, or leave the column out (--drop {name})"


def _copy_of(
    values: npt.NDArray[Any], item: Field, stride: int, out: npt.NDArray[np.uint8]
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """A column, and where it goes in the records, as arrays of one opaque item a row."""
    nbytes = item.nbytes
    # Whole words where they lie so; numpy copies those much faster than items of any other length.
    word = nbytes in (1, 2, 4, 8) and item.offset_bytes % nbytes == 0
    dtype = np.dtype(f"u{nbytes}" if word else f"V{nbytes}")
    rows = values.nbytes // nbytes
    source = np.ndarray((rows,), dtype, np.ascontiguousarray(values).data)
    target: npt.NDArray[Any] = np.ndarray((len(out),), dtype, out, item.offset_bytes, (stride,))
    return source, target
