"""What the ranks of a world do in the tests of placed batches. Each function runs on every rank at once."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torchdata.nodes
from rows_in_memory import ALL_DTYPES, bytes_of, random_rows, random_tensor
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from td_datapipes import DTensorCollate, Placement, RedisTDDataset
from td_datapipes.errors import TDDatapipesError
from td_datapipes.samplers import BlockShuffleBatchSampler, CoalescingBatchSampler, RowSampler

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
AXES = ("dp", "cp", "tp")


def make_mesh(shape: Sequence[int], names: Sequence[str] | None = None) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(shape), mesh_dim_names=tuple(names or AXES[: len(shape)]))


def raised(call: Callable[[], Any]) -> str:
    """The class and the message of what a call raises; empty if it does not."""
    try:
        call()
    except (TDDatapipesError, RuntimeError) as error:
        kinds = "ValueError" if isinstance(error, ValueError) else type(error).__mro__[-2].__name__
        return f"{type(error).__name__} ({kinds}): {error}"
    return ""


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Elements as a trailing dim of bytes: collectives refuse many dtypes, but none refuses bytes."""
    flat = tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    return flat.view(*tensor.shape, tensor.dtype.itemsize)


def full_bytes(value: DTensor) -> bytes:
    """What all ranks hold together, gathered by DTensor itself, as bytes."""
    local, shape = as_bytes(value.to_local()), torch.Size((*value.shape, value.dtype.itemsize))
    strides = torch.empty(shape, device="meta").stride()
    whole = DTensor.from_local(local, value.device_mesh, value.placements, run_check=False, shape=shape, stride=strides)
    return bytes_of(whole.full_tensor())


def require_equal(got: TensorDictBase, expected: TensorDictBase) -> None:
    """Global shapes, dtypes, local shapes and every bit of a placed batch."""
    assert got.batch_size == expected.batch_size
    for key in expected.keys(True, True):
        value, whole = got.get(key), expected.get(key)
        assert (type(value), value.shape, value.dtype) == (DTensor, whole.shape, whole.dtype), key
        assert value.to_local().is_contiguous()
        assert full_bytes(value) == bytes_of(whole), key


# Collating what is in memory.


def collate_grid(
    meshes: Sequence[tuple[int, ...]], num_rows: Sequence[int], row_shapes: Sequence[tuple[int, ...]]
) -> int:
    """Every placement of every shape on every mesh, in all dtypes by turns; returns how many were compared."""
    dtypes, compared = itertools.cycle(ALL_DTYPES), 0
    generator = torch.Generator().manual_seed(0)
    for mesh_shape in meshes:
        mesh = make_mesh(mesh_shape)
        for rows, row_shape in itertools.product(num_rows, row_shapes):
            dims = [R, *(Shard(dim) for dim in range(1 + len(row_shape)))]
            for placements in itertools.product(dims, repeat=mesh.ndim):
                whole = random_tensor((rows, *row_shape), next(dtypes), generator)
                collate = DTensorCollate(mesh, placements, mode="global", check="never")
                placed = collate(TensorDict({"x": whole}, [rows]))["x"]
                assert placed.placements == placements
                assert (placed.shape, placed.dtype) == (whole.shape, whole.dtype)
                theirs = distribute_tensor(as_bytes(whole), mesh, placements).to_local()
                local = placed.to_local()
                assert tuple(local.shape) == tuple(theirs.shape[:-1]), (mesh_shape, whole.shape, placements)
                assert bytes_of(local) == bytes_of(theirs), (mesh_shape, whole.shape, placements)
                assert full_bytes(placed) == bytes_of(whole), (mesh_shape, whole.shape, placements)
                compared += 1
    return compared


def collate_tree() -> None:
    """Nested fields with placements of their own, non-tensor fields, names, nodes with more batch dims."""
    mesh = make_mesh((2, 2), ("dp", "cp"))
    whole = random_rows(5, {"x": (torch.float32, (3,)), "label": (torch.int16, ())})
    node = TensorDict({"y": random_tensor((5, 4, 2), torch.bfloat16, torch.Generator().manual_seed(1))}, [5, 4])
    whole["deep"] = TensorDict({"node": node}, [5])
    plain = whole.clone()
    whole["source"] = NonTensorData("web", batch_size=[5])
    whole["names"] = NonTensorStack(*[NonTensorData(f"row {row}") for row in range(5)])
    whole.names = ["row"]
    placements = {("deep", "node"): (S0, S1), "label": (R, R)}
    placed = DTensorCollate(mesh, placements, mode="global")(whole)
    require_equal(placed, plain)
    assert placed["label"].placements == (R, R)
    assert placed["x"].placements == (S0, R)
    assert placed["deep", "node", "y"].placements == (S0, S1)
    assert placed["deep", "node"].batch_size == (5, 4)
    assert placed.names == ["row"]
    assert placed["source"] == "web"
    assert placed["names"] == [f"row {row}" for row in range(5)]


def collate_own_rows() -> None:
    """Every rank keeps its own rows: nothing of rank 0 is broadcast, and a row dim is cut here."""
    mesh = make_mesh((2, 2), ("dp", "tp"))
    rank = mesh.get_local_rank("dp")
    whole = random_rows(6, {"x": (torch.uint16, (5,)), ("n", "y"): (torch.bool, ())})
    mine = whole[3 * rank : 3 * rank + 3]
    mine["names"] = NonTensorStack(*[NonTensorData(f"row {3 * rank + row}") for row in range(3)])
    placed = DTensorCollate(mesh, {"x": (S0, S1)}, data_axes="dp", mode="local")(mine)
    assert placed["names"] == [f"row {3 * rank + row}" for row in range(3)]
    require_equal(placed, whole)


def collate_uneven_rows(shape: tuple[int, ...], total: int) -> list[int]:
    """Rows that do not divide, each rank its own; returns how many rows each rank holds, by rank."""
    mesh = make_mesh(shape)
    placements = (S0,) * mesh.ndim
    whole = TensorDict({"x": torch.arange(total)}, [total])
    local = distribute_tensor(whole["x"], mesh, placements, src_data_rank=None).to_local()
    collate = DTensorCollate(mesh, placements, mode="local", check="always")
    placed = collate(TensorDict({"x": local.clone()}, [len(local)]), global_rows=total)
    assert placed["x"].shape == (total,)
    assert placed["x"].full_tensor().tolist() == list(range(total))
    counts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, len(placed["x"].to_local()))
    return counts


def collate_on_submesh() -> None:
    """A slice of a larger mesh: each slice is a mesh of its own, and its ranks agree among themselves only."""
    whole = make_mesh((2, 2), ("pp", "dp"))
    mesh, stage = whole["dp"], whole.get_local_rank("pp")
    td = TensorDict({"x": torch.arange(5) + 100 * stage}, [5])
    placed = DTensorCollate(mesh, mode="global", check="always")(td)
    require_equal(placed, td)


def place_with_loaders() -> None:
    """As a collate_fn, as a plain function over a loader, as a nodes mapper, and for lists of rows and dicts."""
    mesh = make_mesh((2,))
    rank, rows = dist.get_rank(), [TensorDict({"x": torch.tensor(float(row))}, []) for row in range(8)]
    wanted = [TensorDict({"x": torch.arange(4.0) + 4 * batch}, [4]) for batch in range(2)]
    sampler = CoalescingBatchSampler(RowSampler(rows, shuffle=False, rank=rank, world_size=2), 2)
    hook = DTensorCollate(mesh, sampler=sampler, check="always")
    assert hook.mode == "local"
    for placed in DataLoader(rows, batch_sampler=sampler, collate_fn=hook):
        assert sorted(placed["x"].full_tensor().tolist()) in [td["x"].tolist() for td in wanted]
    whole = DTensorCollate(mesh, mode="global", check="always")
    for placed, expected in zip(map(whole, DataLoader(rows, batch_size=4)), wanted, strict=True):
        require_equal(placed, expected)
    mapped = torchdata.nodes.Mapper(torchdata.nodes.IterableWrapper(wanted), whole)
    for placed, expected in zip(torchdata.nodes.Loader(mapped), wanted, strict=True):
        require_equal(placed, expected)
    require_equal(whole({"x": torch.arange(3)}), TensorDict({"x": torch.arange(3)}, [3]))


def place_alone() -> int:
    """One rank places batches while the other does nothing at all: placing sends nothing."""
    mesh = make_mesh((2,))
    first = TensorDict({"x": torch.arange(4).to(torch.uint16)}, [4])
    checked = DTensorCollate(mesh, mode="global", check="first")
    checked(first)
    if dist.get_rank() == 1:
        return 0
    unchecked = DTensorCollate(mesh, mode="global", check="never")
    return sum(len(place(first)["x"].to_local()) for place in (unchecked, checked))


# Ranks that disagree.


def disagree(kind: str) -> str:
    """What each rank of a (dp=2, tp=2) mesh raises where the ranks disagree in one thing."""
    mesh, rank = make_mesh((2, 2), ("dp", "tp")), dist.get_rank()
    odd = rank == 2
    local = {"mode": "local", "placements": (S0, R)}
    td = TensorDict({"x": torch.arange(4.0), "y": torch.zeros(4, 2)}, [4])
    if kind == "rows":
        return raised(lambda: DTensorCollate(mesh, **local)(td[: 3 if rank >= 2 else 4]))
    if kind == "rows of replicas":
        return raised(lambda: DTensorCollate(mesh, **local)(td[: 3 if odd else 4]))
    if kind == "dtype":
        other = TensorDict({"x": td["x"].double(), "y": td["y"]}, [4]) if odd else td
        return raised(lambda: DTensorCollate(mesh, **local)(other))
    if kind == "field":
        return raised(lambda: DTensorCollate(mesh, **local)(td.exclude("y") if odd else td))
    if kind == "placements":
        chosen = (R, S0) if odd else (S0, R)
        return raised(lambda: DTensorCollate(mesh, chosen, mode="global")(td))
    if kind == "global batch":
        return raised(lambda: DTensorCollate(mesh, mode="global")(td + 1 if odd else td))
    if kind == "replicas":
        return raised(lambda: DTensorCollate(mesh, **local)(td + rank))
    if kind == "error on one":
        jagged = torch.nested.nested_tensor([torch.zeros(1)] * 4, layout=torch.jagged)
        other = TensorDict({"x": jagged, "y": td["y"]}, [4]) if odd else td
        return raised(lambda: DTensorCollate(mesh, **local)(other))
    if kind == "later":
        collate = DTensorCollate(mesh, check="always", **local)
        collate(td)
        return raised(lambda: collate(td[:2] if rank >= 2 else td))
    raise ValueError(kind)


def disagreeing_samplers(kind: str) -> str:
    """What each rank raises where the ranks' samplers differ."""
    mesh, rank = make_mesh((2, 2), ("dp", "tp")), dist.get_rank()
    odd, rows = rank == 3, list(range(40))
    placement = Placement(mesh)
    ranks = {"rank": placement.data_rank, "world_size": placement.data_world_size}
    if kind == "world":  # what a sampler takes by default: all ranks
        ranks = {"rank": rank, "world_size": 4}
    sampler = BlockShuffleBatchSampler(rows, 4, seed=1 if odd and kind == "seed" else 0, **ranks)
    if kind == "place" and odd:
        next(iter(sampler))
        sampler.load_state_dict(sampler.state_dict())
    if kind == "epoch" and odd:
        sampler.set_epoch(3)
    dataset = TensorDict({"x": torch.arange(40)}, [40])

    def first() -> None:
        collate = DTensorCollate(mesh, sampler=sampler)
        batch = next(iter(sampler))
        collate(dataset[batch])

    return raised(first)


def a_rank_stays_away() -> tuple[str, float]:
    """One rank never comes to the check."""
    mesh = make_mesh((2, 2))
    td = TensorDict({"x": torch.arange(4)}, [4])
    if dist.get_rank() == 3:
        return "", 0.0
    began = time.monotonic()
    text = raised(lambda: DTensorCollate(mesh, mode="global", check_timeout_seconds=1.5)(td))
    return text, time.monotonic() - began


def refused_everywhere(kind: str) -> str:
    """Arguments that cannot work are refused on every rank before anything is sent."""
    mesh = make_mesh((2, 2), ("dp", "tp"))
    td = TensorDict({"x": torch.arange(4), "label": torch.zeros(4)}, [4])
    if kind == "axis":
        return raised(lambda: DTensorCollate(mesh, data_axes="cp", mode="global"))
    if kind == "mode":
        return raised(lambda: DTensorCollate(mesh))
    if kind == "field":
        return raised(lambda: DTensorCollate(mesh, {"tokens": (S0, R)}, mode="global")(td))
    if kind == "dim":
        return raised(lambda: DTensorCollate(mesh, (S0, S1), mode="global")(td))
    raise ValueError(kind)


# Fetching only what is kept.


def placed_dataset(url: str, mesh: DeviceMesh, placements: Any, **options: Any) -> RedisTDDataset:
    return RedisTDDataset(url, placement=Placement(mesh, placements), **options)


def global_batches(dataset: RedisTDDataset, make: Callable[..., Any]) -> Iterator[list[int]]:
    """The rows of each global batch: what the samplers of all data ranks deal, one behind the other."""
    size = dataset.data_world_size
    samplers = [make(dataset, rank=rank, world_size=size) for rank in range(size)]
    for parts in zip(*samplers, strict=True):
        yield [row for part in parts for row in part]


SAMPLERS: dict[str, Callable[..., Any]] = {
    "block": lambda data, **ranks: BlockShuffleBatchSampler(data, 4, seed=1, block_rows=3, buffer_blocks=4, **ranks),
    "rows": lambda data, **ranks: CoalescingBatchSampler(RowSampler(data, seed=1, **ranks), 5, window=2),
}


def fetch_shards(
    url: str, whole: TensorDict, mesh_shape: tuple[int, ...], placements: Any, sampler: str, options: Mapping[str, Any]
) -> tuple[int, int]:
    """An epoch of sharded reads, placed and compared; returns (bytes read, bytes kept) of this rank."""
    mesh = make_mesh(mesh_shape)
    with placed_dataset(url, mesh, placements, **options) as dataset:
        make = SAMPLERS[sampler]
        own = make(dataset, rank=dataset.data_rank, world_size=dataset.data_world_size)
        collate = DTensorCollate(mesh, dataset=dataset, sampler=own, check="always")
        loader = DataLoader(dataset, batch_sampler=own, collate_fn=collate)
        kept = 0
        for placed, rows in zip(loader, global_batches(dataset, make), strict=True):
            require_equal(placed, whole[rows])
            for key in placed.keys(True, True):
                kept += placed.get(key).to_local().nbytes
        return dataset.stats.bytes, kept


def read_once(url: str, whole: TensorDict, mesh_shape: tuple[int, ...], axis: str, prefetch_bytes: int) -> int:
    """An epoch that one rank of each group along an axis reads; returns the bytes this rank read."""
    mesh = make_mesh(mesh_shape, ("dp", "tp"))
    with placed_dataset(url, mesh, (S0, R), read_once_per=axis, prefetch_bytes=prefetch_bytes) as dataset:
        make = SAMPLERS["block"]
        own = make(dataset, rank=dataset.data_rank, world_size=dataset.data_world_size)
        loader = DataLoader(dataset, batch_sampler=own, collate_fn=DTensorCollate(mesh, dataset=dataset, sampler=own))
        for placed, rows in zip(loader, global_batches(dataset, make), strict=True):
            require_equal(placed, whole[rows])
        return dataset.stats.bytes


def read_once_fails(url: str, kind: str) -> str:
    """What the ranks of a replica group raise where they ask for different rows, or where the reading rank fails."""
    mesh = make_mesh((2,), ("tp",))
    options = {"read_once_per": "tp"}
    if kind == "sharded":
        placements = {"tokens": (S1,), "image": (R,), "next": (R,), "label": (R,), "row": (R,)}
        return raised(lambda: placed_dataset(url, mesh, placements, **options))
    with placed_dataset(url, mesh, (R,), **options) as dataset:
        if kind == "other rows":
            return raised(lambda: dataset[[1, 2 + dist.get_rank()]])
        if kind == "fewer rows":
            return raised(lambda: dataset[[1, 2, 3][dist.get_rank() :]])
        if kind == "lost":
            if dist.get_rank() == 0:
                client = dataset._reader.server.client()
                client.delete(*[key for key in client.keys("td:*") if b"manifest" not in key and b"names" not in key])
            return raised(lambda: dataset[[1, 2]])
        if kind == "alone":
            short = RedisTDDataset(
                url.replace("#", "?socket_timeout=0.2#"), placement=Placement(mesh, (R,)), read_once_per="tp"
            )
            return raised(lambda: short[[0]]) if dist.get_rank() == 0 else ""
    raise ValueError(kind)


def in_workers(url: str, whole: TensorDict) -> str:
    """The hook in worker processes, forked and spawned, is refused by name; over the loader it works."""
    mesh = make_mesh((2,), ("dp",))
    refusals = ""
    with placed_dataset(url, mesh, (S0,)) as dataset:
        make = SAMPLERS["rows"]

        def loader(**options: Any) -> tuple[Any, Any]:
            own = make(dataset, rank=dataset.data_rank, world_size=dataset.data_world_size)
            collate = DTensorCollate(mesh, dataset=dataset, sampler=own)
            return collate, lambda hook: DataLoader(dataset, batch_sampler=own, collate_fn=hook, **options)

        for context in ("fork", "spawn") if dist.get_rank() == 0 else ("fork",):
            collate, make_loader = loader(num_workers=1, multiprocessing_context=context)
            refusals += raised(lambda hook=collate, made=make_loader: next(iter(made(hook))))
        collate, make_loader = loader(num_workers=2, multiprocessing_context="fork")
        for placed, rows in zip(map(collate, make_loader(None)), global_batches(dataset, make), strict=True):
            require_equal(placed, whole[rows])
    with placed_dataset(url, mesh, (R,), read_once_per="dp") as dataset:
        forked = DataLoader(dataset, batch_size=4, num_workers=1, multiprocessing_context="fork")
        refusals += raised(lambda: next(iter(forked)))
    return refusals


def epoch_rows(url: str, mesh_shape: tuple[int, ...], batches: int | None, state: Any, cursor: Any) -> Any:
    """Read some batches of an epoch, or what is left of it; returns (rows in order, loader's state, cursor)."""
    mesh = make_mesh(mesh_shape)
    with placed_dataset(url, mesh, None) as dataset:
        own = SAMPLERS["block"](dataset, rank=dataset.data_rank, world_size=dataset.data_world_size)
        if cursor is not None:
            own.load_cursor(cursor)
        loader = StatefulDataLoader(
            dataset, batch_sampler=own, collate_fn=DTensorCollate(mesh, dataset=dataset, sampler=own, check="always")
        )
        if state is not None:
            loader.load_state_dict(state[dist.get_rank()])
        found: list[list[int]] = []
        for placed in loader:
            found.append(placed["row"].full_tensor().tolist())
            if len(found) == batches:
                break
        saved = loader.state_dict()
        return found, saved, own.cursor_of(saved).to_dict()
