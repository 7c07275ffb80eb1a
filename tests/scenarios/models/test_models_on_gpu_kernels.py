"""Models through the GPU's kernels, interpreted: the way that a forward pass takes on a CUDA device, step by step."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from support.kernels import triton_interpreter
from support.models.paged_run import CPU, PagedRun, run_ragged
from support.models.tiny_models import VOCAB, save

from benchmarks.gpu.measure import launches
from rootgraft.engine.loading.load_model import load_model
from rootgraft.engine.models.decoder import DecoderModel
from rootgraft.kernels import ops
from rootgraft.kernels.triton import launch

# In sizes that the kernels take: heads of 16 dimensions, widths of 16 and 32 columns.
SIZES = {"head_dim": 16, "qk_nope_head_dim": 32, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
# Of MiMo V2, whose values have 16 dimensions, and of Laguna, whose layers have other numbers of query heads.
OWN = {"mimo_v2_flash": {"head_dim": 32}, "laguna": {}}
EXPERTS = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
BY_LAYER = (
    *("layer_types", "mlp_layer_types", "no_rope_layers", "layer_rope_theta"),
    "num_attention_heads_per_layer",
)
PROMPTS = [[random.Random(row).randrange(VOCAB) for _ in range(length)] for row, length in enumerate((14, 1, 9))]


def random_model(name: str, folder: Path) -> DecoderModel:
    """Random weights in the shape of a family; of those whose layers differ in size, in their own sizes."""
    if name.startswith(("gemma4", "step3p5")):
        return load_model(save(name, folder), dtype=torch.float32, device=CPU, dummy=True)
    written = json.loads((save(name, folder) / "config.json").read_text())
    listed = [key for key in BY_LAYER if key != "mlp_layer_types" or name in OWN or name == "minimax_m3"]
    layers = {key: written[key][:2] for key in listed if written.get(key)}
    (folder / "config.json").write_text(json.dumps({**written, **layers, **SIZES, **EXPERTS, **OWN.get(name, {})}))
    return load_model(folder, dtype=torch.float32, device=CPU, dummy=True)


LAYER_NORMS = {"_layer_norm", "_rope_store_kv", "extend", "decode", "_gated_activation"}
RMS_NORMS = {"_rms_norm", "_rope_store_kv", "extend", "decode", "_gated_activation"}


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        *((name, RMS_NORMS) for name in ("llama", "qwen3", "gemma2", "gemma3", "smollm3_window")),
        *((name, RMS_NORMS) for name in ("olmo2", "glm4", "hunyuan", "granite_swa")),
        ("gemma4", RMS_NORMS),
        ("gemma4_same_values", RMS_NORMS - {"_gated_activation"}),  # whose MLP is too narrow for that
        ("gpt2", {"_layer_norm", "_rope_store_kv", "extend", "decode"}),
        ("nanochat", {"_rms_norm", "_rope_store_kv", "extend", "decode"}),
        *((name, LAYER_NORMS) for name in ("cohere_normed", "starcoder2", "bloom", "mpt")),
    ],
)
def test_logits_are_those_of_the_cpu(name, kernels, tmp_path, request):
    model = random_model(name, tmp_path)
    with launches() as launched:
        expected = run_ragged(model, PROMPTS, 16, random.Random(0))
        assert not launched
        request.getfixturevalue("interpreted")
        actual = run_ragged(model, PROMPTS, 16, random.Random(0))
    assert launched >= kernels
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("kv", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_kv_in_rows_of_8_bits_is_near_the_model_s_own(kv, tmp_path):
    """A prompt in chunks and tokens one by one; the reference, which reads the same bytes, is nearer still."""
    model = random_model("llama", tmp_path)
    tokens = PROMPTS[0]

    def logits(kv_dtype):
        run = PagedRun(model, 4, 1, len(tokens), kv_dtype=kv_dtype)
        chunks = (tokens[:6], tokens[6:11], *([token] for token in tokens[11:]))
        return torch.cat([run.step({0: list(chunk)})[0] for chunk in chunks])

    exact, rounded = logits(None), logits(kv)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "DEVICE_TYPES", frozenset(("cuda",)))
        oracle = logits(kv)
    assert 0 < float((rounded - exact).abs().max()) < 0.2 * float(exact.abs().max())
    assert float((rounded - oracle).abs().max()) <= 0.5 * float((rounded - exact).abs().max())


EXPERT_KERNELS = {"_group", "_product", "extend", "decode"}


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        *((name, EXPERT_KERNELS) for name in ("qwen2_moe", "mixtral", "gpt_oss", "mimo_v2_flash", "laguna")),
        ("deepseek_v3", EXPERT_KERNELS | {"_rope_store_latent"}),
        *((name, EXPERT_KERNELS | {"_expert_activation"}) for name in ("minimax_m3", "step3p5")),
    ],
)
def test_experts_are_those_of_plain_torch(name, kernels, tmp_path, request):
    """Weights are plain, as on a GPU: native kernels would pack them."""
    ops.use_native(False)
    model = random_model(name, tmp_path)
    expected = run_ragged(model, PROMPTS, 16, random.Random(0))
    ops.use_native(True)
    request.getfixturevalue("interpreted")
    products = [product for layer in model.layers for _, product in layer.active]
    for expert in (each for product in products for each in product.experts):
        triton_interpreter.allow(*(part for part in (expert.weight, expert.bias) if part is not None))
    with launches() as launched:
        actual = run_ragged(model, PROMPTS, 16, random.Random(0))
    assert launched >= kernels
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
