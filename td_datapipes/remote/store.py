"""A tree in the layout `tensordict_store`: what ``TensorDictStore`` wrote, kept so that it can read it on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import redis
import torch
from tensordict import TensorDict

from td_datapipes.catalog import unlink_keys
from td_datapipes.errors import DatasetChangedError, SchemaError
from td_datapipes.extras import decode_value
from td_datapipes.layouts.tensordict_store import StoreDescription, StoredLeaf, leaf_path
from td_datapipes.remote.staging import nested_dict
from td_datapipes.remote.tree import Entry, Tree, TreeOptions
from td_datapipes.remote.values import OneValue, RowValues, encode_value
from td_datapipes.schema import Group, Key, Node, Schema, format_key
from td_datapipes.store_writer import (
    StoreWriter,
    check_string_limit,
    leaf_metadata,
    store_keys,
    tensor_bytes,
    value_metadata,
)
from td_datapipes.wire.server import Server
from td_datapipes.writer import persist

__all__ = ["StoreTree", "create_store"]


def create_store(
    server: Server,
    *,
    rows: int,
    root: Node,
    unbatched: bool,
    device: str,
    overwrite: bool,
    entries: Mapping[Key, Entry],
    nodes: Sequence[Node],
    options: TreeOptions,
) -> StoreTree:
    """Write a store with these entries, in one step. Arguments as for `create_records`.

    Raises:
        SchemaError: a key or a node this layout cannot hold.
        ValueTooLargeError: a field longer than the server takes in one string. Nothing is written then.
        DatasetExistsError: there is one of that name, and `overwrite` is not set.
    """
    _check_nodes([root, *nodes], entries)
    batch_size = root.batch_shape if unbatched else (rows, *root.batch_shape)
    tensors = {key: entry for key, entry in entries.items() if isinstance(entry, torch.Tensor)}
    if unbatched:
        tensors = {key: tensor.unsqueeze(0) for key, tensor in tensors.items()}
    values = {key: _value(entry) for key, entry in entries.items() if isinstance(entry, OneValue | RowValues)}
    groups = [Group.pack([(key, tensor.dtype, tuple(tensor.shape[1:]))]) for key, tensor in tensors.items()]
    schema = Schema(groups=tuple(groups), nodes=(root,))
    for key in values:
        leaf_path(key)
    writer = StoreWriter(server, server.url.name, schema, batch_size, device=device, tensorclass=root.type)
    try:
        writer.add(TensorDict(nested_dict(tensors), batch_size=[rows]))
        writer.add_values(values)
        description = writer.publish(overwrite=overwrite)
    except BaseException:
        writer.undo()
        raise
    persist(server)
    return StoreTree(server, description, options)


def _check_nodes(nodes: Iterable[Node], entries: Mapping[Key, Entry]) -> None:
    """A store knows its leaves; that a node has a batch size of its own is lost, as in upstream's."""
    for node in nodes:
        what = ""
        if node.names is not None:
            what = f"names of dims ({', '.join(map(str, node.names))})"
        elif node.key and node.type:
            what = f"the type {node.type}"
        elif node.key and not any(key[: len(node.key)] == node.key for key in entries):
            what = "a node without entries"
        if what:
            where = format_key(node.key) if node.key else "the root"
            raise SchemaError(
                f"the layout tensordict_store does not keep {what}, of {where}: use the layout records, or take it off "
                f"first"
            )


def _value(entry: OneValue | RowValues) -> tuple[str, Any]:
    return ("json_array", list(entry.values)) if isinstance(entry, RowValues) else ("json", entry.value)


class StoreTree(Tree):
    """Entries of a store. Every change is one transaction, like upstream's own."""

    description: StoreDescription

    @property
    def unbatched(self) -> bool:
        return not self.description.batch_size

    @property
    def batch_size(self) -> tuple[int, ...]:
        return self.description.batch_size

    @property
    def _write_token(self) -> bytes:
        return self.description.key("__write__:")

    def _write_guards(self, known: StoreDescription, keys: Iterable[Key]) -> list[tuple[bytes, bytes]]:
        found = []
        for key in keys:
            leaf = known.leaf_of[key]
            marks = dict(leaf.marks)
            found.append((known.meta_key(leaf.path), b"#%b\n%b" % (marks[b"shape"], marks[b"dtype"])))
        return found

    def put(self, entries: Mapping[Key, Entry], nodes: Sequence[Node] = (), gone: Iterable[Key] = ()) -> None:
        _check_nodes(nodes, entries)
        known = self.description
        stay = {key: entry for key, entry in entries.items() if _fits(known, key, entry)}
        fresh = {key: entry for key, entry in entries.items() if key not in stay}
        away = [leaf for key in gone for leaf in self._leaves_below(key)]
        if fresh or away:
            self._set(fresh, away)
            if stay:  # where it still is what it was
                self.put(stay)
        elif stay:
            self.write_rows(known, {key: self.as_rows(entry) for key, entry in stay.items()}, None)

    def _set(self, entries: Mapping[Key, Entry], away: Sequence[StoredLeaf] = ()) -> None:
        """Set entries and remove leaves, in one step."""
        paths = {key: leaf_path(key) for key in entries}
        self._check_nesting(entries, away)
        stored = {
            key: (tensor_bytes(entry), leaf_metadata(tuple(entry.shape), entry.dtype))
            if isinstance(entry, torch.Tensor)
            else _encoded(key, entry)
            for key, entry in entries.items()
        }
        for key, (data, _) in stored.items():
            check_string_limit(self.server, key, len(data))
        lazy = {"homogeneous": "1", "layout": "stack"} if self.description.stack_dim is not None else {}

        def command(client: Any) -> None:
            pipe = client.pipeline(transaction=True)
            self._remove(pipe, away)
            for key, (data, metadata) in stored.items():
                pipe.set(self.description.data_key(paths[key]), data)
                pipe.delete(self.description.meta_key(paths[key]))
                pipe.hset(self.description.meta_key(paths[key]), mapping={**metadata, **lazy})
                pipe.sadd(self.description.key("__keys__"), paths[key])
            pipe.execute()

        self.call(f"writing to {self.description.name!r}", command)
        self.refresh()

    def _check_nesting(self, entries: Iterable[Key], away: Iterable[StoredLeaf]) -> None:
        """Upstream cannot tell a leaf from a node of the same name: one has to go first."""
        everything = {*self.description.leaf_of, *entries} - {leaf.key for leaf in away if leaf.key not in entries}
        for key in entries:
            above = [key[:depth] for depth in range(1, len(key)) if key[:depth] in everything]
            below = [other for other in everything if len(other) > len(key) and other[: len(key)] == key]
            for other in above + below:
                raise SchemaError(
                    f"{format_key(key)} cannot be set beside {format_key(other)}: one would be a tensor and a node at "
                    f"once; delete the other first"
                )

    def put_values(self, key: Key, values: Mapping[int, Any]) -> None:
        tries = self.tries_against_others()
        while True:
            leaf = self.description.leaf_of.get(key)
            if leaf is not None and leaf.kind == "pickle":
                raise SchemaError(f"{format_key(key)} is pickled; set the whole entry to write it as JSON")
            if self.call(f"writing {format_key(key)}", partial(self._change_values, key, leaf, values)):
                self.refresh()
                return
            named = f"{format_key(key)} of {self.description.name!r} at {self.server.address}"
            tries.failed(DatasetChangedError(f"{named} is being changed by others; write it again"), at_once=True)

    def _change_values(self, key: Key, leaf: StoredLeaf | None, values: Mapping[int, Any], client: Any) -> bool:
        """Upstream keeps all rows' values in one string: it is read and written anew, unless somebody else does."""
        path = leaf_path(key)
        with client.pipeline(transaction=True) as pipe:
            pipe.watch(self.description.data_key(path), self.description.meta_key(path))
            found: list[Any] = [None] * self.rows
            if leaf is not None:
                one = decode_value(pipe.get(self.description.data_key(path)) or b"null", "json")
                found = one if leaf.kind == "json_array" and isinstance(one, list) else [one] * self.rows
            for row, value in values.items():
                found[row] = value
            data, metadata = _encoded(key, RowValues(tuple(found)))
            pipe.multi()
            pipe.set(self.description.data_key(path), data)
            pipe.delete(self.description.meta_key(path))
            pipe.hset(self.description.meta_key(path), mapping=metadata)
            pipe.sadd(self.description.key("__keys__"), path)
            try:
                pipe.execute()
            except redis.WatchError:
                return False
        return True

    def _leaves_below(self, key: Key) -> list[StoredLeaf]:
        return [leaf for leaf in self.description.leaves if leaf.key[: len(key)] == key]

    def delete(self, key: Key) -> None:
        gone = self._leaves_below(key)

        def command(client: Any) -> None:
            pipe = client.pipeline(transaction=True)
            self._remove(pipe, gone)
            pipe.execute()

        if gone:
            self.call(f"deleting {format_key(key)}", command)
            self.refresh()

    def _remove(self, pipe: Any, leaves: Iterable[StoredLeaf]) -> None:
        for leaf in leaves:
            pipe.unlink(self.description.data_key(leaf.path), self.description.key(f"d:{leaf.path}:idx"))
            pipe.unlink(self.description.meta_key(leaf.path))
            pipe.srem(self.description.key("__keys__"), leaf.path)

    def rename(self, old: Key, new: Key) -> None:
        moves = [(leaf, leaf_path(new + leaf.key[len(old) :])) for leaf in self._leaves_below(old)]
        away = [leaf for leaf in self._leaves_below(new) if leaf not in [moved for moved, _ in moves]]

        def command(client: Any) -> None:
            pipe = client.pipeline(transaction=True)
            self._remove(pipe, away)
            for leaf, path in moves:
                pipe.rename(self.description.data_key(leaf.path), self.description.data_key(path))
                pipe.rename(self.description.meta_key(leaf.path), self.description.meta_key(path))
                if leaf.kind == "ragged":
                    idx = self.description.key(f"d:{leaf.path}:idx")
                    pipe.rename(idx, self.description.key(f"d:{path}:idx"))
                pipe.srem(self.description.key("__keys__"), leaf.path)
                pipe.sadd(self.description.key("__keys__"), path)
            pipe.execute()

        if moves and new != old:
            self.call(f"renaming {format_key(old)}", command)
            self.refresh()

    def set_nodes(self, nodes: Sequence[Node]) -> None:
        _check_nodes([node for node in nodes if node.names is not None], {})
        for node in nodes:
            shape = node.batch_shape if self.unbatched else (self.rows, *node.batch_shape)
            if shape == self.batch_size:
                continue
            if node.key:
                raise SchemaError(
                    f"the layout tensordict_store keeps no batch size of {format_key(node.key)}: it is the root's; use "
                    f"the layout records, or to_local()"
                )
            text = json.dumps(list(shape))
            key = self.description.key("__batch_size__")
            self.call("changing the batch size", partial(_set_string, key, text))
            self._take(replace(self.description, batch_size=tuple(shape)))
            self.refresh()

    def set_device(self, device: str) -> None:
        self.call("changing the device", lambda client: client.set(self.description.key("__device__"), device))
        self.refresh()

    def clear(self) -> None:
        gone = store_keys(self.description)
        self.call(f"removing {self.description.name!r}", lambda client: unlink_keys(client, gone))


def _set_string(key: bytes, value: str, client: Any) -> None:
    client.set(key, value)


def _fits(known: StoreDescription, key: Key, entry: Entry) -> bool:
    """Whether it is written in place of what is there."""
    leaf = known.leaf_of.get(key)
    return (
        leaf is not None
        and leaf.kind == "tensor"
        and isinstance(entry, torch.Tensor)
        and (leaf.dtype, leaf.shape) == (entry.dtype, tuple(entry.shape))
    )


def _encoded(key: Key, entry: OneValue | RowValues) -> tuple[bytes, dict[str, str]]:
    encoding, value = _value(entry)
    return encode_value(key, value).encode(), value_metadata(encoding)
