"""Folders in Hugging Face format: what is loaded, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.paged_run import run_whole
from support.models.tiny_models import save
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from rootgraft.engine.checkpoint.read_config import read_model_config
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.errors import ModelError
from rootgraft.engine.loading.load_model import load_model
from rootgraft.engine.loading.tensor_names import expected_shapes
from rootgraft.engine.loading.weight_forms import choose_weight_form
from rootgraft.engine.models.decoder import DecoderModel

CPU = torch.device("cpu")
NORM = "model.layers.1.input_layernorm.weight"
PROMPT = [3, 5, 8, 13, 21, 34, 55]


@pytest.fixture(scope="module")
def source_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=61,
            hidden_size=24,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            tie_word_embeddings=False,
        )
    )


@pytest.fixture
def folder(source_model: LlamaForCausalLM, tmp_path: Path) -> Path:
    source_model.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("known", [True, False])
def test_names_of_tensors_are_quoted_shortened(folder: Path, known: bool) -> None:
    long = f"model.{'x' * 1_000_000}"
    rewrite(folder, {long: torch.zeros(1, dtype=torch.float32 if known else torch.int64)})
    with pytest.raises(ModelError) as caught:
        load(folder)
    assert "model.xxxx" in str(caught.value) and len(str(caught.value)) < 400


def load(folder: Path, **options: Any) -> DecoderModel:
    return load_model(folder, dtype=torch.float32, device=CPU, **options)


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rewrite(folder: Path, changes: dict[str, Tensor | None]) -> None:
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({name: value for name, value in tensors.items() if value is not None}, folder / "model.safetensors")


def weights(model: DecoderModel) -> list[Tensor]:
    layers = [norm for layer in model.layers for norm in (layer.mlp_norm.weight, layer.next_norm.weight)]
    probe = torch.eye(24)
    return [model.embedding, model.first_norm.weight, *layers, model.head(probe), model.layers[1].attention.qkv(probe)]


def assert_equal_weights(one: DecoderModel, other: DecoderModel) -> None:
    for left, right in zip(weights(one), weights(other), strict=True):
        assert torch.equal(left, right)


def test_fused_projections_hold_their_parts(folder: Path, source_model: LlamaForCausalLM) -> None:
    model, x = load(folder), torch.randn(5, 24)
    own = source_model.model.layers[1]
    q, k, v = (getattr(own.self_attn, f"{part}_proj")(x) for part in "qkv")
    torch.testing.assert_close(model.layers[1].attention.qkv(x), torch.cat((q, k, v), dim=1).detach())
    gate_up = torch.cat((own.mlp.gate_proj(x), own.mlp.up_proj(x)), dim=1).detach()
    torch.testing.assert_close(model.layers[1].mlp.gate_up(x), gate_up)


def test_shards(folder: Path, source_model: LlamaForCausalLM, tmp_path: Path) -> None:
    sharded = tmp_path / "sharded"
    source_model.save_pretrained(sharded, max_shard_size="8KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert_equal_weights(load(sharded), load(folder))


def test_weights_outlive_their_files(folder: Path) -> None:
    model, again = load(folder), load(folder)
    (folder / "model.safetensors").write_bytes(bytes((folder / "model.safetensors").stat().st_size))
    assert_equal_weights(model, again)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_stored_in_another_type(folder: Path, source_model: LlamaForCausalLM, dtype: torch.dtype) -> None:
    rewrite(folder, {name: value.to(dtype) for name, value in source_model.state_dict().items()})
    model = load(folder)
    assert model.dtype == torch.float32
    assert torch.equal(model.embedding, source_model.model.embed_tokens.weight.detach().to(dtype).float())


def test_computed_frequencies_in_old_checkpoints_are_ignored(folder: Path) -> None:
    rewrite(folder, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)})
    load(folder)


@pytest.mark.parametrize("name", ["gpt_neox", "gptj"])
def test_causal_masks_in_old_checkpoints_are_ignored(name: str, tmp_path: Path) -> None:
    folder = save(name, tmp_path)
    expected = run_whole(load(folder), PROMPT)
    block = "gpt_neox.layers.1.attention" if name == "gpt_neox" else "transformer.h.1.attn"
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()
    rewrite(folder, {f"{block}.bias": mask, f"{block}.masked_bias": torch.tensor(-1e9)})
    assert torch.equal(run_whole(load(folder), PROMPT), expected)


NF4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16"}


@pytest.mark.parametrize(
    "section",
    [
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, **NF4},
        {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True},
        {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": False},
        {"quant_method": "gptq", "bits": 4, "group_size": 128},
    ],
    ids=["nf4", "int8", "neither", "gptq"],
)
def test_a_merge_in_16_bits_may_keep_what_its_base_said(folder: Path, section: dict[str, Any]) -> None:
    """Which matrices are quantised, their tensors tell: here none is."""
    tokens = list(range(9))
    plain = run_whole(load(folder), tokens)
    form = choose_weight_form(EngineConfig(), CPU, torch.bfloat16, folder)
    change_config(folder, quantization_config=section)
    assert torch.equal(run_whole(load(folder), tokens), plain)
    assert choose_weight_form(EngineConfig(), CPU, torch.bfloat16, folder) == form


def test_tied_head(folder: Path, source_model: LlamaForCausalLM) -> None:
    change_config(folder, tie_word_embeddings=True)
    with pytest.raises(ModelError, match=r"ties lm_head\.weight to model\.embed_tokens\.weight"):
        load(folder)
    embedding = source_model.model.embed_tokens.weight.detach()
    rewrite(folder, {"lm_head.weight": embedding.clone()})
    beside = load(folder)
    rewrite(folder, {"lm_head.weight": None})
    assert_equal_weights(load(folder), beside)
    torch.testing.assert_close(beside.head(torch.eye(24)), embedding.T.contiguous())


def test_positions_of_the_rotary_table(folder: Path) -> None:
    assert load(folder).layers[0].attention.rope.cos_sin.shape == (32, 6)
    model = load(folder, max_positions=9)
    assert model.max_positions == 9
    tables = {layer.attention.rope.cos_sin.data_ptr() for layer in model.layers}
    assert len(tables) == 1 and model.layers[0].attention.rope.cos_sin.shape == (9, 6)


def test_dummy_needs_only_the_config(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    one, other = load(folder, dummy=True), load(folder, dummy=True)
    assert_equal_weights(one, other)
    assert one.embedding.std() > 0
    assert torch.equal(one.first_norm.weight, torch.ones(24))


def test_expected_shapes_are_those_of_transformers(folder: Path, source_model: LlamaForCausalLM) -> None:
    theirs = {name: tuple(value.shape) for name, value in source_model.state_dict().items()}
    assert expected_shapes(read_model_config(folder)) == theirs


def test_missing_tensor(folder: Path) -> None:
    rewrite(folder, {NORM: None})
    with pytest.raises(ModelError, match=f"lacks {NORM}"):
        load(folder)


def test_unexpected_tensors(folder: Path) -> None:
    rewrite(folder, {f"model.extra.{index}": torch.ones(1) for index in range(7)})
    with pytest.raises(ModelError, match=r"does not use: model\.extra\.0, .* and 2 more"):
        load(folder)


def test_wrong_shape(folder: Path) -> None:
    rewrite(folder, {NORM: torch.ones(25)})
    with pytest.raises(ModelError, match=rf"{NORM} has shape \(25,\), but the config requires \(24,\)"):
        load(folder)


@pytest.mark.parametrize("parts", [(48, 48, 192), (288,)])
def test_convolutions_of_olmo_hybrid_as_published_and_whole(parts: tuple[int, ...], tmp_path: Path) -> None:
    """One of q, one of k and one of v; transformers writes three parts of the same size."""
    folder = save("olmo_hybrid", tmp_path)
    expected = run_whole(load(folder), PROMPT)
    assert [len(part) for part in _convs(folder)] == [96, 96, 96]
    names = [f"{each}_conv1d" for each in "qkv"] if len(parts) == 3 else ["conv1d"]
    for index in (0, 2):
        prefix = f"model.layers.{index}.linear_attn"
        split = torch.cat(_convs(folder, index)).split(parts)
        left_out = {f"{prefix}.{each}_conv1d.weight": None for each in "qkv"}
        found = {f"{prefix}.{name}.weight": part.clone() for name, part in zip(names, split, strict=True)}
        rewrite(folder, left_out | found)
    assert torch.equal(run_whole(load(folder), PROMPT), expected)


def test_axk1_as_published(tmp_path: Path) -> None:
    """Without a correction of the router's scores, and with a norm behind dense MLPs, which has no effect."""
    folder = save("axk1", tmp_path)
    corrections = [f"model.layers.{index}.mlp.gate.e_score_correction_bias" for index in (1, 2)]
    rewrite(folder, {name: torch.zeros(12) for name in corrections})
    expected = run_whole(load(folder), PROMPT)
    unused = {"model.layers.0.post_mlp_layernorm.weight": torch.full((48,), 3.0)}
    rewrite(folder, dict.fromkeys(corrections) | unused)
    assert torch.equal(run_whole(load(folder), PROMPT), expected)
    rewrite(folder, {"model.layers.1.post_mlp_layernorm.weight": None})
    with pytest.raises(ModelError, match=r"lacks model.layers.1.post_mlp_layernorm.weight"):
        load(folder)


def test_gpt2_as_first_published(tmp_path: Path) -> None:
    """Without a prefix of its names, and with causal masks, in some files of bytes."""
    folder = save("gpt2", tmp_path)
    expected = run_whole(load(folder), PROMPT)
    stored = load_file(folder / "model.safetensors")
    assert stored["transformer.h.0.mlp.c_fc.weight"].shape == (96, 384)  # [in, out]
    masks = {
        "h.0.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8),
        "h.1.attn.bias": torch.ones(1, 1, 8, 8),
        "h.1.attn.masked_bias": torch.tensor(-1e4),
    }
    plain = {name.removeprefix("transformer."): tensor for name, tensor in stored.items()}
    save_file(plain | masks, folder / "model.safetensors")
    assert torch.equal(run_whole(load(folder), PROMPT), expected)
    rewrite(folder, {"wpe.weight": plain["wpe.weight"][:-1].contiguous()})
    with pytest.raises(ModelError, match=r"model.embed_positions.weight has shape \(127, 96\)"):
        load(folder)


def test_convolutions_of_olmo_hybrid_that_do_not_fit(tmp_path: Path) -> None:
    folder = save("olmo_hybrid", tmp_path)
    rewrite(folder, {"model.layers.0.linear_attn.k_conv1d.weight": torch.zeros(95, 1, 4)})
    with pytest.raises(ModelError, match=r"linear_attn.conv1d.weight has shape \(287, 1, 4\), but the config requires"):
        load(folder)
    rewrite(folder, {"model.layers.0.linear_attn.k_conv1d.weight": None})
    with pytest.raises(ModelError, match=r"lacks model.layers.0.linear_attn.conv1d.weight"):
        load(folder)


def _convs(folder: Path, index: int = 0) -> list[Tensor]:
    tensors = load_file(folder / "model.safetensors")
    return [tensors[f"model.layers.{index}.linear_attn.{each}_conv1d.weight"] for each in "qkv"]


def test_wrong_type(folder: Path) -> None:
    rewrite(folder, {NORM: torch.ones(24, dtype=torch.int8)})
    with pytest.raises(ModelError, match=f"{NORM} is stored as I8"):
        load(folder)


def test_truncated_file(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for length in (0, 5, 200, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
            load(folder)


def test_absurd_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        load(folder)


def test_same_tensor_in_two_shards(folder: Path) -> None:
    save_file({NORM: torch.ones(24)}, folder / "b.safetensors")
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    index = {"weight_map": {NORM: "a.safetensors", "lm_head.weight": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=rf"{NORM} appears twice, the second time in b\.safetensors"):
        load(folder)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("[", "is malformed"),
        ("{}", "is malformed"),
        ('{"weight_map": []}', "is malformed"),
        ('{"weight_map": {"a": {}}}', "is malformed"),
        ('{"weight_map": {"a": 5}}', "names 5"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "names '../model.safetensors'"),
        ('{"weight_map": {"a": "pytorch_model.bin"}}', "names 'pytorch_model.bin'"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "gone.safetensors cannot be read"),
    ],
)
def test_bad_index(folder: Path, index: str, message: str) -> None:
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=message):
        load(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(ModelError, match=f"{name} is a pickle"):
        load(folder)


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor"):
        load(folder)


def test_a_pickle_as_the_model(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"")
    with pytest.raises(ModelError, match=r"model\.pt is neither a folder"):
        load(tmp_path / "model.pt")
