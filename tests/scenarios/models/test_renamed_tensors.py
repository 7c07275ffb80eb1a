"""Checkpoints and adapters that name keys and tensors as their own code did (EXAONE 3.5, GLM-4)."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.lora_driver import AdaptedRun
from support.models.paged_run import CPU, run_whole
from support.models.tiny_models import VOCAB, oracle_logits, save, tiny_model

from rootgraft.engine.errors import ModelError
from rootgraft.engine.loading.base_layout import base_layout
from rootgraft.engine.loading.load_model import load_model
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
        get_peft_model(tiny_model("exaone"), options).save_pretrained(tmp_path / "class")
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


GLM_KEYS = {
    "num_hidden_layers": "num_layers",
    "intermediate_size": "ffn_hidden_size",
    "num_key_value_heads": "multi_query_group_num",
    "head_dim": "kv_channels",
    "max_position_embeddings": "seq_length",
    "rms_norm_eps": "layernorm_epsilon",
    "vocab_size": "padded_vocab_size",
    "attention_bias": "add_qkv_bias",
}
GLM_NAMES = (
    ("lm_head", "transformer.output_layer"),
    ("model.embed_tokens", "transformer.embedding.word_embeddings"),
    ("model.norm", "transformer.encoder.final_layernorm"),
    ("model.layers.", "transformer.encoder.layers."),
    ("self_attn.o_proj", "self_attention.dense"),
    ("mlp.gate_up_proj", "mlp.dense_h_to_4h"),
    ("mlp.down_proj", "mlp.dense_4h_to_h"),
)
FUSED = "transformer.encoder.layers.1.self_attention.query_key_value"


@pytest.fixture(scope="module")
def glm_code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GLM-4 as its code names keys and tensors, with one projection for q, k and v."""
    folder = save("glm", tmp_path_factory.mktemp("glm_code"))
    config = json.loads((folder / "config.json").read_text())
    ropes = config.pop("rope_parameters")
    config.pop("num_key_value_groups", None)
    config = {GLM_KEYS.get(key, key): value for key, value in config.items()}
    config |= {
        "architectures": ["ChatGLMModel"],
        "model_type": "chatglm",
        "auto_map": {"AutoModel": "modeling_chatglm.ChatGLMForConditionalGeneration"},
        "rope_ratio": ropes["rope_theta"] / 10_000,
        "multi_query_attention": True,
        "rmsnorm": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    for index in range(config["num_layers"]):
        prefix = f"model.layers.{index}.self_attn"
        for kind in ("weight", "bias"):
            parts = [tensors.pop(f"{prefix}.{name}_proj.{kind}", None) for name in "qkv"]
            if parts[0] is not None:
                tensors[f"{prefix}.query_key_value.{kind}".replace("self_attn", "self_attention")] = torch.cat(parts)
    for usual, own in GLM_NAMES:
        tensors = {name.replace(usual, own): tensor for name, tensor in tensors.items()}
    tensors["transformer.rotary_pos_emb.inv_freq"] = torch.ones(8)
    assert f"{FUSED}.weight" in tensors and not any("self_attn" in name for name in tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_the_code_of_glm_4_is_its_class(glm_code: Path) -> None:
    model = load_model(glm_code, dtype=torch.float32, device=CPU)
    torch.testing.assert_close(run_whole(model, TOKENS), oracle_logits("glm", TOKENS), rtol=1e-4, atol=1e-4)


def test_an_adapter_of_glm_4s_code(glm_code: Path, tmp_path: Path) -> None:
    """On the projection of q, k and v, it is what the weights with its product added are."""
    generator = torch.Generator().manual_seed(3)
    tensors = load_file(glm_code / "model.safetensors")
    rows, columns = tensors[f"{FUSED}.weight"].shape
    down, up = (torch.randn(shape, generator=generator) for shape in ((2, columns), (rows, 2)))
    names = [f"base_model.model.{FUSED}.lora_{part}.weight" for part in "AB"]
    (tmp_path / "adapter").mkdir()
    save_file(dict(zip(names, (down, up), strict=True)), tmp_path / "adapter" / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["query_key_value"]}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "merged").mkdir()
    tensors[f"{FUSED}.weight"] += up @ down
    save_file(tensors, tmp_path / "merged" / "model.safetensors")
    (tmp_path / "merged" / "config.json").write_bytes((glm_code / "config.json").read_bytes())
    model = load_model(glm_code, dtype=torch.float32, device=CPU)
    layout = base_layout(model, glm_code, dummy=False)
    bank = AdapterBank(layout, 1)
    bank.install(0, AdapterReader(layout, max_rank=8).read(str(tmp_path / "adapter")))
    adapted = AdaptedRun(model, bank, [0], [0]).extend([TOKENS])[0]
    merged = run_whole(load_model(tmp_path / "merged", dtype=torch.float32, device=CPU), TOKENS)
    torch.testing.assert_close(adapted, merged, rtol=1e-4, atol=1e-4 * merged.abs().max().item())
    assert (adapted - oracle_logits("glm", TOKENS)).abs().max() > 0.05
