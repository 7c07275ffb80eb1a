"""``ModelConfig``: the architecture of a decoder as data, a field for every difference between model families.

One formula serves all families; a layer is

    x = norm(h);            h += post_norm(attention(x))        post norms only where ``post_norms`` is set,
    x = norm(h);            h += post_norm(mlp(x))              else the identity
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .mixtures.mixture import Mixture

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by ``factor`` (position interpolation, https://arxiv.org/abs/2306.15595)."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's scaling: long wavelengths divided by ``factor``, short ones kept, those between interpolated.

    Attributes:
        low_freq_factor: wavelengths above ``original_length / low_freq_factor`` are scaled in full.
        high_freq_factor: wavelengths below ``original_length / high_freq_factor`` are kept.
        original_length: tokens of context before the extension.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (https://arxiv.org/abs/2309.00071): low frequencies divided by ``factor``, high ones kept.

    Attributes:
        beta_fast: frequencies of more rotations than this within ``original_length`` are kept.
        beta_slow: frequencies of fewer rotations than this are divided in full.
        original_length: tokens of context before the extension.
        attention_factor: factor of cosines and sines.
        truncate: the two bounds are widened to whole dimensions.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    original_length: int
    attention_factor: float
    truncate: bool


@dataclass(frozen=True, slots=True)
class FrequencyFactors:
    """One divisor for each of the dim / 2 frequencies, as GGUF files store Llama 3.1's scaling."""

    factors: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Rope:
    """A rotary embedding (https://arxiv.org/abs/2104.09864), pairing dimension i with i + dim / 2.

    Attributes:
        theta: base of the frequencies ``theta ** (-2 i / dim)``.
        dim: number of a head's first dimensions that are rotated.
    """

    theta: float
    dim: int
    scaling: LinearScaling | Llama3Scaling | YarnScaling | FrequencyFactors | None = None


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """Parameters of one layer.

    Attributes:
        window: size of the sliding window, the token itself included; None for full attention.
        rope: None for a layer without positions.
        mixture: the experts that are the layer's MLP, None for an ordinary one.
    """

    window: int | None
    rope: Rope | None
    mixture: Mixture | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A supported model; made by ``engine.checkpoint.read_config.read_model_config``.

    Attributes:
        family: name of its family in ``engine.checkpoint.families``.
        max_position_embeddings: the longest sequence of its training.
        layers: one entry for each decoder layer.
        norm_offset: added to the weight of every RMS norm (Gemma stores weights less 1).
        post_norms: the outputs of attention and MLP are normed before they are added (Gemma 2 and 3).
        qk_norm: query and key heads are normed one by one before the rotation (Qwen 3, Gemma 3).
        qkv_bias: q, k and v projections have a bias; ``output_bias`` and ``mlp_bias`` likewise for theirs.
        attention_sinks: each head has a logit without a value, which the softmax takes into account (gpt-oss).
        attention_scale: factor of the scores ``q . k``.
        attention_soft_cap: c of ``c * tanh(score / c)``, None for no cap.
        logit_soft_cap: the same for the logits.
        embedding_scale: factor of the token embeddings.
        tied_head: the head is the embedding matrix.
        fused_weights: the checkpoint stores q, k, v as one matrix, and gate, up as one (Phi-3).
        towers: modules of the checkpoint beside the language model, which are not loaded.
        bos_token_id: the begin token, if there is one; the tokenizer decides whether prompts get it.
        eos_token_ids: the tokens that end an answer.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    layers: tuple[LayerConfig, ...]
    norm_eps: float
    norm_offset: float
    post_norms: bool
    qk_norm: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    activation: Activation
    attention_sinks: bool
    attention_scale: float
    attention_soft_cap: float | None
    logit_soft_cap: float | None
    embedding_scale: float
    tied_head: bool
    fused_weights: bool
    towers: tuple[str, ...]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def query_size(self) -> int:
        """Rows of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim
