"""What the benchmarks share: interleaved timing, tables, servers, memory.

Machines are shared and noisy, so only ratios within one run mean anything: contenders take turns in one loop, and a
ratio is the median over the rounds of that loop, each of which compares neighbours in time. The order of turns is
drawn anew each round, since who comes after whom makes up to a quarter of a difference (whose code, connection and
server are still in the processor's caches).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import redis
import torch
from tensordict import TensorDict

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from servers import ServerProcess  # noqa: E402

from td_datapipes.server import open_embedded  # noqa: E402

__all__ = [
    "ALIGNMENT_BYTES",
    "BATCH",
    "ROOT",
    "SERVER_KINDS",
    "TURN",
    "BenchServer",
    "RecordShape",
    "Results",
    "Rounds",
    "Rows",
    "WireFloor",
    "argument_parser",
    "bench_server",
    "describe_machine",
    "format_table",
    "interleave",
    "rss_bytes",
]

BATCH = 256
TURN = 6
CHUNK_BYTES = 4 << 20
ALIGNMENT_BYTES = 16

Drawn = TypeVar("Drawn")
Rows = npt.NDArray[np.int64]
ServerKind = Literal["embedded", "redis"]
SERVER_KINDS: tuple[ServerKind, ...] = ("embedded", "redis")


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """Seconds each contender took, round by round: ``seconds[name][round]``."""

    seconds: Mapping[str, Sequence[float]]

    def median(self, name: str) -> float:
        """Median seconds of a contender."""
        return statistics.median(self.seconds[name])

    def total(self, name: str) -> float:
        """Seconds of all its rounds."""
        return sum(self.seconds[name])

    def ratio(self, name: str, reference: str) -> float:
        """How many times as long as the reference it takes: the median over the rounds."""
        return statistics.median(self._ratios(name, reference))

    def quartiles(self, name: str, reference: str) -> tuple[float, float]:
        """What half of the rounds' ratios lie between."""
        found = self._ratios(name, reference)
        low, _, high = statistics.quantiles(found, n=4, method="inclusive") if len(found) > 1 else found * 3
        return low, high

    def _ratios(self, name: str, reference: str) -> list[float]:
        pairs = zip(self.seconds[name], self.seconds[reference], strict=True)
        return [own / other for own, other in pairs]


def interleave(
    contenders: Mapping[str, Callable[[Drawn], object]],
    draws: Iterable[Drawn],
    *,
    num_warmup: int = 3,
    turn: int = TURN,
) -> Rounds:
    """Time contenders in turn, each `turn` times in succession with each round's draws.

    The first call of a turn is not counted: it finds the processor's caches full of the others' code and tables, which
    a training loop that reads batch after batch never does. What counts is the median of the rest of the turn.

    Args:
        contenders: by name. What they return is dropped after the clock was read.
        draws: `turn` a round, the warm-up rounds first; a last round may have fewer. Taken round by round.
        num_warmup: rounds that are not counted; one always is.
        turn: calls in succession.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    names, order, source = list(contenders), random.Random(0), iter(draws)
    while drawn := list(islice(source, turn)):
        order.shuffle(names)
        for name in names:
            took = [_timed(contenders[name], one) for one in drawn]
            seconds[name].append(statistics.median(took[1:] or took))
    return Rounds(seconds={name: found[min(num_warmup, len(found) - 1) :] for name, found in seconds.items()})


def _timed(call: Callable[[Drawn], object], drawn: Drawn) -> float:
    began = time.perf_counter()
    result = call(drawn)
    took = time.perf_counter() - began
    del result
    return took


@dataclass(frozen=True, kw_only=True)
class BenchServer:
    """A running server that a benchmark may fill.

    Attributes:
        label: for tables.
        client: redis-py's client to it.
        url_base: what stands before ``#name`` in its URLs.
        dial_options: where it is, as keyword arguments of redis-py's client and of TensorDictStore.
        persists: whether it appends to a file what is written, as the embedded server does.
    """

    label: str
    client: redis.Redis
    url_base: str
    dial_options: Mapping[str, Any]
    persists: bool

    def url(self, name: str) -> str:
        """The URL of a data set on it."""
        return f"{self.url_base}#{name}"

    def connect(self) -> socket.socket:
        """A bare socket to it."""
        tcp = socket.create_connection((self.dial_options["host"], self.dial_options["port"]))
        tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if password := self.dial_options.get("password"):
            tcp.sendall(b"AUTH %s\r\n" % password.encode())
            if (answer := tcp.recv(64)) != b"+OK\r\n":
                raise RuntimeError(f"the server says {answer!r}")
        return tcp


@contextmanager
def bench_server(kind: ServerKind) -> Iterator[BenchServer]:
    """A server of its own, over loopback TCP: the embedded Valkey, which appends to its file, or Debian's Redis."""
    if kind == "embedded":
        with tempfile.TemporaryDirectory() as folder, open_embedded(Path(folder)) as server:
            where = server.listening()
            options: dict[str, Any] = {"host": "127.0.0.1", "port": where.port, "password": where.password}
            with redis.Redis(**options) as client:
                yield BenchServer(
                    label=f"embedded Valkey {_version(client)}",
                    client=client,
                    url_base=f"embedded://{quote(folder)}",
                    dial_options=options,
                    persists=True,
                )
        return
    with ServerProcess("redis") as process:
        options = {"host": process.host, "port": process.port}
        with redis.Redis(**options) as client:
            yield BenchServer(
                label=f"Redis {_version(client)}",
                client=client,
                url_base=f"redis://{process.host}:{process.port}/0",
                dial_options=options,
                persists=False,
            )


def _version(client: redis.Redis) -> str:
    info: Any = client.info("server")
    return str(info.get("valkey_version", info["redis_version"]))


class RecordShape:
    """Where the fields of a row stand in a record; a framed reply of one is a multiple of 16 bytes."""

    def __init__(self, td: TensorDict) -> None:
        offset, self.fields = 0, []
        for key, value in td.items():
            nbytes = value[0].numel() * value.element_size()
            offset = -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            self.fields.append((key, offset, value.dtype, value.shape[1:], nbytes))
            offset += nbytes
        while (len(b"$%d\r\n" % offset) + offset + 2) % ALIGNMENT_BYTES:
            offset += 1
        self.nbytes = offset

    def pack(self, td: TensorDict) -> npt.NDArray[np.uint8]:
        """The rows' records ``[rows, nbytes]``."""
        records = torch.zeros(len(td), self.nbytes, dtype=torch.uint8)
        for key, offset, _, _, nbytes in self.fields:
            records[:, offset : offset + nbytes] = td[key].reshape(len(td), -1).view(torch.uint8).view(len(td), nbytes)
        return records.numpy()

    def view(self, buffer: torch.Tensor, start: int, stride: int, num_rows: int) -> TensorDict:
        """The fields of records that stand in `buffer` from `start` on, one every `stride` bytes; nothing is copied."""
        source = {}
        for key, offset, dtype, shape, _ in self.fields:
            size, strides, step = dtype.itemsize, [], 1
            for dim in reversed(shape):
                strides.insert(0, step)
                step *= dim
            source[key] = torch.as_strided(
                buffer.view(dtype), (num_rows, *shape), (stride // size, *strides), (start + offset) // size
            )
        return TensorDict(source, [num_rows])


class WireFloor:
    """The least that a read can cost: a copy of the rows in chunks of its own, and no error handling."""

    def __init__(self, td: TensorDict, server: BenchServer) -> None:
        self._client, self._socket = server.client, server.connect()
        self.shape, self._num_rows = RecordShape(td), len(td)
        self.nbytes = self.shape.nbytes
        records = self.shape.pack(td)
        self.chunk_rows = max(1, CHUNK_BYTES // self.nbytes)
        self.keys = [b"floor:%d" % chunk for chunk in range(-(-len(td) // self.chunk_rows))]
        for chunk, key in enumerate(self.keys):
            rows = records[chunk * self.chunk_rows : (chunk + 1) * self.chunk_rows]
            self._client.set(key, rows.tobytes())
        self._heads = [b"*4\r\n$8\r\nGETRANGE\r\n$%d\r\n%s\r\n" % (len(key), key) for key in self.keys]
        self._tails = [self._tail(row, row + 1) for row in range(self.chunk_rows)]
        self._header = len(b"$%d\r\n" % self.nbytes)
        self._stride = self._header + self.nbytes + 2
        self._pad = -self._header % ALIGNMENT_BYTES
        self._whole = memoryview(bytearray(BATCH * self.nbytes + 64 * (BATCH // self.chunk_rows + 2)))

    def _tail(self, start: int, stop: int) -> bytes:
        first, last = b"%d" % (start * self.nbytes), b"%d" % (stop * self.nbytes - 1)
        return b"$%d\r\n%s\r\n$%d\r\n%s\r\n" % (len(first), first, len(last), last)

    def scattered(self, rows: Rows) -> TensorDict:
        """One GETRANGE a row, pipelined; the reply stream is received straight into the batch."""
        nbytes = len(rows) * self._stride
        buffer = torch.empty(-(-(self._pad + nbytes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES, dtype=torch.uint8)
        chunk, row = np.divmod(rows, self.chunk_rows)
        heads, tails = self._heads, self._tails
        request = b"".join([heads[c] + tails[r] for c, r in zip(chunk.tolist(), row.tolist(), strict=True)])
        self._exchange(request, memoryview(buffer.numpy())[self._pad : self._pad + nbytes])
        return self.shape.view(buffer, self._pad + self._header, self._stride, len(rows))

    def covering(self, start: int, stop: int) -> None:
        """One GETRANGE a chunk over adjacent rows, at most `BATCH`, into memory that is reused: the bytes, no more."""
        requests, nbytes = [], 0
        for chunk in range(start // self.chunk_rows, -(-stop // self.chunk_rows)):
            base = chunk * self.chunk_rows
            first, last = max(start - base, 0), min(stop - base, self.chunk_rows)
            span = (last - first) * self.nbytes
            requests.append(self._heads[chunk] + self._tail(first, last))
            nbytes += len(b"$%d\r\n" % span) + span + 2
        self._exchange(b"".join(requests), self._whole[:nbytes])

    def _exchange(self, request: bytes, view: memoryview) -> None:
        self._socket.sendall(request)
        got = 0
        while got < len(view):
            got += self._socket.recv_into(view[got:])

    def close(self) -> None:
        """Remove its copy of the rows."""
        self._socket.close()
        self._client.unlink(*self.keys)


def format_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table that also reads well on a terminal: the first column left, the others right."""
    cells = [list(head), *(list(row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    lines = [
        " | ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in enumerate(pairs)
        )
        for pairs in (list(zip(row, widths, strict=True)) for row in cells)
    ]
    rule = "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])])
    return "\n".join([f"| {lines[0]} |", f"|{rule}|", *(f"| {line} |" for line in lines[1:])])


class Results:
    """Figures for ``--json``: one flat record a measurement."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def add(self, **record: Any) -> None:
        """Keep a record."""
        self.records.append(record)

    def write(self, path: Path | None) -> None:
        """Write them with what is known of the machine; nothing where no path was asked for."""
        if path is not None:
            text = json.dumps({"machine": describe_machine(), "results": self.records}, indent=1)
            path.write_text(text + "\n")


def argument_parser(description: str) -> argparse.ArgumentParser:
    """The options every benchmark has: ``--quick``, ``--json`` and ``--server``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="little data and few rounds: shows that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--server", choices=SERVER_KINDS, action="append", help="only this one (default: all)")
    return parser


def describe_machine() -> dict[str, Any]:
    """What figures depend on."""
    return {
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
    }


def rss_bytes() -> int:
    """Resident memory of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
