"""What of an interrupted write has arrived, counted on a real server."""

from __future__ import annotations

import pytest
import torch
from servers import ServerProcess

from td_datapipes.catalog import connect
from td_datapipes.manifest import SPARE_BYTES, ChunkLayout, Manifest
from td_datapipes.schema import Group, Node, Schema
from td_datapipes.staged import count_rows


def two_groups(name: str) -> Manifest:
    """Chunks of 4 rows of 16 bytes, and of 6 rows of 16 bytes."""
    groups = tuple(Group.pack([((key,), torch.int64, (2,))]) for key in "ab")
    layouts = tuple(
        ChunkLayout.for_stride(group.stride_bytes, 1 << 10, per) for group, per in zip(groups, (4, 6), strict=True)
    )
    schema = Schema(groups=groups, nodes=(Node(key=()),))
    return Manifest(
        name=name, id="x", kind="frozen", generation=1, rows=0, schema=schema, layouts=layouts, tags=(name,), created=""
    )


@pytest.mark.parametrize(
    ("arrived", "rows"), [((3, 2), 12), ((2, 2), 0), ((5, 3), 12), ((6, 4), 24), ((0, 9), 0), ((9, 9), 36)]
)
def test_rows_that_have_arrived_end_where_a_chunk_ends_in_every_group(
    arrived: tuple[int, int], rows: int, server: ServerProcess, unique_name: str
) -> None:
    manifest = two_groups(unique_name)
    for group, count in enumerate(arrived):
        for chunk in range(count):
            length = manifest.layouts[group].records_per_chunk * 16 + SPARE_BYTES
            server.execute("SET", manifest.chunk_key(group, chunk), bytes(length))
    opened = connect(server.url(unique_name))
    assert count_rows(opened, manifest, 1000) == rows
    opened.close()
