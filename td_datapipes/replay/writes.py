"""Rows in: packed into records, each part stored by one call that may be repeated without harm."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDictBase, is_tensor_collection

from td_datapipes.errors import ConfigurationError, RateLimitError, RowIndexError, SchemaError
from td_datapipes.layouts import pack_records
from td_datapipes.replay.calls import Caller
from td_datapipes.replay.opening import Opener
from td_datapipes.replay.ring import ANSWER_SECONDS, RESERVED, Ring
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
        with self._lock:
            indices = []
            for part in self._parts(ring, td):
                indices.append(self._part(ring, part, deadline, slot))
                slot = None if slot is None else (slot + part.batch_size[0]) % ring.stripe_capacity
        return torch.from_numpy(np.concatenate([*indices, np.empty(0, dtype=np.int64)]))

    def _parts(self, ring: Ring, td: TensorDictBase) -> Iterator[TensorDictBase]:
        rows, step = td.batch_size[0], ring.part_rows
        limit = ring.options.rate_limit
        if limit is not None and rows:
            # More rows at once than the limit's window holds would wait for ever.
            most = min(2 * limit.error_buffer / limit.samples_per_insert, float(step))
            step = max(1, int(most))
        for start in range(0, rows, step):
            yield td if step >= rows else td[start : start + step]

    def _part(self, ring: Ring, td: TensorDictBase, deadline: float, slot: int | None) -> npt.NDArray[np.int64]:
        rows = td.batch_size[0]
        stripe = self._turn % ring.stripes
        self._turn += 1
        self._calls += 1
        keys = [ring.state_key(stripe), ring.client_key(stripe, self._client)]
        arguments = [ring.prefix(stripe), self._calls, rows, self._pack(ring, td), ANSWER_SECONDS]
        arguments.append("" if slot is None else slot)
        doing, pause = f"storing {rows} rows in {self._opener.name!r}", self._caller.first_pause()
        while True:
            answer = self._caller.run("replay_extend", keys, arguments, doing, deadline)
            if answer[0] == b"WAIT":
                if time.monotonic() >= deadline:
                    raise self._held(ring, answer, rows)
                pause = self._caller.pause(pause, deadline)
                continue
            break
        if answer[0] == b"MOVED":
            raise RowIndexError(
                f"slot {slot} of buffer {self._opener.name!r} is not the next to be written, another process has "
                f"written since: {int(answer[1])} rows by now"
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
