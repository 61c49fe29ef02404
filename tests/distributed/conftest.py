"""Worlds of ranks, shared by all tests of a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from worlds import Worlds


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """Worlds by size: ``worlds.of(4).run(case, ...)``."""
    made = Worlds()
    yield made
    made.close()
