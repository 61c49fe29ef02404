"""A mixture's order: which source each position of an endless stream is drawn from, and which of its rows. Pure.

Shares are kept exactly: the stream is cut into periods, and in each period every source has the same number of slots,
in an order drawn anew for each period. Where a source's n-th draw comes is therefore known at once, and with it the
source's own epoch and its row there, for any position, in O(1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from td_datapipes.errors import ConfigurationError
from td_datapipes.order import BlockOrder, derive_key, hash_positions

__all__ = ["MAX_PERIOD", "MixtureOrder", "SourceShape", "slots_of_weights"]

Rows = NDArray[np.int64]

MAX_PERIOD = 1 << 16
"""Weights whose common denominator is larger are rounded to multiples of 1 / MAX_PERIOD of their sum."""


def slots_of_weights(weights: Sequence[float | int | Fraction]) -> tuple[int, ...]:
    """How many slots of a period each source has: the smallest integers in the ratio of the weights.

    A float is taken as the decimal it prints as: weights 0.7 and 0.3 are 7 and 3 of 10.

    Raises:
        ConfigurationError: no weight, or one that is not a finite number above 0.
    """
    exact = []
    for number, weight in enumerate(weights):
        valid = isinstance(weight, int | float | Fraction) and not isinstance(weight, bool)
        if not valid or not math.isfinite(weight) or weight <= 0:
            raise ConfigurationError(f"weight {number} must be a finite number above 0, got {weight!r}")
        exact.append(Fraction(str(weight)))
    if not exact:
        raise ConfigurationError("a mixture needs at least one source")
    shares = [weight / sum(exact) for weight in exact]
    period = math.lcm(*(share.denominator for share in shares))
    if period <= MAX_PERIOD:
        return tuple(int(share * period) for share in shares)
    # Largest remainders, and one slot at least for everybody.
    slots = [max(int(share * MAX_PERIOD), 1) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: slots[i] - shares[i] * MAX_PERIOD)
    for turn in range(max(MAX_PERIOD - sum(slots), 0)):
        slots[by_remainder[turn % len(slots)]] += 1
    common = math.gcd(*slots)
    return tuple(number // common for number in slots)


@dataclass(frozen=True, kw_only=True)
class SourceShape:
    """What the order needs to know of a source.

    Attributes:
        rows: rows of it, > 0.
        first_row: its first row's number in the mixture.
        block_rows, buffer_blocks: how its rows are block-shuffled; see `td_datapipes.order.BlockOrder`.
        shuffle: whether they are.
    """

    rows: int
    first_row: int
    block_rows: int
    buffer_blocks: int
    shuffle: bool


@dataclass(frozen=True)
class MixtureOrder:
    """Rows of the mixture, by position of one epoch of it. Each source runs through epochs of its own.

    Args:
        sources: what is mixed.
        slots: of a period, for each source.
        seed: of all orders.
        first_position: the position of the endless stream at which the epoch begins.
    """

    sources: tuple[SourceShape, ...]
    slots: tuple[int, ...]
    seed: int
    first_position: int

    @property
    def period(self) -> int:
        """Positions within which every source has exactly its share."""
        return sum(self.slots)

    def permute(self, positions: Rows) -> Rows:
        """The mixture's rows at ``positions`` [k] of the epoch: int64 [k]."""
        sources, draws = self.draws(positions)
        rows = np.empty(len(positions), np.int64)
        for number, shape in enumerate(self.sources):
            members = np.flatnonzero(sources == number)
            if len(members):
                rows[members] = self._rows_of(number, shape, draws[members]) + shape.first_row
        return rows

    def draws(self, positions: Rows) -> tuple[Rows, Rows]:
        """Which source each of ``positions`` is drawn from, and the how manieth draw from it that is, from 0."""
        periods, within = np.divmod(np.asarray(positions, np.int64) + self.first_position, self.period)
        numbers, which = np.unique(periods, return_inverse=True)
        sources = np.empty(len(within), np.int64)
        draws = np.empty(len(within), np.int64)
        # A bounded number of periods at a time.
        step = max(MAX_PERIOD // self.period, 1)
        for first in range(0, len(numbers), step):
            chosen = numbers[first : first + step]
            members = np.flatnonzero((which >= first) & (which < first + step))
            table, ranks = _tables(tuple(chosen.tolist()), self.slots, derive_key(self.seed, 0, "mixture"))
            row, column = which[members] - first, within[members]
            sources[members] = table[row, column]
            draws[members] = ranks[row, column]
        draws += periods * np.asarray(self.slots, np.int64)[sources]
        return sources, draws

    def _rows_of(self, number: int, shape: SourceShape, draws: Rows) -> Rows:
        epochs, places = np.divmod(draws, shape.rows)
        if not shape.shuffle:
            return places
        seed = derive_key(self.seed, 0, "source", number + 1)
        rows = np.empty_like(places)
        for epoch in np.unique(epochs).tolist():
            members = epochs == epoch
            rows[members] = _order(shape, seed, epoch).permute(places[members])
        return rows


@lru_cache(maxsize=64)
def _order(shape: SourceShape, seed: int, epoch: int) -> BlockOrder:
    return BlockOrder(shape.rows, shape.block_rows, shape.buffer_blocks, seed, epoch)


@lru_cache(maxsize=4)
def _tables(periods: tuple[int, ...], slots: tuple[int, ...], key: int) -> tuple[Rows, Rows]:
    """For each period: the source of each position, and the rank of that draw among the source's of the period."""
    size = sum(slots)
    words = hash_positions(key, np.asarray(periods, np.int64)[:, None] * size + np.arange(size))
    slot = np.argsort(words, axis=1, kind="stable")
    sources = np.searchsorted(np.cumsum(slots), slot, side="right")
    ranks = np.empty_like(sources)
    for number in range(len(slots)):
        mine = sources == number
        ranks[mine] = (np.cumsum(mine, axis=1) - 1)[mine]
    return sources, ranks
