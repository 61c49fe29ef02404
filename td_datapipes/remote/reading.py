"""How a TensorDict's interface reads entries of a tree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tensordict import TensorDict, is_non_tensor
from tensordict.base import NO_DEFAULT

from td_datapipes.errors import RowIndexError
from td_datapipes.remote.entries import loaded_class, unselected
from td_datapipes.remote.index import RowIndex, split_index
from td_datapipes.remote.node import RemoteNode, is_node
from td_datapipes.remote.operations import refuse
from td_datapipes.schema import Key, format_key, normalise_key

__all__ = ["RemoteReading"]

MAX_ITEMS_BYTES = 64 << 20
"""Read at once for `items` and `values`; larger ones are read entry by entry."""


class RemoteReading(RemoteNode):
    """Reads entries: whole, or rows of them; what it gives is in memory."""

    _remove: Callable[[Sequence[Key]], Any]

    def items(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        is_leaf: Callable[[type], bool] | None = None,
        *,
        sort: bool = False,
    ) -> Iterator[tuple[Any, Any]]:
        """As ``TensorDict.items``: all entries are read in one round trip, unless they are more than 64 MiB."""
        keys = list(self.keys(include_nested, leaves_only, is_leaf, sort=sort))
        leaves = [key for key in map(normalise_key, keys) if not is_node(self._entry(key))]
        at_once = self._tree.bytes_below(self._prefix) <= MAX_ITEMS_BYTES
        whole = self._read([self._prefix + key for key in leaves]) if at_once and leaves else None
        for key in keys:
            parts = normalise_key(key)
            if whole is not None and parts in leaves:
                yield key, whole._get_tuple(parts, None)
            else:
                yield key, self._get_tuple(parts, None)

    def values(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        is_leaf: Callable[[type], bool] | None = None,
        *,
        sort: bool = False,
    ) -> Iterator[Any]:
        """As ``TensorDict.values``; see `items`."""
        for _, value in self.items(include_nested, leaves_only, is_leaf, sort=sort):
            yield value

    # Reading.

    def _read(self, keys: Sequence[Key], rows: Any = None) -> Any:
        """Entries, as this node sees them: a TensorDict in memory."""
        found: Any = self._tree.read(keys, rows)
        if self._tree.unbatched:
            found = found[0]
        for key, kind in self._classes():
            if any(key[:depth] in keys for depth in range(len(key) + 1)):
                holder = found if len(key) == 1 else found.get(key[:-1])
                holder._set_str(
                    key[-1], kind._from_tensordict(found.get(key)), inplace=False, validated=True, non_blocking=False
                )
        for part in self._prefix:
            found = found._get_str(part, None)
        return found if self.device is None else found.to(self.device)

    def _classes(self) -> list[tuple[Key, Any]]:
        """The tensorclasses of nodes below the root, those that this process has loaded; the deepest first."""
        nodes = self._tree.description.schema.nodes
        kinds = [(node.key, loaded_class(node.type)) for node in nodes if node.type and node.key]
        return sorted(((key, kind) for key, kind in kinds if kind is not None), key=lambda item: -len(item[0]))

    def _local(self, key: Key) -> Any:
        """An entry or node, in memory.

        Raises:
            KeyError: it has been removed since this handle last looked.
        """
        return self._read([self._prefix + key])._get_tuple(key, NO_DEFAULT)

    def to_local(self) -> TensorDict:
        """Everything, read in one round trip into a TensorDict in memory."""
        made: TensorDict = self._read([self._prefix])
        return made

    def to_tensordict(self, *, retain_none: bool | None = None) -> TensorDict:
        """As `to_local`."""
        del retain_none
        return self.to_local()

    def _get_str(self, key: str, default: Any = NO_DEFAULT, **kwargs: Any) -> Any:
        return self._get_tuple((key,), default, **kwargs)

    def _get_tuple(self, key: Any, default: Any = NO_DEFAULT, **kwargs: Any) -> Any:
        del kwargs
        parts = normalise_key(key)
        found = self._entry(parts)
        if found is None:
            if default is not NO_DEFAULT:
                return default
            raise KeyError(f"key {key!r} not found in {type(self).__name__} with keys {sorted(self.keys())}")
        if not is_node(found):
            try:
                return self._local(parts)
            except KeyError:
                return self._get_tuple(parts, default)  # which knows by now that it is gone
        where = self._prefix + parts
        kind = next((kind for key, kind in self._classes() if key == where), None)
        node = self._node_at(where)
        return node if kind is None else kind._from_tensordict(node)

    def select(self, *keys: Any, inplace: bool = False, strict: bool = True) -> Any:
        """As ``TensorDict.select``, of which only what is selected is read. What it gives is in memory.

        With ``inplace=True`` what is not selected is removed from the server, and the result is this handle.
        """
        if inplace:
            self.structure.select(*keys, strict=strict)  # raises where one is missing
            return self._remove(list(unselected(self.structure, map(normalise_key, keys))))
        found = [key for key in map(normalise_key, keys) if self._entry(key) is not None]
        some = self._read([self._prefix + key for key in found]) if found else self.empty()
        made: TensorDict = some.select(*keys, strict=strict)
        return made

    def _get_at_str(self, key: str, idx: Any, default: Any = NO_DEFAULT, **kwargs: Any) -> Any:
        return self._get_at_tuple((key,), idx, default, **kwargs)

    def _get_at_tuple(self, key: Any, idx: Any, default: Any = NO_DEFAULT, **kwargs: Any) -> Any:
        del kwargs
        parts = normalise_key(key)
        found = self._entry(parts)
        if found is None:
            return self._get_tuple(parts, default)
        if is_node(found):
            return self._node_at(self._prefix + parts)[idx]
        index = None if self._tree.unbatched else split_index(idx, self._tree.rows, found.ndim)
        if not is_non_tensor(found) and found.is_nested:
            return self._jagged_at(parts, idx, index)
        if index is None:
            return self._get_tuple(parts)[idx]
        if is_non_tensor(found):  # or rows of different shapes: taken from the rows
            rows = self._read([self._prefix + parts], index.rows)
            return (rows if index.plain else rows[index.rest])._get_tuple(parts, NO_DEFAULT)
        try:
            value = self._read([self._prefix + parts], index.rows)._get_tuple(parts, NO_DEFAULT)
        except KeyError:
            return self._get_tuple(parts, default)  # which knows by now that it is gone
        return value if index.plain else value[index.rest]

    def _jagged_at(self, key: Key, idx: Any, index: RowIndex | None) -> Any:
        """Rows of a tensor of variable length: one, which may be indexed further, or a jagged tensor of them."""
        single = index is not None and isinstance(index.rest[0], int)
        if index is None or not (single or index.keeps_rows):
            raise RowIndexError(
                f"{format_key(self._prefix + key)} is of variable length: its rows are selected by one dim alone, not "
                f"by {idx!r}; index a single row for the dims of an item"
            )
        value = self._read([self._prefix + key], index.rows)._get_tuple(key, NO_DEFAULT)
        return value[0][index.rest[1:]] if single else value

    def get_at(self, key: Any, index: Any, default: Any = None, **kwargs: Any) -> Any:
        """``get(key)[index]``, of which only the rows that are needed are read."""
        return self._get_at_tuple(key, index, default, **kwargs)

    def _index_tensordict(self, index: Any, new_batch_size: Any = None, names: Any = None) -> Any:
        del new_batch_size, names
        split = None if self._tree.unbatched else split_index(index, self._tree.rows, len(self.batch_size))
        if split is None or not (split.plain or split.single):
            structure: Any = self.structure
            for key, value in structure.items(True, True):
                if not is_non_tensor(value) and value.is_nested:
                    raise RowIndexError(
                        f"the index {index!r} reshapes the batch, which cannot be done with jagged tensors "
                        f"({format_key(self._prefix + normalise_key(key))}): index rows by one dim alone"
                    )
        if split is None:
            return self.to_local()[index]
        found = self._read([self._prefix], split.rows)
        return found if split.plain else found[split.rest]

    # Copies.

    def _clone(self, recurse: bool = True) -> Any:
        # A shallow copy, too: what is set in it does not change what it was made from, and losses rely on that.
        del recurse
        return self.to_local()

    def empty(self, recurse: bool = False, **kwargs: Any) -> TensorDict:
        """An empty TensorDict in memory, of the same batch size, device and names."""
        names: Any = self.names
        made = TensorDict({}, batch_size=self.batch_size, device=self.device, names=names)
        if recurse:
            for name in self.keys():
                if is_node(self._entry((name,))):
                    made._set_str(
                        name, self._get_str(name).empty(recurse=True), inplace=False, validated=True, non_blocking=False
                    )
        return made.empty(recurse=recurse, **kwargs) if kwargs else made

    def is_contiguous(self) -> bool:
        """False: tensors are made when they are read."""
        return False

    def detach_(self) -> Any:
        """Itself: a server keeps no history of gradients."""
        return self

    def _check_is_shared(self) -> bool:
        return False

    def _check_device(self, *, raise_exception: bool = True) -> bool:
        del raise_exception
        return True

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Functions of torch (``torch.stack``, ``torch.cat``, ...) are given what is in memory."""
        del types

        def local(value: Any) -> Any:
            if isinstance(value, RemoteReading):
                return value.to_local()
            if isinstance(value, list | tuple):
                return type(value)(map(local, value))
            return value

        given = {name: local(value) for name, value in (kwargs or {}).items()}
        if isinstance((kwargs or {}).get("out"), RemoteReading):
            raise refuse(f"{getattr(func, '__name__', func)}(out=...)", str(kwargs["out"].url))
        return func(*map(local, args), **given)
