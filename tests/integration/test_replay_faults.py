"""Servers that are full, slow, gone or forgetful: named errors, nothing twice, nothing corrupted, nothing hangs."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from replay_rows import counted
from servers import ServerProcess, wait_until

from td_datapipes import RedisReplayBuffer, write_dataset
from td_datapipes.errors import (
    ConfigurationError,
    DataLossError,
    ServerError,
    ServerFullError,
    ServerTimeoutError,
    ServerUnavailableError,
)
from td_datapipes.replay import Prioritized, Uniform


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


def test_a_full_server_changes_nothing_and_goes_on_when_there_is_room(own_server: ServerProcess) -> None:
    with RedisReplayBuffer(own_server.url("full"), 1_000_000, chunk_bytes=1 << 16) as buffer:
        buffer.extend(counted(0, 100))
        used = own_server.client().info("memory")["used_memory"]
        own_server.execute("CONFIG", "SET", "maxmemory", used + (2 << 20))
        written = 100

        def write_on() -> None:
            nonlocal written
            while True:
                buffer.extend(counted(written, 500))
                written += 500

        with pytest.raises(ServerFullError, match="maxmemory"):
            write_on()
        assert buffer.num_written == len(buffer) == written
        assert rows_of(buffer) == list(range(written))
        buffer.sample(20, sampler=Prioritized())
        own_server.execute("CONFIG", "SET", "maxmemory", 0)
        buffer.extend(counted(written, 500))
        assert rows_of(buffer) == list(range(written + 500))


def attempts_of(buffer: RedisReplayBuffer) -> list[str]:
    """What is asked of the server from here on, as it is asked."""
    seen: list[str] = []
    server = buffer.caller.server
    call = server.call

    def noted(doing: str, command: object) -> object:
        seen.append(doing)
        return call(doing, command)  # type: ignore[arg-type]

    server.call = noted  # type: ignore[method-assign, assignment]
    return seen


def test_a_write_whose_answer_was_lost_is_not_carried_out_twice(own_server: ServerProcess) -> None:
    with RedisReplayBuffer(own_server.url("lost", socket_timeout=0.3), 100) as buffer:
        buffer.extend(counted(0, 5))
        attempts = attempts_of(buffer)
        own_server.pause()
        index: list[int] = []
        writer = threading.Thread(target=lambda: index.extend(buffer.extend(counted(5, 5)).tolist()))
        writer.start()
        # The first requests lie in the server's socket and are carried out as soon as it goes on.
        wait_until(lambda: len([doing for doing in attempts if "storing" in doing]) >= 3, "two attempts to time out")
        own_server.resume()
        writer.join(30)
        assert index == [5, 6, 7, 8, 9]
        buffer.extend(counted(10, 1))
        assert buffer.num_written == 11
        assert rows_of(buffer) == list(range(11))


def test_connections_that_are_killed_cost_no_row_and_add_none(own_server: ServerProcess) -> None:
    url = own_server.url("killed")
    # Two rows a part, so that an extend of six goes in three that are sent together.
    RedisReplayBuffer(url, 4000, chunk_bytes=128).extend(counted(0, 1))
    stored: dict[int, int] = {0: 0}
    done = threading.Event()
    failures: list[BaseException] = []

    def write(start: int) -> None:
        try:
            with RedisReplayBuffer(url) as buffer:
                for at in range(start, start + 600, 6):
                    index = buffer.extend(counted(at, 6))
                    stored.update(zip(index.tolist(), range(at, at + 6), strict=True))
        except BaseException as error:
            failures.append(error)

    def sample() -> None:
        try:
            with RedisReplayBuffer(url, prefetch=2) as buffer:
                while not done.is_set():
                    batch = buffer.sample(32)
                    assert torch.equal(batch["b"][:, 0], batch["a"].double())
        except BaseException as error:
            failures.append(error)

    writers = [threading.Thread(target=write, args=(1 + 600 * i,)) for i in range(3)]
    sampler = threading.Thread(target=sample)
    for thread in (*writers, sampler):
        thread.start()
    state = next(key for key in own_server.client().keys("*") if key.endswith(b":state"))
    kills = 0
    for rows in range(20, 1800, 20):  # each time that some more rows have been written
        wait_until(lambda rows=rows: int(own_server.client().hget(state, "cursor")) >= rows, f"{rows} rows", 60)
        kills += own_server.execute("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    for writer in writers:
        writer.join(60)
    done.set()
    sampler.join(60)
    assert not failures
    assert not sampler.is_alive()
    assert kills > 20
    with RedisReplayBuffer(url) as buffer:
        assert buffer.num_written == 1801
        assert rows_of(buffer) == list(range(1801))
        batch = buffer.sample(500)
        assert [stored[index] for index in batch["index"].tolist()] == batch["a"].tolist()


def test_a_stopped_server_is_waited_for_until_the_deadline_and_no_longer(own_server: ServerProcess) -> None:
    with RedisReplayBuffer(own_server.url("stopped", socket_timeout=0.2), 10, timeout_seconds=1.0) as buffer:
        buffer.extend(counted(0, 10))
        buffer.sample(2)
        own_server.pause()
        began = time.monotonic()
        for call in (
            lambda: buffer.sample(2),
            lambda: buffer.extend(counted(0, 1)),
            lambda: buffer.update_priority(torch.tensor([1]), torch.tensor([1.0])),
            lambda: len(buffer),
        ):
            with pytest.raises(ServerTimeoutError, match="did not answer in time"):
                call()
        assert time.monotonic() - began < 4 * (1.0 + 0.2) + 3
        own_server.resume()
        # What timed out may have been carried out, once.
        assert buffer.num_written in (10, 11)
        assert len(buffer.sample(2)) == 2


def test_a_server_that_is_gone_is_named_and_found_again(own_server: ServerProcess) -> None:
    with RedisReplayBuffer(own_server.url("gone"), 10, timeout_seconds=0.5, prefetch=2) as buffer:
        buffer.extend(counted(0, 10))
        buffer.sample(2)
        own_server.kill()
        with pytest.raises(ServerUnavailableError, match=re.escape(f"127.0.0.1:{own_server.port}")):
            buffer.extend(counted(10, 1))
        with pytest.raises((ServerUnavailableError, ServerTimeoutError)):
            _ = [buffer.sample(2) for _ in range(5)]  # some were read ahead


def test_a_restart_without_persistence_says_what_was_lost(own_server: ServerProcess) -> None:
    with RedisReplayBuffer(own_server.url("forgetful"), 50) as buffer:
        buffer.extend(counted(0, 70))
        own_server.restart()
        with pytest.raises(DataLossError, match="lost at least 50 rows"):
            buffer.sample(5)
        buffer.extend(counted(100, 3))
        assert rows_of(buffer) == [100, 101, 102]


@pytest.mark.parametrize("kind", ["valkey", "redis"])
def test_a_restart_of_a_server_that_persists_loses_nothing(kind: str) -> None:
    with (
        ServerProcess(kind, persist=True) as process,
        RedisReplayBuffer(process.url("kept"), 50, sampler=Prioritized(alpha=1.0, eps=0.0)) as buffer,
    ):
        index = buffer.extend(counted(0, 70))
        buffer.update_priority(index[20:], (torch.arange(50) == 7).double())
        process.restart()
        assert rows_of(buffer) == list(range(20, 70))
        assert set(buffer.sample(20)["a"].tolist()) == {27}
        buffer.extend(counted(70, 10))
        assert rows_of(buffer) == list(range(30, 80))


def test_a_restart_from_an_older_file_says_how_many_rows_are_missing(own_server: ServerProcess) -> None:
    with RedisReplayBuffer(own_server.url("older"), 50) as buffer:
        buffer.extend(counted(0, 30))
        own_server.execute("SAVE")
        buffer.extend(counted(30, 12))
        own_server.kill()
        own_server.restart()
        with pytest.raises(DataLossError, match="lost its last 12 rows: 42 had been written, the server has 30"):
            buffer.sample(5)
        assert rows_of(buffer) == list(range(30))
        buffer.extend(counted(30, 5))
        assert rows_of(buffer) == list(range(35))


def test_a_chunk_that_is_missing_is_named(server: ServerProcess, unique_name: str) -> None:
    with RedisReplayBuffer(server.url(unique_name), 40, chunk_bytes=640) as buffer:
        buffer.extend(counted(0, 40))
        chunks = sorted(key for key in server.client().keys("*") if b":0:" in key)
        server.client().delete(chunks[1])
        with pytest.raises(DataLossError, match=re.escape(chunks[1].decode())):
            buffer.sample(40, sampler=Uniform(replacement=False))
        # Written again, it has the new rows and none of the old: those read as lost, not as zeros.
        buffer.extend(counted(40, 12))
        with pytest.raises(DataLossError, match="has lost"):
            buffer.sample(40, sampler=Uniform(replacement=False))


def test_a_foreign_key_in_the_way_stops_a_write_before_it_begins(server: ServerProcess, unique_name: str) -> None:
    with RedisReplayBuffer(server.url(unique_name), 40, chunk_bytes=640) as buffer:
        buffer.extend(counted(0, 40))
        buffer.extend(counted(40, 5))
        chunks = sorted(key for key in server.client().keys("*") if b":0:" in key)
        value = server.client().get(chunks[1])
        server.client().delete(chunks[1])
        server.client().lpush(chunks[1], "x")
        with pytest.raises(ServerError, match="WRONGTYPE"):
            buffer.extend(counted(45, 10))  # five rows into each of two chunks
        server.client().delete(chunks[1])
        server.client().set(chunks[1], value)
        assert rows_of(buffer) == list(range(5, 45))


def test_forgotten_scripts_are_sent_again(server: ServerProcess, unique_name: str) -> None:
    with RedisReplayBuffer(server.url(unique_name), 40) as buffer:
        for turn in range(3):
            index = buffer.extend(counted(10 * turn, 10))
            server.client().script_flush()
            buffer.sample(5, sampler=Prioritized())
            server.client().script_flush()
            buffer.update_priority(index, torch.ones(10))
            server.client().script_flush()
        assert rows_of(buffer) == list(range(30))


@pytest.mark.parametrize("capacity", [0, -5])
def test_capacities_that_hold_nothing_are_refused(server: ServerProcess, unique_name: str, capacity: int) -> None:
    with pytest.raises(ConfigurationError, match=f"capacity={capacity}"):
        RedisReplayBuffer(server.url(unique_name), capacity)


def test_a_data_set_is_no_buffer(server: ServerProcess, unique_name: str) -> None:
    write_dataset(counted(0, 4), server.url(unique_name))
    with pytest.raises(ConfigurationError, match="open it with RedisTDDataset"):
        RedisReplayBuffer(server.url(unique_name), 10)


def test_strings_as_short_as_the_server_takes_them(unique_name: str) -> None:
    config = {"proto-max-bulk-len": "1mb"}
    with (
        ServerProcess("redis", config=config) as process,
        RedisReplayBuffer(process.url(unique_name), 300) as buffer,
    ):
        buffer.extend(counted(0, 400, width=5000))
        assert rows_of(buffer) == list(range(100, 400))
