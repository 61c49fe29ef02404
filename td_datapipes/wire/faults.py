"""What redis-py and the server call an error -> what this package calls it, and what to do about it."""

from __future__ import annotations

import redis.exceptions as rex

from td_datapipes.errors import (
    AuthenticationError,
    ConfigurationError,
    ProtocolError,
    ServerError,
    ServerFullError,
    ServerNotReadyError,
    ServerTimeoutError,
    ServerUnavailableError,
    TDDatapipesError,
    ValueTooLargeError,
)
from td_datapipes.slabs import Slab
from td_datapipes.wire.url import PASSWORD_VARIABLE

__all__ = ["REDIS_ERRORS", "RangeFault", "error_from_text", "translate"]


REDIS_ERRORS = (rex.RedisError, rex.RedisClusterException, OSError, TypeError, ValueError, OverflowError)
"""What redis-py raises where a server, a connection or an option is not as it should be."""

_REFUSALS = (
    "invalid password",
    "without any password",
    "ACL failure in script",
    "executing the script can't run this command",
)
"""Refusals that do not begin with a code of their own."""
_NOT_READY = {
    "LOADING": "it is loading its data",
    "BUSY": "it is running a script that takes long",
    "MASTERDOWN": "it is a replica that has lost its master",
    "CLUSTERDOWN": "the cluster has lost nodes, or some slots are not served",
    "TRYAGAIN": "a slot is moving, and its keys are with two nodes",
    "MOVED": "the slot is with another node",
    "ASK": "the key is moving to another node",
    "READONLY": "it is a replica and takes no writes",
    "NOREPLICAS": "it has too few replicas to take writes (min-replicas-to-write)",
}
"""What passes by itself, or once another server has taken over, by the error's first word."""
_NOT_READY_KINDS: tuple[tuple[type[Exception], str], ...] = (
    (rex.TryAgainError, "TRYAGAIN"),
    (rex.ClusterDownError, "CLUSTERDOWN"),
    (rex.MasterDownError, "MASTERDOWN"),
    (rex.MovedError, "MOVED"),
    (rex.AskError, "ASK"),
    (rex.ReadOnlyError, "READONLY"),
    (rex.SlotNotCoveredError, "CLUSTERDOWN"),
)


class RangeFault(Exception):
    """One range of a read did not come back as asked; the connection has been dropped.

    Attributes:
        slab: number of the slab in its plan.
        index: number of the range in the slab.
        expected_bytes: bytes asked for.
        received_bytes: bytes that came; None where an error came instead.
        text: the server's error; empty where a value came.
        part: the slab as it was asked for: on a cluster, the part of the plan's slab that one node has.
    """

    def __init__(
        self,
        slab: int,
        index: int,
        expected_bytes: int,
        received_bytes: int | None,
        text: str = "",
        part: Slab | None = None,
    ) -> None:
        super().__init__(slab, index, expected_bytes, received_bytes, text)
        self.part = part
        self.slab, self.index = slab, index
        self.expected_bytes, self.received_bytes, self.text = expected_bytes, received_bytes, text

    @property
    def passes(self) -> bool:
        """Whether the server says that it cannot serve this now, but may soon, or that another one does."""
        return self.text.split(" ", 1)[0] in _NOT_READY


def translate(error: Exception, address: str, doing: str) -> TDDatapipesError:
    """The named error for what redis-py raised.

    Args:
        error: what was raised.
        address: the server, without credentials.
        doing: what was being done, as in "while reading the manifest".
    """
    text = str(error)
    if isinstance(error, rex.AuthenticationError | rex.AuthorizationError | rex.NoPermissionError):
        # redis-py takes the code off this one.
        code = "NOPERM " if isinstance(error, rex.NoPermissionError) and "NOPERM" not in text else ""
        return _refused(code + text, address, doing)
    if isinstance(error, rex.TimeoutError | TimeoutError):
        return ServerTimeoutError(
            f"{address} did not answer in time while {doing}; it may be stopped, busy or far away "
            f"(raise it with ?socket_timeout=SECONDS in the URL)"
        )
    if isinstance(error, rex.BusyLoadingError):
        return _not_ready("LOADING " + text, address, doing)
    for kind, code in _NOT_READY_KINDS:
        if isinstance(error, kind):
            return _not_ready(text if text.startswith(code) else f"{code} {text}", address, doing)
    if isinstance(error, rex.ClusterError) and "TTL exhausted" in text:  # redirected again and again
        return _not_ready("TRYAGAIN " + text, address, doing)
    # redis-py's cluster client stumbles over itself (AttributeError) where it has lost all nodes it knew.
    if isinstance(error, rex.RedisClusterException | AttributeError):
        return ServerUnavailableError(f"the cluster of {address} cannot be reached while {doing}: {text}")
    if isinstance(error, rex.InvalidResponse | ValueError | OverflowError):  # a length that is no number, or too large
        return ProtocolError(f"{address} sent no Redis reply while {doing}: {text[:200]}")
    if isinstance(error, rex.ConnectionError | OSError):
        if "CERTIFICATE_VERIFY_FAILED" in text or "SSL" in text:
            return AuthenticationError(
                f"TLS with {address} failed while {doing}: {text}; give the authority with ?ssl_ca_certs=FILE"
            )
        # One that misses a client's certificate just hangs up, and what is noticed of that depends on the moment.
        certificate = ", and does it ask for a certificate (?ssl_certfile=FILE&ssl_keyfile=FILE)"
        sealed = address.startswith("rediss:")
        return ServerUnavailableError(
            f"no server answers at {address} while {doing}: {text}; is it running there{certificate if sealed else ''}?"
        )
    if isinstance(error, rex.ResponseError):
        return error_from_text(text, address, doing)
    if isinstance(error, TypeError):
        return ConfigurationError(f"an option of the URL of {address} is not known to redis-py: {text}")
    return ServerError(f"{address} failed while {doing}: {text}")


def error_from_text(text: str, address: str, doing: str) -> TDDatapipesError:
    """The named error for the text of an error reply."""
    code = text.split(" ", 1)[0].lstrip("-")
    if "cannot be used with replica instances" in text:
        return _not_ready(f"READONLY {text}", address, doing)
    if code in _NOT_READY:
        return _not_ready(text, address, doing)
    if code in ("NOAUTH", "WRONGPASS", "NOPERM") or any(part in text for part in _REFUSALS):
        return _refused(text, address, doing)
    if code == "OOM" or "maxmemory" in text:
        return ServerFullError(
            f"{address} is full (maxmemory) while {doing}: {text}; raise maxmemory or remove data sets. "
            f"Nothing was published, and what was there before is still readable"
        )
    if "string exceeds maximum allowed size" in text or "invalid bulk length" in text:
        return ValueTooLargeError(
            f"{address} refuses a string of that size while {doing} (proto-max-bulk-len): {text}; "
            f"write with a smaller chunk_bytes or raise the setting"
        )
    return ServerError(f"{address} answered with an error while {doing}: {text}")


def _not_ready(text: str, address: str, doing: str) -> ServerNotReadyError:
    code = text.split(" ", 1)[0]
    return ServerNotReadyError(f"{address} could not serve this in time while {doing}: {_NOT_READY[code]} ({text})")


def _refused(text: str, address: str, doing: str) -> AuthenticationError:
    return AuthenticationError(
        f"{address} refused access while {doing}: {text}; give user and password in the URL or the password in "
        f"{PASSWORD_VARIABLE}, and check the user's permissions"
    )
