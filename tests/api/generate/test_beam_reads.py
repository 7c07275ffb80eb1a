"""Beam search: the requests that read scores, and scores where the token budget has replaced the drawn token."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rootgraft.api.generate.beam_reads import BeamReader
from rootgraft.engine.serving.output_processor import Finish, TextDelta, TokenLogprob, TopLogprob
from rootgraft.engine.serving.request import TextRequest
from rootgraft.engine.types import AllowedLogprobs, FinishReason, SamplingParams, Usage
from rootgraft.grammar.spec import GrammarSpec

PROMPT = array("i", (5, 6))
SCORES = {7: -0.5, 8: -1.5, 9: -4.0}  # of every next token
REPLACEMENT = 9  # what the budget leaves to be drawn; the scores of allowed tokens are those of 7 and 8


class ScoringEngine:
    """Answers every request with the same scores."""

    vocab_size = 20
    tokenizer = SimpleNamespace(eos_ids=(2,), join_bytes=lambda tokens, _: bytes(tokens))

    def __init__(self) -> None:
        self.seen: list[TextRequest] = []

    async def stream(self, *requests: TextRequest) -> AsyncIterator[list[TextDelta]]:
        self.seen += requests
        for prompt, request in enumerate(requests):
            drawn = 7 if request.grammar is None else REPLACEMENT
            named = request.params.logprob_token_ids or tuple(SCORES)
            top = tuple(TopLogprob(token, "", b"", SCORES[token]) for token in named)
            scored = TokenLogprob(drawn, "", b"", SCORES[drawn], 1, top)
            relative = np.array([-0.25, -1.25], np.float32)
            allowed = AllowedLogprobs(drawn, np.array([7, 8], np.int32).tobytes(), relative.tobytes())
            yield [
                TextDelta(
                    0,
                    "",
                    (drawn,),
                    (scored,),
                    finish=Finish(FinishReason.LENGTH, Usage(2, 0, 1)),
                    prompt=prompt,
                    allowed=(allowed,) if request.grammar is not None else (),
                )
            ]


def search(engine: Any, request: TextRequest) -> list[TextDelta]:
    async def all_deltas() -> list[TextDelta]:
        reader = BeamReader(engine, SimpleNamespace(seconds_left=None), 0.0)  # type: ignore[arg-type]
        return [delta async for deltas in reader.stream(request) for delta in deltas]

    return asyncio.run(all_deltas())


@pytest.mark.parametrize("grammar", [None, GrammarSpec.regex("[a-z]*")])
def test_an_answer_is_no_part_of_the_prompt(grammar: GrammarSpec | None) -> None:
    """An activated LoRA begins at its last invocation in the prompt, whatever the answer repeats."""
    engine = ScoringEngine()
    search(engine, TextRequest(PROMPT, SamplingParams(max_tokens=3), n=2, grammar=grammar))
    assert {each.tokens.tobytes() for each in engine.seen} == {PROMPT.tobytes()}
    assert {len(each.generated) for each in engine.seen} == {0, 1, 2}
    assert all(each.params.max_tokens == len(each.generated) + 1 for each in engine.seen)


def test_scores_are_the_models_if_the_budget_has_replaced_the_drawn_token() -> None:
    request = TextRequest(PROMPT, SamplingParams(max_tokens=2), n=3, grammar=GrammarSpec.regex("[a-z]*"))
    found = search(ScoringEngine(), request)
    assert [each.tokens for each in found] == [(7, 7), (7, 8), (8, 7)]
