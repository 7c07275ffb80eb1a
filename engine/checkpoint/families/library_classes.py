"""Classes that the transformers library computes over our KV pool, and that the tests compare with it."""

from __future__ import annotations

from dataclasses import dataclass

LIBRARY_CLASSES = (
    "AfmoeForCausalLM",
    "Apertus1p5TextForCausalLM",
    "ApertusForCausalLM",
    "AriaTextForCausalLM",
    "BeamForCausalLM",
    "BioGptForCausalLM",
    "BitNetForCausalLM",
    "CodeGenForCausalLM",
    "Cohere2MoeForCausalLM",
    "CwmForCausalLM",
    "Dots1ForCausalLM",
    "Ernie4_5_MoeForCausalLM",
    "ExaoneMoeForCausalLM",
    "FlexOlmoForCausalLM",
    "FlintForCausalLM",
    "GPT2LMHeadModel",
    "GPTBigCodeForCausalLM",
    "GPTJForCausalLM",
    "GPTNeoXForCausalLM",
    "Gemma3nForCausalLM",
    "GemmaForCausalLM",
    "GraniteMoeSWAForCausalLM",
    "GraniteMoeSharedForCausalLM",
    "GraniteSWAForCausalLM",
    "HYV3ForCausalLM",
    "HeliumForCausalLM",
    "HunYuanMoEV1ForCausalLM",
    "HyperCLOVAXForCausalLM",
    "JetMoeForCausalLM",
    "Kolibri1ForCausalLM",
    "LagunaForCausalLM",
    "MiMoV2FlashForCausalLM",
    "MiniCPM3ForCausalLM",
    "MiniMaxM2ForCausalLM",
    "MinistralForCausalLM",
    "NanoChatForCausalLM",
    "OPTForCausalLM",
    "OlmoForCausalLM",
    "PersimmonForCausalLM",
    "PhiForCausalLM",
    "PhimoeForCausalLM",
    "StableLmForCausalLM",
    "VaultGemmaForCausalLM",
)


@dataclass(frozen=True, slots=True)
class LibraryWrapper:
    """A multimodal class, of which the library computes only the language model.

    Attributes:
        text_class: the causal class of the language model.
        text_type: its ``model_type``.
        towers: modules beside the language model. Text does not pass through them, so they are not loaded.
    """

    text_class: str
    text_type: str
    towers: tuple[str, ...]


LIBRARY_WRAPPERS = {
    "Gemma3nForConditionalGeneration": LibraryWrapper(
        text_class="Gemma3nForCausalLM",
        text_type="gemma3n_text",
        towers=("vision_tower", "audio_tower", "embed_vision", "embed_audio"),
    )
}
"""By the class in ``config.json``."""

TESTED_CLASSES = frozenset((*LIBRARY_CLASSES, *LIBRARY_WRAPPERS))
"""Classes in ``config.json`` that load by the library, by what the tests compare."""
