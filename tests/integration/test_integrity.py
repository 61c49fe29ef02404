"""Every chunk has a checksum; what was altered is found when chunks are read whole, and by verifying."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
import torch
from rows_in_memory import assert_same_rows, random_rows
from servers import ClusterProcess, ServerProcess
from torch.utils.data import DataLoader

from td_datapipes import RedisTDDataset, append_dataset, verify_dataset, write_dataset
from td_datapipes.catalog import chunk_keys, connect, drop
from td_datapipes.errors import ChecksumError, ConfigurationError, DataLossError, DatasetNotFoundError
from td_datapipes.integrity import load_checksums, shard_shares
from td_datapipes.keys import manifest_key
from td_datapipes.manifest import SPARE_BYTES, Manifest
from td_datapipes.wire.cluster import slot_of

TD = random_rows(95, {"x": (torch.float32, (60,)), ("n", "y"): (torch.int16, ())}, seed=7)
STRIDE = 256
PER_CHUNK = 10


@pytest.fixture
def url(server: ServerProcess) -> str:
    write_dataset(TD, made := server.url("summed"), chunk_bytes=STRIDE * PER_CHUNK)
    return made


def manifest_on(server: ServerProcess, name: str = "summed") -> Manifest:
    return Manifest.from_json(server.execute("GET", manifest_key(name)))


def flip(server: ServerProcess, key: bytes, at: int) -> None:
    byte = server.execute("GETRANGE", key, at, at)
    server.execute("SETRANGE", key, at, bytes([byte[0] ^ 1]))


def stored_sums(server: ServerProcess, manifest: Manifest) -> list[int]:
    """Computed from what lies on the server."""
    return [zlib.crc32(server.execute("GET", manifest.chunk_key(0, chunk))[:-SPARE_BYTES]) for chunk in range(10)]


def test_the_checksums_are_those_of_the_records(server: ServerProcess, url: str) -> None:
    manifest = manifest_on(server)
    host = connect(url)
    sums = load_checksums(host, manifest)
    host.close()
    assert sums == {0: stored_sums(server, manifest)}
    assert manifest.last_checksums == (stored_sums(server, manifest)[-1],)


def test_each_generation_has_its_own(server: ServerProcess, url: str) -> None:
    host = connect(url)
    first = manifest_on(server)
    expected = load_checksums(host, first)
    for stop in (3, 5, 30):
        append_dataset(TD[:stop], url)
        assert load_checksums(host, first) == expected  # the last chunk has been extended, and still
    assert verify_dataset(url).good
    assert len(load_checksums(host, manifest_on(server))[0]) == 14  # type: ignore[index]
    with RedisTDDataset(url, verify=True) as dataset:
        assert_same_rows(dataset[:95], TD)
        assert len(dataset) == 133
        dataset[:]
    host.close()


READS: list[dict[str, Any]] = [{}, {"strided": True}, {"strategy": "covering"}, {"prefetch_bytes": 0}]


@pytest.mark.parametrize("options", READS, ids=str)
def test_an_altered_chunk_is_named_when_it_is_read_whole(
    server: ServerProcess, url: str, options: dict[str, Any]
) -> None:
    manifest = manifest_on(server)
    with RedisTDDataset(url, verify=True, **options) as dataset:
        assert_same_rows(dataset[:], TD)
        for chunk, at in ((0, 0), (3, 1234), (9, STRIDE * 5 - 256 + 241)):
            key = manifest.chunk_key(0, chunk)
            flip(server, key, at)
            with pytest.raises(ChecksumError, match=rf"chunk {key.decode()} .rows {chunk * 10} to .*have been altered"):
                dataset[:]
            with RedisTDDataset(url, **options) as trusting:
                trusting[:]
            flip(server, key, at)
        assert_same_rows(dataset[:], TD)
        for rows in (slice(10, 20), slice(7, 61), slice(90, 95), [4, 3], 5):
            assert_same_rows(dataset[rows], TD[rows])


def test_whole_chunks_of_any_order_are_compared(server: ServerProcess, url: str) -> None:
    flip(server, manifest_on(server).chunk_key(0, 4), 100)
    backwards = list(range(94, -1, -1))
    with RedisTDDataset(url, verify=True, strategy="covering") as dataset:
        with pytest.raises(ChecksumError):
            dataset[backwards]
        assert_same_rows(dataset[backwards[60:]], TD[backwards[60:]])
    with RedisTDDataset(url, verify=True) as dataset, pytest.raises(ChecksumError):
        list(DataLoader(dataset, batch_size=20))


def test_large_chunks_that_arrive_in_parts_are_compared(server: ServerProcess) -> None:
    td = random_rows(4000, {"x": (torch.float32, (60,)), "s": (torch.int16, ())}, seed=3)
    write_dataset(td, url := server.url("summed"), chunk_bytes=256 * 3500)
    with RedisTDDataset(url, verify=True) as dataset:
        assert_same_rows(dataset[:], td)
        flip(server, manifest_on(server).chunk_key(0, 0), 256 * 3400)
        with pytest.raises(ChecksumError, match="rows 0 to 3499"):
            dataset[:]


def test_verifying_names_what_is_bad(server: ServerProcess, url: str) -> None:
    found = verify_dataset(url)
    assert (found.good, found.compared, found.chunks, found.nbytes) == (True, True, 10, 95 * STRIDE)
    manifest = manifest_on(server)
    keys = [manifest.chunk_key(0, chunk) for chunk in range(10)]
    flip(server, keys[2], 17)
    server.execute("DEL", keys[5])
    server.execute("SET", keys[7], b"x" * 99)
    server.execute("DEL", keys[9])
    server.execute("RPUSH", keys[9], b"x")
    found = verify_dataset(url, progress=True)
    assert [(bad.key, bad.problem) for bad in found.bad] == [
        (keys[2].decode(), "altered"),
        (keys[5].decode(), "missing"),
        (keys[7].decode(), "short"),
        (keys[9].decode(), "missing"),
    ]
    assert str(found.bad[2]) == f"{keys[7].decode()} (rows 70 to 79): short, 99 of 2560 bytes"
    assert (found.bad[3].first_row, found.bad[3].stop_row, found.bad[3].expected_bytes) == (90, 95, 5 * STRIDE)
    assert not found.good


def test_spare_bytes_and_foreign_bytes_behind_them_do_not_count(server: ServerProcess, url: str) -> None:
    server.execute("APPEND", manifest_on(server).chunk_key(0, 1), b"more")
    flip(server, manifest_on(server).chunk_key(0, 1), STRIDE * PER_CHUNK + 3)
    assert verify_dataset(url).good


def test_what_cannot_be_verified_is_said(server: ServerProcess, url: str) -> None:
    with pytest.raises(DatasetNotFoundError):
        verify_dataset(server.url("nobody"))
    manifest = manifest_on(server)
    server.execute("DEL", manifest.checksums_key(0))
    with pytest.raises(DataLossError, match="40 bytes expected, 0 received; they were deleted"):
        verify_dataset(url)
    with RedisTDDataset(url, verify=True) as dataset, pytest.raises(DataLossError, match="checksums"):
        dataset[:]
    # As an older release wrote it.
    text = manifest.to_json()
    plain = Manifest.from_json(text[: text.rindex(',\n "checksums"')] + "\n}")
    assert plain.last_checksums is None
    server.execute("SET", manifest_key("summed"), plain.to_json())
    found = verify_dataset(url)
    assert (found.good, found.compared) == (True, False)
    append_dataset(TD, url)
    with RedisTDDataset(url, verify=True) as dataset, pytest.raises(ConfigurationError, match="has none"):
        dataset[:]


def test_long_rows_have_checksums_a_piece(server: ServerProcess) -> None:
    td = random_rows(7, {"x": (torch.uint8, (5000,))})
    write_dataset(td, url := server.url("summed"), chunk_bytes=1024)
    append_dataset(td[:2], url)
    assert verify_dataset(url).chunks == 9 * 5
    flip(server, manifest_on(server).chunk_key(0, 13), 4)
    (bad,) = verify_dataset(url).bad
    assert (bad.first_row, bad.stop_row, bad.problem) == (2, 3, "altered")
    with RedisTDDataset(url, verify=True) as dataset:
        assert_same_rows(dataset[3:7], td[3:])


def test_dropping_leaves_no_checksums(server: ServerProcess, url: str) -> None:
    write_dataset(TD, url, overwrite=True)
    host = connect(url)
    drop(host, "summed")
    host.close()
    assert server.execute("KEYS", "*") == []


def test_on_a_cluster_too_and_what_lies_where(cluster: ClusterProcess) -> None:
    write_dataset(TD, url := cluster.url("summed"), chunk_bytes=STRIDE * PER_CHUNK)
    assert verify_dataset(url).good
    with RedisTDDataset(url, verify=True) as dataset:
        assert_same_rows(dataset[:], TD)
        manifest = dataset._reader.manifest
    host = connect(url)
    shares = shard_shares(host, manifest)
    host.close()
    assert [share.tag for share in shares] == list(manifest.tags)
    assert sum(share.chunks for share in shares) == 10
    assert sum(share.nbytes for share in shares) == 95 * STRIDE
    for share in shares:
        assert share.slot == slot_of(share.tag.encode())
        assert share.node == f"127.0.0.1:{cluster.owner(share.slot).port}"
        keys = [key for key in chunk_keys(manifest) if f"{{{share.tag}}}" in key.decode() and b"checksums" not in key]
        assert len(keys) == share.chunks
    key = manifest.chunk_key(0, 4)
    flip(cluster.owner(slot_of(key)), key, 7)
    assert [bad.key for bad in verify_dataset(url).bad] == [key.decode()]
    with RedisTDDataset(url, verify=True) as dataset, pytest.raises(ChecksumError):
        dataset[:]


def test_one_server_has_one_shard(server: ServerProcess, url: str) -> None:
    host = connect(url)
    (share,) = shard_shares(host, manifest_on(server))
    host.close()
    assert (share.node, share.chunks, share.nbytes) == (None, 10, 95 * STRIDE)
