"""The activation position against a search token by token."""

from __future__ import annotations

from array import array

from hypothesis import example, given
from hypothesis import strategies as st

from rootgraft.lora.activated_lora import activation_position

TOKENS = st.lists(st.sampled_from([0, 1, 256, 65536, 1 << 24]), min_size=1, max_size=30)


@given(TOKENS, TOKENS.map(lambda tokens: tokens[:3]))
@example([0, 0, 0], [0, 0])
@example([256, 1], [1 << 16])
def test_last_occurrence(prompt, invocation):
    found = [i for i in range(len(prompt)) if prompt[i : i + len(invocation)] == invocation]
    assert activation_position(array("i", prompt), invocation) == (found[-1] if found else None)
