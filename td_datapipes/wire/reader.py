"""Plans in, filled batches out: asks for slabs ahead of the replies, checks each and hands it to its sink."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass, field
from itertools import accumulate
from typing import cast

import numpy as np
import numpy.typing as npt

from td_datapipes.assemble import BatchSink, Place
from td_datapipes.errors import ProtocolError, ServerUnavailableError
from td_datapipes.plan import ReadPlan
from td_datapipes.slabs import PeriodicSlab, RunSlab, Slab
from td_datapipes.wire.channel import Channel
from td_datapipes.wire.faults import RangeFault
from td_datapipes.wire.guards import Guard, GuardExchange
from td_datapipes.wire.replies import BulkReply, ErrorReply, ReplyParser, StreamCheck, stream_check
from td_datapipes.wire.requests import RequestBuilder, part_bytes

__all__ = ["PlanReader", "ReadJob", "ReadStats"]

Bytes = npt.NDArray[np.uint8]

MAX_IN_FLIGHT_BYTES = 8 << 20
"""Replies asked for and not received: enough to keep the server busy, little enough for its output buffer."""
_SPARE_READ_BYTES = 4096
_MAX_PLACES = 64
"""Of one receive: about as many as fill what a socket holds."""
_PART_BYTES = 192 * 1024
"""Copied out of a slab while the rest of it is on its way: a Unix socket buffers about that much on Linux."""
_RECEIVE_BYTES = 512 * 1024
"""Received at once where parts are copied out: what comes is then still in the cache. A system call costs less."""
_WAITING_PART_BYTES = 8 * 1024
"""The same where there is nothing to do but wait for the rest."""


@dataclass
class ReadStats:
    """What reading has moved so far; see `RedisTDDataset.stats`."""

    rows: int = 0
    bytes: int = 0
    ranges: int = 0
    commands: int = 0
    batches: int = 0
    wait_seconds: float = 0.0

    def __add__(self, other: ReadStats) -> ReadStats:
        return ReadStats(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


@dataclass(eq=False)
class ReadJob:
    """A plan being read.

    Attributes:
        plan: what is read.
        request: makes the request of a slab.
        sink: where it goes; set before the job is finished, which may be after it was asked for.
        unsent: slabs not yet asked for.
        unfinished: slabs not yet received, and the guard.
        guard: asked for behind its ranges; None once that was done.
    """

    plan: ReadPlan
    request: Callable[[Slab], Iterable[bytes]]
    sink: BatchSink = field(init=False)
    unsent: Iterator[tuple[int, Slab]] = field(init=False)
    unfinished: int = field(init=False)
    guard: Guard | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.unsent = iter(enumerate(self.plan.slabs))
        self.unfinished = len(self.plan.slabs)


class _Staging:
    """Memory that slabs are received into before they are copied out; one slab at a time."""

    def __init__(self) -> None:
        self._memory: Bytes = np.empty(0, dtype=np.uint8)

    def stretch(self, nbytes: int) -> Bytes:
        """At least that many bytes. What an earlier call gave is overwritten."""
        if len(self._memory) < nbytes or len(self._memory) > 8 * max(nbytes, 1 << 20):
            self._memory = np.empty(nbytes, dtype=np.uint8)
        return self._memory[:nbytes]


class _Places:
    """The places a reply stream is received into: what the sink wants elsewhere there, the rest where it would be.

    Args:
        stream: memory for the stream; what goes elsewhere leaves gaps.
        places: what goes elsewhere.
    """

    def __init__(self, stream: memoryview, places: list[Place]) -> None:
        self._stream, self._places = stream, places
        self._parts: list[memoryview] = []
        at = 0
        for start, place in places:
            if start > at:
                self._parts.append(stream[at:start])
            self._parts.append(place)
            at = start + len(place)
        self._parts.append(stream[at:])
        self._ends = list(accumulate(map(len, self._parts)))

    def target(self, got: int) -> list[memoryview]:
        """What comes behind the first `got` bytes, as many places as one receive may fill."""
        index = bisect_right(self._ends, got)
        begun = len(self._parts[index]) - (self._ends[index] - got)
        return [self._parts[index][begun:], *self._parts[index + 1 : index + _MAX_PLACES]]

    def fill(self, got: int) -> None:
        """Put into the gaps of the stream what of its first `got` bytes went elsewhere."""
        for start, place in self._places:
            count = min(len(place), max(got - start, 0))
            self._stream[start : start + count] = place[:count]


class _SlabExchange:
    """One slab's request and reply stream (an `Exchange`): straight into memory, checked before any wait."""

    def __init__(self, number: int, slab: Slab, job: ReadJob, staging: _Staging, *, scatters: bool) -> None:
        self.request = job.request(slab)
        self.job = job
        self.nbytes = slab.stream_bytes
        self.part_bytes = 0 if job.plan.strategy == "lua" else part_bytes(slab)
        self._number, self._slab, self._staging = number, slab, staging
        self._got = self._taken_rows = self._taken_bytes = 0
        self._in_parts = False
        self._scatters = scatters
        self._places: _Places | None = None
        self._stream: Bytes | None = None
        self._view = memoryview(b"")
        self._check: StreamCheck | None = None
        self._parser: _FaultFinder | None = None

    def target(self) -> memoryview | list[memoryview]:
        if self._parser is not None:
            return self._parser.target()
        if self._stream is None:
            self._begin()
        if self._got < self.nbytes:
            if self._places is not None:
                return self._places.target(self._got)
            return self._view[self._got : self._got + _RECEIVE_BYTES if self._in_parts else None]
        if self._framed():
            self._take_rest()
            self.job.unfinished -= 1
            return memoryview(b"")
        # As long as what was asked for, but something else: more may have to come until it is known what.
        return self._parse_singly().target()

    def _begin(self) -> None:
        if not hasattr(self.job, "sink"):
            raise ServerUnavailableError("an earlier read on this connection was given up before its reply came")
        own = self.job.sink.target(self._slab)
        self._stream = self._staging.stretch(self.nbytes) if own is None else own
        self._view = self._stream.data
        places = self.job.sink.places(self._slab) if own is None and self._scatters else None
        if places is not None:
            self._places = _Places(self._view, places)
            return
        evenly = isinstance(self._slab, RunSlab | PeriodicSlab) and self._slab.sources is None
        self._in_parts = own is None and evenly

    def received(self, count: int) -> None:
        if self._parser is not None:
            self._parser.received(count)
        else:
            self._got += count
            worth_it = self.nbytes > 2 * _PART_BYTES and self._got - self._taken_bytes >= _PART_BYTES
            if self._in_parts and worth_it and self._framed():
                self._take_part()

    def _take_part(self) -> None:
        """Hand over the rows that are there: the server sends on meanwhile, and they are still in the cache."""
        slab = cast(RunSlab | PeriodicSlab, self._slab)
        rows, step = slab.whole_rows(self._got), slab.row_step_bytes
        if rows > self._taken_rows:
            part = slab.part(self._taken_rows, rows)
            self.job.sink.take(part, self._stream[self._taken_rows * step :])  # type: ignore[index]
            self._taken_rows, self._taken_bytes = rows, rows * step

    def _take_rest(self) -> None:
        if self._places is not None:
            self.job.sink.placed(self._slab, self._stream)  # type: ignore[arg-type]
        elif self._taken_rows:
            self._take_part()
        else:
            self.job.sink.take(self._slab, self._stream)  # type: ignore[arg-type]

    def stalled(self) -> None:
        if self._check is None:
            self._check = stream_check(self._slab)  # now, while there is nothing else to do
        if self._parser is None and self._got:
            if not self._framed():
                self._parse_singly()
            elif self._in_parts and self._got - self._taken_bytes >= _WAITING_PART_BYTES:
                self._take_part()

    def _framed(self) -> bool:
        if self._check is None:
            self._check = stream_check(self._slab)
        return self._check.matches(self._stream, self._got)  # type: ignore[arg-type]

    def _parse_singly(self) -> _FaultFinder:
        """Not what was asked for: read on reply by reply until it is known what came instead."""
        self._parser = _FaultFinder(self._number, self._slab)
        if self._places is not None:
            self._places.fill(self._got)
        self._parser.feed(self._view[: self._got])
        return self._parser


class _FaultFinder:
    """Finds the first reply that is not what was asked for, and raises `RangeFault` for it."""

    def __init__(self, number: int, slab: Slab) -> None:
        self._number, self._slab = number, slab
        self._lengths = slab.ranges().lengths.tolist()
        self._replies = ReplyParser(max(self._lengths) + _SPARE_READ_BYTES)
        self._scratch = memoryview(bytearray(1 << 16))
        self._index = -slab.prefix.count(b"\n")

    def target(self) -> memoryview:
        return self._scratch

    def received(self, count: int) -> None:
        self.feed(self._scratch[:count])

    def feed(self, data: memoryview | bytes) -> None:
        self._replies.feed(data)
        for reply in self._replies.replies():
            if isinstance(reply, ErrorReply):
                index = max(self._index, 0)
                raise RangeFault(self._number, index, self._lengths[index], None, reply.text, self._slab)
            if self._index >= 0:
                self._compare(reply)
            self._index += 1
            if self._index == len(self._lengths):
                raise ProtocolError("the reply stream is framed wrongly, though each of its replies is right")

    def _compare(self, reply: object) -> None:
        expected = self._lengths[self._index]
        if not isinstance(reply, BulkReply):
            raise ProtocolError(f"a string of {expected} bytes was asked for, {reply!r} came")
        received = len(reply.data or b"")
        if received != expected:
            raise RangeFault(self._number, self._index, expected, received, part=self._slab)


class PlanReader:
    """Reads plans over one channel, in the order they were started; later ones are asked for ahead.

    Not safe for threads: one owner at a time.

    Args:
        dial: gives a fresh channel.
        requests: makes requests for the data set's chunks.
        stats: counted into.
        guard: asked for behind the last range of every plan.
    """

    def __init__(
        self, dial: Callable[[], Channel], requests: RequestBuilder, stats: ReadStats, guard: Guard | None = None
    ) -> None:
        self._dial = dial
        self._requests = requests
        self._guard = guard
        self._channel: Channel | None = None
        self._jobs: deque[ReadJob] = deque()
        self._sent: deque[_SlabExchange | GuardExchange] = deque()
        self._in_flight_bytes = 0
        self._staging = _Staging()
        self.stats = stats

    def retarget(self, requests: RequestBuilder, guard: Guard | None) -> None:
        """Read another data set's chunks from the next plan on, over the same connection."""
        self._requests, self._guard = requests, guard

    def start(self, plan: ReadPlan) -> ReadJob:
        """Ask for a plan's first slabs, as far as the limit on bytes in flight lets it.

        The job's sink is not needed yet: it can be made while the server works.
        """
        job = ReadJob(plan, self._requests.for_plan(plan))
        if job.unfinished:
            job.guard = self._guard
            job.unfinished += job.guard is not None
            self._jobs.append(job)
        try:
            self._ask()
        except BaseException:
            self.close()
            raise
        return job

    def finish(self, job: ReadJob, deadline: float, doing: str) -> None:
        """Receive until the job is complete. Jobs started before it complete on the way.

        Args:
            job: from `start`.
            deadline: on `time.monotonic`'s clock.
            doing: for messages.

        Raises:
            RangeFault: a range did not come back as asked.
            TDDatapipesError: the connection or the server failed. After any error every started job is void.
        """
        began = time.perf_counter()
        while job.unfinished:
            self.step(deadline, doing)
        self.stats.wait_seconds += time.perf_counter() - began

    def step(self, deadline: float, doing: str) -> None:
        """Receive one slab of the oldest job. Arguments and errors as `finish`."""
        try:
            self._receive_one(deadline, doing)
        except BaseException:
            self.close()
            raise

    def pump(self, doing: str) -> bool:
        """Move what can be moved without waiting; whether that completed a slab. Errors as `finish`."""
        try:
            if self._channel is None:
                raise ServerUnavailableError("the connection was dropped before this read was finished")
            if not self._channel.pump(doing):
                return False
            self._received()
            return True
        except BaseException:
            self.close()
            raise

    @property
    def awaits_slabs(self) -> bool:
        """Whether any was asked for and not received."""
        return self._channel is not None and bool(self._sent)

    def waits_for(self) -> tuple[int, int]:
        """As `Channel.waits_for`, while slabs are awaited."""
        if self._channel is None:
            raise ServerUnavailableError("the connection was dropped before this read was finished")
        return self._channel.waits_for()

    def _receive_one(self, deadline: float, doing: str) -> None:
        if self._channel is None:
            raise ServerUnavailableError("the connection was dropped before this read was finished")
        self._channel.advance(deadline, doing)
        self._received()

    def _received(self) -> None:
        slab = self._sent.popleft()
        self._in_flight_bytes -= slab.nbytes
        if not slab.job.unfinished:
            slab.job.sink.seal()
            self._jobs.remove(slab.job)
        if self._in_flight_bytes <= MAX_IN_FLIGHT_BYTES // 2:
            self._ask()

    def _ask(self) -> None:
        """Ask for what the limit on bytes in flight allows, all in one go."""
        fresh: list[_SlabExchange | GuardExchange] = []
        for job in self._jobs:
            while self._in_flight_bytes < MAX_IN_FLIGHT_BYTES and (following := next(job.unsent, None)) is not None:
                if self._channel is None:
                    self._channel = self._dial()
                scatters = self._channel.scatters
                exchange = _SlabExchange(*following, job, self._staging, scatters=scatters)
                self._in_flight_bytes += exchange.nbytes
                self._count(following[1])
                fresh.append(exchange)
            if job.guard is not None and self._in_flight_bytes < MAX_IN_FLIGHT_BYTES:
                # Its ranges are all asked for: the loop above ended for want of more.
                fresh.append(GuardExchange(job.guard, job))
                job.guard = None
        if fresh and self._channel is not None:
            self._sent.extend(fresh)
            self._channel.submit(*fresh)

    def _count(self, slab: Slab) -> None:
        self.stats.commands += 1 if slab.prefix else slab.num_ranges
        self.stats.ranges += slab.num_ranges
        self.stats.bytes += slab.num_bytes

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight."""
        return not self._jobs

    def abort(self) -> None:
        """Wake whoever waits in `step` or `finish` with an error. The one call that another thread may make."""
        channel = self._channel
        if channel is not None:
            channel.abort()

    def close(self) -> None:
        """Drop the connection and every job that is not finished."""
        channel, self._channel = self._channel, None
        self._jobs.clear()
        self._sent.clear()
        self._in_flight_bytes = 0
        if channel is not None:
            channel.close()
