"""What tensordict promises of a TensorDict, and its store of what is kept on a server, kept by `RedisTensorDict`.

The oracle is a TensorDict in memory that the same is done to.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from remote_tds import LAYOUTS, assert_same, plain, remote, sample
from rows_in_memory import assert_same_tensor, random_rows, random_tensor
from servers import ServerProcess
from tensordict import NonTensorData, NonTensorStack, TensorDict, is_tensor_collection, lazy_stack, tensorclass
from tensordict.nn import TensorDictModule
from tensordict.store import LazyStackedTensorDictStore, TensorDictStore

from td_datapipes import RedisTensorDict
from td_datapipes.errors import SchemaError

MANY = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
FEW = settings(MANY, max_examples=15)
DTYPES = (torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64, torch.uint16, torch.float8_e4m3fn)
WRITABLE = (torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64, torch.uint8)


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pair(server: ServerProcess, layout: str) -> tuple[Any, TensorDict]:
    """The same on a server and in memory."""
    td = sample()
    return remote(td, server, layout), td


@tensorclass
class Sample:
    """A tensorclass with a tensor, a node and a value."""

    x: torch.Tensor
    inner: TensorDict
    label: str


# Indices.


@st.composite
def batch_sizes(draw: st.DrawFn) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))


@st.composite
def parts(draw: st.DrawFn, size: int, *, advanced: bool = True) -> Any:
    """An index of one dim."""
    rows = st.integers(-size, size - 1)
    kinds = ["int", "slice", "full"] + ["list", "tensor", "matrix", "mask", "array", "range"] * advanced
    kind = draw(st.sampled_from(kinds))
    if kind == "int":
        return draw(rows)
    if kind == "slice":
        bound = st.none() | st.integers(-size - 2, size + 2)
        return slice(draw(bound), draw(bound), draw(st.none() | st.integers(1, 3)))
    if kind == "full":
        return slice(None)
    if kind == "range":
        return range(draw(st.integers(0, size)), size)
    if kind == "mask":
        return torch.tensor(draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    found = draw(st.lists(rows, max_size=6))
    if kind == "matrix":
        return torch.tensor([found, found[::-1]], dtype=torch.int64)
    if kind == "array":
        return np.array(found, dtype=np.int64)
    return found if kind == "list" else torch.tensor(found, dtype=torch.int64)


@st.composite
def indices(draw: st.DrawFn, batch_size: tuple[int, ...]) -> Any:
    """Any index of a TensorDict of that batch size."""
    kind = draw(st.sampled_from(["one", "one", "tuple", "ellipsis", "new dim", "mask of all", "all"]))
    if kind == "one":
        return draw(parts(batch_size[0]))
    if kind == "all":
        return draw(st.sampled_from([..., (), slice(None), (...,)]))
    if kind == "mask of all":
        number = int(np.prod(batch_size))
        return torch.tensor(draw(st.lists(st.booleans(), min_size=number, max_size=number))).reshape(batch_size)
    if kind == "new dim":
        return (None, draw(parts(batch_size[0], advanced=False)))
    # One advanced index at most: where several meet, torch broadcasts them, which not every draw allows.
    where = draw(st.integers(0, len(batch_size) - 1))
    found = [draw(parts(size, advanced=at == where)) for at, size in enumerate(batch_size)]
    keep = draw(st.integers(1, len(found)))
    return (..., *found[-keep:]) if kind == "ellipsis" else tuple(found[:keep])


def drawn(data: st.DataObject, dtypes: tuple[torch.dtype, ...]) -> TensorDict:
    """A TensorDict of drawn shapes and dtypes, with a node in it."""
    batch_size = data.draw(batch_sizes())
    shape = st.lists(st.integers(0, 3), max_size=2).map(tuple)
    leaf = st.tuples(st.sampled_from(dtypes), shape)
    keys: list[Any] = ["a", "b", ("n", "x"), ("n", "m", "y")]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
    td = TensorDict({}, batch_size)
    for key in keys[: data.draw(st.integers(1, 4))]:
        dtype, tail = data.draw(leaf)
        td[key] = random_tensor((*batch_size, *tail), dtype, generator)
    return td


@MANY
@given(data=st.data())
def test_any_index_reads_what_memory_gives(server: ServerProcess, layout: str, data: st.DataObject) -> None:
    td = drawn(data, DTYPES)
    there = remote(td, server, layout)
    for _ in range(3):
        index = data.draw(indices(tuple(td.batch_size)))
        assert_same(there[index], td[index])
    there.close()


@MANY
@given(data=st.data())
def test_any_index_of_an_entry_reads_what_memory_gives(server: ServerProcess, layout: str, data: st.DataObject) -> None:
    td = drawn(data, DTYPES)
    there = remote(td, server, layout)
    index = data.draw(indices(tuple(td.batch_size)))
    for key in td.keys(True, True):
        # An ellipsis takes the last dims of the entry here, which may have no elements.
        try:
            expected = td.get(key)[index]
        except IndexError:
            with pytest.raises(IndexError):
                there.get_at(key, index)
        else:
            assert_same_tensor(there.get_at(key, index), expected, (key, index))
    there.close()


@MANY
@given(data=st.data())
def test_any_index_writes_what_memory_takes(server: ServerProcess, layout: str, data: st.DataObject) -> None:
    td = drawn(data, WRITABLE)
    there = remote(td, server, layout)
    for number in range(3):
        index = data.draw(indices(tuple(td.batch_size)))
        target = td[index]
        fields = {key: (target.get(key).dtype, ()) for key in target.keys(True, True)}
        fresh = target.clone()
        generator = torch.Generator().manual_seed(number)
        for key, (dtype, _) in fields.items():
            fresh[key] = random_tensor(tuple(target.get(key).shape), dtype, generator)
        there[index] = fresh
        td[index] = fresh
        assert_same(there.to_tensordict(), td)
    there.close()


@FEW
@given(data=st.data())
def test_set_at_writes_what_memory_takes(server: ServerProcess, layout: str, data: st.DataObject) -> None:
    td = drawn(data, WRITABLE)
    there = remote(td, server, layout)
    index = data.draw(parts(td.batch_size[0]))
    for key in list(td.keys(True, True)):
        for value in (torch.ones_like(td.get(key)[index]), torch.zeros((), dtype=td.get(key).dtype)):
            there.set_at_(key, value, index)
            td.set_at_(key, value, index)
    assert_same(there.to_tensordict(), td)
    there.close()


@FEW
@given(data=st.data())
def test_indices_that_memory_refuses_are_refused(server: ServerProcess, layout: str, data: st.DataObject) -> None:
    td = sample(5)
    there = remote(td, server, layout)
    wrong = data.draw(
        st.sampled_from([5, -6, [0, 5], torch.tensor([7]), torch.zeros(4, dtype=torch.bool), torch.ones(2)])
    )
    with pytest.raises(IndexError):
        td[wrong]
    with pytest.raises(IndexError):
        there[wrong]
    with pytest.raises(IndexError):
        there[wrong] = 0
    assert_same(there.to_tensordict(), td)
    there.close()


def test_a_number_or_a_dictionary_is_written_to_rows(pair: tuple[Any, TensorDict]) -> None:
    there, td = pair
    for each in (there, td):
        each[2] = 0
        each[[4, 5]] = {"a": torch.ones(2, 3), "n": {"x": torch.full((2, 2, 2), 2.0, dtype=torch.bfloat16)}}
    assert_same(there.to_tensordict(), td)


def test_rows_of_a_node_are_read_and_written_through_its_view(pair: tuple[Any, TensorDict]) -> None:
    there, td = pair
    assert_same(there["n"][3:7], td["n"][3:7])
    there["n"][1] = td["n"][2]
    td["n"][1] = td["n"][2].clone()
    there["n", "deep"][[5, 8]] = td["n", "deep"][[0, 1]]
    td["n", "deep"][[5, 8]] = td["n", "deep"][[0, 1]].clone()
    assert_same(there.to_tensordict(), td)


def test_writing_rows_of_a_new_key_leaves_zeros_elsewhere(pair: tuple[Any, TensorDict]) -> None:
    there, _ = pair
    there[2:4] = TensorDict({"new": torch.ones(2, 5, dtype=torch.int32)}, [2])
    expected = torch.zeros(12, 5, dtype=torch.int32)
    expected[2:4] = 1
    assert torch.equal(there["new"], expected)


def test_rows_of_another_count_are_refused_and_nothing_is_written(pair: tuple[Any, TensorDict]) -> None:
    there, td = pair
    with pytest.raises(RuntimeError):
        there[2:5] = td[:2]
    with pytest.raises(RuntimeError):
        there.set_at_("a", torch.ones(2, 4), slice(0, 2))
    assert_same(there.to_tensordict(), td)


# Keys.


def test_keys_values_and_items_are_those_of_memory(pair: tuple[Any, TensorDict]) -> None:
    there, td = pair
    for nested in (False, True):
        for leaves in (False, True):
            keys = set(td.keys(nested, leaves))
            assert set(there.keys(nested, leaves)) == keys
            found = dict(there.items(nested, leaves))
            assert set(found) == keys
            assert len(list(there.values(nested, leaves))) == len(keys)
            for key in keys:
                if is_tensor_collection(td.get(key)):
                    assert_same(found[key].to_tensordict(), td.get(key))
                else:
                    assert found[key].dtype == td.get(key).dtype
    assert list(there.keys(True, True, sort=True)) == list(td.keys(True, True, sort=True))
    assert "a" in there.keys()  # noqa: SIM118
    assert ("n", "x") in there.keys(True)
    assert "a" in there
    assert ("n", "nothing") not in there.keys(True)


def test_entries_come_and_go_one_by_one(pair: tuple[Any, TensorDict]) -> None:
    there, td = pair
    for each in (there, td):
        each["new"] = torch.arange(12)
        each["n", "new"] = torch.arange(24).reshape(12, 2)
        each["other", "deep", "leaf"] = torch.ones(12)
        each.set("node", TensorDict({"u": torch.zeros(12, 4)}, [12]))
        del each["a"]
        each.del_(("n", "x"))
    assert_same(there.to_tensordict(), td)


def test_pop_gives_what_it_removes(pair: tuple[Any, TensorDict]) -> None:
    there, td = pair
    assert torch.equal(there.pop("a").view(torch.int32), td.pop("a").view(torch.int32))
    assert_same(there.pop("n"), td.pop("n"))
    assert there.pop("n", None) is None
    with pytest.raises(KeyError):
        there.pop("n")
    assert_same(there.to_tensordict(), td)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("a", "c"),
        ("a", ("n", "a")),
        (("n", "x"), "x"),
        ("n", "m"),
        (("n", "deep"), ("n", "d", "e")),
        ("a", "b"),
        ("a", "a"),
    ],
)
def test_renaming_is_that_of_memory(pair: tuple[Any, TensorDict], old: Any, new: Any) -> None:
    there, td = pair
    there.rename_key_(old, new)
    td.rename_key_(old, new)
    assert_same(there.to_tensordict(), td)
    assert_same(RedisTensorDict.from_redis(str_url(there)).to_tensordict(), td)


def str_url(there: Any) -> str:
    """Where it is, as a user would type it."""
    return f"redis://{there.url.address.removeprefix('redis://')}#{there.url.name}"


def test_missing_keys_raise_or_give_the_default(pair: tuple[Any, TensorDict]) -> None:
    there, _ = pair
    assert there.get("nothing", None) is None
    assert there.get(("n", "nothing"), 3) == 3
    assert there.get_at("nothing", 0, None) is None
    for action in (
        lambda: there["nothing"],
        lambda: there["n", "nothing"],
        lambda: there.del_("nothing"),
        lambda: there.rename_key_("nothing", "b"),
        lambda: there.rename_key_("a", "b", safe=True),
        lambda: there.set_("nothing", torch.zeros(12)),
        lambda: there.set_at_("nothing", 0, 0),
        lambda: there.update_({"nothing": torch.zeros(12)}),
    ):
        with pytest.raises(KeyError):
            action()


def test_update_merges_nodes_and_sets_leaves(pair: tuple[Any, TensorDict]) -> None:
    there, td = pair
    given: dict[str, Any] = {
        "a": torch.ones(12, 2, dtype=torch.int8),
        "n": {"x": torch.zeros(12, 1), "new": torch.ones(12)},
    }
    there.update(given)
    td.update(given)
    assert_same(there.to_tensordict(), td)
    given = {"b": torch.arange(12), "n": {"deep": {"flag": torch.ones(12, dtype=torch.bool)}}}
    there.update_(given)
    td.update_(given)
    there.update(TensorDict({"a": torch.zeros(12), "b": torch.zeros(12)}, [12]), keys_to_update=["b"])
    td.update(TensorDict({"a": torch.zeros(12), "b": torch.zeros(12)}, [12]), keys_to_update=["b"])
    there.update_at_(TensorDict({"b": torch.full((3,), 7.0)}, [3]), slice(0, 3))
    td.update_at_(TensorDict({"b": torch.full((3,), 7.0)}, [3]), slice(0, 3))
    assert_same(there.to_tensordict(), td)


def test_in_place_writes_keep_the_dtype_and_others_take_the_new_one(pair: tuple[Any, TensorDict]) -> None:
    there, td = pair
    for each in (there, td):
        each.set_("b", torch.full((12,), 3.7))
        assert each["b"].dtype == torch.int64
        each["a"] = torch.ones(12, 2, dtype=torch.float64)
        each.fill_("b", 5)
    assert there["a"].dtype == torch.float64
    assert_same(there.to_tensordict(), td)
    there.zero_()
    assert all(not there[key].any() for key in there.keys(True, True))


def test_what_does_not_begin_with_the_batch_size_is_refused(pair: tuple[Any, TensorDict]) -> None:
    there, td = pair
    with pytest.raises(RuntimeError):
        there["new"] = torch.zeros(11)
    with pytest.raises(RuntimeError):
        there.update({"a": torch.zeros(12), "new": torch.zeros(3)})
    assert_same(there.to_tensordict(), td)


def test_a_leaf_in_place_of_a_node_and_the_other_way_round(pair: tuple[Any, TensorDict]) -> None:
    there, td = pair
    for each in (there, td):
        each["n"] = torch.ones(12)
        each["a"] = TensorDict({"deep": torch.zeros(12, 2)}, [12])
    assert_same(there.to_tensordict(), td)


def test_setdefault_create_nested_clear_and_popitem(pair: tuple[Any, TensorDict]) -> None:
    there, _ = pair
    assert there.setdefault("a", torch.zeros(12)).shape == (12, 3)
    assert there.setdefault("fresh", torch.ones(12)).sum() == 12
    before = set(there.keys())
    key, _value = there.popitem()
    assert set(there.keys()) == before - {key}
    there.clear()
    assert list(there.keys()) == []
    assert there.batch_size == (12,)
    there["again"] = torch.arange(12)
    assert torch.equal(there["again"], torch.arange(12))


def test_more_than_one_batch_dim(server: ServerProcess, layout: str) -> None:
    td = random_rows(6, {"a": (torch.float32, (4, 3)), ("n", "b"): (torch.int64, (4,))})
    td.auto_batch_size_(2)
    there = remote(td, server, layout)
    assert there.batch_size == (6, 4)
    assert there.shape == (6, 4)
    assert (len(there), there.ndim, there.numel()) == (6, 2, 24)
    for index in ((2, 3), (slice(1, 4), 2), (..., 1), ([0, 5], [1, 3]), (slice(None), torch.tensor([3, 0]))):
        assert_same(there[index], td[index])
        there[index] = td[index] * 0
        td[index] = td[index] * 0
        assert_same(there.to_tensordict(), td)


def test_a_single_row_without_batch_dims(server: ServerProcess, layout: str) -> None:
    td = TensorDict({"a": torch.randn(3, 2), "s": torch.tensor(7), "n": {"b": torch.ones(2)}}, [])
    there = remote(td, server, layout)
    assert_same(there.to_tensordict(), td)
    for each in (there, td):
        each["a"] = torch.zeros(3, 2)
        each["new"] = torch.arange(4)
        each["n", "b"] = torch.full((5,), 2, dtype=torch.int16)
        each.set_at_("a", 5.0, (0, 1))
        each.set_at_("new", torch.tensor([8, 9]), slice(1, 3))
    assert_same(there.to_tensordict(), td)
    assert there.get_at("new", 1) == 8
    again = RedisTensorDict.from_redis(there.url)
    assert again.batch_size == ()
    assert_same(again.to_tensordict(), td)
    with pytest.raises(RuntimeError, match="batch_dims==0"):
        there[0]


# Non-tensor data.


def test_values_that_are_no_tensors(server: ServerProcess, layout: str) -> None:
    td = TensorDict(
        {
            "x": torch.arange(3),
            "one": "shared",
            "each": NonTensorStack("a", "b", "a"),
            "n": {"info": NonTensorData({"k": [1, None]}, batch_size=[3])},
        },
        [3],
    )
    td["n", "number"] = NonTensorData(5, batch_size=[3])
    there = remote(td, server, layout)
    assert there["one"] == "shared"
    assert there["each"] == ["a", "b", "a"]
    assert plain(there.get(("n", "number"))) == 5
    assert_same(there.to_tensordict(), td)
    assert there[1]["each"] == "b"
    assert there[[2, 0]]["each"] == ["a", "a"]
    again = RedisTensorDict.from_redis(there.url)
    again.set_non_tensor("late", {"k": 1})
    assert there["late"] == {"k": 1}


@pytest.mark.parametrize("values", [["a", "b", "a"], ["a", "a", "a"]])
def test_each_row_has_its_own_value_and_only_the_row_written_changes(
    server: ServerProcess, layout: str, values: list[str]
) -> None:
    td = TensorDict({"x": torch.arange(3), "s": NonTensorStack(*values)}, [3])
    there = remote(td, server, layout)
    assert plain(there[1].get("s")) == values[1]
    assert there[[2, 0]].get("s").tolist() == [values[2], values[0]]
    there[1] = TensorDict({"x": torch.tensor(9), "s": "new"}, [])
    assert there.get("s").tolist() == [values[0], "new", values[2]]
    there.set_at_("s", "last", 2)
    assert there.get("s").tolist() == [values[0], "new", "last"]
    there[:2] = TensorDict({"s": NonTensorStack("p", "q")}, [2])
    assert there["s"] == ["p", "q", "last"]
    assert there["x"].tolist() == [0, 9, 2]


def test_a_row_of_a_shared_value_gets_one_of_its_own(server: ServerProcess, layout: str) -> None:
    there = remote(TensorDict({"x": torch.arange(3), "s": "all"}, [3]), server, layout)
    there.set_at_("s", "one", 1)
    assert there["s"] == ["all", "one", "all"]


# Locks.


def test_a_locked_one_takes_values_in_place_and_nothing_else(pair: tuple[Any, TensorDict]) -> None:
    there, td = pair
    there.lock_()
    assert there.is_locked
    assert there["n"].is_locked
    actions: list[Callable[[], Any]] = [
        lambda: there.set("new", torch.zeros(12)),
        lambda: there["n"].set("new", torch.zeros(12)),
        lambda: there.__setitem__("new", torch.zeros(12)),
        lambda: there.update({"new": torch.zeros(12)}),
        lambda: there.del_("a"),
        lambda: there.rename_key_("a", "c"),
        lambda: there.pop("a"),
        lambda: there.clear(),
        lambda: there.__setitem__(slice(0, 2), TensorDict({"new": torch.zeros(2)}, [2])),
        lambda: there["n"].unlock_(),
    ]
    for action in actions:
        with pytest.raises(RuntimeError, match=r"[Ll]ock"):
            action()
    assert_same(there.to_tensordict(), td)
    for each in (there, td):
        each.set_("b", torch.arange(12))
        each[3] = 0
        each.set_at_("a", torch.ones(3), 1)
        each.update_({"b": torch.ones(12, dtype=torch.int64)})
    assert_same(there.to_tensordict(), td)
    there.unlock_()
    there["new"] = torch.zeros(12)
    with there.lock_():
        assert there.is_locked
    assert not there.is_locked
    with there.unlock_():
        there["newer"] = torch.zeros(12)


@pytest.mark.parametrize("width", [1, 90, 400])
def test_hundreds_of_scattered_rows_and_elements_are_written(server: ServerProcess, layout: str, width: int) -> None:
    td = TensorDict({"a": torch.zeros(2000, width), "b": torch.zeros(2000, dtype=torch.int64)}, [2000])
    there = remote(td, server, layout, "many")
    rows = torch.as_tensor(np.random.default_rng(width).choice(2000, 700, replace=False))
    rows = torch.cat([rows, rows[:3], rows[-1:] + 1]).clamp(max=1999)  # some twice, some neighbours
    values = TensorDict({"a": torch.randn(len(rows), width), "b": torch.arange(len(rows))}, [len(rows)])
    there[rows] = values
    for position, row in enumerate(rows.tolist()):  # of a row that comes twice the last value stays
        td[row] = values[position]
    assert_same(there.to_local(), td)
    there.set_at_("a", 7.5, (slice(0, 1400, 2), 0))
    td.set_at_("a", 7.5, (slice(0, 1400, 2), 0))
    assert_same(there.to_local(), td)


def test_what_is_excluded_or_not_selected_in_place_is_removed_from_the_server(pair: tuple[Any, TensorDict]) -> None:
    there, td = pair
    assert there.exclude("a", ("n", "deep", "flag"), "missing", inplace=True) is there
    td.exclude("a", ("n", "deep", "flag"), inplace=True)
    assert_same(RedisTensorDict.from_redis(there.url).to_local(), td)
    assert there.select("b", ("n", "x"), inplace=True) is there
    td.select("b", ("n", "x"), inplace=True)
    assert_same(RedisTensorDict.from_redis(there.url).to_local(), td)
    with pytest.raises(KeyError):
        there.select("missing", inplace=True)
    there.select("missing", "b", inplace=True, strict=False)
    assert list(there.keys()) == ["b"]
    with there.lock_(), pytest.raises(RuntimeError, match="locked"):
        there.exclude("b", inplace=True)
    assert_same_tensor(there["b"], td["b"])


# Copies, and what is made of it.


def test_clones_and_copies_are_in_memory_and_apart(pair: tuple[Any, TensorDict]) -> None:
    there, td = pair
    for made in (there.clone(), there.to_local(), there.to_tensordict(), there.contiguous(), there.cpu()):
        assert type(made) is TensorDict
        assert_same(made, td)
    copy = there.clone()
    copy["b"] += 1
    assert torch.equal(there["b"], td["b"])
    for shallow in (there.clone(recurse=False), there.copy()):
        shallow["b"] = torch.zeros(12, dtype=torch.int64)
        shallow["fresh"] = torch.zeros(12)
        assert torch.equal(there["b"], td["b"])
        assert "fresh" not in there
    assert isinstance(there.to_dict()["n"], dict)


def test_stack_and_cat_give_what_is_in_memory(server: ServerProcess, layout: str) -> None:
    first, second = sample(4, 1), sample(4, 2)
    a, b = remote(first, server, layout, "a"), remote(second, server, layout, "b")
    assert_same(torch.stack([a, b]), torch.stack([first, second]))
    assert_same(torch.stack([a, second], 1), torch.stack([first, second], 1))
    assert_same(torch.cat([a, b]), torch.cat([first, second]))
    assert_same(TensorDict.stack([a, b]), torch.stack([first, second]))
    assert_same(lazy_stack([a, b])[1].to_tensordict(), second)
    assert type(torch.cat([a, b])) is TensorDict
    assert_same(torch.zeros_like(a), torch.zeros_like(first))
    assert_same(torch.unbind(a, 0)[2], first[2])


def test_arithmetic_and_shapes_are_those_of_a_copy_in_memory(server: ServerProcess, layout: str) -> None:
    td = TensorDict({"a": torch.arange(6.0).reshape(6, 1), "n": {"b": torch.arange(6)}}, [6])
    there = remote(td, server, layout)
    for made, expected in [
        (there + 1, td + 1),
        (2 * there, 2 * td),
        (there - there, td - td),
        (-there, -td),
        (there.sum(0), td.sum(0)),
        (there == td, td == td),
        (there.apply(lambda x: x * 2), td.apply(lambda x: x * 2)),
        (there.reshape(2, 3), td.reshape(2, 3)),
        (there.select("a"), td.select("a")),
        (there.exclude("a"), td.exclude("a")),
        (there.flatten_keys("."), td.flatten_keys(".")),
        (there.split(2)[1], td.split(2)[1]),
        (there.expand(2, 6), td.expand(2, 6)),
        (there.float(), td.float()),
        (there.gather(0, torch.tensor([1, 0])), td.gather(0, torch.tensor([1, 0]))),
    ]:
        assert type(made) is TensorDict
        assert_same(made, expected)
    assert bool((there == td).all())
    assert [int(row["n", "b"]) for row in there] == list(range(6))
    assert there.to(torch.float64)["n", "b"].dtype == torch.float64


def test_modules_read_and_write_it(server: ServerProcess, layout: str) -> None:
    td = TensorDict({"obs": torch.randn(6, 4)}, [6])
    there = remote(td, server, layout)
    module = TensorDictModule(torch.nn.Linear(4, 2), in_keys=["obs"], out_keys=[("out", "action")])
    with torch.no_grad():
        module(there)
        module(td)
    assert_same(there.to_tensordict(), td)


# Persistence and processes.


def test_what_was_written_is_found_again(pair: tuple[Any, TensorDict]) -> None:
    there, td = pair
    there["new"] = torch.arange(12)
    td["new"] = torch.arange(12)
    there.close()
    again = RedisTensorDict.from_store(there.url)
    assert_same(again.to_tensordict(), td)
    assert again.layout == there.layout
    assert_same(there.to_tensordict(), td)


def test_a_pickle_is_another_handle_on_the_same(pair: tuple[Any, TensorDict]) -> None:
    there, td = pair
    twin = pickle.loads(pickle.dumps(there))
    assert_same(twin.to_tensordict(), td)
    twin["b"] = torch.zeros(12, dtype=torch.int64)
    assert not there["b"].any()
    node = pickle.loads(pickle.dumps(there["n"]))
    assert_same(node.to_tensordict(), td["n"])
    there.lock_()
    assert pickle.loads(pickle.dumps(there)).is_locked


def for_their_store() -> TensorDict:
    """It cannot write dtypes that numpy lacks, nor tensors without elements."""
    td = sample()
    td["n", "x"] = td["n", "x"].to(torch.float64)
    del td["n", "deep", "none"]
    return td


def test_one_written_by_the_installed_store_is_read_and_written(server: ServerProcess) -> None:
    td = for_their_store()
    theirs = TensorDictStore.from_tensordict(td, host="127.0.0.1", port=server.port)
    there = RedisTensorDict.from_redis(server.url(theirs._td_id))
    assert there.layout == "tensordict_store"
    assert_same(there.to_tensordict(), td)
    there[2:5] = td[5:8]
    there["new"] = torch.arange(12)
    there["a"] = torch.ones(12, 2, dtype=torch.float64)
    del there["b"]
    there.set_non_tensor("s", "text")
    td[2:5] = td[5:8].clone()
    td["new"], td["a"] = torch.arange(12), torch.ones(12, 2, dtype=torch.float64)
    del td["b"]
    td.set_non_tensor("s", "text")
    assert_same(there.to_tensordict(), td)
    theirs.close()
    # One that stays open goes on with the shapes that it knows.
    again = TensorDictStore.from_store(td_id=theirs._td_id, host="127.0.0.1", port=server.port)
    assert_same(again.to_tensordict(), td)
    again.close()


def test_the_installed_store_opens_what_was_written_here(server: ServerProcess) -> None:
    td = for_their_store()
    remote(td, server, "tensordict_store", "shared")
    theirs = TensorDictStore.from_store(td_id="shared", host="127.0.0.1", port=server.port)
    assert_same(theirs.to_tensordict(), td)
    theirs["b"] = torch.arange(12)
    theirs["late"] = torch.ones(12)
    ours = RedisTensorDict.from_redis(server.url("shared"))
    assert torch.equal(ours["b"], torch.arange(12))
    assert torch.equal(ours["late"], torch.ones(12))
    theirs.close()


def test_lazy_stacks_of_the_installed_store(server: ServerProcess) -> None:
    rows = [TensorDict({"x": torch.full((3,), float(i)), "n": {"y": torch.tensor(i)}}) for i in range(5)]
    place: dict[str, Any] = {"host": "127.0.0.1", "port": server.port}
    theirs = LazyStackedTensorDictStore.from_lazy_stack(lazy_stack(rows, 0), **place)
    there, td = RedisTensorDict.from_redis(server.url(theirs._td_id)), torch.stack(rows)
    assert_same(there[[1, 3]], td[[1, 3]])
    for each in (there, td):
        each[[0, 2]] = TensorDict({"x": torch.full((2, 3), 9.0), "n": {"y": torch.tensor([7, 8])}}, [2])
        each["n"].set_at_("y", 55, 4)
        each["z"] = torch.arange(5)
        each["x"] = torch.arange(10.0).reshape(5, 2)
    again = LazyStackedTensorDictStore.from_store(td_id=theirs._td_id, **place)
    assert_same(again.to_tensordict(), td)
    theirs.close()
    again.close()


def test_rows_of_different_shapes_are_read_one_by_one(server: ServerProcess) -> None:
    rows = [TensorDict({"x": torch.full((3 + i,), float(i))}) for i in range(3)]
    theirs = LazyStackedTensorDictStore.from_lazy_stack(lazy_stack(rows, 0), host="127.0.0.1", port=server.port)
    there = RedisTensorDict.from_redis(server.url(theirs._td_id))
    for number, row in enumerate(rows):
        assert torch.equal(there[number]["x"], row["x"])
        assert torch.equal(there.get_at("x", number), row["x"])
    assert [part["x"].shape for part in there.to_local().unbind(0)] == [(3,), (4,), (5,)]
    with pytest.raises(RuntimeError, match="shapes are"):
        there["x"]
    with pytest.raises(SchemaError, match="rows of different shapes"):
        there[1] = rows[1]
    theirs.close()


# Tensorclasses.


def test_a_tensorclass_comes_back_as_one(server: ServerProcess, layout: str) -> None:
    made = Sample(x=torch.arange(4.0), inner=TensorDict({"y": torch.ones(4)}, [4]), label="l", batch_size=[4])
    there = RedisTensorDict.from_tensordict(made, server.url("tc"), layout=layout)  # type: ignore[arg-type]
    assert type(there) is Sample
    assert torch.equal(there.x, made.x)
    assert there.label == "l"
    there.x = torch.zeros(4)
    again = RedisTensorDict.from_redis(server.url("tc"))
    assert type(again) is Sample
    assert not again.x.any()
    row = again[2]
    assert type(row) is Sample
    assert row.inner["y"] == 1
    assert type(again.to_tensordict()) in (Sample, TensorDict)
    assert type(RedisTensorDict.from_redis(server.url("tc"), tensorclass=Sample)) is Sample


def test_a_tensorclass_within_keeps_its_type(server: ServerProcess) -> None:
    made = Sample(x=torch.arange(4.0), inner=TensorDict({"y": torch.ones(4)}, [4]), label="l", batch_size=[4])
    there = remote(TensorDict({"c": made, "z": torch.zeros(4)}, [4]), server, "records")
    assert type(there["c"]) is Sample
    assert type(there.to_tensordict()["c"]) is Sample
    assert type(there[1:3]["c"]) is Sample
    there["c"].x = torch.full((4,), 5.0)
    assert there["c", "x"].tolist() == [5.0] * 4
    assert torch.equal(there.get_at(("c", "x"), [1]), torch.tensor([5.0]))


# Names, devices, sizes.


def test_names_are_kept_and_changed(server: ServerProcess) -> None:
    td = TensorDict({"a": torch.zeros(3, 2), "n": TensorDict({"b": torch.ones(3, 2)}, [3, 2])}, [3], names=["rows"])
    there = remote(td, server, "records")
    assert there.names == ["rows"]
    assert there.to_tensordict().names == ["rows"]
    assert there["n"].batch_size == (3, 2)
    there.names = ["time"]
    assert RedisTensorDict.from_redis(there.url).names == ["time"]
    assert there[1:].names == ["time"]
    assert there["n"].names == ["time", None]
    td.names = ["time"]
    for each in (there, td):
        each["n"].names = ["time", "inner"]
    assert there.to_tensordict()["n"].names == td["n"].names == ["time", "inner"]
    for each in (there, td):
        each.names = None
    assert RedisTensorDict.from_redis(there.url).to_tensordict()["n"].names == td["n"].names


def test_a_nodes_own_batch_size(server: ServerProcess) -> None:
    td = TensorDict({"a": torch.zeros(3, 2), "n": TensorDict({"b": torch.ones(3, 2, 4)}, [3, 2])}, [3])
    there = remote(td, server, "records")
    there["m"] = TensorDict({"c": torch.arange(6).reshape(3, 2)}, [3, 2])
    td["m"] = TensorDict({"c": torch.arange(6).reshape(3, 2)}, [3, 2])
    assert_same(RedisTensorDict.from_redis(there.url).to_tensordict(), td)
    there["n"].batch_size = [3]
    td["n"].batch_size = [3]
    assert_same(there.to_tensordict(), td)
    assert_same(there[1], td[1])
    assert_same(there["m"][:, 1], td["m"][:, 1])
    with pytest.raises(NotImplementedError, match="to_local"):
        there.batch_size = []


def test_a_device_is_where_reads_put_tensors(server: ServerProcess, layout: str) -> None:
    there = remote(sample().to("cpu"), server, layout)
    assert there.device == torch.device("cpu")
    assert there[2].device == torch.device("cpu")
    assert RedisTensorDict.from_redis(there.url).device == torch.device("cpu")
    assert remote(sample(), server, layout, "none").device is None
    meta = RedisTensorDict.from_redis(there.url, device="meta")
    assert meta["a"].device == torch.device("meta")


def test_iadd_and_other_changes_in_place_raise_and_say_what_to_do(pair: tuple[Any, TensorDict]) -> None:
    there, td = pair
    actions: list[Callable[[], Any]] = [
        lambda: there.add_(1),
        lambda: there.apply_(lambda x: x),
        lambda: there.share_memory_(),
        lambda: there.memmap_(),
        lambda: there.view(3, 4),
        lambda: there.permute(0),
        lambda: there.unsqueeze(0),
        lambda: there.flatten_keys(".", inplace=True),
        lambda: there.apply(lambda x: x, inplace=True),
        lambda: there.requires_grad_(),
        lambda: torch.stack(list(td.unbind(0)), out=there),
        lambda: there.load_state_dict({}),
    ]
    for action in actions:
        with pytest.raises(NotImplementedError, match="to_local"):
            action()
    with pytest.raises(NotImplementedError, match="to_local"):
        there += 1
    assert_same(there.to_tensordict(), td)


def test_no_warning_and_no_thread_is_left_behind(pair: tuple[Any, TensorDict]) -> None:
    there, td = pair
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        there[2:4] = td[2:4]
        assert_same(there[[1, 1]], td[[1, 1]])
        there.close()
        there.close()
