"""The example trains on what loader ranks send as it does on what the trainers read for themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from servers import ServerProcess

EXAMPLE = Path(__file__).parents[2] / "examples" / "loader_ranks.py"


@pytest.mark.heavy
def test_losses_are_the_same_with_and_without_loader_ranks(valkey_server: ServerProcess, unique_name: str) -> None:
    command = [sys.executable, str(EXAMPLE), "--url", valkey_server.url(unique_name), "--epochs", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "64 steps" in done.stdout
    assert "the same bit for bit: True" in done.stdout
    first = float(done.stdout.split("loss ")[1].split()[0])
    last = float(done.stdout.split("the last loss is ")[1].split(";")[0])
    assert last < first / 2  # it learns
