"""Load a model: from a Hugging Face folder or a GGUF file to a ``DecoderModel`` on its device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from ..checkpoint.gguf import GgufFile
from ..checkpoint.model_config import ModelConfig
from ..checkpoint.read_config import open_checkpoint, read_model_config
from ..errors import ModelError
from ..models.decoder import DecoderModel
from .kv_scales import read_kv_scales, scales_of_rank
from .layer_loader import LayerLoader
from .load_progress import LoadProgress
from .shards import Shard, ShardSource, check_split
from .stage_loader import StageLoader
from .stages import Stage, StageSource, check_stages
from .tensor_names import (
    EMBEDDING,
    HEAD,
    check_tensors,
    expected_shapes,
    fused_modules,
    ignored_tensors,
    joined_tensors,
    prediction_tensors,
    stacked_experts,
    stored_names,
    transposed_tensors,
    zero_tensors,
)
from .upload import end_uploads
from .weight_forms import WeightForm, WeightReader
from .weight_memory import fitting_form, tensor_bytes
from .weight_readers import GgufWeights, RandomWeights, SafetensorsFolder, WeightSource


def load_model(
    checkpoint: Path | GgufFile,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_positions: int | None = None,
    dummy: bool = False,
    weights: WeightForm = "plain",
    available: int | None = None,
    shard: Shard | None = None,
    stage: Stage | None = None,
) -> DecoderModel:
    """Load a model from a folder in Hugging Face format or from a GGUF file.

    Args:
        checkpoint: the folder, or the file, opened or not.
        dtype: type of weights and hidden states: float32, bfloat16 or float16.
        max_positions: longest sequence; the model's own maximum by default.
        dummy: use random weights in the model's shape; only its config is read.
        weights: the form of matrices in memory.
        available: bytes of memory available for the weights, see ``fitting_form``; None to load them without a check.
        shard: this rank's part of a model that is split over tensor-parallel ranks; None without a split. With a shard,
            ``weights`` must not be a form that quantises rows to integers, because the scales would be those of a part
            of each row.
        stage: this rank's layers of a model that is split over pipeline-parallel ranks; None without a split.

    Raises:
        ModelError: the model is not supported, or its files are malformed.
        ConfigError: the weights need more memory than is available, or the ranks cannot split the model.
    """
    config = read_model_config(checkpoint)
    most = max_positions or config.max_position_embeddings
    config = config.up_to(most)
    source = open_source(checkpoint, config, dummy)
    if not config.tied_head and isinstance(source, SafetensorsFolder) and source.is_bare and HEAD not in source.shapes:
        config = replace(config, tied_head=True, generates=False)  # an embedder, whose class is that of its base
    optional = prediction_tensors(source.shapes, config) | ignored_tensors(source.shapes, config)
    optional |= {HEAD} if config.tied_head else set()
    check_tensors(expected_shapes(config), source.shapes, optional)
    if isinstance(source, SafetensorsFolder):
        source.check_scales()
    if HEAD in source.shapes and config.tied_head:
        _check_tied(source)
    kv_form = "fp8" if config.quantization is None else config.quantization.kv_form
    stored_scales = source.kv_scales if isinstance(source, SafetensorsFolder) else {}
    kv_scales = read_kv_scales(stored_scales, config, kv_form)
    if shard is not None:
        check_split(config, shard.ranks.size)
        shard = Shard.of(config, shard.ranks)  # Computed again from the config as found: the head may be tied.
        source, config = ShardSource(source, shard), shard.config
    if stage is not None:
        check_stages(config, stage.count)
        stage = Stage.of(config, stage.ranks, stage.width)
        source, config = StageSource(source, stage), stage.config
    if available is not None:
        weights = fitting_form(source, config, dtype, weights, device, available)
    reader = WeightReader(source, dtype, device, weights)
    with LoadProgress({} if dummy else tensor_bytes(source, config, dtype, weights)) as progress:
        loader = LayerLoader(config, reader, most, shard)
        if stage is not None:
            loader = StageLoader(config, reader, most, stage, shard)
        loader.kv_scales = own_scales = scales_of_rank(kv_scales, shard, stage)
        model = loader.model(progress)
    end_uploads()
    return replace(
        model, widened=tuple(sorted(reader.widened_storage)), kv_scales=own_scales if stored_scales else None
    )


def open_source(checkpoint: Path | GgufFile, config: ModelConfig, dummy: bool) -> WeightSource:
    """Open the weights of a model; see ``load_model``. Raises ModelError."""
    if dummy:
        return RandomWeights(config)
    found = open_checkpoint(checkpoint) if isinstance(checkpoint, Path) else checkpoint
    if isinstance(found, GgufFile):
        return GgufWeights(found, config)
    folder = SafetensorsFolder(found, config.towers, config.quantization, stored_names(config))
    folder.split_experts(stacked_experts(config))
    fused = dict(fused_modules(config))
    folder.split_rows({f"{whole}.weight": [f"{part}.weight" for part in parts] for whole, parts in fused.items()})
    folder.transpose(transposed_tensors(config))
    folder.join_rows(joined_tensors(config))
    folder.add_zeros(zero_tensors(config))
    if config.norm_head:
        folder.normalise_columns(HEAD)
    return folder


def _check_tied(source: WeightSource) -> None:
    """Check that a stored head equals the embedding it is tied to: else it is undefined which of them counts."""
    head, embedding = (torch.empty(source.shapes[name]) for name in (HEAD, EMBEDDING))
    source.read(HEAD, head)
    source.read(EMBEDDING, embedding)
    if not torch.equal(head, embedding):
        raise ModelError(f"The config ties {HEAD} to {EMBEDDING}, but the checkpoint has different values for the two.")
