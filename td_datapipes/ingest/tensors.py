"""Sources of tensors: memory-mapped TensorDicts, iterables of TensorDicts or of dicts of arrays."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection

from td_datapipes.blocks import RowBlock, TensorDictBlock
from td_datapipes.errors import ConfigurationError, SchemaError, SourceError
from td_datapipes.ingest.fingerprints import fingerprint_of
from td_datapipes.schema import Schema, schema_of

__all__ = ["IterableSource", "Names", "TensorSource", "as_tensor", "memmap_source", "selector", "wanted"]

BATCH_BYTES = 8 << 20
MAX_BATCH_ROWS = 65536


Names = Sequence[str | tuple[str, ...]]


class TensorSource:
    """Rows that lie in files, a tensor a field, as a `RowSource`.

    Args:
        schema: what a row is.
        num_rows: how many there are.
        read: takes a range of rows, gives its TensorDict; asked for one range after the other.
        fingerprint: see `RowSource`.
        label: what it is, for messages.
    """

    def __init__(
        self,
        schema: Schema,
        num_rows: int,
        read: Callable[[int, int], TensorDictBase],
        fingerprint: str | None,
        label: str,
    ) -> None:
        self.schema, self.num_rows, self.fingerprint, self.label = schema, num_rows, fingerprint, label
        self._read = read

    def blocks(self, start_row: int) -> Iterator[RowBlock]:
        """See `RowSource`."""
        row_bytes = sum(field.nbytes for field in self.schema.fields.values())
        step = max(1, min(MAX_BATCH_ROWS, BATCH_BYTES // max(row_bytes, 1)))
        for start in range(start_row, self.num_rows, step):
            yield TensorDictBlock(self._read(start, min(start + step, self.num_rows)))


class IterableSource:
    """Any iterable of TensorDicts, or of dicts of arrays with one length, as a `RowSource`.

    Args:
        batches: give ``[rows, ...]`` each.
        select: what of each batch is written.
        label: what it is, for messages.
        fingerprint: where the caller says that another run gives the same rows again.
    """

    num_rows = None

    def __init__(
        self,
        batches: Iterable[Any],
        select: Callable[[TensorDictBase], TensorDictBase],
        label: str,
        fingerprint: str | None = None,
    ) -> None:
        plain = (TensorDictBlock(select(_as_tensordict(batch))) for batch in batches)
        first = next(plain, None)
        if first is None:
            raise SourceError(f"{label} gave no batch, so there are no rows and no fields to write")
        self.schema, self.fingerprint, self.label = first.schema, fingerprint, label
        self._blocks = chain([first], plain)

    def blocks(self, start_row: int) -> Iterator[RowBlock]:
        """See `RowSource`."""
        for block in self._blocks:
            if start_row >= block.rows:
                start_row -= block.rows
                continue
            yield block.from_row(start_row) if start_row else block
            start_row = 0


def _as_tensordict(batch: Any) -> TensorDictBase:
    if isinstance(batch, TensorDictBase):
        return batch
    if is_tensor_collection(batch):
        plain: TensorDictBase = batch.to_tensordict(retain_none=False)
        return plain
    if not isinstance(batch, Mapping):
        raise SchemaError(f"a batch of rows is a TensorDict or a dict of arrays, not {type(batch).__name__}")
    values = {str(name): as_tensor(str(name), value) for name, value in batch.items()}
    lengths = {name: len(value) if value.ndim else -1 for name, value in values.items()}
    if len(set(lengths.values())) > 1 or -1 in lengths.values():
        shown = ", ".join(f"{name!r}: {tuple(values[name].shape)}" for name in lengths)
        raise SchemaError(f"the arrays of a batch have one row each for every row of the others, not {shown}")
    return TensorDict(values, batch_size=[next(iter(lengths.values()), 0)])


def as_tensor(name: str, value: Any) -> torch.Tensor:
    """A field's rows as a tensor, without a copy where that goes."""
    if isinstance(value, torch.Tensor):
        return value
    try:
        return torch.as_tensor(np.asarray(value))
    except (TypeError, ValueError) as error:
        raise SchemaError(f"field {name!r} is no array of numbers: {str(error)[:200]}; leave it out") from None


def memmap_source(folder: Path, select: Callable[[TensorDictBase], TensorDictBase]) -> TensorSource:
    """A TensorDict that ``td.memmap(folder)`` has written.

    Raises:
        SourceError: it holds pickled objects, which are never loaded, or it is damaged.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    pickled = [path for path in files if path.suffix in (".pkl", ".pickle")]
    if pickled:
        raise SourceError(f"{pickled[0]} is a pickle, which is never loaded; save the TensorDict without that entry")
    try:
        for description in folder.rglob("meta.json"):
            _check_sizes(description)
        loaded = TensorDict.load_memmap(folder)
    except (OSError, ValueError, LookupError, RuntimeError, TypeError, AttributeError) as error:
        raise SourceError(f"{folder} cannot be loaded as a memory-mapped TensorDict: {error}") from error
    whole = select(loaded)
    schema = schema_of(whole)
    fingerprint = fingerprint_of(files, list(schema.fields))
    return TensorSource(schema, len(whole), lambda start, stop: whole[start:stop], fingerprint, str(folder))


def _check_sizes(description: Path) -> None:
    """Missing files would be missing fields otherwise, and short ones would be made longer by mapping them."""
    entries = json.loads(description.read_text())
    expected: Counter[int] = Counter()
    for entry in entries.values():
        if isinstance(entry, dict) and entry.get("dtype") and not entry.get("is_nested"):
            dtype = getattr(torch, entry["dtype"].removeprefix("torch."))
            expected[math.prod(entry["shape"]) * dtype.itemsize] += 1
    del expected[0]  # no bytes, no file
    missing = expected - Counter(path.stat().st_size for path in description.parent.glob("*.memmap"))
    if missing:
        shown = ", ".join(map(str, missing.elements()))
        raise ValueError(f"{description} tells of files that are not there, or not whole: of {shown} bytes")


def wanted(names: Iterable[str], columns: Names | None, drop: Names, label: str) -> list[str]:
    """The names that are left.

    Raises:
        ConfigurationError: one that is not there.
        SourceError: none is left.
    """
    known = list(names)
    for name in (*(columns or ()), *drop):
        if name not in known:
            raise ConfigurationError(f"there is a choice of {name!r}, which {label} does not have; it has {known}")
    left = [name for name in known if (columns is None or name in columns) and name not in drop]
    if not left:
        raise SourceError(f"{label} has no array that is to be read; it has {known or 'none'}")
    return left


def selector(columns: Names | None, drop: Names) -> Callable[[TensorDictBase], TensorDictBase]:
    """Leaves out of a TensorDict what the user does not want of it."""

    def select(td: TensorDictBase) -> TensorDictBase:
        known = set(td.keys(include_nested=True))
        for key in (*(columns or ()), *drop):
            if (key if isinstance(key, str) else tuple(key)) not in known:
                raise ConfigurationError(f"there is no field {key!r} in it; the fields are {sorted(map(str, known))}")
        chosen = td if columns is None else td.select(*columns)
        return chosen.exclude(*drop) if drop else chosen

    return select
