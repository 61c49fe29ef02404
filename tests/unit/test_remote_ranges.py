"""What is written to chunks, carried out on strings in memory and compared with the rows it should leave."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from td_datapipes.manifest import ChunkLayout
from td_datapipes.remote.ranges import element_writes, row_writes, slice_rows
from td_datapipes.schema import Group, Key, Node, Schema
from td_datapipes.wire.range_parts import RangeWrite

ROWS = 9
FIELDS: dict[Key, Any] = {
    ("a",): (torch.float32, (3,)),
    ("b",): (torch.int8, ()),
    ("n", "c"): (torch.bfloat16, (2, 2)),
    ("none",): (torch.int64, (0,)),
}


def chunk_key(group: int, chunk: int) -> bytes:
    return b"%d:%d" % (group, chunk)


class Strings:
    """Chunks as a server keeps them, and rows read back from them."""

    def __init__(self, groups: list[list[Key]], chunk_bytes: int) -> None:
        made = [Group.pack([(key, *FIELDS[key]) for key in keys]) for keys in groups]
        self.schema = Schema(groups=tuple(made), nodes=(Node(key=()), Node(key=("n",))))
        self.layouts = [ChunkLayout.for_stride(group.stride_bytes, chunk_bytes, 1 << 20) for group in made]
        self.chunks = {
            chunk_key(number, chunk): bytearray(layout.chunk_bytes(chunk, ROWS) + 32)
            for number, layout in enumerate(self.layouts)
            for chunk in range(layout.num_chunks(ROWS))
        }

    def write(self, write: RangeWrite) -> None:
        at = 0
        for number, start, length in np.frombuffer(write.packed, dtype="<u4").reshape(-1, 3).tolist():
            key = write.keys[number]
            assert start + length <= write.needed[number] <= len(self.chunks[key])
            self.chunks[key][start : start + length] = write.data[at : at + length]
            at += length
        assert at == len(write.data)
        assert len(set(write.keys)) == len(write.keys) == len(write.needed)

    def read(self, key: Key) -> torch.Tensor:
        found = []
        for number, group in enumerate(self.schema.groups):
            for field in group.fields:
                if field.key == key:
                    for row in range(ROWS):
                        found.append(self._record(number, row)[field.offset_bytes : field.offset_bytes + field.nbytes])
        dtype, shape = FIELDS[key]
        data = bytearray(b"".join(found))
        return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(ROWS, *shape)

    def _record(self, group: int, row: int) -> bytes:
        layout = self.layouts[group]
        if layout.pieces > 1:
            parts = [self.chunks[chunk_key(group, row * layout.pieces + piece)][:-32] for piece in range(layout.pieces)]
            return b"".join(map(bytes, parts))
        chunk, within = divmod(row, layout.records_per_chunk)
        start = within * layout.stride_bytes
        return bytes(self.chunks[chunk_key(group, chunk)][start : start + layout.stride_bytes])


LAYOUTS = st.tuples(
    st.sampled_from(
        [
            [[("a",), ("b",), ("n", "c"), ("none",)]],
            [[("a",), ("n", "c")], [("b",), ("none",)]],
            [[("n", "c")], [("a",)], [("b",)]],
        ]
    ),
    st.sampled_from([16, 32, 64, 128, 4096]),
)


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randint(1, 100, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@settings(max_examples=80, deadline=None)
@given(layout=LAYOUTS, data=st.data())
def test_rows_and_elements_are_left_as_they_were_assigned(layout: Any, data: st.DataObject) -> None:
    strings = Strings(*layout)
    there = [key for group in layout[0] for key in group if key != ("none",)]
    expected = {key: torch.zeros(ROWS, *FIELDS[key][1], dtype=FIELDS[key][0]) for key in there}
    for seed in range(3):
        keys = data.draw(st.lists(st.sampled_from(there), min_size=1, unique=True))
        rows = data.draw(st.lists(st.integers(0, ROWS - 1), max_size=6))
        numbers = np.array(rows, dtype=np.int64)
        values = {key: drawn((len(rows), *FIELDS[key][1]), FIELDS[key][0], seed) for key in keys}
        strings.write(row_writes(strings.schema, strings.layouts, chunk_key, values, numbers))
        for key in keys:
            for position, row in enumerate(rows):
                expected[key][row] = values[key][position]
        elements: dict[Key, tuple[torch.Tensor, torch.Tensor]] = {}
        distinct = np.unique(numbers)
        for key in keys:
            shape = FIELDS[key][1]
            width = int(np.prod(shape))
            places = data.draw(st.lists(st.integers(0, max(len(distinct) * width - 1, 0)), unique=True, max_size=5))
            places = places if len(distinct) else []
            elements[key] = torch.tensor(places, dtype=torch.int64), drawn((len(places),), FIELDS[key][0], seed + 9)
            for place, value in zip(places, elements[key][1], strict=True):
                row = int(distinct[place // width])
                expected[key][row].view(-1)[place % width] = value
        strings.write(element_writes(strings.schema, strings.layouts, chunk_key, elements, distinct))
    for key in there:
        assert torch.equal(strings.read(key), expected[key]), key


def test_fields_side_by_side_are_one_range_a_row_and_adjacent_rows_one() -> None:
    strings = Strings([[("a",), ("b",), ("n", "c")]], 4096)
    values = {key: drawn((4, *FIELDS[key][1]), FIELDS[key][0], 0) for key in [("a",), ("b",), ("n", "c")]}
    scattered = row_writes(strings.schema, strings.layouts, chunk_key, values, np.array([7, 0, 4, 2]))
    adjacent = row_writes(strings.schema, strings.layouts, chunk_key, values, np.array([2, 3, 4, 5]))
    assert (scattered.num_ranges, adjacent.num_ranges) == (4, 1)
    one = row_writes(strings.schema, strings.layouts, chunk_key, {("a",): values["a",]}, np.array([2, 3, 4, 5]))
    assert (one.num_ranges, len(one.data)) == (4, 48)


@settings(max_examples=60, deadline=None)
@given(layout=LAYOUTS, bounds=st.tuples(st.integers(0, ROWS), st.integers(0, ROWS)), every=st.booleans())
def test_a_range_of_rows_is_written_as_its_rows_are(layout: Any, bounds: tuple[int, int], every: bool) -> None:
    start, stop = min(bounds), max(bounds)
    keys = [key for group in layout[0] for key in group if key != ("none",)][: None if every else 1]
    values = {key: drawn((stop - start, *FIELDS[key][1]), FIELDS[key][0], 3) for key in keys}
    by_range, by_row = Strings(*layout), Strings(*layout)
    for strings, rows in ((by_range, range(start, stop)), (by_row, np.arange(start, stop))):
        strings.write(row_writes(strings.schema, strings.layouts, chunk_key, values, rows))
    assert by_range.chunks == by_row.chunks
    for key in keys:
        assert torch.equal(by_range.read(key)[start:stop], values[key])


def test_all_rows_of_complete_records_are_one_range_a_chunk() -> None:
    strings = Strings([[("a",), ("b",), ("n", "c")]], 128)
    values = {key: drawn((ROWS, *FIELDS[key][1]), FIELDS[key][0], 0) for key in [("a",), ("b",), ("n", "c")]}
    write = row_writes(strings.schema, strings.layouts, chunk_key, values, range(ROWS))
    assert write.num_ranges == len(write.keys) == strings.layouts[0].num_chunks(ROWS) > 1


def test_the_last_value_of_a_repeated_row_stays() -> None:
    strings = Strings([[("b",)]], 4096)
    values = {("b",): torch.tensor([1, 2, 3], dtype=torch.int8)}
    strings.write(row_writes(strings.schema, strings.layouts, chunk_key, values, np.array([4, 4, 4])))
    assert strings.read(("b",)).tolist() == [0, 0, 0, 0, 3, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("rows", "row_bytes", "max_bytes", "max_ranges", "expected"),
    [(10, 100, 250, 99, [2] * 5), (10, 100, 9999, 4, [4, 4, 2]), (3, 1000, 250, 9, [1, 1, 1]), (0, 8, 99, 9, [])],
)
def test_large_calls_are_cut(rows: int, row_bytes: int, max_bytes: int, max_ranges: int, expected: list[int]) -> None:
    parts = list(slice_rows(rows, row_bytes, max_bytes, max_ranges))
    assert [part.stop - part.start for part in parts] == expected
    assert sum(expected) == rows
