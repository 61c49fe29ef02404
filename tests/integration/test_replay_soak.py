"""A minute of writers and samplers while the server is stopped and continued and its connections are killed."""

from __future__ import annotations

import multiprocessing
import random
import time
from multiprocessing.synchronize import Barrier, Event

import pytest
import torch
from replay_rows import counted
from servers import ServerProcess

from td_datapipes import RedisReplayBuffer
from td_datapipes.errors import NotEnoughRowsError
from td_datapipes.replay import Prioritized, Uniform

SECONDS = 15.0
"""Four times."""
SHORT, LONG = 5, 600
"""Doubles a row: long ones are staged."""
CAPACITY = 2000
fork = multiprocessing.get_context("fork")
Report = multiprocessing.SimpleQueue


def write(url: str, number: int, width: int, opened: Barrier, stop: Event, report: Report[tuple[str, int]]) -> None:
    torch.set_num_threads(1)
    written, dice = 0, random.Random(number)
    with RedisReplayBuffer(url, CAPACITY, chunk_bytes=None if width == LONG else 4096) as buffer:
        while not stop.is_set():
            rows = dice.choice((32, 64, 96, dice.randint(1, 50))) if width == LONG else 1 + written % 13
            buffer.extend(counted(number * 10**9 + written, rows, width))
            if not written:  # it is made with its first rows, and making it takes no longer than an answer may, either
                opened.wait(60)
            written += rows
    report.put((f"written by {number}", written))


def sample(url: str, prefetch: int, opened: Barrier, stop: Event, report: Report[tuple[str, int]]) -> None:
    torch.set_num_threads(1)
    batches = wrong = updates = 0
    with RedisReplayBuffer(url, sampler=Prioritized(), prefetch=prefetch) as buffer:
        opened.wait(60)
        while not stop.is_set():
            try:
                batch = buffer.sample(64)
            except NotEnoughRowsError:
                continue
            batches += 1
            wrong += int((batch["b"] != batch["a"].double()[:, None]).any(1).sum())
            outcome = buffer.update_priority(batch["index"], torch.rand(64))
            updates += outcome.num_applied + len(outcome.rejected)
    report.put(("batches", batches))
    report.put(("wrong rows", wrong))
    report.put(("updates", updates))


def disturb(server: ServerProcess, seconds: float) -> int:
    """Stop and continue the server and kill its connections, at random."""
    dice, end, faults = random.Random(0), time.monotonic() + seconds, 0
    while time.monotonic() < end:
        time.sleep(dice.uniform(0.05, 0.4))
        if dice.random() < 0.3:
            server.pause()
            time.sleep(dice.uniform(0.05, 0.9))  # attempts time out after 0.5 s
            server.resume()
        else:
            server.execute("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        faults += 1
    return faults


@pytest.mark.heavy
@pytest.mark.timeout(180)
@pytest.mark.parametrize("width", [SHORT, LONG])
@pytest.mark.parametrize("kind", ["valkey", "redis"])
def test_rows_and_counts_stay_right_whatever_happens_to_the_connections(kind: str, width: int) -> None:
    with ServerProcess(kind) as server:
        url = server.url("soak", socket_timeout=0.5)
        # Opening may take no longer than an answer may, which is a named error where the server is stopped for longer.
        opened, stop, report = fork.Barrier(6), fork.Event(), fork.SimpleQueue()
        processes = [fork.Process(target=write, args=(url, number, width, opened, stop, report)) for number in range(3)]
        processes += [fork.Process(target=sample, args=(url, prefetch, opened, stop, report)) for prefetch in (0, 3)]
        for process in processes:
            process.start()
        opened.wait(60)
        faults = disturb(server, SECONDS)
        stop.set()
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [0] * 5, "a process failed, or hangs"
        totals: dict[str, int] = {}
        while not report.empty():
            what, number = report.get()
            totals[what] = totals.get(what, 0) + number
        print(f"{kind}: {faults} faults, {totals}")
        written = sum(number for what, number in totals.items() if what.startswith("written"))
        assert faults > 15
        assert totals["wrong rows"] == 0
        assert min(totals["batches"], totals["updates"], *(totals[f"written by {i}"] for i in range(3))) > 0
        with RedisReplayBuffer(url) as buffer:
            assert buffer.num_written == written
            rows = buffer.sample(min(written, CAPACITY), sampler=Uniform(replacement=False))
        assert torch.equal(rows["b"], rows["a"].double()[:, None].expand_as(rows["b"]))
        assert len(set(rows["a"].tolist())) == len(rows)
        # What is there of each writer is the end of what it wrote, without a gap.
        for number in range(3):
            mine = sorted(a - number * 10**9 for a in rows["a"].tolist() if a // 10**9 == number)
            assert mine == list(range(totals[f"written by {number}"] - len(mine), totals[f"written by {number}"]))
