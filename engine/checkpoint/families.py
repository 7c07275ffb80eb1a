"""The table of model families: how each differs from a Llama, as data.

A family's ``defaults`` are those of its published code for keys that a ``config.json`` leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .mixtures.mixture import ExpertNames, MixtureFamily

# Layers with a sliding window, where config.json has no "layer_types":
#   never     no layer, and a "sliding_window" is refused
#   all       every layer, if there is a "sliding_window"
#   late      layers from "max_window_layers" on, if "use_sliding_window"
#   no_rope   layers without rotary embedding, if "use_sliding_window"
#   pattern   all but every n-th layer, n = "sliding_window_pattern"
#   asked     every layer, if "use_sliding_window"
#   early     every second layer below "max_window_layers", from the first on, if "use_sliding_window"
Windows = Literal["never", "all", "late", "no_rope", "pattern", "asked", "early"]


@dataclass(frozen=True, slots=True)
class Family:
    """One row of the table. ``norm_offset``, ``post_norms`` and ``qk_norm`` are those of ``ModelConfig``.

    Attributes:
        name: in GGUF files.
        architecture: the class in ``config.json``.
        defaults: values of missing keys in ``config.json``.
        windows: layers with a sliding window.
        qkv_bias: q, k and v have a bias, whatever the config says.
        optional_biases: keys by which a config may add biases: "attention_bias" (q, k, v, o), "mlp_bias".
        scaled_embedding: embeddings are multiplied by the root of the hidden size.
        query_scalar: scores are divided by the root of "query_pre_attn_scalar", not of the head size.
        attention_soft_cap: honours "attn_logit_softcapping".
        logit_soft_cap: honours "final_logit_softcapping".
        partial_rotary: honours "partial_rotary_factor".
        mrope: rotary parameters may have sections for time, height and width, which are the same position in text.
        local_rope: layers with a window have a rotary embedding of their own.
        no_rope_layers: some layers have no rotary embedding.
        fused_weights: checkpoints store q, k, v as one matrix, and gate, up as one.
        permuted_gguf: GGUF files interleave the two halves of each q and k head.
        gguf_window: window of GGUF files that name none.
        wide_layers: the number of layers at which scores are divided by the root of hidden size / heads, not of the
            head size; GGUF files have no key for it.
        remote_code: "auto_map" entries that name this very architecture, and so may be ignored.
        attention_sinks: that of ``ModelConfig``.
        mixture: how layers are mixtures of experts, None for none.
    """

    name: str
    architecture: str
    windows: Windows
    defaults: Mapping[str, Any] = field(default_factory=dict)
    norm_offset: float = 0.0
    post_norms: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    optional_biases: tuple[str, ...] = ()
    scaled_embedding: bool = False
    query_scalar: bool = False
    attention_soft_cap: bool = False
    logit_soft_cap: bool = False
    partial_rotary: bool = False
    mrope: bool = False
    local_rope: bool = False
    no_rope_layers: bool = False
    fused_weights: bool = False
    permuted_gguf: bool = False
    gguf_window: int = 0
    wide_layers: int | None = None
    remote_code: tuple[str, ...] = ()
    attention_sinks: bool = False
    mixture: MixtureFamily | None = None


_GEMMA = {
    "tie_word_embeddings": True,
    "head_dim": 256,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "bos_token_id": 2,
    "eos_token_id": 1,
}

FAMILIES = (
    Family(
        name="llama",
        architecture="LlamaForCausalLM",
        windows="never",
        defaults={"bos_token_id": 1, "eos_token_id": 2},
        optional_biases=("attention_bias", "mlp_bias"),
        permuted_gguf=True,
    ),
    Family(
        name="mistral",
        architecture="MistralForCausalLM",
        windows="all",
        defaults={"num_key_value_heads": 8, "sliding_window": 4096, "bos_token_id": 1, "eos_token_id": 2},
    ),
    Family(
        name="qwen2",
        architecture="Qwen2ForCausalLM",
        windows="late",
        defaults={"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
        qkv_bias=True,
    ),
    Family(
        name="qwen3",
        architecture="Qwen3ForCausalLM",
        windows="late",
        defaults={"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
        optional_biases=("attention_bias",),
        qk_norm=True,
    ),
    Family(
        name="smollm3",
        architecture="SmolLM3ForCausalLM",
        windows="no_rope",
        defaults={
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "rope_theta": 2_000_000.0,
            "no_rope_layer_interval": 4,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
        },
        optional_biases=("attention_bias", "mlp_bias"),
        no_rope_layers=True,
        permuted_gguf=True,
    ),
    Family(
        name="gemma2",
        architecture="Gemma2ForCausalLM",
        windows="pattern",
        defaults={
            **_GEMMA,
            "sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        optional_biases=("attention_bias",),
        norm_offset=1.0,
        post_norms=True,
        scaled_embedding=True,
        query_scalar=True,
        attention_soft_cap=True,
        logit_soft_cap=True,
        gguf_window=4096,
        wide_layers=46,
    ),
    Family(
        name="gemma3",
        architecture="Gemma3ForCausalLM",
        windows="pattern",
        defaults={**_GEMMA, "sliding_window_pattern": 6, "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0},
        optional_biases=("attention_bias",),
        norm_offset=1.0,
        post_norms=True,
        qk_norm=True,
        scaled_embedding=True,
        query_scalar=True,
        logit_soft_cap=True,
        local_rope=True,
        wide_layers=62,
    ),
    Family(
        name="phi3",
        architecture="Phi3ForCausalLM",
        windows="all",
        defaults={"bos_token_id": 1, "eos_token_id": 32000},
        partial_rotary=True,
        fused_weights=True,
        remote_code=("configuration_phi3.Phi3Config", "modeling_phi3.Phi3ForCausalLM"),
    ),
    Family(
        name="mixtral",
        architecture="MixtralForCausalLM",
        windows="all",
        permuted_gguf=True,
        defaults={
            "num_key_value_heads": 8,
            "rope_theta": 1_000_000.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "num_experts_per_tok": 2,
        },
        mixture=MixtureFamily(
            names=ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2"),
            count_keys=("num_local_experts", "num_experts"),
            size_key="intermediate_size",
        ),
    ),
    Family(
        name="qwen2moe",
        architecture="Qwen2MoeForCausalLM",
        windows="early",
        defaults={
            "num_key_value_heads": 16,
            "sliding_window": 4096,
            "max_window_layers": 28,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
        qkv_bias=True,
        mixture=MixtureFamily(
            names=ExpertNames(shared="shared_expert"),
            count_keys=("num_experts", "num_local_experts"),
            dense_layers="stepped",
            renormalises=None,
            shared_size_key="shared_expert_intermediate_size",
            gated_sharing=True,
        ),
    ),
    Family(
        name="qwen3moe",
        architecture="Qwen3MoeForCausalLM",
        windows="asked",
        defaults={
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        optional_biases=("attention_bias",),
        qk_norm=True,
        mixture=MixtureFamily(
            names=ExpertNames(),
            count_keys=("num_experts", "num_local_experts"),
            dense_layers="stepped",
            renormalises=None,
            gguf_renormalises=True,
        ),
    ),
    Family(
        name="gptoss",
        architecture="GptOssForCausalLM",
        windows="pattern",
        defaults={
            "head_dim": 64,
            "num_key_value_heads": 8,
            "attention_bias": True,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
            "rope_theta": 150_000.0,
            "num_experts_per_tok": 4,
        },
        optional_biases=("attention_bias",),
        attention_sinks=True,
        mixture=MixtureFamily(
            names=ExpertNames(
                router="router",
                gate="experts.gate_up_proj",
                down="experts.down_proj",
                storage="interleaved",
            ),
            count_keys=("num_local_experts", "num_experts"),
            size_key="intermediate_size",
            biased=True,
            clamped=True,
            mxfp4=True,
        ),
    ),
)

BY_NAME = {family.name: family for family in FAMILIES}
BY_ARCHITECTURE = {family.architecture: family for family in FAMILIES}
_NOT_IN_GGUF = ("mistral", "mixtral", "gptoss")  # the first two are llama there
BY_GGUF_NAME = {family.name: family for family in FAMILIES if family.name not in _NOT_IN_GGUF}
