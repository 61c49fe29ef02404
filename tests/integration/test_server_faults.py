"""What servers do to a reader in the middle of an epoch, done for real: batches stay right, or the error has a name."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
import torch
from redis.backoff import NoBackoff
from redis.retry import Retry
from rows_in_memory import assert_same_rows, random_rows
from servers import Kind, ServerProcess, wait_until
from torch.utils.data import DataLoader

from td_datapipes import RedisTDDataset, append_dataset, write_dataset
from td_datapipes.errors import (
    AuthenticationError,
    ConfigurationError,
    DataLossError,
    ServerError,
    ServerFullError,
    ServerNotReadyError,
    ServerTimeoutError,
    ServerUnavailableError,
    URLError,
)
from td_datapipes.samplers import BlockShuffleBatchSampler
from td_datapipes.wire.retry import RetryPolicy

TD = random_rows(1000, {"x": (torch.float32, (60,)), ("n", "y"): (torch.int64, ())}, seed=7)
TD["row"] = torch.arange(1000)
CHUNK_BYTES = 256 * 20
SCATTERED = torch.randperm(1000, generator=torch.Generator().manual_seed(1))[:200].tolist()
PATIENT = RetryPolicy(attempts=1000, base_seconds=0.01, cap_seconds=0.1, deadline_seconds=30)
KINDS: list[Kind] = ["valkey", "redis"]


@pytest.fixture
def url(server: ServerProcess) -> str:
    write_dataset(TD, made := server.url("frail"), chunk_bytes=CHUNK_BYTES)
    return made


def epoch(dataset: RedisTDDataset, at: dict[int, Callable[[], None]], seed: int = 0) -> None:
    """One epoch of announced batches, every row once and right; something happens before some of them."""
    rows: list[int] = []
    sampler = BlockShuffleBatchSampler(dataset, 20, seed=seed)
    for number, batch in enumerate(DataLoader(dataset, batch_sampler=sampler)):
        assert_same_rows(batch, TD[batch["row"]])
        rows += batch["row"].tolist()
        at.get(number, int)()
    assert sorted(rows) == list(range(1000))


@contextlib.contextmanager
def meanwhile(do: Callable[[], None]) -> Iterator[None]:
    thread = threading.Thread(target=do)
    thread.start()
    try:
        yield
    finally:
        thread.join()


@pytest.fixture(params=KINDS)
def lasting(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    """A server that keeps its data over a restart."""
    with ServerProcess(request.param, persist=True) as process:
        write_dataset(TD, process.url("frail"), chunk_bytes=CHUNK_BYTES)
        yield process


@pytest.mark.parametrize("prefetch_bytes", [0, 40_000])
def test_an_epoch_goes_on_when_the_server_is_killed_and_comes_back(lasting: ServerProcess, prefetch_bytes: int) -> None:
    def restart() -> None:
        lasting.kill()
        threads.append(threading.Thread(target=lasting.restart))
        threads[-1].start()

    threads: list[threading.Thread] = []
    with RedisTDDataset(lasting.url("frail"), retry=PATIENT, prefetch_bytes=prefetch_bytes) as dataset:
        epoch(dataset, {3: restart, 30: restart})
        for thread in threads:
            thread.join()


def test_a_server_that_comes_back_without_its_data_is_named(server: ServerProcess) -> None:
    with ServerProcess(server.kind) as forgetful:
        write_dataset(TD, url := forgetful.url("frail"), chunk_bytes=CHUNK_BYTES)
        lost = pytest.raises(DataLossError, match="is missing or empty: it was deleted, evicted .* or lost in a res")
        with RedisTDDataset(url, retry=PATIENT, prefetch_bytes=40_000) as dataset, lost:
            epoch(dataset, {3: forgetful.restart})


def test_flushing_in_an_epoch_is_named(server: ServerProcess, url: str) -> None:
    lost = pytest.raises(DataLossError, match="'frail' at redis://.*is missing or empty")
    with RedisTDDataset(url, prefetch_bytes=40_000) as dataset, lost:
        epoch(dataset, {3: lambda: server.execute("FLUSHALL")})


def test_a_server_that_stops_for_longer_than_the_time_out(server: ServerProcess, url: str) -> None:
    del url

    def stop_for_a_while() -> None:
        server.pause()
        timer = threading.Timer(1.2, server.resume)
        timers.append(timer)
        timer.start()

    timers: list[threading.Timer] = []
    try:
        with RedisTDDataset(server.url("frail", socket_timeout=0.3), prefetch_bytes=20_000) as dataset:
            with pytest.raises(ServerTimeoutError, match="did not answer in time while reading"):
                epoch(dataset, {3: stop_for_a_while})
            timers[0].join()
            epoch(dataset, {})
        patient = server.url("frail", socket_timeout=0.3, retry_deadline_seconds=20, retry_attempts=100)
        with RedisTDDataset(patient, prefetch_bytes=20_000) as dataset:
            epoch(dataset, {3: stop_for_a_while})
    finally:
        for timer in timers:
            timer.join()


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_loads_its_data_is_waited_for(kind: Kind) -> None:
    slow = {"key-load-delay": "50000", "loading-process-events-interval-bytes": "1024"}
    with ServerProcess(kind, persist=True) as server:
        write_dataset(TD, url := server.url("frail", retry_attempts=1000), chunk_bytes=CHUNK_BYTES)
        with RedisTDDataset(url) as dataset, RedisTDDataset(url, retry=RetryPolicy(deadline_seconds=0.6)) as hasty:
            dataset[0]
            # A snapshot: while it loads one, the server answers after each key.
            server.execute("BGREWRITEAOF")
            wait_until(lambda: not server.execute("INFO", "persistence")["aof_rewrite_in_progress"], "the snapshot")
            server.kill()
            server.extra |= slow
            (server.folder / "server.conf").write_text(server._configuration())
            with meanwhile(server.restart):
                wait_until(lambda: _is_loading(server), "the server to load")
                # Between two keys it is silent for long.
                with pytest.raises((ServerNotReadyError, ServerTimeoutError), match="LOADING|did not answer in time"):
                    hasty[0]
                assert_same_rows(dataset[SCATTERED], TD[SCATTERED])


def _is_loading(server: ServerProcess) -> bool:
    try:
        with redis.Redis(host=server.host, port=server.port, retry=Retry(NoBackoff(), 0)) as client:
            client.get("x")
    except redis.BusyLoadingError:
        return True
    except redis.ConnectionError:
        return False
    return False


def test_a_script_that_runs_long_is_waited_for(server: ServerProcess, url: str) -> None:
    server.execute("CONFIG", "SET", "busy-reply-threshold", 50)
    hasty_policy = RetryPolicy(deadline_seconds=1)
    with RedisTDDataset(url) as dataset, RedisTDDataset(url, retry=hasty_policy) as hasty:
        dataset[0]
        hasty[0]

        def run_for_ever() -> None:
            with server.client().client() as own, pytest.raises(redis.ResponseError, match="killed"):
                own.execute_command("EVAL", "while true do end", 0)

        with meanwhile(run_for_ever):
            try:
                wait_until(lambda: _is_busy(server), "the script to be slow")
                with pytest.raises(ServerNotReadyError, match="it is running a script that takes long .BUSY"):
                    hasty[SCATTERED]
                with pytest.raises(ServerNotReadyError, match="BUSY"):
                    RedisTDDataset(server.url("frail", retry_deadline_seconds=1))
                with meanwhile(lambda: time.sleep(0.3) or _kill_script(server)):  # type: ignore[func-returns-value]
                    assert_same_rows(dataset[SCATTERED], TD[SCATTERED])
            finally:  # a failure is that of this test alone, not of all that come behind it
                _kill_script(server)
    server.execute("CONFIG", "SET", "busy-reply-threshold", 5000)


def _kill_script(server: ServerProcess) -> None:
    with contextlib.suppress(redis.ResponseError):  # NOTBUSY
        server.execute("SCRIPT", "KILL")


def _is_busy(server: ServerProcess) -> bool:
    try:
        server.execute("GET", "x")
    except redis.ResponseError as error:
        return str(error).startswith("BUSY")
    return False


def test_a_server_that_has_become_a_replica_takes_no_writes(server: ServerProcess, url: str) -> None:
    with ServerProcess(server.kind) as master, RedisTDDataset(url) as dataset:
        server.execute("CONFIG", "SET", "replica-serve-stale-data", "yes")
        server.execute("REPLICAOF", master.host, master.port + 1 if master.port < 65535 else 1)
        try:
            began = time.monotonic()
            for write in (
                lambda: write_dataset(TD, url, overwrite=True),
                lambda: append_dataset(TD, url),
                lambda: write_dataset(TD, server.url("other")),
            ):
                with pytest.raises(ServerNotReadyError, match="it is a replica and takes no writes .READONLY"):
                    write()
            assert time.monotonic() - began < 10
            assert_same_rows(dataset[SCATTERED], TD[SCATTERED])
        finally:
            server.execute("REPLICAOF", "NO", "ONE")
    append_dataset(TD, url)


def test_connections_killed_a_hundred_times_in_an_epoch(server: ServerProcess, url: str) -> None:
    kills = 0

    def kill() -> None:
        nonlocal kills
        with server.client().client() as own:
            while kills < 100:
                own.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
                kills += 1
                time.sleep(0.005)

    with RedisTDDataset(url, retry=PATIENT, prefetch_bytes=40_000) as dataset:
        with meanwhile(kill):
            seed = 0
            while kills < 100:
                epoch(dataset, {}, seed)
                seed += 1
        assert kills == 100


def test_writers_go_on_when_their_connections_are_killed(server: ServerProcess) -> None:
    done = threading.Event()

    def kill() -> None:
        with server.client().client() as own:
            while not done.wait(0.01):
                own.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    with meanwhile(kill):
        try:
            for number in range(5):
                write_dataset(TD, url := server.url(f"n{number}"), chunk_bytes=CHUNK_BYTES, retry=PATIENT)
                append_dataset(TD[:30], f"{url.replace('#', '?retry_attempts=1000#')}")
                with RedisTDDataset(url, retry=PATIENT) as dataset:
                    assert_same_rows(dataset[:1000], TD)
                    assert_same_rows(dataset[1000:], TD[:30])
                # A repeat that applied twice would have been an append of its own.
                assert len(dataset) == 1030
        finally:
            done.set()


@pytest.mark.parametrize("kind", KINDS)
def test_a_reader_that_outruns_the_output_buffer_is_told(kind: Kind) -> None:
    td = random_rows(64, {"x": (torch.uint8, (1 << 19,))})
    with ServerProcess(kind, config={"client-output-buffer-limit": "normal 256kb 0 0"}) as server:
        write_dataset(td, url := server.url("large"))
        with RedisTDDataset(url, retry=RetryPolicy(attempts=2, base_seconds=0.01)) as dataset:
            rows = torch.randperm(64, generator=torch.Generator().manual_seed(0)).tolist()
            for index in (rows, slice(None), [3]):
                try:
                    assert_same_rows(dataset[index], td[index])
                except ServerUnavailableError as error:
                    assert "client-output-buffer-limit" in str(error)


def test_a_full_server_that_evicts_nothing_refuses_and_goes_on_serving(server: ServerProcess, url: str) -> None:
    with RedisTDDataset(url) as dataset:
        server.execute("CONFIG", "SET", "maxmemory-policy", "noeviction")
        server.execute("CONFIG", "SET", "maxmemory", "1mb")
        try:
            for write in (
                lambda: write_dataset(iter([TD]), server.url("other"), chunk_bytes=CHUNK_BYTES),
                lambda: write_dataset(TD, url, overwrite=True, chunk_bytes=CHUNK_BYTES),
                lambda: append_dataset(TD, url),
            ):
                with pytest.raises(ServerFullError, match="maxmemory"):
                    write()
            for strategy in ("auto", "pipelined", "lua"):
                with RedisTDDataset(url, strategy=strategy) as other:  # type: ignore[arg-type]
                    assert_same_rows(other[SCATTERED], TD[SCATTERED])
            epoch(dataset, {})
        finally:
            server.execute("CONFIG", "SET", "maxmemory", 0)


@pytest.mark.parametrize("options", [{"strategy": "lua"}, {"atomic": True}], ids=str)
def test_scripts_that_are_flushed_all_the_time_are_loaded_again(
    server: ServerProcess, url: str, options: dict[str, Any]
) -> None:
    done = threading.Event()

    def flush() -> None:
        with server.client().client() as own:
            while not done.wait(0.003):
                own.execute_command("SCRIPT", "FLUSH")

    with meanwhile(flush), RedisTDDataset(url, **options) as dataset:
        try:
            for _ in range(100):
                assert_same_rows(dataset[SCATTERED], TD[SCATTERED])
            epoch(dataset, {})
        finally:
            done.set()


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_password_is_asked_for(kind: Kind) -> None:
    with ServerProcess(kind, password="n1ghtingale-31") as server:
        write_dataset(TD, url := server.url("frail"), chunk_bytes=CHUNK_BYTES)

        def change() -> None:
            server.execute("CONFIG", "SET", "requirepass", "k1ngfisher-77")
            server.execute("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "no")

        with RedisTDDataset(url, prefetch_bytes=40_000) as dataset, pytest.raises(AuthenticationError) as caught:
            epoch(dataset, {3: change})
        assert "refused access" in str(caught.value)
        assert "n1ghtingale" not in str(caught.value)
        server.password = "k1ngfisher-77"
        with RedisTDDataset(server.url("frail")) as dataset:
            epoch(dataset, {})


def test_a_retry_policy_is_an_argument_or_options_of_the_url(server: ServerProcess, url: str) -> None:
    query = {"retry_attempts": 3, "retry_base_seconds": 0.25, "retry_cap_seconds": 2, "retry_deadline_seconds": 9.5}
    policy = RetryPolicy(attempts=3, base_seconds=0.25, cap_seconds=2.0, deadline_seconds=9.5)
    with RedisTDDataset(server.url("frail", **query)) as dataset:
        assert dataset.url.retry == policy
        assert dataset.url.retry.to_options() == query
        assert_same_rows(dataset[SCATTERED], TD[SCATTERED])
    for wrong in (
        {"retry_attempts": 0},
        {"retry_attempts": "few"},
        {"retry_base_seconds": -1},
        {"retry_cap_seconds": "inf"},
    ):
        with pytest.raises(ConfigurationError, match="retry"):
            RedisTDDataset(server.url("frail", **wrong))
    with pytest.raises((ConfigurationError, URLError), match="retry_deadline_seconds"):
        RedisTDDataset(server.url("frail", retry_deadline_seconds="soon"))


@pytest.mark.parametrize("attempts", [1, 4])
def test_a_server_that_is_gone_is_tried_as_often_as_asked(url: str, server: ServerProcess, attempts: int) -> None:
    del url
    pauses: list[float] = []
    policy = RetryPolicy(attempts=attempts, base_seconds=0.01, cap_seconds=0.02)
    tries = policy.begin(time.monotonic() + 30, others_take_over=False)
    failed = ServerUnavailableError("gone")
    for number in range(attempts):
        began = time.monotonic()
        if number + 1 == attempts:
            with pytest.raises(ServerUnavailableError, match="gone"):
                tries.failed(failed)
        else:
            tries.failed(failed)
            pauses.append(time.monotonic() - began)
    assert len(pauses) == attempts - 1
    # Until the deadline where others take over, and never beyond it.
    tries = policy.begin(time.monotonic() + 0.05, others_take_over=True)

    def for_ever() -> None:
        while True:
            tries.failed(failed, passes=True)

    with pytest.raises(ServerUnavailableError):
        for_ever()


def test_an_error_that_has_no_name_is_not_tried_again(server: ServerProcess, url: str) -> None:
    with RedisTDDataset(url) as dataset:
        dataset[0]
        server.execute("ACL", "SETUSER", "default", "-getrange")
        try:
            began = time.monotonic()
            with pytest.raises((AuthenticationError, ServerError)):
                dataset[SCATTERED]
            assert time.monotonic() - began < 5
        finally:
            server.execute("ACL", "SETUSER", "default", "+getrange")
        assert_same_rows(dataset[SCATTERED], TD[SCATTERED])
