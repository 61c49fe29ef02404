"""Users of replay buffers who may do just what docs/security.md says."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
from documented_users import PASSWORD, documented, guarded_server
from replay_rows import GAMMA, counted, episode, expected_return
from servers import ClusterProcess, ServerProcess

from td_datapipes import RedisReplayBuffer, write_dataset
from td_datapipes.catalog import connect, find_manifest, stage
from td_datapipes.errors import AuthenticationError, ConfigurationError, DatasetNotFoundError, NotEnoughRowsError
from td_datapipes.garbage import collect_garbage, staged_writes, writer_note
from td_datapipes.keys import manifest_key
from td_datapipes.replay import Fifo, Lifo, NStep, Prioritized, RateLimit, Slices, Trajectories, Uniform
from td_datapipes.schema import schema_of

ROLES = ("player", "owner", "writer")
LONG = 4096
"""Doubles of a row that is so long that its chunks are staged and renamed."""
JOINED = Trajectories(id="episode", step="step", reward="reward", done="done", terminated="terminated")


@pytest.fixture(scope="module", params=["valkey", "redis"])
def guarded(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    with guarded_server(request.param, *ROLES) as process:
        yield process


@pytest.fixture(autouse=True)
def _empty(request: pytest.FixtureRequest) -> None:
    if "guarded" in request.fixturenames:
        process: ServerProcess = request.getfixturevalue("guarded")
        process.flush()
        process.execute("SCRIPT", "FLUSH")
        process.execute("SET", "somebody's", "own")


def make_all(url: str) -> None:
    """Every kind of buffer that `play_all` plays on, with its first rows."""
    with RedisReplayBuffer(url, 64, chunk_bytes=1024) as buffer:
        buffer.extend(counted(0, 40))
    with RedisReplayBuffer(
        url + "-queue", 64, rate_limit=RateLimit(samples_per_insert=1.0, min_size=1, error_buffer=64.0)
    ) as buffer:
        buffer.extend(counted(0, 8))
    with RedisReplayBuffer(url + "-long", 64) as buffer:
        buffer.extend(counted(0, 8, LONG))
    with RedisReplayBuffer(url + "-joined", 64, trajectories=JOINED) as buffer:
        buffer.extend(episode(1, 4))
    with RedisReplayBuffer(url + "-striped", 180, stripes=3) as buffer:
        buffer.extend(counted(0, 20))


def play_all(url: str) -> None:
    """All that actors and learners do with buffers that are there."""
    play_by_priority(url)
    play_a_queue(url + "-queue")
    play_long_rows(url + "-long")
    play_trajectories(url + "-joined")
    with RedisReplayBuffer(url + "-striped") as buffer:
        buffer.extend(counted(20, 20))
        assert sorted(buffer.sample(40, sampler=Uniform(replacement=False))["a"].tolist()) == list(range(40))
        got = buffer.sample(6, sampler=Uniform(replacement=False))
        assert buffer.update_priority(got["index"], torch.ones(6)).num_applied == 6
    play_slots(url)


def play_by_priority(url: str) -> None:
    with RedisReplayBuffer(url, sampler=Prioritized(alpha=1.0, beta=1.0, eps=0.0), prefetch=2, seed=0) as buffer:
        buffer.extend(counted(40, 40))  # it is full: the first rows are overwritten
        assert buffer.add(counted(80, 1)[0]) > 0
        assert (len(buffer), buffer.num_written) == (64, 81)
        index = buffer.sample(64, sampler=Uniform(replacement=False))["index"]
        report = buffer.update_priority(index, torch.arange(64) == 5)
        assert report.num_applied == 64
        assert buffer.sample(16, sampler=Prioritized(alpha=1.0, eps=0.0))["index"].eq(index[5]).all()
        buffer.sample(16)
        state = buffer.state_dict()
    with RedisReplayBuffer(url, sampler=Prioritized(alpha=1.0, beta=1.0, eps=0.0), prefetch=2) as buffer:
        buffer.load_state_dict(state)
        assert buffer.sample(16)["index"].eq(index[5]).all()


def play_a_queue(url: str) -> None:
    with RedisReplayBuffer(url) as buffer:
        assert buffer.sample(4, sampler=Fifo())["a"].tolist() == [0, 1, 2, 3]
        buffer.extend(counted(8, 4))
        assert buffer.sample(4, sampler=Fifo())["a"].tolist() == [4, 5, 6, 7]
        assert sorted(buffer.sample(2, sampler=Lifo())["a"].tolist()) == [10, 11]


def play_long_rows(url: str) -> None:
    with RedisReplayBuffer(url) as buffer:
        for start in range(8, 72, 16):
            buffer.extend(counted(start, 16, LONG))
        buffer.extend(counted(72, 3, LONG))
        got = buffer.sample(64, sampler=Uniform(replacement=False))
        assert sorted(got["a"].tolist()) == list(range(11, 75))
        assert torch.equal(got["b"][:, -1], got["a"].double())


def play_trajectories(url: str) -> None:
    with RedisReplayBuffer(url) as buffer:
        for step in episode(2, 3).split(1):  # what is joined later is linked when it comes
            buffer.extend(step)
        for number in range(3, 18):  # the first trajectories are overwritten
            buffer.extend(episode(number, 4))
        windows = buffer.sample(6, sampler=Slices(length=3))
        assert torch.equal(windows["step"].diff(dim=1), torch.ones(6, 2, dtype=torch.int64))
        joined = buffer.sample(8, n_step=NStep(steps=2, gamma=GAMMA))
        for first, steps, found in zip(joined["reward"], joined["n_steps"], joined["n_step_return"], strict=True):
            assert found == expected_return(float(first) + k for k in range(int(steps)))


def play_slots(url: str) -> None:
    with RedisReplayBuffer(url) as buffer:
        slots = buffer.slots()
        slots.write(torch.tensor([3, 9]).numpy(), counted(500, 2))
        assert slots.read(torch.tensor([9, 3]).numpy())["a"].tolist() == [501, 500]
        slots.close()


def own_all(url: str) -> None:
    """All that an owner does beside."""
    with RedisReplayBuffer(url) as buffer:
        buffer.snapshot("kept@1")
        buffer.snapshot("kept@1", overwrite=True)
        with RedisReplayBuffer(url, 64) as late:  # makes it too, and is not the first to publish
            late._opener._make(schema_of(counted(0, 1)))
        buffer.clear()
        assert len(buffer) == 0
        buffer.restore("kept@1")
        assert len(buffer) == 64
        with RedisReplayBuffer(url) as dropped:
            buffer.drop()
            with pytest.raises(ConfigurationError, match="is gone"):
                dropped.snapshot("lost")
        with pytest.raises(DatasetNotFoundError, match="kept@1"):
            buffer.restore("nothing")
        buffer.restore("kept@1")
        assert len(buffer) == 64
        buffer.drop()
    for name in ("-queue", "-long", "-joined", "-striped"):
        RedisReplayBuffer(url + name).drop()


def test_an_owner_makes_buffers_and_a_player_plays(guarded: ServerProcess) -> None:
    make_all(guarded.url("buffer", user="owner"))
    play_all(guarded.url("buffer", user="player"))
    own_all(guarded.url("buffer", user="owner"))
    assert guarded.execute("KEYS", "td:{*}:staged") == []


def test_a_player_neither_makes_nor_copies_nor_removes(guarded: ServerProcess) -> None:
    owned, played = (guarded.url("buffer", user=role) for role in ("owner", "player"))
    with RedisReplayBuffer(owned, 64) as buffer:
        buffer.extend(counted(0, 40))
        buffer.snapshot("kept@1")
    before = {key: guarded.execute("DUMP", key) for key in guarded.execute("KEYS", "*")}
    with RedisReplayBuffer(guarded.url("other", user="player"), 64) as other:
        for refused in (lambda: other.extend(counted(0, 4)), lambda: other.restore("kept@1")):
            with pytest.raises(AuthenticationError, match="'other'"):
                refused()
        with pytest.raises(NotEnoughRowsError, match="no process has written"):
            other.sample(1)
    with RedisReplayBuffer(played) as buffer:
        for forbidden in (
            lambda: buffer.snapshot("kept@2"),
            lambda: buffer.snapshot("kept@1", overwrite=True),
            lambda: buffer.restore("kept@1"),
        ):
            with pytest.raises(AuthenticationError):
                forbidden()
        with pytest.raises(AuthenticationError, match="removing 'buffer'"):
            buffer.drop()
        with pytest.raises(AuthenticationError):
            write_dataset(counted(0, 3), guarded.url("data", user="player"))
        assert {key: guarded.execute("DUMP", key) for key in guarded.execute("KEYS", "*")} == before
        assert sorted(buffer.sample(40, sampler=Uniform(replacement=False))["a"].tolist()) == list(range(40))


@pytest.mark.parametrize("role", ["player", "owner"])
def test_roles_of_buffers_reach_no_other_keys(guarded: ServerProcess, role: str) -> None:
    host = connect(guarded.url("buffer", user=role))
    for command in (("GET", "somebody's"), ("SET", "other", 1), ("FLUSHALL",), ("CONFIG", "SET", "maxmemory", 1)):
        with pytest.raises(AuthenticationError):
            host.call("trying", lambda client, command=command: client.execute_command(*command))
    host.close()


def test_a_writer_collects_what_an_interrupted_copy_left(guarded: ServerProcess) -> None:
    with RedisReplayBuffer(guarded.url("buffer", user="owner"), 64) as buffer:
        buffer.extend(counted(0, 40))
        buffer.snapshot("kept@1")
    admin = connect(guarded.url("kept@1"))
    manifest = find_manifest(admin, "kept@1")
    assert manifest is not None
    # As it is where an owner was killed just before publishing, long ago.
    guarded.execute("DEL", manifest_key("kept@1"))
    note = {**json.loads(writer_note(manifest, 0.0)), "host": "elsewhere", "seen": 0.0}
    stage(admin, "kept@1", "copy-1", json.dumps(note))
    admin.close()
    host = connect(guarded.url("kept@1", user="writer"))
    assert [write.id for write in staged_writes(host, "kept@1")] == ["copy-1"]
    collect_garbage(host, "kept@1", older_than_seconds=0)
    host.close()
    assert guarded.execute("EXISTS", *manifest.ring_keys) == 0
    with RedisReplayBuffer(guarded.url("buffer", user="player")) as buffer:
        assert len(buffer.sample(40, sampler=Uniform(replacement=False))) == 40


def test_buffers_are_played_and_owned_on_a_cluster_too(replicated: ClusterProcess) -> None:
    for role in ("player", "owner"):
        for node in replicated.nodes:
            node.execute("ACL", "SETUSER", role, "reset", "on", f">{PASSWORD}", *documented(role).split())
    owned, played = (
        replicated.url("buffer").replace("redis://", f"redis://{role}:{PASSWORD}@") for role in ("owner", "player")
    )
    try:
        with pytest.raises(AuthenticationError), RedisReplayBuffer(played, 64) as buffer:
            buffer.extend(counted(0, 40))
        make_all(owned)
        play_all(played)
        with RedisReplayBuffer(played) as buffer:
            for refused in (lambda: buffer.snapshot("kept@2"), buffer.drop):
                with pytest.raises(AuthenticationError):
                    refused()
        own_all(owned)
    finally:
        for role in ("player", "owner"):
            for node in replicated.nodes:
                node.execute("ACL", "DELUSER", role)
