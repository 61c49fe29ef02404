"""Sources that are not Arrow's: memory-mapped TensorDicts, numpy's files, safetensors, and what `datasets` saves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from matplotlib.cbook import get_sample_data
from rows_in_memory import assert_same_rows, assert_same_tensor, bytes_of, random_rows
from safetensors.torch import save_file
from servers import ServerProcess
from tensordict import NonTensorData, TensorDict

from td_datapipes import RedisTDDataset
from td_datapipes.errors import ConfigurationError, SchemaError, SourceError, TDDatapipesError
from td_datapipes.ingest import ingest

SAVED = Path(__file__).parents[1] / "data" / "huggingface"


@pytest.fixture
def server(valkey_server: ServerProcess) -> ServerProcess:
    """One of them: what differs between servers is tested where rows are written."""
    valkey_server.flush()
    return valkey_server


def read_all(url: str) -> TensorDict:
    with RedisTDDataset(url) as dataset:
        return dataset[:]


def refused(server: ServerProcess, source: Any, error: type[TDDatapipesError], match: str, **options: Any) -> None:
    before = sorted(server.execute("KEYS", "*"))
    with pytest.raises(error, match=match):
        ingest(source, server.url("bad"), **options)
    assert sorted(server.execute("KEYS", "*")) == before


def test_a_memory_mapped_tensordict(server: ServerProcess, tmp_path: Path) -> None:
    td = random_rows(70, {"x": (torch.bfloat16, (3,)), ("n", "y"): (torch.int16, ()), "b": (torch.bool, ())})
    td.names = ["time"]
    td.memmap(tmp_path / "td")
    ingest(tmp_path / "td", server.url("m"))
    assert_same_rows(read_all(server.url("m")), td)
    ingest(tmp_path / "td", server.url("s"), columns=["b", ("n", "y")], drop=["b"])
    assert set(read_all(server.url("s")).keys(True, True)) == {("n", "y")}
    refused(server, tmp_path / "td", ConfigurationError, "there is no field 'q' in it", drop=["q"])
    refused(server, tmp_path / "td", ConfigurationError, "filters, fill and shapes are for Arrow", fill=0)


def test_a_damaged_or_pickled_tensordict_is_refused(server: ServerProcess, tmp_path: Path) -> None:
    td = random_rows(7, {"x": (torch.float32, (3,))})
    td.memmap(tmp_path / "td")
    (tmp_path / "td" / "x.memmap").write_bytes(b"short")
    refused(server, tmp_path / "td", SourceError, "not there, or not whole: of 84 bytes")
    (tmp_path / "td" / "x.memmap").unlink()
    refused(server, tmp_path / "td", SourceError, "not there, or not whole: of 84 bytes")
    (tmp_path / "td" / "meta.json").write_text("{")
    refused(server, tmp_path / "td", SourceError, "td cannot be loaded as a memory-mapped TensorDict")
    (tmp_path / "td" / "other.pickle").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    refused(server, tmp_path / "td", SourceError, "other.pickle is a pickle, which is never loaded")
    td["text"] = NonTensorData("a", batch_size=[7])
    td.memmap(tmp_path / "text")
    ingest(tmp_path / "text", server.url("text"))
    assert read_all(server.url("text"))["text"].tolist() == ["a"] * 7
    ingest(tmp_path / "text", server.url("ok"), drop=["text"])
    assert_same_rows(read_all(server.url("ok")), td.exclude("text"))


NPY = {
    "plain": np.arange(24, dtype=np.int16).reshape(6, 4),
    "fortran": np.asfortranarray(np.arange(24.0).reshape(6, 4)),
    "other byte order": np.arange(6, dtype=">f4"),
    "bools": np.arange(6) % 2 == 0,
    "complex": np.arange(6) * 1j,
}


@pytest.mark.parametrize("name", NPY)
def test_an_array_in_a_file(server: ServerProcess, tmp_path: Path, name: str) -> None:
    np.save(tmp_path / "values.npy", NPY[name])
    ingest(tmp_path / "values.npy", server.url("a"))
    got = read_all(server.url("a"))["values"]
    assert_same_tensor(got, torch.from_numpy(NPY[name].astype(NPY[name].dtype.newbyteorder("="), order="C")))


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_in_a_zip_are_read_together_in_parts(
    server: ServerProcess, tmp_path: Path, save: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("td_datapipes.ingest.tensors.MAX_BATCH_ROWS", 10)
    rng = np.random.default_rng(0)
    rows = np.zeros(64, [("t", "f8"), ("xy", "i4", (2,))])
    rows["t"], rows["xy"] = rng.random(64), rng.integers(0, 9, (64, 2))
    arrays = {
        "image": rng.integers(0, 256, (64, 5, 5), dtype=np.uint8),
        "turned": np.asfortranarray(rng.random((64, 3))),
    }
    save(tmp_path / "a.npz", rows=rows, **arrays)
    ingest(tmp_path / "a.npz", server.url("z"))
    got = read_all(server.url("z"))
    expected = {**arrays, "rows.t": rows["t"], "rows.xy": rows["xy"]}
    assert {name: bytes_of(got[name]) for name in got.keys()} == {  # noqa: SIM118
        name: np.ascontiguousarray(array).tobytes() for name, array in expected.items()
    }


def test_real_prices_from_a_structured_array(server: ServerProcess) -> None:
    path = get_sample_data("goog.npz", asfileobj=False)
    prices = np.load(path)["price_data"]
    ingest(path, server.url("goog"))
    got = read_all(server.url("goog"))
    assert prices.dtype["date"] == "<M8[D]"
    assert got["price_data.date"].tolist() == prices["date"].astype(np.int64).tolist()  # days since 1970
    for name in prices.dtype.names:
        assert bytes_of(got[f"price_data.{name}"]) == np.ascontiguousarray(prices[name]).tobytes()
    ingest(path, server.url("some"), drop=["price_data.date"])
    assert set(read_all(server.url("some")).keys()) == {*got.keys()} - {"price_data.date"}


def test_a_real_landscape_from_a_zip(server: ServerProcess) -> None:
    path = get_sample_data("topobathy.npz", asfileobj=False)
    land = np.load(path)
    refused(server, path, SchemaError, "the arrays of .*topobathy.npz have several lengths")
    refused(server, path, ConfigurationError, "'q', which .*topobathy.npz does not have; it has", drop=["q"])
    ingest(path, server.url("topo"), columns=["topo"])
    assert bytes_of(read_all(server.url("topo"))["topo"]) == np.ascontiguousarray(land["topo"]).tobytes()


def test_bad_arrays_are_refused(server: ServerProcess, tmp_path: Path) -> None:
    np.save(tmp_path / "objects.npy", np.array([{}, {}], dtype=object), allow_pickle=True)
    refused(server, tmp_path / "objects.npy", SourceError, "objects.npy cannot be read as arrays of numbers")
    np.savez(tmp_path / "objects.npz", np.array([{}, {}], dtype=object))
    refused(server, tmp_path / "objects.npz", SourceError, "'arr_0' holds Python objects, which are never unpickled")
    np.save(tmp_path / "number.npy", np.float32(3))
    refused(server, tmp_path / "number.npy", SourceError, "it is a single number; rows need a leading dim")
    np.save(tmp_path / "cut.npy", np.arange(1000))
    (tmp_path / "cut.npy").write_bytes((tmp_path / "cut.npy").read_bytes()[:3000])
    refused(server, tmp_path / "cut.npy", SourceError, "cut.npy cannot be read")
    (tmp_path / "cut.npz").write_bytes((tmp_path / "objects.npz").read_bytes()[:200])
    refused(server, tmp_path / "cut.npz", SourceError, "cut.npz cannot be read")
    np.savez(tmp_path / "none.npz")
    refused(server, tmp_path / "none.npz", SourceError, "none.npz")
    np.save(tmp_path / "text.npy", np.array(["a", "b"]))
    refused(server, tmp_path / "text.npy", SchemaError, "field 'text' is no array of numbers")


def test_safetensors_of_the_real_library(server: ServerProcess, tmp_path: Path) -> None:
    td = random_rows(
        33,
        {
            "x": (torch.float8_e4m3fn, (3,)),
            "n.y": (torch.int16, ()),
            "h": (torch.bfloat16, (2, 2)),
            "e": (torch.bool, (0,)),
        },
    )
    save_file(dict(td.items()), tmp_path / "a.safetensors", metadata={"format": "pt"})
    ingest(tmp_path / "a.safetensors", server.url("s"))
    assert_same_rows(read_all(server.url("s")), td)
    save_file({"x": torch.zeros(3), "y": torch.zeros(4)}, tmp_path / "b.safetensors")
    refused(server, tmp_path / "b.safetensors", SchemaError, "their leading dims differ")


def header(entries: dict[str, Any], length: int | None = None) -> bytes:
    text = json.dumps(entries).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "the file has 0"),
        (b"\xff" * 20, "its header should have"),
        (header({}, 2) + b"{}"[:0], "leading dims differ|cannot be read"),
        (header({"x": {"dtype": "Q4", "shape": [1], "data_offsets": [0, 1]}}) + b"a", "dtype 'Q4'; known are BOOL"),
        (header({"x": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}) + b"a", "bytes 0 to 36 of 1"),
        (header({"x": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}) + b"abcd", "bytes -4 to 0"),
        (header({"x": {"dtype": "U8", "shape": [3], "data_offsets": [0, 4]}}) + b"abcd", "does not have 4 bytes"),
        (header({"x": {"dtype": "U8", "shape": [-1], "data_offsets": [0, 4]}}) + b"abcd", "should lie at"),
        (header({"x": {"dtype": "U8"}}), "cannot be read as safetensors"),
        (header({"x": 3}), "cannot be read as safetensors"),
        (b"\x02" + bytes(7) + b"[]", "its header is no JSON object"),
        (b"\x02" + bytes(7) + b"\xff\xfe", "cannot be read as safetensors"),
        (header({"__metadata__": {"td_datapipes": "{}"}}), "cannot be read as safetensors"),
    ],
)
def test_a_safetensors_header_is_checked_before_it_is_believed(
    server: ServerProcess, tmp_path: Path, content: bytes, match: str
) -> None:
    (tmp_path / "bad.safetensors").write_bytes(content)
    with pytest.raises((SourceError, SchemaError), match=match):
        ingest(tmp_path / "bad.safetensors", server.url("bad"))
    assert server.execute("KEYS", "td:{*") == []


def test_what_the_library_of_hugging_face_saves(server: ServerProcess) -> None:
    manifest = ingest(SAVED / "saved", server.url("hf"))
    got = read_all(server.url("hf"))
    n = torch.arange(30)
    assert manifest.rows == 30
    assert_same_tensor(got["id"], n)
    assert_same_tensor(got["label"], n % 2)
    assert got["text"].tolist() == [str(row) for row in range(30)]
    assert_same_tensor(got["embedding"], n[:, None] + torch.arange(4) / 4)
    assert_same_tensor(got["image"], (n[:, None, None] + torch.arange(6).reshape(2, 3)).to(torch.uint8))
    ingest(SAVED / "saved", server.url("some"), columns=["id"], filters="id >= 27")
    assert read_all(server.url("some"))["id"].tolist() == [27, 28, 29]


def test_splits_of_hugging_face_are_read_one_at_a_time(server: ServerProcess, tmp_path: Path) -> None:
    refused(server, SAVED / "splits", SourceError, "has several splits; choose one: .*/splits/train, .*/splits/test")
    ingest(SAVED / "splits" / "test", server.url("t"), columns=["id"])
    assert read_all(server.url("t"))["id"].tolist() == [10, 11]
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "gone.arrow"}]}))
    refused(server, tmp_path, SourceError, "should have the file .*gone.arrow; is it complete")
    (tmp_path / "state.json").write_text("[]")
    refused(server, tmp_path, SourceError, "is no data set saved by Hugging Face's library")


def test_kinds_are_not_mixed(server: ServerProcess, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(3))
    np.save(tmp_path / "b.npy", np.arange(3))
    with pa.ipc.new_file(tmp_path / "c.arrow", pa.schema([("x", pa.int8())])):
        pass
    paths = [tmp_path / name for name in ("a.npy", "b.npy", "c.arrow")]
    refused(server, paths, SourceError, "a.npy is numpy and .*c.arrow is arrow; read one kind at a time")
    refused(server, paths[:2], SourceError, "numpy sources are read one at a time; append the others: .*b.npy")
    ingest(paths[0], server.url("x"), drop=[])
    np.save(paths[0], np.arange(3, 5))
    ingest(paths[0], server.url("x"), append=True)
    assert read_all(server.url("x"))["a"].tolist() == [0, 1, 2, 3, 4]
