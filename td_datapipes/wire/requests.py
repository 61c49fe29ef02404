"""Slabs -> the bytes of their commands. Pure: nothing is sent here.

Building requests in Python costs as much as serving them costs the server, so nothing is formatted twice: the half of
a command that names the chunk and the half that gives the range come from two tables that fill as they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from operator import itemgetter

import numpy as np

from td_datapipes.errors import ConfigurationError
from td_datapipes.plan import ReadPlan
from td_datapipes.read_spec import ReadSpec, Rows, Segment
from td_datapipes.slabs import ColumnSlab, CoveringSlab, PeriodicSlab, Ranges, RunSlab, Slab
from td_datapipes.wire.range_text import MAX_END_BYTES, RangeText, range_commands
from td_datapipes.wire.scripts import load_script

__all__ = ["RequestBuilder", "bulk", "part_bytes"]

MAX_TABLE_ENTRIES = 32768
"""Bounds each table to a few MB; a full one starts over."""
_CHUNK_BITS = 40
_MULTI = b"*1\r\n$5\r\nMULTI\r\n"
_EXEC = b"*1\r\n$4\r\nEXEC\r\n"
EARLY_RANGES = 64
"""A quarter of a request for four times as many is sent first: the server works on it while the rest is made."""
_HALF_RANGES = 512
"""Of requests for so many or more half is sent first: a quarter would be done with before the rest comes."""
MAX_EARLY_RANGES = 512
"""Made while the server has nothing to do."""
_LONG_ROW_BYTES = 4096
_PACED_BYTES = 256 * 1024
"""At most, of the replies to a part of a request for rows so long. A server makes all replies to what it finds in its
socket before it sends the first: so they are still in its processor's cache, and their memory comes round sooner."""
_MIN_TEXT_RANGES = 48
"""From so many on, numpy's calls cost less than formatting each range."""
_MAX_TEXT_KEYS = 16
"""Numpy is called for each."""
_MAX_SCRIPT_BYTES = 1 << 32
"""Of a string, where a script is told its ranges in 32 bits."""


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


def _range_tail(start: int, length: int) -> bytes:
    first, last = b"%d" % start, b"%d" % (start + length - 1)
    return b"$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(first), first, len(last), last)


class _SegmentTails:
    """The ranges of one segment by the row's number within its chunk.

    A list where there are few enough rows a chunk: looking 256 of them up in random order misses the processor's
    caches half as often as in a dictionary. It fills as it is used.
    """

    def __init__(self, start: int, length: int, stride_bytes: int, records_per_chunk: int) -> None:
        self._start, self._length, self._stride_bytes = start, length, stride_bytes
        self._listed: list[bytes | None] = [None] * (records_per_chunk if records_per_chunk <= MAX_TABLE_ENTRIES else 0)
        self._table = _Table(self._make)

    def _make(self, within: int) -> bytes:
        return _range_tail(within * self._stride_bytes + self._start, self._length)

    def of(self, numbers: list[int]) -> Iterable[bytes]:
        """One range a number."""
        listed = self._listed
        if not listed or len(numbers) < 2:
            return map(self._table.__getitem__, numbers)
        found: Sequence[bytes] = itemgetter(*numbers)(listed)
        if None in found:
            for number in numbers:
                if listed[number] is None:
                    listed[number] = self._make(number)
            found = itemgetter(*numbers)(listed)
        return found


class RequestBuilder:
    """Makes the requests for one data set's chunks.

    Args:
        chunk_key: the server's key of a group's chunk.
    """

    def __init__(self, chunk_key: Callable[[int, int], bytes]) -> None:
        mask = (1 << _CHUNK_BITS) - 1
        self._keys = _Table(lambda code: bulk(chunk_key(code >> _CHUNK_BITS, code & mask)))
        self._heads = _Table(lambda code: b"*4\r\n$8\r\nGETRANGE\r\n" + self._keys[code])
        self._tails: dict[Segment, _SegmentTails] = {}
        self._range_text: tuple[ReadSpec, RangeText] | None = None

    def for_plan(self, plan: ReadPlan) -> Callable[[Slab], Iterable[bytes]]:
        """How slabs of that plan are asked for: the parts of a request, each made when it is taken."""
        return self._script if plan.strategy == "lua" else self._ranges

    def _ranges(self, slab: Slab) -> Iterable[bytes]:
        """One GETRANGE a range, pipelined."""
        paced = part_bytes(slab)
        if isinstance(slab, PeriodicSlab):
            return self._periodic(slab, paced)
        return self._paced(slab, paced) if paced else (self._singly(slab),)

    def _singly(self, slab: Slab) -> bytes:
        if isinstance(slab, RunSlab):
            return self._heads[slab.group << _CHUNK_BITS | slab.chunk] + _range_tail(slab.start, slab.length)
        return self._each(slab.ranges())

    def _paced(self, slab: Slab, paced: int) -> Iterator[bytes]:
        ranges = slab.ranges()
        cuts = np.searchsorted(np.cumsum(ranges.lengths), np.arange(paced, slab.stream_bytes, paced), side="right")
        for first, stop in pairwise(np.unique([0, *cuts, len(ranges.lengths)]).tolist()):
            yield self._each(ranges.part(first, stop))

    def _each(self, ranges: Ranges) -> bytes:
        coded = _codes(ranges)
        if len(coded) >= _MIN_TEXT_RANGES and int((ranges.starts + ranges.lengths).max()) <= MAX_END_BYTES:
            found, head_of = np.unique(coded, return_inverse=True)
            if len(found) <= _MAX_TEXT_KEYS:
                heads = [self._heads[code] for code in found.tolist()]
                return range_commands(heads, head_of, ranges.starts, ranges.lengths)
        codes = coded.tolist()
        spans = zip(ranges.starts.tolist(), ranges.lengths.tolist(), strict=True)
        # Covering ranges start anywhere, so their tails are made anew: they would only flood the table.
        return b"".join([self._heads[code] + _range_tail(*span) for code, span in zip(codes, spans, strict=True)])

    def _periodic(self, slab: PeriodicSlab, paced: int) -> Iterator[bytes]:
        spec, rows = slab.spec, slab.rows
        if paced:
            step = paced // spec.period_bytes
            yield self._rows(spec, rows[:step])
            parts, step = self._row_parts(spec, rows[step:]), 2 * len(spec.segments) * step
            for at in range(0, len(parts), step):
                yield b"".join(parts[at : at + step])
            return
        first = min(slab.num_ranges // (2 if slab.num_ranges >= _HALF_RANGES else 4), MAX_EARLY_RANGES)
        early = first // len(spec.segments) if first >= EARLY_RANGES else 0
        if early:
            yield self._rows(spec, rows[:early])
        yield self._rows(spec, rows[early:])

    def _rows(self, spec: ReadSpec, rows: Rows) -> bytes:
        if len(rows) * len(spec.segments) >= _MIN_TEXT_RANGES and not spec.spare_bytes and _fits_text(spec, rows):
            return self._text(spec, rows)
        return b"".join(self._row_parts(spec, rows))

    def _row_parts(self, spec: ReadSpec, rows: Rows) -> list[bytes]:
        """For every row and segment the two halves of a command."""
        parts: list[bytes] = [b""] * (2 * len(rows) * len(spec.segments))
        step = 2 * len(spec.segments)
        for j, segment in enumerate(spec.segments):
            layout = spec.layouts[segment.group]
            chunk, within = np.divmod(rows, layout.records_per_chunk)
            if layout.pieces > 1:
                chunk = chunk * layout.pieces + segment.piece
            if segment.group:
                chunk += segment.group << _CHUNK_BITS
            parts[2 * j :: step] = map(self._heads.__getitem__, chunk.tolist())
            # Records start at the same few places of every chunk: the number within the chunk names the range.
            parts[2 * j + 1 :: step] = self._segment_tails(spec, j).of(within.tolist())
        return parts

    def _text(self, spec: ReadSpec, rows: Rows) -> bytes:
        """Rows of one long chunk hardly ever come again before all others did: their ranges are made at once, anew."""
        if self._range_text is None or self._range_text[0] is not spec:
            segments, lengths = spec.segments, spec.wire_lengths.tolist()
            heads = [self._heads[segment.group << _CHUNK_BITS] for segment in segments]
            strides = [spec.layouts[segment.group].stride_bytes for segment in segments]
            starts = [segment.start_bytes for segment in segments]
            self._range_text = spec, RangeText(heads, strides, starts, lengths)
        return self._range_text[1].commands(rows)

    def _segment_tails(self, spec: ReadSpec, number: int) -> _SegmentTails:
        segment = spec.segments[number]
        tails = self._tails.get(segment)
        if tails is None:
            layout, length = spec.layouts[segment.group], int(spec.wire_lengths[number])
            tails = _SegmentTails(segment.start_bytes, length, layout.stride_bytes, layout.records_per_chunk)
            self._tails[segment] = tails
        return tails

    def _script(self, slab: Slab) -> Iterable[bytes]:
        """One call that returns all ranges as a table, their numbers packed in one argument; or a transaction."""
        if isinstance(slab, ColumnSlab):
            return (self._columns(slab),)
        if slab.prefix.startswith(b"+OK"):
            return (_MULTI, self._singly(slab), _EXEC)
        ranges = slab.ranges()
        if int((ranges.starts + ranges.lengths).max()) > _MAX_SCRIPT_BYTES:
            raise ConfigurationError(
                "strategy='lua' and atomic=True reach the first 4 GiB of a server string, and a field takes more; "
                "use another strategy, or convert the data to the layout records"
            )
        codes = _codes(ranges)
        keys, index = np.unique(codes, return_inverse=True)
        packed = np.empty(len(codes), dtype=np.dtype("<u4, <u4, <u4"))
        packed["f0"], packed["f1"], packed["f2"] = index, ranges.starts, ranges.starts + ranges.lengths - 1
        sha = load_script("read_ranges").sha.encode()
        head = b"*%d\r\n$7\r\nEVALSHA\r\n" % (4 + len(keys)) + bulk(sha) + bulk(b"%d" % len(keys))
        return (b"".join([head, *map(self._keys.__getitem__, keys.tolist()), bulk(packed.tobytes())]),)

    def _columns(self, slab: ColumnSlab) -> bytes:
        """One call that returns each segment's bytes of all rows."""
        segments, layouts = slab.spec.segments, slab.spec.layouts
        columns = [(layouts[s.group].stride_bytes, s.start_bytes, s.nbytes) for s in segments]
        sha = load_script("read_columns").sha.encode()
        head = b"*%d\r\n$7\r\nEVALSHA\r\n" % (5 + len(segments)) + bulk(sha) + bulk(b"%d" % len(segments))
        keys = [self._keys[segment.group << _CHUNK_BITS] for segment in segments]
        packed = slab.rows.astype("<u4").tobytes()
        return b"".join([head, *keys, bulk(packed), bulk(np.array(columns, dtype="<u4").tobytes())])


def _codes(ranges: Ranges) -> Rows:
    """Group and chunk of each range as one number."""
    return (ranges.groups << _CHUNK_BITS) | ranges.chunks


def part_bytes(slab: Slab) -> int:
    """Of the reply to each part of the request for a slab by ranges, where the next ones are held back; else 0."""
    if slab.stream_bytes < 2 * _PACED_BYTES:
        return 0
    if isinstance(slab, PeriodicSlab):
        if slab.spec.period_bytes < _LONG_ROW_BYTES:
            return 0
        num_parts = min(-(-slab.stream_bytes // _PACED_BYTES), len(slab.rows))
        return -(-len(slab.rows) // num_parts) * slab.spec.period_bytes
    if not isinstance(slab, CoveringSlab) or slab.stream_bytes < _LONG_ROW_BYTES * slab.num_ranges:
        return 0
    return -(-slab.stream_bytes // min(-(-slab.stream_bytes // _PACED_BYTES), slab.num_ranges))


def _fits_text(spec: ReadSpec, rows: Rows) -> bool:
    """Whether all rows of each segment lie in one chunk, so that only the numbers differ."""
    last = int(rows.max())
    layouts = [spec.layouts[segment.group] for segment in spec.segments]
    return all(
        layout.pieces == 1
        and last < layout.records_per_chunk
        and last * layout.stride_bytes + segment.stop_bytes <= MAX_END_BYTES
        for layout, segment in zip(layouts, spec.segments, strict=True)
    )
