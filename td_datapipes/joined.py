"""Several data sets of the same fields as one, their rows numbered one after another."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDict
from torch.utils.data import Dataset

from td_datapipes.datasets import RedisTDDataset
from td_datapipes.errors import ConfigurationError, SchemaError
from td_datapipes.prefetch import AnnouncedBatch, AnnouncedWindow
from td_datapipes.read_spec import Rows
from td_datapipes.rows import resolve_index
from td_datapipes.schema import Field, Key, Schema
from td_datapipes.wire.reader import ReadStats

__all__ = ["JoinedRows"]


class JoinedRows(Dataset[TensorDict]):
    """Rows of several data sets. Every source reads ahead by itself what a batch announces of it.

    Args:
        sources: opened data sets of the same fields; owned from here on.

    Raises:
        ConfigurationError: there are none.
        SchemaError: a source's fields differ from the first one's; it names the field and both data sets.
    """

    def __init__(self, sources: Sequence[RedisTDDataset]) -> None:
        if not sources:
            raise ConfigurationError("at least one data set is needed, got none")
        self.sources = tuple(sources)
        for source in self.sources[1:]:
            _check_same_fields(self.sources[0], source)
        self.offsets = tuple(np.cumsum([0, *map(len, self.sources)]).tolist())

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def __getitem__(self, index: Any) -> TensorDict:
        """As `RedisTDDataset`'s."""
        rows, shape = resolve_index(index, len(self), self.name)
        batch = self._read(rows, None)
        if len(shape) == 1:
            return batch
        return batch.reshape(*shape, *batch.batch_size[1:]) if shape else batch[0]

    def __getitems__(self, rows: Sequence[int]) -> TensorDict:
        """A batch, from what was read ahead where a sampler announced it."""
        numbers, _ = resolve_index(rows, len(self), self.name)
        announced = cast(AnnouncedBatch, rows) if getattr(rows, "window", None) is not None else None
        return self._read(numbers, announced)

    def _read(self, rows: Rows, announced: AnnouncedBatch | None) -> TensorDict:
        which = np.searchsorted(self.offsets, rows, side="right") - 1
        parts: list[TensorDict] = []
        places: list[Rows] = []
        for number, source in enumerate(self.sources):
            mine = np.flatnonzero(which == number)
            if not len(mine) and (parts or number + 1 < len(self.sources)):
                continue
            local = (rows[mine] - self.offsets[number]).tolist()
            parts.append(source.__getitems__(_SourceBatch(local, announced, *self.offsets[number : number + 2])))
            places.append(mine)
        if len(parts) == 1:
            return parts[0]
        back = torch.from_numpy(np.argsort(np.concatenate(places), kind="stable"))
        return self.sources[0].join(parts)[back]

    def refresh(self) -> int:
        """Take in the rows appended to the last source since it was opened; how many rows there are now.

        Rows appended to the others stay unseen: the numbers of those behind them would move.

        Raises:
            DatasetChangedError: the last source was removed or written anew.
        """
        self.sources[-1].refresh()
        self.offsets = tuple(np.cumsum([0, *map(len, self.sources)]).tolist())
        return len(self)

    @property
    def complete(self) -> bool:
        """Whether nothing will be appended to the last of them any more."""
        return self.sources[-1].complete

    @property
    def name(self) -> str:
        """The names of all of them."""
        return ", ".join(source.name for source in self.sources)

    @property
    def schema(self) -> Schema:
        """What a row is."""
        return self.sources[0].schema

    @property
    def fields(self) -> tuple[Key, ...]:
        """The fields that are read."""
        return self.sources[0].fields

    @property
    def row_bytes(self) -> int:
        """Bytes read for one row."""
        return self.sources[0].row_bytes

    @property
    def fingerprint(self) -> str:
        """Tells these rows from others': which data sets, and how many rows of each but the last."""
        known = [f"{source.fingerprint}:{len(source)}" for source in self.sources[:-1]]
        return "+".join([*known, self.sources[-1].fingerprint])

    @property
    def stats(self) -> ReadStats:
        """What was moved in this process so far, over all of them."""
        total = ReadStats()
        for source in self.sources:
            total = total + source.stats
        return total

    def close(self) -> None:
        """Drop all connections. Reading again dials anew."""
        for source in self.sources:
            source.close()

    def __enter__(self) -> JoinedRows:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.sources))})"


class _SourceBatch(list[int]):
    """The rows of one source in a batch, announcing what the batch announces of that source."""

    def __init__(self, rows: Sequence[int], announced: AnnouncedBatch | None, start: int, stop: int) -> None:
        super().__init__(rows)
        self.ordinal = 0 if announced is None else announced.ordinal
        window = None if announced is None else announced.window
        self.window = None if window is None else _SourceWindow(window, start, stop)


class _SourceWindow:
    """What a window announces of one source. Drawn when somebody asks, and then once."""

    def __init__(self, window: AnnouncedWindow, start: int, stop: int) -> None:
        self._window, self._start, self._stop = window, start, stop

    @property
    def first_ordinal(self) -> int:
        return self._window.first_ordinal

    @cached_property
    def batches(self) -> tuple[Rows, ...]:
        start, stop = self._start, self._stop
        return tuple(rows[(rows >= start) & (rows < stop)] - start for rows in self._window.batches)

    @cached_property
    def next(self) -> _SourceWindow | None:
        following = self._window.next
        return None if following is None else _SourceWindow(following, self._start, self._stop)


def _check_same_fields(first: RedisTDDataset, other: RedisTDDataset) -> None:
    mine, theirs = first.schema, other.schema
    dense = [key for key in first.fields if key in mine.fields]
    if len(dense) == len(mine.fields) or first.fields != other.fields:
        difference = mine.difference(theirs)
    else:
        pairs = [(mine.fields[key], theirs.fields[key]) for key in dense if key in theirs.fields]
        unlike = [pair for pair in pairs if not _alike(*pair)]
        difference = f"{unlike[0][0]} here, {unlike[0][1]} there" if unlike else ""
    if difference:
        raise SchemaError(
            f"{first.name!r} and {other.name!r} cannot be read as one: {difference} (here: {first.name!r}, there: "
            f"{other.name!r}); choose fields that are alike with fields=[...]"
        )


def _alike(mine: Field, theirs: Field) -> bool:
    return (mine.dtype, mine.shape, mine.varying) == (theirs.dtype, theirs.shape, theirs.varying)
