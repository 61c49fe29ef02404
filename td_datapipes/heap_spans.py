"""Where a row's values lie in their heap, as its record on the server says; and which rows lie where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from td_datapipes.manifest import Manifest
from td_datapipes.schema import Field
from td_datapipes.wire.server import Server

__all__ = ["read_span", "rows_within"]

_SPAN_WORDS = 2
_WORD_BYTES = 8


def read_span(server: Server, manifest: Manifest, field: Field, row: int) -> tuple[int, int] | None:
    """The bytes ``[start, stop)`` of a row's value in its heap; None where its record has no span.

    Args:
        server: where.
        manifest: of what is read.
        field: of variable length.
        row: its number.
    """
    group = next(number for number, group in enumerate(manifest.schema.groups) if field in group.fields)
    layout = manifest.layouts[group]
    first, record = divmod(row, layout.records_per_chunk)

    def command(client: Any) -> bytes:
        found = b""
        for word in range(_SPAN_WORDS):  # a record that is cut into pieces may be cut between them
            piece, at = divmod(field.offset_bytes + word * _WORD_BYTES, layout.piece_bytes)
            at += record * layout.stride_bytes
            found += client.getrange(manifest.chunk_key(group, first * layout.pieces + piece), at, at + _WORD_BYTES - 1)
        return found

    data = server.call(f"reading a record of {manifest.name!r}", command, repeats=True)
    if len(data) != _SPAN_WORDS * _WORD_BYTES or field.varying is None:
        return None
    start, length = np.frombuffer(data, "<i8").tolist()
    return int(start), int(start + max(length, 0) * field.varying.item_bytes)


def rows_within(server: Server, manifest: Manifest, field: Field, start: int, stop: int) -> tuple[int, int] | None:
    """The rows ``[first, last)`` of which values lie in the bytes ``[start, stop)`` of a heap, by a few spans.

    A row's values neither begin nor end before those of an earlier one.

    Returns:
        None where the records cannot tell.
    """
    spans: list[tuple[int, int] | None] = []

    def first_row(low: int, holds: Callable[[int, int], bool]) -> int:
        high = manifest.rows
        while low < high:
            middle = (low + high) // 2
            spans.append(span := read_span(server, manifest, field, middle))
            low, high = (low, middle) if span is None or holds(*span) else (middle + 1, high)
        return low

    first = first_row(0, lambda _, end: end > start)
    last = first_row(first, lambda begin, _: begin >= stop)
    return None if None in spans or first == last else (first, last)
