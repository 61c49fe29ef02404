"""Boxes, byte ranges and row shares against torch's own cut of a tensor and against numpy."""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as torch_shape_and_offset
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as torch_shape_and_offset_on_mesh
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from td_datapipes.errors import ConfigurationError
from td_datapipes.mesh import AxisPlacement, MeshSpec, local_box, normalise_placements, shard_bounds
from td_datapipes.placement import Placement, byte_ranges
from td_datapipes.schema import Field, Group, Key

R, S0, S1 = Replicate(), Shard(0), Shard(1)


def make_fields(**shapes: tuple[int, ...]) -> tuple[Field, ...]:
    """int32 fields in one record."""
    return Group.pack(((name,), torch.int32, shape) for name, shape in shapes.items()).fields


@st.composite
def shapes_on_meshes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[AxisPlacement, ...]]:
    """A global shape (sizes may be 0), a mesh of 1 to 3 axes, one placement an axis."""
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    mesh_shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    choices = st.sampled_from([R, *(Shard(dim) for dim in range(len(shape)))])
    return shape, mesh_shape, tuple(draw(choices) for _ in mesh_shape)


def chunked(
    tensor: torch.Tensor, mesh_shape: Sequence[int], placements: Any, coordinate: Sequence[int]
) -> torch.Tensor:
    """A rank's shard, cut by torch.chunk axis after axis; chunks that torch.chunk leaves out are empty."""
    for num_shards, placement, index in zip(mesh_shape, placements, coordinate, strict=True):
        if isinstance(placement, Shard):
            chunks = tensor.chunk(num_shards, placement.dim)
            empty = tensor.narrow(placement.dim, 0, 0)
            tensor = chunks[index] if index < len(chunks) else empty
    return tensor


# Cutting a dim


def test_five_over_four() -> None:
    assert [shard_bounds(5, 4, index) for index in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 5)]


@pytest.mark.parametrize("num_shards", range(1, 9))
@pytest.mark.parametrize("size", range(1, 20))
def test_shard_bounds_are_torch_chunk(size: int, num_shards: int) -> None:
    expected = [chunk.tolist() for chunk in torch.arange(size).chunk(num_shards)]
    got = [list(range(*shard_bounds(size, num_shards, index))) for index in range(num_shards)]
    assert got == expected + [[]] * (num_shards - len(expected))


@pytest.mark.parametrize("arguments", [(-1, 2, 0), (4, 2, 2), (4, 2, -1), (4, 0, 0)])
def test_shard_bounds_refuses(arguments: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigurationError, match=f"size={arguments[0]}, num_shards={arguments[1]}"):
        shard_bounds(*arguments)


# Boxes


@given(shapes_on_meshes())
@settings(max_examples=300, deadline=None)
def test_local_box_is_torchs_shape_and_offset(case: Any) -> None:
    shape, mesh_shape, placements = case
    for coordinate in itertools.product(*map(range, mesh_shape)):
        box = local_box(shape, mesh_shape, placements, coordinate)
        expected_shape, expected_offset = torch_shape_and_offset(shape, mesh_shape, list(coordinate), placements)
        assert tuple(stop - start for start, stop in box) == tuple(expected_shape)
        assert tuple(start for start, _ in box) == tuple(expected_offset)


@given(shapes_on_meshes())
@settings(max_examples=200, deadline=None)
def test_local_box_selects_what_nested_chunks_select(case: Any) -> None:
    shape, mesh_shape, placements = case
    tensor = torch.arange(math.prod(shape)).reshape(shape)
    for coordinate in itertools.product(*map(range, mesh_shape)):
        box = local_box(shape, mesh_shape, placements, coordinate)
        torch.testing.assert_close(
            tensor[tuple(slice(*bounds) for bounds in box)], chunked(tensor, mesh_shape, placements, coordinate)
        )


def test_two_axes_cut_one_dim_in_mesh_order() -> None:
    # 10 rows over 2, then each 5 over 4: 2, 2, 1, 0.
    boxes = [local_box((10,), (2, 4), (S0, S0), (1, index)) for index in range(4)]
    assert boxes == [((5, 7),), ((7, 9),), ((9, 10),), ((10, 10),)]


def test_negative_dims_count_from_the_end() -> None:
    assert local_box((4, 6), (2,), (Shard(-1),), (1,)) == ((0, 4), (3, 6))


def test_a_scalar_is_replicated() -> None:
    assert local_box((), (2,), (R,), (1,)) == ()


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        ((S0,), r"the batch has 1 placements .* requires 2"),
        ((S0, R, R), r"the batch has 3 placements .* requires 2"),
        ((S0, Partial()), r"Partial.*only Shard\(dim\) and Replicate\(\)"),
        ((_StridedShard(0, split_factor=2), S0), "_StridedShard"),
        ((S0, Shard(2)), r"2 dims.*Shard\(dim=2\) is out of range.*\[-2, 2\)"),
        ((S0, Shard(-3)), r"Shard\(dim=-3\) is out of range"),
        (S0, "one an axis"),
    ],
)
def test_placements_that_cannot_be(placements: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        normalise_placements(placements, ndim=2, mesh_shape=(2, 2), subject="the batch")


@pytest.mark.parametrize("coordinate", [(0,), (0, 2), (-1, 0)])
def test_local_box_refuses_a_coordinate_outside_the_mesh(coordinate: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError):
        local_box((4,), (2, 2), (S0, S0), coordinate)


# Meshes


def test_mesh_coordinates() -> None:
    mesh = MeshSpec.from_ranks([[4, 0, 6], [1, 9, 3]], ("dp", "tp"))
    assert (mesh.shape, mesh.ndim, mesh.ranks) == ((2, 3), 2, (4, 0, 6, 1, 9, 3))
    assert mesh.coordinate(9) == (1, 1)
    assert dict(mesh.coordinates()) == {rank: mesh.coordinate(rank) for rank in mesh.ranks}
    assert (mesh.axis("tp"), mesh.axis(0), mesh.axis(-1)) == (1, 0, 1)
    assert str(mesh) == "(dp=2, tp=3)"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda mesh: mesh.coordinate(7), r"rank 7 is not in the mesh \(dp=2, tp=2\).*0, 1, 2, 3"),
        (lambda mesh: mesh.axis("pp"), r"\(dp=2, tp=2\) has no axis 'pp'"),
        (lambda mesh: mesh.axis(2), "has no axis 2"),
        (lambda _: MeshSpec.from_ranks([[0, 1], [1, 2]]), "each rank once"),
        (lambda _: MeshSpec.from_ranks([-1, 0]), "negative"),
        (lambda _: MeshSpec.from_ranks([0.0, 1.0]), "integer ranks"),
        (lambda _: MeshSpec.from_ranks([0, 1], ("dp", "tp")), "1 different axis names"),
        (lambda _: MeshSpec.from_ranks([[0, 1]], ("dp", "dp")), "2 different axis names"),
        (lambda _: MeshSpec(shape=(2, 2), ranks=(0, 1)), "has 4 ranks"),
        (lambda _: MeshSpec.from_ranks(3), "one axis or more"),
        (lambda _: MeshSpec.of(cast(Any, [0, 1])), "not list"),
    ],
)
def test_mesh_refuses(call: Any, message: str) -> None:
    mesh = MeshSpec.from_ranks([[0, 1], [2, 3]], ("dp", "tp"))
    with pytest.raises(ConfigurationError, match=message):
        call(mesh)


@pytest.fixture
def rank_five_of_eight() -> Iterator[None]:
    """torch's process group without processes: this one is rank 5 of 8."""
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("rank_five_of_eight")
def test_device_meshes_and_their_slices() -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    spec = MeshSpec.of(mesh)
    assert spec == MeshSpec.from_ranks(np.arange(8).reshape(2, 4), ("dp", "tp"))
    assert spec.coordinate(5) == tuple(mesh.get_coordinate() or ())
    assert MeshSpec.of(mesh["tp"]) == MeshSpec.from_ranks([4, 5, 6, 7], ("tp",))
    placement = Placement(mesh)
    assert placement == Placement(spec, (S0, R), rank=5)
    assert b"DeviceMesh" not in pickle.dumps(placement)


@pytest.mark.usefixtures("rank_five_of_eight")
@pytest.mark.parametrize("shape", [(16, 8), (5, 3), (1, 7), (0, 4)])
@pytest.mark.parametrize("placements", list(itertools.product([R, S0, S1], repeat=2)))
def test_placement_is_dtensors_local_part(shape: tuple[int, ...], placements: tuple[AxisPlacement, ...]) -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    part = Placement(mesh, placements).resolve(make_fields(x=shape[1:]))
    start, stop = part.row_share(shape[0])
    expected_shape, expected_offset = torch_shape_and_offset_on_mesh(torch.Size(shape), mesh, placements)
    assert (stop - start, *part.fields[0].shape) == tuple(expected_shape)
    assert (start, part.fields[0].box[0][0]) == tuple(expected_offset)
    local = torch.zeros(stop - start, *part.fields[0].shape, dtype=torch.int32)
    whole = DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=(shape[1], 1))
    assert whole.to_local().shape == local.shape


# Bytes within a row


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_byte_ranges_are_the_boxs_bytes(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 5), max_size=4)))
    bounds = [sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
    box = tuple((low, high) for low, high in bounds)
    itemsize = data.draw(st.sampled_from([1, 2, 8]))
    numbers = np.arange(math.prod(shape) * itemsize).reshape(*shape, itemsize)
    wanted = numbers[tuple(slice(*b) for b in box)].ravel().tolist()
    ranges = byte_ranges(shape, itemsize, box)
    assert [byte for start, stop in ranges for byte in range(start, stop)] == wanted
    assert all(stop < following for (_, stop), (following, _) in itertools.pairwise(ranges))


@pytest.mark.parametrize(
    ("shape", "box", "expected"),
    [
        ((8, 4), ((2, 4), (0, 4)), ((32, 64),)),  # leading dim: one range
        ((3, 4), ((0, 3), (1, 3)), ((4, 12), (20, 28), (36, 44))),  # last dim: one an index before it
        ((2, 2, 3), ((0, 2), (1, 2), (0, 3)), ((12, 24), (36, 48))),  # middle dim
        ((1, 4), ((0, 1), (2, 4)), ((8, 16),)),
        ((4, 1, 2), ((1, 3), (0, 1), (0, 2)), ((8, 24),)),  # neighbours merge
        ((), (), ((0, 4),)),
        ((4,), ((2, 2),), ()),
        ((0, 3), ((0, 0), (0, 3)), ()),
    ],
)
def test_byte_ranges_of(shape: Any, box: Any, expected: Any) -> None:
    assert byte_ranges(shape, 4, box) == expected


@pytest.mark.parametrize("box", [((0, 5),), ((-1, 2),), ((3, 2),), (), ((0, 1), (0, 1))])
def test_byte_ranges_refuses_a_box_outside(box: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"does not lie in a row of shape \(4,\)"):
        byte_ranges((4,), 4, box)


# What a user passes


MESH = MeshSpec.from_ranks(np.arange(8).reshape(2, 4), ("dp", "cp"))


def test_the_default_shards_rows_over_the_first_axis() -> None:
    part = Placement(MESH, rank=6).resolve(make_fields(tokens=(16,), label=()))
    assert part.coordinate == (1, 2)
    assert part.row_share(9) == (5, 9)
    tokens, label = part.fields
    assert (tokens.placements, tokens.row_axes, tokens.box, tokens.byte_ranges) == (
        (S0, R),
        (0,),
        ((0, 16),),
        ((0, 64),),
    )
    assert (label.shape, label.byte_ranges) == ((), ((0, 4),))


@pytest.mark.parametrize(
    ("data_axes", "expected"),
    [("cp", (R, S0)), (1, (R, S0)), (-1, (R, S0)), (("dp", "cp"), (S0, S0)), (("cp", 0), (S0, S0)), ((), (R, R))],
)
def test_data_axes(data_axes: Any, expected: tuple[AxisPlacement, ...]) -> None:
    assert Placement(MESH, rank=0, data_axes=data_axes).placements_for("x", 1) == expected


@pytest.mark.parametrize("num_rows", [0, 1, 7, 8, 64])
def test_ranks_of_two_data_axes_own_each_row_once(num_rows: int) -> None:
    parts = [Placement(MESH, rank=rank, data_axes=("dp", "cp")).resolve(make_fields(x=())) for rank in MESH.ranks]
    rows = [row for part in parts for row in range(*part.row_share(num_rows))]
    assert rows == list(range(num_rows))


def test_a_sharded_sequence_reads_rows_and_bytes() -> None:
    part = Placement(MESH, (S0, S1), rank=7).resolve(make_fields(tokens=(10,), image=(2, 3)))
    assert part.row_share(4) == (2, 4)
    tokens, image = part.fields
    # 10 over 4 are 3, 3, 3, 1; 2 over 4 are 1, 1, 0, 0.
    assert (tokens.box, tokens.shape, tokens.byte_ranges) == (((9, 10),), (1,), ((36, 40),))
    assert (image.box, image.shape, image.byte_ranges) == (((2, 2), (0, 3)), (0, 3), ())


@pytest.mark.parametrize("placements", list(itertools.product([R, S0, S1, Shard(2)], repeat=2)))
@pytest.mark.parametrize("num_rows", [5, 8])
def test_rows_and_bytes_rebuild_each_ranks_shard(placements: tuple[AxisPlacement, ...], num_rows: int) -> None:
    batch = torch.arange(num_rows * 15, dtype=torch.int32).reshape(num_rows, 3, 5)
    records = batch.numpy().reshape(num_rows, 15).view(np.uint8)
    for rank, coordinate in MESH.coordinates():
        part = Placement(MESH, placements, rank=rank).resolve(make_fields(x=(3, 5)))
        (share,) = part.fields
        start, stop = part.row_share(num_rows)
        taken = [records[start:stop, low:high] for low, high in share.byte_ranges]
        got = np.concatenate([np.zeros((stop - start, 0), np.uint8), *taken], axis=1)
        expected = chunked(batch, MESH.shape, placements, coordinate).contiguous()
        assert (stop - start, *share.shape) == tuple(expected.shape)
        assert got.tobytes() == expected.numpy().tobytes()


def test_placements_by_field() -> None:
    declared = {"tokens": (S0, S1), ("next", "obs"): (S0, Shard(-1)), "next": (R, R)}
    placement = Placement(MESH, declared, rank=0)
    assert placement.placements_for("tokens", 2) == (S0, S1)
    assert placement.placements_for(("next", "obs"), 4) == (S0, Shard(3))
    assert placement.placements_for(("next", "reward"), 1) == (R, R)  # the node above it
    assert placement.placements_for("label", 1) == (S0, R)  # the default
    assert placement == Placement(MESH, dict(reversed(declared.items())), rank=0)


def test_fields_that_share_rows_otherwise_are_read_apart() -> None:
    placement = Placement(MESH, {"a": (S0, R), "b": (R, R), "c": (S0, R)}, rank=6)
    part = placement.resolve(make_fields(a=(), b=(), c=()))
    shares = {bounds: [s.field.key for s in fields] for bounds, fields in part.row_shares(8).items()}
    assert shares == {(4, 8): [("a",), ("c",)], (0, 8): [("b",)]}
    with pytest.raises(ConfigurationError, match=r"'a' has .*Shard\(dim=0\).*'b' has"):
        part.row_share(8)


@pytest.mark.parametrize("rank", range(4))
def test_every_rank_refuses_fields_that_disagree(rank: int) -> None:
    # Ranks 0 and 3 of a square mesh would get the same rows of both fields; they must not go on alone.
    mesh = MeshSpec.from_ranks([[0, 1], [2, 3]])
    part = Placement(mesh, {"a": (S0, R), "b": (R, S0)}, rank=rank).resolve(make_fields(a=(), b=()))
    with pytest.raises(ConfigurationError, match="same axes"):
        part.row_share(4)


def test_axes_of_one_rank_make_no_difference() -> None:
    mesh = MeshSpec.from_ranks([[0, 1]], ("pp", "dp"))
    part = Placement(mesh, {"a": (R, S0), "b": (S0, S0)}, rank=1).resolve(make_fields(a=(), b=()))
    assert part.row_share(5) == (3, 5)


def test_no_fields_own_all_rows() -> None:
    assert Placement(MESH, rank=1).resolve(()).row_share(3) == (0, 3)


def test_placement_survives_pickling() -> None:
    placement = Placement(MESH, {("next", "obs"): (S0, S1)}, rank=5, data_axes="cp")
    copy = pickle.loads(pickle.dumps(placement))
    assert copy == placement
    assert hash(copy) == hash(placement)
    fields = Group.pack([(("next", "obs"), torch.int32, (8,))]).fields
    assert copy.resolve(fields) == placement.resolve(fields)


KEYS: list[Key] = [("tokens",), ("label",)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Placement(MESH, rank=8), "rank 8 is not in the mesh"),
        (lambda: Placement(MESH), "pass rank="),
        (lambda: Placement(MESH, rank=0, data_axes="tp"), r"\(dp=2, cp=4\) has no axis 'tp'"),
        (lambda: Placement(MESH, (S0, R), rank=0, data_axes="cp"), "give one of the two"),
        (lambda: Placement(MESH, (S0,), rank=0), r"the batch has 1 placements .* requires 2"),
        (lambda: Placement(MESH, {"x": (S0,)}, rank=0), "field 'x' has 1 placements .* requires 2"),
        (lambda: Placement(MESH, {"x": (S0, Partial())}, rank=0), "field 'x' has the placement Partial"),
        (lambda: Placement(MESH, (S0, S1), rank=0).resolve(make_fields(label=())), r"field 'label' has 1 dims"),
        (lambda: Placement(MESH, {"y": (S0, R)}, rank=0).resolve(make_fields(x=())), "name the field 'y'; .* 'x'"),
    ],
)
def test_placement_refuses(call: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        call()


def test_placements_of_fields_that_are_not_read_are_known() -> None:
    placement = Placement(MESH, {"label": (R, R)}, rank=0)
    assert len(placement.resolve(make_fields(tokens=(4,)), known_keys=KEYS).fields) == 1
