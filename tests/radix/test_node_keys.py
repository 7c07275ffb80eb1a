from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from rootgraft.radix.node import common_prefix

tokens = st.lists(st.integers(0, 1), max_size=40)


@given(tokens, tokens, tokens, st.integers(0, 50))
def test_it_counts_the_first_tokens_that_are_equal(stem, left, right, limit):
    a, b = stem + left, stem + right
    expected = 0
    while expected < min(len(a), len(b), limit) and a[expected] == b[expected]:
        expected += 1
    assert common_prefix(array("i", a), array("i", b), limit) == expected
