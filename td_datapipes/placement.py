"""Placements of a batch over a mesh -> which rows, and which bytes of a row, a rank owns. Pure: no I/O.

Dim 0 of a batch counts its rows; dims from 1 are the row's own. A ``Shard(0)`` therefore says which rows a rank reads,
any other ``Shard`` which bytes of each row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from td_datapipes.errors import ConfigurationError
from td_datapipes.layouts import FieldPart
from td_datapipes.mesh import AxisPlacement, Box, MeshSpec, Placements, local_box, normalise_placements
from td_datapipes.schema import Field, Key, format_key, normalise_key

__all__ = ["FieldShare", "Placement", "RankPlacement", "byte_ranges"]


def byte_ranges(row_shape: Sequence[int], itemsize: int, box: Box) -> tuple[tuple[int, int], ...]:
    """The ``(start, stop)`` bytes of a contiguous row that a box of it takes up: ascending, adjacent ones merged.

    A shard of the leading dim is one range; a shard of a later dim is one range for each index of the dims before it.

    Args:
        row_shape: of the whole row.
        itemsize: bytes an element.
        box: bounds within the row, one a dim.

    Raises:
        ConfigurationError: the box does not lie in the row.
    """
    if len(box) != len(row_shape) or any(
        not 0 <= start <= stop <= size for (start, stop), size in zip(box, row_shape, strict=False)
    ):
        raise ConfigurationError(f"the box {box} does not lie in a row of shape {tuple(row_shape)}")
    if any(start == stop for start, stop in box):
        return ()
    whole = len(row_shape)
    while whole and box[whole - 1] == (0, row_shape[whole - 1]):
        whole -= 1
    if not whole:
        return ((0, math.prod(row_shape) * itemsize),)
    # Dims from `whole` on are taken entirely, so the last cut dim gives runs with gaps between them.
    cut = whole - 1
    step = math.prod(row_shape[whole:]) * itemsize
    starts = np.arange(1, dtype=np.int64)
    for (start, stop), size in zip(box[:cut], row_shape[:cut], strict=True):
        starts = (starts[:, None] * size + np.arange(start, stop)).ravel()
    low, high = box[cut]
    first = (starts * row_shape[cut] + low) * step
    return tuple(zip(first.tolist(), (first + (high - low) * step).tolist(), strict=True))


@dataclass(frozen=True, kw_only=True)
class FieldShare:
    """What one rank holds of a field.

    Attributes:
        field: the whole field.
        placements: one an axis, dims counted from the front, dim 0 the rows.
        row_axes: the axes of more than one rank that shard the rows, in mesh order.
        box: bounds within a row, one for each of the row's dims.
        shape: of this rank's part of a row.
        byte_ranges: which bytes of the field's row that part is; ``()`` where it is empty.
    """

    field: Field
    placements: Placements
    row_axes: tuple[int, ...]
    box: Box
    shape: tuple[int, ...]
    byte_ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class RankPlacement:
    """What one rank holds of a batch, whatever the batch's size.

    Attributes:
        mesh: the mesh.
        coordinate: the rank's place in it.
        fields: what it holds of each field, in the order they were given.
    """

    mesh: MeshSpec
    coordinate: tuple[int, ...]
    fields: tuple[FieldShare, ...]

    @property
    def parts(self) -> tuple[FieldPart, ...]:
        """What a layout is asked for: the bytes of each row that this rank keeps."""
        return tuple(FieldPart(field=s.field, shape=s.shape, byte_ranges=s.byte_ranges) for s in self.fields)

    @property
    def data_axes(self) -> tuple[int, ...]:
        """The mesh axes of more than one rank that share the rows, of all fields alike. Raises as `row_share`."""
        self.row_share(0)
        return self.fields[0].row_axes if self.fields else ()

    @property
    def data_rank(self) -> int:
        """Which part of a global batch's rows this rank has: the ``rank`` to give a sampler. Raises as `row_share`."""
        return _data_ranks(self.mesh, self.coordinate, self.data_axes)[0]

    @property
    def data_world_size(self) -> int:
        """In how many parts the rows are cut: the ``world_size`` to give a sampler. Raises as `row_share`."""
        return _data_ranks(self.mesh, self.coordinate, self.data_axes)[1]

    def row_shares(self, num_rows: int) -> dict[tuple[int, int], tuple[FieldShare, ...]]:
        """Which rows of a global batch of ``num_rows`` to read, and the fields to read of them.

        Fields that share rows over other axes may have another ``(start, stop)``; one read for each entry fetches
        nothing that is not kept.
        """
        shares: dict[tuple[int, int], list[FieldShare]] = {}
        for share in self.fields:
            shares.setdefault(self._rows(share.row_axes, num_rows), []).append(share)
        return {bounds: tuple(fields) for bounds, fields in shares.items()}

    def row_share(self, num_rows: int) -> tuple[int, int]:
        """The ``(start, stop)`` rows of a global batch of ``num_rows`` that this rank owns, of all fields alike.

        Whether fields agree depends on the placements alone, so either every rank of the mesh raises or none does.

        Raises:
            ConfigurationError: fields shard the rows over different axes; `row_shares` serves those.
        """
        by_axes: dict[tuple[int, ...], FieldShare] = {}
        for share in self.fields:
            by_axes.setdefault(share.row_axes, share)
        if len(by_axes) > 1:
            shown = "; ".join(f"{format_key(s.field.key)} has {s.placements}" for s in by_axes.values())
            raise ConfigurationError(
                f"a batch has one set of rows only if all fields shard dim 0 over the same axes of the mesh "
                f"{self.mesh}: {shown}. Give them the same Shard(0), or read them from two data sets"
            )
        return self._rows(next(iter(by_axes), ()), num_rows)

    def _rows(self, row_axes: tuple[int, ...], num_rows: int) -> tuple[int, int]:
        shards = tuple(Shard(0) if axis in row_axes else Replicate() for axis in range(self.mesh.ndim))
        return local_box((num_rows,), self.mesh.shape, shards, self.coordinate)[0]


@dataclass(frozen=True, init=False)
class Placement:
    """How a global batch lies over a mesh, seen from one rank. Pickles without a DeviceMesh: workers can be sent it.

    Args:
        mesh: a DeviceMesh or its description.
        placements: one tuple for all fields (one placement an axis; dim 0 is the batch's rows), or a mapping from a
            field's (nested) key, or the key of a node above it, to its tuple. The longest key that fits a field wins.
            Fields without an entry, or all of them if this is None, get ``Shard(0)`` on the data axes and
            ``Replicate()`` on the others.
        data_axes: the axis or axes, by name or number, that share the rows; the mesh's first if None. Given only
            where some field is left to that default.
        rank: whose part this is; None is this process's rank in the default process group.

    Raises:
        ConfigurationError: no such axis, not one placement an axis, a placement other than Shard and Replicate, a
            rank outside the mesh, or no rank given where no process group exists.

    Attributes:
        mesh: the mesh's description.
        rank: whose part this is.
        default: placements of fields without an entry.
        by_key: (key, placements) of those that have one.

    A sampler deals this rank its rows with ``rank=placement.data_rank, world_size=placement.data_world_size``.
    """

    mesh: MeshSpec
    rank: int
    default: Placements
    by_key: tuple[tuple[Key, Placements], ...]

    def __init__(
        self,
        mesh: DeviceMesh | MeshSpec,
        placements: Sequence[AxisPlacement] | Mapping[Any, Sequence[AxisPlacement]] | None = None,
        *,
        data_axes: str | int | Sequence[str | int] | None = None,
        rank: int | None = None,
    ) -> None:
        spec = MeshSpec.of(mesh)
        by_key: dict[Key, Placements] = {}
        if placements is None or isinstance(placements, Mapping):
            default = _default_placements(spec, data_axes)
            for name, declared in (placements or {}).items():
                key = normalise_key(name)
                by_key[key] = _declared(declared, spec, f"field {format_key(key)}")
        elif data_axes is not None:
            raise ConfigurationError(
                f"data_axes={data_axes!r} is for fields without placements, and placements={tuple(placements)} is for "
                f"all fields; give one of the two"
            )
        else:
            default = _declared(placements, spec, "the batch")
        rank = _current_rank(spec) if rank is None else rank
        spec.coordinate(rank)
        values = {
            "mesh": spec,
            "rank": rank,
            "default": default,
            "by_key": tuple(sorted(by_key.items(), key=lambda item: item[0])),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        # For those who talk to other ranks; no part of what it says, and left out of pickles.
        object.__setattr__(self, "_device_mesh", mesh if isinstance(mesh, DeviceMesh) else None)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_device_mesh": None}

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The DeviceMesh it was made from; None where that was a description, and in copies that were pickled."""
        found: DeviceMesh | None = self.__dict__["_device_mesh"]
        return found

    @property
    def data_axes(self) -> tuple[int, ...]:
        """The mesh axes of more than one rank that share the rows.

        Raises:
            ConfigurationError: that depends on the field; a data set opened with this placement knows its fields.
        """
        declared = [self.default, *(placements for _, placements in self.by_key)]
        if any(isinstance(p, Shard) and p.dim < 0 for placements in declared for p in placements):
            found = []
        else:
            found = list({_row_axes(placements, self.mesh) for placements in declared})
        if len(found) != 1:
            raise ConfigurationError(
                f"which axes of the mesh {self.mesh} share the rows depends on the field: {self.default} is the "
                f"default, {dict(self.by_key)} are given. Ask the data set: dataset.data_rank, dataset.data_world_size"
            )
        return found[0]

    @property
    def data_rank(self) -> int:
        """Which part of a global batch's rows this rank has. Raises as `data_axes`."""
        return _data_ranks(self.mesh, self.mesh.coordinate(self.rank), self.data_axes)[0]

    @property
    def data_world_size(self) -> int:
        """In how many parts the rows are cut. Raises as `data_axes`."""
        return _data_ranks(self.mesh, self.mesh.coordinate(self.rank), self.data_axes)[1]

    def placements_for(self, key: str | Sequence[Any], ndim: int) -> Placements:
        """The placements of a field of the batch, dims counted from the front.

        Args:
            key: the field's.
            ndim: its dims in a batch, the rows' included.

        Raises:
            ConfigurationError: a ``Shard`` of a dim it does not have.
        """
        key = normalise_key(key)
        fitting = [(name, declared) for name, declared in self.by_key if key[: len(name)] == name]
        declared = max(fitting, key=lambda item: len(item[0]))[1] if fitting else self.default
        return normalise_placements(declared, ndim=ndim, mesh_shape=self.mesh.shape, subject=f"field {format_key(key)}")

    def resolve(self, fields: Iterable[Field], *, known_keys: Iterable[Key] | None = None) -> RankPlacement:
        """What this rank holds of each field.

        Args:
            fields: those that are read.
            known_keys: all that the data set has, where ``fields`` are only some of them.

        Raises:
            ConfigurationError: placements for a key that no field has, a ``Shard`` of a dim a field does not have, or a
                field of variable length.
        """
        fields = tuple(fields)
        known = [field.key for field in fields] if known_keys is None else list(known_keys)
        for name, _ in self.by_key:
            if not any(key[: len(name)] == name for key in known):
                raise ConfigurationError(
                    f"placements name the field {format_key(name)}; the fields are {', '.join(map(format_key, known))}"
                )
        coordinate = self.mesh.coordinate(self.rank)
        shares = tuple(self._share(field, coordinate) for field in fields)
        return RankPlacement(mesh=self.mesh, coordinate=coordinate, fields=shares)

    def _share(self, field: Field, coordinate: tuple[int, ...]) -> FieldShare:
        if field.varying is not None:
            raise ConfigurationError(
                f"field {field} is of variable length, and a placement says which bytes of rows of one length a rank "
                f"keeps: leave it out with fields=, or read it without placement and deal the rows with a sampler's "
                f"rank= and world_size="
            )
        placements = self.placements_for(field.key, 1 + len(field.shape))
        row_axes = _row_axes(placements, self.mesh)
        # The rows' dim has any size here: which rows is asked for each batch.
        box = local_box((1, *field.shape), self.mesh.shape, placements, coordinate)[1:]
        return FieldShare(
            field=field,
            placements=placements,
            row_axes=row_axes,
            box=box,
            shape=tuple(stop - start for start, stop in box),
            byte_ranges=byte_ranges(field.shape, field.dtype.itemsize, box),
        )


def _row_axes(placements: Placements, mesh: MeshSpec) -> tuple[int, ...]:
    return tuple(
        axis
        for axis, placement in enumerate(placements)
        if isinstance(placement, Shard) and placement.dim == 0 and mesh.shape[axis] > 1
    )


def _data_ranks(mesh: MeshSpec, coordinate: Sequence[int], axes: Sequence[int]) -> tuple[int, int]:
    """(rank, world size) over the data axes, which cut the rows one after the other in the mesh's order."""
    rank, size = 0, 1
    for axis in axes:
        rank = rank * mesh.shape[axis] + coordinate[axis]
        size *= mesh.shape[axis]
    return rank, size


def _declared(placements: Sequence[AxisPlacement], mesh: MeshSpec, subject: str) -> Placements:
    return normalise_placements(placements, ndim=None, mesh_shape=mesh.shape, subject=subject)


def _default_placements(mesh: MeshSpec, data_axes: str | int | Sequence[str | int] | None) -> Placements:
    """``Shard(0)`` on the data axes, ``Replicate()`` on the others."""
    names = (0,) if data_axes is None else (data_axes,) if isinstance(data_axes, str | int) else data_axes
    axes = {mesh.axis(name) for name in names}
    return tuple(Shard(0) if axis in axes else Replicate() for axis in range(mesh.ndim))


def _current_rank(mesh: MeshSpec) -> int:
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigurationError(
            f"there is no process group that says which rank of the mesh {mesh} this process is; pass rank="
        )
    return dist.get_rank()
