"""``StatePool``: the tensors of recurrent states, a slot for each state."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.memory import lazy_zeros
from ..checkpoint.families.recurrent import RecurrentLayer
from ..checkpoint.model_config import ModelConfig

LayerStates = tuple[Tensor, Tensor]
"""A layer's states, each [slots, ...]: last inputs of its convolution, and what it sums; the latter may be empty."""


def state_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the bytes of one state: of all recurrent layers together. 0 for a model without."""
    shapes = [shape for layer in config.layers if layer.recurrent for shape in _shapes(layer.recurrent, config)]
    return sum(torch.Size(shape).numel() for shape in shapes) * dtype.itemsize


def _shapes(layer: RecurrentLayer, config: ModelConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return (layer.taps - 1, config.hidden_size), (0,)


class StatePool:
    """States of rows and checkpoints, written by the ops of ``kernels.state_ops``.

    Args:
        num_slots: see ``engine.kv_cache.state_cache.StateSlots.total``.
        dtype: the model's.

    Attributes:
        layers: by the index of the layer in the model.
        state_bytes: of one slot.
    """

    def __init__(self, config: ModelConfig, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self.state_bytes = state_bytes(config, dtype)
        self.layers: dict[int, LayerStates] = {}
        for index, layer in enumerate(config.layers):
            if layer.recurrent is not None:
                first, second = _shapes(layer.recurrent, config)
                self.layers[index] = (
                    _zeros((num_slots, *first), dtype, device),
                    _zeros((num_slots, *second), dtype, device),
                )


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros that take memory on a CPU only as they are written."""
    return (
        lazy_zeros(shape, dtype)
        if device.type == "cpu" and 0 not in shape
        else torch.zeros(shape, dtype=dtype, device=device)
    )
