"""Train straight out of Redis or Valkey: TensorDicts on a server, read by the loaders PyTorch already has.

from torch.utils.data import DataLoader
from td_datapipes import RedisTDDataset, write_dataset

write_dataset(td, "redis://localhost:6379/0#name")
loader = DataLoader(RedisTDDataset("redis://localhost:6379/0#name"), batch_size=256, shuffle=True)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from td_datapipes.collate import register_collate

if TYPE_CHECKING:
    from td_datapipes.appender import append_dataset
    from td_datapipes.datapipes import RedisTDIterableDataset, RedisTDIterDataPipe
    from td_datapipes.datasets import RedisTDDataset
    from td_datapipes.dtensor_collate import DTensorCollate
    from td_datapipes.integrity import verify_dataset
    from td_datapipes.mixture import RedisTDMixture
    from td_datapipes.nodes import RedisTDReader
    from td_datapipes.placement import Placement
    from td_datapipes.wire.retry import RetryPolicy
    from td_datapipes.writer import write_dataset

__all__ = [
    "DTensorCollate",
    "Placement",
    "RedisTDDataset",
    "RedisTDIterDataPipe",
    "RedisTDIterableDataset",
    "RedisTDMixture",
    "RedisTDReader",
    "RetryPolicy",
    "append_dataset",
    "verify_dataset",
    "write_dataset",
]

_HOMES = {
    "DTensorCollate": "td_datapipes.dtensor_collate",
    "Placement": "td_datapipes.placement",
    "RedisTDDataset": "td_datapipes.datasets",
    "RedisTDIterDataPipe": "td_datapipes.datapipes",
    "RedisTDIterableDataset": "td_datapipes.datapipes",
    "RedisTDMixture": "td_datapipes.mixture",
    "RedisTDReader": "td_datapipes.nodes",
    "RetryPolicy": "td_datapipes.wire.retry",
    "append_dataset": "td_datapipes.appender",
    "verify_dataset": "td_datapipes.integrity",
    "write_dataset": "td_datapipes.writer",
}

register_collate()


def __getattr__(name: str) -> Any:
    """Public names are loaded where they are first used, so that importing the package stays cheap."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
