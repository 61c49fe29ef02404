"""How a TensorDict's interface writes entries of a tree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Number
from typing import Any

import torch
from tensordict import NonTensorData, is_non_tensor, is_tensor_collection
from tensordict.base import NO_DEFAULT

from td_datapipes.remote.entries import (
    Additions,
    as_dict,
    check_history,
    collect,
    element_values,
    items_of,
    row_texts,
    row_values,
    zeros_like,
)
from td_datapipes.remote.index import RowIndex, split_index
from td_datapipes.remote.node import is_node
from td_datapipes.remote.operations import refuse
from td_datapipes.remote.reading import RemoteReading
from td_datapipes.remote.tree import Entry
from td_datapipes.remote.values import plain_values
from td_datapipes.schema import Key, format_key, normalise_key

__all__ = ["RemoteWriting"]


class RemoteWriting(RemoteReading):
    """Writes entries: whole, or rows or elements of them; each call all or nothing up to 32 MiB."""

    def _set_str(
        self,
        key: str,
        value: Any,
        *,
        inplace: bool | None,
        validated: bool,
        ignore_lock: bool = False,
        non_blocking: bool = False,
    ) -> Any:
        del non_blocking
        return self._set((key,), value, inplace=inplace, validated=validated, ignore_lock=ignore_lock)

    def _set_tuple(self, key: Any, value: Any, *, inplace: bool | None, validated: bool, non_blocking: bool) -> Any:
        del non_blocking
        return self._set(normalise_key(key), value, inplace=inplace, validated=validated)

    def _set(self, key: Key, value: Any, *, inplace: bool | None, validated: bool, ignore_lock: bool = False) -> Any:
        """Set an entry. `inplace` as torch's TensorDict has it: True needs the entry, None takes it if it is there."""
        self._tree.require_writable()
        check_history(self._prefix + key, value)
        found = self._entry(key, look=inplace is True)
        if inplace is True and found is None:
            raise KeyError(f"key {key!r} not found in {type(self).__name__} with keys {sorted(self.keys())}")
        inplace = inplace is not False and found is not None
        if not ignore_lock:
            self._check_lock(inplace)
        made, gone = Additions(), []
        if inplace and isinstance(found, torch.Tensor):
            made.entries[self._prefix + key] = _copied(value, found)
        elif inplace and is_node(found):
            self._node_at(self._prefix + key).update(value, inplace=True)
            return self
        else:
            holder = self._holder(key[:-1])
            if not validated:
                value = _validated(holder, key, value)
            collect(made, self._prefix + key, value, num_rows=self._num_rows)
            gone = self._stale(key, made)
        self._tree.current(lambda: self._tree.put(made.entries, made.nodes, gone))
        return self

    @property
    def _num_rows(self) -> int | None:
        return None if self._tree.unbatched else self._tree.rows

    def _holder(self, key: Key) -> Any:
        """What validates entries of a node: its structure, or that of the closest node above."""
        for depth in range(len(key), -1, -1):
            found = self._entry(key[:depth], look=False)
            if is_node(found):
                return found
        return self.structure

    def _stale(self, key: Key, made: Additions) -> list[Key]:
        """What is below a key and would stay although something else is set in its place."""
        where = self._prefix + key
        found = self._entry(key, look=False)
        if found is None or (not is_node(found) and where in made.entries):
            return []
        below = {self._prefix + key + normalise_key(item) for item in _every_key(found)}
        kept = {*made.entries, *(node.key for node in made.nodes)}
        if below <= kept and is_node(found) and where in kept and where not in made.entries:
            return []
        return [where]

    def update(
        self,
        input_dict_or_td: Any = None,
        clone: bool = False,
        inplace: bool = False,
        *,
        non_blocking: bool = False,
        keys_to_update: Sequence[Any] | None = None,
        is_leaf: Callable[[type], bool] | None = None,
        update_batch_size: bool = False,
        ignore_lock: bool = False,
        **kwargs: Any,
    ) -> Any:
        """As ``TensorDict.update``: nodes are merged. All new entries become one group, in one step."""
        del clone, non_blocking, is_leaf
        self._tree.require_writable()
        if update_batch_size:
            raise refuse("update(update_batch_size=True)", str(self._url))
        given = {} if input_dict_or_td is None else input_dict_or_td
        if given is self:
            return self
        only = None if keys_to_update is None else [normalise_key(key) for key in keys_to_update]
        made = Additions()
        self._merge(made, (), given, only)
        self._merge(made, (), kwargs, None)
        if not ignore_lock:
            known = all(self._entry(key[len(self._prefix) :]) is not None for key in made.entries)
            self._check_lock(inplace and known)
        if inplace:
            made.entries = {key: self._cast(key, entry) for key, entry in made.entries.items()}
        self._tree.current(lambda: self._tree.put(made.entries, made.nodes))
        return self

    def _merge(self, made: Additions, at: Key, given: Any, only: Sequence[Key] | None) -> None:
        for name, value in items_of(given):
            key = at + normalise_key(name)
            if only is not None and not any(key[: len(want)] == want or want[: len(key)] == key for want in only):
                continue
            nested = isinstance(value, Mapping) or (is_tensor_collection(value) and not is_non_tensor(value))
            if nested and is_node(self._entry(key, look=False)):
                self._merge(made, key, value, only)
            else:
                checked = _validated(self._holder(key[:-1]), key, value)
                collect(made, self._prefix + key, checked, num_rows=self._num_rows)

    def _cast(self, key: Key, entry: Entry) -> Entry:
        found = self._entry(key[len(self._prefix) :], look=False)
        fits = isinstance(found, torch.Tensor) and isinstance(entry, torch.Tensor)
        return _copied(entry, found) if fits else entry

    def update_(self, input_dict_or_td: Any, clone: bool = False, *, keys_to_update: Any = None, **kwargs: Any) -> Any:
        """As ``TensorDict.update_``: into entries that are there; works on a locked one."""
        del clone, kwargs
        for name, _ in items_of(input_dict_or_td):
            if keys_to_update is None and self._entry(normalise_key(name)) is None:
                raise KeyError(f"key {name!r} not found in {type(self).__name__} with keys {sorted(self.keys())}")
        return self.update(input_dict_or_td, inplace=True, keys_to_update=keys_to_update)

    def update_at_(self, input_dict_or_td: Any, index: Any, clone: bool = False, **kwargs: Any) -> Any:
        """As ``TensorDict.update_at_``."""
        del clone, kwargs
        self[index] = as_dict(input_dict_or_td)
        return self

    def __setitem__(self, index: Any, value: Any) -> None:
        """Set an entry, or write rows of all entries of `value`: one call, all or nothing up to 32 MiB."""
        if isinstance(index, str) or (
            isinstance(index, tuple) and index and all(isinstance(i, str | tuple) for i in index)
        ):
            self._set(normalise_key(index), value, inplace=False, validated=False)
            return
        self._setitem_index(index, value)

    def _setitem_index(self, index: Any, value: Any) -> None:
        self._tree.require_writable()
        split = None if self._tree.unbatched else split_index(index, self._tree.rows, len(self.batch_size))
        if split is None:
            local = self.to_local()
            local[index] = value
            self.update(local, inplace=True)
            return
        self._write(self._values_at(index, value, split), split)

    def _values_at(self, index: Any, value: Any, split: RowIndex) -> dict[Key, Any]:
        """What is assigned to each entry, by its key from the root on."""
        if isinstance(value, Number | torch.Tensor):
            leaves = (self._prefix + normalise_key(key) for key in self.structure.keys(True, True))
            return {key: value for key in leaves if key in self._fields}
        td = as_dict(value)
        shape = self._indexed_shape(index, split)
        if td.batch_size != shape and td.batch_dims:
            td = td.expand(shape)
        found: dict[Key, Any] = {}
        made = Additions()
        for name, item in _leaves(td):
            key = self._prefix + name
            if self._entry(name) is None:
                self._check_lock(None)
                made.entries[key] = self._unset(key, item, len(shape))
            found[key] = item
        if made.entries:
            self._tree.current(lambda: self._tree.put(made.entries))
        return found

    def _indexed_shape(self, index: Any, split: RowIndex) -> torch.Size:
        if split.plain:
            return torch.Size((len(split.rows), *self.batch_size[1:]))
        return self.batch_size[1:] if split.single else torch.empty(self.batch_size, device="meta")[index].shape

    def _unset(self, key: Key, item: Any, indexed_dims: int) -> Entry:
        """A new entry, some rows of which are about to be written."""
        if isinstance(item, torch.Tensor):
            return zeros_like(item, indexed_dims, self.batch_size)
        return plain_values(key, NonTensorData(None), self._num_rows)

    def _write(self, values: Mapping[Key, Any], split: RowIndex) -> None:
        """Write what is assigned to rows of entries: the tensors in one call, then each of the others."""
        known = self._fields
        tensors = {key: value for key, value in values.items() if key in known}
        # Before anything is written: what cannot be is found here.
        others = {key: row_texts(key, value, split) for key, value in values.items() if key not in known}

        def action() -> None:
            known = self._tree.description
            fields, count = known.schema.fields, len(split.rows)
            if split.plain or split.single:
                rows = {
                    key: row_values(value, split, fields[key].shape, fields[key].dtype)
                    for key, value in tensors.items()
                }
                self._tree.write_rows(known, rows, split.rows)
            else:
                elements = {
                    key: element_values(value, split.rest, (count, *fields[key].shape), fields[key].dtype)
                    for key, value in tensors.items()
                }
                self._tree.write_elements(known, elements, split.rows)

        if tensors:
            self._tree.current(action)
        for key, given in others.items():
            self._tree.current(partial(self._tree.put_values, key, given))

    @property
    def _fields(self) -> Any:
        return self._tree.description.schema.fields

    def _set_at_str(self, key: str, value: Any, idx: Any, *, validated: bool, non_blocking: bool) -> Any:
        return self._set_at_tuple((key,), value, idx, validated=validated, non_blocking=non_blocking)

    def _set_at_tuple(self, key: Any, value: Any, idx: Any, *, validated: bool, non_blocking: bool) -> Any:
        del validated, non_blocking
        self._tree.require_writable()
        parts = normalise_key(key)
        found = self._entry(parts)
        if found is None:
            raise KeyError(f"key {key!r} not found in {type(self).__name__} with keys {sorted(self.keys())}")
        where = self._prefix + parts
        if is_node(found):
            self._node_at(where)[idx] = value
            return self
        split = None if self._tree.unbatched else split_index(idx, self._tree.rows, found.ndim)
        if split is None:
            whole = self._get_tuple(parts)
            whole[idx] = value
            self._set(parts, whole, inplace=True, validated=True)
        elif is_non_tensor(found) or isinstance(value, torch.Tensor):
            self._write({where: value}, split)
        else:
            self._write({where: torch.as_tensor(value)}, split)
        return self

    # Removing and renaming.

    def del_(self, key: Any) -> Any:
        """Remove an entry, or a node with all below it."""
        self._check_lock(None)
        parts = normalise_key(key)
        if self._entry(parts) is None:
            raise KeyError(f"key {key!r} not found in {type(self).__name__} with keys {sorted(self.keys())}")
        self._tree.current(lambda: self._tree.delete(self._prefix + parts))
        return self

    def __delitem__(self, key: Any) -> None:
        self.del_(key)

    def pop(self, key: Any, default: Any = NO_DEFAULT) -> Any:
        """Remove an entry and give it, in memory."""
        self._tree.require_writable()
        self._check_lock(None)
        found = self._get_tuple(normalise_key(key), default)
        if found is default:
            return default
        value = self._local(normalise_key(key)) if is_node(found) else found
        self.del_(key)
        return value

    def popitem(self) -> tuple[str, Any]:
        """Remove the last entry and give its key and value."""
        keys = list(self.keys())
        if not keys:
            raise KeyError("popitem(): the RedisTensorDict is empty")
        return keys[-1], self.pop(keys[-1])

    def clear(self) -> Any:
        """Remove all entries."""
        return self._remove([(key,) for key in self.keys()])

    def exclude(self, *keys: Any, inplace: bool = False) -> Any:
        """As ``TensorDict.exclude``. What it gives is in memory.

        With ``inplace=True`` the keys are removed from the server, in one step, and the result is this handle.
        """
        if inplace:
            return self._remove([key for key in map(normalise_key, keys) if self._entry(key) is not None])
        return self.to_local().exclude(*keys)

    def _remove(self, keys: Sequence[Key]) -> Any:
        """Remove entries, in one step."""
        self._tree.require_writable()
        self._check_lock(None)
        gone = [self._prefix + key for key in keys]
        if gone:
            self._tree.current(lambda: self._tree.put({}, (), gone))
        return self

    def rename_key_(self, old_key: Any, new_key: Any, safe: bool = False) -> Any:
        """Give an entry, or a node, another key; no data moves."""
        self._check_lock(None)
        old, new = normalise_key(old_key), normalise_key(new_key)
        if self._entry(old) is None:
            raise KeyError(f"key {old_key!r} not found in {type(self).__name__} with keys {sorted(self.keys())}")
        if safe and self._entry(new) is not None:
            raise KeyError(f"key {new_key!r} already present in {type(self).__name__}")
        if new[: len(old)] == old and new != old:
            raise KeyError(f"{old_key!r} cannot be moved below itself, to {new_key!r}")
        self._tree.current(lambda: self._tree.rename(self._prefix + old, self._prefix + new))
        return self

    # Filling.

    def fill_(self, key: Any, value: float | bool) -> Any:
        """Set all elements of an entry, or of all entries of a node."""
        self._tree.require_writable()
        parts = normalise_key(key)
        found = self._entry(parts)
        if found is None:
            raise KeyError(f"key {key!r} not found in {type(self).__name__} with keys {sorted(self.keys())}")
        if is_node(found):
            for name in list(found.keys(True, True)):
                self.fill_((*parts, *normalise_key(name)), value)
        else:
            filled = torch.full(found.shape, value, dtype=found.dtype)
            self._set(parts, filled, inplace=True, validated=True)
        return self

    def zero_(self) -> Any:
        """Set all elements of all entries to 0."""
        for key in list(self.structure.keys(True, True)):
            self.fill_(key, 0)
        return self


def _validated(holder: Any, key: Key, value: Any) -> Any:
    """What a TensorDict would store for a value.

    Raises:
        RuntimeError: it does not begin with the batch size.
    """
    try:
        return holder._validate_value(value, check_shape=True)
    except RuntimeError as error:
        raise RuntimeError(f"entry {format_key(key)}: {error}") from None


def _every_key(found: Any) -> list[Any]:
    return list(found.keys(True, False)) if is_node(found) else []


def _leaves(td: Any, prefix: Key = ()) -> Iterator[tuple[Key, Any]]:
    for name, value in items_of(td):
        if is_node(value):
            yield from _leaves(value, (*prefix, name))
        else:
            yield (*prefix, name), value


def _copied(value: Any, found: Any) -> torch.Tensor:
    """What ``found.copy_(value)`` would leave in it."""
    if isinstance(value, torch.Tensor) and value.dtype == found.dtype and value.shape == found.shape:
        return value
    made = torch.empty(found.shape, dtype=found.dtype)
    return made.copy_(torch.as_tensor(value))
