"""Finds out what a source is, and opens it."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensordict import is_tensor_collection

from td_datapipes.blocks import RowSource
from td_datapipes.errors import ConfigurationError, SourceError
from td_datapipes.formats import FORMATS
from td_datapipes.ingest.arrow import ArrowSource, dataset_parts, parse_filter, stream_parts, table_parts
from td_datapipes.ingest.columns import ColumnOptions
from td_datapipes.ingest.fingerprints import fingerprint_of
from td_datapipes.ingest.numpy_files import numpy_source
from td_datapipes.ingest.safetensors_files import safetensors_source
from td_datapipes.ingest.tensors import IterableSource, memmap_source, selector

__all__ = ["SourceOptions", "open_source"]

_BY_SUFFIX = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".arrows": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
    ".npy": "numpy",
    ".npz": "numpy",
    ".safetensors": "safetensors",
}
_BY_MAGIC = ((b"PAR1", "parquet"), (b"ARROW1", "arrow"), (b"FEA1", "arrow"), (b"\x93NUMPY", "numpy"), (b"PK", "numpy"))
_ARROW_FILE = b"ARROW1"
_FEATHER_1 = b"FEA1"


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """What is read of a source.

    Attributes:
        columns: columns, fill and shapes; only columns and drop matter to sources that are not Arrow's.
        filters: conditions that rows of Arrow sources meet: texts like ``age >= 18``, or a pyarrow expression.
        file_format: one of `FORMATS`, for files whose names do not say it.
        same_as: for an iterable: says that another run with this text gives the same rows again.
    """

    columns: ColumnOptions
    filters: Any = ()
    file_format: str | None = None
    same_as: str | None = None


def open_source(data: Any, options: SourceOptions) -> RowSource:
    """A source of rows.

    Args:
        data: a path (a file, a directory, or a pattern like ``data/*.parquet``) or several; a pyarrow Table,
            RecordBatch, RecordBatchReader or Dataset; a TensorDict; an iterable of TensorDicts or of dicts of arrays.
        options: what of it.

    Raises:
        SourceError: nothing there, damaged, or of no known kind.
        SchemaError: something in it that cannot be stored.
        ConfigurationError: options that do not fit it.
    """
    if options.file_format is not None and options.file_format not in FORMATS:
        raise ConfigurationError(f"the format must be one of {', '.join(FORMATS)}, got {options.file_format!r}")
    expression = _expression(options.filters)
    parts = table_parts(data)
    if parts is not None:
        return ArrowSource(parts, options.columns, expression, None, parts[0].label)
    if isinstance(data, str | Path):
        return _open_paths(_found(str(data)), options, expression, str(data))
    if isinstance(data, Sequence) and data and all(isinstance(item, str | Path) for item in data):
        paths = [path for item in data for path in _found(str(item))]
        label = str(data[0]) if len(data) == 1 else f"the {len(paths)} files"
        return _open_paths(paths, options, expression, label)
    _refuse_arrow_options(options, expression, "iterables and TensorDicts")
    return _open_iterable(data, options)


def _expression(filters: Any) -> Any:
    if isinstance(filters, str):
        return parse_filter([filters])
    return parse_filter(filters) if isinstance(filters, Sequence) else filters


def _open_iterable(data: Any, options: SourceOptions) -> RowSource:
    if is_tensor_collection(data) or isinstance(data, Mapping):
        data, label = [data], "the rows"
    elif isinstance(data, Iterable):
        label = "the iterable"
    else:
        raise SourceError(
            f"rows come from a path, an Arrow table, a TensorDict or an iterable of these, not {type(data).__name__}"
        )
    columns = options.columns
    fingerprint = (
        None if options.same_as is None else fingerprint_of([], options.same_as, columns.columns, columns.drop)
    )
    return IterableSource(data, selector(columns.columns, columns.drop), label, fingerprint)


def _refuse_arrow_options(options: SourceOptions, expression: Any, what: str) -> None:
    columns = options.columns
    if expression is not None or columns.fill or columns.shapes:
        raise ConfigurationError(f"filters, fill and shapes are for Arrow tables and Parquet, not for {what}")


def _found(text: str) -> list[Path]:
    path = Path(text).expanduser()
    if path.exists():
        return [path]
    found = sorted(glob.glob(str(path), recursive=True)) if glob.has_magic(text) else []
    if not found:
        raise SourceError(f"there is no file or directory {text}; is the path right, seen from {Path.cwd()}?")
    return [Path(item) for item in found]


def _open_paths(paths: Sequence[Path], options: SourceOptions, expression: Any, label: str) -> RowSource:
    kinds = {path: options.file_format or _kind(path) for path in paths}
    first = kinds[paths[0]]
    other = next((path for path in paths if kinds[path] != first), None)
    if other is not None:
        raise SourceError(f"{paths[0]} is {first} and {other} is {kinds[other]}; read one kind at a time")
    columns = options.columns
    if first in ("memmap", "numpy", "safetensors"):
        if len(paths) > 1:
            raise SourceError(f"{first} sources are read one at a time; append the others: {paths[1]}")
        _refuse_arrow_options(options, expression, f"{first} files")
        if first == "numpy":
            return numpy_source(paths[0], columns.columns, columns.drop)
        open_file = memmap_source if first == "memmap" else safetensors_source
        return open_file(paths[0], selector(columns.columns, columns.drop))
    if first == "huggingface":
        files = [file for path in paths for file in _huggingface_files(path)]
        return ArrowSource(stream_parts(files), columns, expression, files, label)
    return _open_arrow_files(paths, first, columns, expression, label)


def _open_arrow_files(
    paths: Sequence[Path], kind: str, columns: ColumnOptions, expression: Any, label: str
) -> RowSource:
    if kind == "arrow" and all(path.is_file() for path in paths):
        heads = {path: _head(path) for path in paths}
        old = next((path for path in paths if heads[path].startswith(_FEATHER_1)), None)
        if old is not None:
            raise SourceError(f"{old} is Feather version 1; write it as version 2 (pyarrow.feather.write_feather)")
        if not any(head.startswith(_ARROW_FILE) for head in heads.values()):
            return ArrowSource(stream_parts(paths), columns, expression, paths, label)
    if len(paths) > 1 and any(path.is_dir() for path in paths):
        raise SourceError(f"read one directory at a time, or files: {label}")
    parts, files = dataset_parts(paths, "ipc" if kind == "arrow" else kind, label)
    return ArrowSource(parts, columns, expression, files, label)


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(8)
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error}") from error


def _kind(path: Path) -> str:
    """What a path is, by what lies there."""
    if path.is_dir():
        return _kind_of_folder(path)
    if path.suffix.lower() in _BY_SUFFIX:
        return _BY_SUFFIX[path.suffix.lower()]
    head = _head(path)
    for magic, kind in _BY_MAGIC:
        if head.startswith(magic):
            return kind
    raise SourceError(
        f"{path} is of no known kind; it should end in {', '.join(_BY_SUFFIX)}, or say what it is: "
        f"--format {'|'.join(FORMATS)}"
    )


def _kind_of_folder(folder: Path) -> str:
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        return "huggingface"
    if (folder / "meta.json").is_file():
        return "memmap"
    suffixes = {
        file.suffix.lower() for file in folder.rglob("*") if file.is_file() and not file.name.startswith((".", "_"))
    }
    kinds = sorted({_BY_SUFFIX[suffix] for suffix in suffixes if suffix in _BY_SUFFIX} & {"parquet", "arrow"})
    if len(kinds) == 1:
        return kinds[0]
    if kinds:
        raise SourceError(f"{folder} has files of several kinds ({', '.join(kinds)}); say which: --format {kinds[0]}")
    raise SourceError(
        f"{folder} has no Parquet or Arrow file in it, and is no data set saved by Hugging Face's library and no "
        "memory-mapped TensorDict"
    )


def _huggingface_files(folder: Path) -> list[Path]:
    """The files of a data set as ``Dataset.save_to_disk`` writes it."""
    try:
        if (folder / "dataset_dict.json").is_file():
            splits = json.loads((folder / "dataset_dict.json").read_text())["splits"]
            raise SourceError(f"{folder} has several splits; choose one: {', '.join(str(folder / s) for s in splits)}")
        state = json.loads((folder / "state.json").read_text())
        files = [folder / item["filename"] for item in state["_data_files"]]
        indices = state.get("_indices_files") or state.get("_indices_data_files")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise SourceError(f"{folder} is no data set saved by Hugging Face's library: {error!r}") from error
    if indices:
        raise SourceError(f"{folder} is a selection of rows of a data set; save its flatten_indices() to disk")
    missing = next((file for file in files if not file.is_file()), None)
    if missing is not None or not files:
        raise SourceError(f"{folder} should have the file {missing or 'data-00000-of-00001.arrow'}; is it complete?")
    return files
