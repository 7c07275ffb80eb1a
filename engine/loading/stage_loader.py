"""``StageLoader``: the layers of a pipeline-parallel rank, with the embedding or the head where the rank has it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...kernels.ops import GroupedLinear, QuantisedLinear
from ..checkpoint.model_config import ModelConfig
from ..models.layers import Projection
from ..models.norms import Norm
from ..models.pipeline_stage import PipelineStage
from .layer_loader import LayerLoader
from .load_progress import LoadProgress
from .shards import Shard
from .stages import Stage, stage_name
from .tensor_names import EMBEDDING
from .weight_forms import WeightReader
from .weight_readers import RandomWeights


class StageLoader(LayerLoader):
    """Builds the layers of a stage. Embedding, last norm and head on another rank are represented by their shapes.

    Args:
        config: configuration of the stage. If tensor-parallel ranks split the layers, that of this rank's shard of it.
        shard: this rank's shard of the whole model; None if the layers of the stage are not split.
    """

    def __init__(
        self, config: ModelConfig, weights: WeightReader, max_positions: int, stage: Stage, shard: Shard | None
    ) -> None:
        super().__init__(config, weights, max_positions, None if shard is None else _of_stage(shard, stage))
        self.stage = stage

    def model(self, progress: LoadProgress) -> PipelineStage:
        """Read the layers; as ``LayerLoader.model``."""
        return PipelineStage.of(super().model(progress), self.stage.ranks, self.stage.width)

    def last_norm(self) -> Norm:
        return super().last_norm() if self.stage.has_head else self.norm(None)

    def embedding_and_head(self) -> tuple[Tensor | QuantisedLinear | GroupedLinear, Projection]:
        """Return the embedding and the head."""
        config, meta = self.config, torch.device("meta")
        shapes = LayerLoader(config, WeightReader(RandomWeights(config), self.weights.dtype, meta, "plain"), 1)
        embedding = self.embedding() if self.stage.has_embedding else shapes.embedding()
        if not self.stage.has_head:
            return embedding, shapes.embedding_and_head()[1]
        if self.shard is not None:
            return embedding, self.split_head(self.shard)
        if not config.tied_head:
            return embedding, self.projection("", {"lm_head": config.vocab_size}, config.head_bias)
        return embedding, Projection(("lm_head",), (config.vocab_size,), self.weights.packed(EMBEDDING))


def _of_stage(shard: Shard, stage: Stage) -> Shard:
    """Return a shard of the whole model as one of a stage, under its names of the layers."""
    named = ((stage_name(name, stage.layers), split) for name, split in shard.splits.items())
    return replace(shard, config=stage.config, splits={name: split for name, split in named if name is not None})
