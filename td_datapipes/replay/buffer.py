"""`RedisReplayBuffer`: what actors write to and learners sample from."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from td_datapipes.catalog import drop
from td_datapipes.errors import ConfigurationError, SchemaError
from td_datapipes.replay.batches import BatchQueue
from td_datapipes.replay.calls import Caller
from td_datapipes.replay.keeping import check_state, restore, snapshot
from td_datapipes.replay.opening import Opener, Wanted
from td_datapipes.replay.options import (
    NStep,
    Prioritized,
    PriorityReport,
    RateLimit,
    Sampler,
    Trajectories,
    Uniform,
    value_at,
)
from td_datapipes.replay.picks import Picker
from td_datapipes.replay.priorities import update_priorities
from td_datapipes.replay.reads import Request
from td_datapipes.replay.slots import SlotStore
from td_datapipes.replay.writes import RingWriter, as_rows, check_names
from td_datapipes.schema import Schema
from td_datapipes.wire.url import ServerURL

__all__ = ["RedisReplayBuffer"]

DEFAULT_TIMEOUT_SECONDS = 60.0


class RedisReplayBuffer:
    """A replay buffer on a Redis or Valkey server, shared by all who open its URL.

    Any number of processes write and sample at once. Rows are TensorDicts; the first that is written decides what a row
    is. When the buffer is full, each new row takes the place of the oldest. It pickles and forks: every process dials
    its own connections. An object may be used by several threads.

    Args:
        url: server and name, as for `RedisTDDataset`.
        capacity: rows it holds; needed by the process that writes first. The others may leave it and the options
            below out, and take what is there; what they do give has to agree with it.
        sampler: how `sample` chooses rows, unless it is told otherwise.
        n_step: what `sample` adds of the rows behind each row, unless it is told otherwise.
        batch_size: rows of a sample, unless it is told otherwise.
        prefetch: batches made ahead in the background, once `sample` was called: they are of the kind that was asked
            for first. They hold rows and priorities as they were when they were chosen.
        seed: makes draws repeat, as far as rows and priorities are the same; by default another one each time.
        trajectories: which fields say what row follows which; needed for slices and n-step returns.
        rate_limit: holds writers or samplers back, whoever is ahead.
        prioritized: keep priorities; False saves their updates. By default True.
        stripes: independent rings that rows are dealt to in turn, 1 by default; each lies within one shard. More
            than one give no order of all rows: neither Fifo nor Lifo nor a rate limit.
        chunk_bytes: longest stretch of records in one server string.
        timeout_seconds: how long a call may take, waiting for a rate limit or for a server that does not answer. One
            attempt waits for the URL's ``socket_timeout``, else for at most 10 s, and is repeated where the connection
            broke; a write that was carried out though its answer was lost is not carried out twice.

    Raises:
        URLError, ConfigurationError: arguments that cannot work, or that do not agree with the buffer that is there.
        ServerUnavailableError, ServerTimeoutError, AuthenticationError: the server cannot be reached or refuses.
    """

    def __init__(
        self,
        url: str,
        capacity: int | None = None,
        *,
        sampler: Sampler | None = None,
        n_step: NStep | None = None,
        batch_size: int | None = None,
        prefetch: int = 0,
        seed: int | None = None,
        trajectories: Trajectories | None = None,
        rate_limit: RateLimit | None = None,
        prioritized: bool | None = None,
        stripes: int | None = None,
        chunk_bytes: int | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> None:
        if prefetch < 0:
            raise ConfigurationError(f"prefetch must be 0 or more, got {prefetch}")
        wanted = Wanted(
            capacity=capacity,
            stripes=stripes,
            prioritized=prioritized,
            trajectories=trajectories,
            rate_limit=rate_limit,
            chunk_bytes=chunk_bytes,
        )
        self._caller = Caller(url, timeout_seconds)
        self._opener = Opener(self._caller, wanted)
        self._sampler: Sampler = Uniform() if sampler is None else sampler
        self._n_step, self._batch_size = n_step, batch_size
        seed = secrets.randbits(63) if seed is None else seed
        self._batches = BatchQueue(self._caller, self._opener, prefetch, seed)
        self._reset()
        try:
            self._opener.find()
        except BaseException:
            self._caller.server.close()
            raise

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._writer = RingWriter(self._caller, self._opener)
        self._looker = Picker(self._caller, self._opener)

    def _here(self) -> None:
        """After a fork, start anew: the parent's connections and thread are its own. The child draws otherwise."""
        if self._pid != os.getpid():
            self._batches.part_from(self._pid)
            self._reset()

    def extend(self, td: TensorDictBase, *, timeout_seconds: float | None = None) -> torch.Tensor:
        """Store rows behind the last ones, all fields of a row in one step.

        Rows of one call are stored in order, by one step where they fit a chunk, else part by part. Rows that are
        stored are there for everybody at once.

        Args:
            td: batch size ``[rows, ...]``, on any device.
            timeout_seconds: in place of the buffer's.

        Returns:
            The rows' indices, int64 ``[rows]``.

        Raises:
            SchemaError: a field is missing or new, or has another dtype or shape; nothing is stored.
            RateLimitError: samplers did not come after in time. Parts before the one that had to wait are stored.
            ServerFullError: the server is at maxmemory: what was there before is readable, the length is as it was.
            ServerTimeoutError, ServerUnavailableError: no answer in time; the last part may or may not be stored.
            DataLossError: the buffer is gone from the server, or has lost rows. It goes on from what is left.
        """
        self._here()
        rows = as_rows(td)
        if rows.batch_dims == 0:
            raise SchemaError("extend takes batch_size=[rows, ...]; for one row, call add")
        check_names(rows)
        return self._writer.extend(rows, timeout_seconds)

    def add(self, td: TensorDictBase, *, timeout_seconds: float | None = None) -> int:
        """Store one row, of batch size ``[]`` or more; see `extend`.

        Returns:
            Its index.
        """
        self._here()
        row = as_rows(td)
        check_names(row)
        return int(self._writer.extend(row.unsqueeze(0), timeout_seconds)[0])

    def sample(
        self,
        n: int | None = None,
        *,
        sampler: Sampler | None = None,
        n_step: NStep | None = None,
        timeout_seconds: float | None = None,
    ) -> TensorDict:
        """A batch of rows, in two round trips.

        Args:
            n: rows (with `Slices`: slices); by default the buffer's `batch_size`.
            sampler: in place of the buffer's.
            n_step: in place of the buffer's.
            timeout_seconds: in place of the buffer's.

        Returns:
            The rows' fields, and ``index``, int64 ``[n]``, which names each row for good. With `Prioritized` also
            ``weight``, float32 ``[n]``. With `NStep` also ``n_step_return``, ``n_steps`` (rewards in it),
            ``n_step_done`` and ``n_step_terminated`` (whether the last of them ended the trajectory) and, under
            ``next``, fields of the row behind them. With `Slices` the batch size is ``[n, length]``.

        Raises:
            NotEnoughRowsError: too few rows qualify.
            RateLimitError: writers did not come after in time.
            DataLossError: rows are missing on the server, or the buffer is gone.
            ServerTimeoutError, ServerUnavailableError: no answer in time.
        """
        self._here()
        count = self._batch_size if n is None else n
        if count is None:
            raise ConfigurationError("how many rows? Pass n to sample, or batch_size to the buffer")
        chosen = sampler or self._sampler
        # What the buffer adds by default goes with rows that are drawn one by one.
        joined = n_step or (self._n_step if isinstance(chosen, Uniform | Prioritized) else None)
        request = Request(count=int(count), sampler=chosen, n_step=joined, number=0)
        return self._batches.take(request, self._caller.deadline(timeout_seconds))

    def update_priority(
        self, index: torch.Tensor, priority: torch.Tensor, *, timeout_seconds: float | None = None
    ) -> PriorityReport:
        """Give rows new priorities. A row that has been overwritten since it was drawn is left alone, and reported.

        Args:
            index: as `sample` gave it, int64 ``[n]``; of a row named twice, the last priority counts.
            priority: 0 or more, ``[n]``, before `Prioritized.alpha` is applied.
            timeout_seconds: in place of the buffer's.

        Raises:
            ConfigurationError: the buffer keeps no priorities, or a priority is negative or not finite.
        """
        self._here()
        ring = self._opener.require()
        self._opener.require_priorities(ring)
        sampler = self._sampler if isinstance(self._sampler, Prioritized) else Prioritized()
        values = torch.as_tensor(priority).detach().reshape(-1).cpu().double().numpy()
        if not (np.isfinite(values).all() and (values >= 0).all()):
            raise ConfigurationError("priorities must be finite and 0 or more; take the absolute value of TD errors")
        masses = (values + sampler.eps) ** value_at(sampler.alpha, self._batches.number)
        indices = torch.as_tensor(index).detach().reshape(-1).cpu().long().numpy()
        if len(indices) != len(masses):
            raise ConfigurationError(f"{len(indices)} indices and {len(masses)} priorities: they go in pairs")
        deadline = self._caller.deadline(timeout_seconds)
        return update_priorities(self._caller, self._opener, ring, indices, masses, deadline)

    def __len__(self) -> int:
        """Rows there are, asked of the server: the same for everybody."""
        ring = self._opener.find()
        if ring is None:
            return 0
        states = self._looker.states(ring, self._caller.deadline(None))
        return sum(min(cursor, ring.stripe_capacity) for cursor, _ in states)

    @property
    def num_written(self) -> int:
        """Rows that were ever written, overwritten ones included; asked of the server."""
        ring = self._opener.find()
        if ring is None:
            return 0
        return sum(cursor for cursor, _ in self._looker.states(ring, self._caller.deadline(None)))

    @property
    def name(self) -> str:
        """The buffer's name."""
        return self._opener.name

    @property
    def url(self) -> ServerURL:
        """Where it is; its repr has no credentials."""
        return self._caller.server.url

    @property
    def capacity(self) -> int | None:
        """Rows it holds; None while it is not made."""
        ring = self._opener.find()
        return None if ring is None else ring.options.capacity

    @property
    def schema(self) -> Schema | None:
        """What a row is; None while nobody has written."""
        ring = self._opener.find()
        return None if ring is None else ring.schema

    def state_dict(self) -> dict[str, Any]:
        """Where this object's sampling stands, in some hundred bytes without any secret; the rows stay on the server.

        Batches that were read ahead are kept by the server for a week, as the indices of their rows, and handed out
        first by whoever loads the state.
        """
        self._here()
        return self._batches.state() | {"written": self.num_written}

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Go on where `state_dict` left off.

        Args:
            state: from `state_dict`.
            strict: raise where rows that were there then, or batches that had been read ahead, are there no longer;
                False goes on with what there is.

        Raises:
            StateError: the state is of another buffer or format, or what it needs is lost; the message says what.
        """
        self._here()
        check_state(state, self.name)
        self._batches.load(state, self.num_written, self._sampler, self._n_step, strict=strict)

    def snapshot(self, name: str, *, overwrite: bool = False) -> None:
        """Copy the buffer, as it is at one moment, to another name on the same server.

        The copy can be opened and sampled, not written. It is made by the server in one step (on each shard, one),
        which answers nobody else meanwhile: about a second for some gigabytes.

        Args:
            name: of the copy.
            overwrite: put it in the place of what the name stands for.

        Raises:
            DatasetExistsError: the name is taken.
            ServerFullError: there is no room for the copy.
        """
        snapshot(self._caller, self._opener.require(), name, overwrite=overwrite)

    def restore(self, name: str) -> None:
        """Put a snapshot in this buffer's place, for everybody who has it open. Indices drawn before are void.

        Raises:
            DatasetNotFoundError: there is no such snapshot.
            ConfigurationError: it is no snapshot, or one of a buffer made otherwise.
        """
        self._batches.end_ahead(keep=False)
        restore(self._caller, self._opener.find(), name)

    def clear(self) -> None:
        """Forget all rows, for everybody who has the buffer open. Indices drawn before are void."""
        ring = self._opener.find()
        if ring is None:
            return
        self._batches.end_ahead(keep=False)
        for stripe in range(ring.stripes):
            keys = [ring.state_key(stripe), *ring.keys(stripe)]
            answer = self._caller.run("replay_clear", keys, [], f"clearing {self.name!r}", self._caller.deadline(None))
            if answer[0] == b"GONE":
                raise self._opener.gone(ring)
            if answer[0] == b"FROZEN":
                raise ConfigurationError(f"{self.name!r} is a snapshot and stays as it is; drop it to remove it")

    def slots(self) -> SlotStore:
        """The buffer as an array of slots, for storages that are addressed by position (see `td_datapipes.torchrl`)."""
        return SlotStore(self._caller, self._opener)

    @property
    def caller(self) -> Caller:
        """How the server is called."""
        return self._caller

    def drop(self) -> None:
        """Remove the buffer from the server. Those who have it open get a `DataLossError`."""
        self.close()
        if self._opener.find() is not None:
            drop(self._caller.server, self.name)
            self._opener.forget()

    def close(self) -> None:
        """End reading ahead and drop the connections. Using the buffer again dials anew."""
        if self._pid == os.getpid():
            self._batches.close()
        self._caller.server.close()

    def __enter__(self) -> RedisReplayBuffer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        names = ("_caller", "_opener", "_sampler", "_n_step", "_batch_size")
        kept = {name: self.__dict__[name] for name in names}
        return kept | {"prefetch": self._batches.prefetch, "seed": self._batches.seed, "pid": os.getpid()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        pid, prefetch, seed = (state.pop(name) for name in ("pid", "prefetch", "seed"))
        self.__dict__.update(state)
        self._batches = BatchQueue(self._caller, self._opener, prefetch, seed)
        if pid != os.getpid():
            self._batches.part_from(pid)
        self._reset()

    def __repr__(self) -> str:
        ring = self._opener.known
        what = "not made yet" if ring is None else f"capacity={ring.options.capacity}"
        return f"{type(self).__name__}({str(self.url)!r}, {what}, sampler={self._sampler})"
