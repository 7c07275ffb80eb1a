"""``Family``: how a model family differs from a Llama, as data, field by field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .mixture import MixtureFamily
from .norm_layout import PRE, HeadNorm, LayerNorms, QueryGating
from .prediction import PredictionModule

# Layers with a sliding window, where config.json has no "layer_types":
#   never     no layer, and a "sliding_window" is refused
#   all       every layer, if there is a "sliding_window"
#   late      layers from "max_window_layers" on, if "use_sliding_window"
#   no_rope   layers without rotary embedding, if "use_sliding_window"
#   pattern   all but every n-th layer, n = "sliding_window_pattern", if there is a "sliding_window"
#   leading   all but every n-th layer, the first of which is the very first; otherwise as pattern
#   asked     every layer, if "use_sliding_window"
#   early     every second layer below "max_window_layers", from the first on, if "use_sliding_window"
#   chunks    no layer, but those with rotary embedding see chunks of "attention_chunk_size"
Windows = Literal["never", "all", "late", "no_rope", "pattern", "leading", "asked", "early", "chunks"]

# Layers without a rotary embedding:
#   never     none, and "no_rope_layers" is refused
#   listed    those that "no_rope_layers" lists with 0, or every n-th one, n = "no_rope_layer_interval"
#   full      those without a window, if there is a "sliding_window"
#   asked     all, unless "position_embedding_type" is "rope"
#   windowed  those without a window
#   always    all
NoRope = Literal["never", "listed", "full", "asked", "windowed", "always"]

Recurrent = Literal[
    "short_conv", "mamba", "normed_mamba", "weighted_mamba", "mamba2", "delta", "grouped_delta", "kimi_delta"
]

# What a layer has:
#   both       a mixer, which is attention or has a recurrent state, and an MLP
#   single     a mixer or an MLP, as "layers_block_type" or "hybrid_override_pattern" says
#   recurrent  a mixer with a recurrent state alone
#   parallel   attention, a mixer with a recurrent state beside it, and an MLP
Blocks = Literal["both", "single", "recurrent", "parallel"]

Biases = frozenset[Literal["qkv", "output", "mlp"]]
"""Projections with a bias: of q, k and v; of attention's output; of the MLP."""

QKV: Biases = frozenset({"qkv"})
OUTPUT: Biases = frozenset({"output"})
MLP: Biases = frozenset({"mlp"})
ATTENTION = QKV | OUTPUT
ALL = ATTENTION | MLP


@dataclass(frozen=True, slots=True)
class Family:
    """One row of the table.

    ``norms``, ``norm_offset``, ``parallel_block``, ``qk_norm``, ``head_norms``, ``is_qk_normed_last``, ``qkv_modules``,
    ``grouped_qkv``, ``mlp_modules``, ``mlp_block`` and ``gated_mlp`` are those of ``ModelConfig``.

    Attributes:
        name: of the family here, mostly the "model_type" in ``config.json``.
        models: the published models, for people.
        architecture: the class in ``config.json``.
        defaults: values of missing keys in ``config.json``, those of the published code.
        windows: layers with a sliding window.
        layer_norm: norms are layer norms instead of RMS norms.
        norm_bias: they have a bias.
        eps_key: the key of the norms' epsilon.
        qk_norm_flag: the key that turns ``qk_norm`` on; None where it always is.
        qkv_bias: q, k and v have a bias, whatever the config says.
        head_bias: the head has a bias.
        norm_head: honours "norm_head".
        optional_biases: keys by which a config may add biases, with the projections that get one.
        scaled_embedding: embeddings are multiplied by the root of the hidden size.
        gelu_is_tanh: "gelu" means its approximation by tanh, as in the first files of Gemma.
        embedding_flag: the key that asks for this, unrounded; None where none does.
        multipliers: honours "embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling".
        logit_scale: honours "logit_scale".
        length_key: the key of the longest sequence, where it is not "max_position_embeddings" or that is too short.
        query_scalar: scores are divided by the root of "query_pre_attn_scalar", not of the head size.
        attention_soft_cap: honours "attn_logit_softcapping".
        logit_soft_cap: honours "final_logit_softcapping".
        partial_rotary: honours "partial_rotary_factor".
        interleaved: the rotary embedding pairs neighbouring dimensions.
        ntk_alpha: rope type "dynamic" has a fixed "alpha".
        mrope: rotary parameters may have sections for time, height and width, which are the same position in text.
        local_theta: layers with a window have a rotary embedding of their own, with the base of this key and without
            scaling; None for the same in all layers.
        no_rope: layers without rotary embedding.
        scaled_queries: honours "llama_4_scaling_beta" among the rotary parameters.
        attention_temperature: honours "attn_temperature_tuning", in layers without rotary embedding.
        mlp_size_key: the key of the size of an ordinary MLP.
        halved_mlp: that size is of gate and up together.
        gguf_name: the architecture in GGUF files; None where this family is not read from them. Of two families with
            the same, files with a sliding window are of the one that has windows.
        gguf_ignored: metadata of GGUF files without effect on text.
        permuted_gguf: GGUF files interleave the two halves of each q and k head.
        gguf_window: window of GGUF files that name none.
        gguf_yarn_truncates: what "truncate" would say of YaRN in GGUF files, which have no key for it.
        wide_layers: the number of layers at which scores are divided by the root of hidden size / heads, not of the
            head size; GGUF files have no key for it.
        remote_code: "auto_map" entries that name this very architecture, and so may be ignored.
        harmless: values without effect of keys that are refused at others in all families.
        sized_layers: honours "per_layer_config" or "global_head_dim", "num_global_key_value_heads",
            "attention_k_eq_v", "num_kv_shared_layers" and "use_double_wide_mlp", by which layers differ in size.
        layer_inputs: honours "hidden_size_per_layer_input" and "vocab_size_per_layer_input".
        layer_scalars: ``has_layer_scalars`` of ``ModelConfig``; ``v_norm`` is ``has_v_norm``.
        unit_scale: scores have no factor.
        attention_sinks: that of ``ModelConfig``.
        latent: attention is multi-head latent attention.
        indexed: a token attends to the "index_topk" tokens of the highest scores by an index of its layer, or of an
            earlier one, by "indexer_types" and its like.
        mixture: how layers are mixtures of experts, None for none.
        recurrent: what layers have in place of attention where "layer_types" does not name attention, with the keys
            of LFM2 ("short_conv"), of Mamba ("mamba"), of FalconMamba, whose norms have no weight ("normed_mamba"), of
            Jamba ("weighted_mamba"), of Granite 4 ("mamba2"), of Qwen 3.5 ("delta"), of Qwen3-Next
            ("grouped_delta") or of Kimi Linear ("kimi_delta"); None for attention in all layers.
        blocks: what a layer has.
        gated_attention: that of ``ModelConfig``.
        ignored: beginnings of the names of modules in checkpoints that are no part of the model.
        output_module, mlp_block, final_norm: those of ``ModelConfig``.
        prediction: how checkpoints store MTP modules, None where none is known.
        config_names: keys in ``config.json`` by the family's own names, with the usual ones.
        tensor_names: expressions of parts of names in checkpoints and adapters, each with what stands here for it, one
            after the other.
    """

    name: str
    models: str
    architecture: str
    windows: Windows
    defaults: Mapping[str, Any] = field(default_factory=dict)
    norms: LayerNorms = PRE
    parallel_block: bool = False
    layer_norm: bool = False
    norm_bias: bool = False
    norm_offset: float = 0.0
    eps_key: str = "rms_norm_eps"
    qk_norm: HeadNorm | None = None
    qk_norm_flag: str | None = None
    head_norms: tuple[str, str] | None = ("q_norm", "k_norm")
    is_qk_normed_last: bool = False
    qkv_bias: bool = False
    head_bias: bool = False
    norm_head: bool = False
    optional_biases: Mapping[str, Biases] = field(default_factory=dict)
    qkv_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    grouped_qkv: bool = False
    mlp_modules: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    mlp_block: str = "mlp"
    gated_mlp: bool = True
    scaled_embedding: bool = False
    gelu_is_tanh: bool = False
    embedding_flag: str | None = None
    multipliers: bool = False
    logit_scale: bool = False
    length_key: str = "max_position_embeddings"
    query_scalar: bool = False
    attention_soft_cap: bool = False
    logit_soft_cap: bool = False
    partial_rotary: bool = False
    interleaved: bool = False
    ntk_alpha: bool = False
    mrope: bool = False
    local_theta: str | None = None
    no_rope: NoRope = "never"
    scaled_queries: bool = False
    attention_temperature: bool = False
    mlp_size_key: str = "intermediate_size"
    halved_mlp: bool = False
    gguf_name: str | None = None
    gguf_ignored: frozenset[str] = frozenset()
    permuted_gguf: bool = False
    gguf_window: int = 0
    gguf_yarn_truncates: bool = True
    wide_layers: int | None = None
    remote_code: tuple[str, ...] = ()
    harmless: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    sized_layers: bool = False
    layer_inputs: bool = False
    layer_scalars: bool = False
    v_norm: bool = False
    unit_scale: bool = False
    attention_sinks: bool = False
    latent: bool = False
    indexed: bool = False
    mixture: MixtureFamily | None = None
    recurrent: Recurrent | None = None
    blocks: Blocks = "both"
    gated_attention: QueryGating | None = None
    ignored: tuple[str, ...] = ()
    output_module: str = "o_proj"
    final_norm: str = "norm"
    prediction: PredictionModule | None = None
    config_names: Mapping[str, str] = field(default_factory=dict)
    tensor_names: tuple[tuple[str, str], ...] = ()

    @property
    def has_delta(self) -> bool:
        """Whether layers without attention are gated delta nets."""
        return self.recurrent in ("delta", "grouped_delta")
