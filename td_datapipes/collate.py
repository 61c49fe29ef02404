"""torch's default collate and TensorDict batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase
from torch.utils.data._utils.collate import default_collate_fn_map

__all__ = ["collate_tensordicts", "register_collate"]


def collate_tensordicts(
    batch: TensorDictBase | Sequence[TensorDictBase], *, collate_fn_map: dict[Any, Any] | None = None
) -> TensorDictBase:
    """A batch as it is, if a data set's ``__getitems__`` already made one; single rows are stacked.

    Args:
        batch: what the data set gave: a TensorDict ``[rows, ...]``, or a list of rows.
        collate_fn_map: torch passes it; not needed here.
    """
    del collate_fn_map
    if isinstance(batch, TensorDictBase):
        return batch
    stacked: Any = torch.stack(list(batch), 0)
    return cast(TensorDictBase, stacked)


def register_collate() -> None:
    """Teach ``default_collate`` about TensorDicts, unless the installed tensordict has done so itself."""
    for known in list(default_collate_fn_map):
        if isinstance(known, type) and issubclass(TensorDict, known):
            return
    default_collate_fn_map[TensorDictBase] = collate_tensordicts
