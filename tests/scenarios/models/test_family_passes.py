"""Families whose layers are unlike a Llama's: recorded passes, adapters on every linear module, GPU kernels."""

from __future__ import annotations

import random
import warnings
from pathlib import Path

import pytest
import torch
from support.models.lora_driver import AdaptedRun
from support.models.paged_run import CPU, PagedRun, pool, run_whole
from support.models.tiny_models import VOCAB, adaptable, oracle_logits, save
from torch import Tensor

from rootgraft.engine.batch import Batch, Row
from rootgraft.engine.executor.cpu_graphs import CpuGraphs
from rootgraft.engine.executor.input_builder import InputBuilder
from rootgraft.engine.loading.base_layout import base_layout, planned_layout
from rootgraft.engine.loading.load_model import load_model
from rootgraft.kernels import ops
from rootgraft.kernels.layouts import int8_kv_layout
from rootgraft.lora.lora_step import AdapterBank
from rootgraft.lora.read_adapter import AdapterReader

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of importing it
    from peft import LoraConfig, get_peft_model

FAMILIES = [
    *("granite", "olmo2", "olmo3", "glm", "glm4", "cohere", "cohere_normed", "cohere2", "exaone4", "seed_oss_biased"),
    *("starcoder2", "internlm3", "ernie4_5", "hunyuan", "nemotron", "arcee", "ministral3", "llama4"),
    *("lfm2", "lfm2_biased", "lfm3"),
    *("granite_hybrid", "granite_hybrid_mixture"),
    *("qwen3_next", "qwen3_5", "qwen3_5_biased", "qwen3_5_moe"),
    *("lfm2_moe", "bamba", "nemotron_h", "nemotron_h_mixture", "mamba2", "falcon_h1", "falcon_h1_normed"),
    *("mamba", "falcon_mamba", "jamba", "kimi_linear", "zamba2", "zamba2_plain", "olmo_hybrid"),
    *("solar_open", "afmoe", "minimax_m2", "exaone_moe", "ernie4_5_moe", "hunyuan_moe"),
    *("deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite", "youtu"),
    *("deepseek_v32_chosen", "glm_moe_dsa_shared", "mistral4"),
    *("minimax_m3", "minimax_m3_chosen", "minimax_m3_wide_blocks"),
    *("vaultgemma", "minicpm3", "granite_swa", "granite_moe_swa"),
    *("gpt2", "gpt_bigcode", "gpt_bigcode_heads", "nanochat"),
    *("mellum", "jais2", "phi", "phi_normed", "falcon", "falcon_new"),
    *("gemma", "granite_moe_shared", "gemma4", "gemma4_same_values", "gemma4_mixture"),
    *("helium", "cwm", "flex_olmo", "exaone", "apertus"),
    *("gpt_neox", "gpt_neox_serial", "gptj", "stablelm", "stablelm_parallel", "hy_v3", "axk1"),
    *(
        "cohere2_moe",
        "cohere2_moe_summed",
        "mimo_v2_flash",
        "mimo_v2_flash_even",
        "bailing_hybrid",
        "bailing_hybrid_unbounded",
    ),
    *("bloom", "mpt", "laguna", "laguna_elements", "step3p5"),
]
MAMBAS = ("mamba", "falcon_mamba", "jamba")
PROMPT = [random.Random(f"5 {each}").randrange(VOCAB) for each in range(41)]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, save(request.param, tmp_path_factory.mktemp(request.param))


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())


@pytest.mark.skipif(ops.native_kernels() is None, reason="no C++ compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replayed_steps_are_bitwise_the_same(family: tuple[str, Path], dtype: torch.dtype) -> None:
    model = load_model(family[1], dtype=dtype, device=CPU, max_positions=64)
    pools = [pool(model, 20, 4, 2) for _ in range(2)]
    builder = InputBuilder(2, 40, 4, CPU, has_states=model.config.has_states)
    graphs = CpuGraphs(model, pools[0], builder, 2)
    starts = [0, 0]
    for counts in ((9, 3), (1, 1), (2, 0), (1, 7)):
        rows = []
        for row, count in enumerate(counts):
            tokens = PROMPT[starts[row] :][:count]
            pages = tuple(range(row * 10, row * 10 + 10))
            rows.append(Row(row, starts[row], tokens, 0, pages, draws=count > 0, num_generated=0))
            starts[row] += count
        inputs = builder.build(Batch(tuple(rows)))
        hidden = graphs.forward(inputs)
        assert torch.equal(hidden, model.forward(builder.to_tensors(inputs), pools[1]))
    # The choice of tokens has ops of torch's.
    assert graphs.recorded == ([] if any(model.config.index_keys) else [frozenset()])


@pytest.mark.skipif(ops.native_kernels() is None, reason="no C++ compiler")
def test_weights_and_kv_of_8_bits_stay_near(family: tuple[str, Path]) -> None:
    """Rounding alone: what a layer does with its products does not depend on their form."""
    name, folder = family
    theirs = oracle_logits(name, PROMPT)
    rounded = load_model(folder, dtype=torch.float32, device=CPU, weights="int8_weight_only")
    plain = load_model(folder, dtype=torch.float32, device=CPU)
    run = PagedRun(plain, 16, 1, len(PROMPT))
    if plain.config.latent is None and not plain.config.has_position_keys and not any(plain.config.index_keys):
        run.kv = pool(plain, run.kv.num_pages, 16, 1, int8_kv_layout.DTYPE)
    # Of two experts, or blocks of tokens, with nearly the same score a rounded one may be chosen in place of the other.
    mixtures = [layer.mixture for layer in plain.config.layers if layer.mixture is not None]
    chooses = any(each.top_k < each.num_experts for each in mixtures)
    for ours in run_whole(rounded, PROMPT), run.step({0: PROMPT})[0]:
        near = torch.nn.functional.cosine_similarity(ours, theirs) > 0.98
        assert near.sum() >= len(PROMPT) - (2 if chooses else 0) - (3 if plain.config.block_index else 0)


def test_an_adapter_on_every_linear_module(family: tuple[str, Path], tmp_path: Path) -> None:
    """In chunks, beside a row without one."""
    name, folder = family
    torch.manual_seed(4)
    # PEFT cannot call Llama 4's router, whose result is a pair; Mamba's code reads the weight of its steps' projection.
    options = LoraConfig(
        r=3,
        lora_alpha=9,
        target_modules="all-linear",
        exclude_modules=["router"] if name == "llama4" else ["dt_proj"] if name in MAMBAS else None,
        init_lora_weights=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        oracle = get_peft_model(adaptable(name), options).eval()
        oracle.save_pretrained(tmp_path)
    model = load_model(folder, dtype=torch.float32, device=CPU)
    layout = base_layout(model, folder, dummy=False)
    planned = planned_layout(folder, torch.float32, dummy=False)
    for field in ("projections", "modules", "experts", "norms", "towers", "tied"):
        assert getattr(planned, field) == getattr(layout, field)
    AdapterReader(planned, max_rank=8).check(str(tmp_path))
    bank = AdapterBank(layout, 1)
    bank.install(0, AdapterReader(layout, max_rank=8).read(str(tmp_path)))
    run = AdaptedRun(model, bank, [0, -1], [0, 0])
    pieces = [run.extend([PROMPT[start : start + 17]] * 2) for start in range(0, len(PROMPT), 17)]
    adapted, plain = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    with torch.no_grad():
        assert_same(adapted, oracle(input_ids=torch.tensor([PROMPT])).logits[0])
    assert_same(plain, oracle_logits(name, PROMPT))
    assert (adapted - plain).abs().max() > 0.05
