"""What each rank says of a transfer before any of it moves. Pure: JSON in and out, nothing is sent here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from td_datapipes.errors import ConfigurationError, ProtocolError, TDDatapipesError
from td_datapipes.mesh import AxisPlacement, MeshSpec, Placements
from td_datapipes.schema import Key, dtype_from_name, dtype_name, format_key

__all__ = ["Declaration", "FieldSpec", "NodeSpec", "Sent", "Strategy", "Wanted", "check_strategy"]

Strategy = Literal["auto", "materialize", "redistribute", "optimal"]


def check_strategy(strategy: str) -> None:
    """Refuse a strategy that there is not. Raises ConfigurationError."""
    if strategy not in get_args(Strategy):
        raise ConfigurationError(f"strategy is one of {', '.join(get_args(Strategy))}, got {strategy!r}")


@dataclass(frozen=True, kw_only=True)
class FieldSpec:
    """One tensor as its holders have it.

    Attributes:
        key: its path.
        dtype: its dtype.
        shape: of the whole tensor.
        placements: of a DTensor, one an axis; None for a plain tensor, which all holders have alike.
    """

    key: Key
    dtype: torch.dtype
    shape: tuple[int, ...]
    placements: Placements | None

    def __str__(self) -> str:
        lies = "" if self.placements is None else f" with {self.placements}"
        return f"{format_key(self.key)}: {dtype_name(self.dtype)}{list(self.shape)}{lies}"

    def to_json(self) -> list[Any]:
        """As it travels."""
        placed = None if self.placements is None else [_encode(p, self.key) for p in self.placements]
        return [list(self.key), dtype_name(self.dtype), list(self.shape), placed]

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> FieldSpec:
        """The inverse of `to_json`."""
        key, dtype, shape, placed = data
        return cls(
            key=tuple(map(str, key)),
            dtype=dtype_from_name(dtype),
            shape=_sizes(shape),
            placements=None if placed is None else tuple(map(_decode, placed)),
        )


@dataclass(frozen=True, kw_only=True)
class NodeSpec:
    """A TensorDict of the tree; the root has the key ``()``.

    Attributes:
        key: its path.
        batch_size: of the whole node.
        names: of its batch dims; None where it has none.
    """

    key: Key
    batch_size: tuple[int, ...]
    names: tuple[str | None, ...] | None

    def to_json(self) -> list[Any]:
        """As it travels."""
        return [list(self.key), list(self.batch_size), None if self.names is None else list(self.names)]

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> NodeSpec:
        """The inverse of `to_json`."""
        key, size, names = data
        return cls(key=tuple(map(str, key)), batch_size=_sizes(size), names=None if names is None else tuple(names))


@dataclass(frozen=True, kw_only=True)
class Sent:
    """What a sender holds: its mesh, its fields and the tree they hang in, parents before children."""

    mesh: MeshSpec
    fields: tuple[FieldSpec, ...]
    nodes: tuple[NodeSpec, ...]

    @cached_property
    def by_key(self) -> dict[Key, FieldSpec]:
        """The fields."""
        return {field.key: field for field in self.fields}

    def to_json(self) -> dict[str, Any]:
        """As it travels."""
        return {
            "mesh": _encode_mesh(self.mesh),
            "fields": [field.to_json() for field in self.fields],
            "nodes": [node.to_json() for node in self.nodes],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Sent:
        """The inverse of `to_json`."""
        return cls(
            mesh=_decode_mesh(data["mesh"]),
            fields=tuple(map(FieldSpec.from_json, data["fields"])),
            nodes=tuple(map(NodeSpec.from_json, data["nodes"])),
        )


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """How the receivers are to hold what arrives.

    Attributes:
        mesh: theirs; None where they want whole, plain tensors.
        default: placements of DTensors without an entry; None leaves them as the senders have them.
        by_key: placements of single fields, or of all below a node; the longest key that fits wins.
        like: exactly the fields that must arrive; None takes what comes.
    """

    mesh: MeshSpec | None = None
    default: Placements | None = None
    by_key: tuple[tuple[Key, Placements], ...] = ()
    like: tuple[FieldSpec, ...] | None = None

    def asked_for(self, key: Key) -> Placements | None:
        """The placements that a key, or a node above it, is given by name."""
        fitting = [(name, placed) for name, placed in self.by_key if key[: len(name)] == name]
        return max(fitting, key=lambda item: len(item[0]))[1] if fitting else None

    def to_json(self) -> dict[str, Any]:
        """As it travels."""
        return {
            "mesh": None if self.mesh is None else _encode_mesh(self.mesh),
            "default": None if self.default is None else [_encode(p, ()) for p in self.default],
            "by_key": [[list(key), [_encode(p, key) for p in placed]] for key, placed in self.by_key],
            "like": None if self.like is None else [field.to_json() for field in self.like],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Wanted:
        """The inverse of `to_json`."""
        mesh, default, like = data["mesh"], data["default"], data["like"]
        return cls(
            mesh=None if mesh is None else _decode_mesh(mesh),
            default=None if default is None else tuple(map(_decode, default)),
            by_key=tuple((tuple(map(str, key)), tuple(map(_decode, placed))) for key, placed in data["by_key"]),
            like=None if like is None else tuple(map(FieldSpec.from_json, like)),
        )


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """All that one rank says.

    Attributes:
        src: the senders' ranks, in their mesh's order.
        dst: the receivers' ranks, in their mesh's order.
        strategy: the one it wants.
        sent: what it holds; None on a rank that only receives.
        wanted: what it wants, or knows the receivers to want; None on a sender that leaves that to them.
    """

    src: tuple[int, ...]
    dst: tuple[int, ...]
    strategy: Strategy
    sent: Sent | None = None
    wanted: Wanted | None = None

    def to_json(self) -> bytes:
        """As it travels; equal declarations are equal bytes."""
        data = {
            "src": list(self.src),
            "dst": list(self.dst),
            "strategy": self.strategy,
            "sent": None if self.sent is None else self.sent.to_json(),
            "wanted": None if self.wanted is None else self.wanted.to_json(),
        }
        return json.dumps(data, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, text: bytes, rank: int) -> Declaration:
        """The inverse of `to_json`.

        Args:
            text: as it came.
            rank: who sent it, for the message.

        Raises:
            ProtocolError: it is none.
        """
        try:
            data = json.loads(text)
            check_strategy(data["strategy"])
            return cls(
                src=_sizes(data["src"]),
                dst=_sizes(data["dst"]),
                strategy=data["strategy"],
                sent=None if data["sent"] is None else Sent.from_json(data["sent"]),
                wanted=None if data["wanted"] is None else Wanted.from_json(data["wanted"]),
            )
        except (KeyError, TypeError, ValueError, TDDatapipesError) as error:
            raise ProtocolError(
                f"rank {rank} sent no description of a transfer that this version understands ({error}); all ranks "
                f"have to run the same version"
            ) from error


def _sizes(values: Any) -> tuple[int, ...]:
    found = tuple(values)
    if not all(type(value) is int and value >= 0 for value in found):
        raise ValueError(f"sizes are integers of 0 and more, got {found}")
    return found


def _encode_mesh(mesh: MeshSpec) -> list[Any]:
    return [list(mesh.shape), None if mesh.axis_names is None else list(mesh.axis_names), list(mesh.ranks)]


def _decode_mesh(data: Sequence[Any]) -> MeshSpec:
    shape, names, ranks = data
    return MeshSpec(shape=_sizes(shape), axis_names=None if names is None else tuple(names), ranks=_sizes(ranks))


def _encode(placement: AxisPlacement, key: Key) -> list[Any]:
    if type(placement) is Replicate:
        return ["replicate"]
    if type(placement) is Shard:
        return ["shard", placement.dim]
    if type(placement) is Partial:
        return ["partial", placement.reduce_op]
    if type(placement).__name__ == "_StridedShard":
        return ["strided", placement.dim, placement.split_factor]  # type: ignore[attr-defined]
    raise ConfigurationError(
        f"field {format_key(key) if key else 'of the batch'} has the placement {placement!r}, which cannot be sent; "
        f"redistribute it to Shard and Replicate first"
    )


@dataclass(frozen=True)
class _Strided:
    """Stands for DTensor's own placement of FSDP over tensor parallel, of which only the senders need to know more."""

    dim: int
    split_factor: int


def _decode(data: Sequence[Any]) -> Any:
    kind, *values = data
    if kind == "replicate" and not values:
        return Replicate()
    if kind == "shard" and len(values) == 1 and type(values[0]) is int:
        return Shard(values[0])
    if kind == "partial" and values in (["sum"], ["avg"], ["product"], ["max"], ["min"]):
        return Partial(values[0])
    if kind == "strided" and len(values) == 2:
        return _Strided(*values)
    raise ValueError(f"no placement: {data}")
