"""Commands to bytes, without a copy of what is long."""

from __future__ import annotations

from typing import Any

from redis._parsers import Encoder
from redis.connection import HiredisRespSerializer, PythonRespSerializer
from redis.utils import HIREDIS_AVAILABLE

__all__ = ["Packer"]

_CUTOFF_BYTES = 6000
"""What is longer is sent from where it lies, as redis-py has it."""


class Packer:
    """What redis-py's connections pack commands with.

    hiredis, which redis-py prefers where it is installed, is faster with short commands, but takes a memoryview only as
    two copies of it.
    """

    def __init__(self) -> None:
        encode = Encoder("utf-8", "strict", decode_responses=False).encode  # type: ignore[no-untyped-call]
        self._plain: Any = PythonRespSerializer(_CUTOFF_BYTES, encode)
        self._short: Any = HiredisRespSerializer() if HIREDIS_AVAILABLE else self._plain

    def pack(self, *args: Any) -> list[bytes | memoryview]:
        """A command's bytes, in parts."""
        packer = self._plain if any(isinstance(arg, memoryview) for arg in args) else self._short
        parts: list[bytes | memoryview] = packer.pack(*args)
        return parts
