"""Appending adds rows and touches nothing else: what was published stays byte for byte, whatever the appender does."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator

import pytest
import torch
from rows_in_memory import assert_same_rows, random_rows
from servers import ServerProcess
from tensordict import TensorDict

from td_datapipes import RedisTDDataset, append_dataset, write_dataset
from td_datapipes.catalog import collect, connect, drop, find_manifest
from td_datapipes.errors import (
    AppendConflictError,
    ConfigurationError,
    DataLossError,
    DatasetChangedError,
    DatasetNotFoundError,
    SchemaError,
    ServerFullError,
)
from td_datapipes.keys import appender_key, staged_key
from td_datapipes.manifest import Manifest

FORK = multiprocessing.get_context("fork")
# Records of 32 bytes, of which 160 bytes hold 5.
CHUNK_BYTES = 160


def some_rows(rows: int, seed: int = 0) -> TensorDict:
    return random_rows(rows, {"x": (torch.float32, (5,)), ("n", "y"): (torch.int16, ())}, seed)


def start(server: ServerProcess, rows: int = 12, name: str = "grown") -> tuple[str, TensorDict]:
    url, first = server.url(name), some_rows(rows)
    write_dataset(first, url, chunk_bytes=CHUNK_BYTES)
    return url, first


def manifest_of(url: str) -> Manifest:
    server = connect(url)
    try:
        found = find_manifest(server, server.url.name)
    finally:
        server.close()
    assert found is not None
    return found


def read_all(url: str) -> TensorDict:
    with RedisTDDataset(url) as dataset:
        return dataset[:]


def chunks_of(server: ServerProcess) -> dict[bytes, bytes]:
    """The bytes of every chunk."""
    keys = [key for key in server.execute("KEYS", "td:{*}:*") if key.count(b":") == 3]
    return {key: server.execute("GET", key) for key in keys}


def die_after_one_batch(url: str) -> None:
    def batches() -> Iterator[TensorDict]:
        yield some_rows(9, seed=8)
        os._exit(1)

    append_dataset(batches(), url)


def crash(url: str) -> None:
    child = FORK.Process(target=die_after_one_batch, args=(url,))
    child.start()
    child.join()
    assert child.exitcode == 1


def test_rows_come_behind_those_there_were_whatever_the_chunk_is_filled_to(server: ServerProcess) -> None:
    url, whole = start(server, rows=0)
    for number, rows in enumerate([1, 4, 3, 0, 12, 2, 5]):
        more = some_rows(rows, seed=number + 1)
        published = append_dataset(more, url)
        whole = torch.cat([whole, more])
        assert published.rows == len(whole)
        assert_same_rows(read_all(url), whole)
    assert manifest_of(url).generation == 7  # nothing was published for the empty one


@pytest.mark.parametrize("shape", [(), (3, 4), (100,), (0,)])
def test_records_of_any_length_are_appended(server: ServerProcess, shape: tuple[int, ...]) -> None:
    first = random_rows(7, {"a": (torch.bfloat16, shape), "b": (torch.uint8, ())}, 1)
    more = random_rows(9, {"a": (torch.bfloat16, shape), "b": (torch.uint8, ())}, 2)
    write_dataset(first, server.url("any"), chunk_bytes=64)
    append_dataset([more[:2], more[2:2], more[2:]], server.url("any"))
    assert_same_rows(read_all(server.url("any")), torch.cat([first, more]))


def test_no_published_byte_is_altered_and_only_the_last_chunk_is_extended(server: ServerProcess) -> None:
    url, _ = start(server, rows=12)
    before, manifest = chunks_of(server), manifest_of(url)
    append_dataset(some_rows(7, seed=1), url)
    after = chunks_of(server)
    last = manifest.chunk_key(0, 2)
    assert {key for key in before if before[key] != after[key]} == {last}
    assert after[last].startswith(before[last][: 2 * 32])
    grown = manifest_of(url)
    assert (grown.id, grown.generation, grown.rows) == (manifest.id, 2, 19)


def test_who_has_it_open_keeps_its_rows_until_it_asks_for_more(server: ServerProcess) -> None:
    url, first = start(server)
    more = some_rows(6, seed=1)
    with RedisTDDataset(url) as dataset:
        append_dataset(more, url)
        assert_same_rows(dataset[:], first)
        assert dataset.refresh() == 18
        assert_same_rows(dataset[:], torch.cat([first, more]))
        assert dataset.refresh() == 18
        write_dataset(first[:3], url, overwrite=True)
        with pytest.raises(DatasetChangedError, match=r"'grown' .* written anew .* 18 rows .* 3 of 3 now"):
            dataset.refresh()
        connection = connect(url)
        drop(connection, "grown")
        connection.close()
        with pytest.raises(DatasetChangedError, match="removed"):
            dataset.refresh()


def test_a_difference_is_refused_by_field_and_nothing_is_appended(server: ServerProcess) -> None:
    url, first = start(server)
    wider = TensorDict({"x": torch.zeros(2, 6), "n": TensorDict({"y": torch.zeros(2, dtype=torch.int16)}, [2])}, [2])
    with pytest.raises(SchemaError, match=r"'x'.*\[5\].*'x'.*\[6\]"):
        append_dataset([some_rows(20, seed=1), wider], url)
    assert_same_rows(read_all(url), first)
    assert server.execute("HLEN", staged_key("grown")) == 0
    assert len(chunks_of(server)) == 3
    assert append_dataset(some_rows(1, seed=2), url).rows == 13


def test_there_must_be_something_to_append_to(server: ServerProcess) -> None:
    with pytest.raises(DatasetNotFoundError):
        append_dataset(some_rows(1), server.url("nowhere"))
    assert server.execute("KEYS", "*") == []


def test_what_a_crashed_appender_left_is_written_over(server: ServerProcess) -> None:
    url, first = start(server)
    crash(url)
    assert len(chunks_of(server)) > 3
    assert_same_rows(read_all(url), first)
    more = some_rows(2, seed=1)
    append_dataset(more, url)
    assert_same_rows(read_all(url), torch.cat([first, more]))
    assert len(chunks_of(server)) == 3
    assert server.execute("HLEN", staged_key("grown")) == 0


def test_dropping_removes_what_a_crashed_appender_left(server: ServerProcess) -> None:
    url, _ = start(server)
    crash(url)
    connection = connect(url)
    drop(connection, "grown")
    connection.close()
    assert server.execute("KEYS", "*") == [b"td:names"] or server.execute("KEYS", "*") == []


def test_of_two_appenders_at_once_one_wins(server: ServerProcess) -> None:
    url, first = start(server)
    mine = some_rows(8, seed=1)

    def batches() -> Iterator[TensorDict]:
        yield mine[:5]
        with pytest.raises(AppendConflictError, match=rf"process {os.getpid()} on .* is appending to 'grown'"):
            append_dataset(some_rows(3, seed=2), url)
        yield mine[5:]

    append_dataset(batches(), url)
    assert_same_rows(read_all(url), torch.cat([first, mine]))


def test_one_that_fell_silent_cannot_touch_what_its_successor_published(server: ServerProcess) -> None:
    url, first = start(server)
    theirs = some_rows(11, seed=2)

    def batches() -> Iterator[TensorDict]:
        yield some_rows(5, seed=1)
        server.execute("DEL", appender_key("grown"))  # as if its time were up
        append_dataset(theirs, url)
        yield some_rows(30, seed=1)

    with pytest.raises(AppendConflictError, match="another writer has begun"):
        append_dataset(batches(), url)
    assert_same_rows(read_all(url), torch.cat([first, theirs]))
    assert len(chunks_of(server)) == 5  # 23 rows
    assert_same_rows(read_all(url), torch.cat([first, theirs]))


def test_a_silent_one_cannot_publish_either(server: ServerProcess) -> None:
    url, first = start(server)

    def batches() -> Iterator[TensorDict]:
        yield some_rows(1, seed=1)
        server.execute("DEL", appender_key("grown"))
        with pytest.raises(RuntimeError, match="stop here"):
            append_dataset(fail(), url)

    def fail() -> Iterator[TensorDict]:
        yield some_rows(1, seed=3)
        raise RuntimeError("stop here")

    with pytest.raises(AppendConflictError):
        append_dataset(batches(), url)
    assert_same_rows(read_all(url), first)


def test_appending_to_what_is_written_anew_meanwhile_is_refused(server: ServerProcess) -> None:
    url, _ = start(server)
    anew = some_rows(4, seed=9)

    def batches() -> Iterator[TensorDict]:
        yield some_rows(5, seed=1)
        write_dataset(anew, url, overwrite=True)

    with pytest.raises(AppendConflictError, match="written anew or removed"):
        append_dataset(batches(), url)
    assert_same_rows(read_all(url), anew)
    connection = connect(url)
    collect(connection, "grown", older_than_seconds=0)
    connection.close()
    assert len(chunks_of(server)) == len(manifest_of(url).layouts)


def append_five(url: str, seed: int) -> None:
    for number in range(5):
        append_dataset(some_rows(3, seed=seed * 100 + number), url, wait_seconds=60)


def test_processes_that_wait_for_each_other_lose_nothing(server: ServerProcess) -> None:
    url, first = start(server)
    children = [FORK.Process(target=append_five, args=(url, seed)) for seed in (1, 2, 3)]
    for child in children:
        child.start()
    for child in children:
        child.join()
        assert child.exitcode == 0
    expected = [some_rows(3, seed=seed * 100 + number) for seed in (1, 2, 3) for number in range(5)]
    got = read_all(url)
    assert_same_rows(got[:12], first)
    blocks = [got[at : at + 3] for at in range(12, len(got), 3)]
    assert sorted(block["x"].sum().nan_to_num().item() for block in blocks) == sorted(
        block["x"].sum().nan_to_num().item() for block in expected
    )
    assert len(got) == 12 + 45


def test_a_chunk_that_lost_rows_is_not_extended(server: ServerProcess) -> None:
    url, _ = start(server)
    server.execute("DEL", manifest_of(url).chunk_key(0, 2))
    with pytest.raises(DataLossError, match="64 bytes of published rows expected, 0 found"):
        append_dataset(some_rows(3, seed=1), url)
    assert manifest_of(url).rows == 12


def test_a_full_server_refuses_and_what_was_there_is_readable() -> None:
    with ServerProcess("redis", config={"maxmemory": "4mb"}) as process:
        first = random_rows(100, {"x": (torch.uint8, (1000,))}, 0)
        url = process.url("full")
        write_dataset(first, url, chunk_bytes=16384)
        more = random_rows(1000, {"x": (torch.uint8, (1000,))}, 1)
        with pytest.raises(ServerFullError, match="maxmemory"):
            append_dataset((more[i : i + 100] for _ in range(10) for i in range(0, 1000, 100)), url)
        assert_same_rows(read_all(url), first)
        append_dataset(more[:100], url)
        assert_same_rows(read_all(url), torch.cat([first, more[:100]]))


def test_what_is_complete_takes_nothing_more(server: ServerProcess) -> None:
    url, first = start(server)
    assert not manifest_of(url).complete
    append_dataset([], url, complete=True)
    assert_same_rows(read_all(url), first)
    with pytest.raises(ConfigurationError, match="complete with 12 rows"):
        append_dataset(some_rows(1), url)
    assert manifest_of(url).complete
