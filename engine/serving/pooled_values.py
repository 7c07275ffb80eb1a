"""Pooled values: converts the values that the engine pools over a prompt to embeddings and class probabilities."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import EngineError, RequestError
from ..types import Pooler

Floats = NDArray[np.float32]


def embedding(pooled: bytes, *, dimensions: int | None, normalizes: bool) -> Floats:
    """Return the embedding of a text: its first ``dimensions`` values, scaled to length 1 if ``normalizes`` is set.

    Raises:
        EngineError: a value is not finite.
    """
    values = pooled_floats(pooled)[:dimensions]
    if not normalizes:
        return values
    length = np.linalg.norm(values.astype(np.float64))
    scaled: Floats = (values / (length or 1.0)).astype(np.float32)
    return scaled


def class_probabilities(pooled: bytes, pooler: Pooler) -> Floats:
    """Return the probability of each class: by softmax, or by sigmoid for a multi-label head or a single class.

    Raises:
        EngineError: a logit is not finite.
    """
    logits = pooled_floats(pooled).astype(np.float64)
    if pooler.is_multi_label or len(logits) == 1:
        shares = 1 / (1 + np.exp(-np.clip(logits, -700, 700)))
    else:
        weights = np.exp(logits - logits.max())
        shares = weights / weights.sum()
    found: Floats = shares.astype(np.float32)
    return found


def pooled_floats(pooled: bytes) -> Floats:
    """Decode the pooled values. Raises EngineError if there are none, or if one of them is not finite."""
    values = np.frombuffer(pooled, np.float32)
    if not len(values) or not np.isfinite(values).all():
        raise EngineError("The model gives numbers that are not finite.")
    return values


def prompt_of(pooler: Pooler, name: str | None, field: str = "prompt_name") -> str:
    """Return the prompt text that the checkpoint puts before a text to embed.

    Args:
        name: name of one of the checkpoint's prompts; None for its default prompt.
        field: field of the request that gives the name, for the error message.

    Raises:
        RequestError: the checkpoint has no prompt of this name.
    """
    prompts = dict(pooler.prompts)
    chosen = pooler.default_prompt if name is None else name
    if chosen and chosen not in prompts:
        known = ", ".join(map(repr, prompts)) or "none"
        raise RequestError(f"'{field}' must be one of the model's prompts ({known}), not {chosen!r}.", param=field)
    return prompts.get(chosen, "")


def num_left_out(prompt: Sequence[int], special_ids: Collection[int], num_tokens: int) -> int:
    """Return the number of tokens at the beginning of an input that are not pooled, for a checkpoint that excludes its
    prompt.

    The tokens are counted as in sentence-transformers (``include_prompt``).

    Args:
        prompt: tokens of the prompt alone, encoded like a text. If its last token is a special token, that token is not
            counted.
        num_tokens: number of tokens of the prompt and the text together. The last of them is always pooled.
    """
    return min(len(prompt) - (prompt[-1] in special_ids), num_tokens - 1) if prompt else 0
