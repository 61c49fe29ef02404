"""What ``tensordict.store`` wrote is read as it was written, with all that reading can do, on both servers."""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rows_in_memory import ALL_DTYPES, assert_same_rows, assert_same_tensor, random_rows, random_tensor
from servers import ServerProcess
from stores import NUMPY_DTYPES, open_store, read_store, write_lazy_store, write_store
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, lazy_stack, tensorclass
from tensordict.store import LazyStackedTensorDictStore, TensorDictStore
from test_dataset_read import ROWS, WAYS, check_all_ways

from td_datapipes import RedisTDDataset, RedisTDMixture, append_dataset, write_dataset
from td_datapipes.errors import (
    ConfigurationError,
    DataLossError,
    DatasetNotFoundError,
    FieldNotFoundError,
    PickledValueError,
    RowIndexError,
    SchemaError,
)


@pytest.mark.parametrize("dtype", NUMPY_DTYPES, ids=str)
def test_every_dtype_that_it_writes_is_bit_identical(server: ServerProcess, unique_name: str, dtype: Any) -> None:
    shapes: list[tuple[int, ...]] = [(), (3,), (2, 5), (33,)]
    td = random_rows(10, {f"of {shape}": (dtype, shape) for shape in shapes})
    check_all_ways(write_store(server, td, unique_name), td)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_dtypes_that_others_write_in_its_form_are_bit_identical(server: ServerProcess, unique_name: str) -> None:
    td = random_rows(10, {str(dtype): (dtype, (3,)) for dtype in ALL_DTYPES if dtype not in NUMPY_DTYPES})
    # Its keys and metadata, with the bytes that it could not make: dots nest.
    bits = TensorDict({key: td[key].view(torch.uint8) for key in td.keys()}, [10])  # noqa: SIM118
    url = write_store(server, bits, unique_name)
    for key in td.keys():  # noqa: SIM118
        meta = f"tensordict:{{{unique_name}}}:m:{key}"
        server.execute("HSET", meta, "dtype", key, "shape", "[10, 3]")
    nested = TensorDict({"torch": {key.removeprefix("torch."): td[key] for key in td.keys()}}, [10])  # noqa: SIM118
    check_all_ways(url, nested)


def test_tensors_that_do_not_lie_as_they_seem_are_read_as_they_seem(server: ServerProcess, unique_name: str) -> None:
    td = TensorDict(
        {
            "transposed": torch.arange(60.0).reshape(6, 10).T,
            "stepped": torch.arange(200)[::2].reshape(10, 10)[:, ::3],
            "expanded": torch.arange(5, dtype=torch.int16).expand(10, 5),
            "permuted": torch.randn(4, 10, 3).permute(1, 2, 0),
        },
        batch_size=[10],
    )
    check_all_ways(write_store(server, td, unique_name), td)


def nested_rows() -> TensorDict:
    return TensorDict(
        {
            "obs": torch.randn(10, 4),
            " ": torch.zeros(10, dtype=torch.bool),
            "ключ €\n": torch.rand(10),
            "a": {"": torch.ones(10, 2), "b": {"c": {"d": torch.arange(10)}}},
            "next": TensorDict({"obs": torch.randn(10, 3, 4), "t": torch.arange(30).reshape(10, 3)}, [10, 3]),
        },
        batch_size=[10],
    )


def test_a_tree_comes_back_with_its_keys(server: ServerProcess, unique_name: str) -> None:
    td = nested_rows()
    url = write_store(server, td, unique_name)
    td["next"].batch_size = [10]  # the store does not keep batch sizes of nested nodes
    check_all_ways(url, td)
    assert_same_rows(read_store(server, unique_name), td)
    with RedisTDDataset(url) as dataset:
        assert_same_rows(dataset[3], td[3])
        assert set(dataset.fields) == {key if isinstance(key, tuple) else (key,) for key in td.keys(True, True)}


@pytest.mark.parametrize("batch_size", [[6, 3], [6, 3, 2], [6, 1, 0]])
def test_rows_may_have_batch_dims_of_their_own(server: ServerProcess, unique_name: str, batch_size: list[int]) -> None:
    td = TensorDict(
        {"x": torch.randn(*batch_size, 4), "n": TensorDict({"y": torch.rand(*batch_size)}, batch_size)}, batch_size
    )
    url = write_store(server, td, unique_name)
    check_all_ways(url, td, [5, 0, 0])
    with RedisTDDataset(url) as dataset:
        assert_same_rows(dataset[2], td[2])
        assert dataset[[[0, 1], [2, 3]]].batch_size == torch.Size([2, 2, *batch_size[1:]])


@pytest.mark.parametrize("shape", [(), (4,), (0, 3)])
def test_without_batch_dims_it_is_one_row(server: ServerProcess, unique_name: str, shape: tuple[int, ...]) -> None:
    td = TensorDict({"x": torch.randn(shape), "n": {"y": torch.arange(3)}}, [])
    with RedisTDDataset(write_store(server, td, unique_name)) as dataset:
        assert len(dataset) == 1
        assert_same_rows(dataset[0], td)
        assert_same_rows(dataset[[0, 0]], torch.stack([td, td]))


@pytest.mark.parametrize("rows", [0, 1])
def test_stores_of_no_row_and_of_one(server: ServerProcess, unique_name: str, rows: int) -> None:
    td = random_rows(rows, {"x": (torch.float32, (3,)), ("n", "y"): (torch.bool, ())})
    url = write_store(server, td, unique_name)
    check_all_ways(url, td, [0] * rows)
    with RedisTDDataset(url) as dataset:
        assert len(list(dataset)) == rows
        with pytest.raises(RowIndexError, match=f"row {rows} is not in"):
            dataset[rows]


def test_a_store_without_entries_has_rows_without_fields(server: ServerProcess, unique_name: str) -> None:
    with RedisTDDataset(write_store(server, TensorDict({}, [4]), unique_name)) as dataset:
        assert len(dataset) == 4
        assert_same_rows(dataset[[1, 3]], TensorDict({}, [2]))


def test_fields_without_bytes_keep_shape_and_dtype_and_send_no_command(server: ServerProcess, unique_name: str) -> None:
    kinds: dict[Any, Any] = {"a": (torch.float32, (10, 0)), "b": (torch.int8, (0, 3)), ("n", "c"): (torch.bool, (2, 0))}
    td = random_rows(10, {**kinds, "normal": (torch.int64, (2,))})
    url = write_store(server, td, unique_name)
    check_all_ways(url, td)
    server.execute("CONFIG", "RESETSTAT")
    check_all_ways(url, td.select("a", "b", ("n", "c")), fields=["a", "b", "n"])
    for way in WAYS:
        with RedisTDDataset(url, fields=["a", "b", "n"], **way) as dataset:
            dataset[ROWS]
            assert (dataset.stats.commands, dataset.stats.bytes, dataset.stats.rows) == (0, 0, 6)
    commands = server.execute("INFO", "commandstats")
    assert not [name for name in commands if "getrange" in name or "eval" in name or "hmget" in name]


@tensorclass
class Transition:
    """A tensorclass as users write them."""

    obs: torch.Tensor
    reward: torch.Tensor


def test_a_tensorclass_is_read_as_the_tensordict_of_its_fields(server: ServerProcess, unique_name: str) -> None:
    rows = Transition(obs=torch.randn(5, 3), reward=torch.rand(5), batch_size=[5])
    url = write_store(server, rows, unique_name)
    check_all_ways(url, TensorDict({"obs": rows.obs, "reward": rows.reward}, [5]), [4, 0, 4])


@pytest.mark.parametrize(
    ("td_id", "options"),
    [
        (str(uuid.UUID(int=7)), {}),
        ("run/7 #ü%", {}),
        ("a:b:c", {}),
        ("x", {"prefix": "ns"}),
        ("x:y", {"prefix": "my:name space"}),
    ],
)
def test_it_is_found_by_id_and_namespace(server: ServerProcess, td_id: str, options: dict[str, Any]) -> None:
    td = random_rows(5, {"x": (torch.float32, (3,))})
    with RedisTDDataset(write_store(server, td, td_id, **options)) as dataset:
        assert_same_rows(dataset[:], td)
        assert dataset.name == (f"{options['prefix']}:{td_id}" if options else td_id)


def test_a_name_that_does_not_exist_comes_with_those_that_do(server: ServerProcess) -> None:
    td = random_rows(5, {"x": (torch.float32, (3,))})
    write_store(server, td, "theirs")
    write_store(server, td, "other", prefix="ns")
    write_lazy_store(server, lazy_stack(list(td.unbind(0))), "stack")
    write_dataset(td, server.url("ours"))
    server.execute("SET", "td_datapipes.staged.0:{unpublished}:__batch_size__", "[5]")
    with pytest.raises(
        DatasetNotFoundError,
        match=r"no data set 'x' at .*; it has 'ours'; TensorDictStore wrote 'ns:other', 'stack', 'theirs'$",
    ):
        RedisTDDataset(server.url("x"))
    server.flush()
    with pytest.raises(DatasetNotFoundError, match="; it has none$"):
        RedisTDDataset(server.url("theirs"))


def test_a_data_set_of_ours_goes_first(server: ServerProcess, unique_name: str) -> None:
    theirs, ours = random_rows(5, {"x": (torch.float32, (3,))}), random_rows(7, {"y": (torch.int8, ())})
    write_store(server, theirs, unique_name)
    write_dataset(ours, url := server.url(unique_name))
    with RedisTDDataset(url) as dataset, RedisTDDataset(server.url(f"tensordict:{unique_name}")) as other:
        assert_same_rows(dataset[:], ours)
        assert_same_rows(other[:], theirs)


@pytest.fixture(scope="module")
def plain_rows() -> TensorDict:
    return random_rows(100, {"x": (torch.float32, (25,)), ("n", "y"): (torch.float16, (3, 2)), "z": (torch.int16, ())})


@pytest.fixture
def plain(server: ServerProcess, plain_rows: TensorDict) -> Iterator[RedisTDDataset]:
    with RedisTDDataset(write_store(server, plain_rows, "plain")) as dataset:
        yield dataset


INDICES = st.one_of(
    st.integers(-100, 99),
    st.slices(100),
    st.lists(st.integers(-100, 99), max_size=60),
    st.lists(st.integers(-100, 99), max_size=40).map(lambda rows: torch.tensor(rows, dtype=torch.int64)),
    st.lists(st.booleans(), min_size=100, max_size=100).map(np.array),
    st.tuples(st.integers(0, 4), st.integers(1, 5)).flatmap(
        lambda shape: st.lists(st.integers(0, 99), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]).map(
            lambda rows: torch.tensor(rows, dtype=torch.int64).reshape(shape)
        )
    ),
    st.builds(lambda start, count: list(range(start, start + count)), st.integers(0, 60), st.integers(1, 40)),
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(index=INDICES, way=st.sampled_from(WAYS))
def test_an_index_gives_what_it_gives_of_the_rows_in_memory(
    plain: RedisTDDataset, plain_rows: TensorDict, index: Any, way: dict[str, Any]
) -> None:
    # numpy knows all of these; torch has no slices that go backwards.
    plain_index = index if isinstance(index, int | slice) else np.asarray(index)
    if isinstance(plain_index, np.ndarray) and not plain_index.size:
        plain_index = plain_index.astype(np.int64)
    chosen = torch.as_tensor(np.array(np.arange(100)[plain_index]))
    url: Any = plain.url
    with RedisTDDataset(url, **way) as dataset:
        assert_same_rows(dataset[index], plain_rows[chosen] if chosen.ndim else plain_rows[int(chosen)])


@pytest.mark.parametrize("gap_rows", [0, 3])
def test_near_rows_are_read_by_one_range_a_field_and_each_byte_once(
    server: ServerProcess, unique_name: str, gap_rows: int
) -> None:
    td = random_rows(60, {"x": (torch.float32, (64,)), "y": (torch.int8, ())})
    rows = [20, 21 + gap_rows, 22 + gap_rows, 20, 20]
    with RedisTDDataset(write_store(server, td, unique_name), strategy="covering") as dataset:
        assert_same_rows(dataset[rows], td[rows])
        assert (dataset.stats.ranges, dataset.stats.bytes) == (2, (3 + gap_rows) * 257)


def test_a_slice_is_one_range_a_field(plain: RedisTDDataset, plain_rows: TensorDict) -> None:
    assert_same_rows(plain[20:70], plain_rows[20:70])
    assert (plain.stats.ranges, plain.stats.bytes) == (3, 50 * (100 + 12 + 2))


def test_scattered_rows_are_asked_for_at_their_exact_length(plain: RedisTDDataset) -> None:
    with RedisTDDataset(plain.url, strategy="pipelined") as dataset:  # type: ignore[arg-type]
        dataset[[4, 40, 4, 30]]
        assert (dataset.stats.ranges, dataset.stats.commands, dataset.stats.bytes) == (9, 9, 3 * 114)


def test_an_atomic_batch_is_one_call(plain: RedisTDDataset) -> None:
    with RedisTDDataset(plain.url, atomic=True) as dataset:  # type: ignore[arg-type]
        dataset[0]  # the server knows the script from then on
        before = dataset.stats.commands
        dataset[torch.randperm(100)]
        assert dataset.stats.commands - before == 1


def test_fields_narrow_what_is_read(plain: RedisTDDataset, plain_rows: TensorDict) -> None:
    url: Any = plain.url
    for fields, kept in (
        (["z"], ["z"]),
        (["n"], [("n", "y")]),
        ([("n", "y"), "x"], ["x", ("n", "y")]),
        ([], []),
        (None, ["x", ("n", "y"), "z"]),
    ):
        with RedisTDDataset(url, fields=fields) as dataset:
            assert_same_rows(dataset[ROWS], plain_rows.select(*kept)[ROWS])
    with RedisTDDataset(url, fields=["z"], strategy="covering") as dataset:
        dataset[[3]]
        assert (dataset.row_bytes, dataset.stats.bytes) == (2, 2)
    with pytest.raises(FieldNotFoundError, match=r"no field 'X'; the fields are \('n', 'y'\), 'x', 'z'"):
        RedisTDDataset(url, fields=["X"])


def test_twenty_thousand_scattered_rows_are_read_by_lua(server: ServerProcess, unique_name: str) -> None:
    td = TensorDict({"row": torch.arange(200_000), "half": torch.arange(200_000) // 2}, [200_000])
    rows = torch.arange(0, 200_000, 10)[torch.randperm(20_000, generator=torch.Generator().manual_seed(0))]
    url = write_store(server, td, unique_name)
    for options, most_calls in (({"strategy": "lua"}, 50), ({"atomic": True}, 1)):
        with RedisTDDataset(url, **options) as dataset:  # type: ignore[arg-type]
            dataset[0]
            before = dataset.stats.commands
            assert_same_rows(dataset[rows], td[rows])
            assert 1 <= dataset.stats.commands - before <= most_calls


def test_a_pickled_data_set_and_its_copy_read_the_same(plain: RedisTDDataset, plain_rows: TensorDict) -> None:
    with pickle.loads(pickle.dumps(plain)) as copy:
        assert copy.fingerprint == plain.fingerprint
        assert_same_rows(copy[ROWS], plain_rows[ROWS])
    assert "rows=100" in repr(plain)
    assert "'x': float32[25]" in repr(plain)


# Values that are no tensors.


def rows_with_values() -> TensorDict:
    td = TensorDict({"x": torch.arange(5.0)}, [5])
    td["word"] = NonTensorStack(*(NonTensorData(word) for word in ("a", "b", "a", "c", "a")))
    td["same"] = NonTensorStack(*(NonTensorData("a") for _ in range(5)))
    td["n", "dicts"] = NonTensorStack(*(NonTensorData({"id": number, "tags": [number]}) for number in range(5)))
    td["task"] = NonTensorData({"name": "pong", "level": 3}, batch_size=[5])
    return td


WORDS = ["a", "b", "a", "c", "a"]


@pytest.mark.parametrize(
    "index", [[1], [2, 0], [3, 3, -1], [], slice(1, 4), slice(None), [True, False, True] + [False] * 2]
)
def test_values_follow_their_rows(server: ServerProcess, unique_name: str, index: Any) -> None:
    url = write_store(server, rows_with_values(), unique_name)
    numbers = np.arange(5)[
        index if isinstance(index, slice) else np.asarray(index, dtype=None if index else int)
    ].tolist()
    for way in WAYS:
        with RedisTDDataset(url, **way) as dataset:
            batch = dataset[index]
            assert batch.batch_size == torch.Size([len(numbers)])
            assert_same_tensor(batch["x"], torch.tensor(numbers, dtype=torch.float32))
            assert batch.get("task").data == {"name": "pong", "level": 3}
            if numbers:  # a stack of nothing holds nothing
                assert batch.get("word").tolist() == [WORDS[number] for number in numbers]
                assert batch.get("same").tolist() == ["a"] * len(numbers)
                assert batch.get(("n", "dicts")).tolist() == [{"id": n, "tags": [n]} for n in numbers]


def test_one_row_has_its_own_values(server: ServerProcess, unique_name: str) -> None:
    with RedisTDDataset(write_store(server, rows_with_values(), unique_name)) as dataset:
        row = dataset[3]
        assert row.batch_size == torch.Size([])
        assert (row["word"], row["same"], row["n", "dicts"]) == ("c", "a", {"id": 3, "tags": [3]})
        assert row["task"] == {"name": "pong", "level": 3}
        assert [row["word"] for row in dataset] == WORDS
        square = dataset[[[0, 1], [3, 4]]]
        assert square.batch_size == torch.Size([2, 2])
        assert square.get("word").tolist() == [["a", "b"], ["c", "a"]]


def test_values_are_those_that_upstream_gives(server: ServerProcess, unique_name: str) -> None:
    td = rows_with_values()
    td["task"] = NonTensorData("pong", batch_size=[5])  # of a dict, a row of a store makes a TensorDict
    url = write_store(server, td, unique_name)
    with open_store(server, unique_name) as store, RedisTDDataset(url) as before:
        assert before[:].get("task").tolist() == store.to_tensordict().get("task").tolist()
        # What was one value for all rows becomes one a row with the first indexed write.
        store[1] = TensorDict({"task": NonTensorData("changed")}, [])
        with RedisTDDataset(url) as after:
            for dataset in (before, after):
                assert dataset.refresh() == 5
                assert dataset[:].get("task").tolist() == ["pong", "changed", "pong", "pong", "pong"]
                for row in range(5):
                    theirs = store[row]
                    for key in ("word", "same", "task"):
                        assert dataset[row][key] == theirs.get(key), key


def test_only_the_written_row_changes(server: ServerProcess, unique_name: str) -> None:
    with RedisTDDataset(write_store(server, rows_with_values(), unique_name)) as dataset:
        for key, before in (("word", WORDS), ("same", ["a"] * 5)):
            assert dataset[:].get(key).tolist() == before
            with open_store(server, unique_name) as store:
                store[1] = TensorDict({key: NonTensorData("new")}, [])
            assert dataset[:].get(key).tolist() == [before[0], "new", *before[2:]]


def test_what_a_user_changes_of_a_value_is_his_alone(server: ServerProcess, unique_name: str) -> None:
    with RedisTDDataset(write_store(server, rows_with_values(), unique_name)) as dataset:
        for _ in range(2):
            row = dataset[2]
            assert row["n", "dicts"] == {"id": 2, "tags": [2]}
            row["n", "dicts"]["tags"].append(7)
            assert row["task"] == {"name": "pong", "level": 3}
            row["task"].clear()


def test_fields_choose_values_too(server: ServerProcess, unique_name: str) -> None:
    url = write_store(server, rows_with_values(), unique_name)
    for fields, kept in ((["word"], {"word"}), (["n"], {("n", "dicts")}), (["x"], {"x"}), ([], set())):
        with RedisTDDataset(url, fields=fields) as dataset:
            batch = dataset[[1, 0]]
            assert set(batch.keys(True, True, is_leaf=lambda kind: not issubclass(kind, TensorDict))) == kept
            assert set(dataset.fields) == {key if isinstance(key, tuple) else (key,) for key in kept}
    with pytest.raises(FieldNotFoundError, match="there is no field 'words'; the fields are 'x', .*'word'"):
        RedisTDDataset(url, fields=["words"])


class Opaque:
    """What JSON cannot hold."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque)

    __hash__ = None  # type: ignore[assignment]


def test_pickles_are_refused_unless_they_are_allowed(server: ServerProcess, unique_name: str) -> None:
    td = rows_with_values()
    td["opaque"] = NonTensorData(Opaque(), batch_size=[5])
    td["each"] = NonTensorStack(*(NonTensorData({number}) for number in range(5)))
    url = write_store(server, td, unique_name)
    with pytest.raises(PickledValueError, match="field 'each' of .* pass allow_pickle=True if you trust them"):
        RedisTDDataset(url)
    with RedisTDDataset(url, fields=["x", "word"]) as dataset:
        assert dataset[:].get("word").tolist() == WORDS
    with RedisTDDataset(url, allow_pickle=True) as dataset, pickle.loads(pickle.dumps(dataset)) as copy:
        for opened in (dataset, copy):
            batch = opened[[2, 0]]
            assert batch["opaque"] == Opaque()
            # As upstream reads it: what it pickled belongs to all rows.
            assert batch["each"] == [{number} for number in range(5)]


def test_a_mixture_reads_pickles_where_they_are_allowed(server: ServerProcess, unique_name: str) -> None:
    td = rows_with_values()
    td["opaque"] = NonTensorData(Opaque(), batch_size=[5])
    url = write_store(server, td, unique_name)
    with pytest.raises(PickledValueError, match="pass allow_pickle=True if you trust them"):
        RedisTDMixture([(url, 1)])
    with RedisTDMixture([(url, 1)], allow_pickle=True) as mixture:
        assert mixture[[2, 0]]["opaque"] == Opaque()


def test_a_value_that_was_pickled_since_is_refused(server: ServerProcess, unique_name: str) -> None:
    with RedisTDDataset(write_store(server, rows_with_values(), unique_name)) as dataset:
        with open_store(server, unique_name) as store:
            store["task"] = NonTensorData(Opaque(), batch_size=[5])
        with pytest.raises(
            Exception, match="field 'task' .* was a value of JSON when this was opened, and is pickled now"
        ):
            dataset[0]


def test_a_value_that_is_lost_or_spoiled_is_named(server: ServerProcess, unique_name: str) -> None:
    with RedisTDDataset(write_store(server, rows_with_values(), unique_name)) as dataset:
        key = f"tensordict:{{{unique_name}}}:d:word"
        server.execute("SET", key, '["a", "b"]')
        assert dataset[:2].get("word").tolist() == ["a", "b"]
        with pytest.raises(DataLossError, match=f"field 'word' of '{unique_name}' .* has 2 values, and row 4 is asked"):
            dataset[:]
        server.execute("SET", key, b"\xff{")
        with pytest.raises(DataLossError, match="field 'word' .* holds no JSON"):
            dataset[:]
        server.execute("DEL", key)
        with pytest.raises(DataLossError, match="field 'word' .* is missing; it was deleted, evicted"):
            dataset[:]


# Lazy stacks.


def some_stack(count: int = 10) -> list[TensorDict]:
    generator = torch.Generator().manual_seed(0)
    return [
        TensorDict({"x": random_tensor((2, 3), torch.float64, generator), "n": {"y": torch.tensor([i, -i])}}, [2])
        for i in range(count)
    ]


def test_a_lazy_stack_is_read_as_the_dense_one(server: ServerProcess, unique_name: str) -> None:
    rows = some_stack()
    check_all_ways(write_lazy_store(server, lazy_stack(rows), unique_name), torch.stack(rows))


def test_what_was_set_in_a_stored_stack_is_read(server: ServerProcess, unique_name: str) -> None:
    rows = some_stack()
    url = write_lazy_store(server, lazy_stack(rows), unique_name)
    expected = torch.stack(rows)
    with open_store(server, unique_name, LazyStackedTensorDictStore) as store:
        store[3] = expected[3] = TensorDict({"x": torch.ones(2, 3).double(), "n": {"y": torch.zeros(2).long()}}, [2])
        store["new"] = expected["new"] = torch.arange(20).reshape(10, 2)
    check_all_ways(url, expected)


@pytest.mark.parametrize("stack_dim", [1, -1, 2])
@pytest.mark.parametrize("inner", [(4, 3), (4, 4)])
@pytest.mark.parametrize("count", [5, 4])
def test_a_stack_along_a_later_dim_has_its_leading_dim_for_rows(
    server: ServerProcess, unique_name: str, stack_dim: int, inner: tuple[int, int], count: int
) -> None:
    parts = [
        random_rows(4, {"x": (torch.int16, (inner[1], 2)), "y": (torch.int8, (inner[1],))}, i) for i in range(count)
    ]
    for part in parts:
        part.batch_size = inner
    url = write_lazy_store(server, lazy_stack(parts, stack_dim), unique_name)
    expected = torch.stack(parts, stack_dim)
    with open_store(server, unique_name, LazyStackedTensorDictStore) as store:
        store["set"] = expected["set"] = torch.arange(4 * count * inner[1]).reshape(expected.batch_size)
        assert_same_tensor(store["x"], expected["x"])
    with RedisTDDataset(url) as dataset:
        assert len(dataset) == 4
        for index in ([3, 0, 0], slice(1, 3), 2, []):
            assert_same_rows(dataset[index], expected[index])
            for tensor in dataset[index].values():
                assert tensor.is_contiguous()


def ragged_rows(count: int = 6) -> list[TensorDict]:
    return [
        TensorDict({"x": torch.arange(2 * i).reshape(i, 2) + 100 * i, "n": {"y": torch.full((3,), float(i))}}, [])
        for i in range(count)
    ]


@pytest.mark.parametrize("index", [[4, 1, 1, 0], slice(1, 6, 2), [5]])
def test_rows_that_differ_in_shape_come_as_a_lazy_stack(server: ServerProcess, unique_name: str, index: Any) -> None:
    rows = ragged_rows()
    chosen = [rows[number] for number in np.arange(6)[index].tolist()]
    with RedisTDDataset(write_lazy_store(server, lazy_stack(rows), unique_name)) as dataset:
        batch = dataset[index]
        assert isinstance(batch, LazyStackedTensorDict)
        for got, expected in zip(batch.unbind(0), chosen, strict=True):
            assert_same_rows(got, expected)
        assert_same_rows(dataset[2], rows[2])
        assert [row["x"].shape[0] for row in dataset] == list(range(6))
    with RedisTDDataset(server.url(unique_name), fields=["n"]) as dense:
        assert_same_rows(dense[index], torch.stack([row.select("n") for row in chosen]))


def test_ragged_rows_along_a_later_dim_are_refused_by_name(server: ServerProcess, unique_name: str) -> None:
    parts = [TensorDict({"x": torch.zeros(3, i + 1)}, [3]) for i in range(2)]
    with pytest.raises(SchemaError, match=r"a lazy stack along dim 1, and the elements of leaf 'x' differ in shape"):
        RedisTDDataset(write_lazy_store(server, lazy_stack(parts, 1), unique_name))


# What it cannot tell apart, what nobody wrote, and what it cannot do.


def test_nothing_is_appended_to_a_store(server: ServerProcess, unique_name: str) -> None:
    td = random_rows(5, {"x": (torch.float32, (3,))})
    url = write_store(server, td, unique_name)
    before = set(server.execute("KEYS", "*"))
    with pytest.raises(ConfigurationError, match="was written by TensorDictStore, .* convert it to records"):
        append_dataset(td, url)
    assert set(server.execute("KEYS", "*")) == before


def test_a_leaf_with_leaves_below_it_is_named(server: ServerProcess, unique_name: str) -> None:
    store = TensorDictStore(host=server.host, port=server.port, td_id=unique_name, batch_size=[3])
    store["a"] = torch.arange(3)
    store["a.b"] = torch.arange(3)
    store.close()
    with pytest.raises(SchemaError, match="has 'a' both as a leaf and with leaves below it"):
        RedisTDDataset(server.url(unique_name))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (("dtype", "torch.float99"), "the metadata of leaf 'x' are not what TensorDictStore writes"),
        (("shape", "{"), "the metadata of leaf 'x' are not what TensorDictStore writes"),
        (("shape", "[4, 3]"), r"leaf 'x': float32\[4, 3\] does not begin with the batch size \[5\]"),
    ],
)
def test_metadata_that_make_no_sense_are_named(
    server: ServerProcess, unique_name: str, harm: tuple[str, str], said: str
) -> None:
    url = write_store(server, random_rows(5, {"x": (torch.float32, (3,))}), unique_name)
    server.execute("HSET", f"tensordict:{{{unique_name}}}:m:x", *harm)
    with pytest.raises(SchemaError, match=said):
        RedisTDDataset(url)
