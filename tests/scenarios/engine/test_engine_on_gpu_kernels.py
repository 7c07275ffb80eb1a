"""An engine whose forward pass runs on the GPU's kernels, interpreted, gives the tokens that it gives on the CPU's."""

from __future__ import annotations

import json
from array import array
from pathlib import Path

import pytest

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.executor import cuda_graphs
from rootgraft.engine.executor.worker import Worker
from rootgraft.engine.messages import Submit, TokenOut
from rootgraft.engine.types import SamplingParams
from rootgraft.kernels.triton import shared_prefixes

# Attention leaves the memory of tokens that pad a step as it was, and what follows computes with it.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 131,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PREFIX = [7 * i % 131 for i in range(21)]
PROMPTS = [[*PREFIX, row, 3] for row in range(3)] + [[5, 6]]


def answers(folder: Path, *, overlaps: bool = False) -> dict[int, list[int]]:
    """Greedy tokens of all prompts, the first of them alone before the others come; steps planned ahead or not."""
    config = EngineConfig(
        dtype="float32",
        device="cpu",
        load_format="dummy",
        num_gpu_blocks_override=40,
        threads=1,
        block_size=4,
        max_num_seqs=4,
    )
    worker = Worker(config, folder)
    worker.overlaps = overlaps
    core = EngineCore(config, worker)
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    got: dict[int, list[int]] = {}
    for group in (PROMPTS[:1], PROMPTS[1:]):
        core.handle([Submit(len(got) + i, array("i", prompt), params) for i, prompt in enumerate(group)])
        while core.has_work:
            for message in core.step():
                if isinstance(message, TokenOut):
                    got.setdefault(message.id, []).extend(message.tokens)
            core.check()
    core.close()
    return got


def test_tokens_are_those_of_the_cpu(tmp_path, request, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setattr(shared_prefixes, "LEAST_SHARERS", 2)
    monkeypatch.setattr(shared_prefixes, "LEAST_TOKENS", 8)
    monkeypatch.setattr(shared_prefixes, "LEAST_READS", 0)
    found = []
    find = shared_prefixes.find_shared_prefixes
    monkeypatch.setattr(shared_prefixes, "find_shared_prefixes", lambda *args: found.append(find(*args)) or found[-1])
    expected = answers(tmp_path)
    assert not found
    request.getfixturevalue("interpreted")
    assert answers(tmp_path) == expected
    assert any(found), "the prompts share a prefix"


@pytest.mark.parametrize("overlaps", [False, True])
def test_tokens_of_captured_steps_are_those_of_the_cpu(tmp_path, request, monkeypatch, overlaps):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    expected = answers(tmp_path)
    request.getfixturevalue("interpreted")
    replayed = []

    def capture(forward):
        return lambda: replayed.append(forward())

    monkeypatch.setattr(cuda_graphs, "capture_for", lambda *_: capture)
    assert answers(tmp_path, overlaps=overlaps) == expected
    assert replayed
