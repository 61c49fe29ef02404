"""Who takes which positions of an order: shares of ranks and workers, and cursors to resume from. Pure, no I/O.

A share is a pure function of a few integers, so any batch of any rank can be looked up at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from td_datapipes.errors import StateError

__all__ = ["Cursor", "Share", "Tail", "fingerprint", "worker_batches", "worker_spans"]

Rows = NDArray[np.int64]
Tail = Literal["drop", "pad"]

CURSOR_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Share:
    """A rank's part of each global batch. Every rank gets as many batches, and as many rows in each.

    Global batch k is the positions [start + k * G, start + (k + 1) * G) of the global order, with
    G = batch_size * world_size. Rank r takes the r-th of ``world_size`` equal parts of it.

    Attributes:
        length: positions of the epoch's order.
        start: positions consumed before batch 0, by another number of ranks perhaps.
        batch_size: rows of a rank's batch.
        rank: this rank.
        world_size: number of ranks.
        tail: what becomes of a last global batch that is not full: ``drop`` leaves it out; ``pad`` divides it equally,
            and repeats fewer than ``world_size`` rows from the order's beginning to make it divide.
    """

    length: int
    start: int = 0
    batch_size: int
    rank: int = 0
    world_size: int = 1
    tail: Tail = "pad"

    @property
    def global_batch_rows(self) -> int:
        """Positions of a full global batch."""
        return self.batch_size * self.world_size

    @property
    def num_full(self) -> int:
        """Full batches of each rank."""
        return max(self.length - self.start, 0) // self.global_batch_rows

    @property
    def num_batches(self) -> int:
        """Batches of each rank, a last one that is not full included."""
        rest = max(self.length - self.start, 0) % self.global_batch_rows
        return self.num_full + (self.tail == "pad" and rest > 0)

    def consumed(self, num_batches: int) -> int:
        """Positions that all ranks together have consumed after ``num_batches`` each, those before `start` included."""
        return min(self.start + num_batches * self.global_batch_rows, max(self.length, self.start))

    def span(self, batch: int) -> range:
        """The global batch's positions, padding left out."""
        return range(self.consumed(batch), self.consumed(batch + 1))

    def part(self, num_positions: int) -> tuple[range, int]:
        """This rank's part of a global batch of ``num_positions``: which of them, and how many padding rows follow."""
        size = -(-num_positions // self.world_size)
        first, stop = (min(edge * size, num_positions) for edge in (self.rank, self.rank + 1))
        return range(first, stop), size - (stop - first)

    def positions(self, batch: int) -> tuple[Rows, int]:
        """This rank's positions of a batch, in order, and how many at the end are padding."""
        span = self.span(batch)
        part, padded = self.part(len(span))
        mine = np.arange(span.start + part.start, span.start + part.stop)
        return (np.concatenate([mine, self.padding(padded)]) if padded else mine), padded

    def padded(self, batch: int) -> int:
        """How many of this rank's positions of a batch are padding."""
        return 0 if batch < self.num_full else self.part(len(self.span(batch)))[1]

    def positions_of(self, first: int, stop: int) -> list[Rows]:
        """This rank's positions of each of the batches ``first`` to ``stop``, padding included."""
        full = np.arange(first, max(min(stop, self.num_full), first))
        begins = self.start + self.rank * self.batch_size + full * self.global_batch_rows
        rest = range(first + len(full), stop)
        return [*(begins[:, None] + np.arange(self.batch_size)), *(self.positions(batch)[0] for batch in rest)]

    def padding(self, count: int) -> Rows:
        """The positions that ``count`` padding rows repeat."""
        return np.arange(count) % self.length


def worker_batches(num_batches: int, *, worker: int, num_workers: int) -> range:
    """The batches of one worker: dealt in turn, so a loader that asks its workers in turn gets them in order."""
    return range(worker, num_batches, num_workers)


def worker_spans(num_rows: int, *, unit_rows: int, worker: int, num_workers: int) -> Iterator[range]:
    """The positions of one worker, dealt in turn as spans of ``unit_rows``; only the very last span may be shorter.

    With the batch size as unit, workers that batch their own rows lose fewer rows than one batch in all when they drop
    a short last one. Workers beyond the number of spans get none.
    """
    for first in range(worker * unit_rows, num_rows, unit_rows * num_workers):
        yield range(first, min(first + unit_rows, num_rows))


@dataclass(frozen=True, kw_only=True)
class Cursor:
    """A place in the global order, for any number of ranks and workers: the elastic cursor.

    Attributes:
        seed: the run's seed.
        epoch: the epoch.
        rows: rows of the data set that the order is over.
        rows_consumed: rows of the order that all ranks together have consumed in this epoch.
        fingerprint: which order it is, see `fingerprint`.
        version: of this form.
    """

    seed: int
    epoch: int
    rows: int
    rows_consumed: int
    fingerprint: str
    version: int = CURSOR_VERSION

    def to_dict(self) -> dict[str, int | str]:
        """A few integers and a string, fit for JSON."""
        return {
            "version": self.version,
            "seed": self.seed,
            "epoch": self.epoch,
            "rows": self.rows,
            "rows_consumed": self.rows_consumed,
            "fingerprint": self.fingerprint,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The cursor that `to_dict` wrote.

        Raises:
            StateError: another version, a key missing, or a value of another type.
        """
        if values.get("version") != CURSOR_VERSION:
            raise StateError(f"a cursor of version {CURSOR_VERSION} is needed, got {values.get('version')!r}")
        numbers: dict[str, Any] = {name: values.get(name) for name in ("seed", "epoch", "rows", "rows_consumed")}
        for name, value in numbers.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise StateError(f"a cursor's {name} is an integer >= 0, got {value!r}")
        if not isinstance(values.get("fingerprint"), str):
            raise StateError(f"a cursor's fingerprint is a string, got {values.get('fingerprint')!r}")
        return cls(**numbers, fingerprint=values["fingerprint"])


def fingerprint(kind: str, data_source: object, rows: int, **arguments: int | str | bool) -> str:
    """Which order a sampler makes, readable: its kind, the rows, the arguments that matter, the data set's own.

    Equal strings promise equal orders for equal (seed, epoch). ``data_source.fingerprint``, if it is a string, is part.
    """
    named = ", ".join(f"{name}={value}" for name, value in {"rows": rows, **arguments}.items())
    own = getattr(data_source, "fingerprint", None)
    return f"{kind}({named})" + (f"@{own}" if isinstance(own, str) else "")
