"""``.npy`` and ``.npz`` files as sources of rows. Nothing is ever unpickled."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tensordict import TensorDict, TensorDictBase

from td_datapipes.errors import SchemaError, SourceError, TDDatapipesError
from td_datapipes.ingest.fingerprints import fingerprint_of
from td_datapipes.ingest.tensors import Names, TensorSource, as_tensor, wanted
from td_datapipes.schema import schema_of

__all__ = ["numpy_source"]

Reader = Callable[[int, int], npt.NDArray[Any]]
"""Takes a range of rows; asked for one range after the other."""


def numpy_source(path: Path, columns: Names | None, drop: Names) -> TensorSource:
    """An ``.npy`` file (a field named as the file, or one a name of a structured dtype) or the arrays of an ``.npz``.

    Dates and durations are int64 in their own unit.

    Args:
        path: the file.
        columns: names of fields; only these.
        drop: none of these.

    Raises:
        SourceError: damaged, or arrays of objects, which would have to be unpickled.
        SchemaError: arrays of several lengths.
    """
    try:
        arrays = _open_npz(path) if _is_zip(path) else _open_npy(path)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise SourceError(f"{path} cannot be read as arrays of numbers: {error}") from error
    arrays = {name: arrays[name] for name in wanted(arrays, columns, drop, str(path))}
    lengths = {name: rows for name, (rows, _) in arrays.items()}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{name!r}: {rows}" for name, rows in lengths.items())
        raise SchemaError(f"the arrays of {path} have several lengths ({shown}); drop those that are no rows: --drop")
    num_rows = next(iter(lengths.values()))

    def read(start: int, stop: int) -> TensorDictBase:
        values = {name: as_tensor(name, _native(reader(start, stop))) for name, (_, reader) in arrays.items()}
        return TensorDict(values, batch_size=[stop - start])

    try:
        schema = schema_of(read(0, 0))
    except (OSError, ValueError) as error:
        if isinstance(error, TDDatapipesError):
            raise
        raise SourceError(f"{path} cannot be read as arrays of numbers: {error}") from error
    return TensorSource(schema, num_rows, read, fingerprint_of([path], list(schema.fields)), str(path))


def _is_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"PK"


def _native(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """In this machine's byte order, writable (torch warns of memory that is not), contiguous, dates as integers."""
    if array.dtype.kind in "mM":
        array = array.astype(np.int64)
    return np.array(array, dtype=array.dtype.newbyteorder("="), order="C")


def _open_npy(path: Path) -> dict[str, tuple[int, Reader]]:
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    if array.ndim == 0:
        raise ValueError("it is a single number; rows need a leading dim")
    if array.dtype.names is None:
        return {path.stem: (len(array), lambda start, stop: array[start:stop])}
    return {name: (len(array), _column(array, name)) for name in array.dtype.names}


def _column(array: npt.NDArray[Any], name: str) -> Reader:
    return lambda start, stop: array[name][start:stop]


def _open_npz(path: Path) -> dict[str, tuple[int, Reader]]:
    with zipfile.ZipFile(path) as archive:
        members = [name for name in archive.namelist() if name.endswith(".npy")]
    found: dict[str, tuple[int, Reader]] = {}
    for member in members:
        stream = _NpzMember(path, member)
        if not stream.shape:
            raise ValueError(f"{member.removesuffix('.npy')!r} is a single number; rows need a leading dim")
        name = member.removesuffix(".npy")
        if stream.dtype.names is None:
            found[name] = (stream.shape[0], stream.read)
        else:
            found |= {f"{name}.{part}": (stream.shape[0], stream.column(part)) for part in stream.dtype.names}
    return found


class _NpzMember:
    """An array of an ``.npz``, read from front to back; compressed or not, it is never whole in memory."""

    def __init__(self, path: Path, member: str) -> None:
        self._path, self._member = path, member
        self._stream: Any = None
        self._row = 0
        self._last: tuple[int, int, npt.NDArray[Any]] | None = None
        self._rewind()

    def _rewind(self) -> None:
        # Closed with the last stream that is open in it.
        with zipfile.ZipFile(self._path) as archive:
            self._stream, self._row = archive.open(self._member), 0
        version = np.lib.format.read_magic(self._stream)
        reader = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        self.shape, fortran, self.dtype = reader(self._stream)
        if self.dtype.hasobject:
            raise ValueError(f"{self._member.removesuffix('.npy')!r} holds Python objects, which are never unpickled")
        self._columns = None
        if fortran and len(self.shape) > 1:
            # Its rows do not lie side by side.
            data = self._stream.read()
            self._columns = np.frombuffer(data, self.dtype).reshape(self.shape, order="F")

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Rows ``[start, stop)``."""
        if self._last is not None and self._last[:2] == (start, stop):
            return self._last[2]  # another column of the same rows
        if self._columns is not None:
            return self._columns[start:stop]
        if start < self._row:
            self._rewind()
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        self._skip((start - self._row) * row_bytes)
        data = self._stream.read((stop - start) * row_bytes)
        if len(data) != (stop - start) * row_bytes:
            raise SourceError(f"{self._path} ends within {self._member!r}: is it complete?")
        self._row = stop
        array: npt.NDArray[Any] = np.frombuffer(data, self.dtype).reshape(stop - start, *self.shape[1:])
        self._last = (start, stop, array)
        return array

    def _skip(self, nbytes: int) -> None:
        while nbytes > 0:
            got = len(self._stream.read(min(nbytes, 1 << 20)))
            if not got:
                return
            nbytes -= got

    def column(self, name: str) -> Reader:
        """The reader of one name of a structured dtype."""
        return lambda start, stop: self.read(start, stop)[name]
