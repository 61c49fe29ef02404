"""Commands as bytes: what redis-py itself would send, and nothing long copied."""

from __future__ import annotations

from typing import Any

import pytest
from redis._parsers import Encoder
from redis.connection import PythonRespSerializer

from td_datapipes.wire.packing import Packer


@pytest.mark.parametrize(
    "command",
    [
        ("GET", "key"),
        ("CONFIG GET", "save"),
        ("SET", b"k", memoryview(b"value"), "EX", 60),
        ("SET", b"k", memoryview(bytes(10_000))),
        ("EVALSHA", "sha", 1, b"k", memoryview(b""), b"", 2.5, b"x" * 7000),
    ],
)
def test_a_command_is_as_redis_py_has_it(command: tuple[Any, ...]) -> None:
    encode = Encoder("utf-8", "strict", False).encode
    expected = b"".join(bytes(part) for part in PythonRespSerializer(6000, encode).pack(*command))
    assert b"".join(bytes(part) for part in Packer().pack(*command)) == expected


def test_a_view_is_sent_from_where_it_lies() -> None:
    value = bytearray(10_000)
    parts = Packer().pack("SET", b"k", memoryview(value))
    (view,) = (part for part in parts if isinstance(part, memoryview))
    value[0] = 1
    assert view[0] == 1
