"""What the commands print: tables for people, JSON for programs, errors in one line, and never a password."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from td_datapipes.errors import (
    AppendConflictError,
    AuthenticationError,
    ConfigurationError,
    DataLossError,
    DatasetExistsError,
    DatasetNotFoundError,
    DestinationError,
    EmbeddedServerError,
    FieldNotFoundError,
    SchemaError,
    ServerError,
    ServerTimeoutError,
    ServerUnavailableError,
    SourceError,
)

__all__ = [
    "EXIT_CODES",
    "duration_seconds",
    "exit_code_of",
    "format_bytes",
    "format_duration",
    "one_line",
    "print_facts",
    "print_json",
    "print_table",
    "screen",
    "shown_url",
]

EXIT_CODES: tuple[tuple[type[BaseException] | tuple[type[BaseException], ...], int], ...] = (
    ((SchemaError, SourceError), 6),
    ((DatasetNotFoundError, FieldNotFoundError), 3),
    ((DatasetExistsError, DestinationError, AppendConflictError), 4),
    ((ServerUnavailableError, ServerTimeoutError, AuthenticationError, EmbeddedServerError, ServerError), 5),
    (DataLossError, 7),
    (ConfigurationError, 2),
)
"""The first that an error is an instance of says what the command ends with; anything else is 1."""

_PASSWORD = re.compile(r"(?<=://)[^/\s#?]*:[^\s]*@")
_USER = re.compile(r"(?<=://)[^\s#?]*@")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h|d)?")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def screen(*, error: bool = False) -> Console:
    """The terminal, or what stands for it; no colour where nobody looks."""
    return Console(stderr=error, highlight=False, soft_wrap=False)


def exit_code_of(error: BaseException) -> int:
    """What the command ends with."""
    return next((code for kinds, code in EXIT_CODES if isinstance(error, kinds)), 1)


def shown_url(url: str) -> str:
    """A URL as it may be shown and typed again: without user and password."""
    return _USER.sub("", url)


def one_line(text: str) -> str:
    """A message as one line, without what may be a password in a URL."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return _PASSWORD.sub("***@", "; ".join(lines))


def print_json(value: Any) -> None:
    """For programs: one object, on standard output. What JSON has no number for (nan, inf) is text."""
    sys.stdout.write(json.dumps(_plain(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def print_table(columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[str]], *, title: str | None = None) -> None:
    """A table; each column has a head and is justified ``left`` or ``right``."""
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False, show_edge=False)
    for number, (head, justify) in enumerate(columns):
        # A name may be long: it is folded rather than cut. Numbers are neither.
        fold: Any = "fold" if justify == "left" else "ellipsis"
        table.add_column(head, justify=justify, overflow=fold, no_wrap=justify == "right", ratio=None)  # type: ignore[arg-type]
        del number
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    screen().print(table)


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Lines of a name and a value."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in facts:
        grid.add_row(Text(name), Text(value))
    screen().print(grid)


def format_bytes(number: float) -> str:
    """``1536`` -> ``1.5 KiB``."""
    unit = 0
    while abs(number) >= 1024 and unit < len(_UNITS) - 1:
        number, unit = number / 1024, unit + 1
    return f"{number:,.0f} {_UNITS[unit]}" if unit == 0 else f"{number:,.1f} {_UNITS[unit]}"


def format_duration(seconds: float) -> str:
    """``5400`` -> ``1.5 h``."""
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def duration_seconds(text: str) -> float:
    """``90``, ``90s``, ``1.5h``, ``2d`` -> seconds.

    Raises:
        ConfigurationError: anything else.
    """
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise ConfigurationError(f"{text!r} is no duration; write 90s, 30m, 1.5h or 2d")
    return float(found[1]) * _SECONDS[found[2] or "s"]
