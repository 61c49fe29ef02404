"""Worlds of gloo ranks for tests: processes that stay, one case after the other, each under a deadline.

One world a size serves all tests, because starting ranks costs far more than what a case does. The processes are forked
from a server that has torch imported already and has done nothing with it yet, and they end with the tests, even when
those are killed.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["World", "Worlds"]

T = TypeVar("T")
START_SECONDS = 60.0
CASE_SECONDS = 30.0
PRELOADED = ["torch", "torch.distributed.tensor", "tensordict", "redis", "td_datapipes.datasets"]

_context = multiprocessing.get_context("forkserver")


class World:
    """`size` ranks with a process group of their own.

    Args:
        size: number of ranks.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory(prefix="world-")
        self._ranks: list[tuple[Any, Connection]] = []
        _context.set_forkserver_preload(PRELOADED)
        for rank in range(size):
            ours, theirs = _context.Pipe()
            rendezvous = str(Path(self._folder.name) / "rendezvous")
            process = _context.Process(target=_serve, args=(rank, size, rendezvous, theirs))
            process.start()
            theirs.close()
            self._ranks.append((process, ours))
        self._collect("start", START_SECONDS)

    @property
    def alive(self) -> bool:
        """Whether another case can be run."""
        return bool(self._ranks) and all(process.is_alive() for process, _ in self._ranks)

    def run(self, case: Callable[..., T], *args: Any, seconds: float = CASE_SECONDS, spoils: bool = False) -> list[T]:
        """What ``case(*args)`` returns on each rank, by rank.

        Args:
            case: a function of a module, called on every rank at once.
            args: pickled.
            seconds: after which a rank counts as hanging.
            spoils: the case leaves the group unusable, so this world ends with it.

        Raises:
            AssertionError: it raised on some rank, or did not end in time; the tracebacks are in the message.
        """
        for _, pipe in self._ranks:
            pipe.send((case, args, seconds))
        try:
            return self._collect(case.__name__, seconds)
        finally:
            if spoils:
                self.close()

    def _collect(self, what: str, seconds: float) -> list[Any]:
        deadline = time.monotonic() + seconds
        answers: dict[int, tuple[bool, Any]] = {}
        pipes = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks)}
        while len(answers) < self.size and (left := deadline - time.monotonic()) > 0:
            for pipe in wait([pipe for pipe, rank in pipes.items() if rank not in answers], left):
                try:
                    answers[pipes[pipe]] = pipe.recv()  # type: ignore[index,union-attr]
                except EOFError:
                    answers[pipes[pipe]] = (False, "the process ended")  # type: ignore[index]
        wrong = {rank: text for rank, (fine, text) in answers.items() if not fine}
        wrong |= {rank: f"no answer within {seconds} s" for rank in range(self.size) if rank not in answers}
        if wrong:
            self.close()
            raise AssertionError(
                f"{what} failed:\n" + "\n".join(f"rank {rank}: {text}" for rank, text in sorted(wrong.items()))
            )
        return [answers[rank][1] for rank in range(self.size)]

    def close(self) -> None:
        """End the ranks."""
        ranks, self._ranks = self._ranks, []
        for process, pipe in ranks:
            pipe.close()
            process.kill()
            process.join()
            process.close()
        self._folder.cleanup()


class Worlds:
    """Worlds by size, started when first asked for, and anew where a case has spoilt one."""

    def __init__(self) -> None:
        self._worlds: dict[int, World] = {}

    def of(self, size: int) -> World:
        """A world of that many ranks."""
        world = self._worlds.get(size)
        if world is None or not world.alive:
            if world is not None:
                world.close()
            world = self._worlds[size] = World(size)
        return world

    def close(self) -> None:
        """End all of them."""
        for world in self._worlds.values():
            world.close()


def _end_with_parent() -> None:
    """End this process when the one that runs the tests does, however that ends."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _serve(rank: int, size: int, rendezvous: str, pipe: Connection) -> None:
    """What a rank does: make the group, then case after case until the pipe is closed."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Imported here: the tests' own process needs none of it to start a world.
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", f"file://{rendezvous}", rank=rank, world_size=size, timeout=timedelta(seconds=START_SECONDS)
        )
        pipe.send((True, None))
        while True:
            case, args, seconds = pipe.recv()
            faulthandler.dump_traceback_later(max(seconds - 1, 0.5))
            try:
                answer = (True, case(*args))
            except BaseException:
                answer = (False, traceback.format_exc())
            faulthandler.cancel_dump_traceback_later()
            pipe.send(answer)
    except EOFError:
        pass
    finally:
        # Not by way of the group's destructor, which would wait for ranks that are gone.
        os._exit(0)
