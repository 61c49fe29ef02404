"""What the ranks of a transfer agree on, from what each declared. Pure: all compute the same, or raise the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard

from td_datapipes.errors import ConfigurationError
from td_datapipes.mesh import MeshSpec, Placements, normalise_placements
from td_datapipes.schema import Key, format_key
from td_datapipes.transfer.declaration import Declaration, FieldSpec, NodeSpec, Sent, Strategy, Wanted

__all__ = ["AgreedField", "Agreement", "agree"]


@dataclass(frozen=True, kw_only=True)
class AgreedField:
    """A field and where it goes.

    Attributes:
        spec: as the senders have it.
        wanted: the placements it arrives with; None for one that arrives as a plain, whole tensor.
    """

    spec: FieldSpec
    wanted: Placements | None


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """One transfer.

    Attributes:
        strategy: the one that is used; never ``auto``.
        src: the senders' mesh.
        dst: the receivers' mesh; one axis where they have none.
        fields: by ascending key.
        nodes: the tree, parents before children.
    """

    strategy: Strategy
    src: MeshSpec
    dst: MeshSpec
    fields: tuple[AgreedField, ...]
    nodes: tuple[NodeSpec, ...]

    @property
    def redistributes(self) -> bool:
        """Whether the receivers change placements among themselves, by a collective."""
        everywhere = (Replicate(),) * self.dst.ndim
        return self.strategy == "redistribute" and any(
            (field.spec.placements or everywhere) != (field.wanted or everywhere) for field in self.fields
        )


def agree(declared: Mapping[int, Declaration]) -> Agreement:
    """What to do.

    Args:
        declared: by rank, every rank's.

    Raises:
        ConfigurationError: they do not fit together; the message names both sides and is the same on every rank.
    """
    ranks = sorted(declared)
    first = declared[ranks[0]]
    for rank in ranks:
        theirs = declared[rank]
        if (theirs.src, theirs.dst) != (first.src, first.dst):
            raise ConfigurationError(
                f"rank {ranks[0]} means a transfer from the ranks {_listed(first.src)} to {_listed(first.dst)}, rank "
                f"{rank} one from {_listed(theirs.src)} to {_listed(theirs.dst)}; name the same ranks on both sides"
            )
        if (theirs.sent is not None) != (rank in first.src):
            raise ConfigurationError(
                f"rank {rank} {'is among' if rank in first.src else 'is not among'} the senders "
                f"{_listed(first.src)}, and {'receives only' if theirs.sent is None else 'sends'}; a rank that does "
                f"both calls send_dtensors, which gives it what it receives"
            )
    strategy = _same({rank: declared[rank].strategy for rank in ranks}, "auto", "strategy", str) or "auto"
    sent = _sent({rank: found for rank in first.src if (found := declared[rank].sent) is not None})
    wanted = _wanted({rank: asked for rank in ranks if (asked := declared[rank].wanted) is not None})
    fields = tuple(_field(sent.by_key[key], sent, wanted) for key in sorted(sent.by_key))
    _require_named(sent, wanted)
    dst = MeshSpec.from_ranks(first.dst) if wanted.mesh is None else wanted.mesh
    if set(dst.ranks) != set(first.dst):
        raise ConfigurationError(
            f"the receivers' mesh {dst} holds the ranks {_listed(dst.ranks)}, and the transfer goes to "
            f"{_listed(first.dst)}"
        )
    chosen = _choose(strategy, sent.mesh, dst, wanted, fields)
    return Agreement(strategy=chosen, src=sent.mesh, dst=dst, fields=fields, nodes=sent.nodes)


def _sent(by_rank: Mapping[int, Sent]) -> Sent:
    ranks = sorted(by_rank)
    first = by_rank[ranks[0]]
    for rank in ranks[1:]:
        theirs = by_rank[rank]
        if theirs == first:
            continue
        sides = f"the senders hold different batches: rank {ranks[0]}", f"rank {rank}"
        if theirs.mesh != first.mesh:
            raise ConfigurationError(
                f"{sides[0]} lies on the mesh {first.mesh} of the ranks {_listed(first.mesh.ranks)}, {sides[1]} on "
                f"{theirs.mesh} of {_listed(theirs.mesh.ranks)}"
            )
        mine, other = _difference(first.by_key, theirs.by_key)
        if mine or other:
            raise ConfigurationError(f"{sides[0]} has {mine or 'no such field'}, {sides[1]} {other or 'no such field'}")
        if {node.key: node for node in theirs.nodes} != {node.key: node for node in first.nodes}:
            raise ConfigurationError(f"{sides[0]} and {sides[1]} have other nested nodes, batch sizes or names")
    return first


def _difference(mine: Mapping[Key, FieldSpec], theirs: Mapping[Key, FieldSpec]) -> tuple[str, str]:
    for key in sorted(mine.keys() | theirs.keys()):
        if mine.get(key) != theirs.get(key):
            one, other = mine.get(key), theirs.get(key)
            return "" if one is None else str(one), "" if other is None else str(other)
    return "", ""


def _wanted(by_rank: Mapping[int, Wanted]) -> Wanted:
    found: Wanted | None = _same(by_rank, None, "wanted placements", _describe_wanted)
    return Wanted() if found is None else found


def _describe_wanted(wanted: Wanted) -> str:
    if wanted.like is not None:
        return f"{', '.join(map(str, wanted.like))} on the mesh {wanted.mesh}"
    named = f" and {dict(wanted.by_key)}" if wanted.by_key else ""
    return f"{wanted.default}{named} on the mesh {wanted.mesh}"


def _same(by_rank: Mapping[int, Any], any_value: Any, what: str, describe: Callable[[Any], str]) -> Any:
    """What all ranks that do not leave it open say; None where all do."""
    said = {rank: value for rank, value in sorted(by_rank.items()) if value != any_value}
    if not said:
        return None
    rank, value = next(iter(said.items()))
    for other, theirs in said.items():
        if theirs != value:
            raise ConfigurationError(
                f"the ranks disagree about the {what}: rank {rank} has {describe(value)}, rank {other} "
                f"{describe(theirs)}; give both sides the same"
            )
    return value


def _field(spec: FieldSpec, sent: Sent, wanted: Wanted) -> AgreedField:
    subject = f"field {format_key(spec.key)}"
    if wanted.like is not None:
        expected = {field.key: field for field in wanted.like}.get(spec.key)
        if expected is None or (expected.dtype, expected.shape) != (spec.dtype, spec.shape):
            raise ConfigurationError(
                f"the senders hold {spec}, the receivers expect {expected or 'no such field'}; send what is expected, "
                f"or leave like= out"
            )
        return AgreedField(spec=spec, wanted=expected.placements)
    if wanted.mesh is None:
        return AgreedField(spec=spec, wanted=None)
    named = wanted.asked_for(spec.key)
    if named is None and spec.placements is None:
        return AgreedField(spec=spec, wanted=None)
    asked = wanted.default if named is None else named
    if asked is None:
        if sent.mesh.shape != wanted.mesh.shape or not _is_plannable(spec.placements):
            raise ConfigurationError(
                f"{subject} has {spec.placements} on the senders' mesh {sent.mesh}, and nothing says how it is to lie "
                f"on the receivers' mesh {wanted.mesh}; pass placements="
            )
        asked = spec.placements
    placed = normalise_placements(asked or (), ndim=len(spec.shape), mesh_shape=wanted.mesh.shape, subject=subject)
    return AgreedField(spec=spec, wanted=placed)


def _require_named(sent: Sent, wanted: Wanted) -> None:
    """Every field that the receivers name has to come."""
    keys, shown = list(sent.by_key), ", ".join(map(format_key, sent.by_key))
    expected = [(field.key, str(field)) for field in wanted.like or ()]
    for key, text in [*expected, *((name, format_key(name)) for name, _ in wanted.by_key)]:
        if not any(found[: len(key)] == key for found in keys):
            raise ConfigurationError(f"the receivers expect {text}; the senders hold {shown or 'no tensors'}")


def _choose(strategy: str, src: MeshSpec, dst: MeshSpec, wanted: Wanted, fields: Sequence[AgreedField]) -> Strategy:
    odd = next((field for field in fields if not _is_plannable(field.spec.placements)), None)
    strided = next((field for field in fields if not _is_pairable(field.spec.placements)), None)
    placed = any(field.wanted is not None for field in fields)
    dense = any(field.spec.placements is not None for field in fields)
    no_mesh = dense and wanted.mesh is None
    pairs = src.shape == dst.shape
    if strategy == "auto":
        if odd is None and not no_mesh:
            return "optimal"
        return "redistribute" if pairs and strided is None and placed and not no_mesh else "materialize"
    if strategy == "materialize":
        return "materialize"
    if no_mesh:
        raise ConfigurationError(
            f"strategy={strategy!r} makes DTensors on the receivers' mesh, and they gave none; pass mesh= to "
            f"recv_dtensors, or use strategy='materialize' for whole, plain tensors"
        )
    if strategy == "optimal":
        if odd is not None:
            raise ConfigurationError(
                f"strategy='optimal' plans for Shard and Replicate, and the senders hold {odd.spec}; use "
                f"'materialize' or 'redistribute', or redistribute it first"
            )
        return "optimal"
    if not pairs:
        raise ConfigurationError(
            f"strategy='redistribute' hands each sender's shard to one receiver, so both meshes need the same shape: "
            f"the {len(src.ranks)} senders have {src}, the {len(dst.ranks)} receivers {dst}; use 'optimal'"
        )
    if strided is not None:
        raise ConfigurationError(f"strategy='redistribute' cannot rebuild {strided.spec}; use 'materialize'")
    return "redistribute"


def _is_plannable(placements: Placements | None) -> bool:
    return all(type(placement) in (Shard, Replicate) for placement in placements or ())


def _is_pairable(placements: Placements | None) -> bool:
    return all(type(placement) in (Shard, Replicate, Partial) for placement in placements or ())


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
