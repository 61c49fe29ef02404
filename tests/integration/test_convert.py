"""`convert` copies between the layouts and within one, checked by who wrote the data: every byte, or nothing at all."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from ragged_in_memory import RaggedRows
from rows_in_memory import ALL_DTYPES, assert_same_rows, assert_same_tensor, random_rows
from servers import ServerProcess
from stores import NUMPY_DTYPES, open_store, read_store, write_lazy_store, write_store
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack, tensorclass

from td_datapipes import RedisTDDataset, RedisTensorDict, append_dataset, convert, write_dataset
from td_datapipes import conversion as conversion_module
from td_datapipes.catalog import connect, load_manifest
from td_datapipes.errors import (
    ConfigurationError,
    DataLossError,
    DatasetExistsError,
    DatasetNotFoundError,
    PickledValueError,
    SchemaError,
    ValueTooLargeError,
)
from td_datapipes.layouts import StoreDescription
from td_datapipes.manifest import Manifest

MIB = 1 << 20


def some_rows(rows: int = 50) -> TensorDict:
    fields = {f"{dtype}".removeprefix("torch."): (dtype, (3,)) for dtype in NUMPY_DTYPES}
    return random_rows(rows, {**fields, ("n", "y"): (torch.float32, ()), "none": (torch.int8, (0, 2))})


def rows_with_values(rows: int = 50) -> TensorDict:
    td = TensorDict({"x": torch.arange(rows)}, [rows])
    td["word"] = NonTensorStack(*(NonTensorData(f"word {row}") for row in range(rows)))
    td["n", "dicts"] = NonTensorStack(*(NonTensorData({"id": [row, None]}) for row in range(rows)))
    td["task"] = NonTensorData({"name": "pong", "ü": 1.5}, batch_size=[rows])
    return td


def keys_of(server: ServerProcess) -> set[bytes]:
    return set(server.execute("KEYS", "*"))


@pytest.mark.parametrize("batch_rows", [1, 7, 10_000])
def test_a_store_becomes_records_and_a_store_again(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, batch_rows: int
) -> None:
    td = some_rows()
    with RedisTDDataset(write_store(server, td, "theirs")) as dataset:
        monkeypatch.setattr(conversion_module, "_BATCH_BYTES", batch_rows * dataset.row_bytes)
    manifest = convert(server.url("theirs"), server.url("ours"))
    assert isinstance(manifest, Manifest)
    assert (manifest.kind, manifest.rows, len(manifest.schema.groups)) == ("frozen", 50, 1)
    with RedisTDDataset(server.url("ours")) as dataset:
        assert_same_rows(dataset[:], td)
        assert_same_rows(dataset[[7, 3, 7]], td[[7, 3, 7]])
    store = convert(server.url("ours"), server.url("again"))
    assert isinstance(store, StoreDescription)
    # Read by those who defined the form.
    assert_same_rows(read_store(server, "again"), td)
    with open_store(server, "again") as opened:
        assert_same_rows(opened[[7, 3, 7]], td[[7, 3, 7]])
    for source in ("theirs", "again"):
        for key in td.keys(True, True):
            path = ".".join(key if isinstance(key, tuple) else (key,))
            for kind, command in (("d", "GET"), ("m", "HGETALL")):
                assert server.execute(command, f"tensordict:{{{source}}}:{kind}:{path}") == server.execute(
                    command, f"tensordict:{{theirs}}:{kind}:{path}"
                )


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_dtypes_that_upstream_cannot_write_it_can_read(server: ServerProcess) -> None:
    td = random_rows(9, {str(dtype).removeprefix("torch."): (dtype, (2, 3)) for dtype in ALL_DTYPES})
    write_dataset(td, server.url("ours"))
    convert(server.url("ours"), server.url("theirs"))
    assert_same_rows(read_store(server, "theirs"), td)
    convert(server.url("theirs"), server.url("again"))
    with RedisTDDataset(server.url("again")) as dataset:
        assert_same_rows(dataset[:], td)


@pytest.mark.parametrize("batch_size", [[], [0], [1], [6, 3], [6, 3, 2]])
def test_batch_sizes_are_kept(server: ServerProcess, batch_size: list[int]) -> None:
    td = TensorDict({"x": torch.randn(*batch_size, 2), "n": {"y": torch.ones(*batch_size, 1)}}, batch_size)
    write_store(server, td, "theirs")
    convert(server.url("theirs"), server.url("ours"))
    convert(server.url("ours"), server.url("again"))
    assert_same_rows(read_store(server, "again"), td)
    with RedisTDDataset(server.url("ours")) as dataset:
        assert_same_rows(dataset[:], td if batch_size else td[None])


def test_values_are_copied_both_ways(server: ServerProcess) -> None:
    td = rows_with_values()
    write_store(server, td, "theirs")
    convert(server.url("theirs"), server.url("ours"), chunk_bytes=64)
    convert(server.url("ours"), server.url("again"))
    for name in ("theirs", "ours", "again"):
        with RedisTDDataset(server.url(name)) as dataset:
            for rows in ([3, 41, 3], list(range(50))):
                batch = dataset[rows]
                assert batch["x"].tolist() == rows
                assert batch.get("word").tolist() == [f"word {row}" for row in rows]
                assert batch.get(("n", "dicts")).tolist() == [{"id": [row, None]} for row in rows]
                assert batch.get("task").data == {"name": "pong", "ü": 1.5}
    with open_store(server, "again") as store:
        assert store[[4, 2]].get("word").tolist() == ["word 4", "word 2"]


def test_strings_by_row_stay_by_row(server: ServerProcess) -> None:
    td = TensorDict({"x": torch.arange(3)}, [3])
    td["abab"] = NonTensorStack(*map(NonTensorData, ["a", "b", "a"]))
    td["same"] = NonTensorStack(*map(NonTensorData, ["a", "a", "a"]))
    write_store(server, td, "theirs")
    convert(server.url("theirs"), server.url("ours"))
    convert(server.url("ours"), server.url("again"))
    with open_store(server, "again") as store:
        store[1] = TensorDict({"same": NonTensorData("new")}, [])
    with RedisTDDataset(server.url("ours")) as ours, RedisTDDataset(server.url("again")) as again:
        for index, expected in (([1], ["b"]), ([2, 0], ["a", "a"])):
            assert ours[index].get("abab").tolist() == again[index].get("abab").tolist() == expected
        assert ours[:].get("same").tolist() == ["a", "a", "a"]
        assert again[:].get("same").tolist() == ["a", "new", "a"]


def test_values_that_only_pythons_json_knows(server: ServerProcess) -> None:
    td = TensorDict({"x": torch.arange(2)}, [2])
    td["each"] = NonTensorStack(*map(NonTensorData, [float("nan"), float("inf")]))
    write_store(server, td, "theirs")
    convert(server.url("theirs"), server.url("ours"))
    with RedisTDDataset(server.url("ours")) as dataset:
        nan, infinity = dataset[:].get("each").tolist()
    assert math.isnan(nan)
    assert infinity == math.inf


@tensorclass
class Transition:
    """A tensorclass as users write them."""

    obs: torch.Tensor
    reward: torch.Tensor


def test_class_and_device_are_kept(server: ServerProcess) -> None:
    rows = Transition(obs=torch.randn(5, 3), reward=torch.rand(5), batch_size=[5], device="cpu")
    write_store(server, rows, "theirs")
    convert(server.url("theirs"), server.url("ours"))
    convert(server.url("ours"), server.url("again"))
    with open_store(server, "again") as opened:
        assert isinstance(opened, Transition)
        assert opened.device == torch.device("cpu")
        assert torch.equal(opened.obs, rows.obs)


class Opaque:
    """What JSON cannot hold."""


def test_pickled_values_are_refused_or_must_fit_json(server: ServerProcess) -> None:
    td = TensorDict({"x": torch.arange(3)}, [3])
    td["opaque"] = NonTensorData(Opaque(), batch_size=[3])
    td["set"] = NonTensorData({1, 2}, batch_size=[3])
    write_store(server, td, "theirs")
    before = keys_of(server)
    with pytest.raises(PickledValueError, match="field 'opaque' .* was pickled"):
        convert(server.url("theirs"), server.url("ours"))
    with pytest.raises(SchemaError, match="field 'opaque' was pickled and holds Opaque values, which JSON cannot hold"):
        convert(server.url("theirs"), server.url("ours"), allow_pickle=True)
    assert keys_of(server) - before <= {b"td:names"}
    convert(server.url("theirs"), server.url("ours"), fields=["x"])
    with RedisTDDataset(server.url("ours")) as dataset:
        assert dataset.fields == (("x",),)


def test_fields_may_be_chosen(server: ServerProcess) -> None:
    td = rows_with_values()
    td["y"] = torch.randn(50, 3)
    write_store(server, td, "theirs")
    convert(server.url("theirs"), server.url("ours"), fields=["y", "n"])
    convert(server.url("ours"), server.url("again"), fields=["y"])
    with RedisTDDataset(server.url("ours")) as dataset:
        assert set(dataset.fields) == {("y",), ("n", "dicts")}
        assert_same_rows(dataset[:].select("y"), td.select("y"))
    assert_same_rows(read_store(server, "again"), td.select("y"))


@pytest.mark.parametrize("stack_dim", [0, 1])
def test_a_lazy_stack_becomes_dense(server: ServerProcess, stack_dim: int) -> None:
    parts = [random_rows(4, {"x": (torch.int16, (2,)), ("n", "y"): (torch.int8, ())}, seed) for seed in range(5)]
    write_lazy_store(server, lazy_stack(parts, stack_dim), "stack")
    expected = torch.stack(parts, stack_dim)
    convert(server.url("stack"), server.url("ours"))
    convert(server.url("stack"), server.url("dense"), layout="tensordict_store")
    with RedisTDDataset(server.url("ours")) as dataset:
        assert_same_rows(dataset[:], expected)
    assert_same_rows(read_store(server, "dense"), expected)


def test_rows_that_differ_in_shape_are_refused_by_name(server: ServerProcess) -> None:
    parts = [TensorDict({"x": torch.arange(i), "y": torch.tensor(i)}, []) for i in range(3)]
    write_lazy_store(server, lazy_stack(parts), "stack")
    with pytest.raises(SchemaError, match="the rows of field 'x' differ in shape"):
        convert(server.url("stack"), server.url("ours"))
    convert(server.url("stack"), server.url("ours"), fields=["y"])
    with RedisTDDataset(server.url("ours")) as dataset:
        assert dataset[:]["y"].tolist() == [0, 1, 2]


def test_within_a_layout_it_copies(server: ServerProcess) -> None:
    td = some_rows()
    write_store(server, td, "one")
    convert(server.url("one"), server.url("ns:two"), layout="tensordict_store")
    with RedisTDDataset(server.url("ns:two")) as dataset:
        assert_same_rows(dataset[:], td)
    write_dataset(td, server.url("ours"), chunk_bytes=256)
    manifest = convert(server.url("ours"), server.url("compact"), layout="records")
    assert isinstance(manifest, Manifest)
    with RedisTDDataset(server.url("compact")) as dataset:
        assert_same_rows(dataset[:], td)


def test_groups_that_were_added_later_become_one(server: ServerProcess) -> None:
    td = some_rows(8)
    remote = RedisTensorDict.from_tensordict(td, server.url("grown"), layout="records")
    remote["more"] = td["more"] = torch.randn(8, 5)
    remote["word"] = td["word"] = NonTensorStack(*(NonTensorData(f"word {row}") for row in range(8)))
    remote.close()
    manifest = convert(server.url("grown"), server.url("compact"), layout="records")
    assert isinstance(manifest, Manifest)
    assert (manifest.kind, len(manifest.schema.groups)) == ("frozen", 1)
    with RedisTDDataset(server.url("compact")) as dataset:
        assert_same_rows(dataset[:].exclude("word"), td.exclude("word"))
        assert dataset[[5, 2]].get("word").tolist() == ["word 5", "word 2"]


@pytest.mark.parametrize("to", ["records", "tensordict_store"])
def test_a_copy_may_take_the_place_of_its_source(server: ServerProcess, to: Any) -> None:
    td = some_rows()
    write = {"records": lambda: write_dataset(td, server.url("same"), chunk_bytes=256)}
    write.get(to, lambda: write_store(server, td, "same"))()
    with pytest.raises(DatasetExistsError):
        convert(server.url("same"), server.url("same"), layout=to)
    convert(server.url("same"), server.url("same"), layout=to, overwrite=True)
    with RedisTDDataset(server.url("same")) as dataset:
        assert_same_rows(dataset[:], td)


def test_from_one_server_to_another(valkey_server: ServerProcess, redis_server: ServerProcess) -> None:
    valkey_server.flush()
    redis_server.flush()
    td = some_rows()
    write_store(valkey_server, td, "theirs")
    convert(valkey_server.url("theirs"), redis_server.url("ours"))
    convert(redis_server.url("ours"), valkey_server.url("again"))
    assert_same_rows(read_store(valkey_server, "again"), td)
    assert not valkey_server.execute("EXISTS", "td:{ours}:manifest")


def test_what_exists_is_kept_unless_it_may_be_replaced(server: ServerProcess) -> None:
    old, new = some_rows(5), some_rows(8)
    write_store(server, new, "theirs")
    write_dataset(old, server.url("ours"))
    with pytest.raises(DatasetExistsError, match="'ours' exists at .*; pass overwrite=True to replace it"):
        convert(server.url("theirs"), server.url("ours"))
    with RedisTDDataset(server.url("ours")) as opened:
        convert(server.url("theirs"), server.url("ours"), overwrite=True)
        assert_same_rows(opened[:], old)
    with RedisTDDataset(server.url("ours")) as dataset:
        assert_same_rows(dataset[:], new)
    write_store(server, TensorDict({"gone": torch.zeros(3)}, [3]), "other")
    convert(server.url("ours"), server.url("other"), overwrite=True)
    assert_same_rows(read_store(server, "other"), new)
    assert not server.execute("EXISTS", "tensordict:{other}:d:gone", "tensordict:{other}:m:gone")
    with pytest.raises(DatasetExistsError, match="in the other layout"):
        convert(server.url("theirs"), server.url("other"), layout="records", overwrite=True)


def test_a_lazy_stack_may_be_replaced_by_a_dense_one(server: ServerProcess) -> None:
    td = some_rows(4)
    write_dataset(td, server.url("ours"))
    write_lazy_store(server, lazy_stack([TensorDict({"x": torch.arange(i)}) for i in range(3)]), "stack")
    convert(server.url("ours"), server.url("stack"), overwrite=True)
    assert_same_rows(read_store(server, "stack"), td)
    assert not [key for key in keys_of(server) if key.endswith((b":idx", b"__type__", b"__count__"))]


def test_a_flat_key_with_a_dot_and_a_nested_one(server: ServerProcess) -> None:
    td = TensorDict({"a.b": torch.arange(3), "a": {"b": torch.arange(3) + 10}}, batch_size=[3])
    write_dataset(td, server.url("ours"))
    before = keys_of(server)
    with pytest.raises(SchemaError, match=r"tensordict_store cannot hold the key 'a\.b': it joins nested keys with"):
        convert(server.url("ours"), server.url("theirs"))
    assert keys_of(server) == before
    convert(server.url("ours"), server.url("copy"), layout="records")
    with RedisTDDataset(server.url("copy")) as dataset:
        assert_same_rows(dataset[:], td)


def test_a_field_longer_than_a_string_may_be(server: ServerProcess) -> None:
    td = TensorDict({"small": torch.arange(64), "large": torch.zeros(64, 2 * MIB // 64, dtype=torch.uint8)}, [64])
    server.execute("CONFIG", "SET", "proto-max-bulk-len", MIB)
    try:
        write_dataset(td, server.url("ours"))
        with RedisTDDataset(server.url("ours")) as dataset:
            assert_same_rows(dataset[:], td)
        before = keys_of(server)
        with pytest.raises(
            ValueTooLargeError, match=rf"field 'large' has {2 * MIB} bytes .* takes {MIB} \(proto-max-bulk-len\)"
        ):
            convert(server.url("ours"), server.url("theirs"))
        assert keys_of(server) == before
    finally:
        server.execute("CONFIG", "SET", "proto-max-bulk-len", 512 * MIB)


@pytest.mark.parametrize("to", ["records", "tensordict_store"])
def test_a_source_that_changes_meanwhile_is_not_published(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, to: Any
) -> None:
    td = some_rows()
    write_store(server, td, "theirs")
    before = keys_of(server)
    batches = conversion_module._Source.batches

    def changing(source: Any, advance: Any) -> Any:
        yield from batches(source, advance)
        with open_store(server, "theirs") as store:
            store[3] = TensorDict({"int8": torch.full((3,), 77, dtype=torch.int8)}, [])

    monkeypatch.setattr(conversion_module._Source, "batches", changing)
    with pytest.raises(
        DataLossError, match="the copy of copy differs from the source in field 'int8', in rows 0 to 49"
    ):
        convert(server.url("theirs"), server.url("copy"), layout=to)
    assert keys_of(server) - before <= {b"td:names"}
    with pytest.raises(DatasetNotFoundError):
        RedisTDDataset(server.url("copy"))


@pytest.mark.parametrize("to", ["records", "tensordict_store"])
def test_values_that_change_meanwhile_are_not_published(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, to: Any
) -> None:
    write_store(server, rows_with_values(), "theirs")
    before = keys_of(server)
    batches, calls = conversion_module._Source.batches, []

    def changing(source: Any, advance: Any) -> Any:
        yield from batches(source, advance)
        calls.append(1)
        if len(calls) == 2:  # the second time they are compared
            with open_store(server, "theirs") as store:
                store[3] = TensorDict({"word": NonTensorData("changed")}, [])

    monkeypatch.setattr(conversion_module._Source, "batches", changing)
    with pytest.raises(DataLossError, match="differs from the source in field 'word', in its values"):
        convert(server.url("theirs"), server.url("copy"), layout=to)
    assert keys_of(server) - before <= {b"td:names"}


def test_a_full_server_says_so_and_keeps_nothing(server: ServerProcess) -> None:
    td = TensorDict({"x": torch.ones(64, MIB // 16, dtype=torch.uint8)}, [64])
    write_dataset(td, server.url("ours"))
    before = keys_of(server)
    used = server.execute("INFO", "memory")["used_memory"]
    server.execute("CONFIG", "SET", "maxmemory", used + MIB)
    try:
        with pytest.raises(Exception, match="maxmemory"):
            convert(server.url("ours"), server.url("theirs"))
    finally:
        server.execute("CONFIG", "SET", "maxmemory", 0)
    assert keys_of(server) == before


def test_arguments_that_cannot_work_are_refused(server: ServerProcess) -> None:
    write_store(server, some_rows(), "theirs")
    with pytest.raises(ConfigurationError, match="layout must be 'records' or 'tensordict_store', got 'parquet'"):
        convert(server.url("theirs"), server.url("x"), layout="parquet")  # type: ignore[arg-type]
    with pytest.raises(DatasetNotFoundError, match="TensorDictStore wrote 'theirs'"):
        convert(server.url("nobody's"), server.url("x"))


def test_a_progress_bar_is_shown_when_asked_for(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    write_store(server, some_rows(), "theirs")
    convert(server.url("theirs"), server.url("quiet"))
    assert capsys.readouterr().err == ""
    convert(server.url("theirs"), server.url("shown"), progress=True)
    shown = capsys.readouterr().err
    assert "converting theirs" in shown
    assert "verifying shown" in shown
    assert "50/50" in shown


# Fields of variable length.


RAGGED = RaggedRows([3, 0, 7, 5, 14, 1, 0, 60, 2, 9, 21, 4, 35, 10])


def manifest_of(url: str) -> Manifest:
    host = connect(url)
    try:
        return load_manifest(host, host.url.name)
    finally:
        host.close()


@pytest.mark.parametrize("batch_bytes", [1, 300, 16 * MIB])
@pytest.mark.parametrize("chunk_bytes", [16, 80, None])
def test_values_of_variable_length_are_copied(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, batch_bytes: int, chunk_bytes: int | None
) -> None:
    monkeypatch.setattr(conversion_module, "_BATCH_BYTES", batch_bytes)
    write_dataset(RAGGED.td(), server.url("ours"), chunk_bytes=144)
    copy = convert(server.url("ours"), server.url("copy"), layout="records", chunk_bytes=chunk_bytes)
    assert isinstance(copy, Manifest)
    source = manifest_of(server.url("ours"))
    assert set(map(str, copy.schema.fields.values())) == set(map(str, source.schema.fields.values()))
    assert {heap.key: heap.nbytes for heap in copy.heaps} == {heap.key: heap.nbytes for heap in source.heaps}
    with RedisTDDataset(server.url("copy"), verify=True) as dataset:
        RAGGED.assert_equal(dataset[:], range(14))
        RAGGED.assert_equal(dataset[[7, 0, 7, 13]], [7, 0, 7, 13])


def test_values_of_variable_length_go_from_one_kind_of_server_to_another(
    valkey_server: ServerProcess, redis_server: ServerProcess
) -> None:
    for origin, target in ((valkey_server, redis_server), (redis_server, valkey_server)):
        origin.flush()
        target.flush()
        write_dataset(RAGGED.td(), origin.url("ours"), chunk_bytes=80)
        convert(origin.url("ours"), target.url("theirs"), layout="records", chunk_bytes=64)
        origin.flush()
        with RedisTDDataset(target.url("theirs")) as dataset:
            RAGGED.assert_equal(dataset[:], range(14))


def test_appended_values_of_variable_length_and_none_at_all(server: ServerProcess) -> None:
    more = RaggedRows([4, 0, 100], seed=3)
    write_dataset(RAGGED.td(), server.url("ours"), chunk_bytes=80)
    append_dataset(more.td(), server.url("ours"))
    convert(server.url("ours"), server.url("ours"), layout="records", overwrite=True)
    with RedisTDDataset(server.url("ours")) as dataset:
        (RAGGED + more).assert_equal(dataset[:], range(17))
    write_dataset(RaggedRows([]).td(), server.url("none"))
    convert(server.url("none"), server.url("nothing"), layout="records")
    with RedisTDDataset(server.url("nothing")) as dataset:
        assert len(dataset) == 0
        found, expected = (one.schema.fields for one in (dataset, manifest_of(server.url("none"))))
        assert set(map(str, found.values())) == set(map(str, expected.values()))


def test_a_value_of_variable_length_that_is_damaged_meanwhile_is_not_published(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_dataset(RAGGED.td(), server.url("ours"), chunk_bytes=80)
    source = manifest_of(server.url("ours"))
    chunk = source.chunk_key(source.heap_of(("tokens",))[0], 1)
    before = keys_of(server)
    batches = conversion_module._Source.batches

    def damaging(source: Any, advance: Any) -> Any:
        yield from batches(source, advance)
        byte = server.execute("GETRANGE", chunk, 5, 5)
        server.execute("SETRANGE", chunk, 5, bytes([byte[0] ^ 1]))

    monkeypatch.setattr(conversion_module._Source, "batches", damaging)
    with pytest.raises(DataLossError, match="the copy of copy differs from the source in field 'tokens', in rows 0 to"):
        convert(server.url("ours"), server.url("copy"), layout="records")
    assert keys_of(server) - before <= {b"td:names"}


@pytest.mark.parametrize("field", ["tokens", ("text", "name"), "blob", "info"])
def test_values_of_variable_length_are_refused_by_name_for_a_store(server: ServerProcess, field: Any) -> None:
    write_dataset(RAGGED.td(), server.url("ours"))
    before = keys_of(server)
    shown = re.escape(repr(field))
    with pytest.raises(SchemaError, match=rf"{shown}: .* is of variable length.*tensordict_store \(unlike records"):
        convert(server.url("ours"), server.url("theirs"), fields=["row", field])
    assert keys_of(server) == before
    convert(server.url("ours"), server.url("theirs"), fields=["row"])
    assert_same_tensor(read_store(server, "theirs")["row"], torch.arange(14))
    convert(server.url("ours"), server.url("part"), fields=["row", field], layout="records")
    with RedisTDDataset(server.url("part")) as dataset, RedisTDDataset(server.url("ours")) as whole:
        found, expected = dataset[:].get(field), whole[:].get(field)
        assert len(dataset.fields) == 2
        if field == "tokens":
            assert_same_tensor(found.values(), expected.values())
        else:
            assert found.tolist() == expected.tolist()
