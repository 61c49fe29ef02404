"""What ranks do in the tests of transfers that fail."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from placement_cases import S0, S1, R, raised
from tensordict import NonTensorData, TensorDict
from torch.distributed.device_mesh import DeviceMesh
from transfer_cases import is_in, mesh_of, move, placed, require_placed

from td_datapipes import recv_dtensors, send_dtensors
from td_datapipes.transfer import api, link
from td_datapipes.transfer.carry import Carrier

SENDERS, RECEIVERS = [0, 1], [2, 3]


def mismatch(kind: str) -> str:
    """What each rank raises; afterwards the same ranks move a batch that fits."""
    src, dst = mesh_of(SENDERS), mesh_of([2] if kind in ("counts", "mesh shapes") else RECEIVERS)
    rank = dist.get_rank()
    text = raised(lambda: _send(kind, src, dst) if is_in(src) else _receive(kind, src, dst) if is_in(dst) else None)
    whole = torch.arange(5.0)
    got = move(TensorDict({"x": placed(whole, src, (S0,))}) if is_in(src) else None, src, dst, (R,))
    assert (got is not None) == (rank in dst.mesh.tolist())
    if got is not None:
        require_placed(got["x"], whole, dst, (R,), kind)
    return text


def _send(kind: str, src: DeviceMesh, dst: DeviceMesh) -> None:
    rank = dist.get_rank()
    td = TensorDict({"x": placed(torch.arange(6.0), src, (S0,))})
    if kind == "more keys" or (kind == "senders' keys" and rank == 1):
        td["y"] = placed(torch.arange(4.0), src, (S0,))
    if kind == "senders' shapes" and rank == 1:
        td["x"] = placed(torch.arange(8.0), src, (S0,))
    if kind == "values":
        td["y"] = NonTensorData(f"rank {rank}")
    if kind == "jagged" and rank == 1:
        td["y"] = torch.nested.nested_tensor([torch.zeros(1)], layout=torch.jagged)
    if kind == "object" and rank == 1:
        td["y"] = NonTensorData({1, 2})
    strategy: Any = {"strategies": "optimal", "counts": "redistribute"}.get(kind, "auto")
    send_dtensors(td, dst, strategy=strategy, timeout_seconds=10)


def _receive(kind: str, src: DeviceMesh, dst: DeviceMesh) -> None:
    placements: Any = {"named": {"z": (S0,)}, "dim": (S1,), "mesh shapes": None}.get(kind, (S0,))
    if kind == "placements" and dist.get_rank() == 3:
        placements = (R,)
    like = None
    if kind in ("missing key", "more keys", "shape", "dtype"):
        size, dtype = 7 if kind == "shape" else 6, torch.float64 if kind == "dtype" else torch.float32
        like = TensorDict({"x": placed(torch.zeros(size, dtype=dtype), dst, (S0,))})
        if kind == "missing key":
            like["y"] = placed(torch.zeros(4), dst, (S0,))
        placements = None
    strategy: Any = "materialize" if kind == "strategies" else "auto"
    recv_dtensors(src, dst, placements, like=like, strategy=strategy, timeout_seconds=10)


def refused(kind: str) -> str:
    """Arguments that cannot work, on every rank alone."""
    mesh, rank = mesh_of([0, 1, 2, 3]), dist.get_rank()
    td = TensorDict({"x": torch.zeros(2)})
    if kind == "strategy":
        return raised(lambda: send_dtensors(td, 1, strategy="fast"))  # type: ignore[arg-type]
    if kind == "timeout":
        return raised(lambda: recv_dtensors(1, timeout_seconds=0))
    if kind == "both sides":
        return raised(lambda: recv_dtensors(mesh, mesh))
    if kind == "no mesh":
        return raised(lambda: send_dtensors(td, [rank], placements=(S0,)))
    if kind == "like":
        return raised(lambda: recv_dtensors((rank + 1) % 4, None, (S0,), timeout_seconds=1))
    raise ValueError(kind)


def stay_away() -> str:
    """Rank 2 does not receive."""
    src, dst = mesh_of(SENDERS), mesh_of(RECEIVERS)
    td = TensorDict({"x": placed(torch.arange(6.0), src, (S0,))}) if is_in(src) else None
    if dist.get_rank() == 2:
        return ""
    return raised(lambda: move(td, src, dst, (S0,), timeout_seconds=2))


def sends_garbage() -> str:
    """Rank 3 sends something else under the same tag."""
    if dist.get_rank() == 3:
        dist.send(torch.full((64,), ord("x"), dtype=torch.uint8), 0, tag=link._TAG)
    if dist.get_rank() == 0:
        return raised(lambda: recv_dtensors(3, timeout_seconds=1))
    return ""


def count_differently() -> str:
    """Rank 1 believes that there has been a transfer which rank 0 knows nothing of."""
    rank, td = dist.get_rank(), TensorDict({"x": torch.arange(3)})
    if rank > 1:
        return ""

    def once() -> None:
        if rank == 0:
            send_dtensors(td, 1, timeout_seconds=5)
        else:
            assert recv_dtensors(0, timeout_seconds=5)["x"].tolist() == [0, 1, 2]

    once()
    if rank == 1:
        for session in api._sessions[dist.group.WORLD].values():
            session._number += 1
    return raised(once)


def killed_amid(strategy: str, folder: str) -> None:
    """Rank 1 is killed when all have agreed, before it has posted a byte."""
    src, dst, rank = mesh_of(SENDERS), mesh_of(RECEIVERS), dist.get_rank()
    whole = torch.arange(1 << 20)
    td = TensorDict({"x": placed(whole, src, (S0,))}) if is_in(src) else None

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def go() -> object:
        return move(td, src, dst, (R,), strategy=strategy, timeout_seconds=3)

    if rank == 1:
        with mock.patch.object(Carrier, "carry", die):
            go()
    Path(folder, f"{rank}.json").write_text(json.dumps(raised(go)))


class _Counted:
    """A handle that counts who awaits it."""

    def __init__(self, handle: Any, awaited: list[Any]) -> None:
        self._handle, self._awaited = handle, awaited

    def wait(self, *timeout: Any) -> Any:
        self._awaited.append(self)
        return self._handle.wait(*timeout)


def count_handles(fails: bool) -> tuple[int, int]:
    """A transfer of many messages, during which rank 3 is given up or not; returns handles (made, awaited)."""
    src, dst, rank = mesh_of(SENDERS), mesh_of(RECEIVERS), dist.get_rank()
    whole = torch.arange(1 << 20)
    td = TensorDict({f"f{n}": placed(whole + n, src, (S0,)) for n in range(8)}) if is_in(src) else None
    made: list[Any] = []
    awaited: list[Any] = []

    post = link.Link.post

    def counting(self: Any, operations: Any, deadline: float) -> Any:
        begun = [(one, _Counted(handle, awaited)) for one, handle in post(self, operations, deadline)]
        made.extend(handle for _, handle in begun)
        return begun

    def give_up(*_: object) -> None:
        raise RuntimeError("out of memory")

    with mock.patch.object(link.Link, "post", counting):
        if fails and rank == 3:
            with mock.patch.object(Carrier, "carry", give_up):
                text = raised(lambda: move(td, src, dst, (R,), timeout_seconds=2))
            assert "out of memory" in text
        else:
            text = raised(lambda: move(td, src, dst, (R,), timeout_seconds=2))
            # Rank 2 has all its bytes; those who send to rank 3 as well wait in vain.
            assert bool(text) == (fails and is_in(src))
            if text:
                assert text.startswith("PeerTimeoutError")
                assert "Rank 3 was the first to fail: RuntimeError: out of memory" in text
    return len(made), len({id(handle) for handle in awaited})


def meet_in_a_tree() -> list[int]:
    """What each rank says, as this one heard it, where a rank gathers from two others at most."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with mock.patch.object(link, "_FAN_OUT", 2):
        line = link.Link(dist.group.WORLD, range(size))  # type: ignore[arg-type]
        hello = link.Hello(status=link.Status.START, number=100 + rank)
        heard = line.greet(hello, time.monotonic() + 20, "meeting")
    assert list(heard) == list(range(size))
    return [heard[other].number for other in heard]
