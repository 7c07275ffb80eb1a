"""The native low-rank op against plain torch, its bits, and its bounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.machine.thoroughness import repeats
from torch import Tensor

from rootgraft.kernels import lora_reference, ops
from rootgraft.kernels.lora_ops import Factors, Segments, SlotTable, lora_embed, lora_shrink_expand
from rootgraft.lora.segments import make_segments

CPU = torch.device("cpu")
TYPES = [torch.float32, torch.bfloat16]

pytestmark = pytest.mark.skipif(ops.native_kernels() is None, reason="no native kernels")


def factors(
    sizes: tuple[int, ...], width: int, ranks: tuple[int, ...], dtype: torch.dtype, seed: int, *, embed: bool = False
) -> Factors:
    g = torch.Generator().manual_seed(seed)
    total = sum(ranks)
    shape = (width, total) if embed else (total, width)
    cells = sum(rank * size for rank, size in zip(ranks, sizes, strict=True))
    vectors = seed % 3
    return Factors(
        a=torch.randn(shape, generator=g).to(dtype),
        scale=torch.rand(total, generator=g) / total,
        ranks=ranks,
        b=torch.randn(cells, generator=g).to(dtype),
        gain=torch.rand(sum(sizes), generator=g) if vectors else None,
        add=torch.randn(sum(sizes), generator=g) if vectors == 2 else None,
    )


def table_of(
    sizes: tuple[int, ...], width: int, all_ranks: list[tuple[int, ...] | None], dtype: torch.dtype
) -> SlotTable:
    table = SlotTable(sizes, width, len(all_ranks), dtype)
    for slot, ranks in enumerate(all_ranks):
        table.put(slot, None if ranks is None else factors(sizes, width, ranks, dtype, slot))
    return table


def segments_of(slots: list[int]) -> Segments:
    found = make_segments(np.array(slots, np.int32), CPU)
    assert found is not None
    return found


def same(a: Tensor, b: Tensor) -> bool:
    bits = torch.int16 if a.element_size() == 2 else torch.int32
    return torch.equal(a.view(bits), b.view(bits))


def close(actual: Tensor, expected: Tensor) -> bool:
    tolerance = 1e-5 if actual.dtype is torch.float32 else 1e-2
    return torch.allclose(
        actual.float(), expected.float(), rtol=tolerance, atol=tolerance * expected.abs().max().item()
    )


@settings(max_examples=repeats(120))
@given(
    sizes=st.lists(st.integers(1, 90), min_size=1, max_size=3).map(tuple),
    width=st.integers(1, 150),
    slots=st.lists(st.integers(-1, 3), min_size=1, max_size=70).filter(lambda slots: max(slots) >= 0),
    dtype=st.sampled_from(TYPES),
    wide=st.booleans(),
    data=st.data(),
)
def test_against_plain_torch(sizes, width, slots, dtype, wide, data):
    rank = st.integers(0, 21)
    ranks = [
        data.draw(st.none() | st.tuples(*[rank] * len(sizes)).filter(any), label=f"ranks of slot {slot}")
        for slot in range(4)
    ]
    table = table_of(sizes, width, ranks, dtype)
    g = torch.Generator().manual_seed(len(slots))
    x = torch.randn(len(slots), width, generator=g).to(dtype)
    y = torch.randn(len(slots), sum(sizes), generator=g).to(torch.float32 if wide else dtype)
    actual, expected = y.clone(), y.clone()
    segments = segments_of(slots)
    lora_shrink_expand(actual, x, table, segments)
    lora_reference.lora_shrink_expand(expected, x, None, table, segments)
    assert close(actual, expected)
    untouched = [i for i, slot in enumerate(slots) if slot < 0 or ranks[slot] is None]
    assert same(actual[untouched], y[untouched])
    for token, slot in enumerate(slots):
        alone = y[token : token + 1].clone()
        if slot >= 0:
            lora_shrink_expand(alone, x[token : token + 1].clone(), table, segments_of([slot]))
        assert same(alone[0], actual[token])


@pytest.mark.parametrize("dtype", TYPES)
def test_bits_do_not_depend_on_threads(dtype):
    sizes, width = (576, 192, 200), 577 if dtype is torch.float32 else 576
    table = table_of(sizes, width, [(16, 8, 33), (64, 0, 1)], dtype)
    x = torch.randn(130, width).to(dtype)
    y = torch.randn(130, sum(sizes)).to(dtype)
    segments = segments_of([i % 3 - 1 for i in range(130)])
    results = []
    before = ops.native_kernels().library.num_threads
    try:
        for threads in (1, 2, 3):
            ops.set_threads(threads)
            out = y.clone()
            lora_shrink_expand(out, x, table, segments)
            results.append(out)
    finally:
        ops.set_threads(before)
    assert same(results[0], results[1]) and same(results[0], results[2])


@pytest.mark.parametrize(("dtype", "y_dtype"), [(t, t) for t in TYPES] + [(torch.bfloat16, torch.float32)])
def test_embedding(dtype, y_dtype):
    table = SlotTable((37,), 50, 2, dtype)
    table.put(1, factors((37,), 50, (9,), dtype, 1, embed=True))
    ids = torch.randint(50, (20,))
    y = torch.randn(20, 37).to(y_dtype)
    segments = segments_of([1, -1] * 10)
    actual, expected = y.clone(), y.clone()
    lora_embed(actual, ids, table, segments)
    lora_reference.lora_shrink_expand(expected, None, ids, table, segments)
    assert close(actual, expected)
    assert same(actual[1::2], y[1::2])


def test_plain_torch_serves_where_native_is_off():
    table = table_of((8,), 8, [(2,)], torch.float32)
    x, y = torch.randn(2, 8), torch.zeros(2, 8)
    native, plain = y.clone(), y.clone()
    lora_shrink_expand(native, x, table, segments_of([0, 0]))
    ops.use_native(False)
    try:
        lora_shrink_expand(plain, x, table, segments_of([0, 0]))
    finally:
        ops.use_native(True)
    assert close(native, plain)


@pytest.mark.parametrize("tokens", [[-1], [3], [1 << 30]])
def test_a_token_out_of_range(tokens):
    y = torch.zeros(3, 8)
    with pytest.raises(IndexError):
        lora_shrink_expand(y, torch.ones(3, 8), table_of((8,), 8, [(2,)], torch.float32), raw(tokens, [0], [0, 1]))
    assert not y.any()


@pytest.mark.parametrize(("slots", "starts"), [([-1], [0, 1]), ([1], [0, 1]), ([0], [1, 1]), ([0, 0], [0, 2, 1])])
def test_a_segment_out_of_range(slots, starts):
    with pytest.raises(IndexError):
        lora_shrink_expand(
            torch.zeros(3, 8), torch.ones(3, 8), table_of((8,), 8, [(2,)], torch.float32), raw([0, 1], slots, starts)
        )


def test_segments_beyond_their_tokens():
    """Where a start leads, there are other numbers, which would do."""
    y, segments = torch.zeros(3, 8), raw([0, 1, 2], [0], [0, 3])
    with pytest.raises(IndexError, match=r"a start not in 0 \.\. 2"):
        lora_shrink_expand(
            y,
            torch.ones(3, 8),
            table_of((8,), 8, [(2,)], torch.float32),
            Segments(segments.tokens[:2], segments.slots, segments.starts),
        )
    assert not y.any()


def test_token_ids_of_another_type():
    with pytest.raises(ValueError, match=r"token_ids is torch.int32 \[1\], not torch.int64 \[1\]"):
        lora_embed(
            torch.zeros(1, 4), torch.zeros(1, dtype=torch.int32), SlotTable((4,), 5, 1, torch.float32), segments_of([0])
        )


def test_a_token_id_out_of_range():
    table = SlotTable((4,), 5, 1, torch.float32)
    table.put(0, factors((4,), 5, (2,), torch.float32, 0, embed=True))
    for token in (-1, 5):
        with pytest.raises(IndexError):
            lora_embed(torch.zeros(1, 4), torch.tensor([token]), table, segments_of([0]))


def raw(tokens: list[int], slots: list[int], starts: list[int]) -> Segments:
    return Segments(*(torch.tensor(values, dtype=torch.int32) for values in (tokens, slots, starts)))


def test_factors_of_another_shape_are_refused():
    table = SlotTable((8, 4), 6, 1, torch.float32)
    good = factors((8, 4), 6, (2, 3), torch.float32, 1)
    table.put(0, good)
    for wrong in (
        Factors(good.a[:, :5], good.scale, good.ranks, good.b),
        Factors(good.a, good.scale[:4], good.ranks, good.b),
        Factors(good.a, good.scale, (3, 3), good.b),
        Factors(good.a, good.scale, good.ranks, good.b[:-1]),
        Factors(good.a.T.contiguous().T, good.scale, good.ranks, good.b),
        Factors(good.a, good.scale.double(), good.ranks, good.b),
        Factors(good.a.bfloat16(), good.scale, good.ranks, good.b.bfloat16()),
        Factors(good.a, good.scale, good.ranks, good.b, gain=torch.ones(8)),
    ):
        with pytest.raises(ValueError, match="fit"):
            table.put(0, wrong)
    with pytest.raises(ValueError, match="columns"):
        lora_shrink_expand(torch.zeros(1, 11), torch.zeros(1, 6), table, segments_of([0]))
    with pytest.raises(ValueError, match="x is"):
        lora_shrink_expand(torch.zeros(1, 12), torch.zeros(1, 7), table, segments_of([0]))
    with pytest.raises(ValueError, match="x is"):
        lora_shrink_expand(torch.zeros(1, 12), torch.zeros(1, 6).half(), table, segments_of([0]))
    with pytest.raises(ValueError, match="modules"):
        SlotTable((1, 1, 1, 1), 6, 1, torch.float32)


def test_nothing_is_written_outside():
    """Guards around y, and around every tensor that is read (as NaN, which would spread)."""
    sizes, width, rank = (17, 5), 19, 3

    def guarded(values: Tensor) -> Tensor:
        room = torch.full((values.numel() + 128,), float("nan"))
        room[64:-64] = values.flatten()
        return room[64:-64].view(values.shape)

    good = factors(sizes, width, (rank, 2), torch.float32, 2)
    assert good.gain is not None and good.add is not None
    table = SlotTable(sizes, width, 1, torch.float32)
    table.put(0, Factors(*map(guarded, (good.a, good.scale)), good.ranks, *map(guarded, (good.b, good.gain, good.add))))
    y = guarded(torch.randn(5, 22))
    lora_shrink_expand(y, guarded(torch.randn(5, width)), table, segments_of([0] * 5))
    room = torch.as_strided(y, (5 * 22 + 128,), (1,), y.storage_offset() - 64)
    assert room.isnan().nonzero().flatten().tolist() == [*range(64), *range(64 + 110, 128 + 110)]


@pytest.mark.parametrize("native", [True, False])
def test_segments_without_slots_are_refused(native):
    """As in a captured pass, whose kernels read tiles: others would find no segment, and adapt nothing."""
    tiles = Segments(torch.zeros(2, dtype=torch.int32), *(torch.zeros(0, dtype=torch.int32),) * 2)
    table = table_of((8,), 8, [(2,)], torch.float32)
    ops.use_native(native)
    try:
        with pytest.raises(ValueError, match="segments of 2 tokens have 0 slots and 0 starts"):
            lora_shrink_expand(torch.zeros(2, 8), torch.ones(2, 8), table, tiles)
    finally:
        ops.use_native(True)
