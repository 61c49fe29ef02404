"""URLs: which server, how to dial it, and which data set on it. No socket is opened here."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from redis.connection import SSLConnection, UnixDomainSocketConnection, parse_url

from td_datapipes.errors import URLError
from td_datapipes.wire.retry import RetryPolicy

__all__ = ["PASSWORD_VARIABLE", "USERNAME_VARIABLE", "ServerURL"]

USERNAME_VARIABLE = "TD_DATAPIPES_USERNAME"
PASSWORD_VARIABLE = "TD_DATAPIPES_PASSWORD"
"""Where credentials come from when the URL has none."""

_SCHEMES = {
    "redis": "redis",
    "rediss": "rediss",
    "valkey": "redis",
    "valkeys": "rediss",
    "unix": "unix",
    "redis+sentinel": "redis",
    "rediss+sentinel": "rediss",
    "valkey+sentinel": "redis",
    "valkeys+sentinel": "rediss",
    "embedded": "embedded",
}
SENTINEL_PORT = 26379
_SENTINEL_SECRETS = {"sentinel_username": "username", "sentinel_password": "password"}
_SECRETS = ("username", "password", "ssl_password", *_SENTINEL_SECRETS)
_OURS = ("protocol", "decode_responses", "encoding", "encoding_errors", "legacy_responses", "parser_class")
"""Options about how replies are shown: this package reads bytes on RESP2, whatever the URL prefers elsewhere."""


@dataclass(frozen=True, kw_only=True)
class ServerURL:
    """A server, and the name of a data set on it.

    Its repr has no credentials; neither has its pickle, unless it is on the way to a worker process being spawned.

    Attributes:
        name: the data set's name (the URL's fragment, percent-decoded); empty where there is none.
        address: host, port and db, or the socket's path, for messages.
        folder: the folder of an embedded server, else None.
        options: keyword arguments for redis-py's connection, credentials left out.
        credentials: user name and passwords; never shown.
        retry: how what failed is tried again.
        sentinels: host and port of those to be asked for the master; empty where the URL names the server itself.
        service: the master's name with them.
    """

    name: str
    address: str
    folder: Path | None
    options: Mapping[str, Any]
    credentials: Mapping[str, str] = field(repr=False, compare=False)
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    sentinels: tuple[tuple[str, int], ...] = ()
    service: str = ""

    @classmethod
    def parse(cls, url: str, *, require_name: bool = True) -> ServerURL:
        """Read a URL: ``redis://``, ``rediss://``, ``valkey://``, ``valkeys://``, ``unix://`` or ``embedded://``.

        ``redis+sentinel://[user:password@]host:26379,host:26379/service/db#name`` (likewise with ``rediss``, ``valkey``
        and ``valkeys``) names sentinels, which know the master; their own credentials are the options
        ``sentinel_username`` and ``sentinel_password``.

        Raises:
            URLError: another scheme, no data set's name, or an option that redis-py refuses.
        """
        if not isinstance(url, str):
            raise URLError(f"a URL is a string like 'redis://localhost:6379/0#name', not {type(url).__name__}")
        # Cut here, because urlsplit drops line ends and tabs, which would make two names one.
        location, _, fragment = url.partition("#")
        name = _decode_name(fragment)
        try:
            parts = urlsplit(location)
        except ValueError as error:
            raise URLError(f"the URL of data set {name!r} cannot be read: {error}") from None
        scheme = _SCHEMES.get(parts.scheme)
        if scheme is None or "://" not in location:
            known = ", ".join(f"{known}://" for known in _SCHEMES)
            raise URLError(f"the URL's scheme is {parts.scheme!r}; it must be one of {known}")
        if require_name and not name:
            raise URLError(
                f"the URL of {_address_of(parts.hostname, parts.path)} names no data set; "
                "add it as the fragment: redis://localhost:6379/0#name"
            )
        if scheme == "embedded":
            return cls._embedded(name, unquote(parts.netloc) + unquote(parts.path), parts.query)
        if parts.scheme.endswith("+sentinel"):
            return cls._sentinel(name, parts, scheme)
        where = _address_of(parts.hostname, parts.path)
        _check_port(parts, where)
        # Put together by hand: urlunsplit writes "unix:/path", which redis-py does not take.
        options = _options(f"{scheme}://{parts.netloc}{parts.path}?{parts.query}", where)
        credentials = {key: options.pop(key) for key in _SECRETS if key in options}
        retry = RetryPolicy.from_options(options)
        address = _describe(options)
        return cls(name=name, address=address, folder=None, options=options, credentials=credentials, retry=retry)

    @classmethod
    def _sentinel(cls, name: str, parts: SplitResult, scheme: str) -> ServerURL:
        userinfo, _, hosts = parts.netloc.rpartition("@")
        service, _, db = parts.path.strip("/").partition("/")
        where = f"the sentinels {hosts}"
        if not hosts or not service:
            raise URLError(
                f"the URL of {where} must name them and their service: redis+sentinel://host:26379,host/service/0#name"
            )
        sentinels = tuple(_host_and_port(host, where) for host in hosts.split(","))
        at = f"{userinfo}@" if userinfo else ""
        options = _options(f"{scheme}://{at}service/{db or 0}?{parts.query}", where)
        credentials = {key: options.pop(key) for key in _SECRETS if key in options}
        retry = RetryPolicy.from_options(options)
        listed = ",".join(f"{host}:{port}" for host, port in sentinels)
        return cls(
            name=name,
            address=f"{scheme}+sentinel://{listed}/{unquote(service)}/{options.get('db', 0)}",
            folder=None,
            options=options,
            credentials=credentials,
            retry=retry,
            sentinels=sentinels,
            service=unquote(service),
        )

    @classmethod
    def _embedded(cls, name: str, folder: str, query: str) -> ServerURL:
        if not folder:
            raise URLError("an embedded server needs a folder: embedded:///path/to/folder#name")
        path = Path(folder).expanduser().resolve()
        options = _options(f"unix:///?{query}", str(path))
        # Where it listens, and as whom, is the embedded server's own business.
        for key in ("path", "connection_class", *_SECRETS):
            options.pop(key, None)
        retry = RetryPolicy.from_options(options)
        address = f"embedded:{path}"
        return cls(name=name, address=address, folder=path, options=options, credentials={}, retry=retry)

    def connection_options(self) -> dict[str, Any]:
        """Everything redis-py needs to dial, credentials from the URL or else from the environment."""
        if self.folder is not None:
            return dict(self.options)
        credentials = {key: value for key, value in self.credentials.items() if key not in _SENTINEL_SECRETS}
        if "password" not in credentials and os.environ.get(PASSWORD_VARIABLE):
            credentials["password"] = os.environ[PASSWORD_VARIABLE]
            if os.environ.get(USERNAME_VARIABLE):
                credentials.setdefault("username", os.environ[USERNAME_VARIABLE])
        return {**self.options, **credentials}

    def sentinel_credentials(self) -> dict[str, str]:
        """What the sentinels want to see, if anything."""
        return {_SENTINEL_SECRETS[key]: value for key, value in self.credentials.items() if key in _SENTINEL_SECRETS}

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        if get_spawning_popen() is None:
            state["credentials"] = {}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __copy__(self) -> ServerURL:
        return self  # never changes; a pickle, which `copy` would go by, leaves the credentials out

    def __deepcopy__(self, memo: dict[int, Any]) -> ServerURL:
        return self

    def __str__(self) -> str:
        return f"{self.address}#{self.name}" if self.name else self.address


def _decode_name(fragment: str) -> str:
    try:
        name = unquote(fragment, errors="strict")
        name.encode()
    except UnicodeError as error:
        raise URLError(f"the data set's name {fragment!r} is not UTF-8: {error}") from None
    return name


def _check_port(parts: SplitResult, where: str) -> None:
    try:
        _ = parts.port
    except ValueError:
        # Python's own message would quote what may be a password.
        raise URLError(
            f"the URL of {where} has a port that is no number from 0 to 65535; "
            "in a user name or password, percent-encode / # ? and @"
        ) from None


def _host_and_port(text: str, where: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    if not colon:
        host, port = text, str(SENTINEL_PORT)
    if not port.isdigit() or not 0 < int(port) < 65536 or not host:
        raise URLError(f"the URL of {where} names {text!r}, which is no host:port")
    return host.strip("[]"), int(port)


def _options(url: str, where: str) -> dict[str, Any]:
    """What redis-py makes of a URL, without the options that are this package's to set."""
    try:
        options: dict[str, Any] = parse_url(url)  # type: ignore[no-untyped-call]
    except ValueError as error:
        raise URLError(f"the URL of {where} cannot be read: {error}") from None
    for key in _OURS:
        options.pop(key, None)
    for key in ("socket_timeout", "socket_connect_timeout"):
        if not 0 < options.get(key, 1) < math.inf:
            raise URLError(f"the URL of {where} has {key}={options[key]}; it must be a number of seconds above 0")
    return options


def _address_of(host: str | None, path: str) -> str:
    # A password with an unescaped "/" ends up in the path.
    return f"{host or ''}{path.rpartition('@')[2]}" or "the server"


def _describe(options: Mapping[str, Any]) -> str:
    kind = options.get("connection_class")
    if kind is UnixDomainSocketConnection:
        return f"unix:{options.get('path', '')}"
    scheme = "rediss" if kind is SSLConnection else "redis"
    return f"{scheme}://{options.get('host', 'localhost')}:{options.get('port', 6379)}/{options.get('db', 0)}"
