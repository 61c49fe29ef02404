"""A tree in the layout `records`: a mutable data set, whose entries are fields of groups, or a frozen one to read."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import redis
import torch

from td_datapipes.catalog import collect, drop, find_manifest, retire, unstage
from td_datapipes.errors import DatasetChangedError, DatasetExistsError, InterruptedWriteError, TDDatapipesError
from td_datapipes.keys import encode_name, manifest_key, staged_key, superseded_key
from td_datapipes.manifest import Manifest
from td_datapipes.remote.staging import Staged, Staging
from td_datapipes.remote.structure import added, chunk_keys_gone, renamed, with_nodes, without
from td_datapipes.remote.tree import Entry, StaleWriteError, Tree, TreeOptions, run_script
from td_datapipes.remote.values import OneValue, RowValues, encode_value
from td_datapipes.schema import Key, Node, Schema, format_key
from td_datapipes.wire.scripts import load_script
from td_datapipes.wire.server import Server
from td_datapipes.writer import persist

__all__ = ["FrozenTree", "RecordsTree", "create_records"]

MAX_ROWS_IN_RECORDS = 256
"""Of a field that is written whole and shares its records with others: from here on it gets a group of its own."""


def create_records(
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
) -> RecordsTree:
    """Publish a mutable data set with these entries, its tensors as one group, in one step.

    Args:
        server: where, and under which name; owned by the result.
        rows: the leading dim of every tensor; 1 where there are no batch dims.
        root: the root node.
        unbatched, device: as for `Manifest`.
        overwrite: put it in place of what the name stands for.
        entries, nodes: as for `Tree.put`.
        options: as for `Tree`.

    Raises:
        DatasetExistsError: the name is taken, and `overwrite` is not set.
    """
    name = server.url.name
    found = find_manifest(server, name)
    if found is not None and not overwrite:
        raise DatasetExistsError(
            f"data set {name!r} exists at {server.address} ({found.rows} rows); open it with from_redis, pass "
            f"overwrite=True to put another in its place, or choose another name"
        )
    empty = Manifest(
        name=name,
        id=secrets.token_hex(5),
        kind="mutable",
        generation=0,
        rows=rows,
        schema=Schema(groups=(), nodes=(root,)),
        layouts=(),
        # One slot for what describes it and what it holds: one script can look at both.
        tags=(encode_name(name),),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        labels=(),
        unbatched=unbatched,
        device=device,
    )
    tree = RecordsTree(server, empty, options)
    try:
        with tree.staging(entries) as staged:
            tree.publish(added(empty, staged.groups, nodes, staged.values), found, staged)
    except BaseException as error:
        with suppress(TDDatapipesError):
            unstage(server, name, "", [empty.structure_key])
        if isinstance(error, DatasetChangedError):
            raise DatasetExistsError(
                f"data set {name!r} at {server.address} was published by another writer while this one wrote; nothing "
                f"of this write was kept. Open what is there, or write again with overwrite=True"
            ) from error
        raise
    if found is not None:
        collect(server, name)
    return tree


class RecordsTree(Tree):
    """Entries of a mutable data set. Its structure changes by publishing another manifest, in one step."""

    description: Manifest

    @property
    def unbatched(self) -> bool:
        return self.description.unbatched

    @property
    def batch_size(self) -> tuple[int, ...]:
        shape = self.description.schema.root.batch_shape
        return shape if self.unbatched else (self.rows, *shape)

    @property
    def _write_token(self) -> bytes:
        return self.description.structure_key + b":"

    def _write_guards(self, known: Manifest, keys: Iterable[Key]) -> list[tuple[bytes, bytes]]:
        del keys  # one counter stands for all of them
        return [(known.structure_key, b"=%d" % known.generation)]

    def put(self, entries: Mapping[Key, Entry], nodes: Sequence[Node] = (), gone: Iterable[Key] = ()) -> None:
        self.require_writable()
        gone, known = list(gone), self.description
        stay = {key: entry for key, entry in entries.items() if self._fits(known, key, entry)}
        fresh = {key: entry for key, entry in entries.items() if key not in stay}
        there = {node.key for node in known.schema.nodes}
        if fresh or gone or any(node.key not in there for node in nodes):
            self._restructure(fresh, nodes, gone)
            if stay:  # where it still is what it was
                self.put(stay)
        elif stay:
            self.write_rows(known, {key: self.as_rows(entry) for key, entry in stay.items()}, None)

    def _fits(self, known: Manifest, key: Key, entry: Entry) -> bool:
        """Whether it is best written where the entry is now."""
        field = known.schema.fields.get(key)
        if field is None or not isinstance(entry, torch.Tensor):
            return False
        if field.dtype != entry.dtype or field.shape != tuple(self.as_rows(entry).shape[1:]):
            return False
        group = next(group for group in known.schema.groups if field in group.fields)
        return len(group.fields) == 1 or known.rows <= MAX_ROWS_IN_RECORDS

    def _restructure(self, entries: Mapping[Key, Entry], nodes: Sequence[Node], gone: Sequence[Key]) -> None:
        with self.staging(entries) as staged:

            def change(manifest: Manifest) -> Manifest:
                rest = without(manifest, [*gone, *_replaced(manifest, entries)])
                return added(rest, staged.groups, nodes, staged.values)

            self._change(change, staged)

    def staging(self, entries: Mapping[Key, Entry]) -> Staging:
        """Write entries that nothing refers to yet; they are taken back unless they are published."""
        tensors = {key: self.as_rows(entry) for key, entry in entries.items() if isinstance(entry, torch.Tensor)}
        values = {key: entry for key, entry in entries.items() if isinstance(entry, OneValue | RowValues)}
        return Staging(self.server, self.description, tensors, values)

    def _change(self, change: Callable[[Manifest], Manifest], staged: Staged | None = None) -> None:
        """Publish what a change makes of the structure; of whatever it is by then, if somebody else was faster."""
        self.require_writable()
        named = DatasetChangedError(
            f"data set {self.description.name!r} at {self.server.address} is being changed by others; open it again"
        )
        tries = self.tries_against_others()
        while True:
            old = self.description
            with suppress(DatasetChangedError):
                self.publish(change(old), old, staged)
                return
            tries.failed(named, at_once=True)
            self.refresh()
            if self.description.id != old.id:
                raise named

    def publish(self, new: Manifest, found: Manifest | None, staged: Staged | None) -> None:
        """Make a manifest what the name stands for.

        Raises:
            DatasetChangedError: somebody else published since.
        """
        new = replace(new, generation=1 + (0 if found is None else found.generation))
        expected = "" if found is None else f"{found.id} {found.generation}"
        name, staged_id, arguments = new.name, "" if staged is None else staged.id, [new.to_json()]
        if found is not None and found.id == new.id:
            script = load_script("publish_structure")
            keys = [manifest_key(name), staged_key(name), new.structure_key, *chunk_keys_gone(found, new)]
            arguments += [str(new.generation), expected, staged_id]
        else:
            script = load_script("publish")
            keys = [manifest_key(name), staged_key(name), superseded_key(name)]
            arguments += [expected, staged_id, repr(time.time())]
            # Nobody looks for it before the manifest says so.
            self.call(f"beginning {name!r}", lambda client: client.set(new.structure_key, new.generation))
        answer = self.call(f"publishing {name!r}", lambda client: run_script(client, script, keys, arguments))
        if answer == b"GONE":
            raise InterruptedWriteError(
                f"what this write to {name!r} at {self.server.address} had staged was removed, because it had taken so "
                f"long that it was held for abandoned; nothing of it was published: write again"
            )
        if answer != b"OK":
            raise DatasetChangedError(
                f"data set {name!r} at {self.server.address} was changed by somebody else at the same time"
            )
        if found is not None and found.id != new.id:
            retire(self.server, found)
        self._take(new)
        persist(self.server)

    def put_values(self, key: Key, values: Mapping[int, Any]) -> None:
        self.require_writable()
        value = next((value for value in self.description.values if value.key == key), None)
        if value is None or not value.per_row:
            one = None
            if value is not None:
                where = self.description.value_key(value)
                one = json.loads(self.call(f"reading {format_key(key)}", lambda client: client.get(where)) or "null")
            self.put({key: RowValues(tuple(values.get(row, one) for row in range(self.rows)))})
            return
        texts = {str(row): encode_value(key, item) for row, item in values.items()}
        place, expected = self.description.value_key(value), b"%d" % self.description.generation

        def command(client: Any) -> bool:
            with client.pipeline(transaction=True) as pipe:
                pipe.watch(self.description.structure_key)
                if pipe.get(self.description.structure_key) != expected:
                    return False
                pipe.multi()
                pipe.hset(place, mapping=texts)
                try:
                    pipe.execute()
                except redis.WatchError:
                    return False
            return True

        if texts and not self.call(f"writing {format_key(key)}", command):
            raise StaleWriteError(key)

    def delete(self, key: Key) -> None:
        self._change(lambda manifest: without(manifest, [key]))

    def rename(self, old: Key, new: Key) -> None:
        self._change(lambda manifest: renamed(without(manifest, [new]) if new != old else manifest, old, new))

    def set_nodes(self, nodes: Sequence[Node]) -> None:
        self._change(lambda manifest: with_nodes(manifest, nodes))

    def set_device(self, device: str) -> None:
        self._change(lambda manifest: replace(manifest, device=device))

    def clear(self) -> None:
        self.require_writable()
        drop(self.server, self.description.name)


class FrozenTree(RecordsTree):
    """Entries of a data set that `write_dataset` wrote: read as `RedisTDDataset` does, fields of variable length too.

    It stays on the rows it was opened with, until it is asked to look for those that were appended.
    """

    def __init__(self, server: Server, description: Manifest, options: TreeOptions) -> None:
        # A published generation never changes: there is nothing to take a snapshot of.
        super().__init__(server, description, replace(options, atomic=False))

    def refresh(self) -> bool:
        """Take in the rows that were appended; whether there were any.

        Raises:
            DatasetChangedError: it was removed, or written anew.
        """
        known = self.description
        found = find_manifest(self.server, known.name)
        if found is None or found.id != known.id:
            now = "removed" if found is None else f"written anew ({found.rows} rows of generation {found.generation})"
            raise DatasetChangedError(
                f"data set {known.name!r} at {self.server.address} has been {now} since it was opened with "
                f"{known.rows} rows of generation {known.generation}; open it again"
            )
        if found.generation <= known.generation:
            return False
        self._take(found)
        return True


def _replaced(manifest: Manifest, keys: Iterable[Key]) -> list[Key]:
    """What new entries take the place of: their own key, and leaves where they need nodes."""
    leaves = {*manifest.schema.fields, *(value.key for value in manifest.values)}
    found = set(keys)
    return [*found, *(key[:depth] for key in found for depth in range(1, len(key)) if key[:depth] in leaves)]
