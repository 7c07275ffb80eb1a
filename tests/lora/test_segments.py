"""Tokens of a step sorted by slot, against a loop in Python."""

from __future__ import annotations

from unittest import mock

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from rootgraft.kernels.layouts.lora_arguments import Segments
from rootgraft.kernels.triton import launch, lora_config
from rootgraft.lora.segments import StaticSegments, make_segments, token_slots

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


@given(st.lists(st.integers(-1, 3), min_size=1, max_size=120), st.integers(0, 40))
def test_tiles_of_static_segments_have_room(of_tokens, room):
    """For any step of up to four slots in a pass that is captured for more tokens, and no more than that takes."""
    with mock.patch.object(launch, "DEVICE_TYPES", frozenset(("cuda", "cpu"))):
        static = StaticSegments(len(of_tokens) + room, CPU, num_slots=4)
        static.fill(np.array(of_tokens, np.int32))
        segments = static.segments(len(of_tokens) + room)
    assert slots_of(segments, len(of_tokens)) == of_tokens
    assert_places(segments, [*of_tokens, *[-1] * room])
    assert segments.tiles is not None
    assert len(segments.tiles.lines) <= (len(of_tokens) + room) / lora_config.SHORT + 4


def test_the_most_tiles_are_used():
    """Slots of one token more than whole tiles: the bound that static segments have is met."""
    of_tokens = np.repeat(np.arange(3, dtype=np.int32), lora_config.SHORT + 1)
    tiles = lora_config.make_tiles(np.arange(3, dtype=np.int32), np.arange(4, dtype=np.int32) * 17, lora_config.SHORT)
    assert len(tiles) == (len(of_tokens) + 15 * 3) // 16 == 6


@given(st.lists(st.integers(-1, 3), min_size=1, max_size=70).filter(lambda slots: max(slots) >= 0))
def test_places_of_tokens(of_tokens):
    """In a step of few tokens and short tiles; a longer one after it leaves static places behind that name nothing."""
    with mock.patch.object(launch, "DEVICE_TYPES", frozenset(("cuda", "cpu"))):
        assert_places(make_segments(np.array(of_tokens, np.int32), CPU), of_tokens)
        static = StaticSegments(80, CPU, num_slots=4)
        for step in ([0] * 80, of_tokens):
            static.fill(np.array(step, np.int32))
        for count in (len(of_tokens), 70):
            assert_places(static.segments(count), [*of_tokens, *[-1] * (count - len(of_tokens))])
        static.fill(np.zeros(80, np.int32))
        assert (static.segments(1).tiles.places == -1).all()


def assert_places(segments: Segments, of_tokens: list[int]) -> None:
    """Each token's place names its slot, and the position and the tile that have it; none where tokens are many."""
    tiles = segments.tiles
    assert tiles is not None
    if len(of_tokens) > lora_config.MOST_PLACED or tiles.size != lora_config.SHORT:
        assert tiles.places is None
        return
    assert tiles.places is not None and tiles.places.shape == (len(of_tokens), 3)
    for token, (slot, (own, position, tile)) in enumerate(zip(of_tokens, tiles.places.tolist(), strict=True)):
        assert own == slot
        if slot < 0:
            assert position == tile == -1
        else:
            line, first, end = tiles.lines[tile].tolist()
            assert line == slot and first <= position < end and segments.tokens[position] == token


def slots_of(segments: Segments, count: int) -> list[int]:
    """The slot of each token by the tiles."""
    found = [-1] * count
    assert segments.tiles is not None
    for slot, first, end in segments.tiles.lines.tolist():
        for token in segments.tokens[first:end].tolist():
            assert found[token] == -1
            found[token] = slot
    return found
