"""RedisTensorDict against TensorDictStore, operation by operation, in turn and in one run.

    python benchmarks/tensordict_ops.py [--quick] [--json FILE] [--server embedded|redis]

Both hold the same rows on the same server, `RedisTensorDict` in each of its layouts. All take turns with the same
draws, round by round. A ratio is how many times faster than ``TensorDictStore`` it is: the median over the rounds, and
in brackets what half of the rounds lie between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from _bench import (
    BATCH,
    SERVER_KINDS,
    BenchServer,
    Results,
    Rounds,
    argument_parser,
    bench_server,
    format_table,
    interleave,
)
from read import shapes
from tensordict import TensorDict
from tensordict.store import TensorDictStore

from td_datapipes import RedisTensorDict

GOALS = "goals: at least 1.0 everywhere, 5 for reads and writes of scattered rows (list, tensor, mask)"
LAYOUTS = ("records", "tensordict_store")
CALLS = 4
"""In succession: fewer than elsewhere, as some operations take half a second."""
SECONDS = 1.2
"""Of rounds of an operation; slow ones have few."""
MIN_ROUNDS = 4
MAX_ROUNDS = 24


class Draw:
    """What a round works with: the same for all contenders.

    Args:
        td: the rows.
        rng: draws some of them.
        written: which of its values an operation writes; only that is copied.
    """

    def __init__(self, td: TensorDict, rng: np.random.Generator, written: str) -> None:
        num_rows = len(td)
        self.row = int(rng.integers(num_rows))
        start = int(rng.integers(num_rows - 4 * BATCH)) if num_rows > 4 * BATCH else 0
        self.slice, self.step = slice(start, start + BATCH), slice(start, start + 4 * BATCH, 4)
        rows = rng.choice(num_rows, min(BATCH, num_rows // 2), replace=False)
        self.tensor, self.list = torch.as_tensor(rows), rows.tolist()
        self.mask = torch.zeros(num_rows, dtype=torch.bool)
        self.mask[self.tensor] = True
        self.key = str(rng.choice(list(td.keys())))
        self.value: Any = None
        if written == "entry":
            self.value = td[self.key].clone()
        elif written:
            self.value = td[getattr(self, written)].clone()


@dataclass(frozen=True)
class Operation:
    """Something that is done to all contenders.

    Attributes:
        call: does it.
        written: the index whose rows it writes, or ``entry``; empty where it reads.
    """

    call: Callable[[Any, Draw], object]
    written: str = ""


def read(where: str) -> Operation:
    """Read rows of all fields."""
    return Operation(lambda td, draw: td[getattr(draw, where)])


def write(where: str) -> Operation:
    """Write rows of all fields."""

    def call(td: Any, draw: Draw) -> None:
        td[getattr(draw, where)] = draw.value

    return Operation(call, where)


OPERATIONS: dict[str, Operation] = {
    "keys": Operation(lambda td, _: list(td.keys(True, True))),
    "get": Operation(lambda td, draw: td[draw.key]),
    "items": Operation(lambda td, _: dict(td.items())),
    "to_tensordict": Operation(lambda td, _: td.to_tensordict()),
    "read int": read("row"),
    "read slice": read("slice"),
    "read step": read("step"),
    "read list": read("list"),
    "read tensor": read("tensor"),
    "read mask": read("mask"),
    "read one field": Operation(lambda td, draw: td.get_at(draw.key, draw.tensor)),
    "write int": write("row"),
    "write slice": write("slice"),
    "write step": write("step"),
    "write list": write("list"),
    "write tensor": write("tensor"),
    "write mask": write("mask"),
    # Last: a field that is set whole and shares its records with others moves into a group of its own.
    "set": Operation(lambda td, draw: td.set(draw.key, draw.value), "entry"),
}
SCATTERED = ("read list", "read tensor", "read mask", "write list", "write tensor", "write mask")


def measure(server: BenchServer, label: str, td: TensorDict, seconds: float, results: Results) -> None:
    """Print a table of one kind of rows."""
    store = TensorDictStore.from_tensordict(td, **server.dial_options)
    remote = {
        layout: RedisTensorDict.from_tensordict(td, server.url(f"{label} {layout}"), layout=layout)
        for layout in LAYOUTS
    }
    table = []
    try:
        for name, operation in OPERATIONS.items():
            timed = in_turn({"TensorDictStore": store, **remote}, operation, td, seconds)
            row = [name, f"{timed.median('TensorDictStore') * 1e3:.2f}"]
            for layout in LAYOUTS:
                ratio = 1 / timed.ratio(layout, "TensorDictStore")
                low, high = sorted(1 / bound for bound in timed.quartiles(layout, "TensorDictStore"))
                goal = 5.0 if name in SCATTERED else 1.0
                cell = f"{ratio:.1f} [{low:.1f}, {high:.1f}]" + ("" if ratio >= goal else " (!)")
                row += [f"{timed.median(layout) * 1e3:.2f}", cell]
                results.add(
                    server=server.label,
                    rows=label,
                    operation=name,
                    layout=layout,
                    seconds=timed.median(layout),
                    ratio=ratio,
                    quartiles=[low, high],
                    rounds=len(timed.seconds[layout]),
                )
            table.append(row)
    finally:
        store.clear_redis()
        store.close()
        for td_remote in remote.values():
            with suppress(Exception):
                td_remote.clear_redis()
            td_remote.close()
    print(f"\n### {label}, {server.label}\n")
    print(format_table(["", "TensorDictStore ms", "records ms", "ratio", "tensordict_store ms", "ratio"], table))


def in_turn(contenders: Mapping[str, Any], operation: Operation, td: TensorDict, seconds: float) -> Rounds:
    """Time an operation of all contenders, in as many rounds as take about so long."""
    rng = np.random.default_rng(0)
    bound = {who: partial(operation.call, contender) for who, contender in contenders.items()}
    first = interleave(bound, (Draw(td, rng, operation.written) for _ in range(2)), turn=2)
    round_seconds = CALLS * sum(first.total(who) for who in contenders)
    rounds = min(max(int(seconds / round_seconds), MIN_ROUNDS), MAX_ROUNDS)
    draws = (Draw(td, rng, operation.written) for _ in range(rounds * CALLS))
    return interleave(bound, draws, num_warmup=rounds // 6, turn=CALLS)


def main() -> None:
    """Measure all operations of all kinds of rows on each server."""
    arguments = argument_parser(__doc__ or "").parse_args()
    torch.set_num_threads(1)
    results = Results()
    print(GOALS)
    for kind in arguments.server or SERVER_KINDS:
        with bench_server(kind) as server:
            for label, td in shapes(arguments.quick).items():
                measure(server, label, td, 0.0 if arguments.quick else SECONDS, results)
    results.write(arguments.json)


if __name__ == "__main__":
    main()
