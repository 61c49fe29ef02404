"""Read the rows of an open data set: plan, ask, receive, and say precisely what is wrong where something is."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import redis
from tensordict import TensorDict

from td_datapipes.assemble import BatchSink, make_sink
from td_datapipes.catalog import find_manifest
from td_datapipes.cost import CostModel
from td_datapipes.errors import (
    ConfigurationError,
    DataLossError,
    DatasetChangedError,
    ServerNotReadyError,
    ServerTimeoutError,
    ServerUnavailableError,
    TDDatapipesError,
)
from td_datapipes.integrity import load_checksums
from td_datapipes.layouts import FieldPart, RecordsLayout, build_read_spec, nodes_of_parts
from td_datapipes.manifest import Manifest
from td_datapipes.memory import MemoryPool
from td_datapipes.plan import STRATEGIES, ReadPlan, Strategy, plan_read
from td_datapipes.read_spec import ReadSpec, Rows
from td_datapipes.schema import Field, format_key, new_tensordict
from td_datapipes.slabs import Slab
from td_datapipes.verified import ChunkChecks, VerifyingSink
from td_datapipes.wire.cluster_reader import ClusterPlanReader
from td_datapipes.wire.faults import RangeFault, error_from_text
from td_datapipes.wire.reader import ReadStats
from td_datapipes.wire.retry import Tries
from td_datapipes.wire.scripts import load_script
from td_datapipes.wire.server import Server

__all__ = ["ReadOptions", "RowReader"]

SLAB_BYTES = 1 << 20
"""Received before it is copied out: small enough to still be in the processor's cache then."""
MAX_LUA_ROW_BYTES = 256
MIN_LUA_ROWS = 32
_MASTER, _REPLICA = "master", "replica"
_LOG = logging.getLogger("td_datapipes")


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How rows are read.

    Attributes:
        strategy: ``auto``, or the one to force: ``covering``, ``pipelined``, ``lua``.
        strided: give views of the receive buffer in place of contiguous tensors.
        pin_memory: give page-locked tensors.
        atomic: read every batch in one Lua call: one consistent snapshot.
        verify: compare chunks that are read whole with their checksums.
        read_from: ``master``, or ``replica`` for a replica of each master where there is one.
    """

    strategy: Strategy = "auto"
    strided: bool = False
    pin_memory: bool = False
    atomic: bool = False
    read_from: str = _MASTER
    verify: bool = False

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ConfigurationError(f"strategy must be one of {', '.join(STRATEGIES)}, got {self.strategy!r}")
        if self.atomic and self.strategy not in ("auto", "lua"):
            raise ConfigurationError(
                f"atomic=True reads by one Lua call; it cannot be combined with strategy={self.strategy!r}"
            )

        if self.read_from not in (_MASTER, _REPLICA):
            raise ConfigurationError(f"read_from must be 'master' or 'replica', got {self.read_from!r}")

    @property
    def plan_strategy(self) -> Strategy:
        """What the planner is told."""
        return "lua" if self.atomic else self.strategy


class RowReader:
    """Reads rows of one generation. Safe for threads (one read at a time); a forked child dials its own connection.

    Args:
        server: where the data set lies; owned from here on.
        manifest: the generation to read.
        fields: what of each row is read.
        options: how.
        costs: what is known of the server's costs.
        parts: which part of each of `fields` is read; by default all of it.
    """

    def __init__(
        self,
        server: Server,
        manifest: Manifest,
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
        self._layout = RecordsLayout(manifest=manifest)
        whole, gap = [FieldPart.whole(field) for field in fields], costs.cost.max_gap_bytes
        self.spec: ReadSpec = build_read_spec(self._layout, whole if parts is None else parts, gap)
        # Samplers size their blocks by it, so it is the same on all ranks and on every mesh.
        self.whole_row_bytes = (
            self.spec.row_bytes if parts is None else build_read_spec(self._layout, whole, gap).row_bytes
        )
        kept = {field.key[:depth] for field in fields for depth in range(len(field.key))}
        everything = len(fields) == len(manifest.schema.fields)
        nodes = [node for node in manifest.schema.nodes if everything or node.key in kept or not node.key]
        self._nodes = tuple(nodes if parts is None else nodes_of_parts(nodes, parts))
        self._stats = ReadStats()
        self._pool = MemoryPool()
        self._checks: ChunkChecks | None = None
        self._no_script: ServerNotReadyError | None = None
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
            batch = self._read(plan)
            self._stats.rows += len(rows)
            self._stats.batches += 1
        return batch

    def plan(self, rows: Rows) -> ReadPlan:
        """How to read rows, in the order given; pure."""
        options = self.options
        plan = self._plan(rows, options.plan_strategy)
        if options.strategy == "auto" and self._may_use_lua(plan) and self.costs.wants_lua:
            return self._plan(rows, "lua")
        return plan

    def _plan(self, rows: Rows, strategy: Strategy) -> ReadPlan:
        cost, atomic = self.costs.cost, self.options.atomic
        return plan_read(rows, self.spec, cost, strategy=strategy, slab_bytes=SLAB_BYTES, atomic=atomic)

    def _may_use_lua(self, plan: ReadPlan) -> bool:
        """Whether Lua comes into question: for larger rows, pipelined ranges were never measured slower."""
        small = self.spec.wire_bytes <= MAX_LUA_ROW_BYTES and plan.num_rows >= MIN_LUA_ROWS
        return small and plan.strategy == "pipelined" and not self.options.strided

    def plan_together(self, rows: Rows) -> ReadPlan | None:
        """How to read the rows of several batches at once; None where that gains nothing."""
        if self.options.atomic or not len(rows) or not self.spec.segments:
            return None
        plan = self.plan(rows)
        return None if plan.strategy == "pipelined" else plan

    def new_batch(self, plan: ReadPlan) -> tuple[BatchSink, TensorDict]:
        """A batch whose values are still to come, and where they go."""
        sink = make_sink(plan, self.spec, self._pool, strided=self.options.strided, pin_memory=self.options.pin_memory)
        if self.options.verify and plan.slabs:
            sink = VerifyingSink(sink, self._known_checks())
        return sink, new_tensordict(sink.tensors, self._nodes, plan.num_rows)

    def _known_checks(self) -> ChunkChecks:
        """The checksums of the generation; they are read once."""
        checks = self._checks
        if checks is None or checks.manifest is not self.manifest:
            sums = load_checksums(self.server, self.manifest)
            if sums is None:
                raise ConfigurationError(
                    f"verify=True needs checksums, and data set {self.manifest.name!r} has none: it was written by an "
                    f"older release, or is written in place"
                )
            checks = self._checks = ChunkChecks(manifest=self.manifest, spec=self.spec, sums=sums)
        return checks

    def slice_batch(self, sink: BatchSink, start: int, stop: int) -> TensorDict:
        """Rows ``[start, stop)`` of what a sink holds, as a batch of views."""
        values = {key: tensor[start:stop] for key, tensor in sink.tensors.items()}
        return new_tensordict(values, self._nodes, stop - start)

    def pin(self, manifest: Manifest) -> None:
        """Read a later generation of the same data set from here on: the same rows, and those appended since."""
        self.manifest = manifest
        self._layout = RecordsLayout(manifest=manifest)

    def new_plan_reader(self, stats: ReadStats) -> ClusterPlanReader:
        """A reader with connections of its own, dialled when they are first needed."""
        replica = self.options.read_from == _REPLICA
        return ClusterPlanReader(self.server, self._layout.chunk_key, stats, from_replicas=replica)

    @property
    def name(self) -> str:
        """The data set's name."""
        return self.manifest.name

    def _read(self, plan: ReadPlan) -> TensorDict:
        """Read a plan; again where the retry policy says so, for as long as it says."""
        server, plans = self.server, self._plans
        deadline = time.monotonic() + server.deadline_seconds
        tries: Tries | None = None
        while True:
            began = time.perf_counter()
            try:
                batch = self._try(plan, min(deadline, time.monotonic() + server.timeout_seconds))
                break
            except (ServerUnavailableError, ServerTimeoutError) as error:
                failed: TDDatapipesError = error
            except RangeFault as fault:
                failed = self._named(plan, fault)
            if tries is None:  # made when it is needed: most reads succeed at once
                tries = server.retry.begin(deadline, others_take_over=server.others_take_over)
            self._again(tries, failed)
            plans.from_replicas = False
        plans.from_replicas = self.options.read_from == _REPLICA
        self._learn(plan, time.perf_counter() - began)
        return batch

    def _try(self, plan: ReadPlan, deadline: float) -> TensorDict:
        job = self._plans.start(plan)
        # While the server works on it, the batch is put together around bytes that are still to come.
        job.sink, batch = self.new_batch(plan)
        self._plans.finish(job, deadline, f"reading {plan.num_rows} rows of {self.manifest.name!r}")
        return batch

    def _named(self, plan: ReadPlan, fault: RangeFault) -> TDDatapipesError:
        """What a fault is called if reading again does not help.

        Raises:
            TDDatapipesError: where it cannot help.
        """
        if fault.text.startswith("NOSCRIPT"):
            self.server.call("loading a script", self._load_scripts, repeats=True)
            self._no_script = ServerNotReadyError(f"{self.server.address} forgets scripts as fast as they are loaded")
            return self._no_script
        lagging = not fault.text and self._plans.from_replicas
        if not (fault.passes or lagging):
            raise self._explain(plan, fault) from None
        if lagging:
            return self._explain(plan, fault)
        return error_from_text(fault.text, self.server.address, f"reading {self.manifest.name!r}")

    def _again(self, tries: Tries, failed: TDDatapipesError) -> None:
        """Return when the next try may begin, or raise."""
        if failed is self._no_script:
            if time.monotonic() >= tries.deadline:
                raise failed
            return
        redirected = isinstance(failed, ServerNotReadyError)
        if "READONLY" in str(failed) and not self.server.others_take_over:
            raise failed
        tries.failed(failed, passes=redirected, at_once=redirected)
        _LOG.info("reading again: %s", failed)

    def _load_scripts(self, client: redis.Redis) -> None:
        cluster = self.server.cluster()
        clients = [client] if cluster is None else [one for _, one in cluster.everyone()]
        for one in clients:
            try:
                one.script_load(load_script("read_ranges").source)
            except (redis.ConnectionError, redis.TimeoutError):
                if cluster is None:
                    raise

    def _learn(self, plan: ReadPlan, seconds: float) -> None:
        if not plan.slabs:
            return
        if plan.strategy == "lua" or self._may_use_lua(plan):
            self.costs.compare(plan.strategy, plan.num_rows, seconds)
        if not self.costs.settled and plan.strategy != "lua":
            self.costs.observe(plan.num_ranges, plan.num_bytes, seconds)

    def _explain(self, plan: ReadPlan, fault: RangeFault) -> TDDatapipesError:
        """The error for a range that did not come back as asked."""
        slab = fault.part or plan.slabs[fault.slab]
        what = self._describe(slab, fault.index)
        if fault.text and not fault.text.startswith("WRONGTYPE"):
            return error_from_text(fault.text, self.server.address, f"reading {what}")
        with suppress(TDDatapipesError):
            current = find_manifest(self.server, self.manifest.name)
            if current is not None and current.id != self.manifest.id:
                return DatasetChangedError(
                    f"{what}: data set {self.manifest.name!r} has been written anew since it was opened "
                    f"({self.manifest.created}, now generation {current.generation}); open it again"
                )
        if fault.text:
            cause = f"the key holds something else ({fault.text}): another program wrote to it"
        else:
            cause = self._cause(fault.received_bytes or 0)
        return DataLossError(
            f"{what}: {fault.expected_bytes} bytes expected, {fault.received_bytes or 0} received; {cause}"
        )

    def _describe(self, slab: Slab, index: int) -> str:
        """Which data set, chunk, fields and rows a range is about."""
        ranges = slab.ranges()
        group, chunk = int(ranges.groups[index]), int(ranges.chunks[index])
        layout = self._layout.chunk_layouts[group]
        first, stop = layout.rows_of(chunk, self.manifest.rows)
        asked = slab.rows[(slab.rows >= first) & (slab.rows < stop)]
        names = [format_key(field.key) for field in self.manifest.schema.groups[group].fields if field in self._fields]
        shown = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
        key = self._layout.chunk_key(group, chunk).decode()
        return (
            f"data set {self.manifest.name!r} at {self.server.address}, chunk {key} (rows {first} to {stop - 1}; "
            f"asked for {len(asked)} of them from row {int(asked.min())} on), fields {shown}"
        )

    def _cause(self, received: int) -> str:
        """The likely cause of a missing or short chunk, from what the server says of itself."""
        facts = ""
        with suppress(TDDatapipesError):
            info = self.server.call("asking why a chunk is missing", _eviction_facts)
            if info[1]:
                facts = f" The server evicts keys: maxmemory-policy is {info[0]}, {info[1]} keys were evicted."
        state = "is missing or empty" if received == 0 else "is shorter than it was written"
        return (
            f"the chunk {state}: it was deleted, evicted (maxmemory) or lost in a restart.{facts} "
            f"Write the data set again"
        )

    @property
    def stats(self) -> ReadStats:
        """A copy of what was moved so far."""
        return replace(self._stats)

    def close(self) -> None:
        """Drop the connections."""
        if self._pid == os.getpid():
            with self._lock:
                self._plans.close()
        self.server.close()


def _eviction_facts(client: redis.Redis) -> tuple[str, int]:
    memory, stats = client.info("memory"), client.info("stats")  # of any node, on a cluster
    return str(memory.get("maxmemory_policy", "unknown")), int(stats.get("evicted_keys", 0))
