"""Adapters on stacked experts as different versions of PEFT write them, and the logits that they were trained to give.

Every value comes from NumPy's ``RandomState``, whose numbers never change, so the recorded file holds logits alone.
Run as a program with another PEFT first on the path, it records what that version computes:

    uv venv /tmp/peft-0.18.1 && uv pip install --no-deps --python /tmp/peft-0.18.1/bin/python peft==0.18.1
    PYTHONPATH=/tmp/peft-0.18.1/lib/python3.11/site-packages:tests python -m support.models.peft_versions
"""

from __future__ import annotations

import functools
import json
import tempfile
import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from support.models.tiny_models import COMMON, MODELS
from support.models.tiny_multimodal import MULTIMODAL

RECORDED = Path(__file__).parents[2] / "lora" / "published" / "expert_layouts.json"
TOKENS = [7, 30, 4, 99, 12, 55, 81]
NUM_LOGITS = 8
RANK = 3
SIZE_KEYS = {
    "mixtral": "intermediate_size",
    "qwen2_moe": "moe_intermediate_size",
    "qwen3_moe": "moe_intermediate_size",
    "olmoe": "intermediate_size",
    "flex_olmo": "intermediate_size",
    "glm4_moe": "moe_intermediate_size",
    "deepseek_v2": "moe_intermediate_size",
    "deepseek_v3": "moe_intermediate_size",
    "dots1": "moe_intermediate_size",
    "granite_moe": "intermediate_size",
    "granite_hybrid_mixture": "intermediate_size",
    "gpt_oss": "intermediate_size",
    "llama4": "intermediate_size",
    "qwen3_vl_moe": "moe_intermediate_size",
}
"""The key of an expert's size, by family."""
SIZES = {"no square": (48, 20), "square gate_up": (48, 24), "square down": (48, 48)}
"""The model's size, and an expert's."""


@dataclass(frozen=True)
class Case:
    """An adapter.

    Attributes:
        family: key of ``SIZE_KEYS``.
        sizes: key of ``SIZES``.
        parameters: the tensors that are adapted.
        is_marked: the module of the experts says how it stores them, as in transformers 5.
    """

    family: str
    sizes: str
    parameters: tuple[str, ...]
    is_marked: bool = True

    @property
    def name(self) -> str:
        return " ".join((self.family, self.sizes, *self.parameters, *(() if self.is_marked else ("unmarked",))))


def cases() -> list[Case]:
    """All adapters: each tensor alone, and both."""
    tensors = (("gate_up_proj",), ("down_proj",), ("gate_up_proj", "down_proj"))
    found = [Case(family, sizes, names) for family in SIZE_KEYS for sizes in SIZES for names in tensors]
    return found + [Case("gpt_oss", sizes, names, is_marked=False) for sizes in SIZES for names in tensors]


@functools.cache
def oracle(family: str, sizes: str) -> PreTrainedModel:
    """A tiny model whose weights follow from their names."""
    hidden, size = SIZES[sizes]
    changes = {"hidden_size": hidden, SIZE_KEYS[family]: size}
    config_class, model_class, options = (MULTIMODAL | MODELS)[family]
    options = json.loads(json.dumps(options))
    if family not in MODELS:
        options["text_config"] |= changes
    else:
        options = COMMON | options | changes
    model = model_class(config_class(**options, attn_implementation="eager", experts_implementation="eager")).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_values(name, tuple(parameter.shape), 0.25))
    return model


def save_base(family: str, sizes: str, folder: Path) -> Path:
    """Write the model as it is published."""
    oracle(family, sizes).save_pretrained(folder)
    if family == "qwen3_vl_moe":  # transformers turns them when it loads the published files
        file = folder / "model.safetensors"
        tensors = {
            key: value.mT.contiguous() if ".experts." in key else value for key, value in load_file(file).items()
        }
        save_file(tensors, file, metadata={"format": "pt"})
    return folder


def write_adapter(case: Case, folder: Path) -> list[float]:
    """Write an adapter as the imported version of PEFT does; return the first logits of the last token."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from peft import LoraConfig, get_peft_model

        base = oracle(case.family, case.sizes)
        marks = [each for each in base.modules() if hasattr(each, "is_transposed")]
        before = [each.is_transposed for each in marks]
        for each in marks:
            each.is_transposed = each.is_transposed and case.is_marked
        names = [f"experts.{name}" for name in case.parameters]
        config = LoraConfig(task_type="CAUSAL_LM", r=RANK, lora_alpha=5, target_modules=[], target_parameters=names)
        model = get_peft_model(base, config)
        for each, mark in zip(marks, before, strict=True):
            each.is_transposed = mark
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.copy_(_values(name, tuple(parameter.shape), 0.2))
            logits = model(input_ids=torch.tensor([TOKENS])).logits[0, -1, :NUM_LOGITS]
        model.save_pretrained(folder)
        model.unload()
    return [round(value, 5) for value in logits.tolist()]


def recorder(version: str) -> str:
    """Return the recorded version that writes as this one does."""
    return "0.21.2" if version == "0.19.1" else version


def recorded_logits(case: Case, version: str) -> torch.Tensor:
    """Return the first logits of the last token by the version of PEFT that wrote the adapter."""
    return torch.tensor(_recorded()[recorder(version)][case.name]["logits"])


@functools.cache
def _recorded() -> dict[str, Any]:
    """What each version computed, by adapter."""
    found: dict[str, Any] = json.loads(RECORDED.read_text())
    return found


def rewrite_adapter(case: Case, version: str, folder: Path) -> Path:
    """Write the adapter that another version of PEFT wrote, from the shapes that are recorded."""
    recorded = _recorded()[recorder(version)][case.name]
    names = {
        f"{module}.{part}.weight": shape for module in recorded["modules"] for part, shape in recorded["shapes"].items()
    }
    tensors = {name: _values(_live(name), tuple(shape), 0.2) for name, shape in names.items()}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "peft_version": version, "r": RANK, "lora_alpha": 5,
        "target_modules": [], "target_parameters": [f"experts.{name}" for name in case.parameters],
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def _live(name: str) -> str:
    """Return the name of a parameter, from that of its tensor in the file."""
    return name.replace("lora_A.weight", "lora_A.default.weight").replace("lora_B.weight", "lora_B.default.weight")


def _values(name: str, shape: tuple[int, ...], scale: float) -> torch.Tensor:
    values = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape) * scale
    return torch.from_numpy(values.astype(np.float32))


def record() -> dict[str, Any]:
    """Return shapes and logits of all adapters by the imported version of PEFT."""
    found = {}
    for case in cases():
        with tempfile.TemporaryDirectory() as folder:
            logits = write_adapter(case, Path(folder))
            tensors = load_file(Path(folder) / "adapter_model.safetensors")
        shapes, modules = {}, set()
        for name, tensor in tensors.items():
            module, _, part = name.removesuffix(".weight").partition(".experts.")
            modules.add(f"{module}.experts")
            shapes[part] = list(tensor.shape)
        found[case.name] = {"modules": sorted(modules), "shapes": shapes, "logits": logits}
    return found


if __name__ == "__main__":
    import peft

    torch.set_num_threads(1)
    known = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    RECORDED.parent.mkdir(exist_ok=True)
    RECORDED.write_text(json.dumps(known | {peft.__version__: record()}) + "\n")
