"""One rank of a replica group reads a batch, the others receive it: for when the server is the bottleneck."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.utils.data import get_worker_info

from td_datapipes import errors
from td_datapipes.errors import ConfigurationError, ServerError, TDDatapipesError
from td_datapipes.placement import Placement, RankPlacement
from td_datapipes.plan import ReadPlan
from td_datapipes.rank_exchange import all_gather, broadcast, needs_cpu
from td_datapipes.read_spec import Rows
from td_datapipes.schema import format_key
from td_datapipes.store import RowReader

__all__ = ["ReplicaReader"]

_SLACK_SECONDS = 5.0


class ReplicaReader:
    """Reads for one replica group: the ranks that differ only along one mesh axis and hold the same bytes.

    Every batch is one all_gather of a few integers, which also tells all of them if the reader failed, and a broadcast
    of the fields' bytes, under a deadline of twice the server's time-out.

    Args:
        placement: made from a DeviceMesh.
        shares: what this rank holds.
        axis: the mesh axis, by name or number.
        reader: plans, and makes batches; only the group's first rank reads with it.

    Raises:
        ConfigurationError: no such axis, a field that is sharded along it, strided batches, or no process group.
    """

    def __init__(self, placement: Placement, shares: RankPlacement, axis: str | int, reader: RowReader) -> None:
        number = placement.mesh.axis(axis)
        for share in shares.fields:
            if not share.placements[number].is_replicate() and placement.mesh.shape[number] > 1:
                raise ConfigurationError(
                    f"read_once_per={axis!r} needs fields that all ranks along that axis hold alike; field "
                    f"{format_key(share.field.key)} has {share.placements} on the mesh {placement.mesh}"
                )
        if reader.options.strided:
            raise ConfigurationError(
                "read_once_per hands on contiguous tensors; it cannot be combined with strided=True"
            )
        if placement.device_mesh is None:
            raise ConfigurationError(
                "read_once_per needs the process group: make the placement from the DeviceMesh itself, and read in the "
                "main process (num_workers=0), since a DataLoader worker has none"
            )
        self._group = placement.device_mesh.get_group(number)
        needs_cpu(self._group, "read_once_per")
        coordinate = list(shares.coordinate)
        coordinate[number] = 0
        at = {tuple(place): rank for rank, place in placement.mesh.coordinates()}
        self._reading_rank = at[tuple(coordinate)]
        self._root = dist.get_group_rank(self._group, self._reading_rank)
        self._is_root = self._reading_rank == placement.rank
        self._reader = reader

    def read(self, rows: Rows, fetch: Callable[[Rows], TensorDict]) -> TensorDict:
        """The rows, read by one rank of the group and received by the others.

        Args:
            rows: the same on all ranks of the group, ``[n]``.
            fetch: reads them; called on the reading rank only.

        Raises:
            ConfigurationError: the ranks ask for different rows, the same on all of them; or this is a worker process.
            PeerTimeoutError: a rank did not come in time.
            TDDatapipesError: what the reading rank met, on all of them.
        """
        if get_worker_info() is not None:
            raise ConfigurationError(
                "read_once_per cannot be used in a DataLoader worker, which has no process group; use num_workers=0: "
                "announced batches are read ahead all the same"
            )
        doing = f"sharing {len(rows)} rows of {self._reader.name!r} that rank {self._reading_rank} reads"
        deadline = time.monotonic() + 2 * self._reader.server.timeout_seconds + _SLACK_SECONDS
        batch, failure = self._fetch(rows, fetch)
        text = b"" if failure is None else f"{type(failure).__name__}\n{failure}".encode()
        facts = torch.tensor([len(text), len(rows), _digest(rows)], dtype=torch.int64)
        table = all_gather(self._group, facts, deadline, doing)
        self._require_same_rows(table)
        if length := int(table[self._root, 0]):
            self._raise_everywhere(failure, text, length, deadline, doing)
        leaves = [batch.get(output.key) for output in self._reader.spec.outputs]
        broadcast(self._group, leaves, self._root, deadline, doing)
        return batch

    def _fetch(self, rows: Rows, fetch: Callable[[Rows], TensorDict]) -> tuple[TensorDict, TDDatapipesError | None]:
        if self._is_root:
            try:
                return fetch(rows), None
            except TDDatapipesError as error:
                return TensorDict(), error
        return self._reader.new_batch(ReadPlan(num_rows=len(rows), slabs=(), strategy="pipelined"))[1], None

    def _require_same_rows(self, table: torch.Tensor) -> None:
        mine = table[self._root, 1:]
        for index, row in enumerate(table[:, 1:]):
            if not torch.equal(row, mine):
                other = dist.get_global_rank(self._group, index)
                raise ConfigurationError(
                    f"rank {self._reading_rank} reads {int(mine[0])} rows for rank {other}, which asks for "
                    f"{int(row[0])}{'' if row[0] != mine[0] else ' others'}: their samplers disagree. Give ranks that "
                    f"hold the same bytes samplers of the same rank, world_size, seed and epoch"
                )

    def _raise_everywhere(
        self, failure: TDDatapipesError | None, text: bytes, length: int, deadline: float, doing: str
    ) -> None:
        message = torch.zeros(length, dtype=torch.uint8)
        if failure is not None:
            message.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        broadcast(self._group, [message], self._root, deadline, doing)
        if failure is not None:
            raise failure
        name, _, what = bytes(message.tolist()).decode().partition("\n")
        kind = getattr(errors, name, ServerError)
        raise kind(f"rank {self._reading_rank}, which reads for this one: {what}")


def _digest(rows: Rows) -> int:
    return int.from_bytes(hashlib.blake2b(rows.tobytes(), digest_size=8).digest(), "little") >> 1
