"""A process is killed while it makes, copies or restores a buffer: collecting leaves what is published alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from replay_rows import episode
from servers import ClusterProcess, ServerProcess
from test_killed_writer import keys_of, run_and_die

from td_datapipes import RedisReplayBuffer
from td_datapipes.catalog import connect, find_manifest
from td_datapipes.errors import ConfigurationError, DatasetExistsError
from td_datapipes.garbage import collect_garbage, staged_writes
from td_datapipes.keys import NAMES_KEY, manifest_key, staged_key, superseded_key
from td_datapipes.replay import Trajectories, Uniform, keeping

ROWS = 39
OPTIONS = {"stripes": 2, "trajectories": Trajectories(reward="reward", done="done"), "chunk_bytes": 256}


def make(url: str) -> None:
    with RedisReplayBuffer(url, 60, **OPTIONS) as buffer:
        buffer.extend(episode(1, ROWS))


def copy_of(url: str) -> str:
    return f"{url}@1"


def snapshot(url: str) -> None:
    with RedisReplayBuffer(url) as buffer:
        buffer.snapshot(copy_of(connect(url).url.name), overwrite=True)


def restore(url: str) -> None:
    with RedisReplayBuffer(url) as buffer:
        buffer.restore(copy_of(buffer.name))


def make_and_snapshot(url: str) -> None:
    make(url)
    snapshot(url)


def drop(url: str) -> None:
    with RedisReplayBuffer(url) as buffer:
        buffer.drop()


def leave_the_copy(url: str) -> None:
    make_and_snapshot(url)
    drop(url)


def nothing(url: str) -> None:
    """A server without the buffer."""


CASES: dict[str, tuple[Callable[[str], None], Callable[[str], None]]] = {
    "make": (nothing, make),
    "snapshot": (make, snapshot),
    "overwrite": (make_and_snapshot, snapshot),
    "restore": (make_and_snapshot, restore),
    "restore a dropped one": (leave_the_copy, restore),
}


def collect(url: str) -> None:
    host = connect(url)
    for name in (host.url.name, copy_of(host.url.name)):
        collect_garbage(host, name, older_than_seconds=0)
        assert staged_writes(host, name) == []
    host.close()


def strangers(nodes: list[ServerProcess], url: str) -> set[bytes]:
    """The keys that belong to nothing that is published, but for what clients' calls were answered."""
    host = connect(url)
    known, prefixes = {NAMES_KEY}, []
    for name in (host.url.name, copy_of(host.url.name)):
        known |= {manifest_key(name), superseded_key(name), staged_key(name)}
        manifest = find_manifest(host, name)
        prefixes += [] if manifest is None else [f"td:{{{tag}}}:".encode() for tag in manifest.tags]
    host.close()
    found = {key for key in keys_of(nodes) - known if b"}:by:" not in key}
    return {key for key in found if not key.startswith(tuple(prefixes))}


def assert_whole(url: str) -> None:
    """What is published holds rows in order, each once: `extend` stores them part by part."""
    with RedisReplayBuffer(url) as buffer:
        rows = len(buffer)
        if rows:
            got = buffer.sample(rows, sampler=Uniform(replacement=False))
            assert sorted(got["step"].tolist()) == list(range(rows))
            assert torch.equal(got["observation"][:, 0], 1000 + got["step"].float())


def walk(nodes: list[ServerProcess], url: str, case: str, moment: str, flush: Callable[[], None]) -> int:
    prepare, act = CASES[case]
    left = 0
    for step in range(200):
        flush()
        prepare(url)
        killed = run_and_die(step, moment, lambda: act(url))
        left += len(strangers(nodes, url)) > 0
        collect(url)
        assert strangers(nodes, url) == set(), step
        for name in (url, copy_of(url)):
            assert_whole(name)
        if case != "make":
            with RedisReplayBuffer(copy_of(url) if case.startswith("restore") else url) as kept:
                assert len(kept) == ROWS + 1
            assert_whole(url)
            act(url)  # it can be done again
            assert_whole(url)
        if not killed:
            return left
    raise AssertionError("it takes more steps than expected")


@pytest.mark.heavy
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("case", CASES)
def test_what_a_killed_process_left_of_a_buffer_is_collected(
    server: ServerProcess, unique_name: str, case: str, moment: str
) -> None:
    left = walk([server], server.url(unique_name), case, moment, server.flush)
    # A restore writes to the buffer itself; any other killed one has left something at times.
    assert (left > 0) == (case != "restore")


@pytest.mark.heavy
@pytest.mark.parametrize("case", ["snapshot", "restore"])
def test_what_a_killed_process_left_on_a_cluster_is_collected(
    cluster: ClusterProcess, unique_name: str, case: str
) -> None:
    walk(cluster.nodes, cluster.url(unique_name), case, "after", cluster.flush)


def test_dropping_a_buffer_and_its_copies_leaves_nothing_but_answers(server: ServerProcess, unique_name: str) -> None:
    url = server.url(unique_name)
    make_and_snapshot(url)
    snapshot(url)  # one copy is superseded by another
    drop(copy_of(url))
    assert strangers([server], url) == set()
    drop(url)
    left = {key for key in keys_of([server]) if key != NAMES_KEY}
    assert left
    assert all(b"}:by:" in key and server.execute("TTL", key) > 0 for key in left)


def test_a_copy_under_a_name_that_was_taken_meanwhile_is_taken_back(
    server: ServerProcess, unique_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = server.url(unique_name)
    make(url)
    # Between copying and publishing, another process publishes a copy of its own.
    rivals = iter([snapshot])
    monkeypatch.setattr(keeping, "persist", lambda _: next(rivals, nothing)(url))
    with RedisReplayBuffer(url) as buffer, pytest.raises(DatasetExistsError, match="published by another writer"):
        buffer.snapshot(copy_of(unique_name))
    assert strangers([server], url) == set()
    host = connect(url)
    assert staged_writes(host, copy_of(unique_name)) == []
    host.close()
    assert_whole(copy_of(url))
    with RedisReplayBuffer(copy_of(url)) as copied:
        assert len(copied) == ROWS + 1


def test_a_copy_of_a_buffer_that_is_gone_leaves_nothing(server: ServerProcess, unique_name: str) -> None:
    url = server.url(unique_name)
    make(url)
    with RedisReplayBuffer(url) as buffer:
        ring = buffer._opener.require()
        server.execute("DEL", ring.state_key(1))
        with pytest.raises(ConfigurationError, match="is gone"):
            buffer.snapshot(copy_of(unique_name))
    assert strangers([server], url) == set()
