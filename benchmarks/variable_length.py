"""Token documents of any length: jagged and padded batches, against a dense field as long as the longest.

    python benchmarks/variable_length.py [--quick] [--json FILE] [--server embedded|redis]

The reference is the dense field: what one does without fields of variable length, with the same tokens per row. The
strings are as many characters as there are tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from _bench import (
    BATCH,
    SERVER_KINDS,
    TURN,
    BenchServer,
    Results,
    Rows,
    argument_parser,
    bench_server,
    describe_machine,
    format_table,
    interleave,
)
from tensordict import NonTensorStack, TensorDict

from td_datapipes import RedisTDDataset, write_dataset

LONGEST = 2048
REFERENCE = "dense, padded when written"
HEAD = ("256 rows", "rows/s", "of the reference's time", "KB a row on the wire")


def make_lengths(num_rows: int) -> np.ndarray:
    """Log-normal, about 400 on average, as documents are."""
    drawn = np.random.default_rng(0).lognormal(np.log(280), 0.9, num_rows)
    return drawn.clip(1, LONGEST).astype(np.int64)


def write(server: BenchServer, num_rows: int) -> dict[str, str]:
    """URLs of the same documents: jagged, dense, and as strings."""
    lengths = make_lengths(num_rows)
    offsets = torch.from_numpy(np.concatenate([[0], lengths.cumsum()]))
    values = torch.randint(1, 50_000, (int(offsets[-1]),), dtype=torch.int32)
    tokens = torch.nested.nested_tensor_from_jagged(values, offsets)
    dense = torch.zeros(num_rows, LONGEST, dtype=torch.int32)
    dense[torch.arange(LONGEST) < torch.from_numpy(lengths)[:, None]] = values
    texts = NonTensorStack(*("x" * int(length) for length in lengths))
    urls = {name: server.url(name) for name in ("jagged", "dense", "texts")}
    row = torch.arange(num_rows)
    write_dataset(TensorDict({"tokens": tokens, "row": row}, [num_rows]), urls["jagged"])
    write_dataset(
        TensorDict({"tokens": dense, "length": torch.from_numpy(lengths), "row": row}, [num_rows]), urls["dense"]
    )
    write_dataset(TensorDict({"text": texts, "row": row}, [num_rows]), urls["texts"])
    return urls


def bench(server: BenchServer, *, quick: bool, results: Results) -> None:
    """Print the tables of one server."""
    num_rows, num_rounds = (2048, 3) if quick else (32768, 25)
    urls = write(server, num_rows)
    print(f"\n## {server.label}")
    with ExitStack() as stack:

        def opened(name: str, **options: Any) -> RedisTDDataset:
            return stack.enter_context(RedisTDDataset(urls[name], **options))

        datasets = {
            REFERENCE: opened("dense"),
            "jagged": opened("jagged"),
            "padded when read": opened("jagged", ragged="pad"),
            "padded, at most 512": opened("jagged", ragged="pad", max_length=512),
            "strings": opened("texts"),
            "strings as an Arrow array": opened("texts", strings="arrow"),
        }
        draws: dict[str, Callable[[int], Iterator[Rows]]] = {
            "scattered": lambda count: (np.random.default_rng(i).integers(0, num_rows, BATCH) for i in range(count)),
            "in order": lambda count: (np.arange(BATCH) + BATCH * (i % (num_rows // BATCH)) for i in range(count)),
        }
        for label, draw in draws.items():
            before = {name: dataset.stats for name, dataset in datasets.items()}
            rounds = interleave(
                {name: dataset.__getitem__ for name, dataset in datasets.items()}, draw(TURN * num_rounds)
            )
            table = []
            for name, dataset in datasets.items():
                moved = (dataset.stats.bytes - before[name].bytes) / (dataset.stats.rows - before[name].rows)
                speed, ratio = BATCH / rounds.median(name), rounds.ratio(name, REFERENCE)
                results.add(server=server.label, rows=label, contender=name, rows_per_second=speed, ratio=ratio)
                table.append([name, f"{speed:,.0f}", f"{ratio:.2f}x", f"{moved / 1e3:.2f}"])
            print(f"\n{label}\n\n{format_table(HEAD, table)}")
    server.client.flushdb()


def main() -> None:
    """Run what the options ask for."""
    options = argument_parser("what fields of variable length cost").parse_args()
    torch.set_num_threads(1)
    results = Results()
    print(json.dumps(describe_machine()))
    for kind in options.server or SERVER_KINDS:
        with bench_server(kind) as server:
            bench(server, quick=options.quick, results=results)
    results.write(options.json)


if __name__ == "__main__":
    main()
