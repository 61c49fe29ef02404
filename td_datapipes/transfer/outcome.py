"""What transfers come to, and what they cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict
from torch.distributed.device_mesh import DeviceMesh

from td_datapipes.transfer.agreement import Agreement
from td_datapipes.transfer.contents import build, decode_values
from td_datapipes.transfer.link import Status

__all__ = ["Outcome", "Received", "TransferStats"]


@dataclass(kw_only=True)
class TransferStats:
    """What transfers cost this rank; pass one to count into.

    Attributes:
        strategy: the one last used.
        transfers: finished.
        sent_bytes: of tensors, to other ranks. What a rank keeps of its own is not in it.
        received_bytes: of tensors, from other ranks.
        sent_messages: that carried tensors.
        agreements: how often the fields were described anew; once for each schema.
    """

    strategy: str = ""
    transfers: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    sent_messages: int = 0
    agreements: int = 0


@dataclass(frozen=True, kw_only=True)
class Received:
    """One batch that has arrived on a rank, before DTensors are made of it.

    Attributes:
        agreement: of its transfer.
        tensors: the local tensor of each field.
        values: the non-tensor leaves, encoded.
        states: what each sender said with it, by rank.
    """

    agreement: Agreement
    tensors: Sequence[torch.Tensor]
    values: Any
    states: Mapping[int, Any]

    def build(self, mesh: DeviceMesh | None) -> TensorDict:
        """The TensorDict; a collective of the mesh where `redistribute` has to change placements."""
        return build(self.agreement, self.tensors, decode_values(self.values), mesh)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a round came to.

    Attributes:
        status: ``DATA`` where tensors moved, ``END`` where the senders ended an epoch, ``CLOSE`` where a rank ended it
            all, ``BUSY`` where this rank asked for more time.
        received: the batch, on a receiver.
        states: what each sender said at the end of an epoch, by rank.
        closed_by: the first rank that ended it all.
    """

    status: Status
    received: Received | None = None
    states: Mapping[int, Any] = field(default_factory=dict)
    closed_by: int | None = None
