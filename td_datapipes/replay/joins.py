"""What joins rows to trajectories: which fields, and what the server is told of them beside the records. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from td_datapipes.errors import SchemaError
from td_datapipes.replay.options import Trajectories
from td_datapipes.schema import Field, Key, Schema, format_key

__all__ = ["JOIN_BYTES", "Joins"]

_JOIN = np.dtype([("step", "<f8"), ("reward", "<f8"), ("flags", "<f8"), ("id", "<i8")])
JOIN_BYTES = _JOIN.itemsize

_ROLES: dict[str, tuple[torch.dtype, ...]] = {
    "id": (torch.int64, torch.int32),
    "step": (torch.int64, torch.int32),
    "reward": (torch.float32, torch.float64),
    "done": (torch.bool, torch.uint8),
    "terminated": (torch.bool, torch.uint8),
}
_FORMATS = {
    torch.int64: "<i8",
    torch.int32: "<i4",
    torch.float32: "<f4",
    torch.float64: "<f8",
    torch.bool: "u1",
    torch.uint8: "u1",
}


class Joins:
    """Reads out of records what joins them.

    Args:
        trajectories: which fields do.
        schema: of the records, their write number included.
        hidden: a field of theirs that is not the user's.

    Raises:
        SchemaError: a field that rows lack, or that cannot join them.
    """

    def __init__(self, trajectories: Trajectories, schema: Schema, hidden: Key) -> None:
        self._fields: dict[str, Field] = {}
        for role, key in trajectories.keys().items():
            field = schema.fields.get(key)
            if field is None:
                known = ", ".join(format_key(name) for name in schema.fields if name != hidden)
                raise SchemaError(
                    f"trajectories.{role} names field {format_key(key)}, which rows lack; they have {known}"
                )
            allowed = _ROLES[role]
            if field.dtype not in allowed or field.nbytes != field.dtype.itemsize:
                one = " or ".join(map(str, allowed))
                raise SchemaError(f"trajectories.{role} needs one value a row of {one}; the field is {field}")
            self._fields[role] = field

    def of(self, records: npt.NDArray[np.uint8]) -> bytes:
        """`JOIN_BYTES` a row: step, reward, 1 where done + 2 where terminated, as doubles, and the trajectory's id.

        Args:
            records: ``[rows, stride]``.
        """
        joins = np.zeros(len(records), dtype=_JOIN)
        for role in ("id", "step", "reward"):
            if role in self._fields:
                joins[role] = self._column(records, role)
        for role, flag in (("done", 1), ("terminated", 2)):
            if role in self._fields:
                joins["flags"] += flag * (self._column(records, role) != 0)
        return joins.tobytes()

    def _column(self, records: npt.NDArray[np.uint8], role: str) -> npt.NDArray[np.generic]:
        field, (rows, stride) = self._fields[role], records.shape
        return np.ndarray((rows,), _FORMATS[field.dtype], records, field.offset_bytes, (stride,))
