"""The examples with gymnasium and torchrl, run as a user runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from servers import ServerProcess

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.heavy
@pytest.mark.timeout(420)
def test_two_actors_and_a_learner_reach_a_mean_return_of_150(redis_server: ServerProcess, tmp_path: Path) -> None:
    picture = tmp_path / "curve.png"
    command = [sys.executable, str(EXAMPLES / "dqn_cartpole.py"), "--url", redis_server.url("cartpole")]
    done = subprocess.run([*command, "--picture", str(picture)], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mean return of the last 20 episodes" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.heavy
@pytest.mark.timeout(240)
def test_collectors_and_a_learner_share_a_storage(valkey_server: ServerProcess) -> None:
    command = [sys.executable, str(EXAMPLES / "torchrl_replay.py"), "--url", valkey_server.url("steps")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4000 rows" in done.stdout
