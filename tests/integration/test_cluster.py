"""The same URLs on clusters: rows right, every master used, prefetch, samplers, workers, appending, replicas."""

from __future__ import annotations

import multiprocessing
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
from rows_in_memory import assert_same_rows, random_rows
from servers import ClusterProcess, ServerProcess, wait_until
from tensordict import TensorDict
from torch.utils.data import DataLoader, RandomSampler

from td_datapipes import RedisTDDataset, RedisTensorDict, append_dataset, write_dataset
from td_datapipes.catalog import connect, drop, list_names
from td_datapipes.errors import ConfigurationError, DataLossError, DatasetNotFoundError
from td_datapipes.keys import manifest_key
from td_datapipes.manifest import Manifest
from td_datapipes.samplers import BlockShuffleBatchSampler, CoalescingBatchSampler
from td_datapipes.wire.cluster import slot_of

TD = random_rows(600, {"x": (torch.float32, (60,)), ("n", "y"): (torch.int64, ()), "e": (torch.int8, (0,))}, seed=7)
TD["row"] = torch.arange(600)
STRIDE = 272
PER_CHUNK = 10
SCATTERED = torch.randperm(600, generator=torch.Generator().manual_seed(1))[:200].tolist()
SCATTERED += [3, 3, 599]
WAYS: list[dict[str, Any]] = [
    {},
    {"strategy": "covering"},
    {"strategy": "pipelined"},
    {"strategy": "lua"},
    {"strategy": "pipelined", "strided": True},
    {"strategy": "covering", "strided": True},
    {"fields": ["row"]},
    {"read_from": "replica"},
    {"read_from": "replica", "strategy": "lua"},
]


@pytest.fixture
def url(replicated: ClusterProcess) -> str:
    """Sixty chunks in twelve shards."""
    write_dataset(TD, made := replicated.url("spread/wide"), chunk_bytes=STRIDE * PER_CHUNK)
    return made


def manifest_of(cluster: ClusterProcess, name: str) -> Manifest:
    key = manifest_key(name)
    return Manifest.from_json(cluster.owner(slot_of(key)).execute("GET", key))


def sent_bytes(node: ServerProcess) -> int:
    return int(node.execute("INFO", "stats")["total_net_output_bytes"])


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_rows_are_right_and_come_from_every_master(replicated: ClusterProcess, url: str, way: dict[str, Any]) -> None:
    expected = TD.select(*way["fields"]) if "fields" in way else TD
    serving = replicated.nodes[3:] if "read_from" in way else replicated.nodes[:3]
    with RedisTDDataset(url, **way) as dataset:
        dataset[0]
        before = [sent_bytes(node) for node in serving]
        for index in (slice(None), SCATTERED, slice(95, 311), [5], 17):
            assert_same_rows(dataset[index], expected[index])
        sent = [sent_bytes(node) - start for node, start in zip(serving, before, strict=True)]
        share = dataset.stats.bytes / 3
        # Chunks are dealt out in turn, so each has about a third of what was read.
        assert all(0.6 * share < bytes_ for bytes_ in sent), (sent, share)


def test_chunks_lie_evenly_in_shards_that_cover_the_masters(replicated: ClusterProcess, url: str) -> None:
    del url
    manifest = manifest_of(replicated, "spread/wide")
    assert len(manifest.tags) == 12
    assert Counter(replicated.owner(slot_of(tag.encode())).port for tag in manifest.tags) == Counter(
        {node.port: 4 for node in replicated.nodes[:3]}
    )
    # Beside 20 chunks a master: the manifest, the name and the checksums, wherever they fall.
    sizes = [node.execute("DBSIZE") for node in replicated.nodes[:3]]
    assert (min(sizes) >= 20, sum(sizes)) == (True, 63)


def test_announced_batches_are_read_ahead(url: str) -> None:
    for sampler_of in (
        lambda dataset: BlockShuffleBatchSampler(dataset, 32, seed=3),
        lambda dataset: CoalescingBatchSampler(RandomSampler(dataset), 32),
    ):
        with RedisTDDataset(url) as dataset:
            loader = DataLoader(dataset, batch_sampler=sampler_of(dataset))
            seen = []
            for batch in loader:
                assert_same_rows(batch, TD[batch["row"]])
                seen += batch["row"].tolist()
            assert sorted(seen) == list(range(600))
            assert dataset.stats.rows == 600


@pytest.mark.parametrize("how", ["fork", "spawn"])
@pytest.mark.heavy
def test_workers_dial_for_themselves(url: str, how: str) -> None:
    with RedisTDDataset(url) as dataset:
        assert_same_rows(dataset[SCATTERED], TD[SCATTERED])
        loader = DataLoader(dataset, batch_size=64, num_workers=2, multiprocessing_context=how)
        assert_same_rows(torch.cat(list(loader)), TD)
        assert_same_rows(dataset[SCATTERED], TD[SCATTERED])
        with pickle.loads(pickle.dumps(dataset)) as copied:
            assert_same_rows(copied[SCATTERED], TD[SCATTERED])


def test_any_node_is_as_good_as_another(replicated: ClusterProcess, url: str) -> None:
    del url
    for node in replicated.nodes:  # the replicas too
        with RedisTDDataset(node.url("spread/wide")) as dataset:
            assert_same_rows(dataset[SCATTERED], TD[SCATTERED])
    write_dataset(TD[:50], replicated.nodes[5].url("from a replica"))
    with RedisTDDataset(replicated.url("from a replica")) as dataset:
        assert_same_rows(dataset[:], TD[:50])


def test_appending_overwriting_and_dropping(replicated: ClusterProcess, url: str) -> None:
    with RedisTDDataset(url) as dataset, RedisTDDataset(url) as before:
        append_dataset(TD[:77], url)
        append_dataset([TD[77:80], TD[80:300]], url, complete=True)
        assert dataset.refresh() == 900
        assert_same_rows(dataset[600:], TD[:300])
        assert_same_rows(before[:], TD)
        write_dataset(TD[:33], url, overwrite=True)
        assert_same_rows(before[:], TD)
        with RedisTDDataset(url) as after:
            assert_same_rows(after[:], TD[:33])
    host = connect(url)
    assert list_names(host) == ["spread/wide"]
    drop(host, "spread/wide")
    host.close()
    assert sum(node.execute("DBSIZE") for node in replicated.nodes[:3]) == 0
    with pytest.raises(DatasetNotFoundError, match="it has none"):
        RedisTDDataset(url)


def test_one_shard_gives_one_snapshot_and_many_do_not(replicated: ClusterProcess, url: str) -> None:
    with pytest.raises(ConfigurationError, match="one shard only; 'spread/wide' has several. Write it with"):
        RedisTDDataset(url, atomic=True)
    write_dataset(TD, replicated.url("together"), chunk_bytes=STRIDE * PER_CHUNK, shards=1)
    assert len(manifest_of(replicated, "together").tags) == 1
    with RedisTDDataset(replicated.url("together"), atomic=True) as dataset:
        assert_same_rows(dataset[SCATTERED], TD[SCATTERED])
        commands = dataset.stats.commands  # the first may have had to load the script
        assert_same_rows(dataset[SCATTERED], TD[SCATTERED])
        assert dataset.stats.commands == commands + 1


@pytest.mark.parametrize("way", WAYS[:5], ids=str)
def test_a_row_longer_than_a_chunk_is_read(replicated: ClusterProcess, way: dict[str, Any]) -> None:
    td = random_rows(20, {"long": (torch.uint8, (5000,)), "x": (torch.int16, ())}, seed=2)
    write_dataset(td, url := replicated.url("long"), chunk_bytes=1024)
    with RedisTDDataset(url, **way) as dataset:
        assert_same_rows(dataset[:], td)
        assert_same_rows(dataset[[7, 0, 7]], td[[7, 0, 7]])


def test_large_rows_in_many_slabs(replicated: ClusterProcess) -> None:
    td = random_rows(300, {"frames": (torch.uint8, (3, 84, 84)), "a": (torch.float32, (4,))}, seed=2)
    write_dataset(td, url := replicated.url("large"), chunk_bytes=21184 * 8)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(0))
    for way in ({}, {"strategy": "covering"}, {"strided": True}):
        with RedisTDDataset(url, **way) as dataset:  # type: ignore[arg-type]
            assert_same_rows(dataset[:], td)
            assert_same_rows(dataset[order], td[order])


def test_a_lost_chunk_is_named(replicated: ClusterProcess, url: str) -> None:
    key = manifest_of(replicated, "spread/wide").chunk_key(0, 1)
    replicated.owner(slot_of(key)).execute("DEL", key)
    wait_until(lambda: all(node.client().exists(key) == 0 for node in [replicated.owner(slot_of(key))]), "gone")
    for way in WAYS[:5] + WAYS[7:]:
        with RedisTDDataset(url, **way) as dataset:
            with pytest.raises(DataLossError, match="chunk td:.*:0:00000001 .rows 10 to 19; .*is missing or empty"):
                dataset[SCATTERED]
            assert_same_rows(dataset[20:], TD[20:])


def test_what_a_replica_lacks_its_master_gives(replicated: ClusterProcess, url: str) -> None:
    replica = replicated.nodes[3]
    with RedisTDDataset(url, read_from="replica") as dataset:
        assert_same_rows(dataset[:], TD)
        # As a replica that lags behind, it has nothing yet.
        replica.execute("CONFIG", "SET", "replica-read-only", "no")
        replica.execute("FLUSHALL")
        try:
            for _ in range(3):
                assert_same_rows(dataset[SCATTERED], TD[SCATTERED])
            replica.kill()
            assert_same_rows(dataset[SCATTERED], TD[SCATTERED])
        finally:
            replica.restart()
            wait_until(lambda: replica.execute("DBSIZE") > 0, "the replica to have everything again")


def read_in_child(url: str, connection: Any) -> None:
    with RedisTDDataset(url) as dataset:
        connection.send(dataset[SCATTERED]["row"].tolist())


def test_a_forked_child_reads_while_its_parent_does(url: str) -> None:
    with RedisTDDataset(url) as dataset:
        dataset[SCATTERED]
        here, there = multiprocessing.Pipe()
        child = multiprocessing.get_context("fork").Process(target=read_in_child, args=(url, there))
        child.start()
        for _ in range(20):
            assert_same_rows(dataset[SCATTERED], TD[SCATTERED])
        assert here.recv() == SCATTERED
        child.join()


def test_a_batch_without_rows_or_bytes(url: str) -> None:
    with RedisTDDataset(url, fields=["e"]) as dataset:
        assert dataset[:].batch_size == torch.Size([600])
        assert isinstance(dataset[:], TensorDict)


def test_a_redis_tensordict_lives_in_one_shard(replicated: ClusterProcess) -> None:
    remote = RedisTensorDict.from_tensordict(TD, url := replicated.url("in place"))
    assert_same_rows(remote[SCATTERED], TD[SCATTERED])
    remote[[1, 5]] = TD[[7, 8]]
    remote["z"] = torch.ones(600, 2)
    with RedisTDDataset(url) as dataset:
        assert dataset[:8]["row"].tolist() == [0, 7, 2, 3, 4, 8, 6, 7]
        assert dataset[:]["z"].sum() == 1200
    assert sum(node.execute("DBSIZE") > 1 for node in replicated.nodes[:3]) == 1
    remote.clear_redis()
    remote.close()
