"""Entries on their way to a mutable data set: on the server already, but nothing refers to them yet."""

from __future__ import annotations

import json
import math
import os
import platform
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import TensorDict

from td_datapipes.blocks import TensorDictBlock
from td_datapipes.catalog import stage, unstage
from td_datapipes.errors import SchemaError, TDDatapipesError
from td_datapipes.extras import write_values
from td_datapipes.group_chunks import IN_FLIGHT, GroupChunks, PutChunk
from td_datapipes.manifest import ChunkLayout, Manifest, Value
from td_datapipes.remote.structure import NewGroup
from td_datapipes.remote.values import OneValue, RowValues
from td_datapipes.room import check_room, longest_chunk
from td_datapipes.schema import Group, Key, Node, Schema, dtype_name, format_key
from td_datapipes.wire.server import Server
from td_datapipes.wire.writer import BulkWriter
from td_datapipes.writer import MAX_RECORDS_PER_CHUNK

__all__ = ["Staged", "Staging", "nested_dict"]


SMALL_BYTES = (1 << 20) - 64
"""Of records: every server takes a string of that length, and it goes along with the word that a write has begun."""


LARGE_ROW_BYTES = 16 << 10
"""A field whose rows are this long is a group of its own. One more range a row costs little beside it, and neither it
nor the small ones are read or written along where only the others are wanted."""


@dataclass(frozen=True, kw_only=True)
class Staged:
    """What was written.

    Attributes:
        id: under which it is staged.
        groups: with all tensors, side by side but for those with large rows.
        values: the non-tensor entries.
    """

    id: str
    groups: tuple[NewGroup, ...]
    values: tuple[Value, ...]


class Staging:
    """Writes entries as groups of their own. A context: what was written is taken back if its block fails.

    Args:
        server: where.
        manifest: of the data set they are for.
        tensors: ``[rows, ...]`` each.
        values: non-tensor entries.

    Raises:
        SchemaError: a tensor that cannot be stored.
    """

    def __init__(
        self,
        server: Server,
        manifest: Manifest,
        tensors: Mapping[Key, torch.Tensor],
        values: Mapping[Key, OneValue | RowValues],
    ) -> None:
        self._server, self._rows = server, manifest.rows
        self._tensors = {key: _checked(key, tensor, manifest.rows) for key, tensor in tensors.items()}
        self._others = values
        self._id = secrets.token_hex(5)
        self._values: tuple[Value, ...] = ()
        self._value_labels = [secrets.token_hex(5) for _ in values]
        self._groups = self._laid_out()
        self._manifest = replace(
            manifest,
            schema=Schema(groups=tuple(group for group, _, _ in self._groups), nodes=(Node(key=()),)),
            layouts=tuple(layout for _, layout, _ in self._groups),
            labels=tuple(label for _, _, label in self._groups),
            values=(),
        )

    def _laid_out(self) -> tuple[NewGroup, ...]:
        groups = [
            Group.pack((key, tensor.dtype, tuple(tensor.shape[1:])) for key, tensor in tensors.items())
            for tensors in _side_by_side(self._tensors)
        ]
        # What is little is written without asking what the server takes.
        stride_bytes = sum(group.stride_bytes for group in groups)
        largest = SMALL_BYTES if stride_bytes * self._rows <= SMALL_BYTES else longest_chunk(self._server, None)
        layouts = [ChunkLayout.for_stride(group.stride_bytes, largest, MAX_RECORDS_PER_CHUNK) for group in groups]
        labels = [f"{self._id}.{number}" if number else self._id for number in range(len(groups))]
        return tuple(zip(groups, layouts, labels, strict=True))

    def __enter__(self) -> Staged:
        try:
            self._write()
        except BaseException:
            self._undo()
            raise
        return Staged(id=self._id, groups=self._groups, values=self._values)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            self._undo()

    def _write(self) -> None:
        small = sum(layout.stride_bytes for _, layout, _ in self._groups) * self._rows <= SMALL_BYTES
        if not small:
            check_room(self._server, self._manifest.schema, self._rows)
        note = {"host": platform.node(), "pid": os.getpid(), "started": time.time(), "tags": self._manifest.tags}
        # By these, what a killed process leaves is found.
        labels = {"labels": self._manifest.labels, "values": self._value_labels, "structure": self._manifest.id}
        strings = self._packed() if small else {}
        stage(self._server, self._manifest.name, self._id, json.dumps({**note, **labels}), strings)
        if not small:
            self._write_chunks()
        values = {
            key: (isinstance(value, RowValues), list(value.values) if isinstance(value, RowValues) else value.value)
            for key, value in self._others.items()
        }
        self._values = write_values(self._server, self._manifest, values, self._value_labels)

    def _packed(self) -> dict[bytes, bytes]:
        """All chunks, by key."""
        made: dict[bytes, bytes] = {}

        def put(group: int, chunk: int, start_bytes: int, parts: Sequence[memoryview | bytes], /) -> None:
            del start_bytes  # every chunk is new
            made[self._manifest.chunk_key(group, chunk)] = b"".join(parts)

        self._collect(put)
        return made

    def _collect(self, put: PutChunk, meanwhile: Callable[[], object] | None = None) -> None:
        block = TensorDictBlock(TensorDict(nested_dict(self._tensors), batch_size=[self._rows]))
        for number in range(len(self._groups)):
            chunks = GroupChunks(self._manifest, number, put, meanwhile=meanwhile)
            chunks.add(block)
            chunks.flush()

    def _write_chunks(self) -> None:
        writer = BulkWriter(self._server.dial(), self._server.address, self._server.timeout_seconds, IN_FLIGHT)

        def put(group: int, chunk: int, start_bytes: int, parts: Sequence[memoryview | bytes], /) -> None:
            del start_bytes  # every chunk is new
            writer.set(self._manifest.chunk_key(group, chunk), parts)

        try:
            self._collect(put, writer.push)
            writer.flush()
        finally:
            writer.settle()

    def _undo(self) -> None:
        manifest = self._manifest
        keys = [
            manifest.chunk_key(number, chunk)
            for number, (_, layout, _) in enumerate(self._groups)
            for chunk in range(layout.num_chunks(self._rows))
        ]
        keys += [manifest.value_key(value) for value in self._values]
        with suppress(TDDatapipesError):
            unstage(self._server, manifest.name, self._id, keys)


def _side_by_side(tensors: Mapping[Key, torch.Tensor]) -> list[dict[Key, torch.Tensor]]:
    """Which tensors share their records: the small ones, in the order they come in."""
    large = {key for key, tensor in tensors.items() if _row_bytes(tensor) >= LARGE_ROW_BYTES}
    small = {key: tensor for key, tensor in tensors.items() if key not in large}
    return [group for group in (small, *({key: tensors[key]} for key in tensors if key in large)) if group]


def _row_bytes(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape[1:]) * tensor.element_size()


def _checked(key: Key, tensor: torch.Tensor, rows: int) -> torch.Tensor:
    try:
        dtype_name(tensor.dtype)
    except SchemaError as error:
        raise SchemaError(f"field {format_key(key)}: {error}") from None
    if tensor.is_nested or tensor.layout != torch.strided or tensor.is_meta:
        raise SchemaError(
            f"field {format_key(key)} is no dense tensor with values ({tensor.layout}, {tensor.device}): only those "
            f"can be stored; make it one"
        )
    if not tensor.ndim or tensor.shape[0] != rows:
        raise SchemaError(f"field {format_key(key)} has shape {list(tensor.shape)}, which are not {rows} rows")
    return tensor


def nested_dict(values: Mapping[Key, Any]) -> dict[str, Any]:
    """Leaves by key as nested dictionaries."""
    made: dict[str, Any] = {}
    for key, value in values.items():
        at = made
        for part in key[:-1]:
            at = at.setdefault(part, {})
        at[key[-1]] = value
    return made
