"""A server in between that passes everything on until it is told to tamper with what the server answers."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

__all__ = ["Tamper", "TamperingProxy"]

Tamper = Callable[[bytes], Iterator[bytes]]
"""What becomes of the next bytes of the server: pieces to send; the connection is closed after the last."""


class TamperingProxy:
    """Listens on a port of its own.

    Args:
        port: of the server it stands for.

    Attributes:
        tamper: what it does to the answers of any connection from now on; None passes them on.
    """

    def __init__(self, port: int) -> None:
        self._server_port = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self.tamper: Tamper | None = None
        self._closed = threading.Event()
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._server_port))
            self._open += [client, server]
            for source, target, answers in ((client, server, False), (server, client, True)):
                thread = threading.Thread(target=self._pass_on, args=(source, target, answers))
                self._threads.append(thread)
                thread.start()

    def _pass_on(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                tamper = self.tamper
                if answers and tamper is not None:
                    for piece in tamper(data):
                        if self._closed.is_set() or self.tamper is not tamper:
                            break
                        target.sendall(piece)
                    break
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End all connections."""
        self._closed.set()
        for one in [self._listening, *self._open]:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for one in [self._listening, *self._open]:
            one.close()

    def pause(self, seconds: float) -> None:
        """For a tamper: wait, unless it is over."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._closed.wait(0.01):
            pass

    def __enter__(self) -> TamperingProxy:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
