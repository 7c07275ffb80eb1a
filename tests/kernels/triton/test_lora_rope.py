"""Expansion of q, k and v within their rotation and the writing of K and V, interpreted, against two launches and fp64.

Bits are those of two launches.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.kernels.adapter_tables import Ranks, random_table
from support.machine.thoroughness import repeats
from torch import Tensor

from benchmarks.gpu.measure import launches
from rootgraft.kernels import ops, reference
from rootgraft.kernels.layouts import kv_forms
from rootgraft.kernels.layouts.attention_arguments import RopeParams
from rootgraft.kernels.layouts.lora_arguments import unpack_expansion
from rootgraft.kernels.lora_ops import Segments, SlotTable, lora_rope_store_kv, lora_shrink_beside, lora_shrink_expand
from rootgraft.kernels.triton import lora_config
from rootgraft.lora.segments import StaticSegments, make_segments

pytestmark = pytest.mark.usefixtures("interpreted")

CPU = torch.device("cpu")
TYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUNDING = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
INPUTS, POSITIONS, PAGES, PAGE = 96, 50, 20, 4


def params_of(
    heads: int, kv_heads: int, dim: int, rotary: int, dtype: torch.dtype, *, normed: bool = False
) -> RopeParams:
    norms = torch.randn(2, dim).to(dtype) if normed else (None, None)
    return RopeParams(heads, kv_heads, torch.randn(POSITIONS, rotary) if rotary else None, *norms, 1e-6, 1.0)


def sizes_of(params: RopeParams, dim: int) -> tuple[int, ...]:
    return (params.num_heads * dim, *(params.num_kv_heads * dim,) * 2)


class Step:
    """Tensors of a step, whose last ``padding`` tokens have no cell, and its result by one launch and by two."""

    def __init__(
        self,
        slots: list[int],
        table: SlotTable,
        params: RopeParams,
        *,
        segments: Segments | None = None,
        padding: int = 0,
        kv: torch.dtype | None = None,
    ) -> None:
        g = torch.Generator().manual_seed(len(slots))
        count, dtype, dim = len(slots), table.dtype, table.sizes[0] // params.num_heads
        if segments is None:
            segments = make_segments(np.array(slots, np.int32), CPU)
        assert segments is not None
        self.slots, self.table, self.params, self.segments = slots, table, params, segments
        self.x = torch.randn(count, INPUTS, generator=g).to(dtype)
        self.qkv = torch.randn(count, sum(table.sizes), generator=g).to(dtype)
        self.positions = torch.randint(0, POSITIONS, (count,), generator=g)
        self.cells = torch.randperm(PAGES * PAGE, generator=g)[:count]
        self.cells[count - padding :] = -1
        shape = 2, PAGES, params.num_kv_heads, PAGE, dim if kv is None else dim + 4
        self.caches = torch.randn(shape, generator=g).to(dtype) if kv is None else torch.zeros(shape).to(kv)

    def joined(self) -> tuple[Tensor, Tensor, set[str]]:
        """Queries and caches by the op under test, and the kernels that it launched."""
        qkv, caches = self.qkv.clone(), self.caches.clone()
        shrunk = lora_shrink_beside(self.x, self.table, self.segments)
        with launches() as names:
            q = lora_rope_store_kv(
                qkv, self.x, self.positions, self.cells, *caches, self.params, self.table, self.segments, shrunk
            )
        return q, caches, names

    def apart(self) -> tuple[Tensor, Tensor]:
        qkv, caches = self.qkv.clone(), self.caches.clone()
        lora_shrink_expand(qkv, self.x, self.table, self.segments)
        return ops.rope_store_kv(qkv, self.positions, self.cells, *caches, self.params), caches

    def check(self, *launched: str) -> None:
        q, caches, names = self.joined()
        same_q, same_caches = self.apart()
        assert names == set(launched or ["_expand_rope_store"])
        assert torch.equal(q, same_q)
        assert torch.equal(caches.view(torch.uint8), same_caches.view(torch.uint8))


@settings(max_examples=repeats(20))
@given(
    shape=st.sampled_from([(4, 2, 16, 16), (3, 1, 64, 48), (2, 2, 80, 80), (5, 1, 96, 0), (2, 1, 128, 128)]),
    slots=st.lists(st.integers(-1, 3), min_size=1, max_size=50).filter(lambda slots: max(slots) >= 0),
    dtype=st.sampled_from(TYPES),
    normed=st.booleans(),
    last=st.booleans(),
    interleaved=st.booleans(),
    scaled=st.booleans(),
    data=st.data(),
)
def test_a_step_of_several_adapters(shape, slots, dtype, normed, last, interleaved, scaled, data):
    """Ranks of q, k and v up to 64, of which any may be 0, gains and addends; all forms of the rotation."""
    params = replace(
        params_of(*shape, dtype, normed=normed),
        is_normed_last=last,
        is_interleaved=interleaved,
        query_scale=torch.randn(POSITIONS) if scaled else None,
    )
    rank = st.integers(0, 64)
    ranks = [data.draw(st.none() | st.tuples(rank, rank, rank), label=f"ranks of slot {slot}") for slot in range(4)]
    assume(any(ranks))
    step = Step(slots, random_table(sizes_of(params, shape[2]), INPUTS, ranks, dtype), params)
    assert step.segments.tiles is not None
    assume(step.segments.tiles.size == lora_config.SHORT)
    step.check()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rank", [8, 16, 64])
def test_against_an_adapter_that_is_added_in_fp64(rank, dtype):
    """As PEFT adds it: ``y + scale * B A x``, then gain and addend. What is written is rounded once more."""
    heads, kv_heads, dim, slots = 2, 1, 64, [0, -1, 1, 1]
    params = params_of(heads, kv_heads, dim, dim, dtype)
    table = random_table(sizes_of(params, dim), INPUTS, [(rank, 0, rank), (rank, 8, 64)], dtype)
    step = Step(slots, table, params)
    y = step.qkv.double()
    for token, slot in enumerate(slots):
        factors = table.factors[slot] if slot >= 0 else None
        columns = cells = ranks = 0
        for size, each in zip(table.sizes, factors.ranks if factors else (), strict=False):
            if factors is not None and each:
                here = slice(columns, columns + size)
                b = unpack_expansion(factors.b[cells : cells + size * each], size, each).double()
                a, scale = (part[ranks : ranks + each].double() for part in (factors.a, factors.scale))
                y[token, here] += b @ (scale * (a @ step.x[token].double()))
                y[token, here] *= 1.0 if factors.gain is None else factors.gain[here].double()
                y[token, here] += 0.0 if factors.add is None else factors.add[here].double()
            columns, cells, ranks = columns + size, cells + size * each, ranks + each
    expected = step.caches.double()
    q = reference.rope_store_kv(y, step.positions, step.cells, *expected, params)
    found, caches, names = step.joined()
    assert names == {"_expand_rope_store"}
    near = {"rtol": 2 * ROUNDING[dtype], "atol": 4 * ROUNDING[dtype] * float(y.abs().max())}
    assert torch.allclose(found.double(), q.double(), **near)
    assert torch.allclose(caches.double(), expected, **near)


@pytest.mark.parametrize("kv", kv_forms.ROW_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", TYPES)
def test_caches_of_8_bits(dtype, kv):
    params = params_of(4, 2, 64, 64, dtype)
    table = random_table(sizes_of(params, 64), INPUTS, [(8, 4, 0), (16, 16, 16)], dtype)
    Step([0, -1, 1, 0, -1], table, params, padding=1, kv=kv).check()
    static = kv_forms.StaticScales("int8" if kv is torch.int8 else "fp8", torch.tensor([[0.7, 0.11], [0.013, 0.9]]))
    Step([0, -1, 1, 0, -1], table, replace(params, kv_scales=static), padding=1, kv=kv).check()


@pytest.mark.parametrize("dtype", TYPES)
def test_a_captured_step(dtype):
    """Over segments that are filled anew, with tokens that pad the step and have no cell."""
    ranks: Ranks = [(8, 8, 8), None, (16, 0, 4)]
    params = params_of(2, 1, 64, 64, dtype)
    table, room = random_table(sizes_of(params, 64), INPUTS, ranks, dtype), StaticSegments(8, CPU, num_slots=3)
    table.reserve(192)
    for slots in ([2, -1, 0, 0, 2], [1, 0], [-1, -1, -1], [0] * 8):
        room.fill(np.array(slots, np.int32))
        padding = 8 - len(slots)
        Step([*slots, *[-1] * padding], table, params, segments=room.segments(8), padding=padding).check()


def test_a_product_of_another_width_is_refused():
    params = params_of(2, 1, 16, 16, torch.bfloat16)
    step = Step([0, -1], random_table(sizes_of(params, 16), INPUTS, [(8, 8, 8)], torch.bfloat16), params)
    step.qkv = step.qkv[:, :48].contiguous()
    with pytest.raises(ValueError, match=r"y is \[2, 48\]; the projection has 64 columns"):
        step.joined()


def test_what_is_left_to_two_launches():
    """Batch invariance, more tokens than have places, norms of whole projections or of values, large heads in fp16."""
    params = params_of(4, 2, 16, 16, torch.bfloat16)
    table = random_table(sizes_of(params, 16), INPUTS, [(8, 8, 8)], torch.bfloat16)
    Step([0, -1] * (lora_config.MOST_PLACED // 2 + 1), table, params).check("_expand", "_rope_store_kv")
    ops.use_invariant(True)
    try:
        Step([0, 0, -1], table, params).check("_expand", "_rope_store_kv")
    finally:
        ops.use_invariant(False)
    norms = (torch.randn(count * 16).bfloat16() for count in (4, 2))
    of_projection = RopeParams(4, 2, params.cos_sin, *norms, 1e-6, norm="projection")
    Step([0, 0, -1], table, of_projection).check("_expand", "_rope_store_kv")
    Step([0, 0, -1], table, replace(params, has_v_norm=True)).check("_expand", "_rope_store_kv")
    for dtype, launched in ((torch.float16, ("_expand", "_rope_store_kv")), (torch.bfloat16, ("_expand_rope_store",))):
        large = params_of(1, 1, 256, 256, dtype)
        Step([0, 0, -1], random_table(sizes_of(large, 256), INPUTS, [(8, 8, 8)], dtype), large).check(*launched)
