"""Meshes of ranks, and the part of a tensor each rank holds. Pure: no process group, no I/O.

A mesh has *axes*, a tensor has *dims*. `Shard(dim)` on an axis cuts that dim over the axis's ranks as DTensor does
(``torch.distributed.tensor``): pieces of ``ceil(size / num_shards)``, the last ones short or empty. Axes that shard the
same dim cut one after the other, in the mesh's order.

Source: ``torch/distributed/tensor/_utils.py``, ``compute_local_shape_and_global_offset``, whose results `local_box`
reproduces, including where an empty shard lies.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement as AxisPlacement

from td_datapipes.errors import ConfigurationError

__all__ = [
    "AxisPlacement",
    "Box",
    "MeshSpec",
    "Placements",
    "contiguous_strides",
    "local_box",
    "normalise_placements",
    "shard_bounds",
]

Box = tuple[tuple[int, int], ...]
"""``(start, stop)`` for each dim; a 0-d tensor has the box ``()``."""

Placements = tuple[AxisPlacement, ...]
"""One ``Shard`` or ``Replicate`` for each mesh axis."""


@dataclass(frozen=True, kw_only=True)
class MeshSpec:
    """What a DeviceMesh says about ranks, without its process groups: hashable, and pickled in a few bytes.

    Attributes:
        shape: ranks along each axis.
        axis_names: a name for each axis, or None.
        ranks: the global ranks, each once, in row-major order.
    """

    shape: tuple[int, ...]
    axis_names: tuple[str, ...] | None = None
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.shape or math.prod(self.shape) != len(self.ranks) or not self.ranks:
            raise ConfigurationError(
                f"a mesh of shape {self.shape} has {math.prod(self.shape)} ranks on one axis or more, "
                f"got {len(self.ranks)} ranks"
            )
        if len(set(self.ranks)) != len(self.ranks) or min(self.ranks) < 0:
            raise ConfigurationError(f"a mesh holds each rank once, and none is negative; got {self.ranks}")
        names = self.axis_names
        if names is not None and (len(names) != self.ndim or len(set(names)) != self.ndim):
            raise ConfigurationError(
                f"a mesh of shape {self.shape} needs {self.ndim} different axis names, got {names}"
            )

    @classmethod
    def of(cls, mesh: DeviceMesh | MeshSpec) -> MeshSpec:
        """The description of a DeviceMesh. A submesh describes the slice that this process belongs to."""
        if isinstance(mesh, MeshSpec):
            return mesh
        if isinstance(mesh, DeviceMesh) and (known := _described.get(mesh)) is not None:
            return known
        if not isinstance(mesh, DeviceMesh):
            raise ConfigurationError(
                f"a mesh is a DeviceMesh or a MeshSpec, not {type(mesh).__name__}; see MeshSpec.from_ranks"
            )
        spec = _described[mesh] = cls.from_ranks(mesh.mesh.numpy(force=True), mesh.mesh_dim_names)
        return spec

    @classmethod
    def from_ranks(cls, ranks: npt.ArrayLike, axis_names: Sequence[str] | None = None) -> MeshSpec:
        """A mesh from its array of global ranks: ``from_ranks(np.arange(8).reshape(2, 4), ("dp", "tp"))``."""
        array = np.asarray(ranks)
        if array.dtype.kind not in "iu":
            raise ConfigurationError(f"a mesh is an array of integer ranks, got dtype {array.dtype}")
        names = None if axis_names is None else tuple(axis_names)
        return cls(shape=array.shape, axis_names=names, ranks=tuple(array.ravel().tolist()))

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Where a global rank sits: one index an axis.

        Raises:
            ConfigurationError: the rank is not in the mesh.
        """
        if rank not in self.ranks:
            shown = ", ".join(map(str, self.ranks[:16])) + (", ..." if len(self.ranks) > 16 else "")
            raise ConfigurationError(f"rank {rank} is not in the mesh {self}, which holds the ranks {shown}")
        return tuple(int(index) for index in np.unravel_index(self.ranks.index(rank), self.shape))

    def coordinates(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Every (global rank, coordinate), in row-major order."""
        return zip(self.ranks, itertools.product(*map(range, self.shape)), strict=True)

    def axis(self, axis: str | int) -> int:
        """The number of an axis given by name or by (possibly negative) number.

        Raises:
            ConfigurationError: there is no such axis.
        """
        if isinstance(axis, str):
            if axis in (self.axis_names or ()):
                return (self.axis_names or ()).index(axis)
        elif -self.ndim <= axis < self.ndim:
            return axis % self.ndim
        raise ConfigurationError(
            f"the mesh {self} has no axis {axis!r}; give one of its names, or 0 to {self.ndim - 1}"
        )

    def __str__(self) -> str:
        names = self.axis_names or tuple(str(axis) for axis in range(self.ndim))
        return "(" + ", ".join(f"{name}={size}" for name, size in zip(names, self.shape, strict=True)) + ")"


# A DeviceMesh works its ranks out anew each time, which takes longer than all that is made of them.
_described: WeakKeyDictionary[DeviceMesh, MeshSpec] = WeakKeyDictionary()


def shard_bounds(size: int, num_shards: int, index: int) -> tuple[int, int]:
    """Where shard ``index`` of a dim starts and stops: 5 over 4 shards is 2, 2, 1, 0 long.

    Args:
        size: of the dim, in elements.
        num_shards: ranks on the axis.
        index: which of them.

    Raises:
        ConfigurationError: a negative size, or an index outside ``[0, num_shards)``.

    Source: ``torch.chunk``, and DTensor's ``Shard.local_shard_size_and_offset``.
    """
    if size < 0 or not 0 <= index < num_shards:
        raise ConfigurationError(
            f"a shard is one of [0, num_shards) of a size >= 0, got size={size}, num_shards={num_shards}, index={index}"
        )
    step = -(-size // num_shards)
    start = min(index * step, size)
    return start, min(start + step, size)


@lru_cache(maxsize=4096)
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a contiguous tensor, in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def local_box(
    global_shape: Sequence[int],
    mesh_shape: Sequence[int],
    placements: Sequence[AxisPlacement],
    coordinate: Sequence[int],
) -> Box:
    """The part of a tensor that the rank at ``coordinate`` holds.

    A dim the rank holds nothing of has the bounds ``(size, size)``, which is where DTensor puts it.

    Args:
        global_shape: of the whole tensor.
        mesh_shape: ranks along each axis.
        placements: one an axis.
        coordinate: one index an axis.

    Raises:
        ConfigurationError: lengths that disagree, an index outside its axis, or a placement that cannot be.
    """
    placements = normalise_placements(placements, ndim=len(global_shape), mesh_shape=mesh_shape, subject="the tensor")
    if len(coordinate) != len(mesh_shape):
        raise ConfigurationError(f"a coordinate in a mesh of shape {tuple(mesh_shape)} is as long, got {coordinate}")
    bounds = [(0, size) for size in global_shape]
    for placement, num_shards, index in zip(placements, mesh_shape, coordinate, strict=True):
        if isinstance(placement, Shard):
            start, stop = bounds[placement.dim]
            low, high = shard_bounds(stop - start, num_shards, index)
            bounds[placement.dim] = start + low, start + high
    return tuple(
        (start, stop) if start < stop else (size, size)
        for (start, stop), size in zip(bounds, global_shape, strict=True)
    )


def normalise_placements(
    placements: Sequence[AxisPlacement], *, ndim: int | None, mesh_shape: Sequence[int], subject: str
) -> Placements:
    """Placements as a tuple, every ``Shard`` counting dims from the front.

    Args:
        placements: one an axis.
        ndim: dims of the tensor; None leaves dims as they are, for a tensor that is not known yet.
        mesh_shape: ranks along each axis.
        subject: what the placements are for, for messages: ``"field 'tokens'"``.

    Raises:
        ConfigurationError: not one placement an axis, one that is neither Shard nor Replicate, or a dim out of range.
    """
    if isinstance(placements, AxisPlacement):
        raise ConfigurationError(f"placements of {subject} are a tuple with one an axis, got {placements!r} alone")
    declared = tuple(placements)
    if len(declared) != len(mesh_shape):
        raise ConfigurationError(
            f"{subject} has {len(declared)} placements {declared}; a mesh of shape {tuple(mesh_shape)} requires "
            f"{len(mesh_shape)}, one for each axis"
        )
    return tuple(_normalise(placement, ndim, subject) for placement in declared)


def _normalise(placement: AxisPlacement, ndim: int | None, subject: str) -> AxisPlacement:
    # By exact type: _StridedShard derives from Shard in some versions of torch, and a subclass may cut otherwise.
    if type(placement) is Replicate:
        return placement
    if type(placement) is not Shard:
        raise ConfigurationError(
            f"{subject} has the placement {placement!r} ({type(placement).__name__}); only Shard(dim) and Replicate() "
            f"say which elements a rank holds. Redistribute to those first"
        )
    if ndim is None:
        return placement
    if not -ndim <= placement.dim < ndim:
        raise ConfigurationError(
            f"{subject} has {ndim} dims (its rows are dim 0 if it is a batch), so {placement!r} is out of range: "
            f"shard a dim in [{-ndim}, {ndim}), or give this one other placements"
        )
    return Shard(placement.dim % ndim)
