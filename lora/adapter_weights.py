"""Tensors of a PEFT adapter sorted by module, and checked against its config and the base model."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .base_projections import EMBEDDING, BaseLayout, in_tower
from .config import OF_EXPERTS, AdapterConfig
from .errors import AdapterError
from .published.module_weights import ModuleWeights
from .published.stacked_experts import expert_modules

_NAME = re.compile(
    r"base_model\.model\.(?P<module>.+)\."
    r"(?P<part>lora_A\.weight|lora_B\.weight|lora_B\.bias|lora_embedding_A|lora_embedding_B|lora_magnitude_vector"
    r"(?:\.weight)?|base_layer\.weight|lora_monteclora_sampler\..+)"
)
_LAYER = re.compile(r"(?:[^.]+\.)+?(\d+)\.")


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """A whole adapter as published.

    Attributes:
        modules: by the base model's name of the module, in the order of names.
        invocation_tokens: of an activated LoRA; empty for an ordinary one.
        digest: SHA-256 in hex over everything that affects its results: its identity.
    """

    modules: Mapping[str, ModuleWeights]
    invocation_tokens: tuple[int, ...]
    digest: str

    @property
    def rank(self) -> int:
        return max(module.rank for module in self.modules.values())


def sort_tensors(
    tensors: Mapping[str, Tensor], config: AdapterConfig, layout: BaseLayout, most_rank: int
) -> AdapterWeights:
    """Sort an adapter's tensors by module, found from their names and shapes.

    Args:
        tensors: from ``read_tensors``.
        most_rank: limit of a module's rank.

    Raises:
        AdapterError: a tensor is unknown or has another shape than the config and the base model give it, a part of a
            pair is missing, or the adapter comes with a base weight that is not this model's.
    """
    if not layout.experts and any(OF_EXPERTS.search(name) for name in config.parameters):
        raise AdapterError(
            "target_parameters names experts, which this base model does not have. Train LoRA on its linear modules.",
            "target_parameters",
        )
    parts: dict[str, dict[str, Tensor]] = {}
    stacked: dict[str, dict[str, Tensor]] = {}  # of all experts of a layer
    published: dict[str, str] = {}
    for name, tensor in tensors.items():
        trained, part = _split(name)
        if in_tower(trained, layout.towers):
            continue
        if layout.experts_of(trained) is not None:
            _add(stacked.setdefault(trained, {}), part.removesuffix(".weight"), tensor, name)
            continue
        module = layout.module_of(trained)
        if module is None and OF_EXPERTS.search(trained):
            raise AdapterError(
                f"The tensor {name} is for experts, which this base model does not have.",
                name,
            )
        if module is None:
            raise AdapterError(f"The tensor {name} is for a module {trained} that the base model does not have.", name)
        published[module] = trained
        if part == "base_layer.weight":
            _check_base(module, tensor, layout)
        elif not part.startswith("lora_monteclora_sampler."):  # used in training only
            _add(parts.setdefault(module, {}), part.removesuffix(".weight"), tensor, name)
    if not parts and not stacked:
        raise AdapterError("The adapter adapts no module.")
    modules = {name: _module(name, published[name], parts[name], config, layout, most_rank) for name in sorted(parts)}
    for trained in sorted(stacked):
        experts = layout.experts_of(trained)
        assert experts is not None
        found = expert_modules(trained, stacked[trained], config, experts, most_rank)
        if twice := sorted(found.keys() & modules.keys()):
            raise AdapterError(f"The adapter adapts {twice[0]} twice.", twice[0])
        modules |= found
    modules = {name: modules[name] for name in sorted(modules)}
    return AdapterWeights(modules, config.invocation_tokens, _digest(modules, config.invocation_tokens))


def _split(name: str) -> tuple[str, str]:
    """Split a tensor's name into its module, as it was trained, and the part of it."""
    found = _NAME.fullmatch(name)
    if found is None:
        raise AdapterError(f"The tensor {name} is none that a PEFT LoRA has; it might change the result.", name)
    return found["module"], found["part"]


def _add(parts: dict[str, Tensor], part: str, tensor: Tensor, name: str) -> None:
    if part in parts:  # old and new spelling of the same
        raise AdapterError(f"The tensor {name} is there twice.", name)
    parts[part] = tensor


def _check_base(module: str, tensor: Tensor, layout: BaseLayout) -> None:
    """Check a base weight that PEFT saved with an adapter of the embedding against the base model's."""
    base = layout.read_weight(module)
    if tensor.shape != base.shape or not torch.equal(tensor.to(layout.dtype), base.to(layout.dtype).cpu()):
        raise AdapterError(
            f"The adapter comes with a weight of {module} that is not this base model's "
            f"({list(tensor.shape)} against {list(base.shape)}, or other values).",
            f"{module}.base_layer.weight",
        )


def _module(
    name: str, trained: str, parts: Mapping[str, Tensor], config: AdapterConfig, layout: BaseLayout, most_rank: int
) -> ModuleWeights:
    """Check the parts of a module. ``trained`` is its name in the model that PEFT saw, to which patterns refer."""
    _check_targeted(name, trained, config)
    middle = "embedding_" if name == EMBEDDING else ""
    expected = {f"lora_{middle}A", f"lora_{middle}B"}
    if config.dora:
        expected.add("lora_magnitude_vector")
    if config.lora_bias:
        expected.add("lora_B.bias")
    if parts.keys() != expected:
        missing, extra = sorted(expected - parts.keys()), sorted(parts.keys() - expected)
        raise AdapterError(
            f"By its config the adapter's {name} must have {', '.join(sorted(expected))}; "
            f"missing: {', '.join(missing) or 'none'}; unexpected: {', '.join(extra) or 'none'}.",
            name,
        )
    pattern = f"{trained}.weight" if _ends_with(f"{trained}.weight", config.parameters) else trained
    rank, (outputs, inputs) = config.rank_of(pattern), layout.modules[name]
    if rank > most_rank:
        raise AdapterError(f"{name} has rank {rank}; at most {most_rank} is taken (--max-lora-rank).", "r")
    a, b = parts[f"lora_{middle}A"], parts[f"lora_{middle}B"]
    _check_shape(name, "A", a, (rank, inputs))
    _check_shape(name, "B", b, (outputs, rank))
    bias, magnitude = parts.get("lora_B.bias"), parts.get("lora_magnitude_vector")
    if bias is not None:
        _check_shape(name, "bias of B", bias, (outputs,))
    if magnitude is not None:
        _check_shape(name, "magnitude", magnitude, (outputs,))
    return ModuleWeights(config.scale_of(pattern, rank), a, b, bias, magnitude)


def _check_targeted(name: str, trained: str, config: AdapterConfig) -> None:
    """Refuse tensors of modules that the config leaves out: PEFT would ignore them, but the intent is unclear."""
    is_parameter = _ends_with(f"{trained}.weight", config.parameters)
    if config.targets is not None and not is_parameter and not _ends_with(trained, config.targets):
        raise AdapterError(f"The adapter has tensors for {name}, which target_modules does not name.", "target_modules")
    if _ends_with(trained, config.excluded):
        raise AdapterError(f"The adapter has tensors for {name}, which exclude_modules names.", "exclude_modules")
    layer = _LAYER.match(name)
    if config.layers is not None and (layer is None or int(layer[1]) not in config.layers):
        raise AdapterError(
            f"The adapter has tensors for {name}, whose layer is not in layers_to_transform.", "layers_to_transform"
        )
    if name == EMBEDDING and (config.lora_bias or config.invocation_tokens):
        option = "lora_bias" if config.lora_bias else "alora_invocation_tokens"
        raise AdapterError(f"{option} is set and {name} adapted; PEFT has no such combination.", option)


def _ends_with(name: str, suffixes: frozenset[str]) -> bool:
    return any(name == suffix or name.endswith(f".{suffix}") for suffix in suffixes)


def _check_shape(name: str, what: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise AdapterError(
            f"{what} of {name} has shape {list(tensor.shape)}; by the config's rank and the base model's sizes it must "
            f"be {list(shape)}.",
            name,
        )


def _digest(modules: Mapping[str, ModuleWeights], invocation_tokens: tuple[int, ...]) -> str:
    """SHA-256 over names, factors, shapes, types and values; headers carry their lengths against ambiguity."""
    digest = hashlib.sha256(repr(("rootgraft adapter", invocation_tokens)).encode())
    for name, module in modules.items():
        for tensor in (module.a, module.b, module.bias, module.magnitude):
            kind = None if tensor is None else (str(tensor.dtype), tuple(tensor.shape))
            head = repr((name, module.scale, kind)).encode()
            digest.update(len(head).to_bytes(8, "little") + head)
            if tensor is not None:
                digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
