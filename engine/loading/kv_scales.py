"""Static scales of keys and values that a checkpoint brings, by layer and KV head."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from ...kernels.layouts.kv_forms import StaticScales
from ..checkpoint.model_config import ModelConfig
from ..checkpoint.quantization_config import KvScaleForm
from ..errors import ModelError, shortened
from .quantised_tensors import View
from .shards import Shard
from .stages import Stage

# self_attn.k_scale (compressed-tensors), self_attn.k_proj.k_scale (ModelOpt), self_attn.attn.k_scale
_NAME: Final = re.compile(r"model\.layers\.(\d+)\.self_attn\.(?:\w+\.)?([kv])_scale")
_KINDS: Final = "kv"


def read_kv_scales(
    stored: Mapping[str, View], config: ModelConfig, form: KvScaleForm | None
) -> dict[int, StaticScales]:
    """Return the scales of all KV heads, by layer index, for the layers whose scales the checkpoint has.

    Args:
        stored: tensors whose names end in ``tensor_names.KV_SCALES``.
        form: number format that the scales are for; None if it is one that is not used here, so that no scale is read.

    Raises:
        ModelError: a layer has scales only of its keys or only of its values, or several tensors of scales for either;
            or a tensor of scales has values that are not finite and above 0, or is neither one number nor one for each
            KV head.
    """
    found: dict[int, dict[str, tuple[str, View]]] = {}
    for name, view in stored.items():
        if form is None or (match := _NAME.fullmatch(name)) is None or not _stores(config, int(match[1])):
            continue
        kinds = found.setdefault(int(match[1]), {})
        if match[2] in kinds:
            raise ModelError(f"The scale {shortened(name)} is given twice for its layer, also as {kinds[match[2]][0]}.")
        kinds[match[2]] = name, view
    scales = {}
    for index, kinds in found.items():
        if len(kinds) == 1:
            ((name, _),) = kinds.values()
            raise ModelError(
                f"The tensor {shortened(name)} is the only scale of its layer, but keys and values need a scale each."
            )
        heads = config.heads_of(index).heads
        assert form is not None
        scales[index] = StaticScales(form, torch.stack([_of_heads(*kinds[kind], heads) for kind in _KINDS]))
    return scales


def scales_of_rank(
    scales: Mapping[int, StaticScales], shard: Shard | None, stage: Stage | None
) -> dict[int, StaticScales]:
    """Return the scales of a rank's layers and KV heads, by the layers' indices on the rank."""
    first = 0 if stage is None else stage.first
    count = len(scales) and (max(scales) + 1 if stage is None else stage.config.num_layers)
    own = {index - first: each for index, each in scales.items() if 0 <= index - first < count}
    if shard is None:
        return own
    rank, size = shard.ranks.rank, shard.ranks.size

    def part(index: int, each: StaticScales) -> StaticScales:
        start = rank * each.values.shape[1] // size
        return StaticScales(
            each.form, each.values[:, start : start + shard.config.heads_of(first + index).heads].contiguous()
        )

    return {index: part(index, each) for index, each in own.items()}


def _stores(config: ModelConfig, index: int) -> bool:
    """Return whether a layer of this index stores keys and values."""
    return (
        config.latent is None
        and index < config.num_layers
        and config.attends[index]
        and config.layers[index].kv_source is None
    )


def _of_heads(name: str, view: View, heads: int) -> Tensor:
    """Return the scale of each of ``heads`` KV heads in fp32."""
    values = view.tensor().float().flatten()
    if values.numel() not in (1, heads):
        raise ModelError(
            f"The tensor {shortened(name)} has shape {list(view.shape)}, but a scale must be one number, or one for "
            f"each of {heads} KV heads."
        )
    if not bool((values.isfinite() & (values > 0)).all()):
        raise ModelError(f"The tensor {shortened(name)} has a scale that is not a finite number above 0.")
    return values.expand(heads).clone()
