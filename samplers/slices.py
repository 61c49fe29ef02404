"""`SliceBatchSampler`: batches of fixed-length windows of adjacent rows within trajectories or documents."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from td_datapipes.errors import ConfigurationError
from td_datapipes.order import Permutation, derive_key
from td_datapipes.shares import Share, fingerprint

from .base import PositionSampler, check_positive
from .batch import RowBatch
from .rows import digest
from .states import Position
from .windows import OrderedBatches, WindowDealer

__all__ = ["SliceBatchSampler"]

Rows = NDArray[np.int64]


class SliceBatchSampler(PositionSampler[RowBatch]):
    """Batches of slices: `slice_len` adjacent rows that never cross a trajectory's end.

    Every valid start is equally likely, and an epoch takes each start once: trajectory after trajectory contributes one
    slice for every `stride` rows. A batch is the rows of `batch_slices` slices one after the other, so that a field of
    it is ``x.view(batch_slices, slice_len, ...)``. Needs 16 bytes a trajectory.

    Where trajectories begin and end is said in one of three ways.

    Args:
        data_source: has a length.
        slice_len: rows of a slice.
        batch_slices: slices of this rank's batch.
        offsets: [trajectories + 1]; trajectory i is the rows offsets[i] to offsets[i + 1].
        ends: [rows] bool, true at the last row of each trajectory (``done``); what follows the last true one is a
            trajectory too.
        trajectories: [rows]; a row with another value than the row before begins a trajectory.
        short: what becomes of trajectories below `slice_len` rows: ``error`` or ``skip``.
        stride: rows from one start to the next.
        shuffle: else slices come in the order of their rows.
        seed: in [0, 2**64).
        drop_last: leave out a last global batch that is not full, else divide and pad it (`RowBatch.padded`).
        window: batches drawn and announced together, >= 1.
        rank, world_size: by default the default process group's, else 0 of 1.

    Raises:
        ConfigurationError: boundaries that do not fit the rows, or a short trajectory.
    """

    def __init__(
        self,
        data_source: Sized,
        slice_len: int,
        batch_slices: int,
        *,
        offsets: ArrayLike | None = None,
        ends: ArrayLike | None = None,
        trajectories: ArrayLike | None = None,
        short: Literal["error", "skip"] = "error",
        stride: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        window: int = 8,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        check_positive(slice_len=slice_len, batch_slices=batch_slices, stride=stride, window=window)
        super().__init__(
            data_source, seed=seed, batch_size=batch_slices, drop_last=drop_last, rank=rank, world_size=world_size
        )
        self.slice_len = slice_len
        self.stride = stride
        self.shuffle = shuffle
        self.window = window
        edges = _find_offsets(len(data_source), {"offsets": offsets, "ends": ends, "trajectories": trajectories})
        self._slices = _Slices(*_count_starts(edges, slice_len, stride, short), slice_len, stride)
        self._digest = digest(edges)

    @property
    def num_slices(self) -> int:
        """Slices of an epoch, over all ranks."""
        return len(self._slices)

    def _length(self, rows: int) -> int:  # noqa: ARG002
        return self.num_slices

    def _position_rows(self) -> int:
        return self.slice_len

    def _fingerprint(self, rows: int) -> str:
        arguments: dict[str, int | str | bool] = {"slice_len": self.slice_len, "stride": self.stride}
        arguments |= {"shuffle": self.shuffle, "offsets": self._digest}
        return fingerprint("SliceBatchSampler", self.data_source, rows, **arguments)

    def _dealer(self, position: Position, share: Share) -> WindowDealer:
        key = derive_key(self.seed, position.epoch, "slices")
        order = Permutation(self.num_slices, key) if self.shuffle else _InOrder()
        batches = OrderedBatches(order, share, self._slices.rows, self.slice_len)
        return WindowDealer(batches, lambda batch: (batch // self.window + 1) * self.window, lazy=False)


@dataclass(frozen=True, eq=False)
class _Slices:
    """Slice number -> rows.

    Attributes:
        firsts: [trajectories] first row of each.
        stops: [trajectories] slices of this trajectory and all before it.
    """

    firsts: Rows
    stops: Rows
    slice_len: int
    stride: int

    def __len__(self) -> int:
        return int(self.stops[-1]) if len(self.stops) else 0

    def rows(self, slices: Rows) -> Rows:
        """The rows of ``slices`` [k], one slice after the other: int64 [k * slice_len]."""
        trajectories = np.searchsorted(self.stops, slices, side="right")
        before = np.where(trajectories > 0, self.stops[trajectories - 1], 0)
        starts = self.firsts[trajectories] + (slices - before) * self.stride
        return (starts[:, None] + np.arange(self.slice_len)).reshape(-1)


@dataclass(frozen=True)
class _InOrder:
    def permute(self, positions: Rows) -> Rows:
        return positions


def _find_offsets(rows: int, given: dict[str, Any]) -> Rows:
    """[trajectories + 1], from whichever of the three was given."""
    named = {name: value for name, value in given.items() if value is not None}
    if len(named) != 1:
        raise ConfigurationError(f"give exactly one of offsets, ends and trajectories, got {sorted(named) or 'none'}")
    ((name, value),) = named.items()
    values = np.asarray(value)
    if values.ndim != 1 or (name != "offsets" and len(values) != rows):
        wanted = "[trajectories + 1]" if name == "offsets" else f"[{rows}]"
        raise ConfigurationError(f"{name} is an array of shape {wanted}, got {values.shape}")
    if name == "offsets":
        return _check_offsets(values, rows)
    if name == "ends":
        begins = np.flatnonzero(values.astype(bool)[:-1]) + 1
    else:
        begins = np.flatnonzero(values[1:] != values[:-1]) + 1
    return np.concatenate([[0], begins, [rows]]).astype(np.int64) if rows else np.zeros(1, np.int64)


def _check_offsets(values: NDArray[Any], rows: int) -> Rows:
    if not len(values) or values.dtype.kind not in "iu":
        raise ConfigurationError(f"offsets are at least one integer, got {len(values)} of {values.dtype}")
    offsets = values.astype(np.int64)
    if offsets[0] < 0 or offsets[-1] > rows or (np.diff(offsets) < 0).any():
        raise ConfigurationError(
            f"offsets rise within [0, {rows}], the data set's rows; got {offsets[0]} to {offsets[-1]}"
            + (", not rising" if (np.diff(offsets) < 0).any() else "")
        )
    return offsets


def _count_starts(edges: Rows, slice_len: int, stride: int, short: str) -> tuple[Rows, Rows]:
    """(first row, slices of it and all before) of each trajectory that is long enough."""
    if short not in ("error", "skip"):
        raise ConfigurationError(f"short is 'error' or 'skip', got {short!r}")
    lengths = np.diff(edges)
    enough = lengths >= slice_len
    if short == "error" and not enough.all():
        which = int(np.flatnonzero(~enough)[0])
        raise ConfigurationError(
            f"{int((~enough).sum())} trajectories have fewer than slice_len={slice_len} rows, the first is number "
            f"{which} with {lengths[which]}; pass short='skip' to leave them out"
        )
    counts = (lengths[enough] - slice_len) // stride + 1
    return edges[:-1][enough], np.cumsum(counts)
