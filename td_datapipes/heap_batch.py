"""Values of variable length as a batch holds them: where their bytes are received, and what is made of them. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, cast, get_args

import numpy as np
import numpy.typing as npt
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from td_datapipes.arrow_rows import ArrowRows, arrow_rows, join_arrow_rows
from td_datapipes.errors import ConfigurationError, DataLossError
from td_datapipes.heap_plan import HeapSlab, WantedValues
from td_datapipes.manifest import Manifest
from td_datapipes.memory import MemoryPool
from td_datapipes.read_spec import Rows
from td_datapipes.schema import Field, Key, dtype_name, format_key
from td_datapipes.slabs import Slab
from td_datapipes.varying import NULL, Varying, decode_texts
from td_datapipes.verified import HeapChecks

__all__ = ["Ragged", "RaggedOptions", "Strings", "ValuesBatch", "join_batches"]

Bytes = npt.NDArray[np.uint8]

Ragged = Literal["jagged", "pad"]
Strings = Literal["stack", "arrow"]

_MASK_SUFFIX = "_mask"
_PLAIN = (str, bytes)


@dataclass(frozen=True, kw_only=True)
class RaggedOptions:
    """What batches make of values of variable length.

    Attributes:
        ragged: tensors become ``jagged`` nested tensors, or are padded (``pad``), with a mask beside them.
        pad_value: what padded tensors are filled up with.
        max_length: a row of a tensor has at most so many items; what is behind them is not read. None for all.
        strings: strings, bytes and JSON values become a ``NonTensorStack`` (``stack``), or `ArrowRows` (``arrow``).
    """

    ragged: Ragged = "jagged"
    pad_value: float = 0
    max_length: int | None = None
    strings: Strings = "stack"

    def __post_init__(self) -> None:
        if self.ragged not in get_args(Ragged):
            raise ConfigurationError(f"ragged must be one of {', '.join(get_args(Ragged))}, got {self.ragged!r}")
        if self.strings not in get_args(Strings):
            raise ConfigurationError(f"strings must be one of {', '.join(get_args(Strings))}, got {self.strings!r}")
        if self.ragged != "pad" and self.pad_value != 0:
            raise ConfigurationError(f"pad_value={self.pad_value!r} needs ragged='pad'")
        length = self.max_length
        if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 1):
            raise ConfigurationError(f"max_length must be an integer of at least 1, got {length!r}")

    def check(self, fields: Sequence[Field], known: Sequence[Key]) -> None:
        """Refuse what does not go together with the fields that are read.

        Raises:
            ConfigurationError: a pad value that a dtype cannot hold, or a field that has a mask's name.
        """
        for field in fields:
            if field.varying is None or field.varying.kind != "tensor" or self.ragged != "pad":
                continue
            dtype = field.varying.dtype
            if not (dtype.is_floating_point or dtype.is_complex) and not _is_in_range(self.pad_value, dtype):
                raise ConfigurationError(
                    f"pad_value={self.pad_value!r} is no {dtype_name(dtype)}, which field {format_key(field.key)} is of"
                )
            if mask_key(field.key) in known:
                raise ConfigurationError(
                    f"ragged='pad' puts the mask of field {format_key(field.key)} beside it, and there is a field "
                    f"{format_key(mask_key(field.key))} already; leave one of them out with fields=, or read "
                    f"ragged='jagged'"
                )


def _is_in_range(value: float, dtype: torch.dtype) -> bool:
    if dtype == torch.bool:
        return value in (0, 1)
    limits = torch.iinfo(dtype)
    return value == value and limits.min <= value <= limits.max and int(value) == value


def mask_key(key: Key) -> Key:
    """Where the mask of a padded field is put: beside it."""
    return (*key[:-1], key[-1] + _MASK_SUFFIX)


class ValuesBatch:
    """The values of one or more batches that are read together: a sink for them (a `BatchSink`), then leaves.

    Args:
        manifest: what is read.
        fields: those of variable length that are.
        spans: of each field, ``[n, 2]``, as the records have them.
        rows: ``[n]``.
        sizes: how many of the rows are each batch's.
        options: what to make of them.
        pool: gives memory.
        pin_memory: make page-locked tensors.
        checks: compares chunks that are read whole with their checksums; None compares nothing.

    Raises:
        DataLossError: spans that cannot be: something else was written over the records.
    """

    def __init__(
        self,
        manifest: Manifest,
        fields: Sequence[Field],
        spans: Mapping[Key, torch.Tensor],
        rows: Rows,
        sizes: Sequence[int],
        *,
        options: RaggedOptions,
        pool: MemoryPool,
        pin_memory: bool,
        checks: HeapChecks | None = None,
    ) -> None:
        self.tensors: dict[Key, torch.Tensor] = {}
        self._checks = checks
        bounds = [0, *accumulate(sizes)]
        self._columns: list[_Column] = []
        for output, field in enumerate(fields):
            number, heap = manifest.heap_of(field.key)
            found = spans[field.key].numpy()
            starts, lengths = found[:, 0], found[:, 1]
            varying = cast(Varying, field.varying)
            _check_spans(manifest, field, starts, lengths, heap.nbytes, rows)
            if varying.kind != "tensor":
                column: _Column = _Texts(field, lengths, bounds, arrow=options.strings == "arrow")
            elif options.ragged == "pad":
                column = _Padded(field, _clip(lengths, options), bounds, options.pad_value, pool, pin_memory=pin_memory)
            else:
                column = _Jagged(field, _clip(lengths, options), bounds, pool, pin_memory=pin_memory)
            column.wanted = WantedValues(
                group=number,
                output=output,
                chunk_bytes=heap.chunk_bytes,
                rows=rows,
                starts=starts,
                nbytes=column.nbytes,
                targets=column.targets,
            )
            self._columns.append(column)

    @property
    def wanted(self) -> list[WantedValues]:
        """What is to be read."""
        return [column.wanted for column in self._columns]

    def bytes_of(self, number: int) -> int:
        """Memory of the values of one of the batches."""
        return sum(column.bytes_of(number) for column in self._columns)

    def target(self, slab: Slab) -> None:
        """Always staging."""

    def places(self, slab: Slab) -> None:
        """Always staging."""

    def placed(self, slab: Slab, stream: Bytes) -> None:
        """Nothing has places."""

    def take(self, slab: Slab, stream: Bytes) -> None:
        """Copy the values where they belong."""
        if not isinstance(slab, HeapSlab):
            raise TypeError(f"{type(slab).__name__} has no values of variable length")
        if self._checks is not None:
            self._checks.look(slab, stream)
        memory, source = self._columns[slab.values.output].memory.data, stream.data
        for start, target, nbytes in zip(
            slab.origins.tolist(), slab.targets.tolist(), slab.lengths.tolist(), strict=True
        ):
            memory[target : target + nbytes] = source[start : start + nbytes]

    def seal(self) -> None:
        """Nothing is left to do."""

    def add_to(self, batch: TensorDict, number: int) -> TensorDict:
        """Put the values of one of the batches in place of its spans.

        Raises:
            DataLossError: bytes that are no such value; it names the field.
        """
        for column in self._columns:
            for key, leaf in column.leaves(number).items():
                batch.set(key, leaf)
        return batch


def _clip(lengths: Rows, options: RaggedOptions) -> Rows:
    return lengths if options.max_length is None else np.minimum(lengths, options.max_length)


def _check_spans(manifest: Manifest, field: Field, starts: Rows, lengths: Rows, heap_bytes: int, rows: Rows) -> None:
    item_bytes = cast(Varying, field.varying).item_bytes
    # Without multiplying first: what is no length may be of any size.
    most = heap_bytes // item_bytes if item_bytes else np.iinfo(np.int64).max
    wrong = (lengths < NULL) | (lengths > most) | (starts < 0)
    wrong |= starts > heap_bytes - np.where(wrong, 0, np.maximum(lengths, 0)) * item_bytes
    if wrong.any():
        raise DataLossError(
            f"data set {manifest.name!r}, field {format_key(field.key)}: the records of rows {_some_rows(rows[wrong])} "
            f"say that their values lie where there are none, of {heap_bytes} bytes: another program wrote to them. "
            f"Write the data set again"
        )


def _some_rows(rows: Rows) -> str:
    shown = np.unique(rows).tolist()
    return ", ".join(map(str, shown[:6])) + (", ..." if len(shown) > 6 else "")


class _Column:
    """One field of the batches that are read together.

    Attributes:
        nbytes: of each value that is read, ``[n]``.
        targets: where each begins in `memory`, ``[n]``.
        memory: where they are received.
        wanted: what is to be read.
    """

    nbytes: Rows
    targets: Rows
    memory: Bytes
    wanted: WantedValues

    def __init__(self, field: Field, lengths: Rows, bounds: list[int]) -> None:
        self._field, self._lengths, self._bounds = field, lengths, bounds
        self._varying = cast(Varying, field.varying)
        self.nbytes = np.maximum(lengths, 0) * self._varying.item_bytes

    def bytes_of(self, number: int) -> int:
        """Of the values of one batch."""
        return int(self.nbytes[self._rows(number)].sum())

    def leaves(self, number: int) -> dict[Key, Any]:
        """What stands in one of the batches."""
        raise NotImplementedError

    def _rows(self, number: int) -> slice:
        return slice(self._bounds[number], self._bounds[number + 1])


class _Jagged(_Column):
    """A jagged nested tensor: values and offsets."""

    def __init__(self, field: Field, lengths: Rows, bounds: list[int], pool: MemoryPool, *, pin_memory: bool) -> None:
        super().__init__(field, lengths, bounds)
        self._ends = np.concatenate([[0], np.cumsum(np.maximum(lengths, 0))])
        self.targets = self._ends[:-1] * self._varying.item_bytes
        shape = (int(self._ends[-1]), *self._varying.shape)
        self._values, self.memory = _new_values(shape, self._varying.dtype, pool, pin_memory=pin_memory)

    def leaves(self, number: int) -> dict[Key, Any]:
        rows = self._rows(number)
        ends = self._ends[rows.start : rows.stop + 1]
        lengths = self._lengths[rows]
        known: dict[str, Any] = {}
        if len(lengths):  # the tensor would look for them itself, again and again
            known = {"min_seqlen": int(lengths.min()), "max_seqlen": int(lengths.max())}
        values = self._values[int(ends[0]) : int(ends[-1])]
        offsets = torch.from_numpy(ends - ends[0])
        return {self._field.key: torch.nested.nested_tensor_from_jagged(values, offsets, **known)}


class _Padded(_Column):
    """A dense tensor as long as the longest row of its batch, and a mask of what is no padding."""

    def __init__(
        self, field: Field, lengths: Rows, bounds: list[int], pad_value: float, pool: MemoryPool, *, pin_memory: bool
    ) -> None:
        super().__init__(field, lengths, bounds)
        sizes = np.diff(bounds)
        self._longest = [int(lengths[self._rows(number)].max(initial=0)) for number in range(len(sizes))]
        widths = np.repeat(self._longest, sizes)
        ends = np.concatenate([[0], np.cumsum(widths)])
        self._ends = ends[bounds]
        self.targets = ends[:-1] * self._varying.item_bytes
        shape, dtype = (int(ends[-1]), *self._varying.shape), self._varying.dtype
        self._values, self.memory = _new_values(shape, dtype, pool, pin_memory=pin_memory)
        _fill(self._values, pad_value)

    def bytes_of(self, number: int) -> int:
        return int(self._ends[number + 1] - self._ends[number]) * self._varying.item_bytes

    def leaves(self, number: int) -> dict[Key, Any]:
        rows, longest = self._rows(number), self._longest[number]
        values = self._values[int(self._ends[number]) : int(self._ends[number + 1])]
        padded = values.view(rows.stop - rows.start, longest, *self._varying.shape)
        kind = np.int32 if longest < 1 << 31 else np.int64  # half the time where that will do
        mask = np.arange(longest, dtype=kind) < self._lengths[rows, None].astype(kind)
        return {self._field.key: padded, mask_key(self._field.key): torch.from_numpy(mask)}


class _Texts(_Column):
    """Strings, bytes or JSON values, one a row."""

    def __init__(self, field: Field, lengths: Rows, bounds: list[int], *, arrow: bool) -> None:
        super().__init__(field, lengths, bounds)
        self._arrow = arrow
        self._ends = np.concatenate([[0], np.cumsum(self.nbytes)])
        self.targets = self._ends[:-1]
        self.memory = np.empty(int(self._ends[-1]), dtype=np.uint8)

    def leaves(self, number: int) -> dict[Key, Any]:
        rows = self._rows(number)
        ends, lengths = self._ends[rows.start : rows.stop + 1], self._lengths[rows]
        data = self.memory[int(ends[0]) : int(ends[-1])]
        kind = self._varying.kind
        try:
            made = arrow_rows(data, lengths, kind) if self._arrow else _stack(decode_texts(data.data, lengths, kind))
        except ValueError as error:
            raise DataLossError(
                f"field {format_key(self._field.key)} holds bytes that are no {kind} value ({error}): "
                f"another program wrote to them"
            ) from error
        return {self._field.key: made}


def _stack(values: Sequence[Any]) -> NonTensorData | NonTensorStack:
    if not values:  # a stack of none has no batch size
        return NonTensorData(None, batch_size=[0])
    if all(type(value) in _PLAIN for value in values):  # quicker, and nothing that could be taken for a stack itself
        return NonTensorStack(*values)
    return NonTensorStack(*(NonTensorData(value, batch_size=[]) for value in values), stack_dim=0)


def _new_values(
    shape: tuple[int, ...], dtype: torch.dtype, pool: MemoryPool, *, pin_memory: bool
) -> tuple[torch.Tensor, Bytes]:
    """A tensor whose values are still to come, and its memory."""
    nbytes = math.prod(shape) * dtype.itemsize
    if pin_memory or not nbytes:
        made = torch.empty(shape, dtype=dtype, pin_memory=pin_memory)
        return made, made.view(-1).view(torch.uint8).numpy() if nbytes else np.empty(0, dtype=np.uint8)
    memory = pool.take(nbytes)
    return torch.from_numpy(memory).view(dtype).view(shape), memory


def _fill(tensor: torch.Tensor, value: float) -> None:
    """As ``fill_``, which not all dtypes have."""
    tensor.copy_(torch.tensor(value).to(tensor.dtype).expand(tensor.shape))


def join_batches(parts: Sequence[TensorDict], fields: Sequence[Field], options: RaggedOptions) -> TensorDict:
    """Batches one behind the other.

    Args:
        parts: of data sets with the same fields, read with the same options; they may be changed.
        fields: those of variable length.
        options: what became of them.
    """
    joined: dict[Key, ArrowRows] = {}
    for field in fields:
        varying = cast(Varying, field.varying)
        if varying.kind == "tensor" and options.ragged == "pad":
            width = max(part.get(field.key).shape[1] for part in parts)
            for part in parts:
                for key, value in ((field.key, options.pad_value), (mask_key(field.key), False)):
                    part.set(key, _widened(part.get(key), width, value))
        elif varying.kind != "tensor" and options.strings == "arrow":
            joined[field.key] = join_arrow_rows([cast(ArrowRows, part.pop(field.key)) for part in parts])
    whole: Any = torch.cat(cast(Any, list(parts)))
    for key, rows in joined.items():
        whole.set(key, rows)
    return cast(TensorDict, whole)


def _widened(tensor: torch.Tensor, width: int, value: float) -> torch.Tensor:
    if tensor.shape[1] == width:
        return tensor
    made = torch.empty((tensor.shape[0], width, *tensor.shape[2:]), dtype=tensor.dtype)
    _fill(made, value)
    made[:, : tensor.shape[1]] = tensor
    return made
