"""The GPU's low-rank op, interpreted, against the oracle; and what shape of work it chooses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.kernels import triton_interpreter
from support.kernels.adapter_tables import random_factors, random_table
from support.kernels.fake_streams import FakeStream, fake_streams
from torch import Tensor

from benchmarks.gpu.measure import launches
from rootgraft.kernels import lora_reference, ops
from rootgraft.kernels.lora_ops import (
    Factors,
    Segments,
    SlotTable,
    Tiles,
    lora_embed,
    lora_gated_activation,
    lora_shrink_beside,
    lora_shrink_expand,
)
from rootgraft.kernels.triton import lora_config, lora_kernels
from rootgraft.kernels.triton.graph_branch import branching
from rootgraft.kernels.triton.lora_config import make_tiles
from rootgraft.lora.segments import StaticSegments, make_segments

pytestmark = pytest.mark.usefixtures("interpreted")

CPU = torch.device("cpu")
TYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def segments_of(slots: list[int]) -> Segments:
    found = make_segments(np.array(slots, np.int32), CPU)
    assert found is not None and found.tiles is not None
    return found


def close(actual: Tensor, expected: Tensor) -> bool:
    tolerance = TOLERANCE[actual.dtype]
    return torch.allclose(
        actual.float(), expected.float(), rtol=tolerance, atol=tolerance * expected.abs().max().item()
    )


def both(
    table: SlotTable, slots: list[int], dtype: torch.dtype, y_dtype: torch.dtype, segments: Segments | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """y before, after the kernels, and after the oracle."""
    g = torch.Generator().manual_seed(len(slots))
    x = torch.randn(len(slots), table.width, generator=g).to(dtype)
    y = torch.randn(len(slots), sum(table.sizes), generator=g).to(y_dtype)
    actual, expected = y.clone(), y.clone()
    lora_shrink_expand(actual, x, table, segments or segments_of(slots))
    lora_reference.lora_shrink_expand(expected, x, None, table, segments_of(slots))
    return y, actual, expected


@settings(max_examples=20)
@given(
    sizes=st.lists(st.integers(1, 140), min_size=1, max_size=3).map(tuple) | st.just((128, 64, 64)),
    width=st.integers(1, 300) | st.just(512),
    slots=st.lists(st.integers(-1, 3), min_size=1, max_size=20).filter(lambda slots: max(slots) >= 0),
    dtype=st.sampled_from(TYPES),
    wide=st.booleans(),
    data=st.data(),
)
def test_against_plain_torch(sizes, width, slots, dtype, wide, data):
    rank = st.integers(0, 40)
    ranks = [
        data.draw(st.none() | st.tuples(*[rank] * len(sizes)).filter(any), label=f"ranks of slot {slot}")
        for slot in range(4)
    ]
    table = random_table(sizes, width, ranks, dtype)
    y, actual, expected = both(table, slots, dtype, torch.float32 if wide else dtype)
    assert close(actual, expected)
    untouched = [i for i, slot in enumerate(slots) if slot < 0 or ranks[slot] is None]
    assert torch.equal(actual[untouched], y[untouched])


@pytest.mark.parametrize(("rank", "dtype"), [(1, TYPES[1]), (16, TYPES[2]), (100, TYPES[0]), (256, TYPES[1])])
def test_ranks_from_one_to_the_largest(rank, dtype):
    """Beside a slot of rank 8, in the same step, whose launches are made for the larger one."""
    _, actual, expected = both(random_table((192,), 320, [(rank,), (8,)], dtype), [1, 0, -1, 0, 1], dtype, dtype)
    assert close(actual, expected)


@pytest.mark.parametrize("dtype", TYPES)
def test_long_segments(dtype):
    """A prompt's chunk: tiles of 64 tokens, the last of them partly filled."""
    slots = [0] * 100 + [-1] * 3 + [1] * 64
    assert segments_of(slots).tiles.size == lora_config.LONG
    _, actual, expected = both(random_table((192, 64), 200, [(16, 20), (8, 0)], dtype), slots, dtype, dtype)
    assert close(actual, expected)


@pytest.mark.parametrize("slots", [[0, 1, -1, 1], [0] * 70], ids=["short", "long"])
def test_the_first_half_beside_a_product(slots):
    """The same bits, waited for before they are read; also where y lies so that plain torch adds all."""
    log: list[str] = []
    table = random_table((192, 64), 320, [(16, 8), (8, 0)], torch.bfloat16)
    segments, x = segments_of(slots), torch.randn(len(slots), 320).bfloat16()
    found, expected = (torch.ones(len(slots), 256, dtype=torch.bfloat16) for _ in range(2))
    strided = torch.ones(len(slots), 512, dtype=torch.bfloat16)[:, ::2]
    lora_shrink_expand(expected, x, table, segments)
    for y in (found, strided):
        with fake_streams(log, FakeStream(log, "main")), branching(FakeStream(log, "side")):
            shrunk = lora_shrink_beside(x, table, segments)
            with launches() as names:
                lora_shrink_expand(y, x, table, segments, shrunk)
        assert names == ({"_expand"} if y is found else set())
    assert torch.equal(found, expected)
    assert close(strided, expected)
    assert log == ["side waits for main", "on side", "on main again", "main waits for side"] * 2


def activated(x, table, slots, kind="silu", segments=None):
    """By one launch behind the first half, and by two; the former's name, whose tokens may be of the base model."""
    y = torch.randn(len(slots), sum(table.sizes), generator=torch.Generator().manual_seed(5)).to(table.dtype)
    segments = segments or segments_of(slots)
    whole = y.clone()
    lora_shrink_expand(whole, x, table, segments)
    with launches() as names:
        found = lora_gated_activation(y, x, kind, table, segments, lora_shrink_beside(x, table, segments))
    return found, ops.gated_activation(whole, kind), names


@settings(max_examples=20)
@given(
    width=st.sampled_from([16, 64, 80, 192]),
    slots=st.lists(st.integers(-1, 3), min_size=1, max_size=50).filter(lambda slots: max(slots) >= 0),
    dtype=st.sampled_from(TYPES),
    kind=st.sampled_from(["silu", "gelu_tanh", "relu2", "gelu"]),
    data=st.data(),
)
def test_the_second_half_within_an_activation(width, slots, dtype, kind, data):
    """Bits are those of two launches, for ranks of which either may be 0, gains and addends, and for other tokens."""
    rank = st.integers(0, 40)
    ranks = [data.draw(st.none() | st.tuples(rank, rank), label=f"ranks of slot {slot}") for slot in range(4)]
    assume(any(ranks))
    x = torch.randn(len(slots), 96, generator=torch.Generator().manual_seed(7)).to(dtype)
    found, expected, names = activated(x, random_table((width, width), 96, ranks, dtype), slots, kind)
    assert torch.equal(found, expected)
    assert ("_expand_gated" in names) == (segments_of(slots).tiles.size == lora_config.SHORT)


def test_an_activation_in_a_captured_step():
    """Tiles and tokens of which some are empty; and what one launch does not compute is left to two."""
    slots, dtype = [1, -1, 0, 0, -1], torch.bfloat16
    x = torch.randn(8, 96).to(dtype)
    room = StaticSegments(8, CPU)
    room.fill(np.array(slots, np.int32))
    table = random_table((64, 64), 96, [(8, 4), (16, 16)], dtype)
    found, expected, names = activated(x, table, [0] * 8, segments=room.segments(8))
    assert torch.equal(found, expected) and names == {"_shrink", "_expand_gated"}
    ops.use_invariant(True)
    try:
        found, expected, names = activated(x, table, [0] * 8, segments=room.segments(8))
    finally:
        ops.use_invariant(False)
    assert torch.equal(found, expected) and names == {"_shrink", "_expand", "_gated_activation"}
    found, expected, names = activated(x, random_table((48, 80), 96, [(8, 4)], dtype), [0] * 8)
    assert torch.equal(found, expected) and "_expand_gated" not in names


def test_gate_and_up_of_another_width_are_refused():
    """The launch within the activation would read behind them."""
    table, segments = random_table((64, 64), 96, [(8, 4)], torch.bfloat16), segments_of([0, -1])
    x, y = torch.ones(2, 96, dtype=torch.bfloat16), torch.ones(2, 112, dtype=torch.bfloat16)
    shrunk = lora_shrink_beside(x, table, segments)
    with pytest.raises(ValueError, match=r"y is \[2, 112\]; the projection has 128 columns"):
        lora_gated_activation(y, x, "silu", table, segments, shrunk)


def test_sums_are_fp32_between_the_kernels():
    """A x of 1 + 2^-12 must not become 1, as it would in bf16, nor may what is added to a y of the factors' type."""
    table = SlotTable((64,), 64, 1, torch.bfloat16)
    a, b = torch.zeros(16, 64, dtype=torch.bfloat16), torch.zeros(64, 16, dtype=torch.bfloat16)
    a[0, 0], a[0, 1], b[:, 0] = 1.0, 2.0**-12, 1.0
    made = Factors(a, torch.ones(16), (16,), b.T.contiguous().flatten())
    triton_interpreter.allow(*made.tensors())
    table.put(0, made)
    y = torch.full((1, 64), -1.0)
    lora_shrink_expand(y, torch.ones(1, 64, dtype=torch.bfloat16), table, segments_of([0]))
    assert torch.equal(y, torch.full((1, 64), 2.0**-12))


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(("dtype", "y_dtype"), [(t, t) for t in TYPES] + [(t, torch.float32) for t in TYPES[1:]])
def test_embedding(dtype, y_dtype, captured):
    """In an eager step and in a captured one, whose segments are tiles alone."""
    table = SlotTable((37,), 50, 2, dtype)
    table.put(1, random_factors((37,), 50, (140,), dtype, 1, embed=True))
    slots = [1, -1] * 10
    ids = torch.randint(50, (20,))
    y = torch.randn(20, 37).to(y_dtype)
    y_aligned = torch.zeros(20, 48, dtype=y_dtype)[:, :37].contiguous().copy_(y)
    actual, expected = y_aligned.clone(), y.clone()
    room = StaticSegments(32, CPU)
    room.fill(np.array(slots, np.int32))
    with launches() as launched:
        lora_embed(actual, ids, table, room.segments(20) if captured else segments_of(slots))
    assert launched == {"_gather", "_expand"}
    lora_reference.lora_shrink_expand(expected, None, ids, table, segments_of(slots))
    assert close(actual, expected)
    assert torch.equal(actual[1::2], y[1::2])


def test_an_id_outside_of_the_vocabulary_reads_nothing():
    table = SlotTable((16,), 5, 1, torch.float32)
    table.put(0, random_factors((16,), 5, (2,), torch.float32, 0, embed=True))
    y = torch.ones(2, 16)
    lora_embed(y, torch.tensor([-1, 5]), table, segments_of([0, 0]))
    assert torch.equal(y, torch.ones(2, 16))


def test_a_captured_step_serves_every_mix_of_adapters():
    """The same launches, as in a graph, over segments that are filled anew and adapters that come and go."""
    table = random_table((96,), 64, [(3,), None, (20,)], torch.float32)
    table.reserve(32)
    room = StaticSegments(6, CPU)
    for slots in ([0, 0, 2, -1, 2, 2], [-1] * 6, [2, 1, 0, 0, -1, 1], [0] * 6, [1, -1, 2]):
        room.fill(np.array(slots, np.int32))
        x, y = torch.randn(6, 64), torch.randn(6, 96)
        actual, expected = y.clone(), y.clone()
        lora_shrink_expand(actual, x, table, room.segments(6))
        if max(slots) >= 0:
            lora_reference.lora_shrink_expand(expected, x, None, table, segments_of(slots))
        assert close(actual, expected)
        table.put(1, random_factors((96,), 64, (32,), torch.float32, 5))


@given(lengths=st.lists(st.integers(1, 70), min_size=1, max_size=6), size=st.sampled_from(lora_config.TILES))
def test_tiles_cover_each_segment_once(lengths, size):
    slots = np.arange(len(lengths), dtype=np.int32)[::-1].copy()
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    lines = make_tiles(slots, starts, size)
    covered = [(int(slot), place) for slot, first, end in lines for place in range(first, end)]
    assert covered == [(int(slots[g]), t) for g in range(len(lengths)) for t in range(starts[g], starts[g + 1])]
    assert all(0 < end - first <= size for _, first, end in lines)
    assert len(lines) == sum(-(-length // size) for length in lengths)


def test_tiles_without_segments():
    assert make_tiles(np.zeros(0, np.int32), np.zeros(1, np.int32), 16).shape == (0, 3)


@pytest.mark.parametrize(
    ("num_tokens", "num_segments", "size"),
    [(1, 1, 16), (128, 32, 16), (63, 1, 16), (64, 1, 64), (2048, 1, 64), (2079, 32, 64), (1000, 64, 16)],
)
def test_size_of_tiles(num_tokens, num_segments, size):
    assert lora_config.tile_size(num_tokens, num_segments) == size


H100 = 132


@pytest.mark.parametrize(
    ("tile", "ranks", "width", "expected"),
    [
        (16, 16, 4096, (16, 256, 8)),
        (16, 48, 4096, (32, 256, 8)),
        (16, 16, 1024, (16, 256, 2)),  # parts of two iterations
        (64, 48, 4096, (64, 64, 4)),
        (16, 3, 64, (16, 256, 1)),
    ],
)
def test_form_of_a_shrink(tile: int, ranks: int, width: int, expected: tuple[int, int, int]) -> None:
    config = lora_config.shrink_config(tile, ranks, width, 2)
    assert (config.ranks, config.inputs, config.most_splits) == expected


@pytest.mark.parametrize(
    ("filled", "rank", "sms", "expected"),
    [
        (1, 16, 132, 8),  # one adapter: too few programs, so that its inputs are split as far as can be
        (8, 16, 132, 8),
        (32, 16, 132, 4),
        (32, 40, 132, 2),  # two blocks of ranks
        (64, 16, 132, 2),
        (150, 16, 132, 1),
    ],
)
def test_splits_are_chosen_by_what_a_step_has(filled: int, rank: int, sms: int, expected: int) -> None:
    """And not by the tiles or the ranks that its launches have room for."""
    dtype, width = torch.bfloat16, 4096
    table = random_table((64,), width, [(rank,)], dtype)
    x, counts = torch.ones(filled, width, dtype=dtype), []
    for room, ranks in ((0, rank), (40, 192)):
        lines = torch.zeros(filled + room, 3, dtype=torch.int32)
        lines[:filled, 1] = torch.arange(filled)
        lines[:filled, 2] = torch.arange(filled) + 1
        tiles = Tiles(lines, lora_config.SHORT)
        config = lora_config.shrink_config(tiles.size, ranks, width, 2)
        shrunk = torch.empty(config.most_splits, filled, ranks)
        parts = torch.zeros(filled + room, dtype=torch.int32)
        tokens = torch.arange(filled, dtype=torch.int32)
        launch = lora_kernels._shrink_launch(x, table, tokens, tiles, shrunk, parts, config, sms)
        # What a program chooses depends on no other one: one tile's suffice.
        launch.kernel[(launch.grid[0], 1, 1)](*launch.args, **launch._options())
        counts.append(int(parts[0]))
    assert counts == [expected, expected]


@pytest.mark.parametrize(
    ("tile", "num_tiles", "columns", "expected"),
    [
        (16, 1, 4096, 64),
        (16, 1, 128_256, 128),
        (16, 2, 4096, 64),
        (16, 8, 4096, 128),
        (16, 32, 6144, 128),
        (64, 32, 6144, 128),
    ],
)
def test_form_of_an_expansion(tile, num_tiles, columns, expected):
    assert lora_config.expand_config(tile, num_tiles, columns, H100).columns == expected


@given(
    tile=st.sampled_from(lora_config.TILES),
    num_tiles=st.integers(0, 600),
    ranks=st.integers(1, 800),
    width=st.integers(1, 30_000),
    item_size=st.sampled_from([2, 4]),
)
def test_every_form_is_one_that_is_compiled_offline(tile, num_tiles, ranks, width, item_size):
    shrink = lora_config.shrink_config(tile, ranks, width, item_size)
    assert 1 <= shrink.most_splits <= lora_config.MOST_SPLITS[tile]
    forms = [(form.ranks, form.inputs) for form in lora_config.shrink_configs(tile, item_size)]
    assert (shrink.ranks, shrink.inputs) in forms
    assert lora_config.expand_config(tile, num_tiles, width, H100) in lora_config.expand_configs(tile)


def test_segments_on_a_device_with_kernels_bring_their_tiles():
    found = segments_of([2, -1, 0, 2])
    assert found.tokens.tolist() == [2, 0, 3]
    assert isinstance(found.tiles, Tiles) and found.tiles.lines.tolist() == [[0, 0, 1], [2, 1, 3]]


def test_long_tiles_have_no_more_parts_than_they_need() -> None:
    found = {count: lora_config.splits_of_long(count, H100) for count in (1, 16, 33, 34, 66, 67, 500)}
    assert found == {1: 4, 16: 4, 33: 4, 34: 4, 66: 2, 67: 2, 500: 1}
    assert all(splits in lora_config.numbers_of_parts(lora_config.LONG) for splits in found.values())
