"""What the ranks of a world do in the tests of transfers. Each function runs on every rank at once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from placement_cases import S0, S1, R
from rows_in_memory import ALL_DTYPES, bytes_of, random_tensor
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from td_datapipes import TransferStats, plan_transfer, recv_dtensors, send_dtensors
from td_datapipes.mesh import MeshSpec, contiguous_strides, local_box
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


def long_slices(src_ranks: Ranks, dst_ranks: Ranks, strategy: str) -> None:
    """Slices beyond the staging memory: one stretch, many stretches, uneven ones, fields of several sizes together."""
    src, dst = mesh_of(src_ranks), mesh_of(dst_ranks)
    generator = torch.Generator().manual_seed(1)
    wholes = {
        "rows": random_tensor((1201, 3001), torch.int32, generator),
        "lines": random_tensor((7, 1 << 20), torch.int16, generator),
        "boxes": random_tensor((3, 50, 4001), torch.complex128, generator),
        "bytes": random_tensor((70_001,), torch.uint8, generator),
        "few": random_tensor((5,), torch.float64, generator),
    }
    ours, theirs = [R] * (src.ndim - 1), [R] * (dst.ndim - 1)
    for held, wanted in itertools.product([S0, S1, R], repeat=2):
        placements = {name: wanted if value.ndim > 1 else S0 for name, value in wholes.items()}
        td = None
        if is_in(src):
            td = TensorDict({k: placed(v, src, [*ours, held if v.ndim > 1 else S0]) for k, v in wholes.items()})
        asked = {name: (*theirs, placement) for name, placement in placements.items()}
        got = move(td, src, dst, asked, strategy=strategy)
        if got is not None:
            for name, whole in wholes.items():
                require_placed(got[name], whole, dst, asked[name], (name, held, wanted))


def a_tree(generator: torch.Generator) -> TensorDict:
    """Nested nodes with batch dims and names, plain dtypes, per-row and common values; all whole."""
    td = TensorDict(
        {
            "tokens": random_tensor((5, 8), torch.int16, generator),
            "a.b": random_tensor((5,), torch.bool, generator),
            "a": {"b": random_tensor((5, 3), torch.float8_e4m3fn, generator)},
            "empty": TensorDict({}, [5]),
        },
        [5],
        names=["row"],
    )
    inner = TensorDict({"z": random_tensor((5, 4, 2), torch.bfloat16, generator)}, [5, 4], names=["row", "step"])
    td["deep"] = TensorDict({"er": inner}, [5])
    return td


def tree(src_ranks: Ranks, dst_ranks: Ranks, strategy: str) -> str:
    """A batch of all kinds of leaves; returns the strategy that was used."""
    src, dst, stats = mesh_of(src_ranks), mesh_of(dst_ranks), TransferStats()
    whole, td = a_tree(torch.Generator().manual_seed(2)), None
    if is_in(src):
        td = whole.clone()
        for key in [("tokens",), ("a", "b"), ("deep", "er", "z")]:
            td[key] = placed(whole[key], src, (S0,))
        td["source"] = NonTensorData({"url": "web", "parts": [1, 2.5, None, True]}, batch_size=[5])
        td["a", "names"] = NonTensorStack(*[NonTensorData(f"row {row}") for row in range(5)])
    wanted = {("deep", "er"): (S1,), "tokens": (S0,), "a": (R,)}
    got = move(td, src, dst, wanted, strategy=strategy, stats=stats)
    if got is None:
        return stats.strategy
    require_placed(got["tokens"], whole["tokens"], dst, (S0,), "tokens")
    require_placed(got["a", "b"], whole["a", "b"], dst, (R,), "a")
    require_placed(got["deep", "er", "z"], whole["deep", "er", "z"], dst, (S1,), "z")
    assert type(got["a.b"]) is torch.Tensor
    assert bytes_of(got["a.b"]) == bytes_of(whole["a.b"])
    assert (got.batch_size, got.names) == ((5,), ["row"])
    assert (got["deep", "er"].batch_size, got["deep", "er"].names) == ((5, 4), ["row", "step"])
    assert (got["empty"].batch_size, got["empty"].is_empty()) == ((5,), True)
    assert got["source"] == {"url": "web", "parts": [1, 2.5, None, True]}
    assert got["a", "names"] == [f"row {row}" for row in range(5)]
    return stats.strategy


def tree_without_mesh(src_ranks: Ranks, receiver: int) -> str:
    """One receiver that has no mesh gets whole tensors."""
    src, stats = mesh_of(src_ranks), TransferStats()
    whole = a_tree(torch.Generator().manual_seed(2))
    if is_in(src):
        td = whole.clone()
        td["tokens"] = placed(whole["tokens"], src, (S1,))
        assert send_dtensors(td, receiver, stats=stats) is None
    if dist.get_rank() == receiver:
        got = recv_dtensors(src_ranks, stats=stats)
        for key in whole.keys(True, True):
            assert type(got.get(key)) is torch.Tensor
            assert bytes_of(got.get(key)) == bytes_of(whole.get(key)), key
    return stats.strategy


def odd_placements() -> list[str]:
    """Sums that are still to be made, and the placement of FSDP over tensor parallel; returns what auto chose."""
    pair, other, chosen = mesh_of([0, 1]), mesh_of([2, 3]), []
    parts = DTensor.from_local(torch.arange(6.0).reshape(3, 2) + dist.get_rank(), pair, [Partial()], run_check=False)
    summed = 2 * torch.arange(6.0).reshape(3, 2) + 1
    for strategy in ("auto", "materialize"):
        stats = TransferStats()
        td = TensorDict({"x": parts}) if is_in(pair) else None
        got = move(td, pair, other, (S0,), strategy=strategy, stats=stats)
        if got is not None:
            require_placed(got["x"], summed, other, (S0,), strategy)
        chosen.append(stats.strategy)
    return [*chosen, _strided()]


def _strided() -> str:
    square, line, stats = mesh_of([[0, 1], [2, 3]]), mesh_of([3, 2, 1, 0]), TransferStats()
    whole = torch.arange(16, dtype=torch.int16).reshape(8, 2)
    strided = [_StridedShard(0, split_factor=2), Shard(0)]
    row, column = square.get_coordinate() or (0, 0)
    # Cut over the second axis first, then over the first.
    local = whole[4 * column + 2 * row : 4 * column + 2 * row + 2].clone()
    value = DTensor.from_local(local, square, strided, run_check=False, shape=whole.shape, stride=(2, 1))
    got = send_dtensors(TensorDict({"w": value}), line, placements=(S1,), stats=stats)
    assert got is not None
    require_placed(got["w"], whole, line, (S1,), "strided")
    return stats.strategy


def many_batches(src_ranks: Ranks, dst_ranks: Ranks) -> int:
    """Ten batches of two shapes by turns; returns how often the fields were described."""
    src, dst, stats = mesh_of(src_ranks), mesh_of(dst_ranks), TransferStats()
    for number in range(10):
        whole = torch.arange(6 + number % 2) + 100 * number
        got = move(TensorDict({"x": placed(whole, src, (S0,))}) if is_in(src) else None, src, dst, (S0,), stats=stats)
        if got is not None:
            require_placed(got["x"], whole, dst, (S0,), number)
    assert stats.transfers == 10
    return stats.agreements


def count_messages(src_ranks: Ranks, dst_ranks: Ranks) -> int:
    """How many messages carry 20 small fields and a long one."""
    src, dst, stats = mesh_of(src_ranks), mesh_of(dst_ranks), TransferStats()
    wholes = {f"f{number}": torch.arange(768.0) + number for number in range(20)}
    wholes["long"] = torch.arange(24576 * 2.0)
    td = TensorDict({key: placed(whole, src, (S0,)) for key, whole in wholes.items()}) if is_in(src) else None
    got = move(td, src, dst, (S0,), stats=stats)
    for key, whole in wholes.items():
        if got is not None:
            require_placed(got[key], whole, dst, (S0,), key)
    return stats.sent_messages


def peak_of_sender(src_ranks: Ranks, dst_ranks: Ranks, strategy: str, wanted: int) -> float:
    """A sender's most resident memory during a transfer, shard included, in shards."""
    src, dst = mesh_of(src_ranks), mesh_of(dst_ranks)
    peaks = []
    for rows in (64, 32768):  # the first brings in code and connections
        td, shard = None, rows // 2 * 4096
        if is_in(src):
            td = TensorDict({"x": DTensor.from_local(torch.ones(rows // 2, 1024), src, [S0])})
        before = _resident("VmRSS", reset_peak=True)
        got = move(td, src, dst, (Shard(wanted),), strategy=strategy)
        peaks.append((_resident("VmHWM") - before + shard) / shard)
        del td, got
    return peaks[-1]


def _resident(field: str, reset_peak: bool = False) -> int:
    if reset_peak:
        Path("/proc/self/clear_refs").write_text("5")
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) * 1024


def five_rows(src_ranks: Ranks, dst_ranks: Ranks, strategy: str) -> list[tuple[int, ...]]:
    """Several fields of five rows; returns the shapes of what this rank gets."""
    src, dst = mesh_of(src_ranks), mesh_of(dst_ranks)
    wholes = {"a": torch.arange(5), "b": torch.arange(15.0).reshape(5, 3), "c": torch.zeros(5, 0)}
    td = TensorDict({k: placed(v, src, (S0,)) for k, v in wholes.items()}, [5]) if is_in(src) else None
    got = move(td, src, dst, (S0,), strategy=strategy)
    if got is None:
        return []
    assert got.batch_size == (5,)
    for key, whole in wholes.items():
        require_placed(got[key], whole, dst, (S0,), key)
        assert got[key].full_tensor().tolist() == whole.tolist()
    return [tuple(got[key].to_local().shape) for key in wholes]
