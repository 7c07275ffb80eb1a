"""Adapter weights: a PEFT adapter's tensors, sorted by module and checked against its config and the base model."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .base_projections import EMBEDDING, HEAD, SCORE, BaseLayout, in_tower
from .config import OF_EXPERTS, AdapterConfig
from .errors import AdapterError
from .published.module_weights import ModuleWeights
from .published.own_biases import biased_modules
from .published.saved_modules import UNUSED, SavedModules, saved_modules
from .published.stacked_experts import expert_modules

_LORA = re.compile(
    r"base_model\.model\.(?P<module>.+)\."
    r"(?P<part>lora_A\.weight|lora_B\.weight|lora_B\.bias|lora_embedding_A|lora_embedding_B|lora_magnitude_vector"
    r"(?:\.weight)?|lora_monteclora_sampler\..+)"
)
_SAVED = re.compile(
    r"base_model\.model\.(?P<module>.+?)\.(?P<part>(?:(?:token_adapter\.)?base_layer\.|original_module\.|modules_to_save\.)?"
    r"(?:weight|bias)|token_adapter\.trainable_tokens_(?:delta|original))"
)
_LAYER = re.compile(r"(?:[^.]+\.)+?(\d+)\.")


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """A whole adapter as published.

    Attributes:
        modules: LoRA of modules by their names in the base model, in the order of names.
        saved: whole weights that replace weights of the base model.
        invocation_tokens: invocation tokens of an activated LoRA; empty for an ordinary adapter.
        digest: SHA-256, in hexadecimal, of everything that affects the adapter's results: its identity.
    """

    modules: Mapping[str, ModuleWeights]
    saved: SavedModules
    invocation_tokens: tuple[int, ...]
    digest: str

    @property
    def rank(self) -> int:
        return max((module.rank for module in self.modules.values()), default=0)


def sort_tensors(
    tensors: Mapping[str, Tensor], config: AdapterConfig, layout: BaseLayout, most_rank: int
) -> AdapterWeights:
    """Sort an adapter's tensors by module, found from their names and shapes.

    Args:
        tensors: tensors, as ``read_tensors`` returns them.
        most_rank: limit of a module's rank.

    Raises:
        AdapterError: a tensor is unknown, its shape does not fit the config and the base model, the other factor of a
            pair is missing, or the adapter's file contains a base weight that differs from this model's.
    """
    modules, saved = _sort(tensors, config, layout, most_rank)
    return AdapterWeights(modules, saved, config.invocation_tokens, _digest(modules, saved, config.invocation_tokens))


def check_tensors(shapes: Mapping[str, Tensor], config: AdapterConfig, layout: BaseLayout, most_rank: int) -> None:
    """Check an adapter's tensors on the meta device as ``sort_tensors`` does, without checks of their values."""
    _sort(shapes, config, layout, most_rank)


def _sort(
    tensors: Mapping[str, Tensor], config: AdapterConfig, layout: BaseLayout, most_rank: int
) -> tuple[dict[str, ModuleWeights], SavedModules]:
    """Return LoRA and whole weights by module; see ``sort_tensors``."""
    if not layout.experts and any(OF_EXPERTS.search(name) for name in config.parameters):
        raise AdapterError(
            "target_parameters names experts, which this base model does not have. Train LoRA on its linear modules.",
            "target_parameters",
        )
    found = _Sorted()
    for name, tensor in tensors.items():
        found.add(name, tensor, layout, config)
    saved = saved_modules(found.saved, config, layout)
    whole = {name: rows for name, rows in ((EMBEDDING, saved.embedding), (HEAD, saved.head)) if rows is not None}
    _tie(found.parts, config, layout)
    modules = {}
    for name, parts in found.parts.items():
        rows = whole.get(name)
        if rows is not None and rows.ids is not None:
            raise AdapterError(f"The adapter has LoRA and new rows of {name}; PEFT has no such combination.", name)
        size = None if rows is None else len(rows.rows)
        is_tied = name == HEAD and config.ties_weights and layout.tied and EMBEDDING in found.parts
        trained = found.trained[EMBEDDING if is_tied else name]
        module = _module(name, trained, parts, config, layout, most_rank, size)
        # PEFT gives a tied head the embedding's factors, but the rank and alpha of its own name, as if it had its own.
        modules[name] = replace(module, scale=_scale_of(layout.head_trained, config)) if is_tied else module
    for name, module in expert_modules(found.stacked, config, layout.experts_of, most_rank):
        if name in modules:
            raise AdapterError(f"The adapter adapts {name} twice.", name)
        modules[name] = module
    modules |= biased_modules(found.saved, modules, config, layout)
    if not modules and not saved.tensors():
        raise AdapterError("The adapter adapts no module.")
    return {name: modules[name] for name in sorted(modules)}, saved


@dataclass(slots=True)
class _Sorted:
    """Tensors of an adapter by module and part.

    Attributes:
        parts: LoRA of modules, by the base model's names.
        stacked: LoRA of all experts of a layer, by the name of the module that contains them.
        saved: whole weights, biases and rows, by the base model's names.
        trained: the name of each module in the model that PEFT trained, by the base model's name.
    """

    parts: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    stacked: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    saved: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    trained: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, tensor: Tensor, layout: BaseLayout, config: AdapterConfig) -> None:
        """Add a tensor with this name in the file. Raises AdapterError if the name is unknown."""
        trained, part, is_saved = _split(name)
        if in_tower(trained, layout.towers):
            return
        if layout.experts_of(trained) is not None:
            _add(self.stacked.setdefault(trained, {}), part.removesuffix(".weight"), tensor, name)
            return
        if trained == SCORE and is_saved:
            if part not in UNUSED:
                _add(self.saved.setdefault(SCORE, {}), part.removeprefix("modules_to_save."), tensor, name)
            return
        if (fused := layout.fused_of(trained)) and not is_saved:
            self._add_fused(name, part.removesuffix(".weight"), tensor, fused, trained, layout)
            return
        module = layout.module_of(trained) or (layout.norm_of(trained) if is_saved else None)
        if module is None:
            raise _unknown(name, trained, config)
        self.trained[module] = trained
        if not is_saved:
            # PEFT uses the sampler only in training.
            if not part.startswith("lora_monteclora_sampler."):
                _add(self.parts.setdefault(module, {}), part.removesuffix(".weight"), tensor, name)
        elif part.endswith("weight") and module not in (EMBEDDING, HEAD, *layout.norms):
            _check_base(module, part, tensor, layout)
        elif part not in UNUSED:
            _add(self.saved.setdefault(module, {}), part, tensor, name)

    def _add_fused(
        self, name: str, part: str, tensor: Tensor, modules: tuple[str, ...], trained: str, layout: BaseLayout
    ) -> None:
        """Add a part of a LoRA of several modules trained as one: A is shared, other parts are split by rows."""
        if part.startswith("lora_monteclora_sampler."):
            return
        sizes = [layout.modules[module][0] for module in modules]
        if part != "lora_A" and tensor.shape[:1] != (sum(sizes),):
            raise AdapterError(f"{name} has shape {list(tensor.shape)}; {trained} has {sum(sizes)} outputs.", name)
        pieces = (tensor,) * len(modules) if part == "lora_A" else tensor.split(sizes)
        for module, piece in zip(modules, pieces, strict=True):
            self.trained[module] = trained
            _add(self.parts.setdefault(module, {}), part, piece, name)


def _unknown(name: str, trained: str, config: AdapterConfig) -> AdapterError:
    lacks = f"a module {trained} that the base model does not have"
    if OF_EXPERTS.search(trained):
        lacks = "experts, which this base model does not have"
    return AdapterError(f"The tensor {name} is for {lacks}.{_trained_on(config)}", name)


def _trained_on(config: AdapterConfig) -> str:
    return f" According to its config, the adapter was trained on {config.base}." if config.base else ""


def _split(name: str) -> tuple[str, str, bool]:
    """Split a tensor's name into its module, as trained, and its part.

    Returns also whether it is not part of a LoRA.
    """
    lora = _LORA.fullmatch(name)
    found = lora or _SAVED.fullmatch(name)
    if found is None:
        raise AdapterError(f"The tensor {name} is not a tensor of a PEFT LoRA, and might change the result.", name)
    return found["module"], found["part"], lora is None


def _add(parts: dict[str, Tensor], part: str, tensor: Tensor, name: str) -> None:
    # This is reached if the file contains the tensor under both its old and its new name.
    if part in parts:
        raise AdapterError(f"The tensor {name} appears twice.", name)
    parts[part] = tensor


def _check_base(module: str, part: str, tensor: Tensor, layout: BaseLayout) -> None:
    """Check that a whole weight of a linear module, which all adapters share, equals the base model's."""
    base = layout.read_weight(module)
    if tensor.shape != base.shape or not (tensor.is_meta or _equal(tensor, base, layout)):
        raise AdapterError(
            f"The adapter comes with a tensor {module}.{part} that is not this base model's ({list(tensor.shape)} "
            f"against {list(base.shape)}, or other values). embed_tokens, lm_head and norms are the only whole "
            "matrices that an adapter may replace (modules_to_save); train others with LoRA.",
            "modules_to_save",
        )


def _equal(tensor: Tensor, base: Tensor, layout: BaseLayout) -> bool:
    return torch.equal(tensor.to(layout.dtype), base.to(layout.dtype).cpu())


def _tie(parts: dict[str, dict[str, Tensor]], config: AdapterConfig, layout: BaseLayout) -> None:
    """Swap A and B of the embedding's pair for a tied head, because both compute ``E + s (B A)^T``."""
    embedding = parts.get(EMBEDDING, {})
    if config.ties_weights and layout.tied and {"lora_embedding_A", "lora_embedding_B"} <= embedding.keys():
        a, b = embedding["lora_embedding_A"], embedding["lora_embedding_B"]
        parts.setdefault(HEAD, {"lora_A": b.T.contiguous(), "lora_B": a.T.contiguous()})


def _module(
    name: str,
    trained: str,
    parts: Mapping[str, Tensor],
    config: AdapterConfig,
    layout: BaseLayout,
    most_rank: int,
    vocab_size: int | None,
) -> ModuleWeights:
    """Check the parts of a module.

    Args:
        trained: the module's name in the model that PEFT trained; patterns in the config refer to this name.
        vocab_size: number of tokens of the adapter's own embedding or head; None for the base model's.
    """
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
            f"According to its config, the adapter's {name} must have {', '.join(sorted(expected))}; missing: "
            f"{', '.join(missing) or 'none'}; unexpected: {', '.join(extra) or 'none'}.",
            name,
        )
    pattern = f"{trained}.weight" if _ends_with(f"{trained}.weight", config.parameters) else trained
    rank, (outputs, inputs) = config.rank_of(pattern), layout.modules[name]
    if vocab_size is not None:
        outputs, inputs = (outputs, vocab_size) if name == EMBEDDING else (vocab_size, inputs)
    if rank > most_rank:
        raise AdapterError(f"{name} has rank {rank}; the limit is {most_rank} (--max-lora-rank).", "r")
    a, b = parts[f"lora_{middle}A"], parts[f"lora_{middle}B"]
    _check_shape(name, "A", a, (rank, inputs), config)
    _check_shape(name, "B", b, (outputs, rank), config)
    bias, magnitude = parts.get("lora_B.bias"), parts.get("lora_magnitude_vector")
    if bias is not None:
        _check_shape(name, "bias of B", bias, (outputs,), config)
    if magnitude is not None:
        _check_shape(name, "magnitude", magnitude, (outputs,), config)
    return ModuleWeights(config.scale_of(pattern, rank), a, b, bias, magnitude)


def _scale_of(trained: str, config: AdapterConfig) -> float:
    """Return the factor of ``B A x`` for a module whose rank the config alone determines."""
    return config.scale_of(trained, config.rank_of(trained))


def _check_targeted(name: str, trained: str, config: AdapterConfig) -> None:
    """Refuse tensors of modules that the config leaves out. PEFT would ignore them, but the intent is unclear."""
    is_parameter = _ends_with(f"{trained}.weight", config.parameters)
    if config.targets is not None and not is_parameter and not _ends_with(trained, config.targets):
        raise AdapterError(f"The adapter has tensors for {name}, which target_modules does not name.", "target_modules")
    if _ends_with(trained, config.excluded):
        raise AdapterError(f"The adapter has tensors for {name}, which exclude_modules names.", "exclude_modules")
    # PEFT adapts a module that target_modules names whole, such as lm_head, whatever its layer.
    is_whole = config.targets is not None and trained in config.targets
    layer = _LAYER.match(name)
    if config.layers is not None and not is_whole and (layer is None or int(layer[1]) not in config.layers):
        raise AdapterError(
            f"The adapter has tensors for {name}, whose layer is not in layers_to_transform.", "layers_to_transform"
        )
    if name == EMBEDDING and (config.lora_bias or config.invocation_tokens):
        option = "lora_bias" if config.lora_bias else "alora_invocation_tokens"
        raise AdapterError(f"{option} is set and {name} is adapted; PEFT has no such combination.", option)


def _ends_with(name: str, suffixes: frozenset[str]) -> bool:
    return any(name == suffix or name.endswith(f".{suffix}") for suffix in suffixes)


def _check_shape(name: str, what: str, tensor: Tensor, shape: tuple[int, ...], config: AdapterConfig) -> None:
    if tensor.shape != shape:
        raise AdapterError(
            f"{what} of {name} has shape {list(tensor.shape)}; with the config's rank and the base model's sizes it "
            f"must be {list(shape)}.{_trained_on(config)}",
            name,
        )


def _digest(modules: Mapping[str, ModuleWeights], saved: SavedModules, invocation_tokens: tuple[int, ...]) -> str:
    """Return the SHA-256 of names, factors, shapes, types and values. Headers contain lengths to avoid ambiguity."""
    digest = hashlib.sha256(repr(("rootgraft adapter", invocation_tokens)).encode())
    parts: list[tuple[tuple[object, ...], Tensor | None]] = []
    for name, module in modules.items():
        head: tuple[object, ...] = (name, module.scale)
        parts += [(head, tensor) for tensor in (module.a, module.b, module.bias, module.magnitude)]
        parts += [] if module.own_bias is None else [((name, "bias"), module.own_bias)]
    parts += [((name,), tensor) for name, tensor in saved.tensors()]
    for place, tensor in parts:
        kind = None if tensor is None else (str(tensor.dtype), tuple(tensor.shape))
        text = repr((*place, kind)).encode()
        digest.update(len(text).to_bytes(8, "little") + text)
        if tensor is not None:
            digest.update(bytes_of(tensor))
    return digest.hexdigest()


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a tensor's values as bytes."""
    data: memoryview = tensor.contiguous().flatten().view(torch.uint8).numpy().data
    return data
