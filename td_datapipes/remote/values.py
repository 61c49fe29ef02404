"""Non-tensor data as a server keeps it: JSON, one value for all rows or one a row. Pure: no I/O."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tensordict import NonTensorData, NonTensorStack, is_non_tensor

from td_datapipes.errors import SchemaError
from td_datapipes.schema import Key, format_key

__all__ = ["OneValue", "RowValues", "encode_value", "plain_values"]


@dataclass(frozen=True)
class OneValue:
    """A value that all rows share."""

    value: Any


@dataclass(frozen=True)
class RowValues:
    """One value a row."""

    values: tuple[Any, ...]


def plain_values(key: Key, entry: Any, num_rows: int | None) -> OneValue | RowValues:
    """What is kept of a non-tensor entry.

    Args:
        key: for messages.
        entry: ``NonTensorData``, ``NonTensorStack``, or any other value.
        num_rows: the rows of what holds it; None where it has no batch dims.

    Raises:
        SchemaError: JSON cannot hold it.
    """
    if isinstance(entry, NonTensorData):
        made: OneValue | RowValues = OneValue(entry.data)
    elif isinstance(entry, NonTensorStack) or is_non_tensor(entry):
        values = entry.tolist()
        per_row = isinstance(values, list) and len(values) == num_rows
        made = RowValues(tuple(values)) if per_row else OneValue(values)
    else:
        made = OneValue(entry)
    for value in made.values if isinstance(made, RowValues) else (made.value,):
        encode_value(key, value)
    return made


def encode_value(key: Key, value: Any) -> str:
    """A value as JSON that reads back as the same.

    Raises:
        SchemaError: JSON cannot hold it.
    """
    try:
        text = json.dumps(value)
        if json.loads(text) == value:
            return text
    except (TypeError, ValueError):
        pass
    raise SchemaError(
        f"the value of {format_key(key)} is a {type(value).__name__} that JSON cannot hold, and nothing is pickled to "
        f"a server: keep it elsewhere, or store what it is made from"
    )
