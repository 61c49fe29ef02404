"""For tests of replay buffers: rows from which anybody can tell where they belong, and processes that write them."""

from __future__ import annotations

import multiprocessing.process
from collections.abc import Iterable

import torch
from tensordict import TensorDict

__all__ = ["GAMMA", "counted", "episode", "expected_return", "run_all"]

GAMMA = 0.5


def counted(start: int, rows: int, width: int = 5) -> TensorDict:
    """Rows whose fields ``a`` and ``b`` are one counter."""
    a = torch.arange(start, start + rows)
    return TensorDict({"a": a, "b": a.double()[:, None].expand(rows, width).contiguous()}, batch_size=[rows])


def episode(number: int, steps: int) -> TensorDict:
    """A trajectory of `steps` transitions and the row behind them: observation 1000 * number + step."""
    step = torch.arange(steps + 1)
    done = step == steps - 1
    return TensorDict(
        {
            "episode": torch.full((steps + 1,), number),
            "step": step,
            "observation": (1000 * number + step).float()[:, None].expand(-1, 3).contiguous(),
            "reward": (step + 1 + 10 * number).float(),
            "done": done,
            "terminated": done & (number % 2 == 0),
        },
        batch_size=[steps + 1],
    )


def expected_return(rewards: Iterable[float]) -> float:
    """The discounted sum, written out."""
    return sum(reward * GAMMA**power for power, reward in enumerate(rewards))


def run_all(*processes: multiprocessing.process.BaseProcess) -> None:
    """Start them together, and wait until all have ended well."""
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * len(processes)
