"""The `tensordict_store` layout: what ``tensordict.store`` writes, one server string a leaf. Pure: no I/O.

``TensorDictStore`` and ``LazyStackedTensorDictStore`` keep these keys for a store ``<td_id>`` in a namespace
(``tensordict`` unless it was given another)::

    <namespace>:{<td_id>}:d:<path>         the leaf's bytes, row after row; <path> joins the nested key with dots
    <namespace>:{<td_id>}:m:<path>         hash: shape and dtype, or is_non_tensor and encoding; of a lazy stack also
                                           homogeneous, layout and, where its rows differ in shape, shapes
    <namespace>:{<td_id>}:d:<path>:idx     offsets of the rows, where a lazy stack's rows differ in shape
    <namespace>:{<td_id>}:__keys__         set of the paths
    <namespace>:{<td_id>}:__batch_size__   JSON; __device__, __tensorclass__; of a lazy stack __type__, __count__,
                                           __stack_dim__ and __inner_batch_size__ in its place

Seen as a layout, each tensor leaf is a group of its own whose records are the leaf's rows, all in one chunk. What does
not lie so (values that are no tensors, rows that differ in shape, elements stacked along a later dim) is no field of
the schema: see `td_datapipes.extras`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch

from td_datapipes.errors import SchemaError
from td_datapipes.manifest import ChunkLayout
from td_datapipes.schema import Field, Group, Key, Node, Schema, dtype_from_name, dtype_name, format_key

__all__ = [
    "DEFAULT_NAMESPACE",
    "KEY_SEPARATOR",
    "STAGED_NAMESPACE",
    "StoreDescription",
    "StoredLeaf",
    "TensorDictStoreLayout",
    "describe_store",
    "group_of",
    "leaf_path",
    "parse_leaf",
    "store_candidates",
    "store_key",
    "store_name",
    "value_kind",
]

DEFAULT_NAMESPACE = "tensordict"
STAGED_NAMESPACE = "td_datapipes.staged."
"""What the namespaces begin with in which stores are written before they are published."""
_MAX_SHOWN_ID = 40
KEY_SEPARATOR = "."
"""Between the parts of a nested key: a part cannot contain it."""

LeafKind = Literal["tensor", "stacked", "ragged", "json", "json_array", "pickle"]
_MARKS = (b"shape", b"dtype", b"is_non_tensor", b"homogeneous", b"layout")
"""Metadata that say what a tensor's bytes mean. A value written over a tensor leaves its shape and dtype there."""


def store_key(namespace: str, td_id: str, suffix: str) -> bytes:
    """The server's key of one thing of a store."""
    return f"{namespace}:{{{td_id}}}:{suffix}".encode()


def store_candidates(name: str) -> Iterator[tuple[str, str]]:
    """The namespace and id a data set's name may stand for: ``td_id``, or ``namespace:td_id``."""
    yield DEFAULT_NAMESPACE, name
    for at, character in enumerate(name):
        if character == ":" and 0 < at < len(name) - 1:
            yield name[:at], name[at + 1 :]


def store_name(key: bytes) -> str | None:
    """The name a store can be opened by, from the key of its batch size or type; None for any other key."""
    head, _, suffix = key.decode(errors="replace").rpartition("}:")
    namespace, opened, td_id = head.partition(":{")
    if suffix not in ("__batch_size__", "__type__") or not opened:
        return None
    return td_id if namespace == DEFAULT_NAMESPACE else f"{namespace}:{td_id}"


def leaf_path(key: Key) -> str:
    """A key as the store spells it.

    Raises:
        SchemaError: a part has a dot in it, which this layout cannot tell from nesting.
    """
    for part in key:
        if KEY_SEPARATOR in part:
            raise SchemaError(
                f"the layout tensordict_store cannot hold the key {format_key(key)}: it joins nested keys with "
                f"{KEY_SEPARATOR!r}, so {part!r} would be taken for a nested one; rename it, or use the layout records"
            )
    return KEY_SEPARATOR.join(key)


@dataclass(frozen=True, kw_only=True)
class StoredLeaf:
    """One leaf as its metadata say.

    Attributes:
        key: its path.
        path: the same as the store spells it.
        kind: ``tensor``; of a lazy stack ``stacked`` where its elements lie one behind the other though they are
            stacked along a later dim, and ``ragged`` where its rows differ; or how a non-tensor value is encoded.
        dtype: of a tensor.
        shape: of all of it as stored, batch dims included; of ``ragged`` ones the first row's, with the number of rows
            before it.
        shapes: of each row, for ``ragged`` ones.
        marks: ``(name, value)`` of the metadata that must not change while it is read.
        absent: names of metadata that must not come while it is read.
    """

    key: Key
    path: str
    kind: LeafKind
    dtype: torch.dtype = torch.uint8
    shape: tuple[int, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    marks: tuple[tuple[bytes, bytes], ...] = ()
    absent: tuple[bytes, ...] = ()

    @property
    def expected(self) -> tuple[tuple[bytes, bytes | None], ...]:
        """What both say, None for what must not be there."""
        return (*self.marks, *((name, None) for name in self.absent))

    @property
    def nbytes(self) -> int:
        """Bytes of a dense tensor's string."""
        return math.prod(self.shape) * self.dtype.itemsize

    @cached_property
    def row_bytes(self) -> tuple[int, ...]:
        """Bytes of each row of a ragged leaf."""
        return tuple(math.prod(shape) * self.dtype.itemsize for shape in self.shapes)

    @property
    def form(self) -> tuple[object, ...]:
        """What has to stay as it is for those who have it open. Of a value only whether it is pickled."""
        kind = "json" if self.kind == "json_array" else self.kind
        return kind, self.dtype, self.shape, self.shapes

    def __str__(self) -> str:
        if self.kind in ("json", "json_array"):
            return f"{format_key(self.key)}: a value"
        if self.kind == "pickle":
            return f"{format_key(self.key)}: a pickled value"
        return f"{format_key(self.key)}: {dtype_name(self.dtype)}{list(self.shape)}"


def parse_leaf(
    path: str, metadata: Mapping[bytes, bytes], batch_size: tuple[int, ...], stack_dim: int | None
) -> StoredLeaf:
    """A leaf from its metadata hash.

    Args:
        path: as the store spells it.
        metadata: the hash.
        batch_size, stack_dim: of the store.

    Raises:
        SchemaError: metadata that ``TensorDictStore`` does not write.
    """
    key = tuple(path.split(KEY_SEPARATOR))
    try:
        if metadata.get(b"is_non_tensor") == b"1":
            return StoredLeaf(key=key, path=path, kind=value_kind(metadata.get(b"encoding")))
        dtype = dtype_from_name(metadata[b"dtype"].decode().removeprefix("torch."))
        shape = tuple(json.loads(metadata[b"shape"]))
        marks = tuple((name, metadata[name]) for name in _MARKS if name in metadata)
        absent = tuple(name for name in _MARKS if name not in metadata)
        tensor = StoredLeaf(key=key, path=path, kind="tensor", dtype=dtype, shape=shape, marks=marks, absent=absent)
        if metadata.get(b"homogeneous", b"1") == b"1":
            stacked = _is_stack_first(shape, metadata.get(b"layout"), batch_size, stack_dim or 0)
            return replace(tensor, kind="stacked") if stacked else tensor
        shapes = tuple(tuple(item) for item in json.loads(metadata[b"shapes"]))
        return replace(tensor, kind="ragged", shapes=shapes)
    except (KeyError, ValueError, TypeError) as error:
        raise SchemaError(
            f"the metadata of leaf {path!r} are not what TensorDictStore writes ({error!r}): {dict(metadata)!r}"
        ) from error


def value_kind(encoding: bytes | None) -> LeafKind:
    """How a non-tensor value is stored."""
    if encoding in (None, b"json"):
        return "json"
    return "json_array" if encoding == b"json_array" else "pickle"


def _is_stack_first(shape: tuple[int, ...], layout: bytes | None, batch_size: tuple[int, ...], stack_dim: int) -> bool:
    """Whether a lazy stack's tensor lies element by element though the stack's dim is a later one.

    As upstream decides it: the shape tells, or where it fits both ways, what the writer noted.
    """
    if not stack_dim:
        return False
    num_dims = len(batch_size)
    inner = batch_size[:stack_dim] + batch_size[stack_dim + 1 :]
    first, in_place = shape[:num_dims] == (batch_size[stack_dim], *inner), shape[:num_dims] == batch_size
    return layout == b"stack" if first and in_place else first


@dataclass(frozen=True, kw_only=True)
class StoreDescription:
    """What is known of a store: stands where a `Manifest` does for a data set of the `records` layout.

    Attributes:
        name: as in the URL's fragment.
        namespace, td_id: where its keys are.
        batch_size: as upstream shows it; its leading dim counts rows.
        stack_dim: of a lazy stack, counted from the front; else None.
        device: as it was stored; empty for none.
        tensorclass: the stored path of a class, or empty.
        leaves: all of them, sorted by path.
        schema: the dense tensors.
        layouts: one a group.
    """

    name: str
    namespace: str
    td_id: str
    batch_size: tuple[int, ...]
    stack_dim: int | None
    device: str
    tensorclass: str
    leaves: tuple[StoredLeaf, ...]
    schema: Schema
    layouts: tuple[ChunkLayout, ...]

    kind = "mutable"
    generation = 1
    complete = True
    created = "written by TensorDictStore"

    @property
    def id(self) -> str:
        """Its keys' common part."""
        return f"{self.namespace}:{{{self.td_id}}}"

    @property
    def rows(self) -> int:
        """The leading batch dim; 1 where there is none."""
        return self.batch_size[0] if self.batch_size else 1

    @cached_property
    def fingerprint(self) -> str:
        """Tells this store's rows from others'. Nothing on the server says whether values were written anew."""
        told = [self.id, *map(str, self.batch_size), *(f"{leaf} {leaf.form}" for leaf in self.leaves)]
        digest = hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]
        return f"{self.td_id[:_MAX_SHOWN_ID]}:{digest}"

    @cached_property
    def leaf_of(self) -> dict[Key, StoredLeaf]:
        """Leaves by key."""
        return {leaf.key: leaf for leaf in self.leaves}

    @property
    def others(self) -> tuple[StoredLeaf, ...]:
        """The leaves that are no fields of the schema."""
        return tuple(leaf for leaf in self.leaves if leaf.kind != "tensor")

    def data_key(self, path: str) -> bytes:
        """Where a leaf's bytes are."""
        return store_key(self.namespace, self.td_id, f"d:{path}")

    def meta_key(self, path: str) -> bytes:
        """Where a leaf's metadata are."""
        return store_key(self.namespace, self.td_id, f"m:{path}")

    def key(self, suffix: str) -> bytes:
        """Where something of the whole store is."""
        return store_key(self.namespace, self.td_id, suffix)

    def chunk_key(self, group: int, chunk: int) -> bytes:
        """The server's key of a leaf."""
        del chunk  # there is one
        return self.data_key(KEY_SEPARATOR.join(self.schema.groups[group].fields[0].key))

    def difference(self, other: StoreDescription | None) -> str:
        """In words, the first leaf in which what was opened differs from what is there now; empty where none does."""
        if other is None:
            return "it has been removed"
        if self.batch_size != other.batch_size:
            return f"its batch size was {list(self.batch_size)} and is {list(other.batch_size)} now"
        for key in dict.fromkeys((*self.leaf_of, *other.leaf_of)):
            mine, theirs = self.leaf_of.get(key), other.leaf_of.get(key)
            if mine is None:
                continue  # a new leaf takes nothing away from those that are read
            if theirs is None:
                return f"field {format_key(key)} has been removed"
            if mine.form != theirs.form:
                return f"field {mine} of then is {theirs} now"
        return ""


def describe_store(
    name: str,
    namespace: str,
    td_id: str,
    *,
    batch_size: tuple[int, ...],
    leaves: tuple[StoredLeaf, ...],
    stack_dim: int | None = None,
    device: str = "",
    tensorclass: str = "",
) -> StoreDescription:
    """Put a store's description together. Arguments as the attributes of `StoreDescription`.

    Raises:
        SchemaError: a leaf whose shape does not begin with the batch size, or that is both a leaf and a node.
    """
    leaves = tuple(sorted(leaves, key=lambda leaf: leaf.path))
    rows = batch_size[0] if batch_size else 1
    dense = [leaf for leaf in leaves if leaf.kind == "tensor"]
    groups = [group_of(leaf, batch_size) for leaf in dense]
    prefixes = dict.fromkeys(leaf.key[:depth] for leaf in leaves for depth in range(1, len(leaf.key)))
    for leaf in leaves:
        if leaf.key in prefixes:
            raise SchemaError(
                f"store {td_id!r} has {leaf.path!r} both as a leaf and with leaves below it: a key with a dot in it "
                f"was written beside a nested one, and TensorDictStore cannot tell them apart; delete one of them"
            )
    for leaf in leaves:
        if leaf.kind == "ragged" and stack_dim:
            raise SchemaError(
                f"store {td_id!r} is a lazy stack along dim {stack_dim}, and the elements of leaf {leaf.path!r} differ "
                f"in shape: its rows, the leading dim, are no tensors. Stack along dim 0, or leave it out"
            )
    nodes = [Node(key=key, batch_shape=tuple(batch_size[1:])) for key in ((), *prefixes)]
    return StoreDescription(
        name=name,
        namespace=namespace,
        td_id=td_id,
        batch_size=batch_size,
        stack_dim=stack_dim,
        device=device,
        tensorclass=tensorclass,
        leaves=leaves,
        schema=Schema(groups=tuple(groups), nodes=tuple(nodes)),
        layouts=tuple(_one_chunk(group.stride_bytes, rows) for group in groups),
    )


def group_of(leaf: StoredLeaf, batch_size: tuple[int, ...]) -> Group:
    """A leaf as a group of its own, one record a row; of a ``stacked`` one, as it would lie stacked in place.

    Raises:
        SchemaError: its shape does not begin with the batch size.
    """
    shape = leaf.shape if leaf.kind == "tensor" else (*batch_size, *leaf.shape[len(batch_size) :])
    if shape[: len(batch_size)] != batch_size:
        raise SchemaError(
            f"leaf {leaf} does not begin with the batch size {list(batch_size)} of its store; read it with "
            f"TensorDictStore, or leave it out with fields="
        )
    row_shape = shape[1:] if batch_size else shape
    nbytes = math.prod(row_shape) * leaf.dtype.itemsize
    field = Field(key=leaf.key, dtype=leaf.dtype, shape=row_shape, offset_bytes=0)
    return Group(fields=(field,), record_bytes=nbytes, stride_bytes=nbytes)


def _one_chunk(row_bytes: int, rows: int) -> ChunkLayout:
    return ChunkLayout(stride_bytes=row_bytes, records_per_chunk=max(rows, 1), pieces=1, piece_bytes=row_bytes)


@dataclass(frozen=True, kw_only=True)
class TensorDictStoreLayout:
    """A store seen as a `Layout`. Rows are asked for at their exact length: nothing stands behind the last one."""

    description: StoreDescription
    spare_bytes: int = 0
    alignment_bytes: int = 1

    @property
    def schema(self) -> Schema:
        """Fields, groups and nodes."""
        return self.description.schema

    @property
    def rows(self) -> int:
        """The leading batch dim."""
        return self.description.rows

    @property
    def chunk_layouts(self) -> tuple[ChunkLayout, ...]:
        """One chunk a leaf."""
        return self.description.layouts

    def chunk_key(self, group: int, chunk: int) -> bytes:
        """The server's key of a leaf."""
        return self.description.chunk_key(group, chunk)
