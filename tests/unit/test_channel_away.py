"""What comes to a connection while nobody reads it: the peer goes on sending, and who waits is woken all the same."""

from __future__ import annotations

import fcntl
import socket
import struct
import termios
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from td_datapipes.errors import ServerTimeoutError
from td_datapipes.wire.channel import Channel

REPLY_BYTES = 2 << 20


class Reply:
    """An exchange whose reply is some bytes (an `Exchange`)."""

    request = (b"?",)
    part_bytes = 0

    def __init__(self, num_bytes: int) -> None:
        self.memory = bytearray(num_bytes)
        self._got = 0

    def target(self) -> memoryview:
        return memoryview(self.memory)[self._got :]

    def received(self, count: int) -> None:
        self._got += count

    def stalled(self) -> None:
        pass


@pytest.fixture
def peers() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection over loopback TCP."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()) as mine,
        listening.accept()[0] as theirs,
    ):
        yield mine, theirs


def channel_over(sock: socket.socket) -> Channel:
    return Channel(SimpleNamespace(_sock=sock), "peer:1")


def bytes_in(sock: socket.socket) -> int:
    found: int = struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.FIONREAD, bytes(4)))[0]
    return found


def low_water(sock: socket.socket) -> int:
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)


def test_a_peer_sends_on_while_nobody_reads(peers: tuple[socket.socket, socket.socket]) -> None:
    mine, theirs = peers
    channel, reply = channel_over(mine), Reply(REPLY_BYTES)
    channel.submit(reply)
    sender = threading.Thread(target=theirs.sendall, args=(bytes(range(256)) * (REPLY_BYTES // 256),))
    sender.start()
    deadline = time.monotonic() + 10
    # A socket that nobody has read from holds 64 KB at first.
    while bytes_in(mine) < REPLY_BYTES // 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert bytes_in(mine) >= REPLY_BYTES // 2
    channel.advance(time.monotonic() + 10, "testing")
    sender.join()
    assert reply.memory == bytes(range(256)) * (REPLY_BYTES // 256)
    channel.close()


def test_who_waits_is_woken_by_one_byte(peers: tuple[socket.socket, socket.socket]) -> None:
    mine, theirs = peers
    channel, replies = channel_over(mine), [Reply(1), Reply(1), Reply(1)]
    channel.submit(*replies)
    for _ in range(2):
        assert low_water(mine) > 1000  # the reader may be away
        waker = threading.Timer(0.05, theirs.sendall, (b"!",))
        waker.start()
        channel.advance(time.monotonic() + 10, "testing")
        waker.join()
    assert low_water(mine) > 1000
    number, _ = channel.waits_for()
    assert (number, low_water(mine)) == (mine.fileno(), 1)
    began = time.monotonic()
    with pytest.raises(ServerTimeoutError):
        channel.advance(time.monotonic() + 0.1, "testing")
    assert time.monotonic() - began < 5
    theirs.sendall(b"!")
    channel.advance(time.monotonic() + 10, "testing")
    assert low_water(mine) == 1  # nothing is on its way
    channel.close()
