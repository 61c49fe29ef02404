"""Slabs -> the bytes of their commands. Pure: nothing is sent here.

Building requests in Python costs as much as serving them costs the server, so nothing is formatted twice: the half of
a command that names the chunk and the half that gives the range come from two tables that fill as they are used.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from td_datapipes.plan import ReadPlan, Rows, Slab
from td_datapipes.wire.scripts import load_script

__all__ = ["RequestBuilder", "bulk"]

MAX_TABLE_ENTRIES = 32768
"""Bounds each table to a few MB; a full one starts over."""
_CHUNK_BITS = 40
_START_BITS = 32


def bulk(data: bytes) -> bytes:
    """A RESP bulk string: how every argument of a command travels."""
    return b"$%d\r\n%b\r\n" % (len(data), data)


class _Table(dict[int, bytes]):
    """A dictionary that makes the entries it lacks, and starts over when it is full."""

    def __init__(self, make: Callable[[int], bytes]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, code: int) -> bytes:
        if len(self) >= MAX_TABLE_ENTRIES:
            self.clear()
        self[code] = made = self._make(code)
        return made


def _range_tail(code: int) -> bytes:
    start, length = code >> _START_BITS, code & ((1 << _START_BITS) - 1)
    return bulk(b"%d" % start) + bulk(b"%d" % (start + length - 1))


class RequestBuilder:
    """Makes the requests for one data set's chunks.

    Args:
        chunk_key: the server's key of a group's chunk.
    """

    def __init__(self, chunk_key: Callable[[int, int], bytes]) -> None:
        mask = (1 << _CHUNK_BITS) - 1
        self._keys = _Table(lambda code: bulk(chunk_key(code >> _CHUNK_BITS, code & mask)))
        self._heads = _Table(lambda code: b"*4\r\n$8\r\nGETRANGE\r\n" + self._keys[code])
        self._tails = _Table(_range_tail)

    def for_plan(self, plan: ReadPlan) -> Callable[[Slab], bytes]:
        """How slabs of that plan are asked for."""
        return self._script if plan.strategy == "lua" else self._ranges

    def _ranges(self, slab: Slab) -> bytes:
        """One GETRANGE a range, pipelined."""
        codes = (slab.groups << _CHUNK_BITS) | slab.chunks
        spans = ((slab.starts << _START_BITS) | slab.lengths).tolist()
        parts: list[bytes] = [b""] * (2 * len(spans))
        parts[::2] = map(self._heads.__getitem__, codes.tolist())
        # Records start at the same few places of every chunk; covering ranges start anywhere and would flood the table.
        parts[1::2] = map(self._tails.__getitem__ if slab.periodic else _range_tail, spans)
        return b"".join(parts)

    def _script(self, slab: Slab) -> bytes:
        """One call that returns all ranges as a table; their numbers packed in one argument."""
        codes: Rows = (slab.groups << _CHUNK_BITS) | slab.chunks
        keys, index = np.unique(codes, return_inverse=True)
        packed = np.empty(len(codes), dtype=np.dtype("<u2, <u4, <u4"))
        packed["f0"], packed["f1"], packed["f2"] = index, slab.starts, slab.starts + slab.lengths - 1
        sha = load_script("read_ranges").sha.encode()
        head = b"*%d\r\n$7\r\nEVALSHA\r\n" % (4 + len(keys)) + bulk(sha) + bulk(b"%d" % len(keys))
        return b"".join([head, *map(self._keys.__getitem__, keys.tolist()), bulk(packed.tobytes())])
