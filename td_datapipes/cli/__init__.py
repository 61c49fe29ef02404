"""The command ``td-datapipes``. It needs the extra ``cli``; without it, one line says so."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec

__all__ = ["main"]


def main() -> None:
    """What the installed command runs; exits with the command's code."""
    if find_spec("typer") is None:
        print("error: the command td-datapipes needs typer: pip install 'td-datapipes[cli]'", file=sys.stderr)
        sys.exit(2)
    sys.exit(import_module("td_datapipes.cli.app").run(sys.argv[1:]))
