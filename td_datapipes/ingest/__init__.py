"""Rows from files and tables into a data set: Parquet, Arrow, Hugging Face, memmap, numpy, safetensors, iterables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from td_datapipes.appender import append_rows
from td_datapipes.catalog import connect, load_manifest
from td_datapipes.formats import FORMATS
from td_datapipes.ingest.columns import ColumnOptions
from td_datapipes.ingest.sources import SourceOptions, open_source
from td_datapipes.manifest import Manifest
from td_datapipes.wire.url import ServerURL
from td_datapipes.writer import find_free, write_source

__all__ = ["FORMATS", "ingest"]

Name = str | tuple[str, ...]


def ingest(
    source: Any,
    url: str | ServerURL,
    *,
    columns: Sequence[Name] | None = None,
    drop: Sequence[Name] = (),
    filters: Any = (),
    fill: Mapping[Name, float | bool] | float | bool | None = None,
    shapes: Mapping[Name, tuple[int, ...]] | None = None,
    file_format: str | None = None,
    same_as: str | None = None,
    append: bool = False,
    overwrite: bool = False,
    resume: bool = True,
    chunk_bytes: int | None = None,
    progress: bool | None = None,
) -> Manifest:
    """Write the rows of a source to a server and publish them as one data set, all or nothing.

    The rows are streamed; only some batches of them are in memory. Where it is interrupted (Ctrl-C, a kill, a server
    that goes away), what is staged stays, and the same call made again on this machine goes on from there, as long as
    the files have not changed. `docs/ingest.md` says which column becomes which field.

    Args:
        source: a path (a file, a directory, or a pattern like ``data/*.parquet``) or several: Parquet, Arrow IPC and
            Feather, a data set saved by Hugging Face's ``datasets``, a memory-mapped TensorDict, ``.npy``, ``.npz``,
            safetensors. Or what is in memory: a pyarrow Table, RecordBatch, RecordBatchReader or Dataset, a TensorDict,
            any iterable of TensorDicts or of dicts of arrays.
        url: server and name, as in ``redis://localhost:6379/0#name``.
        columns: only these; a nested one is ``("n", "y")`` or ``"n.y"``.
        drop: none of these.
        filters: only rows that meet these: texts like ``"age >= 18"``, or a pyarrow expression.
        fill: what stands for null, by column, or one value for all columns it fits. Without, a null is an error.
        shapes: the shape all rows of a list or binary column have, where the type does not say it.
        file_format: one of `FORMATS`, for files whose names do not say it.
        same_as: for an iterable: a text that promises the same rows again whenever it is given, which makes it
            resumable. The rows that were staged are then skipped, not written anew.
        append: add the rows to the published data set as its next generation, without copying what it has.
        overwrite: publish in place of what the name stands for now.
        resume: False begins anew even where an interrupted write could be taken up.
        chunk_bytes: longest stretch of records in one server string; see `write_dataset`.
        progress: show a progress bar; by default on a terminal only.

    Returns:
        What was published.

    Raises:
        SourceError: the source is missing, damaged, or of no known kind.
        SchemaError: a column that cannot be stored (named, with what can be), a null without a fill (named, with its
            row), files with different columns, or rows that do not fit the data set they are appended to.
        ConfigurationError: options that do not fit each other or the source.
        DatasetExistsError: the name is taken and neither `append` nor `overwrite` is set.
        DatasetNotFoundError: nothing to append to.
        ServerFullError, ServerUnavailableError, AuthenticationError: what the server said.
            Nothing is published in any of these cases.
    """
    by_column: dict[Name | None, float | bool] = {}
    if isinstance(fill, Mapping):
        by_column.update((name, value) for name, value in fill.items())
    elif fill is not None:
        by_column[None] = fill
    options = SourceOptions(
        columns=ColumnOptions(columns=columns, drop=drop, fill=by_column, shapes=dict(shapes or {})),
        filters=filters,
        file_format=file_format,
        same_as=same_as,
    )
    server = connect(url)
    try:
        if append:
            load_manifest(server, server.url.name)
            rows = open_source(source, options)
            return append_rows(
                server, rows.num_rows, rows.blocks(0), complete=False, wait_seconds=0.0, progress=progress
            )
        found = find_free(server, overwrite=overwrite)
        rows = open_source(source, options)
        return write_source(server, rows, found, chunk_bytes=chunk_bytes, progress=progress, resume=resume)
    finally:
        server.close()
