"""What the ranks of a transfer come to, from what they declare; declarations as they travel."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack
from torch.distributed.tensor import Partial, Replicate, Shard

from td_datapipes.errors import ConfigurationError, PeerError, ProtocolError, SchemaError, ServerTimeoutError
from td_datapipes.mesh import MeshSpec
from td_datapipes.transfer.agreement import agree
from td_datapipes.transfer.board import describe_error, rebuild_error
from td_datapipes.transfer.contents import decode_values, encode_values
from td_datapipes.transfer.declaration import Declaration, FieldSpec, NodeSpec, Sent, Wanted
from td_datapipes.transfer.link import Hello, Status

R, S0, S1 = Replicate(), Shard(0), Shard(1)
ROOT = NodeSpec(key=(), batch_size=(8,), names=("row",))


def field(key: str = "x", placements: Any = (S0,), shape: tuple[int, ...] = (8, 4)) -> FieldSpec:
    return FieldSpec(key=(key,), dtype=torch.bfloat16, shape=shape, placements=placements)


def declared(
    src: Any = (0, 1),
    dst: Any = (2, 3),
    strategy: Any = "auto",
    fields: Any = None,
    wanted: Any = None,
    mesh: Any = None,
) -> dict[int, Declaration]:
    """What all ranks say; the receivers have a mesh of one axis and want rows unless told otherwise."""
    senders, receivers = MeshSpec.from_ranks(src), MeshSpec.from_ranks(dst if mesh is None else mesh)
    sent = Sent(mesh=senders, fields=tuple(fields or [field(placements=(S0,) * senders.ndim)]), nodes=(ROOT,))
    wanted = Wanted(mesh=receivers, default=(S0,) * receivers.ndim) if wanted is None else wanted
    common: Any = {"src": senders.ranks, "dst": receivers.ranks, "strategy": strategy}
    return {rank: Declaration(**common, sent=sent) for rank in senders.ranks} | {
        rank: Declaration(**common, wanted=wanted) for rank in receivers.ranks
    }


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        ({}, "optimal"),
        ({"dst": (2, 3, 4)}, "optimal"),
        ({"fields": [field(placements=(Partial(),))]}, "redistribute"),
        ({"fields": [field(placements=(Partial(),))], "dst": (2, 3, 4)}, "materialize"),
        ({"wanted": Wanted()}, "materialize"),
        ({"wanted": Wanted(), "fields": [field(placements=None)]}, "optimal"),
        ({"strategy": "redistribute"}, "redistribute"),
        ({"strategy": "materialize"}, "materialize"),
    ],
)
def test_auto_takes_the_best_that_can_be(options: dict[str, Any], chosen: str) -> None:
    assert agree(declared(**options)).strategy == chosen


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "redistribute", "dst": (2, 3, 4)}, "the 2 senders have .* the 3 receivers .*; use 'optimal'"),
        ({"strategy": "redistribute", "src": [[0, 1], [4, 5]], "dst": (2, 3, 6, 7)}, "both meshes need the same shape"),
        ({"strategy": "optimal", "fields": [field(placements=(Partial(),))]}, "plans for Shard and Replicate"),
        ({"strategy": "optimal", "wanted": Wanted()}, "and they gave none; pass mesh="),
        ({"wanted": Wanted(mesh=MeshSpec.from_ranks([2, 3]), default=(Shard(2),))}, "has 2 dims"),
        ({"wanted": Wanted(mesh=MeshSpec.from_ranks([2, 3]), default=(S0, S0))}, "2 placements"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        agree(declared(**options))


def test_fields_are_matched_by_name() -> None:
    ranks = declared(fields=[field("b"), field("a")])
    turned = Sent(mesh=ranks[1].sent.mesh, fields=(field("a"), field("b")), nodes=(ROOT,))
    with_turned = {**ranks, 1: Declaration(src=(0, 1), dst=(2, 3), strategy="auto", sent=turned)}
    assert [one.spec.key for one in agree(with_turned).fields] == [("a",), ("b",)]


def test_without_placements_everything_keeps_its_own() -> None:
    (same,) = agree(declared(wanted=Wanted(mesh=MeshSpec.from_ranks([3, 2])), mesh=[3, 2])).fields
    assert same.wanted == (S0,)


def test_who_means_other_ranks_is_named() -> None:
    ranks = declared()
    ranks[3] = Declaration(src=(0, 1), dst=(3,), strategy="auto", wanted=Wanted())
    with pytest.raises(ConfigurationError, match="rank 3 one from 0, 1 to 3"):
        agree(ranks)


def test_a_declaration_travels_as_json() -> None:
    ranks = declared(fields=[field(placements=(Partial("max"),)), field("plain", None, ()), field("y", (R,))])
    wanted = Wanted(mesh=MeshSpec.from_ranks([2, 3]), by_key=((("a", "b"), (S1,)),), like=(field(),))
    ranks[2] = Declaration(src=(0, 1), dst=(2, 3), strategy="auto", wanted=wanted)
    for rank in (0, 2):
        text = ranks[rank].to_json()
        assert Declaration.from_json(text, rank) == ranks[rank]
        json.loads(text)


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b"\xff", b'{"strategy": "auto"}', b'{"strategy": "fast"}'])
def test_what_is_no_declaration_is_refused(text: bytes) -> None:
    with pytest.raises(ProtocolError, match="rank 5 sent no description"):
        Declaration.from_json(text, 5)


@pytest.mark.parametrize("change", [("shape", [-1]), ("shape", ["8"]), ("dtype", "object"), ("placements", [["x"]])])
def test_damaged_fields_are_refused(change: tuple[str, Any]) -> None:
    data = json.loads(declared()[0].to_json())
    place = {"dtype": 1, "shape": 2, "placements": 3}[change[0]]
    data["sent"]["fields"][0][place] = change[1]
    with pytest.raises(ProtocolError, match="rank 0 sent no description"):
        Declaration.from_json(json.dumps(data).encode(), 0)


@given(st.binary(min_size=64, max_size=64))
def test_what_is_no_hello_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="rank 7 sent"):
        Hello.unpack(data, 7)


def test_a_hello_is_64_bytes() -> None:
    hello = Hello(status=Status.END, number=1 << 40, digest=b"d" * 16, text_bytes=5, notes_bytes=6, values=1 << 63)
    data = hello.pack()
    assert len(data) == 64
    assert Hello.unpack(data, 0) == hello
    with pytest.raises(ProtocolError):
        Hello.unpack(Hello(status=Status.END, number=0, notes_bytes=1 << 60).pack(), 0)


def test_values_come_back_as_they_were() -> None:
    value = {"a": [1, 2.5, None, True, "x"], "b": {}}
    stack = NonTensorStack(*[NonTensorData(n, batch_size=[2]) for n in range(3)])
    encoded, digest = encode_values({("v",): NonTensorData(value, batch_size=[3]), ("n", "s"): stack})
    assert digest
    found = decode_values(json.loads(json.dumps(encoded)))
    assert found["v",].data == value
    assert found["v",].batch_size == (3,)
    assert found["n", "s"].tolist() == stack.tolist()
    assert found["n", "s"].batch_size == (3, 2)
    assert encode_values({}) == (None, 0)


@pytest.mark.parametrize("value", [(1, 2), {1: 2}, b"x", [object()], {"a": {1}}, 1j])
def test_values_that_json_would_change_are_refused(value: Any) -> None:
    with pytest.raises(SchemaError, match="field 'v' holds a"):
        encode_values({("v",): NonTensorData(value)})


def test_errors_of_other_ranks_keep_their_class() -> None:
    error = rebuild_error(3, describe_error(ServerTimeoutError("no answer in 5 s")))
    assert type(error) is ServerTimeoutError
    assert str(error) == "rank 3: no answer in 5 s"
    other = rebuild_error(3, describe_error(ZeroDivisionError("division by zero")))
    assert type(other) is PeerError
    assert str(other) == "rank 3 failed: ZeroDivisionError: division by zero"
