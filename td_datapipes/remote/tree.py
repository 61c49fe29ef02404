"""A data set as a tree of entries that are read and written in place, whichever layout it is in."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import redis
import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase

from td_datapipes.cost import CostModel
from td_datapipes.errors import DatasetChangedError, DatasetNotFoundError, RemoteOperationError
from td_datapipes.extras import Extra, extra_fields
from td_datapipes.layouts import layout_of
from td_datapipes.manifest import Manifest
from td_datapipes.read_spec import Rows
from td_datapipes.remote.ranges import element_writes, row_writes, slice_rows
from td_datapipes.remote.values import OneValue, RowValues
from td_datapipes.schema import Field, Key, Node, format_key
from td_datapipes.store import ReadOptions, RowReader
from td_datapipes.upstream import Description, find_description
from td_datapipes.wire.range_parts import RangeWrite
from td_datapipes.wire.range_writer import RangeWriter
from td_datapipes.wire.retry import RetryPolicy, Tries
from td_datapipes.wire.scripts import Script
from td_datapipes.wire.server import Server

__all__ = ["Entry", "StaleWriteError", "Tree", "TreeOptions", "run_script"]

T = TypeVar("T")
Entry = torch.Tensor | OneValue | RowValues
"""What is put under a key: a whole tensor, batch dims included, or non-tensor data."""

MAX_CALL_BYTES = 32 << 20
MAX_CALL_RANGES = 1 << 15
"""Of one write, which is atomic and blocks the server while it runs; a larger one is atomic by row and group."""
_ATTEMPTS = 5
_AGAINST_OTHERS = RetryPolicy(attempts=64, base_seconds=0.002, cap_seconds=0.1)


@dataclass(frozen=True, kw_only=True)
class TreeOptions:
    """How a tree is read.

    Attributes:
        allow_pickle: as for `RedisTDDataset`.
        atomic: read what a call asks for in one step: one consistent snapshot.
    """

    allow_pickle: bool
    atomic: bool


class StaleWriteError(Exception):
    """What was written to is stored differently by now; nothing was written."""


def run_script(client: Any, script: Script, keys: Sequence[bytes], arguments: Sequence[Any]) -> Any:
    """Run a script by its digest, and send it first where the server does not know it."""
    try:
        return client.evalsha(script.sha, len(keys), *keys, *arguments)
    except redis.exceptions.NoScriptError:
        return client.eval(script.source, len(keys), *keys, *arguments)


class Tree(ABC):
    """Entries by key. Safe for threads; a forked child dials its own connection.

    Args:
        server: where it is; owned from here on.
        description: of the data set, as it is now.
        options: how it is read.
    """

    def __init__(self, server: Server, description: Description, options: TreeOptions) -> None:
        self.server, self.options = server, options
        self._costs = CostModel()
        self._readers: dict[tuple[Key, ...], RowReader] = {}
        self._pid = os.getpid()
        self._wire: RowReader | None = None
        self._writer = RangeWriter(server.dial, server.address, server.timeout_seconds)
        self._take(description)

    def _take(self, description: Description) -> None:
        self.description = description
        self.skeleton = _skeleton(description, self.unbatched, self.batch_size)
        self._readers = {}
        self._below: dict[tuple[Key, ...], tuple[tuple[Field, ...], tuple[Extra, ...]]] = {}

    @property
    @abstractmethod
    def unbatched(self) -> bool:
        """Whether its one row has no batch dims."""

    @property
    @abstractmethod
    def batch_size(self) -> tuple[int, ...]:
        """Of the root."""

    def require_writable(self) -> None:
        """Before anything is changed.

        Raises:
            RemoteOperationError: it is written once; the message says what to do.
        """
        known = self.description
        if known.kind == "mutable" or not isinstance(known, Manifest):
            return
        names = ", ".join(format_key(field.key) for field in known.schema.varying_fields)
        varying = f", also those of its fields of variable length ({names})," if names else ""
        raise RemoteOperationError(
            f"data set {known.name!r} at {self.server.address} is {known.kind}: its values{varying} are written once. "
            f"Add rows with append_dataset(rows, url), write it anew with write_dataset(rows, url, overwrite=True), or "
            f"change a copy in memory: to_local()"
        )

    def as_rows(self, entry: Entry) -> torch.Tensor:
        """A whole tensor as it is stored: ``[rows, ...]``.

        Raises:
            TypeError: it is no tensor.
        """
        if not isinstance(entry, torch.Tensor):
            raise TypeError(f"rows are a tensor, not {type(entry).__name__}")
        return entry.unsqueeze(0) if self.unbatched else entry

    @property
    def rows(self) -> int:
        """The leading dim of every tensor; 1 where it has no batch dims."""
        return self.description.rows

    def bytes_below(self, key: Key) -> int:
        """Bytes of the fields of a node; of those of variable length also their values'."""
        fields, _ = self.fields_below([key])
        found = sum(field.nbytes for field in fields) * self.rows
        if isinstance(self.description, Manifest):
            found += sum(self.description.heap_of(f.key)[1].nbytes for f in fields if f.varying is not None)
        return found

    def refresh(self) -> bool:
        """Look at the server again; whether anything is stored differently than was known.

        Raises:
            DatasetNotFoundError: it is gone.
        """
        found = find_description(self.server, self.description.name)
        if found is None or type(found) is not type(self.description):
            raise DatasetNotFoundError(f"{self.description.name!r} has been removed from {self.server.address}")
        if found == self.description:
            return False
        self._take(found)
        return True

    def current(self, action: Callable[[], T]) -> T:
        """Do something, again with a fresh look at the server where things are stored differently than was known."""
        for attempt in range(_ATTEMPTS):
            try:
                return action()
            except (DatasetChangedError, StaleWriteError) as error:
                if not self.refresh() or attempt + 1 == _ATTEMPTS:
                    if isinstance(error, StaleWriteError):
                        raise DatasetChangedError(
                            f"{self.description.name!r} at {self.server.address} is not as it says: chunks are missing "
                            f"or short (deleted, evicted by maxmemory or lost in a restart), or somebody keeps "
                            f"changing what it consists of"
                        ) from error
                    raise
        raise AssertionError("unreachable: the last attempt returns or raises")

    def tries_against_others(self) -> Tries:
        """Of a change that counts only if nobody else was faster, with pauses in which all get their turn."""
        return _AGAINST_OTHERS.begin(time.monotonic() + self.server.deadline_seconds, others_take_over=False)

    def fields_below(self, keys: Iterable[Key]) -> tuple[tuple[Field, ...], tuple[Extra, ...]]:
        """The dense fields, and the others, that are one of the keys or below it."""
        wanted = set(keys)
        return (
            tuple(f for f in self.description.schema.fields.values() if _at_or_below(f.key, wanted)),
            tuple(leaf for leaf in self.description.others if _at_or_below(leaf.key, wanted)),
        )

    def read(self, keys: Iterable[Key], rows: Rows | None = None) -> TensorDictBase:
        """Entries of rows, from one round trip (one more where there are non-tensor ones).

        Args:
            keys: of leaves or nodes; ``()`` is everything.
            rows: ``[n]``; None for all.

        Returns:
            A tree of its own from the root on, ``[n, ...]`` even where there are no batch dims.
        """
        wanted = tuple(keys)

        def action() -> TensorDictBase:
            fields, others = self._below.get(wanted) or self._below.setdefault(wanted, self.fields_below(wanted))
            numbers = np.arange(self.rows, dtype=np.int64) if rows is None else rows
            batch = self._reader(fields).read(numbers)
            extras = extra_fields(self.server, self.description, others, allow_pickle=self.options.allow_pickle)
            return batch if extras is None else extras.add(batch, numbers)

        return self.current(action)

    def _reader(self, fields: tuple[Field, ...]) -> RowReader:
        if self._pid != os.getpid():
            self._pid, self._readers, self._wire = os.getpid(), {}, None
        names = tuple(field.key for field in fields)
        reader = self._readers.get(names)
        if reader is None:
            reader = RowReader(
                self.server, self.description, fields, ReadOptions(atomic=self.options.atomic), self._costs
            )
            if self._wire is None:
                self._wire = reader
            reader.read_over(self._wire)
            self._readers[names] = reader
        return reader

    def write_rows(self, known: Description, values: Mapping[Key, torch.Tensor], rows: Rows | None) -> None:
        """Write whole fields of rows in place.

        Args:
            known: what the values were made for.
            values: ``[n, *shape]`` each, of the field's dtype.
            rows: ``[n]``; None for all.

        Raises:
            StaleWriteError: a field is stored differently than was known; nothing was written.
        """
        numbers: Rows | range = range(known.rows) if rows is None else rows
        schema, layout = known.schema, layout_of(known)
        row_bytes = sum(schema.fields[key].nbytes for key in values)
        groups = [group for group in schema.groups if any(field.key in values for field in group.fields)]
        if isinstance(numbers, range):  # the records of a group that is written completely are one range a chunk
            groups = [group for group in groups if not all(field.key in values for field in group.fields)]
        most = MAX_CALL_RANGES // len(groups) if groups else len(numbers)
        for part in slice_rows(len(numbers), row_bytes, MAX_CALL_BYTES, most):
            mine = {key: tensor[part] for key, tensor in values.items()}
            spare = layout.spare_bytes if rows is None and len(numbers[part]) == known.rows else None
            write = row_writes(schema, layout.chunk_layouts, layout.chunk_key, mine, numbers[part], spare)
            self._send(known, write, values)

    def write_elements(
        self, known: Description, values: Mapping[Key, tuple[torch.Tensor, torch.Tensor]], rows: Rows
    ) -> None:
        """Write some elements of rows in place: see `element_writes`. Raises as `write_rows`."""
        layout = layout_of(known)
        write = element_writes(known.schema, layout.chunk_layouts, layout.chunk_key, values, rows)
        self._send(known, write, values)

    def _send(self, known: Description, write: RangeWrite, keys: Iterable[Key]) -> None:
        if not write.num_ranges:
            return
        doing = f"writing to {self.description.name!r}"
        if not self._writer.write(write, self._write_guards(known, keys), self._write_token, doing):
            raise StaleWriteError(doing)

    @property
    @abstractmethod
    def _write_token(self) -> bytes:
        """Begins a key that nobody uses, in the slot of all others."""

    @abstractmethod
    def _write_guards(self, known: Any, keys: Iterable[Key]) -> list[tuple[bytes, bytes]]:
        """What has to be as it is known for a write of these fields: keys, and what `write_ranges.lua` compares."""

    @abstractmethod
    def put(self, entries: Mapping[Key, Entry], nodes: Sequence[Node] = (), gone: Iterable[Key] = ()) -> None:
        """Set entries, new or in place of what is there, and add nodes.

        Args:
            entries: whole tensors, batch dims included, and non-tensor data.
            nodes: parents before children; those that exist stay as they are.
            gone: keys removed first; none of them is above one of `entries` or `nodes` that is to stay.

        Raises:
            SchemaError: an entry this layout cannot hold.
        """

    @abstractmethod
    def put_values(self, key: Key, values: Mapping[int, Any]) -> None:
        """Set the values of some rows of a non-tensor entry; the others keep theirs."""

    @abstractmethod
    def delete(self, key: Key) -> None:
        """Remove an entry, or a node with all below it."""

    @abstractmethod
    def rename(self, old: Key, new: Key) -> None:
        """Give an entry, or a node with all below it, another key. What is there is replaced."""

    @abstractmethod
    def set_nodes(self, nodes: Sequence[Node]) -> None:
        """Change the batch size or names of nodes. For the root, the leading dim stays."""

    @abstractmethod
    def set_device(self, device: str) -> None:
        """Say where reads put tensors; empty for nowhere in particular."""

    @abstractmethod
    def clear(self) -> None:
        """Remove the data set."""

    def call(self, doing: str, command: Callable[[Any], T]) -> T:
        """As `Server.call`."""
        return self.server.call(doing, command)

    def close(self) -> None:
        """Drop the connections."""
        if self._wire is not None and self._pid == os.getpid():
            self._wire.close()
        self._writer.close()
        self.server.close()


def _at_or_below(key: Key, wanted: set[Key]) -> bool:
    return any(key[:depth] in wanted for depth in range(len(key) + 1))


def _skeleton(description: Description, unbatched: bool, batch_size: tuple[int, ...]) -> TensorDict:
    """The tree without its data: meta tensors of the right shapes and dtypes, None for non-tensor values."""
    lead = () if unbatched else batch_size[:1]
    schema = description.schema
    values: dict[Key, Any] = {
        field.key: torch.empty((*lead, *field.shape), dtype=field.dtype, device="meta")
        for field in schema.fields.values()
    }
    for field in schema.varying_fields:  # its records have spans, which nobody sees
        values[field.key] = _varying_skeleton(description, field)
    for leaf in description.others:
        values[leaf.key] = NonTensorData(None)
    contents: dict[Key, dict[str, Any]] = {node.key: {} for node in schema.nodes}
    for key, value in values.items():
        contents[key[:-1]][key[-1]] = value
    made = TensorDict()
    for node in reversed(schema.nodes):
        shape = (*lead, *node.batch_shape)
        mine = contents[node.key]
        for name, value in mine.items():
            if isinstance(value, NonTensorData):
                mine[name] = NonTensorData(None, batch_size=shape)
        made = TensorDict(mine, batch_size=shape, names=_names(node, len(shape)))  # type: ignore[arg-type]
        if node.key:
            contents[node.key[:-1]][node.key[-1]] = made
    return made


def _varying_skeleton(description: Description, field: Field) -> Any:
    varying = field.varying
    if varying is None or varying.kind != "tensor" or not isinstance(description, Manifest):
        return NonTensorData(None)
    items = description.heap_of(field.key)[1].nbytes // varying.item_bytes if varying.item_bytes else 0
    values = torch.empty((items, *varying.shape), dtype=varying.dtype, device="meta")
    offsets = torch.empty(description.rows + 1, dtype=torch.int64, device="meta")
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def _names(node: Node, num_dims: int) -> list[str | None] | None:
    # Where there are no batch dims, the one row still has a (nameless) dim in storage.
    return None if node.names is None or not num_dims else list(node.names[-num_dims:])
