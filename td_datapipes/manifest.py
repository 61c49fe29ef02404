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
    td:{<id>.<shard>}:fence    the number of the latest appender; chunks of the shard refuse those of earlier ones

A chunk holds whole records and `SPARE_BYTES` more. Where one record is longer than a chunk may be, it is cut into
*pieces* of ``chunk_bytes`` and each piece is a chunk of its own: piece ``p`` of row ``r`` is chunk ``r * pieces + p``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from urllib.parse import quote, unquote

from td_datapipes.errors import SchemaError
from td_datapipes.schema import Field, Group, Node, Schema

__all__ = [
    "FORMAT_VERSION",
    "NAMES_KEY",
    "SPARE_BYTES",
    "ChunkLayout",
    "Manifest",
    "appender_key",
    "appends_key",
    "encode_name",
    "manifest_key",
    "name_from_encoded",
    "staged_key",
    "superseded_key",
]

FORMAT_VERSION = 1
NAMES_KEY = b"td:names"
_MAX_SHOWN_NAME = 40
SPARE_BYTES = 32
"""Zero bytes at a chunk's end: a scattered read may ask for up to 30 bytes more than its record (see `wire_length`)."""


def encode_name(name: str) -> str:
    """The name as it stands in keys: only letters, digits and ``/-_.~`` are left as they are."""
    return quote(name, safe="/-_.~")


def name_from_encoded(encoded: bytes) -> str:
    """The inverse of `encode_name`, from a reply's bytes."""
    return unquote(encoded.decode("ascii"))


def manifest_key(name: str) -> bytes:
    """Where the published manifest of `name` lies."""
    return b"td:{%s}:manifest" % encode_name(name).encode()


def staged_key(name: str) -> bytes:
    """Where writers of `name` say what they have staged."""
    return b"td:{%s}:staged" % encode_name(name).encode()


def superseded_key(name: str) -> bytes:
    """Where earlier generations of `name` are kept until they are collected."""
    return b"td:{%s}:superseded" % encode_name(name).encode()


def appender_key(name: str) -> bytes:
    """Where the writer that is appending to `name` says so."""
    return b"td:{%s}:appender" % encode_name(name).encode()


def appends_key(name: str) -> bytes:
    """Where the writers that append to `name` are numbered."""
    return b"td:{%s}:appends" % encode_name(name).encode()


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
        last_checksums: CRC-32 of each group's last chunk, whose bytes appending extends; those of the others lie under
            `checksums_key`. None where it was written without checksums.
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

    @cached_property
    def _key_heads(self) -> tuple[tuple[bytes, ...], ...]:
        return tuple(
            tuple(b"td:{%s}:%d:" % (tag.encode(), group) for tag in self.tags) for group in range(len(self.layouts))
        )

    def chunk_key(self, group: int, chunk: int) -> bytes:
        """The server's key of one chunk."""
        return b"%s%08x" % (self._key_heads[group][self._shard(group, chunk)], chunk)

    def _shard(self, group: int, chunk: int) -> int:
        return chunk // self.layouts[group].pieces % len(self.tags)

    def tag_of(self, group: int, chunk: int) -> str:
        """The hash tag of the shard that a chunk lies in."""
        return self.tags[self._shard(group, chunk)]

    def checksums_key(self, group: int) -> bytes:
        """Where the checksums of a group's chunks lie: four bytes each, little-endian."""
        return b"td:{%s}:checksums:crc32:%d" % (self.tags[0].encode(), group)

    @property
    def checksums_keys(self) -> list[bytes]:
        """Those of all groups; none where there are no checksums."""
        return [] if self.last_checksums is None else [self.checksums_key(g) for g in range(len(self.layouts))]

    @property
    def fence_keys(self) -> list[bytes]:
        """For each shard, the key that says which appender may write to its chunks."""
        return [b"td:{%s}:fence" % tag.encode() for tag in self.tags]

    def fence_key(self, group: int, chunk: int) -> bytes:
        """The fence of the shard that a chunk lies in."""
        return self.fence_keys[self._shard(group, chunk)]

    def with_rows(
        self, rows: int, *, complete: bool = False, last_checksums: tuple[int, ...] | None = None
    ) -> Manifest:
        """The next generation, with more rows."""
        generation = self.generation + 1
        return replace(self, rows=rows, generation=generation, complete=complete, last_checksums=last_checksums)

    @property
    def nbytes(self) -> int:
        """Bytes of all its records."""
        return sum(layout.stride_bytes for layout in self.layouts) * self.rows

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
            "version": FORMAT_VERSION,
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
        return json.dumps(data, indent=1, ensure_ascii=False)

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
        return cls(
            name=str(data["name"]),
            id=str(data["id"]),
            kind=str(data["kind"]),
            generation=int(data["generation"]),
            rows=int(data["rows"]),
            schema=Schema(groups=tuple(groups), nodes=nodes),
            layouts=tuple(layouts),
            tags=tuple(data["tags"]),
            created=str(data["created"]),
            complete=bool(data.get("complete", False)),
            last_checksums=tuple(map(int, data["checksums"]["last"])) if "checksums" in data else None,
        )
