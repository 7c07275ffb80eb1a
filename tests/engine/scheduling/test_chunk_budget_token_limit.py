"""The limit on a step's tokens after the device had no memory: halved, never below the least, and doubled again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rootgraft.engine.scheduling.chunk_budget import STEPS_WITHOUT_ERROR, TokenLimit


@given(most=st.integers(1, 1 << 20), sizes=st.lists(st.integers(0, 1 << 20), max_size=40))
def test_it_ends_at_one_token(most: int, sizes: list[int]) -> None:
    limit = TokenLimit(most)
    for size in sizes:
        before = limit.tokens
        if limit.halve(size):
            assert 1 <= limit.tokens <= min(before, size) // 2
        else:
            assert limit.tokens == before and min(before, size) <= 1
    while limit.halve(limit.tokens):
        pass
    assert limit.tokens == 1


def test_a_small_step_lowers_the_limit_below_itself() -> None:
    limit = TokenLimit(8192)
    assert limit.halve(300) and limit.tokens == 150
    assert not limit.halve(1) and limit.tokens == 150


def test_it_is_doubled_after_a_thousand_steps() -> None:
    limit = TokenLimit(640)
    limit.halve(640)
    limit.halve(320)
    for _ in range(STEPS_WITHOUT_ERROR):
        assert limit.tokens == 160
        limit.count_step()
    assert limit.tokens == 320
    for _ in range(5 * STEPS_WITHOUT_ERROR):
        limit.count_step()
    assert limit.tokens == 640
