"""URLs: which server and which name they mean, what they refuse, and that they keep secrets."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.connection import SSLConnection, UnixDomainSocketConnection

from td_datapipes.errors import ConfigurationError, URLError
from td_datapipes.keys import encode_name, manifest_key, name_from_encoded, staged_key, superseded_key
from td_datapipes.wire.url import PASSWORD_VARIABLE, USERNAME_VARIABLE, ServerURL

SECRET = "swordfish-81c2"


@pytest.fixture(autouse=True)
def _no_credentials_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(USERNAME_VARIABLE, raising=False)
    monkeypatch.delenv(PASSWORD_VARIABLE, raising=False)


@pytest.mark.parametrize(
    ("url", "address", "options"),
    [
        ("redis://localhost#n", "redis://localhost:6379/0", {"host": "localhost"}),
        ("redis://h:7000/3#n", "redis://h:7000/3", {"host": "h", "port": 7000, "db": 3}),
        ("valkey://h:7000/3#n", "redis://h:7000/3", {"host": "h", "port": 7000, "db": 3}),
        ("redis://h?db=4#n", "redis://h:6379/4", {"host": "h", "db": 4}),
        ("redis://[::1]:6380/0#n", "redis://::1:6380/0", {"host": "::1", "port": 6380, "db": 0}),
        ("redis://h/0?socket_timeout=2.5#n", "redis://h:6379/0", {"host": "h", "db": 0, "socket_timeout": 2.5}),
        ("redis://h?protocol=3&decode_responses=true&encoding=latin1#n", "redis://h:6379/0", {"host": "h"}),
        (
            "rediss://h/0?ssl_ca_certs=/ca.pem&ssl_check_hostname=false#n",
            "rediss://h:6379/0",
            {
                "host": "h",
                "db": 0,
                "ssl_ca_certs": "/ca.pem",
                "ssl_check_hostname": False,
                "connection_class": SSLConnection,
            },
        ),
        ("valkeys://h:1/0#n", "rediss://h:1/0", {"host": "h", "port": 1, "db": 0, "connection_class": SSLConnection}),
        (
            "unix:///run/s.sock?db=2#n",
            "unix:/run/s.sock",
            {"path": "/run/s.sock", "db": 2, "connection_class": UnixDomainSocketConnection},
        ),
    ],
)
def test_a_url_says_what_redis_py_is_told(url: str, address: str, options: dict[str, Any]) -> None:
    parsed = ServerURL.parse(url)
    assert (parsed.name, parsed.address, parsed.folder) == ("n", address, None)
    assert dict(parsed.options) == options
    assert parsed.connection_options() == options
    assert str(parsed) == f"{address}#n"


def test_an_embedded_url_names_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url in (f"embedded://{tmp_path}/a%20b#n", "embedded://a%20b#n", "embedded://./x/../a b#n"):
        parsed = ServerURL.parse(url)
        assert parsed.folder == tmp_path / "a b"
        assert parsed.address == f"embedded:{tmp_path}/a b"
        assert parsed.name == "n"
    timed = ServerURL.parse("embedded:///x?socket_timeout=7#n")
    assert dict(timed.options) == {"socket_timeout": 7.0}


def test_an_embedded_server_is_dialled_without_the_environments_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASSWORD_VARIABLE, SECRET)
    assert ServerURL.parse("embedded:///x#n").connection_options() == {}


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://h/0#n", "scheme is 'http'; it must be one of redis://"),
        ("h:6379#n", "scheme is 'h'"),
        ("", "scheme is ''"),
        ("redis://h/0", "the URL of h/0 names no data set; add it as the fragment"),
        ("redis://h/0#", "names no data set"),
        ("embedded://#n", "needs a folder"),
        ("redis:#n", "must be one of redis://"),
        ("redis:h:6379#n", "must be one of redis://"),
        ("redis://h:port/0#n", "port that is no number"),
        ("redis://h:70000/0#n", "port that is no number"),
        ("redis://[::1#n", "cannot be read: Invalid IPv6 URL"),
        ("redis://h/0?socket_timeout=soon#n", "Invalid value for 'socket_timeout'"),
        ("redis://h/0?socket_timeout=0#n", "socket_timeout=0.0; it must be a number of seconds above 0"),
        ("redis://h/0?socket_timeout=-1#n", "socket_timeout=-1"),
        ("redis://h/0?socket_timeout=nan#n", "socket_timeout=nan"),
        ("redis://h/0?socket_timeout=inf#n", "socket_timeout=inf"),
        ("redis://h/0?socket_connect_timeout=0#n", "socket_connect_timeout=0.0"),
        ("embedded:///x?socket_timeout=0#n", "socket_timeout=0.0"),
        ("redis://h/0#%ff%fe", "'%ff%fe' is not UTF-8"),
        ("redis://h/0#\ud800", "is not UTF-8"),
    ],
)
def test_a_url_that_cannot_work_is_refused_with_its_fault(url: str, said: str) -> None:
    with pytest.raises(URLError) as caught:
        ServerURL.parse(url)
    assert said in str(caught.value)


@pytest.mark.parametrize("url", [None, b"redis://h#n", 3, Path("/x")])
def test_what_is_no_string_is_no_url(url: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"a URL is a string like .*, not {type(url).__name__}"):
        ServerURL.parse(url)


def test_a_name_is_optional_where_none_is_needed() -> None:
    assert ServerURL.parse("redis://h/0", require_name=False).name == ""
    assert str(ServerURL.parse("redis://h/0", require_name=False)) == "redis://h:6379/0"


NAMES = [
    "atari/pong",
    "a b",
    "a%20b",
    "{tag}",
    "*",
    "a?b",
    "[ab]",
    "a#b",
    "a\nb",
    "ab",
    "a\tb",
    "a\0b",
    "ü",
    "a:b",
    " ",
    "€{}%",
]


@pytest.mark.parametrize("name", NAMES)
def test_any_name_comes_back_from_its_fragment_and_its_key(name: str) -> None:
    assert ServerURL.parse(f"redis://h/0#{quote(name)}").name == name
    assert ServerURL.parse(f"redis://h/0#{quote(name, safe='')}").name == name
    if "%" not in name:
        assert ServerURL.parse(f"redis://h/0#{name}").name == name
    assert name_from_encoded(encode_name(name).encode()) == name


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), st.text(st.characters(exclude_categories=["Cs"])))
def test_no_name_leaves_its_own_keys(one: str, other: str) -> None:
    for make in (manifest_key, staged_key, superseded_key):
        key = make(one)
        assert key.isascii()
        # One hash tag, and nothing of the name outside it; nothing in it that a pattern or a separator could be.
        assert key.count(b"{") == key.count(b"}") == 1
        inner = key[key.index(b"{") + 1 : key.index(b"}")]
        assert not set(inner) & set(b"*?[]^\\:{} \r\n\0")
        assert (make(other) == key) == (one == other)
    assert len({make(one) for make in (manifest_key, staged_key, superseded_key)}) == 3


CREDENTIALS = [
    (f"redis://:{SECRET}@h/0#n", {"password": SECRET}),
    (f"redis://me:{SECRET}@h/0#n", {"username": "me", "password": SECRET}),
    (f"redis://h/0?password={SECRET}&username=me#n", {"username": "me", "password": SECRET}),
    (f"unix://me:{SECRET}@/s.sock#n", {"username": "me", "password": SECRET}),
    (f"rediss://h/0?ssl_password={SECRET}#n", {"ssl_password": SECRET}),
]


@pytest.mark.parametrize(("url", "credentials"), CREDENTIALS)
def test_credentials_reach_redis_py_and_nothing_else(url: str, credentials: dict[str, str]) -> None:
    parsed = ServerURL.parse(url)
    assert {key: parsed.connection_options().get(key) for key in credentials} == credentials
    for shown in (repr(parsed), str(parsed), parsed.address, repr(parsed.options), f"{parsed!s} {parsed!r}"):
        assert SECRET not in shown
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        data = pickle.dumps(parsed, protocol)
        assert SECRET.encode() not in data
        copied = pickle.loads(data)
        assert copied == parsed
        assert dict(copied.credentials) == {}


def test_percent_encoded_credentials_are_decoded() -> None:
    parsed = ServerURL.parse(f"redis://{quote('a:b@c', safe='')}:{quote('p/w#?@:%', safe='')}@h/0#n")
    assert parsed.connection_options()["username"] == "a:b@c"
    assert parsed.connection_options()["password"] == "p/w#?@:%"


@pytest.mark.parametrize("separator", ["/", "#", "?", "@", ":", " ", "%"])
@pytest.mark.parametrize("tail", ["@h:6379/0#n", "@h:port/0#n", "@h:6379/0", "@[::1/0#n"])
def test_a_password_that_is_not_percent_encoded_is_not_shown_when_it_is_refused(separator: str, tail: str) -> None:
    try:
        parsed = ServerURL.parse(f"redis://me:first{separator}second{tail}")
    except URLError as error:
        assert "first" not in str(error)
        # What stands after a "#" is the name as far as anybody can tell.
        assert separator == "#" or "second" not in str(error)
    else:
        assert "first" not in f"{parsed} {parsed!r}"


def test_the_environment_supplies_what_the_url_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASSWORD_VARIABLE, SECRET)
    bare = ServerURL.parse("redis://h/0#n")
    assert bare.connection_options()["password"] == SECRET
    assert "username" not in bare.connection_options()
    monkeypatch.setenv(USERNAME_VARIABLE, "me")
    assert bare.connection_options()["username"] == "me"
    own = ServerURL.parse("redis://you:own@h/0#n")
    assert (own.connection_options()["username"], own.connection_options()["password"]) == ("you", "own")
    assert SECRET not in f"{bare} {bare!r} {bare.__getstate__()}"
    assert SECRET.encode() not in pickle.dumps(bare)


def test_copies_keep_the_credentials_and_pickles_do_not() -> None:
    parsed = ServerURL.parse(f"redis://:{SECRET}@h/0#n")
    assert replace(parsed, name="m").connection_options()["password"] == SECRET
    for copied in (copy.copy(parsed), copy.deepcopy([parsed])[0]):
        assert copied.connection_options()["password"] == SECRET
    assert dict(pickle.loads(pickle.dumps(parsed)).credentials) == {}
