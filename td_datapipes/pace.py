"""How often a consumer comes back, and so who is to do what is done ahead for it. Pure: it is told the time."""

from __future__ import annotations

__all__ = ["Pace"]

AWAY_SECONDS = 500e-6
"""A consumer that is away for less is sooner back than a thread has taken the interpreter over and given it back."""
NAP_SECONDS = 10e-3
"""For so long a consumer may stay away unexpectedly before the thread sets to work."""
_LONGEST_SECONDS = 2e-3
_WEIGHT = 0.25
"""Of the latest absence. With the above, five short ones in a row are believed, and one long one."""


class Pace:
    """Tells whether work is left to a thread: the consumer has been away for long, or will be, as it was lately."""

    def __init__(self) -> None:
        self._away_seconds = _LONGEST_SECONDS
        self._left: float | None = None

    def came(self, now: float) -> None:
        """The consumer is here."""
        if self._left is not None:
            away = min(now - self._left, _LONGEST_SECONDS)
            self._away_seconds += (away - self._away_seconds) * _WEIGHT

    def left(self, now: float) -> None:
        """The consumer has got what it came for."""
        self._left = now

    @property
    def is_slow(self) -> bool:
        """Whether it is away for long as a rule."""
        return self._away_seconds >= AWAY_SECONDS

    def nap_seconds(self, now: float) -> float:
        """How long the thread is to leave the work to the consumer; 0 where it is to work."""
        if self.is_slow or self._left is None:
            return 0.0
        return max(self._left + NAP_SECONDS - now, 0.0)
