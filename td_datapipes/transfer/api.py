"""`send_dtensors` and `recv_dtensors`: one TensorDict from the ranks of one mesh to those of another."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from tensordict import TensorDict, TensorDictBase
from torch.distributed.device_mesh import DeviceMesh

from td_datapipes.errors import ConfigurationError
from td_datapipes.mesh import AxisPlacement, MeshSpec, normalise_placements
from td_datapipes.schema import format_key, normalise_key
from td_datapipes.transfer.contents import Contents
from td_datapipes.transfer.declaration import Strategy, Wanted, check_strategy
from td_datapipes.transfer.outcome import TransferStats
from td_datapipes.transfer.session import Session

__all__ = ["TIMEOUT_SECONDS", "PlacementsLike", "Ranks", "ranks_of", "recv_dtensors", "send_dtensors", "wanted_of"]

TIMEOUT_SECONDS = 60.0

Ranks = DeviceMesh | MeshSpec | Sequence[int] | int
"""One side of a transfer: a mesh, or the ranks alone, as numbered in the default process group."""

PlacementsLike = Sequence[AxisPlacement] | Mapping[Any, Sequence[AxisPlacement]]
"""One tuple for all fields, or a mapping by (nested) field."""

_sessions: WeakKeyDictionary[dist.ProcessGroup, dict[object, Session]] = WeakKeyDictionary()


def send_dtensors(
    td: Any,
    dst: Ranks,
    *,
    placements: PlacementsLike | None = None,
    mesh: DeviceMesh | MeshSpec | None = None,
    strategy: Strategy = "auto",
    group: dist.ProcessGroup | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    stats: TransferStats | None = None,
) -> TensorDict | None:
    """Send a TensorDict to the ranks of another mesh, which call `recv_dtensors` meanwhile.

    All senders call this with the same fields. DTensors are sent as they lie; plain tensors and non-tensor values
    (JSON: None, bool, int, float, str, lists, dicts) have to be the same on all senders, and one of them sends each.

    Args:
        td: its leaves are DTensors of one mesh, dense tensors of any dtype, or non-tensor values; nested to any depth.
        dst: the receivers: their mesh, or their ranks.
        placements: how DTensors are to lie on the receivers' mesh; may be left to them.
        mesh: of the senders. Needed only where no leaf is a DTensor and several ranks send.
        strategy: ``optimal`` sends each receiver just the slices it needs, from any mesh to any; ``redistribute`` sends
            each shard to the receiver at the same place, which redistributes it (meshes of the same shape only);
            ``materialize`` makes every tensor whole on the senders first. ``auto`` takes what the other side says, else
            ``optimal`` wherever it can express the placements.
        group: moves the bytes; all senders and receivers are in it. The default group if None.
        timeout_seconds: how long to wait for other ranks, once until all have met and once until the bytes have moved.
        stats: counted into.

    Returns:
        On a rank that is among the receivers too what it receives: it does not call `recv_dtensors`. Else None.

    Raises:
        ConfigurationError: the sides do not fit together (fields, ranks, placements, strategies): on every rank.
        SchemaError: a leaf that cannot be sent; the other ranks raise it too.
        PeerTimeoutError: a rank did not come in time, or is gone; names it, the fields and the strategy.
    """
    group, rank = _group(group, strategy, timeout_seconds), dist.get_rank()
    # The senders have to be known before they can be told that something is wrong.
    src = ranks_of(_mesh_of(td, mesh, rank))
    session = _session(group, src, ranks_of(dst), stats)
    receiving = dst if isinstance(dst, DeviceMesh) else None
    try:
        contents = Contents.of(td, mesh, rank)
        wanted = wanted_of(dst, placements) if placements is not None or session.receives else None
        if session.receives and receiving is None:
            raise ConfigurationError(
                f"rank {rank} receives too and makes DTensors on the receivers' mesh; pass dst= as a DeviceMesh"
            )
        session.declare(contents, wanted, strategy)
    except Exception as error:
        session.fail(error, timeout_seconds)
        raise
    received = session.transfer(contents, timeout_seconds)
    return None if received is None else received.build(receiving)


def recv_dtensors(
    src: Ranks,
    mesh: DeviceMesh | None = None,
    placements: PlacementsLike | None = None,
    *,
    like: TensorDictBase | None = None,
    strategy: Strategy = "auto",
    group: dist.ProcessGroup | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    stats: TransferStats | None = None,
) -> TensorDict:
    """Receive the TensorDict that the ranks of another mesh send with `send_dtensors`.

    Args:
        src: the senders: their mesh, or their ranks.
        mesh: of the receivers, all of which call this. None if this rank receives alone: DTensors arrive whole, as
            plain tensors.
        placements: how DTensors are to lie on `mesh`: one tuple for all, or a mapping by (nested) field; the longest
            key that fits wins. A plain tensor that is named becomes a DTensor. Without, everything keeps the senders'
            placements, which needs a mesh of the same shape.
        like: a TensorDict with exactly the fields, dtypes, shapes and placements to arrive (nothing is written to it);
            anything else is refused on both sides. In place of `placements`.
        strategy: see `send_dtensors`.
        group: see `send_dtensors`.
        timeout_seconds: see `send_dtensors`.
        stats: counted into.

    Returns:
        The tree as it was sent: DTensors on `mesh`, plain tensors, and non-tensor values.

    Raises:
        ConfigurationError: the sides do not fit together (fields, ranks, placements, strategies): on every rank.
        PeerTimeoutError: a rank did not come in time, or is gone; names it, the fields and the strategy.
        TDDatapipesError: what a sender met.
    """
    group, rank = _group(group, strategy, timeout_seconds), dist.get_rank()
    session = _session(group, ranks_of(src), (rank,) if mesh is None else ranks_of(mesh), stats)
    if session.sends:
        raise ConfigurationError(
            f"rank {rank} is among the senders {session.src}; it calls send_dtensors, which gives it what it receives"
        )
    try:
        if like is not None and placements is not None:
            raise ConfigurationError("like= says the placements; leave placements= out")
        if mesh is None and placements is not None:
            raise ConfigurationError("placements= needs the receivers' mesh; pass mesh=")
        wanted = wanted_of(mesh, placements) if like is None else _wanted_like(like, mesh, rank)
        session.declare(None, wanted, strategy)
    except Exception as error:
        session.fail(error, timeout_seconds)
        raise
    received = session.transfer(None, timeout_seconds)
    if received is None:
        raise ConfigurationError(f"rank {rank} is not among the receivers {session.dst}")
    return received.build(mesh)


def ranks_of(side: Ranks) -> tuple[int, ...]:
    """The ranks of one side, in its own order."""
    if isinstance(side, DeviceMesh | MeshSpec):
        return MeshSpec.of(side).ranks
    return MeshSpec.from_ranks([side] if isinstance(side, int) else list(side)).ranks


def wanted_of(mesh: Ranks | None, placements: PlacementsLike | None) -> Wanted:
    """What receivers want, from what a user gave.

    Raises:
        ConfigurationError: not one placement an axis, or one that is neither Shard nor Replicate.
    """
    if mesh is None:
        return Wanted()
    if not isinstance(mesh, DeviceMesh | MeshSpec):
        raise ConfigurationError("placements= needs the receivers' mesh; pass a DeviceMesh or a MeshSpec")
    # Without the axes' names, which one side may leave out.
    spec = replace(MeshSpec.of(mesh), axis_names=None)

    def declared(given: Sequence[AxisPlacement], subject: str) -> Any:
        return normalise_placements(given, ndim=None, mesh_shape=spec.shape, subject=subject)

    if placements is None or isinstance(placements, Mapping):
        keys = [(normalise_key(name), given) for name, given in (placements or {}).items()]
        by_key = tuple(sorted((key, declared(given, f"field {format_key(key)}")) for key, given in keys))
        return Wanted(mesh=spec, by_key=by_key)
    return Wanted(mesh=spec, default=declared(placements, "the batch"))


def _wanted_like(like: TensorDictBase, mesh: DeviceMesh | None, rank: int) -> Wanted:
    sent = Contents.of(like, mesh, rank).describe()
    return Wanted(
        mesh=None if mesh is None else wanted_of(mesh, None).mesh, like=tuple(sorted(sent.fields, key=lambda f: f.key))
    )


def _mesh_of(td: Any, mesh: DeviceMesh | MeshSpec | None, rank: int) -> Ranks:
    if mesh is not None:
        return mesh
    if isinstance(td, TensorDictBase):
        for value in td.values(True, True):
            if hasattr(value, "device_mesh"):
                found: DeviceMesh = value.device_mesh
                return found
    return (rank,)


def _group(group: dist.ProcessGroup | None, strategy: str, timeout_seconds: float) -> dist.ProcessGroup:
    check_strategy(strategy)
    if not timeout_seconds > 0:
        raise ConfigurationError(f"timeout_seconds must be positive, got {timeout_seconds}")
    if group is not None:
        return group
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigurationError("there is no process group; call torch.distributed.init_process_group first")
    found: dist.ProcessGroup | None = dist.group.WORLD
    assert found is not None
    return found


def _session(group: dist.ProcessGroup, src: Sequence[int], dst: Sequence[int], stats: TransferStats | None) -> Session:
    """The session of these ranks; made where they first meet, so that it counts the same transfers on all of them."""
    made = _sessions.setdefault(group, {})
    key = (tuple(src), tuple(dst))
    if key not in made:
        name = "transfer/" + hashlib.blake2b(repr(key).encode(), digest_size=12).hexdigest()
        made[key] = Session(group, src, dst, name, TransferStats())
    session = made[key]
    session.stats = TransferStats() if stats is None else stats
    return session
