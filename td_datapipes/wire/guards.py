"""What must still be so for a read to mean what it was planned to mean, asked for behind its ranges."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from td_datapipes.wire.requests import bulk

__all__ = ["Guard", "GuardExchange", "StaleFault"]


class StaleFault(Exception):
    """A guard's reply is not what it was when the read was planned; the connection has been dropped."""


@dataclass(frozen=True, kw_only=True)
class Guard:
    """A request, and the only reply to it that lets the bytes read before it count.

    Data of another shape or dtype may be as long as what was asked for. The request comes after the ranges: where it
    is answered as before, the ranges were answered before anything changed.

    Attributes:
        request: one command or several.
        reply: its bytes.
        num_replies: in it, heads of lists counted as replies of their own.
    """

    request: bytes
    reply: bytes
    num_replies: int

    @classmethod
    def of_string(cls, key: bytes, value: bytes) -> Guard:
        """A string that must have this value."""
        return cls(request=b"*2\r\n$3\r\nGET\r\n" + bulk(key), reply=bulk(value), num_replies=1)

    @classmethod
    def of_hashes(cls, wanted: Iterable[tuple[bytes, Sequence[tuple[bytes, bytes | None]]]]) -> Guard:
        """Fields of hashes that must have these values: ``(key, [(field, value), ...])``; None where there is none."""
        request, reply, num_replies = [], [], 0
        for key, fields in wanted:
            request.append(b"*%d\r\n$5\r\nHMGET\r\n" % (2 + len(fields)) + bulk(key))
            request += [bulk(name) for name, _ in fields]
            reply.append(b"*%d\r\n" % len(fields) + b"".join(map(_bulk_or_null, (v for _, v in fields))))
            num_replies += 1 + len(fields)
        return cls(request=b"".join(request), reply=b"".join(reply), num_replies=num_replies)


def _bulk_or_null(value: bytes | None) -> bytes:
    return b"$-1\r\n" if value is None else bulk(value)


class GuardExchange:
    """A guard's request and reply (an `Exchange`).

    Args:
        guard: what is asked.
        job: counts it as one more thing to receive.
    """

    nbytes = part_bytes = 0

    def __init__(self, guard: Guard, job: Any) -> None:
        self.request = (guard.request,)
        self.job = job
        self._expected = guard.reply
        self._view = memoryview(bytearray(len(guard.reply)))
        self._got = 0

    def target(self) -> memoryview:
        if self._got < len(self._expected):
            return self._view[self._got :]
        self._compare()
        self.job.unfinished -= 1
        return self._view[:0]

    def received(self, count: int) -> None:
        self._got += count

    def stalled(self) -> None:
        self._compare()

    def _compare(self) -> None:
        if self._view[: self._got] != self._expected[: self._got]:
            raise StaleFault(bytes(self._view[: self._got]))
