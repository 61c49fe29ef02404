"""What reading costs: every way we know, in turn, in one run, on the embedded Valkey and on Debian's Redis.

    python benchmarks/read.py [--quick] [--json FILE] [--server embedded|redis]

The reference is the *wire floor*: requests joined from prebuilt tables, the whole reply stream received into one
buffer, fields seen as strided views of it, and no checks at all. It is what the wire itself can do.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _bench import (
    ALIGNMENT_BYTES,
    BATCH,
    ROOT,
    SERVER_KINDS,
    TURN,
    BenchServer,
    Results,
    Rounds,
    Rows,
    WireFloor,
    argument_parser,
    bench_server,
    describe_machine,
    format_table,
    interleave,
    rss_bytes,
)
from tensordict import TensorDict
from tensordict.store import TensorDictStore
from torch.utils.data import DataLoader

from td_datapipes import RedisTDDataset, write_dataset

LARGE_RECORD_BYTES = 8000
"""From here on the wire dominates; below, what a batch costs whatever its size does."""

GOALS = f"""\
goals, as a multiple of the wire floor: contiguous <= 1.3, strided <= 1.1
goals of adjacent rows and epochs, as a share of the covering range's speed: >= 0.8 where a record has at least
{LARGE_RECORD_BYTES} bytes; below that the wire's time + at most 150 us a batch"""


def shapes(quick: bool) -> dict[str, TensorDict]:
    """Rows of four kinds; `quick` makes a tenth of them."""
    part = 10 if quick else 1
    n = 10_000 // part
    found = {"5 x 64 f32": TensorDict({f"k{i}": torch.randn(n, 64) for i in range(5)}, [n])}
    n = 8_000 // part
    pixels = torch.randint(0, 255, (n, 4, 84, 84), dtype=torch.uint8)
    scalars = {"action": torch.randint(0, 9, (n,)), "reward": torch.randn(n), "done": torch.zeros(n, dtype=torch.bool)}
    found["atari"] = TensorDict({"pixels": pixels, **scalars}, [n])
    n = 50_000 // part
    widths = {"obs": 17, "next": 17, "action": 6, "reward": 1}
    found["mujoco"] = TensorDict({key: torch.randn(n, width) for key, width in widths.items()}, [n])
    n = 20_000 // part
    found["tokens"] = TensorDict({"ids": torch.randint(0, 50_000, (n, 2048), dtype=torch.int32)}, [n])
    return found


def redis_py_reader(floor: WireFloor, client: Any) -> Callable[[Rows], TensorDict]:
    """What one writes without a library: a pipeline of GETRANGE, and torch.frombuffer over the joined replies."""

    def read(rows: Rows) -> TensorDict:
        pipeline = client.pipeline(transaction=False)
        chunk, row = np.divmod(rows, floor.chunk_rows)
        for c, r in zip(chunk.tolist(), row.tolist(), strict=True):
            pipeline.getrange(floor.keys[c], r * floor.nbytes, (r + 1) * floor.nbytes - 1)
        # Records of the floor are not a multiple of 16 long: pad each, so that any dtype can be viewed.
        stride = -(-floor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        fill = bytes(stride - floor.nbytes)
        joined = bytearray(fill.join([*pipeline.execute(), b""]))
        return floor.shape.view(torch.frombuffer(joined, dtype=torch.uint8), 0, stride, len(rows))

    return read


@dataclass(frozen=True, kw_only=True)
class Draw:
    """The rows of a batch, in the form each contender takes."""

    array: Rows
    tensor: torch.Tensor
    numbers: list[int]


def draws(num_rows: int, rounds: int) -> Iterator[Draw]:
    """Random batches without repeats, as a shuffling loader asks for them."""
    rng = np.random.default_rng(0)
    for _ in range(rounds):
        array = rng.choice(num_rows, BATCH, replace=False)
        yield Draw(array=array, tensor=torch.as_tensor(array), numbers=array.tolist())


class ShapeBench:
    """All measurements of one kind of rows on one server."""

    def __init__(self, server: BenchServer, label: str, td: TensorDict, folder: Path, results: Results) -> None:
        self.server, self.label, self.td, self.results = server, label, td, results
        url = server.url(label)
        write_dataset(td, url)
        self.contiguous, self.strided = RedisTDDataset(url), RedisTDDataset(url, strided=True)
        small = min(td.keys(), key=lambda key: td[key][0].nbytes)
        self.part = RedisTDDataset(url, fields=[small]) if len(list(td.keys())) > 1 else None
        self.floor = WireFloor(td, server)
        self.store = TensorDictStore.from_tensordict(td, **server.dial_options)
        self.local = td.memmap(folder)

    def close(self) -> None:
        """Leave the server as it was found."""
        for dataset in (self.contiguous, self.strided, self.part):
            if dataset is not None:
                dataset.close()
        self.floor.close()
        self.store.clear_redis()
        self.store.close()
        self.server.client.flushdb()

    def _keep(self, measure: str, rounds: Rounds, reference: str) -> None:
        for name in rounds.seconds:
            self.results.add(
                server=self.server.label,
                shape=self.label,
                measure=measure,
                contender=name,
                median_seconds=rounds.median(name),
                ratio=rounds.ratio(name, reference),
                reference=reference,
            )

    def check(self) -> None:
        """Every contender gives the right rows.

        Raises:
            RuntimeError: one does not.
        """
        (draw,) = draws(len(self.td), 1)
        wanted = self.td[draw.tensor]
        for name, call in self._scattered().items():
            got: Any = call(draw)
            if not all(torch.equal(got[key], wanted[key]) for key in wanted.keys()):  # noqa: SIM118
                raise RuntimeError(f"{name} gives wrong rows for {self.label!r}")

    def _scattered(self) -> dict[str, Callable[[Draw], Any]]:
        redis_py = redis_py_reader(self.floor, self.server.client)
        return {
            "floor": lambda draw: self.floor.scattered(draw.array),
            "contiguous": lambda draw: self.contiguous.__getitems__(draw.numbers),
            "strided": lambda draw: self.strided.__getitems__(draw.numbers),
            "store": lambda draw: self.store[draw.tensor],
            "redis-py": lambda draw: redis_py(draw.array),
            "memmap": lambda draw: self.local[draw.tensor],
        }

    def scattered(self, num_rounds: int) -> list[str]:
        """A table row: a batch of scattered rows."""
        warmup = 3
        rounds = interleave(self._scattered(), draws(len(self.td), (num_rounds + warmup) * TURN), num_warmup=warmup)
        self._keep("scattered", rounds, "floor")
        others = [f"{rounds.ratio(name, 'contiguous'):.2f}x" for name in ("store", "redis-py", "memmap")]
        ours = [f"{rounds.ratio(name, 'floor'):.2f}x" for name in ("contiguous", "strided")]
        floor, contiguous = rounds.median("floor"), rounds.median("contiguous")
        speed = f"{BATCH / contiguous / 1e3:,.0f}k"
        return [self.label, f"{self.floor.nbytes:,}", f"{floor * 1e6:,.0f}", *ours, speed, *others]

    def adjacent(self, num_rounds: int) -> list[str]:
        """A table row: the same 256 adjacent rows again and again, as row numbers and as a slice."""
        start = len(self.td) // 3
        window = slice(start, start + BATCH)
        numbers = list(range(window.start, window.stop))
        contenders: dict[str, Callable[[None], Any]] = {
            "covering": lambda _: self.floor.covering(window.start, window.stop),
            "contiguous": lambda _: self.contiguous.__getitems__(numbers),
            "slice": lambda _: self.contiguous[window],
            "strided": lambda _: self.strided.__getitems__(numbers),
        }
        rounds = interleave(contenders, [None] * ((num_rounds + 3) * TURN))
        self._keep("adjacent", rounds, "covering")
        return self._against_covering(rounds, ("contiguous", "slice", "strided"))

    def epoch(self) -> list[str]:
        """A table row: all rows in order, a slice a batch."""
        batches = [slice(start, start + BATCH) for start in range(0, len(self.td) - BATCH + 1, BATCH)]
        contenders: dict[str, Callable[[slice], Any]] = {
            "covering": lambda rows: self.floor.covering(rows.start, rows.stop),
            "contiguous": lambda rows: self.contiguous[rows],
            "strided": lambda rows: self.strided[rows],
        }
        # The first batches are read twice, so that the counted turns are one whole epoch.
        rounds = interleave(contenders, [*batches[:TURN], *batches], num_warmup=1)
        self._keep("epoch", rounds, "covering")
        rate = BATCH / rounds.median("contiguous")
        return [*self._against_covering(rounds, ("contiguous", "strided")), f"{rate / 1e3:,.0f}k"]

    def _against_covering(self, rounds: Rounds, names: Sequence[str]) -> list[str]:
        wire = rounds.median("covering")
        cells = [self.label, f"{self.floor.nbytes:,}", f"{wire * 1e6:,.0f}"]
        for name in names:
            share = 1 / rounds.ratio(name, "covering")
            cells.append(f"{share:.2f} ({(rounds.median(name) - wire) * 1e6:+,.0f} us)")
        return cells

    def subset(self, num_rounds: int) -> list[str] | None:
        """A table row: one small field of scattered rows against all fields; None where there is but one field."""
        if self.part is None:
            return None
        part, before = self.part, self.part.stats
        contenders: dict[str, Callable[[Draw], Any]] = {
            "all fields": lambda draw: self.contiguous.__getitems__(draw.numbers),
            "one field": lambda draw: part.__getitems__(draw.numbers),
        }
        rounds = interleave(contenders, draws(len(self.td), (num_rounds + 3) * TURN))
        self._keep("field subset", rounds, "all fields")
        after = part.stats
        moved = (after.bytes - before.bytes) / (after.rows - before.rows)
        field = ".".join(part.fields[0])
        return [
            self.label,
            field,
            f"{self.td[part.fields[0]][0].nbytes:,}",
            f"{moved:,.0f}",
            f"{self.contiguous.row_bytes:,}",
            f"{rounds.ratio('one field', 'all fields'):.2f}x",
        ]


SCATTERED_HEAD = (
    *("rows of", "record B", "floor us", "contiguous", "strided", "rows/s"),
    *("TensorDictStore", "redis-py", "memmap"),
)
ADJACENT_HEAD = ("rows of", "record B", "wire us", "row numbers", "slice", "strided")
EPOCH_HEAD = ("rows of", "record B", "wire us", "contiguous", "strided", "rows/s")
SUBSET_HEAD = ("rows of", "field", "field B", "moved B/row", "all fields B", "time of all fields")


def bench_reads(server: BenchServer, quick: bool, results: Results) -> None:
    """Print the four tables of one server."""
    tables: dict[str, list[list[str]]] = {"scattered": [], "adjacent": [], "epoch": [], "subset": []}
    num_rounds = 2 if quick else 15
    for label, td in shapes(quick).items():
        with tempfile.TemporaryDirectory() as folder:
            bench = ShapeBench(server, label, td, Path(folder), results)
            try:
                bench.check()
                tables["scattered"].append(bench.scattered(num_rounds))
                tables["adjacent"].append(bench.adjacent(num_rounds))
                tables["epoch"].append(bench.epoch())
                if row := bench.subset(num_rounds):
                    tables["subset"].append(row)
            finally:
                bench.close()
    print(f"\n## {server.label}")
    print(f"\n{BATCH} scattered rows: ours against the wire floor, others against our contiguous batches\n")
    print(format_table(SCATTERED_HEAD, tables["scattered"]))
    print(
        f"\n{BATCH} adjacent rows, and a whole epoch in order: share of the covering range's speed (time beyond it)\n"
    )
    print(format_table(ADJACENT_HEAD, tables["adjacent"]) + "\n")
    print(format_table(EPOCH_HEAD, tables["epoch"]))
    print(f"\none field of {BATCH} scattered rows\n")
    print(format_table(SUBSET_HEAD, tables["subset"]))
    print(f"\n{GOALS}")


def large_batches(total_bytes: int) -> Iterator[TensorDict]:
    """Batches of rows of 28 KB."""
    n = 1024
    batch = TensorDict({"pixels": torch.randint(0, 255, (n, 4, 84, 84), dtype=torch.uint8)}, [n])
    for number in range(total_bytes // (n * 4 * 84 * 84)):
        yield batch.clone().set("row", torch.arange(number * n, (number + 1) * n))


def bench_memory(server: BenchServer, quick: bool, results: Results) -> None:
    """Print how much a client's memory grows while it reads a data set several times its size, in a fresh process."""
    url = server.url("large")
    write_dataset(large_batches((64 if quick else 1536) << 20), url)
    command = [sys.executable, str(Path(__file__).resolve()), "--read-all", url]
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = json.loads(answer.splitlines()[-1])
    results.add(server=server.label, measure="client memory", **found)
    megabytes = {key.removesuffix("_bytes"): value / 1e6 for key, value in found.items()}
    print(
        f"\nclient memory while reading {megabytes['read']:,.0f} MB, shuffled: {megabytes['before']:,.0f} MB after the "
        f"first batches, at most {megabytes['peak'] - megabytes['before']:+,.1f} MB from there"
    )
    server.client.flushdb()


def read_all(url: str) -> None:
    """What `bench_memory` runs: read a data set through a loader and print resident memory as JSON."""
    torch.set_num_threads(1)
    with RedisTDDataset(url) as dataset:
        loader = DataLoader(dataset, batch_size=BATCH, shuffle=True)
        before = peak = 0
        for number, batch in enumerate(loader):
            now = rss_bytes()
            # The first batches bring in code and buffers that stay as they are.
            before = now if number < 5 else before
            peak = max(peak, now)
            del batch
        found = {"before_bytes": before, "peak_bytes": peak, "read_bytes": dataset.stats.bytes}
    print(json.dumps(found))


def bench_import(results: Results) -> None:
    """Print what ``import td_datapipes`` takes where torch and tensordict are imported already."""
    script = (
        "import time, torch, tensordict; a = time.perf_counter(); import td_datapipes; b = time.perf_counter(); "
        "td_datapipes.RedisTDDataset; print(b - a, time.perf_counter() - b)"
    )
    found = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, cwd=ROOT)
        found.append([float(word) for word in done.stdout.split()])
    package, dataset = (statistics.median(column) for column in zip(*found, strict=True))
    results.add(measure="import", import_seconds=package, dataset_seconds=dataset)
    print(
        f"\nimport td_datapipes, beyond torch and tensordict: {package:.3f} s (goal: < 0.1 s); "
        f"the first use of RedisTDDataset: {dataset:.3f} s more"
    )


def main() -> None:
    """Run what the options ask for."""
    parser = argument_parser("what reading costs, against the wire itself and others")
    parser.add_argument("--read-all", metavar="URL", help="only read it all and print the memory that takes")
    options = parser.parse_args()
    if options.read_all:
        read_all(options.read_all)
        return
    torch.set_num_threads(1)
    results = Results()
    print(", ".join(f"{key} {value}" for key, value in describe_machine().items()))
    for kind in options.server or SERVER_KINDS:
        with bench_server(kind) as server:
            bench_reads(server, options.quick, results)
            bench_memory(server, options.quick, results)
    bench_import(results)
    results.write(options.json)


if __name__ == "__main__":
    main()
