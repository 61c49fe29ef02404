"""Scripts run to a deadline: repeated where the connection breaks, since every one of them may be repeated."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import redis

from td_datapipes.catalog import connect
from td_datapipes.errors import (
    AuthenticationError,
    ConfigurationError,
    ServerError,
    ServerTimeoutError,
    ServerUnavailableError,
)
from td_datapipes.wire.faults import translate
from td_datapipes.wire.scripts import load_script
from td_datapipes.wire.server import Server
from td_datapipes.wire.url import ServerURL

__all__ = ["Call", "Caller"]

T = TypeVar("T")
ATTEMPT_SECONDS = 10.0
STAGED_SECONDS = 60
"""What was staged and never called for, since its client died, is gone after so long."""
_FEW = 5
_REACHING = frozenset({"replay_extend", "replay_pick", "replay_priorities", "replay_set"})
"""Scripts that reach for keys they do not name."""
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.005, 0.25


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call of a script.

    Attributes:
        keys: that it names.
        arguments: that it gets.
        staged: strings set just before it, for the script to make use of and remove; it names their keys too.
    """

    keys: Sequence[bytes]
    arguments: Sequence[Any]
    staged: Sequence[tuple[bytes, memoryview]] = ()


class Caller:
    """Calls one server until it answers or the deadline has passed. Safe for threads; a forked child dials anew.

    Args:
        url: which server, and the buffer's name.
        timeout_seconds: how long an operation may take unless it says otherwise.

    Attributes:
        server: the server; one attempt waits for the URL's ``socket_timeout``, else at most 10 s.
        timeout_seconds: as given.
    """

    def __init__(self, url: str | ServerURL, timeout_seconds: float) -> None:
        if not timeout_seconds > 0:
            raise ConfigurationError(f"timeout_seconds must be above 0, got {timeout_seconds}")
        parsed = url if isinstance(url, ServerURL) else ServerURL.parse(url)
        wanted = float(parsed.options.get("socket_timeout") or ATTEMPT_SECONDS)
        options = {**parsed.options, "socket_timeout": min(wanted, timeout_seconds)}
        self.server: Server = connect(replace(parsed, options=options))
        self.timeout_seconds = timeout_seconds

    def deadline(self, timeout_seconds: float | None) -> float:
        """When an operation that begins now has to be over, on `time.monotonic`'s clock."""
        return time.monotonic() + (self.timeout_seconds if timeout_seconds is None else timeout_seconds)

    def run(
        self,
        name: str,
        keys: Sequence[bytes],
        arguments: Sequence[Any],
        doing: str,
        deadline: float,
        *,
        staged: Sequence[tuple[bytes, memoryview]] = (),
    ) -> Any:
        """What a script answers. It may be carried out again where the answer to the first call was lost.

        Args:
            name: of the script.
            keys: that it names.
            arguments: that it gets.
            doing: for messages.
            deadline: on `time.monotonic`'s clock.
            staged: see `Call`.

        Raises:
            ServerTimeoutError, ServerUnavailableError: no answer by the deadline.
            ServerFullError, AuthenticationError, ServerError: the server refused; at once.
        """
        script, keys = load_script(name), _declared(name, keys)

        def command(client: redis.Redis) -> Any:
            if staged:
                pipeline = client.pipeline(transaction=False)
                for key, value in staged:
                    pipeline.set(key, value, ex=STAGED_SECONDS)
                pipeline.execute()
            try:
                answer = client.evalsha(script.sha, len(keys), *keys, *arguments)
            except redis.exceptions.NoScriptError:
                answer = client.eval(script.source, len(keys), *keys, *arguments)
            if staged and answer[0] == b"UNSTAGED":
                raise ServerUnavailableError(
                    f"{self.server.address}: {doing}: what was on its way in is gone: another master took over, or it "
                    f"was evicted (maxmemory)"
                )
            return answer

        return self.retry(doing, command, deadline)

    def run_many(self, name: str, calls: Sequence[Call], doing: str, deadline: float) -> list[Any]:
        """What a script answers to several calls, sent together; an error in the place of a call that was refused.

        Args:
            name: of the script.
            calls: one or more.
            doing: for messages.
            deadline: on `time.monotonic`'s clock.

        Raises:
            ServerTimeoutError, ServerUnavailableError: no answers by the deadline.
        """
        script = load_script(name)

        def command(client: redis.Redis) -> list[Any]:
            pipeline, which = client.pipeline(transaction=False), []
            for call in calls:
                for key, value in call.staged:
                    pipeline.set(key, value, ex=STAGED_SECONDS)
                keys = _declared(name, call.keys)
                pipeline.evalsha(script.sha, len(keys), *keys, *call.arguments)
                which.append(len(pipeline) - 1)
            answers: list[Any] = pipeline.execute(raise_on_error=False)
            if any(isinstance(answers[i], redis.exceptions.NoScriptError) for i in which):
                client.script_load(script.source)
                return command(client)
            return [_first_error(answers[i - len(call.staged) : i + 1]) for i, call in zip(which, calls, strict=True)]

        if self.until(deadline, self.server.cluster) is not None:
            return self._one_by_one(name, calls, doing, deadline)
        if len(calls) == 1 and not calls[0].staged:
            return [self.run(name, calls[0].keys, calls[0].arguments, doing, deadline)]
        answers = self.retry(doing, command, deadline)
        return [
            translate(answer, self.server.address, doing) if isinstance(answer, Exception) else answer
            for answer in answers
        ]

    def _one_by_one(self, name: str, calls: Sequence[Call], doing: str, deadline: float) -> list[Any]:
        """As `run_many`, where scripts cannot be sent together: redis-py refuses to on a cluster."""
        answers: list[Any] = []
        for call in calls:
            try:
                answers.append(self.run(name, call.keys, call.arguments, doing, deadline, staged=call.staged))
            except (ServerError, AuthenticationError) as error:
                return [*answers, *[error] * (len(calls) - len(answers))]
        return answers

    def retry(self, doing: str, command: Callable[[redis.Redis], T], deadline: float) -> T:
        """Run commands that may be repeated. Errors as `run`."""
        return self.until(deadline, lambda: self.server.call(doing, command))

    def briefly(self, attempt: Callable[[], T]) -> T:
        """Do something that may be repeated, a few times where the connection breaks: whoever opens a buffer at a
        wrong address should hear of it at once."""
        pause = _FIRST_PAUSE_SECONDS
        for _ in range(_FEW - 1):
            try:
                return attempt()
            except ServerUnavailableError:
                pause = self.pause(pause, time.monotonic() + pause)
        return attempt()

    def until(self, deadline: float, attempt: Callable[[], T]) -> T:
        """Do something that may be repeated, until the server answers or the deadline has passed."""
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                return attempt()
            except (ServerTimeoutError, ServerUnavailableError):
                if time.monotonic() + self.server.timeout_seconds > deadline + pause:
                    raise
            pause = self.pause(pause, deadline)

    def pause(self, seconds: float, deadline: float) -> float:
        """Sleep about so long, never past the deadline.

        Returns:
            How long to sleep the next time.
        """
        time.sleep(max(0.0, min(seconds * random.uniform(0.5, 1.0), deadline - time.monotonic())))
        return min(2 * seconds, _LONGEST_PAUSE_SECONDS)

    def first_pause(self) -> float:
        """How long to sleep the first time."""
        return _FIRST_PAUSE_SECONDS


def _first_error(answers: Sequence[Any]) -> Any:
    """What a call was answered, or why its strings could not be staged."""
    return next((answer for answer in answers if isinstance(answer, Exception)), answers[-1])


def _declared(name: str, keys: Sequence[bytes]) -> Sequence[bytes]:
    """The keys that a call names.

    Most scripts reach for more keys of a stripe than they name. While its slot moves to another master of a cluster,
    those may be with the other one: a script would fail in its middle, or take them for missing. A server that is asked
    for several keys one of which is not there answers ``TRYAGAIN`` all that time, so one that never is goes along.
    """
    if name not in _REACHING:
        return keys
    return [*keys, keys[0][: keys[0].index(b"}:") + 2] + b"never"]
