"""The sampler below a `CoalescingBatchSampler`: its rows, and what restores it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DistributedSampler, SequentialSampler

from td_datapipes.errors import StateError

from .rows import RowIterator, RowSampler

__all__ = ["InnerRows"]

Rows = NDArray[np.int64]

# Their order follows from what they are given, so a position restores them.
_DETERMINISTIC = (SequentialSampler, DistributedSampler)
_SEQUENCES = (range, list, tuple, np.ndarray)


@runtime_checkable
class _Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class InnerRows:
    """One iteration of any sampler of rows.

    Args:
        sampler: what is iterated.
        saved: what `state` gave earlier; None begins an epoch.
    """

    def __init__(self, sampler: Iterable[int], saved: Mapping[str, Any] | None = None) -> None:
        self._sampler = sampler
        self._saved = saved
        self._position = saved.get("position", 0) if saved else 0
        self._drawn = 0
        self._iterator: Iterator[int] = self._open(saved or {})

    def take(self, count: int) -> Rows:
        """The next ``count`` rows, fewer at the end."""
        if isinstance(self._iterator, RowIterator):
            rows = self._iterator.take(count)
        else:
            rows = np.fromiter((int(row) for row in islice(self._iterator, count)), np.int64)
        self._drawn += len(rows)
        return rows

    @property
    def num_padded(self) -> int:
        """How many of the iteration's last rows are repeats."""
        return self._iterator.num_padded if isinstance(self._iterator, RowIterator) else 0

    def state(self) -> dict[str, Any] | None:
        """What restores the iteration here; None if nothing can."""
        if not self._drawn and self._saved is not None:
            return dict(self._saved)
        found: dict[str, Any] = {}
        epoch = getattr(self._sampler, "epoch", None)
        if isinstance(epoch, int) and hasattr(self._sampler, "set_epoch"):
            found["epoch"] = epoch
        if isinstance(self._iterator, _Stateful):
            found["iterator"] = copy.deepcopy(self._iterator.state_dict())
        if isinstance(self._iterator, RowIterator):
            return found  # its state is the sampler's too
        if isinstance(self._sampler, _Stateful):
            # One whose iterators have no state may still hold the last epoch's before the first row.
            if self._drawn or "iterator" in found:
                found["sampler"] = copy.deepcopy(self._sampler.state_dict())
        elif is_deterministic(self._sampler):
            found["position"] = self._position + self._drawn
        elif "iterator" not in found:
            return None
        return found

    def _open(self, saved: Mapping[str, Any]) -> Iterator[int]:
        if "epoch" in saved:
            self._require("set_epoch")(saved["epoch"])
        of_sampler = saved.get("iterator" if isinstance(self._sampler, RowSampler) else "sampler")
        if of_sampler is not None:
            self._require("load_state_dict")(copy.deepcopy(of_sampler))
        iterator = iter(self._sampler)
        if "iterator" in saved:
            if not isinstance(iterator, _Stateful):
                raise StateError(f"the state holds an iterator's, but {_name(self._sampler)} has none that loads it")
            iterator.load_state_dict(copy.deepcopy(saved["iterator"]))
        return islice(iterator, self._position, None) if self._position else iterator

    def _require(self, method: str) -> Any:
        if not hasattr(self._sampler, method):
            raise StateError(f"the state needs {method}(), which {_name(self._sampler)} does not have")
        return getattr(self._sampler, method)


def is_deterministic(sampler: Iterable[int]) -> bool:
    """Whether a position restores it; a subclass with an iteration of its own may be anything."""
    if isinstance(sampler, _SEQUENCES):
        return True
    return any(type(sampler).__iter__ is kind.__iter__ for kind in _DETERMINISTIC)


def _name(sampler: object) -> str:
    return type(sampler).__name__
