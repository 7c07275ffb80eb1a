"""``DraftHead``: an EAGLE-3 head or MTP module, one decoder layer that predicts next tokens from hidden states."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from ...kernels import grouped_weights
from ...kernels.ops import GroupedLinear, Largest, largest
from ...kernels.quantised_weights import QuantisedLinear, rows
from ...lora.lora_step import LoraStep
from ...lora.own.own_weights import OwnStep
from ..checkpoint.model_config import ModelConfig
from .decoder_layer import DecoderLayer
from .forward_inputs import ForwardInputs
from .hidden_pool import FusedLayers, LastHidden
from .kv_pool import KvPool
from .layers import Projection
from .norms import Norm, normed


@dataclass(slots=True)
class HeadStates:
    """Hidden states for the tokens of a draft head's pass, in memory that is not moved, as captured passes require.

    Attributes:
        given: [most tokens, H], for each token the hidden states of the token before: the model's, or after a draft
            token the head's own.
        left: [most tokens, H], the head's own hidden states for the kept tokens, before its last norm; other rows are
            undefined.
    """

    given: Tensor = field(default_factory=lambda: torch.empty(0))
    left: Tensor = field(default_factory=lambda: torch.empty(0))

    def reserve(self, num_tokens: int, like: Tensor) -> None:
        """Allocate memory for ``num_tokens`` tokens with hidden states [..., H] of the type and device of ``like``."""
        if len(self.given) < num_tokens:
            self.given, self.left = (like.new_zeros(num_tokens, like.shape[-1]) for _ in range(2))


class HeadJoin(Protocol):
    """How a head joins each token with the hidden states of the token before it."""

    def __call__(self, embedded: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings [T, H] fp32, hidden states [T, H] -> attention's input [T, ...], residual stream [T, H] fp32."""


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Joins embeddings and hidden states as in EAGLE-3: both are normed and put side by side as attention's input.

    The input of attention is then [T, 2 H].

    Attributes:
        token_norm: the norm of embeddings.
        hidden_norm: the norm of hidden states.
        normed_residual: whether the layer adds to the normed hidden states instead of the given ones.
    """

    token_norm: Norm
    hidden_norm: Norm
    normed_residual: bool

    def __call__(self, embedded: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
        hidden = normed(self.hidden_norm, given, None)
        x = torch.cat((normed(self.token_norm, embedded, None), hidden), dim=1)
        return x, (hidden if self.normed_residual else given).to(torch.float32, copy=True)


@dataclass(frozen=True, slots=True)
class Projected:
    """Joins embeddings and hidden states as in MTP: both are normed, put side by side, and projected.

    The result is the input [T, H] of an ordinary layer.

    Attributes:
        token_norm: the norm of embeddings.
        hidden_norm: the norm of hidden states.
        product: [T, 2 H] -> [T, H].
        layer_norm: the norm before the layer.
        hidden_first: whether hidden states come before embeddings.
    """

    token_norm: Norm
    hidden_norm: Norm
    product: Projection
    layer_norm: Norm
    hidden_first: bool

    def __call__(self, embedded: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
        both = normed(self.token_norm, embedded, None), normed(self.hidden_norm, given, None)
        residual = self.product(torch.cat(both[::-1] if self.hidden_first else both, dim=1), None, torch.float32)
        return normed(self.layer_norm, residual, None), residual


@dataclass(frozen=True, slots=True)
class DraftHead:
    """Weights of a head, and its forward pass: from token t and the model's hidden states of the token before it.

    The head's first token is a sequence's second token, at position 0, as in its training.

    Attributes:
        kind: kind of the head, for people to read.
        config: configuration of the head's layer, and of the vocabulary that it reads.
        dtype: type of hidden states and unquantised weights.
        embedding: [V, H], the head's own embedding or the model's, unquantised or quantised.
        join: how tokens and hidden states are joined to the layer's input.
        layer: the head's decoder layer.
        head: the projection to its own vocabulary [D].
        target_ids: [D] int64, ascending, the model's tokens that form the head's vocabulary; None if they are the first
            D.
        reads: which of the model's hidden states the head reads.
        vocab_size: number of columns of the model's logits; a token that the head lacks has the logit -inf.
        max_positions: number of positions in the rotary table.
        leaves_normed: whether the head, for the next token, reads its own hidden states after its last norm, else
            before it.
        states: hidden states beside the tokens of a pass, with room for the largest pass.
    """

    kind: str
    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    embedding: Tensor | QuantisedLinear | GroupedLinear
    join: HeadJoin
    layer: DecoderLayer
    head: Projection
    target_ids: Tensor | None
    reads: FusedLayers | LastHidden
    vocab_size: int
    max_positions: int
    leaves_normed: bool = False
    states: HeadStates = field(default_factory=HeadStates)
    long_offset: int = 0

    @torch.inference_mode()
    def forward(self, inputs: ForwardInputs, kv: KvPool) -> Tensor:
        """Return the hidden states [S, H] of the kept tokens, ready for ``logits``. Reads and writes ``states``."""
        num_tokens = len(inputs.token_ids)
        x, residual = self.join(self._embed(inputs.token_ids), self.states.given[:num_tokens])
        k_cache, v_cache = kv.k_layers[0], kv.v_layers[0]
        q = self.layer.store(x, inputs, k_cache, v_cache)
        kept = None
        if inputs.kept is not None and inputs.of_kept is not None:
            kept = inputs.kept
            q, residual, inputs = q[kept], residual[kept], inputs.of_kept
        out = self.layer.finish(q, residual, inputs, k_cache, v_cache) if len(q) else residual.to(self.dtype)
        left = out if self.leaves_normed else residual
        if kept is None:
            self.states.left[:num_tokens].copy_(left)
        else:
            self.states.left[kept] = left.to(self.dtype)
        return out

    def logits(self, hidden: Tensor, lora: LoraStep | None = None, own: OwnStep | None = None) -> Tensor:
        """Return the logits [S, vocab_size] fp32 of hidden states [S, H]. Adapters are ignored."""
        found = self.head(hidden, None, torch.float32)
        if self.target_ids is None:
            missing = self.vocab_size - found.shape[1]
            return functional.pad(found, (0, missing), value=-torch.inf) if missing else found
        logits = found.new_full((len(found), self.vocab_size), -torch.inf)
        logits[:, self.target_ids] = found
        return logits

    def best(self, hidden: Tensor, lora: LoraStep | None = None, own: OwnStep | None = None) -> Largest:
        """Return the largest logit of each row."""
        return largest(self.logits(hidden))

    def _embed(self, token_ids: Tensor) -> Tensor:
        """[T] -> [T, H] fp32."""
        if isinstance(self.embedding, GroupedLinear):
            return grouped_weights.rows(self.embedding, token_ids)
        if isinstance(self.embedding, QuantisedLinear):
            return rows(self.embedding, token_ids)
        return functional.embedding(token_ids, self.embedding).float()
