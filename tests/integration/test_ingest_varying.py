"""Strings, bytes and lists of tables on a real server: into a data set and out of it again, value for value."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
import torch
from servers import ServerProcess
from tensordict import NonTensorData, NonTensorStack, TensorDict

from td_datapipes import RedisTDDataset, write_dataset
from td_datapipes.catalog import connect, find_manifest
from td_datapipes.errors import ConfigurationError, SchemaError
from td_datapipes.export import export
from td_datapipes.ingest import ingest
from td_datapipes.integrity import verify_dataset
from td_datapipes.manifest import Manifest

TEXTS = ["", "a", None, "üñí€😀", "two\nlines", "\0", None, "x" * 5000]
BLOBS = [b"", b"\xff\x00", None, bytes(range(256)), None, b"b" * 3000, b"\n", b""]
LISTS = [[], [1], [2, -3], [], list(range(700)), [4], [5, 6, 7], []]


@pytest.fixture
def server(valkey_server: ServerProcess) -> ServerProcess:
    """One of them: what differs between servers is tested where rows are written."""
    valkey_server.flush()
    return valkey_server


def read_all(url: str) -> TensorDict:
    with RedisTDDataset(url) as dataset:
        return dataset[:]


def values_of(rows: TensorDict, key: Any) -> list[Any]:
    found = rows.get(key)
    return [row.tolist() for row in found.unbind()] if isinstance(found, torch.Tensor) else found.tolist()


def repeated(values: Sequence[Any], rows: int) -> list[Any]:
    return [values[row % len(values)] for row in range(rows)]


def varied_table(rows: int = 300) -> pa.Table:
    texts, blobs, lists = repeated(TEXTS, rows), repeated(BLOBS, rows), repeated(LISTS, rows)
    pairs = pa.list_(pa.list_(pa.float32(), 2))
    return pa.table(
        {
            "id": pa.array(range(rows), pa.int64()),
            "text": pa.array(texts, pa.string()),
            "long": pa.array(texts, pa.large_string()),
            "blob": pa.array(blobs, pa.binary()),
            "longblob": pa.array(blobs, pa.large_binary()),
            "word": pa.array(texts, pa.string()).dictionary_encode(),
            "nothing": pa.array([None] * rows, pa.string()),
            "tokens": pa.array(lists, pa.list_(pa.int32())),
            "wide": pa.array([[n % 251 for n in row] for row in lists], pa.large_list(pa.uint8())),
            "flags": pa.array([[n % 2 == 0 for n in row] for row in lists], pa.list_(pa.bool_())),
            "pairs": pa.array([[[n, n / 2] for n in row] for row in lists], pairs),
            "node": pa.StructArray.from_arrays(
                [pa.array(texts, pa.string()), pa.array(lists, pa.list_(pa.float64()))], ["s", "t"]
            ),
        }
    )


def test_parquet_into_a_data_set_and_back(server: ServerProcess, tmp_path: Path) -> None:
    table = varied_table()
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=70)
    # Values lie across chunks, and chunks end within rows.
    ingest(tmp_path / "in.parquet", server.url("v"), chunk_bytes=1024)
    got = read_all(server.url("v"))
    for name in table.column_names[:-1]:
        assert (got["id"].tolist() if name == "id" else values_of(got, name)) == table[name].to_pylist(), name
    assert values_of(got, ("node", "s")) == table["text"].to_pylist()
    assert values_of(got, ("node", "t")) == table["tokens"].to_pylist()
    assert got["tokens"].dtype == torch.int32
    assert got["flags"].dtype == torch.bool
    assert not verify_dataset(server.url("v")).bad

    assert export(server.url("v"), tmp_path / "out.parquet") == table.num_rows
    out = pq.read_table(tmp_path / "out.parquet")
    assert out.select(table.column_names).to_pylist() == table.to_pylist()
    ingest(tmp_path / "out.parquet", server.url("again"))
    export(server.url("again"), tmp_path / "again.parquet")
    assert (tmp_path / "again.parquet").read_bytes() == (tmp_path / "out.parquet").read_bytes()


@pytest.mark.parametrize("view", [pa.string_view(), pa.binary_view()], ids=str)
def test_views_and_sliced_batches(server: ServerProcess, view: pa.DataType) -> None:
    values = TEXTS if view == pa.string_view() else BLOBS
    batches = [pa.record_batch({"v": pa.array(values, view)}) for _ in range(3)]
    table = pa.Table.from_batches(batches).slice(3, 15)
    ingest(table, server.url("v"))
    assert values_of(read_all(server.url("v")), "v") == repeated(values, 24)[3:18]


def test_what_lies_behind_a_null_is_not_sent(server: ServerProcess) -> None:
    valid = pa.py_buffer(b"\x05")  # of three rows, the middle one is null
    offsets = pa.py_buffer(np.array([0, 2, 8, 9], np.int32).tobytes())
    texts = pa.Array.from_buffers(pa.string(), 3, [valid, offsets, pa.py_buffer(b"abSECRETc")])
    items = pa.array(range(9), pa.int8())
    lists = pa.Array.from_buffers(pa.list_(pa.int8()), 3, [valid, offsets], children=[items])
    ingest(pa.table({"s": texts, "l": lists}), server.url("v"), fill={"l": -1})
    got = read_all(server.url("v"))
    assert values_of(got, "s") == ["ab", None, "c"]
    assert values_of(got, "l") == [[0, 1], [-1], [8]]
    assert [heap.nbytes for heap in published(server, "v").heaps] == [3, 4]


def published(server: ServerProcess, name: str) -> Manifest:
    connection = connect(server.url(name))
    try:
        found = find_manifest(connection, name)
    finally:
        connection.close()
    assert found is not None
    return found


def test_the_standard_library_as_a_column(server: ServerProcess, tmp_path: Path) -> None:
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    sources = [path.read_bytes() for path in paths]
    texts = [source.decode(errors="replace") for source in sources]
    words = [len(source) for source in sources]
    table = pa.table({"name": [path.name for path in paths], "source": texts, "raw": sources, "size": words})
    pq.write_table(table, tmp_path / "stdlib.parquet", row_group_size=50)
    ingest(tmp_path / "stdlib.parquet", server.url("stdlib"))
    got = read_all(server.url("stdlib"))
    assert len(got) == len(paths) > 100
    assert values_of(got, "name") == [path.name for path in paths]
    assert values_of(got, "source") == texts
    assert values_of(got, "raw") == sources
    export(server.url("stdlib"), tmp_path / "out.parquet", fields=["source", "size"])
    out = pq.read_table(tmp_path / "out.parquet")
    assert out.to_pydict() == {"source": texts, "size": words}


def test_rows_are_appended(server: ServerProcess) -> None:
    table = varied_table(20).select(["text", "tokens"])
    ingest(table, server.url("v"))
    ingest(table.slice(5), server.url("v"), append=True)
    got = read_all(server.url("v"))
    assert values_of(got, "text") == table["text"].to_pylist() + table["text"].to_pylist()[5:]
    assert values_of(got, "tokens") == table["tokens"].to_pylist() + table["tokens"].to_pylist()[5:]
    other = pa.table({"text": ["a"], "tokens": pa.array([[1.5]], pa.list_(pa.float64()))})
    with pytest.raises(SchemaError, match=r"'tokens': int32\[\*\] here, 'tokens': float64\[\*\] there"):
        ingest(other, server.url("v"), append=True)


def test_null_lists_and_null_items(server: ServerProcess) -> None:
    rows = [[[1, 2], [3, 4]], [], None, [[5, None]], None]
    array = pa.array(rows, pa.list_(pa.list_(pa.int16(), 2)))
    table = pa.table({"n": pa.chunked_array([array.slice(0, 2), array.slice(2)])})
    with pytest.raises(SchemaError, match=r"column 'n' has an item that is null in row 3 of the table; .*--fill n=0"):
        ingest(table, server.url("v"))
    with pytest.raises(SchemaError, match=r"column 'n' is null in row 2 of the table; .*--fill n=0.*--drop n"):
        ingest(table.slice(0, 3), server.url("v"))
    ingest(table, server.url("v"), fill={"n": 7})
    assert values_of(read_all(server.url("v")), "n") == [[[1, 2], [3, 4]], [], [[7, 7]], [[5, 7]], [[7, 7]]]


def test_a_text_is_not_filled(server: ServerProcess) -> None:
    table = pa.table({"s": pa.array([None, "a"]), "i": pa.array([None, 1])})
    with pytest.raises(ConfigurationError, match="column 's' is not filled: null is a value of str fields"):
        ingest(table, server.url("v"), fill={"s": 0})
    ingest(table, server.url("v"), fill=0)  # for those that it fits
    got = read_all(server.url("v"))
    assert (values_of(got, "s"), got["i"].tolist()) == ([None, "a"], [0, 1])


def test_a_string_that_is_none_is_named_with_its_row(server: ServerProcess) -> None:
    offsets = pa.py_buffer(np.array([0, 1, 3, 4], np.int32).tobytes())
    array = pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(b"a\xff\xfeb")])
    table = pa.table({"s": pa.chunked_array([pa.array(["fine"] * 4), array])})
    with pytest.raises(SchemaError, match=r"column 's' is no large_string \(.*UTF8.*\) in row 5 of the table"):
        ingest(table, server.url("v"))


def test_no_rows_and_no_values(server: ServerProcess, tmp_path: Path) -> None:
    table = varied_table(0)
    ingest(table, server.url("none"))
    assert len(read_all(server.url("none"))) == 0
    export(server.url("none"), tmp_path / "none.parquet")
    assert pq.read_table(tmp_path / "none.parquet").select(table.column_names).to_pylist() == []
    empty = pa.table({"s": pa.array([None, None], pa.string()), "l": pa.array([[], []], pa.list_(pa.int8()))})
    ingest(empty, server.url("empty"))
    export(server.url("empty"), tmp_path / "empty.parquet")
    assert pq.read_table(tmp_path / "empty.parquet").to_pylist() == empty.to_pylist()


def test_json_and_dtypes_that_arrow_lacks_come_back_from_parquet(server: ServerProcess, tmp_path: Path) -> None:
    raw = torch.arange(-6, 6, dtype=torch.int16).view(torch.bfloat16)
    tokens = torch.nested.nested_tensor_from_jagged(raw, offsets=torch.tensor([0, 5, 5, 12]))
    complexes = torch.complex(torch.arange(8.0), -torch.arange(8.0)).to(torch.complex128).reshape(4, 2)
    waves = torch.nested.nested_tensor_from_jagged(complexes, offsets=torch.tensor([0, 1, 4, 4]))
    records = NonTensorStack({"a": [1, None]}, "text", None)
    rows = TensorDict({"tokens": tokens, "waves": waves, "record": records}, batch_size=[3])
    write_dataset(rows, server.url("there"))
    export(server.url("there"), tmp_path / "x.parquet")
    assert pq.read_table(tmp_path / "x.parquet")["record"].to_pylist() == ['{"a":[1,null]}', '"text"', "null"]
    ingest(tmp_path / "x.parquet", server.url("back"))
    there, back = published(server, "there"), published(server, "back")
    assert back.schema.difference(there.schema) == ""
    got = read_all(server.url("back"))
    assert got["tokens"].values().view(torch.int16).tolist() == list(range(-6, 6))
    assert got["tokens"].offsets().tolist() == [0, 5, 5, 12]
    assert torch.equal(got["waves"].values(), complexes)
    assert got["record"].tolist() == [{"a": [1, None]}, "text", None]


@pytest.mark.parametrize(("name", "form"), [("x.safetensors", "a safetensors file"), ("x", "a memory-mapped TensorD")])
def test_formats_without_room_for_them_say_so(server: ServerProcess, tmp_path: Path, name: str, form: str) -> None:
    ingest(pa.table({"i": [1, 2], "s": ["a", "b"]}), server.url("v"))
    with pytest.raises(SchemaError, match=rf"field 's': str is of variable length, for which {form}.* has no room"):
        export(server.url("v"), tmp_path / name)
    assert list(tmp_path.iterdir()) == []
    assert export(server.url("v"), tmp_path / name, fields=["i"]) == 2


def test_rows_are_filtered_by_a_string(server: ServerProcess, tmp_path: Path) -> None:
    pq.write_table(varied_table(), tmp_path / "in.parquet", row_group_size=70)
    ingest(ds.dataset(tmp_path / "in.parquet"), server.url("v"), filters="text == a", columns=["text", "blob", "id"])
    got = read_all(server.url("v"))
    assert values_of(got, "text") == ["a"] * len(got)
    assert got["id"].tolist() == list(range(1, 300, 8))
    assert values_of(got, "blob") == [BLOBS[1]] * len(got)


def test_lists_of_strings_and_of_lists_are_kept_as_json(server: ServerProcess, tmp_path: Path) -> None:
    """The remedy that their refusal names, there and back through Parquet."""
    tags: list[Any] = [["a", "ü"], [], None, ["b"]]
    boxes: list[Any] = [[[1, 2], [3]], [], [[]], None]
    table = pa.table({"tags": tags, "boxes": boxes})
    with pytest.raises(SchemaError, match="Or keep each row's list as a JSON value: write_dataset takes TensorDicts"):
        ingest(table, server.url("refused"))
    values = {name: NonTensorStack(*map(NonTensorData, table[name].to_pylist())) for name in table.column_names}
    write_dataset(TensorDict(values, [4]), server.url("lists"))
    export(server.url("lists"), tmp_path / "lists.parquet")
    texts = pq.read_table(tmp_path / "lists.parquet")["tags"].to_pylist()
    assert [json.loads(text or "null") for text in texts] == tags
    ingest(tmp_path / "lists.parquet", server.url("again"))
    for name in ("lists", "again"):
        rows = read_all(server.url(name))
        assert [rows[row]["tags"] for row in range(4)] == tags
        assert [rows[row]["boxes"] for row in range(4)] == boxes
