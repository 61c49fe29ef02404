"""Fields that are no dense tensors, added to batches: non-tensor values, and rows that differ in shape.

What a kind of field needs is in one class, an `ExtraField`: it queues its commands and puts what came into the batch.
All of a batch are asked for in one round trip, beside that of the dense fields.
"""

from __future__ import annotations

import json
import math
import pickle
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

import redis
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, TensorDictBase, lazy_stack

from td_datapipes.errors import (
    DataLossError,
    DatasetChangedError,
    FieldNotFoundError,
    PickledValueError,
    TDDatapipesError,
)
from td_datapipes.layouts.tensordict_store import StoreDescription, StoredLeaf, value_kind
from td_datapipes.manifest import Manifest, Value
from td_datapipes.read_spec import Rows
from td_datapipes.schema import Field, Key, format_key, normalise_key
from td_datapipes.upstream import Description
from td_datapipes.wire.server import Server

__all__ = ["Extra", "ExtraFields", "decode_value", "extra_fields", "per_row_values", "select_fields", "write_values"]

_VALUES_PER_COMMAND = 1024
_UNCHANGEABLE = (str, int, float, bool, type(None))

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


class ExtraField(Protocol):
    """One such field: what it asks for, and what it makes of the replies."""

    def ask(self, pipe: Any, rows: list[int]) -> None:
        """Queue commands on a pipeline of redis-py."""

    def add(self, batch: TensorDictBase, rows: list[int], replies: Iterator[Any]) -> TensorDictBase:
        """The batch with the field; a lazy stack of its rows where these differ in shape.

        Args:
            batch: ``[n, ...]``.
            rows: the row numbers asked for.
            replies: to what was queued, and to more behind it.

        Raises:
            _Unfit: what came is not what was described.
        """


class _Unfit(Exception):
    """A reply that does not fit the field's description.

    Args:
        what: went wrong, in words.
        changed: whether it was stored anew in another way; else it is lost.
    """

    def __init__(self, what: str, *, changed: bool = False) -> None:
        super().__init__(what)
        self.changed = changed


class ExtraFields:
    """Reads such fields of a data set. Safe for threads and forked children, as its server is.

    Args:
        server: where.
        description: of the data set.
        leaves: which.
    """

    def __init__(self, server: Server, description: Description, leaves: Sequence[Extra]) -> None:
        self._server, self._description = server, description
        self._fields = {leaf: _field_of(description, leaf) for leaf in leaves}
        # Rows that differ in shape come last: what is added to a lazy stack is cut into its rows.
        self._order = sorted(leaves, key=lambda leaf: leaf.kind == "ragged")
        # What a store's bytes mean is asked for with them, in one transaction.
        self._transaction = isinstance(description, StoreDescription)

    @property
    def leaves(self) -> tuple[Extra, ...]:
        """What is added."""
        return tuple(self._fields)

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
        replies = self._read(self._order, numbers)
        whole: TensorDictBase = batch
        for leaf in self._order:
            try:
                whole = self._fields[leaf].add(whole, numbers, replies)
            except _Unfit as fault:
                raise self._error(leaf, fault) from fault.__cause__
        return whole

    def values(self, rows: Rows) -> dict[Key, tuple[bool, Any]]:
        """The non-tensor values of rows: whether each has one of its own, and that list or the one value."""
        numbers, found = rows.tolist(), {}
        leaves = [leaf for leaf in self._order if isinstance(self._fields[leaf], _ValueField)]
        replies = self._read(leaves, numbers)
        for leaf in leaves:
            field = self._fields[leaf]
            if isinstance(field, _ValueField):
                try:
                    found[leaf.key] = field.take(numbers, replies)
                except _Unfit as fault:
                    raise self._error(leaf, fault) from fault.__cause__
        return found

    def _read(self, leaves: Sequence[Extra], numbers: list[int]) -> Iterator[Any]:
        def command(client: redis.Redis) -> list[Any]:
            pipe: Any = client.pipeline(transaction=self._transaction)
            for leaf in leaves:
                self._fields[leaf].ask(pipe, numbers)
            replies: list[Any] = pipe.execute()
            return replies

        return iter(self._server.call(f"reading fields of {self._description.name!r}", command) if leaves else ())

    def _error(self, leaf: Extra, fault: _Unfit) -> TDDatapipesError:
        where = f"field {format_key(leaf.key)} of {self._description.name!r} at {self._server.address}"
        if fault.changed:
            return DatasetChangedError(f"{where} {fault}; open it again")
        return DataLossError(f"{where} {fault}; it was deleted, evicted (maxmemory), lost in a restart or overwritten")


def _field_of(description: Description, leaf: Extra) -> ExtraField:
    if isinstance(leaf, Value) and isinstance(description, Manifest):
        return _RecordsValue(description.value_key(leaf), leaf)
    if isinstance(leaf, StoredLeaf) and isinstance(description, StoreDescription):
        kinds = {"ragged": _RaggedRows, "stacked": _StackedRows}
        return kinds.get(leaf.kind, _StoredValue)(description, leaf)
    raise TypeError(f"{leaf} is no field of {description.name!r}")


class _ValueField(ABC):
    """Non-tensor values (an `ExtraField`): one a row, or one that all rows share."""

    key: Key

    @abstractmethod
    def ask(self, pipe: Any, rows: list[int]) -> None: ...

    @abstractmethod
    def take(self, rows: list[int], replies: Iterator[Any]) -> tuple[bool, Any]:
        """Whether there is one value a row, and these values, or else the one value."""

    def add(self, batch: TensorDictBase, rows: list[int], replies: Iterator[Any]) -> TensorDictBase:
        per_row, value = self.take(rows, replies)
        shape = batch.batch_size
        made: Any = per_row_values(value, shape[1:]) if per_row else NonTensorData(value, batch_size=shape)
        return batch.set(self.key, made)


class _RecordsValue(_ValueField):
    """Of the `records` layout: one JSON text, or a hash of one a row."""

    def __init__(self, where: bytes, value: Value) -> None:
        self.key, self._where, self._per_row = value.key, where, value.per_row

    def ask(self, pipe: Any, rows: list[int]) -> None:
        if not self._per_row:
            pipe.get(self._where)
        elif rows:
            pipe.hmget(self._where, rows)

    def take(self, rows: list[int], replies: Iterator[Any]) -> tuple[bool, Any]:
        if not self._per_row:
            return False, _decode(next(replies), "json")
        return True, [_decode(text, "json") for text in (next(replies) if rows else ())]


class _StoredValue(_ValueField):
    """Of a store: one string. Its encoding may change: the first row that is written makes one value a row of it."""

    def __init__(self, store: StoreDescription, leaf: StoredLeaf) -> None:
        self.key, self._may_be_pickle = leaf.key, leaf.kind == "pickle"
        self._data, self._meta = store.data_key(leaf.path), store.meta_key(leaf.path)
        self._last: tuple[bytes, list[Any]] | None = None

    def ask(self, pipe: Any, rows: list[int]) -> None:
        del rows  # they are all in one string
        pipe.get(self._data)
        pipe.hmget(self._meta, "is_non_tensor", "encoding")

    def take(self, rows: list[int], replies: Iterator[Any]) -> tuple[bool, Any]:
        data, (is_value, encoding) = next(replies), next(replies)
        kind = value_kind(encoding)
        if data is not None and (is_value != b"1" or (kind == "pickle" and not self._may_be_pickle)):
            now = "pickled" if is_value == b"1" else "a tensor"
            raise _Unfit(f"was a value of JSON when this was opened, and is {now} now", changed=True)
        value = self._value(data, kind)
        if kind != "json_array" or not isinstance(value, list):
            return False, value
        if rows and max(rows) >= len(value):
            raise _Unfit(f"has {len(value)} values, and row {max(rows)} is asked for")
        return True, [value[row] for row in rows]

    def _value(self, data: bytes | None, kind: str) -> Any:
        """Decoded; what holds all rows is decoded once, unless a batch could change what the next one gets."""
        if self._last is not None and self._last[0] == data:
            return self._last[1]
        value = _decode(data, kind)
        unchangeable = isinstance(value, list) and all(isinstance(item, _UNCHANGEABLE) for item in value)
        self._last = (data, value) if data is not None and kind == "json_array" and unchangeable else None
        return value


class _StoredRows(ABC):
    """Rows of a store's tensor that are more than one range each, or ranges of different lengths (an `ExtraField`)."""

    def __init__(self, store: StoreDescription, leaf: StoredLeaf) -> None:
        self._store, self._leaf = store, leaf
        self._data, self._meta = store.data_key(leaf.path), store.meta_key(leaf.path)
        self._names = [name for name, _ in leaf.expected]

    def ask(self, pipe: Any, rows: list[int]) -> None:
        pipe.hmget(self._meta, self._names)
        for start, nbytes in self._ranges(rows):
            pipe.getrange(self._data, start, start + nbytes - 1)

    @abstractmethod
    def add(self, batch: TensorDictBase, rows: list[int], replies: Iterator[Any]) -> TensorDictBase: ...

    @abstractmethod
    def _ranges(self, rows: list[int]) -> Iterator[tuple[int, int]]:
        """Start and length, in order. None is empty: ``GETRANGE k 0 -1`` would be the whole string."""

    def _take(self, rows: list[int], replies: Iterator[Any]) -> list[bytes]:
        """The bytes of the ranges, checked."""
        marks = next(replies)
        found = [next(replies) for _ in self._ranges(rows)]
        for (name, then), now in zip(self._leaf.expected, marks, strict=True):
            if then != now and any(found):
                before, after = (value.decode() if value else "not there" for value in (then, now))
                raise _Unfit(f"had {name.decode()} {before} when it was opened, and {after} now", changed=True)
        for data, (_, nbytes) in zip(found, self._ranges(rows), strict=True):
            if len(data) != nbytes:
                raise _Unfit(f"has a row of {nbytes} bytes, of which {len(data)} were received")
        return found


class _RaggedRows(_StoredRows):
    """Of a lazy stack whose rows differ in shape: they lie one behind the other."""

    def __init__(self, store: StoreDescription, leaf: StoredLeaf) -> None:
        super().__init__(store, leaf)
        self._starts = [0, *accumulate(leaf.row_bytes)]

    def _ranges(self, rows: list[int]) -> Iterator[tuple[int, int]]:
        lengths = self._leaf.row_bytes
        return ((self._starts[row], lengths[row]) for row in rows if lengths[row])

    def add(self, batch: TensorDictBase, rows: list[int], replies: Iterator[Any]) -> TensorDictBase:
        found = iter(self._take(rows, replies))
        parts = batch.tensordicts if isinstance(batch, LazyStackedTensorDict) else list(batch.unbind(0))
        for part, row in zip(parts, rows, strict=True):
            data = next(found) if self._leaf.row_bytes[row] else b""
            part.set(self._leaf.key, _tensor(data, self._leaf.dtype, self._leaf.shapes[row]))
        return batch if isinstance(batch, LazyStackedTensorDict) or not parts else lazy_stack(parts, 0)


class _StackedRows(_StoredRows):
    """Of a lazy stack along a later dim, element behind element: a row has a part in each."""

    def _ranges(self, rows: list[int]) -> Iterator[tuple[int, int]]:
        count, num_rows, *rest = self._leaf.shape
        nbytes = math.prod(rest) * self._leaf.dtype.itemsize
        return (
            ((element * num_rows + row) * nbytes, nbytes) for row in rows for element in range(count if nbytes else 0)
        )

    def add(self, batch: TensorDictBase, rows: list[int], replies: Iterator[Any]) -> TensorDictBase:
        count, _, *rest = self._leaf.shape
        data = b"".join(self._take(rows, replies))
        elements = _tensor(data, self._leaf.dtype, (len(rows), count, *rest))
        return batch.set(self._leaf.key, elements.movedim(1, self._store.stack_dim or 0).contiguous())


def _tensor(data: bytes, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    if not data:
        return torch.empty(*shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).view(*shape)


def _decode(data: bytes | None, kind: str) -> Any:
    if data is None:
        raise _Unfit("is missing")
    try:
        return decode_value(data, kind)
    except ValueError as error:
        raise _Unfit(f"holds no JSON ({error})") from error


def decode_value(data: bytes, kind: str) -> Any:
    """A non-tensor value from its bytes. Whether a pickle may be read was decided when its field was chosen."""
    return pickle.loads(data) if kind == "pickle" else json.loads(data)


def per_row_values(values: Sequence[Any], batch_shape: Sequence[int]) -> NonTensorData | NonTensorStack:
    """One value a row, as a stack of the batch size ``[n, *batch_shape]``."""
    if not values:  # a stack of none has no batch shape
        return NonTensorData(None, batch_size=[0, *batch_shape])
    return NonTensorStack(*(NonTensorData(value, batch_size=list(batch_shape)) for value in values), stack_dim=0)


def write_values(
    server: Server, manifest: Manifest, values: Mapping[Key, tuple[bool, Any]], labels: Sequence[str] = ()
) -> tuple[Value, ...]:
    """Write non-tensor values beside a manifest's chunks, under labels of their own; give what to put into it.

    Args:
        server: where.
        manifest: says where.
        values: by key, whether each row has a value of its own, and these or else the one value.
        labels: for each; by default new ones.
    """
    names = labels or [secrets.token_hex(5) for _ in values]
    made = [Value(key=key, per_row=values[key][0], label=label) for key, label in zip(values, names, strict=True)]

    def command(client: redis.Redis) -> None:
        pipe: Any = client.pipeline(transaction=False)
        for one in made:
            where, value = manifest.value_key(one), values[one.key][1]
            if one.per_row:
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
