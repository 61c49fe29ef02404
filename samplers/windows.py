"""Deals batches of an epoch with their windows, each window drawn once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from td_datapipes.shares import Share

from .batch import RowBatch, Window

__all__ = ["BatchDraw", "OrderedBatches", "RowOrder", "WindowDealer"]

Rows = NDArray[np.int64]
# Drawing fewer positions at a time costs as much as drawing this many.
MIN_DRAWN_ROWS = 4096


class RowOrder(Protocol):
    """Any position of an epoch's order, at once."""

    def permute(self, positions: Rows) -> Rows:
        """What comes at each position."""
        ...


class BatchDraw(Protocol):
    """One rank's batches of an epoch. Pure: the same batch is the same rows each time."""

    @property
    def share(self) -> Share:
        """The rank's."""
        ...

    def draw(self, first: int, stop: int) -> tuple[Rows, ...]:
        """Rows of the batches ``first`` to ``stop``."""
        ...

    def padded(self, batch: int) -> int:
        """How many rows at the end of a batch are padding."""
        ...


@dataclass(frozen=True)
class OrderedBatches:
    """A rank takes consecutive positions of each global batch.

    Attributes:
        order: of the epoch.
        share: this rank's.
        expand: turns what the order gives into rows, ``rows_each`` for each position, in order; None takes it as rows.
        rows_each: rows of a position.
    """

    order: RowOrder
    share: Share
    expand: Callable[[Rows], Rows] | None = None
    rows_each: int = 1

    def draw(self, first: int, stop: int) -> tuple[Rows, ...]:
        """Rows of the batches ``first`` to ``stop``."""
        positions = self.share.positions_of(first, stop)
        found = self.order.permute(np.concatenate(positions))
        rows = found if self.expand is None else self.expand(found)
        edges = np.cumsum([len(part) for part in positions])[:-1] * self.rows_each
        return tuple(np.split(rows, edges))

    def padded(self, batch: int) -> int:
        """How many rows at the end of a batch are padding."""
        return self.share.padded(batch) * self.rows_each


class _DrawOnce:
    """A window's batches, drawn when first asked. Pickles as what draws them."""

    def __init__(self, batches: BatchDraw, first: int, stop: int) -> None:
        self._source = batches
        self.first = first
        self.stop = stop

    def __len__(self) -> int:
        return self.stop - self.first

    def draw(self) -> tuple[Rows, ...]:
        return self._drawn

    @property
    def is_drawn(self) -> bool:
        return "_drawn" in self.__dict__

    @cached_property
    def _drawn(self) -> tuple[Rows, ...]:
        return self._source.draw(self.first, self.stop)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._source, self.first, self.stop)


class WindowDealer:
    """Deals `RowBatch`es in rising order; each carries its window, and that one the next.

    Args:
        batches: this rank's.
        window_stop: the batch behind the window that a batch falls in.
        lazy: a window is drawn when somebody asks for it and travels as its recipe. For large windows of an order that
            pickles small; others are drawn at once and travel as rows.
    """

    def __init__(self, batches: BatchDraw, window_stop: Callable[[int], int], *, lazy: bool) -> None:
        self._batches = batches
        self._window_stop = window_stop
        self._lazy = lazy
        self._piece_batches = max(MIN_DRAWN_ROWS // batches.share.global_batch_rows, 1)
        self._piece: _DrawOnce | None = None
        self._current: _DrawOnce | None = None
        self._following: _DrawOnce | None = None
        self._window: Window | None = None

    def deal(self, batch: int) -> RowBatch:
        """Batch ``batch``, announcing its window from here on and the next one."""
        while self._current is None or batch >= self._current.stop:
            self._move_window(batch)
        rows = self._rows(batch)
        padded = self._batches.padded(batch)
        return RowBatch(rows.tolist(), ordinal=batch, window=self._window, padded=padded, dealt=rows)

    def _move_window(self, batch: int) -> None:
        self._current = self._open(batch) if self._following is None else self._following
        assert self._current is not None  # For the type checker: `batch` exists, so its window does.
        self._following = self._open(self._current.stop)
        following = None if self._following is None else self._announce(self._following, None)
        self._window = self._announce(self._current, following)

    def _open(self, first: int) -> _DrawOnce | None:
        num_batches = self._batches.share.num_batches
        if first >= num_batches:
            return None
        return _DrawOnce(self._batches, first, min(self._window_stop(first), num_batches))

    def _announce(self, source: _DrawOnce, following: Window | None) -> Window:
        return Window(source.first, source if self._lazy else source.draw(), following)

    def _rows(self, batch: int) -> Rows:
        assert self._current is not None
        if self._current.is_drawn:
            return self._current.draw()[batch - self._current.first]
        if self._piece is None or batch >= self._piece.stop:
            self._piece = _DrawOnce(self._batches, batch, min(batch + self._piece_batches, self._current.stop))
        return self._piece.draw()[batch - self._piece.first]
