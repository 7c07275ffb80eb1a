"""Inputs: reads prompts of offline requests in vLLM's forms, such as ``TextPrompt`` and ``TokensPrompt``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from ...lora.request import LoRARequest
from ..errors import RequestError
from .vllm_table import check_values


class TextPrompt(TypedDict, total=False):
    """A prompt as text. KV is shared only among prompts with the same ``cache_salt``."""

    prompt: str
    cache_salt: str


class TokensPrompt(TypedDict, total=False):
    """A prompt as token ids, optionally with its text."""

    prompt_token_ids: Sequence[int]
    prompt: str
    cache_salt: str


PromptType = str | Sequence[int] | TextPrompt | TokensPrompt
Loras = LoRARequest | Sequence[LoRARequest | None] | None
"""One adapter for all prompts, or a list with one for each prompt."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt in normalized form.

    Attributes:
        text: the text; None if the prompt was given only as token ids.
        tokens: the token ids; None if the prompt was given only as text.
        salt: cache salt; KV is shared only among prompts with the same salt.
    """

    text: str | None = None
    tokens: Sequence[int] | None = None
    salt: str = ""

    @property
    def content(self) -> str | Sequence[int]:
        """The token ids, or the text if there are no token ids."""
        if self.tokens is not None:
            return self.tokens
        assert self.text is not None
        return self.text


def listed_prompts(prompts: Any) -> list[Any]:
    """Return one prompt or several prompts as a list. Raises RequestError for any other value."""
    if isinstance(prompts, bytes) or not hasattr(prompts, "__getitem__"):
        right = "a text, a list of token ids, a dict with prompt or prompt_token_ids, or a list of these"
        raise RequestError(f"prompts must be {right}, not {type(prompts).__name__}.", param="prompt")
    if isinstance(prompts, (str, Mapping)) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]
    return list(prompts)


def read_prompts(prompts: Any, prompt_token_ids: Any = None) -> list[Prompt]:
    """Convert one prompt or several prompts to ``Prompt`` objects.

    Args:
        prompts: one prompt in any form of ``PromptType``, or a list of prompts.
        prompt_token_ids: token ids of one prompt or of several, which replace ``prompts`` (an older form of vLLM).

    Raises:
        RequestError: a prompt has none of these forms.
    """
    if prompt_token_ids is not None:
        return [Prompt(tokens=each.tokens, text=None, salt="") for each in read_prompts(prompt_token_ids)]
    return [_read(prompt) for prompt in listed_prompts(prompts)]


def _read(prompt: Any) -> Prompt:
    if isinstance(prompt, str):
        return Prompt(text=prompt)
    if not isinstance(prompt, Mapping):
        return Prompt(tokens=prompt)
    for owner in ("EmbedsPrompt", "ExplicitEncoderDecoderPrompt", "TokensPrompt"):
        kind = {"EmbedsPrompt": "prompt_embeds", "ExplicitEncoderDecoderPrompt": "encoder_prompt"}.get(owner)
        if kind is None or kind in prompt:
            _check(owner, prompt)
    text, tokens = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is None and tokens is None:
        raise RequestError("A prompt that is a dict must hold prompt or prompt_token_ids.", param="prompt")
    if text is not None and not isinstance(text, str):
        raise RequestError(f"prompt must be a text, not {type(text).__name__}.", param="prompt")
    salt = prompt.get("cache_salt") or ""
    if not isinstance(salt, str):
        raise RequestError(f"cache_salt must be a text, not {type(salt).__name__}.", param="cache_salt")
    return Prompt(text, tokens, salt)


def _check(owner: str, prompt: Mapping[str, Any]) -> None:
    try:
        check_values(owner, prompt)
    except TypeError as error:
        raise RequestError(f"A prompt cannot have this form: {error}", param="prompt") from None
