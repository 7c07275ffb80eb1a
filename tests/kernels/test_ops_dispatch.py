"""Which kernels each public op reaches on a GPU, for the types that the engine passes; without a GPU.

Logits and the residual stream are fp32 in every model, weights and hidden states bf16 or fp16. A predicate that refuses
one of them loses a kernel silently: results stay right where plain torch computes them, only slow, or the host waits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from unittest import mock

import numpy as np
import pytest
import torch
from support.kernels.meta_gpu import GPU, gpu_tensor, posing_gpu

from rootgraft.kernels import expert_ops, lora_ops, memory, ops, pass_graphs, sampling_ops, state_ops
from rootgraft.kernels.layouts.attention_arguments import AttentionParams, PagedBatch, RopeParams
from rootgraft.kernels.lora_ops import Segments, SlotTable
from rootgraft.kernels.triton import graph_capture, shared_prefixes
from rootgraft.lora.segments import StaticSegments, make_segments

TOKENS, WIDTH, VOCAB, HEADS, KV_HEADS, DIM, PAGES, PAGE = 6, 64, 200, 4, 2, 32, 8, 16
MODEL_TYPES = [torch.bfloat16, torch.float16]
FP32, INT64, INT32 = torch.float32, torch.int64, torch.int32


def hidden(dtype: torch.dtype, width: int = WIDTH) -> torch.Tensor:
    return gpu_tensor(TOKENS, width, dtype=dtype)


def logits(width: int = VOCAB) -> torch.Tensor:
    return gpu_tensor(TOKENS, width, dtype=FP32)


def caches(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = gpu_tensor(2, PAGES, KV_HEADS, PAGE, DIM, dtype=dtype)
    return first, second


def norm(dtype: torch.dtype) -> None:
    ops.rms_norm(hidden(dtype), gpu_tensor(WIDTH, dtype=dtype), 1e-5)


def norm_of_residual(dtype: torch.dtype) -> None:
    ops.rms_norm(hidden(FP32), gpu_tensor(WIDTH, dtype=dtype), 1e-5, out_dtype=dtype)


def add_norm(dtype: torch.dtype) -> None:
    ops.add_rms_norm(hidden(dtype), hidden(FP32), gpu_tensor(WIDTH, dtype=dtype), 1e-5)


def rope(dtype: torch.dtype, *, normed: bool = False) -> None:
    norms = [gpu_tensor(DIM, dtype=dtype) if normed else None for _ in range(2)]
    params = RopeParams(HEADS, KV_HEADS, gpu_tensor(50, DIM, dtype=FP32), *norms, 1e-5)
    qkv, ids = hidden(dtype, (HEADS + 2 * KV_HEADS) * DIM), gpu_tensor(TOKENS, dtype=INT64)
    ops.rope_store_kv(qkv, ids, ids, *caches(dtype), params)


def attend(dtype: torch.dtype, *, query: int, context: int = 40, shared: bool = False) -> None:
    rows = TOKENS // query
    prefixes = shared_prefixes.StaticSharedPrefixes(rows, GPU).prefixes(rows) if shared else None
    batch = PagedBatch(
        gpu_tensor(rows, PAGES, dtype=INT32), gpu_tensor(rows + 1, dtype=INT32), gpu_tensor(rows, dtype=INT32),
        query, context, prefixes,
    )  # fmt: skip
    ops.attention(gpu_tensor(TOKENS, HEADS, DIM, dtype=dtype), *caches(dtype), batch, AttentionParams(DIM**-0.5))


def segments(*, captured: bool) -> Segments:
    if captured:
        return StaticSegments(TOKENS, GPU).segments(TOKENS)
    made = make_segments(np.array([0, 0, -1, 1, 1, 0], np.int32), GPU)
    assert made is not None
    return made


def table(dtype: torch.dtype, columns: int, inputs: int) -> SlotTable:
    made = SlotTable((columns,), inputs, 2, dtype, GPU)
    made.reserve(16)
    return made


def adapt(dtype: torch.dtype, *, y: torch.dtype | None = None, captured: bool = False) -> None:
    out = gpu_tensor(TOKENS, VOCAB, dtype=y or dtype)
    lora_ops.lora_shrink_expand(out, hidden(dtype), table(dtype, VOCAB, WIDTH), segments(captured=captured))


def begin_to_adapt(dtype: torch.dtype) -> None:
    begun = lora_ops.lora_shrink_beside(hidden(dtype), table(dtype, VOCAB, WIDTH), segments(captured=True))
    assert begun is not None and begun.sums.dtype is FP32


def activate_adapted(dtype: torch.dtype) -> None:
    part = segments(captured=True)
    made = SlotTable((WIDTH, WIDTH), WIDTH, 2, dtype, GPU)
    made.reserve(16)
    begun = lora_ops.lora_shrink_beside(hidden(dtype), made, part)
    y = gpu_tensor(TOKENS, 2 * WIDTH, dtype=dtype)
    assert lora_ops.lora_gated_activation(y, hidden(dtype), "silu", made, part, begun).shape == (TOKENS, WIDTH)


def rotate_adapted(dtype: torch.dtype) -> None:
    part, sizes = segments(captured=True), (HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM)
    made = SlotTable(sizes, WIDTH, 2, dtype, GPU)
    made.reserve(16)
    begun = lora_ops.lora_shrink_beside(hidden(dtype), made, part)
    params = RopeParams(HEADS, KV_HEADS, gpu_tensor(50, DIM, dtype=FP32))
    qkv, ids = hidden(dtype, sum(sizes)), gpu_tensor(TOKENS, dtype=INT64)
    q = lora_ops.lora_rope_store_kv(qkv, hidden(dtype), ids, ids, *caches(dtype), params, made, part, begun)
    assert q.shape == (TOKENS, HEADS, DIM)


def norm_adapted(dtype: torch.dtype) -> None:
    part, made = segments(captured=True), table(dtype, WIDTH, WIDTH)
    begun = lora_ops.lora_shrink_beside(hidden(dtype), made, part)
    y, residual, weight = hidden(dtype), hidden(FP32), gpu_tensor(WIDTH, dtype=dtype)
    lora_ops.lora_add_rms_norm(y, hidden(dtype), residual, weight, 1e-5, 0.0, made, part, begun)


def adapt_embedding(dtype: torch.dtype, *, captured: bool) -> None:
    ids = gpu_tensor(TOKENS, dtype=INT64)
    lora_ops.lora_embed(hidden(FP32), ids, table(dtype, WIDTH, VOCAB), segments(captured=captured))


def mask(_: torch.dtype) -> None:
    words = gpu_tensor(2, -(-VOCAB // 32), dtype=INT32)
    sampling_ops.mask_logits(logits(), gpu_tensor(2, dtype=INT64), words)


def edit(_: torch.dtype) -> None:
    sampling_ops.edit_logits(logits(), gpu_tensor(5, 4, dtype=INT32))


def layer_norm_of_residual(dtype: torch.dtype) -> None:
    weight = gpu_tensor(WIDTH, dtype=dtype)
    assert ops.layer_norm(hidden(FP32), weight, weight, 1e-5, out_dtype=dtype).dtype is dtype


def add_layer_norm(dtype: torch.dtype) -> None:
    ops.add_layer_norm(hidden(dtype), hidden(FP32), gpu_tensor(WIDTH, dtype=dtype), None, 1e-5)


def draw(_: torch.dtype) -> None:
    assert sampling_ops.has_kernel(logits())
    table, lines = gpu_tensor(3, 6, dtype=torch.float64), gpu_tensor(TOKENS, 2, dtype=INT64)
    sampling_ops.draw_lines(logits(), table, lines)


def copy(dtype: torch.dtype) -> None:
    cache = gpu_tensor(3, PAGES, KV_HEADS, PAGE, DIM, dtype=dtype)
    memory.copy_pages(cache, cache, [1], [2], [5])


def plain_linear(dtype: torch.dtype, *, wide: bool = False, best: bool = False) -> None:
    layer = ops.pack_linear(gpu_tensor(VOCAB, WIDTH, dtype=dtype))
    if best:
        ops.largest_linear(hidden(dtype), layer)
    else:
        assert ops.linear(hidden(dtype), layer, FP32 if wide else None).dtype is (FP32 if wide else dtype)


def gated_linear(dtype: torch.dtype) -> None:
    ops.gated_linear(hidden(dtype), ops.pack_linear(gpu_tensor(2 * WIDTH, WIDTH, dtype=dtype)), "silu")


def choose_experts(_: torch.dtype) -> None:
    correction = gpu_tensor(8, dtype=FP32)
    params = expert_ops.RouterParams(2, "sigmoid", True, 2.0, correction, groups=4, top_groups=2, best_of_group=2)
    expert_ops.route(gpu_tensor(TOKENS, 8, dtype=FP32), params)


def multiply_experts(dtype: torch.dtype) -> None:
    packed = [ops.pack_linear(gpu_tensor(VOCAB, WIDTH, dtype=dtype)) for _ in range(8)]
    experts = gpu_tensor(TOKENS, 2, dtype=INT32)
    assert expert_ops.expert_linear(hidden(dtype), expert_ops.ExpertWeights(tuple(packed)), experts).dtype is dtype


def activate_experts(dtype: torch.dtype, kind: expert_ops.ExpertActivation = "silu") -> None:
    expert_ops.expert_activation(gpu_tensor(TOKENS, 2, WIDTH, dtype=dtype), kind)


def sum_experts(dtype: torch.dtype) -> None:
    weights, gate = gpu_tensor(TOKENS, 2, dtype=FP32), gpu_tensor(TOKENS, 1, dtype=FP32)
    expert_ops.sum_experts(gpu_tensor(TOKENS, 2, WIDTH, dtype=dtype), weights, hidden(dtype), gate)


def states(dtype: torch.dtype) -> dict[str, Callable[[], torch.Tensor]]:
    """Calls of the ops with a state, for two rows of three tokens."""
    batch = state_ops.StateBatch(*(gpu_tensor(count, dtype=INT32) for count in (3, 2, 2, TOKENS)))
    factors = [gpu_tensor(HEADS, dtype=FP32) for _ in range(3)]
    conv = state_ops.ConvParams(gpu_tensor(4, WIDTH, dtype=dtype), None, gated=False)
    scan = state_ops.SsmParams(HEADS, DIM, 2, 16, *factors)
    delta = state_ops.DeltaParams(HEADS, DIM, 2, 16, *factors[:2])
    norm = state_ops.GatedNormParams(gpu_tensor(WIDTH, dtype=dtype), 1e-5, 2)
    channels = state_ops.SelectiveParams(*(gpu_tensor(*size, dtype=FP32) for size in ((16, WIDTH), (WIDTH,), (WIDTH,))))
    of_channels = gpu_tensor(5, 1, 16, WIDTH, dtype=FP32)
    inputs, sums = gpu_tensor(5, 3, WIDTH, dtype=dtype), gpu_tensor(5, HEADS, 16, DIM, dtype=FP32)
    gates = hidden(dtype, 2 * HEADS)
    return {
        "causal_conv": lambda: state_ops.causal_conv(hidden(dtype), inputs, batch, conv),
        "ssm_scan": lambda: state_ops.ssm_scan(hidden(dtype, scan.columns), gates, 0, sums, batch, scan),
        "delta_scan": lambda: state_ops.delta_scan(hidden(dtype, delta.columns), gates, (HEADS, 0), sums, batch, delta),
        "selective_scan": lambda: state_ops.selective_scan(
            hidden(dtype), hidden(dtype), hidden(dtype, 32), of_channels, batch, channels
        ),
        "gated_norm": lambda: state_ops.gated_norm(hidden(dtype), hidden(dtype), norm),
    }


LORA, LORA_EMBED = ["_shrink", "_expand"], ["_gather", "_expand"]
CASES: dict[str, tuple[str, Callable[[torch.dtype], None], list[str]]] = {
    "norm": ("ops.rms_norm", norm, ["_rms_norm"]),
    "norm of the residual stream": ("ops.rms_norm", norm_of_residual, ["_rms_norm"]),
    "norm after a sum": ("ops.add_rms_norm", add_norm, ["_rms_norm"]),
    "layer norm": ("ops.layer_norm", layer_norm_of_residual, ["_layer_norm"]),
    "layer norm after a sum": ("ops.add_layer_norm", add_layer_norm, ["_layer_norm"]),
    "scaled sum": ("ops.add_scaled", lambda d: ops.add_scaled(hidden(d), hidden(FP32), 0.5), []),  # torch's own
    "copy of the residual stream": ("ops.copy_residual", lambda d: ops.copy_residual(hidden(FP32), d), []),
    "rotary": ("ops.rope_store_kv", rope, ["_rope_store_kv"]),
    "rotary with head norms": ("ops.rope_store_kv", lambda d: rope(d, normed=True), ["_rope_store_kv"]),
    "decode": ("ops.attention", lambda d: attend(d, query=1), ["decode"]),
    "decode of long contexts": ("ops.attention", lambda d: attend(d, query=1, context=4096), ["decode"]),
    "extend": ("ops.attention", lambda d: attend(d, query=3), ["extend", "decode"]),  # of rows of one token
    "shared prefixes": (
        "ops.attention", lambda d: attend(d, query=1, context=4096, shared=True), ["decode"],
    ),
    "activation": ("ops.gated_activation", lambda d: ops.gated_activation(hidden(d), "silu"), ["_gated_activation"]),
    "plain activation": ("ops.activation", lambda d: ops.activation(hidden(d), "relu2"), ["_gated_activation"]),
    "xielu": ("ops.xielu", lambda d: ops.xielu(hidden(d), torch.ones(4)), []),  # torch's own
    "linear": ("ops.linear", plain_linear, []),  # torch's own products
    "gated linear": ("ops.gated_linear", gated_linear, ["_gated_activation"]),
    "linear to fp32": ("ops.linear", lambda d: plain_linear(d, wide=True), []),
    "largest of a linear": ("ops.largest_linear", lambda d: plain_linear(d, best=True), []),
    "largest": ("ops.largest", lambda _: ops.largest(logits()), []),
    "page copy": ("memory.copy_pages", copy, ["_copy_page"]),
    "adapter": ("lora_ops.lora_shrink_expand", adapt, LORA),
    "adapter, captured": ("lora_ops.lora_shrink_expand", lambda d: adapt(d, captured=True), LORA),
    "adapter of the head": ("lora_ops.lora_shrink_expand", lambda d: adapt(d, y=FP32), LORA),
    "adapter, its first half": ("lora_ops.lora_shrink_beside", begin_to_adapt, LORA[:1]),
    "adapter of an activation": (
        "lora_ops.lora_gated_activation", activate_adapted, [*LORA[:1], "_expand_gated"],
    ),
    "adapter of q, k and v": ("lora_ops.lora_rope_store_kv", rotate_adapted, [*LORA[:1], "_expand_rope_store"]),
    "adapter before a norm": ("lora_ops.lora_add_rms_norm", norm_adapted, [*LORA[:1], "_expand_add_norm"]),
    "adapter of the embedding": ("lora_ops.lora_embed", lambda d: adapt_embedding(d, captured=False), LORA_EMBED),
    "the same, captured": ("lora_ops.lora_embed", lambda d: adapt_embedding(d, captured=True), LORA_EMBED),
    "mask": ("sampling_ops.mask_logits", mask, ["_mask"]),
    "edits": ("sampling_ops.edit_logits", edit, ["_edit"] * 3),
    "routing": ("expert_ops.route", choose_experts, ["_route"]),
    "experts": ("expert_ops.expert_linear", multiply_experts, ["_group", "_product"]),
    "activation of experts": ("expert_ops.expert_activation", activate_experts, ["_expert_activation"]),
    "clamped activation of experts": (
        "expert_ops.expert_activation", lambda d: activate_experts(d, expert_ops.ClampedSwiglu(1.7, 7.0)),
        ["_expert_activation"],
    ),
    "sum of experts": ("expert_ops.sum_experts", sum_experts, ["_sum_experts"]),
    "convolution": ("state_ops.causal_conv", lambda d: states(d)["causal_conv"](), ["_convolve", "_save"]),
    "selective scan": ("state_ops.ssm_scan", lambda d: states(d)["ssm_scan"](), ["_ssm_short", "_ssm_chunks"]),
    "selective scan of channels": ("state_ops.selective_scan", lambda d: states(d)["selective_scan"](), ["_selective"]),
    "delta rule": ("state_ops.delta_scan", lambda d: states(d)["delta_scan"](), ["_delta_short", "_delta_chunks"]),
    "norm with a gate": ("state_ops.gated_norm", lambda d: states(d)["gated_norm"](), ["_gated_norm"]),
    "draw": (
        "sampling_ops.draw_lines", draw, ["_stats", "_deviations", "_sums", "_levels", "_pick", "_draw"],
    ),
}  # fmt: skip

# Public functions that launch nothing on a device: of the host, or tested below.
HOST = {
    "ops": {
        "find_long_rows", "find_shared_prefixes", "is_invariant", "native_kernels", "native_status", "on_triton",
        "pack_linear",
        "pack_linear_apart", "parts_of",
        "set_threads", "shares_prefixes", "timed_calls", "triton_status", "use_invariant", "use_native",
    },
    "expert_ops": {"expert_parts", "takes_together"},
    "lora_ops": {"lora_experts", "lora_heads", "pack_expansion"},  # the former two by the kernels of lora_shrink_expand
    "sampling_ops": {"draw_tokens", "draws_tokens", "has_kernel"},
    "memory": {"lazy_zeros", "populate", "release_mapped", "trim_heap", "zeros"},
}  # fmt: skip


@pytest.mark.parametrize("dtype", MODEL_TYPES, ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", CASES)
def test_the_kernels_that_an_op_reaches(case: str, dtype: torch.dtype) -> None:
    _, call, expected = CASES[case]
    with posing_gpu() as launched:
        call(dtype)
    assert launched == expected


def public(module: ModuleType) -> set[str]:
    """Names of the public functions: those in ``__all__``, else those of its own."""
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    names = getattr(module, "__all__", [name for name in own if not name.startswith("_")])
    return {name for name in names if inspect.isfunction(getattr(module, name))}


@pytest.mark.parametrize(
    "module", [ops, expert_ops, lora_ops, sampling_ops, state_ops, memory], ids=lambda module: module.__name__
)
def test_every_public_function_has_its_case(module: ModuleType) -> None:
    name = module.__name__.rpartition(".")[2]
    tested = {face.partition(".")[2] for face, _, _ in CASES.values() if face.startswith(f"{name}.")}
    assert public(module) == tested | HOST.get(name, set())
    assert not tested & HOST.get(name, set())


def test_a_model_in_fp32_runs_in_plain_torch() -> None:
    """As a reference; but its logits are masked and drawn from by the kernels, like those of every model."""
    refused = {"norm", "rotary", "decode", "extend", "activation"}
    for case in refused:
        with posing_gpu() as launched, mock.patch("rootgraft.kernels.ops.reference") as plain:
            CASES[case][1](FP32)
        assert not launched and len(plain.mock_calls) == 1
    with posing_gpu() as launched, mock.patch("rootgraft.kernels.lora_ops.lora_reference") as plain:
        adapt(FP32)
        adapt_embedding(FP32, captured=False)
        assert lora_ops.lora_shrink_beside(hidden(FP32), table(FP32, VOCAB, WIDTH), segments(captured=True)) is None
    assert not launched and len(plain.lora_shrink_expand.mock_calls) == 2
    with posing_gpu():
        assert sampling_ops.has_kernel(logits())


def test_tensors_of_other_types_or_layouts_are_not_taken() -> None:
    with posing_gpu():
        assert not sampling_ops.has_kernel(logits().double())
        assert not sampling_ops.has_kernel(logits().to(torch.bfloat16))
        assert not sampling_ops.has_kernel(logits(2 * VOCAB)[:, ::2])


def test_what_else_is_chosen_for_a_device() -> None:
    cache, rows = caches(torch.bfloat16)[0], shared_prefixes.LEAST_SHARERS
    pages = max(shared_prefixes.LEAST_TOKENS, shared_prefixes.LEAST_READS // rows) // PAGE
    table = np.tile(np.arange(pages + 1, dtype=np.int32), (rows, 1))
    table[:, -1] += np.arange(rows, dtype=np.int32)  # each row's own page
    arguments = (table, np.ones(rows, np.int32), np.full(rows, pages * PAGE + 1, np.int32), PAGE)
    with posing_gpu(), mock.patch.object(graph_capture, "Capture") as capture:
        assert pass_graphs.capture_for([cache], cache.dtype) is capture.return_value
        assert pass_graphs.capture_for([caches(FP32)[0]], FP32) is None, "an op of plain torch reads back"
        assert ops.find_shared_prefixes(*arguments, GPU) is not None
        assert ops.find_shared_prefixes(*arguments, torch.device("cpu")) is None


@pytest.mark.parametrize("embeds", [False, True])
def test_plain_torch_refuses_segments_of_tiles_alone(embeds: bool) -> None:
    """It would read no segment, and drop the adapters of a captured step without a word."""
    call = adapt_embedding if embeds else adapt
    with (
        posing_gpu(),
        mock.patch("rootgraft.kernels.lora_ops._takes_triton", return_value=False),
        pytest.raises(ValueError, match="segments of 6 tokens have 0 slots and 0 starts"),
    ):
        call(torch.bfloat16, captured=True)
