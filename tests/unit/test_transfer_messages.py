"""Messages between ranks, carried out in memory: both ends compute the same, and every byte arrives once."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from td_datapipes.mesh import MeshSpec, local_box
from td_datapipes.transfer.agreement import AgreedField, Agreement
from td_datapipes.transfer.declaration import FieldSpec, NodeSpec
from td_datapipes.transfer.messages import SMALL_BYTES, STAGING_BYTES, WINDOW, Message, Program, program_of

DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex128]
R, S0, S1 = Replicate(), Shard(0), Shard(1)


def agreement_of(fields: list[AgreedField], src: Any, dst: Any, strategy: Any = "optimal") -> Agreement:
    return Agreement(
        strategy=strategy,
        src=MeshSpec.from_ranks(src),
        dst=MeshSpec.from_ranks(dst),
        fields=tuple(fields),
        nodes=(NodeSpec(key=(), batch_size=(), names=None),),
    )


def field(number: int, shape: tuple[int, ...], dtype: torch.dtype, held: Any, wanted: Any) -> AgreedField:
    return AgreedField(spec=FieldSpec(key=(f"f{number}",), dtype=dtype, shape=shape, placements=held), wanted=wanted)


def numbered(shape: tuple[int, ...]) -> Any:
    return np.arange(math.prod(shape)).reshape(shape)


def part_of(shape: tuple[int, ...], mesh: MeshSpec, placements: Any, rank: int) -> Any:
    placements = placements or (R,) * mesh.ndim
    box = local_box(shape, mesh.shape, placements, mesh.coordinate(rank))
    return numbered(shape)[tuple(slice(*bounds) for bounds in box)]


def index(box: Any) -> Any:
    return tuple(slice(start, stop) for start, stop in box)


def carry_out(agreement: Agreement) -> dict[Any, int]:
    """Carry out the programs of all ranks; returns the bytes between each two."""
    ranks = sorted({*agreement.src.ranks, *agreement.dst.ranks})
    programs = {rank: program_of(agreement, rank) for rank in ranks}
    results = {rank: [np.full(shape, -1) for shape in programs[rank].dst_shapes] for rank in agreement.dst.ranks}
    writes = {rank: [np.zeros(shape, int) for shape in programs[rank].dst_shapes] for rank in agreement.dst.ranks}

    def source(rank: int, number: int) -> Any:
        spec = agreement.fields[number].spec
        return part_of(spec.shape, agreement.src, spec.placements, rank)

    def write(item: Any, sender: int, receiver: int) -> None:
        results[receiver][item.field][index(item.dst)] = source(sender, item.field)[index(item.src)]
        writes[receiver][item.field][index(item.dst)] += 1

    traffic: dict[Any, int] = {}
    for rank, program in programs.items():
        for copy in program.copies:
            write(copy, rank, rank)
        for stage in program.stages:
            for peer, message in stage.sends:
                check_message(message, agreement)
                traffic[rank, peer] = traffic.get((rank, peer), 0) + message.nbytes
                for item in message.items:
                    write(item, rank, peer)
    check_both_ends(programs)
    for rank in agreement.dst.ranks:
        for number, (got, written) in enumerate(zip(results[rank], writes[rank], strict=True)):
            wanted = agreement.fields[number]
            np.testing.assert_array_equal(got, part_of(wanted.spec.shape, agreement.dst, wanted.wanted, rank))
            assert (written == 1).all()
    return traffic


def check_message(message: Message, agreement: Agreement) -> None:
    """Sizes add up; what is staged fits its memory and lies aligned."""
    assert message.nbytes == sum(item.nbytes for item in message.items)
    if len(message.items) > 1:
        assert message.nbytes <= STAGING_BYTES // WINDOW
    start = 0
    for item in message.items:
        itemsize = agreement.fields[item.field].spec.dtype.itemsize
        assert item.nbytes == math.prod(stop - low for low, stop in item.src) * itemsize
        assert start % itemsize == 0
        start += item.nbytes


def check_both_ends(programs: dict[int, Program]) -> None:
    """What is sent in a stage is awaited in the same stage, in the same order."""
    sent: dict[Any, list[Message]] = {}
    awaited: dict[Any, list[Message]] = {}
    for rank, program in programs.items():
        for number, stage in enumerate(program.stages):
            for peer, message in stage.sends:
                sent.setdefault((number, rank, peer), []).append(message)
            for peer, message in stage.recvs:
                awaited.setdefault((number, peer, rank), []).append(message)
    assert sent == awaited


@st.composite
def transfers(draw: st.DrawFn) -> Agreement:
    meshes = []
    for _ in range(2):
        shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3).filter(lambda s: math.prod(s) <= 8))
        meshes.append(np.array(draw(st.permutations(range(10)))[: math.prod(shape)]).reshape(shape))
    fields = []
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
        choices = st.sampled_from([R, *map(Shard, range(len(shape)))])
        held, wanted = (tuple(draw(choices) for _ in range(mesh.ndim)) for mesh in meshes)
        plain = draw(st.booleans())
        dtype = draw(st.sampled_from(DTYPES))
        fields.append(field(number, shape, dtype, None if plain else held, wanted if draw(st.booleans()) else None))
    return agreement_of(fields, *meshes)


@given(transfers())
@settings(max_examples=200, deadline=None)
def test_every_element_arrives_once(agreement: Agreement) -> None:
    carry_out(agreement)


@pytest.mark.parametrize(("held", "wanted"), list(itertools.product([(S0,), (S1,), (R,)], repeat=2)))
def test_long_fields_are_cut_into_pieces_that_fit(held: Any, wanted: Any) -> None:
    fields = [
        field(0, (64, 10_001), torch.complex128, held, wanted),
        field(1, (3, 5), torch.uint8, held, wanted),
        field(2, (2, 400_000), torch.int64, held, wanted),
    ]
    agreement = agreement_of(fields, [0, 1], [2, 3, 4])
    carry_out(agreement)
    for rank in (0, 1):
        for stage in program_of(agreement, rank).stages[1:]:
            assert all(message.nbytes <= STAGING_BYTES // WINDOW for _, message in stage.sends)
            assert len({peer for peer, _ in stage.sends}) == len(stage.sends)  # one a peer


def test_what_lies_in_one_stretch_goes_in_one_message() -> None:
    agreement = agreement_of([field(0, (1 << 14, 4096), torch.float32, (S0,), (S0,))], [0, 1], [2, 3])
    (first, *others) = program_of(agreement, 0).stages
    ((peer, message),) = first.sends
    assert (peer, message.nbytes, others) == (2, 1 << 27, [])


def test_small_fields_share_a_message() -> None:
    fields = [field(number, (100 + number,), dtype, (S0,), (S0,)) for number, dtype in enumerate(DTYPES * 4)]
    first, packed = program_of(agreement_of(fields, [0, 1], [2, 3]), 1).stages
    assert first.sends == ()
    ((peer, message),) = packed.sends
    assert (peer, len(message.items)) == (3, 20)
    assert max(item.nbytes for item in message.items) <= SMALL_BYTES


def test_shards_go_to_the_receiver_at_the_same_place() -> None:
    fields = [field(0, (5,), torch.int64, (S0, R), (R, R))]
    square, other = [[0, 1], [2, 3]], [[7, 6], [5, 4]]
    sent = {
        (rank, peer): message.nbytes
        for rank in range(4)
        for stage in program_of(agreement_of(fields, square, other, "redistribute"), rank).stages
        for peer, message in stage.sends
    }
    assert sent == {(0, 7): 24, (1, 6): 24, (2, 5): 16, (3, 4): 16}
