"""`RedisTDMixture`: several data sets mixed in fixed shares, as one map-style data set with a batch sampler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

from td_datapipes.datasets import DEFAULT_PREFETCH_BYTES, RedisTDDataset
from td_datapipes.errors import ConfigurationError
from td_datapipes.heap_batch import Ragged, Strings
from td_datapipes.joined import JoinedRows
from td_datapipes.mixing import MixtureOrder, SourceShape, slots_of_weights
from td_datapipes.plan import Strategy
from td_datapipes.samplers.base import PositionSampler, check_positive
from td_datapipes.samplers.batch import RowBatch
from td_datapipes.samplers.block_shuffle import BLOCK_BYTES, BUFFER_BYTES
from td_datapipes.samplers.states import Position
from td_datapipes.samplers.windows import OrderedBatches, WindowDealer
from td_datapipes.shares import Share, fingerprint

__all__ = ["MixtureBatchSampler", "RedisTDMixture"]


class RedisTDMixture(JoinedRows):
    """Several data sets of the same fields, mixed in exact shares.

        mixture = RedisTDMixture([("redis://host/0#code", 7), ("redis://host/0#prose", 3)], seed=0)
        loader = StatefulDataLoader(mixture, batch_sampler=mixture.batch_sampler(256))

    As a map-style data set its rows are the sources' rows one after another; the shares are the batch sampler's. Of
    every `period` rows it draws, each source gives exactly its `slots`; within a period they come in random order.
    Each source runs through epochs of its own, in a new order each time, whatever the mixture's epoch: a small source
    with a large weight comes around often.

    Args:
        sources: a URL and a weight > 0 each. Integers, fractions and decimals are kept exactly, if the period has at
            most 65,536 rows; else shares are rounded to so many parts.
        seed: of all orders, >= 0.
        fields, strategy, strided, pin_memory, ragged, pad_value, max_length, strings, allow_pickle: as for
            `RedisTDDataset`.
        prefetch_bytes: limit of what may be read ahead, over all sources, divided by weight.

    Raises:
        ConfigurationError: a weight that is not above 0, or an empty source.
        SchemaError: fields that differ between sources; it names the field and both data sets.
        TDDatapipesError: as `RedisTDDataset`, for any of the sources.
    """

    def __init__(
        self,
        sources: Sequence[tuple[str, float | int | Fraction]],
        seed: int = 0,
        *,
        fields: Sequence[str | tuple[str, ...]] | None = None,
        strategy: Strategy = "auto",
        strided: bool = False,
        pin_memory: bool = False,
        prefetch_bytes: int = DEFAULT_PREFETCH_BYTES,
        ragged: Ragged = "jagged",
        pad_value: float = 0,
        max_length: int | None = None,
        strings: Strings = "stack",
        allow_pickle: bool = False,
    ) -> None:
        self.seed = seed
        self.slots = slots_of_weights([weight for _, weight in sources])
        opened: list[RedisTDDataset] = []
        try:
            for (url, _), slots in zip(sources, self.slots, strict=True):
                source = RedisTDDataset(
                    url,
                    fields=fields,
                    strategy=strategy,
                    strided=strided,
                    pin_memory=pin_memory,
                    ragged=ragged,
                    pad_value=pad_value,
                    max_length=max_length,
                    strings=strings,
                    allow_pickle=allow_pickle,
                    prefetch_bytes=prefetch_bytes and max(prefetch_bytes * slots // self.period, 1),
                )
                opened.append(source)
                if not len(source):
                    raise ConfigurationError(f"data set {source.name!r} has no rows: it can have no share of a mixture")
            super().__init__(opened)
        except BaseException:
            for source in opened:
                source.close()
            raise

    @property
    def period(self) -> int:
        """Rows within which every source has exactly its share."""
        return sum(self.slots)

    @property
    def shares(self) -> tuple[Fraction, ...]:
        """Each source's part of all rows drawn, as it is kept."""
        return tuple(Fraction(slots, self.period) for slots in self.slots)

    @property
    def fingerprint(self) -> str:
        """Which data sets, how many rows of each, in which shares."""
        return "+".join(
            f"{slots}*{source.fingerprint}:{len(source)}"
            for slots, source in zip(self.slots, self.sources, strict=True)
        )

    def refresh(self) -> int:
        """A mixture is pinned when it is opened: its order depends on the rows of every source.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError("a mixture is pinned to the rows its sources had; open it again to see more")

    def batch_sampler(
        self,
        batch_size: int,
        *,
        shuffle: bool = True,
        num_samples: int | None = None,
        drop_last: bool = False,
        buffer_bytes: int = BUFFER_BYTES,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> MixtureBatchSampler:
        """The batches that keep the shares; see `MixtureBatchSampler`."""
        return MixtureBatchSampler(
            self,
            batch_size,
            shuffle=shuffle,
            num_samples=num_samples,
            drop_last=drop_last,
            buffer_bytes=buffer_bytes,
            rank=rank,
            world_size=world_size,
        )


class MixtureBatchSampler(PositionSampler[RowBatch]):
    """Batches of a mixture, announced a window ahead, with a place that can be saved; as the other samplers have.

    An epoch is `num_samples` rows of one endless stream, and the next epoch goes on where it stopped: shares are kept,
    and sources go through their own epochs, across it. (Except for what `drop_last` leaves out.)

    Args:
        mixture: what is mixed.
        batch_size: rows of this rank's batch.
        shuffle: block-shuffle each source, with a part of the buffer by its share; else its rows come in order.
        num_samples: rows of an epoch over all ranks; by default as many as the sources have together.
        drop_last: leave out an epoch's last global batch that is not full, else divide and pad it.
        buffer_bytes: what a reader holds for the buffers of all sources together; twice that at a border.
        rank, world_size: by default the default process group's, else 0 of 1.
    """

    def __init__(
        self,
        mixture: RedisTDMixture,
        batch_size: int,
        *,
        shuffle: bool = True,
        num_samples: int | None = None,
        drop_last: bool = False,
        buffer_bytes: int = BUFFER_BYTES,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        super().__init__(
            mixture,
            seed=mixture.seed,
            batch_size=batch_size,
            drop_last=drop_last,
            rank=rank,
            world_size=world_size,
        )
        check_positive(buffer_bytes=buffer_bytes, num_samples=1 if num_samples is None else num_samples)
        self.num_samples = num_samples
        self._shuffle = shuffle
        row_bytes = max(mixture.row_bytes, 1)
        self._buffer_rows = max(buffer_bytes // row_bytes, 1)
        block_rows = max(BLOCK_BYTES // row_bytes, 1)
        self._slots = mixture.slots
        self._sources = tuple(
            SourceShape(
                rows=len(source),
                first_row=first_row,
                block_rows=block_rows,
                buffer_blocks=max(int(self._buffer_rows * share) // block_rows, 1),
                shuffle=shuffle,
            )
            for source, first_row, share in zip(mixture.sources, mixture.offsets[:-1], mixture.shares, strict=True)
        )

    def _length(self, rows: int) -> int:
        return self.num_samples or rows

    def _fingerprint(self, rows: int) -> str:
        return fingerprint(
            "MixtureBatchSampler",
            self.data_source,
            rows,
            length=self._length(rows),
            block_rows=self._sources[0].block_rows,
            buffer_rows=self._buffer_rows,
            shuffle=self._shuffle,
        )

    def _dealer(self, position: Position, share: Share) -> WindowDealer:
        order = MixtureOrder(self._sources, self._slots, self.seed, position.epoch * share.length)
        return WindowDealer(OrderedBatches(order, share), self._window_stop(share), lazy=True)

    def _window_stop(self, share: Share) -> Callable[[int], int]:
        window = max(self._buffer_rows // share.global_batch_rows, 1)
        return lambda batch: (batch // window + 1) * window
