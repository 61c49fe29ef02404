"""Copy a data set from one layout to another, or within one, and compare every byte before it is published."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from tensordict import TensorDictBase

from td_datapipes.catalog import connect, unlink_keys
from td_datapipes.cost import CostModel
from td_datapipes.errors import ConfigurationError, DataLossError, DatasetExistsError, SchemaError, TDDatapipesError
from td_datapipes.extras import Extra, extra_fields, select_fields, write_values
from td_datapipes.layouts.tensordict_store import StoreDescription, StoredLeaf, group_of
from td_datapipes.manifest import Manifest
from td_datapipes.progress import progress_bar
from td_datapipes.read_spec import Rows
from td_datapipes.schema import Field, Key, Schema, format_key
from td_datapipes.store import ReadOptions, RowReader
from td_datapipes.store_writer import StoreWriter, tensor_bytes
from td_datapipes.upstream import Description, find_description, open_description
from td_datapipes.varying import encode_rows
from td_datapipes.wire.server import Server
from td_datapipes.writer import persist, write_rows

__all__ = ["convert"]

LayoutName = Literal["records", "tensordict_store"]
_BATCH_BYTES = 16 << 20


def convert(
    source: str,
    target: str,
    *,
    layout: LayoutName | None = None,
    fields: Sequence[str | tuple[str, ...]] | None = None,
    overwrite: bool = False,
    allow_pickle: bool = False,
    chunk_bytes: int | None = None,
    progress: bool | None = None,
) -> Description:
    """Copy a data set, batch by batch, verified byte by byte before it is published.

    Args:
        source: URL of what is copied, in either layout.
        target: URL of the copy, on the same server or another.
        layout: of the copy; by default the other one than the source's. Within ``records`` it compacts: one group.
        fields: copy only these, as for `RedisTDDataset`.
        overwrite: replace what the target's name stands for.
        allow_pickle: read values that ``TensorDictStore`` pickled; they are written as JSON, which has to hold them.
        chunk_bytes: as for `write_dataset`, where the copy is ``records``.
        progress: show a progress bar; by default on a terminal only.

    Returns:
        What describes the copy.

    Raises:
        SchemaError: a field that the copy's layout cannot hold, as ``tensordict_store`` those of variable length: it
            names it.
        DatasetExistsError: the target's name is taken.
        DataLossError: the copy differs from the source, which changed meanwhile; nothing was published.
        ValueTooLargeError: a field is longer than the target's server takes in one string.
    """
    if layout not in (None, "records", "tensordict_store"):
        raise ConfigurationError(f"layout must be 'records' or 'tensordict_store', got {layout!r}")
    origin, destination = connect(source), connect(target)
    try:
        copying = _Source(origin, open_description(origin, origin.url.name), fields, allow_pickle=allow_pickle)
        found = find_description(destination, destination.url.name)
        if found is not None and not overwrite:
            raise DatasetExistsError(
                f"{destination.url.name!r} exists at {destination.address}; pass overwrite=True to replace it"
            )
        if layout is None:
            layout = "records" if isinstance(copying.description, StoreDescription) else "tensordict_store"
        if found is not None and isinstance(found, StoreDescription) != (layout == "tensordict_store"):
            raise DatasetExistsError(
                f"{destination.url.name!r} exists at {destination.address} in the other layout than {layout}; choose "
                f"another name"
            )
        if layout == "records":
            return _to_records(copying, destination, overwrite=overwrite, chunk_bytes=chunk_bytes, progress=progress)
        copying.schema.require_dense("the layout tensordict_store (unlike records: layout='records')")
        return _to_store(copying, destination, overwrite=overwrite, progress=progress)
    finally:
        origin.close()
        destination.close()


class _Source:
    """What is copied, in batches."""

    def __init__(
        self,
        server: Server,
        description: Description,
        fields: Sequence[str | tuple[str, ...]] | None,
        *,
        allow_pickle: bool,
    ) -> None:
        self.server, self.description = server, description
        dense, others = select_fields(description, fields)
        for leaf in others:
            if leaf.kind == "ragged":
                raise SchemaError(
                    f"the rows of field {format_key(leaf.key)} differ in shape, which only a lazy stack can hold; pad "
                    f"them, or leave the field out with fields="
                )
        # What is stacked along a later dim becomes a field like any other.
        stacked = [leaf for leaf in others if leaf.kind == "stacked"]
        self._stacked = extra_fields(server, description, stacked, allow_pickle=False)
        values = [leaf for leaf in others if leaf.kind != "stacked"]
        self._values = extra_fields(server, description, values, allow_pickle=allow_pickle)
        self._reader = _reader(server, description, dense)
        self.schema = _schema(description, dense, stacked)
        self.rows = description.rows
        row_bytes = sum(field.nbytes for field in self.schema.fields.values()) + self._reader.value_bytes
        self._batch_rows = max(1, _BATCH_BYTES // max(row_bytes, 1))

    @property
    def tensorclass(self) -> str:
        """The path of its class, or empty."""
        description = self.description
        return description.tensorclass if isinstance(description, StoreDescription) else description.schema.root.type

    @property
    def unbatched(self) -> bool:
        """Whether its one row has no batch dims."""
        description = self.description
        return description.unbatched if isinstance(description, Manifest) else not description.batch_size

    def row_numbers(self) -> Iterator[Rows]:
        """Of the batches."""
        for start in range(0, max(self.rows, 1), self._batch_rows):
            yield np.arange(start, min(start + self._batch_rows, self.rows), dtype=np.int64)

    def batches(self, advance: Callable[[int], None]) -> Iterator[TensorDictBase]:
        """All rows in order; one batch at least, which may be empty."""
        for rows in self.row_numbers():
            batch = self._reader.read(rows)
            yield batch if self._stacked is None else self._stacked.add(batch, rows)
            advance(len(rows))

    def values(self) -> dict[Key, tuple[bool, Any]]:
        """The non-tensor fields: whether each row has a value of its own, and these or else the one value.

        Raises:
            SchemaError: a value that JSON cannot hold.
        """
        if self._values is None:
            return {}
        found = self._values.values(np.arange(self.rows, dtype=np.int64))
        for key in (leaf.key for leaf in self._values.leaves if leaf.kind == "pickle"):
            value = found[key][1]
            try:
                same = json.loads(json.dumps(value)) == value
            except (TypeError, ValueError):
                same = False
            if not same:
                raise SchemaError(
                    f"field {format_key(key)} was pickled and holds {type(value).__name__} values, which JSON cannot "
                    f"hold; leave it out with fields="
                )
        return found

    def compare(self, server: Server, copy: Description, title: str, progress: bool | None) -> None:
        """Read both and compare every byte.

        Raises:
            DataLossError: they differ.
        """
        fields, others = select_fields(copy, None)
        theirs = _reader(server, copy, fields)
        extras = extra_fields(server, copy, others, allow_pickle=False)
        with progress_bar(f"verifying {title}", self.rows, progress) as advance:
            for batch, rows in zip(self.batches(advance), self.row_numbers(), strict=True):
                other = theirs.read(rows)
                for key, field in self.schema.fields.items():
                    if _content(batch, field) != _content(other, field):
                        raise _differs(title, key, f"in rows {rows[0]} to {rows[-1]}")
        mine = self.values()
        found = {} if extras is None else extras.values(np.arange(self.rows, dtype=np.int64))
        for key, value in mine.items():
            if json.dumps(found.get(key)) != json.dumps(value):  # as texts: a NaN is equal to itself then
                raise _differs(title, key, "in its values")


def _content(batch: TensorDictBase, field: Field) -> object:
    """Every byte of a field, and of values of variable length also whose each is."""
    value = batch.get(field.key)
    if field.varying is None:
        return tensor_bytes(value)
    encoded = encode_rows(value, field.varying)
    return bytes(encoded.data), encoded.lengths.tolist()


def _schema(description: Description, dense: Sequence[Field], stacked: Sequence[Extra]) -> Schema:
    """Of the copy, with the groups as they are in the source: what of them counts is the fields."""
    schema, kept = description.schema, {field.key for field in dense}
    groups = [
        replace(group, fields=tuple(field for field in group.fields if field.key in kept)) for group in schema.groups
    ]
    if isinstance(description, StoreDescription):
        groups += [group_of(leaf, description.batch_size) for leaf in stacked if isinstance(leaf, StoredLeaf)]
    return replace(schema, groups=tuple(groups))


def _differs(title: str, key: Key, where: str) -> DataLossError:
    return DataLossError(
        f"the copy of {title} differs from the source in field {format_key(key)}, {where}: the source was written to "
        f"meanwhile. Nothing was published; convert it again"
    )


def _reader(server: Server, description: Description, fields: Sequence[Field]) -> RowReader:
    return RowReader(server, description, fields, ReadOptions(), CostModel())


def _to_records(
    source: _Source, server: Server, *, overwrite: bool, chunk_bytes: int | None, progress: bool | None
) -> Manifest:
    title = server.url.name

    def complete(manifest: Manifest) -> Manifest:
        values = write_values(server, manifest, source.values())
        try:
            root = replace(manifest.schema.root, type=source.tensorclass)
            nodes = (root, *(node for node in manifest.schema.nodes if node.key))
            whole = replace(
                manifest,
                schema=replace(manifest.schema, nodes=nodes),
                values=values,
                unbatched=source.unbatched,
                device=source.description.device,
            )
            source.compare(server, whole, title, progress)
        except BaseException:
            keys = [manifest.value_key(value) for value in values]
            with suppress(TDDatapipesError):
                server.call(f"taking back {title!r}", lambda client: unlink_keys(client, keys))
            raise
        return whole

    with progress_bar(f"converting {source.description.name}", source.rows, progress) as advance:
        batches = source.batches(advance)
        return write_rows(
            server,
            batches,
            overwrite=overwrite,
            chunk_bytes=chunk_bytes,
            progress=False,
            complete=complete,
            like=source.schema,
        )


def _to_store(source: _Source, server: Server, *, overwrite: bool, progress: bool | None) -> StoreDescription:
    batch_size = () if source.unbatched else (source.rows, *source.schema.root.batch_shape)
    values = {key: ("json_array" if per_row else "json", value) for key, (per_row, value) in source.values().items()}
    name, device = server.url.name, source.description.device
    writer = StoreWriter(server, name, source.schema, batch_size, device=device, tensorclass=source.tensorclass)
    try:
        with progress_bar(f"converting {source.description.name}", source.rows, progress) as advance:
            for batch in source.batches(advance):
                writer.add(batch)
        writer.add_values(values)
        source.compare(server, writer.staged, name, progress)
        published = writer.publish(overwrite=overwrite)
    except BaseException:
        writer.undo()
        raise
    persist(server)
    return published
