"""`LengthBatchSampler`: batches of rows of about one length, each as large as fits a number of tokens."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from td_datapipes.errors import ConfigurationError
from td_datapipes.order import Permutation, derive_key
from td_datapipes.shares import Share, fingerprint

from .base import PositionSampler, check_positive
from .batch import RowBatch
from .rows import digest
from .states import Position
from .windows import WindowDealer

__all__ = ["LengthBatchSampler"]

Rows = NDArray[np.int64]


class LengthBatchSampler(PositionSampler[RowBatch]):
    """Buckets rows by length, and takes as many of one bucket as `max_tokens` holds, padded to the bucket's bound.

    So rows x longest row is at most `max_tokens` in every batch, padding counted, and little of it is padding. Each
    epoch puts the rows of a bucket together anew, and gives the batches in random order. Lengths are read once, before
    the first batch, and again only for rows that were appended since.

    The order follows from (seed, epoch, lengths, max_tokens, max_rows, max_padding), whatever the number of ranks: each
    step, every rank takes one batch. An epoch has as many batches every time. A cursor counts batches.

    Args:
        data_source: has a length, and ``lengths(field, start=)`` as `RedisTDDataset` has, unless `lengths` are given.
        max_tokens: of a batch, padding counted.
        field: whose lengths; by default the one tensor of variable length there is.
        lengths: one a row, where the data source is not to be asked.
        max_rows: of a batch; by default what fits.
        max_padding: a bucket's shortest row is shorter than its bound by at most this part of itself.
        seed: in [0, 2**64).
        shuffle: else bucket comes after bucket, shorter rows first, and rows within a bucket as they are stored.
        drop_last: leave out the batches of a last step that are not one for each rank; else some are repeated, and
            marked as padding (`RowBatch.padded`).
        window: batches announced together.
        rank, world_size: by default the default process group's, else 0 of 1.

    Raises:
        ConfigurationError: a row longer than `max_tokens`, or arguments that cannot work.
    """

    def __init__(
        self,
        data_source: Sized,
        max_tokens: int,
        *,
        field: str | tuple[str, ...] | None = None,
        lengths: ArrayLike | None = None,
        max_rows: int | None = None,
        max_padding: float = 0.125,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        window: int = 8,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        super().__init__(data_source, seed=seed, batch_size=1, drop_last=drop_last, rank=rank, world_size=world_size)
        check_positive(max_tokens=max_tokens, window=window, **({} if max_rows is None else {"max_rows": max_rows}))
        if not isinstance(max_padding, int | float) or not 0 <= max_padding <= 8:
            raise ConfigurationError(f"max_padding must be a number from 0 to 8, got {max_padding!r}")
        self.max_tokens, self.max_rows, self.max_padding = max_tokens, max_rows, max_padding
        self.field, self.shuffle, self.window = field, shuffle, window
        self._given = lengths is not None
        self._lengths = np.empty(0, np.int64) if lengths is None else np.asarray(lengths, dtype=np.int64)
        if self._lengths.ndim != 1:
            raise ConfigurationError(f"lengths are one a row: shape (rows,), got {self._lengths.shape}")
        self._buckets: _Buckets | None = None

    def _length(self, rows: int) -> int:
        return self._bucketed(rows).num_batches

    def _fingerprint(self, rows: int) -> str:
        arguments: dict[str, int | str] = {"max_tokens": self.max_tokens, "max_padding": str(float(self.max_padding))}
        if self.max_rows is not None:
            arguments["max_rows"] = self.max_rows
        arguments |= {"shuffle": self.shuffle, "lengths": self._bucketed(rows).digest}
        return fingerprint("LengthBatchSampler", self.data_source, rows, **arguments)

    def _dealer(self, position: Position, share: Share) -> WindowDealer:
        buckets, window = self._bucketed(position.rows), self.window
        epoch = (self.seed, position.epoch) if self.shuffle else None
        batches = _LengthBatches(buckets, share, epoch)
        return WindowDealer(batches, lambda batch: (batch // window + 1) * window, lazy=False)

    def _bucketed(self, rows: int) -> _Buckets:
        if self._buckets is None or self._buckets.num_rows != rows:
            lengths = self._lengths_of(rows)
            self._buckets = _Buckets.of(lengths, self.max_tokens, self.max_rows, self.max_padding)
        return self._buckets

    def _lengths_of(self, rows: int) -> Rows:
        if len(self._lengths) < rows and not self._given:
            ask: Any = getattr(self.data_source, "lengths", None)
            if ask is None:
                raise ConfigurationError(
                    f"a {type(self.data_source).__name__} does not tell the lengths of its rows; pass lengths="
                )
            more = np.asarray(ask(self.field, start=len(self._lengths)), dtype=np.int64)
            self._lengths = np.concatenate([self._lengths, more])
        if len(self._lengths) < rows:
            raise ConfigurationError(f"lengths are one a row: {rows} are needed, got {len(self._lengths)}")
        return self._lengths[:rows]


@dataclass(frozen=True, eq=False)
class _Buckets:
    """Rows by length, and how batches are cut out of them: the same every epoch.

    Attributes:
        lengths: of all rows.
        rows: by bucket, ascending within each.
        edges: where in `rows` each bucket begins, and the last one ends, ``[buckets + 1]``.
        batch_rows: rows of a full batch of each bucket.
        first_batch: the number of each bucket's first batch, and of all batches, ``[buckets + 1]``.
    """

    lengths: Rows
    rows: Rows
    edges: Rows
    batch_rows: Rows
    first_batch: Rows

    @classmethod
    def of(cls, lengths: Rows, max_tokens: int, max_rows: int | None, max_padding: float) -> _Buckets:
        if len(lengths) and int(lengths.min()) < 0:
            raise ConfigurationError(f"lengths are at least 0, got {lengths.min()} for row {int(lengths.argmin())}")
        longest = int(lengths.max(initial=1))
        if longest > max_tokens:
            raise ConfigurationError(
                f"row {int(lengths.argmax())} has {longest} tokens, more than max_tokens={max_tokens}: raise it, or "
                f"open the data set with max_length={max_tokens} or less, which cuts rows off"
            )
        bounds = _bounds(longest, max_padding)
        bucket_of = np.searchsorted(bounds, lengths)
        counts = np.bincount(bucket_of, minlength=len(bounds))
        batch_rows = max_tokens // bounds
        if max_rows is not None:
            batch_rows = np.minimum(batch_rows, max_rows)
        return cls(
            lengths=lengths,
            rows=np.argsort(bucket_of, kind="stable"),
            edges=np.concatenate([[0], np.cumsum(counts)]),
            batch_rows=batch_rows,
            first_batch=np.concatenate([[0], np.cumsum(-(-counts // batch_rows))]),
        )

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    @property
    def num_batches(self) -> int:
        return int(self.first_batch[-1])

    @cached_property
    def digest(self) -> str:
        """Of the lengths."""
        return digest(self.lengths)

    def batch(self, number: int, epoch: tuple[int, int] | None) -> Rows:
        """The rows of one batch; `epoch` is what shuffles them within their bucket."""
        bucket = int(np.searchsorted(self.first_batch, number, side="right")) - 1
        first, stop = int(self.edges[bucket]), int(self.edges[bucket + 1])
        start = (number - int(self.first_batch[bucket])) * int(self.batch_rows[bucket])
        places = np.arange(start, min(start + int(self.batch_rows[bucket]), stop - first))
        if epoch is not None:
            places = Permutation(stop - first, derive_key(*epoch, "bucket", bucket)).permute(places)
        return self.rows[first + places]


def _bounds(longest: int, max_padding: float) -> Rows:
    """The longest length of each bucket, up to the longest of all."""
    bounds, low = [1], 1
    while low < longest:
        low = min(max(int((low + 1) * (1 + max_padding)), low + 1), longest)
        bounds.append(low)
    return np.array(bounds, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class _LengthBatches:
    """One rank's batches of an epoch (a `BatchDraw`)."""

    buckets: _Buckets
    share: Share
    epoch: tuple[int, int] | None

    def draw(self, first: int, stop: int) -> tuple[Rows, ...]:
        """Rows of the batches ``first`` to ``stop``."""
        positions = np.concatenate(self.share.positions_of(first, stop))
        if self.epoch is not None:
            positions = self._order.permute(positions)
        return tuple(self.buckets.batch(number, self.epoch) for number in positions.tolist())

    def padded(self, batch: int) -> int:
        """All rows of a batch that repeats another, else none."""
        positions, padded = self.share.positions(batch)
        if not padded:
            return 0
        if self.epoch is not None:
            positions = self._order.permute(positions)
        return len(self.buckets.batch(int(positions[-1]), None))

    @cached_property
    def _order(self) -> Permutation:
        assert self.epoch is not None  # For the type checker: both callers have looked.
        return Permutation(self.buckets.num_batches, derive_key(*self.epoch, "batches"))
