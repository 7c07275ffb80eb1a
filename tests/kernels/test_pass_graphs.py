"""Recorded forward passes: the same bits when they are replayed, and refused where a part is no native call."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.machine.waits import HANG_SECONDS
from torch import Tensor

from rootgraft.kernels import ops, pass_graphs, quantised_weights
from rootgraft.kernels.lora_ops import Factors, Segments, SlotTable, lora_shrink_expand, pack_expansion

pytestmark = pytest.mark.skipif(ops.native_kernels() is None, reason="no C++ compiler")

TOKENS, WIDTH, INNER = 5, 64, 96
MOST = 40


class TinyMlp:
    """Some ops in a row, as a decoder layer has them."""

    def __init__(self, dtype: torch.dtype, pack: Callable[[Tensor], ops.Linear] = ops.pack_linear) -> None:
        generator = torch.Generator().manual_seed(3)
        self.norm = torch.rand(WIDTH, generator=generator).to(dtype)
        self.up = pack(torch.randn(2 * INNER, WIDTH, generator=generator).to(dtype))
        self.down = pack(torch.randn(WIDTH, INNER, generator=generator).to(dtype))

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        for _ in range(3):
            x = ops.add_rms_norm(x, residual, self.norm, 1e-5)
            x = ops.linear(ops.gated_activation(ops.linear(x, self.up), "silu"), self.down)
        return ops.add_rms_norm(x, residual, self.norm, 1e-5)


PACKS = [ops.pack_linear, functools.partial(quantised_weights.pack_channels, dynamic=True)]


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_replay_gives_the_bits_of_a_pass(dtype: torch.dtype, pack: Callable[[Tensor], ops.Linear]) -> None:
    mlp = TinyMlp(dtype, pack)
    own_x, own_residual = torch.randn(MOST, WIDTH).to(dtype), torch.randn(MOST, WIDTH)
    expected = mlp(own_x[:TOKENS], own_residual[:TOKENS].clone())
    with torch.inference_mode():
        residual = own_residual[:TOKENS]
        x = own_x[:TOKENS]
        hidden, tape = pass_graphs.record(lambda: mlp(x, residual), pass_graphs.Buffers(MOST))
    assert tape is not None
    assert torch.equal(hidden, expected)
    hidden.resize_(MOST, WIDTH)
    for tokens in (TOKENS, 1, MOST, 2, 0, 17):
        torch.manual_seed(tokens)
        x, residual = torch.randn(tokens, WIDTH).to(dtype), torch.randn(tokens, WIDTH)
        expected = mlp(x, residual.clone())
        own_x[:tokens] = x
        own_residual[:tokens] = residual
        hidden.fill_(7.0)
        torch.empty(1 << 16).fill_(float("nan"))  # what the recording let go must not be anybody else's memory
        tape.replay(tokens, 1)
        assert torch.equal(hidden[:tokens], expected)
        assert (hidden[tokens:] == 7.0).all()
    with pytest.raises(IndexError, match="41 tokens; there is room for 40"):
        tape.replay(MOST + 1, 1)


def test_recordings_share_their_buffers_but_for_results() -> None:
    mlps = [TinyMlp(torch.float32), TinyMlp(torch.float32)]
    mlps[1].norm = mlps[1].norm + 1
    x, residual = torch.randn(TOKENS, WIDTH), torch.randn(TOKENS, WIDTH)
    buffers = pass_graphs.Buffers(TOKENS)
    with torch.inference_mode():
        recorded = [pass_graphs.record(lambda mlp=mlp: mlp(x, residual), buffers) for mlp in mlps]
    assert recorded[0][0].data_ptr() != recorded[1][0].data_ptr()
    for mlp, (hidden, tape) in zip(mlps * 2, recorded * 2, strict=True):
        assert tape is not None
        residual.copy_(torch.randn(TOKENS, WIDTH))
        expected = mlp(x, residual.clone())
        tape.replay(TOKENS, 1)
        assert torch.equal(hidden, expected)


def test_passes_of_several_threads_do_not_mix() -> None:
    """Two engines of one process, on a thread each: one records a pass, the other computes or records one meanwhile."""
    with torch.inference_mode():
        mlps = [TinyMlp(torch.float32), TinyMlp(torch.float32)]
        x, residual = torch.randn(TOKENS, WIDTH), torch.randn(TOKENS, WIDTH)
        expected = [mlp(x, residual.clone()) for mlp in mlps]
    is_inside, may_go_on = threading.Event(), threading.Event()

    def interrupted(residual: Tensor) -> Tensor:
        mlps[0](x, residual)
        is_inside.set()
        assert may_go_on.wait(HANG_SECONDS)
        return mlps[0](x, residual)

    @torch.inference_mode()
    def record(forward: Callable[[Tensor], Tensor]) -> tuple[Tensor, pass_graphs.RecordedPass | None, Tensor]:
        own = residual.clone()
        return *pass_graphs.record(lambda: forward(own), pass_graphs.Buffers(TOKENS)), own

    @torch.inference_mode()
    def replayed(hidden: Tensor, tape: pass_graphs.RecordedPass | None, own: Tensor) -> Tensor:
        assert tape is not None
        own.copy_(residual)
        tape.replay(TOKENS, 1)
        return hidden.clone()

    with ThreadPoolExecutor(1) as other:
        recording = other.submit(record, interrupted)
        assert is_inside.wait(HANG_SECONDS)
        try:
            with torch.inference_mode():
                computed = mlps[1](x, residual.clone())
            recorded = record(lambda own: mlps[1](x, own))
        finally:
            may_go_on.set()
        interrupted_pass = recording.result(HANG_SECONDS)
    assert torch.equal(computed, expected[1])
    assert torch.equal(replayed(*recorded), expected[1])
    with torch.inference_mode():
        own = residual.clone()
        twice = (mlps[0](x, own), mlps[0](x, own))[1]
    assert torch.equal(replayed(*interrupted_pass), twice)


def test_a_result_that_has_no_room_is_refused() -> None:
    mlp = TinyMlp(torch.float32)
    with pytest.raises(ValueError, match="5 tokens; there is room for 4"):
        pass_graphs.record(lambda: mlp(torch.randn(TOKENS, WIDTH), torch.randn(TOKENS, WIDTH)), pass_graphs.Buffers(4))


def test_a_call_that_is_not_for_all_tokens_is_not_recorded() -> None:
    values = torch.randn(TOKENS, WIDTH)
    _, tape = pass_graphs.record(lambda: ops.largest(values).value, pass_graphs.Buffers(MOST))
    assert tape is None


@pytest.mark.parametrize(
    "alien",
    [lambda x: x + 1, lambda x: x.view(-1, 1), lambda x: x[1:], lambda x: x.float()],
    ids=["add", "view", "slice", "cast"],
)
def test_a_pass_with_a_torch_op_is_not_recorded(alien: object) -> None:
    mlp = TinyMlp(torch.bfloat16)
    x, residual = torch.randn(TOKENS, WIDTH).bfloat16(), torch.randn(TOKENS, WIDTH)

    def forward() -> Tensor:
        y = mlp(x, residual)
        alien(y)  # type: ignore[operator]
        return y

    with torch.inference_mode():
        _, tape = pass_graphs.record(forward, pass_graphs.Buffers(MOST))
    assert tape is None


def test_without_native_kernels_nothing_is_recorded() -> None:
    mlp = TinyMlp(torch.float32)
    ops.use_native(False)
    try:
        _, tape = pass_graphs.record(
            lambda: mlp(torch.randn(TOKENS, WIDTH), torch.randn(TOKENS, WIDTH)), pass_graphs.Buffers(MOST)
        )
    finally:
        ops.use_native(True)
    assert tape is None


def test_the_low_rank_op_takes_its_segments_anew() -> None:
    table = SlotTable((WIDTH,), WIDTH, 2, torch.float32)
    for slot in range(2):
        a, b = torch.randn(3, WIDTH), torch.randn(WIDTH, 3)
        table.put(slot, Factors(a, torch.ones(3), (3,), pack_expansion(b)))
    x, y = torch.randn(TOKENS, WIDTH), torch.zeros(TOKENS, WIDTH)
    own = Segments(*(torch.zeros(size, dtype=torch.int32) for size in (TOKENS, TOKENS, TOKENS + 1)))

    def forward() -> Tensor:
        lora_shrink_expand(y, x, table, own)
        return y

    _, tape = pass_graphs.record(forward, pass_graphs.Buffers(MOST))
    assert tape is not None
    for tokens, slots, starts in [([4, 1], [1], [0, 2]), ([0, 3, 2], [0, 1], [0, 1, 3])]:
        segments = Segments(*(torch.tensor(part, dtype=torch.int32) for part in (tokens, slots, starts)))
        expected = torch.zeros_like(y)
        lora_shrink_expand(expected, x, table, segments)
        own.tokens[: len(tokens)], own.slots[: len(slots)] = segments.tokens, segments.slots
        own.starts[: len(starts)], own.starts[len(starts) :] = segments.starts, len(tokens)
        y.zero_()
        tape.replay(TOKENS, 1)
        assert torch.equal(y, expected)


def test_a_replay_reports_what_a_call_would() -> None:
    qkv = torch.randn(1, 3 * 16)
    positions, cells = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    k, v = torch.zeros(2, 1, 4, 16), torch.zeros(2, 1, 4, 16)
    _, tape = pass_graphs.record(
        lambda: ops.rope_store_kv(qkv, positions, cells, k, v, ops.RopeParams(1, 1)), pass_graphs.Buffers(1)
    )
    assert tape is not None
    cells.fill_(8)
    with pytest.raises(IndexError, match="recorded op 0"):
        tape.replay(1, 1)
