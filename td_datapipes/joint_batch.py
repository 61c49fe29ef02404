"""Batches that are read together, each with memory of its own for its long fields. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from td_datapipes.assemble import LONG_BYTES, ContiguousBatch, Place, new_field
from td_datapipes.memory import MemoryPool
from td_datapipes.read_spec import Copy, ReadSpec, Rows
from td_datapipes.schema import Key
from td_datapipes.slabs import RunSlab, Slab, Spacing

__all__ = ["JointBatch"]

Bytes = npt.NDArray[np.uint8]


class JointBatch(ContiguousBatch):
    """Several batches as one of all their rows (a `BatchSink`).

    Long fields have a tensor of their own in each batch, so that its memory is free again when the batch is, and is of
    the size the next batch needs. Short ones are slices of one tensor: fewer calls move their rows.

    Args:
        sizes: rows of each batch.
        spec: what each row is.
        pool: gives fields their memory.
        pin_memory: take page-locked memory in its place.
    """

    def __init__(self, sizes: Sequence[int], spec: ReadSpec, pool: MemoryPool, *, pin_memory: bool) -> None:
        self._bounds = np.cumsum([0, *sizes])
        short = {copy.output for copy in spec.copies if copy.nbytes < LONG_BYTES}
        self._apart = {
            number: [new_field(size, output, pool, pin_memory=pin_memory) for size in sizes]
            for number, output in enumerate(spec.outputs)
            if number not in short and output.nbytes
        }
        super().__init__(sum(sizes), spec, pool, pin_memory=pin_memory, left_out=frozenset(self._apart))

    def batch(self, number: int) -> dict[Key, torch.Tensor]:
        """The fields of one of the batches."""
        rows = slice(*self._bounds[number : number + 2].tolist())
        return {
            output.key: self._apart[index][number][0] if index in self._apart else self.tensors[output.key][rows]
            for index, output in enumerate(self._spec.outputs)
        }

    def take(self, slab: Slab, stream: Bytes) -> None:
        """Copy the slab's rows out: of long fields row by row."""
        self._copy_fields(slab, stream, lambda copy: copy.output not in self._apart)
        for copy, _ in self._copies_of(slab):
            if copy.output in self._apart:
                for start, place in self._places_of(copy, slab):
                    place[:] = stream.data[start : start + len(place)]

    def _places_of(self, copy: Copy, slab: Slab) -> Iterator[Place]:
        if copy.output not in self._apart:
            yield from super()._places_of(copy, slab)
            return
        memories = [memory.data for _, memory in self._apart[copy.output]]
        step = self._spec.outputs[copy.output].nbytes
        offsets, positions = slab.segment_offsets(copy.segment), slab.positions
        if isinstance(slab, RunSlab) and self._is_one_stretch(copy, slab):
            yield from self._stretches(memories, slab.positions, slab.segment_offsets(copy.segment), copy, step)
            return
        if isinstance(offsets, Spacing):
            offsets = offsets.first + offsets.step * np.arange(len(slab.rows))
        if slab.sources is not None:
            offsets = offsets[slab.sources]
        rows = np.arange(positions.start, positions.stop) if isinstance(positions, slice) else positions
        batch_of: Rows = np.searchsorted(self._bounds, rows, side="right") - 1
        targets = (rows - self._bounds[batch_of]) * step + copy.output_start
        starts = offsets + copy.segment_start
        for start, batch, at in zip(starts.tolist(), batch_of.tolist(), targets.tolist(), strict=True):
            yield start, memories[batch][at : at + copy.nbytes]

    def _stretches(
        self, memories: Sequence[memoryview], positions: slice, offsets: Spacing, copy: Copy, step: int
    ) -> Iterator[Place]:
        """Rows that follow each other in the fields too: one place a batch."""
        first = offsets.first + copy.segment_start
        for memory, (low, high) in zip(memories, pairwise(self._bounds.tolist()), strict=True):
            begin, stop = max(low, positions.start), min(high, positions.stop)
            if begin < stop:
                yield first + (begin - positions.start) * step, memory[(begin - low) * step : (stop - low) * step]
