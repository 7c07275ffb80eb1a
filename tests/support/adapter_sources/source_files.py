"""Files of adapters as sources hold them: made up, but in PEFT's format."""

from __future__ import annotations

import hashlib
import json

import numpy as np
from safetensors.numpy import save

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"


def adapter_files(seed: int = 0, num_bytes: int = 200_000) -> dict[str, bytes]:
    """Config and weights of an adapter of about this size."""
    config = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8 + seed,
        "target_modules": ["q_proj"],
        "task_type": "CAUSAL_LM",
    }
    values = np.random.default_rng(seed).standard_normal((num_bytes // 4 // 4, 4), np.float32)
    return {CONFIG: json.dumps(config).encode(), WEIGHTS: save({"base_model.model.q.lora_A.weight": values})}


def digest_of(files: dict[str, bytes]) -> str:
    """What ``cat adapter_config.json adapter_model.safetensors | sha256sum`` says."""
    return hashlib.sha256(files[CONFIG] + files[WEIGHTS]).hexdigest()
