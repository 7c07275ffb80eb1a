"""Weights in MXFP8, MiniMax M3's published form: E4M3 with a power of two for each 32 inputs, exact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.paged_run import CPU, run_whole
from support.models.tiny_multimodal import save_multimodal
from torch import Tensor

from rootgraft.engine.errors import ModelError
from rootgraft.engine.loading.load_model import load_model

CONFIG = {"quant_method": "mxfp8", "activation_scheme": "dynamic", "weight_block_size": [1, 32]}
TOKENS = [5, 9, 100, 7, 64, 3, *range(20, 40)]
PROJECTION = "language_model.model.layers.0.self_attn.o_proj.weight"


def quantised(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers, stored exponents, and what they mean, 32 inputs of a row after the other; the last may be fewer."""
    values, meaning = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    blocks = [slice(start, start + 32) for start in range(0, weight.shape[1], 32)]
    exponents = torch.empty(len(weight), len(blocks), dtype=torch.uint8)
    for number, block in enumerate(blocks):
        power = (weight[:, block].abs().amax(1) / 448).log2().ceil()
        exponents[:, number] = (power + 127).to(torch.uint8)
        values[:, block] = (weight[:, block] / torch.exp2(power)[:, None]).to(torch.float8_e4m3fn)
        meaning[:, block] = values[:, block].float() * torch.exp2(power)[:, None]
    return values, exponents, meaning


def folders(tmp_path: Path) -> tuple[Path, Path, dict[str, Tensor]]:
    """A model whose projections are in MXFP8, those of its index too, the same with what they mean, and its tensors."""
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    save_multimodal("minimax_m3", plain, "old")
    tensors = load_file(plain / "model.safetensors")
    stored = dict(tensors)
    for name in list(tensors):
        is_expert = name.endswith((".w1.weight", ".w2.weight", ".w3.weight"))
        if name.startswith("language_model.model.layers.") and (is_expert or name.endswith("_proj.weight")):
            values, exponents, tensors[name] = quantised(tensors[name])
            stored |= {name: values, f"{name}_scale_inv": exponents}
    packed.mkdir()
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, packed / "model.safetensors", metadata={"format": "pt"})
    write_config(plain, packed, CONFIG)
    return plain, packed, stored


def write_config(plain: Path, packed: Path, section: dict[str, Any]) -> None:
    written = json.loads((plain / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(written | {"quantization_config": section}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_in_mxfp8_is_the_model_that_it_means(dtype: torch.dtype, tmp_path: Path) -> None:
    plain, packed, stored = folders(tmp_path)
    assert stored["language_model.model.layers.1.self_attn.index_q_proj.weight"].dtype is torch.float8_e4m3fn
    assert sum(tensor.dtype is torch.float8_e4m3fn for tensor in stored.values()) > 40
    logits = [run_whole(load_model(folder, dtype=dtype, device=CPU), TOKENS) for folder in (plain, packed)]
    assert torch.equal(*logits)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({f"{PROJECTION}_scale_inv": None}, "in the layout mxfp8 is malformed: weight_scale_inv is missing"),
        ({f"{PROJECTION}_scale_inv": torch.ones(48, 2, dtype=torch.uint8)}, r"U8 \[48, 2\]"),
        ({f"{PROJECTION}_scale_inv": torch.ones(48, 3)}, r"F32 \[48, 3\]"),
        ({f"{PROJECTION}_scale_inv": torch.full((48, 3), 255, dtype=torch.uint8)}, "numbers that are not finite"),
        ({PROJECTION: None}, "in the layout mxfp8 is malformed: weight is missing"),
    ],
)
def test_exponents_that_do_not_fit_are_refused(change: dict[str, Tensor | None], message: str, tmp_path: Path) -> None:
    _, packed, stored = folders(tmp_path)
    changed = {name: tensor for name, tensor in (stored | change).items() if tensor is not None}
    save_file(changed, packed / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=message):
        load_model(packed, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_block_size": [32, 32]}, r"weight_block_size must be \[1, 32\]"),
        ({"scale_fmt": "float32"}, "scale_fmt must be 'ue8m0'"),
        ({"fmt": "e5m2"}, "fmt must be 'e4m3'"),
        ({"moe_quant_algo": "NVFP4"}, "moe_quant_algo must be 'MXFP8'"),
    ],
)
def test_other_numbers_are_refused_by_name(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    plain, packed, _ = folders(tmp_path)
    write_config(plain, packed, CONFIG | change)
    with pytest.raises(ModelError, match=message):
        load_model(packed, dtype=torch.float32, device=CPU)
