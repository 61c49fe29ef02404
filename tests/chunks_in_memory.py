"""A server's chunks in a dictionary, made and read byte by byte: what plans and reply streams are checked against."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from rows_in_memory import bytes_of
from tensordict import TensorDictBase

from td_datapipes.assemble import Place, make_sink
from td_datapipes.layouts import FieldPart, Layout, RecordsLayout, TensorDictStoreLayout, build_read_spec
from td_datapipes.layouts.tensordict_store import StoredLeaf, describe_store
from td_datapipes.manifest import SPARE_BYTES, ChunkLayout, Manifest
from td_datapipes.memory import MemoryPool
from td_datapipes.plan import ReadPlan
from td_datapipes.read_spec import ReadSpec
from td_datapipes.schema import Group, Key, Schema, schema_of
from td_datapipes.slabs import ColumnSlab, Slab

__all__ = ["ChunksInMemory", "StoreInMemory"]


class ChunksInMemory:
    """The chunks of `td` as the docstrings of `Group` and of the manifest describe them.

    Args:
        td: batch size [rows].
        chunk_bytes: longest stretch of records in a chunk.
        groups: keys of each group; by default all fields are one group.
        records_per_chunk: at most so many.
    """

    def __init__(
        self,
        td: TensorDictBase,
        *,
        chunk_bytes: int = 1 << 22,
        groups: Sequence[Iterable[Key]] | None = None,
        records_per_chunk: int = 1 << 14,
    ) -> None:
        schema = schema_of(td)
        if groups is not None:
            fields = schema.fields
            packed = [Group.pack((key, fields[key].dtype, fields[key].shape) for key in keys) for keys in groups]
            schema = Schema(groups=tuple(packed), nodes=schema.nodes)
        self.td = td
        self.rows = td.batch_size[0]
        layouts = [
            ChunkLayout.for_stride(group.stride_bytes, chunk_bytes, records_per_chunk) for group in schema.groups
        ]
        self.manifest = Manifest(
            name="memory",
            id="0123456789",
            kind="frozen",
            generation=1,
            rows=self.rows,
            schema=schema,
            layouts=tuple(layouts),
            tags=("0123456789.0",),
            created="2024-01-01T00:00:00+00:00",
        )
        self.layout: Layout = RecordsLayout(manifest=self.manifest)
        self.values: dict[tuple[int, int], bytes] = {}
        for number, group in enumerate(schema.groups):
            self._fill(number, group, layouts[number])

    def _fill(self, number: int, group: Group, layout: ChunkLayout) -> None:
        if group.stride_bytes == 0:
            return
        records = [self._record(row, group) for row in range(self.rows)]
        for start in range(0, self.rows, layout.records_per_chunk):
            held = b"".join(records[start : start + layout.records_per_chunk])
            chunk = start // layout.records_per_chunk * layout.pieces
            step = layout.piece_bytes if layout.pieces > 1 else len(held)
            for piece in range(layout.pieces):
                self.values[number, chunk + piece] = held[piece * step : (piece + 1) * step] + bytes(SPARE_BYTES)

    def _record(self, row: int, group: Group) -> bytes:
        record = bytearray(group.stride_bytes)
        for field in group.fields:
            value = bytes_of(self.td.get(field.key)[row])
            record[field.offset_bytes : field.offset_bytes + len(value)] = value
        return bytes(record)

    def spec(self, keys: Iterable[Key] | None = None, max_gap_bytes: int = 2000) -> ReadSpec:
        """What is read for those fields (all by default)."""
        fields = self.layout.schema.select(keys)
        return build_read_spec(self.layout, [FieldPart.whole(field) for field in fields], max_gap_bytes)

    def get_range(self, group: int, chunk: int, start: int, length: int) -> bytes:
        """As GETRANGE answers."""
        return self.values.get((group, chunk), b"")[start : start + length]

    def requests(self, slab: Slab) -> list[tuple[int, int, int, int]]:
        """Group, chunk, first byte and length of each range of a slab."""
        if isinstance(slab, ColumnSlab):
            return [request for column in self._columns(slab) for request in column]
        ranges = slab.ranges()
        columns = (ranges.groups, ranges.chunks, ranges.starts, ranges.lengths)
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def _columns(self, slab: ColumnSlab) -> list[list[tuple[int, int, int, int]]]:
        """The ranges of each segment, row by row."""
        return [
            [(s.group, 0, row * slab.spec.layouts[s.group].stride_bytes + s.start_bytes, s.nbytes) for row in slab.rows]
            for s in slab.spec.segments
        ]

    def values_of(self, slab: Slab) -> list[bytes]:
        """What a server that lacks nothing answers."""
        if isinstance(slab, ColumnSlab):
            return [b"".join(self.get_range(*request) for request in column) for column in self._columns(slab)]
        return [self.get_range(*request) for request in self.requests(slab)]

    def reply(self, plan: ReadPlan, slab: Slab) -> bytes:
        """The reply stream to a slab's request: RESP2, an array where Lua is asked."""
        values = self.values_of(slab)
        head = b"*%d\r\n" % len(values) if plan.strategy == "lua" else b""
        if slab.prefix.startswith(b"+OK\r\n"):  # a transaction says so, and that it has queued each command
            head = b"+OK\r\n" + b"+QUEUED\r\n" * len(values) + head
        return head + b"".join(b"$%d\r\n%b\r\n" % (len(value), value) for value in values)

    def read(
        self, plan: ReadPlan, spec: ReadSpec, *, strided: bool = False, scatters: bool = False
    ) -> dict[Key, torch.Tensor]:
        """Carry out a plan: every slab's reply is received where its sink wants it, or into staging that is reused.

        Args:
            plan: from `plan_read`.
            spec: what it reads of a row.
            strided: the kind of batch.
            scatters: receive piece by piece where the sink asks for it.
        """
        sink = make_sink(plan, spec, MemoryPool(), strided=strided, pin_memory=False)
        staging = np.empty(max((slab.stream_bytes for slab in plan.slabs), default=0), dtype=np.uint8)
        for slab in plan.slabs:
            reply = np.frombuffer(self.reply(plan, slab), dtype=np.uint8)
            assert len(reply) == slab.stream_bytes, "the plan expects another length than the server answers"
            own = sink.target(slab)
            target = staging[: slab.stream_bytes] if own is None else own
            places = sink.places(slab) if scatters and own is None else None
            target[:] = reply
            if places is None:
                sink.take(slab, target)
            else:
                _fill(places, target)
                sink.placed(slab, target)
            staging[:] = 0xA5
        sink.seal()
        return sink.tensors


class StoreInMemory(ChunksInMemory):
    """The leaves of `td` as ``TensorDictStore`` keeps them: one string each, its rows one behind the other."""

    def __init__(self, td: TensorDictBase, td_id: str = "store") -> None:
        leaves = [
            StoredLeaf(key=key, path=".".join(key), kind="tensor", dtype=value.dtype, shape=tuple(value.shape))
            for name, value in td.items(True, True)
            for key in [name if isinstance(name, tuple) else (name,)]
        ]
        description = describe_store(td_id, "tensordict", td_id, batch_size=tuple(td.batch_size), leaves=tuple(leaves))
        self.td = td
        self.rows = td.batch_size[0]
        self.layout = TensorDictStoreLayout(description=description)
        groups = enumerate(description.schema.groups)
        self.values = {(number, 0): bytes_of(td.get(group.fields[0].key)) for number, group in groups}


def _fill(places: Sequence[Place], stream: npt.NDArray[np.uint8]) -> None:
    """Move what has places there, and leave something else in the stream."""
    behind = 0
    for start, place in places:
        assert start >= behind, "places are in the order of the stream and do not overlap"
        behind = start + len(place)
        place[:] = stream[start:behind].data
        stream[start:behind] = 0x5A
