"""What every layout tells the planner, and how wanted fields become segments and copies. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from td_datapipes.manifest import ChunkLayout
from td_datapipes.read_spec import Copy, Output, ReadSpec, Segment
from td_datapipes.schema import Field, Node, Schema

__all__ = ["FieldPart", "Layout", "build_read_spec", "nodes_of_parts"]


class Layout(Protocol):
    """Where the rows of a data set lie.

    Attributes:
        schema: fields, groups and nodes.
        rows: number of rows.
        chunk_layouts: how each group is cut into chunks.
        spare_bytes: how far a range may reach past its chunk's records.
        alignment_bytes: what segment starts are rounded down to, so that views of them are aligned.
    """

    @property
    def schema(self) -> Schema: ...
    @property
    def rows(self) -> int: ...
    @property
    def chunk_layouts(self) -> tuple[ChunkLayout, ...]: ...
    @property
    def spare_bytes(self) -> int: ...
    @property
    def alignment_bytes(self) -> int: ...

    def chunk_key(self, group: int, chunk: int) -> bytes:
        """The server's key of one chunk."""


@dataclass(frozen=True, kw_only=True)
class FieldPart:
    """The part of a field that is wanted of every row.

    Attributes:
        field: the whole field.
        shape: the shape of the part.
        byte_ranges: which bytes of the field's row make it up, in order.
    """

    field: Field
    shape: tuple[int, ...]
    byte_ranges: tuple[tuple[int, int], ...]

    @classmethod
    def whole(cls, field: Field) -> FieldPart:
        """All of a field; a field without bytes has no range."""
        ranges = ((0, field.nbytes),) if field.nbytes else ()
        return cls(field=field, shape=field.shape, byte_ranges=ranges)


def nodes_of_parts(nodes: Iterable[Node], parts: Sequence[FieldPart]) -> Iterator[Node]:
    """Nodes as they are where only parts of their fields are held.

    A batch dim that all fields below a node are cut along in the same way is as long as their parts; where they differ,
    it and those behind it are no batch dims of the node any more.
    """
    for node in nodes:
        below = [part.shape for part in parts if part.field.key[: len(node.key)] == node.key]
        kept = 0
        while kept < len(node.batch_shape) and len({shape[kept] for shape in below}) == 1:
            kept += 1
        shape = below[0][:kept] if below else node.batch_shape
        names = node.names if node.names is None else node.names[: 1 + len(shape)]
        yield Node(key=node.key, batch_shape=shape, names=names)


@dataclass(frozen=True, kw_only=True)
class _Interval:
    """Wanted bytes of a record within one piece, and where they go."""

    piece: int
    start: int
    stop: int
    output: int
    output_start: int


def build_read_spec(layout: Layout, parts: Sequence[FieldPart], max_gap_bytes: int) -> ReadSpec:
    """Segments and copies for the wanted parts of a row.

    Args:
        layout: where the rows lie.
        parts: what is wanted, in the schema's order.
        max_gap_bytes: wanted bytes of a record that are no further apart become one segment.
    """
    number = {part.field.key: index for index, part in enumerate(parts)}
    segments: list[Segment] = []
    copies: list[Copy] = []
    for group_number, group in enumerate(layout.schema.groups):
        chunks = layout.chunk_layouts[group_number]
        wanted = [parts[number[field.key]] for field in group.fields if field.key in number]
        intervals = sorted(_intervals(wanted, number, chunks), key=lambda i: (i.piece, i.start))
        for run in _runs(intervals, max_gap_bytes):
            start = run[0].start - run[0].start % layout.alignment_bytes
            segment = Segment(
                group=group_number, piece=run[0].piece, start_bytes=start, stop_bytes=max(i.stop for i in run)
            )
            copies += [_copy(interval, len(segments), start) for interval in run]
            segments.append(segment)
    return ReadSpec(
        segments=tuple(segments),
        copies=tuple(copies),
        outputs=tuple(_output(part) for part in parts),
        layouts=layout.chunk_layouts,
        spare_bytes=layout.spare_bytes,
    )


def _output(part: FieldPart) -> Output:
    nbytes = sum(stop - start for start, stop in part.byte_ranges)
    return Output(key=part.field.key, dtype=part.field.dtype, shape=part.shape, nbytes=nbytes)


def _copy(interval: _Interval, segment: int, segment_start: int) -> Copy:
    return Copy(
        output=interval.output,
        output_start=interval.output_start,
        segment=segment,
        segment_start=interval.start - segment_start,
        nbytes=interval.stop - interval.start,
    )


def _intervals(
    parts: Iterable[FieldPart], number: dict[tuple[str, ...], int], chunks: ChunkLayout
) -> Iterable[_Interval]:
    """The parts' byte ranges as intervals of the record, cut at the borders of its pieces."""
    for part in parts:
        output_start = 0
        for low, high in part.byte_ranges:
            at, end = part.field.offset_bytes + low, part.field.offset_bytes + high
            while at < end:
                piece = at // chunks.piece_bytes if chunks.pieces > 1 else 0
                stop = min(end, (piece + 1) * chunks.piece_bytes)
                base = piece * chunks.piece_bytes
                yield _Interval(
                    piece=piece,
                    start=at - base,
                    stop=stop - base,
                    output=number[part.field.key],
                    output_start=output_start,
                )
                output_start += stop - at
                at = stop


def _runs(intervals: Sequence[_Interval], max_gap_bytes: int) -> Iterable[list[_Interval]]:
    """Neighbours in one piece that are close enough to be read as one."""
    run: list[_Interval] = []
    for interval in intervals:
        if run and (interval.piece != run[-1].piece or interval.start - run[-1].stop > max_gap_bytes):
            yield run
            run = []
        run.append(interval)
    if run:
        yield run
