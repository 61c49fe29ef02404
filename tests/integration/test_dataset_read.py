"""What was written is what is read: every dtype, tree, index, layout of chunks and way to read, on both servers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import product
from typing import Any, get_args

import numpy as np
import pytest
import torch
from rows_in_memory import ALL_DTYPES, assert_same_rows, assert_same_tensor, bytes_of, random_rows, random_tensor
from servers import ServerProcess
from tensordict import TensorDict, TensorDictBase, lazy_stack, tensorclass

from td_datapipes import RedisTDDataset, write_dataset
from td_datapipes.errors import ConfigurationError, FieldNotFoundError, RowIndexError
from td_datapipes.plan import Strategy

STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
WAYS: list[dict[str, Any]] = [
    *({"strategy": strategy, "strided": strided} for strategy, strided in product(STRATEGIES, (False, True))),
    {"atomic": True},
    {"atomic": True, "strided": True},
]
"""Every way to read."""

ROWS = [7, 2, 2, 9, 0, -1]


def check_all_ways(url: str, expected: TensorDictBase, rows: list[int] | None = None, **options: Any) -> None:
    """Read by every strategy, contiguous and strided, and compare with the rows in memory."""
    rows = ROWS if rows is None else rows
    for way in WAYS:
        with RedisTDDataset(url, **way, **options) as dataset:
            assert len(dataset) == expected.batch_size[0]
            assert_same_rows(dataset[rows], expected[rows])
            assert_same_rows(dataset[:], expected)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("chunk_bytes", [None, 16, 160, 4096])
def test_every_dtype_is_bit_identical(server: ServerProcess, unique_name: str, chunk_bytes: int | None) -> None:
    shapes: list[tuple[int, ...]] = [(), (3,), (2, 5)]
    fields = {f"{dtype} {shape}": (dtype, shape) for dtype in ALL_DTYPES for shape in shapes}
    td = random_rows(10, fields)
    write_dataset(td, url := server.url(unique_name), chunk_bytes=chunk_bytes)
    check_all_ways(url, td)


def test_tensors_that_do_not_lie_as_they_seem_are_read_as_they_seem(server: ServerProcess, unique_name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    complexes = random_tensor((10, 4), torch.complex64, generator)
    td = TensorDict(
        {
            "transposed": torch.arange(60.0).reshape(6, 10).T,
            "stepped": torch.arange(200)[::2].reshape(10, 10)[:, ::3],
            "offset": random_tensor((12, 3), torch.bfloat16, generator)[2:],
            "flipped": torch.arange(30).reshape(10, 3).flip(0),
            "expanded rows": torch.arange(5, dtype=torch.int16).expand(10, 5),
            "expanded within": torch.arange(10.0).reshape(10, 1).expand(10, 7),
            "permuted": random_tensor((4, 10, 3), torch.float8_e5m2, generator).permute(1, 2, 0),
            "channels last": torch.randn(10, 3, 4, 4, generator=generator).to(memory_format=torch.channels_last),
            "conjugated": complexes.conj(),
            "imaginary of conjugated": complexes.conj().imag,
            "gradient": torch.ones(10, 2, requires_grad=True) * 3,
            "parameter": torch.nn.Parameter(torch.arange(10.0)),
        },
        batch_size=[10],
    )
    write_dataset(td, url := server.url(unique_name), chunk_bytes=1024)
    check_all_ways(url, td.detach())


def test_one_row_cut_from_a_longer_tensor_is_written(server: ServerProcess, unique_name: str) -> None:
    td = TensorDict({"x": torch.arange(300.0)[::300], "y": torch.arange(60).reshape(3, 20)[::3, ::20]}, [1])
    write_dataset(td, url := server.url(unique_name))
    check_all_ways(url, td, [0, 0, -1])


def nested_rows() -> TensorDict:
    """Four levels, batch sizes and names of their own, and keys that look alike."""
    td = TensorDict(
        {
            "obs": torch.randn(10, 4),
            "a.b": torch.arange(10),
            "a": {"b": torch.arange(10) + 100, "": torch.ones(10, 2)},
            " ": torch.zeros(10, dtype=torch.bool),
            "ключ €\n": torch.rand(10),
            "('a', 'b')": torch.rand(10, 1),
            "next": TensorDict(
                {
                    "obs": torch.randn(10, 3, 4),
                    "deep": TensorDict(
                        {"er": TensorDict({"est": torch.randn(10, 3, 2, 5)}, [10, 3, 2]), "flag": torch.ones(10, 3, 2)},
                        [10, 3, 2],
                        names=["row", "time", "agent"],
                    ),
                },
                [10, 3],
            ),
            "no entries": TensorDict({"none either": {}}, [10]),
        },
        batch_size=[10],
    )
    td["next"].names = ["row", "time"]
    return td


def test_a_tree_comes_back_with_its_keys_batch_sizes_and_names(server: ServerProcess, unique_name: str) -> None:
    td = nested_rows()
    write_dataset(td, url := server.url(unique_name), chunk_bytes=512)
    check_all_ways(url, td)
    with RedisTDDataset(url) as dataset:
        assert_same_rows(dataset[3], td[3])
        assert [str(field) for field in dataset.fields] == [str(key) for key in dataset.schema.fields]


def test_a_flat_key_with_a_dot_and_a_nested_one_both_survive(server: ServerProcess, unique_name: str) -> None:
    td = TensorDict({"a.b": torch.arange(3), "a": {"b": torch.arange(3) + 10}}, batch_size=[3])
    write_dataset(td, url := server.url(unique_name))
    for fields, kept in ((["a.b"], ["a.b"]), ([("a", "b")], [("a", "b")]), (["a"], [("a", "b")])):
        with RedisTDDataset(url, fields=fields) as dataset:
            assert_same_rows(dataset[:], td.select(*kept))


@pytest.mark.parametrize("batch_size", [[6, 3], [6, 3, 2]])
def test_rows_may_have_batch_dims_of_their_own(server: ServerProcess, unique_name: str, batch_size: list[int]) -> None:
    td = TensorDict(
        {"x": torch.randn(*batch_size, 4), "n": TensorDict({"y": torch.rand(*batch_size)}, batch_size)}, batch_size
    )
    write_dataset(td, url := server.url(unique_name))
    check_all_ways(url, td, [5, 0, 0])
    with RedisTDDataset(url) as dataset:
        assert_same_rows(dataset[2], td[2])
        assert dataset[[[0, 1], [2, 3]]].batch_size == torch.Size([2, 2, *batch_size[1:]])


@tensorclass
class Transition:
    """A tensorclass as users write them."""

    obs: torch.Tensor
    reward: torch.Tensor


def test_a_tensorclass_is_read_as_the_tensordict_of_its_fields(server: ServerProcess, unique_name: str) -> None:
    rows = Transition(obs=torch.randn(5, 3), reward=torch.rand(5), batch_size=[5])
    write_dataset(rows, url := server.url(unique_name))
    plain = TensorDict({"obs": rows.obs, "reward": rows.reward}, [5])
    with RedisTDDataset(url) as dataset:
        assert_same_rows(dataset[:], plain)
    write_dataset([rows, rows[:2]], url, overwrite=True)
    with RedisTDDataset(url) as dataset:
        assert_same_rows(dataset[:], torch.cat([plain, plain[:2]]))


def test_a_lazy_stack_is_read_as_the_dense_one(server: ServerProcess, unique_name: str) -> None:
    rows = [TensorDict({"x": torch.full((2,), float(i)), "n": {"y": torch.tensor(i)}}) for i in range(10)]
    write_dataset(lazy_stack(rows), url := server.url(unique_name))
    check_all_ways(url, torch.stack(rows))


@pytest.mark.parametrize("rows", [0, 1])
def test_data_sets_of_no_row_and_of_one(server: ServerProcess, unique_name: str, rows: int) -> None:
    td = random_rows(rows, {"x": (torch.float32, (3,)), ("n", "y"): (torch.bool, ())})
    write_dataset(td, url := server.url(unique_name))
    check_all_ways(url, td, [0] * rows)
    with RedisTDDataset(url) as dataset:
        assert len(list(dataset)) == rows
        with pytest.raises(RowIndexError, match=f"row {rows} is not in"):
            dataset[rows]


def test_rows_longer_than_a_chunk_span_chunks(server: ServerProcess, unique_name: str) -> None:
    td = random_rows(10, {"a": (torch.float64, (33,)), "b": (torch.uint8, (5000,)), "c": (torch.int32, ())})
    manifest = write_dataset(td, url := server.url(unique_name), chunk_bytes=1024)
    assert manifest.layouts[0].pieces == 6  # 264 + 5000 + 4 bytes
    check_all_ways(url, td)
    check_all_ways(url, td.select("c"), fields=["c"])
    check_all_ways(url, td.select("a", "c"), fields=["a", "c"])


def test_fields_without_bytes_keep_shape_and_dtype_and_send_no_command(server: ServerProcess, unique_name: str) -> None:
    kinds: dict[Any, Any] = {"a": (torch.float32, (10, 0)), "b": (torch.int8, (0, 3)), ("n", "c"): (torch.bool, (2, 0))}
    td = random_rows(10, {**kinds, "normal": (torch.int64, (2,))})
    write_dataset(td, url := server.url(unique_name))
    check_all_ways(url, td)
    empty = td.select("a", "b", ("n", "c"))
    server.execute("CONFIG", "RESETSTAT")
    check_all_ways(url, empty, fields=["a", "b", "n"])
    for way in WAYS:
        with RedisTDDataset(url, fields=["a", "b", "n"], **way) as dataset:
            dataset[ROWS]
            assert (dataset.stats.commands, dataset.stats.bytes, dataset.stats.rows) == (0, 0, 6)
    commands = server.execute("INFO", "commandstats")
    assert not [name for name in commands if "getrange" in name or "eval" in name]
    write_dataset(empty, url, overwrite=True)
    check_all_ways(url, empty)


@pytest.fixture(scope="module")
def plain_rows() -> TensorDict:
    return random_rows(100, {"x": (torch.float32, (25,)), ("n", "y"): (torch.bfloat16, (3, 2)), "z": (torch.int16, ())})


@pytest.fixture
def plain(server: ServerProcess, plain_rows: TensorDict) -> Iterator[RedisTDDataset]:
    write_dataset(plain_rows, url := server.url("plain"), chunk_bytes=16 * 130)
    with RedisTDDataset(url) as dataset:
        yield dataset


@pytest.mark.parametrize(
    "index",
    [
        0,
        -100,
        5,
        [],
        [7, 2, 2, 9, 0],
        [-1, 0],
        range(90, 3, -7),
        slice(None),
        slice(95, 5, -9),
        slice(4, 4),
        [[1, 2, 3], [3, 2, 1]],
        [[0], [99]],
        [[], []],
        [row % 7 == 0 for row in range(100)],
        [False] * 100,
    ],
    ids=lambda index: str(index)[:20],
)
def test_an_index_gives_what_it_gives_of_the_rows_in_memory(
    plain: RedisTDDataset, plain_rows: TensorDict, index: Any
) -> None:
    got = plain[index]
    # numpy knows all of these; torch has no slices that go backwards.
    chosen = np.arange(100)[
        index if isinstance(index, int | slice) else np.asarray(index, dtype=None if np.size(index) else int)
    ]
    assert_same_rows(got, plain_rows[torch.as_tensor(chosen.copy())] if chosen.ndim else plain_rows[int(chosen)])


@pytest.mark.parametrize("gap_rows", [0, 3])
def test_near_rows_are_read_by_one_range_and_each_byte_once(
    server: ServerProcess, unique_name: str, gap_rows: int
) -> None:
    td = random_rows(60, {"x": (torch.float32, (64,))})
    write_dataset(td, url := server.url(unique_name))
    rows = [20, 21 + gap_rows, 22 + gap_rows, 20, 20]
    with RedisTDDataset(url, strategy="covering") as dataset:
        assert_same_rows(dataset[rows], td[rows])
        assert (dataset.stats.ranges, dataset.stats.bytes) == (1, (3 + gap_rows) * 256)


def test_iterating_gives_every_row_once_in_order(plain: RedisTDDataset, plain_rows: TensorDict) -> None:
    assert_same_rows(torch.stack(list(plain)), plain_rows)


def test_getitems_is_what_a_loader_calls(plain: RedisTDDataset, plain_rows: TensorDict) -> None:
    assert_same_rows(plain.__getitems__([5, 1, 5]), plain_rows[[5, 1, 5]])


def test_batches_are_contiguous_and_their_own_unless_strided_ones_are_asked_for(plain: RedisTDDataset) -> None:
    for index in ([3, 1, 2], slice(10), [50, 2, 98, 30]):
        batch = plain[index]
        for tensor in batch.values(include_nested=True, leaves_only=True):
            assert tensor.is_contiguous()
            tensor.view(-1)
            tensor.zero_()
        assert plain[index]["x"].count_nonzero() > 0
    # One storage: a single copy takes the whole batch to a device.
    with RedisTDDataset(plain.url, strided=True) as strided:  # type: ignore[arg-type]
        batch = strided[[3, 1, 2]]
        storages = {tensor.untyped_storage().data_ptr() for tensor in batch.values(True, True)}
        assert len(storages) == 1


@pytest.mark.parametrize("strided", [False, True])
def test_what_a_user_holds_of_a_batch_never_changes(server: ServerProcess, unique_name: str, strided: bool) -> None:
    td = random_rows(600, {"x": (torch.uint8, (30_000,)), "y": (torch.int64, (50,))})
    write_dataset(td, url := server.url(unique_name))
    with RedisTDDataset(url, strided=strided) as dataset:
        held: list[tuple[torch.Tensor, bytes]] = []
        for start in range(0, 600, 100):
            rows = list(range(start, start + 100))
            batch = dataset[rows]
            parts = [
                batch["x"][37],
                batch["x"][5:9, ::7],
                batch[11]["x"],
                torch.from_numpy(batch["x"].numpy()[3:5]),
                batch["y"].T,
            ]
            held += [(part, bytes_of(part)) for part in parts]
            del batch, parts
        assert all(bytes_of(part) == before for part, before in held)
        assert_same_tensor(held[0][0], td["x"][37])
        assert_same_tensor(held[5][0], td["x"][137])


def test_fields_narrow_what_is_read(plain: RedisTDDataset, plain_rows: TensorDict) -> None:
    url: Any = plain.url
    for fields, kept in (
        (["z"], ["z"]),
        (["n"], [("n", "y")]),
        ([("n", "y"), "x"], ["x", ("n", "y")]),
        ([], []),
        (None, ["x", ("n", "y"), "z"]),
    ):
        with RedisTDDataset(url, fields=fields) as dataset:
            assert_same_rows(dataset[ROWS], plain_rows.select(*kept)[ROWS])
            assert set(dataset[0].keys(True, True)) == set(kept)
    with RedisTDDataset(url, fields=["z"], strategy="covering") as dataset:
        dataset[[3]]
        # 100 + 12 bytes lie before it: 112 is a multiple of 16, and it is 2 bytes long.
        assert (dataset.row_bytes, dataset.stats.bytes) == (2, 2)


def test_a_field_that_does_not_exist_is_named_with_those_that_do(plain: RedisTDDataset) -> None:
    url: Any = plain.url
    with pytest.raises(FieldNotFoundError, match=r"no field 'X'; the fields are 'x', \('n', 'y'\), 'z'"):
        RedisTDDataset(url, fields=["X"])
    with pytest.raises(FieldNotFoundError, match=r"not the string 'x'; write \['x'\]"):
        RedisTDDataset(url, fields="x")


def test_options_that_cannot_work_are_refused(plain: RedisTDDataset) -> None:
    url: Any = plain.url
    with pytest.raises(ConfigurationError, match="strategy must be one of auto, covering, pipelined, lua, got 'fast'"):
        RedisTDDataset(url, strategy="fast")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="atomic=True reads in one step"):
        RedisTDDataset(url, atomic=True, strategy="covering")


@pytest.mark.parametrize(
    ("index", "said"),
    [
        (100, r"row 100 is not in \[-100, 100\) of 'plain'"),
        ([0, -101], r"row -101 is not in"),
        (1.0, "not by float"),
        ("x", "not by str: x"),
        (("x", 0), "by rows alone"),
        (None, "by rows alone"),
        ([True] * 99, r"a mask has one entry a row: 100 for 'plain', not shape \(99,\)"),
    ],
)
def test_an_index_that_selects_no_rows_is_refused(plain: RedisTDDataset, index: Any, said: str) -> None:
    with pytest.raises(RowIndexError, match=said):
        plain[index]


def test_twenty_thousand_scattered_rows_are_read_by_lua(server: ServerProcess, unique_name: str) -> None:
    # A gap of nine rows is longer than any gap that pays: each row is a range of its own.
    pad = torch.zeros(1, dtype=torch.uint8).expand(200_000, 232)
    td = TensorDict({"row": torch.arange(200_000), "pad": pad}, [200_000])
    write_dataset(td, url := server.url(unique_name), chunk_bytes=64 << 10)
    rows = torch.arange(0, 200_000, 10)[torch.randperm(20_000, generator=torch.Generator().manual_seed(0))]
    for options, most_calls in (({"strategy": "lua"}, 50), ({"atomic": True}, 1)):
        with RedisTDDataset(url, fields=["row"], **options) as dataset:  # type: ignore[arg-type]
            dataset[0]  # the server knows the script from then on
            before = dataset.stats
            assert torch.equal(dataset[rows]["row"], rows)
            assert dataset.stats.ranges - before.ranges == 20_000
            assert 1 <= dataset.stats.commands - before.commands <= most_calls


def test_a_script_that_the_server_forgot_is_loaded_again(plain: RedisTDDataset, server: ServerProcess) -> None:
    with RedisTDDataset(server.url("plain"), strategy="lua") as dataset:
        first = dataset[:5]
        server.execute("SCRIPT", "FLUSH")
        assert_same_rows(dataset[:5], first)


def test_threads_share_a_data_set(plain: RedisTDDataset, plain_rows: TensorDict) -> None:
    errors: list[BaseException] = []

    def read(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        try:
            for _ in range(20):
                rows = torch.randint(0, 100, (30,), generator=generator)
                assert_same_rows(plain[rows], plain_rows[rows])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert plain.stats.batches == 80


def test_a_closed_data_set_dials_anew(plain: RedisTDDataset, plain_rows: TensorDict) -> None:
    plain.close()
    assert_same_rows(plain[[1, 2]], plain_rows[[1, 2]])
    plain.close()
    plain.close()


def test_it_says_what_it_is(plain: RedisTDDataset, server: ServerProcess) -> None:
    text = repr(plain)
    for part in ("#plain", "rows=100", "'x': float32[25]", "('n', 'y'): bfloat16[3, 2]", f":{server.port}/0"):
        assert part in text
    assert plain.name == "plain"
    assert plain.fields == (("x",), ("n", "y"), ("z",))
    assert plain.row_bytes == 114


def test_what_was_read_is_counted_exactly(server: ServerProcess, unique_name: str) -> None:
    td = random_rows(50, {"x": (torch.uint8, (96,))})
    write_dataset(td, url := server.url(unique_name))
    with RedisTDDataset(url, strategy="pipelined") as dataset:
        assert (dataset.stats.rows, dataset.stats.bytes, dataset.stats.commands) == (0, 0, 0)
        dataset[[4, 40, 4, 30]]
        stats = dataset.stats
        # Three distinct records of 96 bytes; "$105\r\n" + 105 + "\r\n" would be 113, so 104 are asked for: 112 bytes.
        assert (stats.rows, stats.batches, stats.ranges, stats.commands, stats.bytes) == (4, 1, 3, 3, 3 * 104)
        assert stats.wait_seconds > 0
        dataset[[]]
        dataset[0]
        assert (dataset.stats.rows, dataset.stats.batches, dataset.stats.commands) == (5, 3, 4)
        assert stats.rows == 4, "it was a copy"


def test_rows_whose_schema_changed_are_read_as_opened_or_as_they_are_now(
    server: ServerProcess, unique_name: str
) -> None:
    old = TensorDict({"x": torch.randn(10, 4)}, [10])
    new = TensorDict({"x": torch.randn(10, 8, dtype=torch.float64)}, [10])
    write_dataset(old, url := server.url(unique_name))
    with RedisTDDataset(url) as before:
        before[0]
        write_dataset(new, url, overwrite=True)
        assert_same_rows(before[ROWS], old[ROWS])
        with RedisTDDataset(url) as after:
            assert_same_rows(after[ROWS], new[ROWS])
            assert after.fingerprint != before.fingerprint
