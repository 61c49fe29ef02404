"""What a writer takes: rows that can say what they are and pack themselves into records. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt
from tensordict import TensorDictBase

from td_datapipes.layouts import pack_records
from td_datapipes.schema import Group, Key, Schema, schema_of
from td_datapipes.varying import EncodedRows

__all__ = ["Heaps", "RowBlock", "RowSource", "TensorDictBlock"]


class Heaps(Protocol):
    """Keeps values of variable length: see `td_datapipes.heap_writer.HeapWriter`."""

    def take(self, batch: TensorDictBase, schema: Schema, /) -> TensorDictBase:
        """The batch with spans in place of such values."""

    def add(self, key: Key, rows: EncodedRows, /) -> npt.NDArray[np.int64]:
        """The spans of a field's next rows, ``[rows, 2]``."""


class RowBlock(Protocol):
    """Some consecutive rows."""

    @property
    def rows(self) -> int:
        """How many."""

    @property
    def schema(self) -> Schema:
        """What a row is; the offsets in it are nobody's but its own."""

    def schema_like(self, like: Schema | None) -> Schema:
        """The same, where another schema decides what these rows leave open: see `schema_of`."""

    def dense(self, heaps: Heaps, schema: Schema) -> RowBlock:
        """These rows with spans in place of their values of variable length.

        Args:
            heaps: keep the values, and give the spans.
            schema: what `schema_like` gave, or the same rows.
        """

    def pack(self, group: Group, start: int, stop: int, out: npt.NDArray[np.uint8]) -> None:
        """Write rows ``[start, stop)`` as records.

        Args:
            group: fields and where they lie in a record.
            start: first row, counted within the block.
            stop: behind the last.
            out: ``[stop - start, group.stride_bytes]`` bytes, contiguous, zeroed where no field lies.
        """


class RowSource(Protocol):
    """Where the rows of a data set come from.

    Attributes:
        schema: what a row is.
        num_rows: how many there are; None where nobody knows yet.
        fingerprint: the same only for a source that gives the same rows again, so that a write of it can be taken up
            where it was interrupted; None where that cannot be told.
    """

    @property
    def schema(self) -> Schema: ...
    @property
    def num_rows(self) -> int | None: ...
    @property
    def fingerprint(self) -> str | None: ...

    def blocks(self, start_row: int) -> Iterator[RowBlock]:
        """The rows from `start_row` on, in order. Only a source with a fingerprint is asked for a row other than 0."""


class TensorDictBlock:
    """The rows of a TensorDict of batch size ``[rows, ...]``."""

    def __init__(self, batch: TensorDictBase) -> None:
        self.rows: int = batch.batch_size[0] if batch.batch_dims else 0
        self._batch = batch

    @cached_property
    def schema(self) -> Schema:
        """What a row is."""
        return schema_of(self._batch)

    def schema_like(self, like: Schema | None) -> Schema:
        """See `RowBlock`."""
        return schema_of(self._batch, like)

    def dense(self, heaps: Heaps, schema: Schema) -> RowBlock:
        """See `RowBlock`."""
        return TensorDictBlock(heaps.take(self._batch, schema))

    def from_row(self, row: int) -> TensorDictBlock:
        """Without the rows before that one."""
        return TensorDictBlock(self._batch[row:])

    def pack(self, group: Group, start: int, stop: int, out: npt.NDArray[np.uint8]) -> None:
        """See `RowBlock`."""
        whole = stop - start == self.rows
        pack_records(self._batch if whole else self._batch[start:stop], group, out)
