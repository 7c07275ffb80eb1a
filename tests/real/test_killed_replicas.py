"""Replicas of the real model are killed under mixed streams: a short run of ``benchmarks/fleet/kill.py``."""

from __future__ import annotations

import pytest

from benchmarks.fleet.kill import KINDS, config_of, differences, run


@pytest.mark.heavy
@pytest.mark.timeout(600)
async def test_answers_are_those_of_an_undisturbed_engine() -> None:
    plain = await run(config_of(), 0, len(KINDS), 0, 24)
    killed = await run(config_of(), 2, len(KINDS), 1, 24)
    assert killed.num_kills == 1 and killed.num_replays > 0
    assert not differences(plain, killed)
