"""``PipelineStage``: a decoder's layers on one of several ranks, which receive the residual stream and send it on."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from ...kernels.collectives import ALONE, Ranks
from .decoder import DecoderModel
from .forward_inputs import ForwardInputs
from .kv_pool import KvPool
from .norms import normed


@dataclass(frozen=True, slots=True)
class PipelineStage(DecoderModel):
    """The layers of one rank. The last rank has the embedding; rank 0 has the last layers and the head.

    Attributes:
        ranks: group of ranks that run the stages of the pipeline.
        width: number of ranks of each stage; each has a shard of the stage's layers, and the whole residual stream.
    """

    ranks: Ranks = ALONE
    width: int = 1

    @classmethod
    def of(cls, model: DecoderModel, ranks: Ranks, width: int) -> PipelineStage:
        """Return the stage of a rank, from a model of the stage's layers."""
        return cls(**{each.name: getattr(model, each.name) for each in fields(model)}, ranks=ranks, width=width)

    @property
    def has_head(self) -> bool:
        return self.ranks.rank < self.width

    @torch.inference_mode()
    def forward(self, inputs: ForwardInputs, kv: KvPool) -> Tensor:
        """Compute these layers for a part of a step.

        Returns:
            On the rank with the head, the last hidden states of the kept tokens. The other ranks send the residual
            stream [T, H] to the stage of the layers that follow, and return no rows.
        """
        rank = self.ranks.rank
        if rank + self.width >= self.ranks.size:
            residual = self.embed(inputs)
        else:
            residual = torch.empty(len(inputs.token_ids), self.config.hidden_size, device=self.device)
            self.ranks.receive(residual, rank + self.width)
        if self.has_head:
            return self.last_hidden(residual, inputs, kv)
        if kv.beside:
            inputs = replace(inputs, beside=kv.beside)
        x = normed(self.first_norm, residual, inputs.own)
        for layer, k_cache, v_cache in zip(self.layers, kv.k_layers, kv.v_layers, strict=True):
            x = layer(x, residual, inputs, k_cache, v_cache)
        self.ranks.send(residual, rank - self.width)
        return residual[:0].to(self.dtype)
