"""What placing a batch over ranks costs: time, and bytes that each rank reads, for every way to get it there.

    python benchmarks/placement.py [--quick] [--json FILE] [--server embedded|redis]

The reference is what one does without a library: rank 0 reads the whole batch, and `distribute_tensor` scatters it.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from _bench import (
    ROOT,
    SERVER_KINDS,
    TURN,
    Results,
    argument_parser,
    bench_server,
    describe_machine,
    format_table,
)
from tensordict import TensorDict

sys.path.insert(0, str(ROOT / "tests" / "distributed"))

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from worlds import World

from td_datapipes import DTensorCollate, Placement, RedisTDDataset, write_dataset

GLOBAL_ROWS = 256
REFERENCE = "rank 0, scattered"
WARM_UP = 2


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A mesh and where the fields go.

    Attributes:
        label: for the table.
        mesh_shape: ranks along dp, and along the second axis if there is one.
        placements: of each field.
        replicated: the axis along which all fields are replicated, if there is one.
    """

    label: str
    mesh_shape: tuple[int, ...]
    placements: Mapping[str, tuple[Any, ...]]
    replicated: str | None = None


SETTINGS = (
    Setting(label="2 ranks: rows", mesh_shape=(2,), placements={"tokens": (Shard(0),), "label": (Shard(0),)}),
    Setting(
        label="4 ranks: rows x context",
        mesh_shape=(2, 2),
        placements={"tokens": (Shard(0), Shard(1)), "label": (Shard(0), Replicate())},
    ),
    Setting(
        label="4 ranks: rows, 2 replicas",
        mesh_shape=(2, 2),
        placements={"tokens": (Shard(0), Replicate()), "label": (Shard(0), Replicate())},
        replicated="cp",
    ),
)


def make_rows(num_rows: int) -> TensorDict:
    """Rows of 2048 tokens and a label: 8 KB."""
    tokens = torch.randint(0, 50_000, (num_rows, 2048), dtype=torch.int32)
    return TensorDict({"tokens": tokens, "label": torch.arange(num_rows)}, [num_rows])


def measure(url: str, setting: Setting, num_rounds: int) -> dict[str, dict[str, Any]]:
    """On every rank at once: seconds of each batch (the slowest rank's) and bytes this rank read, by contender."""
    mesh = init_device_mesh("cpu", setting.mesh_shape, mesh_dim_names=("dp", "cp")[: len(setting.mesh_shape)])
    with ExitStack() as stack:
        contenders = dict(_contenders(url, setting, mesh, stack))
        found: dict[str, dict[str, Any]] = {name: {"seconds": [], "bytes": 0} for name in contenders}
        rng, order, names = np.random.default_rng(0), random.Random(0), list(contenders)
        for number in range(num_rounds + WARM_UP):
            draws = [rng.choice(len(contenders[names[0]].dataset), GLOBAL_ROWS, replace=False) for _ in range(TURN)]
            order.shuffle(names)
            for name in names:
                before = contenders[name].dataset.stats.bytes
                took = [_slowest(contenders[name].call, rows) for rows in draws]
                if number >= WARM_UP:
                    found[name]["seconds"].append(statistics.median(took[1:]))
                    found[name]["bytes"] += (contenders[name].dataset.stats.bytes - before) // TURN
        for record in found.values():
            record["bytes"] //= num_rounds
        return found


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A way to get a placed batch, and the data set that it reads."""

    dataset: RedisTDDataset
    call: Callable[[Any], TensorDict]


def _contenders(url: str, setting: Setting, mesh: Any, stack: ExitStack) -> Iterator[tuple[str, Contender]]:
    def opened(**options: Any) -> RedisTDDataset:
        return stack.enter_context(RedisTDDataset(url, **options))

    placement = Placement(mesh, setting.placements)
    part = placement.data_rank, placement.data_world_size
    own = slice(part[0] * GLOBAL_ROWS // part[1], (part[0] + 1) * GLOBAL_ROWS // part[1])

    def contender(dataset: RedisTDDataset, place: Callable[[Any], TensorDict], mine: slice) -> Contender:
        return Contender(dataset=dataset, call=lambda rows: place(dataset[rows[mine]]))

    options: Any = {"check": "never"}
    yield REFERENCE, _scattering(opened(), setting, mesh)
    whole = DTensorCollate(mesh, setting.placements, mode="global", **options)
    yield "global", contender(opened(), whole, slice(None))
    yield "local", contender(opened(), DTensorCollate(mesh, setting.placements, mode="local", **options), own)
    placed = opened(placement=placement)
    yield "sharded", contender(placed, DTensorCollate(mesh, dataset=placed, **options), own)
    if setting.replicated is not None:
        once = opened(placement=placement, read_once_per=setting.replicated)
        yield "sharded, read once", contender(once, DTensorCollate(mesh, dataset=once, **options), own)


def _scattering(dataset: RedisTDDataset, setting: Setting, mesh: Any) -> Contender:
    empty = {
        field.key: torch.empty((GLOBAL_ROWS, *field.shape), dtype=field.dtype)
        for field in dataset.schema.fields.values()
    }

    def call(rows: Any) -> TensorDict:
        batch = dataset[rows] if dist.get_rank() == 0 else None
        return TensorDict(
            {
                key[0]: distribute_tensor(tensor if batch is None else batch[key], mesh, setting.placements[key[0]])
                for key, tensor in empty.items()
            },
            [GLOBAL_ROWS],
        )

    return Contender(dataset=dataset, call=call)


def _slowest(call: Callable[[Any], object], rows: Any) -> float:
    dist.barrier()
    began = time.perf_counter()
    call(rows)
    took = torch.tensor(time.perf_counter() - began)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


HEAD = ("a batch of 256 rows", "ms", "of the reference's time", "KB read by each rank", "KB in all")


def bench(server: Any, world_of: Mapping[int, World], quick: bool, results: Results) -> None:
    """Print the table of one server."""
    num_rows, num_rounds = (1024, 2) if quick else (8192, 15)
    url = server.url("tokens")
    write_dataset(make_rows(num_rows), url)
    print(f"\n## {server.label}")
    for setting in SETTINGS:
        world = world_of[int(np.prod(setting.mesh_shape))]
        by_rank = world.run(measure, url, setting, num_rounds, seconds=300)
        reference = by_rank[0][REFERENCE]["seconds"]
        table = []
        for name, record in by_rank[0].items():
            seconds, read = record["seconds"], [found[name]["bytes"] for found in by_rank]
            ratio = statistics.median(own / other for own, other in zip(seconds, reference, strict=True))
            results.add(
                server=server.label,
                setting=setting.label,
                contender=name,
                median_seconds=statistics.median(seconds),
                ratio=ratio,
                bytes_by_rank=read,
            )
            each = ", ".join(f"{count / 1e3:,.0f}" for count in read)
            table.append(
                [name, f"{statistics.median(seconds) * 1e3:.2f}", f"{ratio:.2f}x", each, f"{sum(read) / 1e3:,.0f}"]
            )
        print(f"\n{setting.label}\n")
        print(format_table(HEAD, table))
    server.client.flushdb()


def main() -> None:
    """Run what the options ask for."""
    options = argument_parser("what placing batches over ranks costs").parse_args()
    torch.set_num_threads(1)
    results = Results()
    print(json.dumps(describe_machine()))
    worlds = {size: World(size) for size in (2, 4)}
    try:
        for kind in options.server or SERVER_KINDS:
            with bench_server(kind) as server:
                bench(server, worlds, options.quick, results)
    finally:
        for world in worlds.values():
            world.close()
    results.write(options.json)


if __name__ == "__main__":
    main()
