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
    """Hidden states beside the tokens of a pass of a draft head: at one place for all passes, so for captured ones.

    Attributes:
        given: [most tokens, H], of the token before each: the model's, or behind a draft the head's own.
        left: [most tokens, H], the head's own for the kept tokens, before its last norm; those of others are undefined.
    """

    given: Tensor = field(default_factory=lambda: torch.empty(0))
    left: Tensor = field(default_factory=lambda: torch.empty(0))

    def reserve(self, num_tokens: int, like: Tensor) -> None:
        """Have room for so many tokens with hidden states [..., H] of this type, on this device."""
        if len(self.given) < num_tokens:
            self.given, self.left = (like.new_zeros(num_tokens, like.shape[-1]) for _ in range(2))


class HeadJoin(Protocol):
    """How a head joins each token with the hidden states in front of it."""

    def __call__(self, embedded: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings [T, H] fp32, hidden states [T, H] -> attention's input [T, ...], residual stream [T, H] fp32."""


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Both normed, side by side the input of attention [T, 2 H] (EAGLE-3).

    Attributes:
        token_norm: the norm of embeddings.
        hidden_norm: the norm of hidden states.
        normed_residual: the layer adds to the normed hidden states in place of the given ones.
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
    """Both normed, side by side, and projected to the input [T, H] of an ordinary layer (MTP).

    Attributes:
        token_norm: the norm of embeddings.
        hidden_norm: the norm of hidden states.
        product: [T, 2 H] -> [T, H].
        layer_norm: the norm in front of the layer.
        hidden_first: hidden states come before embeddings.
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
    """Weights of a head, and its forward pass: of token t and the model's hidden states in front of it.

    Its first token is a sequence's second one, at position 0, as in its training.

    Attributes:
        kind: what it is, for people.
        config: of its layer, and of the vocabulary that it reads.
        dtype: of hidden states and plain weights.
        embedding: [V, H], its own or the model's, plain or quantised.
        join: what its layer reads.
        layer: its layer.
        head: the projection to its own vocabulary [D].
        target_ids: [D] int64, ascending, the tokens of the model that are its own; None if they are the first ones.
        reads: which hidden states of the model.
        vocab_size: rows of the model's logits; a token that it lacks has the logit -inf.
        max_positions: positions that the rotary table holds.
        leaves_normed: for the next token it reads its own hidden states behind its last norm, else in front of it.
        states: hidden states beside the tokens of a pass, which have room for those of the largest.
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
        """Return the logits [S, vocab_size] fp32 of hidden states [S, H]. It has no adapters."""
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
