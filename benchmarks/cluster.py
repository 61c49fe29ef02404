"""Batches from clusters of one, two and three masters against one server, with the processor time both sides took.

    python benchmarks/cluster.py [--quick] [--json FILE] [--server embedded|redis]

What cluster mode costs is the first column against the second: the same work, from one node. Where servers and reader
share few cores, more masters cannot be faster; the processor time says what each batch costs.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from _bench import BATCH, SERVER_KINDS, Results, argument_parser, describe_machine, format_table
from servers import Kind, ServerProcess, start_cluster
from tensordict import TensorDict

from td_datapipes import RedisTDDataset, write_dataset

GOAL = "goal: cluster mode costs at most 10% of the processor time of one server's batches (1.10x)"
SHAPES: dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]] = {
    "1.3 KB rows": {f"f{number}": (torch.float32, (64,)) for number in range(5)},
    "28 KB rows": {"pixels": (torch.uint8, (4, 84, 84)), "reward": (torch.float32, ())},
}


def rows_of(shape: dict[str, tuple[torch.dtype, tuple[int, ...]]], count: int) -> TensorDict:
    """So many rows of random bytes."""
    generator = torch.Generator().manual_seed(0)
    td = TensorDict(batch_size=[count])
    for key, (dtype, dims) in shape.items():
        nbytes = torch.Size(dims).numel() * dtype.itemsize
        bits = torch.randint(0, 256, (count, nbytes), dtype=torch.uint8, generator=generator)
        td[key] = bits.view(dtype).reshape(count, *dims)
    return td


class Contender:
    """A data set on one server or a cluster, and what reading it took."""

    def __init__(self, name: str, nodes: Sequence[ServerProcess], url: str) -> None:
        self.name, self.nodes = name, nodes
        self.dataset = RedisTDDataset(url)
        self.seconds: list[float] = []
        self.client_seconds = self.server_seconds = 0.0

    def turn(self, batches: Sequence[Sequence[int]]) -> None:
        """Read some batches."""
        used = self._server_seconds()
        began, worked = time.perf_counter(), time.process_time()
        for rows in batches:
            self.dataset[rows]
        self.client_seconds += time.process_time() - worked
        self.seconds.append((time.perf_counter() - began) / len(batches))
        self.server_seconds += self._server_seconds() - used

    def _server_seconds(self) -> float:
        facts = [node.execute("INFO", "cpu") for node in self.nodes]
        return sum(float(fact["used_cpu_sys"]) + float(fact["used_cpu_user"]) for fact in facts)


def measure(kind: Kind, label: str, num_rows: int, num_rounds: int, results: Results) -> list[list[str]]:
    """One shape of row: a line a contender."""
    td = rows_of(SHAPES[label], num_rows)
    per_turn, order, draw = 10, random.Random(0), torch.Generator().manual_seed(1)
    with ExitStack() as stack:
        single = stack.enter_context(ServerProcess(kind))
        places: list[tuple[str, list[ServerProcess], Any]] = [("one server", [single], single)]
        for masters in (1, 2, 3):
            cluster = stack.enter_context(start_cluster(masters, kind=kind))
            places.append((f"cluster of {masters}", cluster.nodes, cluster))
        contenders = []
        for name, nodes, place in places:
            write_dataset(td, place.url("bench"), chunk_bytes=1 << 20)
            contenders.append(Contender(name, nodes, place.url("bench")))
        batches = [torch.randint(0, num_rows, (BATCH,), generator=draw).tolist() for _ in range(per_turn)]
        for contender in contenders:
            contender.turn(batches)  # dials and fills tables
            contender.seconds.clear()
            contender.client_seconds = contender.server_seconds = 0.0
        for _ in range(num_rounds):
            batches = [torch.randint(0, num_rows, (BATCH,), generator=draw).tolist() for _ in range(per_turn)]
            order.shuffle(contenders)
            for contender in contenders:
                contender.turn(batches)
        contenders.sort(key=lambda contender: (contender.name != "one server", contender.name))
        lines = _lines(kind, label, contenders, num_rounds * per_turn, results)
        for contender in contenders:
            contender.dataset.close()
    return lines


def _lines(
    kind: str, label: str, contenders: Sequence[Contender], num_batches: int, results: Results
) -> list[list[str]]:
    def median(values: Sequence[float]) -> float:
        return sorted(values)[len(values) // 2]

    first = contenders[0]
    lines = []
    for contender in contenders:
        pairs = zip(contender.seconds, first.seconds, strict=True)
        ratio = median([mine / theirs for mine, theirs in pairs])
        client, server = contender.client_seconds / num_batches, contender.server_seconds / num_batches
        work = (client + server) * num_batches / (first.client_seconds + first.server_seconds)
        results.add(
            kind=kind,
            shape=label,
            contender=contender.name,
            rows_per_second=BATCH / median(contender.seconds),
            time_ratio=ratio,
            client_cpu_seconds=client,
            server_cpu_seconds=server,
            cpu_ratio=work,
        )
        lines.append(
            [
                *(kind, label, contender.name, f"{BATCH / median(contender.seconds):,.0f}", f"{ratio:.2f}x"),
                *(f"{client * 1e3:.2f}", f"{server * 1e3:.2f}", f"{work:.2f}x"),
            ]
        )
    return lines


def main() -> None:
    """The command."""
    arguments = argument_parser(__doc__ or "").parse_args()
    torch.set_num_threads(1)
    results = Results()
    print(describe_machine())
    head = ["server", "rows", "from", "rows/s", "time", "client CPU ms", "server CPU ms", "CPU"]
    lines: list[list[str]] = []
    for server in arguments.server or SERVER_KINDS:
        kind: Kind = "valkey" if server == "embedded" else "redis"
        for label in SHAPES:
            num_rows = (20_000 if label.startswith("1.3") else 2_000) // (4 if arguments.quick else 1)
            lines += measure(kind, label, num_rows, 5 if arguments.quick else 40, results)
    print(format_table(head, lines))
    print(GOAL)
    results.write(arguments.json)


if __name__ == "__main__":
    main()
