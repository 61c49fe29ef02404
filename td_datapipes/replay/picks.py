"""Which rows a batch is made of: drawn here where the cursor is all it takes, else on the server."""

from __future__ import annotations

import os
import secrets
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import redis

from td_datapipes.errors import ConfigurationError, NotEnoughRowsError, RateLimitError
from td_datapipes.replay.calls import Caller
from td_datapipes.replay.opening import Opener
from td_datapipes.replay.options import Fifo, Lifo, NStep, Prioritized, Sampler, Slices, Uniform
from td_datapipes.replay.ring import ANSWER_SECONDS, Numbers, Ring

__all__ = ["Picker", "Picks"]

Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Picks:
    """Rows chosen for a batch, in the order of the batch.

    Attributes:
        ring: the ring they are of.
        stripes: the stripe of each.
        numbers: write numbers ``[n, m]``: the row itself and what else has to be read for it (the row behind its
            rewards, or all steps of its slice).
        incarnations: of each row's stripe.
        probability: that a draw gives this row, times a factor common to all; None where all are equally likely.
        rows: rows in the buffer, as far as known.
        links: for n-step returns, ``[n, 3]``: links followed, discounted reward, flags.
    """

    ring: Ring
    stripes: Numbers
    numbers: Numbers
    incarnations: Numbers
    probability: Doubles | None
    rows: int
    links: Doubles | None

    def put(self, where: npt.NDArray[np.intp], other: Picks) -> Picks:
        """With other rows in some places."""
        values: dict[str, Any] = {}
        for name in ("stripes", "numbers", "incarnations", "probability", "links"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine is not None:
                mine = mine.copy()
                mine[where] = theirs
            values[name] = mine
        return replace(self, **values)


class Picker:
    """Chooses rows. Not safe for threads: one owner at a time.

    Args:
        caller: how the server is called.
        opener: what the buffer is.
        cursor_seconds: how old cursors may be that rows are chosen by.

    Attributes:
        cursor_seconds: as given.
    """

    def __init__(self, caller: Caller, opener: Opener, cursor_seconds: float = 0.0) -> None:
        self._caller, self._opener = caller, opener
        self.cursor_seconds = cursor_seconds
        self._heard: tuple[str, float, list[tuple[int, int]]] = "", 0.0, []
        self._client = f"s{secrets.token_hex(8)}"
        self._pid = os.getpid()
        self._calls = 0
        self._unanswered: tuple[int, list[Any]] | None = None
        self._weights: dict[tuple[str, str], Doubles] = {}

    def pick(
        self,
        count: int,
        sampler: Sampler,
        n_step: NStep | None,
        random: np.random.Generator,
        deadline: float,
        *,
        counted: bool = True,
    ) -> Picks:
        """Choose rows.

        Args:
            count: rows; of slices, slices.
            sampler: how.
            n_step: what has to follow each row.
            random: where chance comes from.
            deadline: on `time.monotonic`'s clock.
            counted: they count as samples; False for those drawn in place of overwritten ones.

        Raises:
            NotEnoughRowsError: too few rows qualify.
            RateLimitError: the rate limit let none be drawn by the deadline.
            DataLossError: the buffer is gone.
        """
        if self._pid != os.getpid():
            self._client, self._pid = f"s{secrets.token_hex(8)}", os.getpid()
        ring = self._opener.require_by(deadline)
        self._check(ring, count, sampler, n_step)
        call = _Call(self, ring, count, sampler, n_step, random, deadline, counted=counted)
        if isinstance(sampler, Fifo | Lifo):
            return call.in_order()
        if isinstance(sampler, Uniform) and n_step is None:
            return call.uniform()
        return call.drawn()

    def _check(self, ring: Ring, count: int, sampler: Sampler, n_step: NStep | None) -> None:
        if count < 1:
            raise ConfigurationError(f"a sample has 1 row or more, got {count}")
        limit, kind = ring.options.rate_limit, type(sampler).__name__
        if limit is not None and count > 2 * limit.error_buffer:
            raise ConfigurationError(
                f"{count} samples at once are more than {limit} ever allows: sample at most "
                f"{int(2 * limit.error_buffer)}, or make the buffer with a larger error_buffer"
            )
        if isinstance(sampler, Prioritized):
            self._opener.require_priorities(ring)
        if isinstance(sampler, Fifo | Lifo) and ring.stripes > 1:
            raise ConfigurationError(f"{kind} needs one order of all rows, which {ring.stripes} stripes do not have")
        if isinstance(sampler, Fifo) and ring.options.frozen:
            raise ConfigurationError(f"{self._opener.name!r} is a snapshot; {kind} takes rows out of a buffer")
        if isinstance(sampler, Slices):
            self._opener.require_trajectories(ring, kind)
        if n_step is not None:
            self._opener.require_trajectories(ring, "NStep", "reward")
            if isinstance(sampler, Fifo | Lifo | Slices):
                raise ConfigurationError(f"n-step returns go with Uniform and Prioritized, not with {kind}")

    def ask(self, ring: Ring, stripe: int, arguments: list[Any], deadline: float, *, counted: bool) -> list[bytes]:
        """What the script answers, waiting for the rate limit.

        A counted call whose answer was lost keeps its number when it is made again, so that it counts once.
        """
        keys = [ring.state_key(stripe), ring.client_key(stripe, self._client)]
        if counted and self._unanswered != (stripe, arguments):
            self._calls += 1
        self._unanswered = (stripe, arguments) if counted else None
        number = str(self._calls) if counted else ""
        full = [ring.prefix(stripe), *arguments, number, ANSWER_SECONDS]
        doing, pause = f"sampling {self._opener.name!r}", self._caller.first_pause()
        while True:
            answer: list[bytes] = self._caller.run("replay_pick", keys, full, doing, deadline)
            if answer[0] != b"WAIT":
                self._unanswered = None
                break
            if time.monotonic() >= deadline:
                raise RateLimitError(
                    f"buffer {self._opener.name!r} gave no {arguments[1]} samples in time: {int(answer[1])} rows were "
                    f"written and {int(answer[2])} samples drawn, and {ring.options.rate_limit} holds samplers back "
                    f"until more are written"
                )
            pause = self._caller.pause(pause, deadline)
        if answer[0] == b"GONE":
            raise self._opener.gone(ring)
        if answer[0] == b"OK":
            self._opener.observe(ring, stripe, int(answer[1]), int(answer[2]))
        return answer

    @property
    def name(self) -> str:
        """The buffer's name."""
        return self._opener.name

    def states(self, ring: Ring, deadline: float) -> list[tuple[int, int]]:
        """Cursor and incarnation of each stripe.

        Raises:
            DataLossError: the buffer is gone, or rows of it are.
        """
        found, asked = [], time.monotonic()
        command = partial(_read_states, keys=[ring.state_key(stripe) for stripe in range(ring.stripes)])
        answers = self._caller.retry(f"looking at {self._opener.name!r}", command, deadline)
        for stripe, (cursor, incarnation) in enumerate(answers):
            if cursor is None:
                raise self._opener.gone(ring)
            self._opener.observe(ring, stripe, int(cursor), int(incarnation))
            found.append((int(cursor), int(incarnation)))
        self._heard = ring.manifest.id, asked, found
        return found

    def known_states(self, ring: Ring) -> list[tuple[int, int]]:
        """As `states`, of late; nobody is asked. Empty where it is too long ago, or this process has written since."""
        name, when, states = self._heard
        if name != ring.manifest.id or time.monotonic() - when > self.cursor_seconds:
            return []
        written = [self._opener.written(stripe) for stripe in range(ring.stripes)]
        return states if written == [cursor for cursor, _ in states] else []

    def weights(self, key: tuple[str, str], stripes: int) -> Doubles:
        """What is known of the stripes' total weights, by how they are drawn from; kept from answer to answer."""
        if key not in self._weights or len(self._weights[key]) != stripes:
            self._weights[key] = np.full(stripes, np.nan)
        return self._weights[key]


def _read_states(client: redis.Redis, *, keys: list[bytes]) -> list[Any]:
    names = ["cursor", "incarnation"]
    if len(keys) == 1:
        return [client.hmget(keys[0], names)]
    with client.pipeline(transaction=False) as pipeline:
        for key in keys:
            pipeline.hmget(key, names)
        return list(pipeline.execute())


class _Call:
    """One choice of rows."""

    def __init__(
        self,
        picker: Picker,
        ring: Ring,
        count: int,
        sampler: Sampler,
        n_step: NStep | None,
        random: np.random.Generator,
        deadline: float,
        *,
        counted: bool,
    ) -> None:
        self._picker, self._ring, self._count = picker, ring, count
        self._sampler, self._n_step, self._random = sampler, n_step, random
        self._deadline, self._counted = deadline, counted
        # Only what changes something on the server has to be told apart from its repetition.
        self._counts = counted and (ring.options.rate_limit is not None or isinstance(sampler, Fifo))

    def _plain(self, how: str) -> list[bytes]:
        arguments = [how, self._count, b"", 0, "", 1, 0]
        counted = self._counts or how == "fifo"
        return self._picker.ask(self._ring, 0, arguments, self._deadline, counted=counted)

    def _picks(self, stripes: Numbers, numbers: Numbers, incarnations: Numbers, rows: int) -> Picks:
        return Picks(
            ring=self._ring,
            stripes=stripes,
            numbers=numbers.reshape(len(stripes), -1),
            incarnations=incarnations,
            probability=None,
            rows=rows,
            links=None,
        )

    def in_order(self) -> Picks:
        """The oldest that nobody got, or the newest."""
        how = "fifo" if isinstance(self._sampler, Fifo) else "none"
        answer = self._plain(how)
        if answer[0] == b"FEW":
            raise self._few(int(answer[1]))
        cursor, incarnation = int(answer[1]), int(answer[2])
        size = min(cursor, self._ring.stripe_capacity)
        if how == "fifo":
            first = int(float(answer[3]))
            numbers = np.arange(first, first + self._count)
        elif size < self._count:
            raise self._few(size)
        else:
            numbers = np.arange(cursor, cursor - self._count, -1)
        same = np.zeros(self._count, dtype=np.int64)
        return self._picks(same, numbers, same + incarnation, size)

    def uniform(self) -> Picks:
        """Each row equally likely: chosen here, as the cursors are all it takes."""
        capacity = self._ring.stripe_capacity
        states = [] if self._counts else self._picker.known_states(self._ring)
        if sum(min(cursor, capacity) for cursor, _ in states) < self._count:
            states = self._states()
        cursors = np.array([cursor for cursor, _ in states], dtype=np.int64)
        incarnations = np.array([incarnation for _, incarnation in states], dtype=np.int64)
        sizes = np.minimum(cursors, capacity)
        ends = np.cumsum(sizes)
        size = int(ends[-1])
        sampler = self._sampler
        once = isinstance(sampler, Uniform) and not sampler.replacement
        if size < (self._count if once else 1):
            raise self._few(size)
        if once:
            chosen = self._random.choice(size, self._count, replace=False).astype(np.int64)
        else:
            chosen = self._random.integers(0, size, self._count)
        stripes = np.searchsorted(ends, chosen, side="right")
        numbers = cursors[stripes] - (chosen - (ends - sizes)[stripes])
        return self._picks(stripes, numbers, incarnations[stripes], size)

    def _states(self) -> list[tuple[int, int]]:
        if not self._counts:
            return self._picker.states(self._ring, self._deadline)
        answer = self._plain("none")
        if answer[0] == b"FEW":
            raise self._few(0)
        return [(int(answer[1]), int(answer[2]))]

    def drawn(self) -> Picks:
        """By priority, or where rows need successors: chosen on the server."""
        ring, how = self._ring, "priority" if isinstance(self._sampler, Prioritized) else "uniform"
        known = self._picker.weights((ring.manifest.id, how), ring.stripes)
        if ring.stripes == 1:
            known[:] = 1.0
        for stripe in np.flatnonzero(np.isnan(known)).tolist():
            answer = self._draw(stripe, how, 0)
            known[stripe] = float(answer[3]) if answer[0] == b"OK" else 0.0
        parts, left = [], self._count
        while left:
            if not known.sum() > 0:
                known[:] = np.nan
                raise self._few(0)
            share = known / known.sum()
            for stripe, number in enumerate(self._random.multinomial(left, share).tolist()):
                if number:
                    answer = self._draw(stripe, how, number)
                    if answer[0] != b"OK":
                        if ring.stripes == 1:
                            raise self._refusal(answer)
                        known[stripe] = 0.0
                        continue
                    known[stripe] = 1.0 if ring.stripes == 1 else float(answer[3])
                    parts.append(self._parse(answer, stripe, number, float(share[stripe])))
                    left -= number
        if ring.stripes > 1:
            known[known == 0.0] = np.nan
        return _joined(parts)

    def _draw(self, stripe: int, how: str, count: int) -> list[bytes]:
        step, slices = self._n_step, isinstance(self._sampler, Slices)
        hops = self._sampler.length - 1 if isinstance(self._sampler, Slices) else 0 if step is None else step.steps
        once = not getattr(self._sampler, "replacement", True)
        uniforms = np.sort(self._random.random(max(count, 1)))
        if how == "uniform":
            self._random.shuffle(uniforms)
        gamma = 1.0 if step is None else step.gamma
        kind = "slice" if slices else "n_step"
        arguments = [how, count, uniforms.tobytes(), hops, kind, repr(gamma), int(once)]
        counted = self._counts and count > 0
        return self._picker.ask(self._ring, stripe, arguments, self._deadline, counted=counted)

    def _parse(self, answer: list[bytes], stripe: int, count: int, share: float) -> Picks:
        choices = np.frombuffer(answer[4], dtype="<f8").reshape(count, 2)
        numbers = choices[:, :1].astype(np.int64)
        links = None
        if isinstance(self._sampler, Slices):
            numbers = np.frombuffer(answer[5], dtype="<f8").reshape(count, -1).astype(np.int64)
        elif self._n_step is not None:
            found = np.frombuffer(answer[5], dtype="<f8").reshape(count, 4)
            numbers = np.concatenate([numbers, found[:, :1].astype(np.int64)], axis=1)
            links = found[:, 1:]
        probability = None
        if isinstance(self._sampler, Prioritized):
            probability = share * choices[:, 1] / float(answer[3])
        return Picks(
            ring=self._ring,
            stripes=np.full(count, stripe),
            numbers=numbers,
            incarnations=np.full(count, int(answer[2])),
            probability=probability,
            rows=min(int(answer[1]), self._ring.stripe_capacity) * self._ring.stripes,
            links=links,
        )

    def _refusal(self, answer: list[bytes]) -> NotEnoughRowsError:
        if answer[0] == b"FEW":
            return self._few(int(answer[1]))
        return NotEnoughRowsError(
            f"hardly any row of buffer {self._picker.name!r} qualifies for {self._what}: none of 64 draws a row did"
        )

    def _few(self, found: int) -> NotEnoughRowsError:
        more = " that nobody took yet" if isinstance(self._sampler, Fifo) else ""
        return NotEnoughRowsError(
            f"buffer {self._picker.name!r} has {found} rows{more} for {self._what}, {self._count} are needed; write "
            f"more first, or have samplers wait with rate_limit=RateLimit(min_size=...)"
        )

    @property
    def _what(self) -> str:
        step = "" if self._n_step is None else f" with {self._n_step}"
        return f"{self._sampler}{step}"


def _joined(parts: list[Picks]) -> Picks:
    if len(parts) == 1:
        return parts[0]

    def of(name: str) -> Any:
        values = [getattr(part, name) for part in parts]
        return None if values[0] is None else np.concatenate(values)

    names = ("stripes", "numbers", "incarnations", "probability", "links")
    return replace(parts[0], **{name: of(name) for name in names})
