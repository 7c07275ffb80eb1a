"""The table of model families: all rows, by name, by class and by name in GGUF files."""

from __future__ import annotations

from dataclasses import replace

from .family import Family
from .hybrid_families import HYBRID_FAMILIES
from .layer_norm_families import LAYER_NORM_FAMILIES
from .llama_families import LLAMA_FAMILIES
from .mixture_families import MIXTURE_FAMILIES
from .post_norm_families import POST_NORM_FAMILIES

FAMILIES = LLAMA_FAMILIES + POST_NORM_FAMILIES + LAYER_NORM_FAMILIES + MIXTURE_FAMILIES + HYBRID_FAMILIES

BY_NAME = {family.name: family for family in FAMILIES}
BY_ARCHITECTURE = {family.architecture: family for family in FAMILIES}
_TEXT_TYPES = {"gemma3_text": "gemma3", "gemma4_text": "gemma4", "llama4_text": "llama4"}
BY_MODEL_TYPE = BY_NAME | {text: BY_NAME[name] for text, name in _TEXT_TYPES.items()}
_BY_FOLDED_ARCHITECTURE = {family.architecture.casefold(): family for family in FAMILIES}


def family_of(architecture: str) -> Family | None:
    """Return the family of a class name; early checkpoints of Llama write it with other capitals."""
    return BY_ARCHITECTURE.get(architecture) or _BY_FOLDED_ARCHITECTURE.get(architecture.casefold())


# Names in GGUF files of the language models of multimodal models.
_TOWERS = (
    replace(BY_NAME["qwen2"], gguf_name="qwen2vl", gguf_ignored=frozenset({"rope.dimension_sections"})),
    replace(
        BY_NAME["qwen3"],
        gguf_name="qwen3vl",
        gguf_ignored=frozenset({"rope.dimension_sections", "n_deepstack_layers"}),
    ),
    replace(
        BY_NAME["qwen3_moe"],
        gguf_name="qwen3vlmoe",
        gguf_ignored=frozenset({"rope.dimension_sections", "n_deepstack_layers"}),
    ),
)

BY_GGUF_NAME: dict[str, tuple[Family, ...]] = {}
for _family in (*FAMILIES, *_TOWERS):
    if _family.gguf_name is not None:
        BY_GGUF_NAME[_family.gguf_name] = (*BY_GGUF_NAME.get(_family.gguf_name, ()), _family)
