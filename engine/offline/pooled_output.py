"""Outputs of ``LLM.embed`` and ``LLM.classify``, in vLLM's form, and what reads them from pooled values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..errors import RequestError
from ..serving.pooled_values import class_probabilities, embedding, prompt_of
from ..types import Pooler
from .inputs import PromptType, listed_prompts

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
    """What a model gives of a prompt beside tokens."""

    request_id: str
    outputs: T
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool = True


def embedding_prompts(
    pooler: Pooler, prompts: PromptType | Sequence[PromptType], prompt_name: str | None
) -> list[PromptType]:
    """Return prompts with what the checkpoint puts before texts. Raises RequestError for a name it does not have."""
    before = prompt_of(pooler, prompt_name)
    return [f"{before}{each}" if isinstance(each, str) else each for each in listed_prompts(prompts)]


def embedding_reader(
    pooler: Pooler, dimensions: int | None, normalize: bool | None
) -> Callable[[bytes], EmbeddingOutput]:
    """Return what makes an embedding of pooled values. Raises RequestError for dimensions that it does not have."""
    if dimensions is not None and not 1 <= dimensions <= pooler.size:
        raise RequestError(
            f"dimensions must be at least 1 and at most {pooler.size}, not {dimensions}.", param="dimensions"
        )
    normalizes = pooler.normalizes if normalize is None else normalize
    return lambda pooled: EmbeddingOutput(embedding(pooled, dimensions=dimensions, normalizes=normalizes).tolist())


def class_reader(pooler: Pooler) -> Callable[[bytes], ClassificationOutput]:
    """Return what makes probabilities of classes of pooled values."""
    return lambda pooled: ClassificationOutput(class_probabilities(pooled, pooler).tolist())
