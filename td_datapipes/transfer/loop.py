"""What both ends of a loop of transfers have, and the thread that receives ahead of a trainer."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from td_datapipes.errors import ConfigurationError, PeerTimeoutError, ProtocolError, StateError, TDDatapipesError
from td_datapipes.mesh import MeshSpec
from td_datapipes.transfer.api import PlacementsLike, Ranks, ranks_of, wanted_of
from td_datapipes.transfer.board import Board, rebuild_error
from td_datapipes.transfer.declaration import Strategy, Wanted, check_strategy
from td_datapipes.transfer.link import Hello, Status
from td_datapipes.transfer.outcome import Outcome, TransferStats
from td_datapipes.transfer.session import Session

__all__ = ["Feed", "LoopEnd", "describe_place"]

_LOOK_SECONDS = 1.0
_loops: Counter[str] = Counter()


class LoopEnd:
    """What both ends of a loop have."""

    def __init__(
        self,
        loader_mesh: Ranks,
        trainer_mesh: DeviceMesh | MeshSpec,
        placements: PlacementsLike | None,
        strategy: Strategy,
        group: dist.ProcessGroup | None,
        timeout_seconds: float,
    ) -> None:
        check_strategy(strategy)
        if not timeout_seconds > 0:
            raise ConfigurationError(f"timeout_seconds must be positive, got {timeout_seconds}")
        src, dst = ranks_of(loader_mesh), ranks_of(trainer_mesh)
        if both := sorted(set(src) & set(dst)):
            raise ConfigurationError(
                f"the ranks {both} are loaders and trainers at once; a loop needs ranks of its own for each. "
                f"send_dtensors moves single batches between meshes that share ranks"
            )
        self.strategy = strategy
        self.timeout_seconds = timeout_seconds
        self.wanted = _wanted(trainer_mesh, placements)
        self.stats = TransferStats()
        group = _own_group({*src, *dst}) if group is None else group
        # The same on all ranks: each loop of a group has a number.
        _loops[group.group_name] += 1
        name = f"shards/{group.group_name}/{_loops[group.group_name]}"
        self.session = Session(group, src, dst, name, self.stats, ends_at_failure=True)
        self.board: Board = self.session.board

    def start(self, position: Any, seconds: float) -> tuple[Any, int | None]:
        """The first round: where to go on from, and who closed instead of starting, if somebody did.

        Args:
            position: where a trainer wants to go on from; None on loader ranks, and for a fresh start.
            seconds: how long the others may take to begin.

        Raises:
            StateError: the trainers want to go on from different places.
        """
        encoded = json.dumps(position).encode()
        hellos = self.session.gather(Status.START, seconds, text=encoded)
        if closed := [rank for rank, hello in sorted(hellos.items()) if hello.status is Status.CLOSE]:
            return None, closed[0]
        _require_start(hellos)
        sizes = {rank: hello.text_bytes for rank, hello in hellos.items()}
        texts = self.session.spread(encoded, sizes, time.monotonic() + self.timeout_seconds)
        states = {rank: json.loads(texts[rank]) for rank in self.session.dst}
        first = self.session.dst[0]
        for rank, state in states.items():
            if state != states[first]:
                raise StateError(
                    f"the trainers want to go on from different places: rank {first} from "
                    f"{describe_place(states[first])}, rank {rank} from {describe_place(state)}; load the states that "
                    f"were saved after the same step"
                )
        return states[first], None

    def fail(self, error: BaseException) -> None:
        """A failure of this rank's own: tell the others at the next round, so that all raise at the same batch."""
        self.session.fail(error, self.timeout_seconds)

    def broken(self, error: BaseException) -> None:
        """A round failed: nobody shall wait for this rank."""
        if not _is_shared(error):
            self.board.tell(self.session.link.rank, error)
            self.session.link.break_off()

    def look(self) -> None:
        """Raise what another rank has left on the board."""
        note = self.board.read()
        if note is not None and note[0] != self.session.link.rank:
            raise rebuild_error(*note)


class Feed:
    """Goes through the rounds in a thread, and keeps what arrives until it is taken.

    Args:
        end: of the loop.
        prefetch: batches that are kept at most.
        start: where to go on from.
        start_seconds: how long the others may take to begin.
    """

    def __init__(self, end: LoopEnd, prefetch: int, start: Any, start_seconds: float) -> None:
        self._session = end.session
        self._end = end
        self._prefetch = prefetch
        self._start = start
        self._start_seconds = start_seconds
        self._changed = threading.Condition()
        self._arrived: deque[Outcome] = deque()
        self._error: BaseException | None = None
        self._closing = False
        self._reason: BaseException | None = None
        self._last: Outcome | None = None
        self._thread = threading.Thread(target=self._run, name="td-datapipes-shards", daemon=True)
        self._thread.start()

    def take(self) -> Outcome:
        """What comes next. What all ranks raise in the same round is raised after the batches before it, so at the same
        step of training; anything else at once.
        """
        with self._changed:
            while not self._arrived and self._error is None:
                if self._last is not None:
                    return self._last
                if not self._changed.wait(_LOOK_SECONDS):
                    self._end.look()
            if self._error is not None and not (self._arrived and _is_shared(self._error)):
                raise self._error
            outcome = self._arrived.popleft()
            self._changed.notify_all()
        return outcome

    def close(self, reason: BaseException | None) -> None:
        """Come to the next round with the message that this is the end."""
        with self._changed:
            self._closing, self._reason = True, self._reason or reason
            self._changed.notify_all()
        # Each round has its own deadlines.
        self._thread.join()

    def _run(self) -> None:
        try:
            _, closed_by = self._end.start(self._start, self._start_seconds)
            if closed_by is not None:
                self._finish(Outcome(status=Status.CLOSE, closed_by=closed_by))
                return
            self._session.declare(None, self._end.wanted, self._end.strategy)
            while self._last is None:
                self._round(self._next_status())
        except BaseException as error:
            if self._closing and isinstance(error, TDDatapipesError):
                # Nobody is interested any more.
                self._finish(Outcome(status=Status.CLOSE, closed_by=self._session.link.rank))
            with self._changed:
                self._error = error
                self._changed.notify_all()
            self._end.broken(error)

    def _next_status(self) -> Status:
        """Waits for room, but not for so long that the others give this rank up."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing or len(self._arrived) < self._prefetch, self._end.timeout_seconds / 4
            )
            if self._closing:
                return Status.CLOSE if self._reason is None else Status.ERROR
            return Status.DATA if len(self._arrived) < self._prefetch else Status.BUSY

    def _round(self, status: Status) -> None:
        if status is Status.ERROR and self._reason is not None:
            self._end.fail(self._reason)
            self._finish(Outcome(status=Status.CLOSE, closed_by=self._session.link.rank))
            return
        outcome = self._session.round(status, None, self._end.timeout_seconds)
        if outcome.status is Status.CLOSE:
            self._finish(outcome)
        elif outcome.status is not Status.BUSY:
            with self._changed:
                self._arrived.append(outcome)
                self._changed.notify_all()

    def _finish(self, outcome: Outcome) -> None:
        with self._changed:
            self._last = outcome
            self._changed.notify_all()


def _is_shared(error: BaseException) -> bool:
    """Whether all ranks have come to the same error in the same round."""
    return isinstance(error, TDDatapipesError) and not isinstance(error, PeerTimeoutError)


def _require_start(hellos: Mapping[int, Hello]) -> None:
    for rank, hello in sorted(hellos.items()):
        if hello.status is not Status.START:
            raise ProtocolError(
                f"rank {rank} is in the midst of a loop that this rank begins; after a failure make all ends anew"
            )


def _wanted(mesh: DeviceMesh | MeshSpec, placements: PlacementsLike | None) -> Wanted:
    wanted = wanted_of(mesh, placements)
    if wanted.default is not None or wanted.mesh is None:
        return wanted
    return replace(wanted, default=(Shard(0), *[Replicate()] * (wanted.mesh.ndim - 1)))


def _own_group(ranks: set[int]) -> dist.ProcessGroup:
    others = sorted(set(range(dist.get_world_size())) - ranks)
    if others:
        raise ConfigurationError(
            f"the ranks {others} of the default process group are neither loaders nor trainers, and all its processes "
            f"have to make a group together: call group = dist.new_group({sorted(ranks)}) on all, and pass group="
        )
    group: dist.ProcessGroup = dist.new_group(sorted(ranks))
    return group


def describe_place(state: Any) -> str:
    return "the beginning" if state is None else f"epoch {state['epoch']}, batch {state['batches']}"
