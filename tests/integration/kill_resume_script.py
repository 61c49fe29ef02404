"""Trains a tiny model from a server, and is killed on the way. Run by test_kill_resume.py, as

    python kill_resume_script.py URL FOLDER NUM_WORKERS

It imports torch once and forks a run for every line "BATCHES MICROSECONDS" on its standard input, which it kills by
SIGKILL so many microseconds after that run has consumed so many batches; "-1 0" lets it finish. It answers each with
the run's wait status. What a run leaves is in FOLDER: `log`, the rows consumed, one batch a line, and `checkpoint`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from td_datapipes import RedisTDDataset
from td_datapipes.samplers import BlockShuffleBatchSampler

EPOCHS = 3
BATCH = 8
BATCHES_A_CHECKPOINT = 3


class Run:
    """One process's part of the training.

    Args:
        url: data set with fields ``x`` [4] and ``row``.
        folder: log and checkpoint.
        num_workers: of the loader.
        progress: a byte is written there for each batch.
    """

    def __init__(self, url: str, folder: Path, num_workers: int, progress: int) -> None:
        dataset = RedisTDDataset(url, prefetch_bytes=1 << 14)
        sampler = BlockShuffleBatchSampler(dataset, BATCH, seed=11, block_rows=5, buffer_blocks=6)
        self.loader: Any = StatefulDataLoader(dataset, batch_sampler=sampler, num_workers=num_workers)
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.checkpoint = folder / "checkpoint"
        self.log = (folder / "log").open("ab")
        self.progress = progress
        self.epoch = self.steps = 0
        log_bytes = self._load() if self.checkpoint.exists() else 0
        # What was consumed after the checkpoint is consumed again.
        self.log.truncate(log_bytes)
        self.log.seek(log_bytes)

    def _load(self) -> int:
        saved = torch.load(self.checkpoint, weights_only=True)
        self.loader.load_state_dict(saved["loader"])
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.epoch, self.steps = saved["epoch"], saved["steps"]
        return int(saved["log_bytes"])

    def _save(self) -> None:
        saved = {
            "loader": self.loader.state_dict(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "epoch": self.epoch,
            "steps": self.steps,
            "log_bytes": self.log.tell(),
        }
        fresh = self.checkpoint.with_suffix(".new")
        torch.save(saved, fresh)
        os.replace(fresh, self.checkpoint)

    def train(self) -> None:
        """Every batch of every epoch that is left."""
        while self.epoch < EPOCHS:
            for batch in self.loader:
                self._step(batch)
            self.epoch += 1
            self._save()

    def _step(self, batch: Any) -> None:
        self.optimizer.zero_grad()
        loss = (self.model(batch["x"]) - batch["row"][:, None] / 100).square().mean()
        loss.backward()
        self.optimizer.step()
        self.log.write((" ".join(map(str, batch["row"].tolist())) + "\n").encode())
        self.log.flush()
        self.steps += 1
        if self.steps % BATCHES_A_CHECKPOINT == 0:
            self._save()
        os.write(self.progress, b".")


def fork_run(url: str, folder: Path, num_workers: int, batches: int, microseconds: int) -> int:
    """Run and kill as the module's docstring says; the wait status."""
    receive, progress = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receive)
        code = 1
        try:
            Run(url, folder, num_workers, progress).train()
            code = 0
        finally:
            os._exit(code)
    os.close(progress)
    seen = 0
    # Workers of a killed run hold the pipe a while longer, so its end says nothing.
    while batches < 0 or seen < batches:
        found = len(os.read(receive, 1 << 16 if batches < 0 else batches - seen))
        if not found:
            break
        seen += found
    if batches >= 0:
        time.sleep(microseconds * 1e-6)
        os.kill(child, signal.SIGKILL)
    os.close(receive)
    return os.waitpid(child, 0)[1]


def main() -> None:
    """Answer requests until standard input ends."""
    torch.set_num_threads(1)
    url, folder, num_workers = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    for line in sys.stdin:
        batches, microseconds = map(int, line.split())
        print(fork_run(url, folder, num_workers, batches, microseconds), flush=True)


if __name__ == "__main__":
    main()
