"""Which announced batches are read together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from chunks_in_memory import ChunksInMemory
from rows_in_memory import random_rows

from td_datapipes.cost import CostModel
from td_datapipes.store import ReadOptions, RowReader
from td_datapipes.window_reads import BatchRead, group_reads
from td_datapipes.wire.server import Server
from td_datapipes.wire.url import ServerURL

BATCH = 64
SMALL = random_rows(16_384, {"x": (torch.float32, (60,)), "y": (torch.int64, ())})
LONG = random_rows(512, {"x": (torch.uint8, (40_000,)), "y": (torch.int64, ())})


def reader_of(td: object, **options: object) -> RowReader:
    """Plans for the rows; it never dials."""
    manifest = ChunksInMemory(td, chunk_bytes=4 << 20).manifest  # type: ignore[arg-type]
    server = Server(ServerURL.parse("redis://nobody.invalid/0#memory"))
    return RowReader(server, manifest, manifest.schema.select(None), ReadOptions(**options), CostModel())  # type: ignore[arg-type]


def sizes(reader: RowReader, rows: np.ndarray, *, max_bytes: int = 1 << 30, soon: bool = False) -> list[int]:
    """Batches that each read is for; together they are all batches in order."""
    parts: Sequence[np.ndarray] = np.split(rows, range(BATCH, len(rows), BATCH))
    batches = [BatchRead(number, part, len(part) * reader.held_row_bytes) for number, part in enumerate(parts)]
    groups = group_reads(reader, batches, max_bytes, soon=soon)
    assert [batch.ordinal for group in groups for batch in group.batches] == list(range(len(batches)))
    assert all(group.num_rows == sum(len(batch.rows) for batch in group.batches) for group in groups)
    return [len(group.batches) for group in groups]


def test_small_batches_in_order_are_read_some_at_once() -> None:
    reader = reader_of(SMALL)
    some = (5 << 19) // (BATCH * reader.held_row_bytes)
    found = sizes(reader, np.arange(16_384))
    assert found == [some, 256 - some]


def test_where_they_are_waited_for_the_first_ones_come_soon() -> None:
    found = sizes(reader_of(SMALL), np.arange(16_384), soon=True)
    assert found[:3] == [1, 4, 16]


def test_long_batches_are_read_one_by_one_unless_that_halves_the_ranges() -> None:
    shuffled = np.random.default_rng(0).permutation(512)
    assert sizes(reader_of(LONG), np.arange(512)) == [1] * 8
    assert sizes(reader_of(LONG), shuffled[:192]) == [1] * 3
    assert sizes(reader_of(LONG), shuffled) == [8]


def test_scattered_batches_are_read_one_by_one_and_shuffled_neighbours_together() -> None:
    shuffled = np.random.default_rng(0).permutation(16_384)
    assert sizes(reader_of(SMALL), shuffled[: 4 * BATCH]) == [1] * 4
    assert sizes(reader_of(SMALL), shuffled) == [16_384 // BATCH]


def test_what_is_read_together_is_bounded() -> None:
    reader = reader_of(SMALL)
    limit = 100 * BATCH * reader.held_row_bytes
    assert sizes(reader, np.random.default_rng(0).permutation(16_384), max_bytes=limit) == [100] * 2 + [56]


@pytest.mark.parametrize("options", [{"atomic": True}, {"strategy": "pipelined"}])
def test_snapshots_and_forced_single_ranges_stay_apart(options: dict[str, object]) -> None:
    assert sizes(reader_of(SMALL, **options), np.arange(512)) == [1] * 8
