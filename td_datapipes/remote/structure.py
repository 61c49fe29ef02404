"""Manifests of mutable data sets -> manifests: fields come, go and change their names. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from td_datapipes.manifest import ChunkLayout, Manifest, Value
from td_datapipes.schema import Field, Group, Key, Node, Schema

__all__ = ["NewGroup", "added", "chunk_keys_gone", "renamed", "with_nodes", "without"]

NewGroup = tuple[Group, ChunkLayout, str]
"""A group, how it is cut into chunks, and its label."""


def _rebuilt(
    manifest: Manifest, groups: Sequence[NewGroup], nodes: Sequence[Node], values: Iterable[Value]
) -> Manifest:
    return replace(
        manifest,
        generation=manifest.generation + 1,
        schema=Schema(groups=tuple(group for group, _, _ in groups), nodes=tuple(nodes)),
        layouts=tuple(layout for _, layout, _ in groups),
        labels=tuple(label for _, _, label in groups),
        values=tuple(values),
    )


def _groups(manifest: Manifest) -> list[NewGroup]:
    labels = manifest.labels or tuple(map(str, range(len(manifest.layouts))))
    return list(zip(manifest.schema.groups, manifest.layouts, labels, strict=True))


def without(manifest: Manifest, keys: Iterable[Key]) -> Manifest:
    """Without these entries and all below them. A group that has others keeps its records, with a hole in each."""
    gone = set(keys)

    def stays(key: Key) -> bool:
        return not any(key[:depth] in gone for depth in range(1, len(key) + 1))

    groups = [
        (replace(group, fields=tuple(field for field in group.fields if stays(field.key))), layout, label)
        for group, layout, label in _groups(manifest)
    ]
    nodes = [node for node in manifest.schema.nodes if stays(node.key)]
    values = [value for value in manifest.values if stays(value.key)]
    return _rebuilt(manifest, [group for group in groups if group[0].fields], nodes, values)


def added(manifest: Manifest, groups: Iterable[NewGroup], nodes: Iterable[Node], values: Iterable[Value]) -> Manifest:
    """With new groups, nodes and values; nodes that are there, and parents that are missing, are taken care of."""
    found = {node.key: node for node in manifest.schema.nodes}
    new_groups, new_values = list(groups), list(values)
    keys = [field.key for group, _, _ in new_groups for field in group.fields]
    wanted = [*nodes, *(_parent(found, key[:-1]) for key in [*keys, *(value.key for value in new_values)])]
    for node in wanted:
        for depth in range(1, len(node.key)):
            found.setdefault(node.key[:depth], _parent(found, node.key[:depth]))
        found.setdefault(node.key, node)
    ordered = sorted(found.values(), key=lambda node: len(node.key))
    return _rebuilt(manifest, [*_groups(manifest), *new_groups], ordered, [*manifest.values, *new_values])


def _parent(found: dict[Key, Node], key: Key) -> Node:
    """The node of that key, or one like the closest above it."""
    depth = next(depth for depth in range(len(key), -1, -1) if key[:depth] in found)
    return replace(found[key[:depth]], key=key, type="")


def renamed(manifest: Manifest, old: Key, new: Key) -> Manifest:
    """With `old`, and all below it, under `new`."""

    def moved(key: Key) -> Key:
        return new + key[len(old) :] if key[: len(old)] == old else key

    def field(item: Field) -> Field:
        return replace(item, key=moved(item.key))

    groups = [
        (replace(group, fields=tuple(map(field, group.fields))), layout, label)
        for group, layout, label in _groups(manifest)
    ]
    nodes = [replace(node, key=moved(node.key)) for node in manifest.schema.nodes]
    values = [replace(value, key=moved(value.key)) for value in manifest.values]
    plain = _rebuilt(manifest, groups, sorted(nodes, key=lambda node: len(node.key)), values)
    parents = replace(added(plain, (), [_parent({n.key: n for n in plain.schema.nodes}, new[:-1])], ()))
    return replace(parents, generation=manifest.generation + 1)


def with_nodes(manifest: Manifest, changed: Iterable[Node]) -> Manifest:
    """With other batch sizes and names of nodes; their types stay."""
    new = {node.key: node for node in changed}
    nodes = [replace(new.get(node.key, node), type=node.type) for node in manifest.schema.nodes]
    return _rebuilt(manifest, _groups(manifest), nodes, manifest.values)


def chunk_keys_gone(old: Manifest, new: Manifest) -> list[bytes]:
    """The server's keys that the new structure has no use for."""
    kept = {label for _, _, label in _groups(new)}
    gone = [
        old.chunk_key(number, chunk)
        for number, (_, layout, label) in enumerate(_groups(old))
        if label not in kept
        for chunk in range(layout.num_chunks(old.rows))
    ]
    values = {value.label for value in new.values}
    return gone + [old.value_key(value) for value in old.values if value.label not in values]
