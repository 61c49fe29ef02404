"""The engine behind every iterable front: announced batches, read ahead by the data set's own prefetcher.

A `Stream` is one rank's batches, epoch after epoch, in an order that follows from (seed, epoch, rows). A
`StreamIterator` takes those that fall to one worker and asks the data set for them, each with the window it belongs
to; what is read ahead, and how, is the data set's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.utils.data import get_worker_info

from td_datapipes.collate import register_collate
from td_datapipes.epochs import EpochBoard, Round
from td_datapipes.errors import ConfigurationError, StateError
from td_datapipes.passes import RowSource, StreamIterator, StreamOptions, WorkerShare
from td_datapipes.samplers.base import PositionSampler
from td_datapipes.samplers.batch import RowBatch
from td_datapipes.samplers.states import Position, read_integer
from td_datapipes.shares import Cursor

__all__ = ["RowSource", "Stream", "StreamIterator", "StreamOptions", "WorkerShare"]

# Whoever has one of these may give its rows to torch's loaders. Not with the package: that would import torch.
register_collate()


class Stream:
    """One rank's batches, epoch after epoch.

    Args:
        source: gives the rows; owned from here on.
        sampler: the order. Its own epoch and place are not used.
        options: what is given out, and until when.
    """

    def __init__(self, source: RowSource, sampler: PositionSampler[RowBatch], options: StreamOptions) -> None:
        self.source, self.sampler, self.options = source, sampler, options
        self.board = EpochBoard()
        self._latest: StreamIterator | None = None
        # A pass that was restored and that nobody has asked for yet.
        self._prepared: StreamIterator | None = None
        self._num_opened = 0

    def open(self, share: WorkerShare | None = None, loader_seed: int | None = None) -> StreamIterator:
        """A pass over the next epoch, or what is left of it.

        Args:
            share: which batches; by default those of this worker process.
            loader_seed: what a loader gave its pipes for this iteration, the same in all its workers.
        """
        prepared = self._prepared
        if prepared is None or get_worker_info() is not None or prepared.is_at_end:
            self._prepared = (
                None  # else it is kept until its first batch is asked for: loaders open more than they read
            )
        if prepared is not None and not prepared.is_from_here:
            if prepared.position.batch and prepared.row:
                raise StateError(
                    "a place within a batch of rows given one by one was loaded before the workers were started; load "
                    "it into the loader, or give batch_size to the stream instead of to the loader"
                )
            self._prepared = prepared = None
        self._latest = prepared or self._make(share, loader_seed)
        return self._latest

    def _make(self, share: WorkerShare | None, loader_seed: int | None) -> StreamIterator:
        self._num_opened += 1
        return StreamIterator(self, self._identify(share, loader_seed))

    def _identify(self, share: WorkerShare | None, loader_seed: int | None) -> WorkerShare:
        info = get_worker_info()
        if info is None:
            return share or WorkerShare()
        share = share or WorkerShare(worker=info.id, num_workers=info.num_workers)
        # The base seed is drawn by the loader for its workers; persistent ones keep it, and iterate equally often.
        turn = self._num_opened if loader_seed is None else loader_seed
        round_ = Round(id=f"{info.seed - info.id}.{turn}", worker=info.id, num_workers=info.num_workers)
        return replace(share, round=round_)

    def __len__(self) -> int:
        return self.length(WorkerShare())

    def length(self, share: WorkerShare) -> int:
        """Items of an epoch: batches, or rows where they are given one by one.

        Raises:
            TypeError: it follows its data set, so nobody knows.
        """
        if self.options.follow:
            raise TypeError(f"a stream that follows {self.source.name!r} has no length")
        _, parts = self.sampler.open_epoch(self._where())
        batches = range(share.worker, parts.num_batches, share.num_workers)
        if self.options.batched or not batches:
            return len(batches)
        last = len(parts.positions(batches[-1])[0])
        return (len(batches) - 1) * self.sampler.batch_size + last

    def _where(self) -> Position:
        latest = self._prepared or self._latest
        if latest is not None and latest.is_running:
            return latest.position
        return self.board.peek(len(self.source))

    @property
    def epoch(self) -> int:
        """The epoch that is running, or that the next pass runs."""
        return self._where().epoch

    def set_epoch(self, epoch: int) -> None:
        """The next pass runs `epoch`, in running workers too. A place loaded within it is kept, any other dropped."""
        if not isinstance(epoch, int) or isinstance(epoch, bool) or epoch < 0:
            raise ConfigurationError(f"epoch must be an integer >= 0, got {epoch!r}")
        if self._latest is not None and self._latest.position.epoch != epoch:
            self._latest = None
        if self._prepared is not None and self._prepared.position.epoch != epoch:
            self._prepared = None
        self.board.set_epoch(epoch)

    def state_dict(self, share: WorkerShare | None = None, loader_seed: int | None = None) -> dict[str, int | str]:
        """Where the latest pass of this process stands, or where the next one begins.

        Args:
            share, loader_seed: of the pass that is running, or is going to; see `open`.
        """
        if loader_seed is not None and get_worker_info() is not None:
            # Pipes in between open a pass with their first item, but a worker is asked for its place before.
            wanted = self._identify(share, loader_seed)
            if all(known is None or known.share != wanted for known in (self._prepared, self._latest)):
                self._prepared = self._make(share, loader_seed)
        latest = self._prepared or self._latest
        if latest is not None and latest.is_current:
            return latest.state_dict()
        return self.state_at(self.board.peek(len(self.source)), WorkerShare(), 0)

    def load_state_dict(
        self, state: Mapping[str, Any], share: WorkerShare | None = None, loader_seed: int | None = None
    ) -> None:
        """The next pass goes on from there, once.

        Args:
            state: what `state_dict` gave.
            share, loader_seed: of that pass; see `open`.

        Raises:
            StateError: a place in another order, batch size, number of ranks or of workers; both are named.
        """
        latest = self._latest
        if latest is not None and latest.is_unused and latest.state_dict() == dict(state):
            return  # the loader restores a pass that it got from here already
        # A worker's loader restores the same pass more than once; only what it makes anew takes part in a round anew.
        wanted = self._identify(share, loader_seed)
        unused = [known for known in (self._prepared, latest) if known is not None and known.is_unused]
        again = next((known for known in unused if known.share == wanted and wanted.round is not None), None)
        self._latest = None
        self._prepared = again or self._make(share, loader_seed)
        self._prepared.load_state_dict(state)
        if get_worker_info() is None and not self._prepared.is_at_end:
            # For workers that are started later; a pass in this process takes it back.
            self.board.restore(self._prepared.position)

    def begun(self, iterator: StreamIterator) -> None:
        """A pass has been asked for its first batch; if it was restored, that place is used up."""
        if iterator is self._prepared:
            self._prepared = None
            self.board.take_back(iterator.position)

    def discard_if_at_end(self) -> None:
        """Forget a restored pass that has nothing left to give, so that the next one is of the next epoch."""
        if self._prepared is not None and self._prepared.is_at_end:
            self._prepared = None

    def load_cursor(self, cursor: Cursor | Mapping[str, Any]) -> None:
        """The next pass gives this rank's part of what is left of the cursor's epoch, for any number of workers.

        Raises:
            StateError: a place in another order; both are named.
        """
        position = self.sampler.position_of(cursor)
        self.sampler.seed = cursor.seed if isinstance(cursor, Cursor) else int(cursor["seed"])
        self._prepared = self._latest = None
        self.board.restore(position)

    def cursor_of(self, states: Sequence[Mapping[str, Any]]) -> Cursor:
        """The elastic cursor of a consumer who takes its workers' batches in turn, from the workers' states.

        Raises:
            StateError: rows are given one by one, or a worker's state is missing.
        """
        if any(read_integer(state, "row") for state in states) or not self.options.batched:
            raise StateError(
                "rows given one by one have no place that other numbers of ranks or workers share; give batch_size to "
                "the stream instead of to the loader"
            )
        workers = sorted((read_integer(state, "worker"), read_integer(state, "num_workers")) for state in states)
        if not states or workers != [(number, len(states)) for number in range(len(states))]:
            raise StateError(f"the states of all workers of one loader are needed, got those of {workers}")
        # In turn: the consumer's next batch is the earliest that any worker has still to give.
        return self.sampler.cursor(min(states, key=lambda state: read_integer(state, "batch")))

    def state_at(self, position: Position, share: WorkerShare, row: int) -> dict[str, int | str]:
        """A place as it is saved: always a new dictionary of integers and strings."""
        state = self.sampler.state_at(position)
        return {**state, "row": row, "worker": share.worker, "num_workers": share.num_workers}

    def place_of(self, state: Mapping[str, Any], share: WorkerShare) -> tuple[Position, int]:
        """The inverse of `state_at`; the seed is taken over from the state."""
        position = self.sampler.position_at(state)
        worker, num_workers = read_integer(state, "worker"), read_integer(state, "num_workers")
        if (worker, num_workers) != (share.worker, share.num_workers):
            raise StateError(
                f"the state is of worker {worker} of {num_workers}, this is worker {share.worker} of "
                f"{share.num_workers}: load it with as many workers as it was saved with, or save "
                "cursor_of(loader.state_dict()) and load it with load_cursor() to go on with another number"
            )
        self.sampler.seed = read_integer(state, "seed")
        return position, read_integer(state, "row")

    def close(self) -> None:
        """Drop the connections. Reading again dials anew."""
        self.source.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_latest": None}
