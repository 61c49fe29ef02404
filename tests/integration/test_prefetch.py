"""Announced batches, read ahead by a background thread: the rows asked for, bounded memory, nothing read twice."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from rows_in_memory import assert_same_rows, random_rows
from servers import ServerProcess, wait_until
from tensordict import TensorDict
from torch.utils.data import ConcatDataset, DataLoader, RandomSampler, SequentialSampler, Subset

from td_datapipes import RedisTDDataset, write_dataset
from td_datapipes.plan import STRATEGIES, Strategy
from td_datapipes.samplers import (
    BlockShuffleBatchSampler,
    CoalescingBatchSampler,
    RowBatch,
    RowSampler,
    SliceBatchSampler,
)

ROWS = 300
CHUNK_BYTES = 4096

# torch advises against more workers than processors.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

SAMPLERS: dict[str, Callable[[Any], Any]] = {
    "rows": lambda data: CoalescingBatchSampler(RowSampler(data, seed=1), 16, window=3),
    "repeats": lambda data: CoalescingBatchSampler(
        RowSampler(data, seed=1, replacement=True, weights=np.arange(len(data)) % 7 == 3), 16
    ),
    "in_order": lambda data: CoalescingBatchSampler(SequentialSampler(data), 16, drop_last=True),
    "torch": lambda data: CoalescingBatchSampler(
        RandomSampler(data, generator=torch.Generator().manual_seed(7)), 16, window=2
    ),
    "block": lambda data: BlockShuffleBatchSampler(data, 16, seed=1, block_rows=5, buffer_blocks=9),
    "one_buffer": lambda data: BlockShuffleBatchSampler(data, 16, seed=1),
    "rank": lambda data: BlockShuffleBatchSampler(
        data, 8, seed=1, block_rows=5, buffer_blocks=9, window=2, rank=1, world_size=3
    ),
    "slices": lambda data: SliceBatchSampler(data, 4, 4, offsets=[0, 90, 97, len(data)], seed=1),
}


def small_rows(rows: int = ROWS) -> TensorDict:
    """Rows of 80 bytes."""
    nested = {"x": (torch.float32, (9,)), ("node", "y"): (torch.uint8, (5,)), ("node", "z"): (torch.bfloat16, ())}
    td = random_rows(rows, nested)
    td["row"] = torch.arange(rows)
    return td


def large_rows(rows: int = 120) -> TensorDict:
    """Rows of 48 KiB: a batch of 32 takes memory that is lent again once nobody holds it."""
    return TensorDict({"row": torch.arange(rows), "x": torch.randn(rows, 12287, dtype=torch.float32)}, [rows])


def rows_of(rows: int, nbytes: int) -> TensorDict:
    """Rows whose records have exactly that many bytes."""
    return random_rows(rows, {"x": (torch.uint8, (nbytes,))})


@pytest.fixture
def url(server: ServerProcess) -> str:
    """A data set of `small_rows`."""
    write_dataset(small_rows(), server.url("small"), chunk_bytes=CHUNK_BYTES)
    return server.url("small")


def loader_of(dataset: Any, name: str, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, batch_sampler=SAMPLERS[name](dataset), **options)


def settle(dataset: RedisTDDataset) -> int:
    """The bytes asked for, once the thread asks for no more."""
    before, since = dataset.stats.bytes, time.monotonic()
    while time.monotonic() - since < 0.03:
        time.sleep(0.005)
        if (now := dataset.stats.bytes) != before:
            before, since = now, time.monotonic()
    return before


@pytest.mark.parametrize("name", ["rows", "block", "one_buffer"])
def test_an_epoch_that_ran_to_its_end_leaves_the_next_one_its_connection(
    server: ServerProcess, url: str, name: str
) -> None:
    client = server.client()
    with RedisTDDataset(url) as dataset:
        loader, dialled = loader_of(dataset, name), []
        for _ in range(3):
            assert len(list(loader)) == len(loader)
            dialled.append(client.info("stats")["total_connections_received"])
    assert dialled[0] == dialled[1] == dialled[2]


def test_closing_again_and_again_keeps_nothing_alive(url: str) -> None:
    with RedisTDDataset(url) as dataset:
        ended = []
        for _ in range(3):
            next(iter(loader_of(dataset, "rows")))
            ended.append(weakref.ref(dataset._prefetcher._ahead))  # type: ignore[union-attr]
            dataset.close()
        gc.collect()
        assert [ref() for ref in ended] == [None] * 3


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("prefetch_bytes", [0, 4096, 1 << 20])
def test_batches_are_the_rows_asked_for(url: str, prefetch_bytes: int, strategy: Strategy, strided: bool) -> None:
    reference = small_rows()
    with RedisTDDataset(url, strategy=strategy, strided=strided, prefetch_bytes=prefetch_bytes) as dataset:
        for name, make in SAMPLERS.items():
            twin, loader = make(dataset), loader_of(dataset, name)
            seen = []
            for _ in range(2):
                expected = list(twin)
                batches = list(loader)
                assert len(batches) == len(expected), name
                for batch, rows in zip(batches, expected, strict=True):
                    assert_same_rows(batch, reference[rows])
                    assert strided or all(value.is_contiguous() for value in batch.values(True, True))
                seen.append(expected)
            assert name == "in_order" or seen[0] != seen[1], name


@pytest.mark.parametrize("name", SAMPLERS)
def test_an_epoch_that_was_broken_off_starts_again(url: str, name: str) -> None:
    reference = small_rows()
    with RedisTDDataset(url) as dataset:
        twin, loader = SAMPLERS[name](dataset), loader_of(dataset, name)
        for count in (1, 4, 7):
            for batch, rows in zip(islice(loader, count), islice(twin, count), strict=True):
                assert_same_rows(batch, reference[rows])
        for batch, rows in zip(loader, twin, strict=True):
            assert_same_rows(batch, reference[rows])


def test_rows_may_be_read_singly_between_batches(url: str) -> None:
    reference = small_rows()
    with RedisTDDataset(url) as dataset:
        for number, batch in enumerate(loader_of(dataset, "block")):
            assert_same_rows(batch, reference[batch["row"]])
            assert_same_rows(dataset[number], reference[number])
            assert_same_rows(dataset[[5, number, 5]], reference[[5, number, 5]])


def test_several_loaders_share_a_data_set(url: str) -> None:
    reference = small_rows()
    with RedisTDDataset(url) as dataset:
        one, two = loader_of(dataset, "rows"), loader_of(dataset, "block")
        expected = zip(SAMPLERS["rows"](dataset), SAMPLERS["block"](dataset), strict=True)
        for pair, rows in zip(zip(one, two, strict=True), expected, strict=True):
            assert_same_rows(pair[0], reference[rows[0]])
            assert_same_rows(pair[1], reference[rows[1]])


@pytest.mark.parametrize("name", ["rows", "block"])
def test_other_data_sets_drop_the_announcement_without_harm(url: str, name: str) -> None:
    reference = small_rows()
    with RedisTDDataset(url) as dataset:
        subset = Subset(dataset, range(ROWS - 1, -1, -1))
        for batch, rows in zip(loader_of(subset, name), SAMPLERS[name](subset), strict=True):
            assert_same_rows(batch, reference[[ROWS - 1 - row for row in rows]])
        both = ConcatDataset([dataset, dataset])
        for batch, rows in zip(loader_of(both, name), SAMPLERS[name](both), strict=True):
            assert_same_rows(batch, reference[[row % ROWS for row in rows]])


def test_announcements_that_do_not_hold_are_read_all_the_same(url: str) -> None:
    reference = small_rows()
    with RedisTDDataset(url) as dataset:
        announced = list(SAMPLERS["rows"](dataset))
        for number, told in enumerate(announced):
            rows = [(row * 7 + number) % ROWS for row in told] if number % 3 else list(told)
            batch = RowBatch(rows, ordinal=told.ordinal, window=told.window)
            assert_same_rows(dataset.__getitems__(batch), reference[rows])
        for number in (5, 2, 2, 9, 0):  # neither in order nor once each
            assert_same_rows(dataset.__getitems__(announced[number]), reference[list(announced[number])])


class TestBound:
    """What is asked for and not handed over, in bytes on the wire."""

    ROW_BYTES = 4096
    BATCH_BYTES = 16 * ROW_BYTES

    @pytest.fixture
    def rows(self, server: ServerProcess) -> str:
        write_dataset(rows_of(ROWS, self.ROW_BYTES), server.url("bounded"), chunk_bytes=1 << 16)
        return server.url("bounded")

    @pytest.mark.parametrize("batches", [1, 2, 5])
    def test_scattered_batches_stay_within_the_limit(self, rows: str, batches: int) -> None:
        # A scattered record is asked for with at most 16 bytes more, so that replies stay aligned.
        limit = batches * 16 * (self.ROW_BYTES + 16)
        with RedisTDDataset(rows, strategy="pipelined", prefetch_bytes=limit) as dataset:
            handed = 0
            most = 0
            for batch in loader_of(dataset, "rows"):
                handed += len(batch) * self.ROW_BYTES
                most = max(most, settle(dataset) - handed)
            slack = ROWS * 16
            assert most <= limit + slack
            assert most >= min(batches, 3) * self.BATCH_BYTES - slack  # and the limit is made use of

    def test_windows_stay_within_the_limit_and_one_group(self, rows: str) -> None:
        limit = 4 * self.BATCH_BYTES
        with RedisTDDataset(rows, strategy="covering", prefetch_bytes=limit) as dataset:
            before = settle(dataset)
            for batch in loader_of(dataset, "in_order"):
                asked = settle(dataset)
                assert asked - before <= limit + limit // 2 + self.BATCH_BYTES
                before += len(batch) * self.ROW_BYTES

    def test_nothing_is_read_ahead_with_a_limit_of_none(self, rows: str) -> None:
        with RedisTDDataset(rows, strategy="covering", prefetch_bytes=0) as dataset:
            for number, batch in enumerate(loader_of(dataset, "in_order"), 1):
                assert len(batch) == 16
                assert settle(dataset) == number * self.BATCH_BYTES

    def test_plain_shuffling_reads_nothing_ahead(self, rows: str) -> None:
        with RedisTDDataset(rows, strategy="covering") as dataset:
            for number, _ in enumerate(DataLoader(dataset, batch_size=16, shuffle=False), 1):
                assert settle(dataset) == min(number * 16, ROWS) * self.ROW_BYTES


@pytest.mark.parametrize(("nbytes", "block_rows"), [(256, 64), (4096, 16)])
def test_blocks_are_read_once_an_epoch(server: ServerProcess, nbytes: int, block_rows: int) -> None:
    rows = 4096
    reference = rows_of(rows, nbytes)
    write_dataset(reference, server.url("blocks"), chunk_bytes=1 << 18)
    with RedisTDDataset(server.url("blocks")) as dataset:
        sampler = BlockShuffleBatchSampler(dataset, 64, seed=2, block_rows=block_rows, buffer_blocks=16)
        for epoch in (1, 2):
            for batch, wanted in zip(DataLoader(dataset, batch_sampler=sampler), sampler, strict=True):
                assert_same_rows(batch, reference[wanted])
            sampler.set_epoch(epoch)
            assert rows * nbytes <= dataset.stats.bytes / epoch <= 1.02 * rows * nbytes


HOLDS: dict[str, Callable[[TensorDict], Any]] = {
    "batch": lambda batch: batch,
    "field": lambda batch: batch["x"],
    "slice": lambda batch: batch[3:7],
    "row": lambda batch: batch[5],
    "view": lambda batch: batch["x"].view(-1)[5:],
    "numpy": lambda batch: batch["x"].numpy(),
    "numpy_slice": lambda batch: batch["x"].numpy()[4:, ::2],
    "bytes": lambda batch: memoryview(batch["x"].numpy()),
    "detached": lambda batch: batch["x"].detach(),
    "storage": lambda batch: batch["x"].untyped_storage(),
}


def content_of(held: Any) -> bytes:
    if isinstance(held, TensorDict):
        return content_of(held["x"]) + content_of(held["row"])
    if isinstance(held, torch.UntypedStorage):
        held = torch.tensor([], dtype=torch.uint8).set_(held)
    return bytes(np.ascontiguousarray(np.asarray(held)).tobytes())


@pytest.mark.parametrize("prefetch_bytes", [0, 1 << 25], ids=["asked", "ahead"])
@pytest.mark.parametrize("hold", HOLDS)
@pytest.mark.parametrize("name", ["rows", "block"])
def test_memory_is_lent_again_only_when_nobody_holds_the_batch(
    server: ServerProcess, name: str, hold: str, prefetch_bytes: int
) -> None:
    reference = large_rows()
    write_dataset(reference, server.url("large"))
    make: dict[str, Callable[[Any], Any]] = {
        "rows": lambda data: CoalescingBatchSampler(RowSampler(data), 30),
        "block": lambda data: BlockShuffleBatchSampler(data, 30, block_rows=10, buffer_blocks=6),
    }
    with RedisTDDataset(server.url("large"), prefetch_bytes=prefetch_bytes) as dataset:
        sampler = make[name](dataset)
        held, expected = [], []
        for _ in range(3):
            for batch in DataLoader(dataset, batch_sampler=sampler):
                held.append(HOLDS[hold](batch))
                # What a held storage holds beside the batch is whatever was read together with it.
                own = hold != "storage"
                expected.append(content_of(HOLDS[hold](reference[batch["row"]])) if own else content_of(held[-1]))
                del batch
        assert [content_of(one) for one in held] == expected


def test_memory_of_batches_that_nobody_holds_is_used_again(server: ServerProcess) -> None:
    write_dataset(large_rows(), server.url("large"))
    with RedisTDDataset(server.url("large"), prefetch_bytes=1 << 25) as dataset:
        sampler = CoalescingBatchSampler(RowSampler(dataset), 30)
        places = []
        for _ in range(6):
            for batch in DataLoader(dataset, batch_sampler=sampler):
                places.append(batch["x"].data_ptr())
                del batch
        # All four batches of an epoch may be on their way at once, and one is in use.
        assert len(places) == 24
        assert len(set(places)) <= 10


def delivered_bytes(server: ServerProcess) -> int:
    """What the server has sent to all its clients so far."""
    return int(server.client().info("stats")["total_net_output_bytes"])


WORKERS = [
    pytest.param({"num_workers": 0}, id="in_process"),
    pytest.param({"num_workers": 2, "multiprocessing_context": "fork"}, id="fork"),
    pytest.param({"num_workers": 3, "multiprocessing_context": "fork", "prefetch_factor": 1}, id="three"),
    pytest.param({"num_workers": 2, "persistent_workers": True}, id="persistent"),
]
SPAWN = {"num_workers": 2, "multiprocessing_context": "spawn", "persistent_workers": True}


class TestWorkers:
    @pytest.mark.parametrize("options", [*WORKERS, pytest.param(SPAWN, id="spawn", marks=pytest.mark.heavy)])
    def test_no_row_is_read_twice(self, server: ServerProcess, options: dict[str, Any]) -> None:
        reference = rows_of(600, 4096)
        write_dataset(reference, server.url("parted"))
        with RedisTDDataset(server.url("parted"), strategy="pipelined") as dataset:
            sampler = CoalescingBatchSampler(RowSampler(dataset, seed=4), 16, window=4)
            twin = CoalescingBatchSampler(RowSampler(dataset, seed=4), 16)
            loader = DataLoader(dataset, batch_sampler=sampler, **options)
            began = delivered_bytes(server)
            for _ in range(2):
                for batch, wanted in zip(loader, twin, strict=True):
                    assert_same_rows(batch, reference[wanted])
            # Headers, trailers and alignment are 32 bytes a row; manifests and INFO are a few thousand in all.
            assert 2 * 600 * 4096 < delivered_bytes(server) - began < 2 * 600 * (4096 + 32) + 40_000

    @pytest.mark.parametrize("options", WORKERS)
    @pytest.mark.parametrize("name", ["block", "slices"])
    def test_batches_are_the_rows_asked_for(self, url: str, name: str, options: dict[str, Any]) -> None:
        reference = small_rows()
        with RedisTDDataset(url, prefetch_bytes=1 << 16) as dataset:
            assert_same_rows(dataset[:3], reference[:3])
            twin, loader = SAMPLERS[name](dataset), loader_of(dataset, name, **options)
            list(islice(loader, 2))
            loader.batch_sampler.set_epoch(0)  # workers may have drawn the epoch to its end
            for _ in range(2):
                for batch, rows in zip(loader, twin, strict=True):
                    assert_same_rows(batch, reference[rows])
            assert_same_rows(dataset[[8, 2, 2]], reference[[8, 2, 2]])

    def test_workers_begin_while_the_parent_reads_ahead(self, url: str) -> None:
        reference = small_rows()
        with RedisTDDataset(url, prefetch_bytes=4096) as dataset:
            outer: Iterator[TensorDict] = iter(loader_of(dataset, "rows"))
            before = [next(outer) for _ in range(3)]
            inner = list(loader_of(dataset, "block", num_workers=2, multiprocessing_context="fork"))
            twin = list(SAMPLERS["rows"](range(ROWS)))
            for batch, rows in zip([*before, *outer], twin, strict=True):
                assert_same_rows(batch, reference[rows])
            assert sorted(torch.cat([batch["row"] for batch in inner]).tolist()) == list(range(ROWS))


def test_the_next_batches_are_on_their_way_before_they_are_asked_for(url: str) -> None:
    with RedisTDDataset(url, strategy="pipelined") as dataset:
        batches = iter(loader_of(dataset, "rows"))
        next(batches)
        # Windows of three batches: this one's other two and the next one's three.
        wait_until(lambda: dataset.stats.bytes >= 6 * 16 * dataset.row_bytes, "five more batches to be read", 5)
        assert settle(dataset) < 7 * 16 * dataset.row_bytes


def test_a_consumer_in_a_hurry_is_read_ahead_for_once_it_stays_away(url: str) -> None:
    with RedisTDDataset(url, strategy="pipelined") as dataset:
        loader = loader_of(dataset, "rows")
        for _ in range(3):  # at once, batch after batch: it reads by itself
            assert sum(map(len, loader)) == ROWS
        before = dataset.stats.bytes
        next(iter(loader))
        wait_until(lambda: dataset.stats.bytes >= before + 6 * 16 * dataset.row_bytes, "two windows to be read", 5)


def test_consumers_in_several_threads_get_their_rows(url: str) -> None:
    reference = small_rows()
    with RedisTDDataset(url) as dataset, ThreadPoolExecutor(3) as pool:

        def epoch(name: str) -> int:
            count = 0
            for batch, rows in zip(loader_of(dataset, name), SAMPLERS[name](dataset), strict=True):
                assert_same_rows(batch, reference[rows])
                count += len(rows)
            return count

        assert list(pool.map(epoch, ["block", "rows", "one_buffer"])) == [ROWS] * 3
