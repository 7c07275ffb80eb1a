"""Checkpoints and adapters that name keys and tensors as their own code did (EXAONE 3.5)."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.paged_run import CPU, run_whole
from support.models.tiny_models import VOCAB, oracle_logits, save, tiny_model

from rootgraft.engine.errors import ModelError
from rootgraft.engine.loading.base_layout import base_layout
from rootgraft.engine.loading.load_model import load_model
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
