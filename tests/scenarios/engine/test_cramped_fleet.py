"""Requests of a fleet whose KV moves all the time, over tiers and copies that fail: each gets its own tokens."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from support.engine.cramped_fleet import CrampedFleet


def test_requests_get_their_own_tokens_wherever_their_kv_is(tmp_path: Path) -> None:
    counts = Counter[str]()
    for seed in range(2):
        counts += CrampedFleet(seed, tmp_path / str(seed)).run(12)
    assert counts["requests"] == 24, counts


@pytest.mark.heavy
def test_many_requests_get_their_own_tokens(tmp_path: Path) -> None:
    counts = Counter[str]()
    for seed in range(10, 13):
        counts += CrampedFleet(seed, tmp_path / str(seed)).run(24)
    assert counts["requests"] == 72 and counts["kv_hits_peer"] and counts["kv_errors_disk"], counts
    assert counts["prefixes listed"], "no replica has handed anything over"
