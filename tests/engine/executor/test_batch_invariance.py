"""Where ``--batch-invariant`` is taken, and what is said where it cannot be kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.models.tiny_models import save

from rootgraft.engine.checkpoint.read_config import read_model_config
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.errors import ConfigError
from rootgraft.engine.executor.batch_invariance import check_invariance, check_weights
from rootgraft.engine.executor.worker import Worker
from rootgraft.kernels import ops

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
ASKED = EngineConfig(batch_invariant=True)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "on_triton", lambda device: device.type == "cuda")


def test_a_cpu_keeps_it_anyway(tiny_llama: Path) -> None:
    model = read_model_config(tiny_llama)
    try:
        Worker(EngineConfig(batch_invariant=True, device="cpu", dtype="float32", kv_cache_memory=0.01), tiny_llama)
        ops.use_native(False)
        with pytest.raises(
            ConfigError, match="--batch-invariant is not possible: plain torch computes, because there are no native"
        ):
            check_invariance(ASKED, model, CPU, torch.float32)
        check_invariance(EngineConfig(), model, CPU, torch.float32)
    finally:
        ops.use_native(True)
        ops.use_invariant(False)


@pytest.mark.usefixtures("gpu")
def test_a_gpu_keeps_it_for_dense_models(tiny_llama: Path) -> None:
    model = read_model_config(tiny_llama)
    check_invariance(ASKED, model, CUDA, torch.bfloat16)
    check_weights(ASKED, "plain", CUDA)
    check_weights(ASKED, "stored_both", CPU)
    with pytest.raises(ConfigError, match=r"in float32\. Try: --dtype bfloat16"):
        check_invariance(ASKED, model, CUDA, torch.float32)
    with pytest.raises(ConfigError, match="the transformers library computes this model"):
        check_invariance(ASKED, None, CUDA, torch.bfloat16)
    with pytest.raises(ConfigError, match=r"quantised weights on a GPU\. Try: rootgraft serve --quantization widened"):
        check_weights(ASKED, "grouped", CUDA)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("family", "kind"), [("qwen3_moe", "a mixture of experts"), ("lfm2", "recurrent layers")])
def test_other_models_are_refused_by_name(family: str, kind: str, tmp_path: Path) -> None:
    model = read_model_config(save(family, tmp_path))
    with pytest.raises(
        ConfigError, match=rf"models with {kind} do not support it on a GPU\. Leave the option out, or use --device cpu"
    ):
        check_invariance(ASKED, model, CUDA, torch.bfloat16)
    check_invariance(ASKED, model, CPU, torch.bfloat16)
