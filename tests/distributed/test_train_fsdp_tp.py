"""The example trains on a mesh of 2 x 2 ranks as one process does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from servers import ServerProcess

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_fsdp_tp.py"


@pytest.mark.heavy
def test_losses_on_the_mesh_are_those_of_one_process(valkey_server: ServerProcess, unique_name: str) -> None:
    # The epoch has 32 batches, so the second one is begun too.
    command = [sys.executable, str(EXAMPLE), "--url", valkey_server.url(unique_name), "--steps", "34"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    first, last = (
        float(line.split()[3]) for line in done.stdout.splitlines() if line.startswith(("step    0", "step   33"))
    )
    assert last < first - 1  # it learns
