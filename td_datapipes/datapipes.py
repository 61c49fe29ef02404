"""`RedisTDIterDataPipe` and `RedisTDIterableDataset`: data sets as streams, for torch's and torchdata's loaders."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Unpack, cast

import torch.distributed as dist
from tensordict import TensorDict
from torch.utils.data import IterableDataset, IterDataPipe, functional_datapipe, get_worker_info
from torch.utils.data.datapipes.datapipe import _IterDataPipeSerializationWrapper
from torch.utils.data.datapipes.iter import Batcher, Collator, Filter, Mapper
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES, _ShardingIterDataPipe
from torch.utils.data.graph import traverse_dps

from td_datapipes.errors import ConfigurationError, StateError
from td_datapipes.fronts import StreamArguments, StreamFront, Urls, make_stream
from td_datapipes.streaming import Stream, StreamIterator, WorkerShare

__all__ = ["RedisTDIterDataPipe", "RedisTDIterableDataset", "StatefulPipeWrapper"]

_GRAPH_SETTINGS = "torch.utils.data.graph_settings"
_MAX_FRAMES = 64


class RedisTDIterableDataset(StreamFront, IterableDataset[TensorDict]):
    """The rows of a data set as a stream, for ``DataLoader`` and ``StatefulDataLoader``.

        loader = StatefulDataLoader(RedisTDIterableDataset(url, batch_size=256, shuffle=True), batch_size=None)

    Workers are dealt the batches in turn, so a loader gives them in the same order with any number of workers. Ranks
    get equally many. The place is a few integers, and is exact and reached at once with StatefulDataLoader, whatever
    was read ahead. Everything announced is read ahead by the data set's own background thread.

    Args:
        url: server and name, or several of them, whose rows then come one after another.
        batch_size: rows of a TensorDict; give the loader ``batch_size=None`` then. By default rows come one by one.
        shuffle: block-shuffle the rows anew each epoch; see `BlockShuffleBatchSampler`. Else they come as stored.
        seed: of the order, in [0, 2**64).
        drop_last: leave out a last global batch that is not full. Else it is divided among the ranks.
        arguments: see `StreamArguments`. Ranks default to the default process group's.

    Raises:
        ConfigurationError: arguments that cannot work, or contradict each other.
        TDDatapipesError: as `RedisTDDataset`.
    """

    def __init__(
        self,
        url: Urls,
        *,
        batch_size: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        **arguments: Unpack[StreamArguments],
    ) -> None:
        super().__init__()
        self._stream, _ = make_stream(
            url, batch_size=batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last, arguments=arguments
        )

    @classmethod
    def of_stream(cls, stream: Stream) -> RedisTDIterableDataset:
        """The front of a stream that exists."""
        made = cls.__new__(cls)
        made._stream = stream
        return made

    def __iter__(self) -> StreamIterator:
        return self._stream.open()

    def __len__(self) -> int:
        """This rank's items in the running epoch, over all its workers. TypeError where it follows its data set."""
        return len(self._stream)

    def state_dict(self) -> dict[str, int | str]:
        """Where the latest pass in this process stands, counting what it gave."""
        return self._stream.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """The next pass goes on from there, once.

        Raises:
            StateError: a place in another order, batch size, number of ranks or of workers; both are named.
        """
        self._stream.load_state_dict(state_dict)

    def __enter__(self) -> RedisTDIterableDataset:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.source!r})"


@functional_datapipe("read_redis_td")
class RedisTDIterDataPipe(StreamFront, IterDataPipe[TensorDict]):
    """The rows of a data set as a stream, as a source of torch's datapipes.

        pipe = RedisTDIterDataPipe(url, batch_size=256, shuffle=True).map(augment)
        loader = StatefulDataLoader(pipe, batch_size=None, num_workers=2)

    It shuffles and shares its rows by itself: ``DataLoader(pipe, shuffle=True)`` and the graph functions
    `apply_shuffle_settings` and `apply_sharding` reach it, and ``.sharding_filter()`` right behind it changes nothing.
    A sharding filter further behind does the sharing instead; each worker then reads all rows.

    **Resuming.** StatefulDataLoader wraps every pipe in one that has no state. This pipe gives its wrapper one when a
    loader sets the pipe's seed, so that it resumes exactly and at once, also through ``.map()``, ``.filter()``,
    ``.collate()`` and ``.batch()``. Where another pipe that keeps rows to itself stands between (``.shuffle()``, say),
    the loader's state would be wrong: asking for it raises a `StateError`. `stateful` gives the same stream as an
    `IterableDataset`, which needs no wrapper.

    As a functional form it reads the data sets whose URLs another pipe gives: ``urls.read_redis_td(batch_size=256)``.

    Args:
        url: server and name, several of them, or a pipe of them, which is asked at once.
        batch_size, shuffle, drop_last: as for `RedisTDIterableDataset`.
        seed: of the order. None takes what a loader gives its pipes, another one for each of its iterations.
        arguments: see `StreamArguments`. Ranks are told by the loader, or by `apply_sharding`.

    Raises:
        ConfigurationError: arguments that cannot work, or contradict each other.
        TDDatapipesError: as `RedisTDDataset`.
    """

    def __init__(
        self,
        url: Urls | IterDataPipe[str],
        *,
        batch_size: int | None = None,
        shuffle: bool = False,
        seed: int | None = 0,
        drop_last: bool = False,
        **arguments: Unpack[StreamArguments],
    ) -> None:
        super().__init__()
        urls: Urls
        if isinstance(url, IterDataPipe):
            self.source_datapipe = url
            urls = list(url)
        else:
            urls = url
        self._ranks_given = arguments.get("rank") is not None
        if not self._ranks_given:
            # Whoever applies the sharding knows of the ranks; counting them here as well would share rows twice.
            arguments["rank"], arguments["world_size"] = 0, 1
        self._stream, self._make_sampler = make_stream(
            urls, batch_size=batch_size, shuffle=shuffle, seed=seed or 0, drop_last=drop_last, arguments=arguments
        )
        self._own_seed = seed is not None
        self._loader_seed: int | None = None
        self._share = WorkerShare()

    def __iter__(self) -> Iterator[TensorDict]:
        return self._stream.open(self._share, self._loader_seed)

    def __len__(self) -> int:
        """This rank's (or share's) items in the running epoch. TypeError where it follows its data set."""
        return self._stream.length(self._share if get_worker_info() is None else WorkerShare())

    # What torch's graph functions look for.

    def set_shuffle(self, shuffle: bool = True) -> RedisTDIterDataPipe:
        """Shuffle from the next pass on, or do not. Called by ``DataLoader(pipe, shuffle=...)``."""
        if shuffle and self._stream.options.follow:
            raise ConfigurationError("a pipe with follow=True gives rows as they are published: it cannot be shuffled")
        before = self._stream.sampler
        self._stream.sampler = self._make_sampler(self._stream.source, shuffle)
        self._stream.sampler.seed = before.seed
        self._stream.sampler.rank, self._stream.sampler.world_size = before.rank, before.world_size
        return self

    def set_seed(self, seed: int) -> RedisTDIterDataPipe:
        """What a loader calls before each of its iterations; it is the order's seed where the pipe was given none."""
        self._loader_seed = seed
        if not self._own_seed:
            self._stream.sampler.seed = seed % (1 << 64)
        for found in _values_in_graph_functions(_IterDataPipeSerializationWrapper):
            if type(found) is _IterDataPipeSerializationWrapper:
                found.__class__ = StatefulPipeWrapper
        return self

    @property
    def apply_sharding(self) -> Any:
        """What torch's `apply_sharding` calls; not there where it has met a sharding filter behind this pipe."""
        if any(True for _ in _values_in_graph_functions(_ShardingIterDataPipe)):
            raise AttributeError("a sharding filter behind this pipe shares its rows")
        return self._take_share

    def _take_share(
        self, num_instances: int, instance_id: int, sharding_group: SHARDING_PRIORITIES = SHARDING_PRIORITIES.DEFAULT
    ) -> None:
        """Take one of so many shares. Ranks get equally many rows each; workers are dealt them in turn."""
        if not 0 <= instance_id < num_instances:
            raise ConfigurationError(f"instance_id must be in [0, {num_instances}), got {instance_id}")
        num_ranks, num_workers = _ranks_and_workers(num_instances, sharding_group)
        rank, worker = instance_id % num_ranks, instance_id // num_ranks
        if not self._ranks_given and sharding_group != SHARDING_PRIORITIES.MULTIPROCESSING:
            self._stream.sampler.rank, self._stream.sampler.world_size = rank, num_ranks
        if sharding_group != SHARDING_PRIORITIES.DISTRIBUTED:
            self._share = WorkerShare(worker=worker, num_workers=num_workers)

    def sharding_filter(self, *_: object, **__: object) -> RedisTDIterDataPipe:
        """The pipe itself: it shares its rows without reading those of others."""
        return self

    # State.

    def state_dict(self) -> dict[str, int | str]:
        """Where the latest pass in this process stands, counting what it gave."""
        return self._stream.state_dict(self._share, self._loader_seed)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """The next pass goes on from there, once. Raises as `RedisTDIterableDataset.load_state_dict`."""
        self._stream.load_state_dict(state_dict, self._share, self._loader_seed)

    def discard_if_at_end(self) -> None:
        """Forget a loaded place behind the epoch's last item, so that the next pass is of the next epoch."""
        self._stream.discard_if_at_end()

    def stateful(self) -> RedisTDIterableDataset:
        """The same stream as an `IterableDataset`, whose state loaders save without any wrapper."""
        return RedisTDIterableDataset.of_stream(self._stream)

    def __enter__(self) -> RedisTDIterDataPipe:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class StatefulPipeWrapper(_IterDataPipeSerializationWrapper):
    """What loaders wrap a pipe in, with the state of the one `RedisTDIterDataPipe` in it.

    StatefulDataLoader finds state by its two methods. Other pipes' wrappers stay as they are.
    """

    def state_dict(self) -> dict[str, int | str]:
        """The source's. Raises StateError where other pipes hold rows that it has counted as given."""
        return self._source().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """The source's next pass goes on from there, once."""
        source = self._source()
        source.load_state_dict(state_dict)
        if source is not self._datapipe and get_worker_info() is None:
            # Pipes in between ask for it later than the loader believes, who may want the next epoch by then.
            source.discard_if_at_end()

    def _source(self) -> RedisTDIterDataPipe:
        found = self.__dict__.get("_found_source")
        if found is None:
            found = self._found_source = _only_source(self._datapipe)
        return cast(RedisTDIterDataPipe, found)


def _only_source(pipe: Any) -> RedisTDIterDataPipe:
    """The one source of a chain of pipes that keep nothing from one item to the next."""
    passing = (Mapper, Collator, Filter, Batcher)
    while not isinstance(pipe, RedisTDIterDataPipe):
        inner = [found for found, _ in traverse_dps(pipe)[id(pipe)][1].values()]
        if type(pipe) not in passing or len(inner) != 1:
            raise StateError(
                f"{type(pipe).__name__} stands behind a RedisTDIterDataPipe and keeps rows or a count to itself, so "
                "the loader's state could not be resumed exactly. Let the pipe shuffle and share by itself "
                "(shuffle=True, no sharding_filter), keep to map, filter, collate and batch, or use torch's DataLoader"
            )
        pipe = inner[0]
    return pipe


def _values_in_graph_functions(kind: type) -> Iterator[Any]:
    """What of a kind the functions of torch's `graph_settings` that are running now hold in their local variables.

    They hand a pipe neither its wrapper nor the pipes behind it, and there is no other way to learn of them.
    """
    frame = inspect.currentframe()
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return
        if frame.f_globals.get("__name__") == _GRAPH_SETTINGS:
            yield from (value for value in frame.f_locals.values() if isinstance(value, kind))
        frame = frame.f_back


def _ranks_and_workers(num_instances: int, sharding_group: SHARDING_PRIORITIES) -> tuple[int, int]:
    """How many ranks and workers an application of sharding counts: loaders multiply the two."""
    if sharding_group == SHARDING_PRIORITIES.DISTRIBUTED:
        return num_instances, 1
    if sharding_group == SHARDING_PRIORITIES.MULTIPROCESSING:
        return 1, num_instances
    info = get_worker_info()
    if info is not None and num_instances % info.num_workers == 0:
        return num_instances // info.num_workers, info.num_workers
    num_ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    return (num_ranks, num_instances // num_ranks) if num_instances % num_ranks == 0 else (1, num_instances)
