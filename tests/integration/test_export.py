"""A data set into files and back is the same data set, bit for bit; and others can read the files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rows_in_memory import ALL_DTYPES, assert_same_rows, assert_same_tensor, bytes_of, random_rows, random_tensor
from safetensors.torch import load_file
from servers import ServerProcess
from tensordict import TensorDict

from td_datapipes import RedisTDDataset, write_dataset
from td_datapipes.errors import ConfigurationError, DataLossError, DatasetNotFoundError, DestinationError
from td_datapipes.export import EXPORT_FORMATS, export
from td_datapipes.ingest import ingest
from td_datapipes.manifest import Manifest

SUFFIX = {"parquet": ".parquet", "safetensors": ".safetensors", "memmap": ""}


@pytest.fixture
def server(valkey_server: ServerProcess) -> ServerProcess:
    """One of them: reading and writing are tested on both elsewhere."""
    valkey_server.flush()
    return valkey_server


def read_all(url: str) -> TensorDict:
    with RedisTDDataset(url) as dataset:
        return dataset[:]


def there_and_back(server: ServerProcess, rows: TensorDict, path: Path, **options: Any) -> TensorDict:
    write_dataset(rows, server.url("there"), overwrite=True)
    assert export(server.url("there"), path, **options) == len(rows)
    assert [name for name in os.listdir(path.parent) if name.startswith(".")] == []
    ingest(path, server.url("back"), overwrite=True)
    return read_all(server.url("back"))


def every_dtype(rows: int) -> TensorDict:
    generator = torch.Generator().manual_seed(rows)
    td = TensorDict(batch_size=[rows], names=["time"])
    for dtype in ALL_DTYPES:
        name = str(dtype).removeprefix("torch.")
        td[name] = random_tensor((rows,), dtype, generator)
        td["nested", name] = random_tensor((rows, 2, 3), dtype, generator)
    td["a.b"] = random_tensor((rows, 1), torch.float32, generator)
    td["a", "b"] = random_tensor((rows, 1), torch.int16, generator)
    td["nothing"] = torch.zeros(rows, 0, 3)
    inner = TensorDict({"x": random_tensor((rows, 4, 2), torch.float32, generator)}, batch_size=[rows, 4])
    td["deep"] = TensorDict({"inner": inner, "empty": TensorDict(batch_size=[rows])}, batch_size=[rows])
    return td


@pytest.mark.parametrize("form", EXPORT_FORMATS)
@pytest.mark.parametrize("rows", [0, 1, 77])
def test_every_dtype_and_every_node_comes_back_bit_for_bit(
    server: ServerProcess, tmp_path: Path, form: str, rows: int
) -> None:
    td = every_dtype(rows)
    if form == "memmap":
        # tensordict has no name for these in its files.
        lost = [key for key in td.keys(True, True) if "float8" in str(td[key].dtype)]
        with pytest.raises(ConfigurationError, match="does not load such .* again .*'float8_e4m3fn': float8_e4m3fn"):
            there_and_back(server, td, tmp_path / "x")
        assert os.listdir(tmp_path) == []
        td = td.exclude(*lost)
    assert_same_rows(there_and_back(server, td, tmp_path / f"x{SUFFIX[form]}"), td)


@pytest.mark.parametrize("form", EXPORT_FORMATS)
def test_several_batches_make_one_file(
    server: ServerProcess, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("td_datapipes.export.MAX_BATCH_ROWS", 30)
    td = random_rows(101, {"x": (torch.float32, (3,)), ("n", "y"): (torch.uint8, ())})
    assert_same_rows(there_and_back(server, td, tmp_path / f"x{SUFFIX[form]}", file_format=form), td)


FIELDS = st.dictionaries(
    st.text("ab./é ~", min_size=1, max_size=3),
    st.tuples(st.sampled_from(ALL_DTYPES), st.lists(st.integers(0, 3), max_size=3).map(tuple)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fields=FIELDS, rows=st.integers(0, 9), form=st.sampled_from(["parquet", "safetensors"]))
def test_any_fields_come_back(
    server: ServerProcess, tmp_path: Path, fields: dict[str, Any], rows: int, form: str
) -> None:
    td = random_rows(rows, {("n", *name): spec for name, spec in fields.items() if len(name) > 1} | fields)
    path = tmp_path / f"x{SUFFIX[form]}"
    if form == "parquet" and all(0 in shape for _, shape in fields.values()):
        return
    assert_same_rows(there_and_back(server, td, path, overwrite=True), td)


def test_others_read_the_files(server: ServerProcess, tmp_path: Path) -> None:
    td = random_rows(50, {"x": (torch.float32, (2, 3)), ("n", "y"): (torch.int64, ()), "b": (torch.bfloat16, ())})
    td["x"].nan_to_num_()
    write_dataset(td, server.url("x"))
    for form in EXPORT_FORMATS:
        export(server.url("x"), tmp_path / f"x{SUFFIX[form]}")
    table = pq.read_table(tmp_path / "x.parquet")
    assert table["x"].to_pylist() == td["x"].tolist()
    assert [row["y"] for row in table["n"].to_pylist()] == td["n", "y"].tolist()
    loaded = load_file(tmp_path / "x.safetensors")
    assert set(loaded) == {"x", "n.y", "b"}
    for name, tensor in (("x", td["x"]), ("n.y", td["n", "y"]), ("b", td["b"])):
        assert_same_tensor(loaded[name], tensor)
    assert_same_rows(TensorDict.load_memmap(tmp_path / "x").contiguous(), td)


@pytest.mark.parametrize("form", EXPORT_FORMATS)
def test_chosen_fields_alone_are_exported(server: ServerProcess, tmp_path: Path, form: str) -> None:
    td = random_rows(20, {"x": (torch.float32, ()), ("n", "y"): (torch.int8, (2,)), ("m", "z"): (torch.int8, ())})
    write_dataset(td, server.url("x"))
    path = tmp_path / f"x{SUFFIX[form]}"
    export(server.url("x"), path, fields=[("n", "y"), "x"])
    ingest(path, server.url("y"))
    assert_same_rows(read_all(server.url("y")), td.exclude(("m", "z")).exclude("m"))


@pytest.mark.parametrize("form", EXPORT_FORMATS)
def test_what_is_there_is_replaced_only_when_asked_and_only_by_what_is_whole(
    server: ServerProcess, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"x{SUFFIX[form]}"
    td = random_rows(200, {"x": (torch.float32, (8,))})
    manifest = write_dataset(td, server.url("x"), chunk_bytes=1024)
    export(server.url("x"), path, file_format=form)
    with pytest.raises(DestinationError, match="exists; pass overwrite=True"):
        export(server.url("x"), path, file_format=form)
    other = random_rows(300, {"z": (torch.int16, ())})
    write_dataset(other, server.url("z"))
    export(server.url("z"), path, file_format=form, overwrite=True)
    ingest(path, server.url("back"))
    assert_same_rows(read_all(server.url("back")), other)
    lose_a_chunk(server, manifest)
    monkeypatch.setattr("td_datapipes.export.MAX_BATCH_ROWS", 10)  # rows were written when the loss shows
    with pytest.raises(DataLossError):
        export(server.url("x"), path, file_format=form, overwrite=True)
    with pytest.raises(DataLossError):
        export(server.url("x"), tmp_path / f"new{SUFFIX[form]}", file_format=form)
    assert os.listdir(tmp_path) == [path.name]
    ingest(path, server.url("again"))
    assert_same_rows(read_all(server.url("again")), other)


def lose_a_chunk(server: ServerProcess, manifest: Manifest) -> None:
    server.execute("DEL", manifest.chunk_key(0, 5))


def test_places_that_cannot_be_written_are_named(server: ServerProcess, tmp_path: Path) -> None:
    write_dataset(random_rows(3, {"x": (torch.float32, ())}), server.url("x"))
    for suffix in SUFFIX.values():
        with pytest.raises(DestinationError, match=f"{tmp_path}/none/x{suffix} cannot be written"):
            export(server.url("x"), tmp_path / "none" / f"x{suffix}")
    with pytest.raises(ConfigurationError, match="must be one of parquet, safetensors, memmap, got 'csv'"):
        export(server.url("x"), tmp_path / "x", file_format="csv")
    with pytest.raises(DatasetNotFoundError):
        export(server.url("none"), tmp_path / "x.parquet")
    write_dataset(TensorDict({"e": torch.zeros(3, 0)}, [3]), server.url("e"))
    with pytest.raises(ConfigurationError, match="Parquet would have no column"):
        export(server.url("e"), tmp_path / "e.parquet")
    assert os.listdir(tmp_path) == []
    assert bytes_of(read_all(server.url("e"))["e"]) == b""
