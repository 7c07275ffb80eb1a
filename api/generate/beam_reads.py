"""Beam search of one request: each step computes the logprobs of the next tokens of all beams.

In a step, each beam is a sequence that samples one token after the prompt and the answer so far, whose KV is in the
prefix cache. If the answer has an output format, the grammar's mask determines which tokens may follow. The logprobs
are those of the model without the grammar.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...engine.errors import RequestError
from ...engine.serving.beams import BeamSearch, BeamSearchSequence
from ...engine.serving.output_processor import Finish, SequenceOutput, TextDelta
from ...engine.serving.request import TextRequest
from ...engine.types import AllowedLogprobs, FinishReason, SamplingParams, Usage
from ..access.caller import Caller
from .sequence_windows import WINDOW, deadline_of, run_window, usage_of

if TYPE_CHECKING:
    from ...engine.serving.async_engine import AsyncEngine


@dataclass(frozen=True, slots=True)
class BeamOptions:
    """Options of a beam search, see ``BeamRules``."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool
    length_penalty: float


class BeamReader:
    """Searches for the likeliest answers to each prompt. ``generate`` uses its ``stream`` instead of an engine's.

    Args:
        length_penalty: see ``BeamRules``.
    """

    def __init__(self, engine: AsyncEngine, caller: Caller, length_penalty: float) -> None:
        self._engine = engine
        self._caller = caller
        self._length_penalty = length_penalty
        self._ends = frozenset(token for token in engine.tokenizer.eos_ids if token < engine.vocab_size)

    async def stream(self, *requests: TextRequest) -> AsyncGenerator[list[TextDelta], None]:
        """Search the answers to all prompts, one prompt after the other. Yields the ``n`` best answers to each prompt.

        Raises:
            EngineError: see ``AsyncEngine.stream``.
        """
        deadline = deadline_of(self._caller)
        for prompt, request in enumerate(requests):
            yield await self._search(prompt, request, deadline)

    async def _search(self, prompt: int, request: TextRequest, deadline: float | None) -> list[TextDelta]:
        params = request.params
        rules = BeamOptions(request.n, params.max_tokens, params.ignore_eos, self._length_penalty)
        search = BeamSearch(rules, [list(request.tokens)], [self._ends])
        num_cached: int | None = None
        for _ in range(params.max_tokens):
            beams = [beam for _, beam in search.live()]
            if not beams:
                break
            num_prompt = len(request.tokens)
            answers = [array("i", beam.tokens[num_prompt:]) for beam in beams]
            if request.grammar is None:
                outputs = await self._run([self._free(request, each, search) for each in answers], deadline)
                scores = [{each.token: each.logprob for each in output.logprobs[0].top} for output in outputs]
            else:
                outputs = await self._run([self._formed(request, each) for each in answers], deadline)
                scores = await self._formed_scores(request, answers, outputs, search.num_candidates, deadline)
            if num_cached is None:
                num_cached = usage_of(outputs[0]).cached
            search.advance(scores)
        [best] = search.best()
        if len(best) < request.n:
            raise RequestError(
                f"'n' must be at most {len(best)}: the output format allows only so many answers.", param="n"
            )
        return [self._delta(prompt, index, request, each, num_cached or 0) for index, each in enumerate(best)]

    async def _run(self, requests: Sequence[TextRequest], deadline: float | None) -> list[SequenceOutput]:
        assert len(requests) <= WINDOW
        outputs = await run_window(self._engine, requests, deadline)
        for output in outputs:
            # This raises an error if the sequence was cut off.
            usage_of(output)
        return outputs

    def _free(self, request: TextRequest, answer: array[int], search: BeamSearch) -> TextRequest:
        """Return the request that computes the logprobs of the likeliest tokens after an answer."""
        return _after(request, answer, logprobs=search.num_candidates)

    def _formed(self, request: TextRequest, answer: array[int]) -> TextRequest:
        """Return the request that computes the logprobs of the tokens that the grammar allows after an answer."""
        one = _after(request, answer, ignore_eos=False, logprobs=0, allowed_logprobs=True)
        return replace(one, grammar=request.grammar)

    async def _formed_scores(
        self,
        request: TextRequest,
        answers: Sequence[array[int]],
        outputs: Sequence[SequenceOutput],
        most: int,
        deadline: float | None,
    ) -> list[dict[int, float]]:
        """Return the model's logprobs, without the grammar, of the likeliest allowed tokens after each answer.

        The engine returns the logprobs of the allowed tokens relative to each other. They all differ from the model's
        logprobs by the same offset, which follows from the model's logprob of the sampled token. In two cases the
        offset is not known: the sampled token ended the sequence, or its logprob was not among those returned, because
        the token budget made it replace a likelier token. Then the logprob of the likeliest token is read with a
        request without the grammar.
        """
        found = [_likeliest(output.allowed[0], most) if output.allowed else {} for output in outputs]
        drawn = {at: each.logprobs[0] for at, each in enumerate(outputs) if each.logprobs and each.allowed}
        own = {
            at: (each.token, each.logprob)
            for at, each in drawn.items()
            if each.token in np.frombuffer(outputs[at].allowed[0].ids, np.int32)
        }
        missing = [at for at, tokens in enumerate(found) if tokens and at not in own]
        if missing:
            reads = [_named(request, answers[at], next(iter(found[at]))) for at in missing]
            for at, output in zip(missing, await self._run(reads, deadline), strict=True):
                [named] = output.logprobs[0].top
                own[at] = named.token, named.logprob
        return [
            {} if not tokens else _shifted(tokens, outputs[at].allowed[0], *own[at]) for at, tokens in enumerate(found)
        ]

    def _delta(
        self, prompt: int, index: int, request: TextRequest, beam: BeamSearchSequence, num_cached: int
    ) -> TextDelta:
        answer = tuple(beam.tokens[len(request.tokens) :])
        usage = Usage(len(request.tokens), num_cached, len(answer))
        stop = answer[-1] if beam.finish_reason == "stop" else None
        shown = answer if stop is None or request.include_stop else answer[:-1]
        text = self._engine.tokenizer.join_bytes(shown, request.skip_special_tokens).decode(errors="replace")
        reason = FinishReason.LENGTH if stop is None else FinishReason.STOP
        tokens = answer if stop is None else answer[:-1]
        return TextDelta(index, text, tokens, finish=Finish(reason, usage, stop_token=stop), prompt=prompt)


def _single(request: TextRequest, **fields: object) -> TextRequest:
    """Return a copy of a request for one sequence, without the options that only concern the answers to the client."""
    plain = replace(request, n=1, stop=(), grammar=None, session="", pin_seconds=0.0, prefix_pins=())
    return replace(plain, **fields)  # type: ignore[arg-type]


def _after(request: TextRequest, answer: array[int], *, ignore_eos: bool = True, **options: Any) -> TextRequest:
    """Return a request for one token after an answer, with these options for its logprobs.

    The answer is not made a part of the prompt, because an activated LoRA begins at its last invocation in the prompt.
    """
    params = SamplingParams(max_tokens=len(answer) + 1, temperature=0.0, ignore_eos=ignore_eos, **options)
    return _single(request, params=params, generated=answer)


def _named(request: TextRequest, answer: array[int], token: int) -> TextRequest:
    return _after(request, answer, logprobs=0, logprob_token_ids=(token,))


def _likeliest(allowed: AllowedLogprobs, most: int) -> dict[int, float]:
    ids = np.frombuffer(allowed.ids, np.int32)[:most].tolist()
    return dict(zip(ids, np.frombuffer(allowed.logprobs, np.float32)[:most].tolist(), strict=True))


def _shifted(tokens: dict[int, float], allowed: AllowedLogprobs, known: int, logprob: float) -> dict[int, float]:
    """Return the logprobs, shifted so that the logprob of the token ``known`` is ``logprob``."""
    ids = np.frombuffer(allowed.ids, np.int32)
    relative = float(np.frombuffer(allowed.logprobs, np.float32)[int(np.flatnonzero(ids == known)[0])])
    return {token: value + logprob - relative for token, value in tokens.items()}
