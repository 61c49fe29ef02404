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

from td_datapipes.errors import (
    ConfigurationError,
    RateLimitError,
    RowIndexError,
    SchemaError,
    ServerError,
    ServerFullError,
)
from td_datapipes.layouts import pack_records
from td_datapipes.manifest import SPARE_BYTES
from td_datapipes.replay.calls import Call, Caller
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
        self._memory: npt.NDArray[np.uint8] = np.zeros(0, dtype=np.uint8)
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
        rows, most = td.batch_size[0], self._most_rows(ring)
        # Parts that wait for nothing are sent together: the server stores one while the next is on its way.
        alone = ring.options.rate_limit is not None or ring.stripes > 1
        together = most if alone else max(most * _PARTS_TOGETHER, ring.staged_rows(0, rows))
        indices = [np.empty(0, dtype=np.int64)]
        with self._lock:
            for start in range(0, rows, together):
                some = td if together >= rows else td[start : start + together]
                begin = None if slot is None else (slot + start) % ring.stripe_capacity
                indices += self._store(ring, some, most, deadline, begin)
        return torch.from_numpy(np.concatenate(indices))

    @staticmethod
    def _most_rows(ring: Ring) -> int:
        """Rows of one call at most, where they are not staged."""
        limit, most, chunk = ring.options.rate_limit, ring.part_rows, ring.layout.records_per_chunk
        if limit is not None:
            # More rows at once than the limit's window holds would wait for ever.
            most = max(1, min(int(2 * limit.error_buffer / limit.samples_per_insert), most))
        return most // chunk * chunk if ring.stages and most > chunk else most

    def _store(
        self, ring: Ring, td: TensorDictBase, most: int, deadline: float, slot: int | None
    ) -> list[npt.NDArray[np.int64]]:
        """Store rows part by part; the indices of each."""
        rows = td.batch_size[0]
        stripe = self._turn % ring.stripes
        self._turn += 1
        self._pack(ring, td)
        written = self._opener.written(stripe)
        if written is not None:
            # Who writes alone knows the numbers beforehand; Lua would put them in one by one.
            number_records(self._records[:rows], written)
        calls, counts = [], []
        for start, count, staged in _parts(ring, rows, most, written):
            expected = None if slot is None else (slot + start) % ring.stripe_capacity
            behind = None if written is None else written + start
            calls.append(self._call(ring, stripe, range(start, start + count), staged, expected, behind))
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

    def _call(
        self, ring: Ring, stripe: int, rows: range, staged: bool, expected: int | None, written: int | None
    ) -> Call:
        """One part of what was packed.

        Args:
            ring: the buffer.
            stripe: one of its stripes.
            rows: of those that were packed.
            staged: each chunk as a string of its own.
            expected: the slot where the caller of `extend` expects the first row.
            written: what the rows' write numbers follow from, where they were put in.
        """
        self._calls += 1
        records = self._records[rows.start : rows.stop]
        joins = b"" if ring.joins is None else ring.joins.of(records)
        strings: list[tuple[bytes, memoryview]] = []
        if staged:
            stride, chunk = ring.layout.stride_bytes, ring.layout.records_per_chunk
            for number, first in enumerate(range(rows.start, rows.stop, chunk)):
                key = ring.staged_key(stripe, self._client, self._calls, number)
                # A chunk's spare bytes may be anything: here, what follows in memory.
                strings.append((key, self._memory[first * stride : first * stride + ring.chunk_bytes].data))
        payload = b"" if staged else records.reshape(-1).data
        optional = ["" if value is None else value for value in (expected, int(rows.start > 0), written)]
        arguments = [
            ring.prefix(stripe),
            self._calls,
            len(rows),
            payload,
            ANSWER_SECONDS,
            *optional,
            len(strings),
            joins,
        ]
        keys = [ring.state_key(stripe), ring.client_key(stripe, self._client), *(key for key, _ in strings)]
        return Call(keys=keys, arguments=arguments, staged=strings)

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
        if answer[0] == b"UNSTAGED":
            raise ServerFullError(
                f"{self._caller.server.address} has evicted or lost rows of {self._opener.name!r} on their way in: the "
                f"last {rows} rows and those behind them were not stored; give the server more memory (maxmemory)"
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
            self._pack(ring, td)
            return self._records[: td.batch_size[0]].tobytes()

    def _pack(self, ring: Ring, td: TensorDictBase) -> None:
        """Make the rows' records; in memory that the next call uses again."""
        rows, stride = td.batch_size[0], ring.layout.stride_bytes
        if self._records.shape[1] != stride or len(self._records) < rows:
            self._memory = np.zeros(rows * stride + SPARE_BYTES, dtype=np.uint8)
            self._records = self._memory[: rows * stride].reshape(rows, stride)
        pack_records(td, ring.user_group, self._records[:rows])


def _parts(ring: Ring, rows: int, most: int, written: int | None) -> Iterator[tuple[int, int, bool]]:
    """How rows are divided among calls: the first row of each, how many, and whether as whole chunks.

    Args:
        ring: the buffer.
        rows: how many.
        most: of a call that is not of whole chunks.
        written: rows there are before them, as far as is known: where they will lie follows from it.
    """
    start, chunk = 0, ring.layout.records_per_chunk
    while start < rows:
        count, staged = min(most, rows - start), 0
        if written is not None and ring.stages:
            slot = (written + start) % ring.stripe_capacity
            # A rate limit takes no more rows at once than its window holds.
            staged = ring.staged_rows(slot, rows - start if ring.options.rate_limit is None else count)
            count = staged or min(count, chunk - slot % chunk, ring.stripe_capacity - slot)
        yield start, count, staged > 0
        start += count
