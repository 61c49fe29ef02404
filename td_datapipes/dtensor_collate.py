"""`DTensorCollate`: batches as TensorDicts of DTensors. The data never communicates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, cast, get_args

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase, is_tensor_collection
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.data import default_collate, get_worker_info

from td_datapipes.errors import ConfigurationError, SchemaError
from td_datapipes.held_batch import HeldBatch, Holding, Mode, decide_held
from td_datapipes.mesh import AxisPlacement, MeshSpec, contiguous_strides
from td_datapipes.placement import Placement
from td_datapipes.rank_agreement import (
    RankReport,
    describe_cursor,
    digest_contents,
    digest_tensor,
    ranks_of,
    require_agreement,
)
from td_datapipes.schema import Key, Node, Schema, format_key, leaves

__all__ = ["DTensorCollate", "copy_in_one"]

Check = Literal["first", "always", "never"]

CHECK_TIMEOUT_SECONDS = 60.0


class PlacedSource(Protocol):
    """A data set that may have a placement, as `RedisTDDataset` has."""

    @property
    def placement(self) -> Placement | None: ...
    @property
    def schema(self) -> Schema: ...
    @property
    def fields(self) -> tuple[Key, ...]: ...


class DTensorCollate:
    """Turns a batch into a TensorDict of DTensors on a mesh: a ``collate_fn``, or a function of one batch.

    What a rank's batch is of the global batch is decided once, when this is made, and never guessed from shapes:

    - *global*: every rank holds the whole batch and keeps its slice. So it is if the sampler deals for one rank only.
    - *local*: every rank holds its own rows, and they are declared to be its shard. So it is if the sampler deals for
      several ranks. Row dims that are sharded too are cut here; with a data set that has a placement they are cut
      already, on the server.

    The data never communicates, so every dtype works. The check compares what the ranks hold: fields, rows, where their
    samplers stand, and the contents of what has to be the same on several ranks.

    With ``num_workers=0`` pass it as ``collate_fn``. With worker processes or ``pin_memory=True``, which would have to
    handle DTensors, leave the loader's own collate and place in the main process:
    ``for batch in map(collate, loader)``.

    Non-tensor fields are kept as they are on every rank. Where ranks hold their own rows, values that differ from row
    to row become one list of this rank's values.

    Args:
        mesh: all its ranks call this for the same batches.
        placements: one tuple for all fields (one placement an axis; dim 0 is the batch's rows), or a mapping by
            (nested) field; see `Placement`. By default ``Shard(0)`` on the data axes, ``Replicate()`` on the others;
            with `dataset`, its own placement.
        data_axes: the axis or axes that share the rows, where placements leave that open; by default the mesh's first.
        mode: ``global`` or ``local``; ``auto`` asks `dataset` and `sampler`.
        dataset: where the batches come from, if it was opened with a placement.
        sampler: deals the batches: a batch sampler, a sampler or a loader with one. It says for how many ranks, and
            the check compares where it stands. Leave it out where another thread draws from it ahead of time.
        check: compare the ``first`` batch over the ranks, or ``always``, or ``never``. It costs two small messages for
            each mesh axis, and a digest of what has to be the same (one to three s a GB).
        check_timeout_seconds: how long the check waits for the other ranks.

    Raises:
        ConfigurationError: no such axis, a placement that cannot be, or a mode that cannot be told.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        placements: Sequence[AxisPlacement] | Mapping[Any, Sequence[AxisPlacement]] | None = None,
        *,
        data_axes: str | int | Sequence[str | int] | None = None,
        mode: Mode = "auto",
        dataset: PlacedSource | None = None,
        sampler: object | None = None,
        check: Check = "first",
        check_timeout_seconds: float = CHECK_TIMEOUT_SECONDS,
    ) -> None:
        if not isinstance(mesh, DeviceMesh):
            raise ConfigurationError(f"DTensors need a DeviceMesh, not {type(mesh).__name__}; see init_device_mesh")
        if check not in get_args(Check):
            raise ConfigurationError(f"check is one of {', '.join(get_args(Check))}, got {check!r}")
        if not check_timeout_seconds > 0:
            raise ConfigurationError(f"check_timeout_seconds must be positive, got {check_timeout_seconds}")
        placement = _placement_of(mesh, placements, data_axes, dataset)
        dealt = ranks_of(sampler)
        held = decide_held(mode, placed=dataset is not None, dealt=dealt)
        schema, fields = (None, None) if dataset is None else (dataset.schema, dataset.fields)
        self._mesh: DeviceMesh | None = mesh
        self._holding = Holding(placement, held, schema=schema, fields=fields, dealt=dealt)
        self._nodes = {} if schema is None else {node.key: node for node in schema.nodes}
        self._sampler = sampler
        self._check = check
        self._check_timeout_seconds = check_timeout_seconds
        self._checked = False

    @property
    def placement(self) -> Placement:
        """How batches lie over the mesh, for this rank."""
        return self._holding.placement

    @property
    def mode(self) -> Literal["global", "local"]:
        """What the loader yields on each rank: the global batch, or the rank's own rows."""
        return "global" if self._holding.held == "global" else "local"

    def __call__(self, batch: Any, *, global_rows: int | None = None) -> TensorDict:
        """The batch as DTensors of global shape.

        Args:
            batch: a TensorDict of batch size ``[rows, ...]``, or what torch's default collate makes one of. One of
                DTensors, as a `ShardReceiver` hands on, is passed on if it lies as it should.
            global_rows: rows of the global batch, in local mode where not every rank has as many (5 rows over 4 ranks
                are 2, 2, 1, 0). By default each has as many as this one.

        Returns:
            Batch size ``[global rows, ...]``, on the mesh's device.

        Raises:
            ConfigurationError: the ranks disagree, and which; or this rank's batch is not its part. In a check, the
                same on every rank.
            PeerTimeoutError: a rank did not come to the check in time.
            SchemaError: a field that cannot be placed.
        """
        mesh = self._require_mesh()
        if _is_placed(batch):
            return self._passed_on(mesh, batch)
        due = self._check == "always" or (self._check == "first" and not self._checked)
        try:
            collated = _collated(batch)
            held = self._holding.hold(collated, global_rows)
        except Exception as error:
            if due:  # The others wait for this rank: they are told.
                report = RankReport(rank=self.placement.rank, error=f"{type(error).__name__}: {error}")
                require_agreement(mesh, report, self._check_timeout_seconds)
            raise
        if due:
            require_agreement(mesh, self._report(mesh, held), self._check_timeout_seconds)
            self._checked = True
        return self._place(mesh, collated, held)

    def _passed_on(self, mesh: DeviceMesh, batch: TensorDictBase) -> TensorDict:
        """A batch of DTensors, which loader ranks have sent: they have agreed on it already."""
        for key, value in leaves(batch):
            if isinstance(value, DTensor):
                wanted = self.placement.placements_for(key, value.ndim)
                if value.device_mesh != mesh or tuple(value.placements) != wanted:
                    raise ConfigurationError(
                        f"field {format_key(key)} arrives with {value.placements} on the mesh "
                        f"{MeshSpec.of(value.device_mesh)}, and is to lie with {wanted} on {MeshSpec.of(mesh)}; give "
                        f"the ShardSender, the ShardReceiver and the DTensorCollate the same mesh and placements"
                    )
        return cast(TensorDict, batch)

    def _require_mesh(self) -> DeviceMesh:
        if self._mesh is None or get_worker_info() is not None:
            raise ConfigurationError(
                "DTensorCollate places batches in the process that made the mesh, not in a DataLoader worker, which "
                "has no process group: give the loader no collate_fn and write `for batch in map(collate, loader)`"
            )
        return self._mesh

    def _report(self, mesh: DeviceMesh, held: HeldBatch) -> RankReport:
        alike = [self._holding.alike_along(held, axis) if mesh.size(axis) > 1 else [] for axis in range(mesh.ndim)]
        digests = {key: digest_tensor(held.leaves[key]) for key in {key for keys in alike for key in keys}}
        return RankReport(
            rank=self.placement.rank,
            fields=held.describe_fields(),
            num_rows=held.num_rows,
            held_rows=held.held_rows,
            cursor="" if self._sampler is None else describe_cursor(self._sampler),
            contents=tuple(digest_contents(digests, keys) for keys in alike),
        )

    def _place(self, mesh: DeviceMesh, batch: TensorDictBase, held: HeldBatch) -> TensorDict:
        shards = _shards_on(mesh.device_type, held, in_one=self.mode == "local")
        placed = {}
        for key, shard in shards.items():
            shape = held.global_shape(key)
            placed[key] = DTensor.from_local(
                shard,
                mesh,
                held.shares[key].placements,
                run_check=False,
                shape=torch.Size(shape),
                stride=contiguous_strides(shape),
            )
        return self._tree(batch, (), placed, held.num_rows)

    def _tree(self, node: TensorDictBase, key: Key, placed: Mapping[Key, DTensor], num_rows: int) -> TensorDict:
        """The batch's tree with DTensors for leaves."""
        known: Node | None = self._nodes.get(key)
        batch_shape = tuple(node.batch_size[1:]) if known is None else known.batch_shape
        names = (node.names if any(node.names) else None) if known is None else known.names
        contents: dict[str, Any] = {}
        for name in node.keys():  # noqa: SIM118 - a TensorDict iterates over rows, not over keys
            value = node.get(name)
            if isinstance(value, NonTensorData | NonTensorStack):
                contents[name] = self._non_tensor(value, (num_rows, *batch_shape))
            elif is_tensor_collection(value):
                contents[name] = self._tree(value, (*key, name), placed, num_rows)
            else:
                contents[name] = placed[(*key, name)]
        return TensorDict(contents, batch_size=(num_rows, *batch_shape), names=list(names) if names else None)  # type: ignore[arg-type]

    def _non_tensor(self, value: NonTensorData | NonTensorStack, batch_shape: tuple[int, ...]) -> Any:
        if isinstance(value, NonTensorData):
            return NonTensorData(value.data, batch_size=batch_shape)
        if self.mode == "global":
            return value
        return NonTensorData(list(value.tolist()), batch_size=batch_shape)

    def __getstate__(self) -> dict[str, Any]:
        # A spawned worker is sent its loader's collate_fn; what it gets says where batches are placed instead.
        return {**self.__dict__, "_mesh": None, "_sampler": None}


def _is_placed(batch: Any) -> bool:
    """Whether a batch has DTensors among its leaves."""
    return isinstance(batch, TensorDictBase) and any(isinstance(value, DTensor) for _, value in leaves(batch))


def _placement_of(
    mesh: DeviceMesh,
    placements: Sequence[AxisPlacement] | Mapping[Any, Sequence[AxisPlacement]] | None,
    data_axes: str | int | Sequence[str | int] | None,
    dataset: PlacedSource | None,
) -> Placement:
    """The placement to use; that of the data set where it has one."""
    if dataset is None:
        return Placement(mesh, placements, data_axes=data_axes)
    if dataset.placement is None:
        raise ConfigurationError(
            "dataset= is for one that reads only what each rank keeps, and this one has no placement; open it with "
            "placement=, or leave dataset= out"
        )
    given = None if placements is None and data_axes is None else placements
    wanted = dataset.placement if given is None and data_axes is None else Placement(mesh, given, data_axes=data_axes)
    on_mesh = Placement(mesh, data_axes=0)
    if wanted != dataset.placement or on_mesh.mesh != wanted.mesh or on_mesh.rank != wanted.rank:
        raise ConfigurationError(
            f"the data set reads rank {dataset.placement.rank} of the mesh {dataset.placement.mesh} with "
            f"{dataset.placement.default} and {dict(dataset.placement.by_key)}, but rank {on_mesh.rank} of the mesh "
            f"{on_mesh.mesh} is to hold {wanted.default} and {dict(wanted.by_key)}; give both the same placement"
        )
    return dataset.placement


def _collated(batch: Any) -> TensorDictBase:
    """A batch as torch's default collate makes it, as a TensorDict."""
    found: Any = default_collate(list(batch)) if isinstance(batch, list | tuple) else batch
    if is_tensor_collection(found) and not isinstance(found, TensorDictBase):
        found = found.to_tensordict(retain_none=False)
    if isinstance(found, TensorDictBase):
        return found
    if isinstance(found, Mapping):
        rows = next((len(value) for value in found.values() if isinstance(value, torch.Tensor)), None)
        if rows is not None:
            return TensorDict(dict(found), batch_size=[rows])
    raise SchemaError(
        f"a batch is a TensorDict or a dict with tensors at its top, got {type(found).__name__}; name what it holds"
    )


def _shards_on(device: str, held: HeldBatch, *, in_one: bool) -> dict[Key, torch.Tensor]:
    """What is kept of each field, contiguous, on the mesh's device. Copies from page-locked memory do not block.

    Args:
        in_one: where all fields are views of one buffer (``strided=True``), copy it whole and cut on the device.
    """
    if device == "cpu":
        return {key: held.shard(key) for key in held.leaves}
    moved = copy_in_one(held.leaves, device) if in_one else None
    if moved is not None:
        return {key: moved[key][held.kept[key]].contiguous() for key in moved}
    kept = {key: tensor[held.kept[key]] for key, tensor in held.leaves.items()}
    return {key: part.to(device, non_blocking=part.is_pinned()).contiguous() for key, part in kept.items()}


def copy_in_one(tensors: Mapping[Key, torch.Tensor], device: str) -> dict[Key, torch.Tensor] | None:
    """Views of one buffer as the same views of a copy of it on a device; None if they do not share one."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors.values()}
    if len(storages) != 1 or len(tensors) < 2:
        return None
    (storage,) = storages.values()
    buffer = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
    moved = buffer.to(device, non_blocking=buffer.is_pinned(), copy=True).untyped_storage()
    return {
        key: torch.empty(0, dtype=tensor.dtype, device=device).set_(
            moved, tensor.storage_offset(), tensor.size(), tensor.stride()
        )
        for key, tensor in tensors.items()
    }
