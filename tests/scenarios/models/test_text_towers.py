"""The language model of multimodal checkpoints against transformers, which runs the whole model on text."""

from __future__ import annotations

import copy
import json
import random
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.lora_driver import AdaptedRun
from support.models.lora_models import LINEARS
from support.models.paged_run import CPU, run_ragged, run_whole
from support.models.tiny_models import VOCAB
from support.models.tiny_multimodal import MULTIMODAL, multimodal_logits, multimodal_model, save_multimodal
from torch import Tensor

from rootgraft.engine.checkpoint.read_config import config_end_tokens
from rootgraft.engine.errors import ModelError
from rootgraft.engine.loading.base_layout import base_layout
from rootgraft.engine.loading.load_model import load_model
from rootgraft.engine.models.decoder import DecoderModel
from rootgraft.lora.errors import AdapterError
from rootgraft.lora.lora_step import AdapterBank
from rootgraft.lora.read_adapter import AdapterReader

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of importing it
    from peft import LoraConfig, get_peft_model

RANDOM = random.Random(9)
PROMPTS = [[RANDOM.randrange(3, 120) for _ in range(length)] for length in (41, 1, 64)]


@pytest.fixture(scope="module", params=[(name, how) for name in MULTIMODAL for how in ("today", "old")], ids="-".join)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    name, spelling = request.param
    return name, save_multimodal(name, tmp_path_factory.mktemp(f"{name}_{spelling}"), spelling)


def load(folder: Path) -> DecoderModel:
    return load_model(folder, dtype=torch.float32, device=CPU)


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())


def test_logits_of_text(checkpoint: tuple[str, Path]) -> None:
    """Qwen's positions in three dimensions are one in text."""
    name, folder = checkpoint
    model = load(folder)
    for prompt in PROMPTS:
        assert_same(run_whole(model, prompt), multimodal_logits(multimodal_model(name), prompt))
    for prompt, logits in zip(PROMPTS, run_ragged(model, PROMPTS, 16, random.Random(3)), strict=True):
        assert_same(logits, multimodal_logits(multimodal_model(name), prompt))
    assert model.config.eos_token_ids == config_end_tokens(folder, VOCAB) == (2,)


def test_tensors_outside_the_known_towers_are_refused(checkpoint: tuple[str, Path], tmp_path: Path) -> None:
    _, folder = checkpoint
    tensors = load_file(folder / "model.safetensors") | {"model.other_tower.weight": torch.zeros(1)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(ModelError, match=r"does not use: model\.other_tower\.weight\."):
        load(tmp_path)


def test_an_adapter_trained_on_the_whole_model(checkpoint: tuple[str, Path], tmp_path: Path) -> None:
    """Its names are those of the whole model, in patterns too; what it changes in other towers bears on no text."""
    name, folder = checkpoint
    torch.manual_seed(4)
    llama4 = name == "llama4"
    prefix, mlp = ("language_model.model", "feed_forward") if llama4 else ("model.language_model", "mlp")
    options = LoraConfig(
        r=3,
        lora_alpha=9,
        target_modules=LINEARS,
        exclude_modules=r".*\.vision_tower\..*" if name == "gemma4" else None,  # whose modules PEFT does not take
        rank_pattern={f"{prefix}.layers.1.self_attn.q_proj": 5},
        alpha_pattern={f"{prefix}.layers.0.{mlp}.down_proj": 20},
        init_lora_weights=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        oracle = get_peft_model(copy.deepcopy(multimodal_model(name)), options).eval()
        oracle.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    assert any(f".{prefix}.layers." in key for key in stored)
    model = load(folder)
    layout = base_layout(model, folder, dummy=False)
    adapter = AdapterReader(layout, max_rank=8).read(str(tmp_path))
    assert adapter.rank == 5
    bank = AdapterBank(layout, 1)
    bank.install(0, adapter)
    run = AdaptedRun(model, bank, [0, -1], [0, 0])
    prompt = PROMPTS[0]
    pieces = [run.extend([prompt[start : start + 17]] * 2) for start in range(0, len(prompt), 17)]
    adapted, plain = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    assert_same(adapted, multimodal_logits(oracle, prompt))
    assert_same(plain, multimodal_logits(multimodal_model(name), prompt))
    assert (adapted - plain).abs().max() > 0.1


def test_an_adapter_for_an_unknown_tower_is_refused(tmp_path: Path) -> None:
    folder = save_multimodal("qwen3_vl", tmp_path / "model", "today")
    layout = base_layout(load(folder), folder, dummy=False)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2}))
    name = "base_model.model.model.audio_tower.q_proj"
    factors = {f"{name}.lora_A.weight": torch.zeros(2, 4), f"{name}.lora_B.weight": torch.zeros(4, 2)}
    save_file(factors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=r"module model\.audio_tower\.q_proj that the base model does not have"):
        AdapterReader(layout, max_rank=8).read(str(tmp_path))
