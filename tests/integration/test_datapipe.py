"""`RedisTDIterDataPipe` is one of torch's own: graph functions reach it, and torch's pipes work behind it."""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from servers import ServerProcess
from tensordict import TensorDict
from torch.utils.data import DataLoader, IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torch.utils.data.graph import traverse_dps
from torch.utils.data.graph_settings import (
    apply_random_seed,
    apply_sharding,
    apply_shuffle_settings,
    get_all_graph_pipes,
)

from td_datapipes import RedisTDIterDataPipe, write_dataset
from td_datapipes.errors import ConfigurationError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create.*")

ROWS = 60


@pytest.fixture(scope="module")
def url(valkey_server: ServerProcess) -> Iterator[str]:
    name = valkey_server.url("piped")
    write_dataset(TensorDict({"i": torch.arange(ROWS)}, [ROWS]), name, chunk_bytes=160, overwrite=True)
    yield name
    valkey_server.flush()


def doubled(batch: TensorDict) -> TensorDict:
    batch["i"] = batch["i"] * 2
    return batch


def number(row: TensorDict) -> int:
    return int(row["i"])


def flat(parts: Iterable[list[int]]) -> list[int]:
    return [row for part in parts for row in part]


def together(batches: Any) -> list[int]:
    return [row for batch in batches for row in batch["i"].tolist()]


def test_torchs_pipes_work_behind_it(url: str) -> None:
    assert isinstance(RedisTDIterDataPipe(url), IterDataPipe)
    assert together(RedisTDIterDataPipe(url, batch_size=25).map(doubled)) == list(range(0, 2 * ROWS, 2))
    assert list(RedisTDIterDataPipe(url).map(number).batch(7))[1] == list(range(7, 14))
    torch.manual_seed(0)
    shuffled = list(RedisTDIterDataPipe(url).map(number).shuffle(buffer_size=20))
    assert sorted(shuffled) == list(range(ROWS)) != shuffled
    pairs = list(RedisTDIterDataPipe(url).map(number).zip(IterableWrapper(range(ROWS))))
    assert pairs == [(i, i) for i in range(ROWS)]


def test_it_is_found_in_the_graph(url: str) -> None:
    pipe = RedisTDIterDataPipe(url)
    graph = traverse_dps(pipe.map(number).shuffle())
    assert [type(found).__name__ for found in get_all_graph_pipes(graph)] == [
        *("ShufflerIterDataPipe", "MapperIterDataPipe", "RedisTDIterDataPipe")
    ]


def test_the_functional_form_reads_the_data_sets_whose_urls_a_pipe_gives(url: str) -> None:
    pipe = IterableWrapper([url, url]).read_redis_td(batch_size=50)
    assert isinstance(pipe, RedisTDIterDataPipe)
    assert together(pipe) == [*range(ROWS), *range(ROWS)]
    assert len(get_all_graph_pipes(traverse_dps(pipe))) == 2


def test_a_second_iterator_ends_the_first_as_with_all_pipes(url: str) -> None:
    pipe = RedisTDIterDataPipe(url, batch_size=20)
    first = iter(pipe)
    next(first)
    second = iter(pipe)
    assert next(second)["i"].tolist() == list(range(20))
    with pytest.raises(RuntimeError, match="invalidated"):
        next(first)


def test_a_loader_turns_shuffling_on_and_off(url: str) -> None:
    pipe = RedisTDIterDataPipe(url, batch_size=20, seed=1)
    shuffled = [together(DataLoader(pipe, batch_size=None, shuffle=True)) for _ in range(2)]
    assert sorted(shuffled[0]) == sorted(shuffled[1]) == list(range(ROWS))
    assert shuffled[0] != shuffled[1]
    assert together(DataLoader(pipe, batch_size=None, shuffle=False)) == list(range(ROWS))
    apply_shuffle_settings(pipe.map(doubled), shuffle=True)
    assert together(pipe) != list(range(ROWS))
    following = RedisTDIterDataPipe(url, batch_size=20, follow=True, timeout_seconds=0)
    with pytest.raises(ConfigurationError, match="cannot be shuffled"):
        apply_shuffle_settings(following, shuffle=True)


def test_a_seed_of_its_own_is_kept_and_none_takes_the_loaders(url: str) -> None:
    def epoch(seed: int | None, loader_seed: int) -> list[int]:
        pipe = RedisTDIterDataPipe(url, batch_size=20, shuffle=True, seed=seed)
        apply_random_seed(pipe, torch.Generator().manual_seed(loader_seed))
        return together(pipe)

    assert epoch(7, 1) == epoch(7, 2)
    assert epoch(None, 1) == epoch(None, 1) != epoch(None, 2)


@pytest.mark.parametrize("instances", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize("shuffle", [False, True])
def test_shares_applied_by_hand_hold_each_row_once(
    url: str, instances: int, batch_size: int | None, shuffle: bool
) -> None:
    rows: Counter[int] = Counter()
    for instance in range(instances):
        pipe = RedisTDIterDataPipe(url, batch_size=batch_size, shuffle=shuffle, read_rows=5)
        apply_sharding(pipe.map(doubled), instances, instance)
        items = list(pipe)
        assert len(items) == len(pipe)
        rows.update(row for item in items for row in item["i"].reshape(-1).tolist())
    assert rows == Counter(range(ROWS))


def test_ranks_and_workers_are_applied_apart_or_together(url: str) -> None:
    parts = []
    for rank in range(2):
        for worker in range(3):
            pipe = RedisTDIterDataPipe(url, batch_size=5)
            apply_sharding(pipe, 2, rank, SHARDING_PRIORITIES.DISTRIBUTED)
            apply_sharding(pipe, 3, worker, SHARDING_PRIORITIES.MULTIPROCESSING)
            parts.append(together(pipe))
    assert sorted(flat(parts)) == list(range(ROWS))
    assert [len(part) for part in parts] == [10] * 6
    with pytest.raises(ConfigurationError, match="instance_id"):
        apply_sharding(RedisTDIterDataPipe(url), 2, 2)


def test_ranks_given_by_hand_hold_in_a_loader_with_workers(url: str) -> None:
    parts = [
        together(
            DataLoader(RedisTDIterDataPipe(url, batch_size=7, rank=rank, world_size=2), batch_size=None, num_workers=2)
        )
        for rank in range(2)
    ]
    assert sorted(flat(parts)) == list(range(ROWS))
    assert len(parts[0]) == len(parts[1])


@pytest.mark.parametrize("num_workers", [0, 2, 3])
def test_a_sharding_filter_behind_it_neither_loses_nor_repeats_rows(url: str, num_workers: int) -> None:
    at_once = RedisTDIterDataPipe(url).sharding_filter().map(number)
    assert sorted(DataLoader(at_once, batch_size=None, num_workers=num_workers)) == list(range(ROWS))
    further = RedisTDIterDataPipe(url).map(number).sharding_filter()
    assert sorted(DataLoader(further, batch_size=None, num_workers=num_workers)) == list(range(ROWS))
    shuffled = RedisTDIterDataPipe(url).map(number).shuffle().sharding_filter()
    assert sorted(DataLoader(shuffled, batch_size=None, num_workers=num_workers, shuffle=True)) == list(range(ROWS))


def test_a_worker_that_comes_late_behind_a_filter_runs_the_same_epoch(url: str) -> None:
    pipe = RedisTDIterDataPipe(url).map(number).shuffle().sharding_filter()
    loader = DataLoader(pipe, batch_size=None, num_workers=2, shuffle=True, worker_init_fn=time.sleep)
    orders = [list(loader) for _ in range(2)]
    assert [sorted(order) for order in orders] == [list(range(ROWS))] * 2
    assert orders[0] != orders[1]


def test_a_share_of_a_filter_applied_by_hand_is_the_filters(url: str) -> None:
    pipe = RedisTDIterDataPipe(url).map(number).sharding_filter()
    apply_sharding(pipe, 3, 1)
    assert list(pipe) == list(range(1, ROWS, 3))


def test_it_travels_without_its_connections_and_its_place(url: str) -> None:
    pipe = RedisTDIterDataPipe(url, batch_size=20)
    next(iter(pipe))
    copied = pickle.loads(pickle.dumps(pipe))
    assert together(copied) == list(range(ROWS))


def test_its_length_is_that_of_what_comes(url: str) -> None:
    assert len(RedisTDIterDataPipe(url, batch_size=7)) == 9
    assert len(RedisTDIterDataPipe(url, batch_size=7, drop_last=True)) == 8
    assert len(RedisTDIterDataPipe(url).map(number)) == ROWS
    assert len(DataLoader(RedisTDIterDataPipe(url, batch_size=7), batch_size=None, num_workers=2)) == 9
    with pytest.raises(TypeError, match="follows"):
        len(RedisTDIterDataPipe(url, follow=True))


@pytest.mark.heavy
@pytest.mark.timeout(300)
def test_the_example_is_killed_and_resumes_with_the_same_losses(valkey_server: ServerProcess, tmp_path: Path) -> None:
    example = Path(__file__).resolve().parents[2] / "examples" / "stream_tokens.py"
    command = [sys.executable, str(example), "--url", valkey_server.url("tokens"), "--steps", "60", "--rows", "1024"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1,024 rows of 65 bytes of Python; an epoch is 32 steps" in done.stdout  # so it is resumed in the second
    assert "the losses are identical" in done.stdout
    assert list(tmp_path.iterdir()) == []
