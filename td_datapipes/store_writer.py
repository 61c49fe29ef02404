"""Write rows in the layout `tensordict_store`, so that ``TensorDictStore.from_store`` opens them too."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import redis
import torch
from tensordict import TensorDictBase

from td_datapipes.catalog import unlink_keys
from td_datapipes.errors import DatasetExistsError, DatasetNotFoundError, TDDatapipesError, ValueTooLargeError
from td_datapipes.layouts.tensordict_store import (
    DEFAULT_NAMESPACE,
    STAGED_NAMESPACE,
    StoreDescription,
    StoredLeaf,
    describe_store,
    leaf_path,
    store_key,
)
from td_datapipes.room import string_limit
from td_datapipes.schema import Field, Key, Schema, dtype_name, format_key
from td_datapipes.store_garbage import forget_store, note_store
from td_datapipes.upstream import describe
from td_datapipes.wire.server import Server
from td_datapipes.writer import HEARTBEAT_SECONDS

__all__ = ["StoreWriter", "check_string_limit", "leaf_metadata", "store_keys", "tensor_bytes", "value_metadata"]

_SUFFIXES = ("__keys__", "__batch_size__", "__device__", "__tensorclass__")
_OF_LAZY_STACKS = ("__type__", "__count__", "__stack_dim__", "__inner_batch_size__")


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes, row after row; any dtype, wherever it lies."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if not plain.numel():
        return memoryview(b"")
    # A contiguous tensor may still have odd strides along dims of size 1, which `view` minds.
    return memoryview(plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().data)


def leaf_metadata(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, str]:
    """What stands in a tensor leaf's metadata hash."""
    return {"shape": json.dumps(list(shape)), "dtype": f"torch.{dtype_name(dtype)}"}


def value_metadata(encoding: str) -> dict[str, str]:
    """What stands in a non-tensor leaf's metadata hash."""
    return {"is_non_tensor": "1", "encoding": encoding}


def check_string_limit(server: Server, key: Key, nbytes: int) -> None:
    """Refuse early what the server does not take as one string.

    Raises:
        ValueTooLargeError: it names the field, its bytes and the setting.
    """
    limit = string_limit(server)
    if nbytes > limit:
        raise ValueTooLargeError(
            f"field {format_key(key)} has {nbytes} bytes over all its rows, and the layout tensordict_store keeps it "
            f"in one string: {server.address} takes {limit} (proto-max-bulk-len). Raise the setting, or use the layout "
            f"records, which has no such limit"
        )


class StoreWriter:
    """A store under way: complete, but in a namespace of its own, until `publish` renames it in one step.

    Args:
        server: where.
        name: ``td_id``, or ``namespace:td_id``.
        schema: what will be written.
        batch_size: of all rows.
        device: as upstream stores it.
        tensorclass: as upstream stores it.

    Raises:
        SchemaError: a key that this layout cannot hold.
        ValueTooLargeError: a field longer than the server takes in one string. Nothing is written then.
    """

    def __init__(
        self,
        server: Server,
        name: str,
        schema: Schema,
        batch_size: tuple[int, ...],
        *,
        device: str = "",
        tensorclass: str = "",
    ) -> None:
        self._server, self._name = server, name
        self._batch_size, self._device, self._tensorclass = batch_size, device, tensorclass
        namespace, separator, td_id = name.partition(":")
        self._place = (namespace, td_id) if separator and namespace and td_id else (DEFAULT_NAMESPACE, name)
        self._fields = {leaf_path(key): field for key, field in schema.fields.items()}
        rows = batch_size[0] if batch_size else 1
        for field in schema.fields.values():
            check_string_limit(server, field.key, rows * field.nbytes)
        # The same hash tag, so that renaming stays within one slot.
        self._token = secrets.token_hex(5)
        self._staged = f"{STAGED_NAMESPACE}{self._token}"
        self._started = time.time()
        self._paths: list[str] = []
        self._row = 0
        try:
            self._say()
            self._server.call(f"beginning to write {name!r}", self._begin)
        except BaseException:
            self.undo()
            raise

    def _say(self) -> None:
        """Say that this write goes on: what is not heard of for long is collected."""
        note_store(self._server, self._token, self._name, self._place[1], self._started)
        self._said = time.monotonic()

    def _begin(self, client: redis.Redis) -> None:
        rows = self._batch_size[0] if self._batch_size else 1
        pipe: Any = client.pipeline(transaction=False)
        for path, field in self._fields.items():
            self._register(pipe, path)  # first: by it, what a killed process leaves is found
            if rows * field.nbytes:
                pipe.setrange(self._key(f"d:{path}"), rows * field.nbytes - 1, b"\0")
            else:
                pipe.set(self._key(f"d:{path}"), b"")
            pipe.hset(self._key(f"m:{path}"), mapping=leaf_metadata(self._shape(field), field.dtype))
        pipe.set(self._key("__batch_size__"), json.dumps(list(self._batch_size)))
        pipe.set(self._key("__device__"), self._device)
        if self._tensorclass:
            pipe.set(self._key("__tensorclass__"), self._tensorclass)
        pipe.execute()

    def _shape(self, field: Field) -> tuple[int, ...]:
        return (*self._batch_size[:1], *field.shape)

    def _register(self, pipe: Any, path: str) -> None:
        self._paths.append(path)
        pipe.sadd(self._key("__keys__"), path)

    def _key(self, suffix: str) -> bytes:
        return store_key(self._staged, self._place[1], suffix)

    def add(self, batch: TensorDictBase) -> None:
        """Write the next rows: ``[n, ...]`` in any case, of its schema."""
        if time.monotonic() - self._said > HEARTBEAT_SECONDS:
            self._say()

        def command(client: redis.Redis) -> None:
            pipe: Any = client.pipeline(transaction=False)
            for path, field in self._fields.items():
                data = tensor_bytes(batch.get(field.key))
                if len(data):
                    pipe.setrange(self._key(f"d:{path}"), self._row * field.nbytes, data)
            pipe.execute()

        self._server.call(f"writing rows of {self._name!r}", command)
        self._row += batch.batch_size[0]

    def add_values(self, values: Mapping[Key, tuple[str, Any]]) -> None:
        """Write non-tensor leaves: an encoding, ``json`` or ``json_array``, and the value or list of values."""

        def command(client: redis.Redis) -> None:
            pipe: Any = client.pipeline(transaction=False)
            for key, (encoding, value) in values.items():
                path = leaf_path(key)
                self._register(pipe, path)
                pipe.set(self._key(f"d:{path}"), json.dumps(value))
                pipe.hset(self._key(f"m:{path}"), mapping=value_metadata(encoding))
            pipe.execute()

        if values:
            self._server.call(f"writing values of {self._name!r}", command)

    @property
    def staged(self) -> StoreDescription:
        """What was written so far, as it can be read before it is published.

        Raises:
            DatasetNotFoundError: it is gone.
        """
        found = describe(self._server, self._name, self._staged, self._place[1])
        if found is None:
            raise DatasetNotFoundError(f"what was written of {self._name!r} is gone from {self._server.address}")
        return found

    def publish(self, *, overwrite: bool) -> StoreDescription:
        """Make it what the name stands for, in one step.

        Raises:
            DatasetExistsError: there is one, and `overwrite` is not set.
        """
        final = describe_again(self.staged, self._name, self._place[0])

        def command(client: Any) -> bool:
            with client.pipeline(transaction=True) as pipe:
                pipe.watch(final.key("__batch_size__"), final.key("__type__"), final.key("__keys__"))
                exists = pipe.exists(final.key("__batch_size__"), final.key("__type__"))
                if exists and not overwrite:
                    return False
                paths = [raw.decode() for raw in pipe.smembers(final.key("__keys__"))]
                pipe.multi()
                for path in paths:
                    pipe.unlink(final.data_key(path), final.key(f"d:{path}:idx"), final.meta_key(path))
                pipe.unlink(*map(final.key, (*_SUFFIXES, *_OF_LAZY_STACKS)))
                for suffix in self._suffixes():
                    # Not by the method, which redis-py refuses on a cluster, though all these keys are in one slot.
                    pipe.execute_command("RENAME", self._key(suffix), final.key(suffix))
                try:
                    pipe.execute()
                except redis.WatchError:  # somebody else has published, or is writing to it
                    return False
            return True

        if not self._server.call(f"publishing {self._name!r}", command):
            raise DatasetExistsError(
                f"a store {self._name!r} exists at {self._server.address}; pass overwrite=True to write in its place"
            )
        with suppress(TDDatapipesError):  # it is published; a note that stays is collected
            forget_store(self._server, self._token)
        return final

    def _suffixes(self) -> list[str]:
        """Of the keys that were written."""
        of_leaves = [f"{kind}:{path}" for path in self._paths for kind in "dm"]
        found = [*of_leaves, "__batch_size__", "__device__"]
        return found + ["__keys__"] * bool(self._paths) + ["__tensorclass__"] * bool(self._tensorclass)

    def undo(self) -> None:
        """Remove what was written, as far as the server can be reached."""
        keys = [self._key(suffix) for suffix in {*self._suffixes(), *_SUFFIXES}]
        with suppress(TDDatapipesError):
            self._server.call(f"taking back {self._name!r}", lambda client: unlink_keys(client, keys))
            forget_store(self._server, self._token)


def store_keys(description: StoreDescription) -> list[bytes]:
    """Every key of a store."""
    leaves = [suffix for leaf in description.leaves for suffix in (f"d:{leaf.path}", f"d:{leaf.path}:idx")]
    leaves += [f"m:{leaf.path}" for leaf in description.leaves]
    return [description.key(suffix) for suffix in (*leaves, *_SUFFIXES, *_OF_LAZY_STACKS)]


def describe_again(description: StoreDescription, name: str, namespace: str) -> StoreDescription:
    """The same store in another namespace."""
    leaves: tuple[StoredLeaf, ...] = description.leaves
    return describe_store(
        name,
        namespace,
        description.td_id,
        batch_size=description.batch_size,
        stack_dim=description.stack_dim,
        leaves=leaves,
        device=description.device,
        tensorclass=description.tensorclass,
    )
