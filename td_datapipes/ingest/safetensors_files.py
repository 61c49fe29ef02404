"""safetensors files as sources of rows. The format is a JSON header and bytes, so its library is not needed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from td_datapipes.errors import SchemaError, SourceError
from td_datapipes.ingest.columns import METADATA_KEY
from td_datapipes.ingest.fingerprints import fingerprint_of
from td_datapipes.ingest.tensors import TensorSource
from td_datapipes.schema import Field, Key, Node, Schema, dtype_from_name, format_key, new_tensordict, schema_of

__all__ = ["SAFETENSORS_DTYPES", "safetensors_source"]

_MAX_HEADER_BYTES = 100 << 20
"""What the safetensors library allows."""
SAFETENSORS_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}


def safetensors_source(path: Path, select: Callable[[TensorDictBase], TensorDictBase]) -> TensorSource:
    """A safetensors file whose tensors all have a row for each row of the others. Mapped into memory, not loaded.

    Raises:
        SourceError: damaged; what its header says is checked before it is believed.
        SchemaError: tensors of several lengths.
    """
    try:
        header, start_bytes, file_bytes = _safetensors_header(path)
        described = (header.pop("__metadata__", None) or {}).get(METADATA_KEY.decode())
        arrays = {name: _checked_entry(name, entry, file_bytes - start_bytes) for name, entry in sorted(header.items())}
        schema, num_rows, names = _safetensors_schema(arrays, described, path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, SchemaError | SourceError):
            raise
        raise SourceError(f"{path} cannot be read as safetensors: {error}; is it complete?") from error
    data = np.memmap(path, np.uint8, mode="r") if file_bytes else np.zeros(0, np.uint8)

    def read(start: int, stop: int) -> TensorDictBase:
        values = {}
        for key, field in schema.fields.items():
            first = start_bytes + (arrays[names[key]][2] if key in names else 0)
            raw = np.array(data[first + start * field.nbytes : first + stop * field.nbytes])
            shape = (stop - start, *field.shape)
            values[key] = (
                torch.from_numpy(raw).view(field.dtype).reshape(shape)
                if raw.size
                else torch.empty(shape, dtype=field.dtype)
            )
        return select(new_tensordict(values, schema.nodes, stop - start))

    chosen = schema_of(read(0, 0))
    return TensorSource(chosen, num_rows, read, fingerprint_of([path], list(chosen.fields)), str(path))


Entry = tuple[torch.dtype, tuple[int, ...], int]
"""dtype, shape, and where it begins behind the header."""


def _safetensors_header(path: Path) -> tuple[dict[str, Any], int, int]:
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if file_bytes < 8 or length > min(_MAX_HEADER_BYTES, file_bytes - 8):
            raise ValueError(f"its header should have {length} bytes, and the file has {file_bytes}")
        header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    return header, 8 + length, file_bytes


def _checked_entry(name: str, entry: Mapping[str, Any], data_bytes: int) -> Entry:
    if entry["dtype"] not in SAFETENSORS_DTYPES:
        raise ValueError(f"tensor {name!r} has dtype {entry['dtype']!r}; known are {', '.join(SAFETENSORS_DTYPES)}")
    dtype, shape = dtype_from_name(SAFETENSORS_DTYPES[entry["dtype"]]), tuple(map(int, entry["shape"]))
    start, stop = map(int, entry["data_offsets"])
    if min(shape, default=0) < 0 or not 0 <= start <= stop <= data_bytes:
        raise ValueError(f"tensor {name!r}, {list(shape)}, should lie at bytes {start} to {stop} of {data_bytes}")
    if math.prod(shape) * dtype.itemsize != stop - start:
        raise ValueError(f"tensor {name!r} of shape {list(shape)} and {dtype} does not have {stop - start} bytes")
    return dtype, shape, start


def _safetensors_schema(
    arrays: Mapping[str, Entry], described: str | None, path: Path
) -> tuple[Schema, int, Mapping[Key, str]]:
    """What a row is, how many there are, and which tensor holds each field."""
    if described is not None:
        data = json.loads(described)
        fields = [Field.from_json(item) for item in data["fields"]]
        nodes = tuple(Node.from_json(node) for node in data["nodes"])
        names = {tuple(key): name for key, name in data["names"]}
        num_rows = int(data["rows"])
        for field in fields:
            if field.nbytes and _entry_bytes(arrays[names[field.key]]) != num_rows * field.nbytes:
                raise ValueError(f"field {format_key(field.key)} has other bytes than its description says")
    else:
        lengths = {name: shape[0] if shape else None for name, (_, shape, _) in arrays.items()}
        if len(set(lengths.values())) != 1 or None in lengths.values():
            shown = ", ".join(f"{name!r}: {list(shape)}" for name, (_, shape, _) in list(arrays.items())[:8])
            raise SchemaError(f"the tensors of {path} are no rows: their leading dims differ ({shown})")
        num_rows = next(length for length in lengths.values() if length is not None)
        nodes, names = (Node(key=()),), {(name,): name for name in arrays}
        fields = [
            Field(key=(name,), dtype=dtype, shape=shape[1:], offset_bytes=0)
            for name, (dtype, shape, _) in arrays.items()
        ]
    values = {field.key: torch.empty((0, *field.shape), dtype=field.dtype) for field in fields}
    return schema_of(new_tensordict(values, nodes, 0)), num_rows, names


def _entry_bytes(entry: Entry) -> int:
    return math.prod(entry[1]) * entry[0].itemsize
