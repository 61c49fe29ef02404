"""A master is killed while its replica lags, on a cluster or behind a sentinel: slices and n-step returns stay whole.

Every row says whose it is: what it holds is a function of its trajectory and its step, so the tests recompute all that
is joined. A trajectory of `length_of` steps ends with a row that is done and has one more row behind it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from redis.crc import key_slot
from servers import ClusterProcess, Kind, SentinelProcess, ServerProcess, wait_until
from tensordict import TensorDict
from test_cluster_faults import fresh_cluster
from test_replay_failover import NUMBER, Notes, left_behind, owner_and_replica

from td_datapipes import RedisReplayBuffer
from td_datapipes.errors import DataLossError, NotEnoughRowsError
from td_datapipes.replay import NStep, Prioritized, Slices, Trajectories, Uniform
from td_datapipes.replay.options import Sampler
from td_datapipes.replay.reads import Request

TRAJECTORIES = Trajectories(reward="reward", done="done", terminated="terminated")
GAMMA = 0.5
STEPS = 3
N_STEP = NStep(steps=STEPS, gamma=GAMMA)
SLICES = Slices(length=STEPS)
SEQUENCES = 3
"""Trajectories that a writer is at: as many as there are stripes, so that each stays in its own."""

Place = Literal["cluster", "sentinel"]
places = pytest.mark.parametrize("place", ["cluster", "sentinel"])
kinds = pytest.mark.parametrize("kind", ["valkey", "redis"])


def length_of(number: int) -> int:
    return 5 + number % 4


def reward_of(number: int, step: int) -> float:
    return float((7 * number + 3 * step) % 11 + 1)


def part_of(number: int, steps: Sequence[int]) -> TensorDict:
    """Some rows of a trajectory."""
    end = length_of(number)
    return TensorDict(
        {
            "episode": torch.full((len(steps),), number),
            "step": torch.tensor(steps),
            "observation": torch.tensor([[1000.0 * number + step] * 3 for step in steps], dtype=torch.float64),
            "reward": torch.tensor([reward_of(number, step) for step in steps]),
            "done": torch.tensor([step == end - 1 for step in steps]),
            "terminated": torch.tensor([step == end - 1 and number % 2 == 0 for step in steps]),
        },
        batch_size=[len(steps)],
    )


def whole(number: int) -> TensorDict:
    return part_of(number, range(length_of(number) + 1))


def assert_slices(batch: TensorDict) -> None:
    """Each is of one trajectory, its steps are consecutive and end with the row behind the end at the latest."""
    episode, step = batch["episode"], batch["step"]
    assert torch.equal(episode, episode[:, :1].expand_as(episode))
    assert torch.equal(step, step[:, :1] + torch.arange(step.shape[1]))
    for number, last in zip(episode[:, 0].tolist(), step[:, -1].tolist(), strict=True):
        assert 0 <= last <= length_of(number)
    assert_contents(batch.reshape(-1))


def assert_contents(rows: TensorDict) -> None:
    for row in rows:
        number, step = int(row["episode"]), int(row["step"])
        assert row["observation"].tolist() == [1000.0 * number + step] * 3
        assert row["reward"].item() == reward_of(number, step)
        assert row["done"].item() == (step == length_of(number) - 1)


def assert_returns(batch: TensorDict) -> None:
    """Each sum is that of its own trajectory's next rewards, up to the one that is done."""
    assert_contents(batch)
    for row in batch:
        number, step = int(row["episode"]), int(row["step"])
        taken = min(STEPS, length_of(number) - step)
        assert taken > 0  # nothing begins behind the end
        expected = sum(reward_of(number, step + hop) * GAMMA**hop for hop in range(taken))
        assert row["n_step_return"].item() == expected
        assert row["n_steps"].item() == taken
        ended = step + taken == length_of(number)
        assert row["n_step_done"].item() == ended
        assert row["n_step_terminated"].item() == (ended and number % 2 == 0)
        assert row["next", "observation"].tolist() == [1000.0 * number + step + taken] * 3


def rows_of(batch: TensorDict) -> torch.Tensor:
    """What names a row, beside its index: trajectory and step in one number."""
    return (batch["episode"] * 100 + batch["step"]).reshape(-1)


def windows(runs: dict[int, list[range]]) -> list[tuple[int, int]]:
    """Where slices may begin, given the runs of steps that are there of each trajectory."""
    return sorted((n, step) for n, parts in runs.items() for part in parts for step in part[: 1 - STEPS or None])


def starts(runs: dict[int, list[range]]) -> list[tuple[int, int]]:
    """Rows that have their n-step return: those with `STEPS` rows behind them, or all up to the one behind the end."""
    return sorted(
        (n, step)
        for n, parts in runs.items()
        for part in parts
        for step in part
        if step < length_of(n) and min(step + STEPS, length_of(n)) in part
    )


@dataclass(frozen=True, kw_only=True)
class Masters:
    """Servers of which one takes over from another.

    Attributes:
        url: of a buffer.
        pair: who has the buffer's stripe, and who takes over.
        after: a buffer's URL once that has happened.
    """

    url: Callable[..., str]
    pair: Callable[[RedisReplayBuffer, int], tuple[ServerProcess, ServerProcess]]
    after: Callable[[ServerProcess, str], str]


@contextmanager
def masters(place: Place, kind: Kind) -> Iterator[Masters]:
    with ExitStack() as stack:
        if place == "cluster":
            cluster: ClusterProcess = stack.enter_context(fresh_cluster(kind))

            def pair(buffer: RedisReplayBuffer, stripe: int) -> tuple[ServerProcess, ServerProcess]:
                return owner_and_replica(cluster, key_slot(buffer._opener.require().state_key(stripe)))

            yield Masters(url=cluster.url, pair=pair, after=lambda heir, name: heir.url(name))
            return
        first = stack.enter_context(ServerProcess(kind))
        second = stack.enter_context(ServerProcess(kind, config={"replicaof": f"{first.host} {first.port}"}))
        sentinel = stack.enter_context(SentinelProcess(kind, first))
        wait_until(lambda: sentinel.num_replicas() == 1, "the sentinel to know the replica")
        wait_until(lambda: second.execute("INFO", "replication")["master_link_status"] == "up", "the replica to follow")
        yield Masters(url=sentinel.url, pair=lambda *_: (first, second), after=lambda _, name: sentinel.url(name))


def wait_caught_up(master: ServerProcess, replica: ServerProcess) -> None:
    """Until the replica has what has been written by now."""
    written = int(master.execute("INFO", "replication")["master_repl_offset"])
    wait_until(
        lambda: int(replica.execute("INFO", "replication").get("slave_repl_offset", -1)) >= written,
        "the replica to have what was written",
    )


def interleaved(buffer: RedisReplayBuffer, parts: Sequence[TensorDict]) -> dict[int, int]:
    """Write rows of several trajectories in turn, as actors do; which row each index names."""
    named = {}
    for at in range(max(len(part) for part in parts)):
        for part in parts:
            if at < len(part):
                row = part[at : at + 1]
                named[int(buffer.extend(row)[0])] = int(rows_of(row)[0])
    return named


def named_by(batch: TensorDict) -> dict[int, int]:
    return dict(zip(batch["index"].reshape(-1).tolist(), rows_of(batch).tolist(), strict=True))


def assert_named(batch: TensorDict, former: dict[int, int], fresh: dict[int, int]) -> None:
    """Each index names the row it was drawn for; no index of before stands for another row than it did.

    Rows of before have the new incarnation in indices that are drawn by now, and the write number they had.
    """
    there = {index & NUMBER: row for index, row in (former | fresh).items()}
    for index, row in named_by(batch).items():
        assert there[index & NUMBER] == row
        assert former.get(index, row) == row


@pytest.mark.heavy
@places
@kinds
def test_trajectories_cut_short_by_a_lost_master_are_joined_by_what_is_there(kind: Kind, place: Place) -> None:
    torch.set_num_threads(1)
    plain = Uniform()
    with masters(place, kind) as at:
        url = at.url("cut")
        with (
            RedisReplayBuffer(url, 400, trajectories=TRAJECTORIES, seed=1) as writer,
            RedisReplayBuffer(url, seed=2) as learner,
        ):
            named = interleaved(writer, [part_of(number, range(3)) for number in range(6)])
            kept = dict(named)
            master, replica = at.pair(writer, 0)
            wait_caught_up(master, replica)
            with left_behind(master, replica):
                rests = [part_of(number, range(3, length_of(number) + 1)) for number in range(6)]
                more = interleaved(writer, [*rests, *(whole(number) for number in range(6, 10))])
                lost = torch.tensor(sorted(more))
                named |= more
                # What learners see until then, and what they had chosen when the master went.
                everything = {number: [range(length_of(number) + 1)] for number in range(10)}
                seen = learner.sample(len(windows(everything)), sampler=Slices(length=STEPS, replacement=False))
                assert_slices(seen)
                first = zip(seen["episode"][:, 0].tolist(), seen["step"][:, 0].tolist(), strict=True)
                assert sorted(first) == windows(everything)
                assert named_by(seen).items() <= named.items()

                def asked(number: int, sampler: Sampler, n_step: NStep | None) -> Request:
                    return Request(count=200, sampler=sampler, n_step=n_step, number=number)

                maker, deadline = learner._batches._maker, time.monotonic() + 90
                requests = asked(7, SLICES, None), asked(8, plain, N_STEP)
                slices, returns = [maker.begin(maker.choose(request, deadline)) for request in requests]
            # Three actors send again what was lost, three go on behind it, and others begin: by the lost rows' numbers.
            again = [part_of(number, range(3, length_of(number) + 1)) for number in range(3)]
            behind = [part_of(number, range(5, length_of(number) + 1)) for number in range(3, 6)]
            with RedisReplayBuffer(at.after(replica, "cut"), seed=3) as other:
                fresh = interleaved(other, [*again, *behind, *(whole(number) for number in range(20, 26))])
                assert not set(fresh) & set(named)
                runs = {number: [range(length_of(number) + 1)] for number in (0, 1, 2, *range(20, 26))}
                runs |= {number: [range(3), range(5, length_of(number) + 1)] for number in range(3, 6)}
                assert len(other) == len(kept) + len(fresh)
                every = Slices(length=STEPS, replacement=False)
                batch = other.sample(len(windows(runs)), sampler=every)
                assert_slices(batch)
                first = zip(batch["episode"][:, 0].tolist(), batch["step"][:, 0].tolist(), strict=True)
                assert sorted(first) == windows(runs)
                assert_named(batch, kept, fresh)
                with pytest.raises(NotEnoughRowsError):
                    other.sample(len(windows(runs)) + 1, sampler=every)
                batch = other.sample(len(starts(runs)), sampler=Uniform(replacement=False), n_step=N_STEP)
                assert_returns(batch)
                assert sorted(divmod(row, 100) for row in rows_of(batch).tolist()) == starts(runs)
                indices = torch.tensor(sorted(named | fresh))
                report = other.update_priority(indices, torch.ones(len(indices)))
                assert (report.num_applied, sorted(report.rejected.tolist())) == (len(kept) + len(fresh), lost.tolist())
            # Who knew of the lost rows hears of it, once. Then what was chosen before is drawn again where it is lost.
            with pytest.raises(DataLossError, match=f"has lost its last {len(lost)} rows"):
                maker.finish(slices, deadline)
            batch = maker.finish(slices, deadline)
            assert_slices(batch)
            assert_named(batch, kept, fresh)
            assert not set(named_by(batch)) & set(lost.tolist())
            batch = maker.finish(returns, deadline)
            assert_returns(batch)
            assert_named(batch, kept, fresh)
            assert not set(named_by(batch)) & set(lost.tolist())
            with pytest.raises(DataLossError, match=f"has lost its last {len(lost)} rows"):
                writer.extend(whole(30))
            assert_slices(writer.sample(100, sampler=SLICES))


@pytest.mark.heavy
@places
@kinds
def test_slices_and_returns_stay_whole_while_a_master_is_killed(kind: Kind, place: Place) -> None:
    torch.set_num_threads(1)
    notes, done, failed = Notes(), threading.Event(), list[BaseException]()
    stripes = SEQUENCES if place == "cluster" else 1
    prioritized = Prioritized(alpha=0.7)

    def guarded(run: Callable[[], None]) -> Callable[[], None]:
        def body() -> None:
            try:
                run()
            except BaseException as error:
                failed.append(error)
                done.set()

        return body

    def pieces(writer: int) -> Iterator[TensorDict]:
        """Of `SEQUENCES` trajectories in turn, two or three steps at a time, then of the next ones."""
        for first in range(writer * 1_000_000, (writer + 1) * 1_000_000, SEQUENCES):
            # Of one length, so that every trajectory keeps its turn.
            numbers = [(first + i) * 4 + writer for i in range(SEQUENCES)]
            steps = list(range(length_of(numbers[0]) + 1))
            for at in range(0, len(steps), 2 + writer):
                for number in numbers:
                    yield part_of(number, steps[at : at + 2 + writer])

    with masters(place, kind) as at:
        url = at.url("live", socket_timeout=2)
        options = {"stripes": stripes, "trajectories": TRAJECTORIES, "timeout_seconds": 60}

        def write(number: int) -> None:
            rows = pieces(number)
            with RedisReplayBuffer(url, 600, **options) as buffer:

                def step() -> None:
                    piece = next(rows)
                    notes.take(buffer.extend(piece), rows_of(piece))
                    done.wait(0.005)

                notes.repeat(f"writer {number}", step, done)

        def learn() -> None:
            with RedisReplayBuffer(url, sampler=SLICES, timeout_seconds=60, prefetch=2) as buffer:
                wait_until(lambda: len(buffer) > 150, "rows to learn from")

                def step() -> None:
                    batch = buffer.sample(16)
                    assert_slices(batch)
                    notes.take(batch["index"].reshape(-1), rows_of(batch))
                    for sampler in (prioritized, Uniform()):
                        batch = buffer.sample(16, sampler=sampler, n_step=N_STEP)
                        assert_returns(batch)
                        notes.take(batch["index"], rows_of(batch))
                        buffer.update_priority(batch["index"], torch.rand(16))

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

            wait_until(reached, f"{more} rounds of everybody", 90)

        try:
            wait_rounds(15)
            with RedisReplayBuffer(url) as looking:
                victim, heir = at.pair(looking, stripes - 1)
            wait_caught_up(victim, heir)
            with left_behind(victim, heir):
                wait_rounds(5)
            wait_until(lambda: heir.execute("INFO", "replication")["role"] == "master", "the replica to take over", 60)
            wait_rounds(20)
        finally:
            done.set()
            for thread in threads:
                thread.join(120)
        assert not failed, failed
        assert all(len(rows) == 1 for rows in notes.named.values())
        assert any(isinstance(error, DataLossError) for error in notes.errors)
        # One loss a stripe and object at most, and what was in no time answered.
        assert len(notes.errors) <= 2 * len(threads) + 4, notes.errors
        with RedisReplayBuffer(at.after(heir, "live")) as buffer:
            assert_slices(buffer.sample(300, sampler=SLICES))
            assert_returns(buffer.sample(300, sampler=Uniform(), n_step=N_STEP))
            rows = rows_of(buffer.sample(len(buffer), sampler=Uniform(replacement=False))).tolist()
            assert len(set(rows)) == len(rows)  # none was stored twice
