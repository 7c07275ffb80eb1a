"""KV of 8 bits in the whole engine: the same answers from the cache, in chunks and with drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rootgraft import LLM, SamplingParams
from rootgraft.grammar.spec import GrammarSpec

STEM = "You are a careful assistant. Answer in one or two short sentences, and do not guess. " * 4
PROMPTS = [STEM + end for end in ("What is the capital of France?", "Count: 1, 2, 3, 4,", "Count: 1, 2, 3, 4, 5,")]
SCHEMA = GrammarSpec.json_schema(
    {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    }
)


def answers(path: Path, **options: Any) -> list[list[int]]:
    """Greedy tokens of each prompt, asked twice, the second time under a grammar too."""
    llm = LLM(str(path), device="cpu", kv_cache_dtype="int8", kv_cache_memory=0.1, max_model_len=512, **options)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    plain = llm.generate(PROMPTS, params, use_tqdm=False) + llm.generate(PROMPTS, params, use_tqdm=False)
    masked = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=24), grammar=SCHEMA, use_tqdm=False)
    llm.close()
    for output in masked:
        assert set(json.loads(output.outputs[0].text)) == {"city"}
    return [list(output.outputs[0].token_ids) for output in (*plain, *masked)]


@pytest.mark.heavy
def test_answers_do_not_depend_on_cache_chunks_drafts_or_company(smollm2_gguf: Path) -> None:
    alone = answers(
        smollm2_gguf, max_num_seqs=1, enable_prefix_caching=False, speculative_config='{"method": "off"}', threads=1
    )
    assert alone[:3] == alone[3:6]
    assert answers(smollm2_gguf) == alone
    assert answers(smollm2_gguf, max_num_seqs=8, max_num_batched_tokens=32, block_size=32, enforce_eager=True) == alone


@pytest.mark.heavy
def test_scores_are_near_those_of_the_model_s_own_type(smollm2_gguf: Path) -> None:
    def surprise(kind: str) -> torch.Tensor:
        llm = LLM(str(smollm2_gguf), device="cpu", kv_cache_dtype=kind, kv_cache_memory=0.1, max_model_len=512)
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        scores = llm.generate(PROMPTS[0], params, use_tqdm=False)[0].prompt_logprobs
        llm.close()
        assert scores is not None
        return torch.tensor([next(iter(each.values())).logprob for each in scores if each])

    exact, rounded = surprise("auto"), surprise("int8")
    assert (exact - rounded).abs().mean() < 0.1
    assert not torch.equal(exact, rounded)


@pytest.mark.heavy
def test_a_label_within_one_token_is_the_likeliest_of_those_that_fit(smollm2_gguf: Path) -> None:
    """What a budget excludes depends on the grammar alone, and the choice among what is left on the logits."""
    llm = LLM(str(smollm2_gguf), device="cpu", kv_cache_dtype="int8", kv_cache_memory=0.1, max_model_len=512)
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20)
    labels = ["The", "I", "Yes", "No", "It is not known"]
    for free in llm.generate(PROMPTS, params, use_tqdm=False):
        assert free.outputs[0].logprobs is not None and free.prompt is not None
        found = {each.decoded_token: each.logprob for each in free.outputs[0].logprobs[0].values()}
        fitting = {label: found[label] for label in labels[:-1] if label in found}
        [bound] = llm.generate([free.prompt], params, grammar=GrammarSpec.choice(labels), use_tqdm=False)
        text = bound.outputs[0].text
        assert text in labels[:-1] and (not fitting or found.get(text) == max(fitting.values()))
    llm.close()
