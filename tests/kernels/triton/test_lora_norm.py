"""Expansion of an output projection within the sum and norm behind it, interpreted, against two launches and fp64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.kernels.adapter_tables import Ranks, random_table
from torch import Tensor

from benchmarks.gpu.measure import launches
from rootgraft.kernels import ops
from rootgraft.kernels.layouts.lora_arguments import unpack_expansion
from rootgraft.kernels.lora_ops import Segments, SlotTable, lora_add_rms_norm, lora_shrink_beside, lora_shrink_expand
from rootgraft.kernels.triton import lora_config
from rootgraft.lora.segments import StaticSegments, make_segments

pytestmark = pytest.mark.usefixtures("interpreted")

CPU = torch.device("cpu")
TYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUNDING = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
EPS, OFFSET, INPUTS = 1e-5, 0.5, 96


def segments_of(slots: list[int]) -> Segments:
    found = make_segments(np.array(slots, np.int32), CPU)
    assert found is not None
    return found


class Step:
    """Tensors of a step, and its norms by one launch behind the first half and by two."""

    def __init__(self, slots: list[int], table: SlotTable, segments: Segments | None = None) -> None:
        g = torch.Generator().manual_seed(len(slots))
        width, dtype = table.sizes[0], table.dtype
        self.slots, self.table, self.segments = slots, table, segments or segments_of(slots)
        self.x = torch.randn(len(slots), INPUTS, generator=g).to(dtype)
        self.y = torch.randn(len(slots), width, generator=g).to(dtype)
        self.residual = torch.randn(len(slots), width, generator=g)
        self.weight = torch.randn(width, generator=g).to(dtype)

    def joined(self) -> tuple[Tensor, Tensor, set[str]]:
        """The residual stream and its norm by the op under test, and the kernels that it launched."""
        residual, y = self.residual.clone(), self.y.clone()
        shrunk = lora_shrink_beside(self.x, self.table, self.segments)
        with launches() as names:
            out = lora_add_rms_norm(
                y, self.x, residual, self.weight, EPS, OFFSET, self.table, self.segments, shrunk
            )  # fmt: skip
        return residual, out, names

    def apart(self) -> tuple[Tensor, Tensor]:
        residual, y = self.residual.clone(), self.y.clone()
        lora_shrink_expand(y, self.x, self.table, self.segments)
        return residual, ops.add_rms_norm(y, residual, self.weight, EPS, OFFSET)

    def exact(self) -> tuple[Tensor, Tensor]:
        """In fp64, as PEFT adds an adapter: ``y + scale * B A x``, then gain and addend; nothing is rounded."""
        y, width = self.y.double(), self.table.sizes[0]
        for token, slot in enumerate(self.slots):
            factors = self.table.factors[slot] if slot >= 0 else None
            if factors is not None and sum(factors.ranks):
                b = unpack_expansion(factors.b, width, factors.ranks[0]).double()
                y[token] += b @ (factors.scale.double() * (factors.a.double() @ self.x[token].double()))
                y[token] *= 1.0 if factors.gain is None else factors.gain.double()
                y[token] += 0.0 if factors.add is None else factors.add.double()
        total = self.residual.double() + y
        scale = torch.rsqrt(total.square().mean(1, keepdim=True) + EPS)
        return total, total * scale * (OFFSET + self.weight.double())

    def check(self) -> None:
        """The joined result is as near to the exact one as two launches', bit by bit theirs for other tokens."""
        residual, out, names = self.joined()
        assert names == {"_expand_add_norm"}
        total, normed = self.exact()
        step = ROUNDING[self.table.dtype]
        largest = float((total - self.residual).abs().max())
        assert torch.allclose(residual.double(), total, rtol=2 * step, atol=2 * step * largest)
        # A norm is rounded once more, and passes on the error of what it norms.
        assert torch.allclose(out.double(), normed, rtol=4 * step, atol=8 * step * float(normed.abs().max()))
        apart_residual, apart_out = self.apart()
        near = {"rtol": 2 * step, "atol": 2 * step * largest}
        assert torch.allclose(residual, apart_residual, **near)
        empty = [token for token, slot in enumerate(self.slots) if slot < 0 or self.table.factors[slot] is None]
        assert torch.equal(residual[empty], apart_residual[empty]) and torch.equal(out[empty], apart_out[empty])


@settings(max_examples=20)
@given(
    width=st.sampled_from([16, 64, 80, 192, 1040]),
    slots=st.lists(st.integers(-1, 3), min_size=1, max_size=50).filter(lambda slots: max(slots) >= 0),
    dtype=st.sampled_from(TYPES),
    data=st.data(),
)
def test_a_step_of_several_adapters(width, slots, dtype, data):
    """Ranks from 1 to 64, gains and addends, slots that are empty, and tokens of the base model."""
    rank = st.integers(1, 64).map(lambda rank: (rank,))
    ranks = [data.draw(st.none() | rank, label=f"rank of slot {slot}") for slot in range(4)]
    assume(any(ranks))
    segments = segments_of(slots)
    assert segments.tiles is not None
    assume(segments.tiles.size == lora_config.SHORT)
    Step(slots, random_table((width,), INPUTS, ranks, dtype), segments).check()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rank", [8, 16, 64])
def test_ranks(rank, dtype):
    Step([0, -1, 1, 1], random_table((256,), INPUTS, [(rank,), (64,)], dtype)).check()


@pytest.mark.parametrize("dtype", TYPES)
def test_a_captured_step(dtype):
    """Over segments that are filled anew, with tokens that pad the step: those are of the base model."""
    ranks: Ranks = [(8,), None, (16,)]
    table, room = random_table((64,), INPUTS, ranks, dtype), StaticSegments(8, CPU, num_slots=3)
    table.reserve(64)
    for slots in ([2, -1, 0, 0, 2], [1, 0], [-1, -1, -1], [0] * 8):
        room.fill(np.array(slots, np.int32))
        Step([*slots, *[-1] * (8 - len(slots))], table, room.segments(8)).check()


def test_a_result_of_another_width_is_refused():
    step = Step([0, -1], random_table((64,), INPUTS, [(8,)], torch.bfloat16))
    step.y = step.y[:, :48].contiguous()
    with pytest.raises(ValueError, match=r"y is \[2, 48\]; the projection has 64 columns"):
        step.joined()


def test_what_is_left_to_two_launches():
    """Batch invariance, more tokens than have places, rows that are too wide; the bits are then theirs."""
    table = random_table((64,), INPUTS, [(8,), (16,)], torch.bfloat16)
    many = [0, -1] * (lora_config.MOST_PLACED // 2 + 1)
    wide = random_table((8208,), INPUTS, [(8,)], torch.bfloat16)
    for step in (Step(many, table), Step([0, -1], wide)):
        (residual, out, names), (same_residual, same_out) = step.joined(), step.apart()
        assert names == {"_expand", "_rms_norm"}
        assert torch.equal(residual, same_residual) and torch.equal(out, same_out)
    step = Step([0, 1, -1], table)
    ops.use_invariant(True)
    try:
        (residual, out, names), (same_residual, same_out) = step.joined(), step.apart()
    finally:
        ops.use_invariant(False)
    assert names == {"_expand", "_rms_norm"}
    assert torch.equal(residual, same_residual) and torch.equal(out, same_out)
