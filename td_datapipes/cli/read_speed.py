"""The command bench: how fast a data set can be read from here."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from td_datapipes.cli.late import late
from td_datapipes.cli.options import AsJson, AskPassword, DatasetURL, add_command, parse_name
from td_datapipes.cli.output import format_bytes, print_json, print_table, screen
from td_datapipes.errors import ConfigurationError, DestinationError

if TYPE_CHECKING:
    from td_datapipes.datasets import RedisTDDataset
    from td_datapipes.samplers import BlockShuffleBatchSampler, CoalescingBatchSampler
else:
    RedisTDDataset = late("td_datapipes.datasets", "RedisTDDataset")
    BlockShuffleBatchSampler, CoalescingBatchSampler = late(
        "td_datapipes.samplers", "BlockShuffleBatchSampler", "CoalescingBatchSampler"
    )

__all__ = ["register"]

_WARMUP_BATCHES = 3


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(app, bench, "td-datapipes bench redis://localhost:6379/0#train --batch-size 256 --plot speed.png")


@dataclass(frozen=True, kw_only=True)
class Speed:
    """How fast one way of reading was.

    Attributes:
        order: scattered, block-shuffled or in order.
        batch_size: rows a batch.
        batches: that were read.
        rows_per_second: on average.
        bytes_per_second: of records.
        batch_seconds: a batch takes, on average.
        wait_share: of the time, waited for the server.
    """

    order: str
    batch_size: int
    batches: int
    rows_per_second: float
    bytes_per_second: float
    batch_seconds: float
    wait_share: float


def bench(
    url: DatasetURL,
    batch_size: Annotated[list[int], typer.Option("--batch-size", "-b", min=1, help="Repeat for more.")] = [  # noqa: B006
        64,
        256,
        1024,
    ],
    field: Annotated[list[str], typer.Option("--field", help="Read only this field; repeat for more.")] = [],  # noqa: B006
    seconds: Annotated[float, typer.Option(min=0.01, help="For each order and batch size.")] = 1.0,
    plot: Annotated[Path | None, typer.Option(metavar="PNG", help="Draw a chart into this file.")] = None,
    as_json: AsJson = False,
    ask_password: AskPassword = False,
) -> None:
    """Measure how fast a data set can be read from here: scattered, block-shuffled, in order."""
    del ask_password
    if plot is not None:
        _matplotlib()  # refused now rather than after the measurements
    fields = [parse_name(name) for name in field] or None
    with RedisTDDataset(url, fields=fields) as dataset:
        if not len(dataset):
            raise ConfigurationError(f"data set {dataset.name!r} has no rows to read")
        name, row_bytes, rows = dataset.name, dataset.row_bytes, len(dataset)
        found = [
            _measure(url, fields, order, make, min(size, rows), seconds)
            for size in dict.fromkeys(batch_size)
            for order, make in _ORDERS.items()
        ]
    if as_json:
        print_json({"name": name, "row_bytes": row_bytes, "results": [asdict(speed) for speed in found]})
    else:
        screen().print(f"{name}: {rows:,} rows of {format_bytes(row_bytes)}", markup=False)
        _print(found)
    if plot is not None:
        _draw(found, f"{name}: rows of {format_bytes(row_bytes)}", plot)
        if not as_json:
            screen().print(f"drew {plot}", markup=False)


def _scattered(dataset: RedisTDDataset, batch_size: int) -> Iterator[Sequence[int]]:
    draw = random.Random(0)
    while True:
        yield [draw.randrange(len(dataset)) for _ in range(batch_size)]


def _block_shuffled(dataset: RedisTDDataset, batch_size: int) -> Iterator[Sequence[int]]:
    sampler = BlockShuffleBatchSampler(dataset, batch_size, rank=0, world_size=1)
    while True:
        yield from sampler


def _in_order(dataset: RedisTDDataset, batch_size: int) -> Iterator[Sequence[int]]:
    sampler = CoalescingBatchSampler(range(len(dataset)), batch_size)
    while True:
        yield from sampler


_ORDERS: dict[str, Callable[[RedisTDDataset, int], Iterator[Sequence[int]]]] = {
    "scattered": _scattered,
    "block-shuffled": _block_shuffled,
    "in order": _in_order,
}


def _measure(
    url: str,
    fields: Any,
    order: str,
    make: Callable[[RedisTDDataset, int], Iterator[Sequence[int]]],
    batch_size: int,
    seconds: float,
) -> Speed:
    # A data set of its own: what one order reads ahead is no burden of the next.
    with RedisTDDataset(url, fields=fields) as dataset:
        batches = make(dataset, batch_size)
        for _ in range(_WARMUP_BATCHES):
            dataset.__getitems__(next(batches))
        batches_read, rows, before = 0, 0, dataset.stats.wait_seconds
        began = now = time.perf_counter()
        while now - began < seconds or not batches_read:
            rows += len(dataset.__getitems__(next(batches)))
            batches_read, now = batches_read + 1, time.perf_counter()
        elapsed, waited = now - began, dataset.stats.wait_seconds - before
        return Speed(
            order=order,
            batch_size=batch_size,
            batches=batches_read,
            rows_per_second=rows / elapsed,
            bytes_per_second=rows * dataset.row_bytes / elapsed,
            batch_seconds=elapsed / batches_read,
            wait_share=min(1.0, waited / elapsed),
        )


def _print(found: Sequence[Speed]) -> None:
    heads = [("order", "left"), ("batch", "right"), ("rows/s", "right"), ("MB/s", "right"), ("ms a batch", "right")]
    rows = [
        (
            speed.order,
            f"{speed.batch_size:,}",
            f"{speed.rows_per_second:,.0f}",
            f"{speed.bytes_per_second / 1e6:,.1f}",
            f"{speed.batch_seconds * 1e3:.2f}",
            f"{speed.wait_share:.0%}",
        )
        for speed in found
    ]
    print_table([*heads, ("waiting", "right")], rows)


def _matplotlib() -> Any:
    try:
        import matplotlib.figure
    except ImportError:
        raise ConfigurationError("--plot needs matplotlib: pip install 'td-datapipes[plot]'") from None
    return matplotlib.figure


def _draw(found: Sequence[Speed], title: str, path: Path) -> None:
    figure = _matplotlib().Figure(figsize=(7, 4), dpi=150, layout="constrained")
    axes = figure.subplots()
    for order in _ORDERS:
        points = [speed for speed in found if speed.order == order]
        sizes, rates = [p.batch_size for p in points], [p.rows_per_second for p in points]
        axes.plot(sizes, rates, marker="o", label=order)
    axes.set(title=title, xlabel="batch size [rows]", ylabel="rows/s", xscale="log", ylim=(0, None))
    ticks = sorted({speed.batch_size for speed in found})
    axes.set_xticks(ticks, labels=[f"{size:,}" for size in ticks])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise DestinationError(f"{path} cannot be written: {error}") from error
