"""What the iterable fronts cost against the map-style data set, and a whole epoch in order against the wire itself.

    python benchmarks/fronts.py [--quick] [--json FILE] [--server embedded|redis]

`benchmarks/loader.py` runs it as well.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from _bench import (
    BATCH,
    SERVER_KINDS,
    BenchServer,
    Results,
    Rounds,
    WireFloor,
    argument_parser,
    bench_server,
    describe_machine,
    format_table,
)
from read import shapes
from tensordict import TensorDict
from torch.utils.data import DataLoader
from torchdata.nodes import Loader

from td_datapipes import RedisTDDataset, RedisTDIterableDataset, RedisTDIterDataPipe, RedisTDReader, write_dataset
from td_datapipes.samplers import BlockShuffleBatchSampler

FRONTS = ("iterable", "datapipe", "node")
GOALS = """\
goals: shuffled, each front within 10% of the map-style figure (1.10x); in order, at least 0.8 of the wire's speed"""


def time_epochs(contenders: Mapping[str, Callable[[], object]], num_rounds: int) -> Rounds:
    """Time whole epochs, in turn: what is read ahead is read for the epoch that is timed, and for no other."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    names, order = list(contenders), random.Random(0)
    for number in range(num_rounds + 1):
        order.shuffle(names)
        for name in names:
            began = time.perf_counter()
            contenders[name]()
            if number:  # the first fills tables and dials
                seconds[name].append(time.perf_counter() - began)
    return Rounds(seconds=seconds)


def drain(loader: Iterable[TensorDict]) -> Callable[[], None]:
    """Takes an epoch of it and drops the batches."""

    def epoch() -> None:
        for _ in loader:
            pass

    return epoch


def open_fronts(url: str, *, shuffle: bool) -> dict[str, Iterable[TensorDict]]:
    """A loader over each of the three fronts."""
    options: dict[str, Any] = {"batch_size": BATCH, "shuffle": shuffle, "drop_last": True, "seed": 0}
    return {
        "iterable": DataLoader(RedisTDIterableDataset(url, **options), batch_size=None),
        "datapipe": DataLoader(RedisTDIterDataPipe(url, **options), batch_size=None),
        "node": Loader(RedisTDReader(url, **options)),
    }


def shuffled(server: BenchServer, label: str, num_rounds: int, results: Results) -> list[str]:
    """A table row: block-shuffled batches."""
    url = server.url("fronts")
    data = RedisTDDataset(url)
    sampler = BlockShuffleBatchSampler(data, BATCH, seed=0, drop_last=True)
    loaders = {"map-style": DataLoader(data, batch_sampler=sampler), **open_fronts(url, shuffle=True)}
    rounds = time_epochs({name: drain(loader) for name, loader in loaders.items()}, num_rounds)
    for name in loaders:
        results.add(server=server.label, shape=label, measure="shuffled", front=name, seconds=rounds.median(name))
    rate = len(sampler) * BATCH / rounds.median("map-style") / 1e3
    return [label, f"{data.row_bytes:,}", f"{rate:,.0f}k", *(f"{rounds.ratio(n, 'map-style'):.2f}x" for n in FRONTS)]


def in_order(server: BenchServer, label: str, td: TensorDict, num_rounds: int, results: Results) -> list[str]:
    """A table row: a whole epoch in order, batch by batch, against covering ranges received and thrown away."""
    floor = WireFloor(td, server)
    try:
        starts = range(0, len(td) - BATCH + 1, BATCH)

        def wire() -> None:
            for start in starts:
                floor.covering(start, start + BATCH)

        loaders = open_fronts(server.url("fronts"), shuffle=False)
        contenders = {"covering": wire, **{name: drain(loader) for name, loader in loaders.items()}}
        rounds = time_epochs(contenders, num_rounds)
    finally:
        floor.close()
    for name in contenders:
        results.add(server=server.label, shape=label, measure="in order", front=name, seconds=rounds.median(name))
    cells = []
    for name in FRONTS:
        beyond = (rounds.median(name) - rounds.median("covering")) / len(starts)
        cells.append(f"{1 / rounds.ratio(name, 'covering'):.2f} ({beyond * 1e6:+,.0f} us)")
    return [label, f"{floor.nbytes:,}", f"{rounds.median('covering') / len(starts) * 1e6:,.0f}", *cells]


def bench_fronts(server: BenchServer, quick: bool, results: Results) -> None:
    """Print the two tables of one server."""
    by_shuffle, by_order, num_rounds = [], [], 2 if quick else 7
    for label, td in shapes(quick).items():
        write_dataset(td, server.url("fronts"), overwrite=True)
        by_shuffle.append(shuffled(server, label, num_rounds, results))
        by_order.append(in_order(server, label, td, num_rounds, results))
    print(f"\nfronts, block-shuffled batches of {BATCH}: time of the map-style data set's\n")
    print(format_table(("rows of", "record B", "map-style rows/s", *FRONTS), by_shuffle))
    print("\nfronts, a whole epoch in order: share of the wire's speed (time beyond it a batch)\n")
    print(format_table(("rows of", "record B", "wire us", *FRONTS), by_order))
    print(f"\n{GOALS}")


def main() -> None:
    """Run what the options ask for."""
    options = argument_parser("what the iterable fronts cost").parse_args()
    torch.set_num_threads(1)
    results = Results()
    print(", ".join(f"{key} {value}" for key, value in describe_machine().items()))
    for kind in options.server or SERVER_KINDS:
        with bench_server(kind) as server:
            print(f"\n## {server.label}")
            bench_fronts(server, options.quick, results)
    results.write(options.json)


if __name__ == "__main__":
    main()
