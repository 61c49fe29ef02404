"""How often, how long and after which pauses something that failed is tried again."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from redis.backoff import FullJitterBackoff

from td_datapipes.errors import ConfigurationError, TDDatapipesError

__all__ = ["RetryPolicy", "Tries"]

DEFAULT_ATTEMPTS = 5
"""On one server: about a second, for connections that broke. A cluster or a sentinel is given until the deadline."""


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How what failed is tried again: whole plans of reads, and writes that cannot apply twice.

    The pauses grow from `base_seconds` twofold each time up to `cap_seconds`, and each is drawn at random between 0 and
    that, so that many readers do not come back at once ("full jitter").

    Attributes:
        attempts: how often a broken connection is tried, the first time included. By default 5 times on one server, and
            until the deadline where another server may take over (cluster, sentinel). What a server says will pass (it
            loads its data, runs a long script, moves a slot) is waited for until the deadline in any case.
        base_seconds: upper bound of the first pause.
        cap_seconds: upper bound of any pause.
        deadline_seconds: for everything together; by default the URL's ``socket_timeout``, else 30 s.
    """

    attempts: int | None = None
    base_seconds: float = 0.05
    cap_seconds: float = 1.0
    deadline_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.attempts is not None and self.attempts < 1:
            raise ConfigurationError(f"retry attempts must be 1 or more, got {self.attempts}")
        for name in ("base_seconds", "cap_seconds", "deadline_seconds"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigurationError(f"retry {name} must be a number of seconds above 0, got {value}")

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> RetryPolicy:
        """Take ``retry_attempts``, ``retry_base_seconds``, ``retry_cap_seconds``, ``retry_deadline_seconds`` out.

        Raises:
            ConfigurationError: a value that is no number, or out of range.
        """
        found: dict[str, Any] = {}
        for field in fields(cls):
            text = options.pop(f"retry_{field.name}", None)
            if text is None:
                continue
            try:
                found[field.name] = int(text) if field.name == "attempts" else float(text)
            except ValueError:
                raise ConfigurationError(f"retry_{field.name} must be a number, got {text!r}") from None
        return cls(**found)

    def to_options(self) -> Mapping[str, Any]:
        """What differs from the default, as options of a URL."""
        return {f"retry_{f.name}": getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}

    def begin(self, deadline: float, *, others_take_over: bool) -> Tries:
        """The first try begins.

        Args:
            deadline: on `time.monotonic`'s clock.
            others_take_over: whether a server that is gone may be replaced by another.
        """
        attempts = self.attempts
        if attempts is None:
            attempts = None if others_take_over else DEFAULT_ATTEMPTS
        backoff = FullJitterBackoff(cap=self.cap_seconds, base=self.base_seconds)
        return Tries(attempts, backoff, deadline)


class Tries:
    """One operation's tries."""

    def __init__(self, attempts: int | None, backoff: Any, deadline: float) -> None:
        self._attempts, self._backoff, self.deadline = attempts, backoff, deadline
        self._failed = self._in_a_row = 0

    def failed(self, error: TDDatapipesError, *, passes: bool = False, at_once: bool = False) -> None:
        """A try failed: return when the next may begin.

        Args:
            error: what to raise if there is no next.
            passes: the server says that this will pass; it does not count as one of the attempts.
            at_once: no pause the first time: somebody else was named who can be asked.

        Raises:
            TDDatapipesError: `error`, if the attempts or the time are used up.
        """
        self._in_a_row += 1
        if not passes:
            self._failed += 1
            if self._attempts is not None and self._failed >= self._attempts:
                raise error
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise error
        if at_once and self._in_a_row == 1:
            return
        # Bounded: the doubling must not become a number that is none.
        pause = float(self._backoff.compute(min(self._in_a_row, 30)))
        if pause >= left:
            raise error
        time.sleep(pause)
