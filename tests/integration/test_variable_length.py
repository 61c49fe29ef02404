"""Fields of variable length are read as they were written, whatever rows are asked for and however they are cut."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ragged_in_memory import RaggedRows, jagged, texts
from rows_in_memory import ALL_DTYPES, assert_same_tensor, random_tensor
from servers import ServerProcess
from tensordict import NonTensorData, TensorDict, lazy_stack

from td_datapipes import (
    ArrowRows,
    Placement,
    RedisReplayBuffer,
    RedisTDDataset,
    append_dataset,
    convert,
    write_dataset,
)
from td_datapipes.catalog import collect, connect, drop
from td_datapipes.errors import (
    ConfigurationError,
    DataLossError,
    FieldNotFoundError,
    RowIndexError,
    SchemaError,
    ServerFullError,
    TDDatapipesError,
)
from td_datapipes.keys import manifest_key
from td_datapipes.manifest import Manifest
from td_datapipes.mesh import MeshSpec
from td_datapipes.plan import STRATEGIES, Strategy

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")

CHUNK_BYTES = 112
"""Less than many values: they lie across chunks."""


def some_rows(rows: int = 60, seed: int = 0) -> RaggedRows:
    return RaggedRows(np.random.default_rng(seed).integers(0, 40, rows).tolist(), seed)


def manifest_of(server: ServerProcess, name: str) -> Manifest:
    return Manifest.from_json(server.execute("GET", manifest_key(name)))


def keys_of(server: ServerProcess) -> set[bytes]:
    return set(server.execute("KEYS", "*")) - {b"td:names"}


@pytest.fixture
def url(server: ServerProcess, unique_name: str) -> str:
    """A data set of `some_rows`."""
    write_dataset(some_rows().td(), server.url(unique_name), chunk_bytes=CHUNK_BYTES)
    return server.url(unique_name)


@st.composite
def written_and_asked(draw: st.DrawFn) -> tuple[list[int], list[int], int, Any]:
    """Lengths of rows, where they are cut into batches, the chunk size, and an index."""
    lengths = draw(st.lists(st.integers(0, 30), min_size=1, max_size=40))
    cuts = sorted(draw(st.lists(st.integers(0, len(lengths)), max_size=3)))
    chunk_bytes = draw(st.sampled_from([16, 80, 1 << 20]))
    row = st.integers(-len(lengths), len(lengths) - 1)
    index = draw(
        st.one_of(
            st.lists(row, max_size=50),
            st.slices(len(lengths)),
            st.lists(row, min_size=1).map(np.array),
            st.lists(row, min_size=1).map(torch.tensor),
            st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)).map(torch.tensor),
        )
    )
    return lengths, cuts, chunk_bytes, index


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(written_and_asked(), st.sampled_from(STRATEGIES))
def test_any_rows_are_read_as_they_were_written(
    server: ServerProcess, case: tuple[list[int], list[int], int, Any], strategy: Strategy
) -> None:
    lengths, cuts, chunk_bytes, index = case
    rows = RaggedRows(lengths)
    whole = rows.td()
    bounds = [0, *cuts, len(rows)]
    batches = [whole[low:high] for low, high in pairwise(bounds)]
    url = server.url("drawn")
    write_dataset([whole[:0], *batches][bool(len(cuts)) :], url, chunk_bytes=chunk_bytes, overwrite=True)
    with RedisTDDataset(url, strategy=strategy) as dataset:
        numbers = index.numpy() if isinstance(index, torch.Tensor) else index
        rows.assert_equal(dataset[index], np.arange(len(rows))[numbers].tolist())


@pytest.mark.parametrize("options", [{}, {"strided": True}, {"atomic": True}, {"strategy": "pipelined"}], ids=str)
def test_repeats_and_single_rows(url: str, options: dict[str, Any]) -> None:
    rows = some_rows()
    with RedisTDDataset(url, **options) as dataset:
        rows.assert_equal(dataset[[5, 3, 5, 59, 0, 3]], [5, 3, 5, 59, 0, 3])
        rows.assert_equal(dataset[:], list(range(60)))
        one = dataset[-1]
        assert (one.batch_size, one["info"], one["text", "name"]) == ((), rows.infos[59], rows.names[59])
        assert_same_tensor(one["tokens"], rows.tokens[59])
        for row, found in zip(range(60), dataset, strict=True):
            assert_same_tensor(found["tokens"], rows.tokens[row])
            assert found["blob"] == rows.blobs[row]


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_tensors_of_any_dtype_come_back_bit_for_bit(
    server: ServerProcess, unique_name: str, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = [random_tensor((n, 3, 2), dtype, generator) for n in (4, 0, 1, 9)]
    write_dataset(TensorDict({"x": jagged(rows, rows[0])}, [4]), server.url(unique_name), chunk_bytes=48)
    with RedisTDDataset(server.url(unique_name)) as dataset:
        assert_same_tensor(dataset[[3, 1, 0]]["x"].values(), torch.cat([rows[3], rows[1], rows[0]]))
    with RedisTDDataset(server.url(unique_name), ragged="pad", pad_value=1) as dataset:
        batch = dataset[[2, 1, 0]]
        assert (batch["x"].dtype, batch["x"].shape, batch["x_mask"].sum(1).tolist()) == (dtype, (3, 4, 3, 2), [1, 0, 4])
        assert_same_tensor(batch["x"][2], rows[0])
        assert_same_tensor(batch["x"][0, 1:], torch.ones(3, 3, 2).to(dtype))


def test_items_without_bytes_keep_their_number(server: ServerProcess, unique_name: str) -> None:
    rows = [torch.empty(n, 0, 2) for n in (3, 0, 1)]
    write_dataset(TensorDict({"x": jagged(rows, rows[0])}, [3]), server.url(unique_name))
    with RedisTDDataset(server.url(unique_name)) as dataset:
        assert [tuple(row.shape) for row in dataset[[2, 0, 1]]["x"].unbind()] == [(1, 0, 2), (3, 0, 2), (0, 0, 2)]
        assert dataset.lengths().tolist() == [3, 0, 1]


def test_rows_of_a_lazy_stack_and_dense_batches_behind_them(server: ServerProcess, unique_name: str) -> None:
    def stacked(lengths: list[int]) -> TensorDict:
        return lazy_stack(
            [TensorDict({"n": {"x": torch.full((n, 2), i)}, "s": "é" * n}) for i, n in enumerate(lengths)]
        )  # type: ignore[return-value]

    url = server.url(unique_name)
    write_dataset([stacked([3, 0, 2]), stacked([2, 2])], url, chunk_bytes=16)
    with RedisTDDataset(url) as dataset:
        assert [row.tolist() for row in dataset[:]["n", "x"].unbind()] == [
            *([[0, 0]] * 3, [], [[2, 2]] * 2),
            *([[0, 0]] * 2, [[1, 1]] * 2),
        ]
        assert list(dataset[:]["s"]) == ["ééé", "", "éé", "éé", "éé"]


def test_a_value_that_all_rows_share_takes_its_bytes_once(server: ServerProcess, unique_name: str) -> None:
    td = TensorDict({"x": torch.arange(5), "s": NonTensorData("shared", batch_size=[5])}, [5])
    assert write_dataset(td, server.url(unique_name)).heaps[0].nbytes == 6
    with RedisTDDataset(server.url(unique_name)) as dataset:
        assert list(dataset[[4, 0]]["s"]) == ["shared", "shared"]
        assert dataset[2]["s"] == "shared"


def test_what_a_field_holds_may_show_only_in_a_later_batch(server: ServerProcess, unique_name: str) -> None:
    url = server.url(unique_name)
    parts = [[], [None, None], ["a", None], [None], ["b"]]
    values = [texts(part) for part in parts]
    batches = [
        TensorDict({"s": value, "never": texts([None] * len(part))}, [len(part)])
        for part, value in zip(parts, values, strict=True)
    ]
    manifest = write_dataset(batches, url)
    assert [str(field) for field in manifest.schema.varying_fields] == ["'s': str", "'never': json"]
    append_dataset(TensorDict({"s": texts([None]), "never": texts([{}])}, [1]), url)
    with RedisTDDataset(url) as dataset:
        assert list(dataset[:]["s"]) == [None, None, "a", None, None, "b", None]
        assert list(dataset[:]["never"]) == [None] * 6 + [{}]


def test_no_rows_and_rows_without_bytes(server: ServerProcess, unique_name: str) -> None:
    url = server.url(unique_name)
    empty = RaggedRows([])
    write_dataset(empty.td(), url)
    with RedisTDDataset(url) as dataset:
        empty.assert_equal(dataset[:], [])
        assert dataset[:]["tokens"].shape[0] == 0
        assert len(dataset.lengths()) == 0
    nothing = TensorDict({"x": jagged([torch.empty(0)] * 3, torch.empty(0)), "s": texts(["", None, ""])}, [3])
    write_dataset(nothing, url, overwrite=True)
    with RedisTDDataset(url) as dataset:
        commands = dataset.stats.commands
        batch = dataset[[2, 1]]
        assert (batch["x"].values().numel(), list(batch["s"])) == (0, ["", None])
        assert dataset.stats.commands == commands + 1, "values without bytes are not asked for"
    with RedisTDDataset(url, ragged="pad", strings="arrow") as dataset:
        batch = dataset[:]
        assert (batch["x"].shape, batch["x_mask"].shape) == ((3, 0), (3, 0))
        assert batch["s"].to_arrow().to_pylist() == ["", None, ""]


def test_a_value_of_many_chunks_comes_whole_beside_small_ones(server: ServerProcess, unique_name: str) -> None:
    rows = [torch.arange(n) for n in (3, 700_000, 0, 5)]
    write_dataset(TensorDict({"x": jagged(rows, rows[0])}, [4]), server.url(unique_name), chunk_bytes=1 << 20)
    assert manifest_of(server, unique_name).heaps[0].num_chunks == 6
    with RedisTDDataset(server.url(unique_name)) as dataset:
        for index in ([1], [3, 1, 0], [0, 1, 2, 3]):
            found = dataset[index]["x"].unbind()
            assert all(torch.equal(found[place], rows[row]) for place, row in enumerate(index))


def test_adjacent_rows_are_one_range_a_field(server: ServerProcess, unique_name: str) -> None:
    url = server.url(unique_name)
    write_dataset(some_rows().td(), url)
    with RedisTDDataset(url) as dataset:
        dataset[10:50]
        # The records, tokens, names, blobs and infos.
        assert dataset.stats.ranges == 5


@pytest.mark.parametrize("max_length", [None, 1, 7, 1000])
def test_padded_rows_have_a_mask_and_are_cut_off(url: str, max_length: int | None) -> None:
    rows, index = some_rows(), [9, 2, 9, 40, 0]
    with RedisTDDataset(url, ragged="pad", pad_value=-5, max_length=max_length) as dataset:
        batch = dataset[index]
        kept = [rows.tokens[row][:max_length] for row in index]
        width = max(map(len, kept))
        expected = torch.full((5, width, 3), -5, dtype=torch.int16)
        for place, row in enumerate(kept):
            expected[place, : len(row)] = row
        assert_same_tensor(batch["tokens"], expected)
        assert batch["tokens_mask"].tolist() == [[at < len(row) for at in range(width)] for row in kept]
        assert list(batch["text", "name"]) == [rows.names[row] for row in index]
        assert dataset.lengths().tolist() == [min(n, max_length or n) for n in rows.lengths]


def test_an_index_of_two_dims_needs_padding(url: str) -> None:
    rows = some_rows()
    with RedisTDDataset(url) as dataset, pytest.raises(RowIndexError, match=r"shape \(2, 2\).*ragged='pad'"):
        dataset[[[0, 1], [2, 3]]]
    with RedisTDDataset(url, ragged="pad", strings="arrow") as dataset:
        batch = dataset[[[5, 1], [2, 3]]]
        assert batch.batch_size == (2, 2)
        assert_same_tensor(batch["tokens"][0, 1, : rows.lengths[1]], rows.tokens[1])
        assert batch[0]["text", "name"].to_arrow().to_pylist() == [rows.names[5], rows.names[1]]
    with RedisTDDataset(url, fields=["info"]) as dataset:
        assert dataset[[[5, 1], [2, 3]]][1, 0]["info"] == rows.infos[2]


def test_what_is_cut_off_is_not_read(server: ServerProcess, unique_name: str) -> None:
    rows = [torch.arange(100_000) for _ in range(3)]
    write_dataset(TensorDict({"x": jagged(rows, rows[0])}, [3]), server.url(unique_name))
    with RedisTDDataset(server.url(unique_name), max_length=10) as dataset:
        assert [row.tolist() for row in dataset[:]["x"].unbind()] == [list(range(10))] * 3
        assert dataset.stats.bytes < 1000


def test_arrow_arrays_have_strings_bytes_and_the_texts_of_json(url: str) -> None:
    rows = some_rows()
    with RedisTDDataset(url, strings="arrow") as dataset:
        batch = dataset[[7, 3, 7]]
        name, blob, info = (batch[key] for key in (("text", "name"), "blob", "info"))
        assert isinstance(name, ArrowRows)
        assert (name.to_arrow().type, blob.to_arrow().type) == (pa.large_string(), pa.large_binary())
        assert name.to_arrow().to_pylist() == [rows.names[row] for row in (7, 3, 7)]
        assert blob.to_arrow().to_pylist() == [rows.blobs[row] for row in (7, 3, 7)]
        assert pa.compute.equal(info.to_arrow()[0], info.to_arrow()[2]).as_py()
        assert dataset[3]["text", "name"].to_arrow().to_pylist() == [rows.names[3]]


def test_fields_are_chosen_and_what_is_not_is_not_read(url: str) -> None:
    rows = some_rows()
    with RedisTDDataset(url, fields=["row", ("text", "name")]) as dataset:
        batch = dataset[[4, 8]]
        assert (set(batch.keys()), set(batch["text"].keys())) == ({"row", "text"}, {"name"})
        assert list(batch["text", "name"]) == [rows.names[4], rows.names[8]]
        assert dataset.fields == (("row",), ("text", "name"))
        assert dataset.lengths("blob").tolist() == [len(blob or b"") for blob in rows.blobs]
    with RedisTDDataset(url, fields=["row"]) as dataset:
        assert dataset[3]["row"] == 3
        with pytest.raises(FieldNotFoundError, match="no field 'row' of variable length; there are .*'tokens'"):
            dataset.lengths("row")
        with pytest.raises(ConfigurationError, match=r"start must be in \[0, 60\], got 61"):
            dataset.lengths(start=61)


def test_the_schema_says_what_they_are(url: str) -> None:
    with RedisTDDataset(url) as dataset:
        assert str(dataset.schema).splitlines() == [
            *("'row': int64[]", "('text', 'name'): str"),
            *("'tokens': int16[*, 3]", "'blob': bytes", "'info': json"),
        ]


def test_a_batch_that_does_not_fit_is_named(server: ServerProcess, unique_name: str) -> None:
    url, first = server.url(unique_name), some_rows(5).td()
    other = TensorDict(
        {**first.to_dict(convert_tensors=False), "tokens": jagged([torch.zeros(2)] * 5, torch.zeros(1))}, [5]
    )
    for batch, said in (
        (other, r"'tokens': int16\[\*, 3\] here, 'tokens': float32\[\*\] there"),
        (first.clone().set("blob", texts(["a"] * 5)), "'blob': bytes here, 'blob': str there"),
        (first.clone().set("tokens", torch.zeros(5, 2, 3)), r"int16\[\*, 3\] here, 'tokens': float32\[2, 3\] there"),
    ):
        with pytest.raises(SchemaError, match=said):
            write_dataset([first, batch], url)
        assert keys_of(server) == set()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([{}, (1, 2)], "field 's': the value of row 1 is of type tuple"),
        (["a", "\ud800"], "field 's': the string of row 1 is no valid Unicode"),
        ([object(), 1], "field 's': the value of row 0 is of type object"),
    ],
)
def test_a_value_that_cannot_be_stored_is_named_and_nothing_stays(
    server: ServerProcess, unique_name: str, values: list[Any], said: str
) -> None:
    fine = TensorDict({"s": texts(["x"] * 3 if isinstance(values[0], str) else [{}] * 3)}, [3])
    with pytest.raises(SchemaError, match=said):
        write_dataset([fine, TensorDict({"s": texts(values)}, [2])], server.url(unique_name), chunk_bytes=16)
    assert keys_of(server) == set()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ragged": "no"}, "ragged must be one of jagged, pad, got 'no'"),
        ({"strings": "no"}, "strings must be one of stack, arrow, got 'no'"),
        ({"max_length": 0}, "max_length must be an integer of at least 1, got 0"),
        ({"pad_value": 1}, "pad_value=1 needs ragged='pad'"),
        ({"ragged": "pad", "pad_value": 1 << 20}, "pad_value=1048576 is no int16, which field 'tokens' is of"),
        ({"ragged": "pad", "pad_value": 0.5}, "pad_value=0.5 is no int16"),
        (
            {"placement": Placement(MeshSpec(shape=(2,), ranks=(0, 1)), rank=0), "fields": ["row", "tokens"]},
            r"'tokens': int16\[\*, 3\] is of variable length",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_options_that_cannot_work_are_refused(url: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        RedisTDDataset(url, **options)


def test_a_field_in_the_place_of_a_mask_is_named(server: ServerProcess, unique_name: str) -> None:
    td = TensorDict({"x": jagged([torch.zeros(1)] * 2, torch.zeros(1)), "x_mask": torch.zeros(2)}, [2])
    write_dataset(td, server.url(unique_name))
    with pytest.raises(ConfigurationError, match="there is a field 'x_mask' already"):
        RedisTDDataset(server.url(unique_name), ragged="pad")
    with RedisTDDataset(server.url(unique_name), ragged="pad", fields=["x"]) as dataset:
        assert dataset[:]["x_mask"].all()


def test_other_layouts_refuse_them_by_name(server: ServerProcess, url: str, unique_name: str) -> None:
    with pytest.raises(SchemaError, match=r"'name'\): str is of variable length, for which the layout"):
        convert(url, server.url(f"{unique_name}-store"))
    buffer = RedisReplayBuffer(server.url(f"{unique_name}-ring"), capacity=100)
    with pytest.raises(SchemaError, match="is of variable length, for which a replay buffer has no room"):
        buffer.extend(some_rows(5).td())


HARMS: dict[str, tuple[Any, str]] = {
    "deleted": (lambda server, key: server.execute("DEL", key), "is missing or empty"),
    "cut": (lambda server, key: server.execute("SET", key, server.execute("GETRANGE", key, 0, 9)), "the chunk is "),
    "another kind": (
        lambda server, key: server.execute("DEL", key) and server.execute("RPUSH", key, b"x"),
        "the key holds something else",
    ),
}


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("strategy", ["covering", "pipelined", "lua"])
def test_values_that_are_lost_are_named_with_field_and_rows(
    server: ServerProcess, url: str, unique_name: str, harm: str, strategy: Strategy
) -> None:
    manifest = manifest_of(server, unique_name)
    number, heap = manifest.heap_of(("tokens",))
    do, said = HARMS[harm]
    do(server, manifest.chunk_key(number, 3))
    lengths = np.array(some_rows().lengths)
    ends = lengths.cumsum() * 6
    # Rows with bytes in chunk 3 behind its tenth byte.
    hurt = np.flatnonzero((ends > 3 * heap.chunk_bytes + 10) & (ends - lengths * 6 < 4 * heap.chunk_bytes))
    with RedisTDDataset(url, strategy=strategy) as dataset:
        for index in ([int(hurt[0])], slice(None), [59, int(hurt[-1]), 0]):
            with pytest.raises(DataLossError, match=rf"values of field 'tokens', of rows? .*{said}"):
                dataset[index]
        some_rows().assert_equal(dataset[[59]], [59])


def test_spans_that_cannot_be_are_named(server: ServerProcess, url: str, unique_name: str) -> None:
    manifest = manifest_of(server, unique_name)
    field = manifest.schema.fields["tokens",]
    assert manifest.layouts[0].records_per_chunk == 1
    of_row_1 = manifest.chunk_key(0, 1)
    for word, value in ((0, -8), (0, 1 << 50), (1, -2), (1, 1 << 62)):
        start = field.offset_bytes + 8 * word
        before = server.execute("GETRANGE", of_row_1, start, start + 7)
        server.execute("SETRANGE", of_row_1, start, np.int64(value).tobytes())
        with (
            RedisTDDataset(url) as dataset,
            pytest.raises(DataLossError, match="field 'tokens': the records of rows 1 "),
        ):
            dataset[:3]
        server.execute("SETRANGE", of_row_1, start, before)


@pytest.mark.parametrize(("key", "kind"), [(("text", "name"), "str"), (("info",), "json")])
@pytest.mark.parametrize("strings", ["stack", "arrow"])
def test_bytes_that_are_no_such_value_are_named(
    server: ServerProcess, url: str, unique_name: str, key: tuple[str, ...], kind: str, strings: Any
) -> None:
    manifest = manifest_of(server, unique_name)
    number, heap = manifest.heap_of(key)
    for chunk in range(heap.num_chunks):
        where = manifest.chunk_key(number, chunk)
        server.execute("SET", where, b"\xff" * server.execute("STRLEN", where))
    with RedisTDDataset(url, strings=strings) as dataset, pytest.raises(DataLossError, match=f"no {kind} value"):
        dataset[:]


def test_rows_are_appended_behind_the_values_there_are(server: ServerProcess, url: str, unique_name: str) -> None:
    rows = some_rows()
    before = {key: server.execute("GET", key) for key in server.execute("KEYS", "td:{*}:v*:*")}
    with RedisTDDataset(url) as old:
        for seed, count in ((1, 7), (2, 30), (3, 0)):
            more = some_rows(count, seed)
            td = more.td()
            append_dataset([td[:3], td[3:]], url)
            rows = rows + more
        for key, value in before.items():
            assert server.execute("GET", key)[: len(value)] == value
        some_rows().assert_equal(old[[59, 3]], [59, 3])
        assert old.refresh() == 97
        found = old[[96, 60, 59, 70]]
        found["row"] = torch.tensor([96, 60, 59, 70])
        rows.assert_equal(found, [96, 60, 59, 70])
        assert old.lengths(start=58).tolist() == list(rows.lengths[58:])


def test_an_append_that_fails_leaves_no_values_behind(server: ServerProcess, url: str, unique_name: str) -> None:
    before = keys_of(server)

    def batches() -> Iterator[TensorDict]:
        yield some_rows(50, 1).td()
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        append_dataset(batches(), url)
    left = keys_of(server) - before
    assert not {key for key in left if b":v" in key or key.count(b":") == 3}
    append_dataset(some_rows(50, 2).td(), url)
    with RedisTDDataset(url) as dataset:
        found = dataset[:]
        found["row"] = torch.arange(110)
        (some_rows() + some_rows(50, 2)).assert_equal(found, list(range(110)))


def test_what_is_removed_takes_its_values_along(server: ServerProcess, url: str, unique_name: str) -> None:
    write_dataset(some_rows(10, 3).td(), url, overwrite=True, chunk_bytes=CHUNK_BYTES)
    client = connect(url)
    collect(client, unique_name, older_than_seconds=0)
    manifest = manifest_of(server, unique_name)
    counts = [heap.num_chunks for heap in manifest.heaps]
    assert len(server.execute("KEYS", "td:{*}:v*:*")) == sum(counts)
    drop(client, unique_name)
    client.close()
    assert keys_of(server) == set()


def test_a_write_that_fails_leaves_no_values_behind(server: ServerProcess, unique_name: str) -> None:
    def batches() -> Iterator[TensorDict]:
        yield some_rows().td()
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        write_dataset(batches(), server.url(unique_name), chunk_bytes=CHUNK_BYTES)
    assert keys_of(server) == set()


def test_an_older_release_refuses_what_it_does_not_know(server: ServerProcess, url: str, unique_name: str) -> None:
    text = server.execute("GET", manifest_key(unique_name))
    assert b'"version": 2' in text
    server.execute("SET", manifest_key(unique_name), text.replace(b'"version": 2', b'"version": 3'))
    with pytest.raises(SchemaError, match="format version 3, this release reads up to 2"):
        RedisTDDataset(url)


def test_real_text_files_come_back_in_any_order(server: ServerProcess, unique_name: str) -> None:
    folder = Path(sysconfig.get_path("stdlib"))
    paths = sorted(folder.glob("*.py")) + sorted((folder / "test").glob("test_[a-d]*.py"))
    contents = [path.read_bytes() for path in paths]
    sources = [data.decode("utf-8", "replace") for data in contents]
    assert len(sources) > 150
    tokens = [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in contents]
    td = TensorDict({"path": texts([path.name for path in paths]), "source": texts(sources)}, [len(paths)])
    td["tokens"] = jagged(tokens, tokens[0])
    url = server.url(unique_name)
    write_dataset((td[start : start + 20] for start in range(0, len(paths), 20)), url, chunk_bytes=1 << 16)
    order = np.random.default_rng(0).permutation(len(paths))
    with RedisTDDataset(url) as dataset:
        for some in np.array_split(order, 5):
            batch = dataset[some]
            assert list(batch["source"]) == [sources[row] for row in some]
            assert list(batch["path"]) == [paths[row].name for row in some]
            for row, found in zip(some, batch["tokens"].unbind(), strict=True):
                assert torch.equal(found, tokens[row])
    with pytest.raises(TDDatapipesError, match="exists"):
        write_dataset(td, url)


def test_a_full_server_refuses_values_and_keeps_what_it_had(server: ServerProcess, url: str, unique_name: str) -> None:
    before = keys_of(server)
    used = int(server.client().info("memory")["used_memory"])
    limits = {"maxmemory-policy": "noeviction", "maxmemory": str(used + (8 << 20))}
    big = torch.zeros(4 << 20, dtype=torch.uint8)
    td = TensorDict({"x": jagged([big] * 4, big)}, [4])
    try:
        for option, value in limits.items():
            server.execute("CONFIG", "SET", option, value)
        with pytest.raises(ServerFullError, match="maxmemory"):
            write_dataset(td, server.url("big"))
        assert keys_of(server) == before
    finally:
        server.execute("CONFIG", "SET", "maxmemory", "0")
    with RedisTDDataset(url) as dataset:
        some_rows().assert_equal(dataset[:], list(range(60)))
