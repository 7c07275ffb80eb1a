"""Stages of pipeline-parallel ranks: the logits of one rank, for every family that has stages; the others by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.models.lockstep_ranks import run_ranks
from support.models.paged_run import CPU, PagedRun, run_whole
from support.models.small_gguf import SHAPES, tensors, write
from support.models.tiny_models import LONGROPE, MODELS, VOCAB, save
from torch import Tensor

from rootgraft.engine.checkpoint.read_config import read_model_config
from rootgraft.engine.errors import ConfigError
from rootgraft.engine.loading.load_model import load_model
from rootgraft.engine.loading.stages import Stage, check_stages
from rootgraft.engine.loading.tensor_names import expected_shapes
from rootgraft.kernels.collectives import Ranks

TOKENS = [(7 * i + i * i) % VOCAB for i in range(20)]


def compute(folder: Path, ranks: Ranks, tokens: list[int]) -> Tensor | None:
    """The logits on rank 0; the others pass on what they compute."""
    stage = Stage.of(read_model_config(folder), ranks)
    model = load_model(folder, dtype=torch.float32, device=CPU, stage=stage)
    if ranks.rank == 0:
        return run_whole(model, tokens)
    PagedRun(model, 16, 1, len(tokens)).forward({0: tokens})
    return None


@pytest.mark.parametrize("name", [*MODELS, *LONGROPE])
def test_ranks_have_the_logits_of_one(name: str, tmp_path: Path) -> None:
    """Of each family with two ranks; one whose layers read more than the residual stream is refused."""
    folder = save(name, tmp_path)
    config = read_model_config(folder)
    reads_others = any(layer.kv_source is not None or layer.shares_index for layer in config.layers)
    if config.has_states or config.layer_inputs or reads_others:
        with pytest.raises(ConfigError, match=r"--pipeline-parallel-size 2: .* cannot be split into stages"):
            check_stages(config, 2)
        return
    expected = run_whole(load_model(folder, dtype=torch.float32, device=CPU), TOKENS)
    found, _ = run_ranks(2, lambda ranks: compute(folder, ranks, TOKENS))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("name", ["llama_tied", "gemma2"])
def test_a_stage_of_one_layer_each(name: str, tmp_path: Path) -> None:
    folder = save(name, tmp_path)
    expected = run_whole(load_model(folder, dtype=torch.float32, device=CPU), TOKENS)
    found = run_ranks(3, lambda ranks: compute(folder, ranks, TOKENS))[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


def test_each_layer_is_on_one_rank(tmp_path: Path) -> None:
    config = read_model_config(save("llama", tmp_path))
    stages = run_ranks(2, lambda ranks: Stage.of(config, ranks))
    assert [(stage.first, stage.config.num_layers) for stage in stages] == [(1, 2), (0, 1)]
    assert [(stage.has_embedding, stage.has_head) for stage in stages] == [(False, True), (True, False)]
    layers = [name for name in expected_shapes(config) if name.startswith("model.layers.")]
    parts = [name for each in stages for name in expected_shapes(each.config) if name.startswith("model.layers.")]
    assert len(parts) == len(layers)


def test_more_ranks_than_layers_are_refused(tmp_path: Path) -> None:
    config = read_model_config(save("llama", tmp_path))
    check_stages(config, 3)
    with pytest.raises(ConfigError, match="--pipeline-parallel-size 4 is more than the model's 3 layers"):
        check_stages(config, 4)


def test_a_rank_reads_its_own_layers_of_a_gguf_file(tmp_path: Path) -> None:
    """And neither has the other's end of the model in memory."""
    second = {name.replace("blk.0.", "blk.1."): shape for name, shape in SHAPES.items() if name.startswith("blk.0.")}
    path = write(tmp_path / "model.gguf", tensors(SHAPES | second), block_count=2)
    config = read_model_config(path)
    expected = run_whole(load_model(path, dtype=torch.float32, device=CPU), [3, 0, 31])

    def lacks_embedding(ranks: Ranks) -> bool:
        model = load_model(path, dtype=torch.float32, device=CPU, stage=Stage.of(config, ranks))
        assert isinstance(model.embedding, Tensor)
        return model.embedding.is_meta

    assert run_ranks(2, lacks_embedding) == [True, False]
    found = run_ranks(2, lambda ranks: compute(path, ranks, [3, 0, 31]))[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
