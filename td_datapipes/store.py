"""Read the rows of an open data set: plan, ask, receive, and say precisely what is wrong where something is."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from tensordict import TensorDict

from td_datapipes.assemble import LONG_BYTES, BatchSink, make_sink
from td_datapipes.cost import CostModel
from td_datapipes.errors import (
    ConfigurationError,
    DataLossError,
    ServerNotReadyError,
    ServerTimeoutError,
    ServerUnavailableError,
    TDDatapipesError,
)
from td_datapipes.heap_batch import ValuesBatch, join_batches
from td_datapipes.heap_plan import plan_values
from td_datapipes.integrity import load_checksums
from td_datapipes.joint_batch import JointBatch
from td_datapipes.layouts import FieldPart, build_read_spec, layout_of, nodes_of_parts
from td_datapipes.manifest import Manifest
from td_datapipes.memory import MemoryPool
from td_datapipes.plan import ReadPlan, Strategy, plan_read
from td_datapipes.read_failure import FailedRead
from td_datapipes.read_guards import guard_of, load_read_scripts
from td_datapipes.read_options import REPLICA, ReadOptions
from td_datapipes.read_spec import ReadSpec, Rows
from td_datapipes.schema import Field, new_tensordict
from td_datapipes.upstream import Description
from td_datapipes.verified import ChunkChecks, HeapChecks, VerifyingSink
from td_datapipes.wire.cluster_reader import ClusterPlanReader
from td_datapipes.wire.faults import RangeFault, error_from_text
from td_datapipes.wire.guards import StaleFault
from td_datapipes.wire.reader import ReadStats
from td_datapipes.wire.requests import RequestBuilder
from td_datapipes.wire.retry import Tries
from td_datapipes.wire.server import Server

__all__ = ["ReadOptions", "RowReader"]

SLAB_BYTES = 1 << 20
"""Received before it is copied out: small enough to still be in the processor's cache then."""
MAX_LUA_ROW_BYTES = 256
MAX_LUA_COLUMN_BYTES = 128
"""Of a row of a group, where one Lua call can give whole columns."""
MIN_LUA_ROWS = 32
MAX_SNAPSHOT_BYTES = 32 << 20
"""Of rows of several ranges that are read in one step, which blocks the server while it runs."""
_LOG = logging.getLogger("td_datapipes")
_LENGTHS_ROWS = 1 << 16
"""Read at once where only lengths are."""
_DOUBTS = 2
"""How often missing bytes are asked for again on a cluster, of whoever has their slots by then."""
_DOUBT_SECONDS = 0.15
"""Before each of them: time for the nodes to hear of a slot that moved."""


class RowReader:
    """Reads rows of one generation. Safe for threads (one read at a time); a forked child dials its own connection.

    Args:
        server: where the data set lies; owned from here on.
        manifest: the generation to read, or the store.
        fields: what of each row is read.
        options: how.
        costs: what is known of the server's costs.
        parts: which part of each of `fields` is read; by default all of it.
    """

    def __init__(
        self,
        server: Server,
        manifest: Description,
        fields: Sequence[Field],
        options: ReadOptions,
        costs: CostModel,
        parts: Sequence[FieldPart] | None = None,
    ) -> None:
        self.server = server
        self.manifest = manifest
        self.options = options
        self.costs = costs
        self._fields = tuple(fields)
        self._layout = layout_of(manifest)
        whole, gap = [FieldPart.whole(field) for field in fields], costs.cost.max_gap_bytes
        self.spec: ReadSpec = build_read_spec(self._layout, whole if parts is None else parts, gap)
        # Samplers size their blocks by it, so it is the same on all ranks and on every mesh.
        self.whole_row_bytes = (
            self.spec.row_bytes if parts is None else build_read_spec(self._layout, whole, gap).row_bytes
        )
        self._varying = tuple(field for field in fields if field.varying is not None)
        options.ragged.check(fields, tuple(field.key for field in fields))
        if isinstance(manifest, Manifest):
            self.whole_row_bytes += sum(manifest.heap_of(field.key)[1].row_bytes for field in self._varying)
        kept = {field.key[:depth] for field in fields for depth in range(len(field.key))}
        everything = len(fields) == len(manifest.schema.fields)
        nodes = [node for node in manifest.schema.nodes if everything or node.key in kept or not node.key]
        self._nodes = tuple(nodes if parts is None else nodes_of_parts(nodes, parts))
        self._guard = guard_of(manifest, self._fields)
        # Where each row is several ranges, what is written in place meanwhile could be read half old and half new.
        self._may_tear = manifest.kind == "mutable" and isinstance(manifest, Manifest) and len(self.spec.segments) > 1
        self._stats = ReadStats()
        self._pool = MemoryPool()
        self._checks: ChunkChecks | None = None
        self._no_script: ServerNotReadyError | None = None
        self._requests: RequestBuilder | None = None
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._plans = self.new_plan_reader(self._stats)

    def read(self, rows: Rows) -> TensorDict:
        """The rows in the order asked, repeats kept.

        Args:
            rows: row numbers within the data set, ``[n]``.

        Returns:
            A TensorDict of batch size ``[n, ...]``.

        Raises:
            DataLossError, DatasetChangedError: the data are not there as the manifest says.
            ServerTimeoutError, ServerUnavailableError, AuthenticationError, ServerError: the server failed.
        """
        if self._pid != os.getpid():
            self._reset()
        with self._lock:
            plan = self.plan(rows)
            batch = self._read(plan, rows)
            self._stats.rows += len(rows)
            self._stats.batches += 1
        return batch

    def plan(self, rows: Rows) -> ReadPlan:
        """How to read rows, in the order given; pure."""
        options = self.options
        if self._may_tear and options.strategy == "auto" and len(rows) * self.spec.row_bytes <= MAX_SNAPSHOT_BYTES:
            return self._plan(rows, "lua", atomic=True)
        plan = self._plan(rows, options.plan_strategy)
        if options.strategy == "auto" and self._may_use_lua(plan) and self.costs.wants_lua:
            return self._plan(rows, "lua")
        return plan

    def _plan(self, rows: Rows, strategy: Strategy, *, atomic: bool = False) -> ReadPlan:
        cost, atomic = self.costs.cost, atomic or self.options.atomic
        # Long rows are received where they belong, so slabs need not fit the processor's cache.
        slab_bytes = 4 * SLAB_BYTES if self.spec.row_bytes >= LONG_BYTES else SLAB_BYTES
        return plan_read(rows, self.spec, cost, strategy=strategy, slab_bytes=slab_bytes, atomic=atomic)

    def _may_use_lua(self, plan: ReadPlan) -> bool:
        """Whether Lua comes into question: for larger rows, pipelined ranges were never measured slower."""
        largest = MAX_LUA_ROW_BYTES
        if self.spec.has_columns(self.manifest.rows - 1):
            largest = MAX_LUA_COLUMN_BYTES * len(self.spec.segments)
        small = self.spec.wire_bytes <= largest and plan.num_rows >= MIN_LUA_ROWS
        return small and plan.strategy == "pipelined" and not self.options.strided

    def plan_together(self, rows: Rows) -> ReadPlan | None:
        """How to read the rows of several batches at once; None where that gains nothing."""
        if self.options.atomic or not len(rows) or not self.spec.segments:
            return None
        long = self.spec.row_bytes >= LONG_BYTES
        if long and self.options.strategy == "auto" and not self._may_tear and _mostly_adjacent(rows):
            return self._plan(rows, "covering")
        plan = self.plan(rows)
        return None if plan.strategy == "pipelined" else plan

    def new_batch(self, plan: ReadPlan) -> tuple[BatchSink, TensorDict]:
        """A batch whose values are still to come, and where they go."""
        sink = self.new_sink(plan)
        return sink, new_tensordict(sink.tensors, self._nodes, plan.num_rows)

    def new_sink(self, plan: ReadPlan) -> BatchSink:
        """Where the values of a batch go, or of several that are cut from it by `cut_batch`."""
        sink = make_sink(plan, self.spec, self._pool, strided=self.options.strided, pin_memory=self.options.pin_memory)
        if self.options.verify and plan.slabs:
            sink = VerifyingSink(sink, self._known_checks())
        return sink

    def _known_checks(self) -> ChunkChecks:
        """The checksums of the generation; they are read once."""
        checks = self._checks
        if checks is None or checks.manifest is not self.manifest:
            frozen = self.manifest if isinstance(self.manifest, Manifest) else None
            sums = None if frozen is None else load_checksums(self.server, frozen)
            if frozen is None or sums is None:
                raise ConfigurationError(
                    f"verify=True needs checksums, and data set {self.manifest.name!r} has none: it was written by an "
                    f"older release, or is written in place"
                )
            checks = self._checks = ChunkChecks(manifest=frozen, spec=self.spec, sums=sums)
        return checks

    def new_batches(self, plan: ReadPlan, sizes: Sequence[int]) -> BatchSink:
        """Where the rows of several batches of those sizes go, one behind the other."""
        long = any(copy.nbytes >= LONG_BYTES for copy in self.spec.copies)
        if not long or self.options.strided or self.options.verify:
            return self.new_sink(plan)
        return JointBatch(sizes, self.spec, self._pool, pin_memory=self.options.pin_memory)

    def cut_batch(self, sink: BatchSink, number: int, start: int, stop: int) -> TensorDict:
        """One of the batches of `new_batches`: its number, and which rows of all of them are its."""
        if isinstance(sink, JointBatch):
            return new_tensordict(sink.batch(number), self._nodes, stop - start)
        values = {key: tensor[start:stop] for key, tensor in sink.tensors.items()}
        return new_tensordict(values, self._nodes, stop - start)

    def join(self, parts: Sequence[TensorDict]) -> TensorDict:
        """Batches of data sets with the same fields one behind the other; see `join_batches`."""
        return join_batches(parts, self._varying, self.options.ragged)

    def lengths(self, field: Field, start: int) -> torch.Tensor:
        """How many items each row from `start` on has of a field of variable length; see `RedisTDDataset.lengths`."""
        spans = replace(field, varying=None)
        reader = RowReader(self.server, self.manifest, [spans], ReadOptions(), self.costs)
        found = [torch.empty(0, dtype=torch.int64)]
        try:
            for first in range(start, self.manifest.rows, _LENGTHS_ROWS):
                rows = np.arange(first, min(first + _LENGTHS_ROWS, self.manifest.rows), dtype=np.int64)
                found.append(reader.read(rows).get(field.key)[:, 1])
        finally:
            reader.drop_connection()
        is_tensor = field.varying is not None and field.varying.kind == "tensor"
        return torch.cat(found).clamp_(0, self.options.ragged.max_length if is_tensor else None)

    @property
    def held_row_bytes(self) -> int:
        """Memory of a row of a batch; of values of variable length, what rows have on average."""
        return self.spec.row_bytes + self.value_bytes

    @property
    def value_bytes(self) -> int:
        """Of a row's values of variable length, on average."""
        manifest = self.manifest
        if not self._varying or not isinstance(manifest, Manifest):
            return 0
        values = sum(manifest.heap_of(field.key)[1].nbytes for field in self._varying)
        return -(-values // max(manifest.rows, 1))

    @property
    def has_varying(self) -> bool:
        """Whether fields of variable length are read."""
        return bool(self._varying)

    @property
    def has_jagged(self) -> bool:
        """Whether batches have jagged tensors."""
        kinds = {field.varying.kind for field in self._varying if field.varying is not None}
        return "tensor" in kinds and self.options.ragged.ragged == "jagged"

    def new_values(self, sink: BatchSink, rows: Rows, sizes: Sequence[int]) -> tuple[ValuesBatch, ReadPlan]:
        """Where the values of variable length of one batch or more go, and how to read them.

        Args:
            sink: has their spans.
            rows: of all the batches.
            sizes: rows of each.

        Raises:
            DataLossError: spans that cannot be.
        """
        manifest, options = cast(Manifest, self.manifest), self.options
        spans = {field.key: sink.tensors[field.key] for field in self._varying}
        values = ValuesBatch(
            manifest,
            self._varying,
            spans,
            rows,
            sizes,
            options=options.ragged,
            pool=self._pool,
            pin_memory=options.pin_memory,
            checks=HeapChecks(self._known_checks()) if options.verify else None,
        )
        gap = 0 if options.strategy == "pipelined" else self.costs.cost.max_gap_bytes
        shards = len(manifest.tags)
        wanted = values.wanted
        return values, plan_values(
            wanted, num_rows=len(rows), max_gap_bytes=gap, slab_bytes=SLAB_BYTES, num_shards=shards
        )

    def pin(self, manifest: Description) -> None:
        """Read a later generation of the same data set from here on: the same rows, and those appended since."""
        self.manifest = manifest
        self._layout = layout_of(manifest)

    def new_plan_reader(self, stats: ReadStats) -> ClusterPlanReader:
        """A reader with connections of its own, dialled when they are first needed."""
        replica = self.options.read_from == REPLICA
        return ClusterPlanReader(self.server, self._layout.chunk_key, stats, guard=self._guard, from_replicas=replica)

    def read_over(self, other: RowReader) -> None:
        """Read over another reader's connection, in turn with it: both are of one server."""
        self._plans, self._lock = other._plans, other._lock
        self._requests = RequestBuilder(self._layout.chunk_key)

    @property
    def name(self) -> str:
        """The data set's name."""
        return self.manifest.name

    def _read(self, plan: ReadPlan, rows: Rows) -> TensorDict:
        """Read a plan; again where the retry policy says so, for as long as it says."""
        server, plans = self.server, self._plans
        deadline = time.monotonic() + server.deadline_seconds
        tries: Tries | None = None
        doubted = 0
        while True:
            try:
                batch = self._try(plan, rows, min(deadline, time.monotonic() + server.timeout_seconds))
                break
            except (ServerUnavailableError, ServerTimeoutError) as error:
                failed: TDDatapipesError = error
            except RangeFault as fault:
                failed = self._named(self._asked, fault, doubted)
                doubted += isinstance(failed, DataLossError)
            except StaleFault:
                raise self._failed.changed() from None
            if tries is None:  # made when it is needed: most reads succeed at once
                tries = server.retry.begin(deadline, others_take_over=server.others_take_over)
            self._again(tries, failed)
            plans.from_replicas = False
        plans.from_replicas = self.options.read_from == REPLICA
        return batch

    def _try(self, plan: ReadPlan, rows: Rows, deadline: float) -> TensorDict:
        began, self._asked = time.perf_counter(), plan
        if self._requests is not None:
            self._plans.retarget(self._layout.chunk_key, self._requests, self._guard)
        job = self._plans.start(plan)
        # While the server works on it, the batch is put together around bytes that are still to come.
        job.sink, batch = self.new_batch(plan)
        self._plans.finish(job, deadline, f"reading {plan.num_rows} rows of {self.manifest.name!r}")
        self._learn(plan, time.perf_counter() - began)
        if self._varying:
            values, self._asked = self.new_values(job.sink, rows, [len(rows)])
            self._finish_values(values, self._asked, deadline)
            values.add_to(batch, 0)
        return batch

    def _named(self, plan: ReadPlan, fault: RangeFault, doubted: int) -> TDDatapipesError:
        """What a fault is called if reading again does not help.

        Args:
            plan: what was read.
            fault: what came instead.
            doubted: how often bytes were missing in this read before.

        Raises:
            TDDatapipesError: where it cannot help.
        """
        if fault.text.startswith("NOSCRIPT"):
            load_read_scripts(self.server)
            self._no_script = ServerNotReadyError(f"{self.server.address} forgets scripts as fast as they are loaded")
            return self._no_script
        # A replica lags; a node of a cluster may have ceased to be the owner of what it does not have.
        doubtful = self._plans.from_replicas or (self._plans.on_cluster and doubted < _DOUBTS)
        if not fault.passes:
            explained = self._failed.explain(fault.part or plan.slabs[fault.slab], fault)
            if fault.text or not doubtful or not isinstance(explained, DataLossError):
                raise explained from None
            return explained
        return error_from_text(fault.text, self.server.address, f"reading {self.manifest.name!r}")

    def _again(self, tries: Tries, failed: TDDatapipesError) -> None:
        """Return when the next try may begin, or raise."""
        if failed is self._no_script:
            if time.monotonic() >= tries.deadline:
                raise failed
            return
        if isinstance(failed, DataLossError):
            if time.monotonic() + _DOUBT_SECONDS >= tries.deadline:
                raise failed
            time.sleep(_DOUBT_SECONDS)
            return
        redirected = isinstance(failed, ServerNotReadyError)
        if "READONLY" in str(failed) and not self.server.others_take_over:
            raise failed
        tries.failed(failed, passes=redirected, at_once=redirected)
        _LOG.info("reading again: %s", failed)

    def _finish_values(self, values: ValuesBatch, plan: ReadPlan, deadline: float) -> None:
        job = self._plans.start(plan)
        job.sink = values
        self._plans.finish(job, deadline, f"reading values of {plan.num_rows} rows of {self.manifest.name!r}")

    def _learn(self, plan: ReadPlan, seconds: float) -> None:
        if not plan.slabs or self._may_tear:
            return
        if plan.strategy == "lua" or self._may_use_lua(plan):
            self.costs.compare(plan.strategy, plan.num_rows, seconds)
        if plan.strategy != "lua":
            covering = plan.strategy == "covering"
            self.costs.observe(plan.num_ranges, plan.num_bytes, seconds, covering=covering)

    @property
    def _failed(self) -> FailedRead:
        return FailedRead(
            server=self.server,
            manifest=self.manifest,
            layout=self._layout,
            fields=self._fields,
            varying=self._varying,
        )

    @property
    def stats(self) -> ReadStats:
        """A copy of what was moved so far."""
        return replace(self._stats)

    def drop_connection(self) -> None:
        """Drop the one that rows come over; reading again dials anew."""
        if self._pid == os.getpid():
            with self._lock:
                self._plans.close()

    def close(self) -> None:
        """Drop the connections."""
        self.drop_connection()
        self.server.close()


def _mostly_adjacent(rows: Rows) -> bool:
    """Whether half of the rows stand beside another, or more."""
    return 2 * int(np.count_nonzero(np.diff(np.sort(rows)) == 1)) >= len(rows)
