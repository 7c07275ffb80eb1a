"""Outputs of ``LLM.embed`` and ``LLM.classify`` as in vLLM, and functions that create them from pooled values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import ContextTooLong, RequestError
from ..serving.pooled_values import class_probabilities, embedding, num_left_out, prompt_of
from ..types import Pooler
from .inputs import PromptType, TextPrompt, listed_prompts
from .request_inputs import Input

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The embedding of a text."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """The probability of each class."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(frozen=True, slots=True)
class PooledRequestOutput(Generic[T]):
    """Output of a pooling model for one prompt."""

    request_id: str
    outputs: T
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool = True
    error: ClassVar[None] = None
    late_chunking: ClassVar[None] = None


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    """Pooled values of a prompt, shape [n], 32-bit floats."""

    data: NDArray[np.float32]


def as_array(output: PooledRequestOutput[Any], values: Sequence[float]) -> PooledRequestOutput[PoolingOutput]:
    """Return a copy of an output whose values are the given values as an array."""
    return replace(output, outputs=PoolingOutput(np.array(values, np.float32)))


def embedding_prompts(
    pooler: Pooler, prompts: PromptType | Sequence[PromptType], prompt_name: str | None
) -> list[PromptType]:
    """Return the prompts, each preceded by the checkpoint's prompt.

    Raises RequestError for an unknown ``prompt_name``.
    """
    before = prompt_of(pooler, prompt_name)
    return [_behind(before, each) if before else each for each in listed_prompts(prompts)]


def _behind(before: str, prompt: PromptType) -> PromptType:
    if isinstance(prompt, str):
        return before + prompt
    if isinstance(prompt, Mapping) and isinstance(prompt.get("prompt"), str) and prompt.get("prompt_token_ids") is None:
        return TextPrompt(**{**prompt, "prompt": before + prompt["prompt"]})
    return prompt


def prompt_tokens(pooler: Pooler, prompt_name: str | None, prompt: PromptType, given: Input) -> int:
    """Return the number of tokens at the beginning of an input that belong to the checkpoint's prompt and are not
    pooled.

    Args:
        prompt: a prompt from ``embedding_prompts``.
        given: the same prompt as an input.
    """
    before = prompt_of(pooler, prompt_name)
    is_text = isinstance(prompt, str) or (isinstance(prompt, Mapping) and prompt.get("prompt_token_ids") is None)
    if pooler.includes_prompt or not before or not is_text:
        return 0
    model = given.adapter.model
    return num_left_out(model.encode(before), model.served.tokenizer.special_ids, len(given.tokens))


def check_lengths(pooler: Pooler, inputs: Sequence[Input]) -> None:
    """Raise ContextTooLong for an input that is longer than the checkpoint's maximum length."""
    longest = max((len(each.tokens) for each in inputs), default=0)
    if pooler.max_length and longest > pooler.max_length:
        raise ContextTooLong(longest, 0, pooler.max_length)


def embedding_reader(
    pooler: Pooler, dimensions: int | None, normalize: bool | None
) -> Callable[[bytes], EmbeddingOutput]:
    """Return a function that converts pooled values to an embedding. Raises RequestError for invalid ``dimensions``."""
    if dimensions is not None and not 1 <= dimensions <= pooler.size:
        raise RequestError(
            f"dimensions must be at least 1 and at most {pooler.size}, not {dimensions}.", param="dimensions"
        )
    normalizes = pooler.normalizes if normalize is None else normalize
    return lambda pooled: EmbeddingOutput(embedding(pooled, dimensions=dimensions, normalizes=normalizes).tolist())


def class_reader(pooler: Pooler) -> Callable[[bytes], ClassificationOutput]:
    """Return a function that converts pooled values to class probabilities."""
    return lambda pooled: ClassificationOutput(class_probabilities(pooled, pooler).tolist())
