"""`RedisTDDataset`: the map-style data set a training loop holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, cast

import torch
from tensordict import TensorDict
from torch.utils.data import Dataset

from td_datapipes.catalog import connect
from td_datapipes.collate import register_collate
from td_datapipes.cost import CostModel
from td_datapipes.errors import ConfigurationError, DatasetChangedError, FieldNotFoundError, RowIndexError
from td_datapipes.extras import Extra, ExtraFields, extra_fields, select_fields
from td_datapipes.heap_batch import Ragged, RaggedOptions, Strings
from td_datapipes.layouts import StoreDescription
from td_datapipes.manifest import Manifest
from td_datapipes.placement import Placement
from td_datapipes.plan import Strategy
from td_datapipes.prefetch import AnnouncedBatch, Prefetcher
from td_datapipes.read_spec import Rows
from td_datapipes.replica_reads import ReplicaReader
from td_datapipes.reports import Reporter
from td_datapipes.rows import resolve_index
from td_datapipes.schema import Field, Key, Schema, format_key, normalise_key
from td_datapipes.store import ReadOptions, RowReader
from td_datapipes.upstream import Description, find_description, open_description
from td_datapipes.wire.reader import ReadStats
from td_datapipes.wire.retry import RetryPolicy
from td_datapipes.wire.server import Server
from td_datapipes.wire.url import ServerURL

__all__ = ["RedisTDDataset"]

# Whoever has one of these may give its rows to torch's loaders. Not with the package: that would import torch.
register_collate()

DEFAULT_PREFETCH_BYTES = 256 << 20


class RedisTDDataset(Dataset[TensorDict]):
    """The rows of a data set on a Redis or Valkey server, for ``torch.utils.data.DataLoader``.

    ``DataLoader(RedisTDDataset(url), batch_size=256, shuffle=True)`` needs no other argument: a batch is asked for at
    once (``__getitems__``) and torch's default collate passes it on as it is. The number of rows is pinned when the
    data set is opened. It pickles and forks: every process dials its own connection.

    Args:
        url: server and name: ``redis://[user:password@]host:port/db#name``, ``rediss://`` (TLS), ``valkey://``,
            ``unix:///path/to/socket?db=0#name`` or ``embedded:///folder#name``, with redis-py's own query options.
            What ``tensordict.store.TensorDictStore`` wrote is named by its ``td_id``, or ``namespace:td_id``.
        fields: read only these; a nested field is a tuple of names, a node's name stands for all below it.
        strategy: ``auto`` picks by cost; ``covering``, ``pipelined`` and ``lua`` force one.
        strided: batches are views of one buffer, for one copy of the whole to a device; not contiguous.
        pin_memory: receive into page-locked memory (needs an accelerator).
        atomic: read each batch in one step, one consistent snapshot of it.
        placement: read only what this rank keeps of a batch: of each row the bytes of its part. Which rows are its own
            is up to the sampler, made with ``rank=dataset.data_rank, world_size=dataset.data_world_size``. Batches are
            plain tensors; `DTensorCollate` places them.
        read_once_per: a mesh axis along which all fields are replicated: one rank of each group along it reads, the
            others receive its batches. All of them have to read the same batches in the same order.
        prefetch_bytes: limit of what a background thread may have requested and not yet handed over. It reads what
            the samplers of `td_datapipes.samplers` announce; other samplers announce nothing. 0 reads nothing ahead.
        read_from: ``replica`` reads from a replica of each master of a cluster (or of the sentinels' master) where
            there is one. Rows of a frozen generation are the same there; what a replica lacks or cannot serve is read
            from its master. What is written in place may be older there.
        verify: compare every chunk that is read whole (adjacent rows, all fields; of a field of variable length, all
            values in it) with its checksum. Reads of single rows see no whole chunk; `verify_dataset` looks at all.
        retry: how often and how long what failed is tried again; by default as the URL's ``retry_...`` options say.
        ragged: tensors of variable length become ``jagged`` nested tensors, or are padded to the longest row of the
            batch (``pad``), with a bool mask of what is no padding beside them: that of ``tokens`` is ``tokens_mask``.
        pad_value: what they are padded with.
        max_length: take at most so many items of each row of a tensor of variable length; what is behind is not read.
        strings: strings, bytes and JSON values of variable length become a ``NonTensorStack`` (``stack``), or an
            `ArrowRows` with a pyarrow array (``arrow``).
        allow_pickle: read values that ``TensorDictStore`` pickled. Whoever can write to the server can then run code
            in this process.

    Raises:
        URLError, ConfigurationError: arguments that cannot work.
        ServerUnavailableError, ServerTimeoutError, AuthenticationError: the server cannot be reached or refuses.
        DatasetNotFoundError, InterruptedWriteError, FieldNotFoundError: the server has no such data set or field.
        PickledValueError: a field was pickled, and `allow_pickle` is not set.
    """

    def __init__(
        self,
        url: str,
        *,
        fields: Sequence[str | tuple[str, ...]] | None = None,
        strategy: Strategy = "auto",
        strided: bool = False,
        pin_memory: bool = False,
        atomic: bool = False,
        placement: Placement | None = None,
        read_once_per: str | int | None = None,
        prefetch_bytes: int = DEFAULT_PREFETCH_BYTES,
        read_from: Literal["master", "replica"] = "master",
        verify: bool = False,
        retry: RetryPolicy | None = None,
        allow_pickle: bool = False,
        ragged: Ragged = "jagged",
        pad_value: float = 0,
        max_length: int | None = None,
        strings: Strings = "stack",
    ) -> None:
        if prefetch_bytes < 0:
            raise ConfigurationError(f"prefetch_bytes must be 0 or more, got {prefetch_bytes}")
        varying = RaggedOptions(ragged=ragged, pad_value=pad_value, max_length=max_length, strings=strings)
        options = ReadOptions(
            strategy=strategy,
            strided=strided,
            pin_memory=pin_memory,
            atomic=atomic,
            read_from=read_from,
            verify=verify,
            ragged=varying,
        )
        server = connect(url, retry=retry)
        try:
            manifest = open_description(server, server.url.name)
            if getattr(manifest, "kind", "") == "ring":
                raise ConfigurationError(
                    f"{server.url.name!r} is a replay buffer, whose rows are overwritten while it is read; "
                    f"open it with RedisReplayBuffer"
                )
            chosen, others = select_fields(manifest, fields)
            many = isinstance(manifest, Manifest) and len(manifest.tags) > 1
            if atomic and many and server.cluster() is not None:
                raise ConfigurationError(
                    f"atomic=True reads a batch in one step, which a cluster does within one shard only; "
                    f"{manifest.name!r} has several. Write it with shards=1 for that"
                )
            self._open(server, manifest, chosen, options, CostModel(), placement)
            self._open_extras(others, allow_pickle)
            self._once_per = read_once_per
            self._once = self._replica_reader()
        except BaseException:
            server.close()
            raise
        self._set_prefetch(prefetch_bytes)

    def _open(
        self,
        server: Server,
        manifest: Description,
        fields: Sequence[Field],
        options: ReadOptions,
        costs: CostModel,
        placement: Placement | None,
    ) -> None:
        self._fields = tuple(field.key for field in fields)
        self._placement = placement
        self._share = None if placement is None else placement.resolve(fields, known_keys=manifest.schema.fields)
        # What the rows are cut over has to be the same for all fields: this raises where it is not.
        self._data_ranks = (0, 1) if self._share is None else (self._share.data_rank, self._share.data_world_size)
        parts = None if self._share is None else self._share.parts
        self._reader = RowReader(server, manifest, fields, options, costs, parts)
        self._reporter = Reporter(server, manifest.name)

    def _open_extras(self, leaves: Sequence[Extra], allow_pickle: bool) -> None:
        self._allow_pickle = allow_pickle
        reader = self._reader
        self._extras: ExtraFields | None = extra_fields(
            reader.server, reader.manifest, leaves, allow_pickle=allow_pickle
        )

    def _whole(self, batch: TensorDict, rows: Rows) -> TensorDict:
        """With the fields that are no dense tensors. Rows that differ in shape make it a lazy stack of rows."""
        return batch if self._extras is None else cast(TensorDict, self._extras.add(batch, rows))

    def _replica_reader(self) -> ReplicaReader | None:
        axis = self._once_per
        if axis is None:
            return None
        if self._placement is None or self._share is None:
            raise ConfigurationError(f"read_once_per={axis!r} names an axis of a placement's mesh; pass placement=")
        return ReplicaReader(self._placement, self._share, axis, self._reader)

    def _shared(self, rows: Rows, read: Callable[[Rows], TensorDict]) -> TensorDict:
        """Read by this rank, or by another for it."""
        if self._once_per is None:
            return read(rows)
        if self._once is None:  # A worker's copy: this raises, and says so where the loader shows it.
            self._once = self._replica_reader()
        return read(rows) if self._once is None else self._once.read(rows, read)

    def _set_prefetch(self, prefetch_bytes: int) -> None:
        self._prefetch_bytes = prefetch_bytes
        self._prefetcher = Prefetcher(self._reader, prefetch_bytes) if prefetch_bytes else None

    def __len__(self) -> int:
        return self._reader.manifest.rows

    def __getitem__(self, index: Any) -> TensorDict:
        """One row (batch size ``[]``) for an int, else a batch in the order asked, repeats kept.

        Args:
            index: an int, slice, range, list, numpy array or tensor of row numbers, or a bool mask ``[rows]``.

        Raises:
            RowIndexError: a row outside the data set, or an index that selects no rows.
            DataLossError: the server no longer has what it should; see `errors` for the others.
        """
        rows, shape = resolve_index(index, len(self), self.name)
        if len(shape) > 1 and self._reader.has_jagged:
            raise RowIndexError(
                f"index of shape {tuple(shape)} reshapes the batch, which cannot be done with jagged tensors: index "
                f"{self.name!r} with one dim, or open it with ragged='pad'"
            )
        batch = self._whole(self._shared(rows, self._reader.read), rows)
        self._reporter.tick(lambda: self.stats)
        if len(shape) == 1:
            return batch
        return batch.reshape(*shape, *batch.batch_size[1:]) if shape else batch[0]

    def __getitems__(self, rows: Sequence[int]) -> TensorDict:
        """A batch: what ``DataLoader`` calls with the row numbers of its batch sampler.

        A batch that a sampler of `td_datapipes.samplers` announced comes from what was read ahead.
        """
        if self._prefetcher is None or getattr(rows, "window", None) is None:
            return self[rows]
        numbers, _ = resolve_index(rows, len(self), self.name)
        prefetcher, announced = self._prefetcher, cast(AnnouncedBatch, rows)
        batch = self._whole(self._shared(numbers, lambda numbers: prefetcher.get(announced, numbers)), numbers)
        self._reporter.tick(lambda: self.stats)
        return batch

    def join(self, parts: Sequence[TensorDict]) -> TensorDict:
        """Batches of this data set, or of others that have its fields and were opened alike, one behind the other.

        Unlike ``torch.cat`` it also joins padded batches of several widths and `ArrowRows`. It may change `parts`.
        """
        return self._reader.join(parts)

    def lengths(self, field: str | tuple[str, ...] | None = None, *, start: int = 0) -> torch.Tensor:
        """How many items each row of a field of variable length has: at most `max_length`, 0 where it has no value.

        Only the lengths are read, in blocks. Of strings, bytes and JSON values they are bytes.

        Args:
            field: by default the one tensor of variable length there is.
            start: the first row asked for.

        Returns:
            int64 ``[rows - start]``.

        Raises:
            ConfigurationError: no field is given and there is not one tensor of variable length, or `start` is no row.
            FieldNotFoundError: there is no such field of variable length.
        """
        if not 0 <= start <= len(self):
            raise ConfigurationError(f"start must be in [0, {len(self)}], got {start}")
        return self._reader.lengths(_varying_field(self.schema, field), start)

    def __iter__(self) -> Iterator[TensorDict]:
        """Row after row; a loader, or slices, are the fast ways."""
        step = 256
        for start in range(0, len(self), step):
            yield from self[start : start + step].unbind(0)

    def refresh(self) -> int:
        """Take in the rows that were appended since it was opened; in this process and in copies made from here on.

        Returns:
            How many rows it has now.

        Raises:
            DatasetChangedError: it was removed, or written anew. The message says which; open it again.
        """
        pinned = self._reader.manifest
        found = find_description(self._reader.server, pinned.name)
        where = f"data set {pinned.name!r} at {self._reader.server.address}"
        if found is None:
            raise DatasetChangedError(f"{where} has been removed since it was opened with {pinned.rows} rows")
        if isinstance(pinned, StoreDescription) and isinstance(found, StoreDescription):
            if difference := pinned.difference(found):
                raise DatasetChangedError(f"{where} has changed since it was opened: {difference}; open it again")
            return len(self)
        if found.id != pinned.id:
            raise DatasetChangedError(
                f"{where} has been written anew since it was opened: {pinned.rows} rows of generation "
                f"{pinned.generation} then, {found.rows} of {found.generation} now; open it again"
            )
        if found.generation > pinned.generation:
            self._reader.pin(found)
        return len(self)

    @property
    def complete(self) -> bool:
        """Whether its writer has said that nothing will be appended any more."""
        return self._reader.manifest.complete

    @property
    def name(self) -> str:
        """The data set's name."""
        return self._reader.manifest.name

    @property
    def url(self) -> ServerURL:
        """Where it is; its repr has no credentials."""
        return self._reader.server.url

    @property
    def schema(self) -> Schema:
        """What a row is: fields with dtypes and shapes, nested nodes."""
        return self._reader.manifest.schema

    @property
    def fields(self) -> tuple[Key, ...]:
        """The fields that are read, as tuples of names."""
        return self._fields if self._extras is None else (*self._fields, *(leaf.key for leaf in self._extras.leaves))

    @property
    def stats(self) -> ReadStats:
        """Bytes, ranges, commands, rows and batches read in this process so far, and seconds waited for replies."""
        return self._reader.stats if self._prefetcher is None else self._reader.stats + self._prefetcher.stats

    @property
    def row_bytes(self) -> int:
        """Bytes read for one row, of all its parts where a placement leaves some to other ranks."""
        return self._reader.whole_row_bytes

    @property
    def placement(self) -> Placement | None:
        """The placement it was opened with."""
        return self._placement

    @property
    def data_rank(self) -> int:
        """Which part of a global batch's rows is this rank's: the ``rank`` to give a sampler. 0 without a placement."""
        return self._data_ranks[0]

    @property
    def data_world_size(self) -> int:
        """In how many parts ranks share the rows: the ``world_size`` to give a sampler. 1 without a placement."""
        return self._data_ranks[1]

    @property
    def fingerprint(self) -> str:
        """Tells this data set's rows from others': the same after appending, another once written anew."""
        return self._reader.manifest.fingerprint

    def close(self) -> None:
        """Drop the connections and the hold on an embedded server. Reading again dials anew."""
        if self._prefetcher is not None:
            self._prefetcher.close()
        self._reader.close()

    def __enter__(self) -> RedisTDDataset:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        reader = self._reader
        return {
            "server": reader.server,
            "manifest": reader.manifest,
            "options": reader.options,
            "costs": reader.costs,
            "fields": self._fields,
            "placement": self._placement,
            "read_once_per": self._once_per,
            "prefetch_bytes": self._prefetch_bytes,
            "extras": () if self._extras is None else self._extras.leaves,
            "allow_pickle": self._allow_pickle,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        server: Server = state["server"]
        fields = state["manifest"].schema.select(state["fields"])
        self._open(server, state["manifest"], fields, state["options"], state["costs"], state["placement"])
        self._open_extras(state["extras"], state["allow_pickle"])
        self._once_per, self._once = state["read_once_per"], None
        self._set_prefetch(state["prefetch_bytes"])

    def __repr__(self) -> str:
        fields = ", ".join(map(str, self.schema.select(self._fields)))
        return f"{type(self).__name__}({str(self.url)!r}, rows={len(self)}, fields=[{fields}])"


def _varying_field(schema: Schema, wanted: str | tuple[str, ...] | None) -> Field:
    """The field of variable length that is meant."""
    known = schema.varying_fields
    names = ", ".join(format_key(field.key) for field in known) or "none"
    if wanted is None:
        tensors = [field for field in known if field.varying is not None and field.varying.kind == "tensor"]
        if len(tensors) != 1:
            raise ConfigurationError(f"name the field whose lengths are meant; those of variable length are {names}")
        return tensors[0]
    key = normalise_key(wanted)
    found = next((field for field in known if field.key == key), None)
    if found is None:
        raise FieldNotFoundError(f"there is no field {format_key(key)} of variable length; there are {names}")
    return found
