"""Commands that numpy writes are those that formatting writes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from td_datapipes.wire.range_text import MAX_END_BYTES, RangeText, RowText, range_commands, set_commands

COLUMNS = st.lists(
    st.tuples(st.integers(1, 5000), st.integers(0, 100), st.integers(1, 5000), st.integers(0, 40)),
    min_size=1,
    max_size=6,
)


def formatted(heads: list[bytes], columns: list[tuple[int, int, int]], rows: list[int]) -> bytes:
    """One command after the other, as RESP has it."""
    text = b""
    for row in rows:
        for head, (stride, start, length) in zip(heads, columns, strict=True):
            text += head
            for number in (row * stride + start, row * stride + start + length - 1):
                text += b"$%d\r\n%d\r\n" % (len(str(number)), number)
    return text


@settings(max_examples=200, deadline=None)
@given(columns=COLUMNS, rows=st.lists(st.one_of(st.integers(0, 12), st.integers(0, 190_000)), min_size=1, max_size=60))
def test_any_rows_of_any_columns(columns: list[tuple[int, int, int, int]], rows: list[int]) -> None:
    heads = [b"*4\r\n$8\r\nGETRANGE\r\n$%d\r\n%b\r\n" % (size, b"k" * size) for *_, size in columns]
    ranges = [(stride, start, length) for stride, start, length, _ in columns]
    strides, starts, lengths = zip(*ranges, strict=True)
    text = RangeText(heads, strides, starts, lengths)
    assert text.commands(np.array(rows, dtype=np.int64)) == formatted(heads, ranges, rows)
    assert text.commands(np.array(rows[:1], dtype=np.int64)) == formatted(heads, ranges, rows[:1])


@pytest.mark.parametrize("digits", range(1, 10))
def test_numbers_around_each_power_of_ten(digits: int) -> None:
    rows = [10 ** (digits - 1), 10**digits - 3]
    head = b"*4\r\n$8\r\nGETRANGE\r\n$1\r\nk\r\n"
    for start, length in ((0, 1), (0, 2), (0, 3), (1, 1), (0, 1)):
        assert rows[-1] + start + length - 1 < MAX_END_BYTES
        text = RangeText([head], [1], [start], [length])
        assert text.commands(np.array(rows)) == formatted([head], [(1, start, length)], rows)


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    ranges=st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 10**8), st.integers(1, 10**8)), min_size=1, max_size=60
    ),
)
def test_any_ranges_of_any_keys(sizes: list[int], ranges: list[tuple[int, int, int]]) -> None:
    heads = [b"*4\r\n$8\r\nGETRANGE\r\n$%d\r\n%b\r\n" % (size, b"k" * size) for size in sizes]
    chosen = [(key % len(heads), start, length) for key, start, length in ranges]
    which, starts, lengths = (np.array(column, dtype=np.int64) for column in zip(*chosen, strict=True))
    expected = b"".join(formatted([heads[key]], [(1, 0, length)], [start]) for key, start, length in chosen)
    assert range_commands(heads, which, starts, lengths) == expected


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    ranges=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, MAX_END_BYTES - 1), st.sampled_from([1, 7, 68, 1280])),
        min_size=1,
        max_size=60,
    ),
    seed=st.integers(0, 9),
)
def test_any_ranges_to_write(sizes: list[int], ranges: list[tuple[int, int, int]], seed: int) -> None:
    heads = [b"*4\r\n$8\r\nSETRANGE\r\n$%d\r\n%b\r\n" % (size, b"k" * size) for size in sizes]
    chosen = [(key % len(heads), start, length) for key, start, length in ranges]
    data = np.random.default_rng(seed).bytes(sum(length for *_, length in chosen))
    expected, at = b"", 0
    for key, start, length in chosen:
        expected += heads[key] + b"$%d\r\n%d\r\n$%d\r\n%b\r\n" % (
            len(str(start)),
            start,
            length,
            data[at : at + length],
        )
        at += length
    keys, starts, lengths = np.array(chosen, dtype=np.int64).T
    assert set_commands(heads, keys, starts, lengths, memoryview(data)).tobytes() == expected


@pytest.mark.parametrize("sizes", [[3, 3], [3, 5]], ids=["keys of one length", "of two"])
@pytest.mark.parametrize("gap", [0, 4])
def test_columns_of_the_same_ranges_share_what_is_alike(sizes: list[int], gap: int) -> None:
    generator = np.random.default_rng(0)
    starts = generator.integers(0, 10**7, 40)
    heads = [b"*4\r\n$8\r\nSETRANGE\r\n$%d\r\n%b\r\n" % (size, b"ab"[n : n + 1] * size) for n, size in enumerate(sizes)]
    text, written = None, []
    for number in (0, 1, 0):
        items = np.frombuffer(generator.bytes(40 * 24), dtype="V24")
        text = RowText(heads, np.full(40, number), starts, 24 + gap, [(gap, items)], text)
        for first, stop in ((0, 15), (15, 40)):
            expected = b"".join(
                heads[number] + b"$%d\r\n%d\r\n$%d\r\n%b\r\n" % (len(str(start)), start, 24 + gap, bytes(gap) + item)
                for start, item in zip(starts[first:stop].tolist(), items[first:stop].tolist(), strict=True)
            )
            made = text.commands(first, stop)
            assert made.tobytes() == expected
            written.append((made, expected))
    # What was made before is not written over: it may still be on its way.
    assert all(made.tobytes() == expected for made, expected in written)
