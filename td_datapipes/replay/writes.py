"""Rows in: packed into records, each part stored by one call that may be repeated without harm."""

from __future__ import annotations

import os
import secrets
import threading
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDictBase, is_tensor_collection

from td_datapipes.errors import ConfigurationError, RateLimitError, RowIndexError, SchemaError, ServerError
from td_datapipes.layouts import pack_records
from td_datapipes.replay.calls import Caller
from td_datapipes.replay.opening import Opener
from td_datapipes.replay.ring import ANSWER_SECONDS, RESERVED, Ring, number_records
from td_datapipes.schema import schema_of

__all__ = ["RingWriter", "as_rows", "check_names"]


def as_rows(rows: Any) -> TensorDictBase:
    """A TensorDict or tensorclass of batch size ``[rows, ...]``.

    Raises:
        SchemaError: it is none.
    """
    if isinstance(rows, TensorDictBase):
        return rows
    if is_tensor_collection(rows):
        plain: TensorDictBase = rows.to_tensordict(retain_none=False)
        return plain
    raise SchemaError(
        f"rows are a TensorDict, not {type(rows).__name__}; wrap a dict: TensorDict(data, batch_size=[n])"
    )


def check_names(rows: TensorDictBase) -> None:
    """Raises SchemaError where a field's name is one that sampling gives to a field of its own."""
    taken = [name for name in rows.keys() if name in RESERVED]  # noqa: SIM118 - a TensorDict iterates over rows
    if taken:
        raise SchemaError(f"field {taken[0]!r} has a name that sampling adds ({', '.join(RESERVED)}); rename it")


_PARTS_TOGETHER = 4


class RingWriter:
    """One process's writes to a buffer. Safe for threads; a forked child becomes a writer of its own.

    Args:
        caller: how the server is called.
        opener: what the buffer is.
    """

    def __init__(self, caller: Caller, opener: Opener) -> None:
        self._caller, self._opener = caller, opener
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._client = f"w{secrets.token_hex(8)}"
        self._calls = 0
        self._turn = secrets.randbelow(1 << 16)
        self._records: npt.NDArray[np.uint8] = np.zeros((0, 0), dtype=np.uint8)

    def extend(self, td: TensorDictBase, timeout_seconds: float | None, slot: int | None = None) -> torch.Tensor:
        """Store rows; see `RedisReplayBuffer.extend`.

        Args:
            td: rows.
            timeout_seconds: for all of it.
            slot: where the caller expects the first row to come to lie.

        Raises:
            RowIndexError: another process has written there; nothing is stored.
        """
        if self._pid != os.getpid():
            self._reset()
        ring = self._opener.require_for(schema_of(td))
        deadline = self._caller.deadline(timeout_seconds)
        rows, step = td.batch_size[0], self._part_rows(ring)
        # Parts that wait for nothing are sent together: the server stores one while the next is on its way.
        together = step if ring.options.rate_limit is not None or ring.stripes > 1 else step * _PARTS_TOGETHER
        indices = [np.empty(0, dtype=np.int64)]
        with self._lock:
            for start in range(0, rows, together):
                some = td if together >= rows else td[start : start + together]
                begin = None if slot is None else (slot + start) % ring.stripe_capacity
                indices += self._store(ring, some, step, deadline, begin)
        return torch.from_numpy(np.concatenate(indices))

    @staticmethod
    def _part_rows(ring: Ring) -> int:
        """Rows of one call at most."""
        limit = ring.options.rate_limit
        if limit is None:
            return ring.part_rows
        # More rows at once than the limit's window holds would wait for ever.
        return max(1, int(min(2 * limit.error_buffer / limit.samples_per_insert, float(ring.part_rows))))

    def _store(
        self, ring: Ring, td: TensorDictBase, step: int, deadline: float, slot: int | None
    ) -> list[npt.NDArray[np.int64]]:
        """Store rows part by part; the indices of each."""
        rows, stride = td.batch_size[0], ring.layout.stride_bytes
        stripe = self._turn % ring.stripes
        self._turn += 1
        keys = [ring.state_key(stripe), ring.client_key(stripe, self._client)]
        records, calls, counts = self._pack(ring, td), [], []
        written = self._opener.written(stripe)
        if written is not None:
            # Who writes alone knows the numbers beforehand; Lua would put them in one by one.
            number_records(self._records[:rows], written)
        for start in range(0, rows, step):
            count = min(step, rows - start)
            self._calls += 1
            part = records[start * stride : (start + count) * stride]
            expected = "" if slot is None else (slot + start) % ring.stripe_capacity
            behind = "" if written is None else written + start
            arguments = [part, ANSWER_SECONDS, expected, int(start > 0), behind]
            calls.append((keys, [ring.prefix(stripe), self._calls, count, *arguments]))
            counts.append(count)
        doing, pause = f"storing {rows} rows in {self._opener.name!r}", self._caller.first_pause()
        while True:
            answers = self._caller.run_many("replay_extend", calls, doing, deadline)
            if isinstance(answers[0], Exception) or answers[0][0] != b"WAIT":
                break
            if time.monotonic() >= deadline:
                raise self._held(ring, answers[0], rows)
            pause = self._caller.pause(pause, deadline)
        return [self._settle(ring, stripe, answer, count) for answer, count in zip(answers, counts, strict=True)]

    def _settle(self, ring: Ring, stripe: int, answer: Any, rows: int) -> npt.NDArray[np.int64]:
        """The indices of a part's rows, or the error that kept it, and those behind it, from being stored."""
        if isinstance(answer, Exception):
            raise answer
        if answer[0] == b"MOVED":
            raise RowIndexError(
                f"the slots to be written in {self._opener.name!r} are not the next ones, another process has written "
                f"since: {int(answer[1])} rows by now"
            )
        if answer[0] == b"AFTER":
            raise ServerError(
                f"{self._caller.server.address} no longer knows this writer's last call to {self._opener.name!r} "
                f"(its key was evicted or deleted): the last {rows} rows and those behind them were not stored"
            )
        if answer[0] == b"GONE":
            raise self._opener.gone(ring)
        if answer[0] == b"FROZEN":
            raise ConfigurationError(
                f"{self._opener.name!r} is a snapshot and takes no rows; write to the buffer it was made from"
            )
        cursor, incarnation = int(answer[1]), int(answer[2])
        self._opener.observe(ring, stripe, cursor + rows, incarnation)
        return ring.indices_of(stripe, np.arange(cursor + 1, cursor + rows + 1), incarnation)

    def _held(self, ring: Ring, answer: list[bytes], rows: int) -> RateLimitError:
        limit = ring.options.rate_limit
        return RateLimitError(
            f"buffer {self._opener.name!r} took no {rows} more rows in time: {int(answer[1])} rows were written and "
            f"{int(answer[2])} samples drawn, and {limit} holds writers back until more are drawn"
        )

    def packed(self, ring: Ring, td: TensorDictBase) -> bytes:
        """The rows' records, without write numbers."""
        with self._lock:
            return bytes(self._pack(ring, td))

    def _pack(self, ring: Ring, td: TensorDictBase) -> memoryview:
        """The rows' records; in memory that the next call uses again."""
        rows, stride = td.batch_size[0], ring.layout.stride_bytes
        if self._records.shape[1] != stride or len(self._records) < rows:
            self._records = np.zeros((rows, stride), dtype=np.uint8)
        out = self._records[:rows]
        pack_records(td, ring.user_group, out)
        return out.reshape(-1).data
