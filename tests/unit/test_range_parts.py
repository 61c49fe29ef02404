"""The commands that write rows, carried out on strings in memory, against the ranges and bytes they stand for."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from td_datapipes.manifest import SPARE_BYTES, ChunkLayout
from td_datapipes.remote.ranges import row_writes
from td_datapipes.schema import Group, Key, Node, Schema
from td_datapipes.wire.range_parts import ChunkPart, RangePart, RangeWrite, RowPart

ROWS = 300


def commands(data: bytes) -> Iterator[list[bytes]]:
    """RESP arrays of bulk strings."""
    at = 0

    def number(mark: bytes) -> int:
        nonlocal at
        end = data.index(b"\r\n", at)
        assert data[at : at + 1] == mark
        found, at = int(data[at + 1 : end]), end + 2
        return found

    while at < len(data):
        words = []
        for _ in range(number(b"*")):
            length = number(b"$")
            words.append(data[at : at + length])
            assert data[at + length : at + length + 2] == b"\r\n"
            at += length + 2
        yield words


def carried_out(write: RangeWrite, strings: dict[bytes, bytearray]) -> None:
    for name, key, *rest in commands(b"".join(map(bytes, write.commands()))):
        if name == b"SET":
            strings[key] = bytearray(rest[0])
        else:
            assert name == b"SETRANGE"
            start = int(rest[0])
            strings[key][start : start + len(rest[1])] = rest[1]


def one_group(widths: dict[str, int], chunk_bytes: int) -> tuple[Schema, list[ChunkLayout], dict[Key, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    values = {
        (name,): torch.randint(1, 256, (ROWS, width), dtype=torch.uint8, generator=generator)
        for name, width in widths.items()
    }
    group = Group.pack([(key, torch.uint8, tuple(value.shape[1:])) for key, value in values.items()])
    layout = ChunkLayout.for_stride(group.stride_bytes, chunk_bytes, 1 << 20)
    return Schema(groups=(group,), nodes=(Node(key=()),)), [layout], values


def chunk_key(group: int, chunk: int) -> bytes:
    return b"%d:%d" % (group, chunk)


def blank(schema: Schema, layouts: list[ChunkLayout]) -> dict[bytes, bytearray]:
    return {
        chunk_key(number, chunk): bytearray(layout.chunk_bytes(chunk, ROWS) + SPARE_BYTES)
        for number, layout in enumerate(layouts)
        for chunk in range(layout.num_chunks(ROWS))
    }


def records_of(schema: Schema, layouts: list[ChunkLayout], strings: dict[bytes, bytearray]) -> np.ndarray:
    stride = schema.groups[0].stride_bytes
    chunks = range(layouts[0].num_chunks(ROWS))
    found = b"".join(bytes(strings[chunk_key(0, chunk)][:-SPARE_BYTES]) for chunk in chunks)
    return np.frombuffer(found, dtype=np.uint8).reshape(ROWS, stride)


@pytest.mark.parametrize("widths", [{"a": 64}, {"a": 5, "b": 3, "c": 60}, {"a": 3}, {"a": 6000}, {"a": 4100, "b": 9}])
@pytest.mark.parametrize("chunk_bytes", [1 << 14, 1 << 22])
@pytest.mark.parametrize("num_rows", [7, 200])
def test_scattered_rows_are_where_they_belong(widths: dict[str, int], chunk_bytes: int, num_rows: int) -> None:
    schema, layouts, values = one_group(widths, chunk_bytes)
    rows = np.random.default_rng(1).choice(ROWS, num_rows, replace=False)
    mine = {key: value[:num_rows] for key, value in values.items()}
    write = row_writes(schema, layouts, chunk_key, mine, rows)
    strings = blank(schema, layouts)
    carried_out(write, strings)
    assert isinstance(write.parts[0], RowPart)
    records = records_of(schema, layouts, strings)
    expected = np.zeros_like(records)
    for field in schema.groups[0].fields:
        expected[rows, field.offset_bytes : field.offset_bytes + field.nbytes] = mine[field.key].numpy()
    np.testing.assert_array_equal(records, expected)
    assert all(not any(string[-SPARE_BYTES:]) for string in strings.values())
    assert (write.num_ranges, write.num_bytes) == (num_rows, len(write.data))


@pytest.mark.parametrize("widths", [{"a": 64}, {"a": 5, "b": 3, "c": 60}, {"a": 3}])
@pytest.mark.parametrize("chunk_bytes", [1 << 10, 1 << 22])
def test_all_rows_are_set_chunk_by_chunk(widths: dict[str, int], chunk_bytes: int) -> None:
    schema, layouts, values = one_group(widths, chunk_bytes)
    whole = row_writes(schema, layouts, chunk_key, values, range(ROWS), SPARE_BYTES)
    ranges = row_writes(schema, layouts, chunk_key, values, range(ROWS))
    assert isinstance(whole.parts[0], ChunkPart)
    assert isinstance(ranges.parts[0], RangePart)
    assert (whole.keys, whole.needed, whole.packed, whole.data) == (
        ranges.keys,
        ranges.needed,
        ranges.packed,
        ranges.data,
    )
    by_set: dict[bytes, bytearray] = {}
    by_range = blank(schema, layouts)
    carried_out(whole, by_set)
    carried_out(ranges, by_range)
    assert by_set == by_range


def test_records_that_need_not_be_put_together_are_one_part_from_where_they_lie() -> None:
    schema, layouts, values = one_group({"a": 4096}, 1 << 22)
    write = row_writes(schema, layouts, chunk_key, values, range(ROWS), SPARE_BYTES)
    data = values["a",].numpy()
    (part,) = [part for part in write.commands() if isinstance(part, memoryview)]
    assert len(part) == data.nbytes
    assert np.shares_memory(np.frombuffer(part, dtype=np.uint8), data)
