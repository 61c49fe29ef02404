"""What killed processes leave of a RedisTensorDict, or of a copy in upstream's layout, is collected, and no more."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import pytest
import torch
from rows_in_memory import assert_same_rows, random_rows
from servers import ClusterProcess, ServerProcess
from tensordict import NonTensorData, NonTensorStack, TensorDict
from test_cli import output_of
from test_killed_writer import MOMENTS, keys_of, run_and_die

from td_datapipes import RedisTDDataset, RedisTensorDict, write_dataset
from td_datapipes.catalog import chunk_keys, connect, find_manifest
from td_datapipes.conversion import convert
from td_datapipes.errors import InterruptedWriteError
from td_datapipes.garbage import Collected, collect_garbage, staged_writes
from td_datapipes.keys import NAMES_KEY, manifest_key, superseded_key
from td_datapipes.remote.staging import Staging
from td_datapipes.store_garbage import STAGED_STORES_KEY, collect_stores, staged_stores

TD = random_rows(37, {"x": (torch.float32, (4,)), ("n", "y"): (torch.int64, ())}, seed=2)
LARGE = torch.arange(37 * 9000).reshape(37, 9000)  # more than goes along with the word that a write has begun


def with_values() -> TensorDict:
    made = TD.clone()
    made["shared"] = NonTensorData({"a": 1}, batch_size=[37])
    made["own"] = NonTensorStack(*(f"row {row}" for row in range(37)))
    return made


def make(url: str) -> None:
    RedisTensorDict.from_tensordict(with_values(), url)


def make_large(url: str) -> None:
    RedisTensorDict.from_tensordict(TensorDict({"large": LARGE}, batch_size=[37]), url, overwrite=True)


def add_entries(url: str) -> None:
    there = RedisTensorDict.from_redis(url)
    there["small"] = torch.arange(37)
    there["text"] = NonTensorStack(*(f"text {row}" for row in range(37)))


def add_large(url: str) -> None:
    RedisTensorDict.from_redis(url)["large"] = LARGE


def nothing(url: str) -> None:
    """An empty server."""


CASES: dict[str, tuple[Callable[[str], None], Callable[[str], None]]] = {
    "make": (nothing, make),
    "make anew": (make, make_large),
    "add": (make, add_entries),
    "add large": (make, add_large),
}


def strangers(nodes: list[ServerProcess], url: str) -> set[bytes]:
    """The keys that belong to nothing that is published, or is superseded and kept."""
    host = connect(url)
    name = host.url.name
    manifest = find_manifest(host, name)
    notes = host.call("looking", lambda client: client.hvals(superseded_key(name)))
    host.close()
    known = {NAMES_KEY, manifest_key(name), superseded_key(name)}
    known |= set() if manifest is None else set(chunk_keys(manifest))
    for note in notes:
        known |= set(chunk_keys(type(manifest).from_json(note.split(b" ", 1)[1])))  # type: ignore[union-attr]
    return keys_of(nodes) - known


def collect(url: str) -> None:
    host = connect(url)
    collect_garbage(host, host.url.name)
    assert staged_writes(host, host.url.name) == []
    host.close()


@pytest.mark.heavy
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("case", CASES)
def test_entries_of_a_killed_process_are_collected(server: ServerProcess, case: str, moment: str) -> None:
    before, write = CASES[case]
    url, left = server.url("entries"), 0
    for step in range(200):
        server.flush()
        before(url)
        killed = run_and_die(step, moment, lambda: write(url))
        left += bool(strangers([server], url))
        collect(url)
        assert strangers([server], url) == set(), step
        if before is not nothing:
            there = RedisTensorDict.from_redis(url)
            if "x" in there.keys():  # noqa: SIM118 - a TensorDict iterates over rows
                assert_same_rows(there.to_local().select(*TD.keys()), TD)
        if not killed:
            break
    else:
        raise AssertionError("the writer takes more steps than expected")
    assert left > 0  # there was something to collect


def test_entries_on_a_cluster(cluster: ClusterProcess) -> None:
    cluster.flush()
    url = cluster.url("entries")
    make(url)
    for step in range(200):
        killed = run_and_die(step, "after", lambda: add_large(url))
        collect(url)
        assert strangers(cluster.nodes, url) == set()
        if not killed:
            return
    raise AssertionError("the writer takes more steps than expected")


def test_entries_of_a_process_that_goes_on_stay(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    make(url := server.url("entries"))
    host = connect(url)
    plain = Staging.__enter__

    def collecting(self: Staging) -> object:
        staged = plain(self)
        assert collect_garbage(host, "entries") == Collected(generations=0, writes=0, chunks=0)
        return staged

    monkeypatch.setattr(Staging, "__enter__", collecting)
    add_entries(url)
    assert RedisTensorDict.from_redis(url)["small"].tolist() == list(range(37))

    def late(self: Staging) -> object:
        staged = plain(self)
        assert collect_garbage(host, "entries", older_than_seconds=0).writes == 1
        return staged

    # One that was taken for dead publishes nothing: its chunks are gone.
    monkeypatch.setattr(Staging, "__enter__", late)
    with pytest.raises(InterruptedWriteError, match="held for abandoned; nothing of it was published"):
        RedisTensorDict.from_redis(url)["other"] = torch.arange(37)
    host.close()
    assert "other" not in RedisTensorDict.from_redis(url).keys()  # noqa: SIM118
    assert strangers([server], url) == set()


def store_keys(nodes: list[ServerProcess]) -> set[bytes]:
    return {key for key in keys_of(nodes) if key.startswith(b"td_datapipes.staged.") or key == STAGED_STORES_KEY}


def source_of(url: str) -> str:
    write_dataset(TD, url, chunk_bytes=320)
    return url


@pytest.mark.heavy
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_copy_in_the_layout_of_upstream_is_collected(server: ServerProcess, moment: str) -> None:
    source, left, done = source_of(server.url("records")), 0, False
    convert(source, server.url("ns:neighbour"), layout="tensordict_store")
    neighbour = {key for key in keys_of([server]) if b"neighbour" in key}
    for step in range(200):
        killed = run_and_die(
            step, moment, lambda: convert(source, server.url("copy"), layout="tensordict_store", overwrite=True)
        )
        left += bool(store_keys([server]))
        host = connect(server.url(), require_name=False)
        collect_stores(host)
        assert staged_stores(host) == []
        host.close()
        assert store_keys([server]) == set(), step
        assert neighbour <= keys_of([server])
        if not killed:
            done = True
            break
    assert done
    assert left > 3
    with RedisTDDataset(server.url("copy")) as dataset:
        assert_same_rows(dataset[:], TD)


def test_a_copy_on_a_cluster(cluster: ClusterProcess) -> None:
    cluster.flush()
    source = source_of(cluster.url("records"))
    for step in range(200):
        killed = run_and_die(step, "after", lambda: convert(source, cluster.url("copy"), overwrite=True))
        host = connect(cluster.url(), require_name=False)
        collect_stores(host)
        host.close()
        assert store_keys(cluster.nodes) == set(), step
        if not killed:
            with RedisTDDataset(cluster.url("copy")) as dataset:
                assert_same_rows(dataset[:], TD)
            return
    raise AssertionError("the writer takes more steps than expected")


def test_the_command_collects_both_once_they_are_abandoned(server: ServerProcess) -> None:
    make(url := server.url("entries"))
    source = source_of(server.url("records"))
    assert run_and_die(6, "after", lambda: add_large(url))
    assert run_and_die(14, "after", lambda: convert(source, server.url("copy"), layout="tensordict_store"))
    # Somebody on another machine, not heard of for half an hour.
    (token,) = server.execute("HKEYS", STAGED_STORES_KEY)
    note = json.loads(server.execute("HGET", STAGED_STORES_KEY, token))
    other = {**note, "host": "elsewhere", "seen": note["seen"] - 1800}
    server.execute("HSET", STAGED_STORES_KEY, b"0123456789", json.dumps(other))
    server.execute("SADD", "td_datapipes.staged.0123456789:{copy}:__keys__", "a")
    server.execute("SET", "td_datapipes.staged.0123456789:{copy}:d:a", "1")
    before = keys_of([server])
    shown = output_of("gc", server.url(), "--dry-run")
    assert "would remove what a write of entries left" in shown
    assert "would remove what a write of copy left" in shown
    assert keys_of([server]) == before
    output_of("gc", server.url())
    assert store_keys([server]) == {
        STAGED_STORES_KEY,
        b"td_datapipes.staged.0123456789:{copy}:__keys__",
        b"td_datapipes.staged.0123456789:{copy}:d:a",
    }
    output_of("gc", server.url(), "--older-than", "20m")
    assert store_keys([server]) == set()
    assert strangers([server], url) & {key for key in before if b"entries" in key} == set()
    assert note["pid"] != os.getpid()
