"""What is imported when it is first used: a command that only says how it is used need not wait for torch."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

__all__ = ["LateModule", "late"]


class LateModule:
    """Stands for a module, which is imported when something of it is asked for.

    Args:
        name: the module's, dotted.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(import_module(self._name), attribute)

    def __repr__(self) -> str:
        return f"LateModule({self._name!r})"


def late(module: str, *names: str) -> Any:
    """Functions or classes of a module that is imported when one of them is called.

    Args:
        module: its dotted name.
        names: what is wanted of it.

    Returns:
        One callable, or a tuple of as many as there are names.
    """
    made = tuple(_caller(module, name) for name in names)
    return made if len(made) > 1 else made[0]


def _caller(module: str, name: str) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        return getattr(import_module(module), name)(*arguments, **options)

    call.__name__ = call.__qualname__ = name
    return call
