"""Files and tables on real servers: what was in them is in the data set, or nothing is and the message says why."""

from __future__ import annotations

import multiprocessing
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import torch
from matplotlib.cbook import get_sample_data
from pyarrow import csv
from rows_in_memory import assert_same_rows, bytes_of, random_rows
from servers import ServerProcess, wait_until
from sklearn import datasets as real
from tensordict import TensorDict

from td_datapipes import RedisTDDataset, append_dataset
from td_datapipes.catalog import connect, drop, find_manifest
from td_datapipes.errors import (
    ConfigurationError,
    DatasetExistsError,
    DatasetNotFoundError,
    SchemaError,
    ServerFullError,
    SourceError,
    TDDatapipesError,
)
from td_datapipes.garbage import collect_garbage, staged_writes
from td_datapipes.group_chunks import GroupChunks
from td_datapipes.ingest import ingest
from td_datapipes.integrity import verify_dataset
from td_datapipes.keys import staged_key

CHUNK_KEY = re.compile(rb"td:\{[0-9a-f]+\.\d+\}:\d+:[0-9a-f]{8}")
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def server(valkey_server: ServerProcess) -> ServerProcess:
    """One of them: what differs between servers is tested where rows are written."""
    valkey_server.flush()
    return valkey_server


def read_all(url: str) -> TensorDict:
    with RedisTDDataset(url) as dataset:
        return dataset[:]


def keys(server: ServerProcess) -> list[bytes]:
    return sorted(server.execute("KEYS", "*"))


def chunks_on(server: ServerProcess) -> list[bytes]:
    """The keys of all chunks."""
    return [key for key in keys(server) if CHUNK_KEY.fullmatch(key)]


def assert_nothing_was_written(server: ServerProcess) -> None:
    assert chunks_on(server) == []
    assert not any(key.endswith((b":manifest", b":staged")) for key in keys(server))


def numbers(rows: int, seed: int = 0) -> pa.Table:
    rng = np.random.default_rng(seed)
    values = rng.random(rows * 3).astype(np.float32)
    return pa.table(
        {
            "id": np.arange(rows),
            "x": pa.FixedSizeListArray.from_arrays(pa.array(values), 3),
            "on": rng.random(rows) < 0.5,
        }
    )


def assert_is(url: str, table: pa.Table) -> None:
    """The data set has the columns `id`, `x` and `on` of that table."""
    got = read_all(url)
    assert got["id"].tolist() == table["id"].to_pylist()
    assert got["x"].tolist() == [list(row) for row in table["x"].to_pylist()]
    assert got["on"].tolist() == table["on"].to_pylist()


REAL = {
    "digits": real.load_digits,
    "iris": real.load_iris,
    "wine": real.load_wine,
    "breast cancer": real.load_breast_cancer,
    "diabetes": real.load_diabetes,
}


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("codec", ["snappy", "zstd"])
def test_real_tables_come_through_parquet(server: ServerProcess, tmp_path: Path, name: str, codec: str) -> None:
    found = REAL[name]()
    columns = {f"{number} {feature}": found.data[:, number] for number, feature in enumerate(found.feature_names)}
    table = pa.table({**columns, "target": found.target})
    pq.write_table(table, tmp_path / "real.parquet", row_group_size=50, compression=codec)
    manifest = ingest(tmp_path / "real.parquet", server.url(name))
    assert manifest.rows == len(found.data)
    got = read_all(server.url(name))
    stacked = torch.stack([got[column] for column in columns], 1)
    assert bytes_of(stacked) == np.ascontiguousarray(found.data).tobytes()
    assert bytes_of(got["target"]) == found.target.tobytes()


def test_a_table_of_prices_with_dates_and_holes(server: ServerProcess) -> None:
    path = get_sample_data("Stocks.csv", asfileobj=False)
    table = csv.read_csv(path, csv.ReadOptions(skip_rows=1))
    holes = {name: table[name].null_count for name in table.column_names}
    first = next(name for name, number in holes.items() if number)
    row = table[first].is_null().to_pylist().index(True)
    with pytest.raises(SchemaError, match=f"column '{first}' is null in row {row} of the table"):
        ingest(table, server.url("stocks"))
    assert_nothing_was_written(server)
    ingest(table, server.url("stocks"), fill=float("nan"))
    got = read_all(server.url("stocks"))
    assert {name: int(got[name].isnan().sum()) for name in holes if got[name].is_floating_point()} == {
        name: number for name, number in holes.items() if got[name].is_floating_point()
    }
    day = pa.scalar(int(got["Date"][0]), pa.int32()).cast(pa.date32())
    assert day == table["Date"][0]


def test_every_type_that_parquet_holds(server: ServerProcess, tmp_path: Path) -> None:
    rows = 300
    rng = np.random.default_rng(3)
    bits = rng.integers(0, 256, rows * 8, dtype=np.uint8)
    columns: dict[str, Any] = {}
    for name in [f"{kind}{size}" for kind in ("int", "uint", "float") for size in (8, 16, 32, 64)]:
        if name != "float8":
            columns[name] = pa.array(bits.view(name)[:rows])
    whole = pa.array(rng.integers(0, 86_000, rows))
    for kind in (
        pa.timestamp("ms"),
        pa.timestamp("us", tz="UTC"),
        pa.timestamp("ns"),
        pa.duration("us"),
        pa.time64("ns"),
    ):
        columns[str(kind)] = whole.cast(pa.int64()).view(kind)
    for kind in (pa.date32(), pa.time32("s"), pa.time32("ms")):
        columns[str(kind)] = whole.cast(pa.int32()).view(kind)
    columns["bool"] = pa.array(rng.random(rows) < 0.5)
    columns["decimal"] = pa.array(whole.to_pylist(), pa.decimal128(20, 3))
    columns["fixed"] = pa.array([bytes(bits[i : i + 5]) for i in range(rows)], pa.binary(5))
    columns["list"] = pa.FixedSizeListArray.from_arrays(pa.array(bits[: rows * 4].view("u2")), 2)
    columns["category"] = pa.array(rng.integers(0, 9, rows)).dictionary_encode()
    columns["node"] = pa.StructArray.from_arrays([columns["float32"], columns["bool"]], ["a", "b"])
    columns["tensor"] = pa.FixedShapeTensorArray.from_numpy_ndarray(bits[: rows * 6].reshape(rows, 2, 3))
    columns["list<>"] = pa.array([row.tolist() for row in bits[: rows * 4].reshape(rows, 4)], pa.list_(pa.uint8()))
    columns["binary"] = pa.array([bytes(bits[i : i + 7]) for i in range(rows)])
    columns["string"] = pa.array([str(i) for i in range(rows)])
    table = pa.table(columns)
    pq.write_table(table, tmp_path / "all.parquet", row_group_size=70)
    shapes = {"list<>": (4,), "binary": (7,)}
    with pytest.raises(SchemaError, match="column 'string' of .*all.parquet is string, .* rows of shape"):
        ingest(tmp_path / "all.parquet", server.url("all"), shapes={**shapes, "string": (1,)})
    assert_nothing_was_written(server)
    ingest(tmp_path / "all.parquet", server.url("all"), shapes=shapes)
    got = read_all(server.url("all"))
    columns["time32[s]"] = columns["time32[s]"].cast(pa.time32("ms"))  # Parquet has no seconds
    columns["list"] = columns["list"].values
    columns["list<>"] = columns["list<>"].values
    columns["tensor"] = columns["tensor"].storage.values
    for name in {*columns} - {"string", "node", "fixed", "binary", "decimal", "bool", "category"}:
        plain = columns[name]
        flat = plain.view(f"int{plain.type.bit_width}") if pa.types.is_temporal(plain.type) else plain
        assert bytes_of(got[name]) == flat.to_numpy().tobytes(), name
    assert got["bool"].tolist() == columns["bool"].to_pylist()
    assert got["string"].tolist() == columns["string"].to_pylist()
    assert got["category"].tolist() == columns["category"].to_pylist()
    assert bytes_of(got["fixed"]) == b"".join(columns["fixed"].to_pylist())
    assert bytes_of(got["binary"]) == b"".join(columns["binary"].to_pylist())
    assert got["decimal"].tolist() == [float(value) for value in whole.to_pylist()]
    assert bytes_of(got["node", "a"]) == bytes_of(got["float32"])
    assert got["node", "b"].tolist() == columns["bool"].to_pylist()


@pytest.mark.parametrize(
    "form", ["parquet", "feather", "arrow file", "arrow stream", "table", "batch", "reader", "dataset"]
)
def test_one_table_in_every_form_of_arrow(server: ServerProcess, tmp_path: Path, form: str) -> None:
    table = numbers(1000)
    source: Any = tmp_path / "part"
    if form == "parquet":
        pq.write_table(table, source)  # known by its first bytes
    elif form == "feather":
        feather.write_feather(table, source, compression="lz4")
    elif form == "arrow file":
        with pa.ipc.new_file(source, table.schema) as writer:
            writer.write_table(table, max_chunksize=300)
    elif form == "arrow stream":
        with pa.ipc.new_stream(source, table.schema) as writer:
            writer.write_table(table, max_chunksize=300)
        source = source.rename(tmp_path / "part.arrow")
    else:
        forms = {
            "table": table,
            "batch": table.combine_chunks().to_batches()[0],
            "reader": table.to_reader(max_chunksize=70),
            "dataset": ds.dataset(table),
        }
        source = forms[form]
    manifest = ingest(source, server.url("x"))
    assert_is(server.url("x"), table)
    assert (manifest.rows, list(manifest.schema.fields)) == (1000, [("id",), ("x",), ("on",)])


def test_directories_patterns_lists_and_folders_that_name_columns(server: ServerProcess, tmp_path: Path) -> None:
    table = numbers(90)
    for number in range(3):
        folder = tmp_path / "data" / f"year={2020 + number}"
        folder.mkdir(parents=True)
        pq.write_table(table.slice(number * 30, 30), folder / "a.parquet", row_group_size=8)
    (tmp_path / "data" / "_SUCCESS").touch()
    ingest(tmp_path / "data", server.url("d"))
    assert_is(server.url("d"), table)
    assert read_all(server.url("d"))["year"].tolist() == [2020] * 30 + [2021] * 30 + [2022] * 30
    ingest(str(tmp_path / "data/*/a.parquet"), server.url("p"), drop=["on"])
    assert set(read_all(server.url("p")).keys()) == {"id", "x"}
    ingest([tmp_path / "data/year=2022/a.parquet", tmp_path / "data/year=2020/a.parquet"], server.url("l"))
    assert sorted(read_all(server.url("l"))["id"].tolist()) == [*range(30), *range(60, 90)]


@pytest.mark.parametrize("form", ["parquet", "stream", "table"])
def test_filters_leave_rows_out(server: ServerProcess, tmp_path: Path, form: str) -> None:
    table = numbers(500)
    source: Any = table
    if form == "parquet":
        source = tmp_path / "t.parquet"
        pq.write_table(table, source, row_group_size=60)
    elif form == "stream":
        source = tmp_path / "t.arrows"
        with pa.ipc.new_stream(source, table.schema) as writer:
            writer.write_table(table, max_chunksize=60)
    ingest(source, server.url("f"), filters=["id >= 100", "on == true"], columns=["id"])
    expected = [i for i, on in enumerate(table["on"].to_pylist()) if i >= 100 and on]
    assert read_all(server.url("f"))["id"].tolist() == expected
    ingest(source, server.url("e"), filters=ds.field("id") < 0)
    assert len(read_all(server.url("e"))) == 0


@pytest.mark.parametrize("text", ["id", "== 3", "id ==", "id ~ 3"])
def test_a_filter_that_is_none_is_refused(server: ServerProcess, text: str) -> None:
    with pytest.raises(ConfigurationError, match="is no condition; write COLUMN OPERATOR VALUE"):
        ingest(numbers(3), server.url("f"), filters=text)


def test_appending_adds_rows_as_a_new_generation_and_refuses_another_schema_by_field(server: ServerProcess) -> None:
    table = numbers(100)
    first = ingest(table.slice(0, 60), server.url("a"))
    chunks = {key: server.execute("GET", key) for key in chunks_on(server)}
    second = ingest(table.slice(60), server.url("a"), append=True)
    assert (second.id, second.generation, second.rows) == (first.id, 2, 100)
    assert_is(server.url("a"), table)
    for key, value in chunks.items():
        assert server.execute("GET", key)[: 60 * 32] == value[: 60 * 32]  # no byte of the rows there were is new
    wrong = table.set_column(0, "id", pa.array(np.arange(100, dtype=np.int32)))
    with pytest.raises(SchemaError, match=r"'id': int64\[\] here, 'id': int32\[\] there"):
        ingest(wrong, server.url("a"), append=True)
    with pytest.raises(SchemaError, match="'on' is missing there"):
        ingest(table.drop_columns(["on"]), server.url("a"), append=True)
    assert_is(server.url("a"), table)
    with pytest.raises(DatasetNotFoundError):
        ingest(table, server.url("none"), append=True)
    reordered = table.select(["on", "id", "x"]).slice(0, 5)
    ingest(reordered, server.url("a"), append=True)
    assert_is(server.url("a"), pa.concat_tables([table, table.slice(0, 5)]))


def test_rows_longer_than_a_chunk(server: ServerProcess) -> None:
    values = np.random.default_rng(0).integers(0, 256, 5 * 1000, dtype=np.uint8)
    table = pa.table({"a": pa.FixedSizeListArray.from_arrays(pa.array(values), 1000), "n": np.arange(5)})
    manifest = ingest(table, server.url("long"), chunk_bytes=256)
    assert manifest.layouts[0].pieces == 4
    got = read_all(server.url("long"))
    assert bytes_of(got["a"]) == values.tobytes()
    assert got["n"].tolist() == list(range(5))


def test_an_empty_table_is_a_data_set_without_rows(server: ServerProcess, tmp_path: Path) -> None:
    pq.write_table(numbers(0), tmp_path / "empty.parquet")
    for number, source in enumerate([tmp_path / "empty.parquet", numbers(0), numbers(0).to_reader()]):
        manifest = ingest(source, server.url(f"e{number}"))
        assert (manifest.rows, len(read_all(server.url(f"e{number}")))) == (0, 0)
    ingest(numbers(7), server.url("e0"), append=True)
    assert_is(server.url("e0"), numbers(7))


def refused(server: ServerProcess, source: Any, error: type[TDDatapipesError], match: str, **options: Any) -> None:
    with pytest.raises(error, match=match):
        ingest(source, server.url("bad"), **options)
    assert_nothing_was_written(server)


def test_damaged_parquet_is_named(server: ServerProcess, tmp_path: Path) -> None:
    pq.write_table(numbers(2000), tmp_path / "good.parquet", row_group_size=100)
    whole = (tmp_path / "good.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    refused(server, tmp_path / "cut.parquet", SourceError, "cut.parquet cannot be read: .*is it complete")
    (tmp_path / "none.parquet").write_bytes(b"")
    refused(server, tmp_path / "none.parquet", SourceError, "none.parquet cannot be read")
    # Its end is whole, its middle is not: rows were staged when that shows.
    middle = len(whole) // 2
    (tmp_path / "hole.parquet").write_bytes(whole[:middle] + bytes(4000) + whole[middle + 4000 :])
    refused(server, tmp_path / "hole.parquet", SourceError, "hole.parquet cannot be read", chunk_bytes=1024)
    (tmp_path / "text.txt").write_text("hello")
    refused(server, tmp_path / "text.txt", SourceError, "text.txt is of no known kind; it should end in .parquet")
    refused(server, tmp_path / "absent.parquet", SourceError, "there is no file or directory .*absent.parquet")
    (tmp_path / "folder").mkdir()
    refused(server, tmp_path / "folder", SourceError, "folder has no Parquet or Arrow file in it")
    refused(server, 7, SourceError, "not int")
    refused(server, tmp_path / "good.parquet", ConfigurationError, "the format must be one of", file_format="csv")


def test_damaged_arrow_files_are_named(server: ServerProcess, tmp_path: Path) -> None:
    with pa.ipc.new_stream(tmp_path / "s.arrow", numbers(1).schema) as writer:
        writer.write_table(numbers(2000), max_chunksize=100)
    whole = (tmp_path / "s.arrow").read_bytes()
    (tmp_path / "s.arrow").write_bytes(whole[: len(whole) * 2 // 3])
    refused(server, tmp_path / "s.arrow", SourceError, "s.arrow cannot be read", chunk_bytes=1024)
    feather.write_feather(numbers(10), tmp_path / "f.feather")
    whole = (tmp_path / "f.feather").read_bytes()
    (tmp_path / "f.feather").write_bytes(whole[: len(whole) // 2])
    refused(server, tmp_path / "f.feather", SourceError, "f.feather cannot be read")
    (tmp_path / "old.feather").write_bytes(b"FEA1" + bytes(50))
    refused(server, tmp_path / "old.feather", SourceError, "old.feather is Feather version 1")


def test_files_with_other_columns_are_named(server: ServerProcess, tmp_path: Path) -> None:
    table = numbers(10)
    pq.write_table(table, tmp_path / "a.parquet")
    pq.write_table(table.set_column(0, "id", pa.array([1.5] * 10)), tmp_path / "b.parquet")
    refused(server, tmp_path, SchemaError, "column 'id' is int64 in .*a.parquet and double in .*b.parquet.*--drop id")
    pq.write_table(table.drop_columns(["on"]), tmp_path / "b.parquet")
    refused(server, tmp_path, SchemaError, "column 'on' is in .*a.parquet, but not in .*b.parquet.*--drop on")
    ingest(tmp_path, server.url("ok"), drop=["on"])
    assert read_all(server.url("ok"))["id"].tolist() == [*range(10), *range(10)]
    drop_all(server, "ok")
    # More columns than the first file has are nobody's loss.
    pq.write_table(table.append_column("more", pa.array(range(10))), tmp_path / "b.parquet")
    ingest(tmp_path, server.url("ok"))
    assert len(read_all(server.url("ok"))) == 20
    feather.write_feather(table, tmp_path / "c.feather")
    drop_all(server, "ok")
    refused(server, tmp_path, SourceError, "has files of several kinds .arrow, parquet.; say which")


def drop_all(server: ServerProcess, name: str) -> None:
    opened = connect(server.url(name))
    drop(opened, name)
    opened.close()


def test_a_null_in_a_later_file_is_named_with_its_row_there(server: ServerProcess, tmp_path: Path) -> None:
    for number, holes in enumerate([[], [77]]):
        values = [None if row in holes else row for row in range(100)]
        pq.write_table(
            pa.table({"age": pa.array(values, pa.int32())}), tmp_path / f"{number}.parquet", row_group_size=9
        )
    refused(server, tmp_path, SchemaError, "column 'age' is null in row 77 of .*1.parquet", chunk_bytes=160)
    ingest(tmp_path, server.url("f"), fill={"age": -1})
    assert read_all(server.url("f"))["age"][177] == -1


def test_a_taken_name_is_refused_before_anything_is_read(server: ServerProcess) -> None:
    ingest(numbers(3), server.url("a"))
    with pytest.raises(DatasetExistsError):
        ingest("no/such/file.parquet", server.url("a"))
    assert ingest(numbers(4), server.url("a"), overwrite=True).generation == 2


def test_iterables_of_dicts_and_tensordicts(server: ServerProcess) -> None:
    rows = random_rows(50, {"a": (torch.bfloat16, (2,)), ("n", "b"): (torch.int8, ())})
    ingest((rows[start : start + 7] for start in range(0, 50, 7)), server.url("td"))
    assert_same_rows(read_all(server.url("td")), rows)
    ingest(rows, server.url("one"), drop=["a"])
    assert_same_rows(read_all(server.url("one")), rows.exclude("a"))
    ingest([{"x": np.arange(3), "y": [0.5, 1, 2]}, {"x": torch.tensor([9]), "y": np.ones(1)}], server.url("dicts"))
    got = read_all(server.url("dicts"))
    assert (got["x"].tolist(), got["y"].tolist()) == ([0, 1, 2, 9], [0.5, 1, 2, 1])


@pytest.mark.parametrize(
    ("batches", "error", "match"),
    [
        ([], SourceError, "gave no batch"),
        ([{"x": [1, 2], "y": [1]}], SchemaError, r"'x': \(2,\), 'y': \(1,\)"),
        ([{"x": 3}], SchemaError, r"'x': \(\)"),
        ([{"x": ["a"]}], SchemaError, "field 'x' is no array of numbers"),
        ([[1, 2]], SchemaError, "not list"),
        ([{"x": [1]}, {"x": [1.5]}], SchemaError, r"'x': int64\[\] here, 'x': float64\[\] there"),
        ([{"x": [1]}, {"z": [1]}], SchemaError, "field 'x' is missing there"),
    ],
)
def test_bad_batches_are_refused(
    server: ServerProcess, batches: list[Any], error: type[TDDatapipesError], match: str
) -> None:
    refused(server, batches, error, match)


# Interruptions. Chunks of 320 bytes hold 10 records of 32.
CHUNK_BYTES = 320


def write_parquet(path: Path, rows: int = 1000) -> pa.Table:
    table = numbers(rows)
    pq.write_table(table, path, row_group_size=70)
    return table


@contextmanager
def after_chunks(server: ServerProcess, number: int, act: Callable[[], object]) -> Iterator[None]:
    """Do something once that many more chunks are on the server, and no other."""
    sent, plain, before = 0, GroupChunks.flush, len(chunks_on(server))

    def flush(self: GroupChunks) -> None:
        nonlocal sent
        plain(self)
        sent += 1
        if sent == number:
            wait_until(lambda: len(chunks_on(server)) == before + number, "the chunks to arrive")
            act()

    GroupChunks.flush = flush  # type: ignore[method-assign]
    try:
        yield
    finally:
        GroupChunks.flush = plain  # type: ignore[method-assign]


def die_midway(server: ServerProcess, source: Any, name: str, chunks: int, how: str, options: dict[str, Any]) -> None:
    """Ingest, and end after so many chunks: killed, or by Ctrl-C."""

    def interrupt_now() -> None:
        raise KeyboardInterrupt

    try:
        with after_chunks(server, chunks, (lambda: os._exit(9)) if how == "kill" else interrupt_now):
            ingest(source, server.url(name), chunk_bytes=CHUNK_BYTES, **options)
    except KeyboardInterrupt:
        os._exit(9)


def interrupt(
    server: ServerProcess, source: Any, name: str, *, chunks: int = 40, how: str = "kill", **options: Any
) -> None:
    child = FORK.Process(target=die_midway, args=(server, source, name, chunks, how, options))
    child.start()
    child.join()
    assert child.exitcode == 9


class Counting:
    """Server commands between two looks."""

    def __init__(self, server: ServerProcess) -> None:
        self._server, self._before = server, self._sets(server)

    @staticmethod
    def _sets(server: ServerProcess) -> int:
        stats: Any = server.client().info("commandstats")
        return int(stats.get("cmdstat_set", {}).get("calls", 0))

    @property
    def sets(self) -> int:
        return self._sets(self._server) - self._before


@pytest.mark.parametrize("how", ["kill", "interrupt"])
@pytest.mark.parametrize("chunks", [1, 40, 99])
def test_an_interrupted_ingest_goes_on_with_what_is_staged(
    server: ServerProcess, tmp_path: Path, how: str, chunks: int
) -> None:
    table = write_parquet(tmp_path / "t.parquet")
    interrupt(server, tmp_path, "r", chunks=chunks, how=how)
    staged = chunks_on(server)
    assert len(staged) == chunks
    counting = Counting(server)
    manifest = ingest(tmp_path, server.url("r"), chunk_bytes=CHUNK_BYTES)
    assert counting.sets == 100 - chunks + 1  # the manifest is one more
    assert verify_dataset(server.url("r")).bad == ()
    assert staged[0].startswith(b"td:{%s." % manifest.id.encode())
    assert_is(server.url("r"), table)
    assert server.execute("HLEN", staged_key("r")) == 0


def test_it_may_be_interrupted_again_and_again(server: ServerProcess, tmp_path: Path) -> None:
    table = write_parquet(tmp_path / "t.parquet")
    for _ in range(5):
        interrupt(server, tmp_path / "t.parquet", "r", chunks=15)
    assert len(chunks_on(server)) == 75
    ingest(tmp_path / "t.parquet", server.url("r"), chunk_bytes=CHUNK_BYTES)
    assert_is(server.url("r"), table)


def test_filters_and_a_stream_are_taken_up_at_the_right_row(server: ServerProcess, tmp_path: Path) -> None:
    table = write_parquet(tmp_path / "t.parquet")
    with pa.ipc.new_stream(tmp_path / "t.arrows", table.schema) as writer:
        writer.write_table(table, max_chunksize=33)
    for name, source in (("p", tmp_path / "t.parquet"), ("s", tmp_path / "t.arrows")):
        interrupt(server, source, name, chunks=20, filters=("on == true",))
        counting = Counting(server)
        ingest(source, server.url(name), chunk_bytes=CHUNK_BYTES, filters=("on == true",))
        expected = [row for row, on in enumerate(table["on"].to_pylist()) if on]
        assert read_all(server.url(name))["id"].tolist() == expected
        assert counting.sets == -(-len(expected) // 10) - 20 + 1


def test_chunks_that_are_gone_meanwhile_are_written_again(server: ServerProcess, tmp_path: Path) -> None:
    table = write_parquet(tmp_path / "t.parquet")
    interrupt(server, tmp_path / "t.parquet", "r")
    chunks = chunks_on(server)
    server.execute("DEL", chunks[7])
    server.execute("SET", chunks[20], "short")
    ingest(tmp_path / "t.parquet", server.url("r"), chunk_bytes=CHUNK_BYTES)
    assert_is(server.url("r"), table)


def test_what_is_staged_of_something_else_is_not_taken(server: ServerProcess, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    write_parquet(path)
    interrupt(server, path, "r")
    other = numbers(1000, seed=5)
    pq.write_table(other, path, row_group_size=70)
    manifest = ingest(path, server.url("r"), chunk_bytes=CHUNK_BYTES)
    assert_is(server.url("r"), other)
    opened = connect(server.url("r"))
    (left,) = staged_writes(opened, "r")
    assert left.id != manifest.id
    # It is kept for an hour, then `gc` finds it: both its chunks and the word of it.
    assert collect_garbage(opened, "r", 3600.0).writes == 0
    assert collect_garbage(opened, "r", 0.0).writes == 1
    assert staged_writes(opened, "r") == []
    opened.close()
    assert len(chunks_on(server)) == 100
    assert_is(server.url("r"), other)


@pytest.mark.parametrize("options", [{"drop": ["on"]}, {"resume": False}, {"chunk_bytes": 640}])
def test_another_reading_or_layout_begins_anew(server: ServerProcess, tmp_path: Path, options: dict[str, Any]) -> None:
    table = write_parquet(tmp_path / "t.parquet")
    interrupt(server, tmp_path / "t.parquet", "r")
    ingest(tmp_path / "t.parquet", server.url("r"), **{"chunk_bytes": CHUNK_BYTES, **options})
    assert read_all(server.url("r"))["id"].tolist() == table["id"].to_pylist()
    assert server.execute("HLEN", staged_key("r")) == 1


def test_a_write_that_goes_on_is_not_taken_from_its_writer(server: ServerProcess, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    table = write_parquet(path)
    reached, go_on = FORK.Event(), FORK.Event()

    def wait() -> None:
        reached.set()
        go_on.wait()

    def slow() -> None:
        try:
            with after_chunks(server, 40, wait):
                ingest(path, server.url("r"), chunk_bytes=CHUNK_BYTES)
        except DatasetExistsError:
            os._exit(7)

    child = FORK.Process(target=slow)
    child.start()
    reached.wait()
    counting = Counting(server)
    ingest(path, server.url("r"), chunk_bytes=CHUNK_BYTES)
    assert counting.sets == 101  # all of it
    go_on.set()
    child.join()
    assert child.exitcode == 7
    assert_is(server.url("r"), table)


def test_a_full_server_keeps_what_it_took_and_the_same_process_goes_on(tmp_path: Path) -> None:
    values = np.random.default_rng(0).random((4000, 1000))
    table = pa.table({"v": pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), 1000)})
    with pa.ipc.new_stream(tmp_path / "t.arrows", table.schema) as writer:
        writer.write_table(table, max_chunksize=200)
    with ServerProcess("redis") as process:
        url = process.url("full")
        process.execute("CONFIG", "SET", "maxmemory", "16mb")
        # How many rows pass the filter is not known before, so it is not refused before.
        with pytest.raises(ServerFullError):
            ingest(tmp_path / "t.arrows", url, filters=ds.scalar(True))
        opened = connect(url)
        assert find_manifest(opened, "full") is None
        assert len(staged_writes(opened, "full")) == 1
        opened.close()
        process.execute("CONFIG", "SET", "maxmemory", "0")
        counting = Counting(process)
        manifest = ingest(tmp_path / "t.arrows", url, filters=ds.scalar(True))
        assert 0 < counting.sets < manifest.layouts[0].num_chunks(4000)
        assert bytes_of(read_all(url)["v"]) == values.tobytes()


def test_an_iterable_that_promises_the_same_rows_is_taken_up(server: ServerProcess) -> None:
    rows = random_rows(400, {"a": (torch.float32, (8,))})

    def batches() -> Iterator[TensorDict]:
        for start in range(0, 400, 37):
            yield rows[start : start + 37]

    interrupt(server, batches(), "i", chunks=20, same_as="version 1")
    counting = Counting(server)
    ingest(batches(), server.url("i"), chunk_bytes=CHUNK_BYTES, same_as="version 1")
    assert counting.sets == 40 - 20 + 1
    assert_same_rows(read_all(server.url("i")), rows)
    append_dataset(rows, server.url("i"))  # an ordinary data set
