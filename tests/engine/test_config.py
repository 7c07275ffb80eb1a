"""Options that several ranks cannot keep are refused beside ``--tensor-parallel-size``, and alone they are taken."""

from __future__ import annotations

from typing import Any

import pytest

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"quantization": "int8_weight_only"}, "--quantization int8_weight_only"),
        ({"model_impl": "transformers"}, "--model-impl transformers"),
        ({"batch_invariant": True}, "--batch-invariant"),
        ({"quantization": "int8_dynamic"}, "--quantization int8_dynamic"),
        ({"speculative_config": '{"method": "mtp"}'}, "method mtp of --speculative-config"),
    ],
)
def test_what_one_rank_alone_computes(options: dict[str, Any], named: str) -> None:
    EngineConfig(**options)
    with pytest.raises(ConfigError) as refusal:
        EngineConfig(tensor_parallel_size=2, **options)
    assert str(refusal.value) == (
        f"--tensor-parallel-size 2 cannot be used with {named}, which runs on a single rank. Remove one of the two."
    )


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"speculative_config": '{"model": "draft"}'}, "method draft_model of --speculative-config"),
        ({"speculative_config": '{"method": "mtp"}'}, "method mtp of --speculative-config"),
        ({"batch_invariant": True}, "--batch-invariant"),
    ],
)
def test_what_stages_do_not_compute(options: dict[str, Any], named: str) -> None:
    with pytest.raises(
        ConfigError, match=f"--pipeline-parallel-size 3 cannot be used with {named}, which runs on a single rank"
    ):
        EngineConfig(pipeline_parallel_size=3, **options)
    assert EngineConfig(pipeline_parallel_size=3, quantization="int8_weight_only").num_ranks == 3


@pytest.mark.parametrize(
    "options",
    [
        *({"quantization": form} for form in ("widened", "gguf", "gguf_dynamic")),
        {"kv_disk": "kv", "kv_peer_gib": 0.5},
        {"pipeline_parallel_size": 2, "enable_lora": True},
        *({"speculative_config": drafts} for drafts in ('{"method": "ngram"}', '{"model": "draft"}')),
    ],
)
def test_what_all_ranks_compute(options: dict[str, Any]) -> None:
    assert EngineConfig(tensor_parallel_size=64, **options).tensor_parallel_size == 64


@pytest.mark.parametrize(("size", "bound"), [(0, "at least 1"), (65, "at most 64")])
def test_limits_of_the_size(size: int, bound: str) -> None:
    with pytest.raises(ConfigError, match=f"--tensor-parallel-size must be {bound}, not {size}"):
        EngineConfig(tensor_parallel_size=size)
