"""What a user says about a replay buffer: how it samples, what its rows are to each other, how fast it may be used."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from td_datapipes.errors import ConfigurationError
from td_datapipes.schema import Key, normalise_key

__all__ = [
    "FieldName",
    "Fifo",
    "Lifo",
    "LinearSchedule",
    "NStep",
    "Prioritized",
    "PriorityReport",
    "RateLimit",
    "Sampler",
    "Schedule",
    "Slices",
    "Trajectories",
    "Uniform",
    "value_at",
]

FieldName = str | tuple[str, ...]
Schedule = float | Callable[[int], float]
"""A constant, or a function of how many batches this buffer object has handed out."""


_ROLES = ("id", "step", "reward", "done", "terminated")


def value_at(schedule: Schedule, num_batches: int) -> float:
    """The value of a schedule."""
    return float(schedule(num_batches) if callable(schedule) else schedule)


def _positive(what: str, value: int) -> None:
    if value < 1:
        raise ConfigurationError(f"{what} must be 1 or more, got {value}")


@dataclass(frozen=True)
class LinearSchedule:
    """From `start` to `stop` over the first `num_batches` batches, then `stop`: for annealing alpha and beta."""

    start: float
    stop: float
    num_batches: int

    def __call__(self, num_batches: int) -> float:
        """The value after so many batches."""
        done = min(num_batches / max(self.num_batches, 1), 1.0)
        return self.start + (self.stop - self.start) * done


@dataclass(frozen=True, kw_only=True)
class Uniform:
    """Every row is equally likely.

    Attributes:
        replacement: whether a batch may hold a row twice.
    """

    replacement: bool = True


@dataclass(frozen=True, kw_only=True)
class Prioritized:
    """Rows in proportion to ``(priority + eps) ** alpha`` (T. Schaul et al., "Prioritized Experience Replay", 2016).

    New rows get the highest priority there has been. The batch has a field ``weight``: ``(rows * P(row)) ** -beta``,
    divided by the largest of the batch.

    Attributes:
        alpha: how much priorities matter. It is applied when a priority is stored, so a schedule changes what is
            stored from then on, not what the tree holds already.
        beta: how much of the bias the weights take back.
        eps: keeps rows of priority 0 from never being drawn again.
        replacement: whether a batch may hold a row twice.
    """

    alpha: Schedule = 0.6
    beta: Schedule = 0.4
    eps: float = 1e-6
    replacement: bool = True


@dataclass(frozen=True)
class Fifo:
    """The oldest rows that no sampler got this way yet: a queue that all learners share.

    Rows that are overwritten first are skipped.
    """


@dataclass(frozen=True)
class Lifo:
    """The newest rows, newest first. They stay, and may be had again."""


@dataclass(frozen=True, kw_only=True)
class Slices:
    """Windows of consecutive steps of one trajectory; every complete window is equally likely.

    Attributes:
        length: steps a window; a batch has the size ``[n, length]``.
        replacement: whether a batch may hold a window twice.
    """

    length: int
    replacement: bool = True

    def __post_init__(self) -> None:
        if self.length < 2:
            raise ConfigurationError(f"a slice has 2 steps or more, got length={self.length}")


Sampler = Uniform | Prioritized | Fifo | Lifo | Slices


@dataclass(frozen=True, kw_only=True)
class Trajectories:
    """Which fields say what row follows which. Rows are joined within one id, from each step to the next one only.

    The row behind one that is done is stored too, under the same id and the next step: its observation is the last
    one, and as nothing follows it, it is never the start of anything that is sampled.

    Attributes:
        id: an integer field, one number a row: which trajectory. No two actors may use the same.
        step: an integer field, one number a row: grows by 1 from row to row.
        reward: a float32 or float64 field, one number a row; needed for n-step returns.
        done: a bool field, one value a row: no reward behind this row's counts.
        terminated: a bool field, one value a row: done because the task ended, not because time ran out.
    """

    id: FieldName = "episode"
    step: FieldName = "step"
    reward: FieldName | None = None
    done: FieldName | None = None
    terminated: FieldName | None = None

    def __post_init__(self) -> None:
        for role in _ROLES:
            if (name := getattr(self, role)) is not None:
                object.__setattr__(self, role, normalise_key(name))  # so that one field has one name

    def keys(self) -> dict[str, Key]:
        """The fields it names."""
        named = {role: getattr(self, role) for role in _ROLES}
        return {role: key for role, key in named.items() if key is not None}

    def to_json(self) -> dict[str, list[str]]:
        """As the manifest keeps it."""
        return {role: list(key) for role, key in self.keys().items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Trajectories:
        """The inverse of `to_json`."""
        return cls(**{role: tuple(key) for role, key in data.items()})


@dataclass(frozen=True, kw_only=True)
class NStep:
    """Give each row the discounted sum of its next rewards and fields of the row behind them.

    A row is not sampled before the rows behind it are there: `steps` of them, or up to the one behind the end.

    Attributes:
        steps: rewards in the sum, fewer where the trajectory is done before.
        gamma: the discount a step.
        next_fields: what of the row behind them is given, under ``next``.
    """

    steps: int = 1
    gamma: float = 0.99
    next_fields: tuple[FieldName, ...] = ("observation",)

    def __post_init__(self) -> None:
        _positive("steps", self.steps)
        if not 0 <= self.gamma <= 1:
            raise ConfigurationError(f"gamma must be within [0, 1], got {self.gamma}")


@dataclass(frozen=True, kw_only=True)
class RateLimit:
    """Keeps the number of samples near so many times the number of rows written; whoever is ahead waits.

    As Reverb's: ``rows * samples_per_insert - samples`` is held within `error_buffer` of
    ``min_size * samples_per_insert``, and nothing is sampled below `min_size` rows.

    Attributes:
        samples_per_insert: how often a row is drawn, on average.
        min_size: rows before the first sample.
        error_buffer: how far either side may run ahead, in samples; infinite: samples wait for `min_size` only.
    """

    samples_per_insert: float
    min_size: int
    error_buffer: float = math.inf

    def __post_init__(self) -> None:
        _positive("min_size", self.min_size)
        if not self.samples_per_insert > 0:
            raise ConfigurationError(f"samples_per_insert must be above 0, got {self.samples_per_insert}")
        if not self.error_buffer >= max(1.0, self.samples_per_insert):
            raise ConfigurationError(
                f"error_buffer must be at least {max(1.0, self.samples_per_insert)} (1 and samples_per_insert), or "
                f"neither side could ever go on; got {self.error_buffer}"
            )

    @property
    def offset(self) -> float:
        """What the difference is held near."""
        return self.min_size * self.samples_per_insert

    def to_json(self) -> dict[str, float]:
        """As the manifest keeps it."""
        buffer = -1.0 if math.isinf(self.error_buffer) else self.error_buffer
        return {"samples_per_insert": self.samples_per_insert, "min_size": self.min_size, "error_buffer": buffer}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RateLimit:
        """The inverse of `to_json`."""
        buffer = math.inf if data["error_buffer"] < 0 else float(data["error_buffer"])
        return cls(
            samples_per_insert=float(data["samples_per_insert"]), min_size=int(data["min_size"]), error_buffer=buffer
        )


@dataclass(frozen=True, kw_only=True)
class PriorityReport:
    """What became of new priorities.

    Attributes:
        num_applied: rows that have them now.
        rejected: indices of rows that have been overwritten since they were drawn, int64.
    """

    num_applied: int
    rejected: torch.Tensor
