"""Which norms a decoder layer has, and what they are called in checkpoints."""

from __future__ import annotations

from typing import Literal, NamedTuple

HeadNorm = Literal["head", "projection", "centred"]
"""Norm of query and key heads: see ``kernels.layouts.attention_arguments``, which has the same."""


class LayerNorms(NamedTuple):
    """Names of a layer's norms, None for none."""

    before_attention: str | None
    after_attention: str | None
    before_mlp: str | None
    after_mlp: str | None


PRE = LayerNorms("input_layernorm", None, "post_attention_layernorm", None)
"""Norms in front of attention and MLP (Llama)."""
POST = LayerNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
"""Norms of the outputs only (OLMo 2)."""
