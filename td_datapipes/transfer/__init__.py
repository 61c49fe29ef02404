"""TensorDicts of DTensors from the ranks of one mesh to those of another, point to point."""

from __future__ import annotations

from td_datapipes.transfer.api import recv_dtensors, send_dtensors
from td_datapipes.transfer.outcome import TransferStats

__all__ = ["TransferStats", "recv_dtensors", "send_dtensors"]
