"""What the machine can do, as measured: numbers that some machine might have."""

from __future__ import annotations

import pytest
import torch

from rootgraft.kernels import machine_limits, quantised_weights


def test_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_limits, "_COLUMNS", 512)
    assert 1e6 < machine_limits.reading_rate() < 1e14
    for bytewise in (False, *([True] if quantised_weights.available() else [])):
        assert 1e6 < machine_limits.products_rate(torch.bfloat16, bytewise=bytewise, budget=0.0) < 1e15
