"""Bytes between the ranks of a transfer: each operation under a deadline, every handle awaited.

A peer that is gone closes its connections, which gloo reports at once. One that does not come is given up at the
deadline; gloo closes all connections of the group then, so the other ranks notice too.
"""

from __future__ import annotations

import itertools
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from functools import lru_cache
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


_STATUSES = {status.value: status for status in Status}


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
        status = _STATUSES.get(head & 0xFF)
        if magic != _MAGIC or status is None or max(text_bytes, notes_bytes) > _LONGEST_TEXT_BYTES:
            raise ProtocolError(
                f"rank {rank} sent {data[:16]!r}... where a transfer begins; nothing else may use its group meanwhile, "
                f"and all ranks have to run the same version"
            )
        return cls(
            status=status,
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
        self._all = frozenset(ranks) | {self.rank}
        self.peers = tuple(sorted(self._all - {self.rank}))
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
        self,
        hello: Hello,
        deadline: float,
        doing: str,
        among: frozenset[int] | None = None,
    ) -> dict[int, Hello]:
        """Every rank's hello, this one's too. All ranks call this, or all of those it is among.

        The first rank gathers them and hands all to each: two messages a rank, where each rank writing to each,
        gloo's all_gather or rounds of doubling take many more and wake each rank many times. With many ranks it is a
        tree of such stars. What arrives is passed on as it came, so that all read the same and come to the same error.

        Args:
            hello: of this rank.
            deadline: on `time.monotonic`'s clock.
            doing: for the message of a time-out.
            among: the ranks that meet; all if None.

        Raises:
            PeerTimeoutError: a rank did not come in time, or is gone.
            ProtocolError: a rank sent something else.
        """
        size = _HELLO.size
        star = _star(self.rank, self._all if among is None else among, _FAN_OUT)

        def operation(peer: int, data: torch.Tensor, *, sends: bool) -> Operation:
            return Operation(peer=peer, sends=sends, data=data, what=lambda: doing)

        # Room for those below behind this rank's own.
        gathered = self._tensor(hello.pack() + bytes(size * sum(count for _, count in star.below)))
        ends = list(itertools.accumulate((size * count for _, count in star.below), initial=size))
        arriving = [
            operation(child, gathered[start:end], sends=False)
            for (child, _), (start, end) in zip(star.below, itertools.pairwise(ends), strict=True)
        ]
        self.finish(self.post(arriving, deadline), deadline)
        table = gathered
        if star.above is not None:
            table = torch.empty(size * len(star.rows), dtype=torch.uint8, device=self.device)
            both = [operation(star.above, table, sends=False), operation(star.above, gathered, sends=True)]
            self.finish(self.post(both, deadline), deadline)
        failed: PeerTimeoutError | None = None
        try:
            handed = [operation(child, table, sends=True) for child, _ in star.below]
            self.finish(self.post(handed, deadline), deadline)
        except PeerTimeoutError as error:
            failed = error
        text = table.cpu().numpy().tobytes()
        hellos = {rank: Hello.unpack(text[row * size : (row + 1) * size], rank) for rank, row in star.rows}
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


@dataclass(frozen=True, kw_only=True)
class _Star:
    """A rank's place among those that meet.

    Attributes:
        above: who gathers from it; None for the one that gathers from all.
        below: (rank, how many hellos it passes on) of those it gathers from.
        rows: (rank, row of the table that all get), by rank.
    """

    above: int | None
    below: tuple[tuple[int, int], ...]
    rows: tuple[tuple[int, int], ...]


@lru_cache(maxsize=256)
def _star(rank: int, among: frozenset[int], fan_out: int) -> _Star:
    ranks = sorted(among)
    place, count = ranks.index(rank), len(ranks)

    def subtree(at: int) -> tuple[int, ...]:
        """A place and all below it, in the order in which their hellos lie when they are passed up."""
        children = range(at * fan_out + 1, min((at + 1) * fan_out + 1, count))
        return (at, *(under for child in children for under in subtree(child)))

    children = range(place * fan_out + 1, min((place + 1) * fan_out + 1, count))
    return _Star(
        above=ranks[(place - 1) // fan_out] if place else None,
        below=tuple((ranks[child], len(subtree(child))) for child in children),
        rows=tuple(sorted((ranks[at], row) for row, at in enumerate(subtree(0)))),
    )


def _remaining(deadline: float) -> timedelta:
    return timedelta(seconds=max(deadline - time.monotonic(), _LEAST_SECONDS))


def _moves_cpu_tensors(group: Any) -> bool:
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return False
    return True
