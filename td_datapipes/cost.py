"""What a read costs: three constants a server, started from measured values and fitted to the first real reads. Pure.

A read of `m` ranges and `b` bytes takes about ``round_trip + m * range + b * byte``. The ratio of the last two says
which gap is cheaper to read than to skip. Nothing is ever sent just to measure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

import numpy as np

__all__ = ["CostModel", "ReadCost"]

_PRIOR = (50e-6, 2e-6, 1e-9)
"""Seconds a round trip, a range, a byte: loopback and a 2 KB break-even gap, until reads say otherwise."""
_BOUNDS = ((1e-6, 1.0), (2e-7, 1e-4), (5e-11, 1e-6))
_MAX_OBSERVATIONS = 64
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

    observations: int = 0
    _normal: np.ndarray = field(default_factory=lambda: _PRIOR_WEIGHT * np.diag(1.0 / np.square(_PRIOR)))
    _moment: np.ndarray = field(default_factory=lambda: _PRIOR_WEIGHT / np.asarray(_PRIOR))
    _cost: ReadCost = field(default_factory=ReadCost)
    _lua_trials: list[float] = field(default_factory=list)
    _pipelined_trials: list[float] = field(default_factory=list)

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
        """Whether enough reads were seen; later ones need not be timed."""
        return self.observations >= _MAX_OBSERVATIONS

    def observe(self, num_ranges: int, num_bytes: int, seconds: float) -> None:
        """Learn from one read that nothing else was in flight with."""
        if self.settled or seconds <= 0 or num_ranges == 0:
            return
        # No read is quicker than the quickest round trip: a clock that says so would make the fit singular.
        row = np.array([1.0, num_ranges, num_bytes]) / max(seconds, _BOUNDS[0][0])
        self._normal += np.outer(row, row)
        self._moment += row
        self.observations += 1
        solved = np.linalg.solve(self._normal, self._moment)
        low, high = np.array(_BOUNDS).T
        trip, per_range, per_byte = np.clip(solved, low, high).tolist()
        self._cost = ReadCost(round_trip_seconds=trip, range_seconds=per_range, byte_seconds=per_byte)
