"""Slabs -> the bytes of their commands. Pure: nothing is sent here.

Building requests in Python costs as much as serving them costs the server, so nothing is formatted twice: the half of
a command that names the chunk and the half that gives the range come from two tables that fill as they are used.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from td_datapipes.plan import PeriodicSlab, ReadPlan, Rows, Segment, Slab
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
        self._tails: dict[Segment, _Table] = {}

    def for_plan(self, plan: ReadPlan) -> Callable[[Slab], bytes]:
        """How slabs of that plan are asked for."""
        return self._script if plan.strategy == "lua" else self._ranges

    def _ranges(self, slab: Slab) -> bytes:
        """One GETRANGE a range, pipelined."""
        if isinstance(slab, PeriodicSlab):
            return self._periodic(slab)
        ranges = slab.ranges()
        codes = ((ranges.groups << _CHUNK_BITS) | ranges.chunks).tolist()
        spans = ((ranges.starts << _START_BITS) | ranges.lengths).tolist()
        # Covering ranges start anywhere, so their tails are made anew: they would only flood the table.
        return b"".join([self._heads[code] + _range_tail(span) for code, span in zip(codes, spans, strict=True)])

    def _periodic(self, slab: PeriodicSlab) -> bytes:
        spec = slab.spec
        parts: list[bytes] = [b""] * (2 * slab.num_ranges)
        step = 2 * len(spec.segments)
        for j, segment in enumerate(spec.segments):
            layout = spec.layouts[segment.group]
            chunk, within = np.divmod(slab.rows, layout.records_per_chunk)
            if layout.pieces > 1:
                chunk = chunk * layout.pieces + segment.piece
            if segment.group:
                chunk += segment.group << _CHUNK_BITS
            parts[2 * j :: step] = map(self._heads.__getitem__, chunk.tolist())
            # Records start at the same few places of every chunk: the number within the chunk names the range.
            tails = self._segment_tails(segment, layout.stride_bytes, int(spec.wire_lengths[j]))
            parts[2 * j + 1 :: step] = map(tails.__getitem__, within.tolist())
        return b"".join(parts)

    def _segment_tails(self, segment: Segment, stride_bytes: int, length: int) -> _Table:
        tails = self._tails.get(segment)
        if tails is None:
            start = segment.start_bytes
            tails = _Table(lambda within: _range_tail(((within * stride_bytes + start) << _START_BITS) | length))
            self._tails[segment] = tails
        return tails

    def _script(self, slab: Slab) -> bytes:
        """One call that returns all ranges as a table; their numbers packed in one argument."""
        ranges = slab.ranges()
        codes: Rows = (ranges.groups << _CHUNK_BITS) | ranges.chunks
        keys, index = np.unique(codes, return_inverse=True)
        packed = np.empty(len(codes), dtype=np.dtype("<u4, <u4, <u4"))
        packed["f0"], packed["f1"], packed["f2"] = index, ranges.starts, ranges.starts + ranges.lengths - 1
        sha = load_script("read_ranges").sha.encode()
        head = b"*%d\r\n$7\r\nEVALSHA\r\n" % (4 + len(keys)) + bulk(sha) + bulk(b"%d" % len(keys))
        return b"".join([head, *map(self._keys.__getitem__, keys.tolist()), bulk(packed.tobytes())])
