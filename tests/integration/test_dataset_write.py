"""Writing publishes all or nothing: whatever goes wrong, no key of it stays and what was there before is readable."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from rows_in_memory import assert_same_rows, random_rows
from servers import ServerProcess
from tensordict import TensorDict, lazy_stack

from td_datapipes import RedisTDDataset, write_dataset, writer
from td_datapipes.catalog import collect, connect, drop, list_names, publish
from td_datapipes.errors import (
    AuthenticationError,
    ConfigurationError,
    DatasetExistsError,
    DatasetNotFoundError,
    InterruptedWriteError,
    SchemaError,
    ServerFullError,
    ServerTimeoutError,
    TDDatapipesError,
    ValueTooLargeError,
)
from td_datapipes.keys import superseded_key
from td_datapipes.manifest import SPARE_BYTES, Manifest

FORK = multiprocessing.get_context("fork")
MIB = 1 << 20


def some_rows(rows: int = 40, seed: int = 0) -> TensorDict:
    return random_rows(rows, {"x": (torch.float32, (16,)), ("n", "y"): (torch.int16, ())}, seed)


def keys_of(server: ServerProcess) -> set[bytes]:
    """All keys but the list of names, in which a name without a data set is harmless."""
    return set(server.execute("KEYS", "*")) - {b"td:names"}


def read_all(url: str) -> TensorDict:
    with RedisTDDataset(url) as dataset:
        return dataset[:]


@pytest.fixture
def settings(server: ServerProcess) -> Iterator[Callable[[str, str], None]]:
    """Sets options of the server, which are set back afterwards."""
    before: dict[str, str] = {}

    def change(option: str, value: str) -> None:
        reply = server.execute("CONFIG", "GET", option)
        flat = reply if isinstance(reply, dict) else dict(zip(reply[::2], reply[1::2], strict=True))
        before.setdefault(option, next(iter(flat.values())))
        server.execute("CONFIG", "SET", option, value)

    yield change
    for option, value in before.items():
        server.execute("CONFIG", "SET", option, value)


def test_what_is_written_lies_as_the_manifest_says(server: ServerProcess, unique_name: str) -> None:
    td = some_rows(41)
    manifest = write_dataset(td, url := server.url(unique_name), chunk_bytes=16 * 30)
    (layout,) = manifest.layouts
    assert (manifest.rows, manifest.generation, manifest.kind, manifest.name) == (41, 1, "frozen", unique_name)
    assert (layout.stride_bytes, layout.records_per_chunk) == (80, 6)
    chunks = {manifest.chunk_key(0, chunk) for chunk in range(7)}
    assert {key: server.execute("STRLEN", key) for key in chunks} == {
        **{manifest.chunk_key(0, chunk): 480 + SPARE_BYTES for chunk in range(6)},
        manifest.chunk_key(0, 6): 5 * 80 + SPARE_BYTES,
    }
    published = f"td:{{{unique_name}}}:manifest".encode()
    assert keys_of(server) == {*chunks, published, manifest.checksums_key(0)}
    assert Manifest.from_json(server.execute("GET", published)) == manifest
    assert_same_rows(read_all(url), td)


def test_batches_of_any_sizes_are_written_one_after_the_other(server: ServerProcess, unique_name: str) -> None:
    td = some_rows(100)
    sizes = [0, 7, 0, 1, 30, 62, 0]
    for number, chunk_bytes in enumerate((16, 80, 80 * 7, None)):
        url = server.url(f"{unique_name}/{number}")
        manifest = write_dataset(iter(td.split(sizes)), url, chunk_bytes=chunk_bytes)
        assert manifest.rows == 100
        assert_same_rows(read_all(url), td)


def test_more_than_a_chunk_at_a_time_and_less_arrive_alike(server: ServerProcess, unique_name: str) -> None:
    td = random_rows(300, {"x": (torch.uint8, (20_000,))})
    for number, size in enumerate((1, 299, 300)):
        url = server.url(f"{unique_name}/{number}")
        write_dataset(td.split(size), url, chunk_bytes=64_000)
        assert_same_rows(read_all(url), td)


def test_an_existing_name_is_refused_and_left_alone(server: ServerProcess, unique_name: str) -> None:
    td = some_rows()
    write_dataset(td, url := server.url(unique_name))
    before = keys_of(server)
    with pytest.raises(DatasetExistsError, match=r"exists at .* \(40 rows, generation 1\); pass overwrite=True"):
        write_dataset(some_rows(seed=1), url)
    assert keys_of(server) == before
    assert_same_rows(read_all(url), td)


def test_overwriting_keeps_the_old_rows_for_those_who_have_them_open(server: ServerProcess, unique_name: str) -> None:
    old, new = some_rows(40, seed=1), some_rows(25, seed=2)
    first = write_dataset(old, url := server.url(unique_name), chunk_bytes=800)
    with RedisTDDataset(url) as before:
        second = write_dataset(new, url, overwrite=True, chunk_bytes=800)
        assert (second.generation, second.rows) == (2, 25)
        assert second.id != first.id
        assert_same_rows(before[:], old)
        assert_same_rows(read_all(url), new)
        assert list(server.execute("HGETALL", superseded_key(unique_name)))
        server_of = connect(url)
        assert collect(server_of, unique_name) == 0, "it is younger than an hour"
        assert_same_rows(before[:], old)
        assert collect(server_of, unique_name, older_than_seconds=0) == 1
        server_of.close()
    assert not [key for key in keys_of(server) if first.id.encode() in key]
    assert_same_rows(read_all(url), new)


def test_overwriting_what_does_not_exist_writes_it(server: ServerProcess, unique_name: str) -> None:
    assert write_dataset(some_rows(), server.url(unique_name), overwrite=True).generation == 1


@pytest.mark.parametrize("overwrite", [False, True])
def test_of_two_writers_that_race_to_a_name_the_later_is_refused(
    server: ServerProcess, unique_name: str, overwrite: bool
) -> None:
    url = server.url(unique_name)
    if overwrite:
        write_dataset(some_rows(seed=9), url)
    winner = some_rows(30, seed=1)

    def slow() -> Iterator[TensorDict]:
        yield some_rows(20)
        write_dataset(winner, url, overwrite=overwrite)
        keys.update(keys_of(server))
        yield some_rows(20)

    keys: set[bytes] = set()
    with pytest.raises(DatasetExistsError, match="was published by another writer while this one wrote"):
        write_dataset(slow(), url, overwrite=overwrite, chunk_bytes=80)
    assert_same_rows(read_all(url), winner)
    assert keys_of(server) < keys
    assert not any(b"staged" in key for key in keys_of(server))


def test_of_many_writers_at_once_one_wins_and_the_others_are_told(server: ServerProcess, unique_name: str) -> None:
    url, barrier, outcomes = server.url(unique_name), threading.Barrier(4), []

    def write(seed: int) -> None:
        def batches() -> Iterator[TensorDict]:
            yield some_rows(seed=seed)
            barrier.wait()

        try:
            write_dataset(batches(), url)
            outcomes.append(seed)
        except DatasetExistsError:
            outcomes.append(None)

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = [seed for seed in outcomes if seed is not None]
    assert len(outcomes) == 4
    assert_same_rows(read_all(url), some_rows(seed=winner))
    assert len(keys_of(server)) == 3  # chunk, checksums, manifest


class StopError(Exception):
    """Raised by a generator of rows."""


@pytest.mark.parametrize("error", [StopError, KeyboardInterrupt, GeneratorExit, SystemExit])
def test_a_generator_that_raises_leaves_nothing(
    server: ServerProcess, unique_name: str, error: type[BaseException]
) -> None:
    batch = random_rows(64, {"x": (torch.uint8, (MIB // 16,))})
    kept = some_rows()
    write_dataset(kept, server.url("kept"))
    before = keys_of(server)

    def batches() -> Iterator[TensorDict]:
        yield batch  # four megabytes, of which some are still on the way
        raise error

    for chunk_bytes in (None, MIB, 64 * 1024):
        with pytest.raises(error):
            write_dataset(batches(), server.url(unique_name), chunk_bytes=chunk_bytes)
        assert keys_of(server) == before
    server.execute("PING")
    assert keys_of(server) == before
    with pytest.raises(DatasetNotFoundError, match="it has 'kept'"):
        RedisTDDataset(server.url(unique_name))
    assert_same_rows(read_all(server.url("kept")), kept)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda td: td.replace({"x": td["x"].double()}), r"'x': float32\[16\] here, 'x': float64\[16\] there"),
        (lambda td: td.replace({"x": td["x"][:, :3]}), r"'x': float32\[16\] here, 'x': float32\[3\] there"),
        (lambda td: td.exclude(("n", "y")), r"field \('n', 'y'\) is missing there"),
        (lambda td: td.replace({"new": td["x"]}), "field 'new' is missing here"),
        (lambda td: td.exclude("n"), r"field \('n', 'y'\) is missing there"),
    ],
)
def test_a_later_batch_that_differs_is_named_with_its_row_and_field(
    server: ServerProcess, unique_name: str, change: Callable[[TensorDict], TensorDict], said: str
) -> None:
    with pytest.raises(SchemaError, match=f"the batch after row 30 differs from the first one: {said}"):
        write_dataset([some_rows(10), some_rows(20), change(some_rows(5))], server.url(unique_name), chunk_bytes=80)
    assert keys_of(server) == set()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (lambda: torch.eye(2).to_sparse(), "sparse_coo"),
        (lambda: torch.zeros(2, dtype=torch.float4_e2m1fn_x2), "float4_e2m1fn_x2 cannot be stored"),
        (lambda: torch.zeros(2, device="meta"), "meta"),
    ],
    ids=["sparse", "packed", "meta"],
)
def test_a_field_that_cannot_be_stored_is_named_before_anything_is_written(
    server: ServerProcess, unique_name: str, value: Callable[[], Any], said: str
) -> None:
    td = TensorDict({"fine": torch.zeros(2), "n": TensorDict({"bad": value()}, [2])}, [2])
    for data in (td, [td]):
        with pytest.raises(SchemaError, match=rf"field \('n', 'bad'\).*{said}"):
            write_dataset(data, server.url(unique_name))
    assert server.execute("DBSIZE") == 0


def test_ragged_rows_are_named(server: ServerProcess, unique_name: str) -> None:
    ragged = lazy_stack([TensorDict({"x": torch.zeros(1, n)}) for n in (2, 3)])
    with pytest.raises(SchemaError, match="the rows of field 'x' cannot be put together"):
        write_dataset(ragged, server.url(unique_name))
    assert server.execute("DBSIZE") == 0


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([], "there is nothing to write"),
        (iter(()), "there is nothing to write"),
        (3, "an iterable of TensorDicts, not int"),
        (None, "an iterable of TensorDicts, not NoneType"),
        ([{"x": torch.zeros(2)}], "a batch of rows is a TensorDict, not dict; wrap a dict"),
        (TensorDict({"x": torch.zeros(2)}), r"its leading dim must count rows"),
        ([TensorDict({"x": torch.zeros(2)})], r"its leading dim must count rows"),
    ],
)
def test_what_has_no_rows_is_refused(server: ServerProcess, unique_name: str, data: Any, said: str) -> None:
    with pytest.raises(SchemaError, match=said):
        write_dataset(data, server.url(unique_name))
    assert server.execute("DBSIZE") == 0


@pytest.mark.parametrize("chunk_bytes", [0, -16, 8, 100])
def test_a_chunk_size_that_cannot_be_is_refused(server: ServerProcess, unique_name: str, chunk_bytes: int) -> None:
    with pytest.raises(ConfigurationError, match=f"chunk_bytes must be a positive multiple of 16, got {chunk_bytes}"):
        write_dataset(some_rows(), server.url(unique_name), chunk_bytes=chunk_bytes)


def test_a_full_server_is_named_and_keeps_what_it_had(
    server: ServerProcess, unique_name: str, settings: Callable[[str, str], None]
) -> None:
    kept = some_rows()
    write_dataset(kept, server.url("kept"))
    before = keys_of(server)
    used = server.execute("INFO", "memory")["used_memory"]
    settings("maxmemory-policy", "noeviction")
    settings("maxmemory", str(used + 8 * MIB))
    big = random_rows(16, {"x": (torch.uint8, (MIB,))})
    # Known beforehand, it is refused beforehand; else the server refuses a chunk half way.
    with pytest.raises(
        ServerFullError, match=r"has maxmemory=\d+ bytes of which \d+ are used; this data set needs 16777216"
    ):
        write_dataset(big, server.url(unique_name))
    with pytest.raises(ServerFullError, match="maxmemory"):
        write_dataset(big.split(2), server.url(unique_name))
    assert keys_of(server) == before
    assert_same_rows(read_all(server.url("kept")), kept)
    settings("maxmemory", "1mb")
    with pytest.raises(ServerFullError, match="maxmemory"):
        write_dataset(iter([kept]), server.url(unique_name))
    assert_same_rows(read_all(server.url("kept")), kept)
    settings("maxmemory", "0")
    write_dataset(big.split(2), server.url(unique_name))
    assert_same_rows(read_all(server.url(unique_name)), big)


def test_chunks_are_as_long_as_the_server_takes(
    server: ServerProcess, unique_name: str, settings: Callable[[str, str], None]
) -> None:
    settings("proto-max-bulk-len", "1mb")
    # Two megabytes of one field over all rows, and rows that are longer than a string may be.
    for number, td in enumerate(
        (random_rows(500, {"x": (torch.uint8, (4096,))}), random_rows(3, {"x": (torch.float16, (MIB + 5,))}))
    ):
        url = server.url(f"{unique_name}/{number}")
        manifest = write_dataset(td, url)
        assert_same_rows(read_all(url), td)
        longest = max(server.execute("STRLEN", key) for key in keys_of(server) if manifest.id.encode() in key)
        assert longest <= MIB
    before = keys_of(server)
    with pytest.raises(
        ValueTooLargeError,
        match=r"chunk_bytes=2097152 is more than .*proto-max-bulk-len.*pass chunk_bytes=10485\d\d or less",
    ):
        write_dataset(td, server.url(unique_name), chunk_bytes=2 * MIB)
    assert keys_of(server) == before


def test_a_writer_that_may_not_ask_for_the_limit_leaves_nothing_half_written(
    server: ServerProcess, unique_name: str, settings: Callable[[str, str], None]
) -> None:
    settings("proto-max-bulk-len", "1mb")
    server.execute("ACL", "SETUSER", "plain", "on", ">pw", "~*", "+@all", "-config", "-info")
    url = f"redis://plain:pw@{server.host}:{server.port}/0#{unique_name}"
    td = random_rows(500, {"x": (torch.uint8, (4096,))})
    # The server refuses the string and hangs up: which of the two is seen first is up to the network.
    with pytest.raises(TDDatapipesError):
        write_dataset(td, url)
    assert keys_of(server) == set()
    write_dataset(td, url, chunk_bytes=512 * 1024)
    assert_same_rows(read_all(url), td)
    server.execute("ACL", "DELUSER", "plain")


def write_until_killed(url: str, begun: Any) -> None:
    def batches() -> Iterator[TensorDict]:
        yield some_rows()
        begun.set()
        signal.pause()

    write_dataset(batches(), url, chunk_bytes=80)


def test_a_write_whose_writer_was_killed_is_known_as_interrupted(server: ServerProcess, unique_name: str) -> None:
    url, begun = server.url(unique_name), FORK.Event()
    writer = FORK.Process(target=write_until_killed, args=(url, begun))
    writer.start()
    assert begun.wait(30)
    with pytest.raises(
        InterruptedWriteError, match="was never published: its write is still going on or was interrupted"
    ):
        RedisTDDataset(url)
    os.kill(writer.pid or 0, signal.SIGKILL)
    writer.join()
    with pytest.raises(InterruptedWriteError, match="write it again"):
        RedisTDDataset(url)
    td = some_rows(seed=3)
    write_dataset(td, url)
    assert_same_rows(read_all(url), td)


def test_overwriting_is_not_seen_before_it_is_complete(server: ServerProcess, unique_name: str) -> None:
    old, new = some_rows(seed=1), some_rows(30, seed=2)
    write_dataset(old, url := server.url(unique_name))

    def batches() -> Iterator[TensorDict]:
        for batch in new.split(10):
            assert_same_rows(read_all(url), old)
            yield batch

    write_dataset(batches(), url, overwrite=True, chunk_bytes=80)
    assert_same_rows(read_all(url), new)


def test_a_server_that_stops_while_chunks_are_written_is_left_without_the_data_set(
    server: ServerProcess, unique_name: str
) -> None:
    def batches() -> Iterator[TensorDict]:
        yield some_rows(200)
        server.pause()
        yield some_rows(200)

    with pytest.raises(ServerTimeoutError, match="did not answer in time while writing a chunk"):
        write_dataset(batches(), server.url(unique_name, socket_timeout=0.5), chunk_bytes=1600)
    server.resume()
    server.execute("PING")
    with pytest.raises(DatasetNotFoundError):
        RedisTDDataset(server.url(unique_name))
    write_dataset(some_rows(), server.url(unique_name))


def test_chunks_that_were_on_their_way_when_the_connection_broke_are_sent_again(
    server: ServerProcess, unique_name: str
) -> None:
    rows, url = random_rows(600, {"x": (torch.uint8, (20_000,))}, seed=2), server.url(unique_name)

    def batches() -> Iterator[TensorDict]:
        for start in range(0, 600, 60):
            yield rows[start : start + 60]
            # The chunk of 4 MB that was sent last is more than the sockets hold.
            server.execute("CLIENT KILL TYPE normal SKIPME yes")

    manifest = write_dataset(batches(), url)
    assert manifest.rows == 600
    with RedisTDDataset(url, verify=True) as dataset:
        assert_same_rows(dataset[:], rows)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_publication_whose_answer_is_lost_is_whole_or_absent(
    server: ServerProcess, unique_name: str, overwrite: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server stops when all chunks are there: the writer cannot know whether its data set was published."""
    old, new, url = some_rows(50, seed=1), some_rows(200, seed=2), server.url(unique_name)
    if overwrite:
        write_dataset(old, url)

    def stop_and_publish(*arguments: Any) -> None:
        server.pause()
        try:
            publish(*arguments)
        finally:
            server.resume()

    monkeypatch.setattr(writer, "publish", stop_and_publish)
    with pytest.raises(ServerTimeoutError, match="did not answer in time while publishing"):
        write_dataset(new, server.url(unique_name, socket_timeout=0.5), overwrite=overwrite, chunk_bytes=1600)
    # What was sent before the time-out is carried out all the same, and may be so at any time.
    assert_same_rows(read_all(url), new)


def test_a_publication_that_is_refused_leaves_nothing(server: ServerProcess, unique_name: str) -> None:
    server.execute("ACL", "SETUSER", "noscripts", "on", ">pw", "~*", "+@all", "-eval")
    with pytest.raises(AuthenticationError, match="refused access while publishing"):
        write_dataset(some_rows(), f"redis://noscripts:pw@{server.host}:{server.port}/0#{unique_name}")
    assert keys_of(server) == set()
    server.execute("ACL", "DELUSER", "noscripts")


def test_names_are_listed_and_dropped(server: ServerProcess, unique_name: str) -> None:
    td, names = some_rows(), ["a", "b/c", "*", "{x}", "ü\n"]
    for name in names:
        write_dataset(td, server.url(name), chunk_bytes=160)
    write_dataset(td, server.url("a"), overwrite=True)
    host = connect(server.url("a"))
    assert list_names(host) == sorted(names)
    drop(host, "*")
    assert list_names(host) == sorted({*names} - {"*"})
    with pytest.raises(DatasetNotFoundError, match=r"no data set '\*' at .*; it has 'a', 'b/c', '\{x\}', 'ü\\n'"):
        drop(host, "*")
    for name in {*names} - {"*"}:
        assert_same_rows(read_all(server.url(name)), td)
        drop(host, name)
    host.close()
    assert server.execute("DBSIZE") == 0


@pytest.mark.parametrize("name", ["plain", "[red]x[/red]", "[/closing]"])
def test_progress_is_shown_where_it_is_asked_for(
    server: ServerProcess, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    write_dataset(some_rows(), server.url(name), progress=True)
    assert f"writing {name}" in capfd.readouterr().err
    write_dataset(some_rows(), server.url(name), overwrite=True)
    assert capfd.readouterr().err == "", "this is no terminal"
