"""Stores have no generations: what is lost, cut or written anew under a reader is named, and never read as garbage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from rows_in_memory import assert_same_rows, random_rows
from servers import ServerProcess
from stores import open_store, write_lazy_store, write_store
from tensordict import NonTensorData, TensorDict, lazy_stack
from tensordict.store import LazyStackedTensorDictStore
from torch.utils.data import DataLoader

from td_datapipes import RedisTDDataset, write_dataset
from td_datapipes.errors import DataLossError, DatasetChangedError, TDDatapipesError
from td_datapipes.plan import ReadPlan
from td_datapipes.samplers import BlockShuffleBatchSampler
from td_datapipes.store import RowReader

WAYS: list[dict[str, Any]] = [
    {"strategy": "covering"},
    {"strategy": "pipelined"},
    {"strategy": "lua"},
    {"strategy": "pipelined", "strided": True},
    {"atomic": True},
]
READS: list[Any] = [3, [1, 9], slice(None)]
NAME = "frail"
X = f"tensordict:{{{NAME}}}:d:x"


def old_rows() -> TensorDict:
    return random_rows(20, {"x": (torch.float32, (10, 4)), ("n", "y"): (torch.int64, ())}, seed=4)


@pytest.fixture
def url(server: ServerProcess) -> str:
    return write_store(server, old_rows(), NAME)


def change(server: ServerProcess, value: Any) -> None:
    """Write another `x`, as a program does that uses the store."""
    with open_store(server, NAME) as store:
        store["x"] = value


def remove(server: ServerProcess) -> None:
    """Delete `x`, as a program does that uses the store."""
    with open_store(server, NAME) as store:
        del store["x"]


Harm = Callable[[ServerProcess], Any]

LOSSES: dict[str, tuple[Harm, str]] = {
    "deleted": (lambda server: server.execute("DEL", X), "is missing or empty"),
    "emptied": (lambda server: server.execute("SET", X, b""), "is missing or empty"),
    "cut to 100 bytes": (lambda server: server.execute("SETRANGE", X, 0, b"") and cut(server, 100), "the chunk is "),
    "replaced by a list": (
        lambda server: server.execute("DEL", X) and server.execute("RPUSH", X, b"x"),
        "holds something else (WRONGTYPE",
    ),
}


def cut(server: ServerProcess, nbytes: int) -> None:
    server.execute("SET", X, server.execute("GETRANGE", X, 0, nbytes - 1))


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("loss", LOSSES)
def test_lost_bytes_are_named_never_made_up(server: ServerProcess, url: str, loss: str, way: dict[str, Any]) -> None:
    do_harm, said = LOSSES[loss]
    with RedisTDDataset(url, **way) as dataset:
        assert_same_rows(dataset[:], old_rows())
        whole = server.execute("GET", X)
        do_harm(server)
        for index in READS:
            with pytest.raises(DataLossError) as caught:
                dataset[index]
            for part in (f"'{NAME}'", f":{server.port}/0", X, "fields 'x'", "rows 0 to 19", "bytes expected", said):
                assert part in str(caught.value)
        server.execute("DEL", X)
        server.execute("SET", X, whole)
        assert_same_rows(dataset[[1, 9]], old_rows()[[1, 9]])


def test_expected_and_received_bytes_are_in_the_message(server: ServerProcess, url: str) -> None:
    cut(server, 200)
    with RedisTDDataset(url, strategy="pipelined") as dataset:
        with pytest.raises(DataLossError, match="160 bytes expected, 40 received; the chunk is shorter"):
            dataset[1]
        assert_same_rows(dataset[0], old_rows()[0])


CHANGES: dict[str, tuple[Any, str]] = {
    "other dtype and shape": (
        torch.randn(20, 10, 8, dtype=torch.float64),
        r"field 'x': float32\[20, 10, 4\] of then is 'x': float64\[20, 10, 8\] now",
    ),
    "other dtype, as long": (
        torch.ones(20, 10, 4, dtype=torch.int32),
        r"float32\[20, 10, 4\] .* int32\[20, 10, 4\] now",
    ),
    "other shape, as long": (torch.ones(20, 4, 10), r"float32\[20, 10, 4\] of then is 'x': float32\[20, 4, 10\] now"),
    "a shorter one": (torch.ones(20), r"float32\[20, 10, 4\] of then is 'x': float32\[20\] now"),
    "a value": (
        NonTensorData("x" * 5000, batch_size=[20]),
        r"float32\[20, 10, 4\] of then is 'x': a value now",
    ),
}


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("changed", CHANGES)
def test_a_leaf_that_was_written_in_another_form_is_named_with_both(
    server: ServerProcess, url: str, changed: str, way: dict[str, Any]
) -> None:
    value, said = CHANGES[changed]
    said = f"'{NAME}' .* has changed since it was opened: .*{said}; open it again"
    with RedisTDDataset(url, **way) as dataset, RedisTDDataset(url, fields=["n"], **way) as other:
        dataset[0]
        change(server, value)
        for index in READS:
            with pytest.raises(DatasetChangedError, match=said):
                dataset[index]
        assert_same_rows(other[:], old_rows().select(("n", "y")))
    with RedisTDDataset(url, **way) as again:
        assert again.fingerprint != dataset.fingerprint
        got = again[[3, 1]]
        assert got["x"] == "x" * 5000 if changed == "a value" else torch.equal(got["x"], value[[3, 1]])


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_leaf_that_was_removed_is_named(server: ServerProcess, url: str, way: dict[str, Any]) -> None:
    with RedisTDDataset(url, **way) as dataset:
        dataset[0]
        remove(server)
        for index in READS:
            with pytest.raises(DatasetChangedError, match="field 'x' has been removed; open it again"):
                dataset[index]
    with RedisTDDataset(url, **way) as again:
        assert_same_rows(again[:], old_rows().select(("n", "y")))


def test_a_store_that_was_cleared_is_named(server: ServerProcess, url: str) -> None:
    with RedisTDDataset(url) as dataset:
        dataset[0]
        with open_store(server, NAME) as store:
            store.clear_redis()
        with pytest.raises(TDDatapipesError, match="it has been removed|is missing or empty"):
            dataset[0]
        with pytest.raises(DatasetChangedError, match="has been removed since it was opened with 20 rows"):
            dataset.refresh()


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_new_values_of_the_same_form_are_read(server: ServerProcess, url: str, way: dict[str, Any]) -> None:
    expected = old_rows()
    with RedisTDDataset(url, **way) as dataset:
        dataset[0]
        with open_store(server, NAME) as store:
            expected["x"] = torch.randn(20, 10, 4)
            store["x"] = expected["x"]
            store[5] = expected[5] = random_rows(1, {"x": (torch.float32, (10, 4)), ("n", "y"): (torch.int64, ())})[0]
            store["more"] = torch.arange(20)
        assert_same_rows(dataset[:], expected)
        assert dataset.refresh() == 20


@contextmanager
def between_bytes(monkeypatch: pytest.MonkeyPatch, do: Callable[[], Any]) -> Iterator[None]:
    """Once the first bytes of a read have arrived, do something before the others are taken."""
    new_batch = RowReader.new_batch
    left = [do]

    def patched(reader: RowReader, plan: ReadPlan) -> Any:
        sink, batch = new_batch(reader, plan)

        def first(handed_over: Callable[..., None]) -> Callable[..., None]:
            def act(*arguments: Any) -> None:
                if left:
                    left.pop()()
                handed_over(*arguments)

            return act

        sink.take = first(sink.take)  # type: ignore[method-assign]
        sink.placed = first(sink.placed)  # type: ignore[method-assign]
        return sink, batch

    with monkeypatch.context() as patch:
        patch.setattr(RowReader, "new_batch", patched)
        yield
    assert not left, "nothing was read"


@pytest.mark.parametrize("strategy", ["covering", "pipelined"])
def test_a_leaf_that_changes_while_it_is_read_is_named(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, strategy: Any
) -> None:
    rows = 4000  # 32 MB: more than is asked for at once
    td = TensorDict({"x": torch.ones(rows, 1000), "y": torch.ones(rows, 1000, dtype=torch.int32)}, [rows])
    url = write_store(server, td, NAME)
    with RedisTDDataset(url, strategy=strategy) as dataset:
        with (
            between_bytes(monkeypatch, lambda: change(server, torch.ones(rows, 1000, dtype=torch.int32))),
            pytest.raises(DatasetChangedError, match=r"field 'x': float32\[4000, 1000\] of then is 'x': int32"),
        ):
            dataset[:]
        with pytest.raises(DatasetChangedError, match="field 'x': float32"):
            dataset[0]
    with (
        RedisTDDataset(url, strategy=strategy) as dataset,
        between_bytes(monkeypatch, lambda: remove(server)),
        pytest.raises(DatasetChangedError, match="field 'x' has been removed"),
    ):
        dataset[:]


def test_read_ahead_batches_of_a_leaf_that_changed_are_not_handed_over(server: ServerProcess) -> None:
    td = random_rows(400, {"x": (torch.float32, (50,)), "y": (torch.int8, ())})
    with RedisTDDataset(write_store(server, td, NAME)) as dataset:
        sampler = BlockShuffleBatchSampler(dataset, 16, seed=1, block_rows=8, buffer_blocks=4)
        batches = iter(DataLoader(dataset, batch_sampler=sampler))
        order = [list(rows) for rows in BlockShuffleBatchSampler(dataset, 16, seed=1, block_rows=8, buffer_blocks=4)]
        assert_same_rows(next(batches), td[order[0]])
        change(server, torch.zeros(400, 50, dtype=torch.int32))
        seen = [order[0]]

        def consume() -> None:
            for batch in batches:
                # What had been read before the change is as it was then.
                assert_same_rows(batch, td[order[len(seen)]])
                seen.append(order[len(seen)])

        with pytest.raises(DatasetChangedError, match=r"float32\[400, 50\] of then is 'x': int32\[400, 50\] now"):
            consume()
        assert len(seen) < len(order)


def test_a_data_set_of_ours_in_its_place_is_another_one(server: ServerProcess, url: str) -> None:
    with RedisTDDataset(url) as dataset:
        write_dataset(old_rows()[:5], url)
        # The store is still there, and still what was opened.
        assert_same_rows(dataset[:], old_rows())
        with pytest.raises(DatasetChangedError, match="has been written anew since it was opened: 20 rows"):
            dataset.refresh()


def test_ragged_rows_that_changed_are_named(server: ServerProcess) -> None:
    rows = [TensorDict({"x": torch.arange(i + 1)}, []) for i in range(5)]
    with RedisTDDataset(write_lazy_store(server, lazy_stack(rows), NAME)) as dataset:
        assert_same_rows(dataset[3], rows[3])
        whole = server.execute("GET", X)
        cut(server, 100)
        assert_same_rows(dataset[2], rows[2])
        with pytest.raises(DataLossError, match="field 'x' .* has a row of 40 bytes, of which 20 were received"):
            dataset[4]
        server.execute("SET", X, whole)
        assert_same_rows(dataset[4], rows[4])
        with open_store(server, NAME, LazyStackedTensorDictStore) as store:
            store["x"] = torch.zeros(5, 10)
        with pytest.raises(DatasetChangedError, match=r"field 'x' of 'frail' .* had shape \[5, 1\] when it was opened"):
            dataset[4]
        server.execute("DEL", X, f"tensordict:{{{NAME}}}:m:x")
        with pytest.raises(DataLossError, match="field 'x' .* has a row of 40 bytes, of which 0 were received"):
            dataset[4]
