"""Every family against transformers, from a checkpoint that transformers wrote."""

from __future__ import annotations

import json
import random
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.models.paged_run import CPU, run_ragged, run_whole
from support.models.step_model import published_step
from support.models.tiny_models import MODELS, VOCAB, oracle_logits, save, tiny_model
from torch import Tensor

from rootgraft.engine.checkpoint.read_config import read_model_config
from rootgraft.engine.loading.load_model import load_model

RANDOM = random.Random(7)
PROMPTS = [[RANDOM.randrange(VOCAB) for _ in range(length)] for length in (41, 1, 23, 64)]


@pytest.fixture(scope="module", params=MODELS)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, save(request.param, tmp_path_factory.mktemp(request.param))


def farthest(ours: Tensor, theirs: Tensor) -> float:
    """The largest cosine distance of a token's logits."""
    return 1 - float(torch.nn.functional.cosine_similarity(ours, theirs).min())


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())


def test_logits_of_a_whole_prompt(family: tuple[str, Path]) -> None:
    name, folder = family
    model = load_model(folder, dtype=torch.float32, device=CPU)
    for prompt in PROMPTS:
        assert_same(run_whole(model, prompt), oracle_logits(name, prompt))


@pytest.mark.parametrize("page_size", [1, 16])
def test_logits_in_ragged_chunks(family: tuple[str, Path], page_size: int) -> None:
    name, folder = family
    model = load_model(folder, dtype=torch.float32, device=CPU)
    for seed in range(2):
        results = run_ragged(model, PROMPTS, page_size, random.Random(seed))
        for prompt, logits in zip(PROMPTS, results, strict=True):
            assert_same(logits, oracle_logits(name, prompt))


def test_bfloat16_stays_near(family: tuple[str, Path]) -> None:
    name, folder = family
    model = load_model(folder, dtype=torch.bfloat16, device=CPU)
    ours, theirs = run_whole(model, PROMPTS[2]), oracle_logits(name, PROMPTS[2])
    assert ours.dtype == torch.float32
    distance = farthest(ours, theirs)
    if distance >= 0.01:  # a router near a tie: how far the library's own rounding leads
        with torch.inference_mode():
            rounded = deepcopy(tiny_model(name)).to(torch.bfloat16)(torch.tensor([PROMPTS[2]])).logits[0].float()
        assert distance < 3 * farthest(rounded, theirs)


def test_the_oracle_feels_what_the_config_says() -> None:
    """The windows, scalings and caps of these models change their logits, so that the tests above mean something."""
    for name in ("mistral", "llama_scaled", "llama_yarn", "gemma2", "gemma3", "phi3_partial", "ministral3"):
        config = tiny_model(name).config
        plain = type(tiny_model(name))(_neutral(config)).eval()
        plain.load_state_dict(tiny_model(name).state_dict())
        with torch.no_grad():
            other = plain(torch.tensor([PROMPTS[0]])).logits[0]
        assert (other - oracle_logits(name, PROMPTS[0])).abs().max() > 0.05


def _neutral(config):
    neutral = type(config).from_dict(config.to_dict())
    neutral.sliding_window = 1000
    if neutral.model_type not in ("gemma2", "gemma3_text"):
        neutral.rope_parameters = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
    if neutral.model_type == "ministral3":
        neutral.rope_parameters |= {"llama_4_scaling_beta": 0.0, "original_max_position_embeddings": 9}
    neutral._attn_implementation = "eager"
    return neutral


def test_older_spellings_mean_the_same(family: tuple[str, Path], tmp_path: Path) -> None:
    """Rotary keys as before transformers 5, and layers derived from a rule instead of listed."""
    _, folder = family
    written = json.loads((folder / "config.json").read_text())
    if written["model_type"] == "step3p5":
        # The query scalar has no published key: the code divides by the head's own size.
        written["query_pre_attn_scalar"] = written["head_dim"]
        (tmp_path / "config.json").write_text(json.dumps(written))
        expected = read_model_config(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps(published_step(written)))
        assert read_model_config(tmp_path) == replace(expected, prediction_layers=1)
        return
    new = written.pop("rope_parameters", {"rope_theta": 1e4})
    listed_types = written.get("layer_types")
    full = dict(new.get("full_attention", new))
    written["rope_theta"] = full.pop("rope_theta")
    if "partial_rotary_factor" in full:
        written["partial_rotary_factor"] = full.pop("partial_rotary_factor")
    if full.get("rope_type", "default") != "default":
        full["type"] = full.pop("rope_type")
        written["rope_scaling"] = full
    if written["model_type"] == "mimo_v2_flash":  # as published
        kinds = zip(written["layer_types"], written.pop("mlp_layer_types"), strict=True)
        flags = [(int(kind == "sliding_attention"), int(mlp == "sparse")) for kind, mlp in kinds]
        written["hybrid_layer_pattern"], written["moe_layer_freq"] = map(list, zip(*flags, strict=True))
        heads = 2 * written["num_key_value_heads"]
        written |= {"swa_rope_theta": new.pop("sliding_attention")["rope_theta"], "swa_num_key_value_heads": heads}
        written["sliding_window_size"] = written.pop("sliding_window") - 1
        written["layernorm_epsilon"] = written.pop("rms_norm_eps")
    if written["model_type"] == "bailing_hybrid":  # as published
        written["head_dim"] = written.pop("linear_head_dim")
        written["layer_group_size"], written["first_k_dense_replace"] = 2, written.pop("mlp_layer_types").count("dense")
        for own in ("linear_num_heads", "linear_conv_kernel_dim"):
            del written[own]
    if written["model_type"] == "cohere2_moe":
        written["first_k_dense_replace"] = written.pop("mlp_layer_types").count("dense")
    if "sliding_attention" in new and written["model_type"] != "olmo3":  # its two ropes have one base
        written["rope_local_base_freq"] = new["sliding_attention"]["rope_theta"]
    if written["model_type"] == "granitemoehybrid":  # which has no rule
        kinds = {"full_attention": "attention", "linear_attention": "mamba"}
        written["layers_block_type"] = [kinds[kind] for kind in written["layer_types"]]
    if written["model_type"] == "nemotron_h":
        letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
        written["hybrid_override_pattern"] = "".join(letters[kind] for kind in written.pop("layers_block_type"))
    if written["model_type"] == "kimi_linear":
        layers = {kind: [at for at, each in enumerate(listed_types, 1) if each == kind] for kind in set(listed_types)}
        sizes = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads"}
        sizes["short_conv_kernel_size"] = "linear_conv_kernel_dim"
        written["linear_attn_config"] = {
            "full_attn_layers": layers["full_attention"],
            "kda_layers": layers["linear_attention"],
            **{old: written.pop(new) for old, new in sizes.items()},
        }
    if written["model_type"] in ("lfm3", "laguna"):  # which have one spelling of their rotary keys
        written["rope_parameters"] = new
        for key in ("rope_theta", "partial_rotary_factor", "rope_scaling", "rope_local_base_freq"):
            written.pop(key, None)
    if written["model_type"] == "mellum":  # which has no rule either
        written["sliding_window_pattern"] = 2
    if written["model_type"] == "minimax_m3_vl_text":  # as published
        sizes = {"n_heads": "num_index_heads", "head_dim": "index_dim", "block_size": "block_size"}
        sizes |= {"topk_blocks": "topk_blocks", "local_blocks": "local_block"}
        written["sparse_attention_config"] = {
            **{f"sparse_{old}": written.pop(f"index_{new}") for new, old in sizes.items()},
            "sparse_attention_freq": [int(kind != "full_attention") for kind in listed_types],
        }
        written["moe_layer_freq"] = [int(kind == "sparse") for kind in written.pop("mlp_layer_types")]
        written["hidden_act"] = "swigluoai"
    if written["model_type"] == "lfm2_moe":
        written["full_attn_idxs"] = [1]
    if written["model_type"].startswith(("qwen3_next", "qwen3_5", "olmo_hybrid")):
        written["full_attention_interval"] = 2
    if written["model_type"] == "afmoe":
        written |= {"route_norm": True, "score_func": "sigmoid", "n_group": 1, "topk_group": 1}
    for listed in ("layer_types", "no_rope_layers"):
        if written["model_type"] != "laguna":  # which has no rule
            written.pop(listed, None)
    if (own := written.pop("per_layer_config", None)) is not None:  # Gemma 4's own keys, whose rotary ones are new
        keys = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
        written |= {keys[key]: value for key, value in next(iter(own.values())).items()}
        written |= {"rope_parameters": new, "layer_types": listed_types}
        del written["rope_theta"], written["rope_local_base_freq"]
        written.pop("partial_rotary_factor", None), written.pop("rope_scaling", None)
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert read_model_config(tmp_path) == read_model_config(folder)


def test_layers_know_their_modules(tmp_path: Path) -> None:
    model = load_model(save("llama", tmp_path), dtype=torch.float32, device=CPU)
    attention, mlp = model.layers[2].attention, model.layers[2].mlp
    assert attention.qkv.modules == tuple(f"model.layers.2.self_attn.{name}_proj" for name in "qkv")
    assert attention.qkv.sizes == (48, 16, 16)
    assert attention.output.modules == ("model.layers.2.self_attn.o_proj",)
    assert mlp.gate_up.modules == ("model.layers.2.mlp.gate_proj", "model.layers.2.mlp.up_proj")
    assert mlp.down.modules == ("model.layers.2.mlp.down_proj",)
    assert model.head.modules == ("lm_head",)
    assert model.max_positions == 128
    assert (model.dtype, model.device) == (torch.float32, CPU)
