"""Requests of a fleet whose KV moves all the time, over tiers and copies that fail: each gets its own tokens."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from support.engine.cramped_fleet import CrampedFleet

BEFALLEN = ("kv_hits_peer", "kv_errors_disk", "prefixes listed")


def test_requests_get_their_own_tokens_wherever_their_kv_is(tmp_path: Path) -> None:
    counts = Counter[str]()
    for seed in range(2):
        counts += CrampedFleet(seed, tmp_path / str(seed)).run(12)
    assert counts["requests"] == 24, counts


@pytest.mark.heavy
def test_many_requests_get_their_own_tokens(tmp_path: Path) -> None:
    """Threads that read and write take part, so what befalls a request is another thing in each run."""
    counts, num = Counter[str](), 0
    while num < 3 or (num < 12 and not all(counts[each] for each in BEFALLEN)):
        counts += CrampedFleet(10 + num, tmp_path / str(num)).run(24)
        num += 1
    assert counts["requests"] == 24 * num and all(counts[each] for each in BEFALLEN), counts
