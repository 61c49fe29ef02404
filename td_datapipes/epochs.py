"""Which epoch comes next, agreed between the worker processes of a loader. No Redis here.

An iterable data set is copied into each worker, and the copies must run the same epoch: rows are shared by position,
so two copies in different epochs would read some rows twice and others never. A loader tells its workers nothing of
epochs, but those of one iteration can know that they belong together (they share the loader's base seed). The first
of them to begin decides for all, in a small file that every copy knows by name; the file exists only once a worker or
a restored position needed it. Without workers everything happens in memory.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from td_datapipes.samplers.states import Position

__all__ = ["EpochBoard", "Round"]

_ROUNDS_KEPT = 8
"""A worker of an iteration that was broken off may begin after those of the next one."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """One iteration of a loader, as one of its workers sees it. Every worker takes part in it once.

    Attributes:
        id: what all workers of the iteration have in common.
        worker: this one, of `num_workers`; whichever rows it takes.
        num_workers: how many take part.
    """

    id: str
    worker: int
    num_workers: int


class EpochBoard:
    """Where copies of one data set, in any number of processes, agree on the epoch they run.

    An epoch advances when all workers of its round have come to their end; until then every round runs the same epoch,
    from its beginning. Without workers there are no rounds.
    """

    def __init__(self) -> None:
        self._path = Path(tempfile.gettempdir()) / f"td_datapipes-{os.getuid()}-{secrets.token_hex(8)}.json"
        self._memory: dict[str, Any] = {"epoch": 0, "pending": None, "rounds": []}
        weakref.finalize(self, _remove, self._path, os.getpid())

    def peek(self, rows: int) -> Position:
        """The place that the next round begins at; `rows` are the data set's."""
        with self._state() as state:
            return _place(state["pending"]) or Position(epoch=state["epoch"], rows=rows)

    def begin(self, rows: int, round_: Round | None = None) -> Position:
        """The place that a round begins at: the same for all its workers. A restored one is given to one round.

        Args:
            rows: of the data set.
            round_: who begins. Where a worker begins a second time under the same id, the loader's seeds repeat and it
                is another round.
        """
        with self._state(shared=round_ is not None) as state:
            known = _record(state, round_)
            if round_ is not None and known is not None and round_.worker not in known["begun"]:
                known["begun"].append(round_.worker)
                return Position(**known["place"])
            place = _place(state["pending"]) or Position(epoch=state["epoch"], rows=rows)
            state["pending"] = None
            if round_ is not None:
                others = [other for other in state["rounds"] if other is not known]
                record = {"id": round_.id, "place": _plain(place), "begun": [round_.worker], "ended": []}
                state["rounds"] = [*others, record][-_ROUNDS_KEPT:]
            return place

    def adopt(self, place: Position, round_: Round | None = None) -> None:
        """A round that has begun goes on from a restored place instead; all its workers say so, for the same epoch."""
        with self._state(shared=round_ is not None) as state:
            state["epoch"], state["pending"] = place.epoch, None
            if (known := _record(state, round_)) is not None:
                known["place"] = _plain(place)

    def end(self, epoch: int, round_: Round | None = None) -> None:
        """A worker of a round has come to its end of the epoch; the epoch advances when all of them have."""
        with self._state(shared=round_ is not None) as state:
            over = round_ is None or round_.num_workers == 1
            if round_ is not None and (known := _record(state, round_)) is not None:
                known["ended"] = sorted({*known["ended"], round_.worker})
                over = len(known["ended"]) >= round_.num_workers
            if over and state["epoch"] == epoch:
                state["epoch"] = epoch + 1

    def restore(self, place: Position) -> None:
        """The next round begins at a restored place, once."""
        with self._state() as state:
            state["epoch"], state["pending"] = place.epoch, _plain(place)

    def take_back(self, place: Position) -> None:
        """A place that was restored has been taken up without a round."""
        with self._state() as state:
            if _place(state["pending"]) == place:
                state["pending"] = None

    def set_epoch(self, epoch: int) -> None:
        """The next round runs that epoch. A restored place within it is kept, any other is dropped."""
        with self._state() as state:
            pending = _place(state["pending"])
            if pending is not None and pending.epoch != epoch:
                state["pending"] = None
            state["epoch"] = epoch

    @contextmanager
    def _state(self, *, shared: bool = False) -> Iterator[dict[str, Any]]:
        """What is agreed, for reading and writing; in the file if there is one, or has to be."""
        if not shared and not self._path.exists():
            yield self._memory
            return
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            state = json.loads(file.read() or "null") or self._memory
            yield state
            file.seek(0)
            json.dump(state, file)
            file.truncate()


def _remove(path: Path, pid: int) -> None:
    """Only where the board was made: a worker's copy may end first."""
    if os.getpid() == pid:
        with suppress(FileNotFoundError):
            path.unlink()


def _record(state: dict[str, Any], round_: Round | None) -> dict[str, Any] | None:
    """What is known of a round."""
    return next((known for known in state["rounds"] if round_ is not None and known["id"] == round_.id), None)


def _plain(place: Position) -> dict[str, int]:
    return {"epoch": place.epoch, "rows": place.rows, "start": place.start, "batch": place.batch}


def _place(values: dict[str, int] | None) -> Position | None:
    return None if values is None else Position(**values)
