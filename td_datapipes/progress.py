"""Progress bars for long operations, by rich; silent where nobody watches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

__all__ = ["progress_bar"]


@contextmanager
def progress_bar(
    title: str, total: int | None, show: bool | None, unit: str = "rows"
) -> Iterator[Callable[[int], None]]:
    """A bar on standard error; yields a function that takes how many more rows, or other units, are done.

    Args:
        title: what is being done.
        total: how many there will be, None where nobody knows.
        show: None shows it on a terminal only.
        unit: what is counted.
    """
    if not (sys.stderr.isatty() if show is None else show):
        yield lambda _done: None
        return
    columns = (
        TextColumn("{task.description}", markup=False),  # a data set's name may hold brackets
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=total, rate="")

        def advance(done: int) -> None:
            progress.advance(task, done)
            speed = progress.tasks[0].speed
            progress.update(task, rate=f"{speed:,.0f} {unit}/s" if speed else "")

        yield advance
