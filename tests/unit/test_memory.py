"""Memory that is lent comes back when nobody can look at it any more, and never before."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import pytest
import torch

from td_datapipes.memory import MemoryPool

NBYTES = 4 << 20


def address(memory: np.ndarray) -> int:
    return memory.__array_interface__["data"][0]


def as_tensor(memory: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ndarray((NBYTES // 8,), np.int64, memory))


@pytest.mark.parametrize(
    "look",
    [
        lambda memory: torch.from_numpy(memory),
        lambda memory: as_tensor(memory),
        lambda memory: as_tensor(memory)[10:20],
        lambda memory: as_tensor(memory).view(torch.uint8)[5:].numpy(),
        lambda memory: np.ndarray((3,), "V16", memory, 8, (32,)),
        lambda memory: memory[7:9],
    ],
    ids=["tensor", "tensor of an array", "slice", "numpy of a view", "array on it", "slice of it"],
)
def test_memory_is_not_lent_again_while_anything_looks_at_it(look):
    pool = MemoryPool()
    memory = pool.take(NBYTES)
    held, first = look(memory), address(memory)
    del memory
    gc.collect()
    second = pool.take(NBYTES)
    assert address(second) != first
    del held
    gc.collect()
    assert address(pool.take(NBYTES)) == first


def test_a_little_more_or_less_fits_the_same_memory_and_much_less_does_not():
    pool = MemoryPool()
    memory = pool.take(NBYTES)
    first = address(memory)
    del memory
    little_less = pool.take(NBYTES - NBYTES // 10)
    assert address(little_less) == first
    assert len(little_less) == NBYTES - NBYTES // 10
    del little_less
    assert address(pool.take(NBYTES // 2)) != first


def test_what_many_batches_took_is_kept_up_to_a_limit():
    pool = MemoryPool()
    tracemalloc.start()
    try:
        lent = [pool.take(NBYTES) for _ in range(100)]
        del lent
        kept, _ = tracemalloc.get_traced_memory()
        again = [pool.take(NBYTES) for _ in range(20)]
        assert 120 << 20 < tracemalloc.get_traced_memory()[0] <= kept + (1 << 20) <= 129 << 20
        large = [pool.take(400 << 20) for _ in range(3)]
        del again, large
        assert tracemalloc.get_traced_memory()[0] < 2 * (430 << 20)
    finally:
        tracemalloc.stop()
