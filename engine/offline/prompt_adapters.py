"""Prompt adapters: finds the adapters that prompts request by name or ``LoRARequest``, and loads the latter first."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

from ...lora.request import LoRARequest
from ..errors import RequestError
from ..weighted_adapters import check_parts, combination_name, read_combination
from .inputs import Loras, read_prompts
from .prompt_texts import AdapterTexts, PromptTexts
from .request_inputs import Input, PromptAdapter
from .vllm_table import check_values


class PromptAdapters:
    """Finds and loads the adapters of prompts.

    Args:
        texts: tokenizers and limits of the model and of its adapters.
        loaded: names of the loaded adapters.
        load: loads an adapter; its arguments are the name, the path, and whether the name may be in use.
    """

    def __init__(self, texts: AdapterTexts, loaded: Container[str], load: Callable[[str, str, bool], None]) -> None:
        self._texts = texts
        self._loaded = loaded
        self._load = load
        self._paths: dict[str, str] = {}  # Path of each adapter that a ``LoRARequest`` has loaded, by name.

    def texts_of(self, asked: LoRARequest | str | None) -> PromptTexts:
        """Return the tokenizer and limits of an adapter, or of the model for None. Raises like ``name_of``."""
        return self._texts.of(self.name_of(asked))

    def inputs(
        self,
        prompts: Any = None,
        prompt_token_ids: Any = None,
        lora_request: Loras = None,
        adapter: str | None = None,
    ) -> list[Input]:
        """Encode prompts and find their adapters.

        The adapters of ``lora_request`` are loaded first. Raises RequestError.
        """
        read = read_prompts(prompts, prompt_token_ids)
        return [
            Input(chosen.model.encode(prompt.content), prompt.text, prompt.salt, chosen)
            for prompt, chosen in zip(read, self.for_prompts(len(read), lora_request, adapter), strict=True)
        ]

    def for_prompts(self, count: int, lora_request: Loras, adapter: str | None) -> list[PromptAdapter]:
        """Return the adapter of each prompt. The adapters of ``lora_request`` are loaded first."""
        if lora_request is not None and adapter is not None:
            raise RequestError("adapter and lora_request are both given: leave one out.", param="lora_request")
        asked = [adapter] * count if lora_request is None else _one_lora_for_each(lora_request, count)
        found = []
        models: dict[str | None, PromptTexts] = {}
        for each in asked:
            name = self.name_of(each)
            if name not in models:
                models[name] = self._texts.of(name)
            found.append(PromptAdapter(name, models[name], each if isinstance(each, LoRARequest) else None))
        return found

    def name_of(self, asked: LoRARequest | str | None) -> str | None:
        """Return the name of an adapter. The adapter of a ``LoRARequest`` is loaded first."""
        if not isinstance(asked, LoRARequest):
            if asked is not None and not isinstance(asked, str):
                raise RequestError(f"adapter must be a name, not {type(asked).__name__}.", param="adapter")
            return asked if asked is None or asked in self._loaded else self._combined(asked)
        if not isinstance(asked.lora_name, str) or not asked.lora_name:
            raise RequestError("lora_name must be a text that is not empty.", param="lora_request")
        check_values("LoRARequest", {"tensorizer_config_dict": asked.tensorizer_config_dict})
        is_loaded = asked.lora_name in self._loaded
        is_same = is_loaded and asked.path == self._paths.get(asked.lora_name)
        if asked.path and (asked.load_inplace or not is_same):
            self._load(asked.lora_name, asked.path, is_loaded)
            self._paths[asked.lora_name] = asked.path
        return asked.lora_name

    def _combined(self, asked: str) -> str:
        """Return the engine's name of a weighted combination such as ``a0:0.7+a1:0.3``.

        Its adapters are loaded first.
        """
        if not (parts := read_combination(asked)):
            return asked
        check_parts(parts, "adapter")
        for part in parts:
            if part.name not in self._loaded:
                self._load(part.name, part.name, False)
        return combination_name(parts)


def _one_lora_for_each(asked: Any, count: int) -> Sequence[LoRARequest | None]:
    """Return an adapter for each prompt. Raises RequestError for other forms, or if one name has two paths."""
    each = asked if isinstance(asked, (list, tuple)) else [asked] * count
    for one in each:
        if one is not None and not isinstance(one, LoRARequest):
            raise RequestError(f"lora_request must be a LoRARequest, not {type(one).__name__}.", param="lora_request")
    if len(each) != count:
        raise RequestError(
            f"There are {len(each)} lora_request for {count} prompts: give one, or one for each.", param="lora_request"
        )
    paths: dict[str, str] = {}
    for one in each:
        if one is not None and paths.setdefault(one.lora_name, one.path) != one.path:
            raise RequestError(f"{one.lora_name!r} names two adapters in one call.", param="lora_request")
    return each
