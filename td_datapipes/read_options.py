"""How rows are read: what a user chooses."""

from __future__ import annotations

from dataclasses import dataclass, field

from td_datapipes.errors import ConfigurationError
from td_datapipes.heap_batch import RaggedOptions
from td_datapipes.plan import STRATEGIES, Strategy

__all__ = ["REPLICA", "ReadOptions"]

MASTER, REPLICA = "master", "replica"


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How rows are read.

    Attributes:
        strategy: ``auto``, or the one to force: ``covering``, ``pipelined``, ``lua``.
        strided: give views of the receive buffer in place of contiguous tensors.
        pin_memory: give page-locked tensors.
        atomic: read every batch in one step: one consistent snapshot. Values of variable length are of published
            generations, which never change, and are read by ranges all the same.
        verify: compare chunks that are read whole with their checksums.
        read_from: ``master``, or ``replica`` for a replica of each master where there is one.
        ragged: what becomes of values of variable length.
    """

    strategy: Strategy = "auto"
    strided: bool = False
    pin_memory: bool = False
    atomic: bool = False
    read_from: str = MASTER
    verify: bool = False
    ragged: RaggedOptions = field(default_factory=RaggedOptions)

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ConfigurationError(f"strategy must be one of {', '.join(STRATEGIES)}, got {self.strategy!r}")
        if self.atomic and self.strategy not in ("auto", "lua"):
            raise ConfigurationError(
                f"atomic=True reads in one step; it cannot be combined with strategy={self.strategy!r}"
            )

        if self.read_from not in (MASTER, REPLICA):
            raise ConfigurationError(f"read_from must be 'master' or 'replica', got {self.read_from!r}")

    @property
    def plan_strategy(self) -> Strategy:
        """What the planner is told."""
        return "lua" if self.atomic else self.strategy
