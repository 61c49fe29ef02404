"""What is read ahead of the consumer, by a background thread or, where that one cannot keep ahead, by the consumer.

The work is the same, done in steps, by one of them at a time: draw a window, send requests, receive some bytes. They
share one interpreter, so two of them working at once take longer than one: each waits for the other to let go of it.
A consumer that has to wait for a small batch therefore does the next steps itself. The thread is for the time in
which the consumer is away: where that is short, it is not even woken. Large batches are the thread's: most of what
they take is the kernel's copying.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
from tensordict import TensorDict
from torch.utils.data import get_worker_info

from td_datapipes.errors import ServerTimeoutError
from td_datapipes.pace import Pace
from td_datapipes.read_spec import Rows
from td_datapipes.store import RowReader
from td_datapipes.window_reads import BatchRead, ReadGroup, group_reads
from td_datapipes.wire.reader import ReadStats

__all__ = ["AnnouncedBatch", "AnnouncedWindow", "ReadAhead"]

_JOIN_SECONDS = 1.0
_BUSY_BYTES = 1 << 20
"""Of groups that were asked for: what keeps a server busy while the next ones are planned or made."""
_SMALL_BYTES = 1 << 20
"""Batches of more take so long to receive that it pays to have the thread do it: the interpreter is free meanwhile."""


class AnnouncedWindow(Protocol):
    """Consecutive batches that will be asked for; see `td_datapipes.samplers.Window`."""

    @property
    def first_ordinal(self) -> int: ...
    @property
    def batches(self) -> Sequence[Rows]: ...
    @property
    def next(self) -> AnnouncedWindow | None: ...


class AnnouncedBatch(Protocol):
    """A batch that says which one it is and what comes next; see `td_datapipes.samplers.RowBatch`."""

    @property
    def ordinal(self) -> int: ...
    @property
    def window(self) -> AnnouncedWindow | None: ...


@dataclass(eq=False)
class _WindowRead:
    """An announced window.

    Attributes:
        window: as it was announced.
        first_ordinal: the first batch of it that is to be read; earlier ones were asked for before.
        step: every how manyth batch is this process's.
        batches: to be read, in order; None until the thread has drawn them.
    """

    window: AnnouncedWindow
    first_ordinal: int
    step: int
    batches: list[BatchRead] | None = None

    def draw(self, row_bytes: int) -> list[BatchRead]:
        """This process's batches of the window."""
        return [
            BatchRead(ordinal, rows, len(rows) * row_bytes)
            for ordinal, rows in enumerate(self.window.batches, self.window.first_ordinal)
            if ordinal >= self.first_ordinal and (ordinal - self.first_ordinal) % self.step == 0
        ]


class ReadAhead:
    """What the consumer and the thread share.

    One lock guards all of it; who holds the turn (`_is_working`) alone touches `_plans`. Consumers wait on `_changed`,
    the thread on `_due`.
    """

    def __init__(self, reader: RowReader, limit_bytes: int) -> None:
        self._reader = reader
        self._limit_bytes = limit_bytes
        self._pid = os.getpid()
        lock = threading.Lock()
        self._changed, self._due = threading.Condition(lock), threading.Condition(lock)
        self._is_working = self._is_asleep = False
        self._num_waiting = 0
        self._is_small = True
        self._pace = Pace()
        self._windows: dict[int, _WindowRead] = {}
        self._undrawn: deque[_WindowRead] = deque()
        self._unstarted: deque[ReadGroup] = deque()
        self._receiving: deque[ReadGroup] = deque()
        self._outstanding_bytes = 0
        self._wanted: list[BatchRead] = []
        self._round = self._worked_round = 0
        self._closed = False
        self._timed_out: ServerTimeoutError | None = None
        self.stats = ReadStats()
        self._plans = reader.new_plan_reader(self.stats)
        self._thread = threading.Thread(target=self._run, name="td_datapipes prefetch", daemon=True)
        self._thread.start()

    # The consumer's side.

    def get(self, announced: AnnouncedBatch, rows: Rows) -> TensorDict | None:
        """The batch if it was or can be read ahead, None where an ordinary read is to do it."""
        if announced.window is None:
            return None
        began = time.monotonic()
        # The thread gives up first, and says why.
        deadline = began + self._reader.server.timeout_seconds + 1
        with self._changed:
            self._pace.came(began)
            self._is_small = len(rows) * self._reader.held_row_bytes < _SMALL_BYTES
            batch = self._expected(announced, rows, deadline) or self._expected_anew(announced, rows, deadline)
            if batch is not None and batch.make is None:
                self._wanted.append(batch)
                try:
                    self._work_until(lambda: batch.make is not None or batch.failed, deadline)
                finally:
                    self._wanted.remove(batch)
            now = time.monotonic()
            self._pace.left(now)
            self.stats.wait_seconds += now - began
            if batch is None or batch.make is None:
                if self._timed_out is not None:
                    error, self._timed_out = self._timed_out, None
                    raise error
                self._forget()
                return None
            self._hand_over(batch)
            self.stats.rows += len(rows)
            self.stats.batches += 1
        return batch.make()

    def _wake(self) -> None:
        """Tell the thread if it has something to do: woken for nothing, it takes the interpreter from the consumer."""
        if (self._is_asleep or not self._is_small or self._pace.is_slow) and self._has_work():
            self._is_asleep = False
            self._due.notify()

    def _work_until(self, is_done: Callable[[], bool], deadline: float) -> None:
        """Do what is to be done until the consumer has what it came for, or wait while somebody else does it."""
        while not (is_done() or self._closed) and (left := deadline - time.monotonic()) > 0:
            if self._is_small and not self._is_working and self._has_work():
                self._step(deadline)
                continue
            self._wake()
            self._num_waiting += 1
            try:
                self._changed.wait(left)
            finally:
                self._num_waiting -= 1

    def _expected(self, announced: AnnouncedBatch, rows: Rows, deadline: float) -> BatchRead | None:
        """The batch under that ordinal, if its window is known and it has exactly those rows."""
        first = cast(AnnouncedWindow, announced.window).first_ordinal
        if first not in self._windows:
            return None
        self._announce(announced)
        self._drop_passed(first)
        known = self._windows[first]
        if known.batches is None:
            self._work_until(lambda: known.batches is not None, deadline)
        for batch in known.batches or ():
            if batch.ordinal == announced.ordinal:
                return batch if np.array_equal(batch.rows, rows) else None
        return None

    def _expected_anew(self, announced: AnnouncedBatch, rows: Rows, deadline: float) -> BatchRead | None:
        """The same after everything else was forgotten: another iteration has begun."""
        self._forget()
        self._announce(announced)
        return self._expected(announced, rows, deadline)

    def _announce(self, announced: AnnouncedBatch) -> None:
        worker = get_worker_info()
        window = announced.window
        while window is not None:
            if window.first_ordinal not in self._windows:
                step = 1 if worker is None else worker.num_workers
                # Of a window further on, the first of this process's batches follows from this one's number.
                behind = max(window.first_ordinal - announced.ordinal, 0)
                fresh = _WindowRead(window, announced.ordinal + -(-behind // step) * step, step)
                self._windows[window.first_ordinal] = fresh
                self._undrawn.append(fresh)
            window = window.next

    def _drop_passed(self, first: int) -> None:
        """Batches of windows before that one will not be asked for any more."""
        for passed in [ordinal for ordinal in self._windows if ordinal < first]:
            for batch in self._windows.pop(passed).batches or ():
                self._hand_over(batch)

    def _hand_over(self, batch: BatchRead) -> None:
        """The batch no longer counts: it is the consumer's now, or nobody's."""
        if batch.handed_over:
            return
        batch.handed_over = True
        if batch.counted:
            self._outstanding_bytes -= batch.nbytes
        for window in self._windows.values():
            if window.batches and batch in window.batches:
                window.batches.remove(batch)
        self._wake()

    def _forget(self) -> None:
        """Start over: what is on its way is not what is asked for, or cannot be had."""
        for window in self._windows.values():
            window.batches = window.batches or []  # whoever waits for them waits no longer
            for batch in window.batches:
                batch.failed = True
        self._windows.clear()
        self._undrawn.clear()
        self._unstarted.clear()
        self._receiving.clear()
        self._outstanding_bytes = 0
        self._round += 1
        self._changed.notify_all()
        self._due.notify()

    def close(self) -> None:
        """End the thread. Does nothing in a forked child: the thread is its parent's."""
        if self._pid != os.getpid():
            return
        with self._changed:
            self._closed = True
            self._forget()
        self._plans.abort()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)

    # The thread's side.

    def _run(self) -> None:
        with self._due:
            while not self._closed:
                leaves = self._is_small and self._num_waiting  # to who waits
                may_work = not self._is_working and not leaves and self._has_work()
                nap = self._pace.nap_seconds(time.monotonic()) if self._is_small else 0.0
                if may_work and not nap:
                    self._step(None)
                else:
                    # Where the consumer does the work, only somebody who looks now and then sees that it stays away.
                    self._is_asleep = not nap
                    self._due.wait(nap or None)
            while self._is_working:  # a consumer that has been told to stop
                self._due.wait()
        self._plans.close()

    # What either does, in turn.

    def _step(self, deadline: float | None) -> None:
        """One step of the work, without the lock; what goes wrong in it is left to ordinary reads.

        Args:
            deadline: of a consumer who does it.
        """
        self._is_working, seen = True, self._round
        fresh, self._worked_round = seen != self._worked_round, seen
        self._changed.release()
        error: BaseException | None = None
        try:
            if not fresh:
                self._work(seen, deadline)
            elif not self._plans.idle:
                self._plans.close()
        except BaseException as failed:
            error = failed
            self._plans.close()
            if not isinstance(failed, Exception):
                raise
        finally:
            self._changed.acquire()
            self._is_working = False
            if error is not None and self._round == seen:
                # Where there is time left for another try, the ordinary read has it.
                final = self._reader.server.deadline_seconds <= self._reader.server.timeout_seconds
                self._timed_out = error if final and isinstance(error, ServerTimeoutError) else None
                self._forget()
            if self._num_waiting and self._is_small:
                self._changed.notify_all()
            if self._closed:
                self._due.notify()

    def _has_work(self) -> bool:
        waits = self._undrawn or self._receiving or self._next_to_start()
        return bool(waits) or self._round != self._worked_round

    def _work(self, seen: int, deadline: float | None) -> None:
        """One step, the most urgent first: send requests, receive what somebody waits for, plan, receive."""
        window = receiving = None
        with self._changed:
            if self._round != seen:
                return
            start = None if self._is_server_busy() else self._next_to_start()
            if start is None and self._receiving and (self._is_awaited() or not self._undrawn):
                receiving = self._receiving[0]
            elif start is None and self._undrawn:
                window = self._undrawn.popleft()
        if start is not None:
            self._start(start, seen)
        elif receiving is not None:
            self._receive(receiving, seen, deadline)
        elif window is not None:
            self._draw(window, seen)

    def _is_server_busy(self) -> bool:
        """Whether so much is asked for that what comes next can wait until some of it is here."""
        enough = self._is_awaited() or sum(group.nbytes for group in self._receiving) >= _BUSY_BYTES
        return len(self._receiving) > 1 and enough

    def _is_awaited(self) -> bool:
        """Whether the consumer waits for something that was asked for."""
        return any(batch in group.batches for group in self._receiving for batch in self._wanted)

    def _draw(self, window: _WindowRead, seen: int) -> None:
        batches = window.draw(self._reader.held_row_bytes)
        with self._changed:
            if self._round != seen:
                return
            window.batches = list(batches)
            soon = not (self._outstanding_bytes or self._unstarted)
            self._changed.notify_all()
        groups = group_reads(self._reader, batches, self._limit_bytes // 2, soon=soon)
        with self._changed:
            if self._round == seen:
                self._unstarted.extend(groups)

    def _next_to_start(self) -> ReadGroup | None:
        """The next group, if the limit has room for it or the consumer waits for one of its batches."""
        while self._unstarted and all(batch.handed_over for batch in self._unstarted[0].batches):
            self._unstarted.popleft()
        if not self._unstarted:
            return None
        group = self._unstarted[0]
        fits = self._outstanding_bytes + group.nbytes <= self._limit_bytes or self._outstanding_bytes == 0
        return group if fits or any(batch in group.batches for batch in self._wanted) else None

    def _start(self, group: ReadGroup, seen: int) -> None:
        with self._changed:
            if self._round != seen:
                return
            self._unstarted.popleft()
            for batch in group.batches:
                if not batch.handed_over:
                    batch.counted = True
                    self._outstanding_bytes += batch.nbytes
            self._receiving.append(group)
        group.start(self._plans, self._reader)

    def _receive(self, group: ReadGroup, seen: int, deadline: float | None) -> None:
        if self._reader.has_varying:
            self._start_values(seen)
        job = group.job
        if job is not None and job.unfinished:
            latest = time.monotonic() + self._reader.server.timeout_seconds
            latest = latest if deadline is None else min(latest, deadline)
            self._plans.step(latest, f"reading ahead {group.num_rows} rows of {self._reader.name!r}")
        if (job is None or not job.unfinished) and not (self._reader.has_varying and group.wants_values):
            with self._changed:
                if self._round != seen:
                    return
                self._receiving.popleft()
                group.finish(self._reader)
                self._changed.notify_all()

    def _start_values(self, seen: int) -> None:
        """Ask for the values of variable length of groups whose rows are there: now it is known how many they are."""
        for group in list(self._receiving):
            if not group.wants_values:
                continue
            group.start_values(self._plans, self._reader)
            with self._changed:
                if self._round != seen:
                    return
                for number, batch in enumerate(group.batches):
                    nbytes = len(batch.rows) * self._reader.spec.row_bytes + group.value_bytes(number)
                    if batch.counted and not batch.handed_over:
                        self._outstanding_bytes += nbytes - batch.nbytes
                    batch.nbytes = nbytes
