"""The keys of a data set's name on the server; `manifest` says what lies there. Pure."""

from __future__ import annotations

from urllib.parse import quote, unquote

__all__ = [
    "NAMES_KEY",
    "appender_key",
    "appends_key",
    "encode_name",
    "manifest_key",
    "name_from_encoded",
    "staged_key",
    "superseded_key",
]

NAMES_KEY = b"td:names"


def encode_name(name: str) -> str:
    """The name as it stands in keys: only letters, digits and ``/-_.~`` are left as they are."""
    return quote(name, safe="/-_.~")


def name_from_encoded(encoded: bytes) -> str:
    """The inverse of `encode_name`, from a reply's bytes."""
    return unquote(encoded.decode("ascii"))


def manifest_key(name: str) -> bytes:
    """Where the published manifest of `name` lies."""
    return b"td:{%s}:manifest" % encode_name(name).encode()


def staged_key(name: str) -> bytes:
    """Where writers of `name` say what they have staged."""
    return b"td:{%s}:staged" % encode_name(name).encode()


def superseded_key(name: str) -> bytes:
    """Where earlier generations of `name` are kept until they are collected."""
    return b"td:{%s}:superseded" % encode_name(name).encode()


def appender_key(name: str) -> bytes:
    """Where the writer that is appending to `name` says so."""
    return b"td:{%s}:appender" % encode_name(name).encode()


def appends_key(name: str) -> bytes:
    """Where the writers that append to `name` are numbered."""
    return b"td:{%s}:appends" % encode_name(name).encode()
