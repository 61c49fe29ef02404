"""What a batch sampler yields: a list of rows that knows which batches come next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["RowBatch", "Window", "WindowSource"]

Rows = NDArray[np.int64]


class WindowSource(Protocol):
    """Draws a window's batches when first asked. What it pickles should be small."""

    def __len__(self) -> int:
        """Number of batches, without drawing them."""
        ...

    def draw(self) -> tuple[Rows, ...]:
        """The batches' rows; the same arrays when asked again."""
        ...


class Window:
    """Consecutive batches of one rank, announced so that they can be read before they are asked for. Immutable.

    The batches of one window carry the same window, whose `next` is the one after it: a reader that fetches both never
    waits at the border. A reader tells windows apart by `first_ordinal`, and should look at `batches` only of windows
    it has not seen: a window that came by pickle may draw them anew each time it arrives.

    With worker processes each batch goes to one worker, in turn: a worker fetches the ordinals that equal, modulo the
    number of workers, those it was given.

    Args:
        first_ordinal: ordinal of the first batch.
        batches: each batch's rows, int64; or what draws them when first asked.
        next: the window after this one; that one's own `next` is None.
    """

    __slots__ = ("_batches", "_first_ordinal", "_next")

    def __init__(
        self,
        first_ordinal: int,
        batches: Sequence[Rows] | WindowSource,
        next: Window | None = None,  # noqa: A002
    ) -> None:
        self._first_ordinal = first_ordinal
        self._batches = tuple(batches) if isinstance(batches, Sequence) else batches
        self._next = next

    @property
    def first_ordinal(self) -> int:
        """Ordinal of the first batch."""
        return self._first_ordinal

    @property
    def stop_ordinal(self) -> int:
        """Ordinal behind the last batch."""
        return self._first_ordinal + len(self._batches)

    @property
    def batches(self) -> tuple[Rows, ...]:
        """Each batch's rows, padding included."""
        return self._batches if isinstance(self._batches, tuple) else self._batches.draw()

    @property
    def next(self) -> Window | None:
        """The window after this one, if there is one."""
        return self._next

    def __len__(self) -> int:
        return len(self._batches)

    def __reduce__(self) -> tuple[Any, ...]:
        if not isinstance(self._batches, tuple):
            return type(self), (self._first_ordinal, self._batches, self._next)
        lengths = tuple(len(rows) for rows in self._batches)
        data = b"".join(rows.tobytes() for rows in self._batches)
        return _rebuild_window, (self._first_ordinal, lengths, data, self._next)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(ordinals {self.first_ordinal}..{self.stop_ordinal - 1})"


class RowBatch(list[int]):
    """Rows of one batch in the sampler's own order, repeats kept.

    A plain list to everybody; what knows more finds the announcement in its attributes. Wrappers like
    ``torch.utils.data.Subset`` hand on a list without them, and lose only the look-ahead.

    Args:
        rows: row numbers.
        ordinal: which batch of its rank this is in the epoch, or since the elastic cursor it was resumed from.
        window: the batches announced with it.
        padded: how many rows at the end repeat others, so that all ranks get as many.
        dealt: the rows as an array, for who gets the batch from its dealer: nobody can have changed the list yet.
    """

    __slots__ = ("dealt", "ordinal", "padded", "window")

    def __init__(
        self,
        rows: Iterable[int] = (),
        *,
        ordinal: int = 0,
        window: Window | None = None,
        padded: int = 0,
        dealt: Rows | None = None,
    ) -> None:
        super().__init__(rows)
        self.ordinal = ordinal
        self.window = window
        self.padded = padded
        self.dealt = dealt

    def __reduce__(self) -> tuple[Any, ...]:
        data = np.asarray(self, np.int64).tobytes()
        return _rebuild_batch, (type(self), data, self.ordinal, self.window, self.padded)


def _rebuild_batch(kind: type[RowBatch], data: bytes, ordinal: int, window: Window | None, padded: int) -> RowBatch:
    return kind(np.frombuffer(data, np.int64).tolist(), ordinal=ordinal, window=window, padded=padded)


def _rebuild_window(first_ordinal: int, lengths: tuple[int, ...], data: bytes, following: Window | None) -> Window:
    edges = np.cumsum(lengths)[:-1]
    return Window(first_ordinal, tuple(np.split(np.frombuffer(data, np.int64), edges)), following)
