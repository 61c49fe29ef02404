"""What a rank's batch is of the global batch, and which part of it the rank keeps. Pure: no process group, no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from tensordict import TensorDictBase
from torch.distributed.tensor import DTensor

from td_datapipes.errors import ConfigurationError, SchemaError
from td_datapipes.mesh import AxisPlacement
from td_datapipes.placement import FieldShare, Placement, RankPlacement
from td_datapipes.schema import Field, Key, Schema, dtype_name, format_key, leaves

__all__ = ["Held", "HeldBatch", "Holding", "Mode", "decide_held"]

Mode = Literal["auto", "global", "local"]

Held = Literal["global", "rows", "parts"]
"""A rank's batch is the whole global batch, whole rows that are its own, or exactly its shard of each field."""


def decide_held(mode: str, *, placed: bool, dealt: tuple[int, int] | None) -> Held:
    """What the loader yields.

    Args:
        mode: ``global``, ``local``, or ``auto``: as the data set and the sampler say.
        placed: whether the data set reads only what the rank keeps.
        dealt: (rank, world size) that the sampler deals for; None if there is no sampler to ask.

    Raises:
        ConfigurationError: they contradict each other, or nothing says which it is.
    """
    if mode not in get_args(Mode):
        raise ConfigurationError(f"mode is one of {', '.join(get_args(Mode))}, got {mode!r}")
    if placed:
        if mode == "global":
            raise ConfigurationError(
                "mode='global' is for ranks that hold the whole batch, and the data set's placement has each rank read "
                "its own part only; leave mode out, or open the data set without placement"
            )
        return "parts"
    if dealt is not None and mode == "global" and dealt[1] > 1:
        raise ConfigurationError(
            f"mode='global' is for ranks that hold the whole batch, and the sampler deals for rank {dealt[0]} of "
            f"{dealt[1]}; make it with rank=0, world_size=1, or use mode='local'"
        )
    if mode == "auto" and dealt is None:
        raise ConfigurationError(
            "nothing says whether each rank holds the whole batch or its own rows; pass sampler=, or dataset= if it "
            "has a placement, or say mode='global' or mode='local'"
        )
    if mode == "auto" and dealt is not None:
        return "rows" if dealt[1] > 1 else "global"
    return "global" if mode == "global" else "rows"


@dataclass(frozen=True, kw_only=True)
class HeldBatch:
    """One rank's batch, checked.

    Attributes:
        leaves: its tensors.
        num_rows: rows of the global batch.
        held_rows: rows of the batch as it is held.
        shares: what the rank keeps of each field.
        kept: for each field, the index that takes the kept part out of what is held.
    """

    leaves: Mapping[Key, torch.Tensor]
    num_rows: int
    held_rows: int
    shares: Mapping[Key, FieldShare]
    kept: Mapping[Key, tuple[slice, ...]]

    def shard(self, key: Key) -> torch.Tensor:
        """The part of a field that this rank keeps, contiguous. It shares memory only with a batch it is all of."""
        held = self.leaves[key]
        part = held[self.kept[key]]
        # A slice would keep the memory of the whole batch alive.
        return part.contiguous() if part.numel() == held.numel() else part.clone(memory_format=torch.contiguous_format)

    def global_shape(self, key: Key) -> tuple[int, ...]:
        """Of the field's whole batch."""
        return (self.num_rows, *self.shares[key].field.shape)

    def describe_fields(self) -> tuple[str, ...]:
        """A line for each field, the same on all ranks that mean the same batch."""
        return tuple(
            f"{share.field} {_format_placements(share.placements)}"
            for _, share in sorted(self.shares.items(), key=lambda item: item[0])
        )


class Holding:
    """Checks batches against a placement and says what is kept of them; remembers what is the same for all of them.

    Args:
        placement: how the global batch lies over the mesh, for one rank.
        held: what a batch is of it.
        schema: of the data set, where `held` is ``parts``: it knows how long a dim is that a rank holds a part of.
        fields: the fields that are read, then.
        dealt: (rank, world size) that the sampler deals for, to be compared with the mesh's data axes.
    """

    def __init__(
        self,
        placement: Placement,
        held: Held,
        *,
        schema: Schema | None = None,
        fields: Iterable[Key] | None = None,
        dealt: tuple[int, int] | None = None,
    ) -> None:
        self.placement = placement
        self.held = held
        self._dealt = dealt
        self._whole = None if schema is None else schema.select(fields)
        self._known = None if schema is None else tuple(schema.fields)
        self._resolved: tuple[tuple[Field, ...], RankPlacement] | None = None

    def hold(self, batch: TensorDictBase, global_rows: int | None = None) -> HeldBatch:
        """What this rank keeps of a batch.

        Args:
            batch: batch size ``[rows, ...]``.
            global_rows: rows of the global batch where ranks hold their own and not all have as many. By default all
                have as many as this one.

        Raises:
            ConfigurationError: placements that do not fit the fields, rows that are not this rank's share, a sampler
                that deals for other ranks than those of the data axes.
            SchemaError: a jagged or sparse field, or one that is not what the data set's schema says.
        """
        if not batch.batch_dims:
            raise SchemaError("a batch has a leading dim that counts rows, this one has batch_size=[]")
        tensors = {key: _checked(key, value) for key, value in leaves(batch) if isinstance(value, torch.Tensor)}
        part = self._resolve(tensors)
        held_rows = batch.batch_size[0]
        num_rows = self._global_rows(part, held_rows, global_rows)
        kept: dict[Key, tuple[slice, ...]] = {}
        for (start, stop), shares in part.row_shares(num_rows).items():
            for share in shares:
                rows = slice(start, stop) if self.held == "global" else slice(None)
                box = () if self.held == "parts" else tuple(slice(low, high) for low, high in share.box)
                kept[share.field.key] = (rows, *box)
        shares_by_key = {share.field.key: share for share in part.fields}
        return HeldBatch(leaves=tensors, num_rows=num_rows, held_rows=held_rows, shares=shares_by_key, kept=kept)

    def alike_along(self, held: HeldBatch, axis: int) -> list[Key]:
        """The fields that ranks which differ only along a mesh axis hold alike, before anything is cut off."""
        if self.held == "global":
            return list(held.shares)
        if self.held == "rows":
            return [key for key, share in held.shares.items() if axis not in share.row_axes]
        return [key for key, share in held.shares.items() if share.placements[axis].is_replicate()]

    def _resolve(self, tensors: Mapping[Key, torch.Tensor]) -> RankPlacement:
        fields = tuple(
            Field(key=key, dtype=value.dtype, shape=tuple(value.shape[1:]), offset_bytes=0)
            for key, value in tensors.items()
        )
        if self._resolved is None or self._resolved[0] != fields:
            part = self.placement.resolve(fields if self._whole is None else self._whole, known_keys=self._known)
            if self._whole is not None:
                _require_parts(part, fields)
            if self.held != "global":
                self._require_dealt(part)
            self._resolved = fields, part
        return self._resolved[1]

    def _require_dealt(self, part: RankPlacement) -> None:
        wanted = part.data_rank, part.data_world_size
        if self._dealt is not None and self._dealt != wanted:
            raise ConfigurationError(
                f"the sampler deals for rank {self._dealt[0]} of {self._dealt[1]}, and the data axes of the mesh "
                f"{part.mesh} make this rank {wanted[0]} of {wanted[1]}; make the sampler with "
                f"rank=placement.data_rank, world_size=placement.data_world_size"
            )

    def _global_rows(self, part: RankPlacement, held_rows: int, global_rows: int | None) -> int:
        if self.held == "global":
            if global_rows not in (None, held_rows):
                raise ConfigurationError(
                    f"the batch has {held_rows} rows and is the whole one; global_rows={global_rows}"
                )
            return held_rows
        num_rows = held_rows * part.data_world_size if global_rows is None else global_rows
        start, stop = part.row_share(num_rows)
        if stop - start != held_rows:
            raise ConfigurationError(
                f"of a global batch of {num_rows} rows the rank at {part.coordinate} of the mesh {part.mesh} has "
                f"{stop - start}, from {start} on; its batch has {held_rows}"
            )
        return num_rows


def _require_parts(part: RankPlacement, held: Iterable[Field]) -> None:
    """The batch holds exactly the parts that the data set reads."""
    found = {field.key: field for field in held}
    wanted = {share.field.key: share for share in part.fields}
    if found.keys() != wanted.keys():
        raise SchemaError(
            f"the batch has the fields {', '.join(map(format_key, found))}; the data set reads "
            f"{', '.join(map(format_key, wanted))}"
        )
    for key, share in wanted.items():
        if (found[key].shape, found[key].dtype) != (share.shape, share.field.dtype):
            raise SchemaError(
                f"field {found[key]} is not this rank's part of {share.field}, which is "
                f"{dtype_name(share.field.dtype)}{list(share.shape)} with {_format_placements(share.placements)}"
            )


def _checked(key: Key, value: torch.Tensor) -> torch.Tensor:
    if isinstance(value, DTensor):
        raise ConfigurationError(f"field {format_key(key)} is a DTensor already; place plain tensors")
    if value.is_nested or value.layout != torch.strided or value.is_quantized:
        kind = "nested (jagged)" if value.is_nested else "quantized" if value.is_quantized else str(value.layout)
        raise SchemaError(
            f"field {format_key(key)} is a {kind} tensor, whose rows cannot be cut into shards: pad it to a dense one, "
            f"or leave it out with batch.exclude"
        )
    return value


def _format_placements(placements: Iterable[AxisPlacement]) -> str:
    return "(" + ", ".join(f"Shard({p.dim})" if p.is_shard() else "Replicate()" for p in placements) + ")"  # type: ignore[attr-defined]
