"""What lists in GGUF files say of each layer, and what of them is refused."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from rootgraft.engine.checkpoint.config_fields import Fields
from rootgraft.engine.checkpoint.families.family_table import BY_NAME
from rootgraft.engine.checkpoint.gguf import GgufFile
from rootgraft.engine.checkpoint.gguf_listed_layers import listed_layers
from rootgraft.engine.errors import ModelError

LAGUNA = {
    "block_count": 6,
    "attention.head_count": np.array([4, 6, 6, 6, 4, 6]),
    "attention.head_count_kv": 2,
    "attention.key_length": 16,
    "attention.sliding_window": 8,
    "rope.freq_base": 5e5,
    "rope.freq_base_swa": 1e4,
    "rope.dimension_count": 8,
    "rope.dimension_count_swa": 16,
}


class _Shape:
    def __init__(self, *shape: int) -> None:
        self.shape = shape


class _File:
    """Gates of a column for each head."""

    def __init__(self, heads: list[int], width: int = 1) -> None:
        self.tensors = {f"blk.{index}.attn_gate.weight": _Shape(each * width, 96) for index, each in enumerate(heads)}
        self.tensors |= {f"blk.{index}.ffn_gate_inp.weight": _Shape(6, 96) for index in range(1, len(heads))}


def read(name: str, own: dict[str, Any], width: int = 1, scaling: dict[str, Any] | None = None) -> dict[str, Any]:
    file: GgufFile = _File([4, 6, 6, 6, 4, 6], width)  # type: ignore[assignment]
    return listed_layers(file, Fields(own, "GGUF metadata"), BY_NAME[name], scaling or {})


def test_laguna_has_a_layer_with_full_attention_first_and_every_fourth() -> None:
    found = read("laguna", LAGUNA)
    assert [kind == "full_attention" for kind in found["layer_types"]] == [True, False, False, False, True, False]
    assert found["num_attention_heads_per_layer"] == [4, 6, 6, 6, 4, 6] and found["gating"] == "per-head"
    assert found["mlp_layer_types"] == ["dense", *["sparse"] * 5]
    full, local = (found["rope_parameters"][kind] for kind in ("full_attention", "sliding_attention"))
    assert (full["rope_theta"], full["partial_rotary_factor"]) == (5e5, Fraction(1, 2))
    assert (local["rope_theta"], local["partial_rotary_factor"]) == (1e4, Fraction(1))
    assert read("laguna", LAGUNA, width=16)["gating"] == "per-element"
    whole = {key: value for key, value in LAGUNA.items() if "sliding" not in key}
    assert read("laguna", whole)["layer_types"] == ["full_attention"] * 6


def test_yarn_has_the_factor_of_attention_that_the_model_says() -> None:
    yarn = {"rope_type": "yarn", "factor": 32.0}
    ropes = read("laguna", LAGUNA | {"rope.scaling.yarn_attn_factor": 1.0}, scaling=yarn)["rope_parameters"]
    assert ropes["full_attention"]["attention_factor"] == 1.0 and ropes["full_attention"]["factor"] == 32.0
    assert "factor" not in ropes["sliding_attention"]
    assert "attention_factor" not in read("laguna", LAGUNA, scaling=yarn)["rope_parameters"]["full_attention"]


@pytest.mark.parametrize(
    ("name", "changes", "wanted"),
    [
        ("laguna", {"attention.head_count": np.array([4, 6])}, "attention.head_count must be a number above 0"),
        ("laguna", {"attention.head_count_kv": np.array([2, 2, 2, 2, 2, 3])}, "the same in all layers"),
        ("laguna", {"attention.value_length": 8}, "attention.value_length must be equal to attention.key_length 16"),
        ("laguna", {"rope.scaling.yarn_attn_factor": 0.5}, "rope.scaling.yarn_attn_factor must be 1.0 without YaRN"),
        ("laguna", {"expert_shared_count": 2}, "with one shared expert"),
        ("step3p5", {}, "attention.sliding_window_pattern must be a list with a flag for each of 6 layers"),
        (
            "step3p5",
            {"attention.sliding_window_pattern": np.ones(6), "swiglu_clamp_exp": np.array([-1.0] * 6)},
            "swiglu_clamp_exp must be a list with a number from 0 on",
        ),
    ],
)
def test_what_is_not_computed_is_refused(name: str, changes: dict[str, Any], wanted: str) -> None:
    with pytest.raises(ModelError, match=re.escape(wanted)):
        read(name, LAGUNA | changes)


def test_gates_of_another_width_are_refused() -> None:
    with pytest.raises(ModelError, match=r"attn_gate\.weight must have a row for each head"):
        read("laguna", LAGUNA, width=3)
