"""`CoalescingBatchSampler`: batches of any sampler's rows, announced a window ahead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from td_datapipes.errors import ConfigurationError, StateError
from td_datapipes.shares import Cursor

from .base import check_positive
from .batch import RowBatch, Window
from .inner import InnerRows
from .loading import refuse_other_workers
from .rows import RowSampler
from .states import STATE_VERSION, find_sampler_state, read_integer, read_string, require_version

__all__ = ["CoalescingBatchSampler", "CoalescingIterator"]

Rows = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where an iterator of a `CoalescingBatchSampler` stands.

    Attributes:
        inner: what restores the inner sampler at the window's start; None if nothing can.
        window_batch: the window's first batch.
        batch: batches handed out.
        ended: whether the end was seen, so that the next batch is of the next epoch.
    """

    inner: Mapping[str, Any] | None
    window_batch: int = 0
    batch: int = 0
    ended: bool = False


@dataclass(frozen=True, kw_only=True)
class _Drawn:
    """A window's batches, and what restores the inner sampler before the first of them."""

    first: int
    batches: tuple[Rows, ...]
    inner: Mapping[str, Any] | None

    @property
    def stop(self) -> int:
        return self.first + len(self.batches)


class CoalescingBatchSampler(Sampler[list[int]]):
    """Batches of exactly another sampler's rows, in its order; each announces what the next batches will be.

    For 0 workers too: a data set that reads ahead has the rows ready, and may read neighbours of one window together.

    Its state is the inner sampler's at the start of the window, plus the batches handed out since. Inner samplers with
    a state are torchdata's and this package's; torch's SequentialSampler and DistributedSampler, ranges, lists, tuples
    and arrays are restored by position. Of any other the order cannot be restored, and `state_dict` raises; a
    StatefulDataLoader with workers calls it for each batch, so use torch's DataLoader for those.

    Args:
        sampler: any iterable of row numbers. With ``set_epoch``, it is forwarded.
        batch_size: rows of a batch.
        drop_last: leave out a last batch that is not full.
        window: batches drawn and announced together, >= 1; up to twice as many are known ahead.

    Raises:
        ConfigurationError: batch_size or window is not positive.
    """

    def __init__(
        self, sampler: Sampler[int] | Iterable[int], batch_size: int, drop_last: bool = False, *, window: int = 8
    ) -> None:
        check_positive(batch_size=batch_size, window=window)
        if not isinstance(drop_last, bool):
            raise ConfigurationError(f"drop_last must be a bool, got {drop_last!r}")
        self.sampler = sampler
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.window = window
        # A place that was loaded and that no iterator has taken up yet.
        self._loaded: _Place | None = None
        self._iterator: CoalescingIterator | None = None
        # The epoch of a `RowSampler` whose batches were not all handed out: drawing ahead may have ended it.
        self._open_epoch: int | None = None

    def __iter__(self) -> Iterator[list[int]]:
        refuse_other_workers()
        self._iterator = CoalescingIterator(self)
        return self._iterator

    def __len__(self) -> int:
        """Batches of an epoch; a sampler without length raises TypeError, as torch's BatchSampler does."""
        rows = len(self.sampler)  # type: ignore[arg-type]
        return rows // self.batch_size if self.drop_last else -(-rows // self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Forwarded to the inner sampler, if it has epochs. A place loaded within that same epoch is kept."""
        if not hasattr(self.sampler, "set_epoch"):
            return
        if self._loaded is not None and (self._loaded.inner or {}).get("epoch") == epoch and not self._loaded.ended:
            return
        self._loaded = self._iterator = self._open_epoch = None
        self.sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the latest iterator stands, counting the batches it handed out.

        Raises:
            StateError: the inner sampler's order cannot be restored.
        """
        if self._loaded is not None:
            return self._state(self._loaded)
        if self._iterator is None:
            self._iterator = CoalescingIterator(self)
        return self._iterator.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """The next iterator goes on from there, once.

        Raises:
            StateError: the state is of another kind of inner sampler or batch size; both are named.
        """
        self._loaded = self._place(state_dict)
        self._open_epoch = None

    def cursor(self, state: Mapping[str, Any] | None = None) -> Cursor:
        """The elastic cursor of ``state`` (by default: where it stands now). See `RowSampler.cursor`.

        Raises:
            StateError: the inner sampler is no `RowSampler`: others divide rows among ranks in ways of their own.
        """
        return self._cursor(self.state_dict() if state is None else state, later_batches=0)

    def cursor_of(self, loader_state: Mapping[str, Any]) -> Cursor:
        """The place of the consumer of a StatefulDataLoader, from its ``state_dict()``."""
        found = find_sampler_state(loader_state)
        state = {**found.state, "ended": True} if found.finished else found.state
        return self._cursor(state, later_batches=found.later_batches)

    def load_cursor(self, cursor: Cursor | Mapping[str, Any]) -> None:
        """Go on from there with this number of ranks: see `RowSampler.load_cursor`."""
        self._row_sampler().load_cursor(cursor)
        self._loaded = self._iterator = self._open_epoch = None

    def _row_sampler(self) -> RowSampler:
        if not isinstance(self.sampler, RowSampler):
            raise StateError(
                f"{type(self.sampler).__name__} has no elastic cursor; wrap td_datapipes.samplers.RowSampler instead"
            )
        return self.sampler

    def _cursor(self, state: Mapping[str, Any], *, later_batches: int) -> Cursor:
        sampler, place = self._row_sampler(), self._read(state)
        batches = place.batch - place.window_batch + later_batches
        rows = batches * read_integer(state, "batch_size")
        cursor = sampler._cursor((place.inner or {}).get("iterator", {}), later_batches=rows)
        return replace(cursor, epoch=cursor.epoch + 1, rows_consumed=0) if place.ended else cursor

    def _state(self, place: _Place) -> dict[str, Any]:
        if place.inner is None:
            raise StateError(
                f"the order of {type(self.sampler).__name__} cannot be restored, so no state is saved; use "
                "td_datapipes.samplers.RowSampler(dataset, seed=...) in its place, or torch's DataLoader without state"
            )
        return {
            "version": STATE_VERSION,
            "sampler": type(self.sampler).__name__,
            "batch_size": self.batch_size,
            "window_batch": place.window_batch,
            "batch": place.batch,
            "ended": place.ended,
            "inner": dict(place.inner),
        }

    def _place(self, state: Mapping[str, Any]) -> _Place:
        place = self._read(state)
        if (saved := read_integer(state, "batch_size")) != self.batch_size:
            raise StateError(
                f"the state was saved with batch_size {saved}, this sampler has {self.batch_size}; "
                "over a RowSampler, save cursor() and load it with load_cursor() to go on with another"
            )
        return place

    def _read(self, state: Mapping[str, Any]) -> _Place:
        require_version(state, type(self).__name__)
        if (saved := read_string(state, "sampler")) != type(self.sampler).__name__:
            raise StateError(f"the state is of a {saved}, this sampler wraps a {type(self.sampler).__name__}")
        if not isinstance(state.get("inner"), Mapping):
            raise StateError(f"the state holds no inner state, got {state.get('inner')!r}")
        window_batch, batch = read_integer(state, "window_batch"), read_integer(state, "batch")
        return _Place(
            inner=state["inner"], window_batch=window_batch, batch=batch, ended=bool(state.get("ended", False))
        )

    def _reopen_epoch(self) -> None:
        """Run a `RowSampler`'s epoch anew if its batches were not all handed out."""
        inner, epoch = self.sampler, self._open_epoch
        if epoch is not None and isinstance(inner, RowSampler) and inner.epoch == epoch + 1:
            inner.set_epoch(epoch)


class CoalescingIterator(Iterator[list[int]]):
    """One pass over a `CoalescingBatchSampler`, or over what is left of it. Draws nothing before the first batch."""

    def __init__(self, sampler: CoalescingBatchSampler) -> None:
        self._sampler = sampler
        self._given: _Place | None = None
        self._inner: InnerRows | None = None
        self._begun = False
        self._exhausted = False
        self._place = _Place(inner=None)
        self._current: _Drawn | None = None
        self._following: _Drawn | None = None
        self._window: Window | None = None
        self._padded = 0

    def __next__(self) -> list[int]:
        if not self._begun:
            self._begin()
        batch = self._place.batch
        if self._current is None or batch >= self._current.stop:
            self._move(batch)
        if self._current is None:
            self._end()
            raise StopIteration
        rows = self._current.batches[batch - self._current.first]
        self._place = _Place(inner=self._current.inner, window_batch=self._current.first, batch=batch + 1)
        is_last = self._following is None and batch + 1 == self._current.stop
        return RowBatch(rows.tolist(), ordinal=batch, window=self._window, padded=self._padded if is_last else 0)

    def state_dict(self) -> dict[str, Any]:
        """Like the sampler's, but of this iterator whatever others do."""
        return self._sampler._state(self._where())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there. Raises like the sampler's."""
        self._given = self._sampler._place(state_dict)
        self._begun = self._exhausted = False
        self._inner = None

    def _where(self) -> _Place:
        if self._begun:
            return self._place
        if (place := self._given or self._sampler._loaded) is not None:
            return place
        inner = self._inner or self._open(None)
        state = inner.state()
        if state is not None and "iterator" in state:
            # Such an iterator may have drawn already: this is the one to go on with.
            self._inner = inner
        return _Place(inner=state)

    def _begin(self) -> None:
        self._begun = True
        self._current = self._following = None
        if self._given is not None and self._given.ended:
            self._place, self._exhausted = self._given, True
            return
        place = self._given or self._sampler._loaded
        self._sampler._loaded = None
        self._inner = self._open(place)
        fresh = place is None or place.ended
        self._place = _Place(inner=self._inner.state()) if fresh or place is None else place
        inner = self._sampler.sampler
        self._sampler._open_epoch = inner.epoch if isinstance(inner, RowSampler) else None
        self._sampler._iterator = self
        self._following = self._draw(self._place.window_batch)

    def _open(self, place: _Place | None) -> InnerRows:
        sampler = self._sampler.sampler
        if place is None:
            if self._inner is None:
                self._sampler._reopen_epoch()
            return self._inner or InnerRows(sampler)
        if not place.ended:
            return InnerRows(sampler, place.inner)
        if "iterator" in (place.inner or {}):
            # What its iterator leaves behind at the end decides the next epoch.
            last = InnerRows(sampler, place.inner)
            while len(last.take(self._sampler.batch_size)):
                pass
        return InnerRows(sampler)

    def _move(self, batch: int) -> None:
        """Make the window of ``batch`` the current one, and draw the one after it."""
        reached = self._place.window_batch if self._current is None else self._current.stop
        while self._current is None or batch >= self._current.stop:
            self._current = self._following
            if self._current is None:
                break
            reached = self._current.stop
            self._following = self._draw(reached)
        if self._current is None:
            if reached < batch and not self._place.ended:
                raise StateError(
                    f"the state is at batch {batch}, but {type(self._sampler.sampler).__name__} gave rows for only "
                    f"{reached}; load it with the data set and the sampler it was saved with"
                )
            return
        ahead = self._following
        following = None if ahead is None else Window(ahead.first, ahead.batches)
        self._window = Window(batch, self._current.batches[batch - self._current.first :], following)

    def _draw(self, first: int) -> _Drawn | None:
        """The window from batch ``first`` on, None behind the end."""
        if self._exhausted or self._inner is None:
            return None
        size, inner = self._sampler.batch_size, self._inner.state()
        rows = self._inner.take(self._sampler.window * size)
        if len(rows) < self._sampler.window * size:
            self._exhausted = True
            cut = len(rows) % size if self._sampler.drop_last else 0
            self._padded = 0 if cut else self._inner.num_padded
            rows = rows[: len(rows) - cut]
        batches = tuple(rows[at : at + size] for at in range(0, len(rows), size))
        return _Drawn(first=first, batches=batches, inner=inner) if batches else None

    def _end(self) -> None:
        if not self._place.ended:
            self._place = replace(self._place, ended=True)
            if self._sampler._iterator is self:
                self._sampler._open_epoch = None
