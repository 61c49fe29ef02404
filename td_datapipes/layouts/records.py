"""The `records` layout: one record a row and group, its fields side by side. Pure: no I/O."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDictBase

from td_datapipes.errors import SchemaError
from td_datapipes.manifest import SPARE_BYTES, ChunkLayout, Manifest
from td_datapipes.schema import ALIGNMENT_BYTES, Field, Group, Schema, format_key

__all__ = ["RecordsLayout", "pack_records", "row_bytes_view"]


@dataclass(frozen=True, kw_only=True)
class RecordsLayout:
    """A data set as `Manifest` describes it, seen as a `Layout`."""

    manifest: Manifest
    spare_bytes: int = SPARE_BYTES
    alignment_bytes: int = ALIGNMENT_BYTES

    @property
    def schema(self) -> Schema:
        """Fields, groups and nodes."""
        return self.manifest.schema

    @property
    def rows(self) -> int:
        """Rows of the generation."""
        return self.manifest.rows

    @property
    def chunk_layouts(self) -> tuple[ChunkLayout, ...]:
        """How each group is cut into chunks."""
        return self.manifest.layouts

    def chunk_key(self, group: int, chunk: int) -> bytes:
        """The server's key of one chunk."""
        return self.manifest.chunk_key(group, chunk)


def row_bytes_view(tensor: torch.Tensor, nbytes: int) -> npt.NDArray[np.void]:
    """A contiguous tensor as an array of one opaque item a row: numpy copies such items as whole blocks of memory.

    Going through bytes is what makes bfloat16, float8 and complex32 work, which numpy has no dtype for.

    Args:
        tensor: contiguous, ``[rows, ...]``, each row `nbytes` > 0 bytes.
        nbytes: bytes of a row.
    """
    # A contiguous tensor may still have odd strides along dims of size 1, which `view` minds.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
    return np.ndarray((tensor.shape[0],), dtype=f"V{nbytes}", buffer=flat)


def pack_records(td: TensorDictBase, group: Group, out: npt.NDArray[np.uint8]) -> None:
    """Write the rows of a TensorDict into `out` as records.

    Args:
        td: batch size ``[rows, ...]``, on any device.
        group: the group to pack.
        out: ``[rows, group.stride_bytes]`` bytes, contiguous, zeroed where no field lies.

    Raises:
        SchemaError: a field is missing, or has another dtype or shape than the schema's; it names both.
    """
    rows = td.batch_size[0]
    for field in group.fields:
        value = _checked(td, field, rows)
        if field.nbytes == 0 or rows == 0:
            continue
        # A lazily conjugated or negated tensor's memory is not what it stands for.
        plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        source = row_bytes_view(plain, field.nbytes)
        np.ndarray((rows,), source.dtype, out, field.offset_bytes, (group.stride_bytes,))[:] = source


def _checked(td: TensorDictBase, field: Field, rows: int) -> torch.Tensor:
    value = td.get(field.key, None)
    if not isinstance(value, torch.Tensor):
        found = "is missing" if value is None else f"is a {type(value).__name__}"
        raise SchemaError(f"field {format_key(field.key)} {found}; the schema has {field}")
    if value.dtype != field.dtype or tuple(value.shape) != (rows, *field.shape):
        raise SchemaError(
            f"field {format_key(field.key)} has rows of {value.dtype}{list(value.shape[1:])}; the schema has {field}"
        )
    return value
