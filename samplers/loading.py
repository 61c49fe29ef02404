"""Says why a StatefulDataLoader cannot go on from a state, before torchdata refuses it without a word."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from td_datapipes.errors import StateError

__all__ = ["refuse_other_workers"]

# From the sampler's __iter__ to the loader's own iterator, through its base classes.
_MAX_DEPTH = 6


def refuse_other_workers() -> None:
    """To be called by a batch sampler's ``__iter__``: checks the loader that asks for the iterator, if there is one.

    torchdata asks for the sampler's iterator first and then asserts that the state is of as many workers, with no
    message or a misleading one. It tells the sampler of neither number, but both are arguments of the caller. Where
    they are not found, nothing is checked.

    Raises:
        StateError: the state is of another number of workers; both are named, and the way out.
    """
    frame = sys._getframe(1)
    for _ in range(_MAX_DEPTH):
        if frame.f_back is None:
            return
        frame = frame.f_back
        if frame.f_code.co_name != "__init__":
            continue  # looking at a frame's variables would keep them alive for as long as it runs
        found = frame.f_locals
        if "loader" in found and "next_iter_state" in found:
            try:
                _compare(found["next_iter_state"], getattr(found["loader"], "num_workers", None))
            except StateError:
                # Half made, it has no workers to end; without this its __del__ complains of that.
                found["self"]._shutdown = True
                raise
            return


def _compare(state: Any, num_workers: object) -> None:
    if not isinstance(state, Mapping) or not isinstance(num_workers, int):
        return
    try:
        saved = state["_snapshot"]["_main_snapshot"]["_num_workers"] if "_snapshot" in state else 0
    except (KeyError, TypeError):
        return
    if saved != num_workers:
        raise StateError(
            f"the loader's state was saved with num_workers={saved}, this loader has num_workers={num_workers}; "
            f"torchdata cannot change it. Load sampler.load_cursor(sampler.cursor_of(state)) in place of the state, or "
            f"make the loader with num_workers={saved}"
        )
