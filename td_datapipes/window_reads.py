"""Announced batches as reads: which are read together, and what becomes of each when its bytes are there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
from tensordict import TensorDict

from td_datapipes.assemble import BatchSink
from td_datapipes.heap_batch import ValuesBatch
from td_datapipes.plan import ReadPlan
from td_datapipes.read_spec import Rows
from td_datapipes.store import RowReader
from td_datapipes.wire.cluster_reader import ClusterJob, ClusterPlanReader
from td_datapipes.wire.reader import ReadJob

__all__ = ["BatchRead", "ReadGroup", "group_reads"]

_READ_BYTES = 5 << 19
"""Small batches are read so many bytes at once: what a read costs besides its bytes is then little of it."""


@dataclass(eq=False)
class BatchRead:
    """One announced batch on its way.

    Attributes:
        ordinal: which batch of the epoch.
        rows: its rows, in order, ``[n]``.
        nbytes: what it counts for while it is on its way.
        make: gives the batch, once its bytes are there. Who takes it makes it: the thread that reads has enough to do.
        counted: whether its bytes are counted.
        handed_over: whether it is the consumer's (or nobody's) by now.
        failed: it will not become ready.
    """

    ordinal: int
    rows: Rows
    nbytes: int
    make: Callable[[], TensorDict] | None = None
    counted: bool = False
    handed_over: bool = False
    failed: bool = False


@dataclass(eq=False)
class ReadGroup:
    """Batches that one plan reads: a scattered one by itself, or some of a window whose rows lie close together.

    They are read as if they were one batch of all their rows, so every row is moved once, from a buffer that is still
    in the processor's cache (long ones from the socket) to its place in the right batch.

    Attributes:
        batches: in the order they will be asked for.
        plan: reads the rows of all of them, one batch behind the other; made when it is started, where it is not given.

    Where fields are of variable length, a second round reads their values when the first has said where they are.
    """

    batches: list[BatchRead]
    plan: ReadPlan | None = None
    job: ReadJob | ClusterJob | None = field(default=None, init=False)
    _sink: BatchSink | None = field(default=None, init=False)
    _whole: TensorDict | None = field(default=None, init=False)
    _values: ValuesBatch | None = field(default=None, init=False)

    @property
    def nbytes(self) -> int:
        """What its batches count for."""
        return sum(batch.nbytes for batch in self.batches)

    @cached_property
    def num_rows(self) -> int:
        """Rows of all its batches."""
        return sum(len(batch.rows) for batch in self.batches)

    def start(self, plans: ClusterPlanReader, reader: RowReader) -> None:
        """Send the requests, as far as the limit on bytes in flight lets it."""
        plan = self.plan or reader.plan(_rows_of(self.batches))
        self.job = plans.start(plan)
        if len(self.batches) == 1:
            self._sink, self._whole = reader.new_batch(plan)
        else:
            self._sink = reader.new_batches(plan, [len(batch.rows) for batch in self.batches])
        self.job.sink = self._sink

    @property
    def wants_values(self) -> bool:
        """Whether the second round is due: the first is done."""
        return self._values is None and self._sink is not None and self.job is not None and not self.job.unfinished

    def start_values(self, plans: ClusterPlanReader, reader: RowReader) -> None:
        """Ask for the values of the fields of variable length."""
        if self._sink is None:
            raise RuntimeError("values are asked for after the rows were read")
        rows = _rows_of(self.batches)
        sizes = [len(batch.rows) for batch in self.batches]
        self._values, plan = reader.new_values(self._sink, rows, sizes)
        self.job = plans.start(plan)
        self.job.sink = self._values

    def value_bytes(self, number: int) -> int:
        """Of one of the batches, once they are asked for."""
        return 0 if self._values is None else self._values.bytes_of(number)

    def finish(self, reader: RowReader) -> None:
        """Everything has arrived: the batches are ready."""
        if self._sink is None:
            raise RuntimeError("a group is finished after it was started")
        start = 0
        for number, batch in enumerate(self.batches):
            stop = start + len(batch.rows)
            make = partial(reader.cut_batch, self._sink, number, start, stop)
            if self._whole is not None:
                make = partial(_same, self._whole)
            # Values are looked at on the way, and are each batch's own memory.
            batch.make = make if self._values is None else partial(_same, self._values.add_to(make(), number))
            start = stop
        self._sink = self._whole = self._values = self.job = None  # the memory is the batches' alone from here on


def group_reads(reader: RowReader, batches: list[BatchRead], max_bytes: int, *, soon: bool) -> list[ReadGroup]:
    """How announced batches are read.

    Args:
        reader: plans.
        batches: in the order they will be asked for.
        max_bytes: of batches that are read together.
        soon: nothing else is there or on its way, so the first ones are waited for.
    """
    groups: list[ReadGroup] = []
    for part in _parts(batches, max_bytes):
        units = _units(reader, part, soon=soon and part[0] is batches[0])
        together = _together(reader, part, units)
        groups += [ReadGroup(unit) for unit in units] if together is None else [ReadGroup(part, together)]
    return groups


def _units(reader: RowReader, part: list[BatchRead], *, soon: bool) -> list[list[BatchRead]]:
    """What is read at once if not all is: each batch, or some small ones whose rows lie close together."""
    few = next(_parts(part, _READ_BYTES))
    if len(few) > 1 and reader.plan(_rows_of(few)).strategy == "covering" and not reader.options.atomic:
        return list(_few(part, soon=soon))
    return [[batch] for batch in part]


def _together(reader: RowReader, part: list[BatchRead], units: list[list[BatchRead]]) -> ReadPlan | None:
    """A common plan if it takes clearly less time: else the first batch is sooner there, and memory sooner free."""

    def seconds(num_ranges: int, num_bytes: int) -> float:
        # Without the round trips, which are hidden.
        return reader.costs.cost.seconds(num_ranges, num_bytes) - reader.costs.cost.round_trip_seconds

    if len(units) < 2:
        return None
    # The batches of a window are of a kind: two units of them show what all take.
    some = [reader.plan(_rows_of(unit)) for unit in units[-2:]]
    num_rows = sum(len(batch.rows) for batch in part)
    times = num_rows / max(sum(plan.num_rows for plan in some), 1)
    apart = times * sum(seconds(plan.num_ranges, plan.num_bytes) for plan in some)
    plan = reader.plan_together(_rows_of(part))
    if plan is None:
        return None
    # Beside their bytes, ranges over long rows seem to cost little. But servers handle replies of some 10 KB one by one
    # and send 64 KB at a time: where most rows come in ranges of several, a server has a third less to do.
    saved = times * sum(other.num_ranges for other in some) - plan.num_ranges
    pays = 2 * saved >= num_rows and 16 * plan.num_bytes <= 17 * num_rows * reader.spec.row_bytes
    return plan if pays or 10 * seconds(plan.num_ranges, plan.num_bytes) < 9 * apart else None


def _few(batches: list[BatchRead], *, soon: bool) -> Iterator[list[BatchRead]]:
    """Small batches that are read at once: if they are waited for one, then four, then as many as it may be."""
    done, count = 0, 1
    while soon and done < len(batches) and count * batches[done].nbytes < _READ_BYTES:
        yield batches[done : done + count]
        done, count = done + count, 4 * count
    yield from _parts(batches[done:], _READ_BYTES)


def _same(batch: TensorDict) -> TensorDict:
    return batch


def _rows_of(batches: list[BatchRead]) -> Rows:
    return batches[0].rows if len(batches) == 1 else np.concatenate([batch.rows for batch in batches])


def _parts(batches: list[BatchRead], max_bytes: int) -> Iterator[list[BatchRead]]:
    part: list[BatchRead] = []
    total = 0
    for batch in batches:
        if part and total + batch.nbytes > max_bytes:
            yield part
            part, total = [], 0
        part.append(batch)
        total += batch.nbytes
    if part:
        yield part
