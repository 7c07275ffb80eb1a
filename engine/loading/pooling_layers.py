"""Dense layers that a checkpoint applies after pooling, in the files of sentence-transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..checkpoint.pooling_config import DenseModule
from ..errors import ModelError

_FILE = "model.safetensors"
_ACTIVATIONS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "ReLU": torch.relu,
    "GELU": torch.nn.functional.gelu,
    "SiLU": torch.nn.functional.silu,
    "Sigmoid": torch.sigmoid,
}


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A linear layer with an activation: ``act(W x + b)``, all in fp32.

    Attributes:
        weight: [out, in].
        bias: [out]; None if absent.
    """

    weight: Tensor
    bias: Tensor | None
    activation: Callable[[Tensor], Tensor]

    def __call__(self, pooled: Tensor) -> Tensor:
        """Return the layer's output [out] for [in] values."""
        return self.activation(torch.nn.functional.linear(pooled, self.weight, self.bias))


def load_dense(module: DenseModule, device: torch.device) -> DenseLayer:
    """Load a Dense module.

    Raises:
        ModelError: the module's weights are missing or have another shape, or its activation is not supported.
    """
    activation = _ACTIVATIONS.get(module.activation)
    if activation is None:
        known = ", ".join(_ACTIVATIONS)
        raise ModelError(
            f"{module.place}: activation_function {module.activation} is not supported; supported are {known}."
        )
    try:
        tensors = load_file(module.folder / _FILE)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{module.place}/{_FILE} is missing or damaged, and no other format is supported.") from error
    wanted = {"linear.weight": (module.size, module.size_in)} | ({"linear.bias": (module.size,)} if module.bias else {})
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if found != wanted:
        raise ModelError(f"{module.place}/{_FILE} must hold {wanted}, as its config.json states, not {found}.")
    weight, bias = tensors["linear.weight"], tensors.get("linear.bias")
    moved = None if bias is None else bias.to(device, torch.float32)
    return DenseLayer(weight.to(device, torch.float32), moved, activation)
