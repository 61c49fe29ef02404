"""Values of variable length as bytes and spans, and back."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged_in_memory import jagged, texts
from rows_in_memory import ALL_DTYPES, bytes_of, random_tensor
from tensordict import NonTensorData, TensorDict, lazy_stack

from td_datapipes.arrow_rows import arrow_rows
from td_datapipes.errors import SchemaError
from td_datapipes.schema import Field, leaves
from td_datapipes.varying import NULL, Varying, decode_texts, encode_rows, varying_of

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support", "ignore:The PyTorch API of nested tensors")

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


def lengths_of(value: Any, varying: Varying) -> list[int]:
    return encode_rows(value, varying).lengths.tolist()


@given(st.lists(st.integers(0, 6), max_size=9), st.sampled_from(ALL_DTYPES))
def test_a_jagged_tensor_is_its_values_and_where_each_row_begins(lengths: list[int], dtype: torch.dtype) -> None:
    rows = [random_tensor((n, 2), dtype, torch.Generator().manual_seed(n)) for n in lengths]
    value = jagged(rows, torch.empty(0, 2, dtype=dtype))
    varying = varying_of(value)
    assert varying == Varying(kind="tensor", dtype=dtype, shape=(2,))
    encoded = encode_rows(value, varying)
    assert encoded.lengths.tolist() == lengths
    for row, start, length in zip(rows, encoded.starts.tolist(), lengths, strict=True):
        assert bytes(encoded.data[start : start + length * varying.item_bytes]) == bytes_of(row)


def test_whatever_way_rows_are_put_together_their_bytes_are_the_same() -> None:
    rows = [torch.arange(6.0).view(3, 2), torch.empty(0, 2), torch.full((1, 2), 7.0)]
    stacked = lazy_stack([TensorDict({"x": row}) for row in rows])
    ((_, of_lazy_stack),) = leaves(stacked)
    whole = jagged(rows, rows[0])
    padded = torch.zeros(3, 5, 2)
    for row, part in zip(rows, padded, strict=True):
        part[: len(row)] = row
    holes = torch.nested.nested_tensor_from_jagged(
        padded.reshape(15, 2), torch.tensor([0, 5, 10, 15]), torch.tensor([3, 0, 1])
    )
    part_of_more = torch.nested.nested_tensor_from_jagged(
        torch.cat([torch.ones(4, 2), *rows, torch.ones(1, 2)]), torch.tensor([4, 7, 7, 8])
    )
    for value in (whole, of_lazy_stack, holes, part_of_more, torch.nested.nested_tensor(rows)):
        varying = varying_of(value)
        assert varying == Varying(kind="tensor", dtype=torch.float32, shape=(2,))
        encoded = encode_rows(value, varying)
        assert (encoded.lengths.tolist(), encoded.starts.tolist()) == ([3, 0, 1], [0, 24, 24])
        assert bytes(encoded.data) == bytes_of(torch.cat(rows))


def test_lazily_conjugated_values_are_stored_as_what_they_stand_for() -> None:
    values = torch.tensor([1 + 2j, 3 - 4j])
    value = torch.nested.nested_tensor_from_jagged(values.conj(), torch.tensor([0, 1, 2]))
    assert bytes(encode_rows(value, Varying(kind="tensor", dtype=torch.complex64)).data) == bytes_of(values.conj())


def test_what_a_field_was_decides_what_a_batch_leaves_open() -> None:
    tensors = Varying(kind="tensor", dtype=torch.int32, shape=(2,))
    alike = torch.arange(12, dtype=torch.int32).view(2, 3, 2)
    assert varying_of(alike) is None
    assert varying_of(alike, tensors) == tensors
    assert (lengths_of(alike, tensors), bytes(encode_rows(alike, tensors).data)) == ([3, 3], bytes_of(alike))
    assert varying_of(alike.to(torch.int64), tensors) is None
    assert varying_of(torch.zeros(2, dtype=torch.int32), tensors) is None
    nothing = texts([None, None])
    assert varying_of(nothing) == Varying(kind="null")
    for kind in ("str", "bytes", "json"):
        assert varying_of(nothing, Varying(kind=kind)) == Varying(kind=kind)  # type: ignore[arg-type]
    assert varying_of(texts(["a"]), Varying(kind="bytes")) == Varying(kind="str")
    assert varying_of(texts(["a"]), Varying(kind="json")) == Varying(kind="json")


def test_the_kind_is_the_narrowest_that_holds_all_values() -> None:
    for values, kind in (
        (["a", None], "str"),
        ([b"a", None, b""], "bytes"),
        (["a", 1], "json"),
        ([{"a": 1}], "json"),
        ([], "null"),
    ):
        assert varying_of(texts(values)) == Varying(kind=kind)  # type: ignore[arg-type]


@given(st.lists(st.none() | st.text()), st.lists(st.none() | st.binary()), st.lists(JSON_VALUES))
def test_texts_come_back_as_they_were(strings: list[Any], blobs: list[Any], values: list[Any]) -> None:
    for kind, given_values in (("str", strings), ("bytes", blobs), ("json", values)):
        encoded = encode_rows(texts(given_values), Varying(kind=kind))  # type: ignore[arg-type]
        found = decode_texts(encoded.data, encoded.lengths, kind)  # type: ignore[arg-type]
        assert found == given_values
        assert [type(item) for item in found] == [type(item) for item in given_values]
        nothing = [kind != "json" and value is None for value in given_values]
        assert (encoded.lengths == NULL).tolist() == nothing


def test_a_value_that_all_rows_share_is_stored_once() -> None:
    encoded = encode_rows(NonTensorData("abc", batch_size=[4]), Varying(kind="str"))
    assert bytes(encoded.data) == b"abc"
    assert (encoded.starts.tolist(), encoded.lengths.tolist()) == ([0] * 4, [3] * 4)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ((1, 2), "it would come back as something else"),
        ({1: "a"}, "it would come back as something else"),
        (float("nan"), "not JSON compliant"),
        (object(), "not JSON serializable"),
    ],
)
def test_what_json_does_not_hold_is_refused_with_its_row(value: Any, said: str) -> None:
    with pytest.raises(SchemaError, match=f"the value of row 1 is of type {type(value).__name__}.*{said}"):
        encode_rows(texts([{}, value]), Varying(kind="json"))


def test_a_string_that_is_no_unicode_is_refused_with_its_row() -> None:
    with pytest.raises(SchemaError, match="the string of row 2 is no valid Unicode"):
        encode_rows(texts(["a", "b", "\ud800"]), Varying(kind="str"))


@given(st.lists(st.none() | st.text()))
def test_an_arrow_array_has_the_strings_without_a_copy(values: list[Any]) -> None:
    encoded = encode_rows(texts(values), Varying(kind="str"))
    data = np.frombuffer(encoded.data, dtype=np.uint8)
    made = arrow_rows(data, encoded.lengths, "str")
    assert made.to_arrow().to_pylist() == values
    if len(data):
        assert made.to_arrow().buffers()[2].address == data.ctypes.data


def test_arrow_rows_go_with_their_batch() -> None:
    data = np.frombuffer(b"abbccc", dtype=np.uint8)
    made = arrow_rows(data, np.array([1, 2, NULL, 3]), "bytes")
    td = TensorDict({"s": made, "row": torch.arange(4)}, [4])
    expected = [b"a", b"bb", None, b"ccc"]
    for index in (2, slice(1, 3), [3, 0], torch.tensor([[0, 1], [2, 3]])):
        part = td[index]
        assert part["s"].batch_size == part.batch_size
        rows = part["row"].reshape(-1).tolist()
        assert part["s"].to_arrow().to_pylist() == [expected[row] for row in rows]
    assert [row["s"].to_arrow().to_pylist() for row in td.unbind(0)] == [[value] for value in expected]
    other = arrow_rows(data, np.array([1, 2, NULL, 3]), "str")
    both: Any = torch.cat([td, TensorDict({"s": other, "row": torch.arange(4)}, [4])])
    with pytest.raises(SchemaError, match="put together from several batches"):
        both.get("s").to_arrow()


def test_a_field_says_what_its_values_are_and_survives_its_json() -> None:
    varying = Varying(kind="tensor", dtype=torch.bfloat16, shape=(4, 2))
    field = Field(key=("a", "b"), dtype=torch.int64, shape=(2,), offset_bytes=16, varying=varying)
    assert str(field) == "('a', 'b'): bfloat16[*, 4, 2]"
    assert Field.from_json(json.loads(json.dumps(field.to_json()))) == field
    text = Field(key=("t",), dtype=torch.int64, shape=(2,), offset_bytes=0, varying=Varying(kind="str"))
    assert (str(text), Field.from_json(text.to_json())) == ("'t': str", text)
    with pytest.raises(SchemaError, match="one of tensor, str, bytes, json, null, not 'set'"):
        Field.from_json({**text.to_json(), "varying": {"kind": "set", "dtype": "uint8", "shape": []}})
