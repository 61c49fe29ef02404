"""Bytes -> tensors: where a batch's bytes go as its slabs arrive. Pure: no I/O.

Two shapes of a batch:

`ContiguousBatch` (the default) copies every field out of a staging buffer that is reused at once; the copies are
memory moves of whole rows, in any order and with repeats, from any byte offset.

`StridedBatch` receives the reply stream itself into one buffer and gives views of it, nothing is copied; where the
plan does not deliver one record a row in order (repeats, covering ranges), records are moved into such a buffer first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from td_datapipes.plan import Copy, Output, PeriodicSlab, ReadPlan, ReadSpec, Slab, Spacing
from td_datapipes.schema import ALIGNMENT_BYTES, Key

__all__ = ["BatchSink", "ContiguousBatch", "StridedBatch", "make_sink"]

Bytes = npt.NDArray[np.uint8]


class BatchSink(Protocol):
    """Takes the slabs of one plan and ends up holding the batch."""

    def target(self, slab: Slab) -> Bytes | None:
        """The stretch of the batch's own memory that the slab's reply stream is received into; None for staging."""

    def take(self, slab: Slab, stream: Bytes) -> None:
        """The slab has arrived whole: `stream` is its reply stream, checked. It may be overwritten afterwards."""

    def result(self) -> dict[Key, torch.Tensor]:
        """The fields of the batch, each ``[rows, ...]``, once every slab was taken."""


def make_sink(plan: ReadPlan, spec: ReadSpec, *, strided: bool, pin_memory: bool) -> BatchSink:
    """The sink for a plan; `pin_memory` takes page-locked memory from torch's host allocator (needs an accelerator)."""
    if strided:
        return StridedBatch(plan, spec, pin_memory=pin_memory)
    return ContiguousBatch(plan.num_rows, spec, pin_memory=pin_memory)


class ContiguousBatch:
    """One contiguous tensor a field, each with memory of its own."""

    def __init__(self, num_rows: int, spec: ReadSpec, *, pin_memory: bool) -> None:
        self._spec = spec
        new = _pinned_field if pin_memory else _new_field
        self._tensors, self._bytes = [], []
        for output in spec.outputs:
            tensor, memory = new(num_rows, output)
            self._tensors.append(tensor)
            self._bytes.append(memory)

    def target(self, slab: Slab) -> None:
        """Always staging."""

    def take(self, slab: Slab, stream: Bytes) -> None:
        """Copy the slab's rows out, field by field."""
        for copy in self._spec.copies:
            _copy_rows(slab, copy.segment, copy.segment_start, stream, self._rows(copy))

    def _rows(self, copy: Copy) -> npt.NDArray[np.void]:
        output = self._spec.outputs[copy.output]
        return _items(self._bytes[copy.output], copy.nbytes, copy.output_start, output.nbytes)

    def result(self) -> dict[Key, torch.Tensor]:
        """The tensors."""
        return {output.key: tensor for output, tensor in zip(self._spec.outputs, self._tensors, strict=True)}


class StridedBatch:
    """Fields as strided views of one buffer that is never reused by us."""

    def __init__(self, plan: ReadPlan, spec: ReadSpec, *, pin_memory: bool) -> None:
        self._spec = spec
        self._num_rows = plan.num_rows
        self._pin_memory = pin_memory
        self._direct = spec.aligned and all(
            isinstance(slab, PeriodicSlab) and slab.sources is None for slab in plan.slabs
        )
        if self._direct:
            self._base, self._period = spec.pad_bytes, spec.period_bytes
            self._segments = [start + self._base for start in spec.segment_starts]
        else:
            lengths = [-(-segment.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for segment in spec.segments]
            self._base, self._period = 0, sum(lengths)
            self._segments = np.cumsum([0, *lengths[:-1]]).tolist()
        nbytes = self._base + self._num_rows * self._period
        rounded = -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self._buffer = torch.empty(rounded, dtype=torch.uint8, pin_memory=pin_memory)
        self._bytes: Bytes = self._buffer.numpy()

    def target(self, slab: Slab) -> Bytes | None:
        """The stretch of the buffer where the slab's periods lie, if the stream is the batch itself."""
        if not self._direct:
            return None
        start = self._base + slab.positions.start * self._period  # type: ignore[union-attr]
        return self._bytes[start : start + slab.stream_bytes]

    def take(self, slab: Slab, stream: Bytes) -> None:
        """Nothing where the stream is the batch; else move the records, segment by segment."""
        if self._direct:
            return
        for number, segment in enumerate(self._spec.segments):
            rows = _items(self._bytes, segment.nbytes, self._segments[number], self._period)
            _copy_rows(slab, number, 0, stream, rows)

    def result(self) -> dict[Key, torch.Tensor]:
        """The views; a field that a record's cut or a sharded placement leaves in parts is put together first."""
        copies: dict[int, list[Copy]] = {}
        for copy in self._spec.copies:
            copies.setdefault(copy.output, []).append(copy)
        return {
            output.key: self._view(output, copies.get(number, [])) for number, output in enumerate(self._spec.outputs)
        }

    def _view(self, output: Output, copies: Sequence[Copy]) -> torch.Tensor:
        shape = (self._num_rows, *output.shape)
        if self._num_rows and len(copies) == 1 and self._viewable(output, copies[0]):
            size = output.dtype.itemsize
            offset = self._segments[copies[0].segment] + copies[0].segment_start
            flat = self._buffer.view(output.dtype)
            return flat.as_strided(shape, (self._period // size, *_strides(output.shape)), offset // size)
        tensor = torch.empty(shape, dtype=output.dtype, pin_memory=self._pin_memory)
        if not self._num_rows:
            return tensor
        target = tensor.view(-1).view(torch.uint8).numpy()
        for copy in copies:
            offset = self._segments[copy.segment] + copy.segment_start
            _items(target, copy.nbytes, copy.output_start, output.nbytes)[:] = np.ndarray(
                (self._num_rows,), f"V{copy.nbytes}", self._bytes, offset, (self._period,)
            )
        return tensor

    def _viewable(self, output: Output, copy: Copy) -> bool:
        size = output.dtype.itemsize
        offset = self._segments[copy.segment] + copy.segment_start
        return copy.nbytes == output.nbytes and offset % size == 0 and self._period % size == 0


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for dim in reversed(shape):
        strides.append(step)
        step *= dim
    return tuple(reversed(strides))


def _items(memory: Bytes, nbytes: int, offset: int, stride: int) -> npt.NDArray[np.void]:
    """Blocks of `nbytes` bytes, one every `stride` from `offset` on, as opaque items that numpy moves whole."""
    count = (len(memory) - offset - nbytes) // stride + 1 if len(memory) >= offset + nbytes else 0
    return np.ndarray((count,), f"V{nbytes}", memory, offset, (stride,))


def _copy_rows(slab: Slab, segment: int, start: int, stream: Bytes, rows: npt.NDArray[np.void]) -> None:
    """Move bytes of every row of the slab, from `start` in a segment on, to its place in `rows`."""
    offsets = slab.segment_offsets(segment)
    if isinstance(offsets, Spacing):
        first, step = offsets.first + start, offsets.step
        found = np.ndarray((len(slab.rows),), rows.dtype, stream, first, (step,))
        rows[slab.positions] = found if slab.sources is None else found[slab.sources]
        return
    offsets = offsets + start
    if slab.sources is not None:
        offsets = offsets[slab.sources]
    # Overlapping windows, one at every byte: indexing them gathers from any offsets, and numpy moves each as a block.
    windows = np.ndarray((len(stream) - rows.dtype.itemsize + 1,), rows.dtype, stream, 0, (1,))
    rows[slab.positions] = windows[offsets]


def _new_field(num_rows: int, output: Output) -> tuple[torch.Tensor, Bytes]:
    """A contiguous field and its memory. numpy allocates it, which is quicker than a view of torch's."""
    memory = np.empty(num_rows * output.nbytes, dtype=np.uint8)
    if not len(memory):
        return torch.empty((num_rows, *output.shape), dtype=output.dtype), memory
    return torch.from_numpy(memory).view(output.dtype).view(num_rows, *output.shape), memory


def _pinned_field(num_rows: int, output: Output) -> tuple[torch.Tensor, Bytes]:
    """The same in page-locked memory, from torch's host allocator."""
    tensor = torch.empty((num_rows, *output.shape), dtype=output.dtype, pin_memory=True)
    return tensor, tensor.view(-1).view(torch.uint8).numpy()
