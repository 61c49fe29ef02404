"""Orders against plain-Python oracles: permutations and block order."""

from __future__ import annotations

import math
import pickle
from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from td_datapipes.errors import ConfigurationError
from td_datapipes.order import BlockOrder, Permutation, derive_key, hash_positions, uniform_floats

MASK = (1 << 64) - 1


def splitmix64(seed: int, count: int) -> list[int]:
    """The published generator, step by step."""
    words = []
    for _ in range(count):
        seed = (seed + 0x9E3779B97F4A7C15) & MASK
        word = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
        words.append(word ^ (word >> 31))
    return words


def feistel(n: int, key: int, position: int) -> int:
    """A large permutation, one position at a time."""
    radix_high = math.isqrt(n - 1) + 1
    radix_low = -(-n // radix_high)
    keys = splitmix64(key, 8)
    while True:
        digits = [position // radix_low, position % radix_low]
        for number, round_key in enumerate(keys):
            changed = number % 2
            word = ((digits[1 - changed] + round_key) * 0xBF58476D1CE4E5B9) & MASK
            word = ((word ^ (word >> 32)) * 0x94D049BB133111EB) & MASK
            radix = (radix_high, radix_low)[changed]
            digits[changed] = (digits[changed] + ((word >> 32) * radix >> 32)) % radix
        position = digits[0] * radix_low + digits[1]
        if position < n:
            return position


def block_order(order: BlockOrder) -> list[int]:
    """Block order as it is described: blocks permuted, grouped into buffers, each buffer's rows permuted."""
    n, size = order.n, order.block_rows
    blocks = [list(range(first, min(first + size, n))) for first in range(0, n, size)]
    key = derive_key(order.seed, order.epoch, "blocks")
    permuted = [blocks[block] for block in Permutation(len(blocks), key).slice(0, len(blocks))]
    rows: list[int] = []
    for number, first in enumerate(range(0, len(permuted), order.buffer_blocks)):
        held = [row for block in permuted[first : first + order.buffer_blocks] for row in block]
        own_key = int(hash_positions(derive_key(order.seed, order.epoch, "buffers"), np.array([number]))[0])
        rows += [held[place] for place in Permutation(len(held), own_key).slice(0, len(held))]
    return rows


class TestKeys:
    def test_hashes_are_the_published_splitmix64(self) -> None:
        # The first outputs for seed 0, as published with the reference code.
        published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
        assert splitmix64(0, 3) == published
        assert hash_positions(0, np.arange(3)).tolist() == published
        assert hash_positions(MASK, np.arange(100)).tolist() == splitmix64(MASK, 100)

    def test_every_part_changes_the_key(self) -> None:
        keys = {
            derive_key(seed, epoch, purpose, index)
            for seed in (0, 1, 2, 1 << 63)
            for epoch in range(5)
            for purpose in ("rows", "blocks")
            for index in range(3)
        }
        assert len(keys) == 4 * 5 * 2 * 3

    def test_floats_fill_the_unit_interval(self) -> None:
        drawn = uniform_floats(7, np.arange(100_000))
        assert drawn.min() >= 0
        assert drawn.max() < 1
        counts = np.bincount((drawn * 10).astype(int), minlength=10)
        # 6 standard deviations of a binomial count.
        assert np.abs(counts - 10_000).max() < 6 * math.sqrt(100_000 * 0.1 * 0.9)


class TestPermutation:
    @given(n=st.integers(1, 5000), key=st.integers(0, MASK))
    @settings(max_examples=60, deadline=None)
    def test_is_a_bijection_with_its_inverse(self, n: int, key: int) -> None:
        permutation = Permutation(n, key)
        rows = permutation.slice(0, n)
        assert np.array_equal(np.sort(rows), np.arange(n))
        assert np.array_equal(permutation.inverse(rows), np.arange(n))

    @pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 5, 1024, 1025, 1026, 2048, 1_000_003])
    def test_edges(self, n: int) -> None:
        rows = Permutation(n, 99).slice(0, n)
        assert rows.dtype == np.int64
        assert np.array_equal(np.sort(rows), np.arange(n))

    @pytest.mark.parametrize("n", [1025, 3000, 100_000_000, (1 << 62) - 1])
    def test_large_equals_the_scalar_oracle(self, n: int) -> None:
        permutation = Permutation(n, 0xABCDEF)
        positions = [0, 1, 2, n // 3, n // 2, n - 2, n - 1]
        rows = permutation.permute(np.array(positions))
        assert rows.tolist() == [feistel(n, 0xABCDEF, position) for position in positions]
        assert permutation.inverse(rows).tolist() == positions

    @pytest.mark.parametrize("n", [2, 3, 4, 5])
    def test_all_orders_of_few_rows_are_reached_equally_often(self, n: int) -> None:
        seeds = 200 * math.factorial(n)
        counts = Counter(
            tuple(Permutation(n, derive_key(seed, 0, "rows")).slice(0, n).tolist()) for seed in range(seeds)
        )
        assert set(counts) == set(permutations(range(n)))
        # 6 standard deviations of a count of mean 200.
        assert max(abs(count - 200) for count in counts.values()) < 6 * math.sqrt(200)

    @pytest.mark.parametrize("n", [1025, 2500, 1 << 40])
    def test_a_position_goes_everywhere_over_seeds(self, n: int) -> None:
        where = [
            int(Permutation(n, derive_key(seed, 1, "rows")).permute(np.array([n // 2]))[0]) for seed in range(2000)
        ]
        counts = np.bincount([row * 20 // n for row in where], minlength=20)
        chi_squared = float(((counts - 100) ** 2 / 100).sum())
        # 19 degrees of freedom: mean 19, standard deviation 6.2.
        assert chi_squared < 19 + 6 * 6.2

    def test_neighbours_part(self) -> None:
        rows = Permutation(100_000, derive_key(0, 0, "rows")).slice(0, 100_000)
        positions = np.arange(100_000)
        assert abs(np.corrcoef(rows, positions)[0, 1]) < 6 / math.sqrt(100_000)
        assert abs(np.corrcoef(rows[1:], rows[:-1])[0, 1]) < 6 / math.sqrt(100_000)
        # Fixed points of a random permutation: Poisson of mean 1.
        assert int((rows == positions).sum()) < 8

    def test_a_slice_is_the_positions_one_by_one(self) -> None:
        permutation = Permutation(50_000, 5)
        whole = permutation.permute(np.arange(50_000))
        assert np.array_equal(permutation.slice(123, 20_123), whole[123:20_123])
        assert permutation.slice(7, 7).tolist() == []

    @pytest.mark.parametrize("positions", [[-1], [0, 10], [1 << 40]])
    def test_positions_outside_are_refused(self, positions: list[int]) -> None:
        with pytest.raises(ConfigurationError, match=r"positions are in \[0, 10\)"):
            Permutation(10, 1).permute(np.array(positions))


class TestBlockOrder:
    @pytest.mark.parametrize("block_rows", [1, 2, 3, 7, 64])
    @pytest.mark.parametrize("buffer_blocks", [1, 2, 3, 100])
    def test_equals_the_oracle(self, block_rows: int, buffer_blocks: int) -> None:
        for n in (*range(20), 63, 64, 65, 130):
            for epoch in range(3):
                order = BlockOrder(n, block_rows, buffer_blocks, 11, epoch)
                assert order.slice(0, n).tolist() == block_order(order), (n, epoch)

    @pytest.mark.parametrize("n", [5000, 5001, 12_345])
    def test_large_buffers_equal_the_oracle(self, n: int) -> None:
        order = BlockOrder(n, 100, 17, 3, 1)
        assert order.slice(0, n).tolist() == block_order(order)

    @given(
        n=st.integers(0, 3000), block_rows=st.integers(1, 400), buffer_blocks=st.integers(1, 9), seed=st.integers(0, 99)
    )
    @settings(max_examples=60, deadline=None)
    def test_each_row_comes_once(self, n: int, block_rows: int, buffer_blocks: int, seed: int) -> None:
        rows = BlockOrder(n, block_rows, buffer_blocks, seed, 0).slice(0, n)
        assert np.array_equal(np.sort(rows), np.arange(n))

    def test_any_position_at_once(self) -> None:
        order = BlockOrder(10_007, 16, 10, 0, 4)
        whole = order.slice(0, 10_007)
        scattered = np.random.default_rng(0).permutation(10_007)
        assert np.array_equal(order.permute(scattered), whole[scattered])

    def test_a_buffer_touches_only_its_blocks(self) -> None:
        order = BlockOrder(1003, 10, 7, 2, 0)
        rows, seen, start = order.slice(0, 1003), set[int](), 0
        for buffer in range(math.ceil(101 / 7)):
            stop = order.buffer_stop(buffer)
            blocks = {row // 10 for row in rows[start:stop].tolist()}
            assert len(blocks) == (7 if buffer < 14 else 101 - 14 * 7)
            assert not blocks & seen
            assert {order.buffer_of(position) for position in (start, stop - 1)} == {buffer}
            seen |= blocks
            start = stop
        assert start == 1003

    def test_depth_sorts_by_block_position_then_row(self) -> None:
        # 101 blocks, the last of 3 rows; buffers of 7 blocks, the last one of 3.
        order = BlockOrder(1003, 10, 7, 2, 0)
        for buffer in range(15):
            start = order.buffer_stop(buffer - 1) if buffer else 0
            places = order.places(np.arange(start, order.buffer_stop(buffer)))
            depths = order.depths(places)
            assert 0 <= depths.min() < depths.max() < 1 << 31
            rows = order.rows_of(places[np.argsort(depths)]).tolist()
            blocks = list(dict.fromkeys(row // 10 for row in rows))
            assert rows == [row for block in blocks for row in range(block * 10, min(block * 10 + 10, 1003))]

    def test_survives_pickle(self) -> None:
        order = BlockOrder(1003, 10, 7, 2, 0)
        order.slice(0, 1003)
        again = pickle.loads(pickle.dumps(order))
        assert again == order
        assert np.array_equal(again.slice(0, 1003), order.slice(0, 1003))
        assert len(pickle.dumps(order)) < 200

    def test_impossible_sizes_are_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="block_rows >= 1"):
            BlockOrder(10, 0, 1, 0, 0)
