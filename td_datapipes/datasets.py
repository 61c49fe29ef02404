"""`RedisTDDataset`: the map-style data set a training loop holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

from tensordict import TensorDict
from torch.utils.data import Dataset

from td_datapipes.catalog import connect, load_manifest
from td_datapipes.cost import CostModel
from td_datapipes.errors import ConfigurationError
from td_datapipes.plan import Strategy
from td_datapipes.prefetch import AnnouncedBatch, Prefetcher
from td_datapipes.rows import resolve_index
from td_datapipes.schema import Key, Schema
from td_datapipes.store import ReadOptions, RowReader
from td_datapipes.wire.reader import ReadStats
from td_datapipes.wire.server import Server
from td_datapipes.wire.url import ServerURL

__all__ = ["RedisTDDataset"]

DEFAULT_PREFETCH_BYTES = 256 << 20


class RedisTDDataset(Dataset[TensorDict]):
    """The rows of a data set on a Redis or Valkey server, for ``torch.utils.data.DataLoader``.

    ``DataLoader(RedisTDDataset(url), batch_size=256, shuffle=True)`` needs no other argument: a batch is asked for at
    once (``__getitems__``) and torch's default collate passes it on as it is. The number of rows is pinned when the
    data set is opened. It pickles and forks: every process dials its own connection.

    Args:
        url: server and name: ``redis://[user:password@]host:port/db#name``, ``rediss://`` (TLS), ``valkey://``,
            ``unix:///path/to/socket?db=0#name`` or ``embedded:///folder#name``, with redis-py's own query options.
        fields: read only these; a nested field is a tuple of names, a node's name stands for all below it.
        strategy: ``auto`` picks by cost; ``covering``, ``pipelined`` and ``lua`` force one.
        strided: batches are views of one buffer, for one copy of the whole to a device; not contiguous.
        pin_memory: receive into page-locked memory (needs an accelerator).
        atomic: read each batch in one Lua call, one consistent snapshot of it.
        prefetch_bytes: limit of what a background thread may have requested and not yet handed over. It reads what
            the samplers of `td_datapipes.samplers` announce; other samplers announce nothing. 0 reads nothing ahead.

    Raises:
        URLError, ConfigurationError: arguments that cannot work.
        ServerUnavailableError, ServerTimeoutError, AuthenticationError: the server cannot be reached or refuses.
        DatasetNotFoundError, InterruptedWriteError, FieldNotFoundError: the server has no such data set or field.
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
        prefetch_bytes: int = DEFAULT_PREFETCH_BYTES,
    ) -> None:
        if prefetch_bytes < 0:
            raise ConfigurationError(f"prefetch_bytes must be 0 or more, got {prefetch_bytes}")
        options = ReadOptions(strategy=strategy, strided=strided, pin_memory=pin_memory, atomic=atomic)
        server = connect(url)
        try:
            manifest = load_manifest(server, server.url.name)
            chosen = manifest.schema.select(fields)
            self._reader = RowReader(server, manifest, chosen, options, CostModel())
        except BaseException:
            server.close()
            raise
        self._fields = tuple(field.key for field in chosen)
        self._set_prefetch(prefetch_bytes)

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
        batch = self._reader.read(rows)
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
        return self._prefetcher.get(cast(AnnouncedBatch, rows), numbers)

    def __iter__(self) -> Iterator[TensorDict]:
        """Row after row; a loader, or slices, are the fast ways."""
        step = 256
        for start in range(0, len(self), step):
            yield from self[start : start + step].unbind(0)

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
        return self._fields

    @property
    def stats(self) -> ReadStats:
        """Bytes, ranges, commands, rows and batches read in this process so far, and seconds waited for replies."""
        return self._reader.stats if self._prefetcher is None else self._reader.stats + self._prefetcher.stats

    @property
    def row_bytes(self) -> int:
        """Bytes read for one row."""
        return self._reader.spec.row_bytes

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
            "prefetch_bytes": self._prefetch_bytes,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        server: Server = state["server"]
        self._fields = state["fields"]
        fields = state["manifest"].schema.select(self._fields)
        self._reader = RowReader(server, state["manifest"], fields, state["options"], state["costs"])
        self._set_prefetch(state["prefetch_bytes"])

    def __repr__(self) -> str:
        fields = ", ".join(map(str, self.schema.select(self._fields)))
        return f"{type(self).__name__}({str(self.url)!r}, rows={len(self)}, fields=[{fields}])"
