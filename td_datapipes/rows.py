"""What a user may index a data set with -> row numbers. Pure: no I/O."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from td_datapipes.errors import RowIndexError
from td_datapipes.read_spec import Rows

__all__ = ["resolve_index"]


def resolve_index(index: Any, num_rows: int, name: str) -> tuple[Rows, tuple[int, ...]]:
    """Row numbers ``[n]`` and the shape they were asked for in (``()`` for one row).

    Args:
        index: an int, a slice, a range, a (nested) list, numpy array or tensor of ints, or a bool mask ``[rows]``.
        num_rows: rows of the data set.
        name: of the data set, for messages.

    Raises:
        RowIndexError: a row outside the data set, a mask of another length, or an index that selects no rows.
    """
    if isinstance(index, slice):
        rows = np.arange(*_bounds(index, num_rows, name), dtype=np.int64)
        return rows, rows.shape
    array = _as_array(index, name)
    if array.dtype == bool:
        if array.shape != (num_rows,):
            raise RowIndexError(f"a mask has one entry a row: {num_rows} for {name!r}, not shape {array.shape}")
        rows = np.nonzero(array)[0]
        return rows, rows.shape
    rows = array.reshape(-1).astype(np.int64, copy=False)
    if len(rows) and int(rows.view(np.uint64).max()) >= num_rows:  # a negative one is larger than any row then
        rows = _wrap_negative(rows, num_rows, name)
    return rows, array.shape


def _bounds(index: slice, num_rows: int, name: str) -> tuple[int, int, int]:
    try:
        return index.indices(num_rows)
    except (TypeError, ValueError) as error:
        raise RowIndexError(f"{name!r} cannot be cut by {index!r}: {error}") from None


def _wrap_negative(rows: Rows, num_rows: int, name: str) -> Rows:
    wrapped = np.where(rows < 0, rows + num_rows, rows)
    bad = rows[(wrapped < 0) | (wrapped >= num_rows)]
    if len(bad):
        raise RowIndexError(
            f"row {int(bad[0])} is not in [{-num_rows}, {num_rows}) of {name!r}; open it again to see rows "
            f"appended since"
        )
    return wrapped


def _as_array(index: Any, name: str) -> npt.NDArray[Any]:
    if isinstance(index, tuple) or index is None or index is Ellipsis:
        raise RowIndexError(
            f"{name!r} is indexed by rows alone, not by {index!r}; index the batch it gives for the other dims"
        )
    try:
        array = index.detach().cpu().numpy() if isinstance(index, torch.Tensor) else np.asarray(index)
    except (ValueError, TypeError, OverflowError, RuntimeError):  # ragged, or a dtype numpy lacks
        array = np.asarray(None)
    if array.size == 0 and array.dtype != bool:
        return array.astype(np.int64)
    if isinstance(index, int) and array.dtype.kind == "O":  # too large for any integer of numpy's
        raise RowIndexError(f"row {index} is not in [0, 2**63)")
    if array.dtype.kind not in "iub":
        raise RowIndexError(f"{name!r} is indexed by row numbers, not by {type(index).__name__}: {str(index)[:80]}")
    if array.dtype == np.uint64 and int(array.max()) > np.iinfo(np.int64).max:
        raise RowIndexError(f"row {int(array.max())} is not in [0, 2**63)")
    return array
