"""Users who may do just what docs/security.md says, TLS with certificates of both sides, and names that stay inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from documented_users import PASSWORD, documented, guarded_server
from rows_in_memory import assert_same_rows, random_rows
from servers import ClusterProcess, ServerProcess, make_certificates, start_cluster
from torch.utils.data import DataLoader

from td_datapipes import RedisTDDataset, append_dataset, verify_dataset, write_dataset
from td_datapipes.catalog import connect, drop, list_names
from td_datapipes.errors import AuthenticationError, DatasetNotFoundError, ServerUnavailableError
from td_datapipes.garbage import collect_garbage
from td_datapipes.samplers import BlockShuffleBatchSampler
from td_datapipes.wire.cluster import slot_of

TD = random_rows(300, {"x": (torch.float32, (6,)), ("n", "y"): (torch.int16, ())}, seed=6)
TD["row"] = torch.arange(300)
ROWS = torch.randperm(300, generator=torch.Generator().manual_seed(0))[:90].tolist()


@pytest.fixture(scope="module", params=["valkey", "redis"])
def guarded(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    with guarded_server(request.param, "reader", "trainer", "writer") as process:
        yield process


@pytest.fixture(autouse=True)
def _kept(request: pytest.FixtureRequest) -> None:
    if "guarded" in request.fixturenames:
        process: ServerProcess = request.getfixturevalue("guarded")
        process.flush()
        process.execute("SET", "somebody's", "own")
        write_dataset(TD, process.url("kept"), chunk_bytes=48 * 20)


def read_in_every_way(url: str) -> None:
    for options in ({}, {"strategy": "covering"}, {"strategy": "pipelined"}, {"strategy": "lua"}, {"verify": True}):
        with RedisTDDataset(url, **options) as dataset:  # type: ignore[arg-type]
            for _ in range(12):  # long enough for `auto` to try Lua
                assert_same_rows(dataset[ROWS], TD[ROWS])
            assert_same_rows(dataset[:300], TD)
            sampler = BlockShuffleBatchSampler(dataset, 32, seed=0)
            assert sum(len(batch) for batch in DataLoader(dataset, batch_sampler=sampler)) == len(dataset)
            dataset.refresh()


def test_a_reader_reads_and_writes_nothing(guarded: ServerProcess) -> None:
    url = guarded.url("kept", user="reader")
    read_in_every_way(url)
    assert verify_dataset(url).good
    with pytest.raises(DatasetNotFoundError, match="it has 'kept'"):
        RedisTDDataset(guarded.url("nothing", user="reader"))
    before = {key: guarded.execute("DUMP", key) for key in guarded.execute("KEYS", "*")}
    for write in WRITES.values():
        with pytest.raises(AuthenticationError):
            write(url)
    assert {key: guarded.execute("DUMP", key) for key in guarded.execute("KEYS", "*")} == before


def _drop(url: str) -> None:
    host = connect(url)
    try:
        drop(host, host.url.name)
    finally:
        host.close()


WRITES: dict[str, Callable[[str], Any]] = {
    "write": lambda url: write_dataset(TD, url, overwrite=True),
    "append": lambda url: append_dataset(TD, url),
    "drop": _drop,
}


def test_a_trainer_reads_and_appends(guarded: ServerProcess) -> None:
    url = guarded.url("kept", user="trainer")
    append_dataset(TD[:50], url)
    append_dataset(TD[50:60], url)
    read_in_every_way(url)
    with RedisTDDataset(url) as dataset:
        assert_same_rows(dataset[300:], TD[:60])
    assert verify_dataset(url).good
    with pytest.raises(AuthenticationError):
        WRITES["write"](url)
    read_in_every_way(url)


def test_a_writer_does_all_there_is_to_data_sets_and_nothing_else(guarded: ServerProcess) -> None:
    url = guarded.url("made", user="writer")
    write_dataset(TD, url, chunk_bytes=48 * 20)
    append_dataset(TD[:5], url)
    read_in_every_way(url)
    write_dataset(TD, url, overwrite=True)
    host = connect(url)
    assert collect_garbage(host, "made", older_than_seconds=0).generations == 1
    assert list_names(host) == ["kept", "made"]
    drop(host, "made")
    for command in (("GET", "somebody's"), ("SET", "other", 1), ("FLUSHALL",), ("CONFIG", "SET", "maxmemory", 1)):
        with pytest.raises(AuthenticationError):
            host.call("trying", lambda client, command=command: client.execute_command(*command))
    host.close()


@pytest.mark.parametrize("role", ["reader", "trainer", "writer"])
def test_the_roles_do_on_a_cluster_too(replicated: ClusterProcess, role: str) -> None:
    rules = documented(role).split()
    for node in replicated.nodes:
        node.execute("ACL", "SETUSER", role, "reset", "on", f">{PASSWORD}", *rules)
    try:
        write_dataset(TD, replicated.url("kept"), chunk_bytes=48 * 20)
        url = replicated.url("kept").replace("redis://", f"redis://{role}:{PASSWORD}@")
        read_in_every_way(url)
        with RedisTDDataset(url, read_from="replica") as dataset:
            assert_same_rows(dataset[ROWS], TD[ROWS])
        if role != "reader":
            append_dataset(TD[:9], url)
        if role == "writer":
            write_dataset(TD, url, overwrite=True)
            _drop(url)
    finally:
        for node in replicated.nodes:
            node.execute("ACL", "DELUSER", role)


def test_a_server_that_asks_for_certificates_gets_them(tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path)
    with ServerProcess("redis", tls=certificates, client_certificate=True) as server:
        write_dataset(TD, url := server.url("sealed"))
        assert "ssl_certfile" in url
        for options in ({}, {"strategy": "pipelined"}, {"strategy": "lua"}):
            with RedisTDDataset(url, **options) as dataset:  # type: ignore[arg-type]
                assert_same_rows(dataset[ROWS], TD[ROWS])
        bare = f"rediss://localhost:{server.port}/0?ssl_ca_certs={certificates.ca}#sealed"
        for then in (RedisTDDataset, lambda url: write_dataset(TD, url)):
            with pytest.raises((AuthenticationError, ServerUnavailableError), match="TLS|SSL|certificate"):
                then(bare)


@pytest.mark.heavy
def test_a_cluster_speaks_tls(tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path)
    with start_cluster(3, 0, kind="redis", tls=certificates) as cluster:
        write_dataset(TD, url := cluster.url("sealed"), chunk_bytes=48 * 20)
        assert url.startswith("rediss://")
        append_dataset(TD[:7], url)
        read_in_every_way(url)
        assert all(node.execute("DBSIZE") > 3 for node in cluster.nodes)


NAMES = [
    "{a}",
    "}{",
    "{",
    "*",
    "?",
    "[a]",
    "a\nb",
    "a\0b",
    "a\r\nDEL td:names\r\n",
    "../a",
    "td:names",
    "a:manifest",
    "é€",
]


def test_names_stay_inside_on_a_cluster(cluster: ClusterProcess) -> None:
    cluster.owner(slot_of(b"a")).execute("SET", "td:{a}:manifest", b"another's")
    for number, name in enumerate(NAMES):
        write_dataset(TD[number : number + 5], cluster.url(name))
    for number, name in enumerate(NAMES):
        with RedisTDDataset(cluster.url(name)) as dataset:
            assert_same_rows(dataset[:], TD[number : number + 5])
    host = connect(cluster.url("x"))
    assert list_names(host) == sorted(NAMES)
    for name in NAMES:
        drop(host, name)
    host.close()
    assert {key for node in cluster.nodes for key in node.execute("KEYS", "*")} == {b"td:{a}:manifest"}
