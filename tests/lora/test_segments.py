"""Tokens of a step sorted by slot, against a loop in Python."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from rootgraft.lora.segments import make_segments, token_slots

CPU = torch.device("cpu")

ROW = st.tuples(st.integers(-1, 5), st.integers(0, 12), st.integers(1, 7), st.integers(0, 20))


@given(st.lists(ROW, min_size=1, max_size=12))
def test_against_a_loop(rows):
    expected = [slot if start + i >= first else -1 for slot, first, length, start in rows for i in range(length)]
    of_tokens = token_slots(*(np.array(column, np.int32) for column in zip(*rows, strict=True)))
    assert of_tokens.dtype == np.int32
    assert of_tokens.tolist() == expected
    segments = make_segments(of_tokens, CPU)
    if segments is None:
        assert set(expected) == {-1}
        return
    starts, tokens = segments.starts.tolist(), segments.tokens.tolist()
    assert segments.slots.tolist() == sorted(set(expected) - {-1})
    assert starts[0] == 0 and starts[-1] == len(tokens)
    for index, slot in enumerate(segments.slots.tolist()):
        assert tokens[starts[index] : starts[index + 1]] == [i for i, s in enumerate(expected) if s == slot]
