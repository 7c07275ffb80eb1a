"""The keys by which Step 3.5 describes layers, and what of them is refused."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from rootgraft.engine.checkpoint.hf_config import model_config
from rootgraft.engine.checkpoint.model_config import Llama3Scaling
from rootgraft.engine.errors import ModelError

PUBLISHED: dict[str, Any] = {
    "architectures": ["Step3p5ForCausalLM"],
    "model_type": "step3p5",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 4,
    "num_attention_groups": 2,
    "head_dim": 16,
    "attention_other_setting": {
        "attention_type": "sliding_attention",
        "num_attention_heads": 6,
        "num_attention_groups": 2,
        "head_dim": 16,
    },
    "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention", "sliding_attention"],
    "sliding_window": 512,
    "rope_theta": [5e6, 1e4, 1e4, 1e4, 5e6, 1e4],
    "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0, 0.5, 1.0],
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 2.0,
        "original_max_position_embeddings": 4096,
        "low_freq_factor": 1.0,
        "high_freq_factor": 32.0,
    },
    "yarn_only_types": ["full_attention"],
    "max_position_embeddings": 8192,
    "moe_layers_enum": "3,4",
    "moe_num_experts": 8,
    "moe_top_k": 2,
    "moe_intermediate_size": 32,
    "share_expert_dim": 32,
    "moe_router_scaling_factor": 3.0,
    "swiglu_limits": [0.0, 0.0, 0.0, 7.0, 7.0, 0.0],
    "swiglu_limits_shared": [0.0, 2.0, 0.0, 0.0, 16.0, 0.0],
    "use_rope_layers": [],
}


def test_layers_of_a_published_file() -> None:
    layers = model_config(PUBLISHED).layers
    assert [layer.window for layer in layers] == [None, 512, 512, 512, None]
    assert [layer.num_heads for layer in layers] == [None, 6, 6, 6, None]
    ropes = [layer.rope for layer in layers if layer.rope is not None]
    assert [rope.dim for rope in ropes] == [8, 16, 16, 16, 8]
    assert [rope.theta for rope in ropes] == [5e6, 1e4, 1e4, 1e4, 5e6]
    assert [isinstance(rope.scaling, Llama3Scaling) for rope in ropes] == [True, False, False, False, True]
    mixtures = [layer.mixture for layer in layers]
    assert mixtures[:3] == [None] * 3
    assert [each.clamp.limit for each in mixtures if each is not None and each.clamp is not None] == [7.0, 7.0]
    shared = [each.shared_clamp for each in mixtures if each is not None]
    assert shared[0] is None and shared[1] is not None and shared[1].limit == 16.0
    bounds = [layer.mlp_clamp for layer in layers]
    assert [None if each is None else each.limit for each in bounds] == [None, 2.0, None, None, None]
    gate = bounds[1].gate_limit if bounds[1] is not None else None
    assert gate is not None and gate / (1 + math.exp(-gate)) == pytest.approx(2.0, abs=1e-12)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"swiglu_limits": [7.0]}, "swiglu_limits must be a list with an entry for each of 5 layers"),
        ({"swiglu_limits_shared": [-1.0] * 5}, "swiglu_limits_shared must be a list of 5 numbers from 0 on"),
        (
            {"rope_theta": [5e6, 1e4, 1e5, 1e4, 5e6]},
            "the same, with partial_rotary_factors, in all layers with sliding",
        ),
        ({"rope_theta": [0.0] * 5}, "rope_theta must be a number above 0 for each of 5 layers"),
        ({"yarn_only_types": ["sliding_attention"]}, "yarn_only_types must be"),
        ({"use_rope_layers": [True, False, True, True, True]}, "use_rope_layers must be true for all layers"),
        ({"moe_layers_enum": "3,x"}, "moe_layers_enum must be numbers of layers"),
        ({"attention_other_setting": {"num_attention_heads": 6, "head_dim": 32}}, "head_dim of the other layers, 16"),
        ({"per_layer_config": {"9": {"num_attention_heads": 6}}}, "per_layer_config must be an object with"),
        ({"use_head_wise_attn_gate": False}, "use_head_wise_attn_gate = False is not supported"),
        ({"moe_router_activation": "softmax"}, "moe_router_activation = 'softmax' is not supported"),
    ],
)
def test_what_is_not_computed_is_refused(changes: dict[str, Any], wanted: str) -> None:
    with pytest.raises(ModelError, match=re.escape(wanted)):
        model_config(PUBLISHED | changes)
