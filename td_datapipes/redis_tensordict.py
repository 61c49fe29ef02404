"""`RedisTensorDict`: a TensorDict whose entries live on a server and are read and written there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection

from td_datapipes.catalog import connect, drop, unlink_keys
from td_datapipes.collate import register_collate
from td_datapipes.errors import ConfigurationError, DatasetExistsError
from td_datapipes.layouts import StoreDescription
from td_datapipes.manifest import Manifest
from td_datapipes.remote.entries import Additions, class_path, collect, loaded_class, node_of
from td_datapipes.remote.futures import Background, RemoteFuture
from td_datapipes.remote.operations import LocalOperations
from td_datapipes.remote.records import FrozenTree, RecordsTree, create_records
from td_datapipes.remote.store import StoreTree, create_store
from td_datapipes.remote.tree import Tree, TreeOptions
from td_datapipes.remote.writing import RemoteWriting
from td_datapipes.schema import Node
from td_datapipes.store_writer import store_keys
from td_datapipes.upstream import find_description, open_description
from td_datapipes.wire.server import Server
from td_datapipes.wire.url import ServerURL

__all__ = ["RedisTensorDict"]

# Whoever has one of these may give its rows to torch's loaders. Not with the package: that would import torch.
register_collate()

LayoutName = Literal["records", "tensordict_store"]


class RedisTensorDict(RemoteWriting, LocalOperations, TensorDictBase):  # type: ignore[misc, override]
    """A TensorDict on a Redis or Valkey server: keys, indexed reads and writes, and what else reads or writes entries.

    Reading an entry gives a tensor in memory, which is not connected to the server; writing changes what every other
    process sees. A call is one round trip. What makes new tensors (``td + 1``, ``td.sum()``, ``torch.stack``) is done
    in memory, on ``to_local()``; what would change tensors in place or view them raises and names ``to_local()``.

    ``RedisTensorDict(url, batch_size=[n])`` makes an empty one; `from_tensordict` and `from_dict` one with entries;
    `from_redis` opens what is there, also what ``tensordict.store.TensorDictStore`` wrote. What `write_dataset` wrote
    is read only: what would change it raises `RemoteOperationError`.

    A row of a group (the entries that were set by one call) is read and written as a whole; a call that writes up to
    32 MiB is carried out as a whole, too. Handles of other processes see new values at once, and new entries when they
    look for them or after `refresh`.

    Args:
        url: server and name, as for `RedisTDDataset`.
        batch_size: leading dims of all entries. ``[]`` makes one row.
        layout: ``records``, or ``tensordict_store`` to share it with users of ``TensorDictStore``.
        device: where reads put tensors.
        names: of the batch dims.
        overwrite: put it in place of what the name stands for.

    Raises:
        DatasetExistsError: the name is taken, and `overwrite` is not set.
    """

    def __init__(
        self,
        url: str,
        *,
        batch_size: Sequence[int] | torch.Size | int = (),
        layout: LayoutName = "records",
        device: torch.device | str | None = None,
        names: Sequence[str | None] | None = None,
        overwrite: bool = False,
    ) -> None:
        sizes = [batch_size] if isinstance(batch_size, int) else list(batch_size)
        empty = TensorDict({}, batch_size=sizes, names=None if names is None else list(names))  # type: ignore[arg-type]
        self._attach(_create(url, empty, layout, device, overwrite), ())

    @classmethod
    def from_tensordict(
        cls,
        td: Any,
        url: str,
        *,
        layout: LayoutName = "records",
        device: torch.device | str | None = None,
        overwrite: bool = False,
    ) -> Any:
        """Write a TensorDict to a server; its tensors become one group.

        Args:
            td: a TensorDict, or a tensorclass: then the result is one, too.
            url, layout, device, overwrite: as for the class.

        Raises:
            SchemaError: an entry that cannot be stored; it names it.
        """
        device = td.device if device is None else device
        made = cls._opened(_create(url, td, layout, device, overwrite))
        return type(td)._from_tensordict(made) if class_path(td) else made

    @classmethod
    def from_dict(  # type: ignore[override]
        cls,
        input_dict: Mapping[Any, Any],
        url: str,
        *,
        batch_size: Sequence[int] | torch.Size | None = None,
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
        names: Sequence[str] | None = None,
        layout: LayoutName = "records",
        device: torch.device | str | None = None,
        overwrite: bool = False,
    ) -> RedisTensorDict:
        """Write a (nested) dictionary to a server.

        Args:
            input_dict: entries by key.
            batch_size, auto_batch_size, batch_dims, names: as for ``TensorDict.from_dict``.
            url, layout, device, overwrite: as for the class.
        """
        td = TensorDict.from_dict(
            dict(input_dict),
            batch_size=batch_size,
            auto_batch_size=auto_batch_size,
            batch_dims=batch_dims,
            names=names,
        )
        made = cls.from_tensordict(td, url, layout=layout, device=device, overwrite=overwrite)
        return cast(RedisTensorDict, made)

    def from_dict_instance(self, input_dict: Mapping[Any, Any], *args: Any, **kwargs: Any) -> TensorDict:
        """A TensorDict in memory, as ``TensorDict.from_dict`` makes it."""
        return TensorDict.from_dict(dict(input_dict), *args, **kwargs)

    @classmethod
    def from_redis(
        cls,
        url: str,
        *,
        device: torch.device | str | None = None,
        tensorclass: type | None = None,
        allow_pickle: bool = False,
        atomic: bool = False,
    ) -> Any:
        """Open what is on a server, of either layout.

        Args:
            url: as for `RedisTDDataset`: also the id of what ``TensorDictStore`` wrote.
            device: where this handle puts tensors; by default where whoever made it said.
            tensorclass: what to wrap it in. By default the class it was made from, if this process has imported it:
                nothing is imported because a server says so.
            allow_pickle: as for `RedisTDDataset`.
            atomic: each call that reads gets one consistent snapshot of all rows and entries it asks for, in one Lua
                call, which blocks the server while it runs. Otherwise each row of a group is consistent in itself.

        Raises:
            DatasetNotFoundError: there is none of that name.
            ConfigurationError: it is a replay buffer.
        """
        server = connect(url)
        try:
            tree = _tree(server, TreeOptions(allow_pickle=allow_pickle, atomic=atomic))
        except BaseException:
            server.close()
            raise
        made = cls._opened(tree)
        if device is not None:
            made._device_here = torch.device(device)
        kind: Any = tensorclass or loaded_class(_root_type(tree))
        return made if kind is None else kind._from_tensordict(made)

    from_store = from_redis

    @classmethod
    def _opened(cls, tree: Tree) -> RedisTensorDict:
        made = cls.__new__(cls)
        made._attach(tree, ())
        return made

    # In the background.

    def get_async(self, key: Any, index: Any = None) -> RemoteFuture[Any]:
        """``get(key)``, or ``get_at(key, index)``, in the background, over a connection of its own.

        Returns:
            A future: ``result()`` waits for it, and ``await`` does where asyncio runs.
        """
        twin = self._twin()
        if index is None:
            return self._behind.submit(lambda: twin.get(key, None))
        return self._behind.submit(lambda: twin.get_at(key, index))

    def set_async(self, key: Any, value: Any, index: Any = None) -> RemoteFuture[None]:
        """``set(key, value)``, or ``set_at_(key, value, index)``, in the background; in the order they are asked for.

        The value must not be changed before the future is done.
        """
        twin = self._twin()

        def action() -> None:
            if index is None:
                twin.set(key, value)
            else:
                twin.set_at_(key, value, index)

        return self._behind.submit(action)

    def _twin(self) -> RedisTensorDict:
        """A handle of its own for the background thread."""
        root = self._root
        if root._other is None:
            root._other = root._opened(_reopened(root._tree))
        return root._other if not self._prefix else cast(RedisTensorDict, root._other._node_at(self._prefix))

    @property
    def _behind(self) -> Background:
        root = self._root
        if root._background is None:
            root._background = Background()
        behind: Background = root._background
        return behind

    # Its life.

    @property
    def url(self) -> ServerURL:
        """Where it is; its repr has no credentials."""
        return self._tree.server.url

    @property
    def layout(self) -> LayoutName:
        """Which layout it is in."""
        return "records" if isinstance(self._tree.description, Manifest) else "tensordict_store"

    def refresh(self) -> bool:
        """Look for entries that others have added, removed or set anew; whether there were any."""
        return self._tree.refresh()

    def clear_redis(self) -> None:
        """Remove all of it from the server, whichever node this is. `clear` keeps an empty one."""
        self._check_lock(None)
        self._tree.clear()

    def close(self) -> None:
        """Drop the connections. What is on the server stays; reading again dials anew."""
        root = self._root
        if root._background is not None:
            root._background.close()
        if root._other is not None:
            root._other.close()
        self._tree.close()

    def __getstate__(self) -> dict[str, Any]:
        tree = self._tree
        return {
            "server": tree.server,
            "description": tree.description,
            "options": tree.options,
            "prefix": self._prefix,
            "locks": set(self._locks),
            "device": self._device_here,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        tree = _tree_of(state["server"], state["description"], state["options"])
        self._attach(tree, state["prefix"])
        self._locks.update(state["locks"])
        self._device_here = state["device"]

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        return _unpickled, (type(self),), self.__getstate__()

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Row after row, read some hundred at a time."""
        if not self.batch_size:
            raise TypeError("iteration over a 0-d RedisTensorDict")
        step = 256
        for start in range(0, self.batch_size[0], step):
            yield from self[start : start + step].unbind(0)

    def __repr__(self) -> str:
        keys = ", ".join(map(repr, self.keys()))
        where = f"{self.url}" + (f", prefix={self._prefix}" if self._prefix else "")
        return (
            f"{type(self).__name__}(\n    keys=[{keys}],\n    batch_size={self.batch_size},\n"
            f"    device={self.device},\n    layout={self.layout},\n    url={where})"
        )


def _unpickled(kind: type[RedisTensorDict]) -> RedisTensorDict:
    return kind.__new__(kind)


def _create(url: str, td: Any, layout: str, device: torch.device | str | None, overwrite: bool) -> Tree:
    if layout not in ("records", "tensordict_store"):
        raise ConfigurationError(f"layout must be 'records' or 'tensordict_store', got {layout!r}")
    if not is_tensor_collection(td):
        raise ConfigurationError(f"a TensorDict or tensorclass is written, not a {type(td).__name__}")
    unbatched = not td.batch_size
    rows = 1 if unbatched else td.batch_size[0]
    root = node_of((), td, unbatched=unbatched)
    made = Additions()
    collect(made, (), td, num_rows=None if unbatched else rows)
    nodes: list[Node] = [node for node in made.nodes if node.key]
    server, where = connect(url), "" if device is None else str(torch.device(device))
    options: dict[str, Any] = {
        "rows": rows,
        "root": root,
        "unbatched": unbatched,
        "device": where,
        "overwrite": overwrite,
        "entries": made.entries,
        "nodes": nodes,
        "options": TreeOptions(allow_pickle=False, atomic=False),
    }
    try:
        found = find_description(server, server.url.name)
        if found is not None and not overwrite:
            raise DatasetExistsError(
                f"there is a data set {server.url.name!r} at {server.address} ({found.rows} rows); open it with "
                f"from_redis, pass overwrite=True to put another in its place, or choose another name"
            )
        tree: Tree = create_records(server, **options) if layout == "records" else create_store(server, **options)
        if isinstance(found, Manifest) and layout != "records":
            drop(server, found.name)
        elif isinstance(found, StoreDescription) and layout == "records":
            server.call(f"removing {found.name!r}", lambda client: unlink_keys(client, store_keys(found)))
        return tree
    except BaseException:
        server.close()
        raise


def _tree(server: Server, options: TreeOptions) -> Tree:
    return _tree_of(server, open_description(server, server.url.name), options)


def _tree_of(server: Server, description: Any, options: TreeOptions) -> Tree:
    if isinstance(description, StoreDescription):
        return StoreTree(server, description, options)
    if description.kind == "ring":
        raise ConfigurationError(
            f"{description.name!r} at {server.address} is a replay buffer, whose rows are overwritten while it is "
            f"read; open it with RedisReplayBuffer"
        )
    if description.kind == "frozen":
        return FrozenTree(server, description, options)
    return RecordsTree(server, description, options)


def _reopened(tree: Tree) -> Tree:
    """The same, with connections of its own."""
    server = connect(tree.server.url)
    return _tree_of(server, tree.description, tree.options)


def _root_type(tree: Tree) -> str:
    description = tree.description
    return description.tensorclass if isinstance(description, StoreDescription) else description.schema.root.type
