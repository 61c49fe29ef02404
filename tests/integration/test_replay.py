"""What a replay buffer stores and samples, against the same rows in memory."""

from __future__ import annotations

import multiprocessing
import pickle
from collections import Counter

import pytest
import torch
from replay_rows import GAMMA, counted, episode, expected_return
from rows_in_memory import assert_same_rows, random_rows
from servers import ServerProcess
from tensordict import TensorDict

from td_datapipes import RedisReplayBuffer, RedisTDDataset
from td_datapipes.errors import ConfigurationError, NotEnoughRowsError, RowIndexError, SchemaError
from td_datapipes.replay import Fifo, Lifo, LinearSchedule, NStep, Prioritized, Slices, Trajectories, Uniform

TRAJECTORIES = Trajectories(reward="reward", done="done", terminated="terminated")


def test_rows_come_back_bit_for_bit_in_every_dtype(server: ServerProcess, unique_name: str) -> None:
    fields = {
        "flag": (torch.bool, ()),
        "half": (torch.bfloat16, (3,)),
        ("nested", "deep", "x"): (torch.complex64, (2, 2)),
        "eight": (torch.float8_e4m3fn, (5,)),
        "wide": (torch.uint16, (4,)),
        "none": (torch.float32, (0,)),
    }
    rows = random_rows(37, fields)
    with RedisReplayBuffer(server.url(unique_name), 64) as buffer:
        index = buffer.extend(rows)
        got = buffer.sample(37, sampler=Uniform(replacement=False))
        order = got.get("index").argsort()
        assert torch.equal(got.get("index")[order], index)
        assert_same_rows(got.exclude("index")[order], rows)


def test_the_newest_rows_are_kept_across_any_number_of_turns(server: ServerProcess, unique_name: str) -> None:
    with RedisReplayBuffer(server.url(unique_name), 100, chunk_bytes=1024) as buffer:
        written = 0
        for rows in (1, 99, 1, 50, 100, 250, 7, 93):
            index = buffer.extend(counted(written, rows))
            assert index.tolist() == list(range(written, written + rows))
            written += rows
            kept = min(written, 100)
            assert (len(buffer), buffer.num_written) == (kept, written)
            got = buffer.sample(kept, sampler=Uniform(replacement=False))
            assert sorted(got["a"].tolist()) == list(range(written - kept, written))
            assert torch.equal(got["b"], got["a"].double()[:, None].expand(-1, 5))
            assert torch.equal(got["index"], got["a"])


def test_add_stores_one_row(server: ServerProcess, unique_name: str) -> None:
    with RedisReplayBuffer(server.url(unique_name), 3) as buffer:
        assert [buffer.add(row) for row in counted(0, 5)] == [0, 1, 2, 3, 4]
        assert sorted(buffer.sample(3, sampler=Uniform(replacement=False))["a"].tolist()) == [2, 3, 4]


def test_uniform_draws_are_even(server: ServerProcess, unique_name: str) -> None:
    with RedisReplayBuffer(server.url(unique_name), 20, seed=0) as buffer:
        buffer.extend(counted(0, 33))
        drawn = Counter(torch.cat([buffer.sample(200)["a"] for _ in range(50)]).tolist())
    assert sorted(drawn) == list(range(13, 33))
    # 10,000 draws of 20 rows: 500 each, standard deviation 21.8.
    assert all(abs(count - 500) < 120 for count in drawn.values())


def test_one_seed_draws_one_sequence(server: ServerProcess, unique_name: str) -> None:
    url = server.url(unique_name)
    with RedisReplayBuffer(url, 50, seed=7) as one, RedisReplayBuffer(url, seed=7) as same:
        one.extend(counted(0, 50))
        with RedisReplayBuffer(url, seed=8) as other:
            for _ in range(5):
                mine = one.sample(10)["index"]
                assert torch.equal(same.sample(10)["index"], mine)
                assert not torch.equal(other.sample(10)["index"], mine)


def test_fifo_is_one_queue_for_all_and_lifo_the_newest(server: ServerProcess, unique_name: str) -> None:
    url = server.url(unique_name)
    with RedisReplayBuffer(url, 10) as one, RedisReplayBuffer(url) as other:
        one.extend(counted(0, 6))
        assert one.sample(2, sampler=Fifo())["a"].tolist() == [0, 1]
        assert other.sample(2, sampler=Fifo())["a"].tolist() == [2, 3]
        one.extend(counted(6, 10))  # 4 and 5 are overwritten before anybody took them
        assert other.sample(3, sampler=Fifo())["a"].tolist() == [6, 7, 8]
        assert one.sample(3, sampler=Lifo())["a"].tolist() == [15, 14, 13]
        assert one.sample(3, sampler=Lifo())["a"].tolist() == [15, 14, 13]
        with pytest.raises(NotEnoughRowsError, match="7 rows that nobody took yet"):
            one.sample(8, sampler=Fifo())


def test_priorities_are_drawn_in_proportion(server: ServerProcess, unique_name: str) -> None:
    with RedisReplayBuffer(
        server.url(unique_name), 300, sampler=Prioritized(alpha=1.0, beta=1.0, eps=0.0), seed=1
    ) as b:
        index = b.extend(counted(0, 300))
        wanted = torch.zeros(300)
        wanted[[3, 17, 18, 255, 299]] = torch.tensor([1.0, 2.0, 3.0, 4.0, 10.0])
        report = b.update_priority(index, wanted)
        assert (report.num_applied, report.rejected.tolist()) == (300, [])
        batches = [b.sample(400) for _ in range(50)]
        drawn = Counter(torch.cat([batch["a"] for batch in batches]).tolist())
        assert set(drawn) == {3, 17, 18, 255, 299}
        for row, mass in ((3, 1), (17, 2), (18, 3), (255, 4), (299, 10)):
            assert abs(drawn[row] / 20_000 - mass / 20) < 0.015
        # Importance: P is mass / 20, so the weight is 1 / mass, and the rarest row's is 1.
        assert torch.allclose(batches[0]["weight"], 1 / wanted[batches[0]["a"]])


def test_alpha_and_beta_are_annealed(server: ServerProcess, unique_name: str) -> None:
    sampler = Prioritized(alpha=0.5, beta=LinearSchedule(0.0, 1.0, 2), eps=0.0)
    with RedisReplayBuffer(server.url(unique_name), 2, sampler=sampler, seed=1) as buffer:
        index = buffer.extend(counted(0, 2))
        buffer.update_priority(index, torch.tensor([1.0, 16.0]))  # masses 1 and 4
        for rarest_to_commonest in (1.0, 2.0, 4.0, 4.0):
            batch = buffer.sample(200)
            weight = {row: batch["weight"][batch["a"] == row][0].item() for row in (0, 1)}
            assert weight[0] == 1.0
            assert weight[0] / weight[1] == pytest.approx(rarest_to_commonest)


def test_new_rows_have_the_highest_priority_there_was(server: ServerProcess, unique_name: str) -> None:
    with RedisReplayBuffer(server.url(unique_name), 40, sampler=Prioritized(alpha=1.0, eps=0.0), seed=1) as buffer:
        index = buffer.extend(counted(0, 20))
        priorities = torch.zeros(20)
        priorities[4] = 50.0
        buffer.update_priority(index, priorities)
        buffer.extend(counted(20, 1))
        drawn = Counter(buffer.sample(2000)["a"].tolist())
        assert set(drawn) == {4, 20}
        assert abs(drawn[20] - 1000) < 150


def test_a_late_update_for_an_overwritten_row_is_rejected(server: ServerProcess, unique_name: str) -> None:
    with RedisReplayBuffer(server.url(unique_name), 10, sampler=Prioritized(alpha=1.0, eps=0.0)) as buffer:
        old = buffer.extend(counted(0, 10))
        new = buffer.extend(counted(10, 4))
        buffer.update_priority(torch.cat([old[4:], new]), torch.tensor([0.0] * 9 + [5.0]))
        report = buffer.update_priority(old, torch.full((10,), 1000.0))
        assert report.num_applied == 6
        assert report.rejected.tolist() == [0, 1, 2, 3]
        buffer.update_priority(old[4:], torch.zeros(6))
        assert set(buffer.sample(50)["a"].tolist()) == {13}
        with pytest.raises(RowIndexError, match="none that sample gave"):
            buffer.update_priority(torch.tensor([-1]), torch.tensor([1.0]))


def test_of_a_row_named_twice_the_last_priority_counts(server: ServerProcess, unique_name: str) -> None:
    with RedisReplayBuffer(server.url(unique_name), 10, sampler=Prioritized(alpha=1.0, eps=0.0)) as buffer:
        index = buffer.extend(counted(0, 10))
        buffer.update_priority(index, torch.zeros(10))
        buffer.update_priority(torch.tensor([3, 5, 3, 5]), torch.tensor([9.0, 0.0, 0.0, 9.0]))
        assert set(buffer.sample(50)["a"].tolist()) == {5}


@pytest.mark.parametrize("priority", [float("nan"), float("inf"), -1.0])
def test_priorities_that_are_none_are_refused(server: ServerProcess, unique_name: str, priority: float) -> None:
    with RedisReplayBuffer(server.url(unique_name), 10) as buffer:
        index = buffer.extend(counted(0, 10))
        with pytest.raises(ConfigurationError, match="finite and 0 or more"):
            buffer.update_priority(index[:1], torch.tensor([priority]))


def test_prioritized_without_replacement_gives_each_row_once(server: ServerProcess, unique_name: str) -> None:
    with RedisReplayBuffer(server.url(unique_name), 64, sampler=Prioritized(alpha=1.0, replacement=False)) as buffer:
        index = buffer.extend(counted(0, 64))
        buffer.update_priority(index, torch.logspace(-6, 6, 64))
        assert sorted(buffer.sample(64)["a"].tolist()) == list(range(64))
        with pytest.raises(NotEnoughRowsError, match="64 rows"):
            buffer.sample(65)


def test_a_tree_of_many_levels_agrees_with_the_masses(server: ServerProcess, unique_name: str) -> None:
    rows = 5000
    with RedisReplayBuffer(server.url(unique_name), rows, sampler=Prioritized(alpha=1.0, eps=0.0), seed=2) as buffer:
        index = buffer.extend(counted(0, rows, width=1))
        masses = torch.rand(rows, generator=torch.Generator().manual_seed(0)) ** 4
        for part in torch.randperm(rows, generator=torch.Generator().manual_seed(1)).split(700):
            buffer.update_priority(index[part], masses[part])
        drawn = torch.cat([buffer.sample(1000)["a"] for _ in range(40)])
    # 40,000 draws, binned by 250 rows: each bin within five standard deviations of its share.
    share = masses.view(20, 250).sum(1) / masses.sum()
    found = torch.bincount(drawn // 250, minlength=20) / len(drawn)
    assert ((found - share).abs() < 5 * (share * (1 - share) / len(drawn)).sqrt()).all()


def interleaved(buffer: RedisReplayBuffer, episodes: list[TensorDict]) -> None:
    """Two actors that take turns, row by row, so that adjacent rows belong to different trajectories."""
    for first, second in zip(episodes[::2], episodes[1::2], strict=True):
        for rows in zip(first, second, strict=True):
            for row in rows:
                buffer.add(row)


@pytest.mark.parametrize("steps", [1, 3])
def test_n_step_returns_are_joined_within_a_trajectory(server: ServerProcess, unique_name: str, steps: int) -> None:
    episodes = [episode(number, 6) for number in range(8)]
    n_step = NStep(steps=steps, gamma=GAMMA)
    with RedisReplayBuffer(server.url(unique_name), 45, trajectories=TRAJECTORIES, n_step=n_step, seed=3) as buffer:
        interleaved(buffer, episodes)  # 56 rows, of which 11 are overwritten
        batch = buffer.sample(600)
    seen = set()
    for row in batch:
        number, step = int(row["episode"]), int(row["step"])
        rewards = episodes[number]["reward"][step : min(step + steps, 6)].tolist()
        assert row["n_step_return"].item() == pytest.approx(expected_return(rewards))
        assert row["n_steps"] == len(rewards)
        assert row["n_step_done"] == (step + len(rewards) == 6)
        assert row["n_step_terminated"] == (step + len(rewards) == 6 and number % 2 == 0)
        assert torch.equal(row["next", "observation"], episodes[number]["observation"][step + len(rewards)])
        seen.add((number, step))
    # Every row that is there but those behind the ends: rows 11 to 55 of 56, two trajectories at a time.
    there = [(2 * (i // 14) + i % 2, i % 14 // 2) for i in range(11, 56)]
    assert seen == {pair for pair in there if pair[1] < 6}


def test_a_row_without_its_successor_is_not_sampled(server: ServerProcess, unique_name: str) -> None:
    with RedisReplayBuffer(server.url(unique_name), 50, trajectories=TRAJECTORIES, n_step=NStep(steps=2)) as buffer:
        one, other = episode(1, 6), episode(2, 6)
        buffer.extend(one[:2])
        with pytest.raises(NotEnoughRowsError, match="NStep"):
            buffer.sample(1)
        buffer.extend(other[3:4])  # adjacent, but of another trajectory
        with pytest.raises(NotEnoughRowsError):
            buffer.sample(1)
        buffer.extend(one[3:4])  # step 2 is missing: not consecutive
        with pytest.raises(NotEnoughRowsError):
            buffer.sample(1)
        buffer.extend(episode(5, 6)[:4])
        batch = buffer.sample(40)
        assert set(zip(batch["episode"].tolist(), batch["step"].tolist(), strict=True)) == {(5, 0), (5, 1)}


def test_prioritized_n_step_keeps_the_proportions(server: ServerProcess, unique_name: str) -> None:
    options = {"trajectories": TRAJECTORIES, "n_step": NStep(steps=1)}
    sampler = Prioritized(alpha=1.0, eps=0.0)
    with RedisReplayBuffer(server.url(unique_name), 50, sampler=sampler, seed=5, **options) as buffer:
        index = buffer.extend(episode(0, 4))
        buffer.update_priority(index, torch.tensor([1.0, 3.0, 0.0, 0.0, 100.0]))  # the last one has no successor
        drawn = Counter(torch.cat([buffer.sample(200)["step"] for _ in range(10)]).tolist())
    assert set(drawn) == {0, 1}
    assert abs(drawn[0] / 2000 - 0.25) < 0.05


@pytest.mark.parametrize("replacement", [True, False])
def test_slices_stay_within_a_trajectory_across_the_wrap(
    server: ServerProcess, unique_name: str, replacement: bool
) -> None:
    with RedisReplayBuffer(server.url(unique_name), 30, trajectories=TRAJECTORIES, seed=3) as buffer:
        episodes = [episode(number, 6) for number in range(6)]
        interleaved(buffer, episodes)  # 42 rows: 12 to 41 are there, and lie around the ring's end
        there = [(2 * (i // 14) + i % 2, i % 14 // 2) for i in range(12, 42)]
        windows = {(number, step) for number, step in there if (number, step + 3) in there}
        slices = Slices(length=4, replacement=replacement)
        batch = buffer.sample(len(windows), sampler=slices)
        assert batch.batch_size == (len(windows), 4)
        assert (batch["episode"] == batch["episode"][:, :1]).all()
        assert (batch["step"] == batch["step"][:, :1] + torch.arange(4)).all()
        assert torch.equal(batch["observation"][..., 0], (1000 * batch["episode"] + batch["step"]).float())
        starts = list(zip(batch["episode"][:, 0].tolist(), batch["step"][:, 0].tolist(), strict=True))
        assert set(starts) <= windows
        if not replacement:
            assert sorted(starts) == sorted(windows)
            with pytest.raises(NotEnoughRowsError):
                buffer.sample(len(windows) + 1, sampler=slices)


def test_options_of_another_opening_are_refused_by_name(server: ServerProcess, unique_name: str) -> None:
    url = server.url(unique_name)
    with RedisReplayBuffer(url, 10, prioritized=False) as buffer:
        buffer.extend(counted(0, 4))
        assert RedisReplayBuffer(url).capacity == 10
        with pytest.raises(ConfigurationError, match="capacity=10, not 20"):
            RedisReplayBuffer(url, 20)
        with pytest.raises(ConfigurationError, match="prioritized=False, not True"):
            RedisReplayBuffer(url, prioritized=True)
        with pytest.raises(ConfigurationError, match="prioritized=False"):
            buffer.sample(1, sampler=Prioritized())
        with pytest.raises(ConfigurationError, match=r"trajectories=Trajectories\(id"):
            buffer.sample(1, sampler=Slices(length=2))
        with pytest.raises(ConfigurationError, match="RedisReplayBuffer"):
            RedisTDDataset(url)
    with pytest.raises(NotEnoughRowsError, match="is empty"):
        RedisReplayBuffer(server.url("nobody/wrote")).sample(1)
    with pytest.raises(ConfigurationError, match="pass capacity"):
        RedisReplayBuffer(server.url("nobody/wrote")).extend(counted(0, 1))


def test_rows_of_another_structure_are_refused_by_name(server: ServerProcess, unique_name: str) -> None:
    url = server.url(unique_name)
    with RedisReplayBuffer(url, 10) as buffer, RedisReplayBuffer(url, 10) as other:
        buffer.extend(counted(0, 4))
        for bad, field in (
            (counted(4, 2).exclude("b"), "'b'"),
            (counted(4, 2).set("c", torch.zeros(2)), "'c'"),
            (counted(4, 2).set("a", torch.zeros(2)), "'a'"),
            (counted(4, 2, width=6), "'b'"),
        ):
            with pytest.raises(SchemaError, match=field):
                other.extend(bad)
        assert sorted(buffer.sample(4, sampler=Uniform(replacement=False))["a"].tolist()) == [0, 1, 2, 3]
        with pytest.raises(SchemaError, match="'index'"):
            other.extend(counted(0, 2).set("index", torch.zeros(2)))


def test_stripes_hold_their_shares_and_sample_as_one(server: ServerProcess, unique_name: str) -> None:
    sampler = Prioritized(alpha=1.0, beta=1.0, eps=0.0)
    with RedisReplayBuffer(server.url(unique_name), 24, stripes=3, seed=1, sampler=sampler, chunk_bytes=256) as buffer:
        index = torch.cat([buffer.extend(counted(4 * part, 4)) for part in range(15)])
        assert (len(buffer), buffer.num_written) == (24, 60)
        assert len(set(index.tolist())) == 60
        got = buffer.sample(24, sampler=Uniform(replacement=False))
        assert sorted(got["a"].tolist()) == list(range(36, 60))
        assert torch.equal(index[got["a"]], got["index"])
        report = buffer.update_priority(index, torch.arange(60).double() % 2)
        assert sorted(report.rejected.tolist()) == sorted(index[:36].tolist())
        drawn = Counter(torch.cat([buffer.sample(300)["a"] for _ in range(8)]).tolist())
        assert set(drawn) == set(range(37, 60, 2))
        assert all(abs(count - 200) < 75 for count in drawn.values())
        with pytest.raises(ConfigurationError, match="one order of all rows"):
            buffer.sample(1, sampler=Fifo())


def read_a_row(buffer: RedisReplayBuffer, rows: multiprocessing.SimpleQueue[list[int]]) -> None:
    rows.put(buffer.sample(5, sampler=Lifo())["a"].tolist())


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_buffer_travels_to_other_processes(server: ServerProcess, unique_name: str, method: str) -> None:
    context = multiprocessing.get_context(method)
    with RedisReplayBuffer(server.url(unique_name), 50, prefetch=2) as buffer:
        buffer.extend(counted(0, 50))
        buffer.sample(3)
        rows = context.SimpleQueue()
        child = context.Process(target=read_a_row, args=(buffer, rows))
        child.start()
        assert rows.get() == [49, 48, 47, 46, 45]
        child.join(30)
        assert child.exitcode == 0
        assert len(buffer.sample(3)) == 3


def test_neither_pickle_nor_repr_nor_state_has_a_secret(unique_name: str) -> None:
    process = ServerProcess("redis", password="s3cret")
    with process, RedisReplayBuffer(process.url(unique_name), 10, prefetch=2) as buffer:
        buffer.extend(counted(0, 10))
        buffer.sample(2)
        state = buffer.state_dict()
        for shown in (repr(buffer), repr(state), repr(pickle.dumps(buffer)), repr(pickle.dumps(state))):
            assert "s3cret" not in shown
        assert len(repr(state)) < 400


def test_dropping_leaves_nothing_but_answers_that_expire(server: ServerProcess, unique_name: str) -> None:
    buffer = RedisReplayBuffer(server.url(unique_name), 50, trajectories=TRAJECTORIES, chunk_bytes=256)
    buffer.extend(episode(0, 40))
    buffer.drop()
    left = server.client().keys("*")
    assert all(b":by:" in key and server.client().ttl(key) > 0 for key in left)
    assert len(RedisReplayBuffer(server.url(unique_name))) == 0
