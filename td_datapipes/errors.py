"""Every error a user can meet has a name here and says what to do.

Each class can be built from one message alone, because ``DataLoader`` rebuilds a worker's exception that way.
None of them ever carries a password: messages name servers by host, port and database only.
"""

from __future__ import annotations

__all__ = [
    "AppendConflictError",
    "AuthenticationError",
    "ChecksumError",
    "ConfigurationError",
    "DataLossError",
    "DatasetChangedError",
    "DatasetExistsError",
    "DatasetNotFoundError",
    "DestinationError",
    "EmbeddedServerError",
    "FieldNotFoundError",
    "InterruptedWriteError",
    "NotEnoughRowsError",
    "PeerError",
    "PeerTimeoutError",
    "PickledValueError",
    "ProtocolError",
    "RateLimitError",
    "RemoteOperationError",
    "RowIndexError",
    "SchemaError",
    "ServerError",
    "ServerFullError",
    "ServerNotReadyError",
    "ServerTimeoutError",
    "ServerUnavailableError",
    "SourceError",
    "StateError",
    "TDDatapipesError",
    "URLError",
    "ValueTooLargeError",
]


class TDDatapipesError(Exception):
    """The root: ``except TDDatapipesError`` catches whatever this package raises on its own account."""


class ConfigurationError(TDDatapipesError, ValueError):
    """An argument has a value that cannot work; the message gives the value and the range that can."""


class URLError(ConfigurationError):
    """A URL that names no server or no data set."""


class ServerUnavailableError(TDDatapipesError, ConnectionError):
    """Nobody answers at the address, or the connection broke and could not be made again."""


class ServerNotReadyError(ServerUnavailableError):
    """The server is there but could not serve this before the deadline: it loads its data, runs a long script, moves a
    slot, or waits for a replica to take over."""


class ServerTimeoutError(TDDatapipesError, TimeoutError):
    """The server took longer than the deadline; the message says what was waited for."""


class AuthenticationError(TDDatapipesError, PermissionError):
    """The server refuses the user, the password, the certificate, or a command the user may not run."""


class ServerError(TDDatapipesError, RuntimeError):
    """The server answered with an error that has no name of its own here; its text is in the message."""


class ServerFullError(ServerError):
    """The server is at maxmemory and refuses to write; what was there before is still readable."""


class ValueTooLargeError(ServerError):
    """A string is longer than the server takes (``proto-max-bulk-len``)."""


class ProtocolError(TDDatapipesError, RuntimeError):
    """The peer sent bytes that are no reply to what was asked; the connection has been dropped."""


class PeerError(TDDatapipesError, RuntimeError):
    """Another rank failed or stopped, and the message says which and why."""


class PeerTimeoutError(TDDatapipesError, TimeoutError):
    """Another rank did not take part before the deadline, or is gone; the message says in what."""


class RemoteOperationError(TDDatapipesError, NotImplementedError):
    """What a TensorDict in memory can do and one on a server cannot; ``to_local()`` gives one in memory."""


class DatasetNotFoundError(TDDatapipesError, LookupError):
    """No data set of that name; the message lists the names that exist."""


class InterruptedWriteError(DatasetNotFoundError):
    """The name was being written, but the writer never published it."""


class NotEnoughRowsError(TDDatapipesError, LookupError):
    """A replay buffer holds fewer rows than a sample needs; the message says how many and what would qualify."""


class RateLimitError(TDDatapipesError, TimeoutError):
    """A replay buffer's rate limit held a writer or a sampler back past its deadline; the message gives both counts."""


class DatasetExistsError(TDDatapipesError, FileExistsError):
    """The name is taken; pass ``overwrite=True`` to publish a new generation in its place."""


class DestinationError(TDDatapipesError, OSError):
    """A file or folder that rows should be written to is there already, or cannot be written; it is named."""


class AppendConflictError(TDDatapipesError, RuntimeError):
    """Another writer appends to the data set, or has taken over from this one; nothing of this write was published."""


class DatasetChangedError(TDDatapipesError, RuntimeError):
    """What was opened is no longer what the name stands for: it was written anew, or its schema changed."""


class DataLossError(TDDatapipesError, RuntimeError):
    """Bytes of a published data set are missing or short on the server: evicted, deleted or overwritten."""


class ChecksumError(DataLossError):
    """A chunk is there in full length, but its bytes are not those that were written."""


class FieldNotFoundError(TDDatapipesError, LookupError):
    """The data set has no such field; the message lists those it has."""


class RowIndexError(TDDatapipesError, IndexError):
    """A row outside ``[0, rows)``, or an index of a kind that does not select rows."""


class PickledValueError(TDDatapipesError, ValueError):
    """A value was stored as a pickle, which is only read with ``allow_pickle=True``: it runs what its writer wants."""


class SchemaError(TDDatapipesError, ValueError):
    """A field the schema cannot hold, or a row that does not fit the schema; the message names the field."""


class SourceError(TDDatapipesError, ValueError):
    """A file, folder or table that rows should come from is missing, damaged or of no known kind; it is named."""


class StateError(TDDatapipesError, ValueError):
    """A saved position that does not fit here; the message names both sides and how to go on."""


class EmbeddedServerError(TDDatapipesError, RuntimeError):
    """The embedded server did not start, or cannot be used from here."""
