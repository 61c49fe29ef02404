"""Find a buffer by name, or make it when its first rows arrive; follow what becomes of it."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from typing import Any

from td_datapipes.catalog import discard, find_manifest, publish, stage
from td_datapipes.errors import (
    ConfigurationError,
    DataLossError,
    DatasetExistsError,
    InterruptedWriteError,
    NotEnoughRowsError,
    RateLimitError,
    SchemaError,
)
from td_datapipes.garbage import writer_note
from td_datapipes.replay.calls import Caller
from td_datapipes.replay.options import Prioritized, RateLimit, Trajectories
from td_datapipes.replay.ring import Ring, RingOptions, last_named, new_ring
from td_datapipes.room import longest_chunk, shard_tags
from td_datapipes.schema import Schema

__all__ = ["Opener", "Wanted"]


class Wanted:
    """What a process asks of a buffer; None asks for nothing in particular."""

    def __init__(
        self,
        *,
        capacity: int | None,
        stripes: int | None,
        prioritized: bool | None,
        trajectories: Trajectories | None,
        rate_limit: RateLimit | None,
        chunk_bytes: int | None,
    ) -> None:
        self._asked: dict[str, Any] = {
            "capacity": capacity,
            "stripes": stripes,
            "prioritized": prioritized,
            "trajectories": trajectories,
            "rate_limit": rate_limit,
        }
        self.chunk_bytes = chunk_bytes
        if capacity is not None:
            self.options()  # refuses what cannot work before anything is sent

    def options(self) -> RingOptions:
        """For a buffer that is to be made."""
        if self._asked["capacity"] is None:
            raise ConfigurationError("the buffer does not exist yet; pass capacity= to make it")
        return RingOptions(**{name: value for name, value in self._asked.items() if value is not None})

    @property
    def waits(self) -> bool:
        """Whether samplers wait for rows."""
        return self._asked["rate_limit"] is not None

    def check(self, ring: Ring, address: str) -> None:
        """Raises ConfigurationError where the buffer that is there was made otherwise."""
        for name, value in self._asked.items():
            found = getattr(ring.options, name)
            if value is not None and value != found:
                raise ConfigurationError(
                    f"buffer {ring.manifest.name!r} at {address} was made with {name}={found}, not {value}; leave "
                    f"{name} out to take what is there, or choose another name"
                )


@dataclass(frozen=True, kw_only=True)
class _Lineage:
    """How far a stripe is written, and by whom; see `td_datapipes.replay.ring.last_named`."""

    cursor: int
    incarnation: int
    former: bytes

    def last_named(self, named: int) -> int | None:
        """The last row that an incarnation's indices still name."""
        return last_named(named, self.cursor, self.incarnation, self.former)


class Opener:
    """The ring that a name stands for, as this process knows it. Safe for threads.

    Args:
        caller: how the server is called.
        wanted: what the buffer should be.
    """

    def __init__(self, caller: Caller, wanted: Wanted) -> None:
        self._caller, self._wanted = caller, wanted
        self._lock = threading.Lock()
        self._ring: Ring | None = None
        self._seen: dict[int, tuple[int, int]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_caller": self._caller, "_wanted": self._wanted, "_ring": self._ring, "_seen": dict(self._seen)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """The buffer's name."""
        return self._caller.server.url.name

    @property
    def known(self) -> Ring | None:
        """The ring, if it was found already; nobody is asked."""
        return self._ring

    def forget(self) -> None:
        """What was known of the ring holds no longer."""
        with self._lock:
            self._ring = None
            self._seen.clear()

    def find(self) -> Ring | None:
        """The ring, or None while nobody has written.

        Raises:
            ConfigurationError: the name is something else, or the buffer was made otherwise.
        """
        if self._ring is None:
            manifest = self._caller.briefly(lambda: find_manifest(self._caller.server, self.name))
            if manifest is not None:
                ring = Ring(manifest)
                self._wanted.check(ring, self._caller.server.address)
                self._ring = ring
        return self._ring

    def require(self) -> Ring:
        """The ring.

        Raises:
            NotEnoughRowsError: nobody has written yet.
        """
        ring = self.find()
        if ring is None:
            raise NotEnoughRowsError(
                f"buffer {self.name!r} at {self._caller.server.address} is empty: no process has written to it yet"
            )
        return ring

    def require_by(self, deadline: float) -> Ring:
        """The ring; waits for it where a rate limit was asked for, which has samplers wait.

        Raises:
            RateLimitError: nobody has written by the deadline.
            NotEnoughRowsError: nobody has written, and no rate limit was asked for.
        """
        pause = self._caller.first_pause()
        while (ring := self.find()) is None and self._wanted.waits:
            if time.monotonic() >= deadline:
                raise RateLimitError(f"nobody has written to buffer {self.name!r} in time, so there is none yet")
            pause = self._caller.pause(pause, deadline)
        return ring or self.require()

    def require_for(self, rows: Schema) -> Ring:
        """The ring, made now if it is not there.

        Raises:
            SchemaError: its rows are others, or cannot be in a ring; the message names the field.
        """
        rows.require_dense("a replay buffer")
        with self._lock:
            ring = self.find() or self._make(rows)
        if not ring.schema.same_rows(rows):
            raise SchemaError(
                f"rows differ from those of buffer {self.name!r} at {self._caller.server.address}: "
                f"{rows.difference(ring.schema)} (here: what was given, there: the buffer)"
            )
        return ring

    def _make(self, rows: Schema) -> Ring:
        server, briefly, wanted = self._caller.server, self._caller.briefly, self._wanted
        chunk_bytes = briefly(lambda: longest_chunk(server, wanted.chunk_bytes))
        ring = new_ring(self.name, rows, wanted.options(), chunk_bytes)
        if ring.stripes > 1:  # a single one lies where its id, which is random, has it lie
            tags = briefly(lambda: shard_tags(server, ring.manifest.id, ring.stripes))
            ring = Ring(replace(ring.manifest, tags=tags))
        note = writer_note(ring.manifest, time.time())
        briefly(lambda: stage(server, self.name, ring.manifest.id, note))
        deadline = self._caller.deadline(None)
        for stripe in range(ring.stripes):
            fields, key = [part for pair in ring.state(stripe).items() for part in pair], ring.state_key(stripe)
            self._caller.run("replay_create", [key], fields, f"making buffer {self.name!r}", deadline)
        try:
            briefly(lambda: publish(server, ring.manifest, None, ring.manifest.id))
        except DatasetExistsError:  # another process was first, or this one was and did not hear of it
            found = self.find()
            if found is None:
                raise
            if found.manifest.id != ring.manifest.id:
                briefly(lambda: discard(server, ring.manifest, ring.manifest.id))
            return found
        except InterruptedWriteError:  # collected meanwhile: what was made since then goes too
            briefly(lambda: discard(server, ring.manifest, ring.manifest.id))
            raise
        self._ring = ring
        return ring

    def observe(self, ring: Ring, stripe: int, cursor: int, incarnation: int) -> None:
        """Take note of how far a stripe was written.

        Raises:
            DataLossError: rows that were there are gone, as after a restart from an older file, or where a replica
                took over that had not got them yet; once for each loss.
        """
        with self._lock:
            before = self._seen.get(stripe)
            self._seen[stripe] = (incarnation, cursor)
            if before is None or (before[0] == incarnation and cursor >= before[1]):
                return
            # Answers of two threads may pass each other: only what a fresh look confirms is lost.
            now = self._look(ring, stripe)
            self._seen[stripe] = (now.incarnation, now.cursor)
            kept = now.last_named(before[0])
            if kept is not None and kept < before[1]:
                raise DataLossError(
                    f"buffer {self.name!r} at {self._caller.server.address} has lost its last {before[1] - kept} "
                    f"rows: {before[1]} had been written, the server has {kept} of them. It was restarted from a file "
                    f"older than that, or a replica took over that had not got them; what is there now is usable. "
                    f"Turn on appendonly, or min-replicas-to-write, to lose less"
                )

    def written(self, stripe: int) -> int | None:
        """How many rows a stripe had been given when it was last heard of; None where it never was."""
        seen = self._seen.get(stripe)
        return None if seen is None else seen[1]

    def last_named(self, ring: Ring, stripe: int, incarnation: int) -> int:
        """The last row of a stripe that an incarnation's indices name by now; 0 where they name none."""
        return self._look(ring, stripe).last_named(incarnation) or 0

    def _look(self, ring: Ring, stripe: int) -> _Lineage:
        state: Any = self._caller.retry(
            "looking for lost rows",
            lambda client: client.hmget(ring.state_key(stripe), ["cursor", "incarnation", "former"]),
            self._caller.deadline(None),
        )
        return _Lineage(cursor=int(state[0] or 0), incarnation=int(state[1] or 0), former=state[2] or b"")

    def gone(self, ring: Ring) -> DataLossError:
        """The error for a ring whose state is no longer there. The next write makes the buffer anew."""
        with self._lock:
            lost = sum(min(cursor, ring.stripe_capacity) for _, cursor in self._seen.values())
            self._ring = None
            self._seen.clear()
        address = self._caller.server.address
        what = f"at least {lost} rows, all there were" if lost else "everything"
        return DataLossError(
            f"buffer {self.name!r} at {address} has lost {what}: its state is gone from the server, which was "
            f" restarted without persistence, evicted it (maxmemory) or had it deleted. The next extend "
            f"makes it anew"
        )

    def require_priorities(self, ring: Ring) -> None:
        """Raises ConfigurationError where the ring keeps no priorities."""
        if not ring.options.prioritized:
            raise ConfigurationError(
                f"buffer {self.name!r} was made with prioritized=False, so {Prioritized.__name__} cannot sample it; "
                f"make it under another name with prioritized=True"
            )

    def require_trajectories(self, ring: Ring, what: str, *roles: str) -> None:
        """Raises ConfigurationError where the ring does not know what rows belong together."""
        joined = ring.options.trajectories
        missing = [role for role in roles if joined is None or getattr(joined, role) is None]
        if joined is None or missing:
            raise ConfigurationError(
                f"{what} needs to know which rows follow which: make buffer {self.name!r} with "
                f"trajectories=Trajectories(id=..., step=..., {', '.join(f'{role}=...' for role in roles)})"
            )
