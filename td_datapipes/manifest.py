"""The manifest: what a data set is and where its chunks lie. JSON that a person can read; pure, no I/O.

Keys on the server, for the data set ``atari/pong`` (``N`` is its percent-encoded name, so that no name can leave the
key space or move a hash tag)::

    td:names                   set of the names in use (percent-encoded), added before the first byte is staged
    td:{N}:manifest            the published manifest
    td:{N}:staged              hash, id -> what a writer has staged but not published
    td:{N}:superseded          hash, "id generation" -> manifests of earlier generations, until they are collected
    td:{N}:appender            who is appending; expires when that writer falls silent
    td:{N}:appends             how many have begun to append: each one's number
    td:{<id>.<shard>}:<group>:<chunk>   chunk <chunk> (8 hex digits) of group <group>; one hash tag a shard
    td:{<id>.<shard>}:checksums:crc32:<group>   of the group's chunks, 4 bytes each; with the first shard
    td:{<id>.<shard>}:checksums:crc32:v<number> of the chunks of that field's heap
    td:{<id>.<shard>}:v<number>:<chunk> chunk <chunk> of the heap of the field of variable length <number>
    td:{<id>.<shard>}:<label>:json      non-tensor values: one JSON text, or a hash of one a row
    td:{<id>.<shard>}:fence    the number of the latest appender; chunks of the shard refuse those of earlier ones

A `mutable` data set has one shard, whose tag is ``N`` itself, so that one Lua call can change what describes it and
what it holds. Its groups come and go, so their keys have a label that is never used again in place of the number, and
``td:{N}:<id>:structure`` holds the generation, for writers and readers to check.

A chunk holds whole records and `SPARE_BYTES` more. Where one record is longer than a chunk may be, it is cut into
*pieces* of ``chunk_bytes`` and each piece is a chunk of its own: piece ``p`` of row ``r`` is chunk ``r * pieces + p``.

A *heap* holds the values of one field of variable length, one behind the other without any gap, and is cut into chunks
of ``chunk_bytes`` wherever that falls: a value may lie across several. It has no spare bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from td_datapipes.errors import SchemaError
from td_datapipes.schema import Field, Group, Key, Node, Schema

__all__ = [
    "FORMAT_VERSION",
    "SPARE_BYTES",
    "ChunkLayout",
    "Heap",
    "Manifest",
    "Value",
]

FORMAT_VERSION = 2
"""What this release reads. Without fields of variable length, what it writes is of version 1."""
_MAX_SHOWN_NAME = 40
SPARE_BYTES = 32
"""Zero bytes at a chunk's end: a scattered read may ask for up to 30 bytes more than its record (see `wire_length`)."""


@dataclass(frozen=True, kw_only=True)
class ChunkLayout:
    """How the records of one group are cut into chunks.

    Attributes:
        stride_bytes: from one record to the next.
        records_per_chunk: whole records a chunk; 1 where records are cut into pieces.
        pieces: chunks a record; 1 where a chunk holds whole records.
        piece_bytes: length of a piece (the last may be shorter); equal to `stride_bytes` where there is one.
    """

    stride_bytes: int
    records_per_chunk: int
    pieces: int
    piece_bytes: int

    @classmethod
    def for_stride(cls, stride_bytes: int, max_chunk_bytes: int, max_records_per_chunk: int) -> ChunkLayout:
        """Chunks of at most `max_chunk_bytes` of records, and at most so many records.

        Raises:
            SchemaError: a chunk size that is not a positive multiple of 16.
        """
        if max_chunk_bytes < 16 or max_chunk_bytes % 16:
            raise SchemaError(f"chunk_bytes must be a positive multiple of 16, got {max_chunk_bytes}")
        if stride_bytes > max_chunk_bytes:
            pieces = -(-stride_bytes // max_chunk_bytes)
            return cls(stride_bytes=stride_bytes, records_per_chunk=1, pieces=pieces, piece_bytes=max_chunk_bytes)
        records = min(max_records_per_chunk, max_chunk_bytes // max(stride_bytes, 1))
        return cls(stride_bytes=stride_bytes, records_per_chunk=records, pieces=1, piece_bytes=stride_bytes)

    def num_chunks(self, rows: int) -> int:
        """Chunks that `rows` rows fill."""
        if self.stride_bytes == 0:
            return 0
        return -(-rows // self.records_per_chunk) * self.pieces

    def chunk_bytes(self, chunk: int, rows: int) -> int:
        """Bytes of records that chunk `chunk` of a data set of `rows` rows holds, without the spare bytes."""
        if self.pieces > 1:
            return min(self.piece_bytes, self.stride_bytes - chunk % self.pieces * self.piece_bytes)
        return min(self.records_per_chunk, rows - chunk * self.records_per_chunk) * self.stride_bytes

    def rows_of(self, chunk: int, rows: int) -> tuple[int, int]:
        """The rows ``[start, stop)`` that have bytes in chunk `chunk`."""
        start = chunk // self.pieces * self.records_per_chunk
        return start, min(start + self.records_per_chunk, rows)


@dataclass(frozen=True, kw_only=True)
class Value:
    """A non-tensor field.

    Attributes:
        key: its path.
        per_row: whether each row has a value of its own; else all share one.
        label: names it on the server.
    """

    key: Key
    per_row: bool
    label: str

    @property
    def kind(self) -> Literal["json", "json_rows"]:
        """How it is stored: one text, or a hash of row number to text."""
        return "json_rows" if self.per_row else "json"

    def to_json(self) -> dict[str, Any]:
        """As the manifest stores it."""
        return {"key": list(self.key), "per_row": self.per_row, "label": self.label}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Value:
        """The inverse of `to_json`."""
        return cls(key=tuple(data["key"]), per_row=bool(data["per_row"]), label=str(data["label"]))


@dataclass(frozen=True, kw_only=True)
class Heap:
    """Where the values of one field of variable length lie: one behind the other, in chunks.

    Attributes:
        key: the field's.
        chunk_bytes: bytes of a chunk; the last may be shorter.
        nbytes: bytes of all values.
        row_bytes: of a row's values on average when the data set was first written. Appending leaves it as it is:
            samplers size their blocks by it.
    """

    key: Key
    chunk_bytes: int
    nbytes: int
    row_bytes: int

    @property
    def num_chunks(self) -> int:
        """Chunks that hold its values."""
        return -(-self.nbytes // self.chunk_bytes)

    def bytes_of(self, chunk: int) -> int:
        """Bytes of values in a chunk."""
        return min(self.chunk_bytes, self.nbytes - chunk * self.chunk_bytes)

    def to_json(self) -> dict[str, Any]:
        """As the manifest stores it."""
        sizes = {"chunk_bytes": self.chunk_bytes, "nbytes": self.nbytes, "row_bytes": self.row_bytes}
        return {"key": list(self.key), **sizes}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Heap:
        """The inverse of `to_json`."""
        sizes = {name: int(data[name]) for name in ("chunk_bytes", "nbytes", "row_bytes")}
        return cls(key=tuple(data["key"]), **sizes)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What describes one generation of a data set.

    Attributes:
        name: the data set's name, as in the URL's fragment.
        id: new with every writing anew; appending keeps it.
        kind: ``frozen``, ``mutable`` or ``ring``.
        generation: counts what was published under the name, from 1.
        rows: rows of this generation.
        schema: fields, groups, nodes.
        layouts: how each group is cut into chunks.
        tags: hash tag of each shard. Chunk ``c`` lies in shard ``c // pieces % len(tags)``: a row is in one shard.
        created: when it was published, ISO 8601 in UTC.
        complete: nothing will be appended any more.
        last_checksums: CRC-32 of each group's last chunk, then of each heap's: appending extends their bytes. Those of
            the others lie under `checksums_key`. None where it was written without checksums.
        labels: what stands for each group's number in its chunks' keys; None where it is the number.
        values: the non-tensor fields.
        unbatched: its one row is a TensorDict without batch dims.
        device: where reads of a `RedisTensorDict` put tensors; empty for nowhere in particular.
        ring: what a replay buffer was made with (kind ``ring``).
        heaps: of the fields of variable length, in the schema's order. Where a group's number is asked for, a heap's
            is its number among them behind those of the groups.
    """

    name: str
    id: str
    kind: str
    generation: int
    rows: int
    schema: Schema
    layouts: tuple[ChunkLayout, ...]
    tags: tuple[str, ...]
    created: str
    complete: bool = False
    last_checksums: tuple[int, ...] | None = None
    labels: tuple[str, ...] | None = None
    values: tuple[Value, ...] = ()
    unbatched: bool = False
    device: str = ""
    ring: Mapping[str, Any] | None = None
    heaps: tuple[Heap, ...] = ()

    @cached_property
    def _key_heads(self) -> tuple[tuple[bytes, ...], ...]:
        labels = tuple(map(str, range(len(self.layouts)))) if self.labels is None else self.labels
        labels += tuple(f"v{number}" for number in range(len(self.heaps)))
        return tuple(tuple(f"td:{{{tag}}}:{label}:".encode() for tag in self.tags) for label in labels)

    def chunk_key(self, group: int, chunk: int) -> bytes:
        """The server's key of one chunk, of a group or of a heap."""
        return b"%s%08x" % (self._key_heads[group][self._shard(group, chunk)], chunk)

    def _shard(self, group: int, chunk: int) -> int:
        pieces = self.layouts[group].pieces if group < len(self.layouts) else 1
        return chunk // pieces % len(self.tags)

    def tag_of(self, group: int, chunk: int) -> str:
        """The hash tag of the shard that a chunk lies in."""
        return self.tags[self._shard(group, chunk)]

    def checksums_key(self, group: int) -> bytes:
        """Where the checksums of the chunks of a group or a heap lie: four bytes each, little-endian."""
        heap = group - len(self.layouts)
        label = f"{group}" if heap < 0 else f"v{heap}"
        return f"td:{{{self.tags[0]}}}:checksums:crc32:{label}".encode()

    @property
    def checksums_keys(self) -> list[bytes]:
        """Those of all groups and heaps; none where there are no checksums."""
        return [] if self.last_checksums is None else list(map(self.checksums_key, range(len(self.chunk_counts))))

    @property
    def chunk_counts(self) -> list[int]:
        """How many chunks each group has, then how many each heap."""
        return [*(layout.num_chunks(self.rows) for layout in self.layouts), *(heap.num_chunks for heap in self.heaps)]

    def chunk_bytes(self, group: int, chunk: int) -> int:
        """Bytes of records or values in a chunk of a group or a heap."""
        if group < len(self.layouts):
            return self.layouts[group].chunk_bytes(chunk, self.rows)
        return self.heaps[group - len(self.layouts)].bytes_of(chunk)

    @property
    def others(self) -> tuple[Value, ...]:
        """The fields that are no tensors."""
        return self.values

    def value_key(self, value: Value) -> bytes:
        """The server's key of a non-tensor field."""
        return f"td:{{{self.tags[0]}}}:{value.label}:json".encode()

    def heap_of(self, key: Key) -> tuple[int, Heap]:
        """The heap of a field of variable length, and the number that stands for it where a group's could."""
        number = next(number for number, heap in enumerate(self.heaps) if heap.key == key)
        return len(self.layouts) + number, self.heaps[number]

    @property
    def structure_key(self) -> bytes:
        """Where a `mutable` data set says which generation its chunks are of."""
        return f"td:{{{self.tags[0]}}}:{self.id}:structure".encode()

    @property
    def fence_keys(self) -> list[bytes]:
        """For each shard, the key that says which appender may write to its chunks."""
        return [b"td:{%s}:fence" % tag.encode() for tag in self.tags]

    @property
    def ring_keys(self) -> list[bytes]:
        """What a replay buffer keeps beside its chunks."""
        if self.kind != "ring":
            return []
        names = [b"state", b"links", b"ends", *(b"p%d" % level for level in range(8))]
        return [b"td:{%s}:%s" % (tag.encode(), name) for tag in self.tags for name in names]

    def fence_key(self, group: int, chunk: int) -> bytes:
        """The fence of the shard that a chunk lies in."""
        return self.fence_keys[self._shard(group, chunk)]

    def with_rows(
        self,
        rows: int,
        *,
        complete: bool = False,
        heap_bytes: Sequence[int] = (),
        last_checksums: tuple[int, ...] | None = None,
    ) -> Manifest:
        """The next generation, with more rows and values."""
        grown = zip(self.heaps, heap_bytes, strict=True) if heap_bytes else ()
        heaps = tuple(replace(heap, nbytes=nbytes) for heap, nbytes in grown) or self.heaps
        generation = self.generation + 1
        return replace(
            self, rows=rows, generation=generation, complete=complete, heaps=heaps, last_checksums=last_checksums
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all its records and values of variable length."""
        return sum(layout.stride_bytes for layout in self.layouts) * self.rows + sum(heap.nbytes for heap in self.heaps)

    @property
    def fingerprint(self) -> str:
        """Equal for any two generations of which one was appended to the other; different once written anew.

        It begins with the name, so that an error that shows two of them says which data set it is about.
        """
        return f"{self.name[:_MAX_SHOWN_NAME]}:{self.id}"

    def to_json(self) -> str:
        """As it is stored: indented, keys in a fixed order."""
        groups = [
            {
                "stride_bytes": group.stride_bytes,
                "record_bytes": group.record_bytes,
                "records_per_chunk": layout.records_per_chunk,
                "pieces": layout.pieces,
                "piece_bytes": layout.piece_bytes,
                "fields": [field.to_json() for field in group.fields],
            }
            for group, layout in zip(self.schema.groups, self.layouts, strict=True)
        ]
        data = {
            "format": "td_datapipes",
            "version": FORMAT_VERSION if self.heaps else 1,
            "name": self.name,
            "id": self.id,
            "kind": self.kind,
            "generation": self.generation,
            "rows": self.rows,
            "created": self.created,
            "complete": self.complete,
            "tags": list(self.tags),
            "nodes": [node.to_json() for node in self.schema.nodes],
            "groups": groups,
        }
        if self.last_checksums is not None:
            data["checksums"] = {"algorithm": "crc32", "last": list(self.last_checksums)}
        if self.labels is not None:
            data["labels"] = list(self.labels)
        if self.values:
            data["values"] = [value.to_json() for value in self.values]
        if self.unbatched:
            data["unbatched"] = True
        if self.device:
            data["device"] = self.device
        if self.ring is not None:
            data["ring"] = dict(self.ring)
        if self.heaps:
            data["heaps"] = [heap.to_json() for heap in self.heaps]
        # Each new entry of a mutable one publishes it anew, and indented text takes several times as long to make.
        return json.dumps(data, indent=None if self.kind == "mutable" else 1, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Read a manifest.

        Raises:
            SchemaError: text that is no manifest, or one of a later format.
        """
        try:
            data = json.loads(text)
            if data["format"] != "td_datapipes":
                raise ValueError(f"format {data['format']!r}")
            if data["version"] > FORMAT_VERSION:
                raise SchemaError(
                    f"the manifest of {data['name']!r} has format version {data['version']}, this release reads up to "
                    f"{FORMAT_VERSION}; upgrade td-datapipes"
                )
            return cls._from_data(data)
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, SchemaError):
                raise
            raise SchemaError(f"this is no manifest of a data set ({error!r}): {text[:200]!r}") from error

    @classmethod
    def _from_data(cls, data: Mapping[str, Any]) -> Manifest:
        groups, layouts = [], []
        for group in data["groups"]:
            fields = tuple(Field.from_json(field) for field in group["fields"])
            groups.append(
                Group(fields=fields, record_bytes=int(group["record_bytes"]), stride_bytes=int(group["stride_bytes"]))
            )
            layouts.append(
                ChunkLayout(
                    stride_bytes=int(group["stride_bytes"]),
                    records_per_chunk=int(group["records_per_chunk"]),
                    pieces=int(group["pieces"]),
                    piece_bytes=int(group["piece_bytes"]),
                )
            )
        nodes = tuple(Node.from_json(node) for node in data["nodes"])
        schema = Schema(groups=tuple(groups), nodes=nodes)
        heaps = tuple(map(Heap.from_json, data.get("heaps", ())))
        if [heap.key for heap in heaps] != [field.key for field in schema.varying_fields]:
            raise ValueError("its heaps are not those of its fields of variable length")
        last_checksums = tuple(map(int, data["checksums"]["last"])) if "checksums" in data else None
        if last_checksums is not None and len(last_checksums) != len(layouts) + len(heaps):
            raise ValueError("its checksums are not those of its groups and heaps")
        return cls(
            name=str(data["name"]),
            id=str(data["id"]),
            kind=str(data["kind"]),
            generation=int(data["generation"]),
            rows=int(data["rows"]),
            schema=schema,
            layouts=tuple(layouts),
            tags=tuple(data["tags"]),
            created=str(data["created"]),
            complete=bool(data.get("complete", False)),
            last_checksums=last_checksums,
            labels=tuple(map(str, data["labels"])) if "labels" in data else None,
            values=tuple(map(Value.from_json, data.get("values", ()))),
            unbatched=bool(data.get("unbatched", False)),
            device=str(data.get("device", "")),
            ring=data.get("ring"),
            heaps=heaps,
        )
