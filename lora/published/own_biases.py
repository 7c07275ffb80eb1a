"""Own biases: biases that PEFT saves with an adapter (``bias="all"`` or ``"lora_only"``) to replace the model's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ..base_projections import EMBEDDING, BaseLayout
from ..config import AdapterConfig
from ..errors import AdapterError
from .module_weights import ModuleWeights
from .saved_modules import Parts, check_bias, names_saved

_BIASES = ("bias", "base_layer.bias")


def biased_modules(
    parts: Parts, modules: Mapping[str, ModuleWeights], config: AdapterConfig, layout: BaseLayout
) -> dict[str, ModuleWeights]:
    """Return the linear modules with their own bias, each with its LoRA pair, or with a pair that adds nothing.

    Args:
        parts: tensors by module of the base model and part.
        modules: modules that have LoRA.

    Raises:
        AdapterError: a bias is missing, has another shape, or the config or the base model has no such bias.
    """
    biases = {name: bias for name, found in parts.items() if (bias := _bias_of(name, found)) is not None}
    for name in biases:
        is_saved_norm = name in layout.norms and names_saved(config, name)
        if not is_saved_norm and (config.bias == "none" or (config.bias == "lora_only" and name not in modules)):
            raise AdapterError(f"The adapter has a bias of {name}, but its config says bias = '{config.bias}'.", "bias")
    expected = {"none": (), "all": (*layout.modules, *layout.norms), "lora_only": tuple(modules)}[config.bias]
    _check_complete(biases, expected, layout)
    found = {}
    for name in biases.keys() - layout.norms.keys():
        outputs, inputs = layout.modules[name]
        if tuple(biases[name].shape) != check_bias(name, layout).shape:
            raise AdapterError(
                f"The adapter's bias of {name} has shape {list(biases[name].shape)}; the base model's is [{outputs}].",
                name,
            )
        nothing = ModuleWeights(1.0, torch.zeros(1, inputs), torch.zeros(outputs, 1), None, None)
        found[name] = replace(modules.get(name, nothing), own_bias=biases[name])
    return found


def _bias_of(name: str, parts: Mapping[str, Tensor]) -> Tensor | None:
    found = [part for part in _BIASES if part in parts]
    if len(found) > 1:
        raise AdapterError(f"The tensors {name}.{found[0]} and {name}.{found[1]} belong to the same module.", name)
    return parts[found[0]] if found else None


def _check_complete(biases: Mapping[str, Tensor], names: Iterable[str], layout: BaseLayout) -> None:
    for name in names:
        if name != EMBEDDING and name not in biases and layout.read_bias(name) is not None:
            raise AdapterError(
                f"According to its config, the adapter must have the bias of {name}, but adapter_model.safetensors "
                f"has no tensor {name}.bias.",
                "bias",
            )
