"""Many processes at one buffer: every row once, none half-visible, limits kept, nothing lost in the background."""

from __future__ import annotations

import multiprocessing
import threading
import time

import numpy as np
import pytest
import torch
from replay_rows import counted, episode, run_all
from servers import ServerProcess, wait_until

from td_datapipes import RedisReplayBuffer
from td_datapipes.errors import ConfigurationError, NotEnoughRowsError, RateLimitError, StateError
from td_datapipes.replay import Fifo, NStep, Prioritized, RateLimit, Slices, Trajectories, Uniform
from td_datapipes.replay.ahead import Ahead
from td_datapipes.replay.opening import Opener, Wanted
from td_datapipes.replay.picks import Picker
from td_datapipes.replay.reads import BatchMaker, OverwrittenError, Request

fork = multiprocessing.get_context("fork")


def write_rows(url: str, start: int, rows: int, step: int) -> None:
    torch.set_num_threads(1)
    with RedisReplayBuffer(url, 1000, chunk_bytes=512) as buffer:
        for at in range(start, start + rows, step):
            buffer.extend(counted(at, min(step, start + rows - at)))


def test_each_row_of_four_writing_processes_is_stored_once(server: ServerProcess, unique_name: str) -> None:
    url = server.url(unique_name)
    # They also race to make the buffer.
    run_all(*(fork.Process(target=write_rows, args=(url, 250 * i, 250, 7)) for i in range(4)))
    with RedisReplayBuffer(url) as buffer:
        assert (len(buffer), buffer.num_written) == (1000, 1000)
        got = buffer.sample(1000, sampler=Uniform(replacement=False))
        assert sorted(got["a"].tolist()) == list(range(1000))
        assert torch.equal(got["b"][:, 0], got["a"].double())


def test_a_writer_that_does_not_know_of_anothers_rows_numbers_its_own_rightly(
    server: ServerProcess, unique_name: str
) -> None:
    with (
        RedisReplayBuffer(server.url(unique_name), 1000) as one,
        RedisReplayBuffer(server.url(unique_name), 1000) as two,
    ):
        indices = [
            *one.extend(counted(0, 3)).tolist(),
            *one.extend(counted(3, 3)).tolist(),  # goes by what it has heard
            *two.extend(counted(6, 4)).tolist(),
            *one.extend(counted(10, 5)).tolist(),  # has heard of 6 rows, and there are 10
            *two.extend(counted(15, 5)).tolist(),
        ]
        got = one.sample(20, sampler=Uniform(replacement=False))
        assert dict(zip(got["index"].tolist(), got["a"].tolist(), strict=True)) == dict(
            zip(indices, range(20), strict=True)
        )


def sample_until(url: str, enough: multiprocessing.synchronize.Event, wrong: multiprocessing.SimpleQueue[str]) -> None:
    torch.set_num_threads(1)
    with RedisReplayBuffer(url, prefetch=2) as buffer:
        while not enough.is_set():
            try:
                batch = buffer.sample(64)
            except NotEnoughRowsError:
                continue
            if not torch.equal(batch["b"], batch["a"].double()[:, None].expand_as(batch["b"])):
                wrong.put(str(batch["a"]))
                return


def test_no_row_is_seen_half_written(server: ServerProcess, unique_name: str) -> None:
    url = server.url(unique_name)
    enough, wrong = fork.Event(), fork.SimpleQueue()
    readers = [fork.Process(target=sample_until, args=(url, enough, wrong)) for _ in range(2)]
    for reader in readers:
        reader.start()
    # A small ring, so that rows are overwritten all the time between being chosen and being read.
    with RedisReplayBuffer(url, 80, chunk_bytes=1024) as buffer:
        for turn in range(400):
            buffer.extend(counted(50 * turn, 50))
    enough.set()
    run_to_end(readers)
    assert wrong.empty()


def test_a_batch_made_ahead_whose_rows_are_overwritten_is_tried_again_until_the_users_deadline(
    server: ServerProcess, unique_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("td_datapipes.replay.ahead._LOOK_SECONDS", 0.002)  # of one try
    failures: list[BaseException] = []
    step = Ahead._step

    def noting_step(ahead: Ahead) -> None:
        try:
            step(ahead)
        except OverwrittenError as error:
            failures.append(error)
            raise

    monkeypatch.setattr(Ahead, "_step", noting_step)
    done = threading.Event()
    with (
        RedisReplayBuffer(server.url(unique_name), 40) as writer,
        RedisReplayBuffer(server.url(unique_name), prefetch=2) as reader,
    ):
        writer.extend(counted(0, 40))

        def write() -> None:
            at = 40
            while not done.is_set():
                writer.extend(counted(at, 40))
                at += 40

        thread = threading.Thread(target=write)
        thread.start()
        try:
            deadline = time.monotonic() + 60
            while len(failures) < 3 and time.monotonic() < deadline:
                batch = reader.sample(32, timeout_seconds=60)
                assert torch.equal(batch["b"], batch["a"].double()[:, None].expand_as(batch["b"]))
        finally:
            done.set()
            thread.join()
    assert len(failures) >= 3


def run_to_end(processes: list[multiprocessing.Process]) -> None:
    for process in processes:
        process.join(60)
        assert process.exitcode == 0


def test_uniform_rows_are_chosen_by_a_cursor_that_is_known(server: ServerProcess, unique_name: str) -> None:
    """For as long as it is fresh enough, this process has not written since, and it has rows enough."""
    url, random = server.url(unique_name), np.random.default_rng(0)
    with RedisReplayBuffer(url, 100) as other, RedisReplayBuffer(url) as buffer:
        opener = Opener(buffer.caller, nothing_wanted())
        picker, impatient = Picker(buffer.caller, opener, 3600.0), Picker(buffer.caller, opener, 0.0)

        def newest(by: Picker, count: int, *, once: bool = True) -> int:
            sampler, deadline = Uniform(replacement=not once), time.monotonic() + 30
            return int(by.pick(count, sampler, None, random, deadline).numbers.max())

        other.extend(counted(0, 10))
        assert newest(picker, 10) == 10
        other.extend(counted(10, 10))
        assert newest(picker, 10) == 10
        assert newest(picker, 20) == 20
        other.extend(counted(20, 10))
        assert newest(picker, 20) == 20
        assert newest(picker, 21, once=False) >= 1  # which looks again, as there may be more
        assert newest(picker, 30) == 30
        other.extend(counted(30, 10))
        assert newest(impatient, 40) == 40  # what one of them hears of, the other is not behind of
        assert newest(picker, 40) == 40


def test_batches_made_ahead_have_rows_that_others_write_meanwhile(server: ServerProcess, unique_name: str) -> None:
    url = server.url(unique_name)
    with RedisReplayBuffer(url, 1000) as writer, RedisReplayBuffer(url, batch_size=64, prefetch=2, seed=0) as learner:
        writer.extend(counted(0, 100))
        for start in range(100, 1000, 100):
            learner.sample()
            writer.extend(counted(start, 100))
            deadline = time.monotonic() + 10
            while learner.sample()["a"].max() < start:
                assert time.monotonic() < deadline


def test_rows_overwritten_between_the_round_trips_are_drawn_again(server: ServerProcess, unique_name: str) -> None:
    with RedisReplayBuffer(server.url(unique_name), 50, chunk_bytes=256) as buffer:
        buffer.extend(counted(0, 50))
        opener = Opener(buffer.caller, nothing_wanted())
        request, deadline = Request(count=40, sampler=Uniform(), n_step=None, number=0), time.monotonic() + 30
        random = np.random.default_rng(0)
        picks = Picker(buffer.caller, opener).pick(40, Uniform(), None, random, deadline)
        assert (picks.numbers <= 45).any()
        buffer.extend(counted(50, 45))
        maker = BatchMaker(buffer.caller, opener, seed=0)
        batch = maker.finish(maker.begin(maker.chosen(request, picks)), deadline)
        maker.close()
    assert torch.equal(batch["index"], batch["a"])
    assert torch.equal(batch["b"][:, 0], batch["a"].double())
    assert batch["a"].min() >= 45
    kept = torch.from_numpy(picks.numbers[:, 0] > 45)
    assert torch.equal(batch["a"][kept], torch.from_numpy(picks.numbers[:, 0] - 1)[kept])


def nothing_wanted() -> Wanted:
    return Wanted(capacity=None, stripes=None, prioritized=None, trajectories=None, rate_limit=None, chunk_bytes=None)


def test_fifo_hands_each_row_to_one_of_many_samplers(server: ServerProcess, unique_name: str) -> None:
    url = server.url(unique_name)
    with RedisReplayBuffer(url, 1000) as buffer:
        buffer.extend(counted(0, 1000))
    got: list[int] = []

    def take() -> None:
        with RedisReplayBuffer(url, sampler=Fifo()) as mine:
            for _ in range(10):
                got.extend(mine.sample(25)["a"].tolist())

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(got) == list(range(1000))


def test_a_rate_limit_holds_samplers_back_until_rows_come(server: ServerProcess, unique_name: str) -> None:
    limit = RateLimit(samples_per_insert=2.0, min_size=10, error_buffer=4.0)
    with RedisReplayBuffer(server.url(unique_name), 100, rate_limit=limit) as buffer:
        buffer.extend(counted(0, 9))
        with pytest.raises(RateLimitError, match="9 rows were written and 0 samples drawn"):
            buffer.sample(1, timeout_seconds=0.05)
        buffer.extend(counted(9, 1))
        # 10 rows, 20 samples: the buffer lets 4 be drawn beyond the 0 of balance at min_size.
        buffer.sample(4)
        with pytest.raises(RateLimitError, match="10 rows were written and 4 samples drawn"):
            buffer.sample(1, timeout_seconds=0.05)
        waiting = threading.Thread(target=lambda: buffer.sample(2))
        waiting.start()
        with RedisReplayBuffer(server.url(unique_name)) as writer:
            writer.extend(counted(10, 1))
        waiting.join(30)
        assert not waiting.is_alive()
        with pytest.raises(ConfigurationError, match="more than"):
            buffer.sample(9)


def test_a_rate_limit_holds_writers_back_until_samples_are_drawn(server: ServerProcess, unique_name: str) -> None:
    limit = RateLimit(samples_per_insert=1.0, min_size=5, error_buffer=3.0)
    url = server.url(unique_name)
    with RedisReplayBuffer(url, 100, rate_limit=limit) as buffer:
        buffer.extend(counted(0, 8))  # 5 of min_size and 3 beyond
        with pytest.raises(RateLimitError, match="8 rows were written and 0 samples drawn"):
            buffer.extend(counted(8, 1), timeout_seconds=0.05)
        assert len(buffer) == 8
        with RedisReplayBuffer(url) as sampler:
            sampler.sample(2)
        assert buffer.extend(counted(8, 2)).tolist() == [8, 9]
        with pytest.raises(RateLimitError):
            buffer.extend(counted(10, 1), timeout_seconds=0.05)


def test_writers_and_samplers_keep_the_ratio(server: ServerProcess, unique_name: str) -> None:
    limit = RateLimit(samples_per_insert=4.0, min_size=20, error_buffer=40.0)
    url = server.url(unique_name)
    with RedisReplayBuffer(url, 500, rate_limit=limit) as buffer:
        writer = threading.Thread(target=lambda: [buffer.extend(counted(5 * i, 5)) for i in range(60)])
        writer.start()
        drawn = 0
        with RedisReplayBuffer(url, rate_limit=limit) as sampler:
            while drawn < 4 * (300 - 20):
                drawn += len(sampler.sample(8, timeout_seconds=30))
        writer.join(30)
        written = buffer.num_written
    assert written == 300
    assert abs(4.0 * written - drawn - 4.0 * 20) <= 40 + 8


@pytest.mark.parametrize("kind", [Uniform(), Prioritized(), Fifo(), Slices(length=3)])
def test_batches_read_ahead_are_those_read_one_by_one(server: ServerProcess, unique_name: str, kind: object) -> None:
    url = server.url(unique_name)
    trajectories = Trajectories(reward="reward", done="done")
    with RedisReplayBuffer(url, 400, trajectories=trajectories) as buffer:
        for number in range(20):
            buffer.extend(episode(number, 19))
    with RedisReplayBuffer(url, sampler=kind, seed=9, prefetch=3) as ahead:
        got = [ahead.sample(12) for _ in range(8)]
        wait_until(lambda: ahead.state_dict()["num_held"] > 0, "more to be read ahead")
        assert ahead.state_dict()["num_held"] <= 3
    if isinstance(kind, Fifo):
        rows = torch.cat([batch["index"] for batch in got])
        assert rows.tolist() == list(range(96))
    else:
        with RedisReplayBuffer(url, sampler=kind, seed=9) as single:
            for batch in got:
                assert torch.equal(single.sample(12)["index"], batch["index"])


@pytest.mark.parametrize("kind", [Uniform(), Prioritized(), Fifo()])
@pytest.mark.parametrize("prefetch", [0, 4])
def test_what_was_read_ahead_survives_a_checkpoint(
    server: ServerProcess, unique_name: str, kind: object, prefetch: int
) -> None:
    url = server.url(unique_name)
    with RedisReplayBuffer(url, 200, sampler=kind, seed=4, prefetch=3) as first:
        index = first.extend(counted(0, 200))
        first.update_priority(index, torch.arange(200).float())
        for _ in range(2):
            first.sample(10)
        wait_until(lambda: first.state_dict()["num_held"] == 3, "three batches to be chosen")
        state = first.state_dict()
        expected = [first.sample(10)["index"] for _ in range(3)]
    with RedisReplayBuffer(url, sampler=kind, prefetch=prefetch) as second:
        # Priorities change before the state is loaded: what had been chosen stays chosen.
        second.update_priority(index, torch.ones(200))
        second.load_state_dict(state)
        for indices in expected:
            batch = second.sample(10)
            assert torch.equal(batch["index"], indices)
            assert torch.equal(batch["a"], indices)
        after = second.sample(10)["index"]
    if isinstance(kind, Fifo):
        assert len(set(torch.cat([*expected, after]).tolist())) == 40
    if isinstance(kind, Uniform):
        with RedisReplayBuffer(url, sampler=kind, seed=4) as whole:
            sequence = [whole.sample(10)["index"] for _ in range(6)]
        assert torch.equal(torch.stack([*expected, after]), torch.stack(sequence[2:]))


def test_what_is_waiting_is_told_with_the_number_of_what_comes_next(server: ServerProcess, unique_name: str) -> None:
    """While batches are chosen and handed over; a state that lacked one of them would skip it."""
    with RedisReplayBuffer(server.url(unique_name), 100, batch_size=4, prefetch=3) as buffer:
        buffer.extend(counted(0, 100))
        buffer.sample()
        done = threading.Event()

        def consume() -> None:
            while not done.is_set():
                buffer.sample()

        consumer = threading.Thread(target=consume)
        consumer.start()
        ahead = buffer._batches._ahead
        assert ahead is not None
        try:
            following, deadline = 0, time.monotonic() + 30
            while following < 500:
                waiting, following = ahead.standing()
                numbers = [chosen.request.number for chosen in waiting]
                assert numbers == list(range(following - len(numbers), following))
                assert time.monotonic() < deadline
                time.sleep(0.0001)  # so that others get the lock
        finally:
            done.set()
            consumer.join()


def test_a_state_of_another_buffer_or_of_lost_rows_is_refused(server: ServerProcess, unique_name: str) -> None:
    with RedisReplayBuffer(server.url(unique_name), 20, seed=1) as buffer:
        buffer.extend(counted(0, 20))
        buffer.sample(4)
        state = buffer.state_dict()
        with pytest.raises(StateError, match="is of buffer"):
            RedisReplayBuffer(server.url("other"), 5).load_state_dict(state)
        with pytest.raises(StateError, match="version 99"):
            buffer.load_state_dict({**state, "version": 99})
        buffer.drop()
        buffer.extend(counted(0, 3))
        with pytest.raises(StateError, match="made anew since: 20 rows"):
            buffer.load_state_dict(state)
        buffer.load_state_dict(state, strict=False)
        assert len(buffer.sample(4)) == 4


def test_a_snapshot_is_one_moment_and_restoring_brings_it_back(server: ServerProcess, unique_name: str) -> None:
    url, frozen = server.url(unique_name), f"{unique_name}@1"
    trajectories = Trajectories(reward="reward", done="done")
    options = {"sampler": Prioritized(alpha=1.0, eps=0.0), "seed": 2}
    with RedisReplayBuffer(url, 30, trajectories=trajectories, chunk_bytes=256, **options) as buffer:
        index = buffer.extend(episode(0, 39))
        report = buffer.update_priority(index, torch.arange(40).double())
        assert report.num_applied == 30
        before = RedisReplayBuffer(url, **options).sample(50)
        buffer.snapshot(frozen)
        with pytest.raises(FileExistsError):
            buffer.snapshot(frozen)
        buffer.extend(episode(1, 39))
        with RedisReplayBuffer(server.url(frozen), **options) as copy:
            got = copy.sample(50)
            assert torch.equal(got["step"], before["step"])
            assert torch.equal(got["weight"], before["weight"])
            assert len(copy.sample(20, sampler=Uniform(), n_step=NStep(steps=2))) == 20
            with pytest.raises(ConfigurationError, match="snapshot"):
                copy.extend(episode(2, 3))
            with pytest.raises(ConfigurationError, match="snapshot"):
                copy.update_priority(got["index"], torch.ones(50))
        other = RedisReplayBuffer(url, **options)
        other.sample(1)
        buffer.restore(frozen)
        assert (len(other), other.num_written) == (30, 40)
        again = RedisReplayBuffer(url, **options).sample(50)
        assert torch.equal(again["step"], before["step"])
        assert torch.equal(again["observation"], before["observation"])
        assert other.update_priority(before["index"], torch.ones(50)).num_applied == 0
        assert other.update_priority(again["index"], torch.ones(50)).num_applied > 0
        # A lost buffer comes back too.
        buffer.drop()
        buffer.restore(frozen)
        assert sorted(set(buffer.sample(200)["step"].tolist())) == sorted(set(range(10, 40)))


def test_clearing_forgets_rows_for_everybody(server: ServerProcess, unique_name: str) -> None:
    url = server.url(unique_name)
    with RedisReplayBuffer(url, 10) as buffer, RedisReplayBuffer(url) as other:
        old = buffer.extend(counted(0, 10))
        assert len(other) == 10
        buffer.clear()
        assert len(other) == 0
        with pytest.raises(NotEnoughRowsError):
            other.sample(1)
        other.extend(counted(100, 3))
        assert set(buffer.sample(50)["a"].tolist()) == {100, 101, 102}
        assert buffer.update_priority(old, torch.ones(10)).num_applied == 0


def test_dropping_a_buffer_object_ends_its_thread(server: ServerProcess, unique_name: str) -> None:
    buffer = RedisReplayBuffer(server.url(unique_name), 10, prefetch=2)
    buffer.extend(counted(0, 10))
    buffer.sample(2)

    def running() -> bool:
        return any(thread.name == "td-replay-ahead" for thread in threading.enumerate())

    assert running()
    del buffer
    deadline = time.monotonic() + 20
    wait_until(lambda: not running(), "the thread to end", deadline - time.monotonic())
