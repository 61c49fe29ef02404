"""Announced batches as reads: which are read together, and what becomes of each when its bytes are there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

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


@dataclass(eq=False)
class BatchRead:
    """One announced batch on its way.

    Attributes:
        ordinal: which batch of the epoch.
        rows: its rows, in order, ``[n]``.
        nbytes: what it counts for while it is on its way.
        ready: the batch, once its bytes are there.
        counted: whether its bytes are counted.
        handed_over: whether it is the consumer's (or nobody's) by now.
        failed: it will not become ready.
    """

    ordinal: int
    rows: Rows
    nbytes: int
    ready: TensorDict | None = None
    counted: bool = False
    handed_over: bool = False
    failed: bool = False


@dataclass(eq=False)
class ReadGroup:
    """Batches that one plan reads: a scattered one by itself, or those of a window whose rows lie close together.

    A window is read as if it were one batch of all its rows, so every row is moved once, from a buffer that is still
    in the processor's cache to its place in the right batch; the batches are slices of what was read.

    Attributes:
        batches: in the order they will be asked for.
        plan: reads the rows of all of them, one batch behind the other.

    Where fields are of variable length, a second round reads their values when the first has said where they are.
    """

    batches: list[BatchRead]
    plan: ReadPlan
    job: ReadJob | ClusterJob | None = field(default=None, init=False)
    _sink: BatchSink | None = field(default=None, init=False)
    _whole: TensorDict | None = field(default=None, init=False)
    _values: ValuesBatch | None = field(default=None, init=False)

    @property
    def nbytes(self) -> int:
        """What its batches count for."""
        return sum(batch.nbytes for batch in self.batches)

    def start(self, plans: ClusterPlanReader, reader: RowReader) -> None:
        """Send the requests, as far as the limit on bytes in flight lets it."""
        self.job = plans.start(self.plan)
        self._sink, self._whole = reader.new_batch(self.plan)
        self.job.sink = self._sink

    @property
    def wants_values(self) -> bool:
        """Whether the second round is due: the first is done."""
        return self._values is None and self._sink is not None and self.job is not None and not self.job.unfinished

    def start_values(self, plans: ClusterPlanReader, reader: RowReader) -> None:
        """Ask for the values of the fields of variable length."""
        if self._sink is None:
            raise RuntimeError("values are asked for after the rows were read")
        rows = np.concatenate([batch.rows for batch in self.batches])
        sizes = [len(batch.rows) for batch in self.batches]
        self._values, plan = reader.new_values(self._sink, rows, sizes)
        self.job = plans.start(plan)
        self.job.sink = self._values

    def value_bytes(self, number: int) -> int:
        """Of one of the batches, once they are asked for."""
        return 0 if self._values is None else self._values.bytes_of(number)

    def finish(self, reader: RowReader) -> None:
        """Everything has arrived: the batches are ready."""
        if self._whole is None or self._sink is None:
            raise RuntimeError("a group is finished after it was started")
        start = 0
        for number, batch in enumerate(self.batches):
            stop = start + len(batch.rows)
            alone = len(self.batches) == 1
            made = self._whole if alone else reader.slice_batch(self._sink, start, stop)
            batch.ready = made if self._values is None else self._values.add_to(made, number)
            start = stop
        self._sink = self._whole = self._values = self.job = None  # the memory is the batches' alone from here on


def group_reads(reader: RowReader, batches: list[BatchRead], max_bytes: int) -> list[ReadGroup]:
    """How announced batches are read.

    Args:
        reader: plans.
        batches: in the order they will be asked for.
        max_bytes: of batches that are read together.
    """
    groups: list[ReadGroup] = []
    for part in _parts(batches, max_bytes):
        plan = reader.plan_together(np.concatenate([batch.rows for batch in part])) if len(part) > 1 else None
        # The batches of a window are of a kind: two of them show what reading one by one would take.
        if plan is not None and _saves(reader, plan, [reader.plan(part[at].rows) for at in (0, -1)], len(part)):
            groups.append(ReadGroup(part, plan))
        else:
            groups += [ReadGroup([batch], reader.plan(batch.rows)) for batch in part]
    return groups


def _saves(reader: RowReader, together: ReadPlan, some: list[ReadPlan], num_batches: int) -> bool:
    """Whether a common plan takes clearly less time: else the first batch is sooner there, and memory sooner free."""

    def seconds(plan: ReadPlan) -> float:
        # Without the round trips, which are hidden.
        return reader.costs.cost.seconds(plan.num_ranges, plan.num_bytes) - reader.costs.cost.round_trip_seconds

    return 10 * seconds(together) < 9 * sum(map(seconds, some)) * num_batches / len(some)


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
