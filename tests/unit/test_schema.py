"""TensorDict <-> schema: offsets, nodes, keys, and every kind of field that cannot be stored."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rows_in_memory import ALL_DTYPES, assert_same_rows, random_rows
from tensordict import NonTensorData, TensorDict, lazy_stack, tensorclass

from td_datapipes.errors import FieldNotFoundError, SchemaError
from td_datapipes.schema import (
    ALIGNMENT_BYTES,
    Field,
    Group,
    Node,
    Schema,
    dtype_from_name,
    dtype_name,
    format_key,
    leaves,
    new_tensordict,
    normalise_key,
    schema_of,
)
from td_datapipes.varying import Varying


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_every_dtype_has_a_name_that_stands_for_it(dtype: torch.dtype) -> None:
    assert dtype_name(dtype) == str(dtype).removeprefix("torch.")
    assert dtype_from_name(dtype_name(dtype)) is dtype


def test_unknown_dtypes_are_named_with_those_that_are_known() -> None:
    with pytest.raises(SchemaError, match="dtype torch.quint8 cannot be stored; the dtypes that can are bool, uint8"):
        dtype_name(torch.quint8)
    with pytest.raises(SchemaError, match="dtype 'float7' is not known to torch .*; known: bool, uint8"):
        dtype_from_name("float7")


@given(
    st.lists(st.tuples(st.sampled_from(ALL_DTYPES), st.lists(st.integers(0, 6), max_size=3).map(tuple)), max_size=12)
)
def test_fields_lie_one_after_the_other_each_aligned(kinds: list[tuple[torch.dtype, tuple[int, ...]]]) -> None:
    group = Group.pack([((f"f{i}",), dtype, shape) for i, (dtype, shape) in enumerate(kinds)])
    end = 0
    for field, (dtype, shape) in zip(group.fields, kinds, strict=True):
        assert field.nbytes == torch.Size(shape).numel() * dtype.itemsize
        assert field.offset_bytes % dtype.itemsize == 0
        if field.nbytes:
            assert end <= field.offset_bytes < end + dtype.itemsize
            end = field.offset_bytes + field.nbytes
    assert group.record_bytes == end
    assert group.stride_bytes % ALIGNMENT_BYTES == 0
    assert end <= group.stride_bytes < end + ALIGNMENT_BYTES


def nested() -> TensorDict:
    td = TensorDict(
        {
            "obs": torch.zeros(4, 3),
            "next": TensorDict(
                {
                    "obs": torch.ones(4, 2, 3),
                    "deep": TensorDict({"er": torch.zeros(4, 2, 5)}, [4, 2, 5], names=["r", "t", "u"]),
                },
                [4, 2],
            ),
            "empty": TensorDict({}, [4]),
        },
        [4],
    )
    td["next"].names = ["r", "t"]
    return td


def test_the_tree_of_nodes_is_kept_with_batch_sizes_and_names() -> None:
    schema = schema_of(nested())
    assert schema.root == Node(key=(), batch_shape=(), names=("r",))  # a node's names begin with its parent's
    assert {node.key: (node.batch_shape, node.names) for node in schema.nodes[1:]} == {
        ("next",): ((2,), ("r", "t")),
        ("next", "deep"): ((2, 5), ("r", "t", "u")),
        ("empty",): ((), ("r",)),
    }
    assert list(schema.fields) == [("obs",), ("next", "obs"), ("next", "deep", "er")]
    assert [field.shape for field in schema.fields.values()] == [(3,), (2, 3), (2, 5)]


def test_leaves_and_nodes_make_the_tensordict_again() -> None:
    td = nested()
    values = dict(leaves(td))
    again = new_tensordict(values, schema_of(td).nodes, 4)
    assert_same_rows(again, td)
    assert again["obs"] is values["obs",]  # nothing is copied
    row = new_tensordict({key: value[1] for key, value in values.items()}, schema_of(td).nodes, None)
    assert_same_rows(row, td[1])


def test_a_flat_key_with_a_dot_and_a_nested_one_both_survive() -> None:
    td = TensorDict({"a.b": torch.zeros(2), "a": {"b": torch.ones(2)}}, [2])
    schema = schema_of(td)
    assert set(schema.fields) == {("a.b",), ("a", "b")}
    assert {str(field) for field in schema.fields.values()} == {"'a.b': float32[]", "('a', 'b'): float32[]"}
    assert_same_rows(new_tensordict(dict(leaves(td)), schema.nodes, 2), td)


@pytest.mark.parametrize(
    ("key", "flat"),
    [("a", ("a",)), (("a", "b"), ("a", "b")), ((("a",), ("b", ("c",))), ("a", "b", "c")), (["a", "b"], ("a", "b"))],
)
def test_keys_are_flattened(key: Any, flat: tuple[str, ...]) -> None:
    assert normalise_key(key) == flat


@pytest.mark.parametrize("key", [(), 3, None, ("a", 3), ("a", ())])
def test_what_is_no_key_is_refused(key: Any) -> None:
    with pytest.raises(SchemaError, match="a field is named by a string or a non-empty tuple of strings"):
        normalise_key(key)


def test_select_takes_fields_and_whole_nodes_in_the_schemas_order() -> None:
    schema = schema_of(nested())

    def keys(*wanted: Any) -> list[tuple[str, ...]]:
        return [field.key for field in schema.select(wanted)]

    assert [field.key for field in schema.select(None)] == list(schema.fields)
    assert keys() == []
    assert keys("next", "obs") == list(schema.fields)
    assert keys(("next", "deep"), ("next", "deep", "er")) == [("next", "deep", "er")]
    assert keys(("next", "obs"), "obs") == [("obs",), ("next", "obs")]


def test_a_field_that_does_not_exist_is_named_with_those_that_do() -> None:
    schema = schema_of(nested())
    for wrong, shown in (("Obs", "'Obs'"), (("next", "nope"), "('next', 'nope')"), (("obs", "x"), "('obs', 'x')")):
        with pytest.raises(FieldNotFoundError) as caught:
            schema.select([wrong])
        assert str(caught.value).startswith(f"there is no field {shown}; the fields are 'obs', ('next', 'obs')")
    with pytest.raises(FieldNotFoundError, match=r"not the string 'obs'; write \['obs'\]"):
        schema.select("obs")


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"a": (torch.float32, (2,)), "b": (torch.int64, ())}, ""),
        ({"b": (torch.int64, ()), "a": (torch.float32, (2,))}, ""),
        ({"a": (torch.float64, (2,)), "b": (torch.int64, ())}, "'a': float32[2] here, 'a': float64[2] there"),
        ({"a": (torch.float32, (3,)), "b": (torch.int64, ())}, "'a': float32[2] here, 'a': float32[3] there"),
        ({"a": (torch.float32, (2,))}, "field 'b' is missing there"),
        ({"a": (torch.float32, (2,)), "b": (torch.int64, ()), "c": (torch.bool, ())}, "field 'c' is missing here"),
    ],
)
def test_two_schemas_differ_by_the_first_field_that_does(other: dict[Any, Any], said: str) -> None:
    mine = schema_of(random_rows(3, {"a": (torch.float32, (2,)), "b": (torch.int64, ())}))
    theirs = schema_of(random_rows(5, other))
    assert mine.same_rows(theirs) is (said == "")
    assert mine.difference(theirs) == said


def test_two_schemas_with_other_nodes_differ() -> None:
    flat, named = nested(), nested()
    named["next"].names = ["r", "s"]
    assert not schema_of(flat).same_rows(schema_of(named))
    assert "batch sizes or names" in schema_of(flat).difference(schema_of(named))


@given(
    st.lists(st.tuples(st.text(min_size=1, max_size=3), st.text(max_size=3)), min_size=1, max_size=4),
    st.sampled_from(ALL_DTYPES),
)
def test_fields_and_nodes_survive_json(key: list[Any], dtype: torch.dtype) -> None:
    path = tuple("".join(part) for part in key)
    field = Field(key=path, dtype=dtype, shape=(2, 0, 5), offset_bytes=48)
    assert Field.from_json(json.loads(json.dumps(field.to_json()))) == field
    for names in (None, (None, "t")):
        node = Node(key=path, batch_shape=(7,), names=names)
        assert Node.from_json(json.loads(json.dumps(node.to_json()))) == node


class NotReallyDTensor(torch.Tensor):
    """Has what a DTensor is known by."""

    def to_local(self) -> torch.Tensor:
        return self


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.zeros(2, 3), 1.0, 0, torch.quint8)


UNSTORABLE: dict[str, tuple[Callable[[], Any], str]] = {
    "more batch dims": (lambda: NonTensorData("x", batch_size=[2, 3]), "it has the batch dims [2, 3]"),
    "jagged behind": (
        lambda: torch.nested.nested_tensor([torch.zeros(2, 2), torch.zeros(2, 2)], layout=torch.jagged).transpose(1, 2),
        "its ragged dim is dim 2",
    ),
    "sparse": (lambda: torch.eye(2).to_sparse(), "torch.sparse_coo"),
    "quantized": (quantized, "quantized"),
    "meta": (lambda: torch.zeros(2, device="meta"), "meta"),
    "packed": (lambda: torch.zeros(2, dtype=torch.float4_e2m1fn_x2), "float4_e2m1fn_x2 cannot be stored"),
    "distributed": (lambda: torch.zeros(2).as_subclass(NotReallyDTensor), "DTensor; store its full_tensor()"),
}


@pytest.mark.parametrize("kind", UNSTORABLE)
def test_a_field_that_cannot_be_stored_is_named(kind: str) -> None:
    make, said = UNSTORABLE[kind]
    td = TensorDict({"fine": torch.zeros(2), "n": TensorDict({"bad": make()}, [2])}, [2])
    with pytest.raises(SchemaError) as caught:
        schema_of(td)
    assert "field ('n', 'bad')" in str(caught.value)
    assert said in str(caught.value)


def test_rows_that_differ_in_shape_are_named() -> None:
    ragged = lazy_stack([TensorDict({"ok": torch.zeros(1), "x": torch.zeros(1, n)}) for n in (2, 3)])
    with pytest.raises(
        SchemaError, match=r"rows of field 'x' cannot be put together .*float32\[1, 2\], float32\[1, 3\]"
    ):
        schema_of(ragged)


def test_rows_that_differ_in_their_first_dim_alone_are_of_variable_length() -> None:
    ragged = lazy_stack([TensorDict({"ok": torch.zeros(1), "x": torch.zeros(n, 3)}) for n in (2, 0)])
    field = schema_of(ragged).fields["x",]
    assert (field.varying, str(field)) == (
        Varying(kind="tensor", dtype=torch.float32, shape=(3,)),
        "'x': float32[*, 3]",
    )


def test_rows_that_agree_may_be_stacked_lazily() -> None:
    stacked = lazy_stack([TensorDict({"x": torch.full((3,), i)}) for i in range(4)])
    assert schema_of(stacked).fields["x",].shape == (3,)


@tensorclass
class Sample:
    """A tensorclass as users write them."""

    x: torch.Tensor
    y: torch.Tensor


def test_a_tensorclass_has_the_schema_of_its_fields() -> None:
    schema = schema_of(Sample(x=torch.zeros(3, 2), y=torch.zeros(3, dtype=torch.int8), batch_size=[3]))
    assert {key: field.shape for key, field in schema.fields.items()} == {("x",): (2,), ("y",): ()}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"a": torch.zeros(2)}, "not dict; wrap a dict"),
        (torch.zeros(2), "not Tensor"),
        (None, "not NoneType"),
        (TensorDict({"a": torch.zeros(2)}), r"batch_size=\[\]: its leading dim must count rows"),
    ],
)
def test_what_has_no_rows_is_refused(value: Any, said: str) -> None:
    with pytest.raises(SchemaError, match=said):
        schema_of(value)


def test_fields_without_bytes_take_no_room() -> None:
    schema = schema_of(
        random_rows(3, {"a": (torch.float32, (10, 0)), "b": (torch.int8, (0, 3)), "c": (torch.bool, ())})
    )
    assert schema.groups[0].record_bytes == 1
    assert [field.nbytes for field in schema.fields.values()] == [0, 0, 1]
    assert schema_of(TensorDict({}, [2])).groups[0].stride_bytes == 0


def test_messages_tell_flat_keys_from_nested_ones() -> None:
    assert (format_key(("a.b",)), format_key(("a", "b"))) == ("'a.b'", "('a', 'b')")
    assert str(Schema(groups=(), nodes=(Node(key=()),))) == ""
