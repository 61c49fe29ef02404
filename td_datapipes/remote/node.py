"""A node of a tree as a TensorDict shows it: keys, batch size, names, device, locks. Nothing here moves data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_non_tensor, is_tensor_collection

from td_datapipes.remote.futures import Background
from td_datapipes.remote.operations import refuse
from td_datapipes.remote.tree import Tree
from td_datapipes.schema import Key, normalise_key

__all__ = ["RemoteNode", "is_node"]

_LOCKED = (
    "Cannot modify locked TensorDict. For in-place modification, consider using the `set_()` method and make sure the "
    "key is present."
)


def is_node(value: Any) -> bool:
    """Whether it is a TensorDict (or tensorclass) with entries of its own."""
    return is_tensor_collection(value) and not is_non_tensor(value)


class RemoteNode:
    """A handle on a node of a tree. The root holds the connections; handles on other nodes share them."""

    _tree: Tree
    _prefix: Key
    _parent_root: Any
    _locks: set[Key]
    _device_here: torch.device | None
    _background: Background | None
    _other: Any
    _is_shared = False
    _is_memmap = False

    def _attach(self, tree: Tree, prefix: Key, root: Any = None) -> None:
        self._tree, self._prefix = tree, prefix
        self._parent_root = root  # None for the root: a cycle would leave its sockets to the garbage collector
        self._locks = set() if root is None else root._locks
        self._device_here = None if root is None else root._device_here
        self._background, self._other = None, None

    def _node_at(self, key: Key) -> Any:
        """A handle on the node of that key, counted from the root."""
        if not key:
            return self._root
        made = type(self).__new__(type(self))
        made._attach(self._tree, key, self._root)
        return made

    @property
    def _root(self) -> Any:
        return self if self._parent_root is None else self._parent_root

    # What it is.

    @property
    def structure(self) -> TensorDict:
        """The same tree of keys, shapes and dtypes without data, on the meta device; values that are no tensors are
        None. Nothing is read from the server.

        Raises:
            KeyError: this is a view of a node that has been removed.
        """
        node: Any = self._tree.skeleton
        for part in self._prefix:
            node = node._get_str(part, None) if node is not None else None
        if not isinstance(node, TensorDictBase):
            raise KeyError(f"{self._prefix} is no node of {self._tree.description.name!r} any more")
        return node

    @property
    def batch_size(self) -> torch.Size:
        """Leading dims of all entries."""
        return self.structure.batch_size

    @batch_size.setter
    def batch_size(self, value: Sequence[int]) -> None:
        self._change_batch_size(torch.Size(value))

    def _batch_size_setter(self, new_batch_size: torch.Size) -> None:
        self._change_batch_size(torch.Size(new_batch_size))

    def _change_batch_size(self, new_size: torch.Size) -> None:
        structure = self.structure
        if new_size == structure.batch_size:
            return
        rows = None if self._tree.unbatched else self._tree.rows
        if rows is not None and new_size[:1] != (rows,):
            raise refuse(
                f"changing the batch size from {list(structure.batch_size)} to {list(new_size)}", str(self._url)
            )
        changed = structure.clone(recurse=False)
        changed.batch_size = new_size  # raises where an entry does not begin with it
        node = next(node for node in self._tree.description.schema.nodes if node.key == self._prefix)
        shape = tuple(new_size) if rows is None else tuple(new_size[1:])
        names = None if node.names is None else (*node.names, *[None] * len(shape))[: len(shape) + 1]
        self._tree.set_nodes([replace(node, batch_shape=shape, names=names)])

    @property
    def _batch_size(self) -> torch.Size:
        return self.batch_size

    @property
    def device(self) -> torch.device | None:
        """Where reads put tensors, or None: in main memory."""
        if self._device_here is not None:
            return self._device_here
        stored = self._tree.description.device
        return torch.device(stored) if stored else None

    @device.setter
    def device(self, value: torch.device | str | None) -> None:
        self._tree.set_device("" if value is None else str(torch.device(value)))

    @property
    def _device(self) -> torch.device | None:
        return self.device

    @property
    def names(self) -> list[str | None]:
        """Names of the batch dims."""
        return list(self.structure.names)

    @names.setter
    def names(self, value: Sequence[str | None] | None) -> None:
        self._set_names(value)

    def _set_names(self, names: Sequence[str | None] | None) -> None:
        # Nodes below have the same leading dims: theirs change too.
        changed = self._tree.skeleton.clone(recurse=False)
        mine: Any = changed.get(self._prefix) if self._prefix else changed
        mine.names = None if names is None else list(names)
        nodes = []
        for node in self._tree.description.schema.nodes:
            if node.key[: len(self._prefix)] == self._prefix:
                found = tuple((changed.get(node.key) if node.key else changed).names)
                given = None if not any(found) else (None, *found) if self._tree.unbatched else found
                nodes.append(replace(node, names=given))
        self._tree.set_nodes(nodes)

    def _erase_names(self) -> None:
        self._set_names(None)

    def _has_names(self) -> bool:
        return any(self.names)

    @property
    def _td_dim_names(self) -> list[str | None] | None:
        return self.names if self._has_names() else None

    def _rename_subtds(self, names: Sequence[str | None] | None) -> None:
        """Nodes keep their own names."""

    @property
    def _url(self) -> Any:
        return self._tree.server.url

    # Locks: of a handle and its views, not of the server.

    @property
    def _is_locked(self) -> bool:
        return any(self._prefix[:depth] in self._locks for depth in range(len(self._prefix) + 1))

    @_is_locked.setter
    def _is_locked(self, value: bool) -> None:
        if value:
            self._locks.add(self._prefix)
        else:
            self._locks.discard(self._prefix)

    def _propagate_lock(self, lock_parents_weakrefs: Any = None, *, is_compiling: bool = False) -> None:
        del is_compiling
        self._locks.add(self._prefix)
        if lock_parents_weakrefs:
            self._lock_parents_weakrefs = [*self._lock_parents_weakrefs, *lock_parents_weakrefs]

    _lock_parents_weakrefs: Any

    def _propagate_unlock(self) -> list[Any]:
        if any(self._prefix[:depth] in self._locks for depth in range(len(self._prefix))):
            raise RuntimeError(
                "Cannot unlock a tensordict that is part of a locked graph. Unlock the root tensordict first."
            )
        self._locks -= {key for key in self._locks if key[: len(self._prefix)] == self._prefix}
        return []

    def _lock_sub_tensordicts(self) -> list[Any]:
        return []

    def _check_lock(self, inplace: bool | None) -> None:
        if self._is_locked and not inplace:
            raise RuntimeError(_LOCKED)

    # Keys.

    def keys(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        is_leaf: Callable[[type], bool] | None = None,
        *,
        sort: bool = False,
    ) -> Any:
        """As ``TensorDict.keys``; nothing is read from the server."""
        known = self.structure if self._prefix else self._tree.skeleton  # the root's, without a walk
        return known.keys(include_nested, leaves_only, is_leaf, sort=sort)

    def entry_class(self, key: Any) -> type:
        """Of what `get` gives for that key; nothing is read from the server."""
        found = self._entry(normalise_key(key))
        if found is None:
            raise KeyError(f"key {key!r} not found in {type(self).__name__}")
        return type(self) if is_node(found) else type(found)

    def _entry(self, key: Key, *, look: bool = True) -> Any:
        """What the structure has under a key, after another look at the server where it has nothing; else None."""
        found: Any = self.structure
        for part in key:
            found = found._get_str(part, None) if is_node(found) else None
        if found is None and look and self._tree.refresh():
            return self._entry(key, look=False)
        return found

    def _contains_str(self, key: str) -> bool:
        return self._entry((key,)) is not None
