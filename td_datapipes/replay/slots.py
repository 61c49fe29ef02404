"""A ring seen as an array of slots, as torchrl's storages are: read and written by position."""

from __future__ import annotations

import copy
import os
import time
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from td_datapipes.cost import CostModel
from td_datapipes.errors import ConfigurationError, DataLossError, RowIndexError
from td_datapipes.replay.calls import Caller
from td_datapipes.replay.opening import Opener
from td_datapipes.replay.picks import Picker
from td_datapipes.replay.ring import WRITE_NUMBER, Numbers, Ring
from td_datapipes.replay.writes import RingWriter
from td_datapipes.schema import schema_of
from td_datapipes.store import ReadOptions, RowReader

__all__ = ["SlotStore"]

GAP_SECONDS = 5.0
"""How long a write waits for the rows before it, which another process has yet to write."""


class SlotStore:
    """Slots of one ring. Safe for threads; a forked child dials anew.

    Args:
        caller: how the server is called.
        opener: what the buffer is; one stripe.
    """

    def __init__(self, caller: Caller, opener: Opener) -> None:
        self._caller, self._opener = caller, opener
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._writer = RingWriter(self._caller, self._opener)
        self._looker = Picker(self._caller, self._opener)
        self._reader: RowReader | None = None
        self._known_rows = (-1, 0)

    def state(self) -> tuple[int, int, int]:
        """Cursor, incarnation, and how often slots were written over, by anybody."""
        ring = self._opener.find()
        if ring is None:
            return 0, 0, 0
        key = ring.state_key(0)
        found: Any = self._caller.retry(
            f"looking at {self._opener.name!r}",
            lambda client: client.hmget(key, ["cursor", "incarnation", "sets"]),
            self._caller.deadline(None),
        )
        if found[0] is None:
            raise self._opener.gone(ring)
        self._opener.observe(ring, 0, int(found[0]), int(found[1]))
        return int(found[0]), int(found[1]), int(found[2] or b"0")

    def __len__(self) -> int:
        cursor, incarnation, _ = self.state()
        ring = self._opener.known
        size = 0 if ring is None else min(cursor, ring.stripe_capacity)
        self._known_rows = (incarnation, size)
        return size

    def append(self, td: TensorDictBase) -> torch.Tensor:
        """Store rows where the server's cursor is.

        Returns:
            Their slots, int64 ``[rows]``.
        """
        if self._pid != os.getpid():
            self._reset()
        indices = self._writer.extend(td, None)
        ring = self._opener.require()
        return (indices & ((1 << 48) - 1)) % ring.stripe_capacity

    def write(self, slots: Numbers, td: TensorDictBase) -> None:
        """Store rows in slots: behind the last one, or over what is there.

        Args:
            slots: ``[rows]``; adjacent ones that begin where the next row comes to lie move the cursor.
            td: batch size ``[rows, ...]``.

        Raises:
            RowIndexError: rows before these were never written, nor came within some seconds.
        """
        if self._pid != os.getpid():
            self._reset()
        ring = self._opener.require_for(schema_of(td))
        capacity = ring.stripe_capacity
        if len(slots) and not (int(slots.min()) >= 0 and int(slots.max()) < capacity):
            raise RowIndexError(f"slots are within [0, {capacity}), got {int(slots.min())} to {int(slots.max())}")
        deadline = time.monotonic() + min(GAP_SECONDS, self._caller.timeout_seconds)
        pause, done = self._caller.first_pause(), 0
        while done < len(slots):
            cursor, _, _ = self.state()
            left, rows = slots[done:], td[done:]
            run = _first_run(left, capacity)
            if int(left[0]) == cursor % capacity and (run == len(left) or cursor < capacity):
                try:
                    self._writer.extend(rows[:run], None, int(left[0]))
                    done += run
                except RowIndexError:  # another process was first: these are rows that are there by now
                    pass
            elif self._over(ring, left, rows, cursor):
                return
            elif time.monotonic() >= deadline:
                raise RowIndexError(
                    f"slots {int(slots.min())} to {int(slots.max())} of {self._opener.name!r} cannot be written: "
                    f"{min(cursor, capacity)} rows are there, and the ones between were not written in time; write in "
                    f"order, or use RedisWriter, whose cursor all processes share"
                )
            else:
                pause = self._caller.pause(pause, deadline)

    def _over(self, ring: Ring, slots: Numbers, td: TensorDictBase, cursor: int) -> bool:
        """Write over rows; False where one of the slots was never written."""
        if len(slots) and int(slots.max()) >= min(cursor, ring.stripe_capacity):
            return False
        if ring.options.trajectories is not None:
            raise ConfigurationError(
                f"buffer {self._opener.name!r} joins rows to trajectories, which writing over rows would break; "
                f"append to it, or make it without trajectories="
            )
        for start in range(0, len(slots), ring.part_rows):
            part = slots[start : start + ring.part_rows]
            records = self._writer.packed(ring, td[start : start + ring.part_rows])
            arguments = [ring.prefix(0), part.astype("<f8").tobytes(), records]
            doing = f"writing over {len(part)} rows of {self._opener.name!r}"
            answer = self._caller.run("replay_set", [ring.state_key(0)], arguments, doing, self._caller.deadline(None))
            if answer[0] == b"GONE":
                raise self._opener.gone(ring)
            if answer[0] == b"FROZEN":
                raise ConfigurationError(f"{self._opener.name!r} is a snapshot and takes no rows")
            if answer[0] == b"BEYOND":
                return False
        return True

    def read(self, slots: Numbers) -> TensorDict:
        """What lies in slots.

        Raises:
            RowIndexError: a slot that was never written.
            DataLossError: the server has lost what was.
        """
        if self._pid != os.getpid():
            self._reset()
        ring = self._opener.require()
        rows = self._known_rows[1]
        if len(slots) and not (int(slots.min()) >= 0 and int(slots.max()) < rows):
            rows = len(self)
            if int(slots.min()) < 0 or int(slots.max()) >= rows:
                raise RowIndexError(
                    f"slots are within [0, {rows}) while {rows} rows are there, got {int(slots.min())} to "
                    f"{int(slots.max())}"
                )
        reader = self._row_reader(ring)
        where = ring.rows_of(0, slots + 1)
        batch: TensorDict = self._caller.until(self._caller.deadline(None), lambda: reader.read(where))
        written = batch.get(WRITE_NUMBER[0])
        if len(slots) and not bool((written > 0).all()):
            lost = slots[(written <= 0).numpy()]
            raise DataLossError(
                f"buffer {self._opener.name!r} has lost {len(lost)} of the rows asked for, first slot {int(lost[0])}: "
                f"its chunk was evicted (maxmemory) or deleted"
            )
        batch.del_(WRITE_NUMBER[0])
        return batch

    def _row_reader(self, ring: Ring) -> RowReader:
        if self._reader is None or self._reader.manifest.id != ring.manifest.id:
            fields = tuple(ring.manifest.schema.fields.values())
            self._reader = RowReader(copy.copy(self._caller.server), ring.manifest, fields, ReadOptions(), CostModel())
        return self._reader

    def forget(self) -> None:
        """What was known of the length holds no longer."""
        self._known_rows = (-1, 0)

    def close(self) -> None:
        """Drop the connections."""
        if self._reader is not None and self._pid == os.getpid():
            self._reader.close()
        self._reader = None

    def __del__(self) -> None:
        with suppress(Exception):  # as the interpreter ends, what this needs may be gone
            self.close()


def _first_run(slots: Numbers, capacity: int) -> int:
    """How many slots from the first on are adjacent, around the ring's end too."""
    breaks = np.flatnonzero((slots[1:] - slots[:-1] - 1) % capacity != 0)
    return int(breaks[0]) + 1 if len(breaks) else len(slots)
