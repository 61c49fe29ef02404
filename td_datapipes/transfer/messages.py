"""Which bytes travel in which message, for each pair of ranks. Pure: both ends compute the same list.

A part of at most `SMALL_BYTES` shares a message with others. A larger one that is contiguous at both ends is a message
of its own, as long as it is: it is sent from where it lies and received where it belongs. What has gaps at either end
goes in pieces that fit the staging memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Protocol

from torch.distributed.tensor import Partial, Replicate

from td_datapipes.mesh import Box, MeshSpec, Placements, local_box
from td_datapipes.transfer.agreement import AgreedField, Agreement
from td_datapipes.transfer_plan import ShardSpec, Slice, plan_transfer

__all__ = ["SMALL_BYTES", "STAGING_BYTES", "WINDOW", "Copy", "Item", "Message", "Program", "Stage", "program_of"]

SMALL_BYTES = 64 << 10
"""Up to here a part is copied into a message with others."""

STAGING_BYTES = 16 << 20
"""Staging memory a peer, at most."""

WINDOW = 2
"""Messages that are staged for a peer at the same time: one is filled while the other travels."""

_LEAST_STAGED_BYTES = 256 << 10
_SHARE_OF_SHARD = 8


@dataclass(frozen=True, kw_only=True)
class Item:
    """A part of a field in a message.

    Attributes:
        field: its number among the agreed fields.
        src: bounds within the sender's local tensor.
        dst: bounds within the receiver's.
        nbytes: of it.
    """

    field: int
    src: Box
    dst: Box
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Message:
    """Bytes that travel in one: its items one after the other, the largest elements first, so that all lie aligned."""

    items: tuple[Item, ...]
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Copy:
    """What a rank keeps of its own: the field's number, bounds at both ends."""

    field: int
    src: Box
    dst: Box


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What is posted together: (peer, message)."""

    sends: tuple[tuple[int, Message], ...]
    recvs: tuple[tuple[int, Message], ...]


@dataclass(frozen=True, kw_only=True)
class Program:
    """One rank's part of a transfer.

    Attributes:
        stages: in order; those of two ranks fit each other stage by stage.
        copies: what the rank has already.
        dst_shapes: of each agreed field's local tensor on arrival; ``()`` on a rank that receives nothing.
    """

    stages: tuple[Stage, ...]
    copies: tuple[Copy, ...]
    dst_shapes: tuple[tuple[int, ...], ...]

    @property
    def sent_bytes(self) -> int:
        """On the wire, from this rank."""
        return sum(message.nbytes for stage in self.stages for _, message in stage.sends)

    @property
    def received_bytes(self) -> int:
        """On the wire, to this rank."""
        return sum(message.nbytes for stage in self.stages for _, message in stage.recvs)


class _Route(Protocol):
    """How one field gets from mesh to mesh; a `TransferPlan` is one."""

    def sends(self, rank: int) -> tuple[Slice, ...]: ...
    def recvs(self, rank: int) -> tuple[Slice, ...]: ...
    def local_copies(self, rank: int) -> tuple[Slice, ...]: ...


@dataclass(frozen=True, kw_only=True)
class _Pairs:
    """Each sender's whole shard to the receiver at the same place."""

    shapes: dict[int, tuple[int, ...]]
    src: MeshSpec
    dst: MeshSpec

    def sends(self, rank: int) -> tuple[Slice, ...]:
        peer = self._across(rank, self.src, self.dst)
        return () if peer is None or peer == rank else self._whole(rank, peer)

    def recvs(self, rank: int) -> tuple[Slice, ...]:
        peer = self._across(rank, self.dst, self.src)
        return () if peer is None or peer == rank else self._whole(peer, peer)

    def local_copies(self, rank: int) -> tuple[Slice, ...]:
        return self._whole(rank, rank) if self._across(rank, self.src, self.dst) == rank else ()

    def _across(self, rank: int, here: MeshSpec, there: MeshSpec) -> int | None:
        return there.ranks[here.ranks.index(rank)] if rank in here.ranks else None

    def _whole(self, sender: int, peer: int) -> tuple[Slice, ...]:
        box = tuple((0, size) for size in self.shapes[sender])
        if not math.prod(self.shapes[sender]):
            return ()
        return (Slice(peer=peer, global_box=box, src_box=box, dst_box=box),)


@dataclass(frozen=True, kw_only=True)
class _Carried:
    """A field, its route, and what both sides hold of it."""

    number: int
    itemsize: int
    route: _Route
    src: ShardSpec
    dst: ShardSpec
    shape: tuple[int, ...]

    def src_shape(self, rank: int) -> tuple[int, ...]:
        return _extents(self.src.box(self.shape, rank))

    def dst_shape(self, rank: int) -> tuple[int, ...]:
        return _extents(self.dst.box(self.shape, rank))


def program_of(agreement: Agreement, rank: int) -> Program:
    """What a rank sends, receives and keeps."""
    carried = [_carried(number, field, agreement) for number, field in enumerate(agreement.fields)]
    sends: dict[int, list[tuple[_Carried, Slice]]] = {}
    recvs: dict[int, list[tuple[_Carried, Slice]]] = {}
    copies = []
    for field in carried:
        for part in field.route.sends(rank):
            sends.setdefault(part.peer, []).append((field, part))
        for part in field.route.recvs(rank):
            recvs.setdefault(part.peer, []).append((field, part))
        copies += [Copy(field=field.number, src=p.src_box, dst=p.dst_box) for p in field.route.local_copies(rank)]
    held: dict[int, int] = {}
    outgoing = {peer: _pair(rank, peer, parts, carried, agreement, held) for peer, parts in sorted(sends.items())}
    incoming = {peer: _pair(peer, rank, parts, carried, agreement, held) for peer, parts in sorted(recvs.items())}
    receives = rank in agreement.dst.ranks
    return Program(
        stages=tuple(_stages(outgoing, incoming)),
        copies=tuple(copies),
        dst_shapes=tuple(field.dst_shape(rank) for field in carried) if receives else (),
    )


def _carried(number: int, field: AgreedField, agreement: Agreement) -> _Carried:
    spec, src, dst = field.spec, agreement.src, agreement.dst
    everywhere = ShardSpec.of(src, [Replicate()] * src.ndim), ShardSpec.of(dst, [Replicate()] * dst.ndim)
    route: _Route | None = None
    if agreement.strategy == "materialize" or (spec.placements is None and field.wanted is None):
        sides = everywhere
    elif agreement.strategy == "redistribute":
        held = _without_partial(spec.placements or everywhere[0].placements)
        sides = ShardSpec.of(src, held), ShardSpec.of(dst, held)
        shapes = {
            rank: _extents(local_box(spec.shape, src.shape, sides[0].placements, place))
            for rank, place in src.coordinates()
        }
        route = _Pairs(shapes=shapes, src=src, dst=dst)
    else:
        sides = (
            everywhere[0] if spec.placements is None else ShardSpec.of(src, spec.placements),
            everywhere[1] if field.wanted is None else ShardSpec.of(dst, field.wanted),
        )
    return _Carried(
        number=number,
        itemsize=spec.dtype.itemsize,
        route=route or plan_transfer(spec.shape, *sides),
        src=sides[0],
        dst=sides[1],
        shape=spec.shape,
    )


def _without_partial(placements: Placements) -> Placements:
    return tuple(Replicate() if isinstance(placement, Partial) else placement for placement in placements)


def _pair(
    sender: int,
    receiver: int,
    parts: Sequence[tuple[_Carried, Slice]],
    carried: Sequence[_Carried],
    agreement: Agreement,
    held: dict[int, int],
) -> tuple[list[Message], list[Message]]:
    """The messages from one rank to another: those that need no staging, and the others."""
    if sender not in held:
        held[sender] = sum(math.prod(field.src_shape(sender)) * field.itemsize for field in carried)
    room = held[sender] // (_SHARE_OF_SHARD * WINDOW * len(agreement.dst.ranks))
    limit = min(max(room, _LEAST_STAGED_BYTES), STAGING_BYTES // WINDOW)
    whole, pieces = [], []
    for field, part in parts:
        item = Item(field=field.number, src=part.src_box, dst=part.dst_box, nbytes=part.numel * field.itemsize)
        contiguous = _is_contiguous(part.src_box, field.src_shape(sender)) and _is_contiguous(
            part.dst_box, field.dst_shape(receiver)
        )
        if item.nbytes > SMALL_BYTES and contiguous:
            whole.append(Message(items=(item,), nbytes=item.nbytes))
        else:
            pieces += [(field.itemsize, piece) for piece in _split(item, field.itemsize, limit)]
    # The largest elements first: each item then starts at a multiple of its own element's size.
    pieces.sort(key=lambda pair: -pair[0])
    return whole, list(_packed((piece for _, piece in pieces), limit))


def _packed(items: Iterable[Item], limit: int) -> Iterator[Message]:
    taken: list[Item] = []
    size = 0
    for item in items:
        if taken and size + item.nbytes > limit:
            yield Message(items=tuple(taken), nbytes=size)
            taken, size = [], 0
        taken.append(item)
        size += item.nbytes
    if taken:
        yield Message(items=tuple(taken), nbytes=size)


def _split(item: Item, itemsize: int, limit: int) -> Iterator[Item]:
    shape = _extents(item.src)
    for box in _blocks(shape, max(limit // itemsize, 1)):
        yield Item(
            field=item.field,
            src=_within(item.src, box),
            dst=_within(item.dst, box),
            nbytes=math.prod(_extents(box)) * itemsize,
        )


def _blocks(shape: Sequence[int], most: int) -> Iterator[Box]:
    """A box cut into boxes of at most so many elements, in row-major order."""
    if math.prod(shape) <= most:
        yield tuple((0, size) for size in shape)
        return
    inner = math.prod(shape[1:])
    if inner > most:
        for index in range(shape[0]):
            for rest in _blocks(shape[1:], most):
                yield ((index, index + 1), *rest)
        return
    step = most // inner
    for start in range(0, shape[0], step):
        yield ((start, min(start + step, shape[0])), *((0, size) for size in shape[1:]))


def _stages(
    outgoing: dict[int, tuple[list[Message], list[Message]]], incoming: dict[int, tuple[list[Message], list[Message]]]
) -> Iterator[Stage]:
    """Everything that needs no staging first, then one staged message for each pair at a time."""
    yield Stage(
        sends=tuple((peer, message) for peer, (whole, _) in outgoing.items() for message in whole),
        recvs=tuple((peer, message) for peer, (whole, _) in incoming.items() for message in whole),
    )
    sends = [[(peer, message) for message in staged] for peer, (_, staged) in outgoing.items()]
    recvs = [[(peer, message) for message in staged] for peer, (_, staged) in incoming.items()]
    for posted, awaited in zip_longest(zip_longest(*sends), zip_longest(*recvs), fillvalue=()):
        yield Stage(
            sends=tuple(one for one in posted if one is not None),
            recvs=tuple(one for one in awaited if one is not None),
        )


def _is_contiguous(box: Box, shape: Sequence[int]) -> bool:
    """Whether a box of a contiguous tensor is one stretch of its memory."""
    cut = len(shape)
    while cut and box[cut - 1] == (0, shape[cut - 1]):
        cut -= 1
    return all(stop - start == 1 for start, stop in box[: max(cut - 1, 0)])


def _extents(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def _within(outer: Box, inner: Box) -> Box:
    return tuple((base + start, base + stop) for (base, _), (start, stop) in zip(outer, inner, strict=True))
