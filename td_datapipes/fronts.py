"""What the iterable fronts have in common: their arguments, and the stream that these make."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, TypedDict, cast

import numpy as np
from numpy.typing import NDArray

from td_datapipes.datasets import DEFAULT_PREFETCH_BYTES, RedisTDDataset
from td_datapipes.errors import ConfigurationError, StateError
from td_datapipes.heap_batch import Ragged, Strings
from td_datapipes.joined import JoinedRows
from td_datapipes.mixture import RedisTDMixture
from td_datapipes.plan import Strategy
from td_datapipes.samplers.base import PositionSampler, check_positive
from td_datapipes.samplers.batch import RowBatch
from td_datapipes.samplers.block_shuffle import BUFFER_BYTES, BlockShuffleBatchSampler
from td_datapipes.samplers.states import Position
from td_datapipes.samplers.windows import OrderedBatches, WindowDealer
from td_datapipes.shares import Cursor, Share, fingerprint
from td_datapipes.streaming import Stream, StreamOptions
from td_datapipes.wire.reader import ReadStats

__all__ = ["InOrderBatchSampler", "StreamArguments", "StreamFront", "make_stream"]

DEFAULT_READ_ROWS = 256
WINDOW_BYTES = 16 << 20
"""Announced together where rows come in order."""
DEFAULT_TIMEOUT_SECONDS = 30.0
DEFAULT_POLL_SECONDS = 0.1

Urls = str | Sequence[str]


class StreamArguments(TypedDict, total=False):
    """Further arguments of every iterable front.

    Attributes:
        fields, strategy, strided, pin_memory, prefetch_bytes, allow_pickle: as for `RedisTDDataset`.
        ragged, pad_value, max_length, strings: as for `RedisTDDataset`.
        rank, world_size: this process among how many.
        read_rows: rows read at a time, and dealt to a worker at a time, where they are given one by one; 256. Make it
            a multiple of the loader's batch size, and no more than one batch over all workers comes short.
        mark_padding: name of a bool field added to each batch, true for a row that repeats another so that all ranks
            get as many.
        follow: go on with rows that are appended while streaming. Not with ``shuffle``.
        timeout_seconds: with `follow`, end where nothing was appended for so long; 30, or None to wait for ever.
        poll_seconds: with `follow`, how often to look; 0.1.
        block_rows, buffer_blocks, buffer_bytes: with `shuffle`, as for `BlockShuffleBatchSampler`.
    """

    fields: Sequence[str | tuple[str, ...]] | None
    strategy: Strategy
    strided: bool
    pin_memory: bool
    prefetch_bytes: int
    ragged: Ragged
    pad_value: float
    max_length: int | None
    strings: Strings
    allow_pickle: bool
    rank: int | None
    world_size: int | None
    read_rows: int
    mark_padding: str | None
    follow: bool
    timeout_seconds: float | None
    poll_seconds: float
    block_rows: int | None
    buffer_blocks: int | None
    buffer_bytes: int


class InOrderBatchSampler(PositionSampler[RowBatch]):
    """Batches of rows as they are stored. Rank r takes the r-th part of each global batch.

    Args:
        data_source: has a length, and perhaps ``row_bytes``.
        batch_size: rows of this rank's batch.
        drop_last: leave out a last global batch that is not full, else divide and pad it.
        window: batches announced together.
        rank, world_size: by default the default process group's, else 0 of 1.
    """

    def __init__(
        self,
        data_source: Sized,
        batch_size: int,
        *,
        drop_last: bool,
        window: int,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        super().__init__(
            data_source, seed=0, batch_size=batch_size, drop_last=drop_last, rank=rank, world_size=world_size
        )
        check_positive(window=window)
        self.window = window

    def _fingerprint(self, rows: int) -> str:
        return fingerprint("InOrderBatchSampler", self.data_source, rows)

    def _dealer(self, position: Position, share: Share) -> WindowDealer:
        window = self.window
        batches = OrderedBatches(_InOrder(position.rows), share)
        return WindowDealer(batches, lambda batch: (batch // window + 1) * window, lazy=True)


@dataclass(frozen=True)
class _InOrder:
    """Positions are rows; padding wraps around."""

    rows: int

    def permute(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return positions


@dataclass(frozen=True)
class _Order:
    """Makes the sampler of a stream, again where a loader turns shuffling on or off."""

    batch_size: int
    seed: int
    drop_last: bool
    arguments: Mapping[str, Any]

    def sampler(self, source: Any, shuffle: bool) -> PositionSampler[RowBatch]:
        ranks: dict[str, Any] = {name: self.arguments.get(name) for name in ("rank", "world_size")}
        if isinstance(source, RedisTDMixture):
            buffer_bytes = self.arguments.get("buffer_bytes", BUFFER_BYTES)
            return source.batch_sampler(
                self.batch_size, shuffle=shuffle, drop_last=self.drop_last, buffer_bytes=buffer_bytes, **ranks
            )
        if shuffle:
            chosen = ("block_rows", "buffer_blocks", "buffer_bytes")
            blocks: dict[str, Any] = {name: self.arguments[name] for name in chosen if name in self.arguments}
            return BlockShuffleBatchSampler(
                source, self.batch_size, seed=self.seed, drop_last=self.drop_last, **blocks, **ranks
            )
        window = max(WINDOW_BYTES // max(self.batch_size * source.row_bytes, 1), 2)
        return InOrderBatchSampler(source, self.batch_size, drop_last=self.drop_last, window=window, **ranks)


def make_stream(
    urls: Urls | RedisTDMixture,
    *,
    batch_size: int | None,
    shuffle: bool,
    seed: int,
    drop_last: bool,
    arguments: Mapping[str, Any],
) -> tuple[Stream, Callable[[Any, bool], PositionSampler[RowBatch]]]:
    """Open what is streamed; the stream, and what makes its sampler anew for (source, shuffle).

    Raises:
        ConfigurationError: arguments that cannot work, or contradict each other; the message says which.
        TDDatapipesError: as `RedisTDDataset`.
    """
    _check(urls, batch_size, shuffle=shuffle, drop_last=drop_last, arguments=arguments)
    rows = arguments.get("read_rows", DEFAULT_READ_ROWS) if batch_size is None else batch_size
    options = StreamOptions(
        batched=batch_size is not None,
        mark_padding=arguments.get("mark_padding"),
        follow=arguments.get("follow", False),
        timeout_seconds=arguments.get("timeout_seconds", DEFAULT_TIMEOUT_SECONDS),
        poll_seconds=arguments.get("poll_seconds", DEFAULT_POLL_SECONDS),
    )
    order = _Order(rows, seed, drop_last, dict(arguments))
    source = urls if isinstance(urls, RedisTDMixture) else _open(urls, arguments)
    try:
        mark = options.mark_padding
        if mark is not None and any(key[0] == mark for key in source.schema.fields):
            raise ConfigurationError(
                f"mark_padding={mark!r} is a field of {source.name!r} already; choose another name"
            )
        return Stream(source, order.sampler(source, shuffle), options), order.sampler
    except BaseException:
        source.close()
        raise


def _check(
    urls: Urls | RedisTDMixture,
    batch_size: int | None,
    *,
    shuffle: bool,
    drop_last: bool,
    arguments: Mapping[str, Any],
) -> None:
    unknown = sorted(set(arguments) - set(StreamArguments.__annotations__))
    if unknown:
        raise TypeError(f"unexpected argument {unknown[0]!r}; there are {', '.join(StreamArguments.__annotations__)}")
    check_positive(
        batch_size=1 if batch_size is None else batch_size, read_rows=arguments.get("read_rows", DEFAULT_READ_ROWS)
    )
    if batch_size is None and drop_last:
        raise ConfigurationError("drop_last=True needs a batch_size; where the loader makes the batches, give it there")
    follow = arguments.get("follow", False)
    if follow and shuffle:
        raise ConfigurationError(
            "follow=True gives rows as they are published: it cannot be combined with shuffle=True"
        )
    if follow and isinstance(urls, RedisTDMixture):
        raise ConfigurationError("a mixture is pinned to the rows its sources had: it cannot be followed")
    for name in ("timeout_seconds", "poll_seconds"):
        if name not in arguments:
            continue
        if not follow:
            raise ConfigurationError(f"{name} is about waiting for rows: it needs follow=True")
        seconds = arguments[name]
        endless = seconds is None and name == "timeout_seconds"
        if not endless and (not isinstance(seconds, int | float) or not seconds >= 0):
            raise ConfigurationError(f"{name} must be a number of seconds >= 0, got {seconds!r}")


def _open(urls: Urls, arguments: Mapping[str, Any]) -> RedisTDDataset | JoinedRows:
    names = ["fields", "strategy", "strided", "pin_memory", "prefetch_bytes", "allow_pickle"]
    names += ["ragged", "pad_value", "max_length", "strings"]
    chosen = {name: arguments[name] for name in names if name in arguments}
    if isinstance(urls, str):
        return RedisTDDataset(urls, **chosen)
    limit = chosen.pop("prefetch_bytes", DEFAULT_PREFETCH_BYTES)
    opened: list[RedisTDDataset] = []
    try:
        for url in urls:
            opened.append(RedisTDDataset(url, prefetch_bytes=limit // len(urls), **chosen))
        return JoinedRows(opened)
    except BaseException:
        for dataset in opened:
            dataset.close()
        raise


class StreamFront:
    """What `RedisTDIterDataPipe` and `RedisTDIterableDataset` can both be asked."""

    _stream: Stream

    @property
    def source(self) -> RedisTDDataset | JoinedRows:
        """The data set, or data sets, that it reads: names, schema, url."""
        return cast(RedisTDDataset, self._stream.source)

    @property
    def epoch(self) -> int:
        """The epoch that is running, or that the next pass runs."""
        return self._stream.epoch

    def set_epoch(self, epoch: int) -> None:
        """The next pass runs `epoch`, also in worker processes that are running. It advances by itself otherwise."""
        self._stream.set_epoch(epoch)

    def cursor_of(self, loader_state: Mapping[str, Any]) -> Cursor:
        """The place of the consumer of a StatefulDataLoader, for any number of workers or ranks.

        Args:
            loader_state: the loader's ``state_dict()``, with or without workers; or this object's own.

        Raises:
            StateError: rows are given one by one, or there is no place of such a stream in the state.
        """
        states = _find_states(loader_state)
        if not states:
            raise StateError(
                f"no place of a stream in a state with the keys {sorted(loader_state)}; pass the state_dict() of a "
                "StatefulDataLoader that was given this data set"
            )
        cursor = self._stream.cursor_of(states)
        if later := int(loader_state.get("_steps_since_snapshot", 0)):
            batch = min(int(state["batch"]) for state in states)
            ahead = [{**state, "batch": max(int(state["batch"]), batch + later)} for state in states]
            cursor = self._stream.cursor_of(ahead)
        if loader_state.get("_iterator_finished"):
            cursor = Cursor.from_dict({**cursor.to_dict(), "epoch": cursor.epoch + 1, "rows_consumed": 0})
        return cursor

    def load_cursor(self, cursor: Cursor | Mapping[str, Any]) -> None:
        """The next pass gives this rank's part of what is left of the cursor's epoch, once, then whole epochs.

        Raises:
            StateError: the cursor is of another order; both are named.
        """
        self._stream.load_cursor(cursor)

    @property
    def stats(self) -> ReadStats:
        """What was read in this process so far."""
        return self.source.stats

    def close(self) -> None:
        """Drop the connections. Reading again dials anew."""
        self._stream.close()


def _find_states(state: Any) -> list[Mapping[str, Any]]:
    """The places of a stream's workers within a loader's state, one a worker."""
    if not isinstance(state, Mapping):
        return []
    if "fingerprint" in state and "num_workers" in state:
        return [state]
    if "_snapshot" in state:
        workers = state["_snapshot"].get("_worker_snapshots", {})
        return [found for worker in workers.values() for found in _find_states(worker)]
    for value in _by_preference(state):
        if found := _find_states(value):
            return found
    return []


def _by_preference(state: Mapping[str, Any]) -> Iterator[Any]:
    """The iterator's state before that of the data set it was made from."""
    yield state.get("fetcher_state")
    yield from state.values()
