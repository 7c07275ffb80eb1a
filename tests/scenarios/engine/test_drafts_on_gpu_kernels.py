"""Draft models, heads and MTP modules on the GPU's kernels, interpreted and captured: answers without drafts are kept.

A capture is played by keeping the pass. Steps are planned ahead wherever drafts do not gain more.
"""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine.draft_engine import drafting_despite_others
from support.speculation.eagle_heads import save_head
from support.speculation.mtp_models import save_mtp

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.executor import cuda_graphs, draft_weights
from rootgraft.engine.executor.worker import Worker
from rootgraft.engine.messages import Submit, TokenOut
from rootgraft.engine.models.draft_head import DraftHead
from rootgraft.engine.types import SamplingParams

# Attention leaves the memory of tokens that pad a step as it was, and what follows computes with it.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")

PROMPTS = [[7, 8, 9, 10, 11], [5, 6]]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=3, max_tokens=6, allowed_token_ids=tuple(range(20, 60)), ignore_eos=True),
]


def save_llama(folder: Path, vocab_size: int, layers: int) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(layers)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=64, eos_token_id=None, initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def answers(folder: Path, drafts: dict[str, Any], *, overlaps: bool) -> tuple[dict[int, list[int]], dict[str, float]]:
    """The tokens of both requests, of which the second comes a step later; and what the engine has counted."""
    config = EngineConfig(
        dtype="float32",
        device="cpu",
        num_gpu_blocks_override=24,
        threads=1,
        block_size=4,
        max_num_seqs=2,
        max_num_batched_tokens=8,
        speculative_config=json.dumps(drafts),
    )
    worker = Worker(config, folder)
    worker.overlaps = overlaps
    core = EngineCore(config, worker)
    got: dict[int, list[int]] = {0: [], 1: []}
    for number, prompt in enumerate(PROMPTS):
        core.handle([Submit(number, array("i", prompt), PARAMS[number])])
        while core.has_work and (number or not got[0]):
            for message in core.step():
                if isinstance(message, TokenOut):
                    got[message.id] += message.tokens
            core.check()
    stats = core.stats()
    core.close()
    return got, stats


@pytest.fixture
def base(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A target and the option that has it drafted for: by a model of fewer tokens, a head of its own or shared ones."""
    if request.param == "mtp":
        return save_mtp("mimo", tmp_path, shared=True), {"method": "mtp"}
    target = save_llama(tmp_path / "target", 90, 2)
    if request.param == "model":
        return target, {"model": str(save_llama(tmp_path / "draft", 80, 1))}
    return target, {"model": str(save_head(tmp_path / "head", target))}


@pytest.mark.parametrize("base", ["model", "head", "mtp"], indirect=True)
def test_captured_drafts_change_no_answer(
    base: tuple[Path, dict[str, Any]], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, drafts = base
    expected, _ = answers(folder, {"method": "off"}, overlaps=False)
    request.getfixturevalue("interpreted")
    drafting_despite_others(monkeypatch, 2)
    # A tokenizer would say that both models have one vocabulary, padded to different sizes.
    monkeypatch.setattr(draft_weights, "has_tokenizer", lambda _: True)
    eager: list[Any] = []
    replayed: list[None] = []
    inner = DraftHead.forward
    running = [False]

    def capture(forward: Any) -> Any:
        def replay() -> None:
            running[0] = True
            replayed.append(forward())
            running[0] = False

        return replay

    def watched(self: DraftHead, inputs: Any, kv: Any) -> torch.Tensor:
        if not running[0]:
            eager.append(inputs)
        return inner(self, inputs, kv)

    monkeypatch.setattr(DraftHead, "forward", watched)
    monkeypatch.setattr(cuda_graphs, "capture_for", lambda *_: capture)
    got, stats = answers(folder, drafts, overlaps=True)
    assert got == expected
    assert stats["drafted_model"] > 0
    assert replayed and not eager
