"""Beam search over the engine against the same search over the logits of transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine.tiny_llm import make_model, open_llm, write_adapter

from rootgraft import LLM, SamplingParams
from rootgraft.engine.errors import RequestError
from rootgraft.lora.request import LoRARequest
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


def test_an_activated_lora_begins_in_the_prompt_whatever_the_answer_repeats(tiny_model: Path, tmp_path: Path) -> None:
    """A single beam is the greedy answer, also where that contains the invocation token."""
    write_adapter(tmp_path / "made", 1, alora_invocation_tokens=[5])
    config = json.loads((tmp_path / "made" / "adapter_config.json").read_text())
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    beam = BeamSearchParams(beam_width=1, max_tokens=16, ignore_eos=True)
    num_repeated = 0
    llm = open_llm(tiny_model)
    try:
        for token in range(70, 90):
            folder = shutil.copytree(tmp_path / "made", tmp_path / str(token))
            config["alora_invocation_tokens"] = [token]
            (folder / "adapter_config.json").write_text(json.dumps(config))
            asked = LoRARequest(str(token), token, str(folder))
            prompt: Any = {"prompt_token_ids": [7, 30, 9, token]}
            [answer] = llm.generate(prompt, greedy, lora_request=asked, use_tqdm=False)[0].outputs
            [found] = llm.beam_search(prompt, beam, lora_request=asked)[0].sequences
            assert found.tokens[4:] == list(answer.token_ids)
            num_repeated += token in answer.token_ids[:-1]
    finally:
        llm.close()
    assert num_repeated


@pytest.mark.parametrize(("name", "value"), [("beam_width", 0), ("beam_width", 11), ("max_tokens", 0)])
def test_bounds(llm: LLM, name: str, value: int) -> None:
    params = BeamSearchParams(**{"beam_width": 2, "max_tokens": 2} | {name: value})
    with pytest.raises(RequestError, match=f"{name} must be at least 1"):
        llm.beam_search(["a"], params)
