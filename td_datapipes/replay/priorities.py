"""New priorities for rows that were sampled."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from td_datapipes.errors import ConfigurationError, RowIndexError
from td_datapipes.replay.calls import Caller
from td_datapipes.replay.opening import Opener
from td_datapipes.replay.options import PriorityReport
from td_datapipes.replay.ring import Numbers, Ring, split_index

__all__ = ["update_priorities"]


def update_priorities(
    caller: Caller, opener: Opener, ring: Ring, index: Numbers, masses: npt.NDArray[np.float64], deadline: float
) -> PriorityReport:
    """Store what rows weigh in draws from now on.

    Args:
        caller: how the server is called.
        opener: what the buffer is.
        ring: its ring.
        index: rows' indices ``[n]``; of a row named twice, the last mass counts.
        masses: what they weigh ``[n]``.
        deadline: on `time.monotonic`'s clock.

    Raises:
        RowIndexError: an index that `sample` never gave.
    """
    if len(index) and int(index.min()) < 0:
        raise RowIndexError(f"index {int(index.min())} is none that sample gave")
    # The last of each: searched for from the end, where np.unique finds the first.
    _, place = np.unique(index[::-1], return_index=True)
    keep = len(index) - 1 - place
    index, masses = index[keep], masses[keep]
    incarnations, stripes, numbers = split_index(index, ring.stripes)
    rejected, num_applied = [np.empty(0, dtype=np.int64)], 0
    for key in np.unique(incarnations * ring.stripes + stripes):
        chosen = np.flatnonzero(incarnations * ring.stripes + stripes == key)
        incarnation, stripe = divmod(int(key), ring.stripes)
        # Two rows of one slot: the later one, which alone can still be there, has to be the last to be written.
        order = np.lexsort((numbers[chosen], (numbers[chosen] - 1) % ring.stripe_capacity))
        chosen = chosen[order]
        pairs = np.stack([numbers[chosen].astype("<f8"), masses[chosen]], axis=1)
        gone = _update(caller, opener, ring, stripe, incarnation, pairs, deadline)
        rejected.append(index[chosen[gone]])
        num_applied += int((~gone).sum())
    return PriorityReport(num_applied=num_applied, rejected=torch.from_numpy(np.concatenate(rejected)))


def _update(
    caller: Caller, opener: Opener, ring: Ring, stripe: int, incarnation: int, pairs: Any, deadline: float
) -> npt.NDArray[np.bool_]:
    arguments = [ring.prefix(stripe), incarnation, pairs.tobytes()]
    doing = f"updating priorities of {opener.name!r}"
    answer = caller.run("replay_priorities", [ring.state_key(stripe)], arguments, doing, deadline)
    if answer[0] == b"GONE":
        raise opener.gone(ring)
    if answer[0] == b"FROZEN":
        raise ConfigurationError(f"{opener.name!r} is a snapshot; its priorities stay as they are")
    opener.observe(ring, stripe, int(answer[1]), int(answer[2]))
    gone: npt.NDArray[np.bool_] = np.frombuffer(answer[3], dtype=np.uint8) == ord("1")
    return gone
