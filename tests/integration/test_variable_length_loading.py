"""Fields of variable length through loaders: read ahead, by workers, bucketed by length, resumed, streamed."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from ragged_in_memory import RaggedRows, jagged
from rows_in_memory import assert_same_tensor
from servers import ServerProcess
from tensordict import TensorDict
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from td_datapipes import (
    RedisTDDataset,
    RedisTDIterableDataset,
    RedisTDIterDataPipe,
    RedisTDMixture,
    append_dataset,
    write_dataset,
)
from td_datapipes.errors import DataLossError
from td_datapipes.keys import manifest_key
from td_datapipes.manifest import Manifest
from td_datapipes.samplers import (
    BlockShuffleBatchSampler,
    CoalescingBatchSampler,
    LengthBatchSampler,
    RowSampler,
    SliceBatchSampler,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*set_vital.*"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]

ROWS = 300
CHUNK_BYTES = 1024

SAMPLERS: dict[str, Callable[[Any], Any]] = {
    "rows": lambda data: CoalescingBatchSampler(RowSampler(data, seed=1), 16, window=3),
    "repeats": lambda data: CoalescingBatchSampler(
        RowSampler(data, seed=1, replacement=True, weights=np.arange(len(data)) % 7 == 3), 16
    ),
    "in_order": lambda data: CoalescingBatchSampler(range(len(data)), 16, window=4),
    "block": lambda data: BlockShuffleBatchSampler(data, 16, seed=1, block_rows=5, buffer_blocks=9),
    "lengths": lambda data: LengthBatchSampler(data, 300, seed=1, window=3),
    "slices": lambda data: SliceBatchSampler(data, 4, 4, offsets=[0, 90, 97, len(data)], seed=1),
}


def some_rows(rows: int = ROWS, seed: int = 0) -> RaggedRows:
    return RaggedRows(np.random.default_rng(seed).integers(0, 40, rows).tolist(), seed)


@pytest.fixture(scope="module")
def reference() -> RaggedRows:
    return some_rows()


@pytest.fixture
def url(server: ServerProcess, reference: RaggedRows) -> str:
    write_dataset(reference.td(), server.url("ragged"), chunk_bytes=CHUNK_BYTES)
    return server.url("ragged")


def loader_of(dataset: Any, name: str, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, batch_sampler=SAMPLERS[name](dataset), **options)


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("prefetch_bytes", [0, 4096, 1 << 20])
def test_batches_are_the_rows_asked_for(url: str, reference: RaggedRows, name: str, prefetch_bytes: int) -> None:
    with RedisTDDataset(url, prefetch_bytes=prefetch_bytes) as dataset:
        twin, loader = SAMPLERS[name](dataset), loader_of(dataset, name)
        for _ in range(2):
            for batch, rows in zip(loader, twin, strict=True):
                reference.assert_equal(batch, list(rows))


@pytest.mark.parametrize("options", [{"strategy": "pipelined"}, {"strided": True}], ids=str)
def test_strategies_and_strided_batches_are_read_ahead_alike(
    url: str, reference: RaggedRows, options: dict[str, Any]
) -> None:
    with RedisTDDataset(url, **options) as dataset:
        for batch, rows in zip(loader_of(dataset, "block"), SAMPLERS["block"](dataset), strict=True):
            reference.assert_equal(batch, list(rows))


@pytest.mark.parametrize("prefetch_bytes", [0, 1 << 20])
def test_padded_batches_are_as_wide_as_their_own_longest_row(
    url: str, reference: RaggedRows, prefetch_bytes: int
) -> None:
    with RedisTDDataset(url, ragged="pad", pad_value=7, max_length=30, prefetch_bytes=prefetch_bytes) as dataset:
        for batch, rows in zip(loader_of(dataset, "in_order"), SAMPLERS["in_order"](dataset), strict=True):
            kept = [reference.tokens[row][:30] for row in rows]
            assert batch["tokens"].shape == (len(rows), max(map(len, kept)), 3)
            assert batch["tokens_mask"].sum(1).tolist() == list(map(len, kept))
            assert_same_tensor(batch["tokens"][batch["tokens_mask"]], torch.cat(kept))
            assert (batch["tokens"][~batch["tokens_mask"]] == 7).all()


def test_both_rounds_are_done_in_the_background(url: str, reference: RaggedRows) -> None:
    with RedisTDDataset(url) as dataset:
        sampler = SAMPLERS["block"](dataset)
        batches = iter(DataLoader(dataset, batch_sampler=sampler))
        next(batches)
        own = dataset._reader.stats
        list(batches)
        assert dataset._reader.stats.commands == own.commands == 0, "read by the thread alone"


def test_batches_that_are_kept_stay_as_they_are(url: str, reference: RaggedRows) -> None:
    with RedisTDDataset(url) as dataset:
        kept = [batch for _ in range(2) for batch in loader_of(dataset, "block")]
        rows = [list(rows) for sampler in [SAMPLERS["block"](dataset)] for _ in range(1) for rows in sampler]
        for batch, expected in zip(kept, rows * 2, strict=True):
            reference.assert_equal(batch, expected)


WORKERS = [
    pytest.param({"num_workers": 2, "multiprocessing_context": "fork"}, id="fork"),
    pytest.param({"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True}, id="persistent"),
    pytest.param({"num_workers": 2, "multiprocessing_context": "spawn", "persistent_workers": True}, id="spawn"),
]


@pytest.mark.parametrize("options", WORKERS)
@pytest.mark.parametrize("name", ["rows", "lengths"])
def test_workers_hand_values_and_offsets_on(
    url: str, reference: RaggedRows, name: str, options: dict[str, Any]
) -> None:
    with RedisTDDataset(url) as dataset:
        reference.assert_equal(dataset[[5, 2]], [5, 2])
        twin, loader = SAMPLERS[name](dataset), loader_of(dataset, name, **options)
        for _ in range(2 if "persistent_workers" in options else 1):
            for batch, rows in zip(loader, twin, strict=True):
                reference.assert_equal(batch, list(rows))
        reference.assert_equal(dataset[[9]], [9])


def test_workers_hand_arrow_arrays_and_masks_on(url: str, reference: RaggedRows) -> None:
    with RedisTDDataset(url, ragged="pad", strings="arrow") as dataset:
        loader = loader_of(dataset, "rows", num_workers=2)
        for batch, rows in zip(loader, SAMPLERS["rows"](dataset), strict=True):
            assert batch["text", "name"].to_arrow().to_pylist() == [reference.names[row] for row in rows]
            assert batch["tokens_mask"].sum(1).tolist() == [reference.lengths[row] for row in rows]


def test_a_plain_loader_needs_no_more_than_the_data_set(url: str, reference: RaggedRows) -> None:
    with RedisTDDataset(url) as dataset:
        for number, batch in enumerate(DataLoader(dataset, batch_size=32)):
            reference.assert_equal(batch, list(range(32 * number, min(32 * number + 32, ROWS))))


def test_batches_of_a_length_sampler_keep_within_their_tokens(url: str, reference: RaggedRows) -> None:
    with RedisTDDataset(url, ragged="pad") as dataset:
        seen = []
        sampler = LengthBatchSampler(dataset, 200, field="tokens", seed=3)
        for batch in DataLoader(dataset, batch_sampler=sampler):
            assert batch["tokens"].shape[0] * batch["tokens"].shape[1] <= 200
            seen += batch["row"].tolist()
        assert sorted(seen) == list(range(ROWS))


def test_lengths_are_read_without_the_values(server: ServerProcess, url: str, reference: RaggedRows) -> None:
    before = server.client().info("stats")["total_net_output_bytes"]
    with RedisTDDataset(url) as dataset:
        opened = server.client().info("stats")["total_net_output_bytes"]
        assert dataset.lengths("tokens").tolist() == list(reference.lengths)
        moved = server.client().info("stats")["total_net_output_bytes"] - opened
    # The records of all rows, 72 bytes each, and what INFO answers; the values are several times that.
    assert before < opened
    assert moved < ROWS * 100 + 10_000 < sum(heap.nbytes for heap in manifest_of(server).heaps)


def manifest_of(server: ServerProcess) -> Manifest:
    return Manifest.from_json(server.execute("GET", manifest_key("ragged")))


@pytest.mark.parametrize("options", [{"num_workers": 0}, {"num_workers": 2}], ids=str)
@pytest.mark.parametrize("name", ["lengths", "rows"])
def test_a_loop_goes_on_where_it_stopped(url: str, reference: RaggedRows, name: str, options: dict[str, Any]) -> None:
    def loader() -> StatefulDataLoader[Any]:
        dataset = RedisTDDataset(url)
        return StatefulDataLoader(dataset, batch_sampler=SAMPLERS[name](dataset), **options)

    first = loader()
    whole = [[list(batch) for batch in sampler] for sampler in [SAMPLERS[name](first.dataset)] for _ in range(2)]
    iterator = iter(first)
    for batch, rows in zip(islice(iterator, 5), whole[0], strict=False):
        reference.assert_equal(batch, rows)
    state = pickle.loads(pickle.dumps(first.state_dict()))
    del iterator
    first.dataset.close()
    again = loader()
    again.load_state_dict(state)
    for expected in (whole[0][5:], whole[1] if name == "lengths" else None):
        found = list(again)
        if expected is not None:
            assert len(found) == len(expected)
            for batch, rows in zip(found, expected, strict=True):
                reference.assert_equal(batch, rows)
    again.dataset.close()


def test_rows_appended_while_it_runs_are_in_the_next_epoch(url: str, reference: RaggedRows) -> None:
    more = some_rows(50, 1)
    both = reference + more
    with RedisTDDataset(url) as dataset:
        sampler = SAMPLERS["lengths"](dataset)
        iterator: Iterator[TensorDict] = iter(DataLoader(dataset, batch_sampler=sampler))
        next(iterator)
        td = more.td()
        td["row"] += ROWS
        append_dataset(td, url)
        assert dataset.refresh() == ROWS + 50
        assert sum(len(batch) for batch in iterator) < ROWS
        seen: list[int] = []
        for batch in DataLoader(dataset, batch_sampler=sampler):
            both.assert_equal(batch, batch["row"].tolist())
            seen += batch["row"].tolist()
        assert sorted(seen) == list(range(ROWS + 50))


@pytest.mark.parametrize("front", [RedisTDIterableDataset, RedisTDIterDataPipe])
def test_iterable_fronts_give_batches_and_rows(url: str, reference: RaggedRows, front: Any) -> None:
    with RedisTDDataset(url) as dataset:
        assert len(dataset) == ROWS
    stream = front(url, batch_size=32)
    for number, batch in enumerate(stream):
        reference.assert_equal(batch, list(range(32 * number, min(32 * number + 32, ROWS))))
    stream.close()
    shuffled = front(url, batch_size=32, shuffle=True, ragged="pad", max_length=8, strings="arrow")
    for batch in DataLoader(shuffled, batch_size=None, num_workers=2):
        kept = [reference.tokens[row][:8] for row in batch["row"].tolist()]
        assert batch["tokens_mask"].sum(1).tolist() == list(map(len, kept))
        assert batch["text", "name"].to_arrow().to_pylist() == [reference.names[row] for row in batch["row"].tolist()]
    shuffled.close()
    rows = front(url, batch_size=None)
    for number, row in enumerate(rows):
        assert_same_tensor(row["tokens"], reference.tokens[number])
        assert row["text", "name"] == reference.names[number]
    rows.close()


def test_several_data_sets_are_read_as_one(server: ServerProcess, url: str, reference: RaggedRows) -> None:
    other = some_rows(70, 5)
    write_dataset(other.td(), server.url("other"), chunk_bytes=CHUNK_BYTES)
    both = reference + other
    stream = RedisTDIterableDataset([url, server.url("other")], batch_size=33)
    at = 0
    for batch in stream:
        rows = list(range(at, at + len(batch)))
        batch["row"] = torch.tensor(rows)
        both.assert_equal(batch, rows)
        at += len(batch)
    stream.close()
    assert at == ROWS + 70


def test_values_that_are_lost_are_named_from_the_background_too(
    server: ServerProcess, url: str, reference: RaggedRows
) -> None:
    manifest = manifest_of(server)
    number, _ = manifest.heap_of(("text", "name"))
    for options in ({"num_workers": 0}, {"num_workers": 1}):
        with RedisTDDataset(url) as dataset:
            key = manifest.chunk_key(number, 3)
            kept = server.execute("GET", key)
            server.execute("DEL", key)
            batches = iter(loader_of(dataset, "in_order", **options))
            reference.assert_equal(next(batches), list(range(16)))
            with pytest.raises(DataLossError, match=r"field \('text', 'name'\), of rows .* is missing or empty"):
                list(batches)
            server.execute("SET", key, kept)
            reference.assert_equal(dataset[:], list(range(ROWS)))


def test_long_values_come_ahead_in_several_slabs(server: ServerProcess) -> None:
    rows = [torch.arange(n) for n in (400_000, 3, 0, 250_000, 1, 90_000)]
    write_dataset(TensorDict({"x": jagged(rows, rows[0])}, [6]), server.url("long"), chunk_bytes=1 << 20)
    with RedisTDDataset(server.url("long")) as dataset:
        sampler = CoalescingBatchSampler(RowSampler(dataset, seed=1), 2, window=2)
        for _ in range(3):
            for batch, wanted in zip(DataLoader(dataset, batch_sampler=sampler), sampler, strict=False):
                assert all(torch.equal(a, rows[b]) for a, b in zip(batch["x"].unbind(), wanted, strict=True))


def test_mixtures_give_each_source_its_own(server: ServerProcess, url: str, reference: RaggedRows) -> None:
    other = some_rows(70, 5)
    write_dataset(other.td(), server.url("other"), chunk_bytes=CHUNK_BYTES)
    both = reference + other
    for options in ({}, {"ragged": "pad", "strings": "arrow"}):
        with RedisTDMixture([(url, 1), (server.url("other"), 1)], **options) as mixture:
            for rows in ([0, 299, 5, 369, 300], [3, 2], [301]):
                batch = mixture.__getitems__(rows)
                if options:
                    assert batch["tokens_mask"].sum(1).tolist() == [both.lengths[row] for row in rows]
                    assert_same_tensor(batch["tokens"][batch["tokens_mask"]], torch.cat([both.tokens[r] for r in rows]))
                    continue
                batch["row"] = torch.tensor(rows)
                both.assert_equal(batch, rows)


def test_rows_that_are_published_meanwhile_are_followed(url: str, reference: RaggedRows) -> None:
    more = some_rows(40, 1)
    both = reference + more
    stream = RedisTDIterableDataset(url, batch_size=64, follow=True, timeout_seconds=30)
    seen: list[int] = []
    for batch in stream:
        if not seen:
            td = more.td()
            td["row"] += ROWS
            append_dataset(td, url, complete=True)
        both.assert_equal(batch, batch["row"].tolist())
        seen += batch["row"].tolist()
    stream.close()
    assert seen == list(range(ROWS + 40))
