"""The Lua scripts, each a ``.lua`` file beside this module with a header comment that says what it takes and gives."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.resources import files

__all__ = ["Script", "load_script"]

_INCLUDE = re.compile(r"^--include (\w+)$", re.MULTILINE)
"""A line of a script that stands for another file: functions that several scripts use."""


@dataclass(frozen=True)
class Script:
    """A script's source and what the server calls it."""

    name: str
    source: str

    @cached_property
    def sha(self) -> str:
        """The digest EVALSHA takes (SHA-1: the protocol's choice)."""
        return hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()


@lru_cache
def load_script(name: str) -> Script:
    """The script of that name, what it includes put in place; read once a process."""
    return Script(name, _INCLUDE.sub(lambda line: _read(line[1]), _read(name)))


def _read(name: str) -> str:
    return files("td_datapipes.wire").joinpath(f"{name}.lua").read_text(encoding="utf-8")
