"""RedisTensorDict against TensorDictStore, operation by operation, in turn and in one run.

    python benchmarks/tensordict_ops.py [--quick] [--json FILE] [--server embedded|redis]

Both hold the same rows on the same server, `RedisTensorDict` in each of its layouts. A ratio is how many times faster
than ``TensorDictStore`` it is: the median over the rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from _bench import BATCH, SERVER_KINDS, BenchServer, Results, argument_parser, bench_server, format_table, interleave
from read import shapes
from tensordict import TensorDict
from tensordict.store import TensorDictStore

from td_datapipes import RedisTensorDict

GOALS = "goals: at least 1.0 everywhere, 5 for reads and writes of scattered rows (list, tensor, mask)"
LAYOUTS = ("records", "tensordict_store")


class Draw:
    """What a round works with: the same for all contenders."""

    def __init__(self, td: TensorDict, rng: np.random.Generator) -> None:
        num_rows = len(td)
        self.row = int(rng.integers(num_rows))
        start = int(rng.integers(num_rows - 4 * BATCH)) if num_rows > 4 * BATCH else 0
        self.run, self.stepped = slice(start, start + BATCH), slice(start, start + 4 * BATCH, 4)
        rows = rng.choice(num_rows, min(BATCH, num_rows // 2), replace=False)
        self.tensor, self.list = torch.as_tensor(rows), rows.tolist()
        self.mask = torch.zeros(num_rows, dtype=torch.bool)
        self.mask[self.tensor] = True
        self.key = str(rng.choice(list(td.keys())))
        self.values: dict[str, TensorDict] = {
            "int": td[self.row].clone(),
            "run": td[self.run].clone(),
            "stepped": td[self.stepped].clone(),
            "scattered": td[self.tensor].clone(),
        }
        self.whole = td[self.key].clone()


Operation = Callable[[Any, Draw], object]


def assign(where: str, value: str) -> Operation:
    """Write rows of all fields."""

    def operation(td: Any, draw: Draw) -> None:
        td[getattr(draw, where)] = draw.values[value]

    return operation


OPERATIONS: dict[str, Operation] = {
    "keys": lambda td, _: list(td.keys(True, True)),
    "get": lambda td, draw: td[draw.key],
    "items": lambda td, _: dict(td.items()),
    "to_tensordict": lambda td, _: td.to_tensordict(),
    "read int": lambda td, draw: td[draw.row],
    "read slice": lambda td, draw: td[draw.run],
    "read step": lambda td, draw: td[draw.stepped],
    "read list": lambda td, draw: td[draw.list],
    "read tensor": lambda td, draw: td[draw.tensor],
    "read mask": lambda td, draw: td[draw.mask],
    "read one field": lambda td, draw: td.get_at(draw.key, draw.tensor),
    "write int": assign("row", "int"),
    "write slice": assign("run", "run"),
    "write step": assign("stepped", "stepped"),
    "write list": assign("list", "scattered"),
    "write tensor": assign("tensor", "scattered"),
    "write mask": assign("mask", "scattered"),
    # Last: a field that is set whole and shares its records with others moves into a group of its own.
    "set": lambda td, draw: td.set(draw.key, draw.whole),
}
SCATTERED = ("read list", "read tensor", "read mask", "write list", "write tensor", "write mask")


def measure(server: BenchServer, label: str, td: TensorDict, rounds: int, results: Results) -> None:
    """Print a table of one kind of rows."""
    store = TensorDictStore.from_tensordict(td, **server.dial_options)
    remote = {
        layout: RedisTensorDict.from_tensordict(td, server.url(f"{label} {layout}"), layout=layout)
        for layout in LAYOUTS
    }
    table = []
    try:
        for name, operation in OPERATIONS.items():
            rng = np.random.default_rng(0)
            contenders: dict[str, Any] = {"TensorDictStore": store, **remote}
            bound = {who: (lambda draw, op=operation, td=td: op(td, draw)) for who, td in contenders.items()}
            timed = interleave(bound, (Draw(td, rng) for _ in range(rounds + 3)))
            row = [name, f"{timed.median('TensorDictStore') * 1e3:.2f}"]
            for layout in LAYOUTS:
                ratio = 1 / timed.ratio(layout, "TensorDictStore")
                goal = 5.0 if name in SCATTERED else 1.0
                row += [f"{timed.median(layout) * 1e3:.2f}", f"{ratio:.1f}" + ("" if ratio >= goal else " (!)")]
                seconds = timed.median(layout)
                results.add(
                    server=server.label, rows=label, operation=name, layout=layout, seconds=seconds, ratio=ratio
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


def main() -> None:
    """Measure all operations of all kinds of rows on each server."""
    arguments = argument_parser(__doc__ or "").parse_args()
    torch.set_num_threads(1)
    results = Results()
    print(GOALS)
    for kind in arguments.server or SERVER_KINDS:
        with bench_server(kind) as server:
            for label, td in shapes(arguments.quick).items():
                measure(server, label, td, 3 if arguments.quick else 15, results)
    results.write(arguments.json)


if __name__ == "__main__":
    main()
