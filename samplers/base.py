"""What all samplers with an order of their own share: epochs, positions, state, elastic cursors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sized
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

from torch.utils.data import Sampler

from td_datapipes.errors import ConfigurationError, StateError
from td_datapipes.shares import Cursor, Share

from .loading import refuse_other_workers
from .ranks import resolve_ranks
from .states import STATE_VERSION, Position, find_sampler_state, read_integer, read_string, require_version

__all__ = ["Dealer", "PositionIterator", "PositionSampler", "check_positive"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Dealer(Protocol[T_co]):
    """Makes one epoch's items, by number."""

    def deal(self, batch: int) -> T_co:
        """Item ``batch`` of this rank. Asked in rising order."""
        ...


class PositionSampler(Sampler[T], ABC, Generic[T]):
    """A sampler whose items follow from (seed, epoch, rows) and a number: it stores a place, never what it drew.

    A place is consumed when the first item after loading is drawn, not by ``iter()``: loaders call ``iter()`` more
    often than they iterate. The epoch advances when an iterator is exhausted; `set_epoch` overrides.

    Args:
        data_source: has a length; read anew at the start of each epoch.
        seed: >= 0.
        batch_size: positions of the order that a rank takes at a time.
        drop_last: leave out a last global batch that is not full, else divide and pad it.
        rank, world_size: this process among how many; by default the default process group's, else 0 of 1.
    """

    def __init__(
        self,
        data_source: Sized,
        *,
        seed: int,
        batch_size: int,
        drop_last: bool,
        rank: int | None,
        world_size: int | None,
    ) -> None:
        check_positive(batch_size=batch_size)
        if not isinstance(seed, int) or not 0 <= seed < 1 << 64:
            raise ConfigurationError(f"seed must be an integer in [0, 2**64), got {seed!r}")
        self.data_source = data_source
        self.seed = seed
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.rank, self.world_size = resolve_ranks(rank, world_size)
        self._epoch = 0
        # A place that was loaded and that no iterator has taken up yet.
        self._loaded: Position | None = None
        self._iterator: PositionIterator[T] | None = None

    # What a subclass says about its order.

    @abstractmethod
    def _dealer(self, position: Position, share: Share) -> Dealer[T]:
        """Makes the items of ``position``'s epoch."""

    @abstractmethod
    def _fingerprint(self, rows: int) -> str:
        """Which order it is over ``rows`` rows; see `td_datapipes.order.fingerprint`."""

    def _length(self, rows: int) -> int:
        """Positions of an epoch's order over ``rows`` rows."""
        return rows

    def _position_rows(self) -> int:
        """Rows that one position of the order stands for."""
        return 1

    # Epochs.

    @property
    def epoch(self) -> int:
        """The epoch that is running, or that the next iterator runs."""
        return self._where().epoch

    def set_epoch(self, epoch: int) -> None:
        """The next iterator runs ``epoch``. A place loaded within that same epoch is kept, any other is dropped."""
        if not isinstance(epoch, int) or epoch < 0:
            raise ConfigurationError(f"epoch must be an integer >= 0, got {epoch!r}")
        if self._loaded is not None and self._loaded.epoch != epoch:
            self._loaded = None
        if self._iterator is not None and self._iterator.position.epoch != epoch:
            self._iterator = None
        self._epoch = epoch

    def __iter__(self) -> PositionIterator[T]:
        refuse_other_workers()
        self._iterator = PositionIterator(self)
        return self._iterator

    def __len__(self) -> int:
        """Items of this rank in the running epoch; the same for all ranks."""
        return self._share(self._where()).num_batches

    # State.

    def state_dict(self) -> dict[str, int | str]:
        """Where the latest iterator stands: a few integers and a string, counting the items it handed out."""
        return self._state(self._where())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """The next iterator goes on from there, once; a seed other than the sampler's own is taken over.

        Raises:
            StateError: the state is of another order, batch size or number of ranks; both are named.
        """
        self._loaded = self._position(state_dict)
        self.seed = read_integer(state_dict, "seed")
        self._epoch = self._loaded.epoch

    def cursor(self, state: Mapping[str, Any] | None = None) -> Cursor:
        """The place of ``state`` (by default: where it stands now) for any number of ranks, workers or batch size.

        Every rank's is the same, if all have taken as many batches. While a loader with workers runs, this sampler is
        ahead of the consumer: use `cursor_of` with the loader's state.
        """
        return self._cursor(self.state_dict() if state is None else state, later_batches=0)

    def cursor_of(self, loader_state: Mapping[str, Any]) -> Cursor:
        """The place of the consumer of a StatefulDataLoader, from its ``state_dict()``; of any number of ranks.

        Raises:
            StateError: the loader's state has none of this sampler.
        """
        found = find_sampler_state(loader_state)
        cursor = self._cursor(found.state, later_batches=found.later_batches)
        return replace(cursor, epoch=cursor.epoch + 1, rows_consumed=0) if found.finished else cursor

    def load_cursor(self, cursor: Cursor | Mapping[str, Any]) -> None:
        """The next iterator hands out this rank's part of what is left of the cursor's epoch; ordinals start at 0.

        Raises:
            StateError: the cursor is of another order; both are named.
        """
        if not isinstance(cursor, Cursor):
            cursor = Cursor.from_dict(dict(cursor))
        self._loaded = self.position_of(cursor)
        self.seed, self._epoch = cursor.seed, cursor.epoch

    # For readers that keep their own place and take an epoch's items out of turn.

    def open_epoch(self, position: Position) -> tuple[Dealer[T], Share]:
        """What deals the items of ``position``'s epoch by number, and which part of the epoch is this rank's."""
        share = self._share(position)
        return self._dealer(position, share), share

    def state_at(self, position: Position) -> dict[str, int | str]:
        """What `state_dict` would give at ``position``."""
        return self._state(position)

    def position_at(self, state: Mapping[str, Any]) -> Position:
        """The place that a state names, which may lie behind the epoch's end. Changes nothing.

        Raises:
            StateError: the state is of another order, batch size or number of ranks; both are named.
        """
        require_version(state, type(self).__name__)
        names = ("epoch", "rows", "start", "batch")
        position = Position(**{name: read_integer(state, name) for name in names})
        self._check_order(position.rows, read_string(state, "fingerprint"))
        for name in ("batch_size", "world_size"):
            if (saved := read_integer(state, name)) != getattr(self, name):
                raise StateError(
                    f"the state was saved with {name} {saved}, this sampler has {getattr(self, name)}; "
                    "save cursor() and load it with load_cursor() to go on with another"
                )
        return position

    def position_of(self, cursor: Cursor | Mapping[str, Any]) -> Position:
        """The place that an elastic cursor names. Raises as `load_cursor` does, and changes nothing."""
        if not isinstance(cursor, Cursor):
            cursor = Cursor.from_dict(dict(cursor))
        self._check_order(cursor.rows, cursor.fingerprint)
        start, rest = divmod(cursor.rows_consumed, self._position_rows())
        if rest or start > self._length(cursor.rows):
            raise StateError(
                f"the cursor has consumed {cursor.rows_consumed} rows, but an epoch of this order has "
                f"{self._length(cursor.rows)} times {self._position_rows()} rows"
            )
        return Position(epoch=cursor.epoch, rows=cursor.rows, start=start)

    # What iterators ask of it.

    def _claim(self) -> Position:
        """The place to begin at; a loaded one is given away once."""
        position = self._where_next()
        self._loaded = None
        return position

    def _forget(self, position: Position) -> None:
        """An iterator that was loaded itself has begun: the sampler's own copy of that place is used up."""
        if self._loaded is not None and self._loaded.epoch == position.epoch:
            self._loaded = None

    def _finish(self, position: Position) -> None:
        """An iterator is exhausted."""
        if self._epoch == position.epoch:
            self._epoch += 1

    def _share(self, position: Position) -> Share:
        return Share(
            length=self._length(position.rows),
            start=position.start,
            batch_size=self.batch_size,
            rank=self.rank,
            world_size=self.world_size,
            tail="drop" if self.drop_last else "pad",
        )

    def _where(self) -> Position:
        if self._loaded is None and self._iterator is not None and self._iterator.is_running:
            return self._iterator.position
        return self._where_next()

    def _where_next(self) -> Position:
        return self._loaded or Position(epoch=self._epoch, rows=len(self.data_source))

    def _state(self, position: Position) -> dict[str, int | str]:
        return {
            "version": STATE_VERSION,
            "seed": self.seed,
            "epoch": position.epoch,
            "rows": position.rows,
            "start": position.start,
            "batch": position.batch,
            "batch_size": self.batch_size,
            "world_size": self.world_size,
            "fingerprint": self._fingerprint(position.rows),
        }

    def _position(self, state: Mapping[str, Any]) -> Position:
        """The place that a state for this very sampler names, checked."""
        position = self.position_at(state)
        num_batches = self._share(position).num_batches
        if position.batch > max(num_batches, 0):
            raise StateError(f"the state is at batch {position.batch} of an epoch of {num_batches}")
        return position

    def _cursor(self, state: Mapping[str, Any], *, later_batches: int) -> Cursor:
        """Unlike `_position`, for a state of any number of ranks."""
        require_version(state, type(self).__name__)
        rows, stated = read_integer(state, "rows"), read_string(state, "fingerprint")
        self._check_order(rows, stated)
        share = Share(
            length=self._length(rows),
            start=read_integer(state, "start"),
            batch_size=read_integer(state, "batch_size"),
            world_size=read_integer(state, "world_size"),
        )
        consumed = share.consumed(read_integer(state, "batch") + later_batches)
        return Cursor(
            seed=read_integer(state, "seed"),
            epoch=read_integer(state, "epoch"),
            rows=rows,
            rows_consumed=consumed * self._position_rows(),
            fingerprint=stated,
        )

    def _check_order(self, rows: int, stated: str) -> None:
        """Equal orders, or the same data set with rows appended since, which the running epoch leaves alone."""
        now = len(self.data_source)
        appended = rows < now and isinstance(getattr(self.data_source, "fingerprint", None), str)
        if (rows != now and not appended) or stated != self._fingerprint(rows):
            raise StateError(
                f"the state is of {stated}, this sampler is {self._fingerprint(now)}; "
                "load it with the data set and the arguments it was saved with"
            )


class PositionIterator(Iterator[T]):
    """One pass over an epoch of a `PositionSampler`, or over what is left of it."""

    def __init__(self, sampler: PositionSampler[T]) -> None:
        self._sampler = sampler
        self._begun_at: Position | None = None
        self._dealer: Dealer[T] | None = None
        self._next_batch = 0
        self._num_batches = 0
        self._ended = False

    def __next__(self) -> T:
        if self._dealer is None:
            self._begin()
        if self._next_batch >= self._num_batches:
            self._end()
            raise StopIteration
        assert self._dealer is not None  # For the type checker: _begin has set it.
        item = self._dealer.deal(self._next_batch)
        self._next_batch += 1
        return item

    @property
    def position(self) -> Position:
        """Where it stands, or where it would begin."""
        if self._begun_at is None:
            return self._sampler._where_next()
        return replace(self._begun_at, batch=self._next_batch)

    @property
    def is_running(self) -> bool:
        """Whether it has taken up a place and is not exhausted."""
        return self._begun_at is not None and not self._ended

    def state_dict(self) -> dict[str, int | str]:
        """Like the sampler's, but of this iterator whatever others do; after the last item it stays at the end."""
        return self._sampler._state(self.position)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there. Raises like the sampler's."""
        self._begun_at = self._sampler._position(state_dict)
        self._next_batch = self._begun_at.batch
        self._dealer = None
        self._ended = False

    def _begin(self) -> None:
        if self._begun_at is None:
            self._begun_at = self._sampler._claim()
        else:
            self._sampler._forget(self._begun_at)
        self._sampler._iterator = self
        share = self._sampler._share(self._begun_at)
        self._next_batch = self._begun_at.batch
        self._num_batches = share.num_batches
        self._dealer = self._sampler._dealer(self._begun_at, share)

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._sampler._finish(self.position)


def check_positive(**values: int) -> None:
    """Refuse what is no integer above zero.

    Raises:
        ConfigurationError: names the argument and its value.
    """
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigurationError(f"{name} must be an integer of at least 1, got {value!r}")
