"""What can be checked of placed batches on one process: placements, axes, modes, rows, and what ranks would say."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rows_in_memory import assert_same_tensor, random_rows
from tensordict import TensorDict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from td_datapipes import DTensorCollate, Placement
from td_datapipes.dtensor_collate import copy_in_one
from td_datapipes.errors import ConfigurationError, SchemaError
from td_datapipes.held_batch import Holding, decide_held
from td_datapipes.mesh import MeshSpec
from td_datapipes.rank_agreement import RankReport, describe_cursor, disagreement, ranks_of
from td_datapipes.samplers import BlockShuffleBatchSampler, CoalescingBatchSampler, RowSampler
from td_datapipes.schema import Schema, schema_of

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
MESH = MeshSpec.from_ranks([[0, 1], [2, 3]], ("dp", "tp"))


def batch(rows: int = 4) -> TensorDict:
    return random_rows(rows, {"x": (torch.float32, (5,)), ("n", "y"): (torch.int16, (2, 3)), "z": (torch.bool, ())})


def holding(rank: int, held: Any, placements: Any = None, schema: Schema | None = None, dealt: Any = None) -> Holding:
    return Holding(Placement(MESH, placements, rank=rank), held, schema=schema, dealt=dealt)


# Which part is kept.


@pytest.mark.parametrize("rank", range(4))
def test_of_a_global_batch_the_slice_is_kept(rank: int) -> None:
    td, (dp, tp) = batch(5), divmod(rank, 2)
    held = holding(rank, "global", {"x": (S0, S1)}).hold(td)
    rows, columns = [slice(0, 3), slice(3, 5)][dp], [slice(0, 3), slice(3, 5)][tp]
    assert_same_tensor(held.shard(("x",)), td["x"][rows, columns].contiguous())
    assert_same_tensor(held.shard(("n", "y")), td["n", "y"][rows])
    assert (held.num_rows, held.global_shape(("x",))) == (5, (5, 5))


@pytest.mark.parametrize("rank", range(4))
def test_of_own_rows_all_are_kept(rank: int) -> None:
    td, tp = batch(3), rank % 2
    held = holding(rank, "rows", {"x": (S0, S1)}).hold(td)
    assert_same_tensor(held.shard(("x",)), td["x"][:, [slice(0, 3), slice(3, 5)][tp]].contiguous())
    assert held.shard(("z",)).data_ptr() == td["z"].data_ptr()
    assert (held.num_rows, held.held_rows) == (6, 3)


@pytest.mark.parametrize("rank", range(4))
def test_parts_are_what_the_data_set_says(rank: int) -> None:
    td, tp = batch(3), rank % 2
    schema = schema_of(td)
    part = td.clone()
    part["x"] = td["x"][:, [slice(0, 3), slice(3, 5)][tp]]
    held = holding(rank, "parts", {"x": (S0, S1)}, schema=schema).hold(part)
    assert_same_tensor(held.shard(("x",)), part["x"].contiguous())
    assert held.global_shape(("x",)) == (6, 5)
    if tp == 1:
        with pytest.raises(SchemaError, match=r"field 'x': float32\[5\] is not this rank's part .* float32\[2\]"):
            holding(rank, "parts", {"x": (S0, S1)}, schema=schema).hold(td)


def test_a_kept_slice_does_not_keep_the_batch() -> None:
    td = batch(4)
    shard = holding(0, "global").hold(td).shard(("x",))
    assert shard.untyped_storage().nbytes() == 2 * 5 * 4


def test_rows_that_are_not_the_ranks_share_are_refused() -> None:
    mine = holding(2, "rows")
    assert mine.hold(batch(2), global_rows=5).num_rows == 5  # 3 and 2
    with pytest.raises(ConfigurationError, match="of 5 rows the rank at .* has 2, from 3 on; its batch has 3"):
        mine.hold(batch(3), global_rows=5)
    with pytest.raises(ConfigurationError, match="the batch has 3 rows and is the whole one; global_rows=5"):
        holding(0, "global").hold(batch(3), global_rows=5)


@pytest.mark.parametrize(
    ("placements", "error", "message"),
    [
        ({"x": (S0, S2)}, ConfigurationError, "field 'x' has 2 dims"),
        ({"w": (S0, R)}, ConfigurationError, "placements name the field 'w'; the fields are 'x', .*, 'z'"),
        ({"x": (R, R)}, ConfigurationError, "one set of rows only if all fields shard dim 0 over the same axes"),
    ],
)
def test_placements_that_do_not_fit_the_fields(placements: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        holding(0, "rows", placements).hold(batch())


def test_jagged_sparse_and_scalar_batches_are_refused() -> None:
    jagged = torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)], layout=torch.jagged)
    with pytest.raises(SchemaError, match=r"field 'x' is a nested \(jagged\) tensor, .* pad it"):
        holding(0, "global").hold(TensorDict({"x": jagged}, [2]))
    with pytest.raises(SchemaError, match="field 'x' is a torch.sparse_coo tensor"):
        holding(0, "global").hold(TensorDict({"x": torch.eye(2).to_sparse()}, [2]))
    with pytest.raises(SchemaError, match=r"this one has batch_size=\[\]"):
        holding(0, "global").hold(TensorDict({"x": torch.zeros(2)}, []))


def test_a_sampler_for_other_ranks_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"deals for rank 3 of 4, and .*\(dp=2, tp=2\) make this rank 1 of 2"):
        holding(3, "rows", dealt=(3, 4)).hold(batch())
    assert holding(3, "rows", dealt=(1, 2)).hold(batch()).num_rows == 8


# Which mode.


@pytest.mark.parametrize(
    ("mode", "placed", "dealt", "held"),
    [
        ("global", False, None, "global"),
        ("local", False, None, "rows"),
        ("auto", False, (0, 1), "global"),
        ("auto", False, (1, 2), "rows"),
        ("local", False, (1, 2), "rows"),
        ("auto", True, None, "parts"),
        ("local", True, (1, 2), "parts"),
    ],
)
def test_what_the_loader_yields(mode: str, placed: bool, dealt: Any, held: str) -> None:
    assert decide_held(mode, placed=placed, dealt=dealt) == held


@pytest.mark.parametrize(
    ("mode", "placed", "dealt", "message"),
    [
        ("auto", False, None, "nothing says"),
        ("global", False, (1, 2), "the sampler deals for rank 1 of 2"),
        ("global", True, None, "each rank read its own part only"),
        ("both", False, None, "mode is one of auto, global, local, got 'both'"),
    ],
)
def test_modes_that_contradict(mode: str, placed: bool, dealt: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        decide_held(mode, placed=placed, dealt=dealt)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def test_samplers_say_for_whom_they_deal() -> None:
    rows, ranks = list(range(20)), {"rank": 1, "world_size": 3}
    block = BlockShuffleBatchSampler(rows, 2, **ranks)
    assert ranks_of(block) == (1, 3)
    assert ranks_of(CoalescingBatchSampler(RowSampler(rows, **ranks), 2)) == (1, 3)
    assert ranks_of(DataLoader(rows, batch_sampler=block)) == (1, 3)
    assert ranks_of(BatchSampler(DistributedSampler(rows, 3, 1), 2, False)) == (1, 3)
    assert ranks_of(BatchSampler(SequentialSampler(rows), 2, False)) == (0, 1)
    assert ranks_of(DataLoader(Stream())) is None
    assert ranks_of(None) is None


def test_cursors_are_the_same_on_all_ranks() -> None:
    rows = list(range(20))
    samplers = [BlockShuffleBatchSampler(rows, 2, rank=rank, world_size=3) for rank in range(3)]
    for sampler in samplers:
        next(iter(sampler))
    (cursor,) = {describe_cursor(sampler) for sampler in samplers}
    assert '"rows_consumed": 6' in cursor
    torchs = [BatchSampler(DistributedSampler(rows, 3, rank, seed=4), 2, False) for rank in range(3)]
    assert {describe_cursor(sampler) for sampler in torchs} == {'{"seed": 4, "epoch": 0, "num_replicas": 3}'}
    assert describe_cursor(SequentialSampler(rows)) == ""


# What ranks say of each other.


def reports(**odd: Any) -> list[RankReport]:
    """Four that agree, but for rank 3."""
    common: dict[str, Any] = {"fields": ("'x': float32[]",), "num_rows": 8, "held_rows": 4, "cursor": "{}"}
    return [RankReport(rank=rank, **{**common, "contents": (0, 7), **(odd if rank == 3 else {})}) for rank in range(4)]


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ({}, ""),
        ({"contents": (5, 7)}, "rank 1 (dp=0, tp=1) and rank 3 (dp=1, tp=1) differ only along the mesh axis 'dp'"),
        ({"contents": (0, 8)}, "rank 2 (dp=1, tp=0) and rank 3 (dp=1, tp=1) differ only along the mesh axis 'tp'"),
        ({"num_rows": 6, "held_rows": 3}, "rank 0 (dp=0, tp=0) 4 of a global batch of 8, rank 3 (dp=1, tp=1) 3 of 6"),
        ({"fields": ("'x': int64[]",)}, "has 'x': float32[], rank 3 (dp=1, tp=1) has 'x': int64[]"),
        ({"fields": ()}, "has 'x': float32[], rank 3 (dp=1, tp=1) has no such field"),
        ({"cursor": "{1}"}, "rank 0 (dp=0, tp=0) at {}, rank 3 (dp=1, tp=1) at {1}"),
        ({"error": "SchemaError: no"}, "rank 3 (dp=1, tp=1) cannot place its batch: SchemaError: no"),
    ],
)
def test_disagreements_name_both_sides(odd: dict[str, Any], message: str) -> None:
    found = disagreement(MESH, reports(**odd))
    assert message in found
    assert bool(found) == bool(odd)


def test_reports_travel_as_text() -> None:
    for report in reports(error="é", contents=()):
        assert RankReport.from_json(report.to_json()) == report


# The data axes.


@pytest.mark.parametrize(
    ("placements", "data_axes", "expected"),
    [
        (None, None, [(0, 2), (0, 2), (1, 2), (1, 2)]),
        (None, "tp", [(0, 2), (1, 2), (0, 2), (1, 2)]),
        ((S0, S0), None, [(0, 4), (1, 4), (2, 4), (3, 4)]),
        ((R, S1), None, [(0, 1)] * 4),
        ({"x": (S0, S1)}, None, [(0, 2), (0, 2), (1, 2), (1, 2)]),
    ],
)
def test_data_ranks(placements: Any, data_axes: str | None, expected: list[tuple[int, int]]) -> None:
    fields = schema_of(batch()).select(["x"])
    for rank, ranks in enumerate(expected):
        placement = Placement(MESH, placements, data_axes=data_axes, rank=rank)
        assert (placement.data_rank, placement.data_world_size) == ranks
        resolved = placement.resolve(fields)
        assert (resolved.data_rank, resolved.data_world_size) == ranks


def test_data_ranks_that_depend_on_the_field() -> None:
    placement = Placement(MESH, {"x": (R, S0)}, rank=1)
    with pytest.raises(ConfigurationError, match="depends on the field"):
        placement.data_rank  # noqa: B018
    resolved = placement.resolve(schema_of(batch()).select(["x"]))
    assert (resolved.data_rank, resolved.data_world_size) == (1, 2)
    # Dim -2 of a field of two dims is its rows.
    with pytest.raises(ConfigurationError, match="depends on the field"):
        Placement(MESH, (Shard(-2), R), rank=1).data_world_size  # noqa: B018


# The hook itself, on a process group that sends nothing.


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """(dp=2, tp=2), seen from rank 0."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data_axes": "cp"}, r"\(dp=2, tp=2\) has no axis 'cp'"),
        ({"placements": (S0,)}, "the batch has 1 placements .* requires 2"),
        ({"placements": (S0, Partial())}, r"placement Partial\(sum\) \(Partial\)"),
        ({"placements": (S0, _StridedShard(0, split_factor=2))}, r"\(_StridedShard\)"),
        ({"placements": {"x": (S0,)}}, "field 'x' has 1 placements"),
        ({"check": "sometimes"}, "check is one of first, always, never, got 'sometimes'"),
        ({"check_timeout_seconds": 0}, "check_timeout_seconds must be positive"),
        ({"mode": "auto"}, "nothing says"),
    ],
)
def test_arguments_that_cannot_work(mesh: DeviceMesh, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        DTensorCollate(mesh, **{"mode": "global", **arguments})


def test_a_mesh_is_needed() -> None:
    with pytest.raises(ConfigurationError, match="DTensors need a DeviceMesh, not MeshSpec"):
        DTensorCollate(MESH, mode="global")  # type: ignore[arg-type]


def test_batches_that_are_no_tensordicts(mesh: DeviceMesh) -> None:
    collate = DTensorCollate(mesh, mode="global", check="never")
    assert collate({"x": torch.arange(4)})["x"].shape == (4,)
    rows = [{"x": torch.tensor(row)} for row in range(4)]
    assert collate(rows)["x"].to_local().tolist() == [0, 1]
    with pytest.raises(SchemaError, match="got Tensor"):
        collate(torch.arange(4))
    with pytest.raises(ConfigurationError, match="field 'x' is a DTensor already"):
        collate(dict(collate(batch())))


def test_a_placed_batch_is_passed_on_where_it_lies_as_it_should(mesh: DeviceMesh) -> None:
    placed = DTensorCollate(mesh, mode="global", check="never")(batch())
    assert DTensorCollate(mesh, mode="local")(placed) is placed
    with pytest.raises(ConfigurationError, match=r"arrives with .* give the ShardSender, the ShardReceiver and"):
        DTensorCollate(mesh, [Replicate()] * mesh.ndim, mode="local")(placed)


def test_a_pickled_hook_says_where_it_belongs(mesh: DeviceMesh) -> None:
    copy = pickle.loads(pickle.dumps(DTensorCollate(mesh, mode="global")))
    with pytest.raises(ConfigurationError, match=r"for batch in map\(collate, loader\)"):
        copy(batch())


def test_views_of_one_buffer_are_copied_in_one() -> None:
    buffer = torch.arange(96, dtype=torch.uint8)
    views = {
        ("a",): buffer.view(torch.int16).as_strided((4, 3), (12, 1), 2),
        ("b",): buffer.view(torch.float32).as_strided((4,), (6,), 3),
    }
    copied = copy_in_one(views, "cpu")
    assert copied is not None
    assert len({tensor.untyped_storage().data_ptr() for tensor in copied.values()} - {buffer.data_ptr()}) == 1
    for key, view in views.items():
        assert copied[key].stride() == view.stride()
        assert_same_tensor(copied[key].contiguous(), view.contiguous())
    assert copy_in_one({("a",): torch.zeros(2), ("b",): torch.zeros(2)}, "cpu") is None
