"""Samplers with a place that can be saved, for any map-style data set: what comes next is known ahead.

from td_datapipes.samplers import BlockShuffleBatchSampler

loader = StatefulDataLoader(dataset, batch_sampler=BlockShuffleBatchSampler(dataset, 256, seed=0))
"""

from __future__ import annotations

from .batch import RowBatch, Window
from .block_shuffle import BlockShuffleBatchSampler
from .coalescing import CoalescingBatchSampler
from .lengths import LengthBatchSampler
from .rows import RowSampler
from .slices import SliceBatchSampler

__all__ = [
    "BlockShuffleBatchSampler",
    "CoalescingBatchSampler",
    "LengthBatchSampler",
    "RowBatch",
    "RowSampler",
    "SliceBatchSampler",
    "Window",
]
