"""A training run that is killed again and again consumes the very rows, in order, that an unharmed one does."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

import pytest
import torch
from kill_resume_script import BATCH, BATCHES_A_CHECKPOINT, EPOCHS
from rows_in_memory import bytes_of
from servers import ServerProcess
from tensordict import TensorDict

from td_datapipes import RedisTDDataset, write_dataset
from td_datapipes.samplers import BlockShuffleBatchSampler

ROWS = 501
KILLS = 50


class Trainer:
    """The script, in a folder of its own."""

    def __init__(self, url: str, folder: Path, num_workers: int) -> None:
        folder.mkdir()
        (folder / "log").touch()
        self.folder = folder
        # Killed runs leave what multiprocessing put there; their workers complain, and their sockets need short paths.
        self._scratch = TemporaryDirectory()
        self._errors = (folder / "errors").open("w")
        script = Path(__file__).with_name("kill_resume_script.py")
        command = [sys.executable, "-W", "ignore", str(script), url, str(folder), str(num_workers)]
        self._process = subprocess.Popen(
            command,
            env={**os.environ, "TMPDIR": self._scratch.name},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def run(self, batches: int = -1, microseconds: int = 0) -> int:
        """The wait status of one run, killed after so many batches."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(batches, microseconds, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, (self.folder / "errors").read_text()
        return int(answer)

    @property
    def consumed(self) -> list[list[int]]:
        """The rows of each batch."""
        return [list(map(int, line.split())) for line in (self.folder / "log").read_text().splitlines()]

    @property
    def weights(self) -> bytes:
        """Of the model as last saved."""
        return bytes_of(torch.load(self.folder / "checkpoint", weights_only=True)["model"]["weight"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.communicate()
        self._errors.close()
        self._scratch.cleanup()


@pytest.mark.heavy
@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_fifty_kills_change_nothing(server: ServerProcess, tmp_path: Path, num_workers: int) -> None:
    url = server.url("train")
    write_dataset(TensorDict({"x": torch.randn(ROWS, 4), "row": torch.arange(ROWS)}, [ROWS]), url, chunk_bytes=1024)
    with RedisTDDataset(url) as dataset:
        sampler = BlockShuffleBatchSampler(dataset, BATCH, seed=11, block_rows=5, buffer_blocks=6)
        expected = [list(batch) for _ in range(EPOCHS) for batch in sampler]

    with Trainer(url, tmp_path / "unharmed", num_workers) as unharmed:
        assert unharmed.run() == 0
    assert unharmed.consumed == expected

    with Trainer(url, tmp_path / "killed", num_workers) as killed:
        chance = random.Random(num_workers)
        progress = []
        for _ in range(KILLS):
            # Few batches a run, so that fifty runs do not reach the end; at any point of a step or a save.
            status = killed.run(chance.randrange(3 * BATCHES_A_CHECKPOINT - 1), chance.randrange(3000))
            assert os.WIFSIGNALED(status)
            assert os.WTERMSIG(status) == signal.SIGKILL
            progress.append((killed.folder / "log").read_bytes().count(b"\n"))
        assert len(set(progress)) > KILLS // 3
        assert killed.run() == 0
    assert killed.consumed == expected
    assert killed.weights == unharmed.weights
