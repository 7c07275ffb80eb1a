"""The base model's layout for adapters: names and sizes of its projections, and their published weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from ...kernels.layouts.packed_weights import PackedLinear
from ...lora.base_projections import (
    EMBEDDING,
    HEAD,
    AbsorbedHeads,
    BaseLayout,
    ExpertModules,
    ExpertPlace,
    ProjectionShape,
)
from ...lora.published.saved_modules import MOST_ADDED_TOKENS
from ..checkpoint.families.mixture import Mixture
from ..checkpoint.gguf import GgufFile
from ..models.decoder import DecoderModel
from ..models.experts import Experts
from ..models.latent_attention import LatentAttention
from .load_model import load_model, open_source
from .tensor_names import EMBEDDING as EMBEDDING_WEIGHT
from .tensor_names import HEAD as HEAD_WEIGHT
from .tensor_names import fused_modules, norm_shapes, shared_name, stored_names, unused_modules
from .weight_readers import WeightSource


def base_layout(model: DecoderModel, checkpoint: Path | GgufFile, *, dummy: bool) -> BaseLayout:
    """Return the layout of a model, whose files are read again if an adapter needs a weight; ``dummy`` as loaded."""
    # Random weights depend on their device; all others are read to the CPU.
    device = model.device if dummy else torch.device("cpu")
    held = held_weights(model) if model.device.type == "cuda" else {}
    weights = _Weights(
        lambda: open_source(checkpoint, model.config, dummy),
        model.dtype,
        device,
        held,
        lambda name: shared_name(name, model.config),
    )
    return BaseLayout(
        projections=_projections(model) + tuple(_absorbed(model)) + tuple(_expert_shapes(model)),
        dtype=model.dtype,
        device=model.device,
        read_weight=weights.weight,
        read_bias=weights.bias,
        towers=unused_modules(model.config),
        names=stored_names(model.config),
        experts=dict(_experts(model)),
        fused=dict(fused_modules(model.config)),
        norms=norm_shapes(model.config),
        tied=model.config.tied_head,
        # Such a head has its own bias too.
        takes_own=not model.config.head_bias,
        without_own="a model whose head has a bias",
    )


def held_weights(model: DecoderModel) -> dict[str, Tensor]:
    """Return the weights [out, in] that the model stores as published, by module, in their own memory."""
    found: dict[str, Tensor] = {}
    for part in model.projections:
        packed = part.packed
        if not isinstance(packed, PackedLinear) or packed.kernels is not None:
            continue
        # A shard of a tensor-parallel rank has other sizes than its modules.
        if packed.weight.dtype is model.dtype and sum(part.sizes) == len(packed.weight):
            found |= zip(part.modules, packed.weight.split(part.sizes), strict=True)
    return found


def planned_layout(
    checkpoint: Path | GgufFile,
    dtype: torch.dtype,
    device: torch.device | None = None,
    *,
    dummy: bool,
    max_positions: int | None = None,
) -> BaseLayout:
    """Return the layout of a model from its configuration alone, without reading weights or computing anything.

    Args:
        max_positions: as in ``load_model``.
        device: device of the adapters; None for a layout that is used without adapters.

    Raises:
        ModelError: the model is not supported.
    """
    meta = torch.device("meta")
    model = load_model(checkpoint, dtype=dtype, device=meta, max_positions=max_positions, dummy=True)
    return base_layout(replace(model, device=device or meta), checkpoint, dummy=dummy)


def adapter_bytes(layout: BaseLayout, rank: int) -> int:
    """Return the bytes of an adapter with this rank in all projections that all tokens pass, but embedding and head."""
    cells = sum(
        sum(size + shape.width for size in shape.sizes) + (shape.width if shape.heads else 0)
        for shape in layout.projections
        if shape.name not in (EMBEDDING, HEAD) and shape.place is None
    )
    return cells * rank * layout.dtype.itemsize


def matrix_bytes(layout: BaseLayout) -> int:
    """Return the bytes of the largest embedding and head that an adapter may bring."""
    if not layout.takes_own:
        return 0
    hidden_size, vocab_size = layout.modules[EMBEDDING]
    return 2 * (vocab_size + MOST_ADDED_TOKENS) * hidden_size * layout.dtype.itemsize


def _projections(model: DecoderModel) -> tuple[ProjectionShape, ...]:
    vocab_size, hidden_size = model.config.vocab_size, model.config.hidden_size
    return (
        ProjectionShape((EMBEDDING,), (hidden_size,), vocab_size),
        *(ProjectionShape(part.modules, part.sizes, part.packed.in_features) for part in model.projections),
    )


def _absorbed(model: DecoderModel) -> Iterator[ProjectionShape]:
    """Return the modules of latent attention that are not products themselves."""
    for layer in model.layers:
        latent, attention = model.config.latent, layer.attention
        if latent is not None and isinstance(attention, LatentAttention):
            names = attention.absorb.name, attention.values.name
            heads = AbsorbedHeads(model.config.num_heads, latent.plain_dim, latent.value_dim, *names)
            rows = heads.count * (heads.plain + heads.value)
            yield ProjectionShape((attention.up_module,), (rows,), latent.kv_rank, heads=heads)


def _mixtures(model: DecoderModel) -> Iterator[tuple[Mixture, Experts]]:
    """The mixtures of experts."""
    for layer, config in zip(model.layers, model.config.layers, strict=True):
        experts = layer.mlp if layer.beside is None else layer.beside.experts
        if config.mixture is not None and isinstance(experts, Experts):
            yield config.mixture, experts


def _expert_shapes(model: DecoderModel) -> Iterator[ProjectionShape]:
    for mixture, experts in _mixtures(model):
        for product in (experts.gate_up, experts.down):
            for expert, modules in enumerate(product.modules):
                place = ExpertPlace(product.name, expert, mixture.num_experts)
                yield ProjectionShape(modules, product.sizes, product.weights.in_features, place)


def _experts(model: DecoderModel) -> Iterator[tuple[str, ExpertModules]]:
    for mixture, experts in _mixtures(model):
        if not mixture.gated:  # PEFT's form of stacked experts has gate and up in one
            continue
        gates, ups = zip(*experts.gate_up.modules, strict=True)
        owner = experts.gate_up.name.rpartition(".")[0]
        yield (
            owner,
            ExpertModules(
                count=mixture.num_experts,
                gate=gates,
                up=ups,
                down=tuple(modules[0] for modules in experts.down.modules),
                size=mixture.size,
                hidden=model.config.hidden_size,
                interleaved=mixture.names.storage == "interleaved",
                stored=mixture.names.trained_as,
            ),
        )


class _Weights:
    """Plain tensors of the model, from any thread: ``held`` by it, or read from the checkpoint on demand."""

    def __init__(
        self,
        open_checkpoint: Callable[[], WeightSource],
        dtype: torch.dtype,
        device: torch.device,
        held: Mapping[str, Tensor],
        stored_as: Callable[[str], str],
    ) -> None:
        self._open = open_checkpoint
        self._held = held
        self._stored_as = stored_as
        self._dtype = dtype
        self._device = device
        self._source: WeightSource | None = None
        self._lock = Lock()

    def weight(self, module: str) -> Tensor:
        """[out, in]; a tied head's is the embedding."""
        if (held := self._held.get(module)) is not None:
            return held
        found = self._read(f"{module}.weight")
        if found is None and f"{module}.weight" == HEAD_WEIGHT:
            found = self._read(EMBEDDING_WEIGHT)
        if found is None:
            raise KeyError(module)
        return found

    def bias(self, module: str) -> Tensor | None:
        """[out], or None without a bias."""
        return self._read(f"{module}.bias")

    def _read(self, name: str) -> Tensor | None:
        name = self._stored_as(name)
        with self._lock:
            if self._source is None:
                self._source = self._open()
            if name not in self._source.shapes:
                return None
            out = torch.empty(self._source.shapes[name], dtype=self._dtype, device=self._device)
            self._source.read(name, out)
            return out
