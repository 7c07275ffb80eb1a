"""Weights that a model holds as they are published, which norms of DoRA on a GPU read there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.models.lora_models import decoder

from rootgraft.engine.loading.base_layout import base_layout, held_weights
from rootgraft.kernels.ops import use_native


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "phi3"])
def test_held_weights_are_the_published_ones(family: str, tmp_path: Path) -> None:
    use_native(False)  # which packs weights in panels, as no GPU does
    try:
        model = decoder(family, tmp_path)
    finally:
        use_native(True)
    held = held_weights(model)
    layout = base_layout(model, tmp_path / family, dummy=False)
    assert held.keys() == layout.modules.keys() - {"model.embed_tokens"}
    for module, weight in held.items():
        assert torch.equal(weight, layout.read_weight(module)), module
        assert tuple(weight.shape) == layout.modules[module]


def test_packed_weights_are_read_from_files(tmp_path: Path) -> None:
    model = decoder("llama", tmp_path)
    plain = [part for part in model.projections if getattr(part.packed, "kernels", None) is None]
    assert len(held_weights(model)) == sum(len(part.modules) for part in plain)
