"""Thirty seconds of what `make soak` does for ten minutes."""

from __future__ import annotations

import pytest
from soak import soak


@pytest.mark.heavy
@pytest.mark.timeout(300)
def test_nothing_is_wrong_lost_or_stuck_while_a_cluster_is_in_trouble() -> None:
    outcome = soak(30)
    assert outcome.good, outcome
    assert outcome.batches > 20
    assert outcome.appends > 0
    assert sum(outcome.faults.values()) > 5
