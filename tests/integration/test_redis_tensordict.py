"""`RedisTensorDict` on real servers: made, opened, changed by several at once, in workers and in the background."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest
import torch
from remote_tds import LAYOUTS, assert_same, remote, sample
from rows_in_memory import ALL_DTYPES, assert_same_tensor, random_rows, random_tensor
from servers import ServerProcess, wait_until
from tensordict import NonTensorStack, TensorDict
from tensordict.store import TensorDictStore
from torch.utils.data import DataLoader

from td_datapipes import RedisTDDataset, RedisTensorDict, write_dataset
from td_datapipes.catalog import connect, drop
from td_datapipes.errors import (
    DatasetChangedError,
    DatasetExistsError,
    DatasetNotFoundError,
    RemoteOperationError,
    SchemaError,
)

MIB = 1 << 20


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def settings(server: ServerProcess) -> Iterator[Callable[[str, str], None]]:
    """Changes settings of the server until the test ends."""
    before: dict[str, str] = {}

    def change(name: str, value: str) -> None:
        before.setdefault(name, server.client(decode_responses=True).config_get(name)[name])
        server.execute("CONFIG", "SET", name, value)

    yield change
    for name, value in before.items():
        server.execute("CONFIG", "SET", name, value)


def keys_of(server: ServerProcess) -> set[bytes]:
    return set(server.execute("KEYS", "*"))


# Its life on the server.


def test_it_is_made_empty_filled_and_found_again(server: ServerProcess, layout: str) -> None:
    made = RedisTensorDict(server.url("made"), batch_size=[4], layout=layout)  # type: ignore[arg-type]
    assert (made.batch_size, list(made.keys()), made.layout) == ((4,), [], layout)
    made["a"] = torch.arange(4)
    made["n", "b"] = torch.ones(4, 2)
    again = RedisTensorDict.from_redis(server.url("made"))
    assert_same(again.to_local(), TensorDict({"a": torch.arange(4), "n": {"b": torch.ones(4, 2)}}, [4]))
    assert again.layout == layout


def test_from_dict_takes_the_batch_size_asked_for(server: ServerProcess, layout: str) -> None:
    given = {"a": torch.zeros(3, 2), "n": {"b": torch.ones(3, 2, 4)}}
    made = RedisTensorDict.from_dict(given, server.url("d"), batch_size=[3], layout=layout)  # type: ignore[arg-type]
    assert_same(made.to_tensordict(), TensorDict(given, [3]))
    auto = RedisTensorDict.from_dict({"a": torch.zeros(3, 2)}, server.url("e"), auto_batch_size=True)
    assert auto.batch_size == TensorDict.from_dict({"a": torch.zeros(3, 2)}, auto_batch_size=True).batch_size


@pytest.mark.parametrize("other", LAYOUTS)
def test_a_name_that_is_taken_is_kept_unless_it_is_overwritten(server: ServerProcess, layout: str, other: str) -> None:
    first, second = sample(5, 1), sample(7, 2)
    remote(first, server, layout, "x")
    with pytest.raises(DatasetExistsError, match="overwrite=True"):
        RedisTensorDict.from_tensordict(second, server.url("x"), layout=other)  # type: ignore[arg-type]
    assert_same(RedisTensorDict.from_redis(server.url("x")).to_local(), first)
    remote(second, server, other, "x")
    again = RedisTensorDict.from_redis(server.url("x"))
    assert_same(again.to_local(), second)
    assert again.layout == other


def test_clear_redis_leaves_nothing(server: ServerProcess, layout: str) -> None:
    td = sample()
    td.set_non_tensor("s", "text")
    there = remote(td, server, layout)
    there["late"] = torch.zeros(12)
    there["a"] = torch.zeros(12, 9)
    del there["b"]
    there.clear_redis()
    assert keys_of(server) == set()
    with pytest.raises(DatasetNotFoundError):
        RedisTensorDict.from_redis(server.url("td"))


def test_what_is_replaced_is_removed_at_once_and_its_handles_go_on_with_the_new(server: ServerProcess) -> None:
    first, second = sample(5, 1), random_rows(5, {"a": (torch.float64, (4,))})
    old = remote(first, server, "records")
    size = len(keys_of(server))
    remote(second, server, "records")
    assert len(keys_of(server)) <= size + 1  # the superseded manifest is kept for an hour
    assert_same_tensor(old["a"], second["a"])
    old["a"] = second["a"] + 1
    assert_same_tensor(RedisTensorDict.from_redis(server.url("td"))["a"], second["a"] + 1)
    drop(connect(server.url("td")), "td")
    assert keys_of(server) == {b"td:names"} or keys_of(server) == set()


def test_a_frozen_data_set_is_not_opened_for_writing(server: ServerProcess) -> None:
    write_dataset(sample(), server.url("frozen"))
    there = RedisTensorDict.from_redis(server.url("frozen"))
    with pytest.raises(RemoteOperationError, match="is frozen"):
        there[0] = sample()[0]
    assert_same(there.to_local(), sample())
    with pytest.raises(DatasetNotFoundError):
        RedisTensorDict.from_redis(server.url("nothing"))


@pytest.mark.parametrize("where", ["root", "node"])
def test_it_is_a_data_set_that_loaders_read(server: ServerProcess, layout: str, where: str) -> None:
    td = sample()
    there = remote(td, server, layout)
    there[3] = td[4]
    td[3] = td[4].clone()
    if where == "node":
        there["n", "late"] = torch.arange(12)
        td["n", "late"] = torch.arange(12)
    with RedisTDDataset(server.url("td")) as dataset:
        assert_same(dataset[:], td)
        assert_same(dataset[[5, 1, 5]], td[[5, 1, 5]])


def test_credentials_are_in_no_text_and_no_pickle_of_a_handle(server: ServerProcess) -> None:
    server.execute("ACL", "SETUSER", "ada", "on", ">secret", "~*", "+@all")
    url = f"redis://ada:secret@{server.host}:{server.port}/0#mine"
    there = RedisTensorDict.from_tensordict(sample(), url)
    assert "secret" not in repr(there)
    with pytest.raises(RemoteOperationError) as caught:
        there.add_(1)
    assert "secret" not in str(caught.value)
    assert b"secret" not in pickle.dumps(there)
    server.execute("ACL", "DELUSER", "ada")


def test_a_handle_that_nobody_holds_drops_its_connections(server: ServerProcess, layout: str) -> None:
    gc.collect()
    gc.disable()
    try:
        before = server.execute("INFO", "clients")["connected_clients"]
        there = remote(sample(), server, layout)
        there[2] = sample()[3]
        there[2:4] = there[5:7]
        assert server.execute("INFO", "clients")["connected_clients"] > before
        del there
        wait_until(
            lambda: server.execute("INFO", "clients")["connected_clients"] <= before, "the connections to be closed"
        )
    finally:
        gc.enable()


# What every dtype and shape gives.


def test_every_dtype_comes_back_bit_by_bit(server: ServerProcess, layout: str) -> None:
    generator = torch.Generator().manual_seed(0)
    names = [str(dtype).removeprefix("torch.") for dtype in ALL_DTYPES]
    td = TensorDict(
        {name: random_tensor((6, 3), dtype, generator) for name, dtype in zip(names, ALL_DTYPES, strict=True)}, [6]
    )
    td["plain"] = torch.arange(6)
    td["turned"] = torch.arange(18).reshape(3, 6).t()
    td["conjugated"] = torch.randn(6, dtype=torch.complex64).conj()
    there = remote(td, server, layout)
    assert_same(there.to_local(), td)
    assert_same(there[[4, 0, 4]], td[[4, 0, 4]])
    there[1:4] = td[2:5]
    td[1:4] = td[2:5].clone()
    assert_same(there.to_local(), td)


def test_tensors_without_elements_keep_shape_and_dtype(server: ServerProcess, layout: str) -> None:
    td = random_rows(10, {"a": (torch.float64, (0,)), ("n", "b"): (torch.int8, (0, 3)), "c": (torch.float32, (2,))})
    there = remote(td, server, layout)
    assert_same(there.to_local(), td)
    assert_same(there[2:5], td[2:5])
    assert there.get_at("a", [1, 2]).shape == (2, 0)
    there["a"] = torch.ones(10, 0, dtype=torch.float64)
    there[3] = td[4]
    there["late"] = torch.zeros(10, 0, 7)
    assert RedisTensorDict.from_redis(server.url("td"))["late"].shape == (10, 0, 7)
    nothing = remote(random_rows(0, {"x": (torch.int16, (4,))}), server, layout, "no rows")
    assert nothing.to_local()["x"].shape == (0, 4)
    assert nothing[[]]["x"].shape == (0, 4)
    nothing["y"] = torch.zeros(0, 2)
    assert nothing["y"].shape == (0, 2)


def test_a_dot_in_a_key_is_kept_or_refused(server: ServerProcess) -> None:
    td = TensorDict({"a.b": torch.zeros(3), "a": {"b": torch.ones(3)}}, [3])
    there = remote(td, server, "records")
    assert_same(there.to_local(), td)
    there["c.d"] = torch.arange(3)
    assert torch.equal(there["c.d"], torch.arange(3))
    before = keys_of(server)
    with pytest.raises(SchemaError, match=r"a\.b"):
        remote(td, server, "tensordict_store", "dotted")
    assert keys_of(server) == before
    stored = remote(TensorDict({"a": {"b": torch.ones(3)}}, [3]), server, "tensordict_store", "plain")
    with pytest.raises(SchemaError, match=r"a\.b"):
        stored["a.b"] = torch.zeros(3)
    assert list(stored.keys(True, True)) == [("a", "b")]


def test_what_a_store_cannot_keep_is_refused_by_name(server: ServerProcess) -> None:
    there = remote(sample(), server, "tensordict_store")
    before = there.to_local()
    for action, what in [
        (lambda: setattr(there, "names", ["rows"]), "names of dims"),
        (lambda: there.set("empty", TensorDict({}, [12])), "without entries"),
        (lambda: there.set_non_tensor("o", object()), "JSON"),
    ]:
        with pytest.raises(SchemaError, match=what):
            action()
    with pytest.raises(SchemaError, match="names of dims"):
        remote(TensorDict({"a": torch.zeros(3)}, [3], names=["rows"]), server, "tensordict_store", "named")
    assert_same(RedisTensorDict.from_redis(server.url("td")).to_local(), before)


def test_values_json_cannot_hold_are_refused_before_anything_is_written(server: ServerProcess, layout: str) -> None:
    there = remote(TensorDict({"x": torch.arange(3), "s": "text"}, [3]), server, layout)
    before = keys_of(server)
    for action in (
        lambda: there.set_non_tensor("o", object()),
        lambda: there.set_at_("s", {1, 2}, 0),
        lambda: there.__setitem__(1, TensorDict({"x": torch.tensor(9)}).set_non_tensor("s", object())),
    ):
        with pytest.raises(SchemaError, match="JSON"):
            action()
    assert there["x"].tolist() == [0, 1, 2]
    assert keys_of(server) == before


# Costs that can be counted.


def counted(server: ServerProcess, action: Callable[[], object], what: str) -> int:
    """By how much an action raises one of the server's counters; INFO itself counts once."""
    section = "stats"
    before = server.execute("INFO", section)[what]
    between = server.execute("INFO", section)[what]
    action()
    after = server.execute("INFO", section)[what]
    return int(after - between - (between - before))


def test_one_round_trip_reads_or_writes_all_entries(server: ServerProcess, layout: str) -> None:
    td = sample()
    there = remote(td, server, layout)
    there["late"] = torch.arange(12)  # a group of its own
    rows, fresh = [7, 1, 4], there.to_local()[[0, 2, 3]]
    there[rows] = fresh
    there[rows]
    for action in (
        lambda: there[rows],
        lambda: there[2],
        lambda: there[2:9:2],
        lambda: there["a"],
        lambda: there.to_local(),
        lambda: dict(there.items(True, True)),
        lambda: there.__setitem__(rows, fresh),
        lambda: there.__setitem__(5, fresh[0]),
        lambda: there.set_at_("a", 0, [1, 3]),
    ):
        assert counted(server, action, "total_reads_processed") == 1


def test_shapes_and_dtypes_are_known_without_the_data(server: ServerProcess, layout: str) -> None:
    remote(
        TensorDict({"x": torch.zeros(64, 16384), "n": {"y": torch.zeros(64, dtype=torch.int8)}}, [64]), server, layout
    )

    def look() -> None:
        there = RedisTensorDict.from_redis(server.url("td"))
        assert there.batch_size == (64,)
        assert set(there.keys(True, True)) == {"x", ("n", "y")}
        assert there.structure["x"].shape == (64, 16384)
        assert there.structure["n", "y"].dtype == torch.int8
        assert there.entry_class("x") is torch.Tensor
        assert there.entry_class("n") is RedisTensorDict
        assert there.bytes() == 64 * 16384 * 4 + 64
        assert ("n", "y") in there.keys(True)
        assert "RedisTensorDict" in repr(there)
        there.close()

    assert counted(server, look, "total_net_output_bytes") < 16384


def test_rows_longer_than_a_string_may_be(server: ServerProcess, settings: Callable[[str, str], None]) -> None:
    settings("proto-max-bulk-len", "1mb")
    td = random_rows(3, {"long": (torch.int16, (MIB + 5,)), "short": (torch.int64, ())})
    there = remote(td, server, "records")
    assert_same(there.to_local(), td)
    assert_same(there[[2, 0]], td[[2, 0]])
    for each in (there, td):
        each[1] = each[2].clone()
        each["long"] = each["long"] * 0 + 3
        each.set_at_("long", 7, (slice(0, 2), slice(MIB - 9, MIB + 3)))
        each["late"] = torch.arange(3 * MIB, dtype=torch.uint8).reshape(3, MIB)
    assert_same(RedisTensorDict.from_redis(server.url("td")).to_local(), td)
    assert max(server.execute("STRLEN", key) for key in keys_of(server) if key.count(b":") == 3) <= MIB


def test_rows_of_many_bytes_are_kept_apart(server: ServerProcess) -> None:
    fields: dict[Any, Any] = {
        "a": (torch.float32, (3,)),
        ("n", "frame"): (torch.uint8, (2, 9000)),
        "b": (torch.int8, ()),
    }
    fields["other"] = (torch.int16, (8192,))
    td = random_rows(40, fields)
    there = remote(td, server, "records")
    chunks = [key for key in keys_of(server) if key.endswith(b":00000000")]
    lengths = sorted(server.execute("STRLEN", key) for key in chunks)
    assert lengths == [40 * 16 + 32, 40 * 16384 + 32, 40 * 18000 + 32]
    moved = counted(server, lambda: there["a"], "total_net_output_bytes")
    assert moved < 40 * 18000
    for index in (7, [5, 1, 5], slice(3, 30, 4), torch.arange(40) % 3 == 0):
        assert_same(there[index], td[index])
    fresh = random_rows(3, fields, seed=1)
    for each in (there, td):
        each[[9, 0, 39]] = fresh
        each["b"] = each["b"] + 1
        each["n", "frame"] = each["n", "frame"] // 2
        each.set_at_("other", 5, (slice(0, 3), slice(2, 9)))
    assert_same(RedisTensorDict.from_redis(server.url("td")).to_local(), td)
    there.clear_redis()
    assert keys_of(server) == set()


def test_more_bytes_than_one_call_takes(server: ServerProcess, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("td_datapipes.remote.tree.MAX_CALL_BYTES", 4096)
    td = sample(500)
    there = remote(td, server, layout)
    fresh = sample(500, 5)
    there[:] = fresh
    assert_same(there.to_local(), fresh)
    there["b"] = td["b"]
    order = torch.randperm(500)
    there[order] = td
    td[order] = td.clone()
    assert_same(there.to_local(), td)


# Others change it.


def test_another_handle_sees_new_entries_and_other_dtypes(server: ServerProcess, layout: str) -> None:
    mine, theirs = remote(sample(), server, layout), RedisTensorDict.from_redis(server.url("td"))
    mine["late"] = torch.arange(12)
    assert torch.equal(theirs["late"], torch.arange(12))
    x = torch.arange(80, dtype=torch.float64).reshape(10, 8)
    both = remote(TensorDict({"x": torch.zeros(10, 4)}, [10]), server, layout, "x"), None
    reader = RedisTensorDict.from_redis(server.url("x"))
    assert reader["x"].shape == (10, 4)
    both[0]["x"] = x
    assert_same_tensor(reader["x"], x)
    both[0]["x"] = x.float()[:, :4].contiguous()
    assert_same_tensor(reader[[3, 1]]["x"], x.float()[[3, 1], :4])
    both[0].rename_key_("x", "y")
    with pytest.raises((KeyError, DatasetChangedError)):
        reader["x"]
    assert_same_tensor(reader["y"], x.float()[:, :4])


def test_a_writer_that_knows_another_shape_does_not_write(server: ServerProcess, layout: str) -> None:
    mine = remote(TensorDict({"x": torch.zeros(10, 4)}, [10]), server, layout)
    theirs = RedisTensorDict.from_redis(server.url("td"))
    mine["x"] = torch.ones(10, 8, dtype=torch.float64)
    with pytest.raises(RuntimeError):
        theirs.set_at_("x", torch.full((2, 4), 5.0), [1, 2])
    assert_same_tensor(mine["x"], torch.ones(10, 8, dtype=torch.float64))
    theirs.set_at_("x", torch.full((2, 8), 5.0), [1, 2])  # cast to what it is now
    assert mine["x"][1].tolist() == [5.0] * 8


def test_keys_that_several_set_at_once_are_all_there(server: ServerProcess, layout: str) -> None:
    remote(sample(), server, layout)
    context = multiprocessing.get_context("fork")
    with context.Pool(8) as pool:
        pool.starmap(set_keys, [(server.url("td"), number) for number in range(8)], chunksize=1)
    found = RedisTensorDict.from_redis(server.url("td"))
    for number in range(8):
        for at in range(4):
            assert torch.equal(found[f"k{number}{at}"], torch.full((12,), number * 10 + at))


def set_keys(url: str, number: int) -> None:
    torch.set_num_threads(1)
    there = RedisTensorDict.from_redis(url)
    for at in range(4):
        there[f"k{number}{at}"] = torch.full((12,), number * 10 + at)


def create(url: str, layout: str, number: int) -> int:
    torch.set_num_threads(1)
    try:
        RedisTensorDict.from_tensordict(sample(20, number), url, layout=layout)  # type: ignore[arg-type]
    except DatasetExistsError:
        return 0
    return number


def test_of_several_that_make_it_at_once_one_does_and_the_others_leave_nothing(
    server: ServerProcess, layout: str
) -> None:
    with multiprocessing.get_context("fork").Pool(4) as pool:
        for turn in range(5):
            url = server.url(f"raced{turn}")
            made = [
                number for number in pool.starmap(create, [(url, layout, number) for number in (1, 2, 3, 4)]) if number
            ]
            assert len(made) == 1
            there = RedisTensorDict.from_redis(url)
            assert_same(there.to_local(), sample(20, made[0]))
            there.clear_redis()
    assert keys_of(server) - {b"td:names"} == set()


def set_values(url: str, rows: list[int]) -> None:
    torch.set_num_threads(1)
    there = RedisTensorDict.from_redis(url)
    for row in rows:
        there.set_at_("s", f"row {row}", row)


def test_values_of_other_rows_that_are_written_meanwhile_stay(server: ServerProcess, layout: str) -> None:
    td = TensorDict({"x": torch.arange(12), "s": NonTensorStack(*map(str, range(12)))}, [12])
    there = remote(td, server, layout)
    with multiprocessing.get_context("fork").Pool(3) as pool:
        pool.starmap(set_values, [(server.url("td"), list(range(at, 12, 3))) for at in range(3)])
    assert there["s"] == [f"row {row}" for row in range(12)]


def count_up(url: str, until: Event) -> None:
    """Writes one number to every entry of a row, row after row."""
    torch.set_num_threads(1)
    there = RedisTensorDict.from_redis(url)
    rows, number = there.batch_size[0], 0
    template = there.to_local()
    while not until.is_set():
        number += 1
        fresh = template.apply(lambda x, n=number: torch.full_like(x, n))
        if number % 2:
            there[number % rows] = fresh[0]
        else:
            there[torch.randperm(rows)] = fresh


@pytest.mark.parametrize(("layout", "atomic"), [("records", False), ("records", True), ("tensordict_store", True)])
@pytest.mark.parametrize("width", [3, 3000, 5000])
def test_a_reader_never_sees_half_a_record(server: ServerProcess, layout: str, atomic: bool, width: int) -> None:
    td = TensorDict({"a": torch.zeros(8, width), "n": {"b": torch.zeros(8, 2, dtype=torch.int64)}}, [8])
    there = remote(td, server, layout)
    there["late"] = torch.zeros(8, 5)  # in a group of its own
    context = multiprocessing.get_context("fork")
    until = context.Event()
    writers = [context.Process(target=count_up, args=(server.url("td"), until)) for _ in range(2)]
    reader = RedisTensorDict.from_redis(server.url("td"), atomic=atomic)
    for writer in writers:
        writer.start()
    try:
        seen: set[float] = set()
        for number in range(400):
            found = reader[[3, 0, 7]] if number % 2 else reader[2:7]
            numbers = torch.cat([found["a"].double(), found["n", "b"].double(), found["late"].double()], 1)
            assert (numbers == numbers[:, :1]).all(), numbers
            seen.update(numbers[:, 0].tolist())
            assert all(writer.is_alive() for writer in writers)
    finally:
        until.set()
        for writer in writers:
            writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert len(seen) > 3


# In the background, in workers, from other processes.


def test_futures_are_awaited_and_keep_their_order(server: ServerProcess, layout: str) -> None:
    td = sample()
    there = remote(td, server, layout)

    async def main() -> tuple[torch.Tensor, torch.Tensor, list[Any]]:
        first = await there.get_async("b")
        rows = there.get_async("a", [3, 1])
        writes = [there.set_async("b", torch.full((12,), number)) for number in range(5)]
        late = there.set_async(("n", "late"), torch.arange(12))
        at = there.set_async("b", 77, 4)
        return first, await rows, await asyncio.gather(*writes, late, at)

    first, rows, done = asyncio.run(main())
    assert_same_tensor(first, td["b"])
    assert_same_tensor(rows, td["a"][[3, 1]])
    assert done == [None] * 7
    assert there["b"].tolist() == [4] * 4 + [77] + [4] * 7
    assert torch.equal(there["n", "late"], torch.arange(12))
    assert_same_tensor(there["n"].get_async("x").result(timeout_seconds=30), td["n", "x"])
    assert there.get_async("nothing").result() is None
    with pytest.raises(KeyError):
        there.set_async("nothing", 1, 0).result()
    there.close()
    assert_same_tensor(there.get_async("a").result(), td["a"])
    there.close()


def as_they_are(batch: Any) -> Any:
    return batch


@pytest.mark.parametrize(("workers", "start"), [(0, None), (2, "fork"), (1, "spawn")])
def test_a_loader_reads_it(redis_server: ServerProcess, layout: str, workers: int, start: str | None) -> None:
    redis_server.flush()
    td, server = sample(40), redis_server
    there = remote(td, server, layout)
    assert_same(there[:3], td[:3])  # its connection is open before the fork
    loader = DataLoader(there, 4, num_workers=workers, multiprocessing_context=start, collate_fn=as_they_are)
    assert_same(torch.cat(list(loader)), td)
    assert_same(there[[5, 2]], td[[5, 2]])


def write_in_child(there: Any, row: int) -> None:
    torch.set_num_threads(1)
    there[row] = TensorDict({"b": torch.tensor(row)}, [])
    there["n"].set_at_("x", 1, row)


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_children_write_through_the_handle_they_were_given(
    valkey_server: ServerProcess, layout: str, start: str
) -> None:
    valkey_server.flush()
    there = remote(sample(), valkey_server, layout)
    there[0] = there[1]
    there.get_async("b").result()
    context = multiprocessing.get_context(start)
    children = [context.Process(target=write_in_child, args=(there, row)) for row in (3, 5)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0]
    assert there["b"][[3, 5]].tolist() == [3, 5]
    assert there["n", "x"][[3, 5]].float().sum() == 8
    assert there.get_async("b").result()[5] == 5


def test_another_program_finds_it(server: ServerProcess, layout: str) -> None:
    remote(sample(), server, layout)
    program = (
        "import sys, torch; from td_datapipes import RedisTensorDict\n"
        "there = RedisTensorDict.from_redis(sys.argv[1])\n"
        "there['sum'] = there['b'] * 0 + 3\n"
        "print(len(there), sorted(map(str, there.keys())))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, server.url("td")],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.stdout.strip() == "12 ['a', 'b', 'n', 'sum']"
    assert RedisTensorDict.from_redis(server.url("td"))["sum"].tolist() == [3] * 12


def test_upstreams_store_and_this_one_write_to_the_same(server: ServerProcess) -> None:
    td = TensorDict({"x": torch.zeros(8, 3), "n": {"y": torch.arange(8)}}, [8])
    theirs = TensorDictStore.from_tensordict(td, host="127.0.0.1", port=server.port)
    ours = RedisTensorDict.from_redis(server.url(theirs._td_id))
    theirs[2:4] = TensorDict({"x": torch.ones(2, 3), "n": {"y": torch.tensor([7, 7])}}, [2])
    ours[[0, 5]] = TensorDict({"x": torch.full((2, 3), 2.0), "n": {"y": torch.tensor([9, 9])}}, [2])
    theirs["x"] = theirs["x"] + 1
    expected = torch.tensor([3.0, 1, 2, 2, 1, 3, 1, 1]).unsqueeze(1).expand(8, 3)
    for each in (theirs, ours):
        assert torch.equal(each["x"], expected)
        assert each["n", "y"].tolist() == [9, 1, 7, 7, 4, 9, 6, 7]
    theirs["x"] = torch.zeros(8, 2, dtype=torch.float64)
    assert_same_tensor(ours["x"], torch.zeros(8, 2, dtype=torch.float64))
    theirs.close()


def test_an_embedded_server_keeps_it_after_its_last_user(tmp_path: Path) -> None:
    td = sample()
    url = f"embedded://{tmp_path}#kept"
    there = RedisTensorDict.from_tensordict(td, url)
    there["late"] = torch.arange(12)
    there[3] = td[4]
    pid = there._tree.server.client().info("server")["process_id"]
    there.close()
    # It saves and ends once nobody holds it.
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"), "the embedded server to end", 60.0)
    td["late"] = torch.arange(12)
    td[3] = td[4].clone()
    td["late"][3] = 3
    again = RedisTensorDict.from_redis(url)
    assert_same(again.to_local(), td)
    again.close()
