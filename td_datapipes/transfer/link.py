"""Bytes between the ranks of a transfer: each operation under a deadline, every handle awaited.

A peer that is gone closes its connections, which gloo reports at once. One that does not come is given up at the
deadline; gloo closes all connections of the group then, so the other ranks notice too.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist

from td_datapipes.errors import ConfigurationError, PeerTimeoutError, ProtocolError

__all__ = ["Hello", "Link", "Operation", "Status"]

_TAG = 0x7464
_MAGIC = b"tdshards"
_HELLO = struct.Struct("<8sQ16sQQQ8x")
_LONGEST_TEXT_BYTES = 1 << 30
_LEAST_SECONDS = 0.05
_FAN_OUT = 16
"""Ranks that one rank of the tree gathers from; up to one more it is a star."""


class Status(IntEnum):
    """What a rank comes to a round for."""

    DATA = 0
    BUSY = 1
    START = 2
    END = 3
    CLOSE = 4
    ERROR = 5


@dataclass(frozen=True, kw_only=True)
class Hello:
    """What every rank tells every other at the beginning of a round.

    Attributes:
        status: what it comes for.
        number: of the round; the same on all ranks.
        digest: of its declaration.
        text_bytes: of that declaration, or of the text that goes with another status.
        notes_bytes: of what a sender tells the receivers beside the tensors.
        values: a digest of its non-tensor values.
    """

    status: Status
    number: int
    digest: bytes = bytes(16)
    text_bytes: int = 0
    notes_bytes: int = 0
    values: int = 0

    def pack(self) -> bytes:
        """As it travels: 64 bytes."""
        head = self.number << 8 | self.status
        return _HELLO.pack(_MAGIC, head, self.digest, self.text_bytes, self.notes_bytes, self.values)

    @classmethod
    def unpack(cls, data: bytes, rank: int) -> Hello:
        """The inverse of `pack`.

        Raises:
            ProtocolError: the rank sent something else.
        """
        magic, head, digest, text_bytes, notes_bytes, values = _HELLO.unpack(data)
        known = head & 0xFF in Status._value2member_map_
        if magic != _MAGIC or not known or max(text_bytes, notes_bytes) > _LONGEST_TEXT_BYTES:
            raise ProtocolError(
                f"rank {rank} sent {data[:16]!r}... where a transfer begins; nothing else may use its group meanwhile, "
                f"and all ranks have to run the same version"
            )
        return cls(
            status=Status(head & 0xFF),
            number=head >> 8,
            digest=digest,
            text_bytes=text_bytes,
            notes_bytes=notes_bytes,
            values=values,
        )


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One message to post.

    Attributes:
        peer: the rank at the other end.
        sends: whether it goes there; else it comes from there.
        data: its bytes, contiguous uint8, on a device the group moves.
        what: for the message of a time-out.
    """

    peer: int
    sends: bool
    data: torch.Tensor
    what: Callable[[], str]


class Link:
    """This rank's connections to the others of a transfer, over a process group.

    Args:
        group: with all of them in it.
        ranks: the others and this one, as numbered in the default group.

    Raises:
        ConfigurationError: a rank is not in the group.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Iterable[int]) -> None:
        self.group = group
        self.rank = dist.get_rank()
        self.peers = tuple(sorted(set(ranks) - {self.rank}))
        members = dist.get_process_group_ranks(group)
        missing = {self.rank, *self.peers} - set(members)
        if missing:
            raise ConfigurationError(
                f"the ranks {sorted(missing)} of the transfer are not in its process group, which has {members}; pass "
                f"group= with all senders and receivers in it"
            )
        self._number_of = {rank: members.index(rank) for rank in self.peers}
        self.device = torch.device("cpu") if _moves_cpu_tensors(group) else torch.device("cuda")

    def greet(
        self, hello: Hello, deadline: float, doing: str, among: Collection[int] | None = None
    ) -> dict[int, Hello]:
        """Every rank's hello, this one's too. All ranks call this, or all of those it is among.

        The first rank gathers them and hands all to each: two messages a rank, where each rank writing to each, gloo's
        all_gather or rounds of doubling take many more and wake each rank many times. With many ranks it is a tree of
        such stars. What arrives is passed on as it came, so that all read the same and come to the same error.

        Raises:
            PeerTimeoutError: a rank did not come in time, or is gone.
            ProtocolError: a rank sent something else.
        """
        ring = sorted({self.rank, *self.peers} if among is None else among)
        place, size = ring.index(self.rank), _HELLO.size
        below = [(ring[child], _subtree(child, len(ring))) for child in _children(place, len(ring))]
        table = torch.empty((len(ring), size), dtype=torch.uint8, device=self.device)

        def operation(peer: int, data: torch.Tensor, *, sends: bool) -> Operation:
            return Operation(peer=peer, sends=sends, data=data.flatten(), what=lambda: doing)

        parts = [torch.empty((len(places), size), dtype=torch.uint8, device=self.device) for _, places in below]
        arriving = [operation(child, part, sends=False) for (child, _), part in zip(below, parts, strict=True)]
        self.finish(self.post(arriving, deadline), deadline)
        gathered = torch.cat([self._tensor(hello.pack()).view(1, size), *parts])
        if place:
            above = ring[_parent(place)]
            both = [operation(above, table, sends=False), operation(above, gathered, sends=True)]
            self.finish(self.post(both, deadline), deadline)
        else:
            table[list(_subtree(0, len(ring)))] = gathered
        failed: PeerTimeoutError | None = None
        try:
            self.finish(self.post([operation(child, table, sends=True) for child, _ in below], deadline), deadline)
        except PeerTimeoutError as error:
            failed = error
        text = table.cpu().numpy().tobytes()
        hellos = {rank: Hello.unpack(text[at * size : (at + 1) * size], rank) for at, rank in enumerate(ring)}
        if failed is not None:  # only now: who sent something else does not wait for the table, and that says more
            raise failed
        return hellos

    def swap(
        self, outgoing: Mapping[int, bytes], incoming: Mapping[int, int], deadline: float, doing: str
    ) -> dict[int, bytes]:
        """Send some bytes to peers and receive as many as they said from others: by rank.

        Args:
            outgoing: by peer; empty ones are not sent.
            incoming: sizes by peer.
            deadline: on `time.monotonic`'s clock.
            doing: for the message.

        Raises:
            PeerTimeoutError: a rank did not come in time, or is gone.
        """
        buffers = {peer: torch.empty(size, dtype=torch.uint8, device=self.device) for peer, size in incoming.items()}
        # One copy of what goes to many.
        texts = {data: self._tensor(data) for data in set(outgoing.values()) if data}
        operations = [
            Operation(peer=peer, sends=False, data=data, what=lambda: doing)
            for peer, data in buffers.items()
            if len(data)
        ]
        operations += [
            Operation(peer=peer, sends=True, data=texts[data], what=lambda: doing)
            for peer, data in outgoing.items()
            if data
        ]
        self.finish(self.post(operations, deadline), deadline)
        return {peer: data.cpu().numpy().tobytes() for peer, data in buffers.items()}

    def post(self, operations: Sequence[Operation], deadline: float) -> list[tuple[Operation, Any]]:
        """Begin all of them at once; returns each with its handle, for `finish`.

        Raises:
            PeerTimeoutError: a peer is gone.
        """
        if self.device.type != "cpu":
            return self._post_together(operations)
        begun: list[tuple[Operation, Any]] = []
        for one in operations:
            # What dist.isend and dist.irecv call in the end; their own checks cost more than a short message does.
            begin = self.group.send if one.sends else self.group.recv
            try:
                begun.append((one, begin([one.data], self._number_of[one.peer], _TAG)))
            except RuntimeError as error:
                with suppress(PeerTimeoutError):
                    self.finish(begun, deadline)
                raise self._error(one, error, deadline) from error
        return begun

    def _post_together(self, operations: Sequence[Operation]) -> list[tuple[Operation, Any]]:
        """NCCL's way: sends and receives that depend on one another have to begin in one call."""
        if not operations:
            return []
        posted = [
            dist.P2POp(dist.isend if one.sends else dist.irecv, one.data, one.peer, self.group, _TAG)
            for one in operations
        ]
        handles = dist.batch_isend_irecv(posted)
        # There may be one handle for all of them.
        handles = handles if len(handles) == len(operations) else handles * len(operations)
        return list(zip(operations, handles, strict=True))

    def finish(self, begun: Sequence[tuple[Operation, Any]], deadline: float) -> None:
        """Await every one of them, also after one has failed.

        Raises:
            PeerTimeoutError: the first that failed.
        """
        failed: tuple[Operation, RuntimeError] | None = None
        for operation, handle in begun:
            try:
                handle.wait(_remaining(deadline))
            except RuntimeError as error:
                # A time-out makes the group close all its connections: only the first says what happened.
                failed = failed or (operation, error)
        if failed is not None:
            raise self._error(*failed, deadline) from failed[1]

    def break_off(self) -> None:
        """Close this group's connections, so that nobody waits for this rank any longer. Nothing works after it."""
        if self.peers and self.device.type == "cpu":
            with suppress(RuntimeError):
                # gloo has no call for it, but does it when an operation times out.
                unused = torch.empty(1, dtype=torch.uint8)
                handle = dist.irecv(unused, self.peers[0], group=self.group, tag=_TAG + 1)
                if handle is not None:
                    handle.wait(timedelta(milliseconds=1))

    def _error(self, operation: Operation, error: RuntimeError, deadline: float) -> PeerTimeoutError:
        timed_out = time.monotonic() >= deadline - _LEAST_SECONDS or "Timed out" in str(error)
        who = f"{'to' if operation.sends else 'from'} rank {operation.peer}"
        how = "did not go through in time" if timed_out else "broke off, so that rank is gone or has given up"
        return PeerTimeoutError(
            f"{operation.what()} {who} {how} ({str(error).splitlines()[0][:200]}). Look at what the other ranks raised"
        )

    def _tensor(self, data: bytes) -> torch.Tensor:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)


def _parent(place: int) -> int:
    return (place - 1) // _FAN_OUT


def _children(place: int, count: int) -> range:
    return range(place * _FAN_OUT + 1, min((place + 1) * _FAN_OUT + 1, count))


def _subtree(place: int, count: int) -> tuple[int, ...]:
    """A place and all below it, in the order in which their hellos lie when they are passed up."""
    return (place, *(under for child in _children(place, count) for under in _subtree(child, count)))


def _remaining(deadline: float) -> timedelta:
    return timedelta(seconds=max(deadline - time.monotonic(), _LEAST_SECONDS))


def _moves_cpu_tensors(group: Any) -> bool:
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return False
    return True
