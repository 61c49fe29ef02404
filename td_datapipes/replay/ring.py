"""A ring on the server: what it is made of, and what an index says. Pure, no I/O.

A ring is a data set of kind ``ring`` whose manifest has a member ``ring`` and whose records begin with a *write
number*, counted from 1 in each stripe. Stripe ``s`` of id ``I`` has, beside its chunks, under the tag ``{I.s}``::

    state          hash: cursor (rows ever written), incarnation, samples, what the scripts must know of the records;
                   server (which one wrote last) and former (incarnations before another took over, see `last_named`)
    p0, p1, ...    the tree of priorities, a double a slot and a double a node
    links          32 bytes a slot: which row follows it in its trajectory, its reward, whether it is done
    ends           hash, trajectory -> its last row and step
    by:<client>    what a client's latest calls were answered, for a day: a call repeated after a lost answer is not
                   carried out twice
    in:<client>:*  chunks of long rows on their way in, for a minute at most

Row ``w`` of a stripe of ``C`` slots lies in slot ``(w - 1) % C``. An *index*, as users see it, names a row for good:
its incarnation, write number and stripe. A slot that is written again gives its new row another index.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from td_datapipes.errors import ConfigurationError
from td_datapipes.manifest import SPARE_BYTES, ChunkLayout, Manifest
from td_datapipes.replay.joins import JOIN_BYTES, Joins
from td_datapipes.replay.options import RateLimit, Trajectories
from td_datapipes.schema import Group, Key, Schema

__all__ = [
    "ANSWER_SECONDS",
    "INDEX",
    "RESERVED",
    "WEIGHT",
    "WRITE_NUMBER",
    "Ring",
    "RingOptions",
    "last_named",
    "new_ring",
    "number_records",
    "split_index",
]

WRITE_NUMBER: Key = ("td_datapipes:write",)
INDEX, WEIGHT = "index", "weight"
RESERVED = (INDEX, WEIGHT, "n_step_return", "n_step_done", "n_step_terminated", "n_steps")
"""Fields that sampling adds."""
ANSWER_SECONDS = 86400
TREE_FAN_OUT = 16
MAX_RECORDS_PER_CHUNK = 16384
MAX_STRING_BYTES = 512 << 20
MAX_PART_BYTES = 1 << 20
"""Of records in one call: Lua copies its arguments, and what leaves the processor's cache costs twice as much."""
LONG_ROW_BYTES = 4096
"""Rows from here on are staged, see `Ring.stages`: what a string more costs is little beside their copies in Lua."""
STAGED_CHUNK_BYTES = 1 << 18
"""Of a chunk of long rows: small, so that few rows of an extend are no whole chunk."""
MAX_STAGED_BYTES = 1 << 23
"""Of records staged for one call."""
LINK_BYTES = JOIN_BYTES
_INCARNATION_BITS = 48

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class RingOptions:
    """What a ring was made with; every process that opens it has to mean the same.

    Attributes:
        capacity: rows over all stripes.
        stripes: independent rings the rows are dealt to, each within one shard.
        prioritized: whether it keeps priorities.
        trajectories: which fields join rows.
        rate_limit: how fast it may be written and sampled.
        frozen: it is a snapshot: it can be read and restored from, not written.
    """

    capacity: int
    stripes: int = 1
    prioritized: bool = True
    trajectories: Trajectories | None = None
    rate_limit: RateLimit | None = None
    frozen: bool = False

    def __post_init__(self) -> None:
        if self.stripes < 1 or self.capacity < self.stripes:
            raise ConfigurationError(
                f"a buffer has 1 stripe or more and a row or more a stripe; got capacity={self.capacity}, "
                f"stripes={self.stripes}"
            )
        if self.capacity % self.stripes:
            raise ConfigurationError(
                f"capacity={self.capacity} cannot be shared evenly by {self.stripes} stripes; "
                f"take {self.capacity // self.stripes * self.stripes}"
            )
        if self.rate_limit is not None and self.stripes > 1:
            raise ConfigurationError(
                "a rate limit counts the rows of one ring; stripes are independent: pass stripes=1 or no rate_limit"
            )

    def to_json(self) -> dict[str, Any]:
        """As the manifest keeps it."""
        joined, limit = self.trajectories, self.rate_limit
        return {
            "capacity": self.capacity,
            "stripes": self.stripes,
            "prioritized": self.prioritized,
            "trajectories": None if joined is None else joined.to_json(),
            "rate_limit": None if limit is None else limit.to_json(),
            "frozen": self.frozen,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RingOptions:
        """The inverse of `to_json`."""
        joined, limit = data["trajectories"], data["rate_limit"]
        return cls(
            capacity=int(data["capacity"]),
            stripes=int(data["stripes"]),
            prioritized=bool(data["prioritized"]),
            trajectories=None if joined is None else Trajectories.from_json(joined),
            rate_limit=None if limit is None else RateLimit.from_json(limit),
            frozen=bool(data["frozen"]),
        )


@dataclass(frozen=True)
class Ring:
    """A ring as its manifest describes it."""

    manifest: Manifest

    def __post_init__(self) -> None:
        if self.manifest.kind != "ring" or self.manifest.ring is None:
            raise ConfigurationError(
                f"{self.manifest.name!r} is a data set of kind {self.manifest.kind!r}, not a replay buffer; "
                f"open it with RedisTDDataset, or choose another name"
            )

    @cached_property
    def options(self) -> RingOptions:
        """What it was made with."""
        return RingOptions.from_json(self.manifest.ring or {})

    @cached_property
    def schema(self) -> Schema:
        """What a row is for the user: without the write number."""
        return replace(self.manifest.schema, groups=(self.user_group,))

    @cached_property
    def user_group(self) -> Group:
        """The record without its write number's field; offsets and stride as they are."""
        group = self.manifest.schema.groups[0]
        return replace(group, fields=tuple(field for field in group.fields if field.key != WRITE_NUMBER))

    @property
    def layout(self) -> ChunkLayout:
        """How records are cut into chunks."""
        return self.manifest.layouts[0]

    @property
    def stripes(self) -> int:
        """Number of independent rings."""
        return self.options.stripes

    @property
    def stripe_capacity(self) -> int:
        """Slots of one stripe."""
        return self.options.capacity // self.stripes

    @property
    def part_rows(self) -> int:
        """Rows that one call stores at most."""
        most = max(1, MAX_PART_BYTES // max(self.layout.stride_bytes, 1))
        return min(most, self.layout.records_per_chunk, self.stripe_capacity)

    @property
    def chunk_bytes(self) -> int:
        """Length of a chunk's string."""
        return self.layout.records_per_chunk * self.layout.stride_bytes + SPARE_BYTES

    @property
    def stages(self) -> bool:
        """Whether whole chunks are set as strings of their own, which then take the chunks' places."""
        return self.layout.stride_bytes >= LONG_ROW_BYTES

    def staged_rows(self, slot: int, rows: int) -> int:
        """How many of the rows that come to lie from a slot on are whole chunks and may be staged for one call."""
        chunk = self.layout.records_per_chunk
        if not self.stages or slot % chunk:
            return 0
        most = max(MAX_STAGED_BYTES // (chunk * self.layout.stride_bytes), 1) * chunk
        return min(rows, self.stripe_capacity - slot, most) // chunk * chunk

    @property
    def levels(self) -> int:
        """Levels of the tree of priorities; 0 without one."""
        if not self.options.prioritized:
            return 0
        levels, nodes = 1, self.stripe_capacity
        while nodes > TREE_FAN_OUT:
            levels, nodes = levels + 1, -(-nodes // TREE_FAN_OUT)
        return levels

    def prefix(self, stripe: int) -> bytes:
        """What the keys of a stripe begin with."""
        return b"td:{%s}:" % self.manifest.tags[stripe].encode()

    def state_key(self, stripe: int) -> bytes:
        """Where a stripe's state lies."""
        return self.prefix(stripe) + b"state"

    def client_key(self, stripe: int, client: str) -> bytes:
        """Where a client's last answer lies."""
        return self.prefix(stripe) + b"by:" + client.encode()

    def staged_key(self, stripe: int, client: str, call: int, number: int) -> bytes:
        """Where a client stages a chunk for one of its calls."""
        return self.prefix(stripe) + b"in:%s:%d:%d" % (client.encode(), call, number)

    def keys(self, stripe: int) -> list[bytes]:
        """Every key of a stripe but its state and answers, whether it is there yet or not."""
        names = [b"links", b"ends", *(b"p%d" % level for level in range(self.levels))]
        chunks = range(stripe, self.layout.num_chunks(self.manifest.rows), self.stripes)
        return [*(self.prefix(stripe) + name for name in names), *(self.manifest.chunk_key(0, c) for c in chunks)]

    def rows_of(self, stripe: int, numbers: Numbers) -> Numbers:
        """Where rows of a stripe lie: row numbers in the sense of the chunks' layout."""
        slot = (numbers - 1) % self.stripe_capacity
        chunk, within = np.divmod(slot, self.layout.records_per_chunk)
        return (chunk * self.stripes + stripe) * self.layout.records_per_chunk + within

    def indices_of(self, stripe: int, numbers: Numbers, incarnation: int) -> Numbers:
        """The indices of rows."""
        return (incarnation << _INCARNATION_BITS) | ((numbers - 1) * self.stripes + stripe)

    def state(self, stripe: int) -> dict[str, Any]:
        """A stripe's state when nothing is written yet."""
        options, layout, limit = self.options, self.layout, self.options.rate_limit
        return {
            "cursor": 0,
            "incarnation": 0,
            "server": "",
            "former": "",
            "capacity": self.stripe_capacity,
            "records_per_chunk": layout.records_per_chunk,
            "stride_bytes": layout.stride_bytes,
            "chunk_bytes": self.chunk_bytes,
            "stripes": options.stripes,
            "stripe": stripe,
            "frozen": 0,
            "levels": self.levels,
            "max_priority": 1,
            "samples": 0,
            "fifo": 0,
            "samples_per_insert": "" if limit is None else repr(limit.samples_per_insert),
            "min_size": "" if limit is None else limit.min_size,
            "min_diff": "" if limit is None else repr(limit.offset - min(limit.error_buffer, 1e300)),
            "max_diff": "" if limit is None else repr(limit.offset + min(limit.error_buffer, 1e300)),
            "joined": int(options.trajectories is not None),
        }

    @cached_property
    def joins(self) -> Joins | None:
        """What joins its rows to trajectories, if anything does."""
        joined = self.options.trajectories
        return None if joined is None else Joins(joined, self.manifest.schema, WRITE_NUMBER)


def number_records(records: npt.NDArray[np.uint8], written: int) -> None:
    """Put write numbers into the records of rows, ``[rows, stride]``, that are stored behind the first `written`."""
    rows, stride = records.shape
    np.ndarray((rows,), "<i8", records, 0, (stride,))[:] = np.arange(written + 1, written + rows + 1)


def split_index(index: Numbers, stripes: int) -> tuple[Numbers, Numbers, Numbers]:
    """Incarnations, stripes and write numbers of indices."""
    number, stripe = np.divmod(index & ((1 << _INCARNATION_BITS) - 1), stripes)
    return index >> _INCARNATION_BITS, stripe, number + 1


def last_named(named: int, cursor: int, incarnation: int, former: bytes) -> int | None:
    """The last row that indices of an incarnation still name; None where nothing is known of that incarnation.

    Args:
        named: the indices' incarnation.
        cursor: rows written by now.
        incarnation: of the stripe by now.
        former: of a stripe's state: ``incarnation cursor;`` of each time when another server took over.
    """
    if named == incarnation:
        return cursor
    last = cursor
    for entry in reversed(former.split(b";")[:-1]):
        its, at = map(int, entry.split())
        last = min(last, at)
        if its == named:
            return last
    return None


def new_ring(name: str, rows: Schema, options: RingOptions, max_chunk_bytes: int) -> Ring:
    """A ring for rows like these, under a new id.

    Raises:
        SchemaError: a field that cannot be what `options` says.
        ConfigurationError: more slots than a stripe's strings can describe.
    """
    fields = [(WRITE_NUMBER, torch.int64, ()), *((f.key, f.dtype, f.shape) for f in rows.fields.values())]
    group = Group.pack(fields)
    capacity = options.capacity // options.stripes
    described = capacity * (LINK_BYTES if options.trajectories else 8)
    if described > MAX_STRING_BYTES:
        most = MAX_STRING_BYTES // (LINK_BYTES if options.trajectories else 8)
        raise ConfigurationError(
            f"a stripe has at most {most} rows, got {capacity}: pass stripes={-(-options.capacity // most)} or more"
        )
    # A record is never cut: what tells a torn read from a whole one stands at its start.
    longest, most = max(max_chunk_bytes, group.stride_bytes), min(MAX_RECORDS_PER_CHUNK, capacity)
    if group.stride_bytes >= LONG_ROW_BYTES:
        # A power of two, as batches are: an extend is whole chunks then, and so is the next one.
        fitting = max(min(longest, STAGED_CHUNK_BYTES) // group.stride_bytes, 1)
        most = min(most, 1 << (fitting.bit_length() - 1))
    layout = ChunkLayout.for_stride(group.stride_bytes, longest, most)
    ring_id = secrets.token_hex(5)
    ring = Ring(
        Manifest(
            name=name,
            id=ring_id,
            kind="ring",
            generation=1,
            rows=-(-capacity // layout.records_per_chunk) * layout.records_per_chunk * options.stripes,
            schema=Schema(groups=(group,), nodes=rows.nodes),
            layouts=(layout,),
            tags=tuple(f"{ring_id}.{stripe}" for stripe in range(options.stripes)),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            ring=options.to_json(),
        )
    )
    ring.joins  # noqa: B018 - refuses fields that cannot join rows, before anything is written
    return ring
