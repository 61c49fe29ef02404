"""What torchrl promises of a storage and of the buffers around it, kept by `RedisStorage`; torchrl's own is the oracle.

Runs in an environment of its own (``make rl``): torchrl wants an older tensordict.
"""

from __future__ import annotations

import json
import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rows_in_memory import assert_same_rows, random_rows
from servers import ServerProcess
from tensordict import TensorDict, tensorclass
from torchrl.collectors import MultiSyncCollector
from torchrl.data import (
    ImmutableDatasetWriter,
    LazyTensorStorage,
    ReplayBuffer,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from torchrl.data.replay_buffers.samplers import (
    RandomSampler,
    Sampler,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)
from torchrl.data.replay_buffers.writers import RoundRobinWriter
from torchrl.envs import GymEnv

from td_datapipes import RedisReplayBuffer
from td_datapipes.errors import ConfigurationError, NotEnoughRowsError, RowIndexError, SchemaError, StateError
from td_datapipes.torchrl import RedisStorage, RedisWriter

SIZE = 100
fork = multiprocessing.get_context("fork")


@pytest.fixture
def url(server: ServerProcess, unique_name: str) -> str:
    return server.url(unique_name)


def rows(start: int, number: int) -> TensorDict:
    a = torch.arange(start, start + number)
    source = {"a": a, "obs": a.float()[:, None].expand(number, 4).contiguous(), "episode": a // 10}
    td = TensorDict(source, [number])
    td["next", "done"] = (a % 10 == 9)[:, None]
    return td


class Pair:
    """A buffer on the server and the same in memory; whatever is done is done to both."""

    def __init__(self, url: str, make: Callable[[Any], Any]) -> None:
        self.ours, self.theirs = make(RedisStorage(url, SIZE)), make(LazyTensorStorage(SIZE))

    def both(self, act: Callable[[Any], Any]) -> None:
        mine, reference = act(self.ours), act(self.theirs)
        assert torch.equal(torch.as_tensor(mine), torch.as_tensor(reference))
        assert len(self.ours) == len(self.theirs)
        if len(self.ours):
            assert_same_rows(self.ours[:], self.theirs[:])


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
def test_it_holds_what_torchrls_own_storage_holds(url: str, kind: type[ReplayBuffer]) -> None:
    pair = Pair(url, lambda storage: kind(storage=storage, batch_size=8))
    pair.both(lambda buffer: buffer.extend(rows(0, 30)))
    pair.both(lambda buffer: buffer.add(rows(500, 1)[0]))
    pair.both(lambda buffer: buffer.extend(rows(31, 60)))
    pair.both(lambda buffer: buffer.extend(rows(91, 40)))  # around the end
    pair.both(lambda buffer: buffer.extend(rows(200, 100)))
    pair.both(lambda buffer: buffer.add(rows(501, 1)[0]))
    for index in (0, 99, slice(3, 40, 7), slice(None), [5, 5, 2], torch.tensor([7, 1, 99]), range(4, 8)):
        assert_same_rows(pair.ours[index], pair.theirs[index])


def test_every_dtype_and_nested_rows_come_back_bit_for_bit(url: str) -> None:
    fields = {
        "b": (torch.bfloat16, (3,)),
        "f8": (torch.float8_e4m3fn, (5,)),
        ("deep", "er", "flag"): (torch.bool, ()),
        "u": (torch.uint16, (2, 2)),
    }
    data = random_rows(20, fields)
    buffer = ReplayBuffer(storage=RedisStorage(url, 20), batch_size=4)
    buffer.extend(data)
    assert_same_rows(buffer[:], data)


@tensorclass
class Step:
    x: torch.Tensor
    y: torch.Tensor


def test_tensors_tensorclasses_and_lists_of_rows(server: ServerProcess) -> None:
    plain = ReplayBuffer(storage=RedisStorage(server.url("plain"), 10), batch_size=4)
    plain.extend(torch.arange(20).view(10, 2))
    assert torch.equal(plain[:], torch.arange(20).view(10, 2))
    assert torch.equal(plain[3], torch.tensor([6, 7]))
    steps = ReplayBuffer(storage=RedisStorage(server.url("steps"), 10), batch_size=4)
    steps.extend(Step(x=torch.arange(6), y=torch.ones(6, 2), batch_size=[6]))
    assert isinstance(steps[2], Step)
    assert steps[2].x == 2
    listed = ReplayBuffer(storage=RedisStorage(server.url("listed"), 10), batch_size=4)
    listed.extend([rows(i, 1)[0] for i in range(5)])
    assert listed[:]["a"].tolist() == [0, 1, 2, 3, 4]


def test_random_and_prefetched_samples_are_rows_of_the_storage(url: str) -> None:
    buffer = TensorDictReplayBuffer(storage=RedisStorage(url, SIZE), sampler=RandomSampler(), batch_size=32, prefetch=3)
    buffer.extend(rows(0, 130))
    seen: set[int] = set()
    for _ in range(40):
        batch = buffer.sample()
        assert torch.equal(batch["obs"], batch["a"].float()[:, None].expand(32, 4))
        assert torch.equal(batch["index"], batch["a"] % SIZE)
        seen.update(batch["a"].tolist())
    assert seen == set(range(30, 130))


def test_sampling_without_replacement_gives_each_row_once(url: str) -> None:
    sampler = SamplerWithoutReplacement(drop_last=False)
    buffer = TensorDictReplayBuffer(storage=RedisStorage(url, SIZE), sampler=sampler, batch_size=25)
    buffer.extend(rows(0, SIZE))
    assert sorted(torch.cat([buffer.sample()["a"] for _ in range(4)]).tolist()) == list(range(SIZE))


@pytest.mark.parametrize("kind", [SliceSampler, SliceSamplerWithoutReplacement])
@pytest.mark.parametrize("key", [{"traj_key": "episode"}, {"end_key": ("next", "done")}])
def test_slices_stay_within_a_trajectory(url: str, kind: type[Sampler], key: dict[str, Any]) -> None:
    sampler = kind(num_slices=3, **key)
    buffer = TensorDictReplayBuffer(
        storage=RedisStorage(url, SIZE), sampler=sampler, writer=RedisWriter(), batch_size=15
    )
    buffer.extend(rows(0, 125))  # trajectories 2 (half of it) to 12
    for _ in range(10):
        batch = buffer.sample().view(-1, 5)  # without replacement, an epoch's last batch may have fewer
        assert (batch["episode"] == batch["episode"][:, :1]).all()
        assert (batch["a"] == batch["a"][:, :1] + torch.arange(5)).all()
        assert batch["a"].min() >= 25
    # What the sampler keeps of trajectories is void once anybody writes, this process or another.
    child = fork.Process(target=extend_once, args=(url, 1000, 100))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert buffer.sample()["a"].min() >= 1000


class InProportion(Sampler):
    """Priorities as torchrl's samplers keep them: by slot, new rows marked by the writer."""

    def __init__(self, size: int) -> None:
        self.masses = torch.zeros(size)

    def sample(self, storage: Any, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        return torch.multinomial(self.masses[: len(storage)], batch_size, replacement=True), {}

    def add(self, index: Any) -> None:
        self.masses[index] = 1.0

    def extend(self, index: Any) -> None:
        self.masses[index] = 1.0

    def mark_update(self, index: Any, *, storage: Any = None) -> None:  # noqa: ARG002
        self.masses[index] = 1.0

    def update_priority(self, index: Any, priority: Any, *, storage: Any = None) -> None:  # noqa: ARG002
        self.masses[index] = torch.as_tensor(priority, dtype=torch.float32).reshape(-1)

    def _empty(self) -> None:
        self.masses.zero_()

    def state_dict(self) -> dict[str, Any]:
        return {"masses": self.masses}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.masses = state_dict["masses"]

    def dumps(self, path: Any) -> None:
        torch.save(self.masses, Path(path) / "masses.pt")

    def loads(self, path: Any) -> None:
        self.masses = torch.load(Path(path) / "masses.pt")


def test_a_sampler_with_priorities_by_slot_sees_new_rows(url: str) -> None:
    buffer = TensorDictReplayBuffer(
        storage=RedisStorage(url, SIZE), sampler=InProportion(SIZE), writer=RedisWriter(), batch_size=50
    )
    buffer.extend(rows(0, SIZE))
    buffer.update_priority(torch.arange(SIZE), torch.zeros(SIZE))
    buffer.update_priority(torch.tensor([4, 9]), torch.tensor([1.0, 2.0]))
    assert set(buffer.sample()["a"].tolist()) == {4, 9}
    buffer.extend(rows(100, 1))  # over row 0
    assert set(torch.cat([buffer.sample()["a"] for _ in range(5)]).tolist()) == {4, 9, 100}


def test_a_writer_of_the_best_rows_writes_where_it_wants(url: str) -> None:
    storage = RedisStorage(url, 10)
    buffer = TensorDictReplayBuffer(storage=storage, writer=TensorDictMaxValueWriter(rank_key="value"), batch_size=5)
    value = torch.randperm(60, generator=torch.Generator().manual_seed(0)).float()
    for part in TensorDict({"value": value, "id": torch.arange(60)}, [60]).split(7):
        buffer.extend(part)
    assert sorted(buffer[:]["value"].tolist()) == list(range(50, 60))


def test_a_writer_that_writes_nothing(url: str) -> None:
    RedisReplayBuffer(url, 10).extend(rows(0, 5))
    buffer = TensorDictReplayBuffer(storage=RedisStorage(url), writer=ImmutableDatasetWriter(), batch_size=5)
    assert set(buffer.sample()["a"].tolist()) <= set(range(5))
    with pytest.raises(RuntimeError):
        buffer.extend(rows(0, 5))


def extend_once(url: str, start: int, number: int) -> None:
    torch.set_num_threads(1)
    buffer = ReplayBuffer(storage=RedisStorage(url), writer=RedisWriter(), batch_size=1)
    buffer.extend(rows(start, number))


def extend_many(url: str, start: int, number: int, step: int) -> None:
    torch.set_num_threads(1)
    buffer = ReplayBuffer(storage=RedisStorage(url, SIZE), writer=RedisWriter(), batch_size=1)
    for at in range(start, start + number, step):
        slots = buffer.extend(rows(at, step))
        assert buffer[slots]["a"].tolist() == list(range(at, at + step))


def test_four_processes_with_writers_of_their_own_store_distinct_rows(url: str) -> None:
    children = [fork.Process(target=extend_many, args=(url, 25 * i, 25, 5)) for i in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0] * 4
    assert sorted(RedisStorage(url)[:]["a"].tolist()) == list(range(100))


def grow(buffer: ReplayBuffer, turn: Any) -> None:
    torch.set_num_threads(1)
    buffer.extend(rows(10, 15))
    turn.put(len(buffer))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_two_processes_share_it_and_agree_on_its_length(url: str, method: str) -> None:
    context = multiprocessing.get_context(method)
    buffer = ReplayBuffer(storage=RedisStorage(url, SIZE), writer=RedisWriter(), batch_size=4)
    buffer.extend(rows(0, 10))
    buffer.share()
    turn = context.SimpleQueue()
    child = context.Process(target=grow, args=(buffer, turn))
    child.start()
    assert turn.get() == 25
    child.join(60)
    assert child.exitcode == 0
    assert len(buffer) == 25
    assert buffer[:]["a"].tolist() == list(range(25))


def random_cartpole() -> GymEnv:
    return GymEnv("CartPole-v1")


def test_collectors_in_several_processes_write_through_it(url: str) -> None:
    buffer = TensorDictReplayBuffer(storage=RedisStorage(url, 1000), writer=RedisWriter(), batch_size=16, shared=True)
    collector = MultiSyncCollector(
        [random_cartpole] * 2, policy=None, frames_per_batch=40, total_frames=160, replay_buffer=buffer
    )
    try:
        for _ in collector:
            pass
        assert len(buffer) == 160
        batch = buffer.sample()
        assert batch["observation"].shape == (16, 4)
        stored = buffer[:]
        # Within a trajectory, most observations are what the step stored before them led to.
        followed = 0
        for trajectory in stored["collector", "traj_ids"].unique():
            mine = stored[stored["collector", "traj_ids"] == trajectory]
            same = mine["next", "observation"][:-1] == mine["observation"][1:]
            followed += int(same.all(-1).sum())
        assert followed > 80
    finally:
        collector.shutdown()


def test_a_checkpoint_brings_rows_cursor_and_sampler_back(url: str, tmp_path: Path) -> None:
    def make() -> TensorDictReplayBuffer:
        return TensorDictReplayBuffer(
            storage=RedisStorage(url, SIZE), sampler=SamplerWithoutReplacement(), writer=RedisWriter(), batch_size=10
        )

    buffer = make()
    buffer.extend(rows(0, 120))
    buffer.dumps(tmp_path / "one")
    kept = buffer[:]
    buffer.extend(rows(500, 50))
    buffer.dumps(tmp_path / "two")
    again = make()
    again.loads(tmp_path / "one")
    assert_same_rows(again[:], kept)
    assert again.extend(rows(700, 1)).tolist() == [20]
    assert len(json.dumps((tmp_path / "one" / "storage" / "redis_storage.json").read_text())) < 300
    again.loads(tmp_path / "two")
    assert set(range(500, 550)) <= set(again[:]["a"].tolist())


def test_a_state_is_small_without_secrets_and_checked(unique_name: str) -> None:
    with ServerProcess("redis", password="s3cret") as process:
        url = process.url(unique_name)
        buffer = TensorDictReplayBuffer(storage=RedisStorage(url, SIZE), writer=RedisWriter(), batch_size=10)
        buffer.extend(rows(0, 30))
        state = buffer.state_dict()
        assert "s3cret" not in repr(state)
        assert "s3cret" not in repr(buffer)
        assert "s3cret" not in repr(pickle.dumps(buffer._storage))
        buffer.load_state_dict(state)
        assert len(buffer) == 30
        buffer.empty()
        assert len(buffer) == 0
        with pytest.raises(StateError, match="lost its last 30 rows"):
            buffer.load_state_dict(state)


def test_errors_name_what_is_wrong(url: str) -> None:
    with pytest.raises(ConfigurationError, match="max_size"):
        RedisStorage(url)
    storage = RedisStorage(url, SIZE, timeout_seconds=1.0)
    with pytest.raises(NotEnoughRowsError):
        storage.get(0)
    storage.set(range(10), rows(0, 10))
    with pytest.raises(RowIndexError, match=r"\[0, 10\)"):
        storage.get(10)
    with pytest.raises(IndexError):
        storage.get(torch.tensor([0, 55]))
    with pytest.raises(RowIndexError, match="10 rows are there"):
        storage.set(range(20, 30), rows(20, 10))
    with pytest.raises(SchemaError, match="'obs'"):
        storage.set(range(10, 12), rows(10, 2).exclude("obs"))
    with pytest.raises(ConfigurationError, match="RedisStorage"):
        ReplayBuffer(storage=LazyTensorStorage(10), writer=RedisWriter(), batch_size=1)
    storage.set(3, rows(77, 1)[0])
    assert storage.get(3)["a"] == 77
    assert len(storage) == 10
    assert isinstance(ReplayBuffer(storage=storage, batch_size=1)._writer, RoundRobinWriter)


def test_a_buffer_of_ours_reads_what_torchrl_wrote(url: str) -> None:
    buffer = ReplayBuffer(storage=RedisStorage(url, SIZE), batch_size=4)
    buffer.extend(rows(0, 130))
    with RedisReplayBuffer(url) as ours:
        batch = ours.sample(64)
    assert batch["a"].min() >= 30
    assert torch.equal(batch["obs"], batch["a"].float()[:, None].expand(64, 4))
