"""BlockShuffleBatchSampler: each row once, whole blocks at a time, and close to a uniform shuffle."""

from __future__ import annotations

import math
import tracemalloc
from itertools import islice, pairwise
from typing import Any

import numpy as np
import pytest

from td_datapipes.errors import ConfigurationError
from td_datapipes.order import BlockOrder
from td_datapipes.samplers import BlockShuffleBatchSampler, RowBatch


class Data:
    """So many rows of so many bytes."""

    def __init__(self, rows: int, row_bytes: int) -> None:
        self.rows = rows
        self.row_bytes = row_bytes

    def __len__(self) -> int:
        return self.rows


def flat(batches: list[RowBatch]) -> list[int]:
    return [row for batch in batches for row in batch]


def of_ranks(rows: int, world_size: int, batch_size: int, **arguments: Any) -> list[list[RowBatch]]:
    return [
        list(BlockShuffleBatchSampler(range(rows), batch_size, rank=rank, world_size=world_size, **arguments))
        for rank in range(world_size)
    ]


class TestOrder:
    @pytest.mark.parametrize("rows", [0, 1, 2, 7, 100, 101, 1000])
    @pytest.mark.parametrize("block_rows", [1, 3, 16])
    @pytest.mark.parametrize("buffer_blocks", [1, 4, 1000])
    def test_equals_the_block_order(self, rows: int, block_rows: int, buffer_blocks: int) -> None:
        sampler = BlockShuffleBatchSampler(range(rows), 8, seed=5, block_rows=block_rows, buffer_blocks=buffer_blocks)
        assert len(sampler) == math.ceil(rows / 8)
        for epoch in range(2):
            batches = list(sampler)
            oracle = BlockOrder(rows, block_rows, buffer_blocks, 5, epoch).slice(0, rows).tolist()
            assert flat(batches) == oracle
            assert sorted(oracle) == list(range(rows))
            assert [batch.ordinal for batch in batches] == list(range(len(batches)))

    def test_drop_last_leaves_the_short_batch_out(self) -> None:
        sampler = BlockShuffleBatchSampler(range(101), 8, drop_last=True)
        batches = list(sampler)
        assert [len(batch) for batch in batches] == [8] * 12
        assert len(sampler) == 12
        assert len(set(flat(batches))) == 96

    @pytest.mark.parametrize(
        ("row_bytes", "block_rows", "buffer_blocks"),
        [(1 << 10, 256, 256), (28 << 10, 9, 260), (64, 4096, 256), (1 << 20, 1, 64), (1 << 30, 1, 1)],
    )
    def test_blocks_are_256_kib_and_a_buffer_64_mib(self, row_bytes: int, block_rows: int, buffer_blocks: int) -> None:
        sampler = BlockShuffleBatchSampler(Data(100, row_bytes), 8)
        assert (sampler.block_rows, sampler.buffer_blocks) == (block_rows, buffer_blocks)

    def test_rows_of_unknown_size_count_as_1_kib(self) -> None:
        sampler = BlockShuffleBatchSampler(range(100), 8)
        assert (sampler.block_rows, sampler.buffer_blocks) == (256, 256)

    @pytest.mark.parametrize(
        "arguments",
        [{"block_rows": 0}, {"buffer_blocks": 0}, {"buffer_bytes": 0}, {"window": 0}, {"batch_size": 0}],
    )
    def test_impossible_arguments_are_refused(self, arguments: dict[str, int]) -> None:
        with pytest.raises(
            ConfigurationError, match=f"{next(iter(arguments))} must be an integer of at least 1, got 0"
        ):
            BlockShuffleBatchSampler(range(100), **{"batch_size": 8, **arguments})

    def test_a_hundred_million_rows_take_no_memory(self) -> None:
        tracemalloc.start()
        batch = next(iter(BlockShuffleBatchSampler(range(100_000_000), 256)))
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(batch) == 256
        assert peak_bytes < 10 << 20


class TestWindows:
    @pytest.mark.parametrize("look", [False, True])
    def test_a_window_is_the_batches_that_begin_in_one_buffer(self, look: bool) -> None:
        # Buffers of 40 rows, batches of 7: 6, 6, 5, 6 and 6 batches begin in one.
        batches = []
        for batch in BlockShuffleBatchSampler(range(200), 7, block_rows=10, buffer_blocks=4):
            if look:
                assert len(batch.window.batches) == len(batch.window)
            batches.append(batch)
        firsts = [0, 6, 12, 18, 23, 29]
        for first, stop in pairwise(firsts):
            for batch in batches[first:stop]:
                assert (batch.window.first_ordinal, batch.window.stop_ordinal) == (first, stop)
                assert [rows.tolist() for rows in batch.window.batches] == batches[first:stop]
                following = batch.window.next
                if stop < 29:
                    assert following is not None
                    assert [rows.tolist() for rows in following.batches] == batches[stop : following.stop_ordinal]
                    assert following.next is None
                else:
                    assert following is None

    def test_a_window_is_drawn_once(self) -> None:
        batches = list(BlockShuffleBatchSampler(range(200), 7, block_rows=10, buffer_blocks=4))
        for batch, later in pairwise(batches):
            if later.window is not batch.window:
                assert later.window.batches is batch.window.next.batches
            else:
                assert later.window.batches is batch.window.batches

    def test_blocks_are_read_once(self) -> None:
        # A reader that holds the blocks of the announced windows reads no block twice.
        read, held = [], set[int]()
        for batch in BlockShuffleBatchSampler(range(1000), 16, block_rows=10, buffer_blocks=8):
            announced = {row // 10 for row in flat([rows.tolist() for rows in batch.window.batches])}
            if batch.window.next is not None:
                announced |= {row // 10 for row in flat([rows.tolist() for rows in batch.window.next.batches])}
            read += sorted(announced - held)
            held = announced
        assert sorted(read) == list(range(100))

    def test_a_batch_larger_than_a_buffer_is_a_window(self) -> None:
        batches = list(BlockShuffleBatchSampler(range(100), 30, block_rows=2, buffer_blocks=3))
        assert [batch.window.first_ordinal for batch in batches] == [0, 1, 2, 3]
        assert [len(batch.window) for batch in batches] == [1, 1, 1, 1]

    def test_a_fixed_window_may_be_asked_for(self) -> None:
        batches = list(BlockShuffleBatchSampler(range(100), 10, window=4))
        assert [batch.window.first_ordinal for batch in batches] == [0] * 4 + [4] * 4 + [8] * 2
        assert [len(batch.window) for batch in batches] == [4] * 8 + [2] * 2


class TestRanks:
    @pytest.mark.parametrize("world_size", [2, 3, 4])
    @pytest.mark.parametrize("rows", [0, 1, 5, 96, 101, 500])
    def test_ranks_part_each_global_batch_and_keep_its_order(self, world_size: int, rows: int) -> None:
        arguments = {"block_rows": 5, "buffer_blocks": 4, "seed": 3}
        whole = list(BlockShuffleBatchSampler(range(rows), 4 * world_size, **arguments))
        parts = of_ranks(rows, world_size, 4, **arguments)
        assert {len(part) for part in parts} == {len(whole)}
        for number, batch in enumerate(whole):
            mine = [part[number] for part in parts]
            assert len({len(part) for part in mine}) == 1
            real = [list(part)[: len(part) - part.padded] for part in mine]
            assert sorted(row for part in real for row in part) == sorted(batch)
            for part in real:
                assert part == [row for row in batch if row in part]
            assert sum(part.padded for part in mine) < world_size

    def test_a_rank_reads_about_its_share_of_the_blocks(self) -> None:
        parts = of_ranks(64_000, 4, 64, block_rows=16, buffer_blocks=100, drop_last=True)
        for part in parts:
            blocks = {row // 16 for batch in part for row in batch}
            # A quarter of 4000, plus what chance moves across the edges: a quartile of 256 rows has a standard
            # deviation of 2.7 percent, and each buffer has 6 batches and two edges.
            assert 0.25 <= len(blocks) / 4000 < 0.25 + 2 * 2 * 0.027
        rows = flat([batch for part in parts for batch in part])
        assert len(rows) == len(set(rows)) == 64_000

    def test_each_ranks_windows_are_its_own(self) -> None:
        for part in of_ranks(300, 3, 4, block_rows=5, buffer_blocks=8):
            for batch in part:
                ahead = batch.window.batches[batch.ordinal - batch.window.first_ordinal]
                assert ahead.tolist() == batch

    def test_last_rows_of_two_ranks(self) -> None:
        # 101 rows, 2 ranks, batches of 2: 25 full ones each, then one row, repeated on the other rank.
        padding = of_ranks(101, 2, 2)
        assert [len(part) for part in padding] == [26, 26]
        assert [part[25].padded for part in padding] == [0, 1]
        real = [row for part in padding for batch in part for row in list(batch)[: len(batch) - batch.padded]]
        assert sorted(real) == list(range(101))
        dropping = of_ranks(101, 2, 2, drop_last=True)
        assert [len(part) for part in dropping] == [25, 25]
        assert len(set(flat(dropping[0] + dropping[1]))) == 100


class TestCloseToUniform:
    """1000 blocks of 16 rows, 50 of them a buffer; labels are stored in order, 10 of them."""

    rows, block_rows, buffer_blocks, batch_size = 16_000, 16, 50, 80

    @pytest.fixture
    def epochs(self) -> np.ndarray:
        sampler = BlockShuffleBatchSampler(
            range(self.rows), self.batch_size, block_rows=self.block_rows, buffer_blocks=self.buffer_blocks
        )
        return np.array([list(sampler) for _ in range(20)])

    def test_position_says_nothing_of_the_row(self, epochs: np.ndarray) -> None:
        positions = np.arange(self.rows)
        correlations = [np.corrcoef(epoch.reshape(-1), positions)[0, 1] for epoch in epochs]
        # Blocks are what is shuffled at large: 1000 of them give a standard deviation of 1 / sqrt(1000).
        assert max(map(abs, correlations)) < 5 / math.sqrt(1000)
        assert abs(np.mean(correlations)) < 5 / math.sqrt(1000 * 20)

    def test_labels_mix_as_the_buffer_allows(self, epochs: np.ndarray) -> None:
        labels = epochs // (self.rows // 10)
        shares = np.stack([(labels == label).mean(axis=2) for label in range(10)])
        # A batch of b rows out of K of M blocks: the variance of drawing b rows plus that of drawing K blocks.
        blocks = 1 / self.buffer_blocks * (1000 - self.buffer_blocks) / 999
        within = 1 / self.batch_size * (800 - self.batch_size) / 799
        expected = math.sqrt(0.1 * 0.9 * (blocks + within))
        assert abs(shares.mean() - 0.1) < 1e-12
        assert shares.std() == pytest.approx(expected, rel=0.05)

    def test_neighbours_seldom_come_together(self, epochs: np.ndarray) -> None:
        rows = epochs.reshape(20, -1)
        same_block = (rows[:, 1:] // 16 == rows[:, :-1] // 16).mean()
        # Of the other 799 rows of the buffer, 15 are of the same block; no pair spans 19 of 15999 borders.
        assert same_block == pytest.approx(15 / 799, rel=0.05)

    def test_epochs_differ(self, epochs: np.ndarray) -> None:
        equal = (epochs[0] == epochs[1]).mean()
        assert equal < 0.01


def test_the_order_is_the_same_for_any_number_of_ranks() -> None:
    alone = BlockShuffleBatchSampler(range(240), 24, block_rows=5, buffer_blocks=8, seed=9)
    of_one = [set(batch) for batch in islice(alone, 10)]
    for world_size in (2, 3, 4):
        parts = of_ranks(240, world_size, 24 // world_size, block_rows=5, buffer_blocks=8, seed=9)
        assert [set().union(*batches) for batches in zip(*parts, strict=True)] == of_one
