"""torchrl's replay buffers on a server: `RedisStorage` and `RedisWriter`. Needs the extra ``rl``."""

from __future__ import annotations

import json
import operator
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from torchrl.data.replay_buffers.checkpointers import StorageCheckpointerBase
from torchrl.data.replay_buffers.storages import Storage, StoreStorage
from torchrl.data.replay_buffers.writers import RoundRobinWriter

from td_datapipes.catalog import drop
from td_datapipes.errors import ConfigurationError, DatasetNotFoundError, SchemaError, StateError
from td_datapipes.replay import RedisReplayBuffer
from td_datapipes.replay.ring import Numbers

__all__ = ["RedisStorage", "RedisStorageCheckpointer", "RedisWriter"]

_TENSOR = "_tensor"
"""The field that holds rows which are plain tensors."""
_METADATA = "redis_storage.json"


class RedisStorageCheckpointer(StorageCheckpointerBase):  # type: ignore[misc]
    """Saves a `RedisStorage` as a snapshot on its own server; the folder keeps its name.

    Saving again to the same folder removes the snapshot that it named before.
    """

    def dumps(self, storage: RedisStorage, path: str | Path) -> None:
        """Take a snapshot."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        buffer = storage.buffer
        name = f"{buffer.name}@{secrets.token_hex(5)}" if buffer.schema is not None else None
        if name is not None:
            buffer.snapshot(name)
        before = self._named_in(folder)
        (folder / _METADATA).write_text(json.dumps({"name": buffer.name, "snapshot": name}))
        if before:
            with suppress(DatasetNotFoundError):
                drop(buffer.caller.server, before)

    def loads(self, storage: RedisStorage, path: str | Path) -> None:
        """Restore the snapshot.

        Raises:
            StateError: the folder names none.
            DatasetNotFoundError: it is not on the storage's server.
        """
        file = Path(path) / _METADATA
        if not file.is_file():
            raise StateError(f"{file} does not exist: the folder was not saved by {type(self).__name__}")
        name = self._named_in(Path(path))
        if name is None:
            storage.buffer.clear()
        else:
            storage.buffer.restore(name)
        storage.slots.forget()

    @staticmethod
    def _named_in(folder: Path) -> str | None:
        file = folder / _METADATA
        name: str | None = json.loads(file.read_text())["snapshot"] if file.is_file() else None
        return name


class RedisStorage(StoreStorage):  # type: ignore[misc]
    """A storage of torchrl whose rows are those of a `RedisReplayBuffer`.

    Every process that opens the URL sees the same rows and the same length. Where several of them write, give each
    ``writer=RedisWriter()``: its cursor is the server's. (A `RoundRobinWriter` has a cursor of its own process, and
    those of its workers; its writes go where it says.)

    Args:
        url: server and name, as for `RedisReplayBuffer`.
        max_size: rows it holds; needed by the process that writes first.
        checkpointer: by default `RedisStorageCheckpointer`.
        options: more for `RedisReplayBuffer`, such as `timeout_seconds`.

    Raises:
        URLError, ConfigurationError: arguments that cannot work, or do not agree with the buffer that is there.
        ServerUnavailableError, ServerTimeoutError, AuthenticationError: the server cannot be reached or refuses.
    """

    _default_checkpointer = RedisStorageCheckpointer

    def __init__(
        self,
        url: str,
        max_size: int | None = None,
        *,
        checkpointer: StorageCheckpointerBase | None = None,
        **options: Any,
    ) -> None:
        self.buffer = RedisReplayBuffer(url, max_size, **options)
        size = max_size or self.buffer.capacity
        if size is None:
            raise ConfigurationError(f"buffer {self.buffer.name!r} does not exist yet; pass max_size= to make it")
        self.slots = self.buffer.slots()
        self.device = torch.device("cpu")
        self._kind: type[Any] | None = None
        # Not StoreStorage's own: it is a base only because torchrl takes whole batches from the kinds it knows.
        Storage.__init__(self, max_size=size, checkpointer=checkpointer)

    @property
    def _len(self) -> int:
        return len(self)

    @_len.setter
    def _len(self, value: int) -> None:
        """The server knows how many rows there are."""

    @property
    def initialized(self) -> bool:
        """Whether anything was written, by anybody."""
        return self.buffer.schema is not None

    @property
    def _mutation_revision(self) -> int:
        # What samplers derive from rows is void once anybody wrote.
        cursor, incarnation, sets = self.slots.state()
        return (incarnation << 50) + cursor + sets

    def _bump_mutation_revision(self) -> None:
        """The server counts."""

    @property
    def _last_cursor_index(self) -> int | None:
        cursor, _, _ = self.slots.state()
        return (cursor - 1) % self.max_size if cursor else None

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Store rows in slots.

        Args:
            cursor: a slot, or slots ``[rows]`` as a tensor, sequence, slice or range.
            data: rows: a TensorDict, tensorclass or tensor with a leading dim, or a list of rows; for one slot, a row.
            set_cursor: whether it counts as the last write.

        Raises:
            RowIndexError: a slot outside the storage, or one with unwritten slots before it.
            SchemaError: rows of another structure than those before; the message names the field.
        """
        if set_cursor:
            self._last_cursor = cursor
        single = _is_single(cursor)
        rows = self._rows(data, single=single)
        slots = self._slots(cursor, self.max_size)
        if len(slots) != rows.batch_size[0]:
            raise SchemaError(f"{len(slots)} slots for {rows.batch_size[0]} rows")
        self.slots.write(slots, rows)

    def append(self, data: Any, *, single: bool) -> torch.Tensor:
        """Store rows behind the last ones of all processes.

        Returns:
            Their slots, int64 ``[rows]``.
        """
        slots = self.slots.append(self._rows(data, single=single))
        self._last_cursor = slots
        return slots

    def _rows(self, data: Any, *, single: bool) -> TensorDictBase:
        """As a TensorDict with a leading dim of rows."""
        if isinstance(data, list):
            data = torch.stack(data) if not is_tensor_collection(data[0]) else _stacked(data)
        if isinstance(data, torch.Tensor):
            value = data.unsqueeze(0) if single else data
            return TensorDict({_TENSOR: value}, batch_size=[value.shape[0]])
        if not is_tensor_collection(data):
            raise SchemaError(f"rows are TensorDicts, tensorclasses or tensors, not {type(data).__name__}")
        if not isinstance(data, TensorDictBase):
            self._kind = type(data)
            data = data.to_tensordict(retain_none=False)
        rows: TensorDictBase = data.unsqueeze(0) if single else data
        return rows

    def get(self, index: Any) -> Any:
        """What lies in slots: a row for an int, else rows in the order asked.

        Raises:
            NotEnoughRowsError: nothing was written yet.
            RowIndexError: a slot that was never written.
        """
        single = _is_single(index)
        rows: Any = self.slots.read(self._slots(index, None))
        if list(rows.keys()) == [_TENSOR]:
            rows = rows.get(_TENSOR)
        elif self._kind is not None:
            rows = self._kind.from_tensordict(rows)
        if isinstance(index, torch.Tensor | np.ndarray) and index.ndim > 1:
            rows = rows.reshape(*index.shape, *rows.shape[1:])
        return rows[0] if single else rows

    def _slots(self, index: Any, size: int | None) -> Numbers:
        """Slots as an array; ranges and negative numbers count from the length."""
        if isinstance(index, tuple) and len(index) == 1:
            index = index[0]
        if isinstance(index, slice):
            return np.arange(*index.indices(len(self) if size is None else size), dtype=np.int64)
        if isinstance(index, range):
            return np.arange(index.start, index.stop, index.step, dtype=np.int64)
        if _is_single(index):
            index = [operator.index(index)]
        array = index.cpu().numpy() if isinstance(index, torch.Tensor) else np.asarray(index)
        if array.dtype == np.bool_:
            return np.flatnonzero(array).astype(np.int64)
        slots = array.reshape(-1).astype(np.int64)
        if len(slots) and int(slots.min()) < 0:
            slots = np.where(slots < 0, slots + (len(self) if size is None else size), slots)
        return slots

    def __len__(self) -> int:
        return len(self.slots)

    def contains(self, item: int | torch.Tensor) -> Any:
        """Whether slots are written."""
        rows = len(self)
        if isinstance(item, torch.Tensor):
            if item.dtype == torch.bool:
                return item.sum() <= rows
            return (item >= -rows) & (item < rows)
        return -rows <= item < rows

    def _empty(self) -> None:
        self.buffer.clear()
        self.slots.forget()

    def state_dict(self) -> dict[str, Any]:
        """Which buffer it is and how far it was written; no secret. The rows stay on the server."""
        return {"name": self.buffer.name, "written": self.buffer.num_written, "max_size": self.max_size}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Check that the buffer is still the one whose state was saved.

        Raises:
            StateError: it is another, or has lost rows since.
        """
        written = self.buffer.num_written
        if state_dict["name"] != self.buffer.name or state_dict["max_size"] != self.max_size:
            raise StateError(
                f"the state is of buffer {state_dict['name']!r} with {state_dict['max_size']} slots, this one is "
                f"{self.buffer.name!r} with {self.max_size}"
            )
        if written < state_dict["written"]:
            raise StateError(
                f"buffer {self.buffer.name!r} has lost its last {state_dict['written'] - written} rows of "
                f"{state_dict['written']} since the state was saved"
            )
        self.slots.forget()

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = Storage.__getstate__(self)
        # The server counts, and the slots are opened anew.
        for name in ("slots", "mutation_revision__context", "last_cursor_index__context"):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        Storage.__setstate__(self, state)
        self.slots = self.buffer.slots()

    def close(self) -> None:
        """Drop the connections. Using the storage again dials anew."""
        self.slots.close()
        self.buffer.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.buffer.url)!r}, max_size={self.max_size})"


class RedisWriter(RoundRobinWriter):  # type: ignore[misc]
    """A `RoundRobinWriter` whose cursor is the server's: any number of processes write, none over another's rows."""

    @property
    def _cursor(self) -> int:
        storage = self._storage
        if not isinstance(storage, RedisStorage):
            return 0
        cursor, size = storage.slots.state()[0], int(storage.max_size)
        return cursor % size

    @_cursor.setter
    def _cursor(self, value: int) -> None:
        """The server's cursor moves with the rows, and with nothing else."""

    def __getstate__(self) -> dict[str, Any]:
        self.__dict__.setdefault("_cursor_value", None)  # RoundRobinWriter takes its own out
        state: dict[str, Any] = super().__getstate__()
        return state

    def register_storage(self, storage: Storage) -> None:
        """Raises ConfigurationError for a storage that is no `RedisStorage`."""
        if not isinstance(storage, RedisStorage):
            raise ConfigurationError(f"RedisWriter writes to a RedisStorage, not to a {type(storage).__name__}")
        super().register_storage(storage)

    def add(self, data: Any) -> Any:
        """Store a row; its slot."""
        return self._stored(int(self._storage.append(data, single=True)[0]), data, 1)

    def extend(self, data: Sequence[Any] | TensorDictBase | torch.Tensor) -> Any:
        """Store rows; their slots."""
        if not len(data):
            raise RuntimeError(f"Expected at least one element in extend. Got {data=}")
        return self._stored(self._storage.append(data, single=False), data, len(data))

    def _stored(self, index: Any, data: Any, rows: int) -> Any:
        self._write_count += rows
        self._bump_generation(index, data)
        index = self._replicate_index(index)
        self._mark_update_entities(index)
        return index


def _is_single(index: Any) -> bool:
    if isinstance(index, torch.Tensor | np.ndarray):
        return index.ndim == 0 and index.dtype not in (torch.bool, np.bool_)
    return isinstance(index, int) and not isinstance(index, bool)


def _stacked(rows: list[Any]) -> Any:
    """Rows as one TensorDict, dense."""
    return torch.stack([row.to_tensordict(retain_none=False) for row in rows]).contiguous()
