"""Every kind of URL works end to end, and no password is ever shown, logged or pickled."""

from __future__ import annotations

import copy
import logging
import multiprocessing
import pickle
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import torch
from redis._parsers import _HiredisParser, _RESP2Parser
from redis.utils import HIREDIS_AVAILABLE
from rows_in_memory import assert_same_rows, random_rows
from servers import ServerProcess
from tensordict import TensorDict
from torch.utils.data import DataLoader

from td_datapipes import RedisTDDataset, write_dataset
from td_datapipes.catalog import connect, drop, list_names
from td_datapipes.errors import (
    AuthenticationError,
    ConfigurationError,
    DatasetNotFoundError,
    ServerUnavailableError,
    TDDatapipesError,
    URLError,
)
from td_datapipes.wire.url import PASSWORD_VARIABLE, USERNAME_VARIABLE, ServerURL

SECRET = "Sw0rdf1sh-9c41-@:/#?%"
READER_SECRET = "tr0mb0ne-77ab"
TD = random_rows(30, {"x": (torch.float32, (7,)), ("n", "y"): (torch.int16, ())}, seed=6)
ROWS = [4, 29, 0, 4]


def read(url: Any, **options: Any) -> TensorDict:
    with RedisTDDataset(url, **options) as dataset:
        return dataset[ROWS]


@pytest.fixture(scope="module", params=["valkey", "redis"])
def guarded(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    """A server with a password, and users who may do less."""
    users = {
        "reader": (READER_SECRET, "~td:* +@read +@connection +@scripting"),
        "lister": (READER_SECRET, "~td:* +@read +@connection -getrange -evalsha -eval"),
        "stranger": (READER_SECRET, "~other:* +@all"),
    }
    with ServerProcess(request.param, password=SECRET, users=users, unix_socket=True) as process:
        write_dataset(TD, process.url("kept"))
        yield process


@pytest.fixture(autouse=True)
def _no_credentials_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(USERNAME_VARIABLE, raising=False)
    monkeypatch.delenv(PASSWORD_VARIABLE, raising=False)


def bare(server: ServerProcess, name: str = "kept", userinfo: str = "") -> str:
    return f"redis://{userinfo}{server.host}:{server.port}/0#{name}"


def test_passwords_users_and_other_schemes_open_the_same_rows(guarded: ServerProcess) -> None:
    secret = quote(SECRET, safe="")
    for url in (
        guarded.url("kept"),
        guarded.url("kept", user="reader"),
        guarded.url("kept").replace("redis://", "valkey://"),
        guarded.unix_url("kept"),
        guarded.unix_url("kept", user="reader"),
        bare(guarded, userinfo=f"default:{secret}@"),
        f"redis://{guarded.host}:{guarded.port}?password={secret}&db=0#kept",
    ):
        for strategy in ("auto", "lua"):
            assert_same_rows(read(url, strategy=strategy), TD[ROWS])


def test_redis_pys_own_options_are_taken(guarded: ServerProcess) -> None:
    for query in ({"socket_timeout": 5, "client_name": "me"}, {"health_check_interval": 3}):
        assert_same_rows(read(guarded.url("kept", **query)), TD[ROWS])
        assert_same_rows(read(guarded.unix_url("kept", **query)), TD[ROWS])
    assert_same_rows(read(guarded.url("kept", socket_keepalive=True)), TD[ROWS])


def test_a_database_of_its_own_has_names_of_its_own(server: ServerProcess, unique_name: str) -> None:
    first, second = random_rows(5, {"x": (torch.int8, ())}, seed=1), random_rows(6, {"x": (torch.int8, ())}, seed=2)
    write_dataset(first, server.url(unique_name))
    write_dataset(second, server.url(unique_name, db=3))
    write_dataset(second, server.unix_url("other", db=4))
    for url, td in (
        (server.url(unique_name), first),
        (server.url(unique_name, db=3), second),
        (f"redis://{server.host}:{server.port}?db=3#{unique_name}", second),
        (server.unix_url(unique_name, db=3), second),
        (server.url("other", db=4), second),
    ):
        with RedisTDDataset(url) as dataset:
            assert_same_rows(dataset[:], td)


def refuse(url: str, kind: type[TDDatapipesError] = AuthenticationError, then: Callable[[Any], Any] = read) -> str:
    """The whole text of the error, causes and tracebacks included; no secret may be in it."""
    with pytest.raises(kind) as caught:
        then(url)
    text = "".join(traceback.format_exception(caught.value)) + repr(caught.value) + str(vars(caught.value))
    for secret in (SECRET, quote(SECRET, safe=""), READER_SECRET):
        assert secret not in text
    assert secret.encode() not in pickle.dumps(caught.value)
    return str(caught.value)


def write(url: str) -> None:
    write_dataset(TD, url, overwrite=True)


def test_wrong_missing_and_insufficient_credentials_are_refused_by_name(guarded: ServerProcess) -> None:
    for userinfo in ("", ":wrong@", "default:wrong@", f"nobody:{READER_SECRET}@", f":{READER_SECRET}@"):
        for then in (read, write):
            message = refuse(bare(guarded, userinfo=userinfo), then=then)
            assert f"redis://127.0.0.1:{guarded.port}/0 refused access" in message
            assert PASSWORD_VARIABLE in message
    assert "the manifest of 'kept'" in refuse(guarded.url("kept", user="stranger"))
    assert "reading data set 'kept'" in refuse(guarded.url("kept", user="lister"))
    assert "permissions to run the 'sadd' command" in refuse(guarded.url("kept", user="reader"), then=write)
    lua = refuse(guarded.url("kept", user="lister"), then=lambda url: read(url, strategy="lua"))
    assert "refused access" in lua


def test_a_password_where_none_is_needed_is_refused_by_name(server: ServerProcess) -> None:
    assert "refused access" in refuse(bare(server, userinfo=f"nobody:{READER_SECRET}@"))


def test_the_environment_supplies_the_password(guarded: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASSWORD_VARIABLE, SECRET)
    assert_same_rows(read(bare(guarded)), TD[ROWS])
    monkeypatch.setenv(USERNAME_VARIABLE, "reader")
    monkeypatch.setenv(PASSWORD_VARIABLE, READER_SECRET)
    assert_same_rows(read(bare(guarded)), TD[ROWS])
    # The URL's own come first.
    assert_same_rows(read(guarded.url("kept")), TD[ROWS])


def test_no_password_is_shown_logged_or_pickled(
    guarded: ServerProcess, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.DEBUG), RedisTDDataset(guarded.url("kept"), strided=True) as dataset:
        dataset[ROWS]
        shown = [
            *(repr(dataset), str(dataset), str(dataset.url), repr(dataset.url), repr(dataset.stats)),
            *(repr(dataset.__getstate__()), str(vars(dataset.url)["address"]), repr(dataset.schema)),
            repr(connect(guarded.url("kept"))),
        ]
        pickles = [pickle.dumps(dataset, protocol) for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)]
    printed = capfd.readouterr()
    shown += [caplog.text, printed.out, printed.err]
    for text in shown:
        assert SECRET not in text
        assert quote(SECRET, safe="") not in text
    for data in pickles:
        assert SECRET.encode() not in data


def test_a_pickled_data_set_asks_for_its_password_anew(guarded: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    with RedisTDDataset(guarded.url("kept"), fields=["x"], strategy="pipelined") as dataset:
        data = pickle.dumps(dataset)
        monkeypatch.setenv(PASSWORD_VARIABLE, SECRET)
        with pickle.loads(data) as copied:
            assert_same_rows(copied[ROWS], TD.select("x")[ROWS])
            assert (len(copied), copied.name, copied.fields) == (30, "kept", (("x",),))
            assert copied.stats.batches == 1
        monkeypatch.delenv(PASSWORD_VARIABLE)
        with pickle.loads(data) as copied, pytest.raises(AuthenticationError):
            copied[0]
        assert_same_rows(dataset[ROWS], TD.select("x")[ROWS])


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy])
def test_a_copied_data_set_keeps_its_password(guarded: ServerProcess, make: Callable[[Any], Any]) -> None:
    with RedisTDDataset(guarded.url("kept")) as dataset:
        copied = make(dataset)
        assert_same_rows(copied[ROWS], TD[ROWS])
        copied.close()
        assert_same_rows(dataset[ROWS], TD[ROWS])


@pytest.mark.heavy
@pytest.mark.parametrize("guarded", ["valkey"], indirect=True)
def test_a_worker_that_is_spawned_gets_the_password(guarded: ServerProcess) -> None:
    with RedisTDDataset(guarded.url("kept")) as dataset:
        dataset[0]
        loader = DataLoader(dataset, batch_size=10, num_workers=1, multiprocessing_context="spawn")
        assert_same_rows(torch.cat(list(loader)), TD)


def test_a_worker_that_is_forked_gets_the_password(guarded: ServerProcess) -> None:
    with RedisTDDataset(guarded.url("kept")) as dataset:
        loader = DataLoader(dataset, batch_size=10, num_workers=1, multiprocessing_context="fork")
        assert_same_rows(torch.cat(list(loader)), TD)


def test_an_option_that_nobody_knows_is_named(server: ServerProcess) -> None:
    for query, kind in (
        ({"nonsense": 1}, ConfigurationError),
        ({"socket_timeout": "soon"}, URLError),
        ({"socket_timeout": 0}, URLError),
        ({"max_connections": "few"}, URLError),
    ):
        with pytest.raises(kind, match=next(iter(query))):
            RedisTDDataset(server.url("n", **query))
        with pytest.raises(kind, match=next(iter(query))):
            write_dataset(TD, server.url("n", **query))


NAMES = ["a", "a b", "a%20b", "%61", "{a}", "{", "}{", "*", "?", "[a]", "a*", "td:names", "a:manifest", "a\nb", "a\tb"]
NAMES += ["a\0b", "ab", "A", "ä", "a/b", "a//b", "../a", "a#b", "'", '"', "\\", "€" * 50, " ", "$1"]
NAMES += ["a\r\nDEL td:names\r\n"]


def test_each_name_is_a_data_set_of_its_own(server: ServerProcess) -> None:
    others = {f"td:{{{name}}}:manifest".encode(): b"x" for name in ("b", "z", "")} | {b"*": b"1", b"a": b"2", b"": b"3"}
    for key, value in others.items():
        server.execute("SET", key, value)
    rows = {name: random_rows(3, {"x": (torch.int64, ())}, seed=seed) for seed, name in enumerate(NAMES)}
    for name, td in rows.items():
        write_dataset(td, server.url(name))
    for name, td in rows.items():
        with RedisTDDataset(server.url(name)) as dataset:
            assert dataset.name == name
            assert_same_rows(dataset[:], td)
    host = connect(server.url("a"))
    assert list_names(host) == sorted(NAMES)
    for number, name in enumerate(NAMES):
        drop(host, name)
        with pytest.raises(DatasetNotFoundError):
            RedisTDDataset(server.url(name))
        for left in NAMES[number + 1 :: 9]:
            with RedisTDDataset(server.url(left)) as dataset:
                assert_same_rows(dataset[:], rows[left])
    host.close()
    assert {key: server.execute("GET", key) for key in server.execute("KEYS", "*")} == others


@pytest.mark.parametrize(
    "query", [{"decode_responses": True}, {"protocol": 3}, {"protocol": 2}, {"encoding": "latin1"}]
)
def test_how_a_users_own_client_wants_its_replies_changes_nothing(
    server: ServerProcess, unique_name: str, query: dict[str, Any]
) -> None:
    write_dataset(TD, server.url(unique_name, **query))
    for strategy in ("auto", "pipelined", "lua"):
        assert_same_rows(read(server.url(unique_name, **query), strategy=strategy), TD[ROWS])
    assert_same_rows(read(server.url(unique_name)), TD[ROWS])


@pytest.mark.parametrize("parser", [_RESP2Parser, _HiredisParser])
@pytest.mark.parametrize("query", [{}, {"decode_responses": True, "protocol": 3}])
def test_the_rows_are_the_same_with_and_without_hiredis(
    server: ServerProcess, unique_name: str, parser: type, query: dict[str, Any]
) -> None:
    assert HIREDIS_AVAILABLE, "hiredis is not installed; it is among the dev requirements"
    parsed = ServerURL.parse(server.url(unique_name, **query))
    chosen = replace(parsed, options={**parsed.options, "parser_class": parser})
    host = connect(chosen)
    assert type(host.client().connection_pool.make_connection()._parser) is parser
    host.close()
    write_dataset(TD, chosen)
    for strategy in ("auto", "pipelined", "lua"):
        assert_same_rows(read(chosen, strategy=strategy), TD[ROWS])


def test_tls_with_the_authority_is_read_and_without_it_is_refused(tls_server: ServerProcess, unique_name: str) -> None:
    td = random_rows(200, {"x": (torch.uint8, (9000,))})
    write_dataset(td, url := tls_server.url(unique_name))
    assert url.startswith("rediss://")
    for options in ({}, {"strategy": "pipelined"}, {"strategy": "lua"}, {"strided": True}, {"atomic": True}):
        with RedisTDDataset(url, **options) as dataset:  # type: ignore[arg-type]
            assert_same_rows(dataset[:], td)
            assert_same_rows(dataset[ROWS], td[ROWS])
    place, name = f"localhost:{tls_server.port}/0", quote(unique_name)
    assert tls_server.tls is not None
    for query in ("", f"?ssl_ca_certs={tls_server.tls.other_ca}"):
        for scheme in ("rediss", "valkeys"):
            with pytest.raises(AuthenticationError, match=f"TLS with rediss://{place} failed.*ssl_ca_certs=FILE"):
                RedisTDDataset(f"{scheme}://{place}{query}#{name}")
    assert_same_rows(read(f"rediss://{place}?ssl_cert_reqs=none#{name}"), td[ROWS])
    with pytest.raises(ServerUnavailableError):
        RedisTDDataset(f"redis://{place}#{name}")


def test_forked_workers_read_over_tls(tls_server: ServerProcess, unique_name: str) -> None:
    write_dataset(TD, url := tls_server.url(unique_name))
    with RedisTDDataset(url) as dataset:
        dataset[0]
        loader = DataLoader(dataset, batch_size=5, num_workers=2, multiprocessing_context="fork")
        assert_same_rows(torch.cat(list(loader)), TD)
        assert_same_rows(dataset[ROWS], TD[ROWS])


def read_in_child(url: str, connection: Any) -> None:
    with RedisTDDataset(url) as dataset:
        connection.send(dataset[ROWS]["x"].tolist())


def test_an_embedded_data_set_is_written_read_and_still_there_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PASSWORD_VARIABLE, SECRET)  # meant for another server
    url = f"embedded://{quote(str(tmp_path / 'a folder'))}#digits/train"
    with pytest.raises(DatasetNotFoundError, match="it has none"):
        RedisTDDataset(url)
    assert write_dataset(TD, url).rows == 30
    with RedisTDDataset(url) as dataset:
        assert_same_rows(dataset[:], TD)
        loader = DataLoader(dataset, batch_size=10, num_workers=2, multiprocessing_context="fork")
        assert_same_rows(torch.cat(list(loader)), TD)
        here, there = multiprocessing.Pipe()
        child = multiprocessing.get_context("fork").Process(target=read_in_child, args=(url, there))
        child.start()
        assert here.recv() == TD["x"][ROWS].tolist()
        child.join()
        with pickle.loads(pickle.dumps(dataset)) as copied:
            assert_same_rows(copied[ROWS], TD[ROWS])
        assert str(tmp_path) in repr(dataset)
    assert_same_rows(read(url, strategy="lua"), TD[ROWS])
    with pytest.raises(URLError, match="socket_timeout"):
        RedisTDDataset(url.replace("#", "?socket_timeout=0#"))
