"""Beam search over the scores of next tokens, with vLLM's rules: no engine, no tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import RequestError
from ..types import MAX_LOGPROBS
from .sampling_params import BeamSearchParams


@dataclass(slots=True)
class BeamSearchSequence:
    """A sequence.

    Attributes:
        tokens: of prompt and answer, with the end token of one that has ended.
        cum_logprob: sum of the log-probabilities of the answer's tokens.
        text: of all tokens, once the search has ended.
    """

    tokens: list[int]
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The best sequences of a prompt, best first."""

    sequences: list[BeamSearchSequence]


@dataclass(slots=True)
class _Beams:
    live: list[BeamSearchSequence]
    ended: list[BeamSearchSequence] = field(default_factory=list)


class BeamSearch:
    """The beams of several prompts.

    At each step a beam is continued by the ``num_candidates`` likeliest tokens, and the best ``beam_width`` of a
    prompt's new beams are kept. A beam whose last token is the end token is complete.

    Args:
        prompts: tokens of each.
        ends: the end token for each prompt.

    Raises:
        RequestError: a parameter is out of bounds.
    """

    def __init__(self, params: BeamSearchParams, prompts: Sequence[list[int]], ends: Sequence[int | None]) -> None:
        if type(params.beam_width) is not int or not 1 <= params.beam_width <= MAX_LOGPROBS // 2:
            raise RequestError(
                f"beam_width must be at least 1 and at most {MAX_LOGPROBS // 2}, not {params.beam_width}.",
                param="beam_width",
            )
        if type(params.max_tokens) is not int or params.max_tokens < 1:
            raise RequestError(f"max_tokens must be at least 1, not {params.max_tokens}.", param="max_tokens")
        self.num_candidates = 2 * params.beam_width
        self._params = params
        self._ends = ends
        self._beams = [_Beams([BeamSearchSequence(list(tokens))]) for tokens in prompts]

    def live(self) -> list[tuple[int, BeamSearchSequence]]:
        """Return the beams to be continued, with the place of their prompt."""
        return [(place, beam) for place, beams in enumerate(self._beams) for beam in beams.live]

    def advance(self, scores: Sequence[Mapping[int, float]]) -> None:
        """Continue the beams of ``live`` by tokens with these log-probabilities."""
        given = iter(scores)
        for place, beams in enumerate(self._beams):
            found: list[BeamSearchSequence] = []
            for beam in beams.live:
                for token, logprob in next(given).items():
                    new = BeamSearchSequence([*beam.tokens, token], beam.cum_logprob + logprob)
                    is_end = token == self._ends[place] and not self._params.ignore_eos
                    new.finish_reason = "stop" if is_end else None
                    (beams.ended if is_end else found).append(new)
            beams.live = self._best(place, found)

    def outputs(self, decoders: Sequence[Callable[[list[int]], str]]) -> list[BeamSearchOutput]:
        """Return the best sequences of each prompt, their texts by its decoder."""
        found = []
        for place, (beams, decode) in enumerate(zip(self._beams, decoders, strict=True)):
            best = self._best(place, [*beams.ended, *beams.live])
            for beam in best:
                beam.text = decode(beam.tokens)
                beam.finish_reason = beam.finish_reason or "length"
            found.append(BeamSearchOutput(best))
        return found

    def _best(self, place: int, beams: list[BeamSearchSequence]) -> list[BeamSearchSequence]:
        return sorted(beams, key=lambda beam: self._score(place, beam), reverse=True)[: self._params.beam_width]

    def _score(self, place: int, beam: BeamSearchSequence) -> float:
        length = len(beam.tokens) - (beam.tokens[-1] == self._ends[place])
        return beam.cum_logprob / float(length**self._params.length_penalty)
