"""Fits of calibrations: against scipy-free brute force, on data whose right temperature is known."""

from __future__ import annotations

import numpy as np
import pytest

from rootgraft.engine.model_tools.fit_calibration import CalibrationScores, fit_calibration
from rootgraft.engine.serving.calibration import Calibration
from rootgraft.engine.serving.label_shares import LabelShares


def drawn(temperature: float, bias: list[float], count: int = 4000) -> tuple[np.ndarray, np.ndarray]:
    """Shares of an overconfident model, and labels that are drawn from what it should have said."""
    rng = np.random.default_rng(7)
    logits = rng.normal(0.0, 3.0, (count, len(bias)))
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    true = np.log(shares) / temperature + np.array(bias)
    true = np.exp(true) / np.exp(true).sum(1, keepdims=True)
    return shares, (rng.random((count, 1)) > true.cumsum(1)).sum(1)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_the_temperature_that_labels_were_drawn_by_is_found(temperature: float) -> None:
    shares, labels = drawn(temperature, [0.0, 0.0, 0.0])
    fit = fit_calibration(shares, labels, with_bias=False)
    assert fit.temperature == pytest.approx(temperature, rel=0.08) and fit.bias == ()
    assert fit.after.brier <= fit.before.brier + 1e-3 and fit.after.ece < 0.03


def test_biases_are_found_too() -> None:
    shares, labels = drawn(2.0, [1.0, 0.0, -1.0])
    fit = fit_calibration(shares, labels, with_bias=True)
    assert fit.temperature == pytest.approx(2.0, rel=0.1)
    assert np.array(fit.bias) - fit.bias[1] == pytest.approx([1.0, 0.0, -1.0], abs=0.15)
    assert fit.after.brier < fit.before.brier and fit.after.ece < fit.before.ece


def test_no_other_temperature_is_likelier() -> None:
    shares, labels = drawn(1.7, [0.0, 0.0], count=60)
    found = fit_calibration(shares, labels, with_bias=False).temperature

    def loss(temperature: float) -> float:
        logits = np.log(shares) / temperature
        logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        return float(-logprobs[np.arange(60), labels].mean() + (1 / temperature - 1) ** 2 / 120)

    assert loss(found) <= min(loss(each) for each in np.linspace(0.05, 20.0, 2000)) + 1e-9


@pytest.mark.parametrize("with_bias", [False, True])
def test_labels_that_are_always_right_or_wrong_stay_within_bounds(with_bias: bool) -> None:
    shares = np.tile([[0.9, 0.1], [0.1, 0.9]], (20, 1))
    for labels in (np.tile([0, 1], 20), np.tile([1, 0], 20), np.zeros(40, np.int64)):
        fit = fit_calibration(shares, labels, with_bias=with_bias)
        assert 0.05 <= fit.temperature <= 20.0 and np.isfinite(fit.bias).all()


def test_few_examples_are_refused_and_a_share_of_zero_is_none() -> None:
    with pytest.raises(ValueError, match="19 examples are too few"):
        fit_calibration(np.full((19, 2), 0.5), np.zeros(19, np.int64), with_bias=False)
    shares = np.tile([[1.0, 0.0], [0.0, 1.0]], (10, 1))
    assert np.isfinite(fit_calibration(shares, np.tile([0, 0], 10), with_bias=True).after.brier)


def test_scores_are_those_of_their_definitions() -> None:
    scores = CalibrationScores.of(np.array([[0.8, 0.2], [0.6, 0.4]]), np.array([0, 1]))
    assert scores.brier == pytest.approx((2 * 0.2**2 + 2 * 0.6**2) / 2)
    assert scores.ece == pytest.approx((0.2 + 0.6) / 2)


def test_a_calibration_is_applied_as_it_was_fitted() -> None:
    found = LabelShares((0.7, 0.2, 0.1), 0.9)
    assert Calibration("", 1.0).apply(found).shares == pytest.approx(found.shares)
    weights = np.array([0.7, 0.2, 0.1]) ** (1 / 2.5) * np.exp([0.1, -0.2, 0.3])
    calibrated = Calibration("", 2.5, (0.1, -0.2, 0.3)).apply(found)
    assert calibrated.shares == pytest.approx((weights / weights.sum()).tolist()) and calibrated.mass == 0.9
    assert Calibration("", 0.05).apply(LabelShares((1.0, 0.0), 1.0)).shares == (1.0, 0.0)
