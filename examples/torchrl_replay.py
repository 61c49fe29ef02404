"""torchrl's collectors and replay buffer over rows on a server: learn what CartPole does next.

    pip install td-datapipes[embedded,rl]
    python examples/torchrl_replay.py                                         # an embedded server in ./demo-data
    python examples/torchrl_replay.py --url redis://localhost:6379/0#steps   # any Redis or Valkey

Two collector processes play at random and write through one `RedisStorage`; the learner samples the same rows and fits
a model of the next observation. Exits with 1 where the model explains less than 99 % of the observations' variance.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import nn
from torchrl.collectors import MultiSyncCollector
from torchrl.data import TensorDictReplayBuffer
from torchrl.envs import GymEnv

from td_datapipes import RedisReplayBuffer
from td_datapipes.torchrl import RedisStorage, RedisWriter

GOAL = 0.99
FRAMES = 4000


def environment() -> GymEnv:
    """What is played."""
    return GymEnv("CartPole-v1")


def collect(buffer: TensorDictReplayBuffer) -> None:
    """Fill the buffer from two processes."""
    collector = MultiSyncCollector(
        [environment] * 2, policy=None, frames_per_batch=400, total_frames=FRAMES, replay_buffer=buffer
    )
    try:
        for _ in collector:
            print(f"{len(buffer)} rows on the server")
    finally:
        collector.shutdown()


def fit(buffer: TensorDictReplayBuffer, updates: int) -> float:
    """Train a model of the next observation; the share of variance it explains in the last batches."""
    model = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    explained = []
    for update in range(updates):
        batch = buffer.sample()
        known = torch.cat([batch["observation"], batch["action"].float()], 1)
        change = batch["next", "observation"] - batch["observation"]
        error = (model(known) - change).square().mean()
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
        if update >= updates - 20:
            explained.append(1 - error.item() / batch["next", "observation"].var(0).mean().item())
    return sum(explained) / len(explained)


def main() -> int:
    """Collect, then learn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--url", default="embedded://demo-data#steps", help="server and name of the buffer")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    RedisReplayBuffer(options.url).drop()
    buffer = TensorDictReplayBuffer(
        storage=RedisStorage(options.url, 10_000), writer=RedisWriter(), batch_size=256, shared=True
    )
    collect(buffer)
    explained = fit(buffer, updates=500)
    print(f"{len(buffer)} rows; the model explains {explained:.2%} of the next observations' variance")
    return 0 if len(buffer) == FRAMES and explained >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
