"""What is refused by name where the transformers library computes, and which implementation computes what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.models.library_models import (
    MODELS,
    VOCAB,
    library_logits,
    make_library_adapter,
    save_library_model,
)
from support.models.paged_run import CPU, run_whole
from support.models.tiny_llama import save_tiny_llama

from rootgraft.engine.errors import ModelError, UnknownArchitecture
from rootgraft.engine.loading.model_impl import load_by
from rootgraft.engine.models.decoder import DecoderModel
from rootgraft.engine.models.model import Model
from rootgraft.engine.models.transformers.load_transformers_model import load_transformers_model
from rootgraft.engine.models.transformers.transformers_model import TransformersModel
from rootgraft.lora.errors import AdapterError
from rootgraft.lora.read_adapter import AdapterReader

GPT2 = "GPT2LMHeadModel"
PROMPT = [5, 93, 3, 77, 12, 54, 2, 8, 31]


def load(folder: Path, model_impl: str = "transformers", **options: Any) -> Model:
    fields = {"dtype": torch.float32, "device": CPU, "max_positions": None, "dummy": False, "weights": "plain"}
    return load_by(model_impl, folder, **fields | options)


def written(folder: Path, **changes: Any) -> Path:
    """GPT-2 with other keys in its config; None leaves one out."""
    save_library_model(GPT2, folder)
    file = folder / "config.json"
    fields = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in fields.items() if value is not None}))
    return folder


CONFIGS = {
    "no class": ({"architectures": ["Gpt9LMHeadModel"]}, "has no causal language model .*Gpt9LMHeadModel"),
    "code of its own": (
        {"architectures": ["MyModel"], "model_type": "mine", "auto_map": {"AutoModelForCausalLM": "code.MyModel"}},
        "code from the model's repository is never run",
    ),
    "an encoder": ({"architectures": ["BertForMaskedLM"], "model_type": "bert"}, "has no causal language model"),
    "encoder and decoder": ({"is_encoder_decoder": True}, "is_encoder_decoder = True .*: encoders are not supported"),
    "cross attention": ({"add_cross_attention": True}, "cross attention is not supported"),
    "vision": ({"vision_config": {"hidden_size": 4}}, "vision_config = .* multimodal"),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, "quantised weights are not supported there"),
    "layers of its own kind": ({"layer_types": ["linear_attention", "full_attention"]}, "layers of linear_attention"),
    "no length": ({"n_positions": 0}, "max_position_embeddings of GPT2LMHeadModel must be a whole number above 0"),
    "a wrong type": ({"n_layer": "two"}, "transformers refuses it"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_is_refused(case: str, tmp_path: Path) -> None:
    changes, message = CONFIGS[case]
    with pytest.raises(ModelError, match=message):
        load(written(tmp_path, **changes))


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "BloomForCausalLM": ({"n_layer": 1, "hidden_size": 32, "n_head": 2}, "computes its attention outside"),
    "FalconForCausalLM": ({"num_hidden_layers": 1, "hidden_size": 32}, "computes its attention outside"),
    "MambaForCausalLM": ({"num_hidden_layers": 1, "hidden_size": 32}, "layers of linear_attention"),
    "Llama4ForCausalLM": ({}, "layers of chunked_attention"),
    "Qwen3NextForCausalLM": ({}, "layers of linear_attention"),
    "Lfm2ForCausalLM": ({"hidden_size": 32, "num_attention_heads": 2, "layer_types": ["conv"]}, "layers of conv"),
    "DogeForCausalLM": ({"hidden_size": 32, "num_attention_heads": 2}, "mask or a bias of its own"),
    "DiffLlamaForCausalLM": ({"hidden_size": 32, "num_attention_heads": 2}, "interface 2 times, from 1 modules"),
    "BertLMHeadModel": ({"hidden_size": 32, "num_attention_heads": 2}, "sees later tokens|neither causal"),
}
_SMALL = {"vocab_size": VOCAB, "num_hidden_layers": 1, "intermediate_size": 32, "num_key_value_heads": 2}


@pytest.mark.parametrize("name", OTHERS)
def test_a_class_is_refused(name: str, tmp_path: Path) -> None:
    """With random weights: only its config is read."""
    changes, message = OTHERS[name]
    config = getattr(transformers, name).config_class(**(_SMALL if changes else {}) | changes)
    config.architectures = [name]
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=message):
        load(tmp_path, dummy=True)


def test_state_beside_attention_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Falcon H1 has recurrent states beside its attention: were its layers not known by name, its logits would tell."""
    monkeypatch.setattr("rootgraft.engine.models.transformers.transformers_config._LAYER_TYPES", {"hybrid"})
    config = transformers.FalconH1Config(
        **_SMALL, hidden_size=32, num_attention_heads=2, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8,
        mamba_d_state=8, architectures=["FalconH1ForCausalLM"], time_step_limit=(0.0, 10.0), pad_token_id=0,
    )  # fmt: skip
    model = transformers.FalconH1ForCausalLM(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.25, generator=generator)
    model.save_pretrained(tmp_path)
    with pytest.raises(
        ModelError, match=r"FalconH1ForCausalLM: .* carries more than keys and values from token to token"
    ):
        load(tmp_path)


def test_tensors_are_those_of_the_class(tmp_path: Path) -> None:
    file = save_library_model(GPT2, tmp_path) / "model.safetensors"
    tensors = load_file(file)
    name = "transformer.h.1.mlp.c_fc.bias"
    for changed, message in (
        ({key: value for key, value in tensors.items() if key != name}, f"missing tensors .*{name}"),
        (tensors | {"transformer.h.1.mlp.extra": torch.zeros(3)}, "unexpected tensors .*extra"),
        (tensors | {name: torch.zeros(3)}, "does not load|mismatched tensors"),
    ):
        save_file(changed, file, {"format": "pt"})
        with pytest.raises(ModelError, match=message):
            load(tmp_path)
    file.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="is a pickle"):
        load(tmp_path)


def test_forms_that_only_our_decoder_has(tmp_path: Path) -> None:
    folder = save_library_model(GPT2, tmp_path)
    with pytest.raises(ModelError, match="--quantization is for our own decoder"):
        load(folder, weights="int8_dynamic")


def test_auto_takes_ours_where_it_has_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llama, codegen = save_tiny_llama(tmp_path / "llama"), save_library_model("CodeGenForCausalLM", tmp_path / "codegen")
    assert isinstance(load(llama, "auto"), DecoderModel)
    assert isinstance(load(llama), TransformersModel)
    assert isinstance(load(codegen, "auto"), TransformersModel)
    with pytest.raises(UnknownArchitecture, match="CodeGenForCausalLM is not supported"):
        load(codegen, "rootgraft")
    with pytest.raises(UnknownArchitecture, match=r"Gpt9LMHeadModel is not supported\."):
        load(written(tmp_path / "unknown", architectures=["Gpt9LMHeadModel"]), "auto")
    monkeypatch.setattr("rootgraft.engine.loading.model_impl.find_spec", lambda name: None)
    for model_impl in ("auto", "transformers"):
        with pytest.raises(ModelError, match=r"Try: pip install 'rootgraft\[transformers\]'"):
            load(codegen, model_impl)


def test_a_llama_has_the_same_logits_by_both(tmp_path: Path) -> None:
    folder = save_tiny_llama(tmp_path)
    ours, theirs = (run_whole(load(folder, name), PROMPT[:4]) for name in ("rootgraft", "transformers"))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())


def test_longrope_ends_where_its_factors_change(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 100.0,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 40,
    }
    fields = {**MODELS["PhimoeForCausalLM"], "rope_parameters": rope | {"short_mscale": 1.0, "long_mscale": 1.0}}
    config = transformers.PhimoeConfig(**fields, architectures=["PhimoeForCausalLM"])
    config.save_pretrained(tmp_path)
    model = load_transformers_model(tmp_path, dtype=torch.float32, device=CPU, dummy=True)
    assert (model.config.max_position_embeddings, model.max_positions) == (40, 40)
    assert (
        load_transformers_model(tmp_path, dtype=torch.float32, device=CPU, dummy=True, max_positions=9).max_positions
        == 9
    )


def test_the_notice_says_what_computes(tmp_path: Path) -> None:
    model = load(save_library_model(GPT2, tmp_path))
    assert isinstance(model, TransformersModel)
    assert model.notice.startswith(
        f"Implementation: GPT2LMHeadModel of transformers {transformers.__version__}, slower"
    )
    assert "our tests do not compare it" not in model.notice


def test_bfloat16_stays_near(tmp_path: Path) -> None:
    model = load(save_library_model(GPT2, tmp_path), dtype=torch.bfloat16)
    ours, theirs = run_whole(model, PROMPT), library_logits(GPT2, PROMPT)
    assert ours.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(ours, theirs).min() > 0.99


def test_no_mask_is_made_in_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(save_library_model(GPT2, tmp_path))
    names = ("sdpa_mask", "eager_mask")
    for name in names:
        monkeypatch.setattr(transformers.masking_utils, name, lambda **_: pytest.fail("a mask was made"))
    assert model.head.config._attn_implementation not in transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    assert len(run_whole(model, PROMPT)) == len(PROMPT)


@pytest.mark.parametrize("options", [{"modules_to_save": ["ln_f"]}, {"bias": "all"}])
def test_weights_of_an_adapter_s_own_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    model = load(save_library_model(GPT2, tmp_path / "model"))
    assert isinstance(model, TransformersModel)
    folder = make_library_adapter(GPT2, tmp_path / "adapter", 0, **options)
    with pytest.raises(AdapterError, match=r"does not (support|have)"):
        AdapterReader(model.layout, max_rank=8).read(str(folder))


GEMMA3N = "Gemma3nForCausalLM"


def written_wrapper(folder: Path, **changes: Any) -> Path:
    """Gemma 3n as it is published: in a multimodal class, with K and V of layers that read those of others."""
    save_library_model(GEMMA3N, folder)
    (folder / "generation_config.json").unlink()
    tensors = load_file(folder / "model.safetensors")
    inner = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    unused = {f"model.language_model.layers.{index}.self_attn.k_proj.weight": torch.zeros(32, 64) for index in (3, 4)}
    towers = {f"model.{name}.weight": torch.zeros(4, 4) for name in ("vision_tower.stem", "embed_audio.projection")}
    save_file(inner | unused | towers, folder / "model.safetensors", {"format": "pt"})
    file = folder / "config.json"
    text = json.loads(file.read_text()) | {"eos_token_id": 7}
    del text["architectures"]
    whole = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n", "eos_token_id": [2, 5]}
    towers_of_config = {"vision_config": {"hidden_size": 4}, "audio_config": {"hidden_size": 4}}
    file.write_text(json.dumps({**whole, **towers_of_config, "text_config": text | changes}))
    return folder


def test_the_language_model_of_a_multimodal_class(tmp_path: Path) -> None:
    """Its towers are not loaded, and an adapter's part in them changes nothing."""
    model = load(written_wrapper(tmp_path / "model"), "auto")
    assert isinstance(model, TransformersModel)
    assert model.config.eos_token_ids == (2, 5)
    assert model.config.kv_sources == (0, 1, 2, 2, 1)
    theirs = library_logits(GEMMA3N, PROMPT)
    torch.testing.assert_close(run_whole(model, PROMPT, 4), theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())
    folder = make_library_adapter(GEMMA3N, tmp_path / "adapter", 0)
    file = folder / "adapter_model.safetensors"
    trained = {
        name.replace("model.layers", "model.language_model.layers"): tensor for name, tensor in load_file(file).items()
    }
    tower = "base_model.model.model.vision_tower.stem"
    save_file(trained | {f"{tower}.lora_A.weight": torch.ones(3, 4), f"{tower}.lora_B.weight": torch.ones(4, 3)}, file)
    read = AdapterReader(model.layout, max_rank=8).read(str(folder))
    assert read is not None


def test_a_multimodal_class_of_another_language_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"text_config: model_type .* gemma3n_text"):
        load(written_wrapper(tmp_path, model_type="gemma3_text"))
