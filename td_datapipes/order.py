"""Which row comes when: keyed permutations and block order. Pure, no I/O.

An order is a pure function of (seed, epoch, number of rows): any position can be looked up at once, in O(1) memory,
whatever the number of ranks, workers or batches fetched ahead.

Keys are mixed with splitmix64's finaliser (Steele, Lea, Flood 2014: "Fast splittable pseudorandom number generators"):
``key = mix(mix(mix(seed) ^ epoch) ^ fnv1a(purpose))``, so that two epochs, or two uses within one epoch, share nothing.
Nothing here depends on numpy's generators, whose streams may change between versions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from td_datapipes.errors import ConfigurationError

__all__ = [
    "BlockOrder",
    "Permutation",
    "derive_key",
    "hash_positions",
    "uniform_floats",
]

Rows = NDArray[np.int64]
Words = NDArray[np.uint64]

# Up to here a permutation is a sorted table of hashes, 8 KiB at most: all orders of n rows are equally likely.
MAX_TABLE_ROWS = 1024
# The halves of a Feistel network hold at most 31 bits each.
MAX_ROWS = 1 << 62
ROUNDS = 8
# Long slices are permuted piecewise so that the scratch arrays stay in the processor's cache.
PIECE_ROWS = 8192

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_U27, _U30, _U31, _U32 = (np.uint64(bits) for bits in (27, 30, 31, 32))
_MIX_A, _MIX_B = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def derive_key(seed: int, epoch: int, purpose: str, index: int = 0) -> int:
    """A 64-bit key for one use of (seed, epoch); another ``purpose`` or ``index`` gives an unrelated one."""
    digest = 0xCBF29CE484222325
    for byte in purpose.encode():
        digest = ((digest ^ byte) * 0x100000001B3) & _MASK
    key = _mix(_mix(_mix(seed & _MASK) ^ epoch) ^ digest)
    return _mix(key ^ index) if index else key


def hash_positions(key: int, positions: Rows) -> Words:
    """64 random bits for each position: element p of splitmix64's stream that starts at ``key``."""
    words = positions.astype(np.uint64)
    words *= np.uint64(_GOLDEN)
    words += np.uint64((key + _GOLDEN) & _MASK)
    return _finalise(words)


def uniform_floats(key: int, positions: Rows) -> NDArray[np.float64]:
    """A number in [0, 1) for each position, with 53 random bits."""
    return (hash_positions(key, positions) >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True)
class Permutation:
    """A keyed permutation of [0, n): position -> row and back, at once for any position.

    A Feistel network over two digits of radix about sqrt(n); what falls beyond n (less than 1 in sqrt(n)) walks on
    along its cycle until it is inside. 256 positions take about 0.1 ms whatever n is.

    Args:
        n: rows, 0 to 2**62.
        key: 64 bits, from `derive_key`.
    """

    n: int
    key: int

    def __post_init__(self) -> None:
        if not 0 <= self.n <= MAX_ROWS:
            raise ConfigurationError(f"a permutation is of 0 to 2**62 rows, got {self.n}")

    def permute(self, positions: Rows) -> Rows:
        """The rows at ``positions`` [k], each in [0, n): int64 [k]."""
        return self._walk(positions, forward=True)

    def inverse(self, rows: Rows) -> Rows:
        """The positions at which ``rows`` [k] come: int64 [k]."""
        return self._walk(rows, forward=False)

    def slice(self, start: int, stop: int) -> Rows:
        """The rows at positions ``start`` to ``stop``, which takes no more scratch memory than a few thousand do."""
        rows = np.empty(max(stop - start, 0), np.int64)
        for first in range(start, stop, PIECE_ROWS):
            last = min(first + PIECE_ROWS, stop)
            rows[first - start : last - start] = self.permute(np.arange(first, last))
        return rows

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.n, self.key)

    @cached_property
    def _table(self) -> Rows:
        (table,) = _sorted_table(np.array([self.key], np.uint64), self.n)
        return np.asarray(table)

    @cached_property
    def _inverse_table(self) -> Rows:
        return np.argsort(self._table)

    @cached_property
    def _round_keys(self) -> Words:
        return hash_positions(self.key, np.arange(ROUNDS))

    @cached_property
    def _radices(self) -> tuple[int, int]:
        high = math.isqrt(self.n - 1) + 1
        return high, -(-self.n // high)

    def _walk(self, values: Rows, *, forward: bool) -> Rows:
        values = np.asarray(values, np.int64)
        if values.size and not (values.min() >= 0 and values.max() < self.n):
            raise ConfigurationError(f"positions are in [0, {self.n}), got {values.min()} to {values.max()}")
        if self.n <= MAX_TABLE_ROWS:
            return (self._table if forward else self._inverse_table)[values]
        found = self._feistel(values, forward=forward)
        outside = np.flatnonzero(found >= self.n)
        while outside.size:
            found[outside] = self._feistel(found[outside], forward=forward)
            outside = outside[found[outside] >= self.n]
        return found

    def _feistel(self, values: Rows, *, forward: bool) -> Rows:
        """One pass over all pairs of digits: digit += hash(other digit), in turn; the way back subtracts in reverse."""
        radix_high, radix_low = self._radices
        high, low = (digits.astype(np.uint64) for digits in np.divmod(values, radix_low))
        scratch, shifted = np.empty_like(high), np.empty_like(high)
        for number in range(ROUNDS) if forward else reversed(range(ROUNDS)):
            digit, other, radix = (high, low, radix_high) if number % 2 == 0 else (low, high, radix_low)
            size = np.uint64(radix)
            np.add(other, self._round_keys[number], out=scratch)
            scratch *= _MIX_A
            np.right_shift(scratch, _U32, out=shifted)
            scratch ^= shifted
            scratch *= _MIX_B
            scratch >>= _U32
            scratch *= size
            scratch >>= _U32
            if not forward:
                np.subtract(size, scratch, out=scratch)
            digit += scratch
            np.subtract(digit, size, out=digit, where=digit >= size)
        high *= np.uint64(radix_low)
        high += low
        return high.astype(np.int64)


@dataclass(frozen=True)
class BlockOrder:
    """Block shuffle: blocks of adjacent rows in random order, rows shuffled within a buffer of such blocks.

    Rows lie in blocks of ``block_rows``; the blocks are permuted; ``buffer_blocks`` consecutive ones form a buffer, and
    the rows of a buffer are permuted with a key of their own. Positions of one buffer touch only its blocks, so each
    block has to be read once. With one buffer for all rows the order is a uniform permutation.

    Source: CorgiPile (Xu et al., SIGMOD 2022), which also bounds what it costs in convergence.

    Args:
        n: rows, >= 0; the last block may be short.
        block_rows: rows of a block, >= 1.
        buffer_blocks: blocks of a buffer, >= 1.
        seed: the run's seed.
        epoch: the epoch, >= 0.
    """

    n: int
    block_rows: int
    buffer_blocks: int
    seed: int
    epoch: int

    def __post_init__(self) -> None:
        if self.n < 0 or self.block_rows < 1 or self.buffer_blocks < 1:
            raise ConfigurationError(
                f"block order needs n >= 0, block_rows >= 1, buffer_blocks >= 1, got {self.n}, {self.block_rows}, "
                f"{self.buffer_blocks}"
            )

    def __len__(self) -> int:
        return self.n

    @property
    def num_blocks(self) -> int:
        """Blocks, a short last one included."""
        return -(-self.n // self.block_rows)

    @property
    def buffer_rows(self) -> int:
        """Rows of a full buffer."""
        return self.block_rows * self.buffer_blocks

    def permute(self, positions: Rows) -> Rows:
        """The rows at ``positions`` [k]: int64 [k]."""
        return self.rows_of(self.places(positions))

    def slice(self, start: int, stop: int) -> Rows:
        """The rows at positions ``start`` to ``stop``."""
        return self.permute(np.arange(start, stop))

    def places(self, positions: Rows) -> Rows:
        """Where ``positions`` [k] are read: slot of the permuted block times ``block_rows`` plus the row within it."""
        positions = np.asarray(positions, np.int64)
        if positions.size and not (positions.min() >= 0 and positions.max() < self.n):
            raise ConfigurationError(f"positions are in [0, {self.n}), got {positions.min()} to {positions.max()}")
        buffers, local = self._in_buffers(positions)
        places = self._shuffle(buffers, local)
        places += buffers * self.buffer_rows
        # In the short block's buffer, places behind that block move up by what it lacks.
        behind = places >= self._short_slot * self.block_rows + self._short_rows
        places[behind & (buffers == self._short_buffer)] += self._lacking
        return places

    def rows_of(self, places: Rows) -> Rows:
        """The rows at ``places`` [k], as `places` gives them: int64 [k]."""
        slots, offsets = np.divmod(places, self.block_rows)
        first, stop = (int(slots.min()), int(slots.max()) + 1) if slots.size else (0, 0)
        if stop - first < slots.size:  # rows of few buffers: the same few blocks again and again
            starts = self._blocks.permute(np.arange(first, stop)) * self.block_rows
            return np.asarray(starts[slots - first] + offsets)
        return self._blocks.permute(slots) * self.block_rows + offsets

    def depths(self, places: Rows) -> Rows:
        """How deep in its buffer each of ``places`` [k] is, in units of 2**-31 of the buffer: int64 [k].

        Sorting by depth sorts the rows of one buffer by (block position in the buffer, row).
        """
        buffers = places // self.buffer_rows
        sizes = np.minimum(self.num_blocks * self.block_rows - buffers * self.buffer_rows, self.buffer_rows)
        return (places - buffers * self.buffer_rows << 31) // sizes

    def buffer_of(self, position: int) -> int:
        """The buffer, counted from 0, that ``position`` falls in."""
        return int(self._in_buffers(np.array([position]))[0][0])

    def buffer_stop(self, buffer: int) -> int:
        """The first position behind ``buffer``."""
        places = min((buffer + 1) * self.buffer_rows, self.num_blocks * self.block_rows)
        return places - (self._lacking if buffer >= self._short_buffer else 0)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.n, self.block_rows, self.buffer_blocks, self.seed, self.epoch)

    @cached_property
    def _blocks(self) -> Permutation:
        return Permutation(self.num_blocks, derive_key(self.seed, self.epoch, "blocks"))

    @cached_property
    def _short_slot(self) -> int:
        last = self.num_blocks - 1
        return int(self._blocks.inverse(np.array([last]))[0]) if last >= 0 else 0

    @property
    def _short_buffer(self) -> int:
        return self._short_slot // self.buffer_blocks

    @property
    def _lacking(self) -> int:
        return self.num_blocks * self.block_rows - self.n

    @property
    def _short_rows(self) -> int:
        return self.block_rows - self._lacking

    def _in_buffers(self, positions: Rows) -> tuple[Rows, Rows]:
        """Buffer of each position, and its place in the buffer's own order."""
        moved = positions + np.where(positions >= self.buffer_stop(self._short_buffer), self._lacking, 0)
        buffers = moved // self.buffer_rows
        starts = buffers * self.buffer_rows - np.where(buffers > self._short_buffer, self._lacking, 0)
        return buffers, positions - starts

    def _shuffle(self, buffers: Rows, local: Rows) -> Rows:
        """``local`` permuted, each with the key of its buffer."""
        if buffers.size and buffers.min() == buffers.max():
            return self._shuffle_one(int(buffers[0]), local)
        shuffled = np.empty_like(local)
        for size, members in self._by_size(buffers):
            numbers, which = np.unique(buffers[members], return_inverse=True)
            if size <= MAX_TABLE_ROWS:
                keys = hash_positions(derive_key(self.seed, self.epoch, "buffers"), numbers)
                shuffled[members] = _sorted_table(keys, size)[which, local[members]]
                continue
            for place, key in enumerate(hash_positions(derive_key(self.seed, self.epoch, "buffers"), numbers).tolist()):
                mine = members[which == place]
                shuffled[mine] = _permute_piecewise(Permutation(size, key), local[mine])
        return shuffled

    def _shuffle_one(self, buffer: int, local: Rows) -> Rows:
        """The same of positions that are all in one buffer, as those of a large buffer mostly are."""
        size = self.buffer_stop(buffer) - self._start(buffer) if buffer in self._odd_buffers() else self.buffer_rows
        key = hash_positions(derive_key(self.seed, self.epoch, "buffers"), np.array([buffer]))
        if size <= MAX_TABLE_ROWS:
            return np.asarray(_sorted_table(key, size)[0, local])
        return _permute_piecewise(Permutation(size, int(key[0])), local)

    def _by_size(self, buffers: Rows) -> Iterator[tuple[int, Rows]]:
        """Groups of positions whose buffers have as many rows; at most three differ: full, short block, last."""
        stops = [(buffer, self.buffer_stop(buffer) - self._start(buffer)) for buffer in self._odd_buffers()]
        sizes = np.full(len(buffers), self.buffer_rows)
        for buffer, size in stops:
            sizes[buffers == buffer] = size
        for size in np.unique(sizes).tolist():
            yield size, np.flatnonzero(sizes == size)

    def _odd_buffers(self) -> set[int]:
        return {self._short_buffer, max(self.num_blocks - 1, 0) // self.buffer_blocks}

    def _start(self, buffer: int) -> int:
        return self.buffer_stop(buffer - 1) if buffer else 0


def _mix(word: int) -> int:
    word = (word + _GOLDEN) & _MASK
    word = ((word ^ (word >> 30)) * int(_MIX_A)) & _MASK
    word = ((word ^ (word >> 27)) * int(_MIX_B)) & _MASK
    return word ^ (word >> 31)


def _finalise(words: Words) -> Words:
    words ^= words >> _U30
    words *= _MIX_A
    words ^= words >> _U27
    words *= _MIX_B
    words ^= words >> _U31
    return words


def _sorted_table(keys: Words, n: int) -> Rows:
    """A permutation of [0, n) for each key [k], by sorting hashes: int64 [k, n]. Equal hashes keep their order."""
    words = np.arange(1, n + 1).astype(np.uint64) * np.uint64(_GOLDEN)
    return np.argsort(_finalise(words + keys[:, None]), axis=1, kind="stable")


def _permute_piecewise(permutation: Permutation, positions: Rows) -> Rows:
    pieces = [permutation.permute(positions[at : at + PIECE_ROWS]) for at in range(0, len(positions), PIECE_ROWS)]
    return np.concatenate(pieces) if pieces else positions
