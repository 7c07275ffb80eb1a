"""Calibration of a question's probabilities: temperature scaling, with a bias for each label where it was fitted.

Guo et al., On Calibration of Modern Neural Networks (2017). It is for one model and one question, told by content.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

from ..text.questions import TypedQuestion
from .label_shares import LabelShares


@dataclass(frozen=True, slots=True)
class Calibration:
    """What turns the shares of a model's labels into calibrated ones.

    Attributes:
        digest: of model and question, by ``question_digest``.
        temperature: by which the logarithms of the shares are divided.
        bias: what is added to each of them then; empty for nothing.
    """

    digest: str
    temperature: float
    bias: tuple[float, ...] = ()

    def apply(self, found: LabelShares) -> LabelShares:
        """Return the calibrated shares. The labels' mass is the model's."""
        bias = self.bias or (0.0,) * len(found.shares)
        logits = [
            math.log(share) / self.temperature + each if share > 0 else -math.inf
            for share, each in zip(found.shares, bias, strict=True)
        ]
        most = max(logits)
        weights = [math.exp(logit - most) for logit in logits]
        total = math.fsum(weights)
        return LabelShares(tuple(weight / total for weight in weights), found.mass)


def question_digest(model: str, question: TypedQuestion) -> str:
    """Return the identity of a question to a model, which is told by the digest of its content."""
    options = [(option.text, option.description) for option in question.options]
    parts = (model, question.kind.value, question.instructions, options, question.labels_by.value)
    return hashlib.sha256(repr(("rootgraft question", *parts)).encode("utf-8", "surrogatepass")).hexdigest()
