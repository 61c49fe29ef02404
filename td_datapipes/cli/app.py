"""Puts the commands together, and turns what goes wrong into one line and an exit code."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.main import get_command

from td_datapipes.cli import catalogue, move, read_speed, serving, watch
from td_datapipes.cli.output import exit_code_of, one_line
from td_datapipes.errors import TDDatapipesError

__all__ = ["app", "run"]

_EPILOG = (
    "[bold]Exit codes[/bold]: 0 done; 1 failed; 2 wrong usage; 3 not there; 4 there already, or somebody else writes; "
    "5 no server, or it refuses, or is full; 6 rows that cannot be stored; 7 data lost; 130 interrupted.\n\n"
    "Passwords come from $TD_DATAPIPES_PASSWORD, --ask-password or the URL, and are never shown."
)

app = typer.Typer(
    name="td-datapipes",
    help="Data sets of TensorDicts in Redis and Valkey: bring rows in, look at them, read them fast.",
    epilog=_EPILOG,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
for module in (serving, catalogue, move, read_speed, watch):
    module.register(app)


def run(arguments: Sequence[str]) -> int:
    """Run a command line.

    Returns:
        The exit code.
    """
    as_json = "--json" in arguments
    try:
        result: Any = get_command(app).main(list(arguments), prog_name="td-datapipes", standalone_mode=False)
    except TDDatapipesError as error:
        return _fail(str(error), type(error).__name__, exit_code_of(error), as_json=as_json)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", "Interrupted", 130, as_json=as_json)
    except BrokenPipeError:  # who read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # typer's, and the help is on the screen
            return 2
        usage = getattr(error, "format_message", None)
        if usage is not None:
            return _fail(_usage_text(error, usage()), "ConfigurationError", 2, as_json=as_json)
        if os.environ.get("TD_DATAPIPES_TRACEBACK"):
            raise
        text = f"{type(error).__name__}: {error}; this should not happen: run it again with TD_DATAPIPES_TRACEBACK=1"
        return _fail(f"{text} and report what it prints", type(error).__name__, 1, as_json=as_json)
    if result == 130:  # typer's word for Ctrl-C
        return _fail("interrupted", "Interrupted", 130, as_json=as_json)
    return result if isinstance(result, int) else 0


def _usage_text(error: Exception, text: str) -> str:
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "td-datapipes"
    return f"{text.rstrip('.')}; see {command} --help"


def _fail(text: str, kind: str, code: int, *, as_json: bool) -> int:
    line = one_line(text)
    if as_json:
        line = json.dumps({"error": {"type": kind, "message": line, "exit_code": code}}, ensure_ascii=False)
    else:
        line = f"error: {line}"
    sys.stderr.write(line + "\n")
    return code
