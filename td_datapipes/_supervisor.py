"""The process that owns an embedded server: it starts the server, and ends it when its last user is gone.

Run as a file, isolated and without site-packages (``python -I -S _supervisor.py folder binary [pid]``), so it imports
the standard library only and stays small. `td_datapipes.server` starts it and shares the names of the files below.

Four locks (`flock`, so the kernel releases them however a process ends) carry the whole protocol:

- ``users.lock``: shared by every process that uses the server; the supervisor waits for it exclusively, and holds it
  while it ends the server. So nobody can be handed a server that is about to end.
- ``start.lock``: held by the one user that looks for a server and starts it.
- ``supervisor.lock``: held by the supervisor while it lives.
- ``server.lock``: inherited by the server, so it is held while the server or a child it forked lives; two servers can
  never write to one folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, cast

__all__ = ["LOG_FILE", "SERVER_LOCK", "START_LOCK", "STATE_FILE", "SUPERVISOR_LOCK", "USERS_LOCK", "is_free", "main"]

USERS_LOCK = "users.lock"
START_LOCK = "start.lock"
SUPERVISOR_LOCK = "supervisor.lock"
SERVER_LOCK = "server.lock"
STATE_FILE = "server.json"
LOG_FILE = "server.log"
SOCKET_FILE = "server.sock"

LINGER_SECONDS = 0.5
"""How long the server waits for a next user: one script after another does not load the data each time."""
MAX_LOG_BYTES = 1 << 20
"""Two log files of at most this size are kept."""
MAX_SOCKET_PATH_BYTES = 100
"""The kernel takes 107."""

CONFIGURATION = {
    "bind": "127.0.0.1",
    "unixsocketperm": "700",
    "protected-mode": "yes",
    "enable-debug-command": "no",
    "maxmemory-policy": "noeviction",
    # Appending costs each byte written once; a snapshot for each publish would write the whole server anew.
    "save": "",
    "appendonly": "yes",
    "appendfsync": "everysec",
    "aof-load-truncated": "yes",
    "auto-aof-rewrite-percentage": "100",
    "auto-aof-rewrite-min-size": "256mb",
    # Rows of floats and pixels hardly shrink; trying costs more than writing them.
    "rdbcompression": "no",
}


def main() -> None:
    """Start or adopt the server, and return when it has ended."""
    folder, binary, *adopt = sys.argv[1:]
    # From here on files are named relative to the folder itself, so it may be renamed, or deleted and made anew.
    os.chdir(folder)
    if _try_lock(SUPERVISOR_LOCK) is None:
        sys.exit("another supervisor serves this folder")
    if os.fork():
        os._exit(0)  # Who started this waits for this exit; the child goes on with the lock, as nobody's child.
    log = _BoundedLog(Path(LOG_FILE))
    try:
        server = _Adopted(int(adopt[0])) if adopt else _Started(folder, binary, log)
    except Exception as error:
        log.write(f"supervisor {os.getpid()}: {error}\n".encode())
        sys.exit(1)
    log.write(f"supervisor {os.getpid()}: serving with pid {server.pid}\n".encode())
    threading.Thread(target=_end_when_unused, args=(server,), daemon=True).start()
    server.wait()
    log.write(f"supervisor {os.getpid()}: the server has ended\n".encode())
    _clean_up()


def is_free(path: str | Path) -> bool:
    """Whether nobody holds the lock; the file is made where it is missing."""
    descriptor = _try_lock(path)
    if descriptor is None:
        return False
    os.close(descriptor)
    return True


def _try_lock(path: str | Path) -> int | None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class _Adopted:
    """A server whose supervisor was killed. The pid is believed only if that process holds this folder's lock."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._handle = os.pidfd_open(pid)
        if not _has_open(pid, os.stat(SERVER_LOCK)):
            raise RuntimeError(f"process {pid} is not the server of this folder")

    def terminate(self) -> None:
        """Ask it to write what is left and end. Nothing happens where it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGTERM)

    def wait(self) -> None:
        """Return when it has ended."""
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        poll.poll()


class _Started:
    """A server started here, with its output copied to the log."""

    def __init__(self, folder: str, binary: str, log: _BoundedLog) -> None:
        lock = _try_lock(SERVER_LOCK)
        if lock is None:
            raise RuntimeError("a server of this folder is still running")
        # Anyone on this machine can dial a port: the password is for who may read this folder's state.
        path, port, password = _socket_path(folder), _free_port(), os.urandom(32).hex()
        settings = {"unixsocket": path, "port": str(port), **CONFIGURATION}
        command = [binary, *(text for option, value in settings.items() for text in (f"--{option}", value)), "-"]
        log.write(f"supervisor {os.getpid()}: starting {binary}\n".encode())
        # Before the server, so that failing to write it leaves no server behind.
        _write_state({"socket": path, "port": port, "password": password, "supervisor_pid": os.getpid()})
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pass_fds=(lock,)
        )
        # Not as an argument: everybody may read those.
        with contextlib.suppress(BrokenPipeError), cast(IO[bytes], self._process.stdin) as configuration:
            configuration.write(f"requirepass {password}\n".encode())
        # The server has its own descriptor of the same lock: it now lives and dies with the server alone.
        os.close(lock)
        self.pid = self._process.pid
        self._copier = threading.Thread(target=log.copy, args=(self._process.stdout,), daemon=True)
        self._copier.start()

    def terminate(self) -> None:
        """Ask it to write what is left and end. Nothing happens where it has ended."""
        self._process.terminate()

    def wait(self) -> None:
        """Return when it has ended and its last words are in the log."""
        self._process.wait()
        # A child it forked to compact its file may hold the other end for longer.
        self._copier.join(1.0)


def _end_when_unused(server: _Adopted | _Started) -> None:
    users = os.open(USERS_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    while True:
        fcntl.flock(users, fcntl.LOCK_EX)  # Blocks until the last user is gone.
        fcntl.flock(users, fcntl.LOCK_UN)
        time.sleep(LINGER_SECONDS)
        try:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        # Held until this process ends: a new user waits for that, then starts a server of its own.
        server.terminate()
        return


class _BoundedLog:
    """Appends to a file; when that is full it becomes ``.old`` and a new one begins. Safe for threads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()

    def write(self, text: bytes) -> None:
        """Append; a full disk loses lines, but never stops the server or its supervisor."""
        with self._lock, contextlib.suppress(OSError):
            if self._path.exists() and self._path.stat().st_size + len(text) > MAX_LOG_BYTES:
                self._path.replace(f"{self._path}.old")
            with self._path.open("ab") as file:
                file.write(text[-MAX_LOG_BYTES:])

    def copy(self, stream: IO[bytes]) -> None:
        """Write each line until the stream ends."""
        while line := stream.readline(1 << 16):
            self.write(line)


def _socket_path(folder: str) -> str:
    """Relative to the folder where a user can reach it there, else an absolute one in a private folder."""
    if len(os.fsencode(os.path.join(folder, SOCKET_FILE))) <= MAX_SOCKET_PATH_BYTES:
        return SOCKET_FILE
    digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
    for parent in (tempfile.gettempdir(), "/tmp"):
        private = os.path.join(parent, f"td_datapipes-{os.geteuid()}-{digest}")
        if len(os.fsencode(private)) < MAX_SOCKET_PATH_BYTES - len(SOCKET_FILE):
            break
    try:
        os.mkdir(private, 0o700)
    except FileExistsError:
        found = os.lstat(private)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise RuntimeError(f"{private} is needed for the socket, but is not a private folder; remove it") from None
    return os.path.join(private, SOCKET_FILE)


def _free_port() -> int:
    """A port of loopback TCP that nobody listens on; 0, for none, where there is no such network."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
            return int(server.getsockname()[1])
    except OSError:
        return 0


def _write_state(state: dict[str, str | int]) -> None:
    temporary = f"{STATE_FILE}.{os.getpid()}"
    Path(temporary).unlink(missing_ok=True)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(state, file)
    os.replace(temporary, STATE_FILE)


def _clean_up() -> None:
    try:
        path = Path(json.loads(Path(STATE_FILE).read_text())["socket"])
        path.unlink(missing_ok=True)
        if path.is_absolute():
            path.parent.rmdir()
    except (OSError, ValueError, LookupError, TypeError):
        pass  # What is left is found stale, and replaced, by the next start.
    Path(STATE_FILE).unlink(missing_ok=True)


def _has_open(pid: int, wanted: os.stat_result) -> bool:
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found = descriptor.stat()
        except OSError:
            continue
        if os.path.samestat(found, wanted):
            return True
    return False


if __name__ == "__main__":
    main()
