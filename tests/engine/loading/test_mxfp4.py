"""Experts in MXFP4, gpt-oss' published form: exact, by transformers' own decoder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.lockstep_ranks import run_ranks
from support.models.paged_run import CPU, run_whole
from support.models.tiny_models import COMMON
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from rootgraft.engine.checkpoint.read_config import read_model_config
from rootgraft.engine.errors import ModelError
from rootgraft.engine.loading.load_model import load_model
from rootgraft.engine.loading.mxfp4 import decode_mxfp4
from rootgraft.engine.loading.shards import Shard
from rootgraft.engine.loading.weight_forms import WeightForm
from rootgraft.kernels.collectives import Alone, Ranks
from rootgraft.kernels.grouped_weights import GroupedLinear, NumberForm
from rootgraft.kernels.layouts.packed_weights import Format, QuantisedLinear

EXPERTS = ("gate_up_proj", "down_proj")
TOKENS = [5, 9, 100, 7, 64, 3]


def random_blocks(experts: int, rows: int, width: int) -> tuple[Tensor, Tensor]:
    blocks = torch.randint(0, 256, (experts, rows, width // 32, 16), dtype=torch.uint8)
    return blocks, torch.randint(118, 124, blocks.shape[:3], dtype=torch.uint8)


def test_values_are_those_of_transformers() -> None:
    blocks, scales = random_blocks(3, 10, 96)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    ours = torch.stack([decode_mxfp4(*each).T for each in zip(blocks, scales, strict=True)])
    assert torch.equal(ours, expected)
    assert torch.equal(ours, ours.bfloat16().float())


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """The same model with experts in MXFP4, and with what they decode to."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    config = GptOssConfig(
        **COMMON | sizes | {"num_attention_heads": 8, "num_key_value_heads": 4},
        num_local_experts=3,
        num_experts_per_tok=2,
    )
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    GptOssForCausalLM(config).save_pretrained(plain)
    tensors = load_file(plain / "model.safetensors")
    stored = dict(tensors)
    for name in list(tensors):
        if name.endswith(EXPERTS):
            _, width, rows = tensors[name].shape
            blocks, scales = random_blocks(3, rows, width)
            tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
            del stored[name]
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    packed.mkdir()
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, packed / "model.safetensors", metadata={"format": "pt"})
    written = json.loads((plain / "config.json").read_text())
    written["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (packed / "config.json").write_text(json.dumps(written))
    return plain, packed


def test_a_checkpoint_in_mxfp4_is_the_one_it_decodes_to(folders: tuple[Path, Path]) -> None:
    plain, packed = (load_model(folder, dtype=torch.float32, device=CPU) for folder in folders)
    assert torch.equal(run_whole(packed, TOKENS), run_whole(plain, TOKENS))


def test_experts_are_kept_in_their_four_bits_for_a_gpu(folders: tuple[Path, Path]) -> None:
    """Gate and up, which the checkpoint has by turns, one below the other."""
    plain, packed = folders
    model = load_model(packed, dtype=torch.float32, device=CPU, weights="grouped")
    forms = {each.form.numbers for each in model.weights if isinstance(each, GroupedLinear)}
    assert forms == {NumberForm.E2M1}
    expected = run_whole(load_model(plain, dtype=torch.float32, device=CPU), TOKENS)
    torch.testing.assert_close(run_whole(model, TOKENS), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("exponent", [None, 90, 160])
def test_experts_are_kept_in_their_four_bits_on_a_cpu(exponent: int | None, folders: tuple[Path, Path]) -> None:
    """With the bits of the plain form; where a scale does not fit half precision, experts are widened."""
    _, packed = folders
    if exponent is not None:
        file = packed / "model.safetensors"
        tensors = load_file(file)
        for name in tensors:
            if name.endswith("_scales"):
                tensors[name][1, 3] = exponent
        save_file(tensors, file, metadata={"format": "pt"})
    model, plain = (
        load_model(packed, dtype=torch.bfloat16, device=CPU, weights=form) for form in ("stored_widened", "plain")
    )
    kept = {each.format.unarranged for each in model.weights if isinstance(each, QuantisedLinear)}
    assert kept == ({Format.FLOAT4} if exponent is None else set())
    assert torch.equal(run_whole(model, TOKENS), run_whole(plain, TOKENS))


@pytest.mark.parametrize(("size", "form"), [(2, "stored_widened"), (2, "grouped"), (4, "stored_widened")])
def test_ranks_have_the_logits_of_one(size: int, form: WeightForm, folders: tuple[Path, Path]) -> None:
    """Each keeps its inner columns of an expert in four bits; where a block is cut, the experts' down is widened."""
    config = read_model_config(folders[1])

    def compute(ranks: Ranks) -> tuple[Tensor, int]:
        shard = None if ranks.size == 1 else Shard.of(config, ranks)
        model = load_model(folders[1], dtype=torch.float32, device=CPU, weights=form, shard=shard)
        kept = sum(isinstance(each, QuantisedLinear | GroupedLinear) for each in model.weights)
        return run_whole(model, TOKENS), kept

    expected, of_all = compute(Alone())
    logits, kept = run_ranks(size, compute)[0]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    assert kept == (of_all if size == 2 else of_all // 2)


def test_what_lacks_a_part_is_refused(folders: tuple[Path, Path]) -> None:
    file = folders[1] / "model.safetensors"
    tensors = load_file(file)
    scales = "model.layers.1.mlp.experts.down_proj_scales"
    save_file({name: tensor for name, tensor in tensors.items() if name != scales}, file)
    with pytest.raises(ModelError, match="down_proj in MXFP4 lacks its blocks or its scales"):
        load_model(folders[1], dtype=torch.float32, device=CPU)
    save_file(tensors | {scales: tensors[scales][:, :, :0].contiguous()}, file)
    with pytest.raises(ModelError, match="down_proj in MXFP4 has blocks"):
        load_model(folders[1], dtype=torch.float32, device=CPU)


def test_other_quantisation_is_refused_by_name(folders: tuple[Path, Path]) -> None:
    config = folders[1] / "config.json"
    written = json.loads(config.read_text())
    config.write_text(json.dumps(written | {"quantization_config": {"quant_method": "hqq"}}))
    with pytest.raises(ModelError, match=r"quantization_config: quant_method 'hqq' is not supported"):
        read_model_config(folders[1])
