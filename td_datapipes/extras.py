"""Fields that are no dense tensors: non-tensor values, and tensors whose rows differ in shape, added to batches."""

from __future__ import annotations

import json
import pickle
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import redis
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase, lazy_stack

from td_datapipes.errors import DataLossError, DatasetChangedError, FieldNotFoundError, PickledValueError
from td_datapipes.layouts.tensordict_store import StoreDescription, StoredLeaf
from td_datapipes.manifest import Manifest, Value
from td_datapipes.read_spec import Rows
from td_datapipes.schema import Field, Key, format_key, normalise_key
from td_datapipes.upstream import Description
from td_datapipes.wire.server import Server

__all__ = ["Extra", "ExtraFields", "decode_value", "extra_fields", "per_row_values", "select_fields", "write_values"]

_VALUES_PER_COMMAND = 1024

Extra = StoredLeaf | Value
"""A field that is no dense tensor, of either layout."""


def select_fields(
    description: Description, wanted: Sequence[str | tuple[str, ...]] | None
) -> tuple[tuple[Field, ...], tuple[Extra, ...]]:
    """The wanted dense fields, and the wanted ones that are not dense.

    Args:
        description: of the data set.
        wanted: keys of fields or nodes; None selects all.

    Raises:
        FieldNotFoundError: a key that names neither.
    """
    others: tuple[Extra, ...] = description.others
    if wanted is None or isinstance(wanted, str) or not others:
        return description.schema.select(wanted), () if wanted is not None else others
    keys = [normalise_key(item) for item in wanted]
    chosen = tuple(leaf for leaf in others if any(leaf.key[: len(key)] == key for key in keys))
    known = [*description.schema.fields, *(leaf.key for leaf in others)]
    for key in keys:
        if not any(name[: len(key)] == key for name in known):
            names = ", ".join(format_key(name) for name in known)
            raise FieldNotFoundError(f"there is no field {format_key(key)}; the fields are {names}")
    dense = [key for key in keys if any(name[: len(key)] == key for name in description.schema.fields)]
    return description.schema.select(dense), chosen


def extra_fields(
    server: Server, description: Description, leaves: Sequence[Extra], *, allow_pickle: bool
) -> ExtraFields | None:
    """What adds the chosen fields to batches, or None where there is nothing to add.

    Raises:
        PickledValueError: one of them is pickled, and that is not allowed.
    """
    for leaf in leaves:
        if leaf.kind == "pickle" and not allow_pickle:
            raise PickledValueError(
                f"field {format_key(leaf.key)} of {description.name!r} was pickled by whoever wrote it, and reading a "
                f"pickle runs what they put into it; pass allow_pickle=True if you trust them, or leave the field out "
                f"with fields="
            )
    return ExtraFields(server, description, leaves) if leaves else None


class ExtraFields:
    """Reads non-tensor values and ragged rows, one round trip a batch beside that of the dense fields.

    Args:
        server: where.
        description: of the data set.
        leaves: which.
    """

    def __init__(self, server: Server, description: Description, leaves: Sequence[Extra]) -> None:
        self._server, self._description = server, description
        self._values = [leaf for leaf in leaves if leaf.kind != "ragged"]
        self._ragged = [leaf for leaf in leaves if isinstance(leaf, StoredLeaf) and leaf.kind == "ragged"]
        self._starts = {leaf.key: _starts(leaf.row_bytes) for leaf in self._ragged}

    @property
    def leaves(self) -> tuple[Extra, ...]:
        """What is added."""
        return (*self._values, *self._ragged)

    def add(self, batch: TensorDict, rows: Rows) -> TensorDictBase:
        """The batch with them; a lazy stack of its rows where these differ in shape.

        Args:
            batch: ``[n, ...]``, the dense fields of these rows.
            rows: ``[n]``.

        Raises:
            DataLossError: the server no longer has one of them.
            DatasetChangedError: one of them is stored in another way than when this was opened.
        """
        numbers = rows.tolist()
        replies = iter(self._read(numbers))
        for leaf in self._values:
            per_row, value = self._decoded(leaf, numbers, replies)
            added: Any = NonTensorData(value, batch_size=batch.batch_size)
            if per_row:
                added = per_row_values(value, batch.batch_size[1:])
            batch.set(leaf.key, added)
        if not self._ragged or not numbers:
            return batch
        parts = list(batch.unbind(0))
        for ragged in self._ragged:
            for number, part in zip(numbers, parts, strict=True):
                part.set(ragged.key, self._tensor(ragged, number, next(replies)))
        return lazy_stack(parts, 0)

    def values(self, rows: Rows) -> dict[Key, tuple[bool, Any]]:
        """The non-tensor values of rows: whether each has one of its own, and that list or the one value."""
        numbers = rows.tolist()
        replies = iter(self._read(numbers))
        return {leaf.key: self._decoded(leaf, numbers, replies) for leaf in self._values}

    def _read(self, numbers: list[int]) -> list[Any]:
        return self._server.call(f"reading fields of {self._description.name!r}", lambda c: self._ask(c, numbers))

    def _ask(self, client: Any, numbers: list[int]) -> list[Any]:
        pipe = client.pipeline(transaction=bool(self._values))
        for leaf in self._values:
            _ask_value(pipe, self._description, leaf, numbers)
        for ragged in self._ragged:
            key, starts = _data_key(self._description, ragged), self._starts[ragged.key]
            for number in numbers:
                start, nbytes = starts[number], ragged.row_bytes[number]
                # GETRANGE k 0 -1 would be the whole value.
                pipe.getrange(key, start, start + nbytes - 1 if nbytes else start)
        replies: list[Any] = pipe.execute()
        return replies

    def _decoded(self, leaf: Extra, numbers: list[int], replies: Iterator[Any]) -> tuple[bool, Any]:
        """Whether there is one value a row, and these values, or else the one value."""
        found = next(replies) if leaf.kind != "json_rows" or numbers else []
        if isinstance(leaf, StoredLeaf):
            self._check_encoding(leaf, next(replies))
        if found is None or (leaf.kind == "json_rows" and None in found):
            raise DataLossError(
                f"field {format_key(leaf.key)} of {self._description.name!r} at {self._server.address} is missing: it "
                f"was deleted, evicted (maxmemory) or lost in a restart"
            )
        if leaf.kind == "json_rows":
            return True, [json.loads(text) for text in found]
        value = decode_value(bytes(found), leaf.kind)
        if leaf.kind == "json_array" and isinstance(value, list):
            return True, [value[number] for number in numbers]
        return False, value

    def _check_encoding(self, leaf: StoredLeaf, encoding: bytes | None) -> None:
        now = (encoding or b"json").decode()
        if leaf.kind != (now if now in ("json", "json_array") else "pickle"):
            raise DatasetChangedError(
                f"field {format_key(leaf.key)} of {self._description.name!r} at {self._server.address} was stored as "
                f"{leaf.kind} and is stored as {now} now; open it again"
            )

    def _tensor(self, leaf: StoredLeaf, row: int, data: bytes) -> torch.Tensor:
        nbytes, shape = leaf.row_bytes[row], leaf.shapes[row]
        if not nbytes:
            return torch.empty(shape, dtype=leaf.dtype)
        if len(data) != nbytes:
            raise DataLossError(
                f"field {format_key(leaf.key)} of {self._description.name!r} at {self._server.address}, row {row}: "
                f"{nbytes} bytes expected, {len(data)} received; the key was deleted, evicted (maxmemory) or cut"
            )
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(leaf.dtype).view(shape)


def decode_value(data: bytes, kind: str) -> Any:
    """A non-tensor value from its bytes. Whether a pickle may be read was decided when its field was chosen."""
    return pickle.loads(data) if kind == "pickle" else json.loads(data)


def write_values(server: Server, manifest: Manifest, values: Mapping[Key, tuple[bool, Any]]) -> tuple[Value, ...]:
    """Write non-tensor values beside a manifest's chunks, under labels of their own; give what to put into it.

    Args:
        server: where.
        manifest: says where.
        values: by key, whether each row has a value of its own, and these or else the one value.
    """
    made = []

    def command(client: redis.Redis) -> None:
        pipe: Any = client.pipeline(transaction=False)
        for key, (per_row, value) in values.items():
            made.append(Value(key=key, per_row=per_row, label=secrets.token_hex(5)))
            where = manifest.value_key(made[-1])
            if per_row:
                for start in range(0, len(value), _VALUES_PER_COMMAND):
                    part = value[start : start + _VALUES_PER_COMMAND]
                    texts = {str(row): json.dumps(item) for row, item in enumerate(part, start)}
                    pipe.hset(where, mapping=texts)
            else:
                pipe.set(where, json.dumps(value))
        pipe.execute()

    if values:
        server.call(f"writing values of {manifest.name!r}", command)
    return tuple(made)


def per_row_values(values: Sequence[Any], batch_shape: Sequence[int]) -> NonTensorData | NonTensorStack:
    """One value a row, as a stack of the batch size ``[n, *batch_shape]``."""
    if not values:  # a stack of none has no batch shape
        return NonTensorData(None, batch_size=[0, *batch_shape])
    return NonTensorStack(*(NonTensorData(value, batch_size=list(batch_shape)) for value in values), stack_dim=0)


def _data_key(description: Description, leaf: Extra) -> bytes:
    if isinstance(description, StoreDescription):
        return description.data_key(leaf.path if isinstance(leaf, StoredLeaf) else "")
    if isinstance(leaf, Value):
        return description.value_key(leaf)
    raise TypeError(f"{leaf} is no field of {description.name!r}")


def _ask_value(pipe: Any, description: Description, leaf: Extra, numbers: list[int]) -> None:
    key = _data_key(description, leaf)
    if leaf.kind != "json_rows":
        pipe.get(key)
    elif numbers:
        pipe.hmget(key, numbers)
    if isinstance(description, StoreDescription) and isinstance(leaf, StoredLeaf):
        pipe.hget(description.meta_key(leaf.path), "encoding")


def _starts(lengths: Sequence[int]) -> list[int]:
    starts, at = [], 0
    for nbytes in lengths:
        starts.append(at)
        at += nbytes
    return starts
