"""Arguments and options that several commands share, and what they are made into."""

from __future__ import annotations

import getpass
import inspect
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from td_datapipes.errors import ConfigurationError
from td_datapipes.wire.url import PASSWORD_VARIABLE

__all__ = [
    "AsJson",
    "AskPassword",
    "DatasetURL",
    "ServerOnlyURL",
    "add_command",
    "apply_password",
    "parse_fill",
    "parse_name",
    "parse_shapes",
]

_URL_HELP = "Server and name: redis://host:6379/0#name, unix:///socket#name, embedded:///folder#name."
DatasetURL = Annotated[str, typer.Argument(metavar="URL", help=_URL_HELP)]
ServerOnlyURL = Annotated[
    str, typer.Argument(metavar="URL", help="The server: redis://host:6379/0, embedded:///folder.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output, for programs.")]


def _ask(value: bool) -> bool:
    if value:
        apply_password()
    return value


AskPassword = Annotated[
    bool,
    typer.Option(
        "--ask-password",
        "-W",
        callback=_ask,
        help=f"Ask for the server's password. Else it comes from ${PASSWORD_VARIABLE} or the URL.",
    ),
]


def apply_password() -> None:
    """Ask for the password and hand it to this process's connections, through its environment."""
    if not sys.stdin.isatty():
        raise ConfigurationError(f"--ask-password needs a terminal to ask on; set ${PASSWORD_VARIABLE} instead")
    os.environ[PASSWORD_VARIABLE] = getpass.getpass("password: ")


def add_command(app: typer.Typer, command: Callable[..., None], example: str) -> None:
    """Add a command whose help is its docstring, its lines joined, and an example."""
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    app.command(help=text, epilog=f"Example: {example}")(command)


def parse_name(text: str) -> str | tuple[str, ...]:
    """A field's name: a JSON list is a nested one, anything else is taken as it is."""
    if text.startswith("["):
        try:
            parts = json.loads(text)
        except ValueError:
            return text
        if isinstance(parts, list) and parts and all(isinstance(part, str) for part in parts):
            return tuple(parts)
    return text


def parse_fill(texts: Sequence[str]) -> dict[str | tuple[str, ...] | None, Any]:
    """``age=0`` and ``0``: what stands for null, by column or for all others."""
    found: dict[str | tuple[str, ...] | None, Any] = {}
    for text in texts:
        name, equals, value = text.rpartition("=")
        found[parse_name(name) if equals else None] = _number(value, text)
    return found


def _number(value: str, text: str) -> float | bool:
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    try:
        return int(value) if value.lstrip("+-").isdigit() else float(value)
    except ValueError:
        raise ConfigurationError(
            f"--fill {text} fills with no number; write COLUMN=NUMBER, true, false or nan"
        ) from None


def parse_shapes(texts: Sequence[str]) -> dict[str | tuple[str, ...], tuple[int, ...]]:
    """``image=84x84``: the shape that all rows of a column have."""
    found: dict[str | tuple[str, ...], tuple[int, ...]] = {}
    for text in texts:
        name, _, sizes = text.rpartition("=")
        parts = sizes.split("x")
        if not name or not all(part.isdigit() for part in parts):
            raise ConfigurationError(f"--shape {text} is no shape; write COLUMN=84x84")
        found[parse_name(name)] = tuple(map(int, parts))
    return found
