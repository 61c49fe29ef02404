"""`BlockShuffleBatchSampler`: random batches that are read as whole blocks of adjacent rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sized
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from td_datapipes.order import PIECE_ROWS, BlockOrder
from td_datapipes.shares import Share, fingerprint

from .base import PositionSampler, check_positive
from .batch import RowBatch
from .states import Position
from .windows import WindowDealer

__all__ = ["BlockShuffleBatchSampler"]

Rows = NDArray[np.int64]

BLOCK_BYTES = 256 << 10
BUFFER_BYTES = 64 << 20
ASSUMED_ROW_BYTES = 1 << 10


class BlockShuffleBatchSampler(PositionSampler[RowBatch]):
    """Shuffles blocks of adjacent rows, then the rows of a buffer of such blocks: nearly uniform, far cheaper to read.

    A batch mixes rows of `buffer_blocks` blocks from all over the data, so labels stored in order come mixed. Each
    block is read once and kept until its last row is out: the announced windows are the batches of one buffer. Data
    that fits one buffer gets a uniform permutation.

    The order follows from (seed, epoch, rows, block_rows, buffer_blocks), whatever the number of ranks. Of each global
    batch, rank r takes the rows that lie in the r-th part of the buffer's blocks, so that over a buffer it reads about
    1/world_size of them.

    Args:
        data_source: has a length, and perhaps ``row_bytes`` (else 1 KiB is assumed).
        batch_size: rows of this rank's batch.
        seed: in [0, 2**64).
        block_rows: rows of a block; by default 256 KiB of them, at least one.
        buffer_blocks: blocks of a buffer; by default as many as `buffer_bytes` holds, at least one.
        buffer_bytes: what a reader holds for one buffer; two of them while the next one is being fetched.
        drop_last: leave out a last global batch that is not full, else divide and pad it (`RowBatch.padded`).
        window: batches announced together; by default those of one buffer.
        rank, world_size: by default the default process group's, else 0 of 1.

    Source: CorgiPile (Xu et al., SIGMOD 2022).
    """

    def __init__(
        self,
        data_source: Sized,
        batch_size: int,
        *,
        seed: int = 0,
        block_rows: int | None = None,
        buffer_blocks: int | None = None,
        buffer_bytes: int = BUFFER_BYTES,
        drop_last: bool = False,
        window: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        super().__init__(
            data_source, seed=seed, batch_size=batch_size, drop_last=drop_last, rank=rank, world_size=world_size
        )
        row_bytes = _row_bytes(data_source)
        check_positive(buffer_bytes=buffer_bytes)
        self.block_rows = max(BLOCK_BYTES // row_bytes, 1) if block_rows is None else block_rows
        check_positive(block_rows=self.block_rows)
        fitting = max(buffer_bytes // (self.block_rows * row_bytes), 1)
        self.buffer_blocks = fitting if buffer_blocks is None else buffer_blocks
        check_positive(buffer_blocks=self.buffer_blocks)
        if window is not None:
            check_positive(window=window)
        self.window = window

    def _fingerprint(self, rows: int) -> str:
        arguments = {"block_rows": self.block_rows, "buffer_blocks": self.buffer_blocks}
        return fingerprint("BlockShuffleBatchSampler", self.data_source, rows, **arguments)

    def _dealer(self, position: Position, share: Share) -> WindowDealer:
        order = BlockOrder(position.rows, self.block_rows, self.buffer_blocks, self.seed, position.epoch)
        return WindowDealer(_BlockBatches(order, share), self._window_stop(order, share), lazy=True)

    def _window_stop(self, order: BlockOrder, share: Share) -> Callable[[int], int]:
        if (window := self.window) is not None:
            return lambda batch: (batch // window + 1) * window

        def stop(batch: int) -> int:
            """The first batch that begins behind the buffer in which ``batch`` begins."""
            behind = order.buffer_stop(order.buffer_of(share.span(batch).start))
            return max(-(-(behind - share.start) // share.global_batch_rows), batch + 1)

        return stop


@dataclass(frozen=True)
class _BlockBatches:
    """One rank's batches: of each global batch the rows in its part of the buffer, in the global batch's order."""

    order: BlockOrder
    share: Share

    def draw(self, first: int, stop: int) -> tuple[Rows, ...]:
        """Rows of the batches ``first`` to ``stop``."""
        full_stop = min(stop, self.share.num_full)
        # In pieces, whose scratch memory stays in the processor's cache.
        step = max(PIECE_ROWS // self.share.global_batch_rows, 1)
        batches: list[Rows] = []
        for begin in range(first, full_stop, step):
            batches.extend(self._full(begin, min(begin + step, full_stop)))
        if stop > max(first, full_stop):
            batches.append(self._last())
        return tuple(batches)

    def padded(self, batch: int) -> int:
        """How many rows at the end of a batch are padding."""
        return self.share.part(len(self.share.span(batch)))[1]

    def _full(self, first: int, stop: int) -> Iterable[Rows]:
        """The same of batches that are not the last."""
        start, size = self.share.span(first).start, self.share.global_batch_rows
        places = self.order.places(np.arange(start, start + (stop - first) * size))
        mine = self._part(places.reshape(stop - first, size))
        return self.order.rows_of(mine.reshape(-1)).reshape(mine.shape)

    def _part(self, places: Rows) -> Rows:
        """This rank's columns of global batches of places [batches, positions]."""
        if self.share.world_size == 1:
            return places
        part, _ = self.share.part(places.shape[1])
        columns = np.argsort(self.order.depths(places), axis=1, kind="stable")[:, part.start : part.stop]
        columns.sort(axis=1)
        return np.take_along_axis(places, columns, axis=1)

    def _last(self) -> Rows:
        span = self.share.span(self.share.num_full)
        places = self.order.places(np.arange(span.start, span.stop))[None]
        padding = self.share.padding(self.share.part(len(span))[1])
        return np.concatenate([self.order.rows_of(self._part(places)[0]), self.order.permute(padding)])


def _row_bytes(data_source: object) -> int:
    found = getattr(data_source, "row_bytes", None)
    return found if isinstance(found, int) and found > 0 else ASSUMED_ROW_BYTES
