"""Adapters on quantised bases: what they add to the base's own output is the exact low-rank part, as peft has it."""

from __future__ import annotations

import warnings
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from support.models.small_gguf import HIDDEN, METADATA, SHAPES, VOCAB, tensors, write
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from rootgraft.engine.loading import weight_forms
from rootgraft.engine.loading.base_layout import base_layout
from rootgraft.engine.loading.load_model import load_model
from rootgraft.engine.loading.weight_forms import WeightForm
from rootgraft.kernels import ops, quantised_weights
from rootgraft.lora.base_projections import BaseLayout
from rootgraft.lora.lora_step import AdapterBank
from rootgraft.lora.read_adapter import AdapterReader

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of importing it
    from peft import LoraConfig, PeftModel, get_peft_model

KINDS = gguf.GGMLQuantizationType
CPU = torch.device("cpu")
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MATRICES = [name for name, shape in SHAPES.items() if len(shape) == 2]
TOKENS = 9

pytestmark = pytest.mark.skipif(not quantised_weights.available(), reason="no compiler")


def transformers_copy(layout: BaseLayout) -> LlamaForCausalLM:
    """The base's matrices as its file holds them, dequantised, in transformers."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=METADATA["feed_forward_length"],
        num_hidden_layers=METADATA["block_count"],
        num_attention_heads=METADATA["attention.head_count"],
        num_key_value_heads=METADATA["attention.head_count_kv"],
    )
    model = LlamaForCausalLM(config)
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in LINEARS:
            module.weight.data.copy_(layout.read_weight(name))
    return model


def make_adapter(layout: BaseLayout, folder: Path, use_dora: bool) -> PeftModel:
    """A random adapter on all linears, saved to ``folder``."""
    torch.manual_seed(0)
    options = LoraConfig(
        r=5, lora_alpha=70, target_modules=LINEARS, use_dora=use_dora, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(transformers_copy(layout), options)
        for name, parameter in model.named_parameters():
            if "lora_magnitude" in name:
                parameter.data *= 0.5 + torch.rand_like(parameter)
        model.save_pretrained(folder)
    return model


def adapted(peft_model: PeftModel, module: str, x: Tensor, base: Tensor) -> Tensor:
    """[T, N]: ``gain * (base + x A^T B^T scale)``; the gain of DoRA is magnitude over norm of the changed weight."""
    layer = peft_model.base_model.model.get_submodule(module)
    delta = layer.get_delta_weight("default")
    y = base + x.float() @ delta.T
    if not layer.use_dora["default"]:
        return y
    magnitude = layer.lora_magnitude_vector["default"].weight
    return y * (magnitude / (layer.get_base_layer().weight + delta).norm(dim=1))


@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize(
    ("kind", "weights"),
    [
        (KINDS.Q4_1, "stored"),
        (KINDS.Q8_0, "stored"),
        (KINDS.Q4_1, "stored_both"),
        (KINDS.Q4_1, "int8_dynamic"),
        (KINDS.F32, "int8_weight_only"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
@torch.inference_mode()
def test_the_difference_is_the_low_rank_part(
    kind: gguf.GGMLQuantizationType,
    weights: WeightForm,
    use_dora: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weight_forms, "measure_few_rows", lambda *_: TOKENS)
    path = write(tmp_path / "model.gguf", tensors(), types=dict.fromkeys(MATRICES, kind))
    model = load_model(path, dtype=torch.bfloat16, device=CPU, weights=weights)
    layout = base_layout(model, path, dummy=False)
    with torch.inference_mode(False):
        oracle = make_adapter(layout, tmp_path / "adapter", use_dora)
    bank = AdapterBank(layout, 1)
    bank.install(0, AdapterReader(layout, max_rank=8).read(str(tmp_path / "adapter")))
    step = bank.step(np.zeros(TOKENS, np.int32))
    for part in model.projections[:-1]:
        assert isinstance(part.packed, ops.QuantisedLinear)
        x = torch.randn(TOKENS, part.packed.in_features).bfloat16()
        base, found = part(x, None, torch.float32), part(x, step, torch.float32)
        for module, plain, actual in zip(
            part.modules, base.split(part.sizes, 1), found.split(part.sizes, 1), strict=True
        ):
            expected = adapted(oracle, module, x, plain)
            change = (expected - plain).abs().max()
            assert change > 0.1 * plain.abs().max(), "the adapter does too little to prove anything"
            assert (actual - expected).abs().max() < 0.01 * change, module
