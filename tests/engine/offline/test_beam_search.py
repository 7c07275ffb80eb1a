"""Beam search over the engine against the same search over the logits of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.engine.tiny_llm import make_model

from rootgraft import LLM
from rootgraft.engine.errors import RequestError
from rootgraft.sampling_params import BeamSearchParams


def oracle(prompt: list[int], width: int, steps: int, end: int, *, ignore_eos: bool, penalty: float) -> list[Any]:
    """The best sequences as (score, tokens), best first."""
    model = make_model()

    def score(beam: tuple[list[int], float]) -> float:
        return float(beam[1] / (len(beam[0]) - (beam[0][-1] == end and not ignore_eos)) ** penalty)

    live: list[tuple[list[int], float]] = [(prompt, 0.0)]
    ended: list[tuple[list[int], float]] = []
    for _ in range(steps):
        grown = []
        for tokens, total in live:
            with torch.no_grad():
                best = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1).topk(2 * width)
            for value, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                to = ended if token == end and not ignore_eos else grown
                to.append(([*tokens, token], total + value))
        live = sorted(grown, key=score, reverse=True)[:width]
    return sorted([*ended, *live], key=score, reverse=True)[:width]


@pytest.mark.parametrize("width", [1, 3, 10])
@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("penalty", [1.0, 0.0, 2.0])
def test_beams_are_those_of_the_same_search_over_the_oracle(
    llm: LLM, width: int, ignore_eos: bool, penalty: float
) -> None:
    tokenizer = llm.get_tokenizer()
    prompts = [tokenizer.encode("the quick"), tokenizer.encode("in")]
    params = BeamSearchParams(beam_width=width, max_tokens=4, ignore_eos=ignore_eos, length_penalty=penalty)
    outputs = llm.beam_search([{"prompt_token_ids": prompt} for prompt in prompts], params)
    assert tokenizer.eos_token_id is not None
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = oracle(prompt, width, 4, tokenizer.eos_token_id, ignore_eos=ignore_eos, penalty=penalty)
        assert [beam.tokens for beam in output.sequences] == [tokens for tokens, _ in expected]
        assert [beam.cum_logprob for beam in output.sequences] == pytest.approx(
            [total for _, total in expected], abs=1e-3
        )
        assert [beam.text for beam in output.sequences] == [tokenizer.decode(tokens) for tokens, _ in expected]


@pytest.mark.parametrize(("name", "value"), [("beam_width", 0), ("beam_width", 11), ("max_tokens", 0)])
def test_bounds(llm: LLM, name: str, value: int) -> None:
    params = BeamSearchParams(**{"beam_width": 2, "max_tokens": 2} | {name: value})
    with pytest.raises(RequestError, match=f"{name} must be at least 1"):
        llm.beam_search(["a"], params)
