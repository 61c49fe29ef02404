"""One object's batches, in the order they are chosen: made when they are asked for, made ahead, or held by a state."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from tensordict import TensorDict

from td_datapipes.errors import StateError
from td_datapipes.replay.ahead import Ahead
from td_datapipes.replay.calls import Caller
from td_datapipes.replay.keeping import STATE_VERSION, held, hold, kind_of
from td_datapipes.replay.opening import Opener
from td_datapipes.replay.options import NStep, Sampler
from td_datapipes.replay.picks import Picks
from td_datapipes.replay.reads import BatchMaker, Chosen, Request
from td_datapipes.replay.ring import Ring

__all__ = ["BatchQueue"]

_CURSOR_SECONDS = 0.02
"""How old the cursor may be that uniform batches are chosen by ahead: they wait for longer until they are asked for."""


class BatchQueue:
    """The batches of one buffer object. Safe for threads; a forked child calls `part_from`.

    Args:
        caller: how the server is called.
        opener: what the buffer is.
        prefetch: batches made ahead, at most.
        seed: with a batch's number, all that its draws depend on.

    Attributes:
        prefetch: as given.
        seed: as given, or of the state that was loaded.
        number: how many batches were chosen; while some are made ahead, before the first of those.
    """

    def __init__(self, caller: Caller, opener: Opener, prefetch: int, seed: int) -> None:
        self._caller, self._opener = caller, opener
        self.prefetch, self.seed = prefetch, seed
        self._reset()

    def _reset(self) -> None:
        self._maker = BatchMaker(self._caller, self._opener, self.seed)
        self._lock = threading.RLock()
        self.number = 0
        self._ahead: Ahead | None = None
        self._ahead_kind = ""
        self._chosen: deque[Chosen] = deque()
        self._finalizer: weakref.finalize[..., Any] | None = None

    def part_from(self, pid: int) -> None:
        """In another process than `pid`, whose batches these were: begin anew, with other draws than there."""
        if pid != os.getpid():
            self.seed ^= os.getpid() << 20
            self._reset()

    def take(self, request: Request, deadline: float) -> TensorDict:
        """A batch, the next one of those that were chosen before where it is of their kind; errors as of `BatchMaker`.

        Args:
            request: what is asked for, its number aside.
            deadline: on `time.monotonic`'s clock.
        """
        ahead = self._ahead_for(request)
        if ahead is not None:
            return ahead.take(deadline)
        with self._lock:
            return self._make(request, deadline)

    def _make(self, request: Request, deadline: float) -> TensorDict:
        kind = _kind(request)
        if self._chosen and kind == _kind(self._chosen[0].request):
            chosen = self._chosen.popleft()
        else:
            chosen = self._maker.choose(replace(request, number=self.number), deadline)
            self.number += 1
        try:
            return self._maker.finish(self._maker.begin(chosen), deadline)
        except BaseException:
            # Counted, and perhaps taken out of a queue: it is what the next call gets.
            self._chosen.appendleft(chosen)
            raise

    def _ahead_for(self, request: Request) -> Ahead | None:
        """Where batches of this kind are made ahead, if they are."""
        if not self.prefetch:
            return None
        kind = _kind(request)
        with self._lock:
            if self._ahead is not None and self._ahead.failed:
                self.end_ahead(keep=True)
            if self._ahead is None:
                if self._chosen and kind != _kind(self._chosen[0].request):
                    return None
                self._start_ahead(request, kind)
            return self._ahead if kind == self._ahead_kind else None

    def _start_ahead(self, request: Request, kind: str) -> None:
        maker = BatchMaker(self._caller, self._opener, self.seed, cursor_seconds=_CURSOR_SECONDS)
        chosen, self._chosen = self._chosen, deque()
        self._ahead = Ahead(maker, self.prefetch, replace(request, number=self.number), chosen)
        self._ahead_kind = kind
        self._finalizer = weakref.finalize(self, self._ahead.close)

    def end_ahead(self, *, keep: bool) -> None:
        """Make no more batches ahead. Those that were chosen and not handed over come next, if they are kept."""
        with self._lock:
            ahead, self._ahead = self._ahead, None
            if ahead is None:
                return
            if self._finalizer is not None:
                self._finalizer.detach()
            ahead.close()
            waiting, self.number = ahead.standing()
            if keep:
                self._chosen = deque(waiting)

    def state(self) -> dict[str, Any]:
        """Where sampling stands; what was chosen and not handed over is kept on the server."""
        with self._lock:
            waiting, number = (list(self._chosen), self.number) if self._ahead is None else self._ahead.standing()
        ring = self._opener.find()
        token = hold(self._caller, [(one.request.number, one.picks) for one in waiting])
        return {
            "version": STATE_VERSION,
            "name": self._opener.name,
            "id": None if ring is None else ring.manifest.id,
            "seed": self.seed,
            "number": number,
            "held": token,
            "num_held": len(waiting),
        }

    def load(
        self, state: Mapping[str, Any], written: int, sampler: Sampler, n_step: NStep | None, *, strict: bool
    ) -> None:
        """Go on where a state was saved.

        Args:
            state: of this buffer.
            written: rows that have been written by now.
            sampler: how the batches were chosen that the state holds.
            n_step: what they have of the rows behind theirs.
            strict: raise where rows or batches are there no longer.

        Raises:
            StateError: what the state needs is lost.
        """
        ring = self._opener.find()
        lost = _lost(ring, state, written)
        if lost and strict:
            raise StateError(
                f"buffer {self._opener.name!r} at {self._caller.server.url.address} {lost}; load the state with "
                f"strict=False to go on"
            )
        chosen: list[tuple[int, Picks]] = []
        if state["held"] is not None and ring is not None and not lost:
            try:
                chosen = held(self._caller, state["held"], ring)
            except StateError:
                if strict:
                    raise
        with self._lock:
            self.end_ahead(keep=False)
            self.seed, self.number = int(state["seed"]), int(state["number"])
            self._maker.close()
            self._maker = BatchMaker(self._caller, self._opener, self.seed)
            self._chosen = deque(
                self._maker.chosen(_request(number, picks, sampler, n_step), picks) for number, picks in chosen
            )

    def close(self) -> None:
        """End reading ahead, keep what was chosen, and drop the connections."""
        with self._lock:
            self.end_ahead(keep=True)
            self._maker.close()

    def __del__(self) -> None:
        with suppress(Exception):  # as the interpreter ends, what this needs may be gone
            self._maker.close()


def _kind(request: Request) -> str:
    return kind_of(request.count, request.sampler, request.n_step)


def _request(number: int, picks: Picks, sampler: Sampler, n_step: NStep | None) -> Request:
    return Request(count=len(picks.stripes), sampler=sampler, n_step=n_step, number=number)


def _lost(ring: Ring | None, state: Mapping[str, Any], written: int) -> str:
    """What is no longer as it was when a state was saved; empty where all of it is there."""
    if state["id"] is None:
        return ""
    if ring is None:
        return f"is empty now, {state['written']} rows had been written: it was lost, or dropped"
    if ring.manifest.id != state["id"]:
        return f"was made anew since: {state['written']} rows had been written to the former one"
    if written < state["written"]:
        return f"has lost its last {state['written'] - written} rows of {state['written']}, in a restart or a restore"
    return ""
