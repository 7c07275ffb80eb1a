"""Load the MTP module of a checkpoint: the layer behind a model's last, as a ``DraftHead`` beside the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..checkpoint.families.family_table import BY_NAME
from ..checkpoint.model_config import ModelConfig
from ..checkpoint.read_config import CONFIG
from ..errors import ModelError
from ..models.decoder import DecoderModel
from ..models.draft_head import DraftHead, Projected
from .load_model import LayerLoader
from .tensor_names import Shape, check_tensors, expected_shapes
from .weight_forms import WeightForm, WeightReader
from .weight_readers import SafetensorsFolder

_TOKEN_NORM, _HIDDEN_NORM, _PRODUCT, _LAST_NORM = "enorm", "hnorm", "eh_proj", "shared_head.norm"
# Copies of the model's, which some checkpoints leave out.
_EMBEDDING, _HEAD = "embed_tokens", "shared_head.head"


def load_mtp(folder: Path, model: DecoderModel, weights: WeightForm) -> DraftHead:
    """Load the MTP module of a model from its own checkpoint.

    Args:
        folder: of the model.
        model: whose hidden states it reads; also its embedding and head, where the module has none of its own.
        weights: the form of matrices in memory.

    Raises:
        ModelError: there is no such module, there are several, or the files are malformed.
    """
    _check_count(model.config)
    index, size = model.config.num_layers, model.config.hidden_size
    layer = model.config.layers[-1]
    config = replace(model.config, layers=(*model.config.layers, layer))
    prefix = f"model.layers.{index}"
    source = SafetensorsFolder(folder, config.towers)
    found = {name: shape for name, shape in source.shapes.items() if name.startswith(f"{prefix}.")}
    shared: dict[str, Shape] = dict.fromkeys(
        (f"{prefix}.{_EMBEDDING}.weight", f"{prefix}.{_HEAD}.weight"), (config.vocab_size, size)
    )
    own = {name: shape for name, shape in shared.items() if name in found}
    check_tensors(_module_shapes(config, prefix) | own, found, frozenset())
    reader = WeightReader(source, model.dtype, model.device, weights)
    loader = LayerLoader(config, reader, model.max_positions)
    before = loader.norm(f"{prefix}.{config.norms.before_attention}")
    has_embedding, has_head = (name in own for name in shared)
    return DraftHead(
        kind="MTP module",
        config=replace(config, layers=(layer,)),
        dtype=model.dtype,
        device=model.device,
        embedding=reader.tensor(f"{prefix}.{_EMBEDDING}.weight") if has_embedding else model.embedding,
        join=Projected(
            token_norm=loader.norm(f"{prefix}.{_TOKEN_NORM}"),
            hidden_norm=loader.norm(f"{prefix}.{_HIDDEN_NORM}"),
            product=loader.projection(prefix, {_PRODUCT: size}, bias=False),
            layer_norm=before,
        ),
        layer=loader.layer(index, before, loader.norm(f"{prefix}.{_LAST_NORM}")),
        head=loader.projection(prefix, {_HEAD: config.vocab_size}, bias=False) if has_head else model.head,
        target_ids=None,
        fused=None,
        vocab_size=config.vocab_size,
        max_positions=model.max_positions,
    )


def _check_count(config: ModelConfig) -> None:
    """Check that the checkpoint has one module of a form that is computed. Raises ModelError."""
    if (key := _count_key(config.family)) is None:
        classes = ", ".join(sorted(each.architecture for name, each in BY_NAME.items() if _count_key(name)))
        raise ModelError(f"MTP modules are computed of {classes}; {BY_NAME[config.family].architecture} has none.")
    if config.prediction_layers != 1:
        raise ModelError(
            f"{CONFIG}: {key}, the number of MTP modules, must be 1 to draft by one; it is {config.prediction_layers}."
        )


def _count_key(family: str) -> str | None:
    """The key of the number of modules in ``config.json``; None for a family without any."""
    mixture = BY_NAME[family].mixture
    return None if mixture is None else mixture.prediction_layers_key


def _module_shapes(config: ModelConfig, prefix: str) -> dict[str, Shape]:
    """Return the names and shapes of what every module has: a layer of the model's kind, three norms, a product."""
    size = config.hidden_size
    of_layer = {name: shape for name, shape in expected_shapes(config).items() if name.startswith(f"{prefix}.")}
    norms: dict[str, Shape] = {f"{prefix}.{name}.weight": (size,) for name in (_TOKEN_NORM, _HIDDEN_NORM, _LAST_NORM)}
    return of_layer | norms | {f"{prefix}.{_PRODUCT}.weight": (size, 2 * size)}
