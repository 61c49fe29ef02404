"""What goes wrong on the way to a `RedisTensorDict` raises by name, and nothing is half-written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from remote_tds import LAYOUTS, assert_same, remote, sample
from rows_in_memory import random_rows
from servers import ServerProcess
from tensordict import NonTensorData, TensorDict
from tensordict.store import TensorDictStore

from td_datapipes import RedisTensorDict
from td_datapipes.errors import (
    DataLossError,
    DatasetChangedError,
    PickledValueError,
    ServerFullError,
    ServerTimeoutError,
    ServerUnavailableError,
    TDDatapipesError,
    ValueTooLargeError,
)

MIB = 1 << 20


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def keys_of(server: ServerProcess) -> set[bytes]:
    return set(server.execute("KEYS", "*"))


def strings_of(server: ServerProcess) -> dict[bytes, bytes]:
    return {key: server.execute("GET", key) for key in keys_of(server) if server.execute("TYPE", key) == b"string"}


def data_key(there: Any, key: tuple[str, ...]) -> bytes:
    """Where a field's first bytes are."""
    description = there._tree.description
    numbers = [number for number, group in enumerate(description.schema.groups) if key in [f.key for f in group.fields]]
    found: bytes = description.chunk_key(numbers[0], 0)
    return found


def every_way(there: Any) -> list[Callable[[], Any]]:
    """Reads and writes of rows, of an entry and of everything."""
    td = sample()
    return [
        lambda: there[[3, 1]],
        lambda: there["a"],
        lambda: there.to_local(),
        lambda: there.__setitem__(2, td[3]),
        lambda: there.__setitem__([2, 3], td[3:5]),
        lambda: there.set_at_("a", 0, 5),
        lambda: there.set_("a", td["a"]),
    ]


def test_a_server_that_is_gone_is_named_and_the_handle_works_once_it_is_back(layout: str) -> None:
    td = sample()
    with ServerProcess("redis") as server:
        there = remote(td, server, layout)
        assert_same(there[:2], td[:2])
        there[0] = td[0]
        server.kill()
        for action in [*every_way(there), lambda: there.set("late", torch.zeros(12)), lambda: there.refresh()]:
            with pytest.raises(ServerUnavailableError, match=str(server.port)):
                action()
        with pytest.raises(ServerUnavailableError):
            RedisTensorDict.from_redis(server.url("td"))
        server.restart()
        with pytest.raises(TDDatapipesError):  # it keeps nothing on disk
            there.to_local()
        again = remote(td, server, layout)
        again[0] = td[1]
        assert there["b"][0] == td["b"][1]


def test_a_server_that_does_not_answer_is_given_up_at_the_deadline(layout: str) -> None:
    td = sample()
    with ServerProcess("valkey") as server:
        remote(td, server, layout)
        there = RedisTensorDict.from_redis(server.url("td", socket_timeout="0.3"))
        assert_same(there[:2], td[:2])
        there[0] = td[0]
        server.pause()
        for action in every_way(there):
            with pytest.raises(ServerTimeoutError, match="socket_timeout"):
                action()
        server.resume()
        assert_same(there[:2], td[:2])


def test_connections_that_the_server_closes_are_dialled_anew(server: ServerProcess, layout: str) -> None:
    td = sample()
    there = remote(td, server, layout)
    for action in every_way(there):
        action()
        server.execute("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        action()
    server.execute("SCRIPT", "FLUSH")
    there[[1, 2]] = td[[1, 2]]
    assert_same(there[[1, 2]], td[[1, 2]])


@pytest.mark.parametrize("large", [False, True])
def test_a_key_of_another_type_is_named_and_nothing_is_half_written(
    server: ServerProcess, layout: str, large: bool
) -> None:
    td = random_rows(12, {"a": (torch.float32, (2000 if large else 3,)), "b": (torch.int64, ())})
    there = remote(td, server, layout)
    there["late"] = torch.zeros(12, 3)
    key = data_key(there, ("a",))
    server.execute("DEL", key)
    server.execute("RPUSH", key, "x")
    before = strings_of(server)
    for action in (
        lambda: there["a"],
        lambda: there[[3, 1]],
        lambda: there.__setitem__([4, 5, 6], there.structure[4:7].apply(lambda x: torch.ones(x.shape, dtype=x.dtype))),
        lambda: there.set_at_("a", 0, 5),
    ):
        with pytest.raises(TDDatapipesError, match="td"):
            action()
    assert strings_of(server) == before
    assert there["late"].shape == (12, 3)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("cut", [False, True])
def test_data_that_is_missing_or_short_is_an_error_and_does_not_come_back_as_zeros(
    server: ServerProcess, layout: str, large: bool, cut: bool
) -> None:
    td = random_rows(12, {"a": (torch.float32, (2000 if large else 3,)), "b": (torch.int64, ())})
    there = remote(td, server, layout)
    there["late"] = torch.zeros(12, 3)
    key = data_key(there, ("a",))
    if cut:
        server.execute("SET", key, b"short")
    else:
        server.execute("DEL", key)
    before = strings_of(server)
    with pytest.raises(DataLossError, match=r"'td'.*bytes expected"):
        there[[3, 1]]
    with pytest.raises((DataLossError, DatasetChangedError), match="evicted|deleted"):
        there[[3, 1]] = td[[4, 5]]
    with pytest.raises((DataLossError, DatasetChangedError), match="evicted|deleted"):
        there.set_at_("a", 0, 5)
    assert strings_of(server) == before
    assert there["late"].shape == (12, 3)


def test_a_full_server_is_named_and_what_was_there_stays(layout: str) -> None:
    with ServerProcess("redis", config={"maxmemory": "5mb"}) as server:
        td = random_rows(100, {"a": (torch.uint8, (1000,)), "b": (torch.int64, ())})
        there = remote(td, server, layout)
        there[:2] = td[:2]
        before = keys_of(server)
        with pytest.raises(ServerFullError, match="maxmemory"):
            remote(random_rows(100, {"a": (torch.uint8, (100_000,))}), server, layout, "big")
        with pytest.raises(ServerFullError, match="maxmemory"):
            there["late"] = torch.zeros(100, 100_000, dtype=torch.uint8)
        assert keys_of(server) == before
        server.execute("CONFIG", "SET", "maxmemory", "1mb")
        for action in (
            lambda: there.__setitem__([3, 1], td[[4, 5]]),
            lambda: there.__setitem__(slice(0, 90), td[10:100]),
            lambda: there.set("a", torch.zeros(100, 1000, dtype=torch.uint8)),
            lambda: there.set("late", torch.zeros(100)),
            lambda: there.set_non_tensor("s", "text"),
            lambda: there.update({"b": torch.zeros(100, dtype=torch.int64), "late": torch.zeros(100)}),
        ):
            with pytest.raises(ServerFullError, match="maxmemory"):
                action()
        assert keys_of(server) == before
        assert_same(RedisTensorDict.from_redis(server.url("td")).to_local(), td)
        server.execute("CONFIG", "SET", "maxmemory", "0")
        there["late"] = torch.ones(100)
        assert there["late"].sum() == 100


def test_a_field_longer_than_a_string_may_be(server: ServerProcess) -> None:
    client = server.client()
    client.config_set("proto-max-bulk-len", MIB)
    try:
        td = random_rows(2048, {"x": (torch.uint8, (1024,)), "y": (torch.int64, ())})
        with pytest.raises(ValueTooLargeError, match=r"'?x'?.*2097152 bytes.*proto-max-bulk-len"):
            remote(td, server, "tensordict_store")
        assert keys_of(server) == set()
        there = remote(td, server, "records")
        assert_same(there.to_local(), td)
        fresh = random_rows(2048, {"x": (torch.uint8, (1024,)), "y": (torch.int64, ())}, 1)
        there[:] = fresh
        there["x"] = td["x"]
        fresh["x"] = td["x"]
        assert_same(there.to_local(), fresh)
        stored = remote(td.select("y"), server, "tensordict_store", "small")
        before = keys_of(server)
        with pytest.raises(ValueTooLargeError, match=r"'?x'?.*2097152 bytes.*proto-max-bulk-len"):
            stored["x"] = td["x"]
        assert keys_of(server) == before
    finally:
        client.config_set("proto-max-bulk-len", 512 * MIB)


def test_what_others_pickled_is_read_only_by_those_who_trust_them(server: ServerProcess) -> None:
    theirs = TensorDictStore.from_tensordict(
        TensorDict({"x": torch.arange(3)}, [3]), host="127.0.0.1", port=server.port
    )
    theirs["o"] = NonTensorData({1, 2}, batch_size=[3])
    there = RedisTensorDict.from_redis(server.url(theirs._td_id))
    assert there["x"].tolist() == [0, 1, 2]
    with pytest.raises(PickledValueError, match="allow_pickle=True"):
        there["o"]
    with pytest.raises(PickledValueError, match="allow_pickle=True"):
        there.to_local()
    trusting = RedisTensorDict.from_redis(server.url(theirs._td_id), allow_pickle=True)
    assert trusting["o"] == {1, 2}
    theirs.close()


def test_a_change_that_fails_leaves_no_key_behind(server: ServerProcess, layout: str) -> None:
    td = sample()
    there = remote(td, server, layout)
    before = keys_of(server)
    for action in (
        lambda: there.set("m", torch.empty(12, 3, device="meta")),
        lambda: there.set("s", torch.zeros(12, 3).to_sparse()),
        lambda: there.update({"good": torch.zeros(12), "s": torch.zeros(12, 3).to_sparse()}),
    ):
        with pytest.raises((TDDatapipesError, RuntimeError)):
            action()
    assert keys_of(server) == before
    assert_same(there.to_local(), td)
