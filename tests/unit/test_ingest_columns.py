"""Arrow columns -> fields and records: every type, checked against what Python's own conversion says of each row."""

from __future__ import annotations

import datetime as dt
import decimal
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rows_in_memory import bytes_of

from td_datapipes.errors import ConfigurationError, SchemaError
from td_datapipes.ingest import columns
from td_datapipes.ingest.columns import METADATA_KEY, ArrowBlock, ColumnOptions, plan_columns
from td_datapipes.ingest.kinds import KINDS
from td_datapipes.schema import Key

EPOCH = dt.datetime(1970, 1, 1)
DAY = dt.date(1970, 1, 1)


def records_of(table: pa.Table, options: ColumnOptions | None = None) -> dict[Key, torch.Tensor]:
    """The table as records, cut into fields again by where the schema says that they lie."""
    plan = plan_columns(table.schema, options or ColumnOptions(), "the table")
    group = plan.schema.groups[0]
    out = np.zeros((table.num_rows, group.stride_bytes), np.uint8)
    row = 0
    for batch in table.to_batches():
        block = ArrowBlock(batch, plan, row, "the table")
        # In two parts, so that neither starts and ends with the block.
        middle = block.rows // 2
        block.pack(group, 0, middle, out[row : row + middle])
        block.pack(group, middle, block.rows, out[row + middle : row + block.rows])
        row += block.rows
    found = {}
    for key, field in plan.schema.fields.items():
        raw = np.ascontiguousarray(out[:, field.offset_bytes : field.offset_bytes + field.nbytes]).reshape(-1)
        found[key] = torch.from_numpy(raw).view(field.dtype).reshape(table.num_rows, *field.shape)
    return found


def one_column(array: pa.Array, **options: Any) -> torch.Tensor:
    return records_of(pa.table({"x": array}), ColumnOptions(**options))[("x",)]


NUMBERS = [
    *(pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
    *(pa.float16(), pa.float32(), pa.float64()),
]


@pytest.mark.parametrize("arrow_type", NUMBERS, ids=str)
def test_numbers_keep_their_dtype_and_their_bits(arrow_type: pa.DataType) -> None:
    name = arrow_type.to_pandas_dtype().__name__
    bits = np.random.default_rng(0).integers(0, 256, 64 * 8, dtype=np.uint8).view(name)
    got = one_column(pa.array(bits))
    assert got.dtype == getattr(torch, name)
    assert bytes_of(got) == bits.tobytes()


TIMES: list[tuple[pa.DataType, Sequence[Any], torch.dtype, list[int]]] = [
    (pa.date32(), [dt.date(1970, 1, 3), dt.date(1969, 12, 31)], torch.int32, [2, -1]),
    (pa.date64(), [dt.date(1970, 1, 3)], torch.int64, [2 * 86_400_000]),
    (pa.time32("s"), [dt.time(1, 0, 5)], torch.int32, [3605]),
    (pa.time32("ms"), [dt.time(0, 0, 5, 7000)], torch.int32, [5007]),
    (pa.time64("us"), [dt.time(0, 0, 5, 7)], torch.int64, [5_000_007]),
    (pa.time64("ns"), [dt.time(0, 0, 5, 7)], torch.int64, [5_000_007_000]),
    (pa.timestamp("s"), [EPOCH + dt.timedelta(days=1)], torch.int64, [86400]),
    (pa.timestamp("us"), [EPOCH - dt.timedelta(microseconds=1)], torch.int64, [-1]),
    (
        pa.timestamp("ms", tz="Europe/Berlin"),
        [dt.datetime(1970, 1, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=1)))],
        torch.int64,
        [0],  # midnight in Greenwich
    ),
    (pa.duration("ms"), [dt.timedelta(seconds=2)], torch.int64, [2000]),
]


@pytest.mark.parametrize(("arrow_type", "values", "dtype", "expected"), TIMES, ids=[str(row[0]) for row in TIMES])
def test_times_are_integers_in_the_columns_own_unit(
    arrow_type: pa.DataType, values: Sequence[Any], dtype: torch.dtype, expected: list[int]
) -> None:
    got = one_column(pa.array(values, arrow_type))
    assert (got.dtype, got.tolist()) == (dtype, expected)


@pytest.mark.parametrize("make", [pa.decimal32, pa.decimal64, pa.decimal128, pa.decimal256])
def test_decimals_are_the_nearest_float(make: Any) -> None:
    digits = {"decimal32": 9, "decimal64": 18}.get(make.__name__, 38)
    rng = np.random.default_rng(1)
    texts = ["".join(map(str, rng.integers(1, 10, digits - 1))) for _ in range(3000)]
    values = [decimal.Decimal(text).scaleb(-5) * sign for text in texts for sign in (1, -1)]
    got = one_column(pa.array(values, make(digits, 5)))
    assert got.dtype == torch.float64
    assert got.tolist() == [float(value) for value in values]


def test_bits_become_bools_wherever_a_slice_begins() -> None:
    bits = np.random.default_rng(2).random(200) < 0.5
    for start in range(18):
        got = one_column(pa.array(bits).slice(start, 77))
        assert got.dtype == torch.bool
        assert got.tolist() == bits[start : start + 77].tolist()


def test_fixed_size_lists_are_tensors_of_their_shape() -> None:
    numbers = np.arange(5 * 2 * 3, dtype=np.int16)
    inner = pa.FixedSizeListArray.from_arrays(pa.array(numbers), 3)
    array = pa.FixedSizeListArray.from_arrays(inner, 2)
    assert one_column(array).tolist() == numbers.reshape(5, 2, 3).tolist()
    assert one_column(array.slice(2, 2)).tolist() == numbers.reshape(5, 2, 3)[2:4].tolist()


def test_fixed_shape_tensors_have_their_shape_and_permutations_are_undone() -> None:
    numbers = np.arange(4 * 2 * 3, dtype=np.float32).reshape(4, 2, 3)
    plain = pa.FixedShapeTensorArray.from_numpy_ndarray(numbers)
    assert one_column(plain).tolist() == numbers.tolist()
    turned = np.ascontiguousarray(numbers).transpose(0, 2, 1)  # the memory is that of [4, 2, 3]
    array = pa.FixedShapeTensorArray.from_numpy_ndarray(turned)
    assert array.type.permutation == [1, 0]
    assert one_column(array).tolist() == turned.tolist()


def test_fixed_size_binary_is_bytes() -> None:
    got = one_column(pa.array([b"abc", b"\x00\xff\x10"], pa.binary(3)))
    assert (got.dtype, got.tolist()) == (torch.uint8, [[97, 98, 99], [0, 255, 16]])


def test_extension_types_are_what_they_store() -> None:
    uuids = pa.ExtensionArray.from_storage(pa.uuid(), pa.array([bytes(range(16))], pa.binary(16)))
    assert one_column(uuids).tolist() == [list(range(16))]
    bools = pa.ExtensionArray.from_storage(pa.bool8(), pa.array([0, 5, -1], pa.int8()))
    assert one_column(bools).dtype == torch.bool
    assert one_column(bools).tolist() == [False, True, True]


def test_dictionaries_and_runs_are_their_values() -> None:
    values = [7.5, 1.25, 7.5, 7.5]
    assert one_column(pa.array(values).dictionary_encode()).tolist() == values
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([2, 5], pa.int32()), pa.array([3, 9], pa.int64()))
    assert one_column(runs).tolist() == [3, 3, 9, 9, 9]


def test_structs_are_nested_nodes_and_pass_their_nulls_on() -> None:
    inner = pa.struct([("b", pa.float32()), ("c", pa.list_(pa.int8(), 2))])
    rows = [{"a": 1, "n": {"b": 0.5, "c": [1, 2]}}, None, {"a": 3, "n": None}]
    table = pa.table({"s": pa.array(rows, pa.struct([("a", pa.int64()), ("n", inner)]))})
    got = records_of(table, ColumnOptions(fill={None: 9}))
    assert got[("s", "a")].tolist() == [1, 9, 3]
    assert got[("s", "n", "b")].tolist() == [0.5, 9, 9]
    assert got[("s", "n", "c")].tolist() == [[1, 2], [9, 9], [9, 9]]
    assert [node.key for node in plan_columns(table.schema, ColumnOptions(), "t").schema.nodes] == [
        *((), ("s",), ("s", "n"))
    ]
    with pytest.raises(SchemaError, match=r"column \('s', 'a'\) is null in row 1 of the table"):
        records_of(table)


LISTS = [
    (pa.list_(pa.int32()), [[1, 2, 3], [4, 5, 6]], (3,)),
    (pa.large_list(pa.float64()), [[1, 2, 3, 4], [5, 6, 7, 8]], (2, 2)),
    (pa.list_(pa.list_(pa.uint8())), [[[1, 2], [3, 4], [5, 6]], [[7, 8], [9, 10], [11, 12]]], (3, 2)),
    (pa.binary(), [b"\x01\x02\x03", b"\x04\x05\x06"], (3,)),
    (pa.large_binary(), [b"\x01\x02\x03\x04", b"\x04\x05\x06\x07"], (2, 2)),
]


@pytest.mark.parametrize(("arrow_type", "rows", "shape"), LISTS, ids=[str(row[0]) for row in LISTS])
def test_lists_are_tensors_where_the_user_says_their_shape(
    arrow_type: pa.DataType, rows: list[Any], shape: tuple[int, ...]
) -> None:
    array = pa.array([rows[0], *rows], arrow_type).slice(1)
    expected = [np.asarray(list(row)).reshape(shape).tolist() for row in rows]
    assert one_column(array, shapes={"x": shape}).tolist() == expected
    with_null = pa.array([rows[0], None, rows[1]], arrow_type)
    filled = one_column(with_null, shapes={"x": shape}, fill={"x": 5})
    assert filled.tolist() == [expected[0], np.full(shape, 5).tolist(), expected[1]]
    with pytest.raises(SchemaError, match=r"column 'x' is null in row 1 of"):
        one_column(with_null, shapes={"x": shape})
    with pytest.raises(SchemaError, match="column 'x' (has .* in row 0 of|of the table is .* with rows of shape)"):
        one_column(array, shapes={"x": (99,)})


def test_a_list_of_another_length_is_named_with_its_row() -> None:
    table = pa.table({"v": pa.array([[1, 2], [3, 4], [5]], pa.list_(pa.int64()))})
    with pytest.raises(SchemaError, match=r"column 'v' has 1 items, where .* takes 2 in row 2 of the table"):
        records_of(table, ColumnOptions(shapes={"v": (2,)}))


def test_the_shape_that_hugging_face_keeps_in_the_metadata_is_used() -> None:
    metadata = {
        b"ARROW:extension:name": b"datasets.features.features.Array2DExtensionType",
        b"ARROW:extension:metadata": json.dumps([[2, 2], "float32"]).encode(),
    }
    field = pa.field("x", pa.list_(pa.list_(pa.float32())), metadata=metadata)
    table = pa.table([pa.array([[[1, 2], [3, 4]]], field.type)], schema=pa.schema([field]))
    assert records_of(table)[("x",)].tolist() == [[[1, 2], [3, 4]]]


UNSUPPORTED = [
    *(pa.null(), pa.list_(pa.null()), pa.list_(pa.list_(pa.int64())), pa.list_(pa.struct([("a", pa.int8())]))),
    *(pa.large_list(pa.string()), pa.list_view(pa.int8()), pa.map_(pa.int8(), pa.int8()), pa.list_(pa.binary(), 3)),
    *(pa.month_day_nano_interval(), pa.dense_union([pa.field("a", pa.int8())]), pa.list_(pa.list_(pa.int8()), 2)),
    *(pa.list_(pa.string(), 2), pa.list_(pa.struct([("a", pa.int8())]), 2)),
]


@pytest.mark.parametrize("arrow_type", UNSUPPORTED, ids=str)
def test_what_cannot_be_stored_is_named_with_what_can_be(arrow_type: pa.DataType) -> None:
    schema = pa.schema([("fine", pa.int8()), ("odd", arrow_type)])
    more = (
        ".*--shape odd=768.*as a JSON value: write_dataset takes"
        if pa.types.is_list(arrow_type) or pa.types.is_large_list(arrow_type)
        else ""
    )
    match = rf"column 'odd' of the table is .*cannot be stored{more}.*--drop odd"
    with pytest.raises(SchemaError, match=match) as caught:
        plan_columns(schema, ColumnOptions(), "the table")
    assert all(kind.label in str(caught.value) for kind in KINDS)
    assert str(arrow_type) in str(caught.value)
    assert list(plan_columns(schema, ColumnOptions(drop=["odd"]), "the table").schema.fields) == [("fine",)]


def test_nulls_are_an_error_with_column_and_first_row_counted_through_all_batches() -> None:
    batches = [pa.array([1, 2, 3]), pa.array([4, None, None])]
    table = pa.table({"full": pa.chunked_array([[0] * 3, [0] * 3]), "age": pa.chunked_array(batches)})
    with pytest.raises(SchemaError, match=r"column 'age' is null in row 4 of the table; .*--fill age=0.*--drop age"):
        records_of(table)
    assert records_of(table, ColumnOptions(fill={"age": -1}))[("age",)].tolist() == [1, 2, 3, 4, -1, -1]


def test_a_null_within_a_list_is_the_rows() -> None:
    array = pa.array([[1, 2], [3, None], [5, 6]], pa.list_(pa.int64(), 2))
    with pytest.raises(SchemaError, match="column 'x' is null in row 1"):
        one_column(array)
    assert one_column(array, fill={"x": 0}).tolist() == [[1, 2], [3, 0], [5, 6]]


@pytest.mark.parametrize(
    ("arrow_type", "fill"),
    [(pa.int64(), 0.5), (pa.int8(), 300), (pa.uint8(), -1), (pa.int32(), math.nan), (pa.bool_(), 2), (pa.int8(), "x")],
)
def test_a_fill_that_the_dtype_cannot_hold_is_refused(arrow_type: pa.DataType, fill: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"column 'x' is .* cannot be filled with"):
        one_column(pa.array([None], arrow_type), fill={"x": fill})


def test_a_fill_for_all_columns_fills_those_it_fits() -> None:
    table = pa.table({"f": pa.array([1.5, None]), "i": pa.array([None, 2])})
    with pytest.raises(SchemaError, match="column 'i' is null in row 0"):
        records_of(table, ColumnOptions(fill={None: math.nan}))
    got = records_of(table, ColumnOptions(fill={None: math.nan, "i": 7}))
    assert got[("i",)].tolist() == [7, 2]
    assert math.isnan(got[("f",)][1])
    # 0.1 has no float32; the nearest will do.
    assert one_column(pa.array([None], pa.float32()), fill={"x": 0.1}).item() == np.float32(0.1)


def test_columns_are_chosen_by_name_by_struct_and_by_path() -> None:
    struct = pa.struct([("a", pa.int8()), ("b", pa.string())])
    schema = pa.schema([("s", struct), ("s.a", pa.int16()), ("z", pa.int32())])

    def fields(**options: Any) -> list[Key]:
        return list(plan_columns(schema, ColumnOptions(**options), "t").schema.fields)

    assert fields(drop=["s.b", ("s", "b")][1:]) == [("s", "a"), ("s.a",), ("z",)]
    assert fields(columns=["z", ("s", "a")]) == [("s", "a"), ("z",)]
    assert fields(columns=["s.a"]) == [("s.a",)]  # a column of just that name comes first
    assert fields(drop=["s"]) == [("s.a",), ("z",)]
    with pytest.raises(ConfigurationError, match=r"drop names 'q', which t does not have; it has \('s', 'a'\)"):
        fields(drop=["q"])
    with pytest.raises(SchemaError, match="no column of t is left"):
        fields(drop=["s", "s.a", "z"])


def test_two_columns_of_one_name_are_refused() -> None:
    with pytest.raises(SchemaError, match="t has 2 columns of the name 'x'"):
        plan_columns(pa.schema([("x", pa.int8()), ("x", pa.int16())]), ColumnOptions(), "t")
    twice = pa.struct([("a", pa.int8()), ("a", pa.int8())])
    with pytest.raises(SchemaError, match="struct 's' of t has 2 columns of the name 'a'"):
        plan_columns(pa.schema([("s", twice)]), ColumnOptions(), "t")


def test_a_description_that_does_not_fit_the_columns_is_not_believed() -> None:
    described = {
        "fields": [{"key": ["x"], "dtype": "bfloat16", "shape": [], "offset_bytes": 0}],
        "nodes": [{"key": [], "batch_shape": [], "names": None}],
    }
    for text, dtype in ((json.dumps(described), torch.bfloat16), ("{", torch.uint16), ('{"fields": 3}', torch.uint16)):
        schema = pa.schema([("x", pa.uint16())], metadata={METADATA_KEY: text.encode()})
        assert plan_columns(schema, ColumnOptions(), "t").schema.fields[("x",)].dtype == dtype
    changed = pa.schema([("x", pa.int64())], metadata={METADATA_KEY: json.dumps(described).encode()})
    assert plan_columns(changed, ColumnOptions(), "t").schema.fields[("x",)].dtype == torch.int64


@settings(max_examples=60, deadline=None)
@given(data=st.data(), rows=st.integers(0, 40), block_bytes=st.sampled_from([1, 64, 1000]))
def test_any_mixture_of_columns_comes_out_as_it_went_in(data: st.DataObject, rows: int, block_bytes: int) -> None:
    widths = data.draw(st.lists(st.tuples(st.sampled_from(["u1", "i2", "f4", "f8"]), st.integers(1, 9)), min_size=1))
    rng = np.random.default_rng(0)
    arrays, expected = {}, {}
    for number, (dtype, width) in enumerate(widths):
        values = rng.integers(0, 256, rows * width * np.dtype(dtype).itemsize, dtype=np.uint8).view(dtype)
        arrays[f"c{number}"] = pa.FixedSizeListArray.from_arrays(pa.array(values), width)
        expected[(f"c{number}",)] = values.tobytes()
    before, columns.BLOCK_BYTES = columns.BLOCK_BYTES, block_bytes
    try:
        got = records_of(pa.table(arrays))
    finally:
        columns.BLOCK_BYTES = before
    assert {key: bytes_of(tensor) for key, tensor in got.items()} == expected
