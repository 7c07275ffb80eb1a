"""The low-rank op on products of experts: native kernels against plain torch, and in recorded passes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from rootgraft.kernels import lora_reference, pass_graphs
from rootgraft.kernels.lora_ops import Factors, Segments, SlotTable, lora_experts, pack_expansion
from rootgraft.lora.segments import make_segments

pytestmark = pytest.mark.usefixtures("kernels")

EXPERTS, PICKS, WIDTH, SIZES, SLOTS = 5, 2, 48, (24, 40), 3
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def table_of(dtype: torch.dtype) -> SlotTable:
    """Adapters of several ranks, which leave some experts alone."""
    table = SlotTable(SIZES, WIDTH, SLOTS * EXPERTS, dtype)
    for place in range(SLOTS * EXPERTS):
        ranks = ((3, 2), (0, 4), (0, 0))[place % 3]
        if any(ranks):
            b = torch.cat([pack_expansion(torch.randn(size, rank)) for size, rank in zip(SIZES, ranks, strict=True)])
            a = torch.randn(sum(ranks), WIDTH)
            table.put(place, Factors(a.to(dtype), torch.rand(sum(ranks)), ranks, b.to(dtype)))
    return table


def segments_of(slots: list[int]) -> Segments:
    found = make_segments(np.array(slots, np.int32), torch.device("cpu"))
    assert found is not None
    return found


def picks(tokens: int) -> Tensor:
    return torch.stack([torch.randperm(EXPERTS)[:PICKS] for _ in range(tokens)]).int()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("own", [False, True])
def test_against_plain_torch(dtype: torch.dtype, own: bool) -> None:
    table = table_of(dtype)
    slots = [0, 2, -1, 2, 1, 0, -1, 1, 2]
    experts = picks(len(slots))
    x = torch.randn(*((len(slots), PICKS, WIDTH) if own else (len(slots), WIDTH))).to(dtype)
    y = torch.randn(len(slots), PICKS, sum(SIZES)).to(dtype)
    expected, actual = y.clone(), y.clone()
    lora_reference.expert_shrink_expand(expected, x, experts, table, EXPERTS, segments_of(slots))
    lora_experts(actual, x, experts, table, EXPERTS, segments_of(slots))
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(actual[[2, 6]], y[[2, 6]])
    assert not torch.equal(actual, y)


def test_a_recorded_call_takes_segments_and_experts_anew() -> None:
    table, most = table_of(torch.float32), 12
    x, y, experts = torch.randn(most, WIDTH), torch.zeros(most, PICKS, sum(SIZES)), picks(most)
    own = Segments(*(torch.zeros(size, dtype=torch.int32) for size in (most, most, most + 1)))

    def forward() -> Tensor:
        lora_experts(y, x, experts, table, EXPERTS, own)
        return y

    _, tape = pass_graphs.record(forward, pass_graphs.Buffers(most))
    assert tape is not None
    for slots in ([0] * 7, [1, -1, 2, 0, 1], [2] * 12):
        tokens = len(slots)
        segments = segments_of(slots)
        experts.copy_(picks(most))
        expected = torch.zeros(tokens, PICKS, sum(SIZES))
        lora_experts(expected, x[:tokens], experts[:tokens], table, EXPERTS, segments)
        own.tokens[: len(segments.tokens)] = segments.tokens
        own.slots[: len(segments.slots)] = segments.slots
        own.starts.fill_(len(segments.tokens))
        own.starts[: len(segments.starts)] = segments.starts
        y.zero_()
        tape.replay(tokens, 1)
        assert torch.equal(y[:tokens], expected)
        assert not y[tokens:].any()


def test_what_is_out_of_range_is_refused() -> None:
    table, experts = table_of(torch.float32), picks(2)
    x, y = torch.randn(2, WIDTH), torch.zeros(2, PICKS, sum(SIZES))
    with pytest.raises(IndexError, match=r"an expert not in 0 \.\. 4"):
        lora_experts(y, x, experts + EXPERTS, table, EXPERTS, segments_of([0, 1]))
    with pytest.raises(IndexError, match=r"a slot not in 0 \.\. 2"):
        lora_experts(y, x, experts, table, EXPERTS, segments_of([0, 3]))
    with pytest.raises(IndexError, match=r"a token is not in 0 \.\. 1"):
        lora_experts(y, x, experts, table, EXPERTS, segments_of([0, 1, 1]))
    beyond = segments_of([0, 0])
    with pytest.raises(IndexError, match=r"a start not in 0 \.\. 1"):
        lora_experts(y, x, experts, table, EXPERTS, replace(beyond, tokens=beyond.tokens[:1]))
    with pytest.raises(ValueError, match="do not fit"):
        lora_experts(y, x[:, 1:], experts, table, EXPERTS, segments_of([0, 1]))
    with pytest.raises(ValueError, match="bfloat16"):
        lora_experts(y, x.bfloat16(), experts, table, EXPERTS, segments_of([0, 1]))
    assert not y.any()
