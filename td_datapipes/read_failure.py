"""What is said of a read that did not give what it should: which chunk, fields and rows, and the likely cause."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import redis

from td_datapipes.errors import DataLossError, DatasetChangedError, TDDatapipesError
from td_datapipes.heap_plan import HeapSlab
from td_datapipes.layouts import Layout, StoreDescription
from td_datapipes.manifest import Manifest
from td_datapipes.schema import Field, format_key
from td_datapipes.slabs import Slab
from td_datapipes.upstream import Description, find_description
from td_datapipes.wire.faults import RangeFault, error_from_text
from td_datapipes.wire.server import Server

__all__ = ["FailedRead"]


@dataclass(frozen=True, kw_only=True)
class FailedRead:
    """Whose read it was.

    Attributes:
        server: what was asked.
        manifest: what was read, as it was known.
        layout: where its bytes are.
        fields: that were read.
        varying: those of them of variable length.
    """

    server: Server
    manifest: Description
    layout: Layout
    fields: Sequence[Field]
    varying: Sequence[Field]

    def explain(self, slab: Slab, fault: RangeFault) -> TDDatapipesError:
        """The error for a range that did not come back as asked."""
        what = self._describe(slab, fault.index)
        if fault.text and not fault.text.startswith("WRONGTYPE"):
            return error_from_text(fault.text, self.server.address, f"reading {what}")
        with suppress(TDDatapipesError):
            current = find_description(self.server, self.manifest.name)
            if isinstance(self.manifest, StoreDescription):
                if isinstance(current, StoreDescription) and self.manifest.difference(current):
                    return self.changed(current)
            elif self.manifest.kind == "mutable" and current is not None and current.id == self.manifest.id:
                if current.generation != self.manifest.generation:
                    return self.changed(current)
            elif current is not None and current.id != self.manifest.id:
                return DatasetChangedError(
                    f"{what}: data set {self.manifest.name!r} has been written anew since it was opened "
                    f"({self.manifest.created}, now generation {current.generation}); open it again"
                )
        if fault.text:
            cause = f"the key holds something else ({fault.text}): another program wrote to it"
        else:
            cause = self._cause(fault.received_bytes or 0)
        return DataLossError(
            f"{what}: {fault.expected_bytes} bytes expected, {fault.received_bytes or 0} received; {cause}"
        )

    def changed(self, current: Description | None = None) -> DatasetChangedError:
        """The error for a store whose leaves are no longer what they were when it was opened."""
        found = current or find_description(self.server, self.manifest.name)
        difference = "it is another data set now"
        if isinstance(self.manifest, Manifest) and isinstance(found, Manifest) and found.id == self.manifest.id:
            difference = self.manifest.schema.difference(found.schema) or "its fields are stored anew"
        if isinstance(self.manifest, StoreDescription) and (found is None or isinstance(found, StoreDescription)):
            difference = self.manifest.difference(found) or "a field was written anew while it was read"
        return DatasetChangedError(
            f"data set {self.manifest.name!r} at {self.server.address} has changed since it was opened: {difference}; "
            f"open it again"
        )

    def _describe(self, slab: Slab, index: int) -> str:
        """Which data set, chunk, fields and rows a range is about."""
        ranges = slab.ranges()
        group, chunk = int(ranges.groups[index]), int(ranges.chunks[index])
        if isinstance(slab, HeapSlab):
            key, rows = self.layout.chunk_key(group, chunk).decode(), slab.rows_of(index).tolist()
            name = format_key(self.varying[slab.values.output].key)
            shown = ", ".join(map(str, rows[:6])) + (", ..." if len(rows) > 6 else "")
            return (
                f"data set {self.manifest.name!r} at {self.server.address}, chunk {key} (values of field {name}, of "
                f"rows {shown})"
            )
        layout = self.layout.chunk_layouts[group]
        first, stop = layout.rows_of(chunk, self.manifest.rows)
        asked = slab.rows[(slab.rows >= first) & (slab.rows < stop)]
        read = {field.key for field in self.fields}
        names = [format_key(field.key) for field in self.manifest.schema.groups[group].fields if field.key in read]
        shown = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
        key = self.layout.chunk_key(group, chunk).decode()
        return (
            f"data set {self.manifest.name!r} at {self.server.address}, chunk {key} (rows {first} to {stop - 1}; "
            f"asked for {len(asked)} of them from row {int(asked.min())} on), fields {shown}"
        )

    def _cause(self, received: int) -> str:
        """The likely cause of a missing or short chunk, from what the server says of itself."""
        facts = ""
        with suppress(TDDatapipesError):
            info = self.server.call("asking why a chunk is missing", _eviction_facts)
            if info[1]:
                facts = f" The server evicts keys: maxmemory-policy is {info[0]}, {info[1]} keys were evicted."
        state = "is missing or empty" if received == 0 else "is shorter than it was written"
        return (
            f"the chunk {state}: it was deleted, evicted (maxmemory) or lost in a restart.{facts} "
            f"Write the data set again"
        )


def _eviction_facts(client: redis.Redis) -> tuple[str, int]:
    memory, stats = client.info("memory"), client.info("stats")  # of any node, on a cluster
    return str(memory.get("maxmemory_policy", "unknown")), int(stats.get("evicted_keys", 0))
