"""A tiny Llama in a folder beside adapters of it, of different ranks, kinds and modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.models.lora_models import LINEARS, base, make_adapter

INVOCATION = [7, 8]
ADAPTERS: dict[str, dict[str, Any]] = {
    "small": {"r": 1, "target_modules": ["q_proj", "v_proj"]},
    "large": {"r": 12, "target_modules": LINEARS, "lora_alpha": 20},
    "dora": {"r": 3, "target_modules": [*LINEARS, "lm_head"], "use_dora": True},
    "words": {"r": 4, "target_modules": ["embed_tokens", "down_proj"]},
    "activated": {"r": 6, "target_modules": LINEARS, "alora_invocation_tokens": INVOCATION},
    "twin_a": {"r": 4, "target_modules": LINEARS},
    "twin_b": {"r": 4, "target_modules": LINEARS},
    "headed": {"r": 11, "target_modules": [*LINEARS, "lm_head"]},
}


def save_adapted_llama(folder: Path) -> Path:
    """Write the base to ``folder / "llama"`` and each of `ADAPTERS` to a folder of its name."""
    base("llama", folder)
    for seed, (name, options) in enumerate(ADAPTERS.items()):
        make_adapter("llama", folder, folder / name, seed, **options)
    return folder
