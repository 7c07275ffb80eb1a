"""The one decoder of all families."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engine.inputs import ForwardInputs
from engine.kv_pool import KvPool
from engine.models.config import ModelConfig
from engine.models.layers import DecoderLayer, Projection, RmsNorm
from lora.apply import LoraStep


@dataclass(frozen=True, slots=True)
class DecoderModel:
    """Weights on their device, and the way through them. Made by ``engine.loading.load_model``.

    Attributes:
        embedding: [V, H].
        first_norm: the norm in front of the first layer.
        embedding_scale: factor of the embeddings, in the model's type.
        head: the projection to the vocabulary.
        max_positions: positions that the rotary tables hold; a forward pass must stay below.
    """

    config: ModelConfig
    embedding: Tensor
    embedding_scale: float
    first_norm: RmsNorm
    layers: tuple[DecoderLayer, ...]
    head: Projection
    max_positions: int

    @property
    def dtype(self) -> torch.dtype:
        """Type of weights and hidden states."""
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding.device

    @torch.inference_mode()
    def forward(self, inputs: ForwardInputs, kv: KvPool) -> Tensor:
        """Compute the KV of all tokens of a step and their last hidden states, after the model's last norm.

        Returns:
            [T, H] in the model's type, ready for ``logits``.
        """
        return self.run_layers(self.embed(inputs), inputs, kv)

    @torch.inference_mode()
    def embed(self, inputs: ForwardInputs) -> Tensor:
        """The residual stream in front of the first layer: [T, H].

        It is fp32, because every layer adds to it: rounded to bfloat16 each time, it would be the largest source of
        error.
        """
        residual = functional.embedding(inputs.token_ids, self.embedding).float()
        if inputs.lora is not None:
            inputs.lora.embed(inputs.token_ids, residual)
        if self.embedding_scale != 1.0:
            residual *= self.embedding_scale
        return residual

    @torch.inference_mode()
    def run_layers(self, residual: Tensor, inputs: ForwardInputs, kv: KvPool) -> Tensor:
        """The rest of ``forward``, made of ops of ``kernels.ops`` alone. Changes ``residual``; reads no token ids."""
        x = self.first_norm(residual)
        for layer, k_cache, v_cache in zip(self.layers, kv.k_layers, kv.v_layers, strict=True):
            x = layer(x, residual, inputs, k_cache, v_cache)
        return x

    @torch.inference_mode()
    def logits(self, hidden: Tensor, lora: LoraStep | None = None) -> Tensor:
        """Scores of the next token, with the model's soft cap.

        Args:
            hidden: [S, H] from ``forward``.
            lora: the adapters of these rows, if one of them changes the head.

        Returns:
            [S, V] fp32.
        """
        logits = self.head(hidden, lora, torch.float32)
        if (cap := self.config.logit_soft_cap) is not None:
            logits = logits.div_(cap).tanh_().mul_(cap)
        return logits
