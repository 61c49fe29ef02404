"""Stream text out of a server into a small language model, kill it half way, and resume: the loss goes on as if nothing
had happened.

    python examples/stream_tokens.py                                          # an embedded server in ./demo-data
    python examples/stream_tokens.py --url redis://localhost:6379/0#tokens    # any Redis or Valkey

The text is what every Python brings along: the sources of its standard library, as bytes, cut into rows of equal
length. Three processes train on it: one to the end, one that is killed half way, one that resumes from the last
checkpoint. Exits with 1 where the loss does not fall, or the resumed losses are not those of the first process.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from rich.progress import track
from tensordict import TensorDict
from torch import nn
from torch.nn import functional
from torchdata.stateful_dataloader import StatefulDataLoader

from td_datapipes import RedisTDIterDataPipe, write_dataset

TOKENS_A_ROW = 65  # 64 to read, each followed by the one to predict
BATCH_SIZE = 32
CHECKPOINT_STEPS = 10
VOCABULARY = 256  # bytes


def token_rows(num_rows: int) -> Iterator[TensorDict]:
    """The standard library's sources, end to end, in rows of tokens."""
    left, rest = num_rows, np.empty(0, np.uint8)
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        rest = np.concatenate([rest, np.frombuffer(path.read_bytes(), np.uint8)])
        rows = min(len(rest) // TOKENS_A_ROW, left)
        if rows:
            taken, rest = np.split(rest, [rows * TOKENS_A_ROW])
            left -= rows
            yield TensorDict({"tokens": torch.from_numpy(taken.reshape(rows, TOKENS_A_ROW).copy())}, [rows])


class Transformer(nn.Module):
    """A decoder of two layers that predicts the next byte."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Parameter(torch.zeros(TOKENS_A_ROW - 1, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits ``[rows, tokens, 256]`` for tokens ``[rows, tokens]``."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.layers(self.tokens(tokens) + self.places, mask=mask, is_causal=True))


def widened(batch: TensorDict) -> TensorDict:
    """Bytes as the integers an embedding takes."""
    return TensorDict({"tokens": batch["tokens"].long()}, batch.batch_size)


def save(path: Path, values: dict[str, Any]) -> None:
    """A checkpoint is there whole, or the one before it is."""
    torch.save(values, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def train(url: str, steps: int, log: Path, checkpoint: Path, die_at: int | None) -> None:
    """Train up to a step, from the checkpoint if there is one; a line of the log a step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    pipe = RedisTDIterDataPipe(url, batch_size=BATCH_SIZE, shuffle=True, drop_last=True, seed=0).map(widened)
    loader: StatefulDataLoader[TensorDict] = StatefulDataLoader(pipe, batch_size=None)
    step = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=False)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        step = saved["step"]
    while True:
        for batch in loader:
            tokens = batch["tokens"]
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            step += 1
            with log.open("a") as lines:
                print(json.dumps([step, loss.item()]), file=lines)
            if step == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if step % CHECKPOINT_STEPS == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                save(checkpoint, {**state, "loader": loader.state_dict(), "step": step})
            if step >= steps:
                return


def run(url: str, steps: int, folder: Path, name: str, checkpoint: str, die_at: int | None = None) -> dict[int, float]:
    """Train in a process of its own; the losses by step."""
    log = folder / f"{name}.jsonl"
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=train, args=(url, steps, log, folder / checkpoint, die_at))
    child.start()
    for step in track(range(die_at or steps), description=f"{name:>9}"):
        while _lines(log) <= step and child.is_alive():
            time.sleep(0.02)
    child.join()
    if child.exitcode != (0 if die_at is None else -signal.SIGKILL):
        raise SystemExit(f"the {name} process ended with {child.exitcode}")
    return dict(json.loads(line) for line in log.read_text().splitlines())


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def main() -> int:
    """Write, train, kill, resume, compare."""
    here = Path("demo-data").resolve().as_uri().replace("file:", "embedded:", 1)
    parser = argparse.ArgumentParser(description="train on text streamed out of Redis or Valkey, killed and resumed")
    parser.add_argument("--url", default=f"{here}#tokens", help="server and name (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rows", type=int, default=8192)
    options = parser.parse_args()

    manifest = write_dataset(token_rows(options.rows), options.url, overwrite=True)
    print(f"{manifest.rows:,} rows of {TOKENS_A_ROW} bytes of Python; an epoch is {manifest.rows // BATCH_SIZE} steps")
    half = options.steps // 2 + CHECKPOINT_STEPS // 2  # between two checkpoints
    with TemporaryDirectory() as name:
        folder = Path(name)
        whole = run(options.url, options.steps, folder, "unbroken", "whole.pt")
        killed = run(options.url, options.steps, folder, "killed", "broken.pt", die_at=half)
        resumed = run(options.url, options.steps, folder, "resumed", "broken.pt")
    first, last = (sum(list(whole.values())[part]) / 10 for part in (slice(10), slice(-10, None)))
    print(f"loss {first:.3f} over the first 10 steps, {last:.3f} over the last 10")
    for step in sorted({1, options.steps // 4, min(resumed), options.steps * 3 // 4, options.steps}):
        other = resumed.get(step, killed.get(step))
        print(f"step {step:4}: unbroken {whole[step]:.6f}, killed at step {half} and resumed {other:.6f}")
    same = {**killed, **resumed} == whole and killed.items() <= whole.items() and min(resumed) > CHECKPOINT_STEPS
    print("the losses are identical" if same else "THE LOSSES DIFFER")
    return 0 if same and last < first - 0.5 else 1


if __name__ == "__main__":
    sys.exit(main())
