"""A tiny base whose vocabulary was resized before an adapter of it was trained, as TRL does for chat tokens."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from support.models.lora_models import PeftOracle, copy_of, perturb

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from peft import LoraConfig, PeftModel, get_peft_model

ADDED = 5
"""Tokens that `make_resized_adapter` adds."""

KINDS: dict[str, dict[str, Any]] = {
    "saved both": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "untrained": {},  # PEFT saves both since the vocabulary was resized
    "trl": {"trainable_token_indices": {"embed_tokens": [102, 104]}, "modules_to_save": ["lm_head"]},
    "new tokens": {"trainable_token_indices": [101, 102, 103, 104, 105]},
    "lora of both": {"target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    "dora of both": {"target_modules": ["embed_tokens", "lm_head", "q_proj"], "use_dora": True},
    "tied": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
}
"""By name, fields of PEFT's ``LoraConfig``."""


def make_resized_adapter(name: str, folder: Path, out: Path, seed: int, added: int = ADDED, **options: Any) -> Path:
    """Let peft resize the base ``name`` by some tokens, and make and save a random adapter of it."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base: Any = copy_of(name, folder)
        base.config._name_or_path = base.name_or_path = str(folder / name)
        base.resize_token_embeddings(base.config.vocab_size + added, mean_resizing=False)
        with torch.no_grad():
            for embedding in (base.get_input_embeddings(), base.get_output_embeddings()):
                embedding.weight[-max(added, 1) :].normal_(std=0.3)
        fields = {"task_type": "CAUSAL_LM", "init_lora_weights": False, "target_modules": ["q_proj"], **options}
        model = get_peft_model(base, LoraConfig(**fields))
        perturb(model)
        model.save_pretrained(out)
    return out


class ResizedOracle(PeftOracle):
    """Logits of a base resized to an adapter's vocabulary, with the adapter, as peft computes them."""

    @torch.no_grad()
    def logits(self, adapter: Path | None, tokens: list[int]) -> Tensor:
        """[T, V]."""
        if adapter is None:
            return super().logits(None, tokens)
        tensors = load_file(adapter / "adapter_model.safetensors")
        sizes = {len(tensor) for key, tensor in tensors.items() if tensor.dim() == 2 and _is_whole(key)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model: Any = copy_of(self._name, self._folder)
            if sizes:
                model.resize_token_embeddings(max(sizes), mean_resizing=False)
            model = PeftModel.from_pretrained(model, adapter).eval()
            return model(input_ids=torch.tensor([tokens])).logits[0].float()


def _is_whole(key: str) -> bool:
    return key.endswith((".weight",)) and ("embed_tokens" in key or "lm_head" in key) and ".lora_" not in key
