"""Checkpoints and adapters that name keys and tensors as their own code did (EXAONE 3.5, GLM-4, Phi-2 and others)."""

from __future__ import annotations

import json
import random
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.lockstep_ranks import run_ranks
from support.models.lora_driver import AdaptedRun
from support.models.paged_run import CPU, run_ragged, run_whole
from support.models.tiny_models import COMMON, MODELS, VOCAB, adaptable, oracle_logits, save

from rootgraft.engine.checkpoint.read_config import read_model_config
from rootgraft.engine.errors import ConfigError, ModelError
from rootgraft.engine.loading.base_layout import base_layout, planned_layout
from rootgraft.engine.loading.load_model import load_model
from rootgraft.engine.loading.shards import Shard, check_split
from rootgraft.kernels.collectives import Ranks
from rootgraft.lora.errors import AdapterError
from rootgraft.lora.lora_step import AdapterBank
from rootgraft.lora.read_adapter import AdapterReader

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of importing it
    from peft import LoraConfig, get_peft_model

TOKENS = [token * 7 % VOCAB for token in range(23)]
OWN = {
    "num_hidden_layers": "num_layers",
    "rms_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation_function",
}
CODE = (
    ("model.layers.", "transformer.h."),
    ("self_attn.o_proj", "attn.attention.out_proj"),
    ("self_attn.", "attn.attention."),
    ("mlp.gate_proj", "mlp.c_fc_0"),
    ("mlp.up_proj", "mlp.c_fc_1"),
    ("mlp.down_proj", "mlp.c_proj"),
)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose config is as published: keys of its own, and a class that was code."""
    folder = save("exaone", tmp_path_factory.mktemp("exaone"))
    config = json.loads((folder / "config.json").read_text())
    config = {OWN.get(key, key): value for key, value in config.items()}
    config |= {
        "architectures": ["ExaoneForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_exaone.ExaoneForCausalLM"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    assert all("transformer." in name or name == "lm_head.weight" for name in load_file(folder / "model.safetensors"))
    return folder


def test_logits_are_those_of_transformers(published: Path) -> None:
    model = load_model(published, dtype=torch.float32, device=CPU)
    torch.testing.assert_close(run_whole(model, TOKENS), oracle_logits("exaone", TOKENS), rtol=1e-4, atol=1e-4)


def test_a_tensor_that_is_there_by_both_names_is_refused(published: Path, tmp_path: Path) -> None:
    tensors = load_file(published / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["transformer.h.0.mlp.c_fc_1.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((published / "config.json").read_bytes())
    with pytest.raises(ModelError, match=r"The tensor model.layers.0.mlp.up_proj.weight is there twice"):
        load_model(tmp_path, dtype=torch.float32, device=CPU)


def test_adapters_of_the_code_are_those_of_the_class(published: Path, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
        get_peft_model(adaptable("exaone"), options).save_pretrained(tmp_path / "class")
    tensors = load_file(tmp_path / "class" / "adapter_model.safetensors")
    config = json.loads((tmp_path / "class" / "adapter_config.json").read_text())
    for name, own in CODE:
        tensors = {key.replace(name, own): value for key, value in tensors.items()}
    assert all(".transformer.h." in name for name in tensors)
    config["target_modules"] = ["q_proj", "k_proj", "v_proj", "out_proj", "c_fc_0", "c_fc_1", "c_proj"]
    (tmp_path / "code").mkdir()
    save_file(tensors, tmp_path / "code" / "adapter_model.safetensors")
    (tmp_path / "code" / "adapter_config.json").write_text(json.dumps(config))
    model = load_model(published, dtype=torch.float32, device=CPU)
    reader = AdapterReader(base_layout(model, published, dummy=False), max_rank=8)
    found, wanted = (reader.read(str(tmp_path / name)) for name in ("code", "class"))
    assert found.digest == wanted.digest


Names = dict[str, str]


@dataclass(frozen=True)
class CodeModel:
    """A model as its code names keys and tensors, by the tiny model of transformers that computes the same.

    Attributes:
        keys: of the config, by their usual names; ``config`` are others.
        names: parts of tensors' names by the usual ones, replaced one after the other.
        fused: the tensor of q, k and v of a layer, without its prefix; empty where they are apart.
        module: one that an adapter changes.
        grouped: its rows are those of each KV head.
        mlp_parts: 2 where the size of the MLP is of gate and up together.
        dropped: keys that the code does not know.
    """

    base: str
    config: dict[str, Any]
    names: Names
    module: str
    keys: Names = field(default_factory=dict)
    fused: str = ""
    grouped: bool = False
    mlp_parts: int = 1
    dropped: tuple[str, ...] = ()


CODE_MODELS = {
    "glm": CodeModel(
        base="glm",
        config={
            "architectures": ["ChatGLMModel"],
            "model_type": "chatglm",
            "auto_map": {"AutoModel": "modeling_chatglm.ChatGLMForConditionalGeneration"},
            "rope_ratio": 0.05,
            "multi_query_attention": True,
            "rmsnorm": True,
        },
        keys={
            "num_hidden_layers": "num_layers",
            "intermediate_size": "ffn_hidden_size",
            "num_key_value_heads": "multi_query_group_num",
            "head_dim": "kv_channels",
            "max_position_embeddings": "seq_length",
            "rms_norm_eps": "layernorm_epsilon",
            "vocab_size": "padded_vocab_size",
            "attention_bias": "add_qkv_bias",
        },
        names={
            "lm_head": "transformer.output_layer",
            "model.embed_tokens": "transformer.embedding.word_embeddings",
            "model.norm": "transformer.encoder.final_layernorm",
            "model.layers.": "transformer.encoder.layers.",
            "self_attn.o_proj": "self_attention.dense",
            "self_attn.": "self_attention.",
            "mlp.gate_up_proj": "mlp.dense_h_to_4h",
            "mlp.down_proj": "mlp.dense_4h_to_h",
        },
        module="transformer.encoder.layers.1.self_attention.query_key_value",
        fused="query_key_value",
    ),
    "internlm2": CodeModel(
        base="llama",
        config={
            "architectures": ["InternLM2ForCausalLM"],
            "model_type": "internlm2",
            "auto_map": {"AutoModelForCausalLM": "modeling_internlm2.InternLM2ForCausalLM"},
            "bias": False,
            "rope_theta": 10_000.0,
            "rope_scaling": {"type": "dynamic", "factor": 2.0},
        },
        names={
            "lm_head": "output",
            "embed_tokens": "tok_embeddings",
            "self_attn.o_proj": "attention.wo",
            "self_attn.": "attention.",
            "input_layernorm": "attention_norm",
            "post_attention_layernorm": "ffn_norm",
            "mlp.gate_proj": "feed_forward.w1",
            "mlp.up_proj": "feed_forward.w3",
            "mlp.down_proj": "feed_forward.w2",
        },
        module="model.layers.1.attention.wqkv",
        fused="wqkv",
        grouped=True,
        dropped=("attention_bias", "mlp_bias", "head_dim"),
    ),
    "qwen": CodeModel(
        base="qwen_as_code",
        config={
            "architectures": ["QWenLMHeadModel"],
            "model_type": "qwen",
            "auto_map": {"AutoModelForCausalLM": "modeling_qwen.QWenLMHeadModel"},
            "seq_length": 96,
            "use_logn_attn": True,
            "use_dynamic_ntk": True,
            "no_bias": True,
            "rotary_pct": 1.0,
            "rotary_emb_base": 500.0,
        },
        keys={"rms_norm_eps": "layer_norm_epsilon", "head_dim": "kv_channels"},
        names={
            "model.embed_tokens": "transformer.wte",
            "model.layers.": "transformer.h.",
            "model.norm": "transformer.ln_f",
            "self_attn.o_proj": "attn.c_proj",
            "self_attn.": "attn.",
            "input_layernorm": "ln_1",
            "post_attention_layernorm": "ln_2",
            "mlp.gate_proj": "mlp.w2",
            "mlp.up_proj": "mlp.w1",
            "mlp.down_proj": "mlp.c_proj",
        },
        module="transformer.h.1.attn.c_attn",
        fused="c_attn",
        mlp_parts=2,
        dropped=("num_key_value_heads", "layer_types", "sliding_window", "use_sliding_window", "max_window_layers"),
    ),
    "phi": CodeModel(
        base="phi_as_code",
        config={
            "architectures": ["PhiForCausalLM"],
            "model_type": "phi-msft",
            "auto_map": {"AutoModelForCausalLM": "modeling_phi.PhiForCausalLM"},
            "rotary_dim": 8,
            "n_head_kv": None,
            "n_inner": None,
            "flash_attn": False,
        },
        keys={
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
            "layer_norm_eps": "layer_norm_epsilon",
            "hidden_act": "activation_function",
        },
        names={
            "lm_head": "lm_head.linear",
            "model.embed_tokens": "transformer.embd.wte",
            "model.final_layernorm": "lm_head.ln",
            "model.layers.": "transformer.h.",
            "input_layernorm": "ln",
            "self_attn.dense": "mixer.out_proj",
            "self_attn.": "mixer.",
        },
        module="transformer.h.1.mixer.Wqkv",
        fused="Wqkv",
        dropped=("num_key_value_heads", "intermediate_size", "partial_rotary_factor", "qk_layernorm"),
    ),
    "ling": CodeModel(
        base="bailing_moe_v2",
        config={
            "model_type": "bailing_moe",
            "auto_map": {"AutoModelForCausalLM": "modeling_bailing_moe_v2.BailingMoeV2ForCausalLM"},
            "rope_theta": 500.0,
            "partial_rotary_factor": 0.5,
            "score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
        },
        keys={
            "n_routed_experts": "num_experts",
            "n_shared_experts": "num_shared_experts",
            "attention_bias": "use_qkv_bias",
        },
        names={},
        module="model.layers.1.attention.query_key_value",
    ),
}


def write_code_model(model: CodeModel, folder: Path) -> Path:
    """Save the tiny model, and rename what the code names otherwise."""
    save(model.base, folder)
    config = json.loads((folder / "config.json").read_text())
    groups = config["num_attention_heads"] // config["num_key_value_heads"]
    config["intermediate_size"] *= model.mlp_parts
    kv_heads = config["num_key_value_heads"]
    for key in ("rope_parameters", "num_key_value_groups", *model.dropped):
        config.pop(key, None)
    config = {model.keys.get(key, key): value for key, value in config.items()} | model.config
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if ".q_proj." in name and model.fused]:
        parts = [tensors.pop(name.replace("q_proj", f"{each}_proj")) for each in "qkv"]
        if model.grouped:
            heads = [len(parts[1]) // kv_heads * count for count in (groups, 1, 1)]
            split = [part.split(rows) for part, rows in zip(parts, heads, strict=True)]
            parts = [part for of_head in zip(*split, strict=True) for part in of_head]
        tensors[name.replace("q_proj", model.fused)] = torch.cat(parts)
    for usual, own in model.names.items():
        tensors = {name.replace(usual, own): tensor for name, tensor in tensors.items()}
    assert f"{model.module}.weight" in tensors and not any("self_attn" in name for name in tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module", params=CODE_MODELS)
def code_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[CodeModel, Path]:
    model = CODE_MODELS[request.param]
    return model, write_code_model(model, tmp_path_factory.mktemp(request.param))


def test_code_is_what_transformers_computes(code_model: tuple[CodeModel, Path]) -> None:
    """Whole, and in chunks beside other rows."""
    model, folder = code_model
    loaded = load_model(folder, dtype=torch.float32, device=CPU)
    theirs = oracle_logits(model.base, TOKENS)
    close = {"rtol": 1e-4, "atol": 1e-4 * theirs.abs().max().item()}
    torch.testing.assert_close(run_whole(loaded, TOKENS), theirs, **close)
    for logits in run_ragged(loaded, [TOKENS, TOKENS], 4, random.Random(1)):
        torch.testing.assert_close(logits, theirs, **close)


def test_an_adapter_of_the_code(code_model: tuple[CodeModel, Path], tmp_path: Path) -> None:
    """On the projection of q, k and v, it is what the weights with its product added are."""
    model, folder = code_model
    generator = torch.Generator().manual_seed(3)
    tensors = load_file(folder / "model.safetensors")
    rows, columns = tensors[f"{model.module}.weight"].shape
    down, up = (torch.randn(shape, generator=generator) for shape in ((2, columns), (rows, 2)))
    names = [f"base_model.model.{model.module}.lora_{part}.weight" for part in "AB"]
    (tmp_path / "adapter").mkdir()
    save_file(dict(zip(names, (down, up), strict=True)), tmp_path / "adapter" / "adapter_model.safetensors")
    target = model.module.rpartition(".")[2]
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": [target]}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "merged").mkdir()
    tensors[f"{model.module}.weight"] += up @ down
    save_file(tensors, tmp_path / "merged" / "model.safetensors")
    (tmp_path / "merged" / "config.json").write_bytes((folder / "config.json").read_bytes())
    loaded = load_model(folder, dtype=torch.float32, device=CPU)
    layout = base_layout(loaded, folder, dummy=False)
    bank = AdapterBank(layout, 1)
    bank.install(0, AdapterReader(layout, max_rank=8).read(str(tmp_path / "adapter")))
    adapted = AdaptedRun(loaded, bank, [0], [0]).extend([TOKENS])[0]
    merged = run_whole(load_model(tmp_path / "merged", dtype=torch.float32, device=CPU), TOKENS)
    torch.testing.assert_close(adapted, merged, rtol=1e-4, atol=1e-4 * merged.abs().max().item())
    assert (adapted - oracle_logits(model.base, TOKENS)).abs().max() > 0.05


def test_ranks_of_the_code_have_the_logits_of_one(code_model: tuple[CodeModel, Path]) -> None:
    model, folder = code_model
    config, theirs = read_model_config(folder), oracle_logits(model.base, TOKENS)

    def logits(ranks: Ranks) -> torch.Tensor:
        shard = Shard.of(config, ranks)
        return run_whole(load_model(folder, dtype=torch.float32, device=CPU, shard=shard), TOKENS)

    torch.testing.assert_close(run_ranks(2, logits)[0], theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())
    if model.grouped:
        with pytest.raises(
            ConfigError, match=r"does not divide .*2 KV heads, whose rows are among those of their queries"
        ):
            check_split(config, 6)


def test_qwen_1_ends_where_its_code_changes_attention(tmp_path: Path) -> None:
    assert read_model_config(write_code_model(CODE_MODELS["qwen"], tmp_path)).max_position_embeddings == 96


def test_a_head_of_an_adapter_in_place_of_one_with_a_bias_is_refused(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = LoraConfig(r=2, target_modules=["fc1"], modules_to_save=["lm_head"])
        get_peft_model(adaptable("phi"), options).save_pretrained(tmp_path / "adapter")
    layout = planned_layout(save("phi", tmp_path / "model"), torch.float32, dummy=False)
    with pytest.raises(
        AdapterError, match=r"its own weights of lm_head .* which a model whose head has a bias does not"
    ):
        AdapterReader(layout, max_rank=8).check(str(tmp_path / "adapter"))


def test_ling_1_is_a_qwen_2_moe_with_a_head_of_unit_columns(tmp_path: Path) -> None:
    """Whose shared expert counts in whole, not by a gate, which is a half for all tokens in the oracle."""
    config_class, model_class, changes = MODELS["qwen2_moe_plain"]
    fields = COMMON | changes | {"shared_expert_intermediate_size": 64, "norm_topk_prob": True}
    oracle = model_class(config_class(**fields, attn_implementation="eager", experts_implementation="eager")).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            parameter.normal_(0.0, 0.0 if "shared_expert_gate" in name else 0.25, generator=generator)
    oracle.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    kept = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    kept += ("intermediate_size", "moe_intermediate_size", "num_experts", "num_experts_per_tok", "norm_topk_prob")
    kept += ("max_position_embeddings", "rms_norm_eps")
    config = {key: config[key] for key in kept} | {
        "architectures": ["BailingMoeForCausalLM"],
        "model_type": "bailing_moe",
        "auto_map": {"AutoModelForCausalLM": "modeling_bailing_moe.BailingMoeForCausalLM"},
        "num_shared_experts": 2,
        "use_qkv_bias": True,
        "use_bias": False,
        "norm_head": True,
        "rope_theta": config["rope_parameters"]["rope_theta"],
        "first_k_dense_replace": 0,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name: tensor for name, tensor in tensors.items() if "_gate." not in name}
    for name in [name for name in tensors if ".q_proj." in name]:
        parts = [tensors.pop(name.replace("q_proj", f"{each}_proj")) for each in "qkv"]
        tensors[name.replace("q_proj", "query_key_value")] = torch.cat(parts)
    for name in [name for name in tensors if "shared_expert.down_proj" in name]:
        tensors[name] *= 0.5
    renamed = {"embed_tokens": "word_embeddings", "self_attn.o_proj": "attention.dense", "self_attn.": "attention."}
    for usual, own in (renamed | {"shared_expert.": "shared_experts."}).items():
        tensors = {name.replace(usual, own): tensor for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    with torch.no_grad():
        oracle.lm_head.weight /= oracle.lm_head.weight.norm(dim=0) + 1e-7
        theirs = oracle(torch.tensor([TOKENS])).logits[0]
    ours = run_whole(load_model(tmp_path, dtype=torch.float32, device=CPU), TOKENS)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())
