"""Where a sampler stands, as a few integers; and finding that in a loader's own state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from td_datapipes.errors import StateError

__all__ = ["LoaderPosition", "Position", "find_sampler_state", "read_integer", "read_string", "require_version"]

STATE_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Position:
    """A place in the epochs of a sampler.

    Attributes:
        epoch: the epoch.
        rows: rows of the data set when the epoch began; rows appended since are for the next epoch.
        start: positions of the global order consumed before batch 0, by another number of ranks perhaps.
        batch: batches handed out since.
    """

    epoch: int
    rows: int
    start: int = 0
    batch: int = 0


@dataclass(frozen=True, kw_only=True)
class LoaderPosition:
    """What a StatefulDataLoader's state says about its sampler.

    Attributes:
        state: of the sampler or its iterator, as it was at the loader's last snapshot.
        later_batches: batches the consumer got since that snapshot.
        finished: whether the consumer saw the epoch's end.
    """

    state: Mapping[str, Any]
    later_batches: int
    finished: bool


def find_sampler_state(loader_state: Mapping[str, Any]) -> LoaderPosition:
    """The sampler's part of ``StatefulDataLoader.state_dict()``, with or without worker processes.

    The iterator's state is preferred: it is the one that the loader itself was drawing from.

    Raises:
        StateError: it is no such state, or its sampler stored nothing.
    """
    main, later = loader_state, 0
    if "_snapshot" in loader_state:
        main = loader_state["_snapshot"]["_main_snapshot"]
        later = int(loader_state.get("_steps_since_snapshot", 0))
    found = main.get("_sampler_iter_state") or main.get("_index_sampler_state")
    if isinstance(found, Mapping) and "samples_yielded" in found:
        # A row sampler below the loader's own batch sampler.
        found = found.get("sampler_iter_state") or found.get("sampler_state")
        if later:
            raise StateError(
                f"the loader took its last snapshot {later} batches ago and the rows since are unknown; "
                "use snapshot_every_n_steps=1, or a batch sampler"
            )
    if not isinstance(found, Mapping):
        raise StateError(
            f"no sampler's state in a loader state with the keys {sorted(loader_state)}; "
            "pass StatefulDataLoader.state_dict() of a loader that was given this sampler"
        )
    return LoaderPosition(
        state=found, later_batches=later, finished=bool(loader_state.get("_iterator_finished", False))
    )


def require_version(state: Mapping[str, Any], kind: str) -> None:
    """Refuse what no sampler of this package's present form wrote."""
    if not isinstance(state, Mapping) or state.get("version") != STATE_VERSION:
        found = state.get("version") if isinstance(state, Mapping) else type(state).__name__
        raise StateError(f"{kind} loads states of version {STATE_VERSION}, got {found!r}")


def read_integer(state: Mapping[str, Any], name: str) -> int:
    """An integer >= 0 of the state."""
    value = state.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise StateError(f"a sampler state's {name!r} is an integer >= 0, got {value!r}")
    return value


def read_string(state: Mapping[str, Any], name: str) -> str:
    """A string of the state."""
    value = state.get(name)
    if not isinstance(value, str):
        raise StateError(f"a sampler state's {name!r} is a string, got {value!r}")
    return value
