"""Tells whether a source would give the same rows again."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

__all__ = ["fingerprint_of"]


def fingerprint_of(files: Sequence[Path], *options: object) -> str:
    """Equal for the same files, unchanged, read with the same options.

    Args:
        files: in the order in which they are read.
        options: whatever else decides on the rows; their reprs are compared.
    """
    digest = hashlib.sha256()
    for path in files:
        facts = path.stat()
        digest.update(f"{path.resolve()}\0{facts.st_size}\0{facts.st_mtime_ns}\n".encode(errors="surrogateescape"))
    for option in options:
        digest.update(f"{option!r}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()
