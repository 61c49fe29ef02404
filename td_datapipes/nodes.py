"""`RedisTDReader`: a data set, several, or a mixture as the source of a `torchdata.nodes` pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack, cast

from tensordict import TensorDict
from torchdata.nodes import BaseNode

from td_datapipes.datasets import RedisTDDataset
from td_datapipes.errors import ConfigurationError
from td_datapipes.fronts import StreamArguments, Urls, make_stream
from td_datapipes.joined import JoinedRows
from td_datapipes.mixture import RedisTDMixture
from td_datapipes.shares import Cursor
from td_datapipes.streaming import StreamIterator, WorkerShare
from td_datapipes.wire.reader import ReadStats

__all__ = ["RedisTDReader"]


class RedisTDReader(BaseNode[TensorDict]):  # type: ignore[misc]
    """Gives the rows of a data set, batch by batch or one by one, to the nodes behind it.

        node = RedisTDReader(url, batch_size=256, shuffle=True)
        loader = Loader(ParallelMapper(node, augment, num_workers=2))

    As with torchdata's own sources, each ``reset()`` after something was asked for begins the next epoch;
    ``reset(state)`` goes on from a state of `get_state`, at once. The state is a few integers and counts what was
    handed on. What the node reads ahead, by the data set's background thread, needs no `Prefetcher` behind it.

    Args:
        source: URLs as for `RedisTDIterableDataset`, or a `RedisTDMixture`, whose shares are kept then.
        batch_size, shuffle, drop_last: as for `RedisTDIterableDataset`.
        seed: of the order; a mixture has its own.
        arguments: see `StreamArguments`. Ranks default to the default process group's.

    Raises:
        ConfigurationError: arguments that cannot work, or contradict each other.
        TDDatapipesError: as `RedisTDDataset`.
    """

    def __init__(
        self,
        source: Urls | RedisTDMixture,
        *,
        batch_size: int | None = None,
        shuffle: bool = False,
        seed: int | None = None,
        drop_last: bool = False,
        **arguments: Unpack[StreamArguments],
    ) -> None:
        super().__init__()
        if seed is not None and isinstance(source, RedisTDMixture):
            raise ConfigurationError(f"seed={seed} is not the reader's to choose: a mixture has its own, {source.seed}")
        self._stream, _ = make_stream(
            source, batch_size=batch_size, shuffle=shuffle, seed=seed or 0, drop_last=drop_last, arguments=arguments
        )
        self._pass: StreamIterator | None = None
        self._started = False

    def reset(self, initial_state: Mapping[str, Any] | None = None) -> None:
        """Begin the next epoch, or go on from a state.

        Raises:
            StateError: a place in another order, batch size or number of ranks; both are named.
        """
        super().reset(initial_state)
        if initial_state is not None:
            self._stream.load_state_dict(initial_state, WorkerShare())
        elif self._started and self._pass is not None:
            self._stream.set_epoch(self._pass.position.epoch + 1)
        self._pass = self._stream.open(WorkerShare())
        self._started = False

    def next(self) -> TensorDict:
        """The next batch, or row."""
        self._started = True
        return next(self._running)

    def get_state(self) -> dict[str, int | str]:
        """Where it stands, counting what it handed on: always a new dictionary."""
        return self._running.state_dict()

    @property
    def _running(self) -> StreamIterator:
        if self._pass is None:
            raise RuntimeError("a node is reset before it is asked for anything")
        return self._pass

    def __len__(self) -> int:
        """Items of the running epoch. TypeError where it follows its data set."""
        return len(self._stream)

    def set_epoch(self, epoch: int) -> None:
        """The next ``reset()`` begins `epoch`."""
        self._stream.set_epoch(epoch)
        self._started = False

    def cursor_of(self, state: Mapping[str, Any]) -> Cursor:
        """The place of a state of this node, for any number of ranks.

        Raises:
            StateError: rows are given one by one.
        """
        return self._stream.cursor_of([state])

    def load_cursor(self, cursor: Cursor | Mapping[str, Any]) -> None:
        """The next ``reset()`` goes on with what is left of the cursor's epoch.

        Raises:
            StateError: the cursor is of another order; both are named.
        """
        self._stream.load_cursor(cursor)
        self._started = False

    @property
    def source(self) -> RedisTDDataset | JoinedRows:
        """What it reads."""
        return cast(RedisTDDataset, self._stream.source)

    @property
    def stats(self) -> ReadStats:
        """What was read so far."""
        return self.source.stats

    def close(self) -> None:
        """Drop the connections. Reading again dials anew."""
        self._stream.close()
