"""The ways in which models score pairs of texts, such as the relevance of a document to a query.

head        a classification head with one class reads both texts in one prompt (a cross-encoder)
embeddings  the cosine of the two texts' embeddings, for a checkpoint with the files of sentence-transformers
words       the probability of "yes" against "no" when a causal model is asked in the form of Qwen3-Reranker
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from ..errors import RequestError
from ..types import Pooler
from .pooled_values import class_probabilities, pooled_floats

PairScoring = Literal["head", "embeddings", "words"]
# Names under which sentence-transformers looks for the prompts of queries and of documents.
QUERY_PROMPTS: Final = ("query",)
DOCUMENT_PROMPTS: Final = ("document", "passage", "corpus")


def pair_scoring(pooler: Pooler) -> PairScoring:
    """Return how a model scores pairs. Raises RequestError if it cannot.

    Args:
        pooler: what the model offers, or its adapter with a head of its own: see ``Pooler.with_head``.
    """
    num_classes = len(pooler.labels)
    if num_classes == 1:
        return "head"
    if pooler.is_embedder or (not num_classes and not pooler.generates):
        return "embeddings"
    if not pooler.generates:
        raise _of_several_classes("model", num_classes)
    return "words"


def _of_several_classes(owner: str, num_classes: int) -> RequestError:
    return RequestError(
        f"This {owner} has a head of {num_classes} classes, but only a head of one class scores pairs. Use "
        "/v1/classify.",
        param="model",
    )


def prompt_name_of(pooler: Pooler, names: Sequence[str]) -> str | None:
    """Return the first of ``names`` for which the checkpoint has a prompt; None for its default prompt."""
    return next((name for name in names if name in dict(pooler.prompts)), None)


def head_score(pooled: bytes, pooler: Pooler) -> float:
    """Return the score from a classification head of one class: a probability, or the logit if the checkpoint requests
    that.

    Raises:
        RequestError: an adapter has replaced the model's head by a head of several classes.
        EngineError: the logit is not finite.
    """
    scores = pooled_floats(pooled) if pooler.is_raw_score else class_probabilities(pooled, pooler)
    if len(scores) != 1:
        raise _of_several_classes("adapter", len(scores))
    return float(scores[0])
