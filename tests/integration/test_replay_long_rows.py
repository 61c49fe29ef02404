"""Long rows, which take their chunks' places whole: the same rows whoever else writes, and nothing left on the way."""

from __future__ import annotations

import multiprocessing
import random
import threading
from collections.abc import Iterator

import pytest
import torch
from replay_rows import GAMMA, counted, expected_return, run_all
from servers import ClusterProcess, ServerProcess, wait_until
from tensordict import TensorDict

from td_datapipes import RedisReplayBuffer
from td_datapipes.errors import RateLimitError, ServerFullError
from td_datapipes.replay import NStep, RateLimit, Trajectories, Uniform
from td_datapipes.wire.cluster import slot_of

fork = multiprocessing.get_context("fork")
WIDTH = 600
"""Doubles a row: 4.8 KB."""
CHUNK = 32
"""Such rows of a chunk."""


@pytest.fixture(params=["valkey", "redis"])
def own_server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    """A server that no other test uses."""
    with ServerProcess(request.param) as process:
        yield process


def rows_of(buffer: RedisReplayBuffer) -> list[int]:
    """All rows that are there, checked."""
    batch = buffer.sample(len(buffer), sampler=Uniform(replacement=False))
    assert torch.equal(batch["b"], batch["a"].double()[:, None].expand_as(batch["b"]))
    return sorted(batch["a"].tolist())


def assert_nothing_is_left(server: ServerProcess | ClusterProcess, buffer: RedisReplayBuffer) -> None:
    """No chunk lies where it was staged, and none of those that took their places expires."""
    client, ring = server.client(), buffer._opener.require()
    assert ring.layout.records_per_chunk == CHUNK
    for stripe in range(ring.stripes):
        assert list(client.scan_iter(match=ring.prefix(stripe) + b"in:*")) == []
        for key in ring.keys(stripe):
            assert client.ttl(key) in (-1, -2)


def test_whole_chunks_are_renamed_and_not_copied(server: ServerProcess, unique_name: str) -> None:
    with RedisReplayBuffer(server.url(unique_name), 8 * CHUNK) as buffer:
        buffer.extend(counted(0, CHUNK, WIDTH))  # nothing is known of the cursor yet
        server.execute("CONFIG", "RESETSTAT")
        buffer.extend(counted(CHUNK, 4 * CHUNK, WIDTH))
        calls = server.client().info("commandstats")
        assert calls["cmdstat_rename"]["calls"] == calls["cmdstat_persist"]["calls"] == 4
        assert calls["cmdstat_evalsha"]["calls"] == 1
        assert rows_of(buffer) == list(range(5 * CHUNK))
        assert_nothing_is_left(server, buffer)


@pytest.mark.parametrize("seed", range(6))
def test_rows_of_writers_in_turn_are_the_last_ones_in_order(server: ServerProcess, unique_name: str, seed: int) -> None:
    """Of each extend some rows are whole chunks, if the writer is right about where they come to lie."""
    draw, capacity = random.Random(seed), (3 * CHUNK, 3 * CHUNK + 7, 40)[seed % 3]
    url, written = server.url(unique_name), 0
    with RedisReplayBuffer(url, capacity) as first, RedisReplayBuffer(url, capacity) as second:
        for _ in range(25):
            rows = draw.choice((1, 5, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK, 5 * CHUNK))
            index = draw.choice((first, second)).extend(counted(written, rows, WIDTH))
            assert len(set(index.tolist())) == rows
            written += rows
            kept = min(written, capacity)
            assert rows_of(first) == list(range(written - kept, written))
        assert_nothing_is_left(server, first)
        got = second.sample(len(second), sampler=Uniform(replacement=False))
        # An index names its row: the n-th that was written.
        numbers = (got["index"] & ((1 << 48) - 1)).tolist()
        assert numbers == got["a"].tolist()


def write_rows(url: str, start: int, rows: int, size: int, stripes: int) -> None:
    torch.set_num_threads(1)
    with RedisReplayBuffer(url, 32 * CHUNK, stripes=stripes) as buffer:
        for at in range(start, start + rows, size):
            buffer.extend(counted(at, size, WIDTH))


@pytest.mark.parametrize("sizes", [(64, 64), (64, 40)])
def test_writers_at_once_store_each_row_once(server: ServerProcess, unique_name: str, sizes: tuple[int, int]) -> None:
    url = server.url(unique_name)
    run_all(*(fork.Process(target=write_rows, args=(url, 320 * i, 320, size, 1)) for i, size in enumerate(sizes)))
    with RedisReplayBuffer(url) as buffer:
        assert buffer.num_written == 640
        assert rows_of(buffer) == list(range(640))
        assert_nothing_is_left(server, buffer)


def test_stripes_on_a_cluster_take_whole_chunks(cluster: ClusterProcess, unique_name: str) -> None:
    url = cluster.url(unique_name)
    run_all(*(fork.Process(target=write_rows, args=(url, 320 * i, 320, 64, 4)) for i in range(2)))
    with RedisReplayBuffer(url) as buffer:
        assert rows_of(buffer) == list(range(640))
        ring = buffer._opener.require()
        for stripe in range(ring.stripes):
            # Each node by a client of its own: redis-py's cluster client is without a node at times.
            owner = cluster.owner(slot_of(ring.keys(stripe)[0])).client()
            assert list(owner.scan_iter(match=ring.prefix(stripe) + b"in:*")) == []
            assert all(owner.ttl(key) in (-1, -2) for key in ring.keys(stripe))


def test_a_full_server_keeps_nothing_of_what_was_on_its_way(own_server: ServerProcess) -> None:
    with RedisReplayBuffer(own_server.url("full"), 1_000_000, chunk_bytes=1 << 18) as buffer:
        buffer.extend(counted(0, CHUNK, WIDTH))
        own_server.execute("CONFIG", "SET", "maxmemory", own_server.client().info("memory")["used_memory"] + (6 << 20))
        written = CHUNK

        def write_on() -> None:
            nonlocal written
            while True:
                buffer.extend(counted(written, 8 * CHUNK, WIDTH))
                written += 8 * CHUNK

        with pytest.raises(ServerFullError, match="maxmemory"):
            write_on()
        assert buffer.num_written == len(buffer) == written > CHUNK
        assert rows_of(buffer) == list(range(written))
        assert_nothing_is_left(own_server, buffer)
        own_server.execute("CONFIG", "SET", "maxmemory", 0)
        buffer.extend(counted(written, 8 * CHUNK, WIDTH))
        assert rows_of(buffer) == list(range(written + 8 * CHUNK))


def test_chunks_evicted_on_their_way_are_named(own_server: ServerProcess) -> None:
    with RedisReplayBuffer(own_server.url("evicted"), 32 * CHUNK) as buffer:
        buffer.extend(counted(0, CHUNK, WIDTH))
        own_server.execute("CONFIG", "SET", "maxmemory-policy", "volatile-ttl")
        own_server.execute("CONFIG", "SET", "maxmemory", own_server.client().info("memory")["used_memory"] + (2 << 20))
        with pytest.raises(ServerFullError, match="on their way in.*maxmemory"):
            buffer.extend(counted(CHUNK, 31 * CHUNK, WIDTH))
        assert rows_of(buffer) == list(range(CHUNK))
        assert_nothing_is_left(own_server, buffer)


def test_chunks_whose_answer_was_lost_are_not_stored_twice(own_server: ServerProcess) -> None:
    with RedisReplayBuffer(own_server.url("lost", socket_timeout=0.3), 8 * CHUNK) as buffer:
        buffer.extend(counted(0, CHUNK, WIDTH))
        server, attempts = buffer.caller.server, []
        call = server.call

        def noted(doing: str, command: object) -> object:
            attempts.append(doing)
            return call(doing, command)  # type: ignore[arg-type]

        server.call = noted  # type: ignore[method-assign, assignment]
        own_server.pause()
        index: list[int] = []
        rows = counted(CHUNK, CHUNK, WIDTH)
        writer = threading.Thread(target=lambda: index.extend(buffer.extend(rows).tolist()))
        writer.start()
        wait_until(lambda: len([doing for doing in attempts if "storing" in doing]) >= 3, "two attempts to time out")
        own_server.resume()
        writer.join(30)
        assert len(index) == CHUNK
        assert buffer.num_written == 2 * CHUNK
        assert rows_of(buffer) == list(range(2 * CHUNK))
        assert_nothing_is_left(own_server, buffer)


def test_a_buffer_that_takes_no_rows_keeps_no_chunk_either(server: ServerProcess, unique_name: str) -> None:
    limit = RateLimit(samples_per_insert=1.0, min_size=CHUNK, error_buffer=2 * CHUNK)
    with RedisReplayBuffer(server.url(unique_name), 32 * CHUNK, rate_limit=limit) as buffer:
        written = 0

        def write_on() -> None:
            nonlocal written
            while True:
                buffer.extend(counted(written, CHUNK, WIDTH), timeout_seconds=0.2)
                written += CHUNK

        with pytest.raises(RateLimitError, match="holds"):
            write_on()
        assert_nothing_is_left(server, buffer)
        buffer.sample(2 * CHUNK)
        buffer.extend(counted(written, CHUNK, WIDTH))
        assert buffer.num_written == written + CHUNK > 2 * CHUNK
        assert_nothing_is_left(server, buffer)


def test_trajectories_of_long_rows_are_joined(server: ServerProcess, unique_name: str) -> None:
    """Two trajectories by turns, in extends of two chunks and, each time, a row that nothing is known of before."""
    steps, count = 10 * CHUNK, 4
    joined = Trajectories(id="id", step="step", reward="reward", done="done", terminated="terminated")
    step = torch.arange(steps).repeat_interleave(2)
    which = torch.tensor([7, -3], dtype=torch.int32).repeat(steps)
    rows = TensorDict(
        {
            "id": which,
            "step": step,
            "reward": (step + which).float(),
            "done": step == steps - 1,
            "terminated": (step == steps - 1) & (which == 7),
            "observation": (step * which).double()[:, None].expand(-1, WIDTH).contiguous(),
        },
        [2 * steps],
    )
    url = server.url(unique_name)
    with (
        RedisReplayBuffer(url, 16 * CHUNK, trajectories=joined) as buffer,
        RedisReplayBuffer(url, 16 * CHUNK, trajectories=joined) as other,
    ):
        start = 0
        for size in (1, *[2 * CHUNK, 2 * CHUNK - 1, 1] * 4):
            (other if size == 1 else buffer).extend(rows[start : start + size])
            start += size
        got = buffer.sample(200, n_step=NStep(steps=count, gamma=GAMMA))
        assert torch.equal(got["observation"][:, 0], (got["step"] * got["id"]).double())
        assert torch.equal(got["next", "observation"][:, 0], ((got["step"] + count) * got["id"]).double())
        for which_one, first, value in zip(
            got["id"].tolist(), got["step"].tolist(), got["n_step_return"].tolist(), strict=True
        ):
            assert value == pytest.approx(expected_return(first + i + which_one for i in range(count)))
        assert int(got["step"].min()) >= (start - 16 * CHUNK) // 2
        assert_nothing_is_left(server, buffer)
