"""How reading ahead ends, and what it does when the server or the connection fails: nothing hangs, nothing is wrong."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from rows_in_memory import assert_same_rows, random_rows
from servers import ServerProcess, wait_until
from tensordict import TensorDict
from torch.utils.data import DataLoader

from td_datapipes import RedisTDDataset, write_dataset
from td_datapipes.errors import ServerTimeoutError, ServerUnavailableError
from td_datapipes.samplers import BlockShuffleBatchSampler, CoalescingBatchSampler, RowSampler

ROWS = 600
BATCH = 16
TESTS = Path(__file__).resolve().parents[1]
# A second at most where nothing else runs; machines that run tests are busy.
ENDS_SECONDS = 10


def rows_in_memory() -> TensorDict:
    """Rows of 8 KiB: 600 of them do not fit what is read ahead."""
    td = random_rows(ROWS, {"x": (torch.uint8, (8184,))})
    td["row"] = torch.arange(ROWS)
    return td


@pytest.fixture(scope="module")
def reference() -> TensorDict:
    return rows_in_memory()


@pytest.fixture
def url(server: ServerProcess, reference: TensorDict) -> str:
    write_dataset(reference, server.url("ahead"), chunk_bytes=1 << 18)
    return server.url("ahead")


def open_dataset(url: str, prefetch_bytes: int = 1 << 20) -> RedisTDDataset:
    return RedisTDDataset(url, prefetch_bytes=prefetch_bytes)


def sampler_of(dataset: RedisTDDataset, name: str = "rows") -> Any:
    if name == "rows":
        return CoalescingBatchSampler(RowSampler(dataset, seed=3), BATCH, window=4)
    return BlockShuffleBatchSampler(dataset, BATCH, seed=3, block_rows=8, buffer_blocks=12)


def loader_of(dataset: RedisTDDataset, name: str = "rows", **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, batch_sampler=sampler_of(dataset, name), **options)


def check_epoch(dataset: RedisTDDataset, reference: TensorDict, name: str = "rows") -> None:
    for batch, rows in zip(loader_of(dataset, name), sampler_of(dataset, name), strict=True):
        assert_same_rows(batch, reference[list(rows)])


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("td_datapipes")]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    gc.collect()
    assert not threads(), "an earlier test left a thread"
    yield
    gc.collect()
    wait_until(lambda: not threads(), "the threads of this test to end", ENDS_SECONDS)


class TestClosing:
    def test_close_ends_the_thread_and_reading_again_starts_another(self, url: str, reference: TensorDict) -> None:
        dataset = open_dataset(url)
        for _ in range(3):
            list(islice(loader_of(dataset), 3))
            assert len(threads()) == 1
            dataset.close()
            assert not threads()
            dataset.close()
        check_epoch(dataset, reference)
        dataset.close()

    def test_close_at_once_after_the_first_batch(self, url: str, reference: TensorDict) -> None:
        for _ in range(30):
            with open_dataset(url) as dataset:
                batch = next(iter(loader_of(dataset)))
            assert not threads()
            assert_same_rows(batch, reference[batch["row"]])

    def test_batches_outlive_the_data_set(self, url: str, reference: TensorDict) -> None:
        with open_dataset(url) as dataset:
            batches = list(loader_of(dataset))
        del dataset
        gc.collect()
        for batch in batches:
            assert_same_rows(batch, reference[batch["row"]])

    def test_the_last_reference_ends_the_thread(self, url: str) -> None:
        dataset = open_dataset(url)
        batches = iter(loader_of(dataset))
        next(batches)
        assert len(threads()) == 1
        del dataset, batches
        gc.collect()
        wait_until(lambda: not threads(), "the thread to end", ENDS_SECONDS)

    def test_an_exception_in_the_loop(self, url: str, reference: TensorDict) -> None:
        def train(dataset: RedisTDDataset) -> None:
            for number, _ in enumerate(loader_of(dataset)):
                if number == 3:
                    raise ZeroDivisionError("the model")

        with open_dataset(url) as dataset:
            for _ in range(2):
                with pytest.raises(ZeroDivisionError, match="the model"):
                    train(dataset)
            check_epoch(dataset, reference)
        dataset = open_dataset(url)
        with pytest.raises(ZeroDivisionError):
            train(dataset)
        del dataset

    def test_two_data_sets_have_a_thread_each(self, url: str, reference: TensorDict) -> None:
        with open_dataset(url) as one, open_dataset(url) as two:
            for first, second in zip(loader_of(one), loader_of(two, "block"), strict=False):
                assert_same_rows(first, reference[first["row"]])
                assert_same_rows(second, reference[second["row"]])
            assert len(threads()) == 2


SCRIPT = """
import os, sys, time
sys.path[:0] = sys.argv[1:3]
import torch
from test_prefetch_ending import loader_of, open_dataset

def say(text):
    print(text, flush=True)

def loop(dataset, **options):
    for number, batch in enumerate(loader_of(dataset, **options)):
        if number == 3:
            return batch
"""


def run_script(url: str, body: str, interrupt: bool = False) -> subprocess.CompletedProcess[str]:
    """Run it; `interrupt` sends SIGINT once it said that it is ready. It has to end soon after."""
    code = SCRIPT + textwrap.dedent(body).replace("URL", repr(url))
    command = [sys.executable, "-W", "error::ResourceWarning", "-c", code, str(TESTS), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n", process.communicate()[1]
            if interrupt:
                process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=ENDS_SECONDS)
        finally:
            process.kill()
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@pytest.mark.heavy
class TestInterpreter:
    @pytest.fixture
    def url(self, valkey_server: ServerProcess, reference: TensorDict) -> Iterator[str]:
        """On one server alone: each test starts an interpreter, and what ends it is no server's business."""
        valkey_server.flush()
        write_dataset(reference, valkey_server.url("ahead"), chunk_bytes=1 << 18)
        yield valkey_server.url("ahead")
        valkey_server.resume()

    @pytest.mark.parametrize(
        "body",
        [
            pytest.param("dataset = open_dataset(URL); batch = loop(dataset); say('ready')", id="global"),
            pytest.param("batches = iter(loader_of(open_dataset(URL))); next(batches); say('ready')", id="iterator"),
            pytest.param(
                """
                dataset = open_dataset(URL)
                loader = loader_of(dataset, num_workers=2, persistent_workers=True)
                batches = iter(loader); next(batches); loop(dataset); say('ready')
                """,
                id="workers",
            ),
            pytest.param(
                "dataset = open_dataset(URL); dataset.itself = dataset; loop(dataset); say('ready'); sys.exit(0)",
                id="cycle",
            ),
            pytest.param(
                """
                import threading
                def work():
                    dataset = open_dataset(URL); loop(dataset); say('ready')
                thread = threading.Thread(target=work); thread.start(); thread.join()
                """,
                id="other_thread",
            ),
        ],
    )
    def test_exit_with_batches_on_their_way(self, url: str, body: str) -> None:
        done = run_script(url, body)
        assert (done.returncode, done.stderr) == (0, "")

    @pytest.mark.parametrize("wait", ["time.sleep(60)", "loop(dataset)"], ids=["asleep", "reading"])
    def test_ctrl_c(self, url: str, wait: str) -> None:
        body = f"""
            dataset = open_dataset(URL)
            loop(dataset); say('ready')
            while True:
                {wait}
            """
        done = run_script(url, body, interrupt=True)
        assert done.returncode == -signal.SIGINT
        assert done.stderr.rstrip().endswith("KeyboardInterrupt")
        assert done.stderr.count("Traceback") == 1
        assert not any(word in done.stderr for word in ("Exception ignored", "Exception in thread", "Fatal", "Warning"))

    def test_ctrl_c_while_the_server_is_silent(self, valkey_server: ServerProcess, url: str) -> None:
        body = f"""
            import signal
            dataset = open_dataset(URL)
            loop(dataset)
            os.kill({valkey_server.pid}, signal.SIGSTOP)
            say('ready')
            while True:
                loop(dataset)
            """
        done = run_script(url, body, interrupt=True)
        assert done.returncode == -signal.SIGINT
        assert done.stderr.rstrip().endswith("KeyboardInterrupt")

    def test_exit_while_the_server_is_silent(self, valkey_server: ServerProcess, url: str) -> None:
        body = f"""
            import signal
            dataset = open_dataset(URL)
            loop(dataset)
            os.kill({valkey_server.pid}, signal.SIGSTOP)
            say('ready')
            """
        done = run_script(url, body)
        assert (done.returncode, done.stderr) == (0, "")


def test_a_fork_in_the_middle_reads_on_in_both_processes(url: str, reference: TensorDict) -> None:
    with open_dataset(url) as dataset:
        batches = zip(loader_of(dataset), sampler_of(dataset), strict=True)
        for _ in range(4):
            for batch, rows in islice(batches, 3):
                assert_same_rows(batch, reference[list(rows)])
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    for batch, rows in batches:
                        assert_same_rows(batch, reference[list(rows)])
                    check_epoch(dataset, reference, "block")
                    dataset.close()
                    code = 0
                finally:
                    os._exit(code)
            assert os.waitpid(child, 0)[1] == 0
        for batch, rows in batches:
            assert_same_rows(batch, reference[list(rows)])


def unavailable(batches: Iterator[TensorDict]) -> str:
    """What a loader says of a server that is gone. No traceback keeps the loader: torch ends workers slowly then."""
    try:
        list(batches)
    except ServerUnavailableError as error:
        error.__traceback__ = None
        return str(error)
    raise AssertionError("the epoch went on")


class TestFailures:
    @pytest.mark.parametrize("name", ["rows", "block"])
    def test_connections_that_break_during_an_epoch(
        self, server: ServerProcess, url: str, reference: TensorDict, name: str
    ) -> None:
        with open_dataset(url) as dataset:
            pairs = zip(loader_of(dataset, name), sampler_of(dataset, name), strict=True)
            for number, (batch, rows) in enumerate(pairs):
                if number % 3 == 0:
                    server.execute("CLIENT KILL TYPE normal SKIPME yes")
                assert_same_rows(batch, reference[list(rows)])

    def test_connections_of_workers_that_break(self, server: ServerProcess, url: str, reference: TensorDict) -> None:
        with open_dataset(url) as dataset:
            loader = loader_of(dataset, num_workers=2)
            for number, (batch, rows) in enumerate(zip(loader, sampler_of(dataset), strict=True)):
                if number % 3 == 0:
                    server.execute("CLIENT KILL TYPE normal SKIPME yes")
                assert_same_rows(batch, reference[list(rows)])

    @pytest.mark.parametrize("name", ["rows", "block"])
    @pytest.mark.usefixtures("url")
    def test_a_server_that_stops_answering(self, server: ServerProcess, reference: TensorDict, name: str) -> None:
        timeout_seconds = 1.0
        with open_dataset(server.url("ahead", socket_timeout=timeout_seconds), 1 << 19) as dataset:
            batches = iter(loader_of(dataset, name))
            list(islice(batches, 3))
            server.pause()
            began = time.monotonic()
            with pytest.raises(ServerTimeoutError, match="did not answer in time"):
                list(batches)  # what had arrived is still handed over
            assert time.monotonic() - began < timeout_seconds + 3
            server.resume()
            check_epoch(dataset, reference, name)

    @pytest.mark.usefixtures("url")
    def test_a_server_that_is_silent_while_nobody_waits(self, server: ServerProcess, reference: TensorDict) -> None:
        with open_dataset(server.url("ahead", socket_timeout=0.3)) as dataset:
            pairs = zip(loader_of(dataset), sampler_of(dataset), strict=True)
            list(islice(pairs, 3))
            server.pause()
            time.sleep(1.0)
            server.resume()
            for batch, rows in pairs:
                assert_same_rows(batch, reference[list(rows)])

    def test_a_server_that_is_gone(self, server: ServerProcess, url: str) -> None:
        with open_dataset(url) as dataset:
            batches = iter(loader_of(dataset))
            list(islice(batches, 3))
            server.kill()
            began = time.monotonic()
            with pytest.raises(ServerUnavailableError, match=f"{server.host}:{server.port}"):
                list(batches)
            assert time.monotonic() - began < ENDS_SECONDS

    def test_a_server_that_is_gone_with_workers(self, server: ServerProcess, url: str) -> None:
        with open_dataset(url) as dataset:
            batches = iter(loader_of(dataset, num_workers=2))
            list(islice(batches, 3))
            server.kill()
            assert f"{server.host}:{server.port}" in unavailable(batches)
