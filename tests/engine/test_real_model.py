"""The whole offline engine on the real model, against transformers reading the same GGUF file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rootgraft import LLM, SamplingParams

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
PROMPTS = [*STARTS, *(STEM + start for start in STARTS)]
NEW_TOKENS = 40


@pytest.mark.heavy
def test_twenty_prompts_go_on_as_in_transformers(smollm2_gguf: Path) -> None:
    """40 greedy tokens each, batched, in chunks of 32, ten of them over a shared prefix; then all again from the cache.

    One pass of the oracle over prompt and answer is enough: where each of our tokens is its first choice after all
    that stands before, its own greedy answer is the same by induction.
    """
    from transformers import AutoModelForCausalLM

    llm = LLM(str(smollm2_gguf), dtype="float32", device="cpu", max_num_seqs=20, max_num_batched_tokens=32)
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    cold = llm.generate(PROMPTS, params, use_tqdm=False)
    warm = llm.generate(PROMPTS, params, use_tqdm=False)
    oracle = AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32, attn_implementation="eager"
    )
    for first, second in zip(cold, warm, strict=True):
        answer = list(first.outputs[0].token_ids)
        assert len(answer) == NEW_TOKENS and list(second.outputs[0].token_ids) == answer
        prompt = list(first.prompt_token_ids)
        with torch.no_grad():
            logits = oracle(torch.tensor([prompt + answer])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer
