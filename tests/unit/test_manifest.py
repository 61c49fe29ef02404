"""Manifests: chunks and their keys, and a JSON form that is read back whatever was in it."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rows_in_memory import random_rows

from td_datapipes.errors import SchemaError
from td_datapipes.manifest import FORMAT_VERSION, ChunkLayout, Heap, Manifest
from td_datapipes.schema import Field, Group, schema_of
from td_datapipes.varying import Varying


def manifest(name: str = "atari/pong", tags: tuple[str, ...] = ("ab12.0",)) -> Manifest:
    schema = schema_of(random_rows(2, {"x": (torch.bfloat16, (3,)), ("n", "é.\n"): (torch.complex32, (0, 2))}))
    return Manifest(
        name=name,
        id="ab12",
        kind="frozen",
        generation=3,
        rows=70_000,
        schema=schema,
        layouts=(ChunkLayout.for_stride(16, 1 << 20, 1 << 14),),
        tags=tags,
        created="2024-05-01T00:00:00+00:00",
    )


@given(st.integers(0, 5000), st.integers(1, 400), st.integers(1, 40), st.integers(0, 90))
def test_chunks_partition_the_rows_and_their_bytes(stride: int, chunk: int, most: int, rows: int) -> None:
    stride, chunk = stride // 16 * 16, chunk * 16
    layout = ChunkLayout.for_stride(stride, chunk, most)
    number = layout.num_chunks(rows)
    sizes = [layout.chunk_bytes(i, rows) for i in range(number)]
    assert sum(sizes) == stride * rows
    assert all(0 < size <= chunk for size in sizes)
    assert layout.pieces == 1 or layout.records_per_chunk == 1
    seen = Counter(row for i in range(number) for row in range(*layout.rows_of(i, rows)))
    assert seen == Counter(dict.fromkeys(range(rows), layout.pieces) if stride else {})
    if layout.pieces == 1:
        assert layout.records_per_chunk <= most


@pytest.mark.parametrize("chunk_bytes", [0, -16, 8, 24, 100])
def test_a_chunk_size_that_cannot_be_is_refused(chunk_bytes: int) -> None:
    with pytest.raises(SchemaError, match=f"chunk_bytes must be a positive multiple of 16, got {chunk_bytes}"):
        ChunkLayout.for_stride(16, chunk_bytes, 100)


@pytest.mark.parametrize("name", ["plain", "{x}*?[a]\n\0", "ü/€", '"quoted"\\'])
def test_a_manifest_is_read_back_from_its_json(name: str) -> None:
    written = manifest(name)
    for text in (written.to_json(), written.to_json().encode()):
        read = Manifest.from_json(text)
        assert read == written
        assert read.to_json() == written.to_json()


def with_heaps() -> Manifest:
    plain = manifest(tags=("ab12.0", "ab12.1"))
    fields = [
        Field(key=key, dtype=torch.int64, shape=(2,), offset_bytes=0, varying=varying)
        for key, varying in ((("t",), Varying(kind="tensor", dtype=torch.int32)), (("n", "s"), Varying(kind="str")))
    ]
    schema = replace(plain.schema, groups=(Group.pack([("x", torch.int8, ()), *fields]),))  # type: ignore[list-item]
    heaps = (
        Heap(key=("t",), chunk_bytes=160, nbytes=161, row_bytes=3),
        Heap(key=("n", "s"), chunk_bytes=160, nbytes=0, row_bytes=0),
    )
    return replace(plain, schema=schema, heaps=heaps)


def test_heaps_have_chunks_of_their_own_behind_the_groups() -> None:
    written = with_heaps()
    assert Manifest.from_json(written.to_json()).heaps == written.heaps
    assert written.heap_of(("n", "s")) == (2, written.heaps[1])
    assert [written.chunk_key(1, chunk) for chunk in range(2)] == [
        b"td:{ab12.0}:v0:00000000",
        b"td:{ab12.1}:v0:00000001",
    ]
    assert [heap.num_chunks for heap in written.heaps] == [2, 0]
    assert written.nbytes == manifest().nbytes + 161
    assert [heap.nbytes for heap in written.with_rows(70_001, heap_bytes=[400, 7]).heaps] == [400, 7]
    assert written.with_rows(70_001, complete=True).heaps == written.heaps


def test_only_heaps_need_the_later_format() -> None:
    assert [json.loads(made.to_json())["version"] for made in (manifest(), with_heaps())] == [1, 2]


def test_heaps_that_no_field_has_are_refused() -> None:
    data = json.loads(with_heaps().to_json())
    for heaps in ([], data["heaps"][::-1]):
        with pytest.raises(SchemaError, match="its heaps are not those of its fields of variable length"):
            Manifest.from_json(json.dumps({**data, "heaps": heaps}))


def test_a_manifest_can_be_read_by_a_person() -> None:
    lines = manifest().to_json().splitlines()
    assert len(lines) > 20
    for part in ('"name": "atari/pong"', '"rows": 70000', '"dtype": "bfloat16"', '"format": "td_datapipes"'):
        assert any(part in line for line in lines)


def test_chunk_keys_are_spread_over_the_shards_tags() -> None:
    spread = manifest(tags=("ab12.0", "ab12.1"))
    assert [spread.chunk_key(0, chunk) for chunk in (0, 1, 255)] == [
        b"td:{ab12.0}:0:00000000",
        b"td:{ab12.1}:0:00000001",
        b"td:{ab12.1}:0:000000ff",
    ]


def test_appending_makes_a_next_generation_of_the_same_rows() -> None:
    first = manifest()
    longer = first.with_rows(80_000)
    assert (longer.rows, longer.generation, longer.fingerprint) == (80_000, 4, first.fingerprint)
    assert replace(first, id="cd34").fingerprint != first.fingerprint
    assert longer.nbytes == 80_000 * 16


def changed(**changes: Any) -> str:
    return json.dumps(json.loads(manifest().to_json()) | changes)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not json",
        "[]",
        "3",
        "null",
        "{}",
        changed(format="zarr"),
        changed(groups=None),
        changed(groups=[{}]),
        changed(nodes=[3]),
        changed(rows="many"),
        changed(rows=None),
        changed(version="new"),
        changed(tags=None),
        b"\xff\xfe",
    ],
    ids=str,
)
def test_what_is_no_manifest_is_refused_by_name(text: str | bytes) -> None:
    with pytest.raises(SchemaError, match="no manifest of a data set"):
        Manifest.from_json(text)


def test_a_later_format_says_to_upgrade() -> None:
    with pytest.raises(
        SchemaError, match=f"format version {FORMAT_VERSION + 1}, this release reads up to {FORMAT_VERSION}"
    ):
        Manifest.from_json(changed(version=FORMAT_VERSION + 1))


def test_a_dtype_this_torch_lacks_is_named() -> None:
    data = json.loads(manifest().to_json())
    data["groups"][0]["fields"][0]["dtype"] = "float7"
    with pytest.raises(SchemaError, match="dtype 'float7' is not known to torch"):
        Manifest.from_json(json.dumps(data))
