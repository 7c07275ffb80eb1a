"""What the machine can do, as measured: numbers that some machine might have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rootgraft.kernels import machine_limits, ops, quantised_weights
from rootgraft.kernels.layouts.packed_weights import Linear


def test_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_limits, "_COLUMNS", 512)
    monkeypatch.setattr(machine_limits, "last_cache_size", lambda: 0)
    assert 1e6 < machine_limits.reading_rate() < 1e14
    for bytewise in (False, *([True] if quantised_weights.available() else [])):
        assert 1e6 < machine_limits.products_rate(torch.bfloat16, bytewise=bytewise, budget=0.0) < 1e15
    layers: list[Linear] = [ops.pack_linear(torch.ones(32, 64, dtype=torch.bfloat16))]
    if quantised_weights.available():
        layers.append(quantised_weights.pack_channels(torch.ones(32, 64), dynamic=True))
    for layer in layers:
        assert 1e6 < machine_limits.layer_rate(layer, torch.bfloat16, budget=0.0) < 1e15


def test_the_size_of_the_last_cache(tmp_path: Path) -> None:
    assert machine_limits.last_cache_size(tmp_path) == 0
    for index, size in enumerate(("48K\n", "2048K\n", "480M\n", "?\n")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size)
    assert machine_limits.last_cache_size(tmp_path) == 480 << 20
