"""Chosen rows -> a batch: read, checked by their write numbers, drawn again where they were overwritten meanwhile."""

from __future__ import annotations

import copy
import os
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict

from td_datapipes.cost import CostModel
from td_datapipes.errors import (
    ConfigurationError,
    DataLossError,
    FieldNotFoundError,
    NotEnoughRowsError,
    TDDatapipesError,
)
from td_datapipes.replay.calls import Caller
from td_datapipes.replay.opening import Opener
from td_datapipes.replay.options import NStep, Prioritized, Sampler, Slices, value_at
from td_datapipes.replay.picks import Picker, Picks
from td_datapipes.replay.ring import INDEX, WEIGHT, WRITE_NUMBER, Numbers, Ring
from td_datapipes.schema import normalise_key
from td_datapipes.store import ReadOptions, RowReader
from td_datapipes.wire.cluster_reader import ClusterJob, ClusterPlanReader
from td_datapipes.wire.faults import RangeFault
from td_datapipes.wire.reader import ReadJob, ReadStats

__all__ = ["BatchMaker", "Begun", "Chosen", "OverwrittenError", "Request"]

_TAKE_OVER_SECONDS = 0.1
"""No server takes the place of another, and is written to, sooner."""


class OverwrittenError(NotEnoughRowsError):
    """What was drawn was overwritten before it could be read, until the deadline. Another try may be quicker."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A batch to be made.

    Attributes:
        count: rows (of slices: slices).
        sampler: how they are chosen.
        n_step: what each is given of the rows behind it.
        number: how many batches were asked for before; chance and schedules follow from it.
    """

    count: int
    sampler: Sampler
    n_step: NStep | None
    number: int


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """A batch whose rows are chosen.

    Attributes:
        request: what was asked for.
        picks: the rows.
        random: where chance goes on from.
        since: when they were chosen, on `time.monotonic`'s clock; long ago where that is not known.
    """

    request: Request
    picks: Picks
    random: np.random.Generator
    since: float


@dataclass(frozen=True, kw_only=True)
class Begun:
    """A batch whose rows are on their way.

    Attributes:
        chosen: its rows.
        arriving: the read, and the batch it fills; None where they could not be asked for yet.
        dialled: of how many connections it came over the latest.
    """

    chosen: Chosen
    arriving: tuple[ReadJob | ClusterJob, TensorDict] | None
    dialled: int


class BatchMaker:
    """Makes batches over a connection of its own. Not safe for threads: one owner at a time.

    Args:
        caller: how the server is called.
        opener: what the buffer is.
        seed: with a batch's number, all that its draws depend on.
        cursor_seconds: see `Picker`.
    """

    def __init__(self, caller: Caller, opener: Opener, seed: int, *, cursor_seconds: float = 0.0) -> None:
        self._caller, self._opener, self._seed = caller, opener, seed
        self._picker = Picker(caller, opener, cursor_seconds)
        self._looker = Picker(caller, opener)
        self._reader: RowReader | None = None
        self._plans: ClusterPlanReader | None = None
        self._pid = os.getpid()
        self._dialled = 0

    def choose(self, request: Request, deadline: float) -> Chosen:
        """Choose the rows of a batch, by a deadline on `time.monotonic`'s clock; errors as of `Picker.pick`."""
        since, random = time.monotonic() - self._picker.cursor_seconds, self._random(request)
        picks = self._picker.pick(request.count, request.sampler, request.n_step, random, deadline)
        return Chosen(request=request, picks=picks, random=random, since=since)

    def chosen(self, request: Request, picks: Picks) -> Chosen:
        """A batch whose rows were chosen before, perhaps by another process."""
        return Chosen(request=request, picks=picks, random=self._random(request), since=0.0)

    def _random(self, request: Request) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=[self._seed, request.number]))

    def begin(self, chosen: Chosen) -> Begun:
        """Ask for the rows of a batch. Batches that were begun are finished in the same order."""
        reader, plans = self._readers(chosen.picks.ring)
        plan = reader.plan(_rows_of(chosen.picks))
        arriving = None
        try:
            job = plans.start(plan)
            job.sink, batch = reader.new_batch(plan)
            arriving = (job, batch)
        except TDDatapipesError:  # what was chosen stays chosen: `finish` asks for it again
            self._dialled += 1
        return Begun(chosen=chosen, arriving=arriving, dialled=self._dialled)

    def _readers(self, ring: Ring) -> tuple[RowReader, ClusterPlanReader]:
        fresh = self._pid == os.getpid() and self._reader is not None and self._reader.manifest.id == ring.manifest.id
        if not fresh or self._reader is None or self._plans is None:
            self._pid = os.getpid()
            self.close()
            server, fields = self._caller.server, tuple(ring.manifest.schema.fields.values())
            # A server of its own, as the reader closes what it was given.
            self._reader = RowReader(copy.copy(server), ring.manifest, fields, ReadOptions(), CostModel())
            self._plans = self._reader.new_plan_reader(ReadStats())
        return self._reader, self._plans

    def finish(self, begun: Begun, deadline: float) -> TensorDict:
        """Receive a batch, and draw again what was overwritten between the two round trips.

        Args:
            begun: the batch.
            deadline: on `time.monotonic`'s clock.

        Raises:
            DataLossError: rows are missing on the server.
            NotEnoughRowsError, RateLimitError: see `Picker.pick`.
            OverwrittenError: the same happened to what was drawn in their place until the deadline.
            ServerTimeoutError, ServerUnavailableError, ServerError: the server failed until the deadline.
        """
        chosen = begun.chosen
        picks, request = chosen.picks, chosen.request
        batch = self._receive(begun, deadline)
        stale = self._stale(picks, batch, chosen.since)
        while len(stale):
            since = time.monotonic()
            again = self._looker.pick(
                len(stale), request.sampler, request.n_step, chosen.random, deadline, counted=False
            )
            rows = self._read(_rows_of(again), deadline)
            picks = picks.put(stale, again)
            width = picks.numbers.shape[1]
            batch[torch.from_numpy((stale[:, None] * width + np.arange(width)).reshape(-1))] = rows
            stale = stale[self._stale(again, rows, since)]
            if len(stale) and time.monotonic() >= deadline:
                raise OverwrittenError(
                    f"rows of buffer {self._opener.name!r} are overwritten faster than they can be read; "
                    f"make it larger, or hold writers back with rate_limit="
                )
        return self._dressed(batch, picks, request)

    def _receive(self, begun: Begun, deadline: float) -> TensorDict:
        # An error drops the connection, and with it whatever else was on its way there.
        if self._plans is not None and begun.arriving is not None and begun.dialled == self._dialled:
            job, batch = begun.arriving
            try:
                attempt = min(deadline, time.monotonic() + self._caller.server.timeout_seconds)
                self._plans.finish(job, attempt, f"sampling {self._opener.name!r}")
                return batch
            except (TDDatapipesError, RangeFault):
                # Read once more: a connection that broke is dialled anew, and what is wrong is explained.
                self._dialled += 1
        return self._read(_rows_of(begun.chosen.picks), deadline)

    def _read(self, rows: Numbers, deadline: float) -> TensorDict:
        reader = self._reader
        if reader is None:
            reader, _ = self._readers(self._opener.require())
        return self._caller.until(deadline, lambda: reader.read(rows))

    def _stale(self, picks: Picks, batch: TensorDict, since: float) -> Numbers:
        """Which of the picks' rows hold something else by now.

        Args:
            picks: rows.
            batch: what was read for them.
            since: when they were chosen.

        Raises:
            DataLossError: something older: rows that were stored are not there.
        """
        written = batch.get(WRITE_NUMBER[0]).numpy().reshape(picks.numbers.shape)
        differ = written != picks.numbers
        if not differ.any() and time.monotonic() - since < _TAKE_OVER_SECONDS:
            return np.empty(0, dtype=np.int64)
        # Another server may have taken over, without rows that were chosen, and given their numbers to others.
        void = self._void(picks)
        older = (written < picks.numbers) & ~void[:, None]
        if older.any():
            row, column = np.argwhere(older)[0]
            stripe, number = int(picks.stripes[row]), int(picks.numbers[row, column])
            key = picks.ring.manifest.chunk_key(0, self._chunk(picks.ring, stripe, number)).decode()
            raise DataLossError(
                f"buffer {self._opener.name!r} at {self._caller.server.address} has lost {int(older.sum())} of the "
                f"rows asked for, first row {number} of stripe {stripe} in {key}: the server has "
                f"{int(written[row, column])} there. The key was evicted (maxmemory), deleted, or written to by others"
            )
        return np.flatnonzero(differ.any(axis=1) | void)

    def _void(self, picks: Picks) -> npt.NDArray[np.bool_]:
        """Which of the picks name no row any more: the buffer was restored since, or has lost them."""
        ring = picks.ring
        states = self._looker.states(ring, self._caller.deadline(None))
        void = np.zeros(len(picks.stripes), dtype=bool)
        for stripe, (cursor, current) in enumerate(states):
            of_it = picks.stripes == stripe
            for incarnation in np.unique(picks.incarnations[of_it]).tolist():
                same = incarnation == current
                last = cursor if same else self._opener.last_named(ring, stripe, incarnation)
                void |= of_it & (picks.incarnations == incarnation) & (picks.numbers > last).any(axis=1)
        return void

    @staticmethod
    def _chunk(ring: Ring, stripe: int, number: int) -> int:
        return int(ring.rows_of(stripe, np.array([number]))[0]) // ring.layout.records_per_chunk

    def _dressed(self, batch: TensorDict, picks: Picks, request: Request) -> TensorDict:
        """The batch as the user sees it."""
        batch.del_(WRITE_NUMBER[0])
        count, width = picks.numbers.shape
        ring = picks.ring
        numbers = picks.numbers if isinstance(request.sampler, Slices) else picks.numbers[:, :1]
        incarnations, stripes = picks.incarnations[:, None], picks.stripes[:, None]
        index = torch.from_numpy((incarnations << 48) | ((numbers - 1) * ring.stripes + stripes))
        if isinstance(request.sampler, Slices):
            batch = batch.reshape(count, width, *batch.batch_size[1:])
            return batch.set(INDEX, index)
        if request.n_step is not None and picks.links is not None:
            batch = self._joined(batch, picks.links, request.n_step, ring)
        batch.set(INDEX, index[:, 0])
        if isinstance(request.sampler, Prioritized) and picks.probability is not None:
            beta = value_at(request.sampler.beta, request.number)
            weight = (picks.rows * picks.probability) ** -beta
            batch.set(WEIGHT, torch.from_numpy((weight / weight.max()).astype(np.float32)))
        return batch

    def _joined(self, batch: TensorDict, links: np.ndarray, n_step: NStep, ring: Ring) -> TensorDict:
        """Rows with the sums of their rewards and what is wanted of the rows behind them."""
        rows, behind = batch[0::2].contiguous(), batch[1::2]
        for name in n_step.next_fields:
            key = normalise_key(name)
            if key not in ring.schema.fields:
                raise FieldNotFoundError(f"n_step.next_fields names {key}, which rows do not have")
            if ("next", *key) in ring.schema.fields:
                raise ConfigurationError(
                    f"n_step.next_fields names {key}, but rows have a field {('next', *key)} already"
                )
            rows.set(("next", *key), behind.get(key).contiguous())
        trajectories = ring.options.trajectories
        if trajectories is not None and trajectories.reward is not None:
            reward = rows.get(normalise_key(trajectories.reward))
            total = torch.from_numpy(links[:, 1].copy()).to(reward.dtype)
            rows.set("n_step_return", total.reshape(reward.shape))
        flags = torch.from_numpy(links[:, 2].astype(np.int64))
        rows.set("n_steps", torch.from_numpy(links[:, 0].astype(np.int64)))
        rows.set("n_step_done", flags > 0)
        rows.set("n_step_terminated", flags >= 2)
        return rows

    def close(self) -> None:
        """Drop the connections."""
        if self._plans is not None:
            self._plans.close()
        if self._reader is not None:
            self._reader.close()
        self._reader = self._plans = None
        self._dialled += 1

    def abort(self) -> None:
        """Wake whoever waits for rows; the one call that another thread may make."""
        if self._plans is not None:
            self._plans.abort()


def _rows_of(picks: Picks) -> Numbers:
    """Where the rows lie, row after row of the batch."""
    stripes = np.repeat(picks.stripes, picks.numbers.shape[1])
    numbers = picks.numbers.reshape(-1)
    if picks.ring.stripes == 1:
        return picks.ring.rows_of(0, numbers)
    rows = np.empty_like(numbers)
    for stripe in range(picks.ring.stripes):
        of_it = stripes == stripe
        rows[of_it] = picks.ring.rows_of(stripe, numbers[of_it])
    return rows
