"""What was asked for in the background: a future for threads and for asyncio alike."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

__all__ = ["Background", "RemoteFuture"]

T = TypeVar("T")


class RemoteFuture(Generic[T]):
    """The result of something that is being done; ``result()`` waits for it, and so does ``await``."""

    def __init__(self, future: Future[T]) -> None:
        self._future = future

    def result(self, timeout_seconds: float | None = None) -> T:
        """Wait for the result, or raise what was raised.

        Raises:
            TimeoutError: it took longer.
        """
        return self._future.result(timeout_seconds)

    def done(self) -> bool:
        """Whether `result` returns at once."""
        return self._future.done()

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.wrap_future(self._future).__await__()


class Background:
    """One thread that does things in the order they were asked for; started with the first, ended with this object."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._pool: ThreadPoolExecutor | None = None

    def submit(self, action: Callable[[], T]) -> RemoteFuture[T]:
        """Do something later, without waiting for it."""
        if self._pid != os.getpid():  # a thread does not survive a fork
            self._lock, self._pid, self._pool = threading.Lock(), os.getpid(), None
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, thread_name_prefix="td_datapipes remote")
                weakref.finalize(self, self._pool.shutdown, wait=False)
            return RemoteFuture(self._pool.submit(action))

    def close(self) -> None:
        """Wait for what was asked for, and end the thread."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None and self._pid == os.getpid():
            pool.shutdown(wait=True)
