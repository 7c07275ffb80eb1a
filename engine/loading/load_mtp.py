"""Load the MTP module of a checkpoint, the layer stored after a model's last layer, as a ``DraftHead`` of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ..checkpoint.families.family_table import BY_NAME
from ..checkpoint.families.prediction import PredictionModule
from ..checkpoint.model_config import ModelConfig
from ..checkpoint.read_config import CONFIG
from ..errors import ModelError
from ..models.decoder import DecoderModel
from ..models.draft_head import DraftHead, Projected
from ..models.hidden_pool import LastHidden
from .layer_loader import LayerLoader
from .tensor_names import Shape, check_tensors, expected_shapes, ignored_tensors, stored_names
from .weight_forms import WeightForm, WeightReader
from .weight_readers import SafetensorsFolder


def load_mtp(folder: Path, model: DecoderModel, weights: WeightForm) -> DraftHead:
    """Load the MTP module of a model from its own checkpoint.

    Args:
        folder: the model's folder.
        model: the model whose hidden states the module reads. It also provides embedding and head if the module has
            none.
        weights: the form of matrices in memory.

    Raises:
        ModelError: the checkpoint has no MTP module or has several, or its files are malformed.
    """
    module = prediction_module(model.config)
    index, size = model.config.num_layers, model.config.hidden_size
    layer = next(each for each in reversed(model.config.layers) if each.has_attention and each.recurrent is None)
    layer = replace(layer, shares_index=False)  # there is no earlier layer in the module
    config = replace(model.config, layers=(*model.config.layers, layer))
    prefix, of_layer = module.prefix(0, index), module.layer_prefix(0, index)
    source = SafetensorsFolder(folder, config.towers, config.quantization, stored_names(config))
    found = {name: shape for name, shape in source.shapes.items() if name.startswith(f"{prefix}.")}
    embedding, head = (_copy(name, prefix, found) for name in (module.embedding, module.head))
    copies: dict[str, Shape] = {f"{name}.weight": (config.vocab_size, size) for name in (embedding, head) if name}
    check_tensors(_module_shapes(config, module, index) | copies, found, ignored_tensors(found, config))
    reader = WeightReader(source, model.dtype, model.device, weights)
    loader = LayerLoader(config, reader, model.max_positions)
    before = loader.norm(f"{of_layer}.{config.norms.before_attention}")
    last = loader.norm(f"{prefix}.{module.last_norm}")
    return DraftHead(
        kind="MTP module",
        config=replace(config, layers=(layer,)),
        dtype=model.dtype,
        device=model.device,
        embedding=reader.tensor(f"{embedding}.weight") if embedding else model.embedding,
        join=Projected(
            token_norm=loader.norm(f"{prefix}.{module.token_norm}"),
            hidden_norm=loader.norm(f"{prefix}.{module.hidden_norm}"),
            product=loader.projection(prefix, {module.product: size}, bias=False),
            layer_norm=before,
            hidden_first=module.hidden_first,
        ),
        layer=loader.layer(index, before, last, of_layer),
        head=loader.projection("", {head: config.vocab_size}, bias=False) if head else model.head,
        target_ids=None,
        reads=LastHidden(module.reads_normed),
        leaves_normed=module.leaves_normed,
        vocab_size=config.vocab_size,
        max_positions=model.max_positions,
    )


def prediction_module(config: ModelConfig) -> PredictionModule:
    """Return how a model's MTP module is stored. Raises ModelError unless it has one, of a form that is computed."""
    if (module := BY_NAME[config.family].prediction) is None or not module.is_computed:
        rows = (each for each in BY_NAME.values() if each.prediction is not None and each.prediction.is_computed)
        classes = ", ".join(sorted(each.architecture for each in rows))
        family = BY_NAME[config.family]
        own = "the one of {} is not supported" if "mtp" in family.ignored or module is not None else "{} has none"
        raise ModelError(f"MTP modules are supported for {classes}; {own.format(family.architecture)}.")
    if config.prediction_layers != 1:
        raise ModelError(
            f"{CONFIG}: {module.count_key}, the number of MTP modules, must be 1 to draft with one, not "
            f"{config.prediction_layers}."
        )
    return module


def _copy(name: str | None, prefix: str, found: Mapping[str, Shape]) -> str | None:
    """Return the full name of a module's own embedding or head; None if the model's is shared."""
    return f"{prefix}.{name}" if name and f"{prefix}.{name}.weight" in found else None


def _module_shapes(config: ModelConfig, module: PredictionModule, index: int) -> dict[str, Shape]:
    """Return the names and shapes of what every module has: a layer of the model's kind, three norms, a product."""
    size, last = config.hidden_size, f"model.layers.{index}."
    prefix, of_layer = module.prefix(0, index), module.layer_prefix(0, index)
    shapes = {
        f"{of_layer}.{name.removeprefix(last)}": shape
        for name, shape in expected_shapes(config).items()
        if name.startswith(last)
    }
    for norm in (module.token_norm, module.hidden_norm, module.last_norm):
        shapes[f"{prefix}.{norm}.weight"] = (size,)
    return shapes | {f"{prefix}.{module.product}.weight": (size, 2 * size)}
