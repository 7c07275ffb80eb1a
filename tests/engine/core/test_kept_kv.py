"""Kept KV: what the tiers hold back while sequences are computed is written when none is left, and found later."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support.engine.adapter_engine import Engine
from support.engine.core_hooks import tiers_of

from rootgraft.engine.kv_cache.write_admission import WRITTEN_POOLS
from rootgraft.engine.messages import Done

NUM_PAGES, PAGE = 32, 4
PROMPTS = [[random.Random(f"{each} {place}").randrange(11) for place in range(10 * PAGE + 1)] for each in range(40)]


@pytest.fixture
def served(tmp_path: Path) -> Path:
    """Return the folder of an engine that has computed more prompts than the tier takes on credit, without a pause."""
    engine = Engine(num_pages=NUM_PAGES, max_num_seqs=1, kv_disk=str(tmp_path))
    for prompt in PROMPTS:
        engine.submit(prompt, max_tokens=1)
    while engine.core.has_work:
        engine.step()
        tiers_of(engine.core).flush()  # the device computes a page sooner than one is written, unlike a model
    engine.run()
    stats = tiers_of(engine.core).stats()
    assert stats["kv_unwritten_disk"] > 10 and stats["kv_held_disk"] == 0
    assert WRITTEN_POOLS * NUM_PAGES < stats["kv_stored_disk"] <= (WRITTEN_POOLS + 1) * NUM_PAGES
    engine.core.close()
    return tmp_path


def cached_after_a_restart(folder: Path, prompt: list[int]) -> int:
    engine = Engine(num_pages=NUM_PAGES, kv_disk=str(folder))
    number = engine.submit(prompt, max_tokens=1)
    engine.run()
    engine.check_tokens(number)
    done = engine.ends[number]
    engine.core.close()
    assert isinstance(done, Done)
    return done.usage.cached


def test_the_first_prompts_and_those_of_the_last_pause_are_found_after_a_restart(served: Path) -> None:
    assert [cached_after_a_restart(served, PROMPTS[each]) for each in (0, -1)] == [40, 40]


def test_what_left_the_pool_before_a_pause_is_computed_again(served: Path) -> None:
    assert cached_after_a_restart(served, PROMPTS[-10]) == 0
