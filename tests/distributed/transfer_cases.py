"""What the ranks of a world do in the tests of transfers. Each function runs on every rank at once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from placement_cases import R
from rows_in_memory import ALL_DTYPES, bytes_of, random_tensor
from tensordict import TensorDict, TensorDictBase
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from td_datapipes import TransferStats, plan_transfer, recv_dtensors, send_dtensors
from td_datapipes.mesh import MeshSpec, local_box
from td_datapipes.transfer.contents import contiguous_strides
from td_datapipes.transfer_plan import ShardSpec

Ranks = Any
"""A nested list of ranks: a mesh."""


def mesh_of(ranks: Ranks) -> DeviceMesh:
    """A mesh over some of the ranks; all ranks of the world call this."""
    return DeviceMesh("cpu", torch.tensor(ranks))


def shard_of(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> torch.Tensor:
    """What this rank holds of a tensor, cut here."""
    box = local_box(whole.shape, tuple(mesh.shape), placements, mesh.get_coordinate() or ())
    return whole[tuple(slice(start, stop) for start, stop in box)].clone()


def placed(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> DTensor:
    """A DTensor whose elements are known everywhere; nothing is communicated."""
    return DTensor.from_local(
        shard_of(whole, mesh, placements),
        mesh,
        placements,
        run_check=False,
        shape=whole.shape,
        stride=contiguous_strides(whole.shape),
    )


def is_in(mesh: DeviceMesh) -> bool:
    return mesh.get_coordinate() is not None


def move(
    td: TensorDictBase | None, src: DeviceMesh, dst: DeviceMesh, placements: Any, **options: Any
) -> TensorDict | None:
    """One transfer, on whichever side this rank is."""
    if is_in(src):
        return send_dtensors(td, dst, placements=placements, **options)
    return recv_dtensors(src, dst, placements, **options) if is_in(dst) else None


def require_placed(got: Any, whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any], what: object) -> None:
    """Global shape, placements, and every bit of this rank's shard."""
    assert type(got) is DTensor, what
    assert (got.shape, got.dtype, tuple(got.placements)) == (whole.shape, whole.dtype, tuple(placements)), what
    assert got.stride() == contiguous_strides(whole.shape), what
    local, expected = got.to_local(), shard_of(whole, mesh, placements)
    assert tuple(local.shape) == tuple(expected.shape), what
    assert bytes_of(local) == bytes_of(expected), what


def grid(src_ranks: Ranks, dst_ranks: Ranks, strategy: str, shapes: Sequence[tuple[int, ...]]) -> int:
    """Every pair of placements for every shape, dtypes by turns: bit-identical, and just the bytes of the plan.

    Returns how many were compared on this rank.
    """
    src, dst = mesh_of(src_ranks), mesh_of(dst_ranks)
    dtypes, generator, compared = itertools.cycle(ALL_DTYPES), torch.Generator().manual_seed(0), 0
    for shape in shapes:
        choices = [R, *map(Shard, range(len(shape)))]
        held = itertools.product(choices, repeat=src.ndim)
        wanted = itertools.product(choices, repeat=dst.ndim)
        for ours, theirs in itertools.product(held, wanted):
            whole = random_tensor(shape, next(dtypes), generator)
            td = TensorDict({"x": placed(whole, src, ours)}) if is_in(src) else None
            stats = TransferStats()
            got = move(td, src, dst, theirs, strategy=strategy, stats=stats)
            what = (shape, ours, theirs)
            if is_in(dst):
                assert got is not None
                require_placed(got["x"], whole, dst, theirs, what)
                compared += 1
            require_planned(stats, whole, src, dst, ours, theirs, strategy)
    return compared


def require_planned(
    stats: TransferStats, whole: torch.Tensor, src: DeviceMesh, dst: DeviceMesh, ours: Any, theirs: Any, strategy: str
) -> None:
    """The bytes that went from and to this rank are those of the plan."""
    if strategy == "materialize":
        ours, theirs = (R,) * src.ndim, (R,) * dst.ndim
    sides = ShardSpec.of(src, ours), ShardSpec.of(dst, ours if strategy == "redistribute" else theirs)
    traffic = plan_transfer(whole.shape, *sides).bytes_between(whole.dtype.itemsize)
    rank = dist.get_rank()
    sent = sum(size for (sender, _), size in traffic.items() if sender == rank)
    received = sum(size for (_, receiver), size in traffic.items() if receiver == rank)
    if strategy == "redistribute":
        # Shard by shard: each of several holders sends its own.
        pairs = dict(zip(MeshSpec.of(src).ranks, MeshSpec.of(dst).ranks, strict=True))
        held = {r: shard_bytes(whole, sides[0], r) for r in pairs}
        sent = held[rank] if rank in pairs and pairs[rank] != rank else 0
        received = sum(held[s] for s, r in pairs.items() if r == rank and s != rank)
    assert (stats.sent_bytes, stats.received_bytes) == (sent, received), (whole.shape, ours, theirs, strategy)
    if is_in(src) or is_in(dst):
        assert stats.strategy == strategy


def shard_bytes(whole: torch.Tensor, side: ShardSpec, rank: int) -> int:
    """Of a rank's shard."""
    return int(np.prod([stop - start for start, stop in side.box(whole.shape, rank)])) * whole.dtype.itemsize
