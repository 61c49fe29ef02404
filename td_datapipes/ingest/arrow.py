"""Arrow sources: Parquet, Arrow IPC and Feather files and directories, tables, Hugging Face data sets on disk.

A source is made of parts (files, or a table) that are read one after the other, batch by batch. All parts have the
same columns of the same types.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from td_datapipes.errors import ConfigurationError, SchemaError, SourceError
from td_datapipes.ingest.columns import ArrowBlock, ColumnOptions, RowPlan, plan_columns
from td_datapipes.ingest.fingerprints import fingerprint_of
from td_datapipes.schema import Schema

__all__ = ["ArrowSource", "Part", "dataset_parts", "parse_filter", "stream_parts", "table_parts"]

BATCH_BYTES = 8 << 20
MAX_BATCH_ROWS = 65536
VARYING_BYTES = 4 << 10
"""What a value of variable length is taken for, as long as nobody has read it: decides how many rows make a batch."""
_MISSING_COLUMN = re.compile(r"No match for FieldRef\.Name\((.*?)\)")
_OPERATORS = ("==", "!=", "<=", ">=", "<", ">", "=")


class Part(ABC):
    """One file, or one table: rows of one schema.

    Attributes:
        label: what it is, for messages.
    """

    label: str

    @abstractmethod
    def schema(self) -> Any:
        """Its Arrow schema."""

    @abstractmethod
    def count_rows(self, expression: Any) -> int | None:
        """How many rows pass the filter; None where only reading would tell."""

    @abstractmethod
    def batches(self, names: Sequence[str], expression: Any, start_row: int, batch_rows: int) -> Iterator[Any]:
        """Record batches of those columns, from that row of those that pass the filter on."""


class ArrowSource:
    """The rows of some parts, as a `RowSource`.

    Args:
        parts: at least one.
        options: which columns, and how.
        expression: only the rows for which this is true.
        files: what the rows come from, where they can be had again; None where they cannot.
        label: what it is, for messages.

    Raises:
        SchemaError: a column that cannot be stored, or parts that differ; the message names the column and the part.
        SourceError: a part that cannot be read.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        options: ColumnOptions,
        expression: Any,
        files: Sequence[Path] | None,
        label: str,
    ) -> None:
        self._parts, self._expression, self.label = parts, expression, label
        with readable(parts[0].label):
            first = parts[0].schema()
        self.plan: RowPlan = plan_columns(first, options, label)
        for part in parts[1:]:
            with readable(part.label):
                found = part.schema()
            _check_same(first, found, self.plan, parts[0].label, part.label)
        self.fingerprint = None if files is None else fingerprint_of(files, options, expression)
        self.num_rows = self._count()

    @property
    def schema(self) -> Schema:
        """What a row is."""
        return self.plan.schema

    def _count(self) -> int | None:
        if self._expression is not None:
            return None
        total = 0
        for part in self._parts:
            with readable(part.label):
                rows = part.count_rows(None)
            if rows is None:
                return None
            total += rows
        return total

    def blocks(self, start_row: int) -> Iterator[ArrowBlock]:
        """See `RowSource`."""
        row_bytes = sum(column.nbytes for column in self.schema.fields.values())
        row_bytes += VARYING_BYTES * len(self.schema.varying_fields)
        batch_rows = max(1, min(MAX_BATCH_ROWS, BATCH_BYTES // max(row_bytes, 1)))
        done = 0
        for part in self._parts:
            skip = start_row - done
            if skip > 0:
                with readable(part.label):
                    rows = part.count_rows(self._expression)
                if rows is not None and rows <= skip:
                    done += rows
                    continue
            skip = max(skip, 0)
            row = skip
            for batch in self._read(part, skip, batch_rows):
                yield ArrowBlock(batch, self.plan, row, part.label)
                row += batch.num_rows
            done += row

    def _read(self, part: Part, skip: int, batch_rows: int) -> Iterator[Any]:
        with readable(part.label):
            yield from part.batches(self.plan.names, self._expression, skip, batch_rows)


@contextmanager
def readable(label: str) -> Iterator[None]:
    """Gives what pyarrow and the system raise while a part is read its name."""
    try:
        yield
    except (pa.ArrowException, OSError, EOFError) as error:
        missing = _MISSING_COLUMN.search(str(error))
        if missing is not None:
            raise ConfigurationError(f"the filter names {missing[1]!r}, which {label} does not have") from error
        if isinstance(error, pa.ArrowNotImplementedError):
            raise SourceError(f"pyarrow {pa.__version__} cannot read {label}: {_first_line(error)}") from error
        raise SourceError(f"{label} cannot be read: {_first_line(error)}; is it complete?") from error


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:300]


def _check_same(first: Any, found: Any, plan: RowPlan, first_label: str, label: str) -> None:
    for name in plan.names:
        number = found.names.count(name)
        if number != 1:
            raise SchemaError(
                f"column {name!r} is in {first_label}, but {'twice' if number else 'not'} in {label}: files that are "
                f"read together have the same columns. Name the files one by one, or leave it out: --drop {name}"
            )
        mine, theirs = first.field(name).type, found.field(name).type
        if mine != theirs:
            raise SchemaError(
                f"column {name!r} is {mine} in {first_label} and {theirs} in {label}: files that are read together "
                f"have the same columns. Convert one of them, or leave it out: --drop {name}"
            )


def _skip_rows(batches: Iterator[Any], start_row: int) -> Iterator[Any]:
    for batch in batches:
        if start_row >= batch.num_rows:
            start_row -= batch.num_rows
            continue
        yield batch.slice(start_row) if start_row else batch
        start_row = 0


class _Fragment(Part):
    """A file of a pyarrow data set."""

    def __init__(self, fragment: Any, whole: Any) -> None:
        self.label = str(getattr(fragment, "path", "") or "a table in memory")
        self._fragment, self._whole = fragment, whole

    def schema(self) -> Any:
        physical = self._fragment.physical_schema
        # What the folders' names say (year=2024/) is no column of any file.
        for name in ds.get_partition_keys(self._fragment.partition_expression):
            physical = physical if name in physical.names else physical.append(self._whole.field(name))
        return physical

    def count_rows(self, expression: Any) -> int | None:
        rows: int = self._fragment.count_rows(filter=expression)
        return rows

    def batches(self, names: Sequence[str], expression: Any, start_row: int, batch_rows: int) -> Iterator[Any]:
        fragment = self._fragment
        if expression is None and start_row and isinstance(fragment, ds.ParquetFileFragment):
            fragment, start_row = _without_leading_row_groups(fragment, start_row)
        # One fragment at a time, and little ahead of what is asked for: what is decoded stays small.
        scanner = fragment.scanner(
            schema=self._whole,
            columns=list(names),
            filter=expression,
            batch_size=batch_rows,
            batch_readahead=2,
            fragment_readahead=1,
        )
        return _skip_rows(scanner.to_batches(), start_row)


def _without_leading_row_groups(fragment: Any, start_row: int) -> tuple[Any, int]:
    sizes = [group.num_rows for group in fragment.row_groups]
    first = 0
    while first < len(sizes) and sizes[first] <= start_row:
        start_row -= sizes[first]
        first += 1
    return fragment.subset(row_group_ids=list(range(first, len(sizes)))), start_row


def dataset_parts(paths: Sequence[Path], file_format: str, label: str) -> tuple[list[Part], list[Path]]:
    """The files of a directory (or those of a list) as parts, and the files.

    Args:
        paths: one directory, whose folders may say more columns (``year=2024/``), or files.
        file_format: ``parquet`` or ``ipc``.
        label: what they are, for messages.
    """
    with readable(label):
        source = str(paths[0]) if len(paths) == 1 else [str(path) for path in paths]
        by_folders = "hive" if paths[0].is_dir() else None
        whole = ds.dataset(source, format=file_format, partitioning=by_folders, exclude_invalid_files=False)
        parts: list[Part] = [_Fragment(fragment, whole.schema) for fragment in whole.get_fragments()]
    if not parts:
        raise SourceError(f"{label} has no {file_format} file in it")
    parts.sort(key=lambda part: part.label)
    return parts, [Path(part.label) for part in parts]


def parts_of_dataset(dataset: Any) -> list[Part]:
    """The fragments of a data set of pyarrow's own."""
    return [_Fragment(fragment, dataset.schema) for fragment in dataset.get_fragments()]


@dataclass
class _Stream(Part):
    """A file of Arrow's streaming format, as Hugging Face's library writes them, mapped into memory."""

    path: Path

    def __post_init__(self) -> None:
        self.label = str(self.path)

    def schema(self) -> Any:
        with pa.memory_map(self.label) as file:
            return pa.ipc.open_stream(file).schema

    def count_rows(self, expression: Any) -> int | None:
        if expression is not None:
            return None
        with pa.memory_map(self.label) as file, pa.ipc.open_stream(file) as reader:
            return sum(int(batch.num_rows) for batch in reader)

    def batches(self, names: Sequence[str], expression: Any, start_row: int, batch_rows: int) -> Iterator[Any]:
        with pa.memory_map(self.label) as file, pa.ipc.open_stream(file) as reader:
            plain = _narrowed(reader, names, expression, batch_rows)
            yield from _skip_rows(plain, start_row)


def _narrowed(batches: Any, names: Sequence[str], expression: Any, batch_rows: int) -> Iterator[Any]:
    for batch in batches:
        for start in range(0, batch.num_rows, batch_rows):
            part = batch.slice(start, batch_rows)
            yield (part if expression is None else part.filter(expression)).select(list(names))


def stream_parts(paths: Sequence[Path]) -> list[Part]:
    """Files of the streaming format as parts."""
    return [_Stream(path=path) for path in paths]


class _Table(Part):
    """A table in memory."""

    label = "the table"

    def __init__(self, table: Any) -> None:
        self._table = table

    def schema(self) -> Any:
        return self._table.schema

    def count_rows(self, expression: Any) -> int | None:
        return None if expression is not None else int(self._table.num_rows)

    def batches(self, names: Sequence[str], expression: Any, start_row: int, batch_rows: int) -> Iterator[Any]:
        batches = self._table.to_batches(max_chunksize=batch_rows)
        return _skip_rows(_narrowed(batches, names, expression, batch_rows), start_row)


class _Reader(Part):
    """Batches that come one after the other, once."""

    label = "the record batch reader"

    def __init__(self, reader: Any) -> None:
        self._reader = reader

    def schema(self) -> Any:
        return self._reader.schema

    def count_rows(self, expression: Any) -> int | None:
        del expression
        return None

    def batches(self, names: Sequence[str], expression: Any, start_row: int, batch_rows: int) -> Iterator[Any]:
        return _skip_rows(_narrowed(self._reader, names, expression, batch_rows), start_row)


def table_parts(data: Any) -> list[Part] | None:
    """What is in memory, as parts; None where it is none of Arrow's."""
    if isinstance(data, pa.RecordBatch):
        return [_Table(pa.Table.from_batches([data]))]
    if isinstance(data, pa.Table):
        return [_Table(data)]
    if isinstance(data, pa.RecordBatchReader):
        return [_Reader(data)]
    if isinstance(data, ds.Dataset):
        return parts_of_dataset(data) or None
    return None


def parse_filter(texts: Sequence[str]) -> Any:
    """Conditions like ``age >= 18``, all of which have to hold, as an expression; None where there is none.

    Raises:
        ConfigurationError: a text that is no column, operator and value.
    """
    expression = None
    for text in texts:
        found = min(
            ((text.find(operator), -len(operator), operator) for operator in _OPERATORS if operator in text),
            default=None,
        )
        name, _, value = text.partition(found[2]) if found else ("", "", "")
        if found is None or not name.strip() or not value.strip():
            raise ConfigurationError(
                f"the filter {text!r} is no condition; write COLUMN OPERATOR VALUE with one of {' '.join(_OPERATORS)}, "
                "as in 'age >= 18'"
            )
        condition = _compare(pc.field(*name.strip().split(".")), found[2], _value(value.strip()))
        expression = condition if expression is None else expression & condition
    return expression


def _value(text: str) -> Any:
    """JSON where it is some (numbers, true, "quoted"), else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _compare(column: Any, operator: str, value: Any) -> Any:
    match operator:
        case "<":
            return column < value
        case "<=":
            return column <= value
        case ">":
            return column > value
        case ">=":
            return column >= value
        case "!=":
            return column != value
    return column == value
