"""DQN on CartPole: two actor processes and a learner share one replay buffer on a server.

    pip install td-datapipes[embedded,rl]
    python examples/dqn_cartpole.py                                          # an embedded server in ./demo-data
    python examples/dqn_cartpole.py --url redis://localhost:6379/0#cartpole  # any Redis or Valkey

Actors store each observation once; the learner samples by priority and gets three-step returns, and the observation
behind them, put together on the server. A rate limit keeps actors and learner in step. Ends once the mean return of
the last 20 episodes is 150, prints the curve and saves it as a picture; exits with 1 where it is not reached in time.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import gymnasium
import matplotlib as mpl
import torch
from tensordict import TensorDict
from torch import multiprocessing, nn

from td_datapipes import RedisReplayBuffer
from td_datapipes.errors import TDDatapipesError
from td_datapipes.replay import LinearSchedule, NStep, Prioritized, RateLimit, Trajectories

mpl.use("Agg")
from matplotlib import pyplot as plt

GOAL, WINDOW = 150.0, 20
GAMMA, STEPS, BATCH = 0.99, 3, 128
CAPACITY, ROWS_A_WRITE = 50_000, 16


def network() -> nn.Sequential:
    """Values of the two actions."""
    return nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))


def open_buffer(url: str, **options: Any) -> RedisReplayBuffer:
    """The one buffer, as every process opens it: whoever writes first makes it."""
    return RedisReplayBuffer(
        url,
        CAPACITY,
        trajectories=Trajectories(reward="reward", done="done", terminated="terminated"),
        # A row is drawn 16 times on average, and nothing before 1,000 rows are there.
        rate_limit=RateLimit(samples_per_insert=16, min_size=1000, error_buffer=8192),
        **options,
    )


def rows_of(steps: list[tuple[Any, ...]]) -> TensorDict:
    """Steps as rows."""
    observation, action, reward, done, terminated, episode, step = (
        torch.as_tensor(v) for v in zip(*steps, strict=True)
    )
    source = {"observation": observation, "action": action, "reward": reward.float(), "done": done}
    source |= {"terminated": terminated, "episode": episode, "step": step}
    return TensorDict(source, batch_size=[len(steps)])


def act(number: int, url: str, model: nn.Module, returns: Queue[float], stop: Any) -> None:
    """Play episodes with the shared model and store every step."""
    torch.set_num_threads(1)
    dice = random.Random(number)
    environment = gymnasium.make("CartPole-v1")
    played = 0
    with open_buffer(url) as buffer:
        steps: list[tuple[Any, ...]] = []
        for count in itertools.count():
            episode, total = number * 10**9 + count, 0.0
            observation, _ = environment.reset(seed=episode % 2**31)
            for step in itertools.count():
                if stop.is_set():
                    return
                explore = dice.random() < max(0.02, 1.0 - played / 2500)
                with torch.no_grad():
                    best = model(torch.from_numpy(observation)).argmax().item()
                action = dice.randrange(2) if explore else int(best)
                following, reward, terminated, truncated, _ = environment.step(action)
                done = terminated or truncated
                steps.append((observation.tolist(), action, float(reward), done, terminated, episode, step))
                observation, total, played = following, total + float(reward), played + 1
                if done:  # what is seen last, and that nothing follows it
                    steps.append((observation.tolist(), 0, 0.0, True, terminated, episode, step + 1))
                if len(steps) >= ROWS_A_WRITE or done:
                    try:
                        buffer.extend(rows_of(steps))
                    except TDDatapipesError:
                        if stop.is_set():
                            return
                        raise
                    steps = []
                if done:
                    returns.put(total)
                    break


def loss_of(batch: TensorDict, model: nn.Module, target: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Double DQN: the loss, and each row's error."""
    value = model(batch["observation"]).gather(1, batch["action"][:, None])[:, 0]
    with torch.no_grad():
        best = model(batch["next", "observation"]).argmax(1, keepdim=True)
        behind = target(batch["next", "observation"]).gather(1, best)[:, 0]
        goes_on = (~batch["n_step_terminated"]).float()
        wanted = batch["n_step_return"] + GAMMA ** batch["n_steps"] * goes_on * behind
    error = wanted - value
    return (batch["weight"] * nn.functional.smooth_l1_loss(value, wanted, reduction="none")).mean(), error.detach()


def learn(url: str, model: nn.Module, returns: Queue[float], seconds: float) -> list[float]:
    """Train until the goal is reached or the time is up; the returns of all episodes."""
    target, optimizer = network(), torch.optim.Adam(model.parameters(), lr=5e-4)
    sampler = Prioritized(alpha=0.6, beta=LinearSchedule(0.4, 1.0, 20_000))
    n_step = NStep(steps=STEPS, gamma=GAMMA, next_fields=("observation",))
    curve: list[float] = []
    began = shown = time.monotonic()
    with open_buffer(url, sampler=sampler, n_step=n_step, batch_size=BATCH, prefetch=2) as buffer:
        for update in itertools.count():
            if update % 250 == 0:
                target.load_state_dict(model.state_dict())
            batch = buffer.sample()
            loss, error = loss_of(batch, model, target)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            buffer.update_priority(batch["index"], error.abs())
            while not returns.empty():
                curve.append(returns.get())
            mean = sum(curve[-WINDOW:]) / max(len(curve[-WINDOW:]), 1)
            now = time.monotonic()
            reached = len(curve) >= WINDOW and mean >= GOAL
            if now - shown > 5 or reached:
                shown = now
                print(f"{now - began:4.0f} s  {update:6} updates  {len(curve):5} episodes  mean return {mean:6.1f}")
            if reached or now - began > seconds:
                print(f"{buffer.num_written} rows written, {update * BATCH} drawn")
                return curve
    return curve


def draw(curve: list[float], file: Path) -> None:
    """Save the returns and their running mean as a picture."""
    means = [sum(curve[max(0, i - WINDOW + 1) : i + 1]) / min(i + 1, WINDOW) for i in range(len(curve))]
    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot(curve, ".", alpha=0.3, label="episode")
    axes.plot(means, label=f"mean of {WINDOW}")
    axes.axhline(GOAL, linestyle=":", color="gray")
    axes.set_xlabel("episode")
    axes.set_ylabel("return")
    axes.legend()
    figure.savefig(file, dpi=120, bbox_inches="tight")


def main() -> int:
    """Run actors and learner."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--url", default="embedded://demo-data#cartpole", help="server and name of the buffer")
    parser.add_argument("--seconds", type=float, default=300.0, help="give up after")
    parser.add_argument("--picture", type=Path, default=Path("cartpole.png"), help="where the curve is saved")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    context = multiprocessing.get_context("spawn")
    returns, stop, model = context.Queue(), context.Event(), network()
    model.share_memory()  # the learner's steps are seen by the actors
    open_buffer(options.url).drop()
    actors = [context.Process(target=act, args=(n, options.url, model, returns, stop)) for n in range(2)]
    for actor in actors:
        actor.start()
    try:
        curve = learn(options.url, model, returns, options.seconds)
    finally:
        stop.set()
        open_buffer(options.url).drop()  # wakes an actor that waits for the learner
        for actor in actors:
            actor.join(20)
            if actor.is_alive():
                actor.terminate()
    draw(curve, options.picture)
    mean = sum(curve[-WINDOW:]) / WINDOW
    print(f"mean return of the last {WINDOW} episodes: {mean:.1f}; the curve is in {options.picture}")
    return 0 if mean >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
