"""Published models: ``config.json`` of repositories on the hub, kept to answer without a download which models load.

The answers come from the configs by the same reader that loads a model: so an answer cannot differ from the result of a
start with the same ``config.json``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from ..errors import ModelError, UnknownArchitecture
from .families.family_table import BY_NAME
from .families.library_classes import TESTED_CLASSES
from .gguf import TENSOR_TYPES
from .hf_config import model_config
from .quantization_config import KEY

PLAIN: Final = "16 bits"
# Types of tensors in a file of each quantisation, as llama.cpp chooses them; types for rows of odd widths are included.
_GGUF_TYPES: Final[dict[str, tuple[str, ...]]] = {
    "Q8_0": ("Q8_0",),
    "Q6_K": ("Q6_K", "Q8_0"),
    "Q5_K_M": ("Q5_K", "Q6_K", "Q5_1", "Q8_0"),
    "Q4_K_M": ("Q4_K", "Q5_K", "Q6_K", "Q5_0", "Q5_1", "Q8_0"),
    "Q4_0": ("Q4_0", "Q4_1", "Q6_K", "Q8_0"),
    "IQ4_XS": ("IQ4_XS", "IQ4_NL", "Q5_K", "Q6_K", "Q5_1", "Q8_0"),
    "Q3_K_M": ("Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "Q4_0", "Q5_0", "Q5_1", "Q8_0"),
    "Q2_K": ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "Q4_0", "Q5_0", "Q5_1", "Q8_0"),
    "IQ2_XXS": ("IQ2_XXS", "IQ2_S", "IQ3_S", "Q2_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "Q4_0", "Q5_0", "Q5_1", "Q8_0"),
}
GGUF_FORMS: Final = tuple(f"GGUF {name}" for name in _GGUF_TYPES)
GGUF_OF_WHOLE: Final = {
    "Qwen2_5_VLForConditionalGeneration": "qwen2vl",
    "Qwen3VLForConditionalGeneration": "qwen3vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3vlmoe",
}
"""Architectures in GGUF files of multimodal classes, where it is not that of their language model."""
_GGUF_AS: Final = {"mistral": "llama", "glm4_moe_lite": "deepseek2", "gemma4_unified_text": "gemma4"}
"""Families that llama.cpp writes as another one, which computes the same."""
# The entry that publishers of quantised forms write in config.json, by the name of the form.
_SECTIONS: Final[dict[str, dict[str, Any]]] = {
    "FP8": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "GPTQ": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
    "AWQ": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True},
}
FORMS: Final = (PLAIN, *_SECTIONS, *GGUF_FORMS)
"""Forms that a model is published in, beside those that its own config names."""


@dataclass(frozen=True, slots=True)
class FormAnswer:
    """Whether a form of a published model loads.

    Attributes:
        form: one of ``FORMS``, or the form that the repository's own config names.
        how: the code that computes it, or for a GGUF file its architecture; empty if it does not load.
        fault: why it does not load, in the reader's words; empty if it loads.
    """

    form: str
    how: str
    fault: str = ""

    @property
    def loads(self) -> bool:
        """Return whether the form loads."""
        return not self.fault


@cache
def published_models() -> Mapping[str, Mapping[str, Any]]:
    """Return ``config.json`` of each published repository, by its name on the hub, sorted without regard to case.

    Lists of modules that stay unquantised, configs of other towers, and keys without effect on text are left out.
    """
    lines = Path(__file__).with_name("published_configs.jsonl").read_text("utf-8").splitlines()
    return {row["name"]: row["config"] for row in map(json.loads, lines)}


def own_form(config: Mapping[str, Any]) -> str:
    """Return the form in which a repository's weights are stored, as its config names it."""
    text = config.get("text_config")
    found = config.get(KEY) or (text.get(KEY) if isinstance(text, dict) else None) or config.get("compression_config")
    if not isinstance(found, dict):
        return PLAIN
    scheme = found.get("quant_algo") or found.get("format") or ""
    return " ".join(str(each) for each in (found.get("quant_method") or "modelopt", scheme) if each)


def form_answers(config: Mapping[str, Any]) -> list[FormAnswer]:
    """Return whether a repository's model loads: as published and, if that is unquantised, in each of ``FORMS``."""
    own = _answer(own_form(config), config)
    if own.form != PLAIN:
        return [own]
    others = (_quantised_answer(form, {**config, KEY: section}) for form, section in _SECTIONS.items())
    return [own, *others, *_gguf_answers(config)]


def _answer(form: str, config: Mapping[str, Any]) -> FormAnswer:
    try:
        found = model_config(config)
    except UnknownArchitecture as error:
        if error.architecture not in TESTED_CLASSES:
            return FormAnswer(form, "", str(error))
        if form == PLAIN:
            return FormAnswer(form, "by the transformers library")
        return FormAnswer(form, "", f"The transformers library supports {error.architecture} only with 16-bit weights.")
    except ModelError as error:
        return FormAnswer(form, "", str(error))
    return FormAnswer(form, f"by our decoder, as {found.family}")


def _quantised_answer(form: str, config: Mapping[str, Any]) -> FormAnswer:
    """Return the answer for a form whose publishers store experts one by one, as the tools that write it do."""
    found = _answer(form, config)
    if found.loads and any(
        layer.mixture is not None and layer.mixture.names.storage != "modules" for layer in model_config(config).layers
    ):
        return FormAnswer(
            form,
            "",
            "Quantised experts stored one by one are not supported for a model that stores its experts in one tensor.",
        )
    return found


def _gguf_answers(config: Mapping[str, Any]) -> list[FormAnswer]:
    """Return an answer for each quantisation: a file loads if its architecture and all of its types can be read."""
    name, fault = _gguf_name(config)
    read = {each for each, _, _ in TENSOR_TYPES.values()}
    found = []
    for form, types in zip(GGUF_FORMS, _GGUF_TYPES.values(), strict=True):
        unread = sorted(set(types) - read)
        why = fault or (f"Tensors of type {unread[0]} are not supported." if unread else "")
        found.append(FormAnswer(form, "" if why else f"as {name}", why))
    return found


def _gguf_name(config: Mapping[str, Any]) -> tuple[str, str]:
    """Return the architecture in a GGUF file of the model, or the reason why no such file can be read."""
    try:
        found = model_config(config)
    except ModelError as error:
        return "", str(error)
    family = BY_NAME[found.family]
    if any(layer.mixture is not None and layer.mixture.is_beside_mlp for layer in found.layers):
        return "", "Experts beside an MLP are not supported in GGUF files."
    name = GGUF_OF_WHOLE.get(config["architectures"][0]) or _GGUF_AS.get(family.name, family.gguf_name)
    return (name, "") if name is not None else ("", f"GGUF files of {family.architecture} are not supported.")
