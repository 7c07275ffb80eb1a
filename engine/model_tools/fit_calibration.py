"""Fit a calibration to labelled answers: maximum likelihood by Newton's method, judged by cross-validation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]

LEAST_EXAMPLES = 20
LEAST_TEMPERATURE, MOST_TEMPERATURE = 0.05, 20.0
_FOLDS = 5
_BINS = 10
_SMALLEST = 1e-30  # Smallest share: the logarithm of a smaller one is replaced by its logarithm.
_ROUNDS = 100


@dataclass(frozen=True, slots=True)
class CalibrationScores:
    """The quality of probabilities, measured against the right answers.

    Attributes:
        brier: mean over examples of the squared distance between probabilities and the right label (Brier, 1950).
        ece: expected calibration error: how far the likeliest label's probability is from how often it is right, in
            ten bins of equal width, weighted by their examples (Naeini et al., 2015).
    """

    brier: float
    ece: float

    @classmethod
    def of(cls, probabilities: Floats, labels: Labels) -> CalibrationScores:
        """Score probabilities, [examples, labels], of examples with these right labels."""
        right = np.zeros_like(probabilities)
        right[np.arange(len(labels)), labels] = 1.0
        best, confidence = probabilities.argmax(1), probabilities.max(1)
        bins = np.minimum((confidence * _BINS).astype(np.int64), _BINS - 1)
        gaps = np.bincount(bins, (best == labels) - confidence, minlength=_BINS)
        return cls(float(((probabilities - right) ** 2).sum(1).mean()), float(np.abs(gaps).sum() / len(labels)))


@dataclass(frozen=True, slots=True)
class CalibrationFit:
    """A fit over all examples.

    Attributes:
        temperature, bias: as in ``Calibration``.
        before: quality of the model's own probabilities.
        after: quality after calibration, in five-fold cross-validation: on examples that were left out of the fit.
    """

    temperature: float
    bias: tuple[float, ...]
    before: CalibrationScores
    after: CalibrationScores


def fit_calibration(shares: Floats, labels: Labels, *, with_bias: bool) -> CalibrationFit:
    """Fit the temperature, and biases with ``with_bias``, to probabilities [examples, labels] and the right labels.

    A ridge penalty with the weight of one example favours temperature 1 and no bias, so that few examples have little
    effect.

    Raises:
        ValueError: there are fewer than ``LEAST_EXAMPLES``.
    """
    if len(labels) < LEAST_EXAMPLES:
        raise ValueError(f"{len(labels)} examples are too few: at least {LEAST_EXAMPLES} are needed")
    logits = np.log(np.maximum(shares, _SMALLEST))
    parts = np.random.default_rng(0).permutation(len(labels)) % _FOLDS
    held_out = np.empty_like(shares)
    for part in range(_FOLDS):
        is_in = parts != part
        scale, bias = _fit(logits[is_in], labels[is_in], with_bias=with_bias)
        held_out[~is_in] = _softmax(scale * logits[~is_in] + bias)
    scale, bias = _fit(logits, labels, with_bias=with_bias)
    return CalibrationFit(
        1.0 / scale,
        tuple(bias.tolist()) if with_bias else (),
        CalibrationScores.of(shares, labels),
        CalibrationScores.of(held_out, labels),
    )


def _fit(logits: Floats, labels: Labels, *, with_bias: bool) -> tuple[float, Floats]:
    """Return the scale, which is the inverse of the temperature, and the biases."""
    num_labels = logits.shape[1]
    size = 1 + num_labels if with_bias else 1
    params = np.zeros(1 + num_labels)
    params[0] = 1.0
    best = _loss(logits, labels, params)
    for _ in range(_ROUNDS):
        gradient, hessian = _derivatives(logits, labels, params)
        step = np.zeros_like(params)
        step[:size] = np.linalg.solve(hessian[:size, :size], gradient[:size])
        length = 1.0
        while length > 1e-6:
            tried = params - length * step
            tried[0] = np.clip(tried[0], 1.0 / MOST_TEMPERATURE, 1.0 / LEAST_TEMPERATURE)
            loss = _loss(logits, labels, tried)
            if loss < best:
                break
            length /= 2
        else:
            break
        if best - loss < 1e-12:
            params = tried
            break
        params, best = tried, loss
    return float(params[0]), params[1:]


def _loss(logits: Floats, labels: Labels, params: Floats) -> float:
    scaled = params[0] * logits + params[1:]
    most = scaled.max(1)
    sums = most + np.log(np.exp(scaled - most[:, None]).sum(1))
    ridge = ((params[0] - 1.0) ** 2 + (params[1:] ** 2).sum()) / (2 * len(labels))
    return float((sums - scaled[np.arange(len(labels)), labels]).mean() + ridge)


def _derivatives(logits: Floats, labels: Labels, params: Floats) -> tuple[Floats, Floats]:
    """Return gradient and Hessian of the loss."""
    count = len(labels)
    shares = _softmax(params[0] * logits + params[1:])
    error = shares.copy()
    error[np.arange(count), labels] -= 1.0
    mean = (shares * logits).sum(1)
    gradient = np.concatenate([[(error * logits).sum() / count], error.mean(0)])
    hessian = np.empty((len(params), len(params)))
    hessian[0, 0] = ((shares * logits**2).sum(1) - mean**2).mean()
    hessian[0, 1:] = hessian[1:, 0] = (shares * (logits - mean[:, None])).mean(0)
    hessian[1:, 1:] = np.diag(shares.mean(0)) - shares.T @ shares / count
    gradient += (params - np.eye(len(params))[0]) / count
    return gradient, hessian + np.eye(len(params)) / count


def _softmax(logits: Floats) -> Floats:
    weights: Floats = np.exp(logits - logits.max(1, keepdims=True))
    shares: Floats = weights / weights.sum(1, keepdims=True)
    return shares
