"""A mixture keeps its shares exactly, its sources their own epochs, and its place through any interruption."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from servers import ServerProcess
from tensordict import TensorDict
from torch.utils.data import DataLoader
from torchdata.nodes import Loader
from torchdata.stateful_dataloader import StatefulDataLoader

from td_datapipes import RedisTDMixture, RedisTDReader, append_dataset, write_dataset
from td_datapipes.errors import ConfigurationError, SchemaError, StateError
from td_datapipes.mixing import MAX_PERIOD, MixtureOrder, SourceShape, slots_of_weights

pytestmark = pytest.mark.filterwarnings("ignore:.*set_vital.*", "ignore:This DataLoader will create.*")

SIZES = (40, 13, 7)
WEIGHTS = (5, 3, 2)


def source_rows(number: int, size: int) -> TensorDict:
    return TensorDict({"source": torch.full((size,), number), "i": torch.arange(size)}, [size])


@pytest.fixture(scope="module")
def sources(valkey_server: ServerProcess) -> Iterator[list[tuple[str, int]]]:
    names = []
    for number, (size, weight) in enumerate(zip(SIZES, WEIGHTS, strict=True)):
        url = valkey_server.url(f"source{number}")
        write_dataset(source_rows(number, size), url, chunk_bytes=160, overwrite=True)
        names.append((url, weight))
    yield names
    valkey_server.flush()


def pairs(batches: Any) -> list[tuple[int, int]]:
    return [pair for batch in batches for pair in zip(batch["source"].tolist(), batch["i"].tolist(), strict=True)]


def per_source(drawn: list[tuple[int, int]], number: int) -> list[int]:
    return [i for source, i in drawn if source == number]


def test_as_a_map_style_data_set_it_is_its_sources_one_after_another(sources: list[tuple[str, int]]) -> None:
    with RedisTDMixture(sources) as mixture:
        assert len(mixture) == sum(SIZES)
        whole = torch.cat([source_rows(number, size) for number, size in enumerate(SIZES)])  # type: ignore[arg-type]
        index = [59, 0, 39, 40, 40, 52, -1, 53]
        assert (mixture[index] == whole[index]).all()
        assert (mixture[:] == whole).all()
        assert int(mixture[45]["i"]) == 5
        assert mixture[[]].batch_size == (0,)
        assert mixture[torch.tensor([[0, 41], [55, 2]])].batch_size == (2, 2)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_period_has_exactly_the_shares_and_each_source_its_own_epochs(
    sources: list[tuple[str, int]], num_workers: int, shuffle: bool
) -> None:
    mixture = RedisTDMixture(sources, seed=4)
    assert (mixture.slots, mixture.period) == ((5, 3, 2), 10)
    assert mixture.shares == (Fraction(1, 2), Fraction(3, 10), Fraction(1, 5))
    sampler = mixture.batch_sampler(7, shuffle=shuffle)
    loader = DataLoader(mixture, batch_sampler=sampler, num_workers=num_workers)
    drawn = [pair for _ in range(5) for pair in pairs(loader)]
    assert len(drawn) == 5 * sum(SIZES)
    for at in range(0, len(drawn), 10):
        assert Counter(source for source, _ in drawn[at : at + 10]) == {0: 5, 1: 3, 2: 2}
    for number, size in enumerate(SIZES):
        rows = per_source(drawn, number)
        epochs = [rows[at : at + size] for at in range(0, len(rows) - size + 1, size)]
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
        assert all((epoch == list(range(size))) == (not shuffle) for epoch in epochs)
        if shuffle:
            assert len({tuple(epoch) for epoch in epochs}) == len(epochs)


def test_the_same_seed_gives_the_same_rows_and_another_others(sources: list[tuple[str, int]]) -> None:
    def epoch(seed: int) -> list[tuple[int, int]]:
        mixture = RedisTDMixture(sources, seed=seed)
        return pairs(DataLoader(mixture, batch_sampler=mixture.batch_sampler(8)))

    assert epoch(1) == epoch(1) != epoch(2)


@pytest.mark.parametrize(
    "options",
    [{"num_workers": 0}, {"num_workers": 1}, {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 4}],
)
def test_it_resumes_exactly(sources: list[tuple[str, int]], options: dict[str, Any]) -> None:
    def make() -> StatefulDataLoader[Any]:
        mixture = RedisTDMixture(sources, seed=1)
        return StatefulDataLoader(mixture, batch_sampler=mixture.batch_sampler(7), **options)

    loader = make()
    reference = [pairs(loader) for _ in range(3)]
    del loader
    loader = make()
    list(loader)
    iterator = iter(loader)
    assert pairs(islice(iterator, 3)) == reference[1][:21]
    state = loader.state_dict()
    del iterator, loader
    resumed = make()
    resumed.load_state_dict(state)
    assert [pairs(resumed) for _ in range(2)] == [reference[1][21:], reference[2]]


def test_ranks_share_each_global_batch(sources: list[tuple[str, int]]) -> None:
    mixture = RedisTDMixture(sources, seed=1)
    whole = pairs(DataLoader(mixture, batch_sampler=mixture.batch_sampler(8, num_samples=64)))
    samplers = [mixture.batch_sampler(4, num_samples=64, rank=rank, world_size=2) for rank in range(2)]
    parts = [pairs(DataLoader(mixture, batch_sampler=sampler)) for sampler in samplers]
    assert [len(part) for part in parts] == [32, 32]
    joined = [pair for at in range(0, 32, 4) for part in parts for pair in part[at : at + 4]]
    assert joined == whole


def test_the_elastic_cursor_changes_the_number_of_ranks(sources: list[tuple[str, int]]) -> None:
    mixture = RedisTDMixture(sources, seed=1)
    reference = pairs(DataLoader(mixture, batch_sampler=mixture.batch_sampler(4)))
    sampler = mixture.batch_sampler(4)
    list(islice(iter(sampler), 5))
    cursor = sampler.cursor()
    rest = []
    for rank in range(3):
        other = mixture.batch_sampler(2, rank=rank, world_size=3)
        other.load_cursor(cursor)
        for batch in other:
            rest += pairs([mixture[batch[: len(batch) - batch.padded]]])
    assert sorted(rest) == sorted(reference[20:])


class TestNode:
    def test_it_gives_what_the_sampler_gives_and_resumes(self, sources: list[tuple[str, int]]) -> None:
        mixture = RedisTDMixture(sources, seed=1)
        reference = [
            pairs(loader) for loader in [DataLoader(mixture, batch_sampler=mixture.batch_sampler(7))] for _ in range(3)
        ]
        sampler = mixture.batch_sampler(7)
        expected = [pairs(DataLoader(mixture, batch_sampler=sampler)) for _ in range(3)]
        assert expected == reference
        loader = Loader(RedisTDReader(RedisTDMixture(sources, seed=1), batch_size=7, shuffle=True))
        assert [pairs(loader) for _ in range(3)] == expected
        loader = Loader(RedisTDReader(RedisTDMixture(sources, seed=1), batch_size=7, shuffle=True))
        list(loader)
        iterator = iter(loader)
        assert pairs(islice(iterator, 2)) == expected[1][:14]
        resumed = Loader(RedisTDReader(RedisTDMixture(sources, seed=1), batch_size=7, shuffle=True))
        resumed.load_state_dict(loader.state_dict())
        assert [pairs(resumed) for _ in range(2)] == [expected[1][14:], expected[2]]

    def test_rows_one_by_one(self, sources: list[tuple[str, int]]) -> None:
        node = RedisTDReader(RedisTDMixture(sources), shuffle=True, read_rows=10)
        drawn = [int(row["source"]) for row in node]
        assert Counter(drawn) == {0: 30, 1: 18, 2: 12}

    def test_what_is_not_a_mixtures_is_refused(self, sources: list[tuple[str, int]]) -> None:
        mixture = RedisTDMixture(sources, seed=3)
        with pytest.raises(ConfigurationError, match="a mixture has its own, 3"):
            RedisTDReader(mixture, batch_size=4, seed=1)
        with pytest.raises(ConfigurationError, match="pinned"):
            RedisTDReader(mixture, batch_size=4, follow=True)
        with pytest.raises(ConfigurationError, match="pinned"):
            mixture.refresh()


def test_a_place_in_a_mixture_of_other_sources_is_refused(
    valkey_server: ServerProcess, sources: list[tuple[str, int]]
) -> None:
    state = RedisTDMixture(sources).batch_sampler(4).state_dict()
    with pytest.raises(StateError, match=r"5\*.*1\*"):
        RedisTDMixture([(url, 1) for url, _ in sources]).batch_sampler(4).load_state_dict(state)
    url = valkey_server.url("growing")
    write_dataset(source_rows(0, 5), url, overwrite=True)
    mixed = [(url, 1), sources[0]]
    state = RedisTDMixture(mixed).batch_sampler(4).state_dict()
    append_dataset(source_rows(0, 1), url)
    with pytest.raises(StateError, match=r":5.*:6"):
        RedisTDMixture(mixed).batch_sampler(4).load_state_dict(state)


def test_what_cannot_be_mixed_is_named(valkey_server: ServerProcess, sources: list[tuple[str, int]]) -> None:
    for weight in (0, -1, float("nan"), float("inf"), "7", True):
        with pytest.raises(ConfigurationError, match="weight 1"):
            RedisTDMixture([sources[0], (sources[1][0], weight)])  # type: ignore[list-item]
    with pytest.raises(ConfigurationError, match="at least one"):
        RedisTDMixture([])
    empty, unlike = valkey_server.url("empty"), valkey_server.url("unlike")
    write_dataset(source_rows(0, 0), empty, overwrite=True)
    with pytest.raises(ConfigurationError, match="'empty' has no rows"):
        RedisTDMixture([sources[0], (empty, 1)])
    write_dataset(TensorDict({"source": torch.zeros(2), "i": torch.arange(2)}, [2]), unlike, overwrite=True)
    with pytest.raises(SchemaError, match=r"'source0'.*'unlike'.*'source'"):
        RedisTDMixture([sources[0], (unlike, 1)])
    with RedisTDMixture([sources[0], (unlike, 1)], fields=["i"]) as mixture:
        assert mixture[:]["i"].tolist() == [*range(40), 0, 1]


@pytest.mark.parametrize(
    ("weights", "slots"),
    [
        ([1], (1,)),
        ([2, 2], (1, 1)),
        ([7, 3], (7, 3)),
        ([0.7, 0.3], (7, 3)),
        ([0.1, 0.25, 1], (2, 5, 20)),
        ([Fraction(1, 3), Fraction(2, 3)], (1, 2)),
        ([1, 65535], (1, 65535)),
        ([1, 1 << 40], (1, MAX_PERIOD - 1)),
    ],
)
def test_slots_are_the_smallest_integers_in_the_ratio(weights: list[Any], slots: tuple[int, ...]) -> None:
    assert slots_of_weights(weights) == slots


def test_rounded_shares_are_the_nearest() -> None:
    weights = [0.123456789, 0.3141592653, 0.562383945]
    slots = slots_of_weights(weights)
    shares = np.array(weights) / sum(weights)
    assert np.abs(np.array(slots) / sum(slots) - shares).max() < 1 / MAX_PERIOD


def test_any_place_of_the_order_is_found_at_once_and_far_out_too() -> None:
    shapes = tuple(
        SourceShape(rows=rows, first_row=first, block_rows=4, buffer_blocks=3, shuffle=True)
        for rows, first in ((1000, 0), (50, 1000))
    )
    order = MixtureOrder(shapes, (3, 1), 5, 0)
    whole = order.permute(np.arange(4000))
    assert (order.permute(np.arange(4000)[::-1]) == whole[::-1]).all()
    assert [int(order.permute(np.array([at]))[0]) for at in (0, 17, 3999)] == whole[[0, 17, 3999]].tolist()
    later = MixtureOrder(shapes, (3, 1), 5, 1000)
    assert (later.permute(np.arange(3000)) == whole[1000:]).all()
    far = order.permute(10**12 + np.arange(40))
    assert (far < 1000).sum() == 30
