"""Announcements numbered anew, for whoever takes only every n-th batch of a rank. Pure, no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from td_datapipes.read_spec import Rows
from td_datapipes.samplers.batch import RowBatch, Window

__all__ = ["deal_batch"]


class _Dealt:
    """An announced batch as an array: reading its rows out of a list takes longer than finding them."""

    __slots__ = ("_rows", "ordinal", "window")

    def __init__(self, rows: Rows, ordinal: int, window: Window) -> None:
        self._rows, self.ordinal, self.window = rows, ordinal, window

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Rows:
        return self._rows


def deal_batch(rows: RowBatch, *, step: int, expected: int) -> Sequence[int]:
    """The batch, numbered so that a reader expects exactly those batches that will be asked for.

    Args:
        rows: as its dealer made it.
        step: every how manieth batch of the sampler is taken.
        expected: every how manieth the reader expects: the number of workers of the loader it runs in.
    """
    if rows.window is None:
        return rows
    if step == expected:
        return rows if rows.dealt is None else cast(Sequence[int], _Dealt(rows.dealt, rows.ordinal, rows.window))
    window = _DealtWindow(rows.window, rows.ordinal % step, step, expected)
    ordinal = rows.ordinal // step * expected
    return RowBatch(rows, ordinal=ordinal, window=cast(Window, window), padded=rows.padded)


class _DealtWindow:
    """Those batches of a window that are dealt to one of `step`, each under a number `spread` after the one before.

    Args:
        window: all batches.
        remainder: of the ordinals that are dealt to this one.
        step: among how many they are dealt.
        spread: from one number to the next; what is announced under the numbers between is empty.
    """

    def __init__(self, window: Window, remainder: int, step: int, spread: int) -> None:
        self._window, self._remainder, self._step, self._spread = window, remainder, step, spread
        self._first = window.first_ordinal + (remainder - window.first_ordinal) % step

    @property
    def first_ordinal(self) -> int:
        return self._first // self._step * self._spread

    @property
    def batches(self) -> tuple[Rows, ...]:
        gap = [np.empty(0, np.int64)] * (self._spread - 1)
        mine = self._window.batches[self._first - self._window.first_ordinal :: self._step]
        return tuple(rows for batch in mine for rows in (batch, *gap))

    @property
    def next(self) -> _DealtWindow | None:
        following = self._window.next
        if following is None:
            return None
        dealt = _DealtWindow(following, self._remainder, self._step, self._spread)
        return dealt if dealt._first < following.stop_ordinal else None
