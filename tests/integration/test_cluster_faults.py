"""Slots that move, masters that fail, clusters that are down, sentinels: batches stay right, or errors have names."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from rows_in_memory import assert_same_rows, random_rows
from servers import ClusterProcess, Kind, SentinelProcess, ServerProcess, start_cluster, wait_until
from torch.utils.data import DataLoader

from td_datapipes import RedisTDDataset, append_dataset, write_dataset
from td_datapipes.errors import (
    ConfigurationError,
    ServerNotReadyError,
    ServerTimeoutError,
    ServerUnavailableError,
)
from td_datapipes.manifest import Manifest
from td_datapipes.samplers import BlockShuffleBatchSampler
from td_datapipes.wire.cluster import slot_of
from td_datapipes.wire.retry import RetryPolicy

TD = random_rows(600, {"x": (torch.float32, (60,)), ("n", "y"): (torch.int64, ())}, seed=7)
TD["row"] = torch.arange(600)
STRIDE = 256
PER_CHUNK = 10
SCATTERED = torch.randperm(600, generator=torch.Generator().manual_seed(1))[:200].tolist()
WAYS: list[dict[str, Any]] = [
    {"strategy": "covering"},
    {"strategy": "pipelined"},
    {"strategy": "lua"},
    {"strategy": "pipelined", "strided": True},
    {"strategy": "covering", "strided": True},
    {"read_from": "replica"},
]


def write_wide(cluster: ClusterProcess, name: str = "wide", **options: Any) -> Manifest:
    return write_dataset(TD, cluster.url(name), chunk_bytes=STRIDE * PER_CHUNK, **options)


def other_master(cluster: ClusterProcess, slot: int) -> ServerProcess:
    return next(node for node in cluster.nodes[:3] if node is not cluster.owner(slot))


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_rows_are_right_while_a_slot_moves(replicated: ClusterProcess, way: dict[str, Any]) -> None:
    manifest = write_wide(replicated)
    slot = slot_of(manifest.tags[1].encode())
    target = other_master(replicated, slot)
    with RedisTDDataset(replicated.url("wide"), **way) as dataset:
        assert_same_rows(dataset[SCATTERED], TD[SCATTERED])
        source = replicated.begin_move(slot, target)
        assert_same_rows(dataset[SCATTERED], TD[SCATTERED])
        # Five chunks lie in the slot: with one node, with both, with the other.
        moved = []
        while count := replicated.move_keys(slot, source, target, 2):
            moved.append(count)
            for index in (SCATTERED, slice(None), [10, 11], 12):
                assert_same_rows(dataset[index], TD[index])
        assert sum(moved) == 5
        replicated.end_move(slot, source, target)
        for index in (SCATTERED, slice(None), [10, 11], 12):
            assert_same_rows(dataset[index], TD[index])


def test_a_snapshot_waits_until_its_slot_has_moved(replicated: ClusterProcess) -> None:
    manifest = write_wide(replicated, "together", shards=1)
    slot = slot_of(manifest.tags[0].encode())
    target = other_master(replicated, slot)
    url = replicated.url("together")
    with (
        RedisTDDataset(url, atomic=True) as dataset,
        RedisTDDataset(url, atomic=True, retry=RetryPolicy(deadline_seconds=0.7)) as hasty,
    ):
        assert_same_rows(dataset[SCATTERED], TD[SCATTERED])
        source = replicated.begin_move(slot, target)
        replicated.move_keys(slot, source, target, 20)
        with pytest.raises(ServerNotReadyError, match="slot is moving, and its keys are with two nodes .TRYAGAIN"):
            hasty[SCATTERED]

        def move_the_rest() -> None:
            while replicated.move_keys(slot, source, target, 10):
                pass

        mover = threading.Thread(target=move_the_rest)
        mover.start()
        assert_same_rows(dataset[SCATTERED], TD[SCATTERED])
        mover.join()
        # All keys are there, though the slot is not yet the target's.
        assert_same_rows(dataset[SCATTERED], TD[SCATTERED])
        replicated.end_move(slot, source, target)
        assert_same_rows(dataset[SCATTERED], TD[SCATTERED])
        assert_same_rows(hasty[SCATTERED], TD[SCATTERED])


@pytest.mark.parametrize("way", [{"strategy": "lua"}, {"atomic": True}], ids=str)
def test_a_key_that_has_not_moved_yet_is_not_taken_for_lost(replicated: ClusterProcess, way: dict[str, Any]) -> None:
    manifest = write_wide(replicated, "apart", shards=1)
    slot = slot_of(manifest.tags[0].encode())
    target = other_master(replicated, slot)
    with RedisTDDataset(replicated.url("apart"), **way) as dataset:
        source = replicated.begin_move(slot, target)
        try:
            replicated.move_keys(slot, source, target, 20)
            # Of each chunk alone: one that has moved says where the slot goes to, where the others are not yet.
            for _ in range(2):
                for row in range(0, 600, PER_CHUNK):
                    assert_same_rows(dataset[[row, row + 3]], TD[[row, row + 3]])
        finally:
            while replicated.move_keys(slot, source, target, 100):
                pass
            replicated.end_move(slot, source, target)


def test_an_epoch_goes_on_while_slots_move_back_and_forth(replicated: ClusterProcess) -> None:
    manifest = write_wide(replicated)
    done = threading.Event()
    moves: list[int] = []

    def move() -> None:
        while not done.is_set():
            for tag in manifest.tags:
                slot = slot_of(tag.encode())
                replicated.migrate_slot(slot, other_master(replicated, slot))
                moves.append(slot)
                if done.is_set():
                    return

    mover = threading.Thread(target=move)
    with RedisTDDataset(replicated.url("wide")) as dataset:
        sampler = BlockShuffleBatchSampler(dataset, 32, seed=0)
        mover.start()
        try:
            epochs = 0
            while len(moves) < 30 and mover.is_alive():
                rows = []
                for batch in DataLoader(dataset, batch_sampler=sampler):
                    assert_same_rows(batch, TD[batch["row"]])
                    rows += batch["row"].tolist()
                assert sorted(rows) == list(range(600))
                assert_same_rows(dataset[SCATTERED], TD[SCATTERED])
                epochs += 1
        finally:
            done.set()
            mover.join()
    assert epochs > 0
    assert len(moves) >= 30


def test_a_writer_follows_slots_that_move(replicated: ClusterProcess) -> None:
    batches = [TD[start : start + 100] for start in range(0, 600, 100)]

    def moving_between() -> Iterator[Any]:
        for number, batch in enumerate(batches):
            yield batch
            staged = [key for node in replicated.nodes[:3] for key in node.client().scan_iter(match="td:{*.*}:0:*")]
            slot = sorted({slot_of(key) for key in staged} - used)[0]
            used.add(slot)
            target = other_master(replicated, slot)
            source = replicated.begin_move(slot, target)
            if number % 2:
                replicated.move_keys(slot, source, target, 100)
                replicated.end_move(slot, source, target)
            else:
                replicated.move_keys(slot, source, target, 1)
                later.append((slot, source, target))

    later: list[Any] = []
    used: set[int] = set()
    try:
        write_dataset(moving_between(), url := replicated.url("moved"), chunk_bytes=STRIDE * PER_CHUNK)
        with RedisTDDataset(url) as dataset:
            assert_same_rows(dataset[:], TD)
    finally:
        for slot, source, target in later:
            while replicated.move_keys(slot, source, target, 100):
                pass
            replicated.end_move(slot, source, target)
    append_dataset(TD[:50], url)
    with RedisTDDataset(url) as dataset:
        assert_same_rows(dataset[600:], TD[:50])


@contextmanager
def fresh_cluster(kind: Kind, *, replicas: int = 1, **config: str) -> Iterator[ClusterProcess]:
    config = {"cluster-node-timeout": "1500", **{key.replace("_", "-"): value for key, value in config.items()}}
    with start_cluster(3, replicas, kind=kind, config=config) as cluster:
        yield cluster


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["valkey", "redis"])
def test_an_epoch_goes_on_when_a_master_is_killed(kind: Kind) -> None:
    with fresh_cluster(kind) as cluster:
        write_wide(cluster)
        victim = cluster.nodes[1]
        with RedisTDDataset(cluster.url("wide")) as dataset, RedisTDDataset(cluster.url("wide")) as by_replica:
            for epoch in range(2):
                rows = []
                for number, batch in enumerate(
                    DataLoader(dataset, batch_sampler=BlockShuffleBatchSampler(dataset, 32, seed=epoch))
                ):
                    if (epoch, number) == (0, 4):
                        victim.kill()
                    assert_same_rows(batch, TD[batch["row"]])
                    rows += batch["row"].tolist()
                assert sorted(rows) == list(range(600))
            assert_same_rows(by_replica[SCATTERED], TD[SCATTERED])
            append_dataset(TD[:40], cluster.url("wide"))
            write_dataset(TD[:40], cluster.url("another"))
            victim.restart()  # comes back as a replica
            wait_until(lambda: victim.execute("INFO", "replication")["role"] == "slave", "it to be a replica")
            assert_same_rows(dataset[SCATTERED], TD[SCATTERED])
            assert dataset.refresh() == 640


@pytest.mark.heavy
def test_a_master_that_stops_is_replaced_before_the_deadline() -> None:
    with fresh_cluster("valkey") as cluster:
        write_wide(cluster)
        with RedisTDDataset(cluster.url("wide", socket_timeout=2)) as dataset:
            assert_same_rows(dataset[SCATTERED], TD[SCATTERED])
            cluster.nodes[2].pause()
            assert_same_rows(dataset[SCATTERED], TD[SCATTERED])
            cluster.nodes[2].resume()
            wait_until(lambda: cluster.nodes[2].execute("INFO", "replication")["role"] == "slave", "a replica")
            assert_same_rows(dataset[SCATTERED], TD[SCATTERED])


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["valkey", "redis"])
def test_a_cluster_that_is_down_is_waited_for_and_named(kind: Kind) -> None:
    with fresh_cluster(kind, replicas=0, appendonly="yes") as cluster:
        write_wide(cluster)
        victim, watching = cluster.nodes[0], cluster.nodes[1]
        with RedisTDDataset(watching.url("wide")) as dataset:
            assert_same_rows(dataset[SCATTERED], TD[SCATTERED])
            victim.kill()
            wait_until(lambda: b"cluster_state:fail" in _cluster_info(watching), "the cluster to be down")
            began = time.monotonic()
            for url in (watching.url("wide", retry_deadline_seconds=1.5),):
                with pytest.raises((ServerNotReadyError, ServerUnavailableError), match="CLUSTERDOWN|127.0.0.1"):
                    RedisTDDataset(url)
            assert time.monotonic() - began < 15
            back = threading.Thread(target=victim.restart)
            back.start()
            assert_same_rows(dataset[SCATTERED], TD[SCATTERED])
            back.join()


def _cluster_info(node: ServerProcess) -> bytes:
    reply = node.execute("CLUSTER INFO")
    return repr(reply).replace("': '", ":").encode() if isinstance(reply, dict) else reply


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["valkey", "redis"])
@pytest.mark.parametrize("password", [None, "n1ghtingale-31"])
def test_a_sentinel_url_follows_the_master(kind: Kind, password: str | None) -> None:
    auth = {} if password is None else {"masterauth": password}
    with ServerProcess(kind, password=password, config=auth) as first:
        joined = {"replicaof": f"{first.host} {first.port}", **auth}
        with (
            ServerProcess(kind, password=password, config=joined) as second,
            SentinelProcess(kind, first, password=password) as sentinel,
        ):
            wait_until(lambda: sentinel.num_replicas() == 1, "the sentinel to know the replica")
            query = {} if password is None else {"sentinel_password": password}
            url = sentinel.url("kept", **query)
            write_dataset(TD, url)
            wait_until(lambda: second.execute("DBSIZE") == first.execute("DBSIZE"), "the replica to have it")
            with RedisTDDataset(url) as dataset, RedisTDDataset(url, read_from="replica") as by_replica:
                assert "n1ghtingale" not in repr(dataset) + str(dataset.url) + repr(dataset.url)
                assert_same_rows(dataset[SCATTERED], TD[SCATTERED])
                assert_same_rows(by_replica[SCATTERED], TD[SCATTERED])
                first.kill()
                assert_same_rows(dataset[SCATTERED], TD[SCATTERED])
                assert sentinel.master_port() == second.port
                append_dataset(TD[:10], url)
                assert dataset.refresh() == 610
                assert_same_rows(dataset[600:], TD[:10])


def test_a_sentinel_that_is_not_there_or_knows_no_such_master_is_named() -> None:
    with ServerProcess("redis") as master, SentinelProcess("redis", master) as sentinel:
        wrong = sentinel.url("n", retry_deadline_seconds=0.5).replace("mymaster", "nobody")
        with pytest.raises(ServerUnavailableError, match="No master found for 'nobody'"):
            RedisTDDataset(wrong)
        gone = sentinel.url("n", retry_deadline_seconds=0.5)
        sentinel.kill()
        with pytest.raises(ServerUnavailableError, match="redis.sentinel://127.0.0.1"):
            RedisTDDataset(gone)


def test_one_server_has_no_replicas_to_read_from(server: ServerProcess) -> None:
    write_dataset(TD, server.url("alone"))
    with (
        RedisTDDataset(server.url("alone"), read_from="replica") as dataset,
        pytest.raises(ConfigurationError, match="needs a cluster or a sentinel URL"),
    ):
        dataset[0]
    with pytest.raises(ConfigurationError, match="must be 'master' or 'replica', got 'slave'"):
        RedisTDDataset(server.url("alone"), read_from="slave")  # type: ignore[arg-type]


def test_the_deadline_holds_on_a_cluster(replicated: ClusterProcess) -> None:
    write_wide(replicated)
    policy = RetryPolicy(deadline_seconds=1.0)
    with RedisTDDataset(replicated.url("wide", socket_timeout=0.4), retry=policy) as dataset:
        dataset[0]
        for node in replicated.nodes:
            node.pause()
        began = time.monotonic()
        try:
            with pytest.raises((ServerTimeoutError, ServerUnavailableError), match="did not answer in time|answers"):
                dataset[SCATTERED]
            # Every node may have to be asked for the slots once, for as long as an answer may take.
            assert time.monotonic() - began < 1.0 + len(replicated.nodes) * 0.4 + 2
        finally:
            for node in replicated.nodes:
                node.resume()
        replicated.wait_ok()
        assert_same_rows(dataset[SCATTERED], TD[SCATTERED])
