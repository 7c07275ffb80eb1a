"""The real model, alone and through the whole offline engine, against transformers reading the same GGUF file."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import gguf
import pytest
import torch
from support.models.paged_run import CPU, PagedRun
from torch import Tensor

from rootgraft import LLM, SamplingParams
from rootgraft.engine.loading import weight_forms
from rootgraft.engine.loading.load_model import load_model
from rootgraft.engine.text.tokenizer import Tokenizer

STEM = "You are a careful assistant. Answer in one or two short sentences, and do not guess.\n\n"
STARTS = [
    "Question: What is the capital of France?\nAnswer:",
    "Question: How many legs has a spider?\nAnswer:",
    "Question: Who wrote Hamlet?\nAnswer:",
    "The three primary colours are",
    "def fibonacci(n):\n",
    "Once upon a time, in a small village by the sea,",
    "Dear Sir or Madam,\n\nI am writing to",
    "Ingredients for pancakes:\n-",
    "1, 2, 4, 8, 16,",
    '{"name": "Ada", "born":',
]
NEW_TOKENS = 24

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def oracle(smollm2_gguf: Path) -> Any:
    from transformers import AutoModelForCausalLM

    with pytest.MonkeyPatch.context() as patch:
        # Its loader reads the file twice, and makes the table of names again for each module: half of its time.
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
        model = AutoModelForCausalLM.from_pretrained(
            smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32, attn_implementation="eager"
        )
    return model.eval()


def oracle_logits(oracle: Any, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = oracle(torch.tensor([tokens])).logits[0]
    return logits


def test_logits_are_those_of_transformers(smollm2_gguf: Path, oracle: Any) -> None:
    """Of prompts of 5 to 200 tokens: any words of the vocabulary and then a few that make sense."""
    tokenizer = Tokenizer.load(smollm2_gguf)
    rng = random.Random(0)
    model = load_model(smollm2_gguf, dtype=torch.float32, device=CPU)
    for start in ("The capital of France is", "def add(a, b):\n", "Once upon a time", "In 1969,"):
        noise = [rng.randrange(100, 49152) for _ in range(rng.choice((0, 9, 40, 190)))]
        prompt = [*noise, *tokenizer.encode(start, add_special_tokens=False)]
        ours, theirs = PagedRun(model, 16, 1, len(prompt)).step({0: prompt})[0], oracle_logits(oracle, prompt)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())


def test_prompts_go_on_as_in_transformers(smollm2_gguf: Path, oracle: Any) -> None:
    """24 greedy tokens each, batched, in chunks of 32, half over a shared prefix; then all again from the cache.

    One pass of the oracle over prompt and answer is enough: where each of our tokens is its first choice after all
    that stands before, its own greedy answer is the same by induction.
    """
    prompts = [*STARTS[::2], *(STEM + start for start in STARTS[::2])]
    llm = LLM(str(smollm2_gguf), dtype="float32", device="cpu", max_num_seqs=len(prompts), max_num_batched_tokens=32)
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    cold = llm.generate(prompts, params, use_tqdm=False)
    warm = llm.generate(prompts, params, use_tqdm=False)
    llm.close()
    for first, second in zip(cold, warm, strict=True):
        answer = list(first.outputs[0].token_ids)
        assert len(answer) == NEW_TOKENS and list(second.outputs[0].token_ids) == answer
        prompt = list(first.prompt_token_ids)
        choices = oracle_logits(oracle, prompt + answer).argmax(-1).tolist()
        assert choices[len(prompt) - 1 : -1] == answer


def test_answers_do_not_depend_on_the_form_of_blocks_or_on_company(
    smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampled, with log probabilities: widened and one by one, then from blocks up to 3 rows and for all."""

    def answers(few_rows: int, **options: Any) -> list[list[tuple[int, float]]]:
        measure = Mock(return_value=few_rows)
        monkeypatch.setattr(weight_forms, "measure_few_rows", measure)
        llm = LLM(str(smollm2_gguf), device="cpu", kv_cache_memory=0.1, max_model_len=512, **options)
        params = [SamplingParams(temperature=1.0, seed=i, max_tokens=12, logprobs=1) for i in range(6)]
        outputs = llm.generate(STARTS[:6], params, use_tqdm=False)
        llm.close()
        measure.assert_called()
        scores = [zip(each.outputs[0].token_ids, each.outputs[0].logprobs or (), strict=True) for each in outputs]
        return [[(token, found[token].logprob) for token, found in each] for each in scores]

    alone = answers(0, max_num_seqs=1, enable_prefix_caching=False, speculative_config='{"method": "off"}')
    assert answers(1000) == alone
    for few_rows in (3, 1000):
        assert answers(few_rows, max_num_seqs=4, max_num_batched_tokens=16, threads=1) == alone
