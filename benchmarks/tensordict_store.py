"""What TensorDictStore wrote, read by RedisTDDataset as it is, against TensorDictStore itself: in turn, in one run.

    python benchmarks/tensordict_store.py [--quick] [--json FILE] [--server embedded|redis]

Both read the same keys of the same server. A ratio is how many times faster than ``TensorDictStore`` it is: the median
over the rounds, and in brackets what half of the rounds lie between. `convert` is timed
once, there and back, as what the same batches cost in the layout `records`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from _bench import (
    BATCH,
    SERVER_KINDS,
    TURN,
    BenchServer,
    Results,
    argument_parser,
    bench_server,
    format_table,
    interleave,
)
from read import Draw, draws, shapes
from tensordict import TensorDict
from tensordict.store import TensorDictStore

from td_datapipes import RedisTDDataset, convert

GOALS = "goals, against TensorDictStore[idx]: scattered rows at least 4x, slices at least 2x"
HEAD = ("rows of", "row B", "store ms", "scattered ms", "ratio", "slice ms", "ratio", "records ms", "convert MB/s")


def slices(num_rows: int, rounds: int) -> Iterator[slice]:
    """As many adjacent rows as a batch has, anywhere."""
    rng = np.random.default_rng(0)
    for start in rng.integers(0, num_rows - BATCH, rounds):
        yield slice(int(start), int(start) + BATCH)


class StoreBench:
    """One kind of rows on one server."""

    def __init__(self, server: BenchServer, label: str, td: TensorDict) -> None:
        self.td, self.label = td, label
        self.store = TensorDictStore.from_tensordict(td, td_id="store", **server.dial_options)
        began = time.perf_counter()
        convert(server.url("store"), server.url("records"))
        self.convert_seconds = time.perf_counter() - began
        self.dataset, self.records = RedisTDDataset(server.url("store")), RedisTDDataset(server.url("records"))

    def close(self) -> None:
        """Leave the server to the next one."""
        self.dataset.close()
        self.records.close()
        self.store.clear_redis()
        self.store.close()

    def check(self, contenders: dict[str, Callable[[Any], Any]], drawn: Any, index: Any) -> None:
        """Every contender gives the right rows.

        Raises:
            RuntimeError: one does not.
        """
        for name, call in contenders.items():
            got = call(drawn)
            if not all(torch.equal(got[key], self.td[key][index]) for key in self.td.keys()):  # noqa: SIM118
                raise RuntimeError(f"{name} gives wrong rows for {self.label!r}")

    def measure(self, num_rounds: int, results: Results, server: str) -> list[str]:
        """A table row."""
        scattered: dict[str, Callable[[Draw], Any]] = {
            "TensorDictStore": lambda draw: self.store[draw.tensor],
            "tensordict_store": lambda draw: self.dataset.__getitems__(draw.numbers),
            "records": lambda draw: self.records.__getitems__(draw.numbers),
        }
        adjacent: dict[str, Callable[[slice], Any]] = {
            "TensorDictStore": lambda rows: self.store[rows],
            "tensordict_store": lambda rows: self.dataset[rows],
        }
        (draw,), (rows,) = draws(len(self.td), 1), slices(len(self.td), 1)
        self.check(scattered, draw, draw.tensor)
        self.check(adjacent, rows, rows)
        many = (num_rounds + 3) * TURN
        batches = interleave(scattered, draws(len(self.td), many))
        runs = interleave(adjacent, slices(len(self.td), many))
        cells = [self.label, f"{self.dataset.row_bytes:,}", f"{batches.median('TensorDictStore') * 1e3:.2f}"]
        for measure, rounds, goal in (("scattered", batches, 4.0), ("slice", runs, 2.0)):
            ratio = 1 / rounds.ratio("tensordict_store", "TensorDictStore")
            low, high = sorted(1 / bound for bound in rounds.quartiles("tensordict_store", "TensorDictStore"))
            seconds = rounds.median("tensordict_store")
            results.add(server=server, rows=self.label, measure=measure, median_seconds=seconds, ratio=ratio)
            cells += [
                f"{seconds * 1e3:.2f}",
                f"{ratio:.1f} [{low:.1f}, {high:.1f}]" + ("" if ratio >= goal else " (!)"),
            ]
        copied = len(self.td) * self.dataset.row_bytes / self.convert_seconds / 1e6
        results.add(server=server, rows=self.label, measure="convert", seconds=self.convert_seconds)
        return [*cells, f"{batches.median('records') * 1e3:.2f}", f"{copied:,.0f}"]


def main() -> None:
    """One table a server."""
    options = argument_parser("reading what TensorDictStore wrote, against TensorDictStore itself").parse_args()
    torch.set_num_threads(1)
    results = Results()
    for kind in options.server or SERVER_KINDS:
        with bench_server(kind) as server:
            table = []
            for label, td in shapes(options.quick).items():
                bench = StoreBench(server, label, td)
                try:
                    table.append(bench.measure(5 if options.quick else 15, results, server.label))
                finally:
                    bench.close()
                    server.client.flushdb()
            print(f"\n## {server.label}: batches of {BATCH} rows\n")
            print(format_table(HEAD, table))
    print(f"\n{GOALS}")
    results.write(options.json)


if __name__ == "__main__":
    main()
