"""Readers, a writer and chaos on a cluster of three masters and three replicas, for as long as asked.

Run by ``make soak`` (ten minutes); thirty seconds of it are a test. Prints what was read, what was done to the cluster,
and what went wrong: wrong rows, lost rows and hangs must all be 0.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from rows_in_memory import bytes_of
from servers import ClusterProcess, Kind, ServerProcess, start_cluster, wait_until
from tensordict import TensorDict
from torch.utils.data import DataLoader

from td_datapipes import RedisTDDataset, RetryPolicy, append_dataset, write_dataset
from td_datapipes.catalog import connect
from td_datapipes.errors import AppendConflictError, ServerError, TDDatapipesError
from td_datapipes.garbage import collect_garbage
from td_datapipes.manifest import Manifest
from td_datapipes.samplers import BlockShuffleBatchSampler
from td_datapipes.wire.cluster import slot_of

__all__ = ["Outcome", "soak"]

ROWS = 2000
CHUNK_BYTES = 272 * 20
HANG_SECONDS = 90.0
"""Twice what a read may take with all its repeats."""
PATIENT = RetryPolicy(deadline_seconds=45.0)


@dataclass
class Outcome:
    """What happened.

    Attributes:
        seconds: how long it went on.
        batches: read, in whole epochs and at random.
        rows: of them.
        appends: published.
        writes: published anew.
        faults: what was done to the cluster, and how often.
        named_errors: errors that were raised, all of them named; the work was done again.
        wrong_rows: rows that were not what was written.
        lost_rows: rows that were published and are not there.
        hangs: threads that did not get on for too long.
        crashes: errors that have no name of this package, or none of their own in it.
    """

    seconds: float = 0.0
    batches: int = 0
    rows: int = 0
    appends: int = 0
    writes: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    named_errors: Counter[str] = field(default_factory=Counter)
    wrong_rows: int = 0
    lost_rows: int = 0
    hangs: int = 0
    crashes: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether nothing was wrong, lost or stuck."""
        return not (self.wrong_rows or self.lost_rows or self.hangs or self.crashes)


def rows_from(start: int, stop: int) -> TensorDict:
    """Rows that say themselves what they must be."""
    number = torch.arange(start, stop)
    x = (number[:, None] * 1_000_003 + torch.arange(60)).to(torch.int32)
    return TensorDict({"row": number, "x": x}, [stop - start])


class Soak:
    """The threads and what they share."""

    def __init__(self, cluster: ClusterProcess, seconds: float, seed: int) -> None:
        self.cluster = cluster
        self.outcome = Outcome()
        self._until = time.monotonic() + seconds
        self._lock = threading.Lock()
        self._draw = random.Random(seed)
        self._alive: dict[str, float] = {}
        self._published = ROWS
        self._cut_short = threading.Event()

    @property
    def over(self) -> bool:
        return time.monotonic() > self._until or self._cut_short.is_set()

    def url(self, name: str) -> str:
        """Of a node that runs."""
        return next(node for node in self.cluster.nodes if node.running).url(name)

    def beat(self) -> None:
        self._alive[threading.current_thread().name] = time.monotonic()

    def compare(self, batch: TensorDict, wanted: torch.Tensor | None = None) -> None:
        expected_rows = batch["row"] if wanted is None else wanted
        expected = (expected_rows[:, None] * 1_000_003 + torch.arange(60)).to(torch.int32)
        wrong = int(((batch["x"] != expected).any(1) | (batch["row"] != expected_rows)).sum())
        with self._lock:
            self.outcome.batches += 1
            self.outcome.rows += len(batch)
            self.outcome.wrong_rows += wrong
        self.beat()

    def read_epochs(self, options: dict[str, Any]) -> None:
        """Whole epochs, each row once."""
        with RedisTDDataset(self.url("grows"), retry=PATIENT, prefetch_bytes=100_000, **options) as dataset:
            while not self.over:
                sampler = BlockShuffleBatchSampler(dataset, 50, seed=self._draw.randrange(1000))
                seen: list[int] = []
                for batch in DataLoader(dataset, batch_sampler=sampler):
                    self.compare(batch)
                    seen += batch["row"].tolist()
                with self._lock:
                    self.outcome.lost_rows += len(set(range(len(dataset))) - set(seen))
                before = self._published
                dataset.refresh()
                with self._lock:
                    self.outcome.lost_rows += max(0, before - len(dataset))

    def read_at_random(self, options: dict[str, Any]) -> None:
        """Scattered rows."""
        draw = random.Random(7)
        with RedisTDDataset(self.url("fixed"), retry=PATIENT, **options) as dataset:
            while not self.over:
                wanted = torch.tensor([draw.randrange(ROWS) for _ in range(100)])
                self.compare(dataset[wanted], wanted)

    def write(self) -> None:
        """Append, write anew, collect."""
        while not self.over:
            size = self._draw.randint(1, 60)
            start = self._published
            try:
                published = append_dataset(rows_from(start, start + size), self.url("grows"), wait_seconds=20)
            except TDDatapipesError:
                # It may have been published all the same: then the next rows come behind it.
                self._published = self._rows_there(start)
                raise
            finally:
                self.beat()
            self._published = published.rows
            with self._lock:
                self.outcome.appends += 1
            write_dataset(rows_from(0, 200), self.url("anew"), overwrite=True, chunk_bytes=CHUNK_BYTES, retry=PATIENT)
            with self._lock:
                self.outcome.writes += 1
            host = connect(self.url("anew"), retry=PATIENT)
            collect_garbage(host, "anew", older_than_seconds=0)
            host.close()
            time.sleep(0.05)

    def _rows_there(self, at_least: int) -> int:
        with RedisTDDataset(self.url("grows"), retry=PATIENT) as dataset:
            with self._lock:
                self.outcome.lost_rows += max(0, at_least - len(dataset))
            return len(dataset)

    # What is done to the cluster.

    def trouble(self) -> None:
        """One thing after the other."""
        kinds = [self.kill_connections] * 3 + [self.move_slot] * 3 + [self.flush_scripts, self.pause, self.fail_over]
        while not self.over:
            what = self._draw.choice(kinds)
            what()
            with self._lock:
                self.outcome.faults[what.__name__] += 1
            self.beat()
            time.sleep(self._draw.uniform(0.05, 0.5))

    def masters(self) -> list[ServerProcess]:
        ports = {master[1] for _, _, master, *_ in self._running().execute("CLUSTER SLOTS")}
        return [node for node in self.cluster.nodes if node.port in ports]

    def _running(self) -> ServerProcess:
        return next(node for node in self.cluster.nodes if node.running)

    def kill_connections(self) -> None:
        """All of all nodes."""
        for node in self.cluster.nodes:
            node.execute("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    def flush_scripts(self) -> None:
        """On every node."""
        for node in self.cluster.nodes:
            node.execute("SCRIPT", "FLUSH")

    def pause(self) -> None:
        """Stop a master for a moment, too short for a failover."""
        node = self._draw.choice(self.masters())
        node.pause()
        time.sleep(0.4)
        node.resume()

    def move_slot(self) -> None:
        """One of those that chunks lie in."""
        masters = self.masters()
        with RedisTDDataset(self.url("fixed"), retry=PATIENT) as dataset:
            manifest: Manifest = dataset._reader.manifest
        slot = slot_of(self._draw.choice(manifest.tags).encode())
        source = self.cluster.owner(slot)
        target = self._draw.choice([node for node in masters if node is not source])
        self.cluster.begin_move(slot, target)
        while self.cluster.move_keys(slot, source, target, 3):
            time.sleep(0.02)
        for node in [target, source, *masters]:
            node.execute("CLUSTER", "SETSLOT", slot, "NODE", target.execute("CLUSTER", "MYID"))

    def fail_over(self) -> None:
        """Kill a master by SIGKILL; it comes back as a replica of who took over."""
        victim = self._draw.choice(self.masters())
        # Nobody promises that writes of the last instants survive: wait_replicated is for those that were published.
        victim.kill()
        left = [node for node in self.cluster.nodes if node is not victim]
        # Not before: it has forgotten everything, and is still taken for the master.
        wait_until(lambda: all(_has_replaced(node, victim) for node in left), "a replica to take over", 60)
        victim.restart()
        wait_until(lambda: victim.execute("INFO", "replication")["role"] == "slave", "it to be a replica", 60)
        up = "master_link_status"
        wait_until(lambda: victim.execute("INFO", "replication").get(up) == "up", "it to have everything", 60)
        self.cluster.wait_ok()

    # Running it.

    def run(self) -> Outcome:
        began = time.monotonic()
        for name in ("grows", "fixed"):
            write_dataset(rows_from(0, ROWS), self.url(name), chunk_bytes=CHUNK_BYTES)
        jobs: dict[str, Callable[[], None]] = {
            "epochs": lambda: self.read_epochs({}),
            "epochs from replicas": lambda: self.read_epochs({"read_from": "replica"}),
            "scattered": lambda: self.read_at_random({}),
            "scattered by lua": lambda: self.read_at_random({"strategy": "lua"}),
            "verified": lambda: self.read_epochs({"verify": True}),
            "writer": self.write,
            "chaos": self.trouble,
        }
        threads = [threading.Thread(target=self._keep_on, args=(job,), name=name) for name, job in jobs.items()]
        for thread in threads:
            self._alive[thread.name] = time.monotonic()
            thread.daemon = True
            thread.start()
        self._watch(threads)
        self._check_everything()
        self.outcome.seconds = time.monotonic() - began
        return self.outcome

    def _keep_on(self, job: Callable[[], None]) -> None:
        while not self.over:
            try:
                job()
            except TDDatapipesError as error:
                with self._lock:
                    self.outcome.named_errors[type(error).__name__] += not isinstance(error, AppendConflictError)
                    if type(error) is ServerError:
                        self.outcome.crashes.append(f"{threading.current_thread().name}: {error!r}")
                time.sleep(0.2)
            except Exception as error:
                with self._lock:
                    self.outcome.crashes.append(f"{threading.current_thread().name}: {error!r}")
                self._cut_short.set()
        self._alive.pop(threading.current_thread().name, None)

    def _watch(self, threads: list[threading.Thread]) -> None:
        while any(thread.is_alive() for thread in threads):
            now = time.monotonic()
            stuck = [name for name, seen in list(self._alive.items()) if now - seen > HANG_SECONDS]
            if stuck:
                self.outcome.hangs += len(stuck)
                self.outcome.crashes += [f"{name} did not get on" for name in stuck]
                self._cut_short.set()
                return
            time.sleep(0.2)

    def _check_everything(self) -> None:
        """Every row that was ever published is there, and right."""
        if self.outcome.hangs or self.outcome.crashes:
            return
        for name, rows in (("grows", self._published), ("fixed", ROWS)):
            with RedisTDDataset(self.url(name), retry=PATIENT, verify=True) as dataset:
                self.outcome.lost_rows += max(0, rows - len(dataset))
                found, expected = dataset[:], rows_from(0, len(dataset))
                same = bytes_of(found["x"]) == bytes_of(expected["x"])
                self.outcome.wrong_rows += 0 if same else int((found["x"] != expected["x"]).any(1).sum())


def _has_replaced(node: ServerProcess, victim: ServerProcess) -> bool:
    """Whether a node knows another master of all slots of one that was killed."""
    info = node.execute("CLUSTER INFO")
    facts = info if isinstance(info, dict) else dict(line.split(":", 1) for line in info.decode().split())
    masters = {master[1] for _, _, master, *_ in node.execute("CLUSTER SLOTS")}
    return facts["cluster_state"] == "ok" and victim.port not in masters


def soak(seconds: float, *, kind: Kind = "valkey", seed: int = 0) -> Outcome:
    """Readers, a writer and chaos on a cluster of its own.

    Args:
        seconds: how long the threads go on.
        kind: of the servers.
        seed: of what happens; when it happens is up to the machine.
    """
    with start_cluster(3, 1, kind=kind, config={"cluster-node-timeout": "2000"}) as cluster:
        return Soak(cluster, seconds, seed).run()


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--kind", choices=["valkey", "redis"], default="valkey")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    outcome = soak(arguments.seconds, kind=arguments.kind, seed=arguments.seed)
    print(json.dumps(vars(outcome), indent=1))
    return 0 if outcome.good else 1


if __name__ == "__main__":
    sys.exit(main())
