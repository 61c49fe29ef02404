"""Replay buffers on a server: many processes write, many sample, all by URL."""

from __future__ import annotations

from td_datapipes.replay.buffer import RedisReplayBuffer
from td_datapipes.replay.options import (
    Fifo,
    Lifo,
    LinearSchedule,
    NStep,
    Prioritized,
    PriorityReport,
    RateLimit,
    Slices,
    Trajectories,
    Uniform,
)

__all__ = [
    "Fifo",
    "Lifo",
    "LinearSchedule",
    "NStep",
    "Prioritized",
    "PriorityReport",
    "RateLimit",
    "RedisReplayBuffer",
    "Slices",
    "Trajectories",
    "Uniform",
]
