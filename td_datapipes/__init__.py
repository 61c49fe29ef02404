"""Train straight out of Redis or Valkey: TensorDicts on a server, read by the loaders PyTorch already has.

from torch.utils.data import DataLoader
from td_datapipes import RedisTDDataset, write_dataset

write_dataset(td, "redis://localhost:6379/0#name")
loader = DataLoader(RedisTDDataset("redis://localhost:6379/0#name"), batch_size=256, shuffle=True)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from td_datapipes.appender import append_dataset
    from td_datapipes.arrow_rows import ArrowRows
    from td_datapipes.conversion import convert
    from td_datapipes.datapipes import RedisTDIterableDataset, RedisTDIterDataPipe
    from td_datapipes.datasets import RedisTDDataset
    from td_datapipes.dtensor_collate import DTensorCollate
    from td_datapipes.integrity import verify_dataset
    from td_datapipes.mixture import RedisTDMixture
    from td_datapipes.nodes import RedisTDReader
    from td_datapipes.placement import Placement
    from td_datapipes.redis_tensordict import RedisTensorDict
    from td_datapipes.replay import RedisReplayBuffer
    from td_datapipes.shard_loop import ShardReceiver, ShardSender
    from td_datapipes.transfer import TransferStats, recv_dtensors, send_dtensors
    from td_datapipes.transfer_plan import plan_transfer
    from td_datapipes.wire.retry import RetryPolicy
    from td_datapipes.writer import write_dataset

__all__ = [
    "ArrowRows",
    "DTensorCollate",
    "Placement",
    "RedisReplayBuffer",
    "RedisTDDataset",
    "RedisTDIterDataPipe",
    "RedisTDIterableDataset",
    "RedisTDMixture",
    "RedisTDReader",
    "RedisTensorDict",
    "RetryPolicy",
    "ShardReceiver",
    "ShardSender",
    "TransferStats",
    "append_dataset",
    "convert",
    "plan_transfer",
    "recv_dtensors",
    "send_dtensors",
    "verify_dataset",
    "write_dataset",
]

_HOMES = {
    "ArrowRows": "td_datapipes.arrow_rows",
    "DTensorCollate": "td_datapipes.dtensor_collate",
    "Placement": "td_datapipes.placement",
    "RedisReplayBuffer": "td_datapipes.replay",
    "RedisTDDataset": "td_datapipes.datasets",
    "RedisTDIterDataPipe": "td_datapipes.datapipes",
    "RedisTDIterableDataset": "td_datapipes.datapipes",
    "RedisTDMixture": "td_datapipes.mixture",
    "RedisTDReader": "td_datapipes.nodes",
    "RedisTensorDict": "td_datapipes.redis_tensordict",
    "RetryPolicy": "td_datapipes.wire.retry",
    "ShardReceiver": "td_datapipes.shard_loop",
    "ShardSender": "td_datapipes.shard_loop",
    "TransferStats": "td_datapipes.transfer",
    "append_dataset": "td_datapipes.appender",
    "convert": "td_datapipes.conversion",
    "plan_transfer": "td_datapipes.transfer_plan",
    "recv_dtensors": "td_datapipes.transfer",
    "send_dtensors": "td_datapipes.transfer",
    "verify_dataset": "td_datapipes.integrity",
    "write_dataset": "td_datapipes.writer",
}


def __getattr__(name: str) -> Any:
    """Public names are loaded where they are first used, so that importing the package stays cheap."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
