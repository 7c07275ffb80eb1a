"""Outputs of ``LLM.embed`` and ``LLM.classify``, in vLLM's form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

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
