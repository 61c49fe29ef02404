"""Servers for every test that asks for one: started once a session, emptied before each test."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
import torch
from servers import ClusterProcess, Kind, ServerProcess, make_certificates, start_cluster

# The machines that run the tests have few cores, and several processes of one test share them.
torch.set_num_threads(1)


_shared: list[ServerProcess] = []
"""What more than one test uses."""


@pytest.fixture(autouse=True)
def _shared_servers_run() -> Iterator[None]:
    """Whatever a test did to the shared servers, the next one finds them running, in any order of tests."""
    yield
    for process in _shared:
        if process.running:
            process.resume()
        else:
            process.restart()


def _share(process: ServerProcess) -> Iterator[ServerProcess]:
    with process:
        _shared.append(process)
        yield process
        _shared.remove(process)


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[ServerProcess]:
    """The wheel's valkey-server, without persistence. Shared: use `server` to get it emptied."""
    yield from _share(ServerProcess("valkey", unix_socket=True))


@pytest.fixture(scope="session")
def redis_server() -> Iterator[ServerProcess]:
    """Debian's redis-server, without persistence. Shared: use `server` to get it emptied."""
    yield from _share(ServerProcess("redis", unix_socket=True))


@pytest.fixture(params=["valkey", "redis"])
def server(request: pytest.FixtureRequest) -> ServerProcess:
    """Each kind of server in turn, empty."""
    process: ServerProcess = request.getfixturevalue(f"{request.param}_server")
    process.flush()
    return process


@pytest.fixture(scope="session")
def tls_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Debian's redis-server speaking TLS only; the URL names the authority's file."""
    certificates = make_certificates(tmp_path_factory.mktemp("certificates"))
    yield from _share(ServerProcess("redis", tls=certificates))


def _share_cluster(nodes: ClusterProcess) -> Iterator[ClusterProcess]:
    with nodes:
        _shared.extend(nodes.nodes)
        yield nodes
        for node in nodes.nodes:
            _shared.remove(node)


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[ClusterProcess]:
    """Three masters, started when the first test asks. Shared: use `cluster` to get it emptied."""
    yield from _share_cluster(start_cluster(masters=3))


@pytest.fixture
def cluster(shared_cluster: ClusterProcess) -> ClusterProcess:
    """Three masters, empty."""
    shared_cluster.wait_ok()
    shared_cluster.flush()
    return shared_cluster


def _replicated(kind: Kind) -> Iterator[ClusterProcess]:
    # Long: a busy machine's replica would take its master for dead.
    config = {"cluster-node-timeout": "10000"}
    yield from _share_cluster(start_cluster(masters=3, replicas=1, kind=kind, config=config))


@pytest.fixture(scope="session")
def valkey_cluster() -> Iterator[ClusterProcess]:
    """Three masters of the wheel's Valkey with a replica each. Shared: use `replicated` to get it emptied."""
    yield from _replicated("valkey")


@pytest.fixture(scope="session")
def redis_cluster() -> Iterator[ClusterProcess]:
    """Three masters of Debian's Redis with a replica each. Shared: use `replicated` to get it emptied."""
    yield from _replicated("redis")


@pytest.fixture(params=["valkey", "redis"])
def replicated(request: pytest.FixtureRequest) -> ClusterProcess:
    """A cluster of each kind in turn, empty; no test may leave another node a master."""
    nodes: ClusterProcess = request.getfixturevalue(f"{request.param}_cluster")
    nodes.wait_ok()
    nodes.flush()
    return nodes


@pytest.fixture
def unique_name() -> str:
    """A data set's name that nobody else uses."""
    return f"test/{uuid.uuid4().hex}"
