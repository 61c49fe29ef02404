"""What each reader says of itself, for ``td-datapipes top``: in the name of its connection, once a second.

A connection's name needs no permission to write, no key and no room on the server, and is gone with the reader.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from td_datapipes.errors import TDDatapipesError
from td_datapipes.keys import encode_name, name_from_encoded
from td_datapipes.wire.reader import ReadStats
from td_datapipes.wire.server import Server

__all__ = ["REPORT_SECONDS", "ReadReport", "Reporter", "find_reports"]

REPORT_SECONDS = 1.0
_PREFIX = "td-reader"


@dataclass(frozen=True, kw_only=True)
class ReadReport:
    """What one reader has read so far.

    Attributes:
        name: of the data set.
        address: where the reader is, as the server sees it.
        pid: its process.
        token: tells it from others.
        rows, bytes: read since it was opened.
        wait_seconds: of them, waited for replies.
        at_seconds: on its own clock, when it said so.
    """

    name: str
    address: str
    pid: int
    token: str
    rows: int
    bytes: int
    wait_seconds: float
    at_seconds: float


class Reporter:
    """Reports for one data set object; a forked copy reports for itself.

    Args:
        server: where the data set lies.
        name: its name.
    """

    def __init__(self, server: Server, name: str) -> None:
        self._server, self._name = server, name
        self._due = time.monotonic() + REPORT_SECONDS
        self._pid, self._token = 0, ""

    def tick(self, read: Callable[[], ReadStats]) -> None:
        """After each read: report if it is time. What keeps it from being heard is nobody's concern who reads.

        Args:
            read: gives what has been read. It is not kept: it would keep the data set alive.
        """
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + REPORT_SECONDS
        if self._pid != os.getpid():
            self._pid, self._token = os.getpid(), secrets.token_hex(4)
        stats = read()
        values = (self._pid, self._token, stats.rows, stats.bytes, round(stats.wait_seconds * 1e3), round(now * 1e3))
        text = "|".join([_PREFIX, encode_name(self._name), *map(str, values)])
        try:
            if self._server.cluster() is not None:  # which of its nodes' connections would be asked?
                self._due = float("inf")
                return
            self._server.call("reporting", lambda client: client.client_setname(text))
        except TDDatapipesError:
            self._due = float("inf")


def find_reports(server: Server) -> list[ReadReport]:
    """What the readers of all data sets on a server said last.

    Raises:
        AuthenticationError: the user may not list clients.
    """

    def command(client: Any) -> list[Mapping[str, str]]:
        found: list[Mapping[str, str]] = client.client_list()
        return found

    latest: dict[str, ReadReport] = {}
    for item in server.call("listing clients", command):
        report = _parse(item)
        # A reader's connection may have been made anew: what it said last counts.
        if report is not None and (report.token not in latest or latest[report.token].at_seconds < report.at_seconds):
            latest[report.token] = report
    return sorted(latest.values(), key=lambda report: (report.name, report.address, report.pid, report.token))


def _parse(item: Mapping[str, str]) -> ReadReport | None:
    parts = item.get("name", "").split("|")
    if parts[0] != _PREFIX or len(parts) != 8 or not all(part.isdigit() for part in (parts[2], *parts[4:])):
        return None
    host = item.get("addr", "").rpartition(":")[0]
    return ReadReport(
        name=name_from_encoded(parts[1].encode("ascii", "replace")),
        address="this machine" if host.startswith("/") or not host or item.get("addr", "").endswith(":0") else host,
        pid=int(parts[2]),
        token=parts[3],
        rows=int(parts[4]),
        bytes=int(parts[5]),
        wait_seconds=int(parts[6]) / 1e3,
        at_seconds=int(parts[7]) / 1e3,
    )
