"""`RowSampler`: a seeded sampler of rows that resumes at any place at once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sized
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from td_datapipes.errors import ConfigurationError
from td_datapipes.order import Permutation, derive_key, uniform_floats
from td_datapipes.shares import Share, fingerprint

from .base import PositionIterator, PositionSampler, check_positive
from .loading import refuse_other_workers
from .states import Position
from .windows import RowOrder

__all__ = ["RowIterator", "RowSampler", "digest"]

Rows = NDArray[np.int64]
Weights = NDArray[np.float64]
# Drawn together when rows are asked for one by one.
DRAWN_ROWS = 1024


class RowSampler(PositionSampler[int]):
    """Row numbers in an order that follows from (seed, epoch, rows): any place is resumed in O(1), on any rank.

    Without replacement it is a keyed permutation, in O(1) memory; an epoch longer than the data goes through several.
    With replacement each position is hashed on its own; weights need 8 bytes a row and a binary search. Rank r of W
    takes every W-th row, from the r-th on, so W batches of equal number are consecutive rows of the order.

    ``CoalescingBatchSampler(RowSampler(dataset), 256)`` makes batches of it.

    Args:
        data_source: has a length.
        seed: in [0, 2**64).
        shuffle: else rows come in their own order.
        replacement: draw each row independently of the others. Needs shuffle.
        weights: how often each row is drawn, relative to others; [rows], >= 0, not all 0. Needs replacement.
        num_samples: rows of an epoch over all ranks; by default as many as the data has.
        drop_last: leave out the last rows that not every rank would get one of; else some ranks repeat one, and
            `RowIterator.num_padded` says so.
        rank, world_size: by default the default process group's, else 0 of 1.

    Raises:
        ConfigurationError: arguments that contradict each other; the message says which.
    """

    def __init__(
        self,
        data_source: Sized,
        *,
        seed: int = 0,
        shuffle: bool = True,
        replacement: bool = False,
        weights: Iterable[float] | None = None,
        num_samples: int | None = None,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        super().__init__(data_source, seed=seed, batch_size=1, drop_last=drop_last, rank=rank, world_size=world_size)
        if replacement and not shuffle:
            raise ConfigurationError("replacement=True draws at random: it needs shuffle=True")
        if weights is not None and not replacement:
            raise ConfigurationError(
                "weights need replacement=True; without, wrap torch's WeightedRandomSampler in a CoalescingBatchSampler"
            )
        if num_samples is not None:
            check_positive(num_samples=num_samples)
        self.shuffle = shuffle
        self.replacement = replacement
        self.num_samples = num_samples
        self._cumulative = None if weights is None else _cumulate(weights, len(data_source))
        self._digest = "" if self._cumulative is None else digest(self._cumulative)

    def __iter__(self) -> RowIterator:
        refuse_other_workers()
        self._iterator = iterator = RowIterator(self)
        return iterator

    def _length(self, rows: int) -> int:
        return (self.num_samples or rows) if rows else 0

    def _fingerprint(self, rows: int) -> str:
        arguments: dict[str, int | str | bool] = {"shuffle": self.shuffle, "replacement": self.replacement}
        if self.num_samples is not None:
            arguments["num_samples"] = self.num_samples
        if self._digest:
            arguments["weights"] = self._digest
        return fingerprint("RowSampler", self.data_source, rows, **arguments)

    def _dealer(self, position: Position, share: Share) -> RowDealer:
        return RowDealer(self._order(position), share)

    def _order(self, position: Position) -> RowOrder:
        if not self.shuffle:
            return _InOrder(position.rows)
        if not self.replacement:
            return _Shuffled(position.rows, self.seed, position.epoch)
        key = derive_key(self.seed, position.epoch, "replacement")
        if self._cumulative is None:
            return _Uniform(position.rows, key)
        return _Weighted(self._cumulative, key)


class RowIterator(PositionIterator[int]):
    """A pass over a `RowSampler`."""

    def take(self, count: int) -> Rows:
        """The next ``count`` rows at once; fewer at the end, which the sampler then has been told of."""
        if self._dealer is None:
            self._begin()
        dealer, first = self._dealer, self._next_batch
        assert isinstance(dealer, RowDealer)
        stop = min(first + count, self._num_batches)
        self._next_batch = stop
        if stop < first + count:
            self._end()
        return dealer.rows(first, stop)

    @property
    def num_padded(self) -> int:
        """How many rows at the end of this pass are repeats, so that all ranks get as many: 0 or 1."""
        share = self._sampler._share(self.position)
        return share.padded(share.num_batches - 1) if share.num_batches else 0


class RowDealer:
    """Deals a rank's rows of an epoch one by one, drawn many at a time."""

    def __init__(self, order: RowOrder, share: Share) -> None:
        self._order = order
        self._share = share
        self._first = 0
        self._drawn: list[int] = []

    def deal(self, batch: int) -> int:
        """Row ``batch`` of this rank."""
        if not self._first <= batch < self._first + len(self._drawn):
            stop = min(batch + DRAWN_ROWS, self._share.num_batches)
            self._first, self._drawn = batch, self.rows(batch, stop).tolist()
        return self._drawn[batch - self._first]

    def rows(self, first: int, stop: int) -> Rows:
        """This rank's rows ``first`` to ``stop``."""
        share = self._share
        full = np.arange(first, min(stop, share.num_full))
        positions = share.start + full * share.world_size + share.rank
        if stop > max(first, share.num_full):
            positions = np.concatenate([positions, share.positions(share.num_full)[0]])
        return self._order.permute(positions)


@dataclass(frozen=True)
class _InOrder:
    n: int

    def permute(self, positions: Rows) -> Rows:
        return positions % self.n if len(positions) else positions


@dataclass(frozen=True)
class _Shuffled:
    """Permutation after permutation, each with a key of its own."""

    n: int
    seed: int
    epoch: int

    def permute(self, positions: Rows) -> Rows:
        rows = np.empty_like(positions)
        passes = positions // self.n if len(positions) else positions
        for number in np.unique(passes).tolist():
            members = passes == number
            permutation = Permutation(self.n, derive_key(self.seed, self.epoch, "rows", number))
            rows[members] = permutation.permute(positions[members] - number * self.n)
        return rows


@dataclass(frozen=True)
class _Uniform:
    n: int
    key: int

    def permute(self, positions: Rows) -> Rows:
        drawn = (uniform_floats(self.key, positions) * self.n).astype(np.int64)
        return np.minimum(drawn, self.n - 1)


@dataclass(frozen=True, eq=False)
class _Weighted:
    cumulative: Weights
    key: int

    def permute(self, positions: Rows) -> Rows:
        total = self.cumulative[-1]
        drawn = np.minimum(uniform_floats(self.key, positions) * total, np.nextafter(total, 0))
        # The first row whose sum is above: a row of weight 0 has the sum of the one before and is never it.
        return np.asarray(np.searchsorted(self.cumulative, drawn, side="right"), np.int64)


def digest(values: NDArray[np.generic]) -> str:
    """A short name for an array's content."""
    return hashlib.blake2b(np.ascontiguousarray(values).tobytes(), digest_size=8).hexdigest()


def _cumulate(weights: Iterable[float], rows: int) -> Weights:
    values = np.asarray(weights if isinstance(weights, Sized) else list(weights), np.float64)
    if values.shape != (rows,):
        raise ConfigurationError(f"weights are one a row: shape ({rows},), got {values.shape}")
    if not np.isfinite(values).all() or (values < 0).any() or not (values > 0).any():
        raise ConfigurationError("weights are finite and >= 0, and at least one is above 0")
    return np.cumsum(values)
