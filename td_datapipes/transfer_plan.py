"""Which rank sends which part of a sharded tensor to which, from any mesh to any mesh. Pure: no process group, no I/O.

The shards of one side are the cells of a grid: nested ``Shard`` cuts each dim into intervals, and ranks that differ
only on replicated axes hold the same cell. So a receiver needs exactly one slice from each source cell that its own
shard overlaps, and there is never more than one message between two ranks. Who of a cell's holders sends follows from
the two sides alone: every rank computes the same plan without a word to the others.

Sources: the resharding of ``torch.distributed.checkpoint`` (overlaps of saved and wanted chunks,
``planner_helpers.create_read_items_for_chunk_list``); for the choice of senders, greedy list scheduling, longest first
(Graham 1969, "Bounds on multiprocessing timing anomalies").
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from heapq import heapreplace

from torch.distributed.device_mesh import DeviceMesh

from td_datapipes.errors import ConfigurationError
from td_datapipes.mesh import AxisPlacement, Box, MeshSpec, Placements, local_box, normalise_placements

__all__ = ["ShardSpec", "Slice", "TransferPlan", "plan_transfer"]


@dataclass(frozen=True, kw_only=True)
class ShardSpec:
    """How one side holds a tensor.

    Attributes:
        mesh: the ranks that hold it.
        placements: one ``Shard`` or ``Replicate`` for each axis of the mesh.
    """

    mesh: MeshSpec
    placements: Placements

    @classmethod
    def of(cls, mesh: DeviceMesh | MeshSpec, placements: Sequence[AxisPlacement]) -> ShardSpec:
        """From a DeviceMesh, as in ``ShardSpec.of(dtensor.device_mesh, dtensor.placements)``.

        Raises:
            ConfigurationError: not one placement an axis, or one that is neither Shard nor Replicate.
        """
        spec = MeshSpec.of(mesh)
        declared = normalise_placements(placements, ndim=None, mesh_shape=spec.shape, subject="the tensor")
        return cls(mesh=spec, placements=declared)

    def box(self, shape: Sequence[int], rank: int) -> Box:
        """What a rank of the mesh holds of a tensor of that global shape."""
        return local_box(shape, self.mesh.shape, self.placements, self.mesh.coordinate(rank))


@dataclass(frozen=True, kw_only=True)
class Slice:
    """One part of the tensor on its way from one rank to another.

    Attributes:
        peer: the rank at the other end; the rank itself for a local copy.
        global_box: where the part lies in the whole tensor.
        src_box: where it lies in the sender's local shard.
        dst_box: where it lies in the receiver's local shard.
    """

    peer: int
    global_box: Box
    src_box: Box
    dst_box: Box

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the part."""
        return tuple(stop - start for start, stop in self.global_box)

    @property
    def numel(self) -> int:
        """Elements in the part; at least 1."""
        return math.prod(self.shape)

    @property
    def src_index(self) -> tuple[slice, ...]:
        """``sender_local[part.src_index]`` is the part."""
        return tuple(slice(start, stop) for start, stop in self.src_box)

    @property
    def dst_index(self) -> tuple[slice, ...]:
        """``receiver_local[part.dst_index]`` is where it goes."""
        return tuple(slice(start, stop) for start, stop in self.dst_box)


@dataclass(frozen=True, kw_only=True)
class TransferPlan:
    """Every slice of one transfer; made by `plan_transfer`, looked up rank by rank.

    Each element of each receiver's shard is written exactly once: by the receiver itself if it holds the element as a
    source (`local_copies`), otherwise by one of the element's holders. Among the holders of one shard, the elements
    sent differ by no more than the largest slice of it. Nothing here depends on the number of elements: a rank's part
    costs about one step for each slice of it, and one for each receiver of a cell that several ranks could send.

    Attributes:
        shape: of the whole tensor.
        src: who holds it.
        dst: who is to hold it.
    """

    shape: tuple[int, ...]
    src: ShardSpec
    dst: ShardSpec

    def sends(self, rank: int) -> tuple[Slice, ...]:
        """What a rank sends, by ascending receiver, one slice a receiver; ``()`` for a rank that is no source."""
        if rank not in self._sends:
            self._sends[rank] = tuple(self._plan_sends(rank))
        return self._sends[rank]

    def recvs(self, rank: int) -> tuple[Slice, ...]:
        """What a rank receives, by ascending sender, one slice a sender; ``()`` for a rank that is no destination."""
        if rank not in self._recvs:
            self._recvs[rank] = tuple(sorted(self._plan_recvs(rank), key=lambda part: part.peer))
        return self._recvs[rank]

    def local_copies(self, rank: int) -> tuple[Slice, ...]:
        """What a rank keeps of its own source shard: one slice, or none."""
        cell, box = self._src_cells.held.get(rank), self._dst_cells.held.get(rank)
        part = _overlap(cell, box) if cell is not None and box is not None else None
        if cell is None or box is None or part is None:
            return ()
        return (_slice(rank, part, cell, box),)

    def bytes_between(self, itemsize: int) -> dict[tuple[int, int], int]:
        """Bytes on the wire for each (sender, receiver), in ascending order; local copies are not in it.

        Goes through the whole plan, so it costs one step for each slice of every rank.

        Args:
            itemsize: bytes an element.
        """
        traffic = {
            (sender, receiver): math.prod(stop - start for start, stop in part) * itemsize
            for cell in self._src_cells.holders
            for sender, receiver, part in self._assignments(cell)
        }
        return dict(sorted(traffic.items()))

    @cached_property
    def _src_cells(self) -> _Cells:
        return _Cells.of(self.shape, self.src)

    @cached_property
    def _dst_cells(self) -> _Cells:
        return _Cells.of(self.shape, self.dst)

    # What was asked for once is asked for again with every batch. A rank asks for its own part only.
    @cached_property
    def _sends(self) -> dict[int, tuple[Slice, ...]]:
        return {}

    @cached_property
    def _recvs(self) -> dict[int, tuple[Slice, ...]]:
        return {}

    @cached_property
    def _shared(self) -> dict[Box, dict[int, int]]:
        """For cells with several holders: receiver -> sender."""
        return {}

    def _plan_sends(self, rank: int) -> Iterator[Slice]:
        cell = self._src_cells.held.get(rank)
        if cell is None:
            return
        for sender, receiver, part in sorted(self._assignments(cell)):
            if sender == rank:
                yield _slice(receiver, part, cell, self._dst_cells.held[receiver])

    def _plan_recvs(self, rank: int) -> Iterator[Slice]:
        box = self._dst_cells.held.get(rank)
        if box is None:
            return
        for cell, part in self._src_cells.overlapping(box):
            if cell != self._src_cells.held.get(rank):
                yield _slice(self._sender(cell, rank), part, cell, box)

    def _sender(self, cell: Box, receiver: int) -> int:
        holders = self._src_cells.holders[cell]
        if len(holders) == 1:
            return holders[0]
        if cell not in self._shared:
            self._shared[cell] = {to: sender for sender, to, _ in self._assignments(cell)}
        return self._shared[cell][receiver]

    def _assignments(self, cell: Box) -> Iterator[tuple[int, int, Box]]:
        """(sender, receiver, part) for everyone who needs part of a cell: the least loaded holder sends next."""
        needed = [
            (-math.prod(stop - start for start, stop in part), receiver, part)
            for box, part in self._dst_cells.overlapping(cell)
            for receiver in self._dst_cells.holders[box]
            if self._src_cells.held.get(receiver) != cell
        ]
        # Longest first keeps the holders closest together; ties go to the lower rank on both sides.
        loads = [(0, holder) for holder in self._src_cells.holders[cell]]
        for minus_numel, receiver, part in sorted(needed):
            load, sender = loads[0]
            heapreplace(loads, (load - minus_numel, sender))
            yield sender, receiver, part


@dataclass(frozen=True, kw_only=True)
class _Cells:
    """The grid that one side's shards are. Empty shards are no cells.

    Attributes:
        held: the cell of each rank that holds something.
        holders: the ranks that hold each cell, ascending.
        edges: for each dim, the bounds of the intervals it is cut into, ascending.
    """

    held: dict[int, Box]
    holders: dict[Box, tuple[int, ...]]
    edges: tuple[tuple[tuple[int, int], ...], ...]

    @classmethod
    def of(cls, shape: tuple[int, ...], spec: ShardSpec) -> _Cells:
        boxes = (
            (rank, local_box(shape, spec.mesh.shape, spec.placements, coordinate))
            for rank, coordinate in spec.mesh.coordinates()
        )
        held = {rank: box for rank, box in boxes if all(start < stop for start, stop in box)}
        holders: dict[Box, list[int]] = {}
        for rank in sorted(held):
            holders.setdefault(held[rank], []).append(rank)
        return cls(
            held=held,
            holders={box: tuple(ranks) for box, ranks in holders.items()},
            edges=tuple(tuple(sorted({box[dim] for box in holders})) for dim in range(len(shape))),
        )

    def overlapping(self, box: Box) -> Iterator[tuple[Box, Box]]:
        """Every cell that shares elements with a box that is not empty, and the elements they share."""
        if not self.holders:
            return
        spans = [_between(edges, *bounds) for edges, bounds in zip(self.edges, box, strict=True)]
        for cell in itertools.product(*spans):
            yield cell, tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(cell, box, strict=True))


def _between(edges: Sequence[tuple[int, int]], start: int, stop: int) -> Sequence[tuple[int, int]]:
    """The intervals that reach into ``[start, stop)``."""
    first = bisect_right(edges, start, key=lambda edge: edge[1])
    return edges[first : bisect_left(edges, stop, key=lambda edge: edge[0])]


def _overlap(one: Box, other: Box) -> Box | None:
    part = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return part if all(start < stop for start, stop in part) else None


def _slice(peer: int, part: Box, src: Box, dst: Box) -> Slice:
    return Slice(peer=peer, global_box=part, src_box=_relative(part, src), dst_box=_relative(part, dst))


def _relative(part: Box, whole: Box) -> Box:
    return tuple((start - base, stop - base) for (start, stop), (base, _) in zip(part, whole, strict=True))


def plan_transfer(shape: Sequence[int], src: ShardSpec, dst: ShardSpec) -> TransferPlan:
    """The slices that turn shards of ``src`` into shards of ``dst``; the same object for the same arguments.

    Args:
        shape: of the whole tensor.
        src: the mesh and placements of those who hold it.
        dst: the mesh and placements of those who are to hold it. The two may share all, some or none of their ranks,
            which are numbered as in the default process group.

    Raises:
        ConfigurationError: a negative size, or placements that do not fit their mesh or the shape.
    """
    sizes = tuple(int(size) for size in shape)
    if any(size < 0 for size in sizes):
        raise ConfigurationError(f"the shape of a tensor has no negative sizes, got {sizes}")
    return _plan(sizes, _checked(src, len(sizes), "the source"), _checked(dst, len(sizes), "the destination"))


@lru_cache(maxsize=256)
def _plan(shape: tuple[int, ...], src: ShardSpec, dst: ShardSpec) -> TransferPlan:
    return TransferPlan(shape=shape, src=src, dst=dst)


def _checked(spec: ShardSpec, ndim: int, subject: str) -> ShardSpec:
    placements = normalise_placements(spec.placements, ndim=ndim, mesh_shape=spec.mesh.shape, subject=subject)
    return ShardSpec(mesh=spec.mesh, placements=placements)
