"""Batches that are read together, each with memory of its own for its long fields. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from td_datapipes.assemble import LONG_BYTES, ContiguousBatch, Place, copy_rows, new_field, repeats
from td_datapipes.memory import MemoryPool
from td_datapipes.read_spec import Copy, ReadSpec, Rows
from td_datapipes.schema import Key
from td_datapipes.slabs import Slab

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
        again = repeats(slab)
        for copy, rows in self._copies_of(slab):
            if copy.output not in self._apart:
                copy_rows(slab, copy.segment, copy.segment_start, stream, rows)
                continue
            for start, place in self._places_of(copy, slab):
                place[:] = stream.data[start : start + len(place)]
            self._repeat(copy, again)

    def _stretches(self, copy: Copy, first: int, positions: slice) -> Iterable[Place]:
        """One place a batch."""
        if copy.output not in self._apart:
            yield from super()._stretches(copy, first, positions)
            return
        step = copy.nbytes
        for (_, memory), (low, high) in zip(self._apart[copy.output], pairwise(self._bounds.tolist()), strict=True):
            begin, stop = max(low, positions.start), min(high, positions.stop)
            if begin < stop:
                place = memory.data[(begin - low) * step : (stop - low) * step]
                yield first + (begin - positions.start) * step, place

    def _targets(self, copy: Copy, positions: Rows) -> list[memoryview]:
        if copy.output not in self._apart:
            return super()._targets(copy, positions)
        memories = [memory.data for _, memory in self._apart[copy.output]]
        batch_of: Rows = np.searchsorted(self._bounds, positions, side="right") - 1
        step = self._spec.outputs[copy.output].nbytes
        starts = (positions - self._bounds[batch_of]) * step + copy.output_start
        pairs = zip(batch_of.tolist(), starts.tolist(), strict=True)
        return [memories[batch][at : at + copy.nbytes] for batch, at in pairs]

    def _repeat(self, copy: Copy, again: tuple[Rows, Rows]) -> None:
        if copy.output not in self._apart:
            super()._repeat(copy, again)
            return
        for further, first in zip(*(self._targets(copy, positions) for positions in again), strict=True):
            further[:] = first
