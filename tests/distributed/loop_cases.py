"""What loader and trainer ranks do in the tests of the loop. Each function runs on every rank at once."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from placement_cases import S0, S1, SAMPLERS, placed_dataset, raised, require_equal
from tensordict import TensorDict
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from transfer_cases import is_in, mesh_of

from td_datapipes import DTensorCollate, Placement, RedisTDDataset, ShardReceiver, ShardSender
from td_datapipes.errors import DataLossError
from td_datapipes.mesh import MeshSpec

WANTED = {"tokens": (S1,)}
LOADERS, TRAINERS = [0, 1], [2, 3]
KINDS: dict[str, Any] = {"DataLoader": DataLoader, "StatefulDataLoader": StatefulDataLoader}


def loader_of(url: str, mesh: DeviceMesh, kind: str = "DataLoader") -> Any:
    """A loader rank's batches: its own rows, as DTensors on the loaders' mesh."""
    dataset = placed_dataset(url, mesh, None)
    sampler = SAMPLERS["block"](dataset, rank=dataset.data_rank, world_size=dataset.data_world_size)
    collate = DTensorCollate(mesh, dataset=dataset, sampler=sampler)
    return KINDS[kind](dataset, batch_sampler=sampler, collate_fn=collate)


def two_epochs(url: str, num_loaders: int) -> list[list[int]]:
    """The rows of each global batch of the first two epochs, worked out without any loader rank."""
    mesh = MeshSpec.from_ranks(range(num_loaders))
    with RedisTDDataset(url, placement=Placement(mesh, rank=0)) as dataset:
        samplers = [SAMPLERS["block"](dataset, rank=rank, world_size=num_loaders) for rank in range(num_loaders)]
        parts = [parts for _ in range(2) for parts in zip(*samplers, strict=True)]
    return [[row for part in batch for row in part] for batch in parts]


def feed(
    url: str,
    whole: TensorDict,
    src_ranks: Any,
    dst_ranks: Any,
    options: dict[str, Any],
    through_loader: bool = False,
    group_ranks: Sequence[int] | None = None,
) -> tuple[int, str]:
    """Two epochs from loader ranks to trainer ranks, each batch compared; returns (batches, strategy) of this rank."""
    src, dst = mesh_of(src_ranks), mesh_of(dst_ranks)
    group = None if group_ranks is None else dist.new_group(list(group_ranks))
    options = {"placements": WANTED if dst.ndim == 1 else {"tokens": (S0, S1)}, "group": group, **options}
    if is_in(src):
        sender = ShardSender(src, MeshSpec.of(dst), timeout_seconds=15, **options)
        sender.run(loader_of(url, src), num_epochs=2)
        return sender.stats.transfers, sender.stats.strategy
    if not is_in(dst):
        return 0, ""
    wanted = two_epochs(url, src.size())
    with ShardReceiver(MeshSpec.of(src), dst, timeout_seconds=15, **options) as receiver:
        batches: Any = receiver
        if through_loader:
            collate = DTensorCollate(dst, options["placements"], mode="local")
            batches = DataLoader(receiver, batch_size=None, collate_fn=collate)
        placed = [batch for _ in range(2) for batch in batches]
        for batch, rows in zip(placed, wanted, strict=True):
            require_equal(batch, whole[rows])
            assert tuple(batch["tokens"].placements) == options["placements"]["tokens"]
        assert f"rank {min(src_ranks)} has ended the transfer of batches" in raised(lambda: next(iter(receiver)))
        assert receiver.stats.agreements == 2  # the last batch of an epoch is shorter
        return len(placed), receiver.stats.strategy


def resume(url: str, whole: TensorDict, consumed: int, past_end: bool, kind: str) -> int:
    """Some batches, then all ends; new ends go on from what the trainers saved. Returns how many came in all."""
    src, dst = mesh_of(LOADERS), mesh_of(TRAINERS)
    wanted = two_epochs(url, 2)
    if is_in(src):
        for epochs in (None, 2):
            ShardSender(src, MeshSpec.of(dst), WANTED, timeout_seconds=15).run(
                loader_of(url, src, kind), num_epochs=epochs
            )
        return 0
    seen, state = [], None
    for part in (wanted[:consumed], wanted[consumed:]):
        with ShardReceiver(MeshSpec.of(src), dst, WANTED, timeout_seconds=15) as receiver:
            if state is not None:
                receiver.load_state_dict(state)
            for batch in _endless(receiver, len(part)):
                seen.append(batch)
                state = receiver.state_dict()
            if past_end and state is not None and len(seen) < len(wanted):
                # The epoch's end has been seen too.
                assert next(iter(receiver), None) is None
                state = receiver.state_dict()
                assert (state["epoch"], state["batches"]) == (1, 0)
            state = json.loads(json.dumps(state))
    for batch, rows in zip(seen, wanted, strict=True):
        require_equal(batch, whole[rows])
    return len(seen)


def _endless(receiver: ShardReceiver, count: int) -> Iterator[TensorDict]:
    """So many batches, over the ends of epochs."""
    while count:
        for batch in receiver:
            yield batch
            count -= 1
            if not count:
                return


def busy_trainers(url: str) -> tuple[int, int]:
    """Trainers that take nothing for longer than the time-out; returns (rounds gone through, batches then)."""
    src, dst = mesh_of(LOADERS), mesh_of(TRAINERS)
    if is_in(src):
        ShardSender(src, MeshSpec.of(dst), WANTED, timeout_seconds=1, start_timeout_seconds=15).run(
            loader_of(url, src), num_epochs=1
        )
        return 0, 0
    with ShardReceiver(
        MeshSpec.of(src), dst, WANTED, prefetch=1, timeout_seconds=1, start_timeout_seconds=15
    ) as receiver:
        batches = iter(receiver)
        next(batches)
        # A second of rounds in which nothing moves: one in each quarter of it.
        session = receiver._end.session
        rounds = torch.zeros(())
        while rounds < 10:
            rounds.fill_(session._number)
            dist.all_reduce(rounds, dist.ReduceOp.MIN, group=dst.get_group(0))
        return session._number, 1 + sum(1 for _ in batches)


class Rows:
    """Batches of a loader rank, with something that happens at one of them."""

    def __init__(self, mesh: DeviceMesh, at: int, event: Any, count: int = 6) -> None:
        self._mesh, self._at, self._event, self._count = mesh, at, event, count

    def __iter__(self) -> Iterator[TensorDict]:
        place = DTensorCollate(self._mesh, mode="global", check="never")
        for number in range(self._count):
            if number == self._at and self._event is not None:
                self._event()
            yield place(TensorDict({"x": number * 100 + torch.arange(8)}, [8]))


def lose_data() -> None:
    raise DataLossError("chunk 3 of field 'x' is missing")


def go_wrong() -> None:
    raise KeyError("no such column")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


EVENTS = {"lost": lose_data, "key": go_wrong, "killed": die}


def one_loader_fails(kind: str, folder: str) -> list[Any]:
    """Loader rank 1 fails before its batch 3; each rank writes what it raises into a file of the folder."""
    src, dst = mesh_of(LOADERS), mesh_of(TRAINERS)
    seen: list[int] = []

    def send() -> None:
        event = EVENTS[kind] if dist.get_rank() == 1 else None
        ShardSender(src, MeshSpec.of(dst), timeout_seconds=5).run(Rows(src, 3, event))

    def receive() -> None:
        with ShardReceiver(MeshSpec.of(src), dst, timeout_seconds=5) as receiver:
            for batch in receiver:
                # With other trainers, where they are sure to come as well.
                first = batch["x"].to_local() if kind == "killed" else batch["x"].full_tensor()
                seen.append(int(first[0]) // 100)

    text = ""
    try:
        text = raised(send if is_in(src) else receive)
    except KeyError as error:
        text = f"KeyError: {error}"
    outcome = [text, seen]
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(outcome))
    return outcome


def ends_disagree(kind: str) -> str:
    """What each rank raises where the two ends of a loop do not fit together."""
    src, dst = mesh_of(LOADERS), mesh_of(TRAINERS)
    rank = dist.get_rank()
    sends: dict[str, Any] = {}
    receives: dict[str, Any] = {}
    count = 6
    if kind == "placements":
        receives = {"placements": (S1,)}
    if kind == "strategy":
        sends, receives = {"strategy": "optimal"}, {"strategy": "redistribute"}
    if kind == "batches" and rank == 1:
        count = 4
    state = {"version": 1, "epoch": 0, "batches": rank, "loaders": {}}

    def send() -> None:
        ShardSender(src, MeshSpec.of(dst), timeout_seconds=10, **sends).run(Rows(src, 9, None, count))

    def receive() -> None:
        with ShardReceiver(MeshSpec.of(src), dst, timeout_seconds=10, **receives) as receiver:
            if kind in ("states", "no state"):
                receiver.load_state_dict({**state, "batches": rank if kind == "states" else 1})
            for _ in receiver:
                pass
            if kind == "trainer" and rank == 3:
                raise DataLossError("the checkpoint is gone")
            for _ in receiver:
                pass

    return raised(send if is_in(src) else receive)


def trainers_stop_early() -> tuple[int, int]:
    """Trainers close after two batches; returns (batches this rank sent or took, rounds)."""
    src, dst = mesh_of(LOADERS), mesh_of(TRAINERS)
    if is_in(src):
        sender = ShardSender(src, MeshSpec.of(dst), timeout_seconds=10)
        sender.run(Rows(src, 99, None, 100))
        return sender.stats.transfers, 0
    with ShardReceiver(MeshSpec.of(src), dst, timeout_seconds=10) as receiver:
        taken = [int(batch["x"].full_tensor()[0]) for batch, _ in zip(receiver, range(2), strict=False)]
    assert taken == [0, 100]
    return receiver.stats.transfers, len(taken)
