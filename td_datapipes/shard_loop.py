"""Loader ranks feed trainer ranks: `ShardSender` and `ShardReceiver`, the loop around `transfer`.

Every batch is one round that all ranks come to. On a trainer a thread goes through the rounds, point to point only and
on a group of its own; DTensors are made in ``next()``, in step with the trainers' other collectives. A receiver with
enough batches in hand says in time that it is busy, so that a long pause of training is no time-out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch.distributed as dist
from tensordict import TensorDict
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import IterableDataset, get_worker_info

from td_datapipes.errors import ConfigurationError, PeerError, StateError
from td_datapipes.mesh import MeshSpec
from td_datapipes.transfer import TransferStats
from td_datapipes.transfer.api import PlacementsLike
from td_datapipes.transfer.contents import Contents
from td_datapipes.transfer.declaration import Strategy
from td_datapipes.transfer.link import Status
from td_datapipes.transfer.loop import Feed, LoopEnd, describe_place
from td_datapipes.transfer.outcome import Received

__all__ = ["ShardReceiver", "ShardSender"]

TIMEOUT_SECONDS = 300.0
_STATE_VERSION = 1


class ShardSender:
    """A loader rank: sends batches of DTensors to the trainer ranks, where a `ShardReceiver` hands them on.

    All loader and trainer ranks make their end at the same time. The meshes' ranks are numbered as in the default
    process group, and no rank is on both sides.

    Args:
        loader_mesh: the loader ranks, this one among them; batches lie on it.
        trainer_mesh: the trainer ranks, as a DeviceMesh or a MeshSpec.
        placements: how DTensors are to lie on the trainers' mesh: one tuple for all, or a mapping by (nested) field;
            what is not in it is sharded by rows over the first axis. The same on all ranks.
        strategy: see `send_dtensors`.
        group: moves the bytes, and is used for nothing else meanwhile. By default a new one, which all processes of
            the default group make, so all of them have to be loaders or trainers; else pass ``dist.new_group(ranks)``.
        timeout_seconds: how long to wait for other ranks in one round.
        start_timeout_seconds: how long to wait until all have begun; twice `timeout_seconds` by default.

    Raises:
        ConfigurationError: meshes that share ranks, placements that cannot be, or other processes in the default group.
    """

    def __init__(
        self,
        loader_mesh: DeviceMesh | MeshSpec,
        trainer_mesh: DeviceMesh | MeshSpec,
        placements: PlacementsLike | None = None,
        *,
        strategy: Strategy = "auto",
        group: dist.ProcessGroup | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        start_timeout_seconds: float | None = None,
    ) -> None:
        self._end = LoopEnd(loader_mesh, trainer_mesh, placements, strategy, group, timeout_seconds)
        if not self._end.session.sends:
            raise ConfigurationError(f"rank {dist.get_rank()} is not in the loaders' mesh {MeshSpec.of(loader_mesh)}")
        self._mesh = loader_mesh
        self._start_seconds = 2 * timeout_seconds if start_timeout_seconds is None else start_timeout_seconds
        self._started = False
        self._closed = False

    @property
    def stats(self) -> TransferStats:
        """What was sent."""
        return self._end.stats

    def run(self, batches: Iterable[Any], *, state: Any = None, num_epochs: int | None = None) -> None:
        """Send epoch after epoch until the trainers close, or that many.

        Args:
            batches: a loader whose batches are TensorDicts of DTensors on the loaders' mesh (``collate_fn`` or ``map``
                with `DTensorCollate`), or of plain tensors that all loader ranks have alike. It is gone through anew
                for each epoch; an iterator is one epoch.
            state: what remembers where `batches` stands, by ``state_dict`` and ``load_state_dict``: by default
                `batches` itself, or its batch sampler or sampler where worker processes do not draw ahead of it. Its
                state travels with each batch, as JSON, and comes back when the trainers resume.
            num_epochs: how many in all, those before a resume included.

        Raises:
            StateError: the trainers resume, and nothing here has a state.
            PeerTimeoutError: a rank did not come in time, or is gone.
            Exception: whatever `batches` raises; every other rank is told.
        """
        source = _find_state(batches) if state is None else state
        with self._telling():
            epoch = self._resume(self.start(), source)
        while not self._closed and (num_epochs is None or epoch < num_epochs):
            iterator = self._begin(batches)
            while not self._closed:
                with self._telling():
                    batch = next(iterator, None)
                    position = _position(source)
                if batch is None:
                    self.end_epoch(position)
                    break
                self.send(batch, position)
            epoch += 1
            if iterator is batches:  # an iterator, which there is only one epoch of
                break
        self.close()

    def start(self) -> dict[str, Any] | None:
        """Wait until all ranks have begun. `run` and `send` do so by themselves.

        Returns:
            The receivers' state to go on from, as their ``state_dict`` gave it; this rank's part is
            ``state["loaders"][str(rank)]``. None for a fresh start.
        """
        if self._started:
            return None
        self._started = True
        with self._breaking():
            state, closed_by = self._end.start(None, self._start_seconds)
        self._closed = closed_by is not None
        return cast("dict[str, Any] | None", state)

    def send(self, batch: Any, state: Any = None) -> bool:
        """Send one batch; returns whether the trainers took it, False if they have closed.

        Args:
            batch: a TensorDict.
            state: where the data stands after it, as JSON can hold it.
        """
        self.start()
        end = self._end
        with self._telling():
            contents = Contents.of(batch, self._mesh, end.session.link.rank)
            end.session.declare(contents, end.wanted, end.strategy)
        return self._round(Status.DATA, contents, state)

    def end_epoch(self, state: Any = None) -> bool:
        """End the epoch, on all loader ranks at once; returns whether the trainers go on."""
        self.start()
        return self._round(Status.END, None, state)

    def close(self) -> None:
        """End it all; the trainers get what was sent before."""
        if self._started and not self._closed:
            self._round(Status.CLOSE, None, None)

    def _round(self, status: Status, contents: Contents | None, state: Any) -> bool:
        if self._closed:
            return False
        with self._breaking():
            outcome = self._end.session.round(status, contents, self._end.timeout_seconds, state=state)
        self._closed = outcome.status is Status.CLOSE
        return not self._closed

    def _begin(self, batches: Iterable[Any]) -> Iterator[Any]:
        with self._telling():
            return iter(batches)

    def _resume(self, state: dict[str, Any] | None, source: Any) -> int:
        if state is None:
            return 0
        rank = self._end.session.link.rank
        own = state["loaders"].get(str(rank))
        if source is None or own is None:
            raise StateError(
                f"the trainers go on from {describe_place(state)}, and loader rank {rank} "
                f"{'has nothing with a state_dict' if source is None else 'is not in their state'}; "
                f"pass run(..., state=) what says where its data stands, on the loader ranks that there were"
            )
        source.load_state_dict(own)
        return int(state["epoch"])

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """What goes wrong here is this rank's own, and told to the others."""
        try:
            yield
        except Exception as error:
            if not self._closed:
                self._closed = True
                self._end.fail(error)
            raise

    @contextmanager
    def _breaking(self) -> Iterator[None]:
        """What goes wrong here is a round's: nothing works after it."""
        try:
            yield
        except BaseException as error:
            self._closed = True
            self._end.broken(error)
            raise


@dataclass(frozen=True, kw_only=True)
class _Position:
    """What the trainer has consumed."""

    epoch: int = 0
    batches: int = 0
    loaders: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": _STATE_VERSION,
            "epoch": self.epoch,
            "batches": self.batches,
            "loaders": json.loads(json.dumps(self.loaders)),
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> _Position:
        if not isinstance(state, Mapping) or state.get("version") != _STATE_VERSION:
            raise StateError(f"this is no state of a ShardReceiver of version {_STATE_VERSION}: {state!r:.200}")
        return cls(epoch=state["epoch"], batches=state["batches"], loaders=state["loaders"])


class ShardReceiver(IterableDataset[TensorDict]):
    """A trainer rank: an iterable of batches that loader ranks send with `ShardSender`, as DTensors on its mesh.

    Going through it is one epoch; going through it again, the next one. After a ``break`` it goes on where it stood.
    Use it as a context manager, or call `close`, so that the loader ranks learn that training has ended.

    It works in the main process only. ``DataLoader(receiver, batch_size=None, collate_fn=DTensorCollate(...))`` hands
    its batches through the collate hook.

    Args:
        loader_mesh: the loader ranks, as a DeviceMesh or a MeshSpec.
        trainer_mesh: the trainer ranks, this one among them.
        placements: see `ShardSender`; the same on all ranks.
        strategy: see `send_dtensors`.
        prefetch: batches that are received ahead of the training loop; at least 1.
        group: see `ShardSender`.
        timeout_seconds: how long to wait for other ranks in one round.
        start_timeout_seconds: how long to wait until all have begun; twice `timeout_seconds` by default.

    Raises:
        ConfigurationError: meshes that share ranks, placements that cannot be, or other processes in the default group.
    """

    def __init__(
        self,
        loader_mesh: DeviceMesh | MeshSpec,
        trainer_mesh: DeviceMesh,
        placements: PlacementsLike | None = None,
        *,
        strategy: Strategy = "auto",
        prefetch: int = 2,
        group: dist.ProcessGroup | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        start_timeout_seconds: float | None = None,
    ) -> None:
        if not isinstance(trainer_mesh, DeviceMesh):
            raise ConfigurationError(f"DTensors need a DeviceMesh, not {type(trainer_mesh).__name__}")
        if prefetch < 1:
            raise ConfigurationError(f"prefetch must be 1 or more batches, got {prefetch}")
        self._end = LoopEnd(loader_mesh, trainer_mesh, placements, strategy, group, timeout_seconds)
        if not self._end.session.receives:
            raise ConfigurationError(f"rank {dist.get_rank()} is not in the trainers' mesh {MeshSpec.of(trainer_mesh)}")
        self._mesh = trainer_mesh
        self._start_seconds = 2 * timeout_seconds if start_timeout_seconds is None else start_timeout_seconds
        self._prefetch = prefetch
        self._position = _Position()
        self._resumes = False
        self._feed: Feed | None = None

    @property
    def stats(self) -> TransferStats:
        """What was received, batches ahead of the training loop included."""
        return self._end.stats

    def __iter__(self) -> Iterator[TensorDict]:
        """The batches that are left of this epoch.

        Raises:
            PeerTimeoutError: a rank did not come in time, or is gone.
            PeerError: a rank has ended it all before the epoch's end.
            TDDatapipesError: what another rank met.
        """
        if get_worker_info() is not None:
            raise ConfigurationError(
                "a ShardReceiver receives in the process that is a trainer rank; give its DataLoader num_workers=0"
            )
        if self._feed is None:
            start = self._position.to_dict() if self._resumes else None
            self._feed = Feed(self._end, self._prefetch, start, self._start_seconds)
        while (outcome := self._feed.take()).status is Status.DATA:
            self._end.look()
            received = cast(Received, outcome.received)
            batch = received.build(self._mesh)
            self._advance(received.states, replace(self._position, batches=self._position.batches + 1))
            yield batch
        if outcome.status is Status.CLOSE:
            raise PeerError(
                f"rank {outcome.closed_by} has ended the transfer of batches; there are no more after batch "
                f"{self._position.batches} of epoch {self._position.epoch}"
            )
        self._advance(outcome.states, _Position(epoch=self._position.epoch + 1))

    def state_dict(self) -> dict[str, Any]:
        """Where the training loop stands: batches it was given, never those received ahead. A fresh value."""
        return self._position.to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind the last batch that was consumed; on all trainers, before the first batch is asked for.

        The loader ranks need no state of their own: theirs comes with this one.

        Raises:
            StateError: it is no such state, or batches have been asked for already.
        """
        if self._feed is not None:
            raise StateError("batches have been asked for already; load the state into a new ShardReceiver")
        self._position = _Position.from_dict(state)
        self._resumes = True

    def close(self, error: BaseException | None = None) -> None:
        """Tell all ranks that this one takes no more batches; returns when they know.

        Args:
            error: why, if training has failed: the other ranks raise it too.
        """
        if self._feed is not None:
            self._feed.close(error)
        elif error is not None:
            self._end.board.tell(self._end.session.link.rank, error)

    def __enter__(self) -> ShardReceiver:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.close(error)

    def _advance(self, states: Mapping[int, Any], position: _Position) -> None:
        self._position = replace(position, loaders={str(rank): state for rank, state in sorted(states.items())})


def _find_state(batches: Any) -> Any:
    """What remembers where the data stands; None if nothing does."""
    candidates = [batches]
    if getattr(batches, "num_workers", 0) == 0:
        # Worker processes draw from the samplers ahead of what was yielded.
        candidates += [getattr(batches, "batch_sampler", None), getattr(batches, "sampler", None)]
    for candidate in candidates:
        if callable(getattr(candidate, "state_dict", None)) and callable(getattr(candidate, "load_state_dict", None)):
            return candidate
    return None


def _position(source: Any) -> Any:
    if source is None:
        return None
    state = source.state_dict()
    try:
        return json.loads(json.dumps(state))
    except (TypeError, ValueError) as error:
        raise StateError(
            f"the state of {type(source).__name__} travels to the trainers as JSON, which cannot hold it ({error}); "
            f"use the samplers of td_datapipes.samplers, or pass run(..., state=) something whose state is plain values"
        ) from error
