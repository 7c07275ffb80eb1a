"""Which norms and gates a decoder layer has, and what norms are called in checkpoints."""

from __future__ import annotations

from typing import Literal, NamedTuple

HeadNorm = Literal["head", "projection", "centred", "biased"]
"""Norm of query and key heads: see ``kernels.layouts.attention_arguments``, which has the same."""

QueryGating = Literal["heads", "module", "head_module"]
"""Where the gate of attention's results is: behind the queries of each head in their projection (Qwen3-Next), or in a
module of its own (AFMoE), which may have a single row for each head (LFM3)."""


class LayerNorms(NamedTuple):
    """Names of a layer's norms, None if absent."""

    before_attention: str | None
    after_attention: str | None
    before_mlp: str | None
    after_mlp: str | None


PRE = LayerNorms("input_layernorm", None, "post_attention_layernorm", None)
"""Norms in front of attention and MLP (Llama)."""
POST = LayerNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
"""Norms of the outputs only (OLMo 2)."""
