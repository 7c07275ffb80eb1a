"""Checkpoints that the GPU's run writes are ones that the engine loads, with all that drafts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.checkpoint_files import write_draft_head, write_model, write_mtp_model
from benchmarks.gpu.engine_runs import LLAMA_1B, TINY
from benchmarks.gpu.measure import Machine
from rootgraft.engine.loading.load_head import load_head
from rootgraft.engine.loading.load_model import load_model
from rootgraft.engine.loading.load_mtp import load_mtp
from rootgraft.engine.models.decoder import DecoderModel
from rootgraft.engine.models.hidden_pool import FusedLayers

CPU = Machine(torch.device("cpu"), torch.float32, tiny=True)
DEEP = replace(TINY, layers=LLAMA_1B.layers)


def loaded(folder: Path) -> DecoderModel:
    return load_model(folder, dtype=CPU.dtype, device=CPU.device, max_positions=32)


def test_a_model_has_a_tokenizer_of_bytes(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", TINY, CPU)
    assert loaded(folder).config.vocab_size == TINY.vocab
    assert json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"].keys() >= {"a", "<299>"}


def test_a_model_with_an_mtp_module(tmp_path: Path) -> None:
    folder = write_mtp_model(tmp_path / "model", TINY, CPU)
    model = loaded(folder)
    module = load_mtp(folder, model, "plain")
    assert model.config.prediction_layers == 1 and len(model.layers) == TINY.layers
    assert module.embedding is model.embedding and module.target_ids is None


@pytest.mark.parametrize(("shape", "layers"), [(TINY, (0,)), (DEEP, (2, 8, 13))])
def test_an_eagle_3_head_reads_the_layers_of_published_ones(shape, layers, tmp_path: Path) -> None:
    """Of a model of 16 layers the inputs of the third, the middle one and the third from the end."""
    model = loaded(write_model(tmp_path / "model", shape, CPU))
    head = load_head(write_draft_head(tmp_path / "head", shape, CPU), model, "plain")
    assert head.embedding is model.embedding
    assert isinstance(head.reads, FusedLayers) and head.reads.layers == layers
    assert head.target_ids is not None and head.target_ids.tolist() == list(range(shape.vocab - 1))
