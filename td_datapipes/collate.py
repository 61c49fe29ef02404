"""torch's default collate and TensorDict batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase
from torch.utils.data._utils import collate
from torch.utils.data._utils.collate import default_collate_fn_map

__all__ = ["collate_tensordicts", "convert_tensordicts", "register_collate"]

_convert_others: Callable[[Any], Any] = getattr(collate.default_convert, "others", collate.default_convert)
"""torch's own, also where this module is loaded once more."""


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


def convert_tensordicts(data: Any) -> Any:
    """What loaders do with items they do not batch (``batch_size=None``): a TensorDict is passed on as it is.

    torch's own takes it for a mapping, looks its rows up as if they were keys, and raises; there is no registry for
    this one. Everything else is left to torch's.
    """
    return data if isinstance(data, TensorDictBase) else _convert_others(data)


def register_collate() -> None:
    """Teach ``default_collate`` and ``default_convert`` about TensorDicts, unless tensordict has done so itself."""
    convert_tensordicts.others = _convert_others  # type: ignore[attr-defined]
    collate.default_convert = convert_tensordicts
    # A function is pickled by its name, under which ours is found now: who has torch's own ships it to workers by this.
    _convert_others.__module__, _convert_others.__qualname__ = __name__, "_convert_others"
    for known in list(default_collate_fn_map):
        if isinstance(known, type) and issubclass(TensorDict, known):
            return
    default_collate_fn_map[TensorDictBase] = collate_tensordicts
