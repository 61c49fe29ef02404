"""Servers that send garbage, huge lengths, half replies or slow bytes: an error in time, never a wrong batch."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from rows_in_memory import assert_same_rows, random_rows
from servers import ServerProcess
from tampering_proxy import Tamper, TamperingProxy

from td_datapipes import RedisTDDataset, write_dataset
from td_datapipes.errors import TDDatapipesError

TD = random_rows(200, {"x": (torch.float32, (60,)), ("n", "y"): (torch.int64, ())}, seed=7)
SCATTERED = torch.randperm(200, generator=torch.Generator().manual_seed(1))[:60].tolist()
WAYS: list[dict[str, Any]] = [
    {"strategy": "covering"},
    {"strategy": "pipelined"},
    {"strategy": "lua"},
    {"strategy": "pipelined", "strided": True},
]
DEADLINE_SECONDS = 1.0


def instead(text: bytes) -> Callable[[TamperingProxy], Tamper]:
    return lambda _: lambda _: iter([text])


def behind_half(text: bytes) -> Callable[[TamperingProxy], Tamper]:
    return lambda _: lambda data: iter([data[: len(data) // 2], text])


def half_and_silence(proxy: TamperingProxy) -> Tamper:
    def tamper(data: bytes) -> Iterator[bytes]:
        yield data[: len(data) // 2]
        proxy.pause(60)

    return tamper


def slow_bytes(proxy: TamperingProxy) -> Tamper:
    def tamper(data: bytes) -> Iterator[bytes]:
        for at in range(len(data)):
            yield data[at : at + 1]
            proxy.pause(0.02)

    return tamper


def endless(proxy: TamperingProxy) -> Tamper:
    def tamper(data: bytes) -> Iterator[bytes]:
        del data
        while True:
            yield b"+" + b"x" * 65000

    return tamper


TAMPERS: dict[str, Callable[[TamperingProxy], Tamper]] = {
    "nothing": instead(b""),
    "garbage": instead(bytes(range(256)) * 40),
    "another protocol": instead(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"),
    "a huge string": instead(b"$4294967296\r\n" + b"x" * 1000),
    "a huger string": instead(b"$99999999999999999999\r\n"),
    "a huge array": instead(b"*2000000000\r\n" + b"$1\r\nx\r\n" * 100),
    "a negative length": instead(b"$-7\r\n"),
    "a shorter string": instead(b"$3\r\nabc\r\n" * 300),
    "null strings": instead(b"$-1\r\n" * 300),
    "statuses": instead(b"+OK\r\n" * 300),
    "errors": instead(b"-ERR no\r\n" * 300),
    "a foreign error": instead(b"-\xff\xfe\x00 \x1b[31m" + b"e" * 500 + b"\r\n"),
    "half and an error": behind_half(b"-ERR no\r\n"),
    "half and garbage": behind_half(b"\0" * 5000),
    "half and no more": behind_half(b""),
    "half and silence": half_and_silence,
    "slow bytes": slow_bytes,
    "a line without an end": endless,
}


@pytest.fixture
def proxy(server: ServerProcess) -> Iterator[TamperingProxy]:
    write_dataset(TD, server.url("frail"), chunk_bytes=256 * 20)
    with TamperingProxy(server.port) as between:
        yield between


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("name", TAMPERS)
def test_what_is_no_answer_is_an_error_in_time(proxy: TamperingProxy, name: str, way: dict[str, Any]) -> None:
    query = f"socket_timeout={DEADLINE_SECONDS}&retry_attempts=2&retry_base_seconds=0.01"
    with RedisTDDataset(f"redis://127.0.0.1:{proxy.port}/0?{query}#frail", **way) as dataset:
        assert_same_rows(dataset[SCATTERED], TD[SCATTERED])
        for index in (SCATTERED, slice(3, 90)):
            proxy.tamper = TAMPERS[name](proxy)
            began = time.monotonic()
            with pytest.raises(TDDatapipesError):
                dataset[index]
            # Looking into the cause of an error may ask once more.
            assert time.monotonic() - began < 4 * DEADLINE_SECONDS + 2
            proxy.tamper = None
            assert_same_rows(dataset[index], TD[index])


@pytest.mark.parametrize("name", ["a huge string", "a huge array", "a line without an end", "garbage"])
def test_no_more_memory_is_taken_than_was_asked_for(proxy: TamperingProxy, name: str) -> None:
    query = f"socket_timeout={DEADLINE_SECONDS}&retry_attempts=1"
    with RedisTDDataset(f"redis://127.0.0.1:{proxy.port}/0?{query}#frail") as dataset:
        dataset[SCATTERED]
        tracemalloc.start()
        try:
            proxy.tamper = TAMPERS[name](proxy)
            with pytest.raises(TDDatapipesError):
                dataset[SCATTERED]
            # Some of it is the proxy's own, which lives in this process.
            assert tracemalloc.get_traced_memory()[1] < 4 << 20
        finally:
            tracemalloc.stop()
            proxy.tamper = None


def test_an_opening_that_is_tampered_with_is_an_error_in_time(proxy: TamperingProxy) -> None:
    for name, make in TAMPERS.items():
        proxy.tamper = make(proxy)
        began = time.monotonic()
        with pytest.raises(TDDatapipesError):
            RedisTDDataset(f"redis://127.0.0.1:{proxy.port}/0?socket_timeout=0.3&retry_attempts=1#frail")
        assert time.monotonic() - began < 5, name
