"""Read announced batches before they are asked for: one background thread a data set and process.

A batch sampler announces a window of batches in every batch it yields. Where the rows of a window lie close together,
the window is read at once by covering ranges, each row moved straight to its batch; where they are scattered, every
batch is read by itself. Either way the requests of what comes next are sent before the replies of what comes now are
read, and what was requested but not yet handed over is bounded in bytes.

Reading ahead is an optimisation, never a source of truth: a batch is handed over only if its rows are exactly the rows
asked for, and whatever goes wrong here is left to an ordinary read, which repeats it or names the error.
"""

from __future__ import annotations

import os
import weakref

from tensordict import TensorDict

from td_datapipes.read_ahead import AnnouncedBatch, AnnouncedWindow, ReadAhead
from td_datapipes.read_spec import Rows
from td_datapipes.store import RowReader
from td_datapipes.wire.reader import ReadStats

__all__ = ["AnnouncedBatch", "AnnouncedWindow", "Prefetcher"]


class Prefetcher:
    """Hands over announced batches that a background thread has read ahead.

    The thread starts with the first announcement and ends with `close`, with this object, or with the process.

    Args:
        reader: plans the reads, and does those that nobody announced.
        limit_bytes: for everything requested and not handed over. A single group of batches may exceed it.
    """

    def __init__(self, reader: RowReader, limit_bytes: int) -> None:
        self._reader = reader
        self._limit_bytes = limit_bytes
        self._ahead: ReadAhead | None = None
        self._finalizer: weakref.finalize[..., Prefetcher] | None = None
        self._past = ReadStats()
        self._pid = os.getpid()

    def get(self, announced: AnnouncedBatch, rows: Rows) -> TensorDict:
        """The rows of an announced batch, from what was read ahead or else by an ordinary read.

        Args:
            announced: the batch as its sampler made it.
            rows: its rows, checked, ``[n]``.

        Raises:
            ServerTimeoutError: the server did not answer within its time-out.
            TDDatapipesError: as `RowReader.read`.
        """
        if self._pid != os.getpid():  # a thread does not survive a fork
            self._ahead, self._pid = None, os.getpid()
        if self._ahead is None:
            self._ahead = ReadAhead(self._reader, self._limit_bytes)
            self._finalizer = weakref.finalize(self, self._ahead.close)
        ready = self._ahead.get(announced, rows)
        return self._reader.read(rows) if ready is None else ready

    @property
    def stats(self) -> ReadStats:
        """What was read ahead so far."""
        return self._past if self._ahead is None else self._past + self._ahead.stats

    def close(self) -> None:
        """End the thread; a later `get` starts another."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            if self._finalizer is not None:
                self._finalizer.detach()
            ahead.close()
            self._past = self._past + ahead.stats
