"""A writer is killed at every step it takes: readers see the old rows or the new, and collecting leaves just those."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from redis.connection import AbstractConnection
from rows_in_memory import assert_same_rows, random_rows
from servers import ClusterProcess, ServerProcess
from tensordict import TensorDict

from td_datapipes import RedisTDDataset, append_dataset, write_dataset
from td_datapipes.catalog import chunk_keys, connect, find_manifest
from td_datapipes.errors import DatasetNotFoundError, InterruptedWriteError
from td_datapipes.garbage import Collected, collect_garbage, staged_writes
from td_datapipes.keys import NAMES_KEY, appends_key, manifest_key, superseded_key
from td_datapipes.manifest import Manifest
from td_datapipes.wire.channel import Channel

OLD = random_rows(25, {"x": (torch.float32, (4,)), "y": (torch.int64, ())}, seed=1)
NEW = random_rows(37, {"x": (torch.float32, (4,)), "y": (torch.int64, ())}, seed=2)
CHUNK_BYTES = 320
MOMENTS = ["before", "halfway", "after"]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(step: int, moment: str) -> None:
    """Let this process be killed when it sends for the `step`-th time: whatever it does on a server, it sends first."""
    counted = iter(range(sys.maxsize))
    send_command, send_bulk = AbstractConnection.send_packed_command, Channel._send

    def dying(send: Callable[[bytes], None], data: Callable[[], bytes], whole: Callable[[], Any]) -> Any:
        if next(counted) != step:
            return whole()
        if moment == "halfway":
            send(data()[: len(data()) // 2])
        elif moment == "after":
            whole()
            time.sleep(0.01)  # the server may have it or not: both happen
        return die()

    def command(self: Any, packed: Any, check_health: bool = True) -> Any:
        parts = packed if isinstance(packed, list | tuple) else [packed]
        if self._sock is None:
            self.connect()
        return dying(
            self._sock.sendall, lambda: b"".join(map(bytes, parts)), lambda: send_command(self, packed, check_health)
        )

    def bulk(self: Any) -> Any:
        if not self._unsent:
            return send_bulk(self)
        return dying(self._socket.send, lambda: b"".join(self._unsent), lambda: send_bulk(self))

    AbstractConnection.send_packed_command = command  # type: ignore[method-assign]
    Channel._send = bulk  # type: ignore[method-assign]


def run_and_die(step: int, moment: str, write: Callable[[], Any]) -> bool:
    """Whether the writer was killed, in a process of its own; else it has finished."""

    def child() -> None:
        torch.set_num_threads(1)
        die_at(step, moment)
        write()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode in (0, -signal.SIGKILL), process.exitcode
    return process.exitcode != 0


def rows_of(url: str) -> TensorDict | None:
    """What a reader that opens it now gets."""
    try:
        with RedisTDDataset(url) as dataset:
            return dataset[:]
    except InterruptedWriteError:
        return None
    except DatasetNotFoundError:
        return None


def keys_of(nodes: list[ServerProcess]) -> set[bytes]:
    return {key for node in nodes for key in node.execute("KEYS", "*")}


def kept(manifest: Manifest | None, superseded: list[Manifest]) -> set[bytes]:
    """The keys that may be there when nothing is staged."""
    found: set[bytes] = set()
    for one in [*superseded, *([] if manifest is None else [manifest])]:
        found |= set(chunk_keys(one))
    return found


def write_new(url: str) -> None:
    write_dataset(NEW, url, chunk_bytes=CHUNK_BYTES)


def overwrite(url: str) -> None:
    write_dataset(NEW, url, overwrite=True, chunk_bytes=CHUNK_BYTES)


def append(url: str) -> None:
    append_dataset(NEW, url)


WRITES: dict[str, Any] = {"new": write_new, "overwrite": overwrite, "append": append}


def walk(nodes: list[ServerProcess], url: str, moment: str, how: str, flush: Callable[[], None]) -> Iterator[int]:
    """Kill the writer at each step in turn, and check what is there, before and after collecting."""
    expected = {"new": [None, NEW], "overwrite": [OLD, NEW], "append": [OLD, torch.cat([OLD, NEW])]}[how]
    for step in range(200):
        flush()
        old: Manifest | None = None
        if how != "new":
            old = write_dataset(OLD, url, chunk_bytes=CHUNK_BYTES)
        killed = run_and_die(step, moment, lambda: WRITES[how](url))
        found = rows_of(url)
        if found is None:
            assert None in expected, step
        else:
            assert_same_rows(found, next(one for one in expected if one is not None and len(one) == len(found)))
        host = connect(url)
        try:
            collect_garbage(host, host.url.name)
            assert staged_writes(host, host.url.name) == []
            manifest = find_manifest(host, host.url.name)
        finally:
            host.close()
        superseded = [old] if old is not None and manifest is not None and manifest.id != old.id else []
        chunks = {key for key in keys_of(nodes) if key.count(b":") > 2}
        assert chunks == kept(manifest, superseded), step
        after = rows_of(url)
        assert (after is None) == (found is None)
        if found is not None and after is not None:
            assert_same_rows(after, found)
        # And the name can be written again.
        again = WRITES["append" if how == "append" else "overwrite"]
        again(url)
        if not killed:
            yield step
            return
    raise AssertionError("the writer takes more steps than expected")


@pytest.mark.heavy
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("how", WRITES)
def test_a_writer_killed_at_any_step_leaves_the_old_or_the_new(
    server: ServerProcess, unique_name: str, how: str, moment: str
) -> None:
    (steps,) = walk([server], server.url(unique_name), moment, how, server.flush)
    assert steps > 8  # it was killed that often


@pytest.mark.heavy
@pytest.mark.parametrize("how", WRITES)
def test_a_writer_killed_on_a_cluster_leaves_the_old_or_the_new(
    cluster: ClusterProcess, unique_name: str, how: str
) -> None:
    (steps,) = walk(cluster.nodes, cluster.url(unique_name), "after", how, cluster.flush)
    assert steps > 8


def test_collecting_takes_nothing_from_a_writer_that_goes_on(server: ServerProcess, unique_name: str) -> None:
    url = server.url(unique_name)
    host = connect(url)
    seen: list[Any] = []

    def batches() -> Iterator[TensorDict]:
        for start in range(0, 37, 10):
            yield NEW[start : start + 10]
            seen.append(staged_writes(host, host.url.name)[0])
            assert collect_garbage(host, host.url.name) == Collected(generations=0, writes=0, chunks=0)

    write_dataset(batches(), url, chunk_bytes=CHUNK_BYTES)
    host.close()
    assert {(write.pid, write.appends, write.interrupted(3600)) for write in seen} == {(os.getpid(), False, False)}
    found = rows_of(url)
    assert found is not None
    assert_same_rows(found, NEW)


@pytest.mark.parametrize("how", ["new", "overwrite"])
def test_a_writer_that_was_taken_for_dead_publishes_nothing(server: ServerProcess, unique_name: str, how: str) -> None:
    url = server.url(unique_name)
    if how == "overwrite":
        write_dataset(OLD, url, chunk_bytes=CHUNK_BYTES)
    host = connect(url)

    def batches() -> Iterator[TensorDict]:
        yield NEW[:20]
        yield NEW[20:]
        assert collect_garbage(host, host.url.name, older_than_seconds=0).writes == 1

    with pytest.raises(InterruptedWriteError, match="had not been heard of for long; nothing was published"):
        write_dataset(batches(), url, overwrite=True, chunk_bytes=CHUNK_BYTES)
    host.close()
    found = rows_of(url)
    assert (found is None) == (how == "new")
    if found is not None:
        assert_same_rows(found, OLD)
        manifest = Manifest.from_json(server.execute("GET", manifest_key(unique_name)))
        assert keys_of([server]) == {NAMES_KEY, manifest_key(unique_name), *chunk_keys(manifest)}


def test_collecting_leaves_what_others_wrote(server: ServerProcess, unique_name: str) -> None:
    url = server.url(unique_name)
    write_dataset(OLD, url, chunk_bytes=CHUNK_BYTES)
    write_dataset(NEW, server.url("neighbour"), chunk_bytes=CHUNK_BYTES)
    write_dataset(NEW, url, overwrite=True, chunk_bytes=CHUNK_BYTES)
    server.execute("SET", "td:{somebody.0}:0:00000000", b"else's")
    before = keys_of([server])
    host = connect(url)
    # The former generation is not an hour old.
    assert collect_garbage(host, host.url.name) == Collected(generations=0, writes=0, chunks=0)
    assert keys_of([server]) == before
    assert collect_garbage(host, host.url.name, older_than_seconds=0).generations == 1
    host.close()
    gone = before - keys_of([server])
    assert len(gone) == 3 + 1 + 1  # three chunks, their checksums, and the list of what was superseded
    assert superseded_key(unique_name) in gone
    assert not {key for key in gone if b"neighbour" in key or b"somebody" in key}
    assert appends_key(unique_name) not in keys_of([server])
