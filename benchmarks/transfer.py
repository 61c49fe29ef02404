"""What sending a batch from loader ranks to trainer ranks costs, by strategy, beside the raw send of the same bytes.

    python benchmarks/transfer.py [--quick] [--json FILE] [--chart FILE.svg]

The reference posts the bytes that each receiver needs from each sender with gloo's isend and irecv, from memory where
they lie in one stretch to memory that is used again: no plan, no checks, no DTensors. Contenders take turns with it in
one loop; what counts is the median over the pairs of neighbours.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _bench import ROOT, Results, describe_machine, format_table
from tensordict import TensorDict

sys.path.insert(0, str(ROOT / "tests" / "distributed"))

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from worlds import World

from td_datapipes import TransferStats, plan_transfer, recv_dtensors, send_dtensors
from td_datapipes.transfer_plan import ShardSpec

RAW = "raw send"
STRATEGIES = {"optimal": "C, optimal", "redistribute": "B, redistribute", "materialize": "A, materialize"}
MEGABYTE = 1 << 20
ROW_BYTES = 4096
TARGET, TARGET_FROM_BYTES, OVERHEAD_SECONDS = 0.8, 64 * MEGABYTE, 2e-3


@dataclass(frozen=True, kw_only=True)
class Setting:
    """From which ranks to which, and where the batch lies.

    Attributes:
        label: for tables.
        src: senders.
        dst: receivers.
        wanted: the receivers' placement; the senders' is by rows.
    """

    label: str
    src: tuple[int, ...]
    dst: tuple[int, ...]
    wanted: int

    @property
    def strategies(self) -> tuple[str, ...]:
        """Those that fit."""
        return tuple(name for name in STRATEGIES if name != "redistribute" or len(self.src) == len(self.dst))


SETTINGS = (
    Setting(label="2 to 2, rows to rows", src=(0, 1), dst=(2, 3), wanted=0),
    Setting(label="2 to 4, rows to rows", src=(0, 1), dst=(2, 3, 4, 5), wanted=0),
    Setting(label="2 to 2, rows to columns", src=(0, 1), dst=(2, 3), wanted=1),
)


def measure(setting: Setting, batch_bytes: int, num_pairs: int) -> dict[str, Any]:
    """On every rank at once: for each strategy (its seconds, the raw send's seconds) pair by pair, and bytes sent."""
    src, dst = (DeviceMesh("cpu", torch.tensor(ranks)) for ranks in (setting.src, setting.dst))
    td = _batch({"x": (batch_bytes // ROW_BYTES, ROW_BYTES // 4)}, src)
    raw = _raw_send(setting, batch_bytes)
    group = dist.new_group([*setting.src, *setting.dst])
    found: dict[str, Any] = {}
    for strategy in setting.strategies:
        stats = TransferStats()
        call = _transfer(td, setting, src, dst, strategy, stats, group)
        pairs = []
        for number in range(num_pairs + 2):
            # Who comes first changes, since the second finds caches full of the other's bytes.
            order = (call, raw) if number % 2 else (raw, call)
            took = {id(one): _slowest(one) for one in order}
            pairs.append((took[id(call)], took[id(raw)]))
        found[strategy] = {"pairs": pairs[2:], "bytes": stats.sent_bytes // stats.transfers if stats.transfers else 0}
    return found


def measure_small(setting: Setting, num_rounds: int) -> dict[str, list[float]]:
    """Seconds of a batch of 20 fields of 1 KB a rank, by strategy."""
    src, dst = (DeviceMesh("cpu", torch.tensor(ranks)) for ranks in (setting.src, setting.dst))
    td = _batch({f"field {number}": (64, 8) for number in range(20)}, src)
    group, found = dist.new_group([*setting.src, *setting.dst]), {}
    for strategy in setting.strategies:
        call = _transfer(td, setting, src, dst, strategy, TransferStats(), group)
        found[strategy] = [_slowest(call) for _ in range(num_rounds + 3)][3:]
    found[RAW] = [_slowest(lambda: None) for _ in range(num_rounds)]
    return found


def _batch(shapes: Mapping[str, tuple[int, ...]], mesh: DeviceMesh) -> TensorDict | None:
    if mesh.get_coordinate() is None:
        return None
    local = {
        name: torch.randint(0, 1000, (rows // mesh.size(), *rest), dtype=torch.int32)
        for name, (rows, *rest) in shapes.items()
    }
    return TensorDict({name: DTensor.from_local(part, mesh, [Shard(0)]) for name, part in local.items()})


def _transfer(
    td: TensorDict | None,
    setting: Setting,
    src: DeviceMesh,
    dst: DeviceMesh,
    strategy: Any,
    stats: TransferStats,
    group: Any,
) -> Callable[[], object]:
    options: Any = {"strategy": strategy, "stats": stats, "group": group}
    placements = (Shard(setting.wanted),)
    if td is not None:
        return lambda: send_dtensors(td, dst, placements=placements, **options)
    if dist.get_rank() in setting.dst:
        return lambda: recv_dtensors(src, dst, placements, **options)
    return lambda: None


def _raw_send(setting: Setting, batch_bytes: int) -> Callable[[], object]:
    shape, rank = (batch_bytes // ROW_BYTES, ROW_BYTES // 4), dist.get_rank()
    sides = (ShardSpec.of(DeviceMesh("cpu", torch.tensor(ranks)), [Shard(dim)]) for ranks, dim in _sides(setting))
    traffic = plan_transfer(shape, *sides).bytes_between(4)
    sends = [(peer, torch.ones(size, dtype=torch.uint8)) for (sender, peer), size in traffic.items() if sender == rank]
    recvs = [(peer, torch.ones(size, dtype=torch.uint8)) for (peer, at), size in traffic.items() if at == rank]

    def call() -> None:
        posted = [dist.isend(data, peer) for peer, data in sends] + [dist.irecv(data, peer) for peer, data in recvs]
        for handle in posted:
            handle.wait()

    return call


def _sides(setting: Setting) -> Sequence[tuple[tuple[int, ...], int]]:
    return (setting.src, 0), (setting.dst, setting.wanted)


def _slowest(call: Callable[[], object]) -> float:
    dist.barrier()
    began = time.perf_counter()
    result = call()
    took = torch.tensor(time.perf_counter() - began)
    del result
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


HEAD = ("batch", "strategy", "ms", "raw send, ms", "of the raw send's speed", "MB sent")


def bench(setting: Setting, world: World, sizes: Sequence[int], num_pairs: int, results: Results) -> list[str]:
    """Print one setting's table; returns the goals it missed."""
    table, missed = [], []
    for size in sizes:
        by_rank = world.run(measure, setting, size, num_pairs, seconds=600)
        sent = {name: sum(found[name]["bytes"] for found in by_rank) for name in setting.strategies}
        for name in setting.strategies:
            pairs = by_rank[0][name]["pairs"]
            own, raw = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
            speed = statistics.median(theirs / mine for mine, theirs in pairs)
            results.add(
                setting=setting.label,
                batch_bytes=size,
                strategy=name,
                median_seconds=own,
                raw_seconds=raw,
                speed=speed,
                sent_bytes=sent[name],
            )
            label = STRATEGIES[name]
            megabytes = f"{size / MEGABYTE:.0f} MB"
            table.append(
                [
                    megabytes,
                    label,
                    f"{own * 1e3:.2f}",
                    f"{raw * 1e3:.2f}",
                    f"{speed:.2f}",
                    f"{sent[name] / MEGABYTE:.1f}",
                ]
            )
            if name != "materialize" and not setting.wanted and size >= TARGET_FROM_BYTES and speed < TARGET:
                missed.append(f"{setting.label}, {megabytes}: {label} at {speed:.2f} of the raw send's speed")
        if sent["optimal"] > min(sent.values()):
            missed.append(f"{setting.label}: C does not move the fewest bytes: {sent}")
    print(f"\n## {setting.label}\n\n{format_table(HEAD, table)}")
    return missed


def bench_small(setting: Setting, world: World, num_rounds: int, results: Results) -> list[str]:
    """Print what a batch of small fields costs beyond the barrier around it; returns the goals it missed."""
    (found, *_) = world.run(measure_small, setting, num_rounds, seconds=120)
    idle, missed, table = statistics.median(found[RAW]), [], []
    for name in setting.strategies:
        seconds = statistics.median(found[name]) - idle
        results.add(setting=setting.label, small_fields=20, strategy=name, median_seconds=seconds)
        table.append([STRATEGIES[name], f"{seconds * 1e3:.2f}"])
        if name != "materialize" and not setting.wanted and seconds > OVERHEAD_SECONDS:
            missed.append(f"{setting.label}: 20 small fields take {seconds * 1e3:.2f} ms with {STRATEGIES[name]}")
    print(f"\n20 small fields\n\n{format_table(('strategy', 'ms'), table)}")
    return missed


def draw(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Speeds over sizes as a chart, one panel a setting."""
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "transfer"
    labels = list(dict.fromkeys(record["setting"] for record in records))
    figure, panels = pyplot.subplots(1, len(labels), figsize=(4 * len(labels), 3.4), sharey=True, squeeze=False)
    for label, panel in zip(labels, panels[0], strict=True):
        for name, title in STRATEGIES.items():
            rows = [r for r in records if r["setting"] == label and r["strategy"] == name and "batch_bytes" in r]
            if rows:
                panel.plot(
                    [r["batch_bytes"] / MEGABYTE for r in rows], [r["speed"] for r in rows], marker="o", label=title
                )
        panel.axhline(1, color="grey", linewidth=0.8)
        panel.axhline(TARGET, color="grey", linewidth=0.8, linestyle=":")
        panel.set_xscale("log", base=2)
        panel.set_title(label, fontsize=10)
        panel.set_xlabel("MB a batch")
    panels[0][0].set_ylabel("of the raw send's speed")
    panels[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> int:
    """Run what the options ask for; 1 where a goal is missed."""
    parser = argparse.ArgumentParser(description="what sending batches from mesh to mesh costs")
    parser.add_argument("--quick", action="store_true", help="small batches and few rounds: shows that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--chart", type=Path, metavar="FILE", help="draw them (needs matplotlib)")
    options = parser.parse_args()
    sizes = [MEGABYTE * size for size in ((1, 64) if options.quick else (1, 4, 16, 64, 256))]
    num_pairs, num_rounds = (5, 20) if options.quick else (20, 200)
    torch.set_num_threads(1)
    results, missed = Results(), []
    print(json.dumps(describe_machine()))
    worlds: dict[int, World] = {}
    try:
        for setting in SETTINGS:
            count = len(setting.src) + len(setting.dst)
            world = worlds.setdefault(count, World(count)) if count not in worlds else worlds[count]
            missed += bench(setting, world, sizes, num_pairs, results)
            missed += bench_small(setting, world, num_rounds, results)
    finally:
        for world in worlds.values():
            world.close()
    results.write(options.json)
    if options.chart is not None:
        draw(results.records, options.chart)
    print("\n" + ("\n".join(f"missed: {goal}" for goal in missed) or "all goals met"))
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
