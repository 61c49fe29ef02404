"""Replay buffers whose stripes lie on the masters of a cluster: rows intact and counted, draws as on one server."""

from __future__ import annotations

import multiprocessing

import numpy as np
import pytest
import torch
from redis.crc import key_slot
from replay_rows import GAMMA, counted, episode, expected_return, run_all
from servers import ClusterProcess, wait_until

from td_datapipes import RedisReplayBuffer
from td_datapipes.errors import ConfigurationError, ServerNotReadyError
from td_datapipes.replay import Fifo, NStep, Prioritized, Slices, Trajectories, Uniform

fork = multiprocessing.get_context("fork")
STRIPES = 6


def write_rows(url: str, start: int, rows: int) -> None:
    torch.set_num_threads(1)
    with RedisReplayBuffer(url, 2400, stripes=STRIPES, chunk_bytes=1024) as buffer:
        for at in range(start, start + rows, 20):
            buffer.extend(counted(at, 20))


def masters_of(cluster: ClusterProcess, buffer: RedisReplayBuffer) -> set[int]:
    """The ports of the masters that a buffer's stripes lie on."""
    ring = buffer._opener.require()
    return {cluster.owner(key_slot(ring.state_key(stripe))).port for stripe in range(ring.stripes)}


def assert_intact(got: torch.Tensor) -> None:
    assert torch.equal(got["b"], got["a"].double()[:, None].expand_as(got["b"]))


def test_rows_of_two_writers_are_stored_once_over_all_masters(cluster: ClusterProcess, unique_name: str) -> None:
    url = cluster.url(unique_name)
    # They also race to make the buffer.
    run_all(*(fork.Process(target=write_rows, args=(url, 400 * i, 400)) for i in range(2)))
    with RedisReplayBuffer(url, seed=3) as buffer:
        assert masters_of(cluster, buffer) == {node.port for node in cluster.nodes}
        assert (len(buffer), buffer.num_written) == (800, 800)
        got = buffer.sample(800, sampler=Uniform(replacement=False))
        assert sorted(got["a"].tolist()) == list(range(800))
        assert_intact(got)
        ring = buffer._opener.require()
        for stripe in range(STRIPES):
            keys = [ring.state_key(stripe), *ring.keys(stripe)]
            assert len({key_slot(key) for key in keys}) == 1
            owner = cluster.owner(key_slot(keys[0]))
            assert int(owner.execute("HGET", keys[0], "cursor")) > 0
        drawn = torch.bincount(buffer.sample(40_000)["a"], minlength=800)
        assert drawn.min() > 15  # each row 50 times on average, 7 the standard deviation
        assert drawn.max() < 95


def test_priorities_hold_over_all_masters(cluster: ClusterProcess, unique_name: str) -> None:
    url, kind = cluster.url(unique_name), Prioritized(alpha=1.0, beta=1.0, eps=0.0)
    with RedisReplayBuffer(url, 120, stripes=STRIPES, sampler=kind, seed=5) as buffer:
        index = torch.cat([buffer.extend(counted(10 * i, 10)) for i in range(12)])
        priority = (torch.arange(120) % 4).double()
        report = buffer.update_priority(index, priority)
        assert (report.num_applied, len(report.rejected)) == (120, 0)
        got = buffer.sample(36_000)
        assert_intact(got)
        shares = torch.bincount(got["a"] % 4, minlength=4).double() / 36_000
        assert torch.allclose(shares, torch.tensor([0.0, 1 / 6, 2 / 6, 3 / 6]).double(), atol=0.02)
        # A row's weight is what makes up for its being drawn more often: the rarest have 1.
        expected = 1.0 / (got["a"] % 4).float()
        assert torch.allclose(got["weight"], expected, rtol=1e-4)
        # What has been overwritten since is left alone.
        buffer.extend(counted(120, 10))
        again = buffer.update_priority(index, priority)
        assert (again.num_applied, len(again.rejected)) == (110, 10)


def test_stripes_that_nobody_has_written_yet_are_empty(cluster: ClusterProcess, unique_name: str) -> None:
    kind = Prioritized(alpha=1.0, eps=0.0)
    with RedisReplayBuffer(cluster.url(unique_name), 600, stripes=STRIPES, sampler=kind) as buffer:
        index = buffer.extend(counted(0, 10))
        assert set(buffer.sample(200)["a"].tolist()) == set(range(10))
        buffer.update_priority(index, torch.tensor([1.0] * 2 + [0.0] * 8, dtype=torch.float64))
        assert set(buffer.sample(50)["a"].tolist()) == {0, 1}


def test_samplers_that_need_one_order_take_one_stripe(cluster: ClusterProcess, unique_name: str) -> None:
    with RedisReplayBuffer(cluster.url(unique_name), 60, stripes=STRIPES) as buffer:
        buffer.extend(counted(0, 60))
        with pytest.raises(ConfigurationError, match="Fifo needs one order of all rows, which 6 stripes"):
            buffer.sample(1, sampler=Fifo())
    url = cluster.url(f"{unique_name}/queue")
    with RedisReplayBuffer(url, 60) as buffer, RedisReplayBuffer(url, sampler=Fifo()) as other:
        buffer.extend(counted(0, 60))
        got = [part.sample(10, sampler=Fifo())["a"].tolist() for _ in range(3) for part in (buffer, other)]
    assert [row for rows in got for row in rows] == list(range(60))


def test_rows_in_many_parts_go_to_one_stripe_in_order(cluster: ClusterProcess, unique_name: str) -> None:
    with RedisReplayBuffer(cluster.url(unique_name), 500, chunk_bytes=1024) as buffer:
        index = torch.cat([buffer.extend(counted(0, 300)), buffer.extend(counted(300, 150))])
        assert index.tolist() == list(range(450))
        # Scripts are forgotten by a master that restarts, or that is told to.
        for node in cluster.nodes:
            node.execute("SCRIPT FLUSH")
        assert buffer.extend(counted(450, 100)).tolist() == list(range(450, 550))
        assert (len(buffer), buffer.num_written) == (500, 550)
        got = buffer.sample(500, sampler=Uniform(replacement=False))
        assert sorted(got["a"].tolist()) == list(range(50, 550))
        assert_intact(got)


def with_episodes(url: str, **options: object) -> RedisReplayBuffer:
    joined = Trajectories(reward="reward", done="done", terminated="terminated")
    buffer = RedisReplayBuffer(url, 1200, stripes=STRIPES, trajectories=joined, **options)
    for number in range(12):
        buffer.extend(episode(number, 19))
    return buffer


def test_slices_and_returns_stay_within_their_trajectories(cluster: ClusterProcess, unique_name: str) -> None:
    with with_episodes(cluster.url(unique_name), seed=1) as buffer:
        windows = buffer.sample(200, sampler=Slices(length=5))
        assert windows.batch_size == (200, 5)
        assert torch.equal(windows["step"], windows["step"][:, :1] + torch.arange(5))
        assert torch.equal(windows["episode"], windows["episode"][:, :1].expand(200, 5))
        assert torch.equal(windows["observation"][..., 0], 1000.0 * windows["episode"] + windows["step"])
        assert set(windows["episode"].unique().tolist()) == set(range(12))
        step = NStep(steps=3, gamma=GAMMA, next_fields=("observation",))
        got = buffer.sample(300, n_step=step)
        for row in got:
            number, first = int(row["episode"]), int(row["step"])
            rewards = [10 * number + s + 1 for s in range(first, min(first + 3, 19))]
            assert float(row["n_step_return"]) == pytest.approx(expected_return(rewards))
            assert int(row["n_steps"]) == len(rewards)
            assert float(row["next", "observation"][0]) == 1000 * number + first + len(rewards)
        assert set(got["episode"].unique().tolist()) == set(range(12))


def test_a_snapshot_of_all_stripes_is_restored(cluster: ClusterProcess, unique_name: str) -> None:
    url, frozen = cluster.url(unique_name), f"{unique_name}@1"
    kind = {"sampler": Prioritized(alpha=1.0, eps=0.0), "seed": 2}
    with with_episodes(url, **kind) as buffer:
        every = buffer.sample(240, sampler=Uniform(replacement=False))
        buffer.update_priority(every["index"], every["step"].double())
        before = RedisReplayBuffer(url, **kind).sample(60)
        buffer.snapshot(frozen)
        buffer.extend(episode(50, 30))
        with RedisReplayBuffer(cluster.url(frozen), **kind) as copy:
            assert (len(copy), len(masters_of(cluster, copy))) == (240, len(masters_of(cluster, buffer)))
            got = copy.sample(60)
            assert torch.equal(got["observation"], before["observation"])
            assert torch.equal(got["weight"], before["weight"])
        buffer.restore(frozen)
        assert (len(buffer), buffer.num_written) == (240, 240)
        again = RedisReplayBuffer(url, **kind).sample(60)
        assert torch.equal(again["observation"], before["observation"])
        assert buffer.update_priority(before["index"], torch.ones(60)).num_applied == 0
        buffer.drop()
        buffer.restore(frozen)
        last = RedisReplayBuffer(url).sample(240, sampler=Uniform(replacement=False))
        assert sorted(last["observation"][:, 0].tolist()) == sorted(every["observation"][:, 0].tolist())


@pytest.mark.parametrize("kind", [Uniform(), Prioritized()])
def test_what_was_read_ahead_survives_a_checkpoint(cluster: ClusterProcess, unique_name: str, kind: object) -> None:
    url = cluster.url(unique_name)
    with RedisReplayBuffer(url, 240, stripes=STRIPES, sampler=kind, seed=4, prefetch=3) as first:
        for start in range(0, 240, 20):
            first.extend(counted(start, 20))
        for _ in range(2):
            assert_intact(first.sample(12))
        wait_until(lambda: first.state_dict()["num_held"] == 3, "three batches to be chosen")
        state = first.state_dict()
        expected = [first.sample(12)["index"] for _ in range(3)]
    with RedisReplayBuffer(url, sampler=kind, prefetch=3) as second:
        second.load_state_dict(state)
        for indices in expected:
            got = second.sample(12)
            assert torch.equal(got["index"], indices)
            assert_intact(got)


def test_a_stripe_that_moves_to_another_master_is_followed(cluster: ClusterProcess, unique_name: str) -> None:
    with RedisReplayBuffer(cluster.url(unique_name), 120, stripes=3, seed=0) as buffer:
        index = torch.cat([buffer.extend(counted(10 * i, 10)) for i in range(12)])
        assert len(buffer.sample(32)) == 32
        ring = buffer._opener.require()
        slot = key_slot(ring.state_key(0))
        source = cluster.owner(slot)
        target = next(node for node in cluster.nodes if node is not source)
        cluster.migrate_slot(slot, target)
        try:
            got = buffer.sample(120, sampler=Uniform(replacement=False))
            assert sorted(got["a"].tolist()) == list(range(120))
            assert_intact(got)
            assert buffer.update_priority(index, torch.ones(120)).num_applied == 120
            again = torch.cat([buffer.extend(counted(120 + 10 * i, 10)) for i in range(12)])
            assert len(np.intersect1d(again, index)) == 0
            assert (len(buffer), buffer.num_written) == (120, 240)
            assert buffer.sample(50)["a"].min() >= 120
        finally:
            cluster.flush()
            cluster.migrate_slot(slot, source)


@pytest.mark.parametrize("keys_moved", [1, 3, 6])
def test_rows_are_whole_when_a_slot_was_half_moved(cluster: ClusterProcess, unique_name: str, keys_moved: int) -> None:
    url = cluster.url(unique_name)
    with RedisReplayBuffer(url, 200, chunk_bytes=1024, seed=0, timeout_seconds=30) as buffer:
        index = buffer.extend(counted(0, 200))
        slot = key_slot(buffer._opener.require().state_key(0))
        target = next(node for node in cluster.nodes if node is not cluster.owner(slot))
        source = cluster.begin_move(slot, target)
        try:
            cluster.move_keys(slot, source, target, keys_moved)
            # What reaches for many keys is put off as a whole; what names its keys goes on.
            with pytest.raises(ServerNotReadyError, match="TRYAGAIN"):
                buffer.extend(counted(200, 10), timeout_seconds=0.1)
            with pytest.raises(ServerNotReadyError, match="TRYAGAIN"):
                buffer.update_priority(index, torch.ones(200), timeout_seconds=0.1)
            assert_intact(buffer.sample(20))
            while cluster.move_keys(slot, source, target, 100):
                pass
            cluster.end_move(slot, source, target)
            cluster.wait_agreed()
            assert (len(buffer), buffer.num_written) == (200, 200)
            assert buffer.update_priority(index, torch.ones(200)).num_applied == 200
            buffer.extend(counted(200, 10))
            got = buffer.sample(200, sampler=Uniform(replacement=False))
            assert sorted(got["a"].tolist()) == list(range(10, 210))
            assert_intact(got)
        finally:
            cluster.flush()
            cluster.end_move(slot, source, target)
            cluster.migrate_slot(slot, source)
