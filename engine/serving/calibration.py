"""Calibration of a question's probabilities by temperature scaling, optionally with a bias for each label.

See Guo et al., On Calibration of Modern Neural Networks (2017). A calibration applies to one model and one question. A
digest of their contents identifies both.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

from ..text.questions import TypedQuestion
from ..weighted_adapters import names_in, renamed
from .label_shares import LabelShares


@dataclass(frozen=True, slots=True)
class Calibration:
    """Transformation of a model's label probabilities into calibrated probabilities.

    Attributes:
        digest: digest of the model and the question, from ``question_digest``.
        temperature: number by which the logarithm of each label's share is divided.
        bias: numbers added to the logarithms after the division, one for each label; empty for no bias.
    """

    digest: str
    temperature: float
    bias: tuple[float, ...] = ()

    def apply(self, found: LabelShares) -> LabelShares:
        """Return the calibrated shares. ``mass``, the total probability of the labels, is not changed."""
        bias = self.bias or (0.0,) * len(found.shares)
        logits = [
            math.log(share) / self.temperature + each if share > 0 else -math.inf
            for share, each in zip(found.shares, bias, strict=True)
        ]
        most = max(logits)
        weights = [math.exp(logit - most) for logit in logits]
        total = math.fsum(weights)
        return LabelShares(tuple(weight / total for weight in weights), found.mass)


def content_digest(base: str, adapter: str | None, digest_of: Callable[[str], str]) -> str | None:
    """Return the digest of the weights of an adapter, or of the base model; None if the digest is not known.

    The digest of a weighted combination of adapters covers the weights of its parts and their factors.

    Args:
        base: digest of the base model, "" if it is not known.
        digest_of: returns the digest of a loaded adapter, "" if it is not known.
    """
    if adapter is None or not base:
        return base or None
    known = {name: digest_of(name) for name in names_in(adapter)}
    if not all(known.values()):
        return None
    return hashlib.sha256(f"{base} {renamed(adapter, known.__getitem__)}".encode()).hexdigest()


def question_digest(model: str, question: TypedQuestion) -> str:
    """Return the digest of a question to a model. ``model`` is the digest of the model's content."""
    options = [(option.text, option.description) for option in question.options]
    parts = (model, question.kind.value, question.instructions, options, question.labels_by.value)
    return hashlib.sha256(repr(("rootgraft question", *parts)).encode("utf-8", "surrogatepass")).hexdigest()
