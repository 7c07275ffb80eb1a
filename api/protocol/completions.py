"""Request body of ``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, cast

from pydantic import Discriminator, Field, Tag, model_validator

from ...engine.types import MAX_LOGPROBS, MAX_TOKEN_COUNT
from .base import Refusal, rejected
from .foreign_fields import foreign_rules
from .sampling import SamplingFields
from .structured import StructuredFields

MAX_PROMPTS = 64
DEFAULT_MAX_TOKENS = 16


def _prompt_form(value: Any) -> str | None:
    if isinstance(value, str):
        return "<string>"
    if not isinstance(value, list):
        return None
    first = value[0] if value else None
    if isinstance(first, str):
        return "<strings>"
    return "<token lists>" if isinstance(first, list) else "<tokens>"


Prompt = Annotated[
    Annotated[str, Tag("<string>")]
    | Annotated[list[str], Tag("<strings>"), Field(max_length=MAX_PROMPTS)]
    | Annotated[list[int], Tag("<tokens>"), Field(min_length=1)]
    | Annotated[list[Annotated[list[int], Field(min_length=1)]], Tag("<token lists>"), Field(max_length=MAX_PROMPTS)],
    Discriminator(
        _prompt_form,
        custom_error_type="rejected",
        custom_error_message="must be a string, a list of strings, a list of token ids or a list of such lists",
    ),
]


class CompletionRequest(StructuredFields):
    """Body of a completion request, with OpenAI's fields and the implemented extensions of vLLM.

    With ``max_tokens`` 0, the request only computes the prompt into the prefix cache (prefill only). With ``echo`` and
    ``logprobs``, the prompt is scored from the token at ``logprob_start_len`` on.
    """

    refused: ClassVar[Mapping[str, Refusal]] = {
        **SamplingFields.refused,
        **foreign_rules("completions").refused,
        "best_of": Refusal("the server returns all answers; request several with 'n'.", (1,)),
        "suffix": Refusal("fill-in-the-middle is not supported.", ("",)),
    }

    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKEN_COUNT)] = DEFAULT_MAX_TOKENS
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: bool = True
    logprob_start_len: Annotated[int, Field(ge=0, le=MAX_TOKEN_COUNT)] = 0

    @model_validator(mode="after")
    def _check_scoring(self) -> CompletionRequest:
        if self.is_prefetch:
            self.max_tokens = 0
        if self.max_tokens == 0 and self.min_tokens > 0:
            raise rejected("contradicts 'max_tokens'", "min_tokens")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return cast(list[str | list[int]], self.prompt)

    @property
    def num_top(self) -> int:
        """Number of logprobs that are shown at each position in addition to that of the sampled token."""
        return len(self.logprob_token_ids) or self.logprobs or 0

    @property
    def echoed_logprobs(self) -> int | None:
        """Number of likeliest tokens with logprobs for each prompt token, for ``echo``; None for no logprobs."""
        return self.logprobs if self.echo else None
