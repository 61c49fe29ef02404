"""The command top: who reads what from a server, and how fast, live."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from td_datapipes.cli.late import LateModule, late
from td_datapipes.cli.options import AsJson, AskPassword, ServerOnlyURL, add_command
from td_datapipes.cli.output import format_bytes, print_json, screen

if TYPE_CHECKING:
    from td_datapipes import reports
    from td_datapipes.catalog import connect, load_manifest
    from td_datapipes.reports import ReadReport, find_reports
    from td_datapipes.wire.server import Server
else:
    connect, load_manifest = late("td_datapipes.catalog", "connect", "load_manifest")
    reports, find_reports = LateModule("td_datapipes.reports"), late("td_datapipes.reports", "find_reports")

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(app, top, "td-datapipes top redis://localhost:6379/0#train")


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How fast one reader is.

    Attributes:
        name: the data set's.
        reader: where it runs.
        rows_per_second, bytes_per_second: since its report before the last; 0 where it is silent.
        wait_share: of that time, waited for the server.
        rows: read since it was opened.
    """

    name: str
    reader: str
    rows_per_second: float
    bytes_per_second: float
    wait_share: float
    rows: int


def top(
    url: ServerOnlyURL,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 2.0,
    count: Annotated[
        int | None, typer.Option(min=1, help="Looks, then end. By default for ever on a terminal, else once.")
    ] = None,
    as_json: AsJson = False,
    ask_password: AskPassword = False,
) -> None:
    """Watch who reads which data set, and how fast. A URL with a name watches that one alone.

    Readers report once a second, in the names of their connections: rows, bytes, and how much of the time they wait.
    """
    del ask_password
    server = connect(url, require_name=False)
    try:
        if server.url.name:
            load_manifest(server, server.url.name)
        live = not as_json and sys.stdout.isatty()
        looks = count if count is not None else None if live else 1
        _watch(server, max(interval, 0.1), looks, live=live, as_json=as_json)
    finally:
        server.close()


def _watch(server: Server, interval: float, looks: int | None, *, live: bool, as_json: bool) -> None:
    watcher = _Watcher(server)
    watcher.look()
    if live:
        with Live(_picture(server, [], {}), console=screen(), transient=False, auto_refresh=False) as view:
            while looks is None or looks > 0:
                time.sleep(interval)
                view.update(_picture(server, watcher.look(), _server_facts(server)), refresh=True)
                looks = None if looks is None else looks - 1
        return
    for _ in range(looks or 1):
        # Two reports of each reader make a speed.
        time.sleep(max(interval, 2 * reports.REPORT_SECONDS))
        readings, facts = watcher.look(), _server_facts(server)
        if as_json:
            print_json({"server": server.address, **facts, "readers": [asdict(reading) for reading in readings]})
        else:
            screen().print(_picture(server, readings, facts))


class _Watcher:
    """Compares what readers say with what they said before."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._before: dict[str, ReadReport] = {}

    def look(self) -> list[Reading]:
        """The readers that there are now."""
        name = self._server.url.name
        reports = [report for report in find_reports(self._server) if not name or report.name == name]
        readings = [self._reading(report) for report in reports]
        self._before = {report.token: report for report in reports}
        return readings

    def _reading(self, now: ReadReport) -> Reading:
        before = self._before.get(now.token, now)
        seconds = now.at_seconds - before.at_seconds
        return Reading(
            name=now.name,
            reader=f"{now.address}, process {now.pid}",
            rows_per_second=(now.rows - before.rows) / seconds if seconds else 0.0,
            bytes_per_second=(now.bytes - before.bytes) / seconds if seconds else 0.0,
            wait_share=min(1.0, (now.wait_seconds - before.wait_seconds) / seconds) if seconds else 0.0,
            rows=now.rows,
        )


def _server_facts(server: Server) -> dict[str, Any]:
    def command(client: Any) -> Mapping[str, Any]:
        found: Mapping[str, Any] = client.info()
        return found

    info = server.call("asking how it is", command)
    return {
        "used_bytes": info.get("used_memory"),
        "max_bytes": info.get("maxmemory"),
        "commands_per_second": info.get("instantaneous_ops_per_sec"),
        "output_bytes_per_second": round(float(info.get("instantaneous_output_kbps", 0)) * 1024),
        "clients": info.get("connected_clients"),
    }


def _picture(server: Server, readings: Sequence[Reading], facts: Mapping[str, Any]) -> Group:
    head = Text(str(server.url), style="bold")
    if facts:
        limit = f" of {format_bytes(facts['max_bytes'])}" if facts["max_bytes"] else ""
        head.append(
            f"\n{format_bytes(facts['used_bytes'])}{limit} in memory, {facts['clients']} connections, "
            f"{facts['commands_per_second']:,} commands/s, {facts['output_bytes_per_second'] / 1e6:,.1f} MB/s out",
            style="not bold",
        )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("data set", overflow="fold")
    table.add_column("reader", overflow="fold")
    for name in ("rows/s", "MB/s", "waiting", "rows read"):
        table.add_column(name, justify="right", no_wrap=True)
    for reading in readings:
        table.add_row(Text(reading.name), Text(reading.reader), *_cells(reading))
    if len(readings) > 1:
        table.add_section()
        table.add_row("all", "", *_cells(_sum(readings)), style="bold")
    body = table if readings else Text("nobody reads" if facts else "looking ...")
    return Group(head, Text(), body)


def _cells(reading: Reading) -> list[str]:
    return [
        f"{reading.rows_per_second:,.0f}",
        f"{reading.bytes_per_second / 1e6:,.1f}",
        f"{reading.wait_share:.0%}",
        f"{reading.rows:,}",
    ]


def _sum(readings: Sequence[Reading]) -> Reading:
    return Reading(
        name="all",
        reader="",
        rows_per_second=sum(reading.rows_per_second for reading in readings),
        bytes_per_second=sum(reading.bytes_per_second for reading in readings),
        wait_share=sum(reading.wait_share for reading in readings) / len(readings),
        rows=sum(reading.rows for reading in readings),
    )
