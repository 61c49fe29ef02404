"""Chunks that are read whole are compared with their checksums on the way to the batch. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from td_datapipes.assemble import BatchSink, Place
from td_datapipes.checksums import crc32
from td_datapipes.errors import ChecksumError
from td_datapipes.heap_plan import HeapSlab
from td_datapipes.manifest import Manifest
from td_datapipes.read_spec import TRAILER_BYTES, ReadSpec, frame_headers
from td_datapipes.schema import Key, format_key
from td_datapipes.slabs import CoveringSlab, Ranges, RunSlab, Slab

__all__ = ["ChunkChecks", "HeapChecks", "VerifyingSink"]

Bytes = npt.NDArray[np.uint8]


@dataclass(kw_only=True)
class ChunkChecks:
    """What the chunks of one generation must add up to (CRC-32 of their records).

    Attributes:
        manifest: the generation.
        spec: what is read of each row; only a read of whole records can be compared.
        sums: for each group, the checksum of each chunk.
        checked: chunks compared so far.
    """

    manifest: Manifest
    spec: ReadSpec
    sums: Mapping[int, Sequence[int]]
    checked: int = 0
    _whole_bytes: dict[int, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for group, layout in enumerate(self.manifest.layouts):
            segments = [segment for segment in self.spec.segments if segment.group == group]
            record = self.manifest.schema.groups[group].record_bytes
            gapless = all(a.stop_bytes >= b.start_bytes for a, b in pairwise(segments))
            whole = bool(segments) and segments[0].start_bytes == 0 and segments[-1].stop_bytes >= record
            if layout.pieces == 1 and gapless and whole:
                self._whole_bytes[group] = segments[-1].stop_bytes

    def is_whole(self, group: int, chunk: int, start: int, length: int) -> bool:
        """Whether a range is all records of a chunk, but for the padding behind the last."""
        last = self._whole_bytes.get(group)
        if last is None or start:
            return False
        layout = self.manifest.layouts[group]
        first, stop = layout.rows_of(chunk, self.manifest.rows)
        return length == (stop - first - 1) * layout.stride_bytes + last

    def compare(self, group: int, chunk: int, found: int) -> None:
        """Raise unless that is the chunk's checksum.

        Raises:
            ChecksumError: it is not.
        """
        self.checked += 1
        expected = self.sums[group][chunk]
        if found != expected:
            first, stop = self.manifest.layouts[group].rows_of(chunk, self.manifest.rows)
            raise ChecksumError(
                f"data set {self.manifest.name!r}, chunk {self.manifest.chunk_key(group, chunk).decode()} "
                f"(rows {first} to {stop - 1}): its checksum is {found:08x}, {expected:08x} was written; its bytes "
                f"have been altered. Write the data set again"
            )

    def padded(self, group: int, crc: int, read_bytes: int) -> int:
        """The checksum with the zeros behind the last record's fields."""
        return crc32(bytes(-read_bytes % self.manifest.layouts[group].stride_bytes), crc)


class VerifyingSink:
    """A sink that lets only chunks pass that are as they were written, where it sees them whole (a `BatchSink`).

    Args:
        sink: takes the slabs.
        checks: knows the checksums.
    """

    def __init__(self, sink: BatchSink, checks: ChunkChecks) -> None:
        self._sink, self._checks = sink, checks
        self._begun: dict[tuple[int, int], tuple[int, int]] = {}
        self.placed: Callable[[Slab, Bytes], None] = sink.placed
        self.seal: Callable[[], None] = sink.seal

    @property
    def tensors(self) -> dict[Key, torch.Tensor]:
        """The fields of the batch."""
        return self._sink.tensors

    def target(self, slab: Slab) -> Bytes | None:
        """Where the sink wants the slab's stream."""
        return self._sink.target(slab)

    def places(self, slab: Slab) -> list[Place] | None:
        """None for whole chunks, and for ranges that may be: they are looked at in one stretch."""
        if isinstance(slab, CoveringSlab) or (isinstance(slab, RunSlab) and self._is_whole(slab)):
            return None
        return self._sink.places(slab)

    def take(self, slab: Slab, stream: Bytes) -> None:
        """Compare what is whole, then pass it on."""
        if isinstance(slab, RunSlab):
            if self._is_whole(slab):
                self._run(slab, stream)
        elif isinstance(slab, CoveringSlab):
            self._covering(slab, stream)
        self._sink.take(slab, stream)

    def _is_whole(self, run: RunSlab) -> bool:
        return self._checks.is_whole(run.group, run.chunk, run.start, run.length)

    def _run(self, run: RunSlab, stream: Bytes) -> None:
        """A run, or the next rows of one: they come in order."""
        key = (run.group, run.chunk)
        crc, seen = self._begun.pop(key, (0, 0))
        # The padding behind the last of these rows may not have come yet, so its zeros are not taken from the stream.
        last_bytes = run.length % run.row_step_bytes or run.row_step_bytes
        count = (len(run.rows) - 1) * run.row_step_bytes + last_bytes
        crc = crc32(stream[run.header_bytes : run.header_bytes + count].data, crc)
        crc, seen = self._checks.padded(run.group, crc, count), seen + len(run.rows)
        if seen * run.row_step_bytes < run.length:
            self._begun[key] = crc, seen
        else:
            self._checks.compare(*key, crc)

    def _covering(self, slab: CoveringSlab, stream: Bytes) -> None:
        covered = slab.covered
        for group, chunk, start, length, end in _ranges(covered, len(slab.prefix)):
            if self._checks.is_whole(group, chunk, start, length):
                crc = crc32(stream[end - length : end].data)
                self._checks.compare(group, chunk, self._checks.padded(group, crc, length))


class HeapChecks:
    """Compares the chunks of heaps that one read gets whole, in one range or in several that follow on one another.

    Args:
        checks: knows the checksums.
    """

    def __init__(self, checks: ChunkChecks) -> None:
        self._checks, self._manifest = checks, checks.manifest
        # Of chunks that come in parts: the checksum of those so far, and where the next one begins.
        self._begun: dict[tuple[int, int], tuple[int, int]] = {}

    def look(self, slab: HeapSlab, stream: Bytes) -> None:
        """Compare what is whole in a slab that has arrived.

        Raises:
            ChecksumError: a chunk is not as it was written.
        """
        for group, chunk, start, length, end in _ranges(slab.covered, len(slab.prefix)):
            crc, expected_start = self._begun.pop((group, chunk), (0, 0)) if start else (0, 0)
            if start != expected_start:
                continue  # something before it is not read
            crc = crc32(stream[end - length : end].data, crc)
            if start + length < self._manifest.chunk_bytes(group, chunk):
                self._begun[group, chunk] = crc, start + length
            else:
                self._compare(group, chunk, crc)

    def _compare(self, group: int, chunk: int, found: int) -> None:
        self._checks.checked += 1
        expected = self._checks.sums[group][chunk]
        if found != expected:
            manifest = self._manifest
            key, name = manifest.chunk_key(group, chunk).decode(), manifest.heaps[group - len(manifest.layouts)].key
            raise ChecksumError(
                f"data set {manifest.name!r}, chunk {key} (values of field {format_key(name)}): its checksum is "
                f"{found:08x}, {expected:08x} was written; its bytes have been altered. Write the data set again"
            )


def _ranges(covered: Ranges, prefix_bytes: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Of each range its group, chunk, start and length, and where its bytes end in the stream."""
    framed = frame_headers(covered.lengths) + covered.lengths + TRAILER_BYTES
    ends = np.cumsum(framed) + prefix_bytes - TRAILER_BYTES
    columns = (covered.groups, covered.chunks, covered.starts, covered.lengths, ends)
    return zip(*(column.tolist() for column in columns), strict=True)
