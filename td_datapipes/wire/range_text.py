"""Many GETRANGE or SETRANGE commands at once, written by numpy: for ranges that no table would know. Pure.

Formatting a range in Python takes about 1 us, as long as the server takes to serve it. Here all numbers of a batch are
turned into digits at once, and every part of a command is moved to its place as one opaque item.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from td_datapipes.read_spec import Rows

__all__ = ["MAX_END_BYTES", "Items", "RangeText", "RowText", "range_commands", "set_commands"]

Items = npt.NDArray[np.void]
"""Opaque items of bytes, which numpy copies as whole blocks of memory."""

MAX_END_BYTES = 10**9
"""Ends of ranges have at most 9 digits here, so that the length of each number is one digit itself."""
_PAD = 12
"""Bytes that a number is written with, zeros in front; what stands before it is written over these afterwards."""
_FOURS = np.array([b"%04d" % number for number in range(10_000)], dtype="S4").view(np.uint32)
_LINE_END = int(np.frombuffer(b"\r\n\r\n", dtype=np.uint32)[0])
_POWERS = 10 ** np.arange(1, 10)
_LENGTHS = np.array([b"$%d\r\n" % digits for digits in range(10)], dtype="V4")
_BETWEEN = np.array([b"\r\n$%d\r\n" % digits for digits in range(10)], dtype="V6")


class RangeText:
    """Writes the commands for rows of columns that each lie in one chunk.

    Args:
        heads: for each column what its commands begin with, up to the key; at least 12 bytes each.
        strides, starts, lengths: of each column: bytes from row to row, the first one wanted of a row, and how many.
    """

    def __init__(
        self, heads: Sequence[bytes], strides: Sequence[int], starts: Sequence[int], lengths: Sequence[int]
    ) -> None:
        self._heads = heads
        self._head_bytes = np.array([len(head) for head in heads])
        # Fields of the same length have the same ranges: their digits are made once.
        shapes = list(zip(strides, starts, lengths, strict=True))
        distinct = list(dict.fromkeys(shapes))
        self._shape_of = None if len(distinct) == len(shapes) else np.array([distinct.index(s) for s in shapes])
        self._strides, self._starts, self._lengths = (np.array(column) for column in zip(*distinct, strict=True))

    def commands(self, rows: Rows) -> bytes:
        """One command a row and column, row by row."""
        first = rows[:, None] * self._strides + self._starts
        numbers = _Numbers.of(first), _Numbers.of(first + (self._lengths - 1))
        if self._shape_of is not None:
            numbers = numbers[0].columns(self._shape_of), numbers[1].columns(self._shape_of)
        text, at = _write(*numbers, self._head_bytes)
        for column, head in enumerate(self._heads):
            _put(text, at[:, column], np.array(head, dtype=f"V{len(head)}"))
        return text.tobytes()


def range_commands(heads: Sequence[bytes], head_of: Rows, starts: Rows, lengths: Rows) -> bytes:
    """One command a range.

    Args:
        heads: what commands begin with, up to the key; at least 12 bytes each.
        head_of: which of them each range has, ``[ranges]``.
        starts, lengths: of each range, ``[ranges]``.
    """
    head_bytes = np.array([len(head) for head in heads])[head_of]
    text, at = _write(_Numbers.of(starts), _Numbers.of(starts + (lengths - 1)), head_bytes)
    for number, head in enumerate(heads):
        places = at[head_of == number]
        if len(places):
            _put(text, places, np.array(head, dtype=f"V{len(head)}"))
    return text.tobytes()


def set_commands(
    heads: Sequence[bytes], head_of: Rows, starts: Rows, lengths: Rows, data: memoryview
) -> npt.NDArray[np.uint8]:
    """One SETRANGE a range, in this order, with its bytes: for ranges of a few different lengths.

    Args:
        heads: what commands begin with, up to the key; at least 12 bytes each.
        head_of: which of them each range has, ``[ranges]``.
        starts: below `MAX_END_BYTES`, ``[ranges]``.
        lengths: ``[ranges]``.
        data: the ranges' bytes, one behind the other.
    """
    distinct, length_of = _distinct(lengths)
    middles = [b"$%d\r\n" % length for length in distinct.tolist()]
    head_bytes = np.array([len(head) for head in heads])[head_of]
    first = _Numbers.of(starts)
    # head + "$n\r\n" + first + "\r\n" + "$n\r\n" + bytes + "\r\n"
    middle_bytes = np.array([len(middle) for middle in middles])[length_of]
    at: Rows = np.cumsum(head_bytes + first.digits + middle_bytes + lengths + 8)
    text = np.empty(int(at[-1]), dtype=np.uint8)
    ends, bodies = at - 2, at - lengths - 2
    numbers = bodies - middle_bytes - 2  # behind their last digits
    _put(text, numbers - _PAD, first.text)  # the zeros in front are written over
    _put(text, numbers - first.digits - 4, _LENGTHS[first.digits])
    before = numbers - first.digits - 4 - head_bytes
    for number, head in enumerate(heads):
        places = before[head_of == number]
        if len(places):
            _put(text, places, np.array(head, dtype=f"V{len(head)}"))
    _put(text, ends, np.array(b"\r\n", dtype="V2"))
    source, offsets = np.frombuffer(data, dtype=np.uint8), np.cumsum(lengths) - lengths
    for number, (length, middle) in enumerate(zip(distinct.tolist(), middles, strict=True)):
        mine = slice(None) if len(distinct) == 1 else length_of == number
        _put(text, (bodies - middle_bytes)[mine], np.array(middle, dtype=f"V{len(middle)}"))
        windows = np.ndarray((len(source) - length + 1,), f"V{length}", source, 0, (1,))
        _put(text, bodies[mine], windows[offsets[mine]])
    return text


class RowText:
    """Writes one SETRANGE a row, some of the rows at a time; their bytes are copied once, from where they lie.

    Args:
        heads: what commands begin with, up to the key; at least 12 bytes each.
        head_of: which of them each row has, ``[rows]``.
        starts: below `MAX_END_BYTES`, ``[rows]``.
        width: bytes of each.
        columns: what stands in them and where: ``(first byte, one item a row)``; between them there are zeros.
        like: of the same starts and width: what is alike is not made again.
    """

    def __init__(
        self,
        heads: Sequence[bytes],
        head_of: Rows,
        starts: Rows,
        width: int,
        columns: Sequence[tuple[int, Items]],
        like: RowText | None = None,
    ) -> None:
        self._width, self._columns = width, columns
        self._gapless = sum(items.dtype.itemsize for _, items in columns) == width
        self._numbers: _Numbers = _Numbers.of(starts) if like is None else like._numbers
        self._middle = b"\r\n$%d\r\n" % width
        lengths = np.array([len(head) for head in heads])
        self._head_of, self._head_bytes = head_of, lengths[head_of]
        # The first and last row: the text, where each command starts and where its bytes do.
        self._made: dict[tuple[int, int], tuple[npt.NDArray[np.uint8], Rows, Rows]] = {}
        if like is not None and self._gapless and np.array_equal(like._head_bytes, self._head_bytes):
            self._made = like._made
        # Keys that differ by a number are mostly of the same length: those are put in place all at once.
        self._heads = [
            (size, np.array([head if len(head) == size else b"" for head in heads], dtype=f"S{size}").view(f"V{size}"))
            for size in sorted(set(map(len, heads)))
        ]

    def commands(self, first: int, stop: int) -> npt.NDArray[np.uint8]:
        """Those of the rows ``[first, stop)``."""
        rows = slice(first, stop)
        made = self._made.get((first, stop))
        if made is None:
            text, starts, bodies = self._made[first, stop] = self._framed(rows)
        else:  # all but keys and bytes stands there already
            text, starts, bodies = made[0].copy(), *made[1:]
        self._put_heads(text, starts, self._head_of[rows], self._head_bytes[rows])
        for start, items in self._columns:
            _put(text, bodies + start if start else bodies, items[rows])
        return text

    def _framed(self, rows: slice) -> tuple[npt.NDArray[np.uint8], Rows, Rows]:
        """The text without keys and bytes, and where each command starts and its bytes do."""
        width, middle = self._width, self._middle
        digits, head_bytes = self._numbers.digits[rows], self._head_bytes[rows]
        # head + "$n\r\n" + first + "\r\n$n\r\n" + bytes + "\r\n"
        ends: Rows = np.cumsum(head_bytes + digits + (width + len(middle) + 6))
        text = (np.empty if self._gapless else np.zeros)(int(ends[-1]), dtype=np.uint8)
        at = ends - (width + len(middle) + 2)  # behind the number
        _put(text, at - _PAD, self._numbers.text[rows])  # the zeros in front are written over
        _put(text, at, np.array(middle, dtype=f"V{len(middle)}"))
        at -= digits + 4
        _put(text, at, _LENGTHS[digits])
        at -= head_bytes
        _put(text, ends - 2, np.array(b"\r\n", dtype="V2"))
        return text, at, ends - (width + 2)

    def _put_heads(self, text: npt.NDArray[np.uint8], at: Rows, head_of: Rows, head_bytes: Rows) -> None:
        for size, heads in self._heads:
            if len(heads) == 1:
                _put(text, at, heads[0])
            elif len(self._heads) == 1:
                _put(text, at, heads[head_of])
            else:
                mine = head_bytes == size
                _put(text, at[mine], heads[head_of[mine]])


@dataclass(frozen=True)
class _Numbers:
    """How many digits each number has, and its text with zeros in front and a line end behind."""

    digits: Rows
    text: Items

    @classmethod
    def of(cls, numbers: Rows) -> _Numbers:
        return cls(np.searchsorted(_POWERS, numbers, side="right") + 1, _padded(numbers))

    def columns(self, which: Rows) -> _Numbers:
        return _Numbers(self.digits[:, which], self.text[:, which])


def _write(first: _Numbers, last: _Numbers, head_bytes: Rows) -> tuple[npt.NDArray[np.uint8], Rows]:
    """The text of all commands without their heads, and where these go."""
    # "$n\r\n" + first + "\r\n$n\r\n" + last + "\r\n"
    sizes = first.digits + last.digits + (head_bytes + 12)
    at: Rows = np.cumsum(sizes.reshape(-1)).reshape(sizes.shape)
    text = np.empty(int(at.reshape(-1)[-1]), dtype=np.uint8)
    # From the right to the left, as each number's zeros reach into what stands before it.
    at -= 2
    _put(text, at - _PAD, last.text)
    at -= last.digits + 6
    between = _BETWEEN[last.digits]
    _put(text, at - _PAD, first.text)
    _put(text, at, between)
    at -= first.digits + 4
    _put(text, at, _LENGTHS[first.digits])
    at -= head_bytes
    return text, at


def _padded(numbers: Rows) -> Items:
    """Twelve digits and a line end each."""
    high, low = np.divmod(numbers, 10_000)
    top, middle = np.divmod(high, 10_000)
    parts = np.empty((*numbers.shape, 4), dtype=np.uint32)
    parts[..., 0], parts[..., 1], parts[..., 2] = _FOURS[top], _FOURS[middle], _FOURS[low]
    parts[..., 3] = _LINE_END
    return np.ndarray(numbers.shape, f"V{_PAD + 2}", parts, 0, parts.strides[:-1])


def _distinct(numbers: Rows) -> tuple[Rows, Rows]:
    """The numbers, each once, and which of them each is; as a rule there is one."""
    if int(numbers.min()) == int(numbers.max()):
        return numbers[:1], np.zeros(len(numbers), dtype=np.int64)
    found, which = np.unique(numbers, return_inverse=True)
    return found, which


def _put(text: npt.NDArray[np.uint8], places: Rows, items: Items) -> None:
    """Write items at any bytes: windows of their length, one at every byte, overlap each other."""
    size = items.dtype.itemsize
    np.ndarray((len(text) - size + 1,), items.dtype, text, 0, (1,))[places] = items
