"""Rows to write and to compare with: random ones of any dtype, and a comparison down to the last bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection

__all__ = ["ALL_DTYPES", "assert_same_rows", "assert_same_tensor", "bytes_of", "random_rows", "random_tensor"]

ALL_DTYPES = (
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex32, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
)
"""Every dtype whose elements are whole bytes."""


def random_tensor(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Random bits, so that NaNs with payloads, infinities and negative zeros all occur."""
    number = torch.Size(shape).numel()
    top = 2 if dtype is torch.bool else 256
    bits = torch.randint(0, top, (number * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return bits.view(dtype).reshape(tuple(shape))


def random_rows(
    rows: int, fields: Mapping[str | tuple[str, ...], tuple[torch.dtype, tuple[int, ...]]], seed: int = 0
) -> TensorDict:
    """A TensorDict of batch size [rows] with random bits: key -> (dtype, shape of one row)."""
    generator = torch.Generator().manual_seed(seed)
    td = TensorDict(batch_size=[rows])
    for key, (dtype, shape) in fields.items():
        td[key] = random_tensor((rows, *shape), dtype, generator)
    return td


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The elements' bytes in row-major order; numpy lacks some dtypes, so they go as bytes."""
    plain = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same_tensor(got: torch.Tensor, expected: torch.Tensor, what: object = "tensor") -> None:
    """Same dtype, same shape, same bits."""
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape), what
    assert bytes_of(got) == bytes_of(expected), f"{what} differs"


def assert_same_rows(got: TensorDictBase, expected: TensorDictBase, path: tuple[str, ...] = ()) -> None:
    """Same tree, and at each node the same batch size, names and entries."""
    assert got.batch_size == expected.batch_size, path
    assert list(got.names) == list(expected.names), path
    assert set(got.keys()) == set(expected.keys()), path
    for name in expected.keys():  # noqa: SIM118 - a TensorDict iterates over rows
        mine, theirs = got.get(name), expected.get(name)
        if is_tensor_collection(theirs):
            assert_same_rows(mine, theirs, (*path, name))
        else:
            assert_same_tensor(mine, theirs, (*path, name))
