"""`ArrowRows`: strings, bytes or JSON texts of a batch as one pyarrow array. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from tensordict import TensorClass

from td_datapipes.errors import SchemaError
from td_datapipes.varying import NULL, Kind

__all__ = ["ArrowRows", "arrow_rows", "join_arrow_rows"]


class ArrowRows(TensorClass):
    """What a batch has in place of a ``NonTensorStack``: it is indexed, split and reshaped as the batch is.

    Attributes:
        rows: which element of `array` each row is, of the batch's size.
        array: of the batch as it was read; it is not copied when a part of the batch is taken.
    """

    rows: torch.Tensor
    array: Any

    def to_arrow(self) -> pa.Array:
        """The rows as a pyarrow array, ``large_string`` or ``large_binary``; without a copy where it is all of them.

        Raises:
            SchemaError: batches were put together; take the array of each before.
        """
        array = self.array
        if not isinstance(array, pa.Array):
            raise SchemaError(
                "this was put together from several batches, which have an array each: take to_arrow() of each batch "
                "and join them with pyarrow.concat_arrays"
            )
        rows = self.rows.reshape(-1).numpy()
        return array if np.array_equal(rows, np.arange(len(array))) else array.take(pa.array(rows))


def arrow_rows(data: npt.NDArray[np.uint8], lengths: npt.NDArray[np.int64], kind: Kind) -> ArrowRows:
    """Rows whose bytes lie one behind the other; `data` is not copied.

    Args:
        data: the bytes of all rows.
        lengths: of each row, `NULL` where it has no value, ``[n]``.
        kind: what they are; JSON stays text.

    Raises:
        ValueError: bytes that are no Unicode.
    """
    offsets = np.concatenate([[0], np.cumsum(np.maximum(lengths, 0))])
    missing = lengths == NULL
    valid = pa.py_buffer(np.packbits(~missing, bitorder="little")) if missing.any() else None
    kinds = pa.large_binary() if kind == "bytes" else pa.large_string()
    array = pa.Array.from_buffers(kinds, len(lengths), [valid, pa.py_buffer(offsets), pa.py_buffer(data)])
    array.validate(full=True)
    return ArrowRows(rows=torch.arange(len(lengths)), array=array, batch_size=[len(lengths)])


def join_arrow_rows(parts: Sequence[ArrowRows]) -> ArrowRows:
    """Rows of several batches, one batch behind the other, with one array."""
    array = pa.concat_arrays([part.to_arrow() for part in parts])
    return ArrowRows(rows=torch.arange(len(array)), array=array, batch_size=[len(array)])
