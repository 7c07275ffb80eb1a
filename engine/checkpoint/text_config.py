"""Multimodal checkpoints, of which only the language model is served: their ``text_config`` and their other towers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .config_fields import Fields
from .families.family import Family
from .families.family_table import BY_NAME
from .families.mixture import ExpertNames, MixtureFamily

TEXT, VISION, AUDIO = "text_config", "vision_config", "audio_config"

# Keys of the whole model that take precedence over the same keys of its language model.
_SHARED = ("bos_token_id", "eos_token_id", "tie_word_embeddings")


@dataclass(frozen=True, slots=True)
class Multimodal:
    """One row of the table of multimodal classes.

    Attributes:
        family: family of the language model, with the multimodal class as its architecture.
        text_types: values of ``model_type`` in ``text_config`` that mean this family.
        towers: names of the modules beside the language model. Text does not pass through them, so they are not loaded.
        flat: whether older files have the language model's keys in ``config.json`` itself.
    """

    family: Family
    text_types: tuple[str, ...]
    towers: tuple[str, ...]
    flat: bool = False

    @property
    def inner_configs(self) -> tuple[str, ...]:
        """Keys of the configs of the language model and of the towers."""
        return (TEXT, VISION, AUDIO) if "embed_audio" in self.towers else (TEXT, VISION)


_LLAVA = ("vision_tower", "multi_modal_projector")

MULTIMODAL = (
    Multimodal(
        family=replace(
            BY_NAME["gemma3"],
            architecture="Gemma3ForConditionalGeneration",
            defaults={
                **BY_NAME["gemma3"].defaults,
                "vocab_size": 262_208,
                "hidden_size": 2304,
                "intermediate_size": 9216,
                "num_hidden_layers": 26,
                "num_attention_heads": 8,
                "max_position_embeddings": 131_072,
                "rms_norm_eps": 1e-6,
            },
        ),
        text_types=("gemma3_text",),
        towers=_LLAVA,
    ),
    Multimodal(
        family=replace(BY_NAME["gemma4"], architecture="Gemma4ForConditionalGeneration"),
        text_types=("gemma4_text",),
        towers=("vision_tower", "audio_tower", "embed_vision", "embed_audio"),
    ),
    Multimodal(  # without towers: patches and frames are projected to embeddings
        family=replace(BY_NAME["gemma4_unified_text"], architecture="Gemma4UnifiedForConditionalGeneration"),
        text_types=("gemma4_unified_text",),
        towers=("vision_embedder", "embed_vision", "embed_audio"),
    ),
    Multimodal(
        family=replace(BY_NAME["mistral"], architecture="Mistral3ForConditionalGeneration"),
        text_types=("mistral",),
        towers=_LLAVA,
    ),
    Multimodal(
        family=replace(BY_NAME["ministral3"], architecture="Mistral3ForConditionalGeneration"),
        text_types=("ministral3",),
        towers=_LLAVA,
    ),
    Multimodal(
        family=replace(BY_NAME["mistral4"], architecture="Mistral3ForConditionalGeneration"),
        text_types=("mistral4",),
        towers=_LLAVA,
    ),
    Multimodal(
        family=replace(
            BY_NAME["qwen2"],
            architecture="Qwen2_5_VLForConditionalGeneration",
            defaults={
                "num_key_value_heads": 8,
                "sliding_window": 4096,
                "max_window_layers": 80,
                "rope_theta": 1_000_000.0,
                "rms_norm_eps": 1e-5,
                "bos_token_id": 151643,
                "eos_token_id": 151645,
            },
            mrope=True,
        ),
        text_types=("qwen2_5_vl_text", "qwen2_5_vl"),
        towers=("visual",),
        flat=True,
    ),
    Multimodal(
        family=replace(
            BY_NAME["qwen3"],
            architecture="Qwen3VLForConditionalGeneration",
            windows="never",
            defaults={"num_key_value_heads": 32, "head_dim": 128, "rope_theta": 500_000.0, "rms_norm_eps": 1e-6},
            mrope=True,
        ),
        text_types=("qwen3_vl_text",),
        towers=("visual",),
    ),
    Multimodal(
        family=replace(
            BY_NAME["qwen3_moe"],
            architecture="Qwen3VLMoeForConditionalGeneration",
            windows="never",
            defaults={"num_key_value_heads": 16, "rope_theta": 500_000.0, "num_experts_per_tok": 4},
            mixture=MixtureFamily(
                names=ExpertNames(
                    gate="experts.gate_up_proj",
                    down="experts.down_proj",
                    storage="transposed",
                    trained_as=("outputs first", "inputs first"),
                ),
                count_keys=("num_experts", "num_local_experts"),
                dense_layers="stepped",
            ),
            mrope=True,
        ),
        text_types=("qwen3_vl_moe_text",),
        towers=("visual",),
    ),
    Multimodal(
        family=replace(BY_NAME["qwen3_5_text"], architecture="Qwen3_5ForConditionalGeneration"),
        text_types=("qwen3_5_text",),
        towers=("visual",),
    ),
    Multimodal(
        family=replace(BY_NAME["qwen3_5_moe_text"], architecture="Qwen3_5MoeForConditionalGeneration"),
        text_types=("qwen3_5_moe_text",),
        towers=("visual",),
    ),
    Multimodal(
        family=replace(BY_NAME["minimax_m3_vl_text"], architecture="MiniMaxM3SparseForConditionalGeneration"),
        text_types=("minimax_m3_vl_text", "minimax_m3_text", "minimax_m3"),
        towers=("vision_tower", "multi_modal_projector", "patch_merge_mlp"),
    ),
    Multimodal(
        family=replace(BY_NAME["llama4"], architecture="Llama4ForConditionalGeneration"),
        text_types=("llama4_text",),
        towers=("vision_model", "multi_modal_projector"),
    ),
    Multimodal(
        family=replace(BY_NAME["step3p5"], architecture="Step3p7ForConditionalGeneration"),
        text_types=("step3p5",),
        towers=("vision_model", "vit_large_projector", "multi_modal_projector"),
    ),
    *(  # as published, and as transformers writes it
        Multimodal(
            family=replace(BY_NAME["deepseek_v3"], architecture=name),
            text_types=("kimi_k2", "deepseek_v3"),
            towers=("vision_tower", "mm_projector"),
        )
        for name in ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration")
    ),
)

MULTIMODAL_BY_ARCHITECTURE: dict[str, tuple[Multimodal, ...]] = {}
for _whole in MULTIMODAL:
    _name = _whole.family.architecture
    MULTIMODAL_BY_ARCHITECTURE[_name] = (*MULTIMODAL_BY_ARCHITECTURE.get(_name, ()), _whole)


def multimodal(config: Mapping[str, Any], architecture: str, where: str) -> Multimodal | None:
    """Return the row of a multimodal class that fits the language model in ``text_config``; None for another class.

    Raises:
        ModelError: this class is not served with a language model of that family.
    """
    rows = MULTIMODAL_BY_ARCHITECTURE.get(architecture)
    text = config.get(TEXT)
    if not rows or not isinstance(text, dict) or text.get("model_type") is None:
        return rows[0] if rows else None
    known = [name for whole in rows for name in whole.text_types]
    if text["model_type"] not in known:
        raise Fields(text, f"{where}: {TEXT}").wrong("model_type", f"{' or '.join(known)} in {architecture}")
    return next(whole for whole in rows if text["model_type"] in whole.text_types)


def language_config(config: Mapping[str, Any], whole: Multimodal, where: str) -> dict[str, Any]:
    """Return the keys of the language model, and the keys of the whole model that apply to it.

    Raises:
        ModelError: there is no ``text_config``.
    """
    outer = {key: value for key, value in config.items() if key not in whole.inner_configs}
    fields = Fields(config, where)
    if not fields.has(TEXT) and whole.flat:
        return outer
    text = fields.mapping(TEXT)
    if not text:
        raise fields.wrong(TEXT, f"the language model's config in {whole.family.architecture}")
    return text | shared_keys(config)


def shared_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of the whole model that take precedence over those of its language model."""
    return {key: value for key in _SHARED if (value := shared_value(config, key)) is not None}


def shared_value(config: Mapping[str, Any], key: str) -> Any:
    """Return a key's value in the whole model, else in its language model, else None."""
    value, text = config.get(key), config.get(TEXT)
    return text.get(key) if value is None and isinstance(text, dict) else value
