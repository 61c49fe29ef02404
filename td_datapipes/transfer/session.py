"""Rounds of a transfer: all ranks meet, agree on what is to move, and move it."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from td_datapipes.errors import ConfigurationError, PeerTimeoutError, ProtocolError, TDDatapipesError
from td_datapipes.transfer.agreement import agree
from td_datapipes.transfer.board import Board, describe_error, rebuild_error
from td_datapipes.transfer.carry import Carrier, Course
from td_datapipes.transfer.contents import Contents
from td_datapipes.transfer.declaration import Declaration, Strategy, Wanted
from td_datapipes.transfer.link import Hello, Link, Status
from td_datapipes.transfer.messages import program_of
from td_datapipes.transfer.outcome import Outcome, Received, TransferStats

__all__ = ["Session"]

_MOST_AGREEMENTS = 64
_ROLL_SECONDS = 2.0


@dataclass(kw_only=True)
class _Said:
    """This rank's declaration of the last schema."""

    signature: object = None
    text: bytes = b""
    digest: bytes = bytes(16)
    declaration: Declaration | None = field(default=None)


class Session:
    """What one rank and its peers remember from transfer to transfer.

    Args:
        group: moves the bytes.
        src: the senders' ranks.
        dst: the receivers' ranks.
        name: of this session, the same on all ranks and of no other of the group.
        stats: counted into.
        ends_at_failure: whether a failure ends the session, or only the round.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        src: Sequence[int],
        dst: Sequence[int],
        name: str,
        stats: TransferStats,
        *,
        ends_at_failure: bool = False,
    ) -> None:
        self.src, self.dst = tuple(src), tuple(dst)
        self.link = Link(group, {*src, *dst})
        self.stats = stats
        self._group = group
        self._name = name
        self._ends_at_failure = ends_at_failure
        self._carrier = Carrier(self.link)
        self._number = 0
        self._agreed: dict[object, Course] = {}
        self._said = _Said()

    @property
    def sends(self) -> bool:
        """Whether this rank is among the senders."""
        return self.link.rank in self.src

    @property
    def receives(self) -> bool:
        """Whether this rank is among the receivers."""
        return self.link.rank in self.dst

    @property
    def board(self) -> Board:
        """Where the first rank to fail says so."""
        return Board(self._group, self._name if self._ends_at_failure else f"{self._name}/{self._number}")

    def meet(
        self,
        status: Status,
        deadline: float,
        *,
        text: bytes = b"",
        digest: bytes = bytes(16),
        notes: bytes = b"",
        values: int = 0,
    ) -> dict[int, Hello]:
        """Come to a round, and wait until all have.

        Args:
            status: what this rank comes for.
            deadline: on `time.monotonic`'s clock.
            text: its declaration, or what goes with another status.
            digest: of that declaration.
            notes: what a sender tells the receivers beside the tensors.
            values: a digest of its non-tensor values.

        Returns:
            What every rank says, this one's too.

        Raises:
            PeerTimeoutError: a rank did not come in time, or is gone.
            ProtocolError: a rank is at another round.
            TDDatapipesError: what another rank came to say that it met.
        """
        hello = Hello(
            status=status,
            number=self._number,
            digest=digest,
            text_bytes=len(text),
            notes_bytes=len(notes),
            values=values,
        )
        hellos = self.link.greet(hello, deadline, f"transfer {self._number}: meeting the other ranks, messages")
        odd = next((rank for rank, other in sorted(hellos.items()) if other.number != self._number), None)
        if odd is not None:
            raise ProtocolError(
                f"rank {odd} is at transfer {hellos[odd].number} of the ranks {self.src} to {self.dst}, rank "
                f"{self.link.rank} at {self._number}: after a failure make new groups, and let all ranks make the "
                f"same calls"
            )
        self._number += 1
        failed = [rank for rank, other in sorted(hellos.items()) if other.status is Status.ERROR]
        if failed:
            texts = self.spread(text, {rank: hellos[rank].text_bytes for rank in failed}, deadline)
            others = [rank for rank in failed if rank != self.link.rank]
            if status is not Status.ERROR:
                raise rebuild_error(others[0], texts[others[0]].decode(errors="replace"))
        return hellos

    def spread(self, text: bytes, sizes: Mapping[int, int], deadline: float) -> dict[int, bytes]:
        """Everyone's text, of those that have one; all ranks call this.

        Args:
            text: of this rank.
            sizes: by rank, of those that send theirs.
            deadline: on `time.monotonic`'s clock.
        """
        mine = self.link.rank in sizes
        outgoing = dict.fromkeys(self.link.peers, text) if mine else {}
        incoming = {rank: size for rank, size in sizes.items() if rank != self.link.rank}
        found = self.link.swap(outgoing, incoming, deadline, "describing the transfer, messages")
        return found | ({self.link.rank: text} if mine else {})

    def fail(self, error: BaseException, timeout_seconds: float) -> None:
        """Tell all others at the next round that this rank cannot come, and why."""
        try:
            self.meet(Status.ERROR, time.monotonic() + timeout_seconds, text=describe_error(error).encode())
        except Exception as other:
            # They have their own troubles; this rank's is what its caller is told.
            error.add_note(f"the other ranks could not be told: {other}")

    def declare(
        self, contents: Contents | None, wanted: Wanted | None, strategy: Strategy, expected: object = None
    ) -> None:
        """Say what the next transfer is to be, on this rank.

        Args:
            contents: what it sends.
            wanted: what the receivers want, as far as this rank knows.
            strategy: asked for.
            expected: what else a new declaration depends on.
        """
        signature = (None if contents is None else contents.signature, wanted, strategy, expected)
        if self._said.declaration is not None and signature == self._said.signature:
            return
        declaration = Declaration(
            src=self.src,
            dst=self.dst,
            strategy=strategy,
            sent=None if contents is None else contents.describe(),
            wanted=wanted,
        )
        text = declaration.to_json()
        digest = hashlib.blake2b(text, digest_size=16).digest()
        self._said = _Said(signature=signature, text=text, digest=digest, declaration=declaration)

    def transfer(self, contents: Contents | None, timeout_seconds: float) -> Received | None:
        """One round that moves what was declared. Arguments and errors as `round`.

        Returns:
            What arrived; None on a rank that only sends.
        """
        outcome = self.round(Status.DATA, contents, timeout_seconds)
        if outcome.status is not Status.DATA:
            raise ProtocolError(f"rank {outcome.closed_by} runs a loop of transfers, this rank sends or receives once")
        return outcome.received

    def round(self, status: Status, contents: Contents | None, timeout_seconds: float, *, state: Any = None) -> Outcome:
        """Meet, and do what all have come for.

        Args:
            status: what this rank comes for. Receivers come for ``DATA``, whatever the senders bring; a round in which
                some rank is ``BUSY`` is repeated by the others.
            contents: what this rank sends; None on one that only receives.
            timeout_seconds: for each of: meeting, and moving the bytes.
            state: what a sender tells the receivers with it, as JSON can hold it.

        Raises:
            PeerTimeoutError, ProtocolError, TDDatapipesError: as `meet`.
            ConfigurationError: what the ranks declared does not fit together: the same on all of them.
        """
        notes, values = self._notes(contents, state)
        said, board = self._said, self.board
        try:
            while True:
                hellos = self.gather(
                    status, timeout_seconds, text=said.text, digest=said.digest, notes=notes, values=values
                )
                if all(hello.status is not Status.BUSY for hello in hellos.values()):
                    break
                if status is Status.BUSY:
                    return Outcome(status=status)
            return self._settle(hellos, contents, notes, timeout_seconds)
        except PeerTimeoutError as error:
            self.link.break_off()
            raise self._explained(error, board) from error
        except TDDatapipesError:
            # What the ranks said to one another: all of them raise it in this round.
            raise
        except Exception as error:
            board.tell(self.link.rank, error)
            raise

    def gather(self, status: Status, timeout_seconds: float, **said: Any) -> dict[int, Hello]:
        """As `meet`, and says who is missing.

        Args:
            status: what this rank comes for.
            timeout_seconds: until all have come, or it is known who has not.
            said: see `meet`.
        """
        number, board = self._number, Board(self._group, f"{self._name}/{self._number}")
        roll_seconds = min(timeout_seconds / 5, _ROLL_SECONDS)
        try:
            return self.meet(status, time.monotonic() + timeout_seconds - roll_seconds, **said)
        except PeerTimeoutError as error:
            # The others notice at once, instead of at their own time-outs.
            self.link.break_off()
            missing = board.call_roll(self.link.rank, {*self.src, *self.dst}, roll_seconds)
            if not missing:
                raise
            shown = ", ".join(map(str, missing))
            raise PeerTimeoutError(
                f"transfer {number} of the ranks {self.src} to {self.dst}: rank {shown} did not come, or is gone. "
                f"{error}"
            ) from error

    def _settle(
        self, hellos: Mapping[int, Hello], contents: Contents | None, notes: bytes, timeout_seconds: float
    ) -> Outcome:
        deadline = time.monotonic() + timeout_seconds
        by_status: dict[Status, list[int]] = {status: [] for status in Status}
        for rank in sorted(hellos):
            by_status[hellos[rank].status].append(rank)
        if closed := by_status[Status.CLOSE]:
            return Outcome(status=Status.CLOSE, closed_by=closed[0])
        if started := by_status[Status.START]:
            raise ProtocolError(f"rank {started[0]} starts anew, and others are in the midst of it; start all of them")
        if ended := by_status[Status.END]:
            going_on = [rank for rank in self.src if hellos[rank].status is not Status.END]
            if going_on:
                raise ConfigurationError(
                    f"rank {ended[0]} has come to the end of its epoch, and rank {going_on[0]} sends another batch; "
                    f"give all loader ranks as many batches (drop_last=True, or padded rows)"
                )
            told = self.hand_over(notes, hellos, deadline)
            return Outcome(status=Status.END, states={rank: state for rank, (_, state) in told.items()})
        course = self._agree(hellos, deadline)
        self._require_same_values(hellos)
        return Outcome(status=Status.DATA, received=self._move(course, contents, notes, hellos, deadline))

    def _explained(self, error: PeerTimeoutError, board: Board) -> PeerTimeoutError:
        """The error together with what the first rank to fail said; this one says it where it is the first."""
        board.tell(self.link.rank, error)
        note = board.read()
        if note is None or note[0] == self.link.rank:
            return error
        return PeerTimeoutError(f"{error}. Rank {note[0]} was the first to fail: {note[1]}")

    def _notes(self, contents: Contents | None, state: Any) -> tuple[bytes, int]:
        digest = 0 if contents is None else contents.values_digest
        # All senders hold the same values, so one of them sends them.
        values = None if contents is None or self.link.rank != self.src[0] else contents.values
        if values is None and state is None:
            return b"", digest
        return json.dumps([values, state], separators=(",", ":")).encode(), digest

    def _require_same_values(self, hellos: Mapping[int, Hello]) -> None:
        first = self.src[0]
        for rank in self.src:
            if hellos[rank].values != hellos[first].values:
                raise ConfigurationError(
                    f"the senders hold different non-tensor values: rank {rank}'s are not those of rank {first}; what "
                    f"differs from rank to rank has to be a tensor, or left out"
                )

    def _agree(self, hellos: Mapping[int, Hello], deadline: float) -> Course:
        """What these declarations come to. Every rank has met the same ones before, so all look up or all swap."""
        digests = tuple((rank, hellos[rank].digest) for rank in sorted(hellos))
        found = self._agreed.get(digests)
        if found is None:
            sizes = {rank: hello.text_bytes for rank, hello in hellos.items()}
            texts = self.spread(self._said.text, sizes, deadline)
            for rank, text in texts.items():
                if hashlib.blake2b(text, digest_size=16).digest() != hellos[rank].digest:
                    raise ProtocolError(f"the description that rank {rank} sent is not the one it announced")
            agreement = agree({rank: Declaration.from_json(text, rank) for rank, text in texts.items()})
            found = Course(agreement, program_of(agreement, self.link.rank))
            if len(self._agreed) == _MOST_AGREEMENTS:
                del self._agreed[next(iter(self._agreed))]
            self._agreed[digests] = found
            self.stats.agreements += 1
        return found

    def _move(
        self,
        course: Course,
        contents: Contents | None,
        notes: bytes,
        hellos: Mapping[int, Hello],
        deadline: float,
    ) -> Received | None:
        agreement = course.agreement
        told = self.hand_over(notes, hellos, deadline)
        sources = [] if contents is None else contents.sources(agreement, self.link.device)
        targets = self._carrier.carry(course, sources, deadline)
        if self.receives and agreement.redistributes:
            # The receivers' collective would wait for one that has not got its part.
            everywhere = Hello(status=Status.DATA, number=self._number)
            self.link.greet(everywhere, deadline, "before 'redistribute': messages", frozenset(self.dst))
        self._count(course)
        if not self.receives:
            return None
        return Received(
            agreement=agreement,
            tensors=targets,
            values=told.get(self.src[0], (None, None))[0],
            states={rank: state for rank, (_, state) in told.items() if state is not None},
        )

    def hand_over(self, notes: bytes, hellos: Mapping[int, Hello], deadline: float) -> dict[int, tuple[Any, Any]]:
        """What the senders tell the receivers: (non-tensor values, state) by sender; empty on a pure sender."""
        if not notes and not any(hellos[rank].notes_bytes for rank in self.src):
            return {}
        outgoing = dict.fromkeys((rank for rank in self.dst if rank != self.link.rank), notes) if self.sends else {}
        incoming = {}
        if self.receives:
            incoming = {rank: hellos[rank].notes_bytes for rank in self.src if rank != self.link.rank}
        told = self.link.swap(outgoing, incoming, deadline, "non-tensor values and states, messages")
        if self.sends and self.receives:
            told[self.link.rank] = notes
        return {rank: _parse_notes(rank, text) for rank, text in told.items() if text}

    def _count(self, course: Course) -> None:
        stats, program = self.stats, course.program
        stats.strategy = course.agreement.strategy
        stats.transfers += 1
        stats.sent_bytes += program.sent_bytes
        stats.received_bytes += program.received_bytes
        stats.sent_messages += sum(len(stage.sends) for stage in program.stages)


def _parse_notes(rank: int, text: bytes) -> tuple[Any, Any]:
    try:
        values, state = json.loads(text)
    except ValueError as error:
        raise ProtocolError(f"rank {rank} sent notes that are no JSON: {error}") from error
    return values, state
