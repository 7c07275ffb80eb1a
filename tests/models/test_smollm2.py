"""The real model against transformers reading the same GGUF file."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.paged_run import CPU, PagedRun
from torch import Tensor

from rootgraft.engine.loading.load_model import load_model

STARTS = ["The capital of France is", "def add(a, b):\n", "Once upon a time", "In 1969,", '{"name": "'] * 2
NEW_TOKENS = 32


@pytest.fixture(scope="module")
def oracle(smollm2_gguf: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


@pytest.fixture(scope="module")
def prompts(smollm2_gguf: Path) -> list[list[int]]:
    """Ten prompts of 5 to 200 tokens: a few words and then any words of the vocabulary."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)
    rng = random.Random(0)
    noise = [[rng.randrange(100, 49152) for _ in range(rng.choice((0, 9, 40, 190)))] for _ in STARTS]
    return [[*extra, *tokenizer(start).input_ids] for extra, start in zip(noise, STARTS, strict=True)]


def oracle_logits(oracle: Any, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = oracle(torch.tensor([tokens])).logits[0]
    return logits


@pytest.mark.heavy
def test_greedy_answers_are_those_of_transformers(smollm2_gguf: Path, oracle: Any, prompts: list[list[int]]) -> None:
    """10 prompts, 32 tokens each, in one ragged batch, token by token the same.

    One pass of the oracle over prompt and answer is enough: where each of our tokens is its first choice after all
    that stands before, its own greedy answer is the same by induction.
    """
    model = load_model(smollm2_gguf, dtype=torch.float32, device=CPU)
    run = PagedRun(model, 16, len(prompts), max(map(len, prompts)) + NEW_TOKENS)
    answers: list[list[int]] = [[] for _ in prompts]
    chunks = dict(enumerate(prompts))
    for _ in range(NEW_TOKENS):
        chunks = {row: [int(logits[-1].argmax())] for row, logits in run.step(chunks).items()}
        for row, token in chunks.items():
            answers[row] += token
    for prompt, answer in zip(prompts, answers, strict=True):
        choices = oracle_logits(oracle, prompt + answer).argmax(-1).tolist()
        assert choices[len(prompt) - 1 : -1] == answer


@pytest.mark.heavy
def test_logits_are_those_of_transformers(smollm2_gguf: Path, oracle: Any, prompts: list[list[int]]) -> None:
    model = load_model(smollm2_gguf, dtype=torch.float32, device=CPU)
    for prompt in prompts[:4]:
        ours, theirs = PagedRun(model, 16, 1, len(prompt)).step({0: prompt})[0], oracle_logits(oracle, prompt)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())
