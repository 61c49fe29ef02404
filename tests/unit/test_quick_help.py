"""Help and wrong usage are told without importing torch; what needs it says so itself."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

import pytest
from typer.main import get_command

from td_datapipes.catalog import SUPERSEDED_SECONDS
from td_datapipes.cli.app import app
from td_datapipes.cli.catalogue import KEPT_FOR
from td_datapipes.cli.output import duration_seconds

HEAVY = ("torch", "tensordict", "pyarrow", "numpy", "pandas")
WRONG = (
    ["no-such-command"],
    ["ls"],
    ["ingest", "a.parquet", "redis://localhost:1/0#x", "--fill", "age=old"],
    ["ingest", "a.parquet", "redis://localhost:1/0#x", "--shape", "image"],
    ["ingest", "a.parquet", "redis://localhost:1/0#x", "--chunk-kib", "0"],
    ["gc", "redis://localhost:1/0", "--older-than", "soon"],
)
_RUN = """
import contextlib, io, json, sys
from td_datapipes.cli.app import run
found = []
for arguments in json.loads(sys.argv[2]):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = run(arguments)
    found.append([code, [name for name in json.loads(sys.argv[1]) if name in sys.modules], out.getvalue()])
print(json.dumps(found))
"""


def told(lines: Sequence[Sequence[str]]) -> list[tuple[int, list[str], str]]:
    """Of each command line the exit code, what heavy modules are imported since, and what is said; one process."""
    command = [sys.executable, "-c", _RUN, json.dumps(HEAVY), json.dumps(lines)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [(code, heavy, text) for code, heavy, text in json.loads(done.stdout)]


def test_help_imports_nothing_that_takes_long() -> None:
    names = sorted(name for name in get_command(app).commands)  # type: ignore[attr-defined]
    assert {"ingest", "export", "serve", "top"} <= set(names)
    for name, (code, heavy, text) in zip(
        ["", *names], told([["--help"], *([name, "--help"] for name in names)]), strict=True
    ):
        assert (code, heavy) == (0, []), name
        assert f"Usage: {f'td-datapipes {name}'.strip()} " in text


def test_wrong_arguments_are_told_without_importing_what_takes_long() -> None:
    for arguments, (code, heavy, text) in zip(WRONG, told(WRONG), strict=True):
        assert (code, heavy) == (2, []), arguments
        assert text.startswith("error: "), arguments


def test_what_is_kept_by_default_is_what_the_catalogue_says() -> None:
    assert duration_seconds(KEPT_FOR) == SUPERSEDED_SECONDS


@pytest.mark.parametrize("module", ["datasets", "streaming", "redis_tensordict"])
def test_what_loaders_are_given_teaches_torch_about_tensordicts(module: str) -> None:
    check = f"""
import sys
import td_datapipes
assert "torch" not in sys.modules
import td_datapipes.{module}
from tensordict import TensorDict
from torch.utils.data import default_collate
batch = TensorDict(dict(x=[1, 2]), [2])
assert default_collate(batch) is batch
"""
    subprocess.run([sys.executable, "-c", check], check=True)
