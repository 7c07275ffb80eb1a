"""``StatePool``: the tensors of recurrent states, a slot for each state."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.memory import lazy_zeros
from ..checkpoint.families.recurrent import DeltaLayer, RecurrentLayer, ShortConvLayer
from ..checkpoint.model_config import ModelConfig

SUM_DTYPE = torch.float32
"""Of what a layer sums over all tokens: rounding at the end of a step would make answers depend on chunks."""

LayerStates = tuple[Tensor, Tensor]
"""A layer's states, each [slots, ...]: last inputs of its convolution, and what it sums; the latter may be empty."""


def state_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the bytes of one state, all recurrent layers together; 0 for a model without such layers."""
    pairs = [_shapes(layer.recurrent, config) for layer in config.layers if layer.recurrent]
    conv, sums = (sum(torch.Size(pair[i]).numel() for pair in pairs) for i in (0, 1))
    return conv * dtype.itemsize + sums * SUM_DTYPE.itemsize


def _shapes(layer: RecurrentLayer, config: ModelConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if isinstance(layer, ShortConvLayer):
        return (layer.taps - 1, config.hidden_size), (0,)
    rows = layer.key_dim if isinstance(layer, DeltaLayer) else layer.state_size
    return (layer.taps - 1, layer.conv_width), (layer.num_heads, rows, layer.head_dim)


class StatePool:
    """States of rows and checkpoints, written by the ops of ``kernels.state_ops``.

    Args:
        num_slots: see ``engine.kv_cache.state_cache.StateSlots.total``.
        dtype: the model's type, which is the type of the convolutions' inputs.

    Attributes:
        layers: states of each recurrent layer, by the index of the layer in the model.
        state_bytes: bytes of one slot.
    """

    def __init__(self, config: ModelConfig, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self.state_bytes = state_bytes(config, dtype)
        self.layers: dict[int, LayerStates] = {}
        for index, layer in enumerate(config.layers):
            if layer.recurrent is not None:
                first, second = _shapes(layer.recurrent, config)
                self.layers[index] = (
                    _zeros((num_slots, *first), dtype, device),
                    _zeros((num_slots, *second), SUM_DTYPE, device),
                )

    @property
    def form(self) -> str:
        """Number formats and shapes of a state: its bytes can only be loaded into a pool of the same form."""
        return ",".join("x".join(map(str, states.shape[1:])) + f":{states.dtype}" for states in self._tensors())

    def read(self, slot: int) -> memoryview:
        """Return a copy of a state, layer by layer. Another thread may compute meanwhile."""
        data = np.empty(self.state_bytes, np.uint8)
        for part, target in self._parts(slot, data):
            np.copyto(target, part.view(torch.uint8).cpu().numpy())
        return data.data

    def load(self, slot: int, payload: bytes | bytearray | memoryview) -> None:
        """Fill a slot with bytes of ``read``. Raises IndexError for a slot or a size that does not fit the pool."""
        data = np.frombuffer(payload, np.uint8)
        if not 0 <= slot < next(self._tensors()).shape[0] or data.nbytes != self.state_bytes:
            raise IndexError(f"slot {slot} with {data.nbytes} bytes is not a slot of the pool")
        for part, source in self._parts(slot, data):
            part.view(torch.uint8).copy_(torch.from_numpy(source.copy()))

    def _tensors(self) -> Iterator[Tensor]:
        return (states for pair in self.layers.values() for states in pair if states.numel())

    def _parts(self, slot: int, data: NDArray[np.uint8]) -> Iterator[tuple[Tensor, NDArray[np.uint8]]]:
        """Yield each layer's states of a slot, flat, with the layer's part of the slot's bytes."""
        start = 0
        for states in self._tensors():
            part = states[slot].view(-1)
            size = part.numel() * part.element_size()
            yield part, data[start : start + size]
            start += size


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros; on a CPU their memory is allocated only when they are written."""
    return (
        lazy_zeros(shape, dtype)
        if device.type == "cpu" and 0 not in shape
        else torch.zeros(shape, dtype=dtype, device=device)
    )
