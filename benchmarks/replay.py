"""What a replay buffer on a server costs, against torchrl's storages and Reverb, all in turn in one run.

    python benchmarks/replay.py [--quick] [--json FILE] [--server embedded|redis]
                                [--rl-python PYTHON] [--reverb-python PYTHON]

torchrl (``.venv-rl``, made by ``make rl``) and Reverb run in environments of their own, see README.md; without those
options they are left out.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from _bench import (
    BATCH,
    SERVER_KINDS,
    BenchServer,
    Results,
    argument_parser,
    bench_server,
    describe_machine,
    format_table,
)
from _replay_peers import WARM_UP, arrays
from servers import ServerProcess
from tensordict import TensorDict

from td_datapipes import RedisReplayBuffer
from td_datapipes._supervisor import CONFIGURATION
from td_datapipes.replay import Prioritized, Uniform

SHAPES = {"small": ("276 B", 40_960), "large": ("28 KB", 8_192)}
MEASURES = ("uniform", "prioritized", "extend")
OURS = "RedisReplayBuffer"
PEERS = {"memmap": "LazyMemmapStorage", "store": "StoreStorage", "reverb": "Reverb", "reverb-inside": "Reverb inside"}
"""Reverb's server in a process of its own, and inside the learner's."""
TREES = (10_000, 1_000_000)
_ROUND_SECONDS, _FEWEST_CALLS, _MOST_CALLS = 0.3, 10, 200
"""Of one contender's turn: as long for the fast ones as for the slow, since each begins with cold caches."""
PERSISTING = {option: value for option, value in CONFIGURATION.items() if value}
"""As the embedded server does."""
GOALS = """\
goals, in rows/s: 28 KB uniform >= 1.0 x Reverb and 10 x StoreStorage; 276 B uniform >= 2 x Reverb and 5 x StoreStorage;
prioritized >= 1.0 x Reverb; extend >= 5 x StoreStorage; a tree of a million rows <= 2.0 x the time of ten thousand"""


class Peer:
    """Another replay buffer, in a process of its own."""

    def __init__(self, python: Path, *arguments: str) -> None:
        script = Path(__file__).with_name("_replay_peers.py")
        self._process = subprocess.Popen(
            [str(python), str(script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        if self._ask("") != "ready":
            raise RuntimeError(f"{python} {' '.join(arguments)} did not start")

    def _ask(self, line: str) -> str:
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("it has no pipes")
        if line:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        for said in self._process.stdout:
            if said.startswith(">"):
                return said[1:].strip()
        return ""

    def seconds(self, measure: str, num_batches: int) -> float | None:
        """What a batch takes; None where it has no such thing."""
        answer = self._ask(f"{measure} {num_batches}")
        return None if answer == "none" else float(answer)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.wait()


class Ours:
    """A buffer and what is measured of it."""

    def __init__(self, url: str, shape: str, rows: int) -> None:
        self._rows = TensorDict({n: torch.from_numpy(v) for n, v in arrays(shape, BATCH).items()}, [BATCH])
        self._writer = RedisReplayBuffer(url, rows)
        for _ in range(rows // BATCH):
            index = self._writer.extend(self._rows)
            self._writer.update_priority(index, torch.rand(BATCH))
        self._url = url

    def seconds(self, measure: str, num_batches: int) -> float:
        """What a batch takes."""
        if measure == "extend":
            return _per_call(lambda: self._writer.extend(self._rows), num_batches)
        sampler = Uniform() if measure == "uniform" else Prioritized()
        with RedisReplayBuffer(self._url, sampler=sampler, batch_size=BATCH, prefetch=3) as buffer:
            return _per_call(buffer.sample, num_batches)

    def __enter__(self) -> Ours:
        return self

    def __exit__(self, *exc: object) -> None:
        self._writer.drop()
        self._writer.close()


def _per_call(call: Callable[[], object], number: int) -> float:
    for _ in range(WARM_UP):
        call()
    began = time.perf_counter()
    for _ in range(number):
        call()
    return (time.perf_counter() - began) / number


def compare(server: BenchServer, store: ServerProcess, options: Any, results: Results) -> None:
    """Print the table of one server: milliseconds a batch."""
    lines = []
    for shape, (label, rows) in SHAPES.items():
        with ExitStack() as stack:
            contenders: dict[str, Any] = {OURS: stack.enter_context(Ours(server.url(shape), shape, rows))}
            for kind, name in PEERS.items():
                python = options.reverb_python if kind.startswith("reverb") else options.rl_python
                if python is not None:
                    where = (store.host, str(store.port)) if kind == "store" else ()
                    contenders[name] = stack.enter_context(Peer(python, kind, shape, str(rows), *where))
            for measure in MEASURES:
                seconds = rounds_of(contenders, measure, 2 if options.quick else 7)
                lines.append([f"{label} {measure}", *cells(seconds)])
                for name, value in seconds.items():
                    results.add(server=server.label, shape=label, measure=measure, contender=name, seconds=value)
    print(f"\n## {server.label}\n\nmilliseconds a batch of {BATCH} rows, and how many times as long as ours\n")
    print(format_table(("", OURS, *PEERS.values()), lines))


def rounds_of(contenders: Mapping[str, Any], measure: str, num_rounds: int) -> dict[str, float]:
    """Median seconds a batch, contenders in turn."""
    found: dict[str, list[float]] = {}
    names, order = list(contenders), random.Random(0)
    numbers: dict[str, int] = {}
    for name in names:
        once = contenders[name].seconds(measure, _FEWEST_CALLS)
        if once is not None:
            numbers[name] = min(max(_FEWEST_CALLS, int(_ROUND_SECONDS / once)), _MOST_CALLS)
    for _ in range(num_rounds):
        order.shuffle(names)
        for name in filter(numbers.__contains__, names):
            found.setdefault(name, []).append(contenders[name].seconds(measure, numbers[name]))
    return {name: statistics.median(values) for name, values in found.items()}


def cells(seconds: Mapping[str, float]) -> list[str]:
    """A table row's cells."""
    ours = seconds[OURS]
    shown = [f"{ours * 1e3:.2f}"]
    for name in PEERS.values():
        shown.append(f"{seconds[name] * 1e3:.2f} ({seconds[name] / ours:.1f}x)" if name in seconds else "-")
    return shown


def trees(server: BenchServer, quick: bool, results: Results) -> None:
    """Print what drawing by priority takes from a small and a large tree, rows of 276 bytes included."""
    buffers = {}
    for rows in TREES:
        buffer = RedisReplayBuffer(server.url(f"tree{rows}"), rows, sampler=Prioritized(), batch_size=BATCH)
        part = TensorDict({"x": torch.zeros(8192, 66)}, [8192])
        for start in range(0, rows, 8192):
            index = buffer.extend(part[: min(8192, rows - start)])
            buffer.update_priority(index, torch.rand(len(index)))
        buffers[rows] = buffer
    seconds: dict[int, list[float]] = {rows: [] for rows in TREES}
    for _ in range(3 if quick else 15):
        for rows, buffer in buffers.items():
            seconds[rows].append(_per_call(buffer.sample, 5))
    small, large = (statistics.median(seconds[rows]) for rows in TREES)
    ratio = statistics.median(b / a for a, b in zip(seconds[TREES[0]], seconds[TREES[1]], strict=True))
    print(f"\n{BATCH} rows by priority: of {TREES[0]:,} {small * 1e3:.2f} ms, of {TREES[1]:,} {large * 1e3:.2f} ms, ")
    print(f"ratio {ratio:.2f}")
    results.add(server=server.label, measure="tree", small=small, large=large, ratio=ratio)
    for buffer in buffers.values():
        buffer.drop()


def main() -> None:
    """Run what the options ask for."""
    parser = argument_parser("what a replay buffer on a server costs")
    parser.add_argument("--rl-python", type=Path, help="python of an environment with torchrl")
    parser.add_argument("--reverb-python", type=Path, help="python of an environment with Reverb")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = Results()
    print(", ".join(f"{key} {value}" for key, value in describe_machine().items()))
    for kind in options.server or SERVER_KINDS:
        # torchrl's StoreStorage dials by host and port only: it gets the same kind of server, without a password.
        alike = ServerProcess("valkey", config=PERSISTING) if kind == "embedded" else ServerProcess("redis")
        with bench_server(kind) as server, alike as store:
            compare(server, store, options, results)
            trees(server, options.quick, results)
    print(f"\n{GOALS}")
    results.write(options.json)


if __name__ == "__main__":
    sys.exit(main())
