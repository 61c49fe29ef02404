"""A data set into files: Parquet, safetensors, or a memory-mapped TensorDict. `ingest` reads them back, bit for bit.

Files appear under their name when they are whole, in one step. What a format has no type for (bfloat16 in Parquet,
nested nodes in safetensors) is kept as plain bytes beside a description, which `ingest` reads and others may ignore.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tensordict import TensorDict

from td_datapipes.arrow_rows import ArrowRows
from td_datapipes.datasets import RedisTDDataset
from td_datapipes.errors import ConfigurationError, DestinationError, TDDatapipesError
from td_datapipes.formats import EXPORT_FORMATS
from td_datapipes.ingest.columns import METADATA_KEY
from td_datapipes.ingest.safetensors_files import SAFETENSORS_DTYPES
from td_datapipes.progress import progress_bar
from td_datapipes.schema import Field, Key, Schema, dtype_name, new_tensordict, schema_of
from td_datapipes.varying import Varying

__all__ = ["export"]

BATCH_BYTES = 32 << 20
MAX_BATCH_ROWS = 131_072
_NUMPY_NAMES = frozenset(
    ("bool", "float16", "float32", "float64", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
)
_SAFETENSORS_NAMES = {name: code for code, name in SAFETENSORS_DTYPES.items()}


def export(
    url: str,
    destination: str | Path,
    *,
    fields: Sequence[str | tuple[str, ...]] | None = None,
    file_format: str | None = None,
    overwrite: bool = False,
    progress: bool | None = None,
) -> int:
    """Write the rows of a data set to a file or a folder, batch by batch.

    Args:
        url: server and name.
        destination: ``NAME.parquet``, ``NAME.safetensors``, or a folder for a memory-mapped TensorDict
            (``TensorDict.load_memmap``).
        fields: only these.
        file_format: one of `EXPORT_FORMATS`; by default what the destination's name says.
        overwrite: replace what is there; until the new one is whole, it stays.
        progress: show a progress bar; by default on a terminal only.

    Returns:
        How many rows were written.

    Raises:
        DestinationError: something is there, or it cannot be written.
        ConfigurationError: an unknown format.
        SchemaError: a field of variable length, which only Parquet has room for.
        DatasetNotFoundError, ServerUnavailableError, DataLossError: from reading; nothing is at the destination then.
    """
    target = Path(destination).expanduser()
    name = file_format or {".parquet": "parquet", ".pq": "parquet", ".safetensors": "safetensors"}.get(
        target.suffix.lower(), "memmap"
    )
    if name not in EXPORT_FORMATS:
        raise ConfigurationError(f"the format must be one of {', '.join(EXPORT_FORMATS)}, got {name!r}")
    if os.path.lexists(target) and not overwrite:
        raise DestinationError(f"{target} exists; pass overwrite=True (--overwrite) to replace it, or another name")
    if not target.parent.is_dir():
        raise DestinationError(f"{target} cannot be written: the folder {target.parent} does not exist; make it first")
    with RedisTDDataset(url, fields=fields, prefetch_bytes=0, strings="arrow") as dataset:
        try:
            return _export(dataset, name, target, progress)
        except OSError as error:
            if isinstance(error, TDDatapipesError):
                raise  # the server's: some of them are OSErrors too
            raise DestinationError(f"{target} cannot be written: {error}") from error


def _export(dataset: RedisTDDataset, name: str, target: Path, progress: bool | None) -> int:
    rows = len(dataset)
    schema = _chosen(dataset)
    step = max(1, min(MAX_BATCH_ROWS, BATCH_BYTES // max(dataset.row_bytes, 1)))
    # Beside the target, so that it is on the same disk and can be renamed.
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    writers: dict[str, Callable[[Path, Schema, int], _Writer]]
    writers = {"parquet": _ParquetWriter, "safetensors": _SafetensorsWriter, "memmap": _MemmapWriter}
    writer: _Writer | None = None
    try:
        writer = writers[name](partial, schema, rows)
        with progress_bar(f"exporting {dataset.name}", rows, progress) as advance:
            for start in range(0, rows, step):
                batch = dataset[start : min(start + step, rows)]
                writer.write(start, batch)
                advance(len(batch))
        writer.close()
        _replace(partial, target)
    except BaseException:
        if writer is not None:
            with suppress(OSError, pa.ArrowException):
                writer.close()
        _remove(partial)
        raise
    return rows


def _chosen(dataset: RedisTDDataset) -> Schema:
    """The schema of what is read: all of it, or the wanted fields and the nodes they are in."""
    kept = dataset.schema.select(dataset.fields)
    sample = dataset[:0]
    nodes = [node for node in dataset.schema.nodes if not node.key or sample.get(node.key, None) is not None]
    groups = tuple(
        type(group).pack(field for field in group.fields if field in kept) for group in dataset.schema.groups
    )
    return Schema(groups=groups, nodes=tuple(nodes))


def _replace(partial: Path, target: Path) -> None:
    if target.is_dir() and not target.is_symlink():
        # A folder that is not empty cannot be renamed over: put it aside for the moment between the two.
        aside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.replaced")
        target.rename(aside)
        partial.rename(target)
        _remove(aside)
    else:
        partial.replace(target)


def _remove(path: Path) -> None:
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _describe(schema: Schema, **more: Any) -> str:
    return json.dumps(
        {
            "fields": [field.to_json() for field in schema.fields.values()],
            "nodes": [node.to_json() for node in schema.nodes],
            **more,
        }
    )


class _Writer(ABC):
    """Writes the batches of a data set to a file or a folder.

    Args:
        path: where; nothing is there yet.
        schema: what a row is.
        rows: how many there will be.
    """

    def __init__(self, path: Path, schema: Schema, rows: int) -> None:
        self._path, self._schema, self._rows = path, schema, rows

    @abstractmethod
    def write(self, start: int, batch: TensorDict) -> None:
        """Rows from `start` on. Batches come in order, without gaps."""

    @abstractmethod
    def close(self) -> None:
        """Everything is written."""


class _ParquetWriter(_Writer):
    """One column a field, structs for nested nodes; a tensor's rows are fixed-size lists, one in another.

    Those of variable length are lists of their items; strings and bytes are themselves.
    """

    def __init__(self, path: Path, schema: Schema, rows: int) -> None:
        super().__init__(path, schema, rows)
        # A column needs bytes: fields without any, and nodes without fields, are in the description alone.
        self._tree = _tree([field for field in schema.fields.values() if field.nbytes])
        if not self._tree:
            raise ConfigurationError("no field has any bytes, so Parquet would have no column; export to safetensors")
        empty = [str(field) for field in schema.varying_fields if field.varying and not field.varying.item_bytes]
        if empty:
            raise ConfigurationError(f"field {empty[0]} has items without any bytes, which Parquet has no type for")
        columns = [_arrow_field(name, child) for name, child in self._tree.items()]
        self._arrow = pa.schema(columns, metadata={METADATA_KEY: _describe(schema, rows=rows).encode()})
        # Dictionaries take all NaNs for one, and so lose bits.
        self._file = pq.ParquetWriter(path, self._arrow, use_dictionary=False, compression="zstd")

    def write(self, start: int, batch: TensorDict) -> None:
        del start  # in order
        arrays = [_arrow_array(child, batch) for child in self._tree.values()]
        self._file.write_batch(pa.RecordBatch.from_arrays(arrays, schema=self._arrow))

    def close(self) -> None:
        self._file.close()


Tree = dict[str, "Tree | Field"]


def _tree(fields: Sequence[Field]) -> Tree:
    root: Tree = {}
    for field in fields:
        node = root
        for name in field.key[:-1]:
            below = node.setdefault(name, {})
            node = below if isinstance(below, dict) else {}
        node[field.key[-1]] = field
    return root


def _item_name(field: Field) -> str:
    """The numpy dtype that has the field's bits."""
    name = dtype_name(field.dtype)
    return name if name in _NUMPY_NAMES else f"uint{8 * min(field.dtype.itemsize, 8)}"


def _item_shape(field: Field) -> tuple[int, ...]:
    """Its shape in such items: a complex128 is two."""
    extra = field.dtype.itemsize // np.dtype(_item_name(field)).itemsize
    return field.shape if extra == 1 else (*field.shape, extra)


def _arrow_field(name: str, child: Tree | Field) -> Any:
    varying = child.varying if isinstance(child, Field) else None
    return pa.field(name, _arrow_type(child), nullable=varying is not None and varying.kind != "tensor")


def _items_of(field: Field) -> Field:
    """Of a tensor of variable length: its items as a field of their own."""
    varying = cast(Varying, field.varying)
    return Field(key=field.key, dtype=varying.dtype, shape=varying.shape, offset_bytes=0)


def _arrow_type(child: Tree | Field) -> Any:
    if isinstance(child, dict):
        return pa.struct([_arrow_field(name, below) for name, below in child.items()])
    if child.varying is not None:
        if child.varying.kind == "tensor":
            return pa.large_list(pa.field("item", _arrow_type(_items_of(child)), nullable=False))
        return pa.large_binary() if child.varying.kind == "bytes" else pa.large_string()
    found = pa.from_numpy_dtype(np.dtype(_item_name(child)))
    for size in reversed(_item_shape(child)):
        found = pa.list_(pa.field("item", found, nullable=False), size)
    return found


def _arrow_array(child: Tree | Field, batch: TensorDict) -> Any:
    if isinstance(child, dict):
        arrays = [_arrow_array(below, batch) for below in child.values()]
        return pa.StructArray.from_arrays(arrays, fields=list(_arrow_type(child)))
    if child.varying is not None:
        return _varying_array(child, batch.get(child.key))
    return _items_array(batch.get(child.key), child)


def _varying_array(field: Field, values: Any) -> Any:
    if isinstance(values, ArrowRows):
        return values.to_arrow()
    offsets = values.offsets()
    items = _items_array(values.values()[int(offsets[0]) : int(offsets[-1])], _items_of(field))
    return pa.LargeListArray.from_arrays(pa.array((offsets - offsets[0]).numpy()), items, type=_arrow_type(field))


def _items_array(tensor: torch.Tensor, field: Field) -> Any:
    array = pa.array(_items(tensor, field))
    shape = _item_shape(field)
    for dim in reversed(range(len(shape))):
        item = pa.field("item", array.type, nullable=False)
        array = pa.FixedSizeListArray.from_arrays(array, type=pa.list_(item, shape[dim]))
    return array


def _items(tensor: torch.Tensor, field: Field) -> npt.NDArray[Any]:
    """The elements, one after the other, as numpy's."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    raw = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy()
    return raw.view(_item_name(field))


class _SafetensorsWriter(_Writer):
    """One tensor a field. The file has its full length from the start, and is filled field by field, batch by batch."""

    def __init__(self, path: Path, schema: Schema, rows: int) -> None:
        super().__init__(path, schema, rows)
        schema.require_dense("a safetensors file (unlike Parquet)")
        names = _unique_names(list(schema.fields))
        header: dict[str, Any] = {}
        self._starts: dict[Key, int] = {}
        end = 0
        # The widest items first, so that all are aligned.
        for field in sorted(schema.fields.values(), key=lambda item: -item.dtype.itemsize):
            code = _SAFETENSORS_NAMES.get(dtype_name(field.dtype))
            shape = [rows, *field.shape] if code else [rows, *field.shape, field.dtype.itemsize]
            start, end = end, end + rows * field.nbytes
            header[names[field.key]] = {"dtype": code or "U8", "shape": shape, "data_offsets": [start, end]}
            self._starts[field.key] = start
        pairs = [[list(key), name] for key, name in names.items()]
        header = {"__metadata__": {METADATA_KEY.decode(): _describe(schema, rows=rows, names=pairs)}, **header}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._base = 8 + len(text)
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._file.truncate(self._base + end)

    def write(self, start: int, batch: TensorDict) -> None:
        for key, field in self._schema.fields.items():
            if field.nbytes:
                self._file.seek(self._base + self._starts[key] + start * field.nbytes)
                self._file.write(_items(batch.get(key), field).data)

    def close(self) -> None:
        self._file.close()


def _unique_names(keys: Sequence[Key]) -> Mapping[Key, str]:
    """Dotted names; where two keys would share one, the later gets a number."""
    names: dict[Key, str] = {}
    for key in keys:
        name = plain = ".".join(key)
        number = 2
        while name in names.values():
            name, number = f"{plain}~{number}", number + 1
        names[key] = name
    return names


class _MemmapWriter(_Writer):
    """What ``TensorDict.load_memmap`` loads. The files have their full length from the start."""

    def __init__(self, path: Path, schema: Schema, rows: int) -> None:
        super().__init__(path, schema, rows)
        schema.require_dense("a memory-mapped TensorDict (unlike Parquet)")
        # Of one row each, so that no memory is needed for what will be on the disk.
        values = {
            field.key: torch.zeros((1, *field.shape), dtype=field.dtype).expand(rows, *field.shape)
            for field in schema.fields.values()
        }
        new_tensordict(values, schema.nodes, rows).memmap_like(path)
        self._mapped = _loaded(path, schema)

    def write(self, start: int, batch: TensorDict) -> None:
        stop = start + len(batch)
        for key in self._schema.fields:
            self._mapped.get(key)[start:stop].copy_(batch.get(key))

    def close(self) -> None:
        del self._mapped


def _loaded(path: Path, schema: Schema) -> TensorDict:
    """What has just been made, as tensordict loads it: it makes files of dtypes that it cannot load again."""
    try:
        mapped: TensorDict = TensorDict.load_memmap(path)
        found = schema_of(mapped)
        difference = schema.difference(found)
    except (LookupError, RuntimeError, ValueError) as error:
        unknown = [str(field) for field in schema.fields.values() if str(field.dtype) in str(error)]
        difference = ", ".join(unknown) or f"{error!r}"
    if difference:
        raise ConfigurationError(
            f"tensordict does not load such a memory-mapped TensorDict again ({difference}); leave the field out, or "
            "export to Parquet or safetensors"
        )
    return mapped
