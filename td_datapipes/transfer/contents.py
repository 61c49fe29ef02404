"""A TensorDict taken apart for sending, and put together again from what arrived."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase, is_tensor_collection
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from td_datapipes.errors import ConfigurationError, ProtocolError, SchemaError
from td_datapipes.mesh import MeshSpec, Placements, contiguous_strides, local_box
from td_datapipes.schema import Key, dtype_name, format_key
from td_datapipes.transfer.agreement import AgreedField, Agreement
from td_datapipes.transfer.declaration import FieldSpec, NodeSpec, Sent

__all__ = ["Contents", "build", "decode_values", "encode_values", "whole_of"]

_MARKS = (NonTensorData, NonTensorStack)

_MOST_SPECS = 1024
_specs: dict[tuple[int, int], tuple[AgreedField, DTensorSpec]] = {}


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What is to be sent.

    Attributes:
        tensors: the leaves.
        local: what this rank has of each.
        values: the non-tensor leaves as JSON can hold them; None where there are none.
        values_digest: of those.
        nodes: the tree, parents before children.
        mesh: of the DTensors; the one given where there are none.
    """

    tensors: Mapping[Key, torch.Tensor]
    local: Mapping[Key, torch.Tensor]
    values: list[Any] | None
    values_digest: int
    nodes: tuple[NodeSpec, ...]
    mesh: DeviceMesh | MeshSpec

    @classmethod
    def of(cls, td: Any, mesh: DeviceMesh | MeshSpec | None, rank: int) -> Contents:
        """Take a TensorDict apart.

        Args:
            td: its leaves are DTensors of one mesh, dense tensors or non-tensor values.
            mesh: of the senders, where no leaf says it; None is this rank alone.
            rank: this one.

        Raises:
            SchemaError: a leaf that has no plain bytes, or a value that JSON would not give back as it was.
            ConfigurationError: DTensors of several meshes, or of another one than `mesh`.
        """
        if not isinstance(td, TensorDictBase):
            if not is_tensor_collection(td):
                raise SchemaError(f"what is sent is a TensorDict, not {type(td).__name__}; wrap it in one")
            td = td.to_tensordict(retain_none=False)
        tensors: dict[Key, torch.Tensor] = {}
        values: dict[Key, Any] = {}
        nodes: list[NodeSpec] = []
        _walk(td, (), tensors, values, nodes)
        found = mesh
        for key, value in tensors.items():
            if isinstance(value, DTensor) and value.device_mesh is not found:
                if found is not None and MeshSpec.of(found) != MeshSpec.of(value.device_mesh):
                    raise ConfigurationError(
                        f"field {format_key(key)} lies on the mesh {MeshSpec.of(value.device_mesh)}, others on "
                        f"{MeshSpec.of(found)}; send the fields of one mesh at a time"
                    )
                found = value.device_mesh
        alone = MeshSpec.from_ranks([rank])
        encoded, digest = encode_values(values)
        with torch.no_grad():
            local = {key: _checked(key, value) for key, value in tensors.items()}
        return cls(
            tensors=tensors,
            local=local,
            values=encoded,
            values_digest=digest,
            nodes=tuple(nodes),
            mesh=alone if found is None else found,
        )

    @cached_property
    def signature(self) -> object:
        """Equal for contents that are declared alike: cheaper than the declaration."""
        fields = [
            (key, value.dtype, tuple(value.shape), value.placements if isinstance(value, DTensor) else None)
            for key, value in self.tensors.items()
        ]
        return fields, self.nodes, self.mesh

    def describe(self) -> Sent:
        """What to declare."""
        fields = tuple(
            FieldSpec(
                key=key,
                dtype=value.dtype,
                shape=tuple(value.shape),
                placements=tuple(value.placements) if isinstance(value, DTensor) else None,
            )
            for key, value in self.tensors.items()
        )
        return Sent(mesh=MeshSpec.of(self.mesh), fields=fields, nodes=self.nodes)

    def sources(self, agreement: Agreement, device: torch.device) -> list[torch.Tensor]:
        """For each agreed field what this rank has of it on the wire, contiguous. With ``materialize`` a collective."""
        keys = [field.spec.key for field in agreement.fields]
        if agreement.strategy == "materialize":
            return [_plain(whole_of(self.tensors[key]), device) for key in keys]
        return [_plain(self.local[key], device) for key in keys]


def _walk(
    td: TensorDictBase, prefix: Key, tensors: dict[Key, torch.Tensor], values: dict[Key, Any], nodes: list[NodeSpec]
) -> None:
    names = tuple(td.names) if td.batch_dims and any(td.names) else None
    nodes.append(NodeSpec(key=prefix, batch_size=tuple(td.batch_size), names=names))
    value: Any
    for name, value in td.items():
        key = (*prefix, name)
        # Tensors first, as most are: asking whether something is a tensor collection takes longer.
        if isinstance(value, torch.Tensor):
            tensors[key] = value
        elif isinstance(value, _MARKS):
            values[key] = value
        elif is_tensor_collection(value):
            plain = value if isinstance(value, TensorDictBase) else value.to_tensordict(retain_none=False)
            _walk(plain, key, tensors, values, nodes)
        else:
            values[key] = NonTensorData(value, batch_size=td.batch_size)


def _checked(key: Key, value: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor; nothing is communicated. Called without gradients."""
    local = value.to_local() if isinstance(value, DTensor) else value
    if local.layout is not torch.strided or local.is_nested or local.is_quantized or local.is_meta:
        kind = "nested (jagged)" if local.is_nested else "meta" if local.is_meta else str(local.layout)
        raise SchemaError(f"field {format_key(key)} is a {kind} tensor, which has no plain bytes to send; leave it out")
    try:
        dtype_name(local.dtype)
    except SchemaError as error:
        raise SchemaError(f"field {format_key(key)}: {error}") from None
    return local


def whole_of(value: torch.Tensor) -> torch.Tensor:
    """All of a tensor, on every rank of its mesh; a collective of that mesh."""
    if not isinstance(value, DTensor):
        return value
    if any(isinstance(placement, Partial) for placement in value.placements):
        return value.full_tensor()
    if all(isinstance(placement, Replicate) for placement in value.placements):
        return value.to_local()
    return _from_bytes(_bytes_dtensor(value).full_tensor(), value.dtype)


def _bytes_dtensor(value: DTensor) -> DTensor:
    """The same with each element as a trailing dim of bytes: gloo's collectives refuse many dtypes, but not bytes."""
    local, shape = _plain(value.to_local(), None), torch.Size((*value.shape, value.dtype.itemsize))
    as_bytes = local.as_strided((local.numel(),), (1,)).view(torch.uint8).view(*local.shape, value.dtype.itemsize)
    return _dtensor(as_bytes, value.device_mesh, value.placements, shape)


def _from_bytes(whole: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return whole.contiguous().view(dtype).squeeze(-1)


def _plain(value: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    lies_there = device is None or value.device == device
    if lies_there and value.is_contiguous() and not (value.requires_grad or value.is_conj() or value.is_neg()):
        return value
    plain = value.detach().resolve_conj().resolve_neg()
    return (plain if device is None else plain.to(device)).contiguous()


def _dtensor(local: torch.Tensor, mesh: DeviceMesh, placements: Placements, shape: Sequence[int]) -> DTensor:
    return _with_spec(local, _spec(mesh, placements, shape, local.dtype))


def _with_spec(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    # As `DTensor.from_local` does in the end, which takes longer and would make them differentiable. `__init__` does
    # nothing but ask the compiler whether it is at work.
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


def _spec(mesh: DeviceMesh, placements: Placements, shape: Sequence[int], dtype: torch.dtype) -> DTensorSpec:
    # Shape and stride are said: `from_local` would guess them from one shard, wrongly where shards are uneven.
    meta = TensorMeta(shape=torch.Size(shape), stride=contiguous_strides(tuple(shape)), dtype=dtype)
    return DTensorSpec(mesh, tuple(placements), tensor_meta=meta)


def _agreed_spec(field: AgreedField, placements: Placements, mesh: DeviceMesh) -> DTensorSpec:
    """Made once for the batches of a schema: it takes longer than everything else about a small field."""
    # By the very objects: meshes that are equal may have different process groups, and comparing placements takes
    # longer than making a DTensor. The entry keeps both, so the ids stay theirs.
    key = (id(mesh), id(field))
    if key not in _specs:
        if len(_specs) == _MOST_SPECS:
            _specs.clear()
        _specs[key] = field, _spec(mesh, placements, field.spec.shape, field.spec.dtype)
    return _specs[key][1]


def build(
    agreement: Agreement, arrived: Sequence[torch.Tensor], values: Mapping[Key, Any], mesh: DeviceMesh | None
) -> TensorDict:
    """What arrived as a TensorDict. With ``redistribute`` to other placements it is a collective of the mesh.

    Args:
        agreement: of the transfer.
        arrived: for each of its fields the local tensor.
        values: the non-tensor leaves.
        mesh: the receivers'; None if all fields stay plain.
    """
    leaves: dict[Key, Any] = dict(values)
    for field, local in zip(agreement.fields, arrived, strict=True):
        leaves[field.spec.key] = _arranged(agreement, field, local, mesh)
    entries: dict[Key, dict[str, Any]] = {node.key: {} for node in agreement.nodes}
    for key, value in leaves.items():
        entries[key[:-1]][key[-1]] = value
    for node in reversed(agreement.nodes):
        names = None if node.names is None else list(node.names)
        td = TensorDict(entries[node.key], batch_size=node.batch_size, names=names)  # type: ignore[arg-type]
        if not node.key:
            return td
        entries[node.key[:-1]][node.key[-1]] = td
    raise ProtocolError("the transfer describes no TensorDict")


def _arranged(agreement: Agreement, field: AgreedField, local: torch.Tensor, mesh: DeviceMesh | None) -> torch.Tensor:
    spec, wanted = field.spec, field.wanted
    if mesh is not None and local.device.type != mesh.device_type:
        local = local.to(mesh.device_type)
    if agreement.strategy == "materialize" and wanted is not None and mesh is not None:
        local = _cut(local, spec, wanted, mesh)
    elif agreement.strategy == "redistribute" and mesh is not None and (spec.placements or wanted is not None):
        local = _redistributed(local, spec, wanted, mesh)
    if wanted is None or mesh is None:
        return local
    return _with_spec(local, _agreed_spec(field, wanted, mesh))


def _cut(whole: torch.Tensor, spec: FieldSpec, wanted: Placements, mesh: DeviceMesh) -> torch.Tensor:
    box = local_box(spec.shape, tuple(mesh.shape), wanted, mesh.get_coordinate() or ())
    part = whole[tuple(slice(start, stop) for start, stop in box)]
    # A slice would keep the memory of the whole tensor alive.
    return part if part.shape == whole.shape else part.clone(memory_format=torch.contiguous_format)


def _redistributed(local: torch.Tensor, spec: FieldSpec, wanted: Placements | None, mesh: DeviceMesh) -> torch.Tensor:
    everywhere = (Replicate(),) * mesh.ndim
    held, asked = spec.placements or everywhere, everywhere if wanted is None else wanted
    if held == asked:
        return local
    value = _dtensor(local, mesh, held, spec.shape)
    if any(isinstance(placement, Partial) for placement in held):
        return value.redistribute(mesh, asked).to_local()
    return _from_bytes(_bytes_dtensor(value).redistribute(mesh, asked).to_local(), spec.dtype)


# Non-tensor values: JSON, and nothing that could run.


def encode_values(values: Mapping[Key, Any]) -> tuple[list[Any] | None, int]:
    """Values as JSON can hold them, and a digest; (None, 0) where there are none.

    Raises:
        SchemaError: a value that JSON would not give back as it was.
    """
    if not values:
        return None, 0
    encoded = [[list(key), _encode(value, key)] for key, value in sorted(values.items())]
    digest = hashlib.blake2b(json.dumps(encoded).encode(), digest_size=8).digest()
    return encoded, int.from_bytes(digest, "little")


def decode_values(encoded: Iterable[Any] | None) -> dict[Key, Any]:
    """The inverse of `encode_values`."""
    return {tuple(map(str, key)): _decode(value) for key, value in encoded or ()}


def _encode(value: Any, key: Key) -> list[Any]:
    if isinstance(value, NonTensorStack):
        return ["stack", value.stack_dim, [_encode(part, key) for part in value.tensordicts]]
    _require_json(value.data, key)
    return ["data", list(value.batch_size), value.data]


def _decode(encoded: Sequence[Any]) -> Any:
    kind, where, what = encoded
    if kind == "stack":
        return NonTensorStack(*map(_decode, what), stack_dim=where)
    return NonTensorData(what, batch_size=where)


_JSON_TYPES: Mapping[type, Callable[[Any], Iterable[Any]]] = {
    **dict.fromkeys((type(None), bool, int, float, str), lambda _: ()),
    list: lambda value: value,
    dict: lambda value: value.values(),
}


def _require_json(value: Any, key: Key) -> None:
    parts = _JSON_TYPES.get(type(value))
    if parts is None or (isinstance(value, dict) and not all(type(name) is str for name in value)):
        raise SchemaError(
            f"field {format_key(key)} holds a {type(value).__name__}; non-tensor values travel as JSON (None, bool, "
            f"int, float, str, lists and dicts of them by str): convert it, or leave it out"
        )
    for part in parts(value):
        _require_json(part, key)
