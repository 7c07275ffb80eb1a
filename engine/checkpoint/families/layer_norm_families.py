"""Families with layer norms."""

from __future__ import annotations

from .family import ALL, ATTENTION, MLP, Family
from .norm_layout import LayerNorms

_COHERE = {
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
    "bos_token_id": 5,
    "eos_token_id": 255001,
}
_ONE_NORM = LayerNorms("input_layernorm", None, "input_layernorm", None)

LAYER_NORM_FAMILIES = (
    Family(
        name="cohere",
        models="Command R, Command R+, Aya 23",
        architecture="CohereForCausalLM",
        windows="never",
        defaults={**_COHERE, "rope_theta": 500_000.0},
        optional_biases={"attention_bias": ATTENTION},
        norms=_ONE_NORM,
        parallel_block=True,
        layer_norm=True,
        eps_key="layer_norm_eps",
        qk_norm="centred",
        qk_norm_flag="use_qk_norm",
        logit_scale=True,
        interleaved=True,
        length_key="model_max_length",
        gguf_name="command-r",
    ),
    Family(
        name="cohere2",
        models="Command R7B, Command A",
        architecture="Cohere2ForCausalLM",
        windows="pattern",
        defaults={**_COHERE, "sliding_window": 4096, "sliding_window_pattern": 4},
        optional_biases={"attention_bias": ATTENTION},
        norms=_ONE_NORM,
        parallel_block=True,
        layer_norm=True,
        eps_key="layer_norm_eps",
        logit_scale=True,
        interleaved=True,
        no_rope="full",
        gguf_name="cohere2",
    ),
    Family(
        name="starcoder2",
        models="StarCoder 2",
        architecture="Starcoder2ForCausalLM",
        windows="all",
        defaults={
            "num_key_value_heads": 2,
            "hidden_act": "gelu_pytorch_tanh",
            "norm_epsilon": 1e-5,
            "use_bias": True,
            "tie_word_embeddings": True,
            "bos_token_id": 50256,
            "eos_token_id": 50256,
        },
        optional_biases={"use_bias": ALL},
        layer_norm=True,
        norm_bias=True,
        eps_key="norm_epsilon",
        mlp_modules=("c_fc", "c_proj"),
        gated_mlp=False,
        gguf_name="starcoder2",
        gguf_window=4096,
    ),
    Family(
        name="nemotron",
        models="Nemotron 3 8B, Nemotron 4, Minitron",
        architecture="NemotronForCausalLM",
        windows="never",
        defaults={
            "hidden_act": "relu2",
            "norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "bos_token_id": 2,
            "eos_token_id": 3,
        },
        optional_biases={"attention_bias": ATTENTION, "mlp_bias": MLP},
        layer_norm=True,
        norm_bias=True,
        norm_offset=1.0,
        eps_key="norm_eps",
        mlp_modules=("up_proj", "down_proj"),
        gated_mlp=False,
        partial_rotary=True,
        gguf_name="nemotron",
    ),
)
