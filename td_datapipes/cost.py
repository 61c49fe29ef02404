"""What a read costs: three constants a server, started from measured values and fitted to the first real reads. Pure.

A read of `m` ranges and `b` bytes takes about ``round_trip + m * range + b * byte``. The ratio of the last two says
which gap is cheaper to read than to skip. Nothing is ever sent just to measure.

Reads of few ranges say what a byte costs and reads of many short ones what a range does; neither says both. So each
kind of read is learnt from apart, and gaps are no wider than the prior has them until reads of many ranges were seen.
Nothing is learnt from many covering ranges: they cost more than the same ranges and bytes do elsewhere, which would
make ranges look dear, hence more of them covering.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

import numpy as np

__all__ = ["CostModel", "ReadCost"]

_PRIOR = (50e-6, 2e-6, 1e-9)
"""Seconds a round trip, a range, a byte: loopback and a 2 KB break-even gap, until reads say otherwise."""
_BOUNDS = ((1e-6, 1.0), (2e-7, 1e-4), (5e-11, 1e-6))
_MAX_OBSERVATIONS = 48
"""Of each kind of read."""
_MANY_RANGES = 32
"""Below, what a range costs does not show beside the round trip."""
_LONG_RANGE_BYTES = 4096
"""On average: such ranges cost more than their bytes do elsewhere, since servers send them one by one."""
_WARM_UP = 4
"""The first reads find tables and caches empty and would make the other way look good."""
_TRIALS = 5
"""Lua calls to judge by; the first of them also pays for loading the script."""
_PRIOR_WEIGHT = 0.5
"""How many observations the prior counts for; it also decides where reads are all alike."""


@dataclass(frozen=True, kw_only=True)
class ReadCost:
    """The constants as they stand now.

    Attributes:
        round_trip_seconds: what every read pays once.
        range_seconds: what a range costs whatever its size.
        byte_seconds: what a byte costs.
    """

    round_trip_seconds: float = _PRIOR[0]
    range_seconds: float = _PRIOR[1]
    byte_seconds: float = _PRIOR[2]

    @property
    def max_gap_bytes(self) -> int:
        """The longest gap that is cheaper to read than to skip, between 256 B and 64 KiB."""
        return int(min(max(self.range_seconds / self.byte_seconds, 256), 65536))

    def seconds(self, num_ranges: int, num_bytes: int) -> float:
        """Estimated duration of a read."""
        return self.round_trip_seconds + num_ranges * self.range_seconds + num_bytes * self.byte_seconds


@dataclass
class CostModel:
    """Fits `ReadCost` to observed reads: least squares on relative errors, with the prior as further rows.

    It travels in pickles (a handful of floats), so a worker process starts from what its parent knows.
    """

    _seen: list[int] = field(default_factory=lambda: [0, 0, 0])
    _normal: np.ndarray = field(default_factory=lambda: _PRIOR_WEIGHT * np.diag(1.0 / np.square(_PRIOR)))
    _moment: np.ndarray = field(default_factory=lambda: _PRIOR_WEIGHT / np.asarray(_PRIOR))
    _cost: ReadCost = field(default_factory=ReadCost)
    _lua_trials: list[float] = field(default_factory=list)
    _pipelined_trials: list[float] = field(default_factory=list)

    @property
    def observations(self) -> int:
        """Reads that were seen; of each kind the first few are not learnt from."""
        return sum(self._seen)

    @property
    def cost(self) -> ReadCost:
        """The constants to plan the next read with."""
        return self._cost

    @property
    def wants_lua(self) -> bool:
        """Whether a scattered read of small rows is better done by one Lua call, or one is due to find that out.

        Every fourth of the first such reads is done by Lua: a real read, not a probe. From then on the cheaper way is
        taken, Lua only if it is clearly cheaper, since it blocks the server for its length.
        """
        if len(self._lua_trials) < _TRIALS:
            return len(self._pipelined_trials) > _WARM_UP + 3 * len(self._lua_trials)
        return median(self._lua_trials) < 0.9 * median(self._pipelined_trials[_WARM_UP:])

    def compare(self, strategy: str, num_rows: int, seconds: float) -> None:
        """Remember what a row cost in a scattered read of small rows, done by ``lua`` or ``pipelined``."""
        trials = self._lua_trials if strategy == "lua" else self._pipelined_trials
        if len(trials) < 4 * _TRIALS:
            trials.append(seconds / num_rows)

    @property
    def settled(self) -> bool:
        """Whether enough reads of every kind were seen; later ones need not be timed."""
        return min(self._seen) >= _MAX_OBSERVATIONS

    def observe(self, num_ranges: int, num_bytes: int, seconds: float, *, covering: bool = False) -> None:
        """Learn from one read that nothing else was in flight with; `covering` says that its ranges close gaps."""
        kind = _kind(num_ranges, num_bytes)
        if covering and kind:
            return
        if self._seen[kind] >= _MAX_OBSERVATIONS or seconds <= 0 or num_ranges == 0:
            return
        self._seen[kind] += 1
        if self._seen[kind] <= _WARM_UP:
            return
        # No read is quicker than the quickest round trip: a clock that says so would make the fit singular.
        row = np.array([1.0, num_ranges, num_bytes]) / max(seconds, _BOUNDS[0][0])
        self._normal += np.outer(row, row)
        self._moment += row
        solved = np.linalg.solve(self._normal, self._moment)
        low, high = np.array(_BOUNDS).T
        trip, per_range, per_byte = np.clip(solved, low, high).tolist()
        if max(self._seen[1:]) <= _WARM_UP:  # nothing says yet what a range costs
            per_range = min(per_range, per_byte * _PRIOR[1] / _PRIOR[2])
        self._cost = ReadCost(round_trip_seconds=trip, range_seconds=per_range, byte_seconds=per_byte)


def _kind(num_ranges: int, num_bytes: int) -> int:
    """Of a read: few ranges, many short ones, many long ones."""
    if num_ranges < _MANY_RANGES:
        return 0
    return 1 if num_bytes < _LONG_RANGE_BYTES * num_ranges else 2
