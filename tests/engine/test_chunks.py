"""Prompts are cut so that streams beside them go on; how much depends on how fast steps are."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engine.core_hooks import set_clock
from support.engine.fake_worker import FakeWorker

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.messages import Submit, TokenOut
from rootgraft.engine.step_cost import LEAST, STREAM_WAIT, ChunkLimit
from rootgraft.engine.types import SamplingParams

BUDGET = 512


class TimedCore:
    """An engine on whose clock a step takes ``per_token`` seconds for each of its tokens."""

    def __init__(self, per_token: float) -> None:
        config = EngineConfig(max_num_seqs=8, max_num_batched_tokens=BUDGET, speculative_config='{"method": "off"}')
        self.worker = FakeWorker(1000, 16)
        self.core = EngineCore(config, self.worker)
        self.per_token = per_token
        self.now = 0.0
        set_clock(self.core, lambda: self.now)
        launch = self.worker.launch

        def timed_launch(batch):
            self.now += batch.num_tokens * self.per_token
            return launch(batch)

        self.worker.launch = timed_launch

    def submit(self, number: int, num_prompt: int, max_tokens: int) -> None:
        prompt = array("i", [(number * 31 + i * i) % 97 for i in range(num_prompt)])
        self.core.handle([Submit(number, prompt, SamplingParams(max_tokens=max_tokens))])

    def step(self) -> tuple[int, set[int]]:
        """The tokens of the next step, and whose tokens it brought."""
        told = self.core.step()
        return self.worker.batches[-1].num_tokens, {each.id for each in told if isinstance(each, TokenOut)}


def test_beside_a_stream_a_prompt_takes_no_longer_than_streams_are_to_wait() -> None:
    timed = TimedCore(per_token=2**-10)
    timed.submit(0, 600, 100)
    assert [timed.step()[0] for _ in range(2)] == [512, 88]  # nobody waits
    timed.submit(1, 1500, 1)
    sizes = []
    while 1 not in (told := timed.step())[1]:
        sizes.append(told[0])
        assert 0 in told[1]
    assert sizes == [int(STREAM_WAIT * 2**10)] * 5


def test_a_fast_device_takes_its_whole_budget() -> None:
    timed = TimedCore(per_token=0.00001)
    timed.submit(0, 100, 100)
    timed.step()
    timed.submit(1, 1000, 1)
    assert timed.step()[0] == BUDGET


def test_on_a_slow_device_prompts_get_on_nevertheless() -> None:
    timed = TimedCore(per_token=1.0)
    timed.submit(0, 100, 100)
    timed.step()
    timed.submit(1, 320, 1)
    assert timed.step()[0] == 1 + LEAST


def test_streams_keep_their_part_of_the_budget() -> None:
    """Those who wait for one token are never cut, however many they are."""
    limit = ChunkLimit()
    limit.observe(100, 0, 100.0)
    assert limit.cut(64, 60) == 64
    assert limit.cut(512, 60) == 60 + LEAST


@given(st.floats(1e-6, 1e-2), st.lists(st.integers(17, 2048), min_size=30, max_size=60), st.integers(1, 64))
def test_one_slow_step_is_forgotten(per_token: float, sizes: list[int], streams: int) -> None:
    limit = ChunkLimit()
    limit.observe(256, 0, 1000 * per_token * 256)  # pages touched for the first time, say
    for size in sizes:
        limit.observe(size, 0, size * per_token)
    wanted = max(streams + LEAST, STREAM_WAIT / per_token)
    assert limit.cut(1 << 30, streams) == pytest.approx(wanted, rel=0.25, abs=1)


@given(st.floats(1e-4, 1e-3), st.lists(st.integers(32, 80), min_size=1, max_size=60))
def test_small_steps_do_not_make_prompts_look_slow(per_token: float, sizes: list[int]) -> None:
    """Each takes as long as 40 tokens more."""
    limit = ChunkLimit()
    limit.observe(512, 0, (512 + 40) * per_token)
    before = limit.cut(1 << 30, 1)
    for size in sizes:
        limit.observe(size, 2, (size + 40) * per_token)
    assert limit.cut(1 << 30, 1) == before


@given(st.lists(st.integers(32, 80), min_size=1, max_size=60))
def test_small_steps_are_no_measure_for_a_large_one(sizes: list[int]) -> None:
    limit = ChunkLimit()
    for size in sizes:
        limit.observe(size, 2, (size + 40) * 0.0003)
    chunks = []
    for _ in range(2):
        chunks.append(limit.cut(512, 4))
        limit.observe(chunks[-1], 4, (chunks[-1] + 40) * 0.0003)
    assert chunks[-1] == 512


@pytest.mark.parametrize("slower", [2.0, 10.0])
def test_a_machine_that_becomes_slower_gets_shorter_chunks(slower: float) -> None:
    limit, seconds = ChunkLimit(), 0.0
    limit.observe(512, 4, 512 * 0.0004)
    for _ in range(20):
        tokens = limit.cut(512, 4)
        seconds = tokens * 0.0004 * slower
        limit.observe(tokens, 4, seconds)
    assert seconds == pytest.approx(STREAM_WAIT, rel=0.1)


def test_steps_without_prompts_say_nothing() -> None:
    limit = ChunkLimit()
    limit.observe(40, 30, 10.0)
    assert limit.cut(512, 30) == 512
