"""Which Arrow types become fields, and how: one entry in `KINDS` each. Pure: no I/O.

=============================  ====================================================================================
Arrow                          field
=============================  ====================================================================================
bool, int*, uint*, float*      the same dtype
date32, time32                 int32: days since 1970; seconds or milliseconds since midnight, as the column has them
date64, time64, timestamp,     int64 in the column's own unit: since 1970 (in UTC where it has a time zone), since
duration                       midnight, or as long
decimal                        float64, the nearest there is
fixed_size_binary[n]           uint8[n]
fixed_size_list[n]             what its items are, with a leading dim n
dictionary, run_end_encoded    what its values are
extension                      what its storage is; bool8 is bool, and a fixed_shape_tensor has its shape
struct                         a nested node (see `columns`)
list, large_list, binary       with a shape that every row has, ``{"embedding": (768,)}``: a tensor of that shape
list, large_list               without one: a tensor of variable length, of items that are of one shape
string, binary                 of variable length: ``str`` and ``bytes``; of large types and views too
=============================  ====================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
import torch

from td_datapipes.varying import NULL, Kind

__all__ = ["KINDS", "Cells", "ColumnKind", "Converter", "RowFault", "converter_of", "supported_types"]

Shape = tuple[int, ...]


class RowFault(Exception):
    """A row that cannot be stored; who knows the column and where the rows start tells the user."""

    def __init__(self, row: int, text: str) -> None:
        super().__init__(row, text)
        self.row, self.text = row, text


@dataclass(frozen=True, kw_only=True)
class Cells:
    """The elements of some rows.

    Attributes:
        data: one after the other, row by row; contiguous.
        nulls: which of them are null (what `data` has there means nothing); None where none is.
        lengths: of rows of variable length, how many items each has, `NULL` where it is null and has no elements,
            ``[rows]``; None where all rows are of one shape.
    """

    data: npt.NDArray[Any]
    nulls: npt.NDArray[np.bool_] | None = None
    lengths: npt.NDArray[np.int64] | None = None


@dataclass(frozen=True, kw_only=True)
class Converter:
    """How the rows of one column become elements.

    Attributes:
        dtype: of the field.
        shape: of one row; of one item of it, where rows are of variable length.
        cells: takes an Arrow array of the column's type.
        kind: what rows are, where they are of variable length; None where all are of one shape.
    """

    dtype: torch.dtype
    shape: Shape
    cells: Callable[[Any], Cells]
    kind: Kind | None = None


@dataclass(frozen=True, kw_only=True)
class ColumnKind:
    """A family of Arrow types.

    Attributes:
        label: how messages call it.
        build: a type, and the shape that the user says its rows have, to a converter; None where it is none of these.
    """

    label: str
    build: Callable[[Any, Shape | None], Converter | None]


def converter_of(arrow_type: Any, shape: Shape | None) -> Converter | None:
    """The converter for a column, None where its type is not supported.

    Args:
        arrow_type: the column's type.
        shape: of a row, where the user gave one for a type that does not say it.
    """
    for kind in KINDS:
        found = kind.build(arrow_type, shape)
        if found is not None:
            return found
    return None


def supported_types() -> str:
    """For messages."""
    return ", ".join(kind.label for kind in KINDS)


_NUMBERS: tuple[tuple[Callable[[Any], bool], str], ...] = (
    *((pt.is_uint8, "uint8"), (pt.is_uint16, "uint16"), (pt.is_uint32, "uint32"), (pt.is_uint64, "uint64")),
    *((pt.is_int8, "int8"), (pt.is_int16, "int16"), (pt.is_int32, "int32"), (pt.is_int64, "int64")),
    *((pt.is_float16, "float16"), (pt.is_float32, "float32"), (pt.is_float64, "float64")),
    *((pt.is_date32, "int32"), (pt.is_time32, "int32")),
    *((pt.is_date64, "int64"), (pt.is_time64, "int64"), (pt.is_timestamp, "int64"), (pt.is_duration, "int64")),
)


def _number(arrow_type: Any, shape: Shape | None) -> Converter | None:
    del shape
    name = next((name for matches, name in _NUMBERS if matches(arrow_type)), None)
    if name is None:
        return None
    dtype = np.dtype(name)

    def cells(array: Any) -> Cells:
        return Cells(data=_buffer(array, 1, dtype, len(array)), nulls=_nulls(array))

    return Converter(dtype=getattr(torch, name), shape=(), cells=cells)


def _bool(arrow_type: Any, shape: Shape | None) -> Converter | None:
    del shape
    if not pt.is_boolean(arrow_type):
        return None

    def cells(array: Any) -> Cells:
        return Cells(data=_bits(array.buffers()[1], array.offset, len(array)), nulls=_nulls(array))

    return Converter(dtype=torch.bool, shape=(), cells=cells)


def _decimal(arrow_type: Any, shape: Shape | None) -> Converter | None:
    del shape
    if not pt.is_decimal(arrow_type):
        return None

    def cells(array: Any) -> Cells:
        # Arrow's own cast is off by a bit for one value in three thousand; through text it is the nearest.
        values = array.cast(pa.string()).cast(pa.float64())
        return Cells(data=_buffer(values, 1, np.dtype(np.float64), len(values)), nulls=_nulls(array))

    return Converter(dtype=torch.float64, shape=(), cells=cells)


def _fixed_size_binary(arrow_type: Any, shape: Shape | None) -> Converter | None:
    if not pt.is_fixed_size_binary(arrow_type) or (shape is not None and math.prod(shape) != arrow_type.byte_width):
        return None
    width = arrow_type.byte_width

    def cells(array: Any) -> Cells:
        start = array.offset * width
        data = _bytes(array.buffers()[1])[start : start + len(array) * width]
        return Cells(data=data, nulls=_spread(_nulls(array), width))

    return Converter(dtype=torch.uint8, shape=(width,) if shape is None else shape, cells=cells)


def _fixed_size_list(arrow_type: Any, shape: Shape | None) -> Converter | None:
    if not pt.is_fixed_size_list(arrow_type):
        return None
    item, width = converter_of(arrow_type.value_type, None), arrow_type.list_size
    if item is None or item.kind is not None:
        return None
    own = (width, *item.shape)
    if shape is not None and math.prod(shape) != math.prod(own):
        return None

    def cells(array: Any) -> Cells:
        inner = item.cells(array.values.slice(array.offset * width, len(array) * width))
        lists = _spread(_nulls(array), math.prod(own))
        return Cells(data=inner.data, nulls=_either(lists, inner.nulls))

    return Converter(dtype=item.dtype, shape=own if shape is None else shape, cells=cells)


def _dictionary(arrow_type: Any, shape: Shape | None) -> Converter | None:
    if not pt.is_dictionary(arrow_type):
        return None
    values = converter_of(arrow_type.value_type, shape)
    if values is None:
        return None

    def cells(array: Any) -> Cells:
        return values.cells(_one_array(array.dictionary_decode()))

    return replace(values, cells=cells)


def _run_end_encoded(arrow_type: Any, shape: Shape | None) -> Converter | None:
    if not pt.is_run_end_encoded(arrow_type):
        return None
    values = converter_of(arrow_type.value_type, shape)
    if values is None:
        return None

    def cells(array: Any) -> Cells:
        return values.cells(_one_array(pc.run_end_decode(array)))

    return replace(values, cells=cells)


def _extension(arrow_type: Any, shape: Shape | None) -> Converter | None:
    if not isinstance(arrow_type, pa.BaseExtensionType):
        return None
    if arrow_type.extension_name == "arrow.fixed_shape_tensor":
        return _fixed_shape_tensor(arrow_type, shape)
    storage = converter_of(arrow_type.storage_type, shape)
    if storage is None:
        return None
    is_bool = arrow_type.extension_name == "arrow.bool8"

    def cells(array: Any) -> Cells:
        found = storage.cells(array.storage)
        return Cells(data=found.data != 0, nulls=found.nulls) if is_bool else found

    return replace(storage, dtype=torch.bool if is_bool else storage.dtype, cells=cells)


def _fixed_shape_tensor(arrow_type: Any, shape: Shape | None) -> Converter | None:
    """Its elements lie in the order of their memory; a permutation says which of the dims is which."""
    storage = converter_of(arrow_type.storage_type, None)
    if storage is None:
        return None
    physical = tuple(arrow_type.shape)
    order = tuple(arrow_type.permutation or range(len(physical)))
    logical = tuple(physical[dim] for dim in order)
    if shape is not None and math.prod(shape) != math.prod(logical):
        return None

    def turn(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        rows = values.reshape(-1, *physical).transpose(0, *(dim + 1 for dim in order))
        return np.ascontiguousarray(rows).reshape(-1)

    def cells(array: Any) -> Cells:
        found = storage.cells(array.storage)
        if order == tuple(range(len(order))) or not len(found.data):
            return found
        return Cells(data=turn(found.data), nulls=None if found.nulls is None else turn(found.nulls))

    return Converter(dtype=storage.dtype, shape=logical if shape is None else shape, cells=cells)


def _list_of_one_length(arrow_type: Any, shape: Shape | None) -> Converter | None:
    if shape is None or not (pt.is_list(arrow_type) or pt.is_large_list(arrow_type)):
        return None
    nested = len(shape) > 1 and pt.is_nested(arrow_type.value_type)
    item = converter_of(arrow_type.value_type, shape[1:] if nested else None)
    length = shape[0] if nested else math.prod(shape)
    if item is None or item.kind is not None or length * math.prod(item.shape) != math.prod(shape):
        return None

    def cells(array: Any) -> Cells:
        nulls = _nulls(array)
        lengths = np.diff(array.offsets.to_numpy())
        _check_lengths(lengths, nulls, length, "items")
        inner = item.cells(_one_array(array.flatten()))  # which leaves out the rows that are null
        return _with_null_rows(inner, nulls, math.prod(shape))

    return Converter(dtype=item.dtype, shape=shape, cells=cells)


def _binary_of_one_length(arrow_type: Any, shape: Shape | None) -> Converter | None:
    if shape is None or not (pt.is_binary(arrow_type) or pt.is_large_binary(arrow_type)):
        return None
    length, offset_dtype = math.prod(shape), np.dtype(np.int64 if pt.is_large_binary(arrow_type) else np.int32)

    def cells(array: Any) -> Cells:
        nulls = _nulls(array)
        offsets = _buffer(array, 1, offset_dtype, len(array) + 1) if len(array) else np.zeros(1, offset_dtype)
        _check_lengths(np.diff(offsets), nulls, length, "bytes")
        data = _bytes(array.buffers()[2])
        if nulls is None:
            return Cells(data=data[offsets[0] : offsets[-1]])
        starts = offsets[:-1][~nulls].astype(np.int64)
        kept = data[(starts[:, None] + np.arange(length)).reshape(-1)]
        return _with_null_rows(Cells(data=kept), nulls, length)

    return Converter(dtype=torch.uint8, shape=shape, cells=cells)


def _varying(arrow_type: Any, shape: Shape | None) -> Converter | None:
    """Strings, bytes, and lists whose items are all of one shape."""
    if shape is not None:
        return None
    for matches, kind, plain in _TEXTS:
        if matches(arrow_type):
            return Converter(dtype=torch.uint8, shape=(), cells=_text_cells(plain), kind=kind)
    if not (pt.is_list(arrow_type) or pt.is_large_list(arrow_type)):
        return None
    item = converter_of(arrow_type.value_type, None)
    if item is None or item.kind is not None:
        return None
    return replace(item, cells=_list_cells(item), kind="tensor")


def _either_of(*kinds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda arrow_type: any(kind(arrow_type) for kind in kinds)


_TEXTS: tuple[tuple[Callable[[Any], bool], Kind, Any], ...] = (
    (_either_of(pt.is_string, pt.is_large_string, pt.is_string_view), "str", pa.large_string()),
    (_either_of(pt.is_binary, pt.is_large_binary, pt.is_binary_view), "bytes", pa.large_binary()),
)


def _text_cells(plain: Any) -> Callable[[Any], Cells]:
    def cells(array: Any) -> Cells:
        array = _one_array(array.cast(plain))
        _check_values(array)
        if array.null_count:
            # Nobody cleared what lies behind a null.
            array, missing = _one_array(array.fill_null("" if pt.is_large_string(plain) else b"")), _nulls(array)
        else:
            missing = None
        offsets = _buffer(array, 1, np.dtype(np.int64), len(array) + 1) if len(array) else np.zeros(1, np.int64)
        lengths = np.diff(offsets)
        if missing is not None:
            lengths[missing] = NULL
        return Cells(data=_bytes(array.buffers()[2])[offsets[0] : offsets[-1]], lengths=lengths)

    return cells


def _list_cells(item: Converter) -> Callable[[Any], Cells]:
    def cells(array: Any) -> Cells:
        _check_values(array)
        lengths = np.diff(array.offsets.to_numpy()).astype(np.int64)
        missing = _nulls(array)
        if missing is not None:
            lengths[missing] = NULL
        inner = item.cells(_one_array(array.flatten()))  # which leaves out the rows that are null
        return replace(inner, lengths=lengths)

    return cells


def _check_values(array: Any) -> None:
    """Refuse strings that are no Unicode, and whatever else a file may say that its bytes do not hold."""
    try:
        array.validate(full=True)
    except pa.ArrowInvalid as error:
        for row in range(len(array)):
            try:
                array.slice(row, 1).validate(full=True)
            except pa.ArrowInvalid:
                raise RowFault(row, f"is no {array.type} ({str(error).splitlines()[0][:200]})") from None
        raise RowFault(0, f"is damaged ({str(error).splitlines()[0][:200]})") from None


KINDS: tuple[ColumnKind, ...] = (
    ColumnKind(label="integers, floats, dates, times, timestamps and durations", build=_number),
    ColumnKind(label="bool", build=_bool),
    ColumnKind(label="decimals", build=_decimal),
    ColumnKind(label="fixed_size_binary", build=_fixed_size_binary),
    ColumnKind(label="fixed_size_list", build=_fixed_size_list),
    ColumnKind(label="dictionary", build=_dictionary),
    ColumnKind(label="run_end_encoded", build=_run_end_encoded),
    ColumnKind(label="extension types of these", build=_extension),
    ColumnKind(label="list with a shape that all rows have", build=_list_of_one_length),
    ColumnKind(label="binary with a shape that all rows have", build=_binary_of_one_length),
    ColumnKind(label="strings, binary and lists of items of one shape, as rows of any length", build=_varying),
)
"""What can be stored beside structs, which become nested nodes. The first one that takes a type has it."""


def _check_lengths(lengths: npt.NDArray[Any], nulls: npt.NDArray[np.bool_] | None, wanted: int, what: str) -> None:
    wrong = lengths != wanted
    if nulls is not None:
        wrong &= ~nulls
    if wrong.any():
        row = int(wrong.argmax())
        raise RowFault(row, f"has {int(lengths[row])} {what}, where the shape that was given for it takes {wanted}")


def _with_null_rows(cells: Cells, nulls: npt.NDArray[np.bool_] | None, per_row: int) -> Cells:
    """Elements of the rows that are there -> elements of all rows."""
    if nulls is None:
        return cells
    data = np.zeros((len(nulls), per_row), cells.data.dtype)
    data[~nulls] = cells.data.reshape(-1, per_row)
    missing = np.repeat(nulls, per_row).reshape(len(nulls), per_row)
    if cells.nulls is not None:
        missing[~nulls] = cells.nulls.reshape(-1, per_row)
    return Cells(data=data.reshape(-1), nulls=missing.reshape(-1))


def _one_array(array: Any) -> Any:
    return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array


def _bytes(buffer: Any) -> npt.NDArray[np.uint8]:
    return np.zeros(0, np.uint8) if buffer is None else np.frombuffer(buffer, np.uint8)


def _buffer(array: Any, number: int, dtype: np.dtype[Any], length: int) -> npt.NDArray[Any]:
    """The values of an array where they lie, without a copy."""
    buffer = array.buffers()[number]
    if buffer is None or not length:
        return np.zeros(0, dtype)
    return np.ndarray((length,), dtype, buffer, array.offset * dtype.itemsize)


def _bits(buffer: Any, offset: int, length: int) -> npt.NDArray[np.bool_]:
    start, skip = divmod(offset, 8)
    packed = _bytes(buffer)[start : start + (skip + length + 7) // 8]
    return np.unpackbits(packed, count=skip + length, bitorder="little")[skip:].view(np.bool_)


def _nulls(array: Any) -> npt.NDArray[np.bool_] | None:
    if array.null_count == 0:
        return None
    return ~_bits(array.buffers()[0], array.offset, len(array))


def _spread(nulls: npt.NDArray[np.bool_] | None, per_row: int) -> npt.NDArray[np.bool_] | None:
    return None if nulls is None else np.repeat(nulls, per_row)


def _either(first: npt.NDArray[np.bool_] | None, second: npt.NDArray[np.bool_] | None) -> npt.NDArray[np.bool_] | None:
    if first is None or second is None:
        return second if first is None else first
    return first | second
