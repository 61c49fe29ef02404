"""Where a rank that fails tells the others: the store that the process group was made with."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from td_datapipes import errors
from td_datapipes.errors import PeerError, TDDatapipesError

__all__ = ["Board", "describe_error", "rebuild_error"]


class Board:
    """One note that the first rank to fail leaves for all.

    Args:
        group: of the transfer.
        name: of the note; the same on all ranks, and of this transfer only.
    """

    def __init__(self, group: dist.ProcessGroup, name: str) -> None:
        store: Any = group.get_group_store()
        self._store = PrefixStore("td_datapipes", store)
        self._key = name

    def tell(self, rank: int, error: BaseException) -> None:
        """Leave the note, unless another rank has. Never raises: the error itself is what matters."""
        text = json.dumps([rank, describe_error(error)])
        try:
            self._store.compare_set(self._key, "", text)
        except RuntimeError:  # the store's own process may be what is gone
            return

    def read(self) -> tuple[int, str] | None:
        """(rank, what it met); None where all is well, or nobody can be asked."""
        try:
            if not self._store.check([self._key]):
                return None
            rank, text = json.loads(self._store.get(self._key))
        except (RuntimeError, ValueError):
            return None
        return int(rank), str(text)

    def call_roll(self, rank: int, ranks: Iterable[int], seconds: float) -> list[int]:
        """Who of the ranks is missing: who does not say within so many seconds that it is there, as this one does.

        Empty where nobody can be asked.
        """
        keys = {other: f"{self._key}/here/{other}" for other in ranks}
        try:
            self._store.set(keys[rank], "1")
            with suppress(RuntimeError):
                self._store.wait(list(keys.values()), timedelta(seconds=seconds))
            return [other for other, key in keys.items() if not self._store.check([key])]
        except RuntimeError:  # the store's own process may be what is gone
            return []


def describe_error(error: BaseException) -> str:
    """The class and the message, as `rebuild_error` takes them."""
    return f"{type(error).__name__}: {error}"


def rebuild_error(rank: int, text: str) -> TDDatapipesError:
    """What another rank met, as an error of the same class where that is one of this package's."""
    name, _, message = text.partition(": ")
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, TDDatapipesError):
        return kind(f"rank {rank}: {message}")
    return PeerError(f"rank {rank} failed: {text}")
