"""What a training loop gets: loaders of shuffled rows, in turn, in one run, on the embedded Valkey and Debian's Redis.

    python benchmarks/loader.py [--quick] [--json FILE] [--server embedded|redis] [--peers-python PYTHON]

Peers read the same rows from local memory disk. MosaicML streaming and LitData run in an environment of their own, see
README.md; without ``--peers-python`` they are left out.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
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
    interleave,
)
from fronts import bench_fronts
from tensordict import TensorDict
from tensordict.store import TensorDictStore
from torch.utils.data import DataLoader

from td_datapipes import RedisTDDataset, write_dataset
from td_datapipes.samplers import BlockShuffleBatchSampler, CoalescingBatchSampler, RowSampler, SliceBatchSampler

PEERS = ("streaming", "litdata")
MEMORY_DISK = Path("/dev/shm")
NOT_INSTALLED = "not installed"

GOALS_SHUFFLED = "goals: at least the rows/s of memmap with 0 workers, and 8 x the best of streaming and LitData"
GOALS_BLOCKS = (
    "goals: >= 0.7 of the wire's speed for rows of 8 KB and more; below, at most 150 us a batch beyond its time"
)
GOALS_OVERLAP = "goals, as a multiple of max(C, F): <= 1.1 where C waits, <= 1.3 where it computes"
GOALS_SIZE = "goal: a batch of the large data set in <= 1.3 x the time of the small one's"
GOALS_FIRST = "goals: the first batch in < 100 ms and < 10 MB"


def atari_rows(rows: int) -> TensorDict:
    """Rows of 28 KB."""
    generator = np.random.default_rng(0)
    pixels = torch.from_numpy(generator.integers(0, 255, (rows, 4, 84, 84), dtype=np.uint8))
    scalars = {"action": torch.arange(rows) % 9, "reward": torch.arange(rows).double(), "done": torch.arange(rows) % 2}
    return TensorDict({"pixels": pixels, **scalars}, [rows])


def flat_rows(rows: int, nbytes: int) -> TensorDict:
    """Rows of one field of float32."""
    return TensorDict({"x": torch.rand(rows, nbytes // 4)}, [rows])


@contextmanager
def stored(server: BenchServer, name: str, td: TensorDict, **options: Any) -> Iterator[RedisTDDataset]:
    """A data set that is there for a while."""
    write_dataset(td, server.url(name))
    try:
        with RedisTDDataset(server.url(name), **options) as dataset:
            yield dataset
    finally:
        server.client.flushdb()


def shuffled(dataset: RedisTDDataset) -> DataLoader[Any]:
    """Our loader of scattered rows: no worker processes, read ahead."""
    return DataLoader(dataset, batch_sampler=CoalescingBatchSampler(RowSampler(dataset), BATCH, drop_last=True))


def run_epoch(loader: Any) -> None:
    """Take every batch and drop it."""
    for _ in loader:
        pass


# Shuffled rows of 28 KB.


class PeerProcess:
    """`_peers.py` in its own environment; it has written its rows when the constructor returns."""

    def __init__(self, python: str, folder: str, rows: int) -> None:
        command = [python, str(Path(__file__).with_name("_peers.py")), folder, "--rows", str(rows)]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [*command, "--batch", str(BATCH)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self.names: list[str] = self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise RuntimeError(f"the peers' process ended:\n{self._log.read()[-3000:]}")
        return json.loads(line)

    def epoch(self, name: str, num_workers: int) -> float:
        """Seconds of one epoch."""
        assert self._process.stdin is not None
        print(name, num_workers, file=self._process.stdin, flush=True)
        return float(self._answer())

    def close(self) -> None:
        """End it. Workers that were forked here meanwhile hold its standard input open: that it ends is said."""
        assert self._process.stdin is not None
        print("end 0", file=self._process.stdin, flush=True)
        self._process.communicate()
        self._log.close()


def local_loader(local: TensorDict, num_workers: int) -> DataLoader[Any]:
    """A memory-mapped TensorDict, as its own documentation loads it."""
    return DataLoader(
        local,  # type: ignore[arg-type]
        batch_size=BATCH,
        shuffle=True,
        drop_last=True,
        collate_fn=lambda batch: batch,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
    )


def bench_shuffled(server: BenchServer, quick: bool, peers_python: str | None, results: Results) -> None:
    """Print rows/s of every loader of shuffled 28 KB rows."""
    rows = BATCH * (3 if quick else 32)
    td = atari_rows(rows)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=MEMORY_DISK if MEMORY_DISK.is_dir() else None))
        local = td.memmap(f"{folder}/memmap")
        dataset = stack.enter_context(stored(server, "shuffled", td))
        store = TensorDictStore.from_tensordict(td, **server.dial_options)
        stack.callback(store.close)
        seconds_each = {"ours": _timed(shuffled(dataset)), "ours, shuffle=True": _timed(_plain(dataset))}
        seconds_each |= {f"memmap, {workers} workers": _timed(local_loader(local, workers)) for workers in (0, 2)}
        # Far too slow for whole epochs.
        some = BATCH * 2
        seconds_each["TensorDictStore"] = lambda: _timed(_StoreBatches(store, some))() * rows / some
        if peers_python is not None:
            peers = PeerProcess(peers_python, folder, rows)
            stack.callback(peers.close)
            for name, workers in itertools.product(peers.names, (0, 2)):
                seconds_each[f"{name}, {workers} workers"] = _peer(peers, name, workers)
        rounds = rounds_of(seconds_each, 2 if quick else 7)
    print_shuffled(server, rows, rounds, results)


def _plain(dataset: RedisTDDataset) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=BATCH, shuffle=True, drop_last=True)


def _timed(loader: Any) -> Callable[[], float]:
    def epoch() -> float:
        began = time.perf_counter()
        run_epoch(loader)
        return time.perf_counter() - began

    return epoch


def _peer(peers: PeerProcess, name: str, num_workers: int) -> Callable[[], float]:
    return lambda: peers.epoch(name, num_workers)


class _StoreBatches:
    """Scattered batches of a TensorDictStore, again and again."""

    def __init__(self, store: TensorDictStore, rows: int) -> None:
        self._store, self._rows = store, rows

    def __iter__(self) -> Iterator[Any]:
        for batch in torch.randperm(len(self._store))[: self._rows].split(BATCH):
            yield self._store[batch]


def rounds_of(seconds_each: Mapping[str, Callable[[], float]], num_rounds: int) -> Rounds:
    """Contenders that time themselves, in turn, in another order each round; the first round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in seconds_each}
    names, rng = list(seconds_each), np.random.default_rng(0)
    for number in range(num_rounds + 1):
        for at in rng.permutation(len(names)).tolist():
            took = seconds_each[names[at]]()
            if number:
                seconds[names[at]].append(took)
    return Rounds(seconds=seconds)


def print_shuffled(server: BenchServer, rows: int, rounds: Rounds, results: Results) -> None:
    """The table of `bench_shuffled`."""
    lines = []
    reference = "memmap, 0 workers"
    missing = [f"{peer}, {n} workers" for peer in PEERS for n in (0, 2) if f"{peer}, {n} workers" not in rounds.seconds]
    for name in rounds.seconds:
        rate, ratio = rows / rounds.median(name), 1 / rounds.ratio(name, reference)
        results.add(
            server=server.label,
            measure="shuffled",
            contender=name,
            rows_per_second=rate,
            of_memmap=ratio,
            ours_is=rounds.ratio(name, "ours"),
        )
        lines.append([name, f"{rate / 1e3:,.1f}k", f"{ratio:.2f}x", f"{rounds.ratio(name, 'ours'):.2f}x"])
    for name in missing:
        results.add(server=server.label, measure="shuffled", contender=name, note=NOT_INSTALLED)
        lines.append([name, NOT_INSTALLED, "", ""])
    print(f"\nshuffled rows of 28 KB, batches of {BATCH}\n")
    print(format_table(("loader", "rows/s", "of memmap, 0 workers", "ours is"), lines))
    print(f"\n{GOALS_SHUFFLED}")


# Block-shuffled epochs.


def block_shapes(quick: bool) -> dict[str, TensorDict]:
    """Rows of four sizes."""
    part = 20 if quick else 1
    return {
        "28 KB": atari_rows(8192 // part),
        "8 KB": flat_rows(20480 // part, 8192),
        "1.3 KB": flat_rows(102400 // part, 1280),
        "256 B": flat_rows(409600 // part, 256),
    }


def bench_blocks(server: BenchServer, quick: bool, results: Results) -> None:
    """Print how near block-shuffled epochs come to reading everything by covering ranges, and nothing else."""
    lines = []
    for label, td in block_shapes(quick).items():
        with stored(server, "blocks", td) as dataset:
            floor = WireFloor(td, server)
            sampler = BlockShuffleBatchSampler(dataset, BATCH, drop_last=True)
            batches = len(sampler)
            rounds = rounds_of(
                {"wire": _wire_epoch(floor, batches), "blocks": _timed(DataLoader(dataset, batch_sampler=sampler))},
                2 if quick else 7,
            )
            share = 1 / rounds.ratio("blocks", "wire")
            beyond = statistics.median(
                (own - wire) / batches
                for own, wire in zip(rounds.seconds["blocks"], rounds.seconds["wire"], strict=True)
            )
            rate = batches * BATCH / rounds.median("blocks")
            results.add(
                server=server.label,
                measure="block-shuffled",
                shape=label,
                share_of_wire=share,
                seconds_beyond_wire_a_batch=beyond,
                rows_per_second=rate,
            )
            wire = rounds.median("wire") / batches
            lines.append([label, f"{wire * 1e6:,.0f}", f"{share:.2f}", f"{beyond * 1e6:+,.0f}", f"{rate / 1e3:,.0f}k"])
            floor.close()
    print(f"\nblock-shuffled epochs, batches of {BATCH}\n")
    print(format_table(("rows of", "wire us/batch", "of the wire's speed", "us/batch beyond", "rows/s"), lines))
    print(f"\n{GOALS_BLOCKS}")


def _wire_epoch(floor: WireFloor, batches: int) -> Callable[[], float]:
    def epoch() -> float:
        began = time.perf_counter()
        for batch in range(batches):
            floor.covering(batch * BATCH, (batch + 1) * BATCH)
        return time.perf_counter() - began

    return epoch


# Overlap with computing.


class Computing:
    """Work of one thread that takes a given time where nothing else runs."""

    def __init__(self) -> None:
        self._matrix = torch.rand(96, 96)
        self._target = torch.empty(96, 96)
        times = []
        for _ in range(5):
            began = time.perf_counter()
            self._work(500)
            times.append((time.perf_counter() - began) / 500)
        self._seconds_once = min(times)

    def _work(self, times: int) -> None:
        for _ in range(times):
            torch.mm(self._matrix, self._matrix, out=self._target)

    def __call__(self, seconds: float) -> None:
        self._work(max(round(seconds / self._seconds_once), 1))


def bench_overlap(server: BenchServer, quick: bool, results: Results) -> None:
    """Print the time of a step that computes C while F is fetched."""
    computing = Computing()
    ways: dict[str, Callable[[float], None]] = {"waits": time.sleep, "computes": computing}
    lines = []
    for label, td in (("28 KB", atari_rows(BATCH * (4 if quick else 16))), ("1.3 KB", flat_rows(BATCH * 40, 1280))):
        write_dataset(td, server.url("overlap"))
        with (
            RedisTDDataset(server.url("overlap"), prefetch_bytes=0) as alone,
            RedisTDDataset(server.url("overlap")) as ahead,
        ):
            fetch = rounds_of({"": _timed(shuffled(alone))}, 3).median("") / (len(td) // BATCH)
            for way, times in itertools.product(ways, (0.5, 1.0, 2.0)):
                work, asked = ways[way], fetch * times
                compute = _work_seconds(work, asked)
                step = _step_seconds(ahead, work, asked, 1 if quick else 5)
                of_longer = step / max(compute, fetch)
                results.add(
                    server=server.label,
                    measure="overlap",
                    shape=label,
                    way=way,
                    fetch_seconds=fetch,
                    compute_seconds=compute,
                    step_seconds=step,
                    of_longer=of_longer,
                )
                cells = [f"{seconds * 1e3:.2f}" for seconds in (fetch, compute, step)]
                lines.append([f"{label}, C {way}", *cells, f"{of_longer:.2f}x"])
        server.client.flushdb()
    print("\na step that computes C while its next batch is fetched, which alone takes F\n")
    print(format_table(("rows of", "F ms", "C ms", "step ms", "of max(C, F)"), lines))
    print(f"\n{GOALS_OVERLAP}")


def _work_seconds(work: Callable[[float], None], seconds: float) -> float:
    """What a step's work takes by itself: sleeping takes a little longer than asked for."""
    began = time.perf_counter()
    for _ in range(20):
        work(seconds)
    return (time.perf_counter() - began) / 20


def _step_seconds(dataset: RedisTDDataset, work: Callable[[float], None], seconds: float, epochs: int) -> float:
    """Median over epochs; the first batch of each, which nothing could hide, is not counted."""
    found = []
    for _ in range(epochs):
        batches = iter(shuffled(dataset))
        next(batches)
        began, steps = time.perf_counter(), 0
        work(seconds)
        for _ in batches:
            work(seconds)
            steps += 1
        # As many fetches as steps: the first batch's computing stands for the last one's.
        found.append((time.perf_counter() - began - seconds) / steps)
    return statistics.median(found)


# Time a batch against the size of the data set.


def batches_of(rows: int, nbytes: int) -> Iterator[TensorDict]:
    """A large data set in parts."""
    step = 1 << 16
    part = flat_rows(min(rows, step), nbytes)
    for start in range(0, rows, step):
        yield part[: min(step, rows - start)]


def free_bytes() -> int:
    """Memory that programs may still take."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) * 1024


def bench_size(server: BenchServer, quick: bool, results: Results) -> None:
    """Print the time of a batch of scattered rows of a large data set against a small one."""
    nbytes, small, large = 256, 10_000, 100_000 if quick else 10_000_000
    # Twice: a server that saves in the background may copy what is written meanwhile.
    if (needed := 2 * nbytes * large) > free_bytes():
        print(f"\ntime a batch at {large:,} rows: not run, it needs {needed / 1e9:.1f} GB of free memory")
        results.add(server=server.label, measure="size", note="not run: too little memory")
        return
    lines = []
    for rows in (small, large):
        write_dataset(batches_of(rows, nbytes), server.url(f"rows/{rows}"), progress=False)
    for label, prefetch_bytes in (("asked one by one", 0), ("read ahead", 1 << 28)):
        with ExitStack() as stack:
            opened = {
                rows: stack.enter_context(RedisTDDataset(server.url(f"rows/{rows}"), prefetch_bytes=prefetch_bytes))
                for rows in (small, large)
            }
            count = 32
            contenders = {str(rows): _some_batches(dataset, count) for rows, dataset in opened.items()}
            rounds = interleave(contenders, range(5 if quick else 40))
        ratio = rounds.ratio(str(large), str(small))
        results.add(server=server.label, measure="size", way=label, rows=large, of_small=ratio)
        cells = [f"{rounds.median(str(rows)) / count * 1e6:,.0f}" for rows in (small, large)]
        lines.append([label, *cells, f"{ratio:.2f}x"])
    server.client.flushdb()
    print(f"\n{BATCH} scattered rows of {nbytes} B, us a batch\n")
    print(format_table(("", f"{small:,} rows", f"{large:,} rows", "ratio"), lines))
    print(f"\n{GOALS_SIZE}")


def _some_batches(dataset: RedisTDDataset, count: int) -> Callable[[int], None]:
    def run(epoch: int) -> None:
        loader = shuffled(dataset)
        loader.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]
        for _ in itertools.islice(loader, count):
            pass

    return run


# The beginning of an epoch.


@dataclass(frozen=True)
class ManyRows:
    """Stands for a data set of so many rows of 256 B."""

    rows: int
    row_bytes: int = 256

    def __len__(self) -> int:
        return self.rows


def bench_first_batch(quick: bool, results: Results) -> None:
    """Print what the first batch of each sampler takes over a hundred million rows, from making the sampler on."""
    data = ManyRows(10**8)
    offsets = np.arange(0, len(data) + 1, 1000)
    samplers: dict[str, Callable[[], Any]] = {
        "CoalescingBatchSampler(RowSampler)": lambda: CoalescingBatchSampler(RowSampler(data), BATCH),
        "the same, with replacement": lambda: CoalescingBatchSampler(RowSampler(data, replacement=True), BATCH),
        "BlockShuffleBatchSampler": lambda: BlockShuffleBatchSampler(data, BATCH),
        "rank 7 of 8 of it": lambda: BlockShuffleBatchSampler(data, BATCH, rank=7, world_size=8),
        "SliceBatchSampler, 100,000 trajectories": lambda: SliceBatchSampler(data, 16, BATCH // 16, offsets=offsets),
    }
    lines = []
    for name, make in samplers.items():
        cells = []
        for windows in (False, True):
            seconds, peak_bytes = _first_batch(make, 2 if quick else 7, windows)
            results.add(measure="first batch", sampler=name, windows=windows, seconds=seconds, peak_bytes=peak_bytes)
            cells += [f"{seconds * 1e3:.2f}", f"{peak_bytes / 1e6:.2f}"]
        lines.append([name, *cells])
    print(
        f"\nthe first batch over {len(data):,} rows, and with what it announces drawn (weights: 8 bytes a row more)\n"
    )
    print(format_table(("sampler", "ms", "peak MB", "windows, ms", "windows, MB"), lines))
    print(f"\n{GOALS_FIRST}")


def _first_batch(make: Callable[[], Any], rounds: int, windows: bool) -> tuple[float, int]:
    def first() -> Sequence[int]:
        batch = next(iter(make()))
        # A data set that reads ahead asks for them.
        window = batch.window if windows else None
        while window is not None:
            _, window = window.batches, window.next
        return list(batch)

    took = []
    for _ in range(rounds):
        began = time.perf_counter()
        first()
        took.append(time.perf_counter() - began)
    tracemalloc.start()
    first()
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return statistics.median(took), peak_bytes


def main() -> None:
    """Run what the options ask for."""
    parser = argument_parser("what a training loop gets from loaders of shuffled rows")
    parser.add_argument("--peers-python", metavar="PYTHON", help="one that has streaming and litdata; see README.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = Results()
    print(", ".join(f"{key} {value}" for key, value in describe_machine().items()))
    for kind in options.server or SERVER_KINDS:
        with bench_server(kind) as server:
            print(f"\n## {server.label}")
            bench_shuffled(server, options.quick, options.peers_python, results)
            bench_blocks(server, options.quick, results)
            bench_overlap(server, options.quick, results)
            bench_size(server, options.quick, results)
            bench_fronts(server, options.quick, results)
    bench_first_batch(options.quick, results)
    results.write(options.json)


if __name__ == "__main__":
    main()
