"""Passes of every family can be captured on a GPU: in none of them the host waits. On a GPU of tensors without memory.

Where no kernel fits a model's sizes, plain torch may wait for the device: then steps are not captured, where a capture
would have ended the server at its start.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.kernels.meta_gpu import GPU, posing_gpu
from support.machine.thoroughness import taking_turns
from support.models.tiny_models import LONGROPE, MODELS, save

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.executor import cuda_graphs
from rootgraft.engine.executor.cuda_graphs import CudaGraphs, graphs_for
from rootgraft.engine.executor.input_builder import InputBuilder
from rootgraft.engine.loading.load_model import load_model
from rootgraft.engine.models.hidden_pool import FusedLayers, HiddenPool
from rootgraft.engine.models.kv_pool import KvPool
from rootgraft.engine.models.state_pool import StatePool
from rootgraft.kernels.layouts import kv_forms
from rootgraft.kernels.pass_graphs import host_wait
from rootgraft.kernels.triton import graph_capture

# In sizes that the kernels take: heads of multiples of 16 dimensions, experts of multiples of 16 inputs.
SIZES = {
    "head_dim": 16,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "intermediate_size": 96,
    "hidden_size": 96,
}
OWN = {
    "mimo_v2_flash": {"head_dim": 32},
    "mistral4": {"head_dim": 40, "qk_nope_head_dim": 24},
    **{name: {"hidden_size": 48} for name in ("zamba2", "zamba2_plain")},
}
# An index that chooses among a context's tokens is refused on a GPU (``check_index``).
REFUSED = {"deepseek_v32_chosen", "glm_moe_dsa_shared", "minimax_m3_chosen", "minimax_m3_wide_blocks"}
NAMES = sorted((MODELS | LONGROPE).keys() - REFUSED)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU of meta tensors, whose captures run the pass and refuse what a capture refuses."""

    def capture(forward: Callable[[], None]) -> Callable[[], None]:
        assert host_wait(forward) is None
        return forward

    monkeypatch.setattr(graph_capture, "Capture", lambda _: capture)
    cuda_graphs._say_once.cache_clear()
    with posing_gpu():
        yield


def graphs_of(
    name: str,
    folder: Path,
    changes: dict[str, Any],
    kv_dtype: torch.dtype = torch.bfloat16,
    hidden: HiddenPool | None = None,
) -> CudaGraphs | None:
    """The graphs of a family's model with these fields, none captured yet."""
    written = json.loads((save(name, folder) / "config.json").read_text())
    changed = {key: value for key, value in changes.items() if key in written}
    (folder / "config.json").write_text(json.dumps({**written, **changed}))
    model = load_model(folder, dtype=torch.bfloat16, device=GPU, dummy=True)
    states = StatePool(model.config, 3, model.dtype, GPU) if model.config.has_states else None
    kv = KvPool(model.config, 8, 16, kv_dtype, GPU, states, hidden)
    inputs = InputBuilder(2, 64, 16, GPU, None, model.long_offset, model.config.has_states)
    config = EngineConfig(dtype="bfloat16", max_num_seqs=2, max_num_batched_tokens=4, block_size=16)
    return graphs_for(config, model, kv, inputs)


@pytest.mark.parametrize("name", taking_turns(NAMES, 3))
def test_every_pass_is_captured(name: str, tmp_path: Path) -> None:
    graphs = graphs_of(name, tmp_path, SIZES | OWN.get(name, {}))
    assert graphs is not None and {variant.is_mixed for variant in graphs.variants} == {True, False}
    graphs.capture(graphs.variants)


@pytest.mark.parametrize("kv", [kv_forms.INT8, kv_forms.FLOAT8], ids=str)
def test_so_are_those_over_kv_of_8_bits(kv: torch.dtype, tmp_path: Path) -> None:
    graphs = graphs_of("llama", tmp_path, SIZES, kv)
    assert graphs is not None
    graphs.capture(graphs.variants)


def test_larger_heads_in_some_layers_are_looked_at_too(tmp_path: Path) -> None:
    """Those of the full layers of Gemma 4 have 512 dimensions, which plain torch computes."""
    for dim in (32, 512):
        graphs = graphs_of("gemma4", tmp_path, {"per_layer_config": {layer: {"head_dim": dim} for layer in "134"}})
        assert (graphs is None) == (dim == 512)


def test_a_pass_in_which_the_host_waits_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Once said, whoever asks for graphs: the memory of steps is measured with graphs of their own."""
    head: Any = None  # which no pass reaches
    hidden = HiddenPool(8, 16, 96, torch.bfloat16, GPU, FusedLayers((0,), head))
    odd = {**SIZES, "intermediate_size": 72}
    assert [graphs_of("mixtral", tmp_path, odd, hidden=hidden) for _ in range(2)] == [None, None]
    assert hidden.take_seen() == (), "what a draft head reads of a pass that was broken off"
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("CUDA graphs")]
    assert line.startswith("CUDA graphs are off") and "unique" in line
