"""Values of variable length on their way to the server: into chunks of heaps, and spans in their place. No I/O here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDictBase

from td_datapipes.checksums import crc32
from td_datapipes.errors import SchemaError
from td_datapipes.manifest import Heap, Manifest
from td_datapipes.schema import Field, Key, Schema, format_key, leaves, new_tensordict
from td_datapipes.varying import EncodedRows, Varying, encode_rows

__all__ = ["HeapWriter", "PutHeapChunk", "new_heaps"]


class PutHeapChunk(Protocol):
    """Sends the parts of a chunk, from `start_bytes` on. They are not written to afterwards."""

    def __call__(self, group: int, chunk: int, start_bytes: int, parts: Sequence[memoryview], /) -> None: ...


def new_heaps(schema: Schema, chunk_bytes: int) -> tuple[Heap, ...]:
    """An empty heap for each field of variable length."""
    return tuple(Heap(key=field.key, chunk_bytes=chunk_bytes, nbytes=0, row_bytes=0) for field in schema.varying_fields)


class HeapWriter:
    """Collects the values of the fields of variable length and sends a chunk whenever one is full.

    Args:
        manifest: what is written, with its heaps as they are so far.
        put: sends a chunk.
        heads: of each heap the bytes of the chunk being filled, where that is to be sent whole; else none.
        sums: of each heap the checksums of the chunks it has already, where they are to be kept anew; else none.
    """

    def __init__(
        self,
        manifest: Manifest,
        put: PutHeapChunk,
        heads: Sequence[bytes] = (),
        sums: Sequence[Sequence[int]] = (),
    ) -> None:
        self._begun = manifest.heaps
        first = len(manifest.layouts)
        begun = heads or [b""] * len(manifest.heaps)
        self._chunks = {
            heap.key: _HeapChunks(first + number, heap, put, head)
            for number, (heap, head) in enumerate(zip(manifest.heaps, begun, strict=True))
        }
        for chunks, known in zip(self._chunks.values(), sums, strict=False):
            chunks.first_chunk, chunks.checksums = 0, list(known)
        for chunks, last in zip(self._chunks.values(), (manifest.last_checksums or ())[first:], strict=False):
            chunks.begun_checksum = last

    def take(self, batch: TensorDictBase, schema: Schema) -> TensorDictBase:
        """The batch with spans in place of the values, which are on their way.

        Args:
            batch: ``[rows, ...]``.
            schema: the batch's: it may know of values what the manifest does not know yet.

        Raises:
            SchemaError: a value that cannot be stored; it names field and row. Nothing of the batch was taken.
        """
        if not self._chunks:
            return batch
        values = dict(leaves(batch))
        encoded = [_encode(field, values[field.key]) for field in schema.varying_fields]
        for field, rows in zip(schema.varying_fields, encoded, strict=True):
            values[field.key] = torch.from_numpy(self.add(field.key, rows))
        return new_tensordict(values, schema.nodes, batch.batch_size[0])

    def add(self, key: Key, rows: EncodedRows) -> npt.NDArray[np.int64]:
        """Take the values of a field's next rows; their spans, which stand in the records, ``[rows, 2]``."""
        return self._chunks[key].add(rows)

    def flush(self) -> None:
        """Send the chunks being filled."""
        for chunks in self._chunks.values():
            chunks.flush()

    def unsent(self) -> Iterator[tuple[int, int, memoryview]]:
        """Of each chunk being filled the number that stands for its heap, its own, and its bytes so far."""
        for chunks in self._chunks.values():
            if chunks.unsent is not None:
                yield chunks.unsent

    @property
    def checksums(self) -> Iterator[tuple[int, int, list[int]]]:
        """Of each heap the number that stands for it, a chunk, and the checksums of those from that one on."""
        for chunks in self._chunks.values():
            yield chunks.group, chunks.first_chunk, chunks.checksums

    @property
    def last_checksums(self) -> tuple[int, ...]:
        """Of each heap's last chunk; 0 where there is none."""
        return tuple(
            chunks.checksums[-1] if chunks.checksums else chunks.begun_checksum for chunks in self._chunks.values()
        )

    @property
    def nbytes(self) -> list[int]:
        """Bytes of each heap so far."""
        return [chunks.nbytes for chunks in self._chunks.values()]

    def heaps(self, rows: int) -> tuple[Heap, ...]:
        """The heaps of a data set that is written anew and has so many rows."""
        return tuple(
            replace(heap, nbytes=nbytes, row_bytes=-(-nbytes // max(rows, 1)))
            for heap, nbytes in zip(self._begun, self.nbytes, strict=True)
        )


def _encode(field: Field, value: object) -> EncodedRows:
    try:
        return encode_rows(value, cast(Varying, field.varying))
    except SchemaError as error:
        raise SchemaError(f"field {format_key(field.key)}: {error}") from error


class _HeapChunks:
    """One heap being written.

    Attributes:
        group: the number that stands for it.
        first_chunk: the first chunk it sends.
        checksums: of the chunks sent, in order.
        begun_checksum: of the bytes that its last chunk had before.
    """

    def __init__(self, group: int, heap: Heap, put: PutHeapChunk, head: bytes) -> None:
        self.group, self._chunk_bytes, self._put = group, heap.chunk_bytes, put
        self.nbytes, self._sent = heap.nbytes, heap.nbytes - len(head)
        self.first_chunk, self.checksums, self.begun_checksum = self._sent // self._chunk_bytes, list[int](), 0
        # Of the chunk being filled, from where it was continued; a new one for each chunk: what was given to `put`
        # may still be on its way.
        self._buffer: npt.NDArray[np.uint8] | None = None
        if head:
            self._buffer = np.empty(self._chunk_bytes - self._sent % self._chunk_bytes, dtype=np.uint8)
            self._buffer[: len(head)] = np.frombuffer(head, dtype=np.uint8)

    @property
    def unsent(self) -> tuple[int, int, memoryview] | None:
        """The chunk being filled, as `HeapWriter.unsent` gives it."""
        if self._buffer is None:
            return None
        return self.group, self._sent // self._chunk_bytes, self._buffer[: self.nbytes - self._sent].data

    def add(self, rows: EncodedRows) -> npt.NDArray[np.int64]:
        """Spans of the rows, ``[rows, 2]``: the heap's byte where each row's items begin, and how many they are."""
        spans = np.stack([rows.starts + self.nbytes, rows.lengths], axis=1)
        data = np.frombuffer(rows.data, dtype=np.uint8)
        while len(data):
            if self._buffer is None:
                self._buffer = np.empty(self._chunk_bytes - self._sent % self._chunk_bytes, dtype=np.uint8)
            filled = self.nbytes - self._sent
            part = data[: len(self._buffer) - filled]
            self._buffer[filled : filled + len(part)] = part
            self.nbytes += len(part)
            data = data[len(part) :]
            if self.nbytes - self._sent == len(self._buffer):
                self.flush()
        return spans

    def flush(self) -> None:
        """Send what is not sent yet."""
        if self._buffer is None:
            return
        chunk, start = divmod(self._sent, self._chunk_bytes)
        data = self._buffer[: self.nbytes - self._sent].data
        self.checksums.append(crc32(data, self.begun_checksum if start else 0))
        self._put(self.group, chunk, start, [data])
        self._sent, self._buffer = self.nbytes, None
