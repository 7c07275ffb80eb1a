"""Beam search over the logprobs of next tokens, with vLLM's rules. Needs no engine and no tokenizer.

Beams of equal length are ranked as in transformers for every length penalty, because the sum of log-probabilities of
each of them is divided by the same number.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..errors import RequestError
from ..types import MAX_LOGPROBS

MAX_BEAMS = MAX_LOGPROBS // 2


class BeamRules(Protocol):
    """Parameters of a search.

    Attributes:
        beam_width: number of beams that are kept.
        ignore_eos: whether beams continue after an end token.
        length_penalty: a beam's sum of logprobs is divided by its length to the power of this number. The length
            includes the prompt and excludes an end token.
    """

    @property
    def beam_width(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def ignore_eos(self) -> bool: ...
    @property
    def length_penalty(self) -> float: ...


@dataclass(slots=True)
class BeamSearchSequence:
    """One sequence of the search.

    Attributes:
        tokens: tokens of prompt and answer, including the end token if the sequence has ended.
        cum_logprob: sum of the logprobs of the answer's tokens.
        text: text of all tokens; set when the search has ended.
    """

    tokens: list[int]
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class _Beams:
    live: list[BeamSearchSequence]
    ended: list[BeamSearchSequence] = field(default_factory=list)


class BeamSearch:
    """Beam search over several prompts at once.

    In each step, each beam is continued by each of its ``num_candidates`` likeliest tokens, and the best ``beam_width``
    of a prompt's new beams are kept. A beam whose last token is an end token is complete.

    Args:
        prompts: tokens of each prompt.
        ends: the end tokens for each prompt.

    Raises:
        RequestError: a parameter is out of bounds.
    """

    def __init__(self, rules: BeamRules, prompts: Sequence[list[int]], ends: Sequence[Collection[int]]) -> None:
        if type(rules.beam_width) is not int or not 1 <= rules.beam_width <= MAX_BEAMS:
            raise RequestError(
                f"beam_width must be at least 1 and at most {MAX_BEAMS}, not {rules.beam_width}.",
                param="beam_width",
            )
        if type(rules.max_tokens) is not int or rules.max_tokens < 1:
            raise RequestError(f"max_tokens must be at least 1, not {rules.max_tokens}.", param="max_tokens")
        self.num_candidates = 2 * rules.beam_width
        self._rules = rules
        self._ends = ends
        self._beams = [_Beams([BeamSearchSequence(list(tokens))]) for tokens in prompts]

    def live(self) -> list[tuple[int, BeamSearchSequence]]:
        """Return the beams to continue, each with the index of its prompt."""
        return [(place, beam) for place, beams in enumerate(self._beams) for beam in beams.live]

    def advance(self, scores: Sequence[Mapping[int, float]]) -> None:
        """Continue the beams of ``live`` by one token.

        ``scores`` holds, for each beam, the logprobs of its next tokens.
        """
        given = iter(scores)
        for place, beams in enumerate(self._beams):
            found: list[BeamSearchSequence] = []
            for beam in beams.live:
                for token, logprob in next(given).items():
                    new = BeamSearchSequence([*beam.tokens, token], beam.cum_logprob + logprob)
                    is_end = token in self._ends[place] and not self._rules.ignore_eos
                    new.finish_reason = "stop" if is_end else None
                    (beams.ended if is_end else found).append(new)
            beams.ended = self._best(beams.ended)
            beams.live = self._best(found)

    def best(self) -> list[list[BeamSearchSequence]]:
        """Return the best beams of each prompt, the best one first."""
        return [self._best([*beams.ended, *beams.live]) for beams in self._beams]

    def _best(self, beams: list[BeamSearchSequence]) -> list[BeamSearchSequence]:
        return sorted(beams, key=self._score, reverse=True)[: self._rules.beam_width]

    def _score(self, beam: BeamSearchSequence) -> float:
        length = len(beam.tokens) - (beam.finish_reason == "stop")
        return beam.cum_logprob / float(length**self._rules.length_penalty)
