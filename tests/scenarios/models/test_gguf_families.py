"""GGUF files as llama.cpp's converter writes them, against the models in transformers that they were made from."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from unittest import mock

import gguf
import numpy as np
import pytest
import torch
from support.models.code_models import write_ling_1, write_ling_1_gguf
from support.models.gguf_files import gguf_architecture, gguf_name, write_gguf
from support.models.paged_run import CPU, run_whole
from support.models.tiny_models import MODELS, VOCAB, oracle_logits, save, tiny_model

from rootgraft.engine.checkpoint.gguf import GgufFile
from rootgraft.engine.checkpoint.model_config import Rope, YarnScaling
from rootgraft.engine.checkpoint.read_config import read_model_config
from rootgraft.engine.errors import ModelError
from rootgraft.engine.loading.base_layout import base_layout
from rootgraft.engine.loading.load_model import load_model
from rootgraft.engine.loading.weight_readers import GgufWeights
from rootgraft.kernels import ops
from rootgraft.kernels.expert_ops import expert_linear
from rootgraft.kernels.ops import QuantisedLinear
from rootgraft.kernels.quantised_weights import Format

# Those of the tiny models whose maths a GGUF file can say. (It has no query scale for Gemma: see below.)
WRITTEN = [
    "llama",
    "llama_tied",
    "llama_scaled",
    "llama_linear",
    "llama_biased",
    "qwen2",
    "qwen3",
    "smollm3",
    "gemma",
    "gemma2_plain",
    "gemma3_plain",
    "gemma4",
    "gemma4_same_values",
    "phi3",
    "phi3_partial",
    "mixtral_plain",
    "qwen2_moe_plain",
    "qwen3_moe_plain",
    "olmoe",
    "llama_yarn",
    "granite",
    "olmo2",
    "olmo3_plain",
    "glm4",
    "cohere",
    "cohere_normed",
    "cohere2",
    "exaone",
    "exaone4",
    "exaone4_full",
    "seed_oss",
    "starcoder2_plain",
    "ernie4_5",
    "hunyuan",
    "nemotron",
    "phi",
    "arcee",
    "deepseek_v2_plain",
    "deepseek_v3",
    "glm4_moe_lite",
    "ministral3",
    "glm",
    "glm4_moe",
    "bailing_moe_v2",
    "granite_moe",
    "gpt_oss_plain",
    "llama4_published",
    "lfm2",
    "lfm2_biased",
    "granite_hybrid",
    "granite_hybrid_mixture",
    "qwen3_5",
    "qwen3_next_plain",
    "qwen3_5_biased",
    "qwen3_5_moe",
    "falcon",
    "falcon_new",
    "falcon_new_one_norm",
    "bloom",
    "mpt",
    "cohere2_moe",
    "laguna",
    "laguna_elements",
    "step3p5",
]
# Of which a file has the MLP's gate and up apart, and not the folder.
MLP = ("gate_proj", "up_proj", "down_proj")
APART = ("granite_hybrid", "granite_hybrid_mixture")
NO_FLOATS = {"rope": None, "query_scaling": None, "mixture": None}
PROMPT = [(17 * index + index * index) % VOCAB for index in range(50)]


@pytest.mark.parametrize("name", WRITTEN)
def test_logits(name: str, tmp_path: Path) -> None:
    model = load_model(write_gguf(name, tmp_path / "model.gguf"), dtype=torch.float32, device=CPU)
    theirs = oracle_logits(name, PROMPT)
    torch.testing.assert_close(run_whole(model, PROMPT), theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())


@pytest.mark.parametrize(
    ("base", "name"), [("llama", "internlm2"), ("llama_linear", "internlm2"), ("qwen_as_code", "qwen")]
)
def test_logits_of_models_that_were_code(base: str, name: str, tmp_path: Path) -> None:
    model = load_model(write_gguf(base, tmp_path / "model.gguf", name_as=name), dtype=torch.float32, device=CPU)
    assert model.config.family == name
    theirs = oracle_logits(base, PROMPT)
    torch.testing.assert_close(run_whole(model, PROMPT), theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())


def test_logits_of_ling_1(tmp_path: Path) -> None:
    oracle = write_ling_1(tmp_path)
    model = load_model(write_ling_1_gguf(tmp_path, tmp_path / "model.gguf"), dtype=torch.float32, device=CPU)
    with torch.no_grad():
        theirs = oracle(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(run_whole(model, PROMPT), theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())


# Files of GLM-4.7-Flash are those of DeepSeek V3, which has other names for the same.
OTHERWISE = ("llama_scaled", "step3p5", "exaone4_full", "glm4_moe_lite", *APART)


@pytest.mark.parametrize("name", [name for name in WRITTEN if name not in OTHERWISE])
def test_same_config_as_from_the_folder(name: str, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    from_folder = read_model_config(save(name, tmp_path / "hf"))
    from_file = read_model_config(write_gguf(name, tmp_path / "model.gguf"))
    assert from_file.eos_token_ids == (2, 5)
    # A file keeps its floats in 32 bits.
    floats = ("norm_eps", "attention_scale", "embedding_scale", "residual_scale", "logit_scale")
    exact = {name: getattr(from_folder, name) for name in floats}
    assert {name: getattr(from_file, name) for name in floats} == pytest.approx(exact)
    thetas = [[layer.rope and layer.rope.theta for layer in config.layers] for config in (from_file, from_folder)]
    assert thetas[0] == pytest.approx(thetas[1])
    exact["prediction_layers"] = from_folder.prediction_layers  # which a file leaves out
    assert replace(from_file, eos_token_ids=(2,), layers=from_folder.layers, **exact) == from_folder
    for ours, theirs in zip(from_file.layers, from_folder.layers, strict=True):
        assert replace(ours, **NO_FLOATS) == replace(theirs, **NO_FLOATS)
        assert ours.rope is None or rounded(ours.rope) == rounded(theirs.rope)
        assert (ours.query_scaling is None) is (theirs.query_scaling is None)
        if ours.query_scaling is not None and theirs.query_scaling is not None:
            assert ours.query_scaling.beta == pytest.approx(theirs.query_scaling.beta)
            assert replace(ours.query_scaling, beta=1.0) == replace(theirs.query_scaling, beta=1.0)
        if ours.mixture is not None and theirs.mixture is not None:
            assert ours.mixture.scale == pytest.approx(theirs.mixture.scale)
            names = replace(theirs.mixture.names, is_split=theirs.mixture.names.storage != "modules")
            assert replace(ours.mixture, scale=1.0) == replace(theirs.mixture, scale=1.0, names=names)


@pytest.mark.parametrize("name", APART)
def test_a_file_with_gate_and_up_apart_says_the_same_of_all_else(name: str, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    from_folder = read_model_config(save(name, tmp_path / "hf"))
    file = GgufFile.open(write_gguf(name, tmp_path / "model.gguf"))
    from_file = read_model_config(file)
    assert [layer.recurrent for layer in from_file.layers] == [layer.recurrent for layer in from_folder.layers]
    assert [layer.rope is None for layer in from_file.layers] == [layer.rope is None for layer in from_folder.layers]
    assert from_file.intermediate_size == from_folder.intermediate_size
    for ours, theirs in zip(from_file.layers, from_folder.layers, strict=True):
        names = None if theirs.mixture is None else replace(theirs.mixture.names, is_split=True, shared_modules=MLP)
        assert ours.mixture == (theirs.mixture and replace(theirs.mixture, names=names))
    file.metadata.pop("granitehybrid.attention.scale")
    with pytest.raises(ModelError, match=r"attention\.scale must be set, as in files of Granite"):
        read_model_config(file)


def rounded(rope: Rope) -> Rope:
    """Without its base, and with factors that a file says in 32 bits rounded."""
    scaling = rope.scaling
    if isinstance(scaling, YarnScaling):
        scaling = replace(scaling, score_factor=round(scaling.score_factor, 5))
    return replace(rope, theta=1.0, scaling=scaling)


@pytest.mark.parametrize("length", [24, 40])
def test_longrope(length: int, tmp_path: Path) -> None:
    model = load_model(write_gguf("phi3_longrope", tmp_path / "model.gguf"), dtype=torch.float32, device=CPU)
    assert model.config.rope_switch == 24 and model.long_offset == 128
    theirs = oracle_logits("phi3_longrope", PROMPT[:length])
    ours = run_whole(model, PROMPT[:length], offset=model.long_offset * (length > 24))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())


@pytest.mark.parametrize(
    ("architecture", "key"), [("qwen2", "qwen2vl"), ("qwen3", "qwen3vl"), ("qwen3_moe_plain", "qwen3vlmoe")]
)
def test_language_models_of_multimodal_files(architecture: str, key: str, tmp_path: Path) -> None:
    """Sections of the rotary embedding and layers that take images bear on no text."""
    extra = {"rope.dimension_sections": [2, 1, 1, 0], **({"n_deepstack_layers": 3} if key != "qwen2vl" else {})}
    model = load_model(
        write_gguf(architecture, tmp_path / "m.gguf", name_as=key, extra=extra), dtype=torch.float32, device=CPU
    )
    theirs = oracle_logits(architecture, PROMPT)
    torch.testing.assert_close(run_whole(model, PROMPT), theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"add_key_length_mla": None}, "attention.key_length_mla must be an integer from 17"),
        ({"add_expert_gating_func": lambda writer, _: writer.add_uint32("deepseek2.expert_gating_func", 3)}, "1 to 2"),
        (
            {
                "add_expert_group_count": None,
                "add_expert_count": lambda writer, _: writer.add_uint32("deepseek2.expert_count", 65),
            },
            "expert_group_count must be set for so many experts",
        ),
        ({"add_rope_scaling_yarn_log_mul": None}, "rope.scaling.yarn_log_multiplier must be a number above 0"),
    ],
)
def test_older_files_of_latent_attention_are_refused_by_name(written, message: str, tmp_path: Path) -> None:
    """They lack what the answers depend on; before llama.cpp split ``kv_b_proj``, the head sizes too."""
    with contextlib.ExitStack() as patches:
        for name, write in written.items():
            write = write or (lambda _, __: None)
            patches.enter_context(mock.patch.object(gguf.GGUFWriter, name, write))
        path = write_gguf("deepseek_v3", tmp_path / "model.gguf")
    with pytest.raises(ModelError, match=message):
        read_model_config(path)


def test_parts_of_a_matrix_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    add = gguf.GGUFWriter.add_tensor

    def cut(writer: gguf.GGUFWriter, name: str, tensor: np.ndarray) -> None:
        if name != "blk.1.attn_v_b.weight":
            add(writer, name, tensor)

    with mock.patch.object(gguf.GGUFWriter, "add_tensor", cut):
        path = write_gguf("deepseek_v3", tmp_path / "model.gguf")
    with pytest.raises(ModelError, match=r"attn_k_b.weight .* and blk.1.attn_v_b.weight \(\) do not fit together"):
        load_model(path, dtype=torch.float32, device=CPU)


def test_early_files_of_qwen3_next(tmp_path: Path) -> None:
    """They have q, k, v and gates in one tensor, as published."""
    with mock.patch("support.models.gguf_files._add_grouped", write_whole):
        path = write_gguf("qwen3_next_plain", tmp_path / "model.gguf")
    theirs = oracle_logits("qwen3_next_plain", PROMPT)
    ours = run_whole(load_model(path, dtype=torch.float32, device=CPU), PROMPT)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())


def write_whole(writer: gguf.GGUFWriter, key: str, tensor: torch.Tensor, config: object) -> None:
    writer.add_tensor(gguf_name(key, "qwen3next"), tensor.numpy())


def test_gates_of_qwen3_next_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    file = GgufFile.open(write_gguf("qwen3_next_plain", tmp_path / "model.gguf"))
    file.tensors.pop("blk.2.attn_gate.weight")
    with pytest.raises(ModelError, match=r"blk\.2\.attn_qkv\.weight .* and blk\.2\.attn_gate\.weight \(\) do not fit"):
        GgufWeights(file, read_model_config(file))


def test_tensors_named_by_llama_cpp() -> None:
    """The names that the test's writer gives are those of llama.cpp's own table."""
    for name in WRITTEN:
        model = tiny_model(name)
        architecture = gguf_architecture(model)
        if architecture not in gguf.MODEL_ARCH_NAMES.values():
            assert architecture in ("laguna", "cohere2moe")  # newer than the package
            continue
        number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
        table = gguf.get_tensor_name_map(number, model.config.num_hidden_layers)
        for key in model.state_dict():
            is_split = ".experts." in key or ".shared_mlp." in key
            is_split |= architecture == "bailingmoe2" and any(f".{each}_proj." in key for each in "qkv")
            if not is_split and (key != "lm_head.weight" or not model.config.tie_word_embeddings):
                looked_up = key.removeprefix("transformer.") if architecture == "bloom" else converted(key)
                assert table.get_name(looked_up, (".weight", ".bias")) == gguf_name(key, architecture)


def converted(key: str) -> str:
    """The name of a tensor in transformers 5 as llama.cpp's converter looks it up."""
    key = (
        key.replace("dt_bias", "dt_proj.bias")
        .replace("e_score_correction_bias", "e_score_correction.bias")
        .replace("moe.router.", "moe.router.layer.")
    )
    return f"{key}.weight" if key.endswith(("sinks", "layer_scalar")) else key


def test_query_scale_of_the_largest_gemmas(tmp_path: Path) -> None:
    """A GGUF file does not say it: like llama.cpp, by the number of layers of Gemma 2 27B."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "gemma2")
    writer.add_context_length(64)
    writer.add_embedding_length(48)
    writer.add_block_count(46)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tensor("token_embd.weight", torch.zeros(10, 48).numpy())
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    assert read_model_config(path).attention_scale == pytest.approx(12**-0.5)


def test_stacked_experts_are_named_by_llama_cpp(tmp_path: Path) -> None:
    names = {tensor.name for tensor in gguf.GGUFReader(write_gguf("qwen3_moe_plain", tmp_path / "model.gguf")).tensors}
    for kind in (gguf.MODEL_TENSOR.FFN_GATE_EXP, gguf.MODEL_TENSOR.FFN_UP_EXP, gguf.MODEL_TENSOR.FFN_DOWN_EXP):
        assert f"{gguf.TENSOR_NAMES[kind].format(bid=1)}.weight" in names


def test_experts_in_quantised_blocks(tmp_path: Path) -> None:
    """Each expert keeps its part of the stacked tensor's blocks."""
    path = tmp_path / "model.gguf"
    kept, add = {}, gguf.GGUFWriter.add_tensor

    def quantised(writer: gguf.GGUFWriter, name: str, tensor: np.ndarray) -> None:
        if "_exps." not in name or tensor.shape[-1] % 32:
            return add(writer, name, tensor)
        raw = gguf.quants.quantize(tensor, gguf.GGMLQuantizationType.Q8_0)
        kept[name] = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q8_0)
        return add(writer, name, raw, raw_dtype=gguf.GGMLQuantizationType.Q8_0)

    with mock.patch.object(gguf.GGUFWriter, "add_tensor", quantised):
        write_gguf("qwen3_moe_plain", path)
    assert kept
    model = load_model(path, dtype=torch.float32, device=CPU, weights="stored")
    plain = load_model(path, dtype=torch.float32, device=CPU)
    down = model.layers[1].mlp.down.weights
    assert isinstance(down.first, QuantisedLinear) == (ops.native_kernels() is not None)
    x, experts = torch.randn(3, 2, 32), torch.tensor([[5, 0], [1, 2], [4, 3]], dtype=torch.int32)
    expected = torch.einsum("tki,tkhi->tkh", x, torch.from_numpy(kept["blk.1.ffn_down_exps.weight"])[experts.long()])
    torch.testing.assert_close(expert_linear(x, down, experts), expected, rtol=1e-3, atol=1e-3)
    ours, theirs = run_whole(model, PROMPT), run_whole(plain, PROMPT)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=2e-3 * theirs.abs().max().item())


@pytest.mark.skipif(ops.native_kernels() is None, reason="no compiler")
def test_gates_of_experts_in_another_type_than_their_factors_stay_in_it(tmp_path: Path) -> None:
    """As some mixtures of K-quants have them: gate and up are one product nevertheless, and nothing is widened."""
    path, add = tmp_path / "model.gguf", gguf.GGUFWriter.add_tensor
    kinds = {"gate_exps": "Q8_0", "up_exps": "Q4_0", "down_exps": "Q5_0"}

    def quantised(writer: gguf.GGUFWriter, name: str, tensor: np.ndarray) -> None:
        kind = next((gguf.GGMLQuantizationType[kind] for words, kind in kinds.items() if words in name), None)
        if kind is None:
            return add(writer, name, tensor)
        return add(writer, name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)

    *classes, sizes = MODELS["qwen3_moe_plain"]
    wide = {"qwen3_moe_wide": (*classes, {**sizes, "hidden_size": 64})}
    with mock.patch.object(gguf.GGUFWriter, "add_tensor", quantised), mock.patch.dict(MODELS, wide):
        write_gguf("qwen3_moe_wide", path)
    model = load_model(path, dtype=torch.float32, device=CPU, weights="stored_widened")
    assert not model.widened
    mixture = model.layers[1].mlp
    assert [part.first.format.unarranged for _, part in mixture.active] == [
        Format.BYTES, Format.SYMMETRIC, Format.SYMMETRIC_5_BITS,
    ]  # fmt: skip
    shapes = base_layout(model, GgufFile.open(path), dummy=False).projections  # as adapters on experts find them
    assert {len(each.modules): each.width for each in shapes if each.place is not None} == {2: 64, 1: 32}
    plain = load_model(path, dtype=torch.float32, device=CPU)
    assert torch.equal(run_whole(model, PROMPT), run_whole(plain, PROMPT))


@pytest.mark.parametrize(
    ("name", "kind", "of_gates"),
    [
        ("qwen3_5", "Q8_0", "Q8_0"),
        ("qwen3_5", "Q4_0", "Q4_0"),
        ("qwen3_next_plain", "Q8_0", "Q8_0"),
        ("qwen3_next_plain", "Q4_0", "Q8_0"),
    ],
)
def test_blocks_of_reordered_heads(name: str, kind: str, of_gates: str, tmp_path: Path) -> None:
    """Rows in blocks change places; a matrix whose columns do, or whose parts have two types, is widened."""
    path = tmp_path / "model.gguf"
    add = gguf.GGUFWriter.add_tensor

    def quantised(writer: gguf.GGUFWriter, name: str, tensor: np.ndarray) -> None:
        if tensor.ndim != 2 or tensor.shape[-1] % 32 or "nextn" in name or "conv1d" in name:
            return add(writer, name, tensor)
        number = gguf.GGMLQuantizationType[of_gates if "attn_gate" in name else kind]
        return add(writer, name, gguf.quants.quantize(tensor, number), raw_dtype=number)

    with mock.patch.object(gguf.GGUFWriter, "add_tensor", quantised):
        write_gguf(name, path)
    stored, plain = (
        run_whole(load_model(path, dtype=torch.float32, device=CPU, weights=form), PROMPT)
        for form in ("stored", "plain")
    )
    torch.testing.assert_close(stored, plain, rtol=1e-3, atol=5e-3 * plain.abs().max().item())


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"ssm.inner_size": 127}, "ssm.inner_size must be a multiple of ssm.time_step_rank 4"),
        (
            {"attention.recurrent_layers": [True]},
            "attention.recurrent_layers must be a list with a flag for each layer",
        ),
        ({"nextn_predict_layers": 4}, "block_count must be an integer from 5"),
    ],
)
def test_wrong_shapes_of_delta_nets_are_refused_by_name(extra: dict, message: str, tmp_path: Path) -> None:
    file = GgufFile.open(write_gguf("qwen3_5", tmp_path / "model.gguf"))
    for key, value in extra.items():
        file.metadata[f"qwen35.{key}"] = np.array(value) if isinstance(value, list) else value
    with pytest.raises(ModelError, match=message):
        read_model_config(file)


def test_files_of_falcon_rw_are_refused(tmp_path: Path) -> None:
    """Their MLP is behind attention, with a norm of its own, and their scores have a bias that no key names."""
    add = gguf.GGUFWriter.add_tensor

    def with_norm(writer: gguf.GGUFWriter, name: str, tensor: np.ndarray) -> None:
        add(writer, name, tensor)
        if ".attn_norm." in name:
            add(writer, name.replace("attn_norm", "ffn_norm"), tensor)

    with mock.patch.object(gguf.GGUFWriter, "add_tensor", with_norm):
        path = write_gguf("falcon", tmp_path / "model.gguf")
    with pytest.raises(ModelError, match=r"does not use: blk\.0\.ffn_norm\.bias, blk\.0\.ffn_norm\.weight"):
        load_model(path, dtype=torch.float32, device=CPU)
