"""Transfer plans, carried out with numpy arrays and compared with torch.chunk's own shards."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from td_datapipes.errors import ConfigurationError
from td_datapipes.mesh import MeshSpec
from td_datapipes.transfer_plan import ShardSpec, Slice, TransferPlan, plan_transfer

R, S0, S1 = Replicate(), Shard(0), Shard(1)
Array = npt.NDArray[np.int64]


def spec(ranks: Any, *placements: Any) -> ShardSpec:
    return ShardSpec.of(MeshSpec.from_ranks(ranks), placements)


def reference(shape: tuple[int, ...], side: ShardSpec) -> dict[int, Array]:
    """Each rank's shard of arange, cut by torch.chunk axis after axis."""
    shards = {}
    for rank, coordinate in side.mesh.coordinates():
        local = torch.arange(math.prod(shape)).reshape(shape)
        for num_shards, placement, index in zip(side.mesh.shape, side.placements, coordinate, strict=True):
            if isinstance(placement, Shard):
                dim = placement.dim % len(shape)
                chunks = local.chunk(num_shards, dim)
                local = chunks[index] if index < len(chunks) else local.narrow(dim, 0, 0)
        shards[rank] = local.numpy()
    return shards


def carry_out(plan: TransferPlan) -> tuple[dict[int, Array], dict[int, Array]]:
    """Every destination rank's shard after the transfer, and how often each of its elements was written."""
    held, wanted = reference(plan.shape, plan.src), reference(plan.shape, plan.dst)
    result = {rank: np.full(shard.shape, -1) for rank, shard in wanted.items()}
    writes = {rank: np.zeros(shard.shape, np.int64) for rank, shard in wanted.items()}

    def write(part: Slice, sender: int, receiver: int) -> None:
        assert all(
            0 <= start < stop <= size for (start, stop), size in zip(part.src_box, held[sender].shape, strict=True)
        )
        result[receiver][part.dst_index] = held[sender][part.src_index]
        writes[receiver][part.dst_index] += 1

    for rank in sorted(held.keys() | wanted.keys()):
        for part in plan.local_copies(rank):
            assert part.peer == rank
            write(part, rank, rank)
        for part in plan.sends(rank):
            write(part, rank, part.peer)
    return result, writes


def check(plan: TransferPlan) -> None:
    """All that a plan promises."""
    held, wanted = reference(plan.shape, plan.src), reference(plan.shape, plan.dst)
    result, writes = carry_out(plan)
    for rank, shard in wanted.items():
        np.testing.assert_array_equal(result[rank], shard)
        assert (writes[rank] == 1).all()
        arriving = sum(part.numel for part in plan.recvs(rank))
        assert arriving == len(np.setdiff1d(shard, held.get(rank, np.array([], np.int64))))
    check_both_ends_agree(plan, sorted(held.keys() | wanted.keys()))
    check_replicas_are_balanced(plan, held)


def check_both_ends_agree(plan: TransferPlan, ranks: list[int]) -> None:
    sent = {(rank, part.peer): part for rank in ranks for part in plan.sends(rank)}
    received = {(part.peer, rank): part for rank in ranks for part in plan.recvs(rank)}
    assert sum(len(plan.sends(rank)) for rank in ranks) == len(sent)  # one message a pair
    assert sent.keys() == received.keys()
    for pair, part in sent.items():
        assert pair[0] != pair[1]
        assert part == Slice(
            peer=pair[1],
            global_box=received[pair].global_box,
            src_box=received[pair].src_box,
            dst_box=received[pair].dst_box,
        )
    assert plan.bytes_between(4) == {pair: 4 * part.numel for pair, part in sorted(sent.items())}


def check_replicas_are_balanced(plan: TransferPlan, held: dict[int, Array]) -> None:
    """Ranks that hold the same elements send as much as one another, but for one slice."""
    replicas: dict[bytes, list[int]] = {}
    for rank, shard in held.items():
        if shard.size:
            replicas.setdefault(shard.tobytes(), []).append(rank)
    for ranks in replicas.values():
        sizes = [[part.numel for part in plan.sends(rank)] for rank in ranks]
        loads = [sum(sent) for sent in sizes]
        assert max(loads) - min(loads) <= max((size for sent in sizes for size in sent), default=0)


@st.composite
def sides(draw: st.DrawFn, ndim: int) -> ShardSpec:
    """A mesh of 1 to 3 axes over any of 16 ranks, in any order."""
    mesh_shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(lambda s: math.prod(s) <= 12))
    ranks = draw(st.permutations(range(16)))[: math.prod(mesh_shape)]
    choices = st.sampled_from([R, *(Shard(dim) for dim in range(-ndim, ndim))])
    return spec(np.array(ranks).reshape(mesh_shape), *(draw(choices) for _ in mesh_shape))


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_any_mesh_to_any_mesh(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 9), max_size=3)))
    src, dst = data.draw(sides(len(shape))), data.draw(sides(len(shape)))
    check(plan_transfer(shape, src, dst))


PLACEMENTS_2D = list(itertools.product([R, S0, S1], repeat=2))


@pytest.mark.parametrize("dst_placements", PLACEMENTS_2D)
@pytest.mark.parametrize("src_placements", PLACEMENTS_2D)
def test_two_by_three_to_three_by_two(src_placements: Any, dst_placements: Any) -> None:
    ranks = np.arange(6)
    for shape in [(12, 12), (7, 5), (2, 1)]:
        check(
            plan_transfer(shape, spec(ranks.reshape(2, 3), *src_placements), spec(ranks.reshape(3, 2), *dst_placements))
        )


# Plans worked out by hand


def test_rows_to_columns() -> None:
    plan = plan_transfer((4, 6), spec([0, 1], S0), spec([0, 1], S1))
    (part,) = plan.sends(0)
    assert part == Slice(peer=1, global_box=((0, 2), (3, 6)), src_box=((0, 2), (3, 6)), dst_box=((0, 2), (0, 3)))
    assert (part.shape, part.numel) == ((2, 3), 6)
    (kept,) = plan.local_copies(1)
    assert kept == Slice(peer=1, global_box=((2, 4), (3, 6)), src_box=((0, 2), (3, 6)), dst_box=((2, 4), (0, 3)))
    assert plan.bytes_between(2) == {(0, 1): 12, (1, 0): 12}


def test_the_same_placement_moves_nothing() -> None:
    plan = plan_transfer((5, 3), spec([0, 1, 2, 3], S0), spec([0, 1, 2, 3], S0))
    assert plan.bytes_between(4) == {}
    assert [len(plan.local_copies(rank)) for rank in range(4)] == [1, 1, 1, 0]  # rank 3 holds nothing


def test_replicating_a_shard_sends_each_rank_what_it_lacks() -> None:
    plan = plan_transfer((4,), spec([0, 1], S0), spec([0, 1], R))
    assert plan.bytes_between(1) == {(0, 1): 2, (1, 0): 2}


def test_sharding_a_replica_is_local() -> None:
    plan = plan_transfer((9,), spec([0, 1, 2], R), spec([0, 1, 2], S0))
    assert plan.bytes_between(1) == {}


def test_trainers_to_generators_share_the_load() -> None:
    # Two trainers hold everything; four other ranks want a quarter each, so each trainer sends two.
    plan = plan_transfer((8, 2), spec([0, 1], R), spec([2, 3, 4, 5], S0))
    assert plan.bytes_between(1) == {(0, 2): 4, (0, 4): 4, (1, 3): 4, (1, 5): 4}


def test_load_counts_elements_not_slices() -> None:
    # 3 by 3 in four parts of 4, 2, 2 and 1: 4 + 1 from one holder, 2 + 2 from the other.
    plan = plan_transfer((3, 3), spec([0, 1], R), spec([[2, 3], [4, 5]], S0, S1))
    assert plan.bytes_between(1) == {(0, 2): 4, (0, 5): 1, (1, 3): 2, (1, 4): 2}


def test_ties_go_to_the_lower_rank() -> None:
    plan = plan_transfer((4,), spec([8, 3, 5], R), spec([2, 1], R))
    assert plan.bytes_between(1) == {(3, 1): 4, (5, 2): 4}


def test_ranks_may_be_the_same_in_another_order() -> None:
    plan = plan_transfer((4,), spec([0, 1], S0), spec([1, 0], S0))
    assert plan.bytes_between(8) == {(0, 1): 16, (1, 0): 16}
    assert plan.local_copies(0) == ()


def test_scalars_and_empty_tensors() -> None:
    plan = plan_transfer((), spec([0, 1], R), spec([1, 2], R))
    assert plan.bytes_between(8) == {(0, 2): 8}
    assert plan.local_copies(1) == (Slice(peer=1, global_box=(), src_box=(), dst_box=()),)
    empty = plan_transfer((0, 4), spec([0, 1], S0), spec([2, 3], S1))
    assert empty.bytes_between(8) == {}
    assert empty.recvs(2) == ()


def test_a_rank_of_neither_side_has_nothing_to_do() -> None:
    plan = plan_transfer((4,), spec([0, 1], S0), spec([2, 3], S0))
    assert (plan.sends(9), plan.recvs(9), plan.local_copies(9)) == ((), (), ())


# Size and caching


def test_the_number_of_elements_does_not_matter() -> None:
    ranks = np.arange(64 * 64).reshape(64, 64)
    rows, columns = 1 << 40, 1 << 30
    plan = plan_transfer((rows, columns), spec(ranks, S0, S1), spec(ranks, S1, S0))
    # Rank (i, j) holds row band i and column band j, and wants row band j and column band i: rank (j, i)'s part.
    (part,) = plan.recvs(64 * 3 + 5)
    assert (part.peer, part.numel) == (64 * 5 + 3, rows * columns // 4096)
    assert plan.recvs(64 * 7 + 7) == ()
    assert len(plan.bytes_between(1)) == 64 * 63


def test_many_replicas_share_the_load_evenly() -> None:
    src, dst = spec(np.arange(256).reshape(16, 16), S0, R), spec(np.arange(256, 512).reshape(16, 16), R, S0)
    senders = Counter(sender for sender, _ in plan_transfer((1 << 20,), src, dst).bytes_between(1))
    # 256 receivers want one sixteenth each, which is one source band: 16 receivers for 16 holders.
    assert senders == dict.fromkeys(range(256), 1)


def test_equal_arguments_give_the_same_plan() -> None:
    first = plan_transfer((4, 6), spec([0, 1], S0), spec([0, 1], Shard(-1)))
    assert plan_transfer(torch.Size([4, 6]), spec([0, 1], Shard(-2)), spec([0, 1], S1)) is first
    assert plan_transfer((4, 6), spec([1, 0], S0), spec([0, 1], S1)) is not first


def test_a_plan_does_not_depend_on_who_asks_first() -> None:
    src, dst = spec([[0, 1], [2, 3]], S0, R), spec([4, 5, 6], S0)
    forwards, backwards = (TransferPlan(shape=(9,), src=src, dst=dst) for _ in range(2))
    ranks = range(7)
    one = {rank: (forwards.sends(rank), forwards.recvs(rank)) for rank in ranks}
    other = {rank: (backwards.sends(rank), backwards.recvs(rank)) for rank in reversed(ranks)}
    assert one == other


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plan_transfer((-1,), spec([0], R), spec([0], R)), "no negative sizes"),
        (lambda: plan_transfer((4,), spec([0, 1], S1), spec([0], R)), r"the source has 1 dims .*Shard\(dim=1\)"),
        (lambda: plan_transfer((4,), spec([0], R), spec([0, 1], Shard(-2))), "the destination has 1 dims"),
        (lambda: spec([0, 1], S0, R), "2 placements .* requires 1"),
        (lambda: spec([0, 1], Partial()), "Partial"),
    ],
)
def test_plans_refuse(call: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        call()


def test_a_spec_says_what_a_rank_holds() -> None:
    assert spec([[3, 2], [1, 0]], S0, R).box((5, 2), 1) == ((3, 5), (0, 2))
