"""One worker's pass over an epoch of a stream: takes its batches in turn, and knows its place at every moment.

A place is a few integers, counts what the consumer got, and is reached at once.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from tensordict import TensorDict
from torch.utils.data import get_worker_info

from td_datapipes.dealing import deal_batch
from td_datapipes.epochs import EpochBoard, Round
from td_datapipes.samplers.base import Dealer, PositionSampler
from td_datapipes.samplers.batch import RowBatch
from td_datapipes.samplers.states import Position

__all__ = ["PassOwner", "RowSource", "StreamIterator", "StreamOptions", "WorkerShare"]


class RowSource(Protocol):
    """What a stream reads from: `RedisTDDataset`, several joined, a mixture."""

    @property
    def name(self) -> str: ...
    @property
    def complete(self) -> bool: ...
    def __len__(self) -> int: ...
    def __getitems__(self, rows: Sequence[int]) -> TensorDict: ...
    def refresh(self) -> int: ...
    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """What of a stream does not depend on its order.

    Attributes:
        batched: give whole batches, else their rows one by one.
        mark_padding: name of a bool field that is added to each batch: true for a row that repeats another so that
            all ranks get as many.
        follow: go on with rows appended while streaming.
        timeout_seconds: when following, end when nothing was appended for so long; None never does.
        poll_seconds: when following, from one look at the data set to the next.
    """

    batched: bool
    mark_padding: str | None = None
    follow: bool = False
    timeout_seconds: float | None = None
    poll_seconds: float = 0.1


@dataclass(frozen=True, kw_only=True)
class WorkerShare:
    """Which of a rank's batches an iterator takes: each `num_workers`-th.

    Attributes:
        worker: this one, of `num_workers`.
        num_workers: among how many they are dealt.
        round: the loader's iteration and the process that takes part in it, which may be one of several that take the
            same batches; None without worker processes.
    """

    worker: int = 0
    num_workers: int = 1
    round: Round | None = None


class PassOwner(Protocol):
    """What a pass asks of its stream: the order, and what is agreed on with other passes."""

    @property
    def source(self) -> RowSource: ...
    @property
    def sampler(self) -> PositionSampler[RowBatch]: ...
    @property
    def options(self) -> StreamOptions: ...
    @property
    def board(self) -> EpochBoard: ...
    def begun(self, iterator: StreamIterator) -> None: ...
    def state_at(self, position: Position, share: WorkerShare, row: int) -> dict[str, int | str]: ...
    def place_of(self, state: Mapping[str, Any], share: WorkerShare) -> tuple[Position, int]: ...


class StreamIterator(Iterator[TensorDict]):
    """One worker's pass over an epoch, or over what is left of it."""

    def __init__(self, stream: PassOwner, share: WorkerShare) -> None:
        self._stream, self._share = stream, share
        self._begun_at: Position | None = None
        self._pid = os.getpid()
        if share.round is not None:
            # Before anything is asked for: workers that begin later must not find the epoch ended already.
            self._begun_at = stream.board.begin(len(stream.source), share.round)
        self._next = 0 if self._begun_at is None else self._begun_at.batch + share.worker
        self._num_batches = 0
        self._dealer: Dealer[RowBatch] | None = None
        self._rows: deque[TensorDict] = deque()
        self._row = 0
        self._ended = False

    # What a loader asks for.

    def __next__(self) -> TensorDict:
        if self._dealer is None:
            self._begin()
            self._stream.begun(self)
        if self._rows:
            return self._next_row()
        if not self._has_batch():
            self._end()
            raise StopIteration
        assert self._dealer is not None  # For the type checker: _begin has set it.
        batch = self._read(self._dealer.deal(self._next))
        if self._stream.options.batched:
            self._next += self._share.num_workers
            return batch
        self._rows.extend(batch.unbind(0)[self._row :])
        return self._next_row() if self._rows else self._skip_empty()

    def state_dict(self) -> dict[str, int | str]:
        """Where it stands, counting what it gave; at the end it stays there."""
        return self._stream.state_at(self.position, self._share, self._row)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there.

        Raises:
            StateError: see `Stream.load_state_dict`.
        """
        stream, share = self._stream, self._share
        position, self._row = stream.place_of(state, share)
        self._begun_at, self._next = position, position.batch
        self._dealer, self._ended = None, False
        self._rows.clear()
        stream.board.adopt(replace(position, batch=0), share.round)
        if self.is_at_end:
            self._finish()

    @property
    def position(self) -> Position:
        """Where it stands, or where it would begin; `batch` is the next one of this worker."""
        if self._begun_at is None:
            return self._stream.board.peek(len(self._stream.source))
        return replace(self._begun_at, batch=self._next)

    @property
    def is_running(self) -> bool:
        """Whether it has taken up a place and is not exhausted."""
        return self._begun_at is not None and not self._ended

    @property
    def share(self) -> WorkerShare:
        """Which batches it takes, in which round."""
        return self._share

    @property
    def row(self) -> int:
        """Rows given of the next batch, where they are given one by one."""
        return self._row

    @property
    def is_at_end(self) -> bool:
        """Whether it has nothing left to give of what is known of its epoch."""
        if self._stream.options.follow:
            return False
        position = self.position
        return position.batch >= self._stream.sampler.open_epoch(position)[1].num_batches

    @property
    def is_unused(self) -> bool:
        """Whether it has a place, in this process, and was not asked for anything yet."""
        return self._begun_at is not None and self._dealer is None and self.is_from_here

    @property
    def is_from_here(self) -> bool:
        """Whether it was made in this very process."""
        return self._pid == os.getpid()

    @property
    def is_current(self) -> bool:
        """Whether its place is the stream's: it has begun, or was loaded."""
        return self._begun_at is not None

    # How it goes on.

    def _begin(self) -> None:
        if self._begun_at is None:
            self._begun_at = self._stream.board.begin(len(self._stream.source))
            self._next = self._begun_at.batch + self._share.worker
        if self._begun_at.rows > len(self._stream.source):
            self._stream.source.refresh()  # another process has seen more rows already
        if self._stream.options.follow:
            self._open_published(self._begun_at.rows)
        else:
            self._open(self._begun_at)

    def _open(self, position: Position) -> None:
        self._begun_at = position
        self._dealer, share = self._stream.sampler.open_epoch(position)
        self._num_batches = share.num_batches

    def _open_published(self, rows: int) -> None:
        """When following: those of so many rows that fill batches of all ranks."""
        assert self._begun_at is not None  # For the type checker.
        rest = (rows - self._begun_at.start) % self._global_batch_rows
        self._open(replace(self._begun_at, rows=rows - rest))

    @property
    def _global_batch_rows(self) -> int:
        return self._stream.sampler.batch_size * self._stream.sampler.world_size

    def _has_batch(self) -> bool:
        if self._next < self._num_batches and not self._stream.options.follow:
            return True
        return self._stream.options.follow and self._wait_for_rows()

    def _wait_for_rows(self) -> bool:
        """When following: whether there is a next batch. Waits until it is published, or clear that it will not be."""
        assert self._begun_at is not None  # For the type checker.
        source, options, parent = self._stream.source, self._stream.options, os.getppid()
        needed = self._begun_at.start + (self._next + 1) * self._global_batch_rows
        known, grown = len(source), time.monotonic()
        while known < needed:
            # A worker whose loader is gone must not wait for rows on its own.
            if source.complete or os.getppid() != parent:
                return self._take_rest(known)
            before, known = known, source.refresh()
            if known > before:
                grown = time.monotonic()
            elif not source.complete:
                left = (
                    math.inf if options.timeout_seconds is None else grown + options.timeout_seconds - time.monotonic()
                )
                if left <= 0:
                    return self._take_rest(known)
                time.sleep(min(left, options.poll_seconds))
        if self._begun_at.rows < needed:
            self._open_published(known)
        return True

    def _take_rest(self, rows: int) -> bool:
        """When following, at the end: whether rows are left for this worker."""
        assert self._begun_at is not None  # For the type checker.
        if self._begun_at.rows != rows:
            self._open(replace(self._begun_at, rows=rows))
        return self._next < self._num_batches

    def _read(self, rows: RowBatch) -> TensorDict:
        info = get_worker_info()
        expected = 1 if info is None else info.num_workers
        batch = self._stream.source.__getitems__(deal_batch(rows, step=self._share.num_workers, expected=expected))
        mark = self._stream.options.mark_padding
        if mark is not None:
            flags = torch.zeros(len(rows), dtype=torch.bool)
            flags[len(rows) - rows.padded :] = True
            batch = batch.copy()
            batch[mark] = flags.view(-1, *[1] * (batch.batch_dims - 1)).expand(batch.batch_size)
        return batch

    def _next_row(self) -> TensorDict:
        self._row += 1
        row = self._rows.popleft()
        if not self._rows:
            self._row = 0
            self._next += self._share.num_workers
        return row

    def _skip_empty(self) -> TensorDict:
        self._row = 0
        self._next += self._share.num_workers
        return next(self)

    def _end(self) -> None:
        if not self._ended:
            self._finish()
        self._ended = True

    def _finish(self) -> None:
        """The epoch is over for this worker."""
        assert self._begun_at is not None  # For the type checker.
        self._stream.board.end(self._begun_at.epoch, self._share.round)
