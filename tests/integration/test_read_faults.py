"""A read is right or it raises: missing, short and foreign data, a server that stops, and connections that break."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from rows_in_memory import assert_same_rows, random_rows
from servers import ServerProcess
from tensordict import TensorDict

from td_datapipes import RedisTDDataset, write_dataset
from td_datapipes.catalog import collect, connect, drop
from td_datapipes.errors import (
    DataLossError,
    DatasetChangedError,
    DatasetNotFoundError,
    SchemaError,
    ServerError,
    ServerTimeoutError,
    ServerUnavailableError,
    TDDatapipesError,
)
from td_datapipes.keys import manifest_key
from td_datapipes.manifest import SPARE_BYTES, Manifest
from td_datapipes.plan import ReadPlan
from td_datapipes.store import RowReader
from td_datapipes.wire.retry import RetryPolicy

MIB = 1 << 20
TD = random_rows(20, {"x": (torch.float32, (60,)), ("n", "y"): (torch.int64, ())}, seed=4)
STRIDE = 256
PER_CHUNK = 5
READS: list[Any] = [3, [1, 9], slice(None)]
"""All of them touch chunk 0, rows 0 to 4."""
WAYS: list[dict[str, Any]] = [
    {"strategy": "covering"},
    {"strategy": "pipelined"},
    {"strategy": "lua"},
    {"strategy": "pipelined", "strided": True},
    {"atomic": True},
]


@pytest.fixture
def url(server: ServerProcess) -> str:
    """Twenty rows in four chunks."""
    write_dataset(TD, made := server.url("frail"), chunk_bytes=STRIDE * PER_CHUNK)
    return made


@pytest.fixture
def chunk(server: ServerProcess, url: str) -> bytes:
    """The key of the chunk that holds rows 0 to 4."""
    del url
    return Manifest.from_json(server.execute("GET", manifest_key("frail"))).chunk_key(0, 0)


Harm = Callable[[ServerProcess, bytes], None]
HARMS: dict[str, tuple[Harm, str]] = {
    "deleted": (lambda server, key: server.execute("DEL", key), "is missing or empty"),
    "emptied": (lambda server, key: server.execute("SET", key, b""), "is missing or empty"),
    "cut to 100 bytes": (
        lambda server, key: server.execute("SET", key, server.execute("GETRANGE", key, 0, 99)),
        "the chunk is ",  # shorter than it was written; what lies beyond its end is missing
    ),
    "replaced by a list": (
        lambda server, key: server.execute("DEL", key) and server.execute("RPUSH", key, b"x"),
        "holds something else (WRONGTYPE",
    ),
}


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("harm", HARMS)
def test_lost_bytes_are_named_never_made_up(
    server: ServerProcess, url: str, chunk: bytes, harm: str, way: dict[str, Any]
) -> None:
    do_harm, said = HARMS[harm]
    with RedisTDDataset(url, **way) as dataset:
        assert_same_rows(dataset[:], TD)
        do_harm(server, chunk)
        for index in READS:
            with pytest.raises(DataLossError) as caught:
                dataset[index]
            message = str(caught.value)
            for part in ("'frail'", f":{server.port}/0", chunk.decode(), "'x', ('n', 'y')", "bytes expected", said):
                assert part in message
            assert "rows 0 to 4" in message
        # The other chunks are as they were, and so is the data set.
        assert_same_rows(dataset[5:], TD[5:])


def test_expected_and_received_bytes_are_in_the_message(server: ServerProcess, url: str, chunk: bytes) -> None:
    server.execute("SET", chunk, server.execute("GETRANGE", chunk, 0, 99))
    with RedisTDDataset(url, strategy="covering") as dataset:
        with pytest.raises(DataLossError, match="248 bytes expected, 100 received; the chunk is shorter"):
            dataset[0]
        with pytest.raises(DataLossError, match="248 bytes expected, 0 received"):
            dataset[1]


def test_bytes_beyond_the_last_record_are_not_missed(server: ServerProcess, url: str, chunk: bytes) -> None:
    whole = server.execute("GET", chunk)
    assert len(whole) == STRIDE * PER_CHUNK + SPARE_BYTES
    with RedisTDDataset(url, strategy="covering") as dataset:
        server.execute("SET", chunk, whole[:-SPARE_BYTES])
        assert_same_rows(dataset[:5], TD[:5])
        server.execute("SET", chunk, whole + b"more")
        assert_same_rows(dataset[:5], TD[:5])


def test_a_restored_chunk_is_read_again(server: ServerProcess, url: str, chunk: bytes) -> None:
    whole = server.execute("GET", chunk)
    with RedisTDDataset(url) as dataset:
        server.execute("DEL", chunk)
        with pytest.raises(DataLossError):
            dataset[0]
        server.execute("SET", chunk, whole)
        assert_same_rows(dataset[:], TD)


def test_eviction_is_named_as_the_likely_cause(server: ServerProcess, unique_name: str) -> None:
    td = random_rows(32, {"x": (torch.uint8, (MIB // 4,))})
    write_dataset(td, url := server.url(unique_name), chunk_bytes=MIB)
    with RedisTDDataset(url) as dataset:
        dataset[0]
        used = server.execute("INFO", "memory")["used_memory"]
        server.execute("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        server.execute("CONFIG", "SET", "maxmemory", used - 5 * MIB)
        try:
            server.execute("SET", "one more", b"x" * 1000)
            with pytest.raises(DataLossError, match=r"maxmemory-policy is allkeys-lru, \d+ keys were evicted"):
                dataset[:]
        finally:
            server.execute("CONFIG", "SET", "maxmemory", 0)
            server.execute("CONFIG", "SET", "maxmemory-policy", "noeviction")


def test_what_was_written_anew_and_collected_is_known_as_changed(server: ServerProcess, url: str) -> None:
    new = random_rows(10, {"x": (torch.float64, (8,))})
    with RedisTDDataset(url) as before, RedisTDDataset(url, strategy="lua") as by_lua:
        write_dataset(new, url, overwrite=True)
        assert_same_rows(before[:], TD)
        host = connect(url)
        collect(host, "frail", older_than_seconds=0)
        host.close()
        for dataset in (before, by_lua):
            with pytest.raises(DatasetChangedError, match="'frail' has been written anew since .* open it again"):
                dataset[3]
    with RedisTDDataset(url) as after:
        assert_same_rows(after[:], new)
    assert server.execute("DBSIZE") == 4  # manifest, name, chunk, checksums


def test_what_was_dropped_is_lost(url: str) -> None:
    with RedisTDDataset(url) as dataset:
        dataset[0]
        host = connect(url)
        drop(host, "frail")
        host.close()
        with pytest.raises(DataLossError, match="is missing or empty"):
            dataset[0]
    with pytest.raises(DatasetNotFoundError):
        RedisTDDataset(url)


def test_a_name_that_does_not_exist_comes_with_those_that_do(server: ServerProcess, url: str) -> None:
    write_dataset(TD, server.url("other"))
    with pytest.raises(DatasetNotFoundError, match=r"no data set 'Frail' at redis://.*; it has 'frail', 'other'"):
        RedisTDDataset(server.url("Frail"))
    server.flush()
    with pytest.raises(DatasetNotFoundError, match="no data set 'frail' at .*; it has none"):
        RedisTDDataset(url)


def test_a_manifest_that_is_none_is_named(server: ServerProcess, url: str) -> None:
    for text in (b"{}", b"\xff\xfe", b"no manifest"):
        server.execute("SET", manifest_key("frail"), text)
        with pytest.raises(SchemaError, match="no manifest of a data set"):
            RedisTDDataset(url)
    server.execute("DEL", manifest_key("frail"))
    server.execute("RPUSH", manifest_key("frail"), "x")
    with pytest.raises(ServerError, match="while reading the manifest of 'frail': WRONGTYPE"):
        RedisTDDataset(url)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_after_a_server_that_stopped_the_next_read_gives_the_next_rows(
    server: ServerProcess, url: str, way: dict[str, Any]
) -> None:
    del url
    with RedisTDDataset(server.url("frail", socket_timeout=0.4), **way) as dataset:
        dataset[0]
        server.pause()
        with pytest.raises(ServerTimeoutError, match="did not answer in time while reading 3 rows of 'frail'"):
            dataset[[7, 3, 3]]
        server.resume()
        assert_same_rows(dataset[[8, 4, 4]], TD[[8, 4, 4]])


def test_after_a_server_that_stopped_mid_reply_the_next_read_gives_the_next_rows(
    server: ServerProcess, unique_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    td = random_rows(256, {"x": (torch.uint8, (MIB // 8,))})
    write_dataset(td, server.url(unique_name))
    new_batch = RowReader.new_batch

    def stopping(reader: RowReader, plan: ReadPlan) -> Any:
        sink, batch = new_batch(reader, plan)

        def stop_before(handed_over: Callable[..., None]) -> Callable[..., None]:
            def stop(*arguments: Any) -> None:
                server.pause()
                handed_over(*arguments)

            return stop

        # The first rows have arrived, the others are on their way.
        sink.take = stop_before(sink.take)  # type: ignore[method-assign]
        sink.placed = stop_before(sink.placed)  # type: ignore[method-assign]
        return sink, batch

    with RedisTDDataset(server.url(unique_name, socket_timeout=0.6)) as dataset:
        for rows in (slice(None), torch.randperm(256, generator=torch.Generator().manual_seed(0))):
            with monkeypatch.context() as patch:
                patch.setattr(RowReader, "new_batch", stopping)
                with pytest.raises(ServerTimeoutError):
                    dataset[rows]
            server.resume()
            assert_same_rows(dataset[[5, 250, 17]], td[[5, 250, 17]])


def test_a_batch_that_has_no_memory_does_not_harm_the_next_read(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> None:
        raise MemoryError

    with RedisTDDataset(url) as dataset:
        with monkeypatch.context() as patch:
            patch.setattr(RowReader, "new_batch", no_memory)
            with pytest.raises(MemoryError):
                dataset[:]
        assert_same_rows(dataset[[4, 2]], TD[[4, 2]])
        assert_same_rows(dataset[:], TD)


def test_connections_killed_between_reads_are_made_again(server: ServerProcess, url: str) -> None:
    for way in WAYS:
        with RedisTDDataset(url, **way) as dataset:
            for rows in ([0, 1], [19, 2, 2]):
                assert_same_rows(dataset[rows], TD[rows])
                assert server.execute("CLIENT", "KILL", "TYPE", "normal") >= 1


@pytest.mark.parametrize("strategy", ["covering", "pipelined", "lua"])
def test_connections_killed_at_any_time_give_right_rows_or_an_error(
    server: ServerProcess, url: str, strategy: Any
) -> None:
    done = threading.Event()

    def kill() -> None:
        with server.client().client() as own:
            while not done.wait(0.002):
                own.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    killer = threading.Thread(target=kill)
    right = 0
    with RedisTDDataset(url, strategy=strategy, retry=RetryPolicy(attempts=2, base_seconds=0.001)) as dataset:
        dataset[0]
        killer.start()
        try:
            for number in range(300):
                rows = [number % 20, (number * 7) % 20, number % 3]
                try:
                    batch = dataset[rows]
                except ServerUnavailableError:
                    continue
                assert_same_rows(batch, TD[rows])
                right += 1
        finally:
            done.set()
            killer.join()
    assert right > 0


@pytest.fixture
def lasting(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    """A server that keeps its data over a restart."""
    with ServerProcess(request.param, persist=True) as process:
        yield process


@pytest.mark.parametrize("lasting", ["valkey", "redis"], indirect=True)
def test_a_server_that_is_gone_is_named_and_read_again_once_it_is_back(lasting: ServerProcess) -> None:
    write_dataset(TD, url := lasting.url("frail"))
    with RedisTDDataset(url) as dataset:
        assert_same_rows(dataset[:5], TD[:5])
        lasting.kill()
        for _ in range(2):
            with pytest.raises(ServerUnavailableError, match=rf"127.0.0.1:{lasting.port}/0"):
                dataset[:5]
        with pytest.raises(ServerUnavailableError, match=f"no server answers at redis://127.0.0.1:{lasting.port}/0"):
            RedisTDDataset(url)
        with pytest.raises(ServerUnavailableError):
            write_dataset(TD, lasting.url("another"))
        lasting.restart()
        assert_same_rows(dataset[[7, 2]], TD[[7, 2]])
        lasting.restart()
        assert_same_rows(dataset[[8, 3]], TD[[8, 3]])


def test_nobody_at_the_address_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    for scheme in ("redis", "rediss"):
        with pytest.raises(ServerUnavailableError, match=f"no server answers at {scheme}://127.0.0.1:{port}/0"):
            RedisTDDataset(f"{scheme}://127.0.0.1:{port}/0#n")
    with pytest.raises(ServerUnavailableError, match="unix:/nowhere/socket"):
        RedisTDDataset("unix:///nowhere/socket#n")


@pytest.mark.parametrize(
    "greeting", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x15\x03\x01\x00\x02\x02\x50", b"SSH-2.0-OpenSSH_9.2\r\n", b""]
)
def test_somebody_else_at_the_address_is_an_error_of_ours(greeting: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        listening.settimeout(10)

        def greet() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(1000)
                    connection.sendall(greeting)

        stranger = threading.Thread(target=greet)
        stranger.start()
        try:
            for query in ("", "?protocol=3"):
                with pytest.raises(TDDatapipesError, match=f"127.0.0.1:{port}/0"):
                    RedisTDDataset(f"redis://127.0.0.1:{port}/0{query}#n")
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            stranger.join()


def test_a_server_that_never_answers_times_out_when_opened() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(ServerTimeoutError, match="socket_timeout=SECONDS"):
            RedisTDDataset(f"redis://127.0.0.1:{port}/0?socket_timeout=0.1#n")
        with pytest.raises(ServerTimeoutError):
            write_dataset(TensorDict({"x": torch.zeros(2)}, [2]), f"redis://127.0.0.1:{port}/0?socket_timeout=0.1#n")
