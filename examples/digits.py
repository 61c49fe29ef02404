"""Write a data set to a server, then train a small model straight out of it.

    python examples/digits.py                                        # an embedded server in ./demo-data
    python examples/digits.py --url redis://localhost:6379/0#digits  # any Redis or Valkey

Exits with 1 where the model is right on less than 95 % of the held-out rows.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from rich.progress import track
from sklearn.datasets import load_digits
from tensordict import TensorDict
from torch import nn
from torch.utils.data import DataLoader

from td_datapipes import RedisTDDataset, write_dataset

GOAL = 0.95


def write_digits(train_url: str, held_out_url: str) -> None:
    """8x8 images of handwritten digits, split into two data sets; what stood there before is replaced."""
    digits = load_digits()
    images = torch.as_tensor(digits.images, dtype=torch.float32) / 16
    rows = TensorDict({"image": images, "label": torch.as_tensor(digits.target)}, batch_size=[len(images)])
    rows = rows[torch.randperm(len(rows))]
    write_dataset(rows[:1437], train_url, overwrite=True)
    write_dataset(rows[1437:], held_out_url, overwrite=True)


def train(loader: DataLoader[TensorDict], epochs: int) -> nn.Module:
    """A perceptron with a hidden layer. Each batch is a TensorDict, whose fields are contiguous tensors."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in track(range(epochs), description="training"):
        for batch in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch["image"]), batch["label"]).backward()
            optimizer.step()
    return model


def accuracy(model: nn.Module, loader: DataLoader[TensorDict]) -> float:
    """The share of rows on which the model is right."""
    model.eval()
    right, rows = 0, 0
    with torch.no_grad():
        for batch in loader:
            right += int((model(batch["image"]).argmax(1) == batch["label"]).sum())
            rows += len(batch)
    return right / rows


def main() -> int:
    """Write, train, measure; the exit code says whether the goal was reached."""
    here = Path("demo-data").resolve().as_uri().replace("file:", "embedded:", 1)
    parser = argparse.ArgumentParser(description="train on handwritten digits straight out of Redis or Valkey")
    parser.add_argument("--url", default=f"{here}#digits", help="server and name (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)  # faster where the model is this small
    torch.manual_seed(0)

    train_url, held_out_url = f"{options.url}/train", f"{options.url}/held-out"
    write_digits(train_url, held_out_url)

    with RedisTDDataset(train_url) as train_rows, RedisTDDataset(held_out_url) as held_out_rows:
        print(f"reading {train_rows}")
        began = time.perf_counter()
        model = train(DataLoader(train_rows, batch_size=options.batch_size, shuffle=True), options.epochs)
        seconds = time.perf_counter() - began
        reached = accuracy(model, DataLoader(held_out_rows, batch_size=256))
        read = train_rows.stats.rows

    print(f"read and trained on {read:,} rows in {seconds:.1f} s: {read / seconds:,.0f} rows/s")
    print(f"accuracy on {len(held_out_rows)} held-out rows: {reached:.3f} (goal: {GOAL})")
    return 0 if reached >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
