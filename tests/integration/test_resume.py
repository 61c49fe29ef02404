"""A training loop over `RedisTDDataset` in a StatefulDataLoader goes on exactly where it stopped."""

from __future__ import annotations

import json
import multiprocessing
import pickle
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rows_in_memory import assert_same_rows, random_rows
from servers import ServerProcess
from tensordict import TensorDict
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from td_datapipes import RedisTDDataset, append_dataset, write_dataset
from td_datapipes.errors import StateError
from td_datapipes.samplers import BlockShuffleBatchSampler, CoalescingBatchSampler, RowSampler, SliceBatchSampler

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*set_vital.*"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]

Batches = list[list[int]]
TESTS = Path(__file__).resolve().parents[1]
ROWS = 200
BATCH = 16

WORKERS = [
    pytest.param({"num_workers": 0}, id="in_process"),
    pytest.param({"num_workers": 2}, id="two_workers"),
    pytest.param({"num_workers": 2, "persistent_workers": True, "prefetch_factor": 4}, id="persistent"),
]
SAMPLERS: dict[str, Callable[[Any], Any]] = {
    "rows": lambda data: CoalescingBatchSampler(RowSampler(data, seed=1), BATCH, window=3),
    "weighted": lambda data: CoalescingBatchSampler(
        RowSampler(data, seed=1, replacement=True, weights=1 + np.arange(len(data)) % 3), BATCH, drop_last=True
    ),
    "block": lambda data: BlockShuffleBatchSampler(data, BATCH, seed=1, block_rows=5, buffer_blocks=6),
    "slices": lambda data: SliceBatchSampler(data, 4, 4, offsets=[0, 90, len(data)], stride=3, seed=1),
}


def make_rows(rows: int = ROWS, seed: int = 0, nbytes: int = 52) -> TensorDict:
    """Rows of `nbytes` bytes and the row's number."""
    td = random_rows(rows, {"x": (torch.uint8, (nbytes,))}, seed)
    td["row"] = torch.arange(rows)
    return td


def make_loader(
    url: str, sampler: str | Callable[[Any], Any], prefetch_bytes: int = 1 << 15, **options: Any
) -> StatefulDataLoader[Any]:
    """As a fresh process makes it."""
    dataset = RedisTDDataset(url, prefetch_bytes=prefetch_bytes)
    make = SAMPLERS[sampler] if isinstance(sampler, str) else sampler
    return StatefulDataLoader(dataset, batch_sampler=make(dataset), **options)


def resume(url: str, sampler: str | Callable[[Any], Any], state: Any, **options: Any) -> StatefulDataLoader[Any]:
    loader = make_loader(url, sampler, **options)
    loader.load_state_dict(pickle.loads(pickle.dumps(state)))
    return loader


def rows_of(batches: Any) -> Batches:
    return [batch["row"].tolist() for batch in batches]


def epochs_of(loader: Any, count: int) -> list[Batches]:
    found = [rows_of(loader) for _ in range(count)]
    loader.dataset.close()
    return found


def expected_epochs(url: str, sampler: str, count: int) -> list[Batches]:
    """What the sampler says, without any loader."""
    with RedisTDDataset(url) as dataset:
        order = SAMPLERS[sampler](dataset)
        return [[list(batch) for batch in order] for _ in range(count)]


@pytest.fixture
def url(server: ServerProcess) -> str:
    write_dataset(make_rows(), server.url("run"), chunk_bytes=4096)
    return server.url("run")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(
            pytest.param(name, *param.values, id=f"{name}-{param.id}")
            for name in ("rows", "block")
            for param in WORKERS
        ),
        pytest.param("weighted", {"num_workers": 0}, id="weighted"),
        pytest.param("slices", {"num_workers": 2}, id="slices"),
    ],
)
class TestResume:
    def test_twice_in_the_second_epoch_then_two_more(self, url: str, name: str, options: dict[str, Any]) -> None:
        expected, reference = expected_epochs(url, name, 4), make_rows()
        loader = make_loader(url, name, **options)
        assert rows_of(loader) == expected[0]
        iterator, states = iter(loader), []
        for start, stop in ((0, 2), (2, 5)):
            assert rows_of(islice(iterator, stop - start)) == expected[1][start:stop]
            states.append((stop, pickle.loads(pickle.dumps(loader.state_dict()))))
        assert rows_of(iterator) == expected[1][5:]
        loader.dataset.close()
        for place, state in states:
            resumed = resume(url, name, state, **options)
            for batch, rows in zip(resumed, expected[1][place:], strict=True):
                assert_same_rows(batch, reference[rows])
            assert epochs_of(resumed, 2) == expected[2:]

    def test_resumed_and_saved_again(self, url: str, name: str, options: dict[str, Any]) -> None:
        expected = expected_epochs(url, name, 2)
        seen: Batches = []
        state: dict[str, Any] = {}
        for count in (3, 1, 4):
            loader = resume(url, name, state, **options)
            seen += rows_of(islice(loader, count))
            state = loader.state_dict()
            loader.dataset.close()
        assert seen == expected[0][:8]
        assert epochs_of(resume(url, name, state, **options), 2) == [expected[0][8:], expected[1]]

    def test_at_an_epochs_end(self, url: str, name: str, options: dict[str, Any]) -> None:
        expected = expected_epochs(url, name, 3)
        loader = make_loader(url, name, **options)
        iterator = iter(loader)
        assert rows_of(islice(iterator, len(expected[0]))) == expected[0]
        last_batch_out = loader.state_dict()
        assert next(iterator, None) is None
        end_seen = loader.state_dict()
        loader.dataset.close()
        assert epochs_of(resume(url, name, last_batch_out, **options), 3) == [[], *expected[1:]]
        assert epochs_of(resume(url, name, end_seen, **options), 2) == expected[1:]

    def test_the_state_is_small(self, url: str, name: str, options: dict[str, Any]) -> None:
        loader = make_loader(url, name, **options)
        list(loader)
        list(islice(loader, 7))
        assert len(pickle.dumps(loader.state_dict())) < 1024
        loader.dataset.close()


@pytest.mark.parametrize("name", ["rows", "block"])
def test_the_state_of_an_order_over_many_rows_is_as_small(name: str) -> None:
    sampler = SAMPLERS[name](range(10**9))
    list(islice(sampler, 1000))
    assert len(pickle.dumps(sampler.state_dict())) < 512


SCRIPT = """
import json, pickle, sys
sys.path[:0] = sys.argv[1:3]
import torch
from test_resume import epochs_of, resume
torch.set_num_threads(1)
url, cases = pickle.loads(sys.stdin.buffer.read())
print(json.dumps([epochs_of(resume(url, name, state, **options), 2) for name, options, state in cases]))
"""


@pytest.mark.heavy
def test_a_new_process_goes_on(url: str) -> None:
    cases, expected = [], []
    for name in SAMPLERS:
        epochs = expected_epochs(url, name, 2)
        for param in WORKERS:
            options: Any = param.values[0]
            loader = make_loader(url, name, **options)
            list(islice(loader, 4))
            cases.append((name, options, loader.state_dict()))
            expected.append([epochs[0][4:], epochs[1]])
            loader.dataset.close()
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(TESTS), str(Path(__file__).parent)]
    done = subprocess.run(command, input=pickle.dumps((url, cases)), capture_output=True, check=True)
    assert json.loads(done.stdout) == expected


@pytest.mark.parametrize("options", WORKERS)
@pytest.mark.parametrize("name", ["rows", "block"])
def test_rows_that_were_consumed_are_not_read_again(server: ServerProcess, name: str, options: dict[str, Any]) -> None:
    rows, nbytes = 1280, 4096
    url = server.url("large")
    write_dataset(make_rows(rows, nbytes=nbytes - 8), url)

    def make(data: Any) -> Any:
        if name == "rows":
            return SAMPLERS[name](data)
        return BlockShuffleBatchSampler(data, BATCH, seed=1, block_rows=16, buffer_blocks=10)

    loader = make_loader(url, make, **options)
    list(islice(loader, 70))
    state = loader.state_dict()
    loader.dataset.close()
    del loader
    resumed = resume(url, make, state, prefetch_bytes=1 << 22, **options)
    began = int(server.client().info("stats")["total_net_output_bytes"])
    left = rows_of(resumed)
    read = int(server.client().info("stats")["total_net_output_bytes"]) - began
    resumed.dataset.close()
    assert len(left) == 10
    # Headers, and for blocks the gaps between rows: less than the blocks as a whole. Workers may share blocks.
    most = 2 if name == "block" else 1.05
    assert 10 * BATCH * nbytes < read < most * 10 * BATCH * nbytes + 50_000


class TestReportedCases:
    """What people reported of other loaders."""

    @pytest.mark.parametrize("num_workers", [0, 1])
    def test_three_batches_are_left_of_the_second_epoch(self, server: ServerProcess, num_workers: int) -> None:
        url = server.url("twenty")
        write_dataset(make_rows(20), url)

        def make(data: Any) -> Any:
            return CoalescingBatchSampler(RowSampler(data, seed=5), 4)

        whole = epochs_of(make_loader(url, make, num_workers=num_workers), 2)
        loader = make_loader(url, make, num_workers=num_workers)
        list(loader)
        list(islice(loader, 2))
        assert epochs_of(resume(url, make, loader.state_dict(), num_workers=num_workers), 1) == [whole[1][2:]]
        assert len(whole[1][2:]) == 3
        loader.dataset.close()

    def test_batches_that_workers_fetched_ahead_are_not_lost(self, server: ServerProcess) -> None:
        url = server.url("twelve")
        write_dataset(make_rows(12 * BATCH), url)
        options = {"num_workers": 2, "prefetch_factor": 4}
        loader = make_loader(url, "block", **options)
        seen = rows_of(islice(loader, 3))
        (left,) = epochs_of(resume(url, "block", loader.state_dict(), **options), 1)
        assert len(left) == 9
        assert sorted(row for batch in seen + left for row in batch) == list(range(12 * BATCH))
        loader.dataset.close()

    def test_persistent_workers_resume_once_and_epochs_differ(self, server: ServerProcess) -> None:
        url = server.url("many")
        write_dataset(make_rows(64 * 4), url)

        def make(data: Any) -> Any:
            return CoalescingBatchSampler(RowSampler(data, seed=5), 4)

        options = {"num_workers": 2, "persistent_workers": True}
        loader = make_loader(url, make, **options)
        list(islice(loader, 61))
        resumed = resume(url, make, loader.state_dict(), **options)
        epochs = [rows_of(resumed) for _ in range(3)]
        assert [len(epoch) for epoch in epochs] == [3, 64, 64]
        assert epochs[1] != epochs[2]
        resumed.batch_sampler.set_epoch(1)
        assert rows_of(resumed) == epochs[1]
        loader.dataset.close()
        resumed.dataset.close()

    @pytest.mark.parametrize("drop_last", [False, True])
    @pytest.mark.parametrize("num_workers", [0, 1, 3, 4])
    def test_each_row_comes_once_whatever_the_workers(
        self, server: ServerProcess, num_workers: int, drop_last: bool
    ) -> None:
        url = server.url("parted")
        stride = write_dataset(make_rows(102), url, chunk_bytes=34 * 64).layouts[0].stride_bytes
        assert stride == 64  # so there are 3 chunks
        with RedisTDDataset(url) as dataset:
            sampler = CoalescingBatchSampler(RowSampler(dataset, seed=2), 4, drop_last)
            batches = rows_of(DataLoader(dataset, batch_sampler=sampler, num_workers=num_workers))
        rows = [row for batch in batches for row in batch]
        assert len(set(rows)) == len(rows) == (100 if drop_last else 102)


class TestRanks:
    @pytest.mark.parametrize("drop_last", [False, True])
    @pytest.mark.parametrize("name", ["rows", "block"])
    def test_all_ranks_run_as_many_steps(self, server: ServerProcess, name: str, drop_last: bool) -> None:
        url = server.url("odd")
        write_dataset(make_rows(101), url)

        def make(data: Any, rank: int) -> Any:
            if name == "block":
                return BlockShuffleBatchSampler(data, 2, rank=rank, world_size=2, drop_last=drop_last, block_rows=4)
            return CoalescingBatchSampler(RowSampler(data, rank=rank, world_size=2, drop_last=drop_last), 2, drop_last)

        with RedisTDDataset(url) as dataset:
            announced = [list(make(dataset, rank)) for rank in range(2)]
            read = [rows_of(DataLoader(dataset, batch_sampler=make(dataset, rank))) for rank in range(2)]
        assert read == [[list(batch) for batch in batches] for batches in announced]
        assert len(read[0]) == len(read[1]) == (25 if drop_last else 26)
        kept = [row for batches in announced for batch in batches for row in batch[: len(batch) - batch.padded]]
        assert len(set(kept)) == len(kept) == (100 if drop_last else 101)

    def test_a_collective_each_step_over_two_processes(self, server: ServerProcess, tmp_path: Path) -> None:
        url = server.url("odd")
        write_dataset(make_rows(101), url)
        context = multiprocessing.get_context("fork")
        queue: Any = context.SimpleQueue()
        arguments = [(url, f"file://{tmp_path}/rendezvous", rank, queue) for rank in range(2)]
        processes = [context.Process(target=train_rank, args=args, daemon=True) for args in arguments]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [0, 0]
        found = dict(queue.get() for _ in range(2))
        # Two ranks of 26 batches; the sums are over all rows and the one that is there twice.
        assert found[0] == found[1]
        assert len(found[0]) == 26
        assert 0 <= sum(found[0]) - sum(range(101)) <= 100

    @pytest.mark.parametrize("num_workers", [0, 1, 4])
    @pytest.mark.parametrize("name", ["rows", "block"])
    def test_two_ranks_with_two_workers_go_on_as_one(self, server: ServerProcess, name: str, num_workers: int) -> None:
        url = server.url("elastic")
        write_dataset(make_rows(101), url)

        def make(rank: int, world_size: int) -> Callable[[Any], Any]:
            if name == "block":
                return lambda data: BlockShuffleBatchSampler(
                    data, 8 // world_size, block_rows=3, buffer_blocks=4, rank=rank, world_size=world_size
                )
            return lambda data: CoalescingBatchSampler(
                RowSampler(data, rank=rank, world_size=world_size), 8 // world_size
            )

        taken: list[int] = []
        cursors = []
        for rank in range(2):
            loader = make_loader(url, make(rank, 2), num_workers=2)
            taken += [row for batch in rows_of(islice(loader, 5)) for row in batch]
            cursors.append(json.dumps(loader.batch_sampler.cursor_of(loader.state_dict()).to_dict()))
            loader.dataset.close()
        assert cursors[0] == cursors[1]
        assert json.loads(cursors[0])["rows_consumed"] == 40
        loader = make_loader(url, make(0, 1), num_workers=num_workers)
        loader.batch_sampler.load_cursor(json.loads(cursors[0]))
        rest, following = epochs_of(loader, 2)
        assert sorted(taken + [row for batch in rest for row in batch]) == list(range(101))
        assert sorted(row for batch in following for row in batch) == list(range(101))

    def test_one_rank_goes_on_as_three(self, url: str) -> None:
        def make(rank: int, world_size: int) -> Callable[[Any], Any]:
            return lambda data: BlockShuffleBatchSampler(data, 6, block_rows=3, rank=rank, world_size=world_size)

        loader = make_loader(url, make(0, 1))
        taken = [row for batch in rows_of(islice(loader, 9)) for row in batch]
        cursor = loader.batch_sampler.cursor_of(loader.state_dict())
        loader.dataset.close()
        counts = []
        for rank in range(3):
            loader = make_loader(url, make(rank, 3), num_workers=rank)
            loader.batch_sampler.load_cursor(cursor)
            (rest,) = epochs_of(loader, 1)
            counts.append(len(rest))
            taken += [row for batch in rest for row in batch]
        # 146 rows are left: 8 global batches of 18, and 2 rows for 3 ranks, of which one is padding.
        assert counts == [9, 9, 9]
        assert sorted(set(taken)) == list(range(ROWS))
        assert len(taken) == ROWS + 1


def train_rank(url: str, rendezvous: str, rank: int, queue: Any) -> None:
    """What each process runs: the sampler finds rank and world size by itself."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2)
    sums = []
    with RedisTDDataset(url) as dataset:
        for batch in DataLoader(dataset, batch_sampler=BlockShuffleBatchSampler(dataset, 2, block_rows=4)):
            total = batch["row"].sum()
            dist.all_reduce(total)
            sums.append(int(total))
    dist.destroy_process_group()
    queue.put((rank, sums))


class TestOtherWorkers:
    """torchdata cannot load a state of another number of workers: the error names both, and the cursor goes on."""

    @pytest.mark.parametrize(("saved", "now"), [(0, 2), (2, 0), (2, 3), (3, 2)])
    @pytest.mark.parametrize("name", ["rows", "block"])
    def test_the_state_is_refused_and_the_cursor_goes_on(self, url: str, name: str, saved: int, now: int) -> None:
        expected = expected_epochs(url, name, 2)
        loader = make_loader(url, name, num_workers=saved)
        assert rows_of(islice(loader, 5)) == expected[0][:5]
        state = loader.state_dict()
        loader.dataset.close()
        refused = resume(url, name, state, num_workers=now)
        with pytest.raises(StateError, match=rf"num_workers={saved}, .*num_workers={now}; .*cursor_of"):
            next(iter(refused))
        refused.dataset.close()
        other = make_loader(url, name, num_workers=now)
        other.batch_sampler.load_cursor(other.batch_sampler.cursor_of(state))
        assert epochs_of(other, 2) == [expected[0][5:], expected[1]]


class TestChangedData:
    def saved_state(self, url: str, name: str) -> tuple[dict[str, Any], str, Batches]:
        loader = make_loader(url, name)
        seen = rows_of(islice(loader, 4))
        state, known = loader.state_dict(), loader.dataset.fingerprint
        loader.dataset.close()
        return state, known, seen

    @pytest.mark.parametrize("name", SAMPLERS)
    def test_data_written_anew_are_refused(self, url: str, name: str) -> None:
        state, known, _ = self.saved_state(url, name)
        write_dataset(make_rows(seed=1), url, overwrite=True)
        resumed = resume(url, name, state)
        new = resumed.dataset.fingerprint
        with pytest.raises(StateError, match=rf"the state is of .*@{known}, this sampler is .*@{new}"):
            next(iter(resumed))
        resumed.dataset.close()

    @pytest.mark.parametrize("options", WORKERS)
    @pytest.mark.parametrize("name", ["rows", "block"])
    def test_rows_appended_since_are_for_the_next_epoch(self, url: str, name: str, options: dict[str, Any]) -> None:
        expected = expected_epochs(url, name, 1)
        loader = make_loader(url, name, **options)
        assert rows_of(islice(loader, 4)) == expected[0][:4]
        state = loader.state_dict()
        loader.dataset.close()
        more = make_rows(50, seed=3)
        more["row"] += ROWS
        append_dataset(more, url)
        rest, following = epochs_of(resume(url, name, state, **options), 2)
        assert rest == expected[0][4:]
        assert sorted(row for batch in following for row in batch) == list(range(ROWS + 50))

    @pytest.mark.parametrize("name", ["rows", "block"])
    def test_another_order_is_refused(self, url: str, name: str) -> None:
        state, _, _ = self.saved_state(url, name)

        def make(data: Any) -> Any:
            if name == "rows":
                return CoalescingBatchSampler(RowSampler(data, seed=1), BATCH + 1)
            return BlockShuffleBatchSampler(data, BATCH, seed=1, block_rows=6, buffer_blocks=6)

        wanted = r"batch_size 16, this sampler has 17" if name == "rows" else r"block_rows=5.*block_rows=6"
        resumed = resume(url, make, state)
        with pytest.raises(StateError, match=wanted):
            next(iter(resumed))
        resumed.dataset.close()
