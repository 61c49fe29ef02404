"""Data as the installed ``tensordict.store`` writes it, for tests that read it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from servers import ServerProcess
from tensordict import TensorDict, TensorDictBase
from tensordict.store import LazyStackedTensorDictStore, TensorDictStore

__all__ = ["NUMPY_DTYPES", "open_store", "read_store", "write_lazy_store", "write_store"]

NUMPY_DTYPES = (
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
)
"""What ``TensorDictStore`` can write: it goes through numpy, which has no bfloat16, float8 and complex32."""


def write_store(server: ServerProcess, td: TensorDictBase, td_id: str, **options: Any) -> str:
    """Write with ``TensorDictStore.from_tensordict``; the URL that opens it."""
    TensorDictStore.from_tensordict(td, host=server.host, port=server.port, td_id=td_id, **options).close()
    namespace = options.get("prefix")
    return server.url(td_id if namespace is None else f"{namespace}:{td_id}")


def write_lazy_store(server: ServerProcess, stack: TensorDictBase, td_id: str, **options: Any) -> str:
    """Write with ``LazyStackedTensorDictStore.from_lazy_stack``; the URL that opens it."""
    LazyStackedTensorDictStore.from_lazy_stack(
        stack, host=server.host, port=server.port, td_id=td_id, **options
    ).close()
    return server.url(td_id)


@contextmanager
def open_store(server: ServerProcess, td_id: str, kind: Any = TensorDictStore) -> Iterator[Any]:
    """The store as its own library opens it, to write into it."""
    store = kind.from_store(host=server.host, port=server.port, td_id=td_id, cache_metadata=False)
    try:
        yield store
    finally:
        getattr(store, "_tensordict", store).close()  # a tensorclass wraps one


def read_store(server: ServerProcess, td_id: str) -> TensorDict:
    """All of it, as its own library reads it."""
    with open_store(server, td_id) as store:
        found: TensorDict = store.to_tensordict()
    return found
