"""Batches made ahead in the background: one thread, two batches on their way at a time."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from tensordict import TensorDict

from td_datapipes.errors import (
    RateLimitError,
    ServerTimeoutError,
    ServerUnavailableError,
    TDDatapipesError,
)
from td_datapipes.replay.reads import BatchMaker, Begun, Chosen, OverwrittenError, Request

__all__ = ["Ahead"]

_LOOK_SECONDS = 1.0
"""How long one try in the background may take before it is looked whether anybody still wants it."""
_TRANSIENT = (OverwrittenError, RateLimitError, ServerTimeoutError, ServerUnavailableError)


class Ahead:
    """Keeps up to `depth` batches ready, all of one kind.

    Args:
        maker: owned from here on.
        depth: batches chosen and not handed over, at most.
        first: what is asked for; later batches differ in their number only.
        chosen: batches that were chosen before, by a process that saved its state.
    """

    def __init__(self, maker: BatchMaker, depth: int, first: Request, chosen: Iterable[Chosen]) -> None:
        self._maker, self._depth, self._next = maker, depth, first
        self._chosen = deque(chosen)
        self._begun: deque[Begun] = deque()
        self._ready: deque[tuple[Chosen, TensorDict]] = deque()
        self._state = threading.Condition()
        self._stepping = threading.Lock()
        self._error: BaseException | None = None
        self._stopped = False
        self.pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="td-replay-ahead", daemon=True)
        self._thread.start()

    def take(self, deadline: float) -> TensorDict:
        """The next batch, in the order of their numbers.

        Raises:
            TDDatapipesError: what kept it from being made; what may pass is raised at the deadline only.
        """
        with self._state:
            while not self._ready:
                left = deadline - time.monotonic()
                if self._error is not None and (left <= 0 or not isinstance(self._error, _TRANSIENT)):
                    raise self._error
                if left <= 0:
                    raise ServerTimeoutError("no batch was ready in time; the server may be stopped, busy or far away")
                if not self._thread.is_alive() and self._error is None:
                    raise ServerUnavailableError("reading ahead was stopped")
                self._state.wait(min(left, _LOOK_SECONDS))
            _, batch = self._ready.popleft()
            self._state.notify_all()
            return batch

    @property
    def failed(self) -> bool:
        """Whether it has ended with an error that nothing but a new one gets over."""
        return self._error is not None and not isinstance(self._error, _TRANSIENT)

    def standing(self) -> tuple[list[Chosen], int]:
        """What was chosen and not handed over, in order, and the number of the batch that will be chosen next."""
        with self._stepping, self._state:
            ready, begun = [chosen for chosen, _ in self._ready], [begun.chosen for begun in self._begun]
            return [*ready, *begun, *self._chosen], self._next.number

    def _run(self) -> None:
        while not self._stopped:
            try:
                self._step()
            except _TRANSIENT as error:
                self._tell(error)
            except BaseException as error:
                self._tell(error)
                return

    def _tell(self, error: BaseException) -> None:
        with self._state:
            self._error = error
            self._state.notify_all()

    def _step(self) -> None:
        with self._state:
            while not self._stopped and not self._room and not self._begun:
                self._state.wait()
        if self._stopped:
            return
        failure: TDDatapipesError | None = None
        while len(self._begun) < 2 and self._room and not failure:
            try:
                self._begin()
            except TDDatapipesError as error:
                if not self._begun:
                    raise
                failure = error
        begun = self._begun[0]
        batch = self._maker.finish(begun, _soon())
        with self._state:
            self._begun.popleft()
            self._ready.append((begun.chosen, batch))
            self._error = None
            self._state.notify_all()
        if failure is not None:
            raise failure

    @property
    def _room(self) -> bool:
        return len(self._ready) + len(self._begun) < self._depth

    def _begin(self) -> None:
        with self._stepping:
            if not self._chosen:
                self._chosen.append(self._maker.choose(self._next, _soon()))
                self._next = replace(self._next, number=self._next.number + 1)
            begun = self._maker.begin(self._chosen[0])
            with self._state:
                self._begun.append(begun)
                self._chosen.popleft()

    def close(self) -> None:
        """End the thread. What was read ahead is dropped."""
        if self.pid == os.getpid():  # else the thread is another process's, and the lock may be its for ever
            with self._state:
                self._stopped = True
                self._state.notify_all()
            self._maker.abort()
            # The last reference to a buffer may go while this very thread collects garbage.
            if threading.current_thread() is not self._thread:
                self._thread.join()
        self._maker.close()


def _soon() -> float:
    return time.monotonic() + _LOOK_SECONDS
