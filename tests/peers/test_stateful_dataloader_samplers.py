"""What torchdata's StatefulDataLoader promises, kept with our samplers: resumes exactly where the consumer stood."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler as StatefulRandomSampler

from td_datapipes.errors import StateError
from td_datapipes.samplers import BlockShuffleBatchSampler, CoalescingBatchSampler, RowSampler, SliceBatchSampler
from td_datapipes.shares import worker_spans

pytestmark = pytest.mark.filterwarnings("ignore:.*set_vital.*")

Batches = list[list[int]]
WORKERS = [
    pytest.param({"num_workers": 0}, id="in_process"),
    pytest.param({"num_workers": 2}, id="two_workers"),
    pytest.param({"num_workers": 2, "persistent_workers": True, "prefetch_factor": 4}, id="persistent_workers"),
]


class Identity(Dataset[int]):
    """Row i is i."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> int:
        return row


SAMPLERS: dict[str, Callable[[Identity], Any]] = {
    "block": lambda data: BlockShuffleBatchSampler(data, 4, seed=1, block_rows=3, buffer_blocks=4),
    "slices": lambda data: SliceBatchSampler(data, 2, 4, offsets=[0, 20, len(data)], seed=1),
    "rows": lambda data: CoalescingBatchSampler(RowSampler(data, seed=1), 4, window=3),
    "sequential": lambda data: CoalescingBatchSampler(SequentialSampler(data), 4),
    "torchdata": lambda data: CoalescingBatchSampler(StatefulRandomSampler(data), 4, window=3),
}


def make_loader(name: str, rows: int, **options: Any) -> StatefulDataLoader[Any]:
    data = Identity(rows)
    return StatefulDataLoader(data, batch_sampler=SAMPLERS[name](data), collate_fn=list, **options)


def epochs_of(loader: Any, count: int) -> list[Batches]:
    return [list(loader) for _ in range(count)]


@pytest.mark.parametrize("options", WORKERS)
@pytest.mark.parametrize("name", ["block", "slices", "rows", "sequential"])
class TestResume:
    def test_mid_epoch_then_two_more(self, name: str, options: dict[str, Any]) -> None:
        reference = epochs_of(make_loader(name, 50, **options), 4)
        loader = make_loader(name, 50, **options)
        list(loader)
        iterator = iter(loader)
        assert list(islice(iterator, 2)) == reference[1][:2]
        early = pickle.loads(pickle.dumps(loader.state_dict()))
        assert list(islice(iterator, 3)) == reference[1][2:5]
        late = pickle.loads(pickle.dumps(loader.state_dict()))
        assert list(iterator) == reference[1][5:]
        for state, place in ((early, 2), (late, 5)):
            resumed = make_loader(name, 50, **options)
            resumed.load_state_dict(state)
            assert epochs_of(resumed, 3) == [reference[1][place:], *reference[2:]]

    def test_at_the_epochs_end(self, name: str, options: dict[str, Any]) -> None:
        reference = epochs_of(make_loader(name, 50, **options), 3)
        loader = make_loader(name, 50, **options)
        iterator = iter(loader)
        list(islice(iterator, len(reference[0])))
        last_batch_out = loader.state_dict()
        assert next(iterator, None) is None
        end_seen = loader.state_dict()

        resumed = make_loader(name, 50, **options)
        resumed.load_state_dict(last_batch_out)
        assert epochs_of(resumed, 3) == [[], *reference[1:]]
        resumed = make_loader(name, 50, **options)
        resumed.load_state_dict(end_seen)
        assert epochs_of(resumed, 2) == reference[1:]


@pytest.mark.parametrize("options", WORKERS)
def test_torchdatas_random_sampler_resumes_within_its_own_generator(options: dict[str, Any]) -> None:
    loader = make_loader("torchdata", 50, **options)
    list(loader)
    iterator = iter(loader)
    list(islice(iterator, 4))
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    rest, following = list(iterator), list(loader)
    resumed = make_loader("torchdata", 50, **options)
    resumed.load_state_dict(state)
    assert epochs_of(resumed, 2) == [rest, following]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_three_batches_are_left_of_the_second_epoch(num_workers: int) -> None:
    reference = epochs_of(make_loader("rows", 20, num_workers=num_workers), 2)
    loader = make_loader("rows", 20, num_workers=num_workers)
    list(loader)
    list(islice(loader, 2))
    resumed = make_loader("rows", 20, num_workers=num_workers)
    resumed.load_state_dict(loader.state_dict())
    rest = list(resumed)
    assert len(rest) == 3
    assert rest == reference[1][2:]


def test_what_was_prefetched_is_not_counted() -> None:
    options = {"num_workers": 2, "prefetch_factor": 4}
    reference = list(make_loader("block", 48, **options))
    loader = make_loader("block", 48, **options)
    list(islice(loader, 3))
    resumed = make_loader("block", 48, **options)
    resumed.load_state_dict(loader.state_dict())
    assert list(resumed) == reference[3:]
    assert len(reference) == 12


def test_persistent_workers_resume_once_and_epochs_differ() -> None:
    options = {"num_workers": 2, "persistent_workers": True}
    loader = make_loader("rows", 256, **options)
    list(islice(loader, 61))
    resumed = make_loader("rows", 256, **options)
    resumed.load_state_dict(loader.state_dict())
    epochs = epochs_of(resumed, 3)
    assert [len(epoch) for epoch in epochs] == [3, 64, 64]
    assert epochs[1] != epochs[2]
    resumed.batch_sampler.set_epoch(1)
    assert list(resumed) == epochs[1]


@pytest.mark.parametrize("options", WORKERS)
def test_a_row_sampler_below_the_loaders_own_batches(options: dict[str, Any]) -> None:
    def make() -> StatefulDataLoader[Any]:
        data = Identity(50)
        return StatefulDataLoader(data, 4, sampler=RowSampler(data, seed=3), collate_fn=list, **options)

    reference = epochs_of(make(), 3)
    for place in (3, 13):
        loader = make()
        list(islice(loader, place))
        resumed = make()
        resumed.load_state_dict(loader.state_dict())
        assert epochs_of(resumed, 3) == [reference[0][place:], *reference[1:]]
        cursor = RowSampler(range(50), seed=3).cursor_of(loader.state_dict())
        assert cursor.rows_consumed == min(place * 4, 50)


@pytest.mark.parametrize("options", WORKERS)
def test_iterating_the_sampler_elsewhere_does_not_move_the_loader(options: dict[str, Any]) -> None:
    reference = list(make_loader("block", 50, **options))
    loader = make_loader("block", 50, **options)
    iterator = iter(loader)
    list(islice(iterator, 3))
    assert len(list(loader.batch_sampler)) == 13
    resumed = make_loader("block", 50, **options)
    resumed.load_state_dict(loader.state_dict())
    assert list(resumed) == reference[3:]


@pytest.mark.parametrize("options", WORKERS)
def test_a_state_saved_before_the_first_batch(options: dict[str, Any]) -> None:
    reference = list(make_loader("block", 50, **options))
    state = make_loader("block", 50, **options).state_dict()
    resumed = make_loader("block", 50, **options)
    resumed.load_state_dict(state)
    assert list(resumed) == reference


class TestElastic:
    @pytest.mark.parametrize(
        "options", [*WORKERS, pytest.param({"num_workers": 2, "snapshot_every_n_steps": 4}, id="rare")]
    )
    @pytest.mark.parametrize("name", ["block", "rows"])
    def test_the_cursor_counts_what_the_consumer_got(self, name: str, options: dict[str, Any]) -> None:
        loader = make_loader(name, 50, **options)
        iterator = iter(loader)
        list(islice(iterator, 6))
        sampler = SAMPLERS[name](Identity(50))
        cursor = sampler.cursor_of(loader.state_dict())
        assert (cursor.epoch, cursor.rows_consumed) == (0, 24)
        list(iterator)
        cursor = sampler.cursor_of(loader.state_dict())
        assert (cursor.epoch, cursor.rows_consumed) == (1, 0)

    @pytest.mark.parametrize("num_workers", [0, 1, 3])
    def test_two_ranks_with_two_workers_to_one_rank(self, num_workers: int) -> None:
        data = Identity(101)

        def make(batch_size: int, rank: int, world_size: int) -> BlockShuffleBatchSampler:
            return BlockShuffleBatchSampler(
                data, batch_size, block_rows=3, buffer_blocks=4, rank=rank, world_size=world_size
            )

        taken: list[int] = []
        for rank in range(2):
            sampler = make(4, rank, 2)
            loader = StatefulDataLoader(data, batch_sampler=sampler, num_workers=2, collate_fn=list)
            taken += [row for batch in islice(loader, 5) for row in batch]
            cursor = sampler.cursor_of(loader.state_dict())
            with pytest.raises(StateError, match=r"world_size 2, this sampler has 1; save cursor\(\)"):
                make(4, 0, 1).load_state_dict(loader.state_dict()["_snapshot"]["_main_snapshot"]["_sampler_iter_state"])
        alone = make(8, 0, 1)
        alone.load_cursor(cursor)
        rest = [
            row
            for batch in StatefulDataLoader(data, batch_sampler=alone, num_workers=num_workers, collate_fn=list)
            for row in batch
        ]
        assert sorted(taken + rest) == list(range(101))

    def test_a_foreign_state_is_refused(self) -> None:
        data = Identity(20)
        with pytest.raises(StateError, match="no sampler's state in a loader state with the keys"):
            RowSampler(data).cursor_of({"something": 1})


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("name", ["block", "rows"])
def test_announcements_reach_the_data_set(name: str, num_workers: int) -> None:
    class Announced(Identity):
        def __getitems__(self, batch: Any) -> list[Any]:
            windows = [batch.window, batch.window.next]
            ahead = {
                window.first_ordinal + number: rows.tolist()
                for window in windows
                if window is not None
                for number, rows in enumerate(window.batches)
            }
            return [list(batch), batch.ordinal, ahead]

    data = Announced(50)
    reference = list(SAMPLERS[name](data))
    loader = StatefulDataLoader(
        data, batch_sampler=SAMPLERS[name](data), num_workers=num_workers, collate_fn=lambda found: found
    )
    for ordinal, (rows, seen, ahead) in enumerate(loader):
        assert seen == ordinal
        assert rows == reference[ordinal] == ahead[ordinal]
        assert all(ahead[number] == reference[number] for number in ahead)
        assert ordinal + 1 == len(reference) or ordinal + 1 in ahead


@pytest.mark.parametrize("num_workers", [0, 2])
def test_torchs_own_loader_goes_on_from_a_loaded_place(num_workers: int) -> None:
    data = Identity(50)
    reference = list(SAMPLERS["block"](data))
    sampler = SAMPLERS["block"](data)
    list(islice(sampler, 5))
    fresh = SAMPLERS["block"](data)
    fresh.load_state_dict(sampler.state_dict())
    # With workers it calls iter() twice before it draws.
    assert list(DataLoader(data, batch_sampler=fresh, num_workers=num_workers, collate_fn=list)) == reference[5:]


def test_an_unrestorable_order_is_refused_at_once_with_workers() -> None:
    data = Identity(20)
    loader = StatefulDataLoader(
        data, batch_sampler=CoalescingBatchSampler(RandomSampler(data), 4), num_workers=1, collate_fn=list
    )
    with pytest.raises(StateError, match="RandomSampler cannot be restored"):
        list(loader)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("num_workers", [0, 1, 3, 4])
def test_iterable_workers_part_the_rows(num_workers: int, drop_last: bool) -> None:
    class Spans(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            info = get_worker_info()
            worker, workers = (info.id, info.num_workers) if info else (0, 1)
            for span in worker_spans(102, unit_rows=4, worker=worker, num_workers=workers):
                yield from span

    batches = list(DataLoader(Spans(), 4, num_workers=num_workers, drop_last=drop_last, collate_fn=list))
    rows = sorted(row for batch in batches for row in batch)
    assert len(rows) == len(set(rows)) == (100 if drop_last else 102)


@pytest.mark.heavy
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_fresh_process_goes_on(tmp_path: Path, num_workers: int) -> None:
    script = textwrap.dedent(
        """
        import json, pickle, sys
        from pathlib import Path
        sys.path.insert(0, sys.argv[1])
        from test_stateful_dataloader_samplers import make_loader
        loader = make_loader("rows", 50, num_workers=int(sys.argv[3]))
        loader.load_state_dict(pickle.loads(Path(sys.argv[2]).read_bytes()))
        print(json.dumps([list(loader), list(loader)]))
        """
    )
    reference = epochs_of(make_loader("rows", 50, num_workers=num_workers), 2)
    loader = make_loader("rows", 50, num_workers=num_workers)
    list(islice(loader, 5))
    saved = tmp_path / "state"
    saved.write_bytes(pickle.dumps(loader.state_dict()))
    arguments = [str(Path(__file__).parent), str(saved), str(num_workers)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, *arguments], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == [reference[0][5:], reference[1]]
