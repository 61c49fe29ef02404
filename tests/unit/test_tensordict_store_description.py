"""What describes a store, read from its metadata: no server."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from td_datapipes.errors import SchemaError
from td_datapipes.layouts import TensorDictStoreLayout
from td_datapipes.layouts.tensordict_store import (
    StoreDescription,
    StoredLeaf,
    describe_store,
    group_of,
    leaf_path,
    parse_leaf,
    store_candidates,
    store_key,
    store_name,
    value_kind,
)


def tensor(path: str, shape: str = "[4, 3]", dtype: str = "torch.float32", **more: str) -> StoredLeaf:
    found = {"shape": shape, "dtype": dtype, **more}
    return parse_leaf(path, {name.encode(): text.encode() for name, text in found.items()}, (4,), None)


def describe(*leaves: StoredLeaf, batch_size: tuple[int, ...] = (4,), **more: Any) -> StoreDescription:
    return describe_store("name", "ns", "id", batch_size=batch_size, leaves=leaves, **more)


def test_keys_are_spelt_as_upstream_spells_them() -> None:
    assert store_key("tensordict", "abc", "d:a.b") == b"tensordict:{abc}:d:a.b"
    found = describe(tensor("a.b"))
    assert found.data_key("a.b") == b"ns:{id}:d:a.b"
    assert found.meta_key("a.b") == b"ns:{id}:m:a.b"
    assert found.chunk_key(0, 0) == b"ns:{id}:d:a.b"
    assert found.id == "ns:{id}"


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("abc", [("tensordict", "abc")]),
        ("ns:abc", [("tensordict", "ns:abc"), ("ns", "abc")]),
        ("a:b:c", [("tensordict", "a:b:c"), ("a", "b:c"), ("a:b", "c")]),
        (":a:", [("tensordict", ":a:")]),
    ],
)
def test_a_name_may_stand_for_these(name: str, places: list[tuple[str, str]]) -> None:
    assert list(store_candidates(name)) == places


@pytest.mark.parametrize(
    ("key", "name"),
    [
        (b"tensordict:{abc}:__batch_size__", "abc"),
        (b"ns:{abc}:__type__", "ns:abc"),
        (b"a:b:{c}d}:__batch_size__", "a:b:c}d"),
        (b"tensordict:{abc}:__keys__", None),
        (b"tensordict:{abc}:d:x", None),
        (b"{abc}:__batch_size__", None),
        (b"td:{abc}:manifest", None),
    ],
)
def test_the_name_that_opens_what_a_key_belongs_to(key: bytes, name: str | None) -> None:
    assert store_name(key) == name
    if name is not None:
        assert any(key.startswith(store_key(*place, "__")) for place in store_candidates(name))


def test_a_tensor_is_known_by_its_shape_and_dtype() -> None:
    leaf = tensor("a.b", "[4, 2]", "torch.bfloat16")
    assert (leaf.key, leaf.kind, leaf.dtype, leaf.shape) == (("a", "b"), "tensor", torch.bfloat16, (4, 2))
    assert leaf.nbytes == 16
    assert leaf.expected == (
        *((b"shape", b"[4, 2]"), (b"dtype", b"torch.bfloat16")),
        *((b"is_non_tensor", None), (b"homogeneous", None), (b"layout", None)),
    )
    assert str(leaf) == "('a', 'b'): bfloat16[4, 2]"


@pytest.mark.parametrize(
    ("encoding", "kind"),
    [(None, "json"), (b"json", "json"), (b"json_array", "json_array"), (b"pickle", "pickle"), (b"?", "pickle")],
)
def test_what_is_no_json_is_taken_for_a_pickle(encoding: bytes | None, kind: str) -> None:
    metadata = {b"is_non_tensor": b"1", **({} if encoding is None else {b"encoding": encoding})}
    assert value_kind(encoding) == kind
    # Written over a tensor, whose metadata are left behind.
    leaf = parse_leaf("x", {**metadata, b"shape": b"[4]", b"dtype": b"torch.int8"}, (4,), None)
    assert (leaf.kind, str(leaf)) == (kind, "'x': a pickled value" if kind == "pickle" else "'x': a value")


@pytest.mark.parametrize(
    ("shape", "layout", "kind"),
    [
        ("[5, 4, 3, 2]", None, "stacked"),  # count 5, inner [4, 3]
        ("[4, 5, 3, 2]", None, "tensor"),
        ("[5, 4, 3]", "batch", "stacked"),  # the shape tells, whatever is noted
        ("[4, 5, 3]", "stack", "tensor"),
    ],
)
def test_of_a_stack_along_a_later_dim_the_shape_tells_the_order(shape: str, layout: str | None, kind: str) -> None:
    metadata = {b"shape": shape.encode(), b"dtype": b"torch.int8", b"homogeneous": b"1"}
    if layout is not None:
        metadata[b"layout"] = layout.encode()
    assert parse_leaf("x", metadata, (4, 5, 3), 1).kind == kind


@pytest.mark.parametrize(("layout", "kind"), [(b"stack", "stacked"), (b"batch", "tensor"), (None, "tensor")])
def test_where_the_shape_fits_both_ways_what_was_noted_tells(layout: bytes | None, kind: str) -> None:
    metadata = {b"shape": b"[4, 4, 7]", b"dtype": b"torch.int8", **({} if layout is None else {b"layout": layout})}
    assert parse_leaf("x", metadata, (4, 4), 1).kind == kind
    assert parse_leaf("x", metadata, (4, 4), 0).kind == "tensor"


def test_rows_of_different_shapes_lie_one_behind_the_other() -> None:
    leaf = tensor("x", "[4, 1, 3]", "torch.int16", homogeneous="0", shapes="[[1, 3], [0, 3], [2, 3], [4]]")
    assert (leaf.kind, leaf.row_bytes) == ("ragged", (6, 0, 12, 8))
    assert leaf.shapes == ((1, 3), (0, 3), (2, 3), (4,))


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {b"shape": b"[4]"},
        {b"dtype": b"torch.int8"},
        {b"shape": b"no", b"dtype": b"torch.int8"},
        {b"shape": b"4", b"dtype": b"torch.int8"},
        {b"shape": b"[4]", b"dtype": b"torch.int9"},
        {b"shape": b"[4]", b"dtype": b"torch.int8", b"homogeneous": b"0"},
        {b"shape": b"[4]", b"dtype": b"torch.int8", b"homogeneous": b"0", b"shapes": b"[1]"},
    ],
)
def test_metadata_that_nobody_writes_are_named(metadata: dict[bytes, bytes]) -> None:
    with pytest.raises(SchemaError, match=r"the metadata of leaf 'a\.b' are not what TensorDictStore writes"):
        parse_leaf("a.b", metadata, (4,), None)


def test_each_tensor_is_a_group_with_its_rows_in_one_chunk() -> None:
    value = parse_leaf("v", {b"is_non_tensor": b"1"}, (4,), None)
    found = describe(tensor("n.y", "[4]", "torch.int64"), tensor("x"), value, device="cpu", tensorclass="a.B")
    assert [str(field) for field in found.schema.fields.values()] == ["('n', 'y'): int64[]", "'x': float32[3]"]
    assert [(layout.stride_bytes, layout.records_per_chunk) for layout in found.layouts] == [(8, 4), (12, 4)]
    assert [node.key for node in found.schema.nodes] == [(), ("n",)]
    assert (found.rows, found.others, found.kind, found.complete) == (4, (value,), "mutable", True)
    layout = TensorDictStoreLayout(description=found)
    assert (layout.spare_bytes, layout.alignment_bytes, layout.rows) == (0, 1, 4)


def test_more_batch_dims_belong_to_the_row() -> None:
    found = describe(tensor("x", "[4, 2, 3]"), batch_size=(4, 2))
    assert found.schema.fields["x",].shape == (2, 3)
    assert found.schema.root.batch_shape == (2,)


def test_without_batch_dims_there_is_one_row() -> None:
    found = describe(tensor("x", "[7]"), batch_size=())
    assert (found.rows, found.schema.fields["x",].shape) == (1, (7,))


def test_a_stacked_leaf_as_it_would_lie_in_place() -> None:
    leaf = parse_leaf("x", {b"shape": b"[5, 4, 3]", b"dtype": b"torch.int16"}, (4, 5), 1)
    assert leaf.kind == "stacked"
    (field,) = group_of(leaf, (4, 5)).fields
    assert (field.shape, field.nbytes) == ((5, 3), 30)


def test_shapes_that_do_not_begin_with_the_batch_size_are_named() -> None:
    with pytest.raises(SchemaError, match=r"leaf 'x': float32\[3, 3\] does not begin with the batch size \[4\]"):
        describe(tensor("x", "[3, 3]"))


def test_a_leaf_with_leaves_below_it_is_named() -> None:
    with pytest.raises(SchemaError, match="has 'a' both as a leaf and with leaves below it"):
        describe(tensor("a"), tensor("a.b"))


def test_a_part_of_a_key_may_not_have_a_dot() -> None:
    assert leaf_path(("a", "b")) == "a.b"
    with pytest.raises(SchemaError, match=r"cannot hold the key \('a', 'b\.c'\)"):
        leaf_path(("a", "b.c"))


def test_what_has_changed_is_said_with_both() -> None:
    then = describe(tensor("x"), tensor("y"))
    assert then.difference(describe(tensor("x"), tensor("y"), tensor("z"))) == ""
    assert then.difference(None) == "it has been removed"
    assert then.difference(describe(tensor("x"))) == "field 'y' has been removed"
    assert then.difference(describe(batch_size=(5,))) == "its batch size was [4] and is [5] now"
    changed = then.difference(describe(tensor("x", dtype="torch.int32"), tensor("y")))
    assert changed == "field 'x': float32[4, 3] of then is 'x': int32[4, 3] now"


def test_a_value_may_become_one_a_row_but_no_pickle() -> None:
    shared, each, pickled = (
        describe(parse_leaf("v", {b"is_non_tensor": b"1", b"encoding": encoding}, (4,), None))
        for encoding in (b"json", b"json_array", b"pickle")
    )
    assert shared.difference(each) == each.difference(shared) == ""
    assert shared.fingerprint == each.fingerprint != pickled.fingerprint
    assert shared.difference(pickled) == "field 'v': a value of then is 'v': a pickled value now"


def test_fingerprints_tell_stores_and_forms_apart() -> None:
    prints = {
        found.fingerprint
        for found in (
            describe(tensor("x")),
            describe(tensor("y")),
            describe(tensor("x", dtype="torch.int32")),
            describe(tensor("x", "[4, 2]")),
            describe_store("name", "ns", "other", batch_size=(4,), leaves=(tensor("x"),)),
            describe_store("name", "elsewhere", "id", batch_size=(4,), leaves=(tensor("x"),)),
        )
    }
    assert len(prints) == 6
    assert describe(tensor("x")).fingerprint == describe(tensor("x")).fingerprint
