"""``DecoderModel``: the forward pass and logits of a decoder, one class for all model families."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from ...kernels import grouped_weights
from ...kernels.layouts.kv_forms import StaticScales
from ...kernels.ops import GroupedLinear, Largest, Linear, copy_residual, largest, parts_of
from ...kernels.quantised_weights import QuantisedLinear, rows
from ...lora.lora_step import LoraStep
from ...lora.own.own_weights import OwnStep
from ..checkpoint.model_config import ModelConfig
from .decoder_layer import DecoderLayer
from .forward_inputs import ChosenTokens, ForwardInputs
from .kv_pool import KvPool
from .layer_inputs import LayerInputs
from .layers import Projection
from .norms import Norm, normed


@dataclass(frozen=True, slots=True)
class DecoderModel:
    """Weights on their device, and the forward pass. Made by ``engine.loading.load_model``.

    Attributes:
        dtype: type of hidden states and of plain weights.
        embedding: [V, H], the embedding matrix, unquantised or quantised.
        first_norm: the norm before the first layer.
        embedding_scale: factor of the embeddings.
        head: the projection to the vocabulary.
        max_positions: number of positions in the rotary tables; a forward pass must stay below it.
        long_offset: number added to the positions of sequences longer than ``config.rope_switch``, whose part of the
            rotary tables comes after the first part; 0 if no sequence is that long.
        positions: [P, H], what is added to the embedding of a token by its position; None in a model without.
        layer_inputs: computes the inputs that layers get for each token beside the residual stream; None without such
            inputs.
        score: [classes, H] fp32, the classification head; None without one.
        embedding_norm: the norm behind the embedding, whose result is the residual stream; None if absent.
        widened: types and schemes of the checkpoint's quantised matrices that are stored in the model's type here.
        kv_scales: the checkpoint's static scales of keys and values by layer; empty if its scales are not used, None if
            it has none.
    """

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    embedding: Tensor | QuantisedLinear | GroupedLinear
    embedding_scale: float
    first_norm: Norm
    layers: tuple[DecoderLayer, ...]
    head: Projection
    max_positions: int
    long_offset: int
    positions: Tensor | None = None
    layer_inputs: LayerInputs | None = None
    score: Tensor | None = None
    embedding_norm: Norm | None = None
    widened: tuple[str, ...] = ()
    kv_scales: Mapping[int, StaticScales] | None = None

    @torch.inference_mode()
    def forward(self, inputs: ForwardInputs, kv: KvPool) -> Tensor:
        """Compute the KV of all tokens of a step, and the last hidden states of the kept ones.

        Returns:
            [S, H] in the model's type, after the model's last norm: the input of ``logits``.
        """
        residual = self.embed(inputs)
        if self.layer_inputs is not None:
            inputs = self.with_layer_inputs(inputs, residual)
        return self.last_hidden(residual, inputs, kv)

    def last_hidden(self, residual: Tensor, inputs: ForwardInputs, kv: KvPool) -> Tensor:
        """Return the result of ``forward`` from the residual stream [T, H] before the first layer, which is updated."""
        q = self.extend(residual, inputs, kv)
        if kv.hidden is not None:
            kv.hidden.write_seen(kv.hidden.take_seen(), inputs.kv_loc)
        if inputs.kept is None or inputs.of_kept is None:
            hidden = self.finish(q, residual, inputs, kv)
            if kv.hidden is not None:
                kv.hidden.write_last(hidden, residual, inputs.kv_loc)
            return hidden
        if not len(inputs.kept):
            return q.new_empty((0, self.config.hidden_size))
        return self.finish(q[inputs.kept], residual[inputs.kept], inputs.of_kept, kv)

    def embed(self, inputs: ForwardInputs) -> Tensor:
        """Return the residual stream before the first layer: [T, H].

        The stream is fp32: every layer adds to it, and rounding to bfloat16 each time would be the largest source of
        error.
        """
        token_ids = inputs.token_ids
        if inputs.own is not None or inputs.own_rows is not None:
            # The embedding of an adapter's own vocabulary may have more rows than the model's; those are added below.
            token_ids = token_ids.clamp(max=self.config.vocab_size - 1)
        residual = self._embed(token_ids)
        if inputs.lora is not None:
            inputs.lora.embed(token_ids, residual)
        if inputs.own is not None:
            inputs.own.embed(inputs.token_ids, residual)
        if inputs.own_rows is not None:
            inputs.own_rows.embed(residual)
        if self.embedding_scale != 1.0:
            residual *= self.embedding_scale
        if self.positions is not None:
            residual += functional.embedding(inputs.positions, self.positions)
        if self.embedding_norm is not None:
            residual = normed(self.embedding_norm, residual, inputs.own).float()
        return residual

    def with_layer_inputs(self, inputs: ForwardInputs, residual: Tensor) -> ForwardInputs:
        """Return the inputs with the layers' inputs for each token; ``residual`` [T, H] is from ``embed``."""
        assert self.layer_inputs is not None
        # A token that an adapter adds has no layer input of its own here.
        token_ids = inputs.token_ids.clamp(max=len(self.layer_inputs.embedding) - 1)
        made = self.layer_inputs(token_ids, residual, inputs.lora)
        of_kept = inputs.of_kept
        if of_kept is not None and inputs.kept is not None:
            of_kept = replace(of_kept, layer_inputs=made[inputs.kept])
        return replace(inputs, layer_inputs=made, of_kept=of_kept)

    def extend(self, residual: Tensor, inputs: ForwardInputs, kv: KvPool) -> Tensor:
        """Compute the KV of all tokens in all layers, only by ops of ``kernels.ops``, without reading token ids.

        Args:
            residual: [T, H] from ``embed``; updated to the input of the last layer's additions.

        Returns:
            The last layer's queries, [T, Hq, D] (with latent attention [T, Hq * D], and the choice of an index).
        """
        if kv.beside:
            inputs = replace(inputs, beside=kv.beside)
        if self.config.shares_index:
            inputs = replace(inputs, chosen=ChosenTokens())
        if self.config.shares_blocks:
            inputs = replace(inputs, embedded=copy_residual(residual, self.dtype))
        x = normed(self.first_norm, residual, inputs.own)
        *earlier, (last, k_last, v_last) = zip(self.layers, kv.k_layers, kv.v_layers, strict=True)
        for index, (layer, k_cache, v_cache) in enumerate(earlier):
            if kv.hidden is not None:
                kv.hidden.see(index, residual)
            x = layer(x, residual, inputs, k_cache, v_cache)
        if kv.hidden is not None:
            kv.hidden.see(len(earlier), residual)
        return last.store(x, inputs, k_last, v_last)

    def finish(self, q: Tensor, residual: Tensor, inputs: ForwardInputs, kv: KvPool) -> Tensor:
        """Return the hidden states [S, H] of S tokens from their queries and residual stream; updates the latter."""
        return self.layers[-1].finish(q, residual, inputs, kv.k_layers[-1], kv.v_layers[-1])

    @property
    def projections(self) -> tuple[Projection, ...]:
        """All matrix products except those of experts; the head is last."""
        first = () if self.layer_inputs is None else (self.layer_inputs.projection,)
        return (*first, *(part for layer in self.layers for part in layer.projections), self.head)

    @property
    def weights(self) -> tuple[Linear, ...]:
        """The weights of all matrix products; for experts and heads the weights of one part."""
        experts = (product.first for layer in self.layers for _, product in layer.active)
        return (*(each for part in self.projections for each in parts_of(part.packed)), *experts)

    def _embed(self, token_ids: Tensor) -> Tensor:
        """[T] -> [T, H] fp32."""
        if isinstance(self.embedding, GroupedLinear):
            return grouped_weights.rows(self.embedding, token_ids)
        if isinstance(self.embedding, QuantisedLinear):
            embedded = rows(self.embedding, token_ids)
            # The embedding is rounded to the model's type, as the head rounds its inputs.
            return embedded if self.embedding.planes else embedded.to(self.dtype).float()
        return functional.embedding(token_ids, self.embedding).float()

    def logits(self, hidden: Tensor, lora: LoraStep | None = None, own: OwnStep | None = None) -> Tensor:
        """Return the logits [S, V] fp32 of hidden states [S, H], with the model's scale and soft cap.

        Args:
            lora: the adapters of these rows, if any of them changes the head.
            own: the adapters' weights in place of the model's. V is then the largest vocabulary of a row; logits of
                tokens that a row's vocabulary lacks are -inf.
        """
        return self._logits(hidden, lora, own)

    def best(self, hidden: Tensor, lora: LoraStep | None = None, own: OwnStep | None = None) -> Largest:
        """Return the largest of ``logits`` and their tokens, [S] each, mostly without storing all logits."""
        config = self.config
        if lora is None and config.logit_soft_cap is None and config.logit_scale == 1.0:
            if own is None:
                return self.head.largest(hidden)
            if (found := own.best(hidden)) is not None:
                return found
        # Scale and cap do not change the order, but the rounding after them may cause ties.
        return largest(self._logits(hidden, lora, own))

    def _logits(self, hidden: Tensor, lora: LoraStep | None, own: OwnStep | None) -> Tensor:
        if own is None:
            logits = self.head(hidden, lora, torch.float32)
        else:
            logits = own.logits(hidden, lambda rows: self.head(rows, lora, torch.float32))
        if self.config.logit_scale != 1.0:
            logits *= self.config.logit_scale
        if (cap := self.config.logit_soft_cap) is not None:
            missing = None if own is None else logits == -torch.inf
            logits = logits.div_(cap).tanh_().mul_(cap)
            if missing is not None:
                logits.masked_fill_(missing, -torch.inf)
        return logits
