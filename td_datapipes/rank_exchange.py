"""A few bytes between ranks, under a deadline: nobody waits for a rank that does not come.

The time-out goes into each operation itself. Waiting for an operation with a time-out would leave it running, and the
process could not end before the group's own time-out, half an hour by default.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import AllgatherOptions, BroadcastOptions  # type: ignore[attr-defined]

from td_datapipes.errors import ConfigurationError, PeerTimeoutError

__all__ = ["all_gather", "all_gather_over_mesh", "all_gather_texts", "broadcast", "needs_cpu"]

_LEAST_SECONDS = 0.05


def all_gather(group: dist.ProcessGroup, tensor: torch.Tensor, deadline: float, doing: str) -> torch.Tensor:
    """Every rank's tensor: ``[group size, *shape]``, in the group's own order of ranks.

    Args:
        group: its ranks all call this.
        tensor: contiguous, of a dtype that the group's backend takes (uint8 and int64 are), on a device it takes.
        deadline: on `time.monotonic`'s clock.
        doing: for the message.

    Raises:
        PeerTimeoutError: a rank did not come in time, or is gone.
    """
    found = [torch.empty_like(tensor) for _ in range(group.size())]
    options = AllgatherOptions()
    options.timeout = _remaining(deadline)
    with _naming_the_group(group, doing):
        group.allgather([found], [tensor], options).wait()
    return torch.stack(found)


def all_gather_over_mesh(mesh: DeviceMesh, tensor: torch.Tensor, deadline: float, doing: str) -> torch.Tensor:
    """Every rank's tensor ``[ranks, *shape]`` over all axes of a mesh, one axis after the other.

    It needs no group beyond those the mesh has. The ranks come in no order to rely on: put the rank into the tensor.
    Arguments and errors as `all_gather`.
    """
    gathered = tensor.to(_exchange_device(mesh)).unsqueeze(0)
    for axis in reversed(range(mesh.ndim)):
        if mesh.size(axis) > 1:
            gathered = all_gather(mesh.get_group(axis), gathered.contiguous(), deadline, doing).flatten(0, 1)
    return gathered.cpu()


def all_gather_texts(mesh: DeviceMesh, text: str, longest_bytes: int, deadline: float, doing: str) -> list[str]:
    """Every rank's text. Arguments and errors as `all_gather_over_mesh`.

    Args:
        longest_bytes: of any rank's text as UTF-8; the same on all ranks.
    """
    padded = torch.zeros(longest_bytes, dtype=torch.uint8)
    data = text.encode()
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    rows = all_gather_over_mesh(mesh, padded, deadline, doing)
    return [bytes(row.tolist()).rstrip(b"\0").decode() for row in rows]


def broadcast(
    group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], root: int, deadline: float, doing: str
) -> None:
    """Fill contiguous tensors with those of one rank, as bytes: any dtype travels.

    Args:
        group: its ranks all call this, with tensors of the same sizes.
        tensors: sent by the root, overwritten on the others.
        root: the sender's rank within the group.
        deadline: on `time.monotonic`'s clock.
        doing: for the message.

    Raises:
        PeerTimeoutError: a rank did not come in time, or is gone.
    """
    options = BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    options.timeout = _remaining(deadline)
    with _naming_the_group(group, doing):
        pending = [group.broadcast([as_bytes], options) for as_bytes in map(_as_bytes, tensors) if len(as_bytes)]
        for work in pending:
            work.wait()


def needs_cpu(group: dist.ProcessGroup, subject: str) -> None:
    """Refuse a group that moves no CPU tensors.

    Raises:
        ConfigurationError: it has no backend for them; `subject` begins the message.
    """
    if not _moves_cpu_tensors(group):
        raise ConfigurationError(
            f"{subject} moves CPU tensors, and the mesh's groups have no backend for them; initialise them with one: "
            f'init_process_group("cpu:gloo,cuda:nccl")'
        )


def _exchange_device(mesh: DeviceMesh) -> str:
    return "cpu" if _moves_cpu_tensors(mesh.get_group(0)) else mesh.device_type


def _moves_cpu_tensors(group: Any) -> bool:
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return False
    return True


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    # A contiguous tensor may still have odd strides along dims of size 1, which `view` minds.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _remaining(deadline: float) -> timedelta:
    return timedelta(seconds=max(deadline - time.monotonic(), _LEAST_SECONDS))


@contextmanager
def _naming_the_group(group: dist.ProcessGroup, doing: str) -> Iterator[None]:
    began = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        ranks = ", ".join(map(str, dist.get_process_group_ranks(group)))
        raise PeerTimeoutError(
            f"{doing}: not all of the ranks {ranks} took part within {time.monotonic() - began:.1f} s "
            f"({str(error).splitlines()[0]}). Look at what the others raised; every rank has to make the same calls"
        ) from error
