"""Masters that hold stripes are killed: rows stay whole and are counted right, and no index ever names two of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from redis.crc import key_slot
from replay_rows import counted
from servers import ClusterProcess, Kind, ServerProcess, wait_until
from test_cluster_faults import fresh_cluster

from td_datapipes import RedisReplayBuffer
from td_datapipes.errors import DataLossError, ServerTimeoutError, ServerUnavailableError
from td_datapipes.replay import Fifo, Prioritized, Uniform
from td_datapipes.replay.reads import Request

STRIPES = 3
CAPACITY = 600
NUMBER = (1 << 48) - 1
"""What of an index says stripe and write number."""


def assert_intact(got: torch.Tensor) -> None:
    assert torch.equal(got["b"], got["a"].double()[:, None].expand_as(got["b"]))


def owner_and_replica(cluster: ClusterProcess, slot: int) -> tuple[ServerProcess, ServerProcess]:
    asked = next(node for node in cluster.nodes if node.running)
    for first, last, *nodes in asked.execute("CLUSTER SLOTS"):
        if first <= slot <= last:
            found = [next(node for node in cluster.nodes if node.port == port) for _, port, *_ in nodes]
            return found[0], found[-1]
    raise LookupError(slot)


def master_of(cluster: ClusterProcess, buffer: RedisReplayBuffer, stripe: int) -> tuple[ServerProcess, ServerProcess]:
    return owner_and_replica(cluster, key_slot(buffer._opener.require().state_key(stripe)))


@contextmanager
def left_behind(master: ServerProcess, replica: ServerProcess) -> Iterator[None]:
    """What is written in here is confirmed by the master alone, which is killed at the end; its replica takes over."""
    master.execute("WAIT", 1, 10_000)
    replica.pause()
    try:
        master.execute("CLIENT", "KILL", "TYPE", "replica")  # nothing waits in a socket's buffer for it to wake up
        yield
        master.kill()
    finally:
        replica.resume()


def stripes_of(index: torch.Tensor) -> torch.Tensor:
    return (index & NUMBER) % STRIPES


def write_to_each(writer: RedisReplayBuffer) -> None:
    for stripe in range(STRIPES):
        writer.extend(counted(300 + stripe, 1))


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["valkey", "redis"])
def test_rows_lost_with_their_master_are_named_by_no_index_any_more(kind: Kind) -> None:
    sampler = Prioritized(alpha=1.0, beta=1.0, eps=0.0)
    with fresh_cluster(kind) as cluster:
        url = cluster.url("lagging")
        with (
            RedisReplayBuffer(url, CAPACITY, stripes=STRIPES, sampler=sampler, seed=1) as writer,
            RedisReplayBuffer(url, sampler=sampler, seed=2) as learner,
        ):
            kept = torch.cat([writer.extend(counted(10 * i, 10)) for i in range(6)])
            master, replica = master_of(cluster, writer, 1)
            with left_behind(master, replica):
                more = torch.cat([writer.extend(counted(60 + 10 * i, 10)) for i in range(6)])
                lost = more[stripes_of(more) == 1]
                assert len(lost) == 20
                whole = learner.sample(120, sampler=Uniform(replacement=False))
                named = dict(zip(whole["index"].tolist(), whole["a"].tolist(), strict=True))
                maker, deadline = learner._batches._maker, time.monotonic() + 90
                request = Request(count=400, sampler=sampler, n_step=None, number=7)
                begun = maker.begin(maker.choose(request, deadline))
            with RedisReplayBuffer(replica.url("lagging"), sampler=sampler, seed=3) as other:
                fresh = torch.cat([other.extend(counted(200 + 10 * i, 10)) for i in range(6)])
                assert (len(other), other.num_written) == (160, 160)
                assert not set(fresh.tolist()) & set(named)  # their numbers have been given again, not their indices
                named |= dict(zip(fresh.tolist(), range(200, 260), strict=True))
                other.update_priority(fresh, torch.ones(60))
                report = other.update_priority(lost, torch.full((20,), 1e9))
                assert (report.num_applied, sorted(report.rejected.tolist())) == (0, sorted(lost.tolist()))
                # Those that were there before the master failed are still named by what was handed out then.
                report = other.update_priority(torch.cat([kept, more]), torch.ones(120))
                assert (report.num_applied, sorted(report.rejected.tolist())) == (100, sorted(lost.tolist()))
                drawn = other.sample(4000)
                assert_intact(drawn)
                assert torch.bincount(drawn["a"], minlength=260)[drawn["a"].unique()].max() < 75  # of 25 on average
            # Who knew of the lost rows hears of it, once; rows chosen before are drawn again where they are lost.
            with pytest.raises(DataLossError, match="lost its last 20 rows: 40 had been written, the server has 20"):
                maker.finish(begun, deadline)
            got = maker.finish(begun, deadline)
            assert_intact(got)
            # Rows drawn by now have another index than before, of the same number.
            there = {index & NUMBER: a for index, a in named.items()}
            assert [there[index & NUMBER] for index in got["index"].tolist()] == got["a"].tolist()
            assert not set(got["index"].tolist()) & set(lost.tolist())
            assert len(learner.sample(100)) == 100
            with pytest.raises(DataLossError, match="has lost its last 20 rows"):
                write_to_each(writer)
            writer.extend(counted(310, 10))


@pytest.mark.heavy
def test_a_queue_goes_on_behind_what_the_new_master_has() -> None:
    with fresh_cluster("valkey") as cluster:
        url = cluster.url("queue")
        with RedisReplayBuffer(url, 200) as writer, RedisReplayBuffer(url, sampler=Fifo()) as learner:
            writer.extend(counted(0, 40))
            seen = learner.sample(10)["a"].tolist()
            master, replica = master_of(cluster, writer, 0)
            with left_behind(master, replica):
                writer.extend(counted(40, 20))
                ahead = learner.sample(10)["a"].tolist()
            with RedisReplayBuffer(replica.url("queue"), sampler=Fifo()) as other:
                other.extend(counted(100, 20))
                rest = [row for _ in range(5) for row in other.sample(10)["a"].tolist()]
                # That rows 10 to 19 were handed out is lost with the master, as rows 40 to 59 are.
                assert (seen, ahead) == (list(range(10)), list(range(10, 20)))
                assert rest == [*range(10, 40), *range(100, 120)]


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["valkey", "redis"])
def test_who_has_a_buffer_open_begins_to_sample_after_the_urls_node_is_gone(kind: Kind) -> None:
    with fresh_cluster(kind) as cluster, RedisReplayBuffer(cluster.url("open"), CAPACITY, stripes=STRIPES) as buffer:
        for start in range(0, 30, 10):
            buffer.extend(counted(start, 10))
        first, heir = owner_and_replica(cluster, 0)
        assert f":{first.port}/" in cluster.url("open")
        for master in cluster.nodes[:3]:
            written = int(master.execute("INFO", "replication")["master_repl_offset"])
            wait_until(
                lambda master=master, written=written: (
                    int(master.execute("INFO", "replication")["slave0"]["offset"]) >= written
                ),
                "its replica to have all",
            )
        first.kill()
        wait_until(lambda: heir.execute("INFO", "replication")["role"] == "master", "the replica to take over")
        batch = buffer.sample(30, sampler=Uniform(replacement=False))
        assert sorted(batch["a"].tolist()) == list(range(30))
        assert_intact(batch)


@dataclass
class Notes:
    """What threads saw: which row each index named, and which errors."""

    named: dict[int, set[int]] = field(default_factory=dict)
    errors: list[BaseException] = field(default_factory=list)
    rounds: dict[str, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, index: torch.Tensor, a: torch.Tensor) -> None:
        with self.lock:
            for one, row in zip(index.tolist(), a.tolist(), strict=True):
                self.named.setdefault(one, set()).add(row)

    def repeat(self, name: str, step: Callable[[], Any], done: threading.Event) -> None:
        """Until it is done, go on after errors that say what happened."""
        while not done.is_set():
            try:
                step()
            except (DataLossError, ServerUnavailableError, ServerTimeoutError) as error:
                self.errors.append(error)
            with self.lock:
                self.rounds[name] = self.rounds.get(name, 0) + 1


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["valkey", "redis"])
def test_writers_and_a_learner_go_on_when_a_master_is_killed(kind: Kind) -> None:
    torch.set_num_threads(1)
    notes, done, failed = Notes(), threading.Event(), list[BaseException]()
    prioritized = Prioritized(alpha=0.7)

    def guarded(run: Callable[[], None]) -> Callable[[], None]:
        def body() -> None:
            try:
                run()
            except BaseException as error:
                failed.append(error)
                done.set()

        return body

    with fresh_cluster(kind) as cluster:
        url = cluster.url("live", socket_timeout=2)

        def write(number: int) -> None:
            at = iter(range(number * 10_000_000, (number + 1) * 10_000_000, 10))
            with RedisReplayBuffer(url, CAPACITY, stripes=STRIPES, sampler=prioritized, timeout_seconds=40) as buffer:

                def step() -> None:
                    rows = counted(next(at), 10)
                    notes.take(buffer.extend(rows), rows["a"])
                    done.wait(0.005)

                notes.repeat(f"writer {number}", step, done)

        def learn() -> None:
            with RedisReplayBuffer(url, sampler=prioritized, timeout_seconds=40, prefetch=2) as buffer:
                wait_until(lambda: len(buffer) > 100, "rows to learn from")

                def step() -> None:
                    for sampler in (prioritized, Uniform()):
                        got = buffer.sample(32, sampler=sampler)
                        assert_intact(got)
                        notes.take(got["index"], got["a"])
                        buffer.update_priority(got["index"], torch.rand(32))

                notes.repeat("learner", step, done)

        jobs = [lambda number=number: write(number) for number in range(2)] + [learn]
        threads = [threading.Thread(target=guarded(job)) for job in jobs]
        for thread in threads:
            thread.start()

        def wait_rounds(more: int) -> None:
            with notes.lock:
                before = dict(notes.rounds)
            goal = {name: before.get(name, 0) + more for name in ("writer 0", "writer 1", "learner")}

            def reached() -> bool:
                with notes.lock:
                    return bool(failed) or all(notes.rounds.get(name, 0) >= count for name, count in goal.items())

            wait_until(reached, f"{more} rounds of everybody", 60)

        try:
            wait_rounds(20)
            with RedisReplayBuffer(url) as looking:
                victim, heir = master_of(cluster, looking, 1)
            victim.kill()
            wait_until(lambda: heir.execute("INFO", "replication")["role"] == "master", "the replica to take over")
            wait_rounds(30)
        finally:
            done.set()
            for thread in threads:
                thread.join(90)
        assert not failed, failed
        assert all(len(rows) == 1 for rows in notes.named.values())
        # One loss a stripe and object at most, and what was in no time answered.
        assert len(notes.errors) <= 2 * len(threads) + 4, notes.errors
        with RedisReplayBuffer(heir.url("live")) as buffer:
            whole = buffer.sample(len(buffer), sampler=Uniform(replacement=False))
            assert_intact(whole)
            rows = whole["a"].tolist()
            assert len(set(rows)) == len(rows)  # none was stored twice
            ring = buffer._opener.require()
            cursors = [
                int(master_of(cluster, buffer, stripe)[0].execute("HGET", ring.state_key(stripe), "cursor"))
                for stripe in range(STRIPES)
            ]
            assert buffer.num_written == sum(cursors)
            assert len(buffer) == sum(np.minimum(cursors, CAPACITY // STRIPES))
