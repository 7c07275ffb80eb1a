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
#   listed    none but those that "layer_types" lists
#   prefixed  all but every n-th layer, n = "prefix_dense_sliding_window_pattern" among the first
#             "first_k_dense_replace" layers, and "sliding_window_pattern" among the others
#   flagged   those that "hybrid_layer_pattern" lists with 1, or all but the first layer and every sixth one
#   chunks    no layer, but those with rotary embedding see chunks of "attention_chunk_size"
Windows = Literal[
    "never", "all", "late", "no_rope", "pattern", "leading", "asked", "early", "listed", "prefixed", "flagged", "chunks"
]

# Layers without a rotary embedding:
#   never     none, and "no_rope_layers" is refused
#   listed    those that "no_rope_layers" lists with 0, or every n-th one, n = "no_rope_layer_interval"
#   full      those without a window, if there is a "sliding_window"
#   asked     all, unless "position_embedding_type" is "rope"
#   windowed  those without a window
#   sparse    the same, but for layers without experts if "prefix_dense_sliding_window_pattern" is 1
#   always    all
#   null      all, if the base of the rotary embedding, "rope_theta", is null
NoRope = Literal["never", "listed", "full", "asked", "windowed", "sparse", "always", "null"]

Recurrent = Literal[
    "short_conv",
    "mamba",
    "normed_mamba",
    "weighted_mamba",
    "mamba2",
    "delta",
    "grouped_delta",
    "separate_delta",
    "kimi_delta",
    "wide_kimi_delta",
]

# What a layer has:
#   both       a mixer, which is attention or has a recurrent state, and an MLP
#   single     a mixer or an MLP, as "layers_block_type" or "hybrid_override_pattern" says
#   recurrent  a mixer with a recurrent state alone
#   parallel   attention, a mixer with a recurrent state beside it, and an MLP
#   shared     a mixer with a recurrent state, in some layers behind a block of attention and MLP whose weights several
#              layers share
Blocks = Literal["both", "single", "recurrent", "parallel", "shared"]

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
        name: name of the family in this table, mostly the "model_type" in ``config.json``.
        models: names of the published models, for people to read.
        architecture: the class in ``config.json``.
        defaults: values of keys that ``config.json`` lacks, taken from the published code.
        windows: rule for which layers have a sliding window.
        two_norms_key: the key of the number of norms of a parallel block, which may be 2: one of attention's input, and
            one of the MLP's, ``post_attention_layernorm``; None for one norm.
        parallel_flag: the key that makes the block a parallel one; None if ``parallel_block`` decides.
        parallel_norms: names of a layer's norms in a parallel block, if they differ from ``norms``.
        layer_norm: whether norms are layer norms instead of RMS norms.
        norm_bias: whether norms have a bias.
        weightless_norms: the field of ``ModelConfig`` with the same name.
        eps_key: the key of the norms' epsilon.
        rms_eps_key: the key of the epsilon of RMS norms, which a config that has it has in place of layer norms.
        qk_norm_flag: the key that turns ``qk_norm`` on; None if it is always on.
        qkv_bias: whether q, k and v always have a bias, regardless of the config.
        head_bias: whether the head has a bias.
        learned_positions, transposed: the fields of ``ModelConfig`` with the same names.
        norm_head: whether the family honours "norm_head".
        optional_biases: keys by which a config may add biases, with the projections that get one.
        scaled_embedding: whether embeddings are multiplied by the root of the hidden size.
        gelu_is_tanh: whether "gelu" means its approximation by tanh, as in the first files of Gemma.
        embedding_flag: the key that turns on an unrounded scaling of embeddings; None without such a key.
        multipliers: whether the family honours "embedding_multiplier", "attention_multiplier", "residual_multiplier"
            and "logits_scaling".
        logit_scale: whether the family honours "logit_scale".
        length_key: the key of the longest sequence, if it is not "max_position_embeddings" or the latter is too short.
        query_scalar: whether scores are divided by the root of "query_pre_attn_scalar", instead of the root of the head
            size.
        attention_soft_cap: whether the family honours "attn_logit_softcapping".
        logit_soft_cap: whether the family honours "final_logit_softcapping".
        partial_rotary: whether the family honours "partial_rotary_factor".
        interleaved: whether the rotary embedding pairs neighbouring dimensions.
        rotates_back: whether the rotary embedding rotates by negative angles.
        ntk_alpha: whether rope type "dynamic" has a fixed "alpha".
        mrope: whether rotary parameters may have sections for time, height and width. In text the three positions are
            equal.
        layer_thetas: whether the family honours "layer_rope_theta", the base of each layer's rotary embedding, which is
            0 for a layer without one.
        local_theta: the key of the base of a separate rotary embedding, without scaling, for layers with a window; None
            if all layers have the same rotary embedding.
        no_rope: rule for which layers have no rotary embedding.
        scaled_queries: whether the family honours "llama_4_scaling_beta" among the rotary parameters.
        attention_temperature: whether layers without rotary embedding honour "attn_temperature_tuning".
        mlp_size_key: the key of the size of an ordinary MLP.
        mlp_size_default: the key whose value is the size if ``mlp_size_key`` is absent; None if it must not be.
        halved_mlp: whether the size under ``mlp_size_key`` is the size of gate and up together.
        gguf_name: the architecture's name in GGUF files; None if this family is not read from GGUF files. If two
            families share a name, files with a sliding window belong to the family that has windows.
        gguf_lists: whether GGUF files have lists of what differs between layers, and a rotary embedding for each kind.
        gguf_ignored: metadata of GGUF files without effect on text.
        permuted_gguf: whether GGUF files interleave the two halves of each q and k head.
        gguf_window: size of the sliding window if a GGUF file does not state it.
        gguf_yarn_truncates: the value of YaRN's "truncate" for GGUF files, which have no key for it.
        wide_layers: the number of layers of the model whose scores are divided by the root of hidden size / heads,
            instead of the root of the head size; GGUF files have no key for this.
        remote_code: "auto_map" entries that name this architecture's own code, and so may be ignored.
        harmless: values at which a key has no effect, for keys whose other values are refused in all families.
        sized_layers: whether the family honours the keys by which layers differ in size: "per_layer_config" or
            "global_head_dim", "num_global_key_value_heads", "attention_k_eq_v", "num_kv_shared_layers" and
            "use_double_wide_mlp".
        layer_inputs: whether the family honours "hidden_size_per_layer_input" and "vocab_size_per_layer_input".
        layer_scalars: ``has_layer_scalars`` of ``ModelConfig``; ``v_norm`` is ``has_v_norm``.
        proportional: whether rope type "proportional" is honoured; it is where ``sized_layers`` is set.
        unit_scale: whether scores are used without a factor.
        attention_sinks: ``attention_sinks`` of ``ModelConfig``; ``windowed_sinks`` likewise.
        window_kv_heads_key: the key of the number of KV heads in layers with a window, by default twice the number of
            the others; None if all layers have the same number.
        layer_heads_key: the key of a list with the number of query heads of each layer; None if all layers have the
            same number.
        alibi: whether scores have a bias by distance (ALiBi), in place of a rotary embedding.
        embedding_norm: ``embedding_norm`` of ``ModelConfig``.
        value_dim_key: the key of the dimensions of a value head; None if they are those of a key head.
        latent: whether attention is multi-head latent attention.
        indexed: whether a token attends only to the "index_topk" tokens with the highest scores, by an index of its
            layer, or of an earlier layer as "indexer_types" and similar keys say.
        block_index: whether a token attends only to the blocks of tokens with the highest scores, by an index of its
            layer, in layers that "layer_types" calls "minimax_m3_sparse".
        clamped_mlp: whether MLPs have the activation of ``MixtureFamily.clamped``.
        mixture: description of the layers' mixtures of experts, None for a family without experts.
        recurrent: the kind of layer for each layer that "layer_types" does not call attention, by the keys of LFM2
            ("short_conv"), of Mamba ("mamba"), of FalconMamba, whose norms have no weight ("normed_mamba"), of Jamba
            ("weighted_mamba"), of Granite 4 ("mamba2"), of Qwen 3.5 ("delta"), of Qwen3-Next ("grouped_delta"), of OLMo
            Hybrid ("separate_delta"), of Kimi Linear ("kimi_delta") or of Ling 3 ("wide_kimi_delta"); None for
            attention in all layers.
        recurrent_norms: names of the norms of a layer with a recurrent state, if they differ from ``norms``.
        mixture_norms: the same for a layer with a mixture of experts. Files may have these norms in other layers too,
            without effect.
        blocks: the blocks of a layer.
        gated_attention: ``gated_attention`` of ``ModelConfig``; ``softplus_gate`` likewise.
        gating_key: the key by which the gate has a column for each head (true or "per-head") or for each of the head's
            dimensions ("per-element"); None if ``gated_attention`` decides.
        ignored: prefixes of the names of modules in checkpoints that are not part of the model.
        output_module, mlp_block, final_norm: the fields of ``ModelConfig`` with the same names.
        prediction: how checkpoints store MTP modules, None if no such form is known.
        config_names: the family's own names of keys in ``config.json``, with the usual names.
        tensor_names: regular expressions for parts of names in checkpoints and adapters, each with its replacement;
            they are applied one after the other.
    """

    name: str
    models: str
    architecture: str
    windows: Windows
    defaults: Mapping[str, Any] = field(default_factory=dict)
    norms: LayerNorms = PRE
    parallel_block: bool = False
    two_norms_key: str | None = None
    parallel_flag: str | None = None
    parallel_norms: LayerNorms | None = None
    layer_norm: bool = False
    norm_bias: bool = False
    norm_offset: float = 0.0
    weightless_norms: bool = False
    eps_key: str = "rms_norm_eps"
    rms_eps_key: str | None = None
    qk_norm: HeadNorm | None = None
    qk_norm_flag: str | None = None
    head_norms: tuple[str, str] | None = ("q_norm", "k_norm")
    is_qk_normed_last: bool = False
    qkv_bias: bool = False
    head_bias: bool = False
    learned_positions: bool = False
    transposed: bool = False
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
    rotates_back: bool = False
    ntk_alpha: bool = False
    mrope: bool = False
    layer_thetas: bool = False
    local_theta: str | None = None
    no_rope: NoRope = "never"
    scaled_queries: bool = False
    attention_temperature: bool = False
    mlp_size_key: str = "intermediate_size"
    mlp_size_default: str | None = None
    halved_mlp: bool = False
    gguf_name: str | None = None
    gguf_lists: bool = False
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
    proportional: bool = False
    unit_scale: bool = False
    attention_sinks: bool = False
    windowed_sinks: bool = False
    window_kv_heads_key: str | None = None
    layer_heads_key: str | None = None
    value_dim_key: str | None = None
    alibi: bool = False
    embedding_norm: str | None = None
    latent: bool = False
    indexed: bool = False
    block_index: bool = False
    clamped_mlp: bool = False
    mixture: MixtureFamily | None = None
    recurrent: Recurrent | None = None
    recurrent_norms: LayerNorms | None = None
    mixture_norms: LayerNorms | None = None
    blocks: Blocks = "both"
    gated_attention: QueryGating | None = None
    softplus_gate: bool = False
    gating_key: str | None = None
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
