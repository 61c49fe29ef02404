"""Plans read from wherever their chunks are: one server, or all masters of a cluster at once, by one thread.

On a cluster, each slab of a plan is cut into the parts that each node has. Every node has a `PlanReader` of its own,
and they are driven together: whichever socket has something is read. A Lua call asks for the keys of one slot only.

Where a slot is moving, the keys that have gone already are asked for one by one at the node they went to; the plan is
begun anew for it, as for every other redirection, because replies come in the order of requests.
"""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakMethod

import numpy as np
import redis

from td_datapipes.assemble import BatchSink
from td_datapipes.errors import ServerTimeoutError, ServerUnavailableError
from td_datapipes.plan import ReadPlan
from td_datapipes.read_spec import Rows
from td_datapipes.slabs import CoveringSlab, Slab
from td_datapipes.split import split_slab
from td_datapipes.wire.channel import Channel
from td_datapipes.wire.cluster import Cluster, Node, parse_node, slot_of
from td_datapipes.wire.faults import REDIS_ERRORS, RangeFault, translate
from td_datapipes.wire.guards import Guard
from td_datapipes.wire.reader import PlanReader, ReadJob, ReadStats
from td_datapipes.wire.requests import RequestBuilder
from td_datapipes.wire.server import Server

__all__ = ["ClusterJob", "ClusterPlanReader"]

_MOVING_SECONDS = 1.0
"""How long a slot counts as moving after a node said so; then the quick way is tried again."""
_MAX_WAIT_SECONDS = 3600.0


class _Shared:
    """A job's sink as the nodes' readers see it: it is sealed once, when all of them are done."""

    def __init__(self, sink: BatchSink) -> None:
        self.target, self.places, self.placed, self.take = sink.target, sink.places, sink.placed, sink.take
        self.tensors = sink.tensors

    def seal(self) -> None:
        """Not yet: others may still be receiving."""


class ClusterJob:
    """A plan being read from several nodes; see `ReadJob`.

    Attributes:
        plan: what is read.
        parts: what each node was asked for.
        aside: slabs of moving slots, read one by one.
    """

    def __init__(self, plan: ReadPlan, parts: Sequence[ReadJob], aside: Sequence[tuple[int, Slab]]) -> None:
        self.plan = plan
        self.parts = parts
        self.aside = deque(aside)
        self._sink: BatchSink | None = None

    @property
    def sink(self) -> BatchSink:
        """Where it goes; set before the job is finished, which may be after it was asked for."""
        if self._sink is None:
            raise ServerUnavailableError("an earlier read on this connection was given up before its reply came")
        return self._sink

    @sink.setter
    def sink(self, sink: BatchSink) -> None:
        self._sink = sink
        for part in self.parts:
            part.sink = _Shared(sink)

    @property
    def unfinished(self) -> int:
        """Slabs not yet received."""
        return sum(part.unfinished for part in self.parts) + len(self.aside)


class _Slots:
    """The slot of every chunk, filled in as they are asked for."""

    def __init__(self, chunk_key: Callable[[int, int], bytes]) -> None:
        self._chunk_key = chunk_key
        self._tables: dict[int, Rows] = {}

    def __call__(self, group: int, chunks: Rows) -> Rows:
        table = self._tables.get(group, np.empty(0, dtype=np.int64))
        top = int(chunks.max(initial=-1)) + 1
        if top > len(table):
            table = np.concatenate([table, np.full(max(top, 2 * len(table)) - len(table), -1, dtype=np.int64)])
            self._tables[group] = table
        found: Rows = table[chunks]
        if (found < 0).any():
            for chunk in np.unique(chunks[found < 0]).tolist():
                table[chunk] = slot_of(self._chunk_key(group, chunk))
            found = table[chunks]
        return found


class ClusterPlanReader:
    """Reads plans from one server or from a cluster, with the face of `PlanReader`; which it is, the server is asked.

    Not safe for threads: one owner at a time.

    Args:
        server: where; asked and dialled when the first plan is started.
        chunk_key: the server's key of a group's chunk.
        stats: counted into.
        guard: asked for behind the last range of every plan, at the node that has the last of them.
        from_replicas: read from a replica of each master where it has one.
    """

    def __init__(
        self,
        server: Server,
        chunk_key: Callable[[int, int], bytes],
        stats: ReadStats,
        *,
        guard: Guard | None = None,
        from_replicas: bool = False,
    ) -> None:
        self._server = server
        self._guard = guard
        self._requests = RequestBuilder(chunk_key)
        self.from_replicas = from_replicas
        self.stats = stats
        self._single: PlanReader | None = None
        self._cluster: Cluster | None = None
        self._chunk_key = chunk_key
        self._slot_of_chunk = _Slots(chunk_key)
        self._nodes: dict[Node, PlanReader] = {}
        self._dialled_replicas = from_replicas
        self._jobs: deque[ClusterJob] = deque()
        self._stale = False
        self._prefer: Node | None = None
        self._moving: dict[int, tuple[Node | None, float]] = {}

    def retarget(self, chunk_key: Callable[[int, int], bytes], requests: RequestBuilder, guard: Guard | None) -> None:
        """Read another data set's chunks from the next plan on, over the same connections."""
        if requests is self._requests:
            return
        self._requests, self._guard = requests, guard
        self._chunk_key, self._slot_of_chunk = chunk_key, _Slots(chunk_key)
        for reader in [self._single, *self._nodes.values()]:
            if reader is not None:
                reader.retarget(requests, guard)

    def start(self, plan: ReadPlan) -> ReadJob | ClusterJob:
        """Ask for a plan's first slabs; see `PlanReader.start`."""
        if self._single is None and self._cluster is None:
            self._cluster = self._server.cluster()
            if self._cluster is None:
                dial = WeakMethod(self._dial_server)  # its reader is this one's: no circle, so that both end at once
                self._single = PlanReader(lambda: dial()(), self._requests, self.stats, self._guard)  # type: ignore[misc]
        if self._single is not None:
            return self._single.start(plan)
        try:
            return self._start(plan)
        except BaseException:
            self.close()
            raise

    def _dial_server(self) -> Channel:
        return self._server.dial(replica=self.from_replicas)

    def _start(self, plan: ReadPlan) -> ClusterJob:
        cluster = self._known_cluster()
        if self._stale:
            cluster.refresh(self._prefer)
            self._stale, self._prefer = False, None
        if self._dialled_replicas != self.from_replicas and not self._jobs:
            self._drop_nodes()
        self._forget_moved()
        by_node, aside = self._share_out(plan)
        parts = [
            self._reader(node).start(ReadPlan(num_rows=plan.num_rows, slabs=tuple(slabs), strategy=plan.strategy))
            for node, slabs in by_node.items()
        ]
        job = ClusterJob(plan, parts, aside)
        if job.unfinished:
            self._jobs.append(job)
        return job

    def _share_out(self, plan: ReadPlan) -> tuple[dict[Node, list[Slab]], list[tuple[int, Slab]]]:
        """What each node is asked for, and what has to be read one by one."""
        slots = self._known_cluster().slots
        by_node: dict[Node, list[Slab]] = {}
        aside: list[tuple[int, Slab]] = []
        by_slot = plan.strategy == "lua" or bool(self._moving)
        owners = self._slot_of_chunk
        if not by_slot and len(slots.nodes) == 1 and slots.complete:
            return ({slots.nodes[0]: list(plan.slabs)} if plan.slabs else {}), []
        for slab in plan.slabs:
            if by_slot:
                for slot, part in split_slab(slab, owners):
                    if slot in self._moving:
                        aside.append((slot, part))
                    else:
                        by_node.setdefault(slots.master(slot), []).append(part)
            else:
                for number, part in split_slab(slab, lambda group, chunks: slots.owner[owners(group, chunks)]):
                    node = slots.nodes[number] if number >= 0 else slots.master(int(np.argmin(slots.owner)))
                    by_node.setdefault(node, []).append(part)
        return by_node, aside

    def _reader(self, node: Node) -> PlanReader:
        if node not in self._nodes:
            cluster, replica = self._known_cluster(), self._dialled_replicas
            self._nodes[node] = PlanReader(
                lambda: cluster.dial(node, replica=replica), self._requests, self.stats, self._guard
            )
        return self._nodes[node]

    def _known_cluster(self) -> Cluster:
        if self._cluster is None:
            raise ServerUnavailableError("a cluster's plan is read before the cluster was found")
        return self._cluster

    def finish(self, job: ReadJob | ClusterJob, deadline: float, doing: str) -> None:
        """Receive until the job is complete; see `PlanReader.finish`."""
        began = time.perf_counter()
        while job.unfinished:
            self.step(deadline, doing)
        self.stats.wait_seconds += time.perf_counter() - began

    def step(self, deadline: float, doing: str) -> None:
        """Receive at least one slab. Arguments and errors as `finish`."""
        if self._single is not None:
            self._single.step(deadline, doing)
            return
        try:
            self._step(deadline, doing)
        except RangeFault as fault:
            self.heed(fault)
            self.close()
            raise
        except BaseException:
            self.close()
            raise

    def _step(self, deadline: float, doing: str) -> None:
        if not self._jobs:
            raise ServerUnavailableError("the connection was dropped before this read was finished")
        oldest = self._jobs[0]
        if oldest.aside:
            self._read_aside(oldest, *oldest.aside[0], doing)
            oldest.aside.popleft()
        else:
            while not self._pump(doing):
                self._wait(deadline, doing)
        while self._jobs and not self._jobs[0].unfinished:
            self._jobs.popleft().sink.seal()

    def _pump(self, doing: str) -> bool:
        """Whether any node has completed a slab."""
        completed = False
        for reader in self._nodes.values():
            if reader.awaits_slabs and reader.pump(doing):
                completed = True
        return completed

    def _wait(self, deadline: float, doing: str) -> None:
        """Sleep until any socket has something, or takes more."""
        left = min(deadline - time.monotonic(), _MAX_WAIT_SECONDS)
        waiting = {node: reader.waits_for() for node, reader in self._nodes.items() if reader.awaits_slabs}
        if left <= 0 or not waiting:
            nodes = ", ".join(map(str, waiting)) or "no node"
            raise ServerTimeoutError(
                f"{nodes} of {self._server.address} did not answer in time while {doing}; it may be stopped, busy or "
                f"far away (raise it with ?socket_timeout=SECONDS in the URL)"
            )
        poll = select.poll()
        for events in waiting.values():
            poll.register(*events)
        poll.poll(left * 1000 + 1)

    @property
    def on_cluster(self) -> bool:
        """Whether the last plan was read from a cluster."""
        return self._cluster is not None

    def heed(self, fault: RangeFault) -> None:
        """Take in where a redirection points to, before the plan is started again."""
        if self._single is not None or not fault.text:
            return
        code, *rest = fault.text.split(" ")
        self._stale = True
        if code == "MOVED" and len(rest) > 1:
            self._moving.pop(int(rest[0]), None)
            self._prefer = parse_node(rest[1], self._any_node())
        elif code == "ASK" and len(rest) > 1:
            self._moving[int(rest[0])] = (parse_node(rest[1], self._any_node()), time.monotonic())
        elif code == "TRYAGAIN" and fault.part is not None:
            slot = self._slot_of(fault.part)
            self._moving[slot] = (self._moving.get(slot, (None, 0.0))[0], time.monotonic())

    def _any_node(self) -> Node:
        return self._known_cluster().slots.nodes[0]

    def _slot_of(self, slab: Slab) -> int:
        ranges = slab.ranges()
        return int(self._slot_of_chunk(int(ranges.groups[0]), ranges.chunks[:1])[0])

    def _forget_moved(self) -> None:
        now, slots = time.monotonic(), self._known_cluster().slots
        for slot, (target, since) in list(self._moving.items()):
            arrived = target is not None and slots.owner[slot] >= 0 and slots.master(slot) == target
            if arrived or now - since > _MOVING_SECONDS:
                del self._moving[slot]

    def _read_aside(self, job: ClusterJob, slot: int, slab: Slab, doing: str) -> None:
        """Read a slab of a moving slot: each key is with one of two nodes."""
        try:
            # A snapshot is one call or none. What else was to be one call may as well come one by one.
            snapshot = slab.prefix and (slab is job.plan.slabs[0] or not isinstance(slab, CoveringSlab))
            values = self._whole_call(job, slot, slab) if snapshot else self._one_by_one(slab)
        except redis.ResponseError as error:
            named = translate(error, self._server.address, doing)
            if not str(error).startswith("NOSCRIPT") and "NOSCRIPT" not in type(error).__name__.upper():
                raise named from error
            raise RangeFault(0, 0, 0, None, "NOSCRIPT", slab) from error
        except REDIS_ERRORS as error:
            self._stale = True
            raise translate(error, self._server.address, doing) from error
        for index, (value, length) in enumerate(zip(values, slab.ranges().lengths.tolist(), strict=True)):
            if len(value) != length:
                raise RangeFault(0, index, length, len(value), part=slab)
        stream = np.frombuffer(slab.prefix + b"".join(b"$%d\r\n%b\r\n" % (len(v), v) for v in values), dtype=np.uint8)
        own = job.sink.target(slab)
        if own is not None:
            own[:] = stream
            stream = own
        job.sink.take(slab, stream)
        self.stats.commands += 1 if slab.prefix else slab.num_ranges
        self.stats.ranges += slab.num_ranges
        self.stats.bytes += slab.num_bytes

    def _one_by_one(self, slab: Slab) -> list[bytes]:
        """Each range by a command of its own, which redis-py sends where it is redirected to."""
        client: Any = self._known_cluster().client()
        ranges = slab.ranges()
        columns = (ranges.groups.tolist(), ranges.chunks.tolist(), ranges.starts.tolist(), ranges.lengths.tolist())
        return [
            client.getrange(self._chunk_key(group, chunk), start, start + length - 1)
            for group, chunk, start, length in zip(*columns, strict=True)
        ]

    def _whole_call(self, job: ClusterJob, slot: int, slab: Slab) -> list[bytes]:
        """One Lua call, at the node the slot is with, or where that one sends it to.

        Never at once where the slot goes to: for one key that has not come yet, that node answers as if it were empty.
        """
        cluster = self._known_cluster()
        request = b"".join(self._requests.for_plan(job.plan)(slab))
        skipped = slab.prefix.count(b"\n") - 1
        owner = cluster.slots.master(slot)
        values: list[bytes]
        try:
            values = cluster.ask(owner, request, skipped)
        except redis.exceptions.AskError as error:
            values = cluster.ask(parse_node(str(error).split(" ")[-1], owner), request, skipped)
        return values

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight."""
        return self._single.idle if self._single is not None else not self._jobs

    def abort(self) -> None:
        """Wake whoever waits in `step` or `finish` with an error. The one call that another thread may make."""
        for reader in [self._single, *list(self._nodes.values())]:
            if reader is not None:
                reader.abort()

    def close(self) -> None:
        """Drop the connections and every job that is not finished; where things are is asked anew afterwards."""
        if self._single is not None:
            self._single.close()
        self._drop_nodes()
        self._jobs.clear()
        self._stale = True

    def _drop_nodes(self) -> None:
        nodes, self._nodes = self._nodes, {}
        self._dialled_replicas = self.from_replicas
        for reader in nodes.values():
            reader.close()
