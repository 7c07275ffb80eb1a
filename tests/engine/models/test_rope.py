"""Tables of rotary embeddings against transformers, at positions up to 128k."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from rootgraft.engine.checkpoint.hf_config import model_config
from rootgraft.engine.checkpoint.model_config import QueryScaling
from rootgraft.engine.models.rope import cos_sin_table, query_scale_table

LONGEST = 131_072
POSITIONS = torch.tensor([0, 1, 4095, 4096, 8191, 32_767, 32_768, 65_536, LONGEST - 1])
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "llama3 of Llama 4": {
        "rope_type": "llama3",
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    },
    "dynamic up to its length": {"rope_type": "dynamic", "factor": 6.0},
    "yarn": YARN,
    "yarn without original length": {"rope_type": "yarn", "factor": 4.0},
    "yarn below 1": YARN | {"factor": 0.5},
    "yarn with attention factor": YARN | {"attention_factor": 1.25},
    "yarn with both mscales": YARN | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.707},
    "yarn with mscale alone": YARN | {"mscale": 0.5},
    "yarn with betas": YARN | {"beta_fast": 16.0, "beta_slow": 2.0},
    "yarn in fractions": YARN | {"factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
    "yarn of a short model": YARN | {"original_max_position_embeddings": 4},
}


@pytest.mark.parametrize("attention", [{}, {"attention_factor": 1.3}, {"factor": 16.0}], ids=str)
@pytest.mark.parametrize("length", [4096, 4097, LONGEST])
def test_longrope_table_equals_that_of_transformers(length: int, attention: dict[str, float]) -> None:
    """Phi-4-mini's sizes: three quarters of a head of 128 dimensions."""
    factors = {"short_factor": [1 + index / 48 for index in range(48)], "long_factor": [1.1**n for n in range(48)]}
    config = Phi3Config(
        hidden_size=256,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_hidden_layers=1,
        intermediate_size=64,
        vocab_size=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        max_position_embeddings=LONGEST,
        original_max_position_embeddings=4096,
        rope_parameters={"rope_type": "longrope", "partial_rotary_factor": 0.75, **factors, **attention},
    )
    positions = torch.tensor([0, 1, 2047, 4095, length - 1])
    cos, sin = Phi3RotaryEmbedding(config)(torch.zeros(1), positions[None])
    found = model_config(config.to_dict() | {"architectures": ["Phi3ForCausalLM"]})
    rope = found.layers[0].rope
    assert rope is not None and found.rope_switch == 4096
    ours = cos_sin_table(rope, length, torch.device("cpu"), is_long=length > 4096)[positions]
    torch.testing.assert_close(ours, torch.cat((cos[0, :, :48], sin[0, :, :48]), dim=1), atol=1e-4, rtol=0)


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
@pytest.mark.parametrize("theta", [10_000.0, 1_000_000.0])
def test_table_equals_that_of_transformers(scaling: dict[str, Any], theta: float) -> None:
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_hidden_layers=1,
        intermediate_size=64,
        vocab_size=64,
        bos_token_id=1,
        eos_token_id=2,
        max_position_embeddings=LONGEST,
        rope_parameters={**scaling, "rope_theta": theta},
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), POSITIONS[None])
    written = config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    rope = model_config(written).layers[0].rope
    assert rope is not None
    ours = cos_sin_table(rope, LONGEST, torch.device("cpu"))[POSITIONS]
    expected = torch.cat((cos[0, :, :32], sin[0, :, :32]), dim=1)
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["llama3", "yarn", "yarn without original length"])
def test_a_length_beside_the_rotary_parameters_counts_more_than_theirs(name: str) -> None:
    """In transformers it replaces the length among the parameters, and stands in for a missing one."""
    written = {
        "hidden_size": 128,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "intermediate_size": 64,
        "vocab_size": 64,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": LONGEST,
        "original_max_position_embeddings": 2048,
        "rope_scaling": SCALINGS[name],
        "rope_theta": 10_000.0,
    }
    found = model_config(written | {"architectures": ["LlamaForCausalLM"]})
    rope = found.layers[0].rope
    assert rope is not None and found.max_position_embeddings == LONGEST
    cos, sin = LlamaRotaryEmbedding(LlamaConfig.from_dict(deepcopy(written)))(torch.zeros(1), POSITIONS[None])
    ours = cos_sin_table(rope, LONGEST, torch.device("cpu"))[POSITIONS]
    torch.testing.assert_close(ours, torch.cat((cos[0, :, :32], sin[0, :, :32]), dim=1), atol=1e-4, rtol=0)


def test_query_scales_are_those_of_transformers() -> None:
    """Ministral 3 counts positions from 0, Llama 4 from 1."""
    positions = torch.tensor([0, 8190, 8191, 8192, 16_383, 16_384, 32_767, 32_768, LONGEST - 1])
    ours = query_scale_table(QueryScaling(0.1, 16_384), LONGEST, torch.device("cpu"))[positions]
    theirs = get_llama_4_attn_scale(positions[None].float(), 0.1, 16_384)[0, 0, :, 0]
    torch.testing.assert_close(ours, theirs)
    assert ours[4] == 1 and ours[5] > 1
    ours = query_scale_table(QueryScaling(0.1, 8192, shift=1), LONGEST, torch.device("cpu"))[positions]
    theirs = torch.log1p(torch.floor((positions.float() + 1.0) / 8192)) * 0.1 + 1.0  # as in Llama4TextAttention
    torch.testing.assert_close(ours, theirs)
    assert ours[1] == 1 and ours[2] > 1
