"""Adapters trained over a quantised base: what they compute there is what PEFT computes over what the base means."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from support.models.lora_driver import AdaptedRun
from support.models.lora_models import perturb
from support.models.quantised_llama import save_quantised
from torch import Tensor
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.loading.base_layout import base_layout
from rootgraft.engine.loading.load_model import load_model
from rootgraft.engine.loading.weight_forms import choose_weight_form
from rootgraft.lora.lora_step import AdapterBank
from rootgraft.lora.read_adapter import AdapterReader

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of importing it
    from peft import LoraConfig, get_peft_model

CPU: Final = torch.device("cpu")
TOKENS: Final = [5, 9, 60, 7, 33, 3, 41, 12]


def save_nf4(folder: Path) -> PreTrainedModel:
    """Let bitsandbytes write a tiny model in NF4 with scales quantised again; returns it as it is trained on.

    In training its products take the dequantised matrices. Others would rearrange what they are dequantised from, which
    DoRA in PEFT does not know, and round to bfloat16.
    """
    pytest.importorskip("bitsandbytes")
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "plain")
    nf4 = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    base = LlamaForCausalLM.from_pretrained(folder / "plain", dtype=torch.float32, quantization_config=nf4)
    base.save_pretrained(folder)
    return base.train()


def train(base: PreTrainedModel, folder: Path, use_dora: bool) -> tuple[Tensor, Tensor]:
    """Save a random adapter of all linear modules; returns the logits [T, V] without it and with it."""
    tokens = torch.tensor([TOKENS])
    options = LoraConfig(
        r=4, lora_alpha=16, target_modules="all-linear", use_dora=use_dora, init_lora_weights=False,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    with torch.no_grad():
        plain = base(tokens).logits[0]
        is_training = base.training
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trained: Any = get_peft_model(base, options).train(is_training)
            perturb(trained)
            trained.save_pretrained(folder)
        return plain, trained(input_ids=tokens).logits[0]


def served(folder: Path, adapter: Path) -> Tensor:
    """The logits [T, V] of the engine, which keeps the base as it would for a server."""
    form = choose_weight_form(EngineConfig(), CPU, torch.float32, folder)
    model = load_model(folder, dtype=torch.float32, device=CPU, weights=form)
    layout = base_layout(model, folder, dummy=False)
    bank = AdapterBank(layout, 1)
    bank.install(0, AdapterReader(layout, max_rank=8).read(str(adapter)))
    return AdaptedRun(model, bank, [0], [0]).extend([TOKENS])[0]


@pytest.mark.parametrize(
    ("form", "use_dora"),
    [
        ("nf4", False), ("nf4", True), ("gptq 4 bits", False), ("gptq 4 bits", True), ("gptq 3 bits", True),
        ("awq gemm", True), ("compressed-tensors w4a16", True), ("compressed-tensors fp8 channel", True),
        ("fp8 in blocks", True), ("modelopt nvfp4", True), ("bitsandbytes int8", True),
    ],
)  # fmt: skip
def test_an_adapter_is_as_it_was_trained(form: str, use_dora: bool, tmp_path: Path) -> None:
    torch.manual_seed(4)
    base = save_nf4(tmp_path) if form == "nf4" else save_quantised(form, tmp_path)
    plain, wanted = train(base, tmp_path / "adapter", use_dora)
    assert (wanted - plain).abs().max() > 0.1 * plain.abs().max()
    assert (served(tmp_path, tmp_path / "adapter") - wanted).abs().max() < 1e-4 * wanted.abs().max()
