"""`RedisTensorDict` over what `write_dataset` wrote: all fields are read, of variable length too; none is written."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ragged_in_memory import RaggedRows, jagged, texts
from rows_in_memory import assert_same_rows, assert_same_tensor, random_rows
from servers import ClusterProcess, ServerProcess
from tensordict import NonTensorData, NonTensorStack, TensorDict, is_leaf_nontensor, is_non_tensor

from td_datapipes import RedisReplayBuffer, RedisTDDataset, RedisTensorDict, append_dataset, write_dataset
from td_datapipes.catalog import connect, load_manifest
from td_datapipes.errors import (
    ConfigurationError,
    DataLossError,
    DatasetChangedError,
    RemoteOperationError,
    RowIndexError,
)

LENGTHS = [3, 0, 7, 5, 14, 1, 0, 30, 2, 9, 21, 4]
ROWS = RaggedRows(LENGTHS)
MASK = torch.tensor([length % 2 == 1 for length in LENGTHS])
CHUNK_BYTES = 80


@pytest.fixture
def url(server: ServerProcess, unique_name: str) -> str:
    """A data set of `ROWS`, whose values lie across chunks."""
    write_dataset(ROWS.td(), server.url(unique_name), chunk_bytes=CHUNK_BYTES)
    return server.url(unique_name)


def same_values(found: Any, expected: Any) -> None:
    """Both are of one kind, and have the same values."""
    assert type(found) is type(expected)
    if is_non_tensor(expected):
        assert found.tolist() == expected.tolist()
    elif expected.is_nested:
        assert (found.layout, found.shape[0]) == (torch.jagged, expected.shape[0])
        assert found.offsets().tolist() == expected.offsets().tolist()
        assert_same_tensor(found.values(), expected.values())
    else:
        assert_same_tensor(found, expected)


INDICES: dict[str, tuple[Any, list[int]]] = {
    "slice": (slice(2, 6), [2, 3, 4, 5]),
    "step": (slice(1, None, 3), [1, 4, 7, 10]),
    "all": (slice(None), list(range(12))),
    "ellipsis": (..., list(range(12))),
    "list": ([7, 0, 7, -1], [7, 0, 7, 11]),
    "array": (np.array([4, 4, 2]), [4, 4, 2]),
    "tensor": (torch.tensor([11, 3]), [11, 3]),
    "tuple": ((torch.tensor([1, 2]),), [1, 2]),
    "range": (range(8, 4, -2), [8, 6]),
    "mask": (MASK, MASK.nonzero().squeeze(1).tolist()),
    "none": ([], []),
}


@pytest.mark.parametrize("case", INDICES)
def test_rows_are_read_as_they_were_written(url: str, case: str) -> None:
    index, rows = INDICES[case]
    there = RedisTensorDict.from_redis(url)
    ROWS.assert_equal(there[index], rows)
    if rows:
        with RedisTDDataset(url) as dataset:
            expected = dataset[rows]
        for key in ("row", "tokens", ("text", "name"), "blob", "info"):
            same_values(there.get_at(key, index), expected.get(key))
            same_values(there[index].get(key), expected.get(key))
        assert list(there["text"][index]["name"]) == [ROWS.names[row] for row in rows]
    there.close()


def test_everything_is_read_at_once(url: str) -> None:
    there = RedisTensorDict.from_redis(url)
    for whole in (there.to_tensordict(), there.to_local(), there.clone(), pickle.loads(pickle.dumps(there)).to_local()):
        assert type(whole) is TensorDict
        ROWS.assert_equal(whole, range(12))
    ROWS.assert_equal(torch.cat([there[:5], there[5:]]), range(12))
    there.close()
    ROWS.assert_equal(there[:3], range(3))  # it dials anew
    there.close()


def test_a_row_is_what_a_data_set_gives(url: str) -> None:
    there = RedisTensorDict.from_redis(url)
    with RedisTDDataset(url) as dataset:
        for row in (0, 1, 4, -1):
            found, expected = there[row], dataset[row]
            assert found.batch_size == expected.batch_size == ()
            assert_same_tensor(found["tokens"], ROWS.tokens[row])
            assert_same_tensor(there.get_at("tokens", row), ROWS.tokens[row])
            assert_same_tensor(there.get_at("tokens", (row, slice(0, 2), 1)), ROWS.tokens[row][:2, 1])
            for key, values in ((("text", "name"), ROWS.names), ("blob", ROWS.blobs), ("info", ROWS.infos)):
                assert found[key] == expected[key] == values[row]
                same_values(there.get_at(key, row), expected.get(key))
    assert [row["row"].item() for row in there] == list(range(12))
    there.close()


def test_whole_fields_keys_items_and_values(url: str) -> None:
    there = RedisTensorDict.from_redis(url)
    with RedisTDDataset(url) as dataset:
        expected = dataset[:]
    assert set(there.keys()) == {"row", "text", "tokens", "blob", "info"}
    assert set(there.keys(True, True)) == set(expected.keys(True, True)) == {"row", "tokens"}
    leaves = {"row", ("text", "name"), "tokens", "blob", "info"}
    assert set(there.keys(True, True, is_leaf=is_leaf_nontensor)) == leaves
    assert ("text", "name") in there.keys(True)
    for key in leaves:
        same_values(there.get(key), expected.get(key))
    found = dict(there.items(True, True, is_leaf=is_leaf_nontensor))
    assert set(found) == leaves
    for key, value in found.items():
        same_values(value, expected.get(key))
    assert len(list(there.values())) == 5
    assert list(there["text", "name"]) == list(there["text"]["name"]) == ROWS.names
    assert there.get("nothing", None) is None
    some = there.select("tokens", ("text", "name"))
    assert set(some.keys(True)) == {"tokens", "text", ("text", "name")}
    there.close()


def test_what_it_consists_of_is_known_without_reading(server: ServerProcess, url: str) -> None:
    there = RedisTensorDict.from_redis(url)
    server.execute("CONFIG", "RESETSTAT")
    assert (there.batch_size, len(there), there.layout, there.device) == ((12,), 12, "records", None)
    structure = there.structure
    tokens = structure["tokens"]
    assert (tokens.dtype, tokens.device.type, tokens.layout) == (torch.int16, "meta", torch.jagged)
    assert (tokens.ndim, tokens.shape[0], tokens.shape[2]) == (3, 12, 3)
    assert tokens.values().shape == (sum(LENGTHS), 3)
    assert is_non_tensor(structure.get(("text", "name")))
    assert there.entry_class("info") is not torch.Tensor
    assert there.bytes() >= sum(LENGTHS) * 3 * 2 + 12 * 8
    assert "'tokens'" in repr(there)
    commands = server.execute("INFO", "commandstats")
    assert not {name for name in commands if "getrange" in name or name.removeprefix("cmdstat_") == "get"}
    there.close()


WRITES: dict[str, Callable[[Any], Any]] = {
    "rows": lambda td: td.__setitem__(
        slice(0, 2), TensorDict({"tokens": jagged(ROWS.tokens[:2], ROWS.tokens[0])}, [2])
    ),
    "a row": lambda td: td.__setitem__(0, TensorDict({"tokens": ROWS.tokens[0]})),
    "a number to rows": lambda td: td.__setitem__([1, 2], 0),
    "at": lambda td: td.set_at_("tokens", ROWS.tokens[0], 0),
    "a string at": lambda td: td.set_at_(("text", "name"), "x", 0),
    "a dense field at": lambda td: td.set_at_("row", 1, 0),
    "a key": lambda td: td.__setitem__("tokens", jagged(ROWS.tokens, ROWS.tokens[0])),
    "in place": lambda td: td.set_("tokens", jagged(ROWS.tokens, ROWS.tokens[0])),
    "a string": lambda td: td.set(("text", "name"), texts(ROWS.names)),
    "a new key": lambda td: td.__setitem__("new", torch.zeros(12)),
    "a new node": lambda td: td.__setitem__(("deep", "new"), torch.zeros(12)),
    "a view": lambda td: td["text"].__setitem__("name", texts(ROWS.names)),
    "an update": lambda td: td.update({"row": torch.zeros(12, dtype=torch.int64)}),
    "an update in place": lambda td: td.update_(td.to_local()),
    "an update at": lambda td: td.update_at_(td[:2], slice(0, 2)),
    "a removal": lambda td: td.__delitem__("tokens"),
    "pop": lambda td: td.pop("tokens"),
    "another name": lambda td: td.rename_key_("tokens", "words"),
    "fill": lambda td: td.fill_("row", 0),
    "zero": lambda td: td.zero_(),
    "clear": lambda td: td.clear(),
    "all of it": lambda td: td.clear_redis(),
    "names": lambda td: setattr(td, "names", ["time"]),
    "device": lambda td: setattr(td, "device", "cpu"),
    "in the background": lambda td: td.set_async("row", torch.zeros(12, dtype=torch.int64)).result(),
}


@pytest.mark.parametrize("write", WRITES)
def test_nothing_is_written(server: ServerProcess, url: str, write: str) -> None:
    before = {key: server.execute("DUMP", key) for key in server.execute("KEYS", "*")}
    there = RedisTensorDict.from_redis(url)
    with pytest.raises(
        RemoteOperationError, match=r"is frozen.*'tokens', .*append_dataset.*write_dataset.*to_local\(\)"
    ):
        WRITES[write](there)
    assert {key: server.execute("DUMP", key) for key in server.execute("KEYS", "*")} == before
    ROWS.assert_equal(there[:], range(12))
    there.close()


def test_indices_that_reshape_are_refused_by_name(url: str) -> None:
    there = RedisTensorDict.from_redis(url)
    for index in (torch.tensor([[0, 1], [2, 3]]), None, (slice(0, 2), None), (None, 0)):
        with pytest.raises(RowIndexError, match="reshapes the batch, which cannot be done with jagged tensors.*tokens"):
            there[index]
        with pytest.raises(
            RowIndexError, match="'tokens' is of variable length: its rows are selected by one dim alone"
        ):
            there.get_at("tokens", index)
    with pytest.raises(RowIndexError, match="'tokens' is of variable length"):
        there.get_at("tokens", (slice(0, 2), 0))
    with pytest.raises(IndexError, match="index 12 is out of bounds"):
        there[[0, 12]]
    # What has no jagged tensor is reshaped.
    assert there["text"][torch.tensor([[0, 1], [2, 3]])].batch_size == (2, 2)
    assert there.get_at("row", torch.tensor([[0, 1], [2, 3]])).tolist() == [[0, 1], [2, 3]]
    there.close()


def test_a_frozen_data_set_of_dense_fields_is_read_too(server: ServerProcess, unique_name: str) -> None:
    td = random_rows(20, {"a": (torch.float32, (3,)), "b": (torch.bfloat16, ())})
    write_dataset(td, server.url(unique_name))
    there = RedisTensorDict.from_redis(server.url(unique_name), atomic=True)
    assert_same_rows(there.to_local(), td)
    assert_same_rows(there[torch.tensor([[3, 1], [0, 0]])], td[torch.tensor([[3, 1], [0, 0]])])
    assert_same_tensor(there.get_at("a", (slice(2, 5), 1)), td["a"][2:5, 1])
    assert_same_rows((there + 1), td + 1)
    with pytest.raises(RemoteOperationError, match=r"is frozen: its values are written once\. Add rows with append"):
        there["a"] = td["a"]
    there.close()


def test_rows_that_are_appended_are_seen_after_a_refresh(url: str) -> None:
    there, more = RedisTensorDict.from_redis(url), RaggedRows([2, 40, 0], seed=5)
    append_dataset(more.td(), url)
    ROWS.assert_equal(there.to_local(), range(12))
    assert there.refresh()
    assert not there.refresh()
    assert there.batch_size == (15,)
    both = ROWS + more
    found = there[[14, 0, 13, 12]]
    assert_same_tensor(found["tokens"].values(), torch.cat([both.tokens[row] for row in (14, 0, 13, 12)]))
    assert list(there["text", "name"]) == both.names
    there.close()


def test_a_data_set_that_was_written_anew_is_named(url: str) -> None:
    there = RedisTensorDict.from_redis(url)
    write_dataset(RaggedRows([1, 2]).td(), url, overwrite=True)
    ROWS.assert_equal(there[:], range(12))  # kept for an hour for those who read it
    with pytest.raises(DatasetChangedError, match=r"has been written anew \(2 rows of generation 2\).*open it again"):
        there.refresh()
    there.close()


def test_values_that_are_lost_are_named(server: ServerProcess, url: str) -> None:
    there = RedisTensorDict.from_redis(url)
    host = connect(url)
    manifest = load_manifest(host, host.url.name)
    host.close()
    server.execute("DEL", manifest.chunk_key(manifest.heap_of(("tokens",))[0], 2))
    with RedisTDDataset(url) as dataset, pytest.raises(DataLossError) as theirs:
        dataset[:]
    with pytest.raises(DataLossError, match="values of field 'tokens'") as mine:
        there.to_local()
    assert str(mine.value) == str(theirs.value)
    there.close()


def test_over_a_cluster_and_an_embedded_server(cluster: ClusterProcess, unique_name: str, tmp_path: Path) -> None:
    for url in (cluster.url(unique_name), f"embedded://{tmp_path}/d#{unique_name}"):
        write_dataset(ROWS.td(), url, chunk_bytes=CHUNK_BYTES)
        there = RedisTensorDict.from_redis(url, atomic=True)
        ROWS.assert_equal(there[[3, 9, 3]], [3, 9, 3])
        ROWS.assert_equal(there.to_local(), range(12))
        there.close()


def test_no_rows(server: ServerProcess, unique_name: str) -> None:
    write_dataset(RaggedRows([]).td(), server.url(unique_name))
    there = RedisTensorDict.from_redis(server.url(unique_name))
    assert there.batch_size == (0,)
    assert there.to_local()["tokens"].shape[0] == 0
    there.close()


def test_read_in_the_background(url: str) -> None:
    there = RedisTensorDict.from_redis(url)
    assert there.get_async(("text", "name")).result().tolist() == ROWS.names
    assert_same_tensor(there.get_async("tokens", [2, 0]).result().values(), torch.cat([ROWS.tokens[2], ROWS.tokens[0]]))
    there.close()


def test_a_replay_buffer_is_refused_by_name(server: ServerProcess, unique_name: str) -> None:
    buffer = RedisReplayBuffer(server.url(unique_name), capacity=4)
    buffer.extend(TensorDict({"a": torch.zeros(2)}, [2]))
    with pytest.raises(ConfigurationError, match="is a replay buffer.*open it with RedisReplayBuffer"):
        RedisTensorDict.from_redis(server.url(unique_name))
    buffer.close()


def test_strings_alone_are_reshaped_and_a_shared_one_is_of_all_rows(server: ServerProcess, unique_name: str) -> None:
    shared = NonTensorData("all", batch_size=[3])
    write_dataset(
        TensorDict({"x": torch.arange(3), "s": NonTensorStack("a", "é", "b"), "t": shared}, [3]),
        server.url(unique_name),
    )
    there = RedisTensorDict.from_redis(server.url(unique_name))
    assert there[torch.tensor([[2, 0]])]["s"].tolist() == [["b", "a"]]
    assert (there["s"], there["t"]) == (["a", "é", "b"], ["all"] * 3)
    there.close()
