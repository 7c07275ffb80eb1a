"""Prompt texts: encodes prompts with the tokenizer of a model, or of an adapter with its own vocabulary."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence

from ..errors import RequestError
from ..serving.adapter_tokenizers import AdapterTokenizers, ServedTokenizer
from ..serving.request import RequestLimits, token_array
from ..text.prompt_cache import Owner, PromptCache, PromptEncoder
from ..types import AdapterInfo
from ..weighted_adapters import names_in


class PromptTexts:
    """Encodes prompts with one tokenizer.

    Args:
        cache: cache of parts of prompts.

    Attributes:
        served: the tokenizer.
        limits: bounds of requests.
    """

    def __init__(self, served: ServedTokenizer, max_model_len: int, cache: PromptCache) -> None:
        self.served = served
        self.limits = RequestLimits(max_model_len, served.vocab_size)
        self._encoder = PromptEncoder(served.tokenizer, cache, served.identity)

    def encode(self, prompt: str | Sequence[int]) -> array[int]:
        """Return the tokens of a prompt. If it is a text, special tokens are added around it."""
        if isinstance(prompt, str):
            return self.served.tokenizer.encode(prompt, add_special_tokens=True)
        return token_array(prompt)

    def encode_chat(self, text: str) -> array[int]:
        """Return the tokens of a rendered conversation, which already contains its special tokens."""
        return self._encoder.encode(self._encoder.cut(text), Owner())


class AdapterTexts:
    """Finds the ``PromptTexts`` of a model and of its adapters.

    Args:
        tokenizers: tokenizers of the adapters.
        adapters: loaded adapters by name.
        load: loads an adapter from the folder of adapters.
    """

    def __init__(
        self,
        tokenizers: AdapterTokenizers,
        adapters: Mapping[str, AdapterInfo],
        load: Callable[[str], None],
        max_model_len: int,
    ) -> None:
        self._tokenizers = tokenizers
        self._adapters = adapters
        self._load = load
        self._max_model_len = max_model_len
        self._cache = PromptCache()

    def num_own(self, name: str, path: str) -> int:
        """Return the number of tokens of an adapter's own tokenizer. Raises like ``AdapterTokenizers.read_own``."""
        return self._tokenizers.read_own(name, path)

    def of(self, adapter: str | None) -> PromptTexts:
        """Return the ``PromptTexts`` of an adapter, or of the model for None.

        Raises RequestError for an unusable tokenizer.
        """
        if adapter is not None and not isinstance(adapter, str):
            raise RequestError(f"adapter must be a name, not {type(adapter).__name__}.", param="adapter")
        if adapter is not None:
            # All adapters of a combination have the same tokenizer.
            adapter = names_in(adapter)[0]
        if (
            adapter is not None
            and adapter not in self._adapters
            and self._tokenizers.has_folder
            and self.num_own(adapter, adapter)
        ):
            self._load(adapter)
        info = None if adapter is None else self._adapters.get(adapter)
        served = self._tokenizers.known(adapter if info else None, info)
        if served is None:
            assert adapter is not None and info is not None
            served = self._tokenizers.find(adapter, info)
        return PromptTexts(served, self._max_model_len, self._cache)
