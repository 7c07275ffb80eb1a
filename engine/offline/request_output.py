"""What ``LLM`` returns, in the shape that vLLM's users know."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..serving.output_processor import Finish, TextDelta, TokenLogprob
from ..types import Usage


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A token's log-probability at a position; rank 1 is the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


PositionScores = dict[int, TokenScore]
"""Scores at one position by token id: the token that stands there and the likeliest."""


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer.

    Attributes:
        index: which of the ``n`` answers to its prompt.
        token_ids: without the end token, which has no text and no score.
        logprobs: scores at each of ``token_ids``, None if not asked for.
        cumulative_logprob: sum of the log-probabilities of ``token_ids``, None if not asked for.
        finish_reason: ``"stop"``, ``"length"`` or ``"abort"``.
        stop_reason: the stop string or stop token id that ended it; None for the model's own end token.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[PositionScores] | None
    cumulative_logprob: float | None
    finish_reason: str
    stop_reason: str | int | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """All answers to one prompt.

    Attributes:
        prompt: its text, None if it was given as token ids.
        prompt_logprobs: scores of the prompt's tokens (None for the first and for those before
            ``logprob_start_len``), None if not asked for.
        usage: of each answer, in the order of ``outputs``.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[PositionScores | None] | None
    outputs: list[CompletionOutput]
    usage: list[Usage]


@dataclass(slots=True)
class _Answer:
    """One sequence while it grows."""

    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None


class OutputBuilder:
    """Collects the deltas of one request.

    Args:
        prompt: its text, if it was given as text.
        tokens: its tokens.
        n: number of sequences.
        with_logprobs, with_prompt_logprobs: whether they were asked for.
    """

    def __init__(
        self, prompt: str | None, tokens: array[int], n: int, *, with_logprobs: bool, with_prompt_logprobs: bool
    ) -> None:
        self._prompt = prompt
        self._tokens = tokens
        self._answers = [_Answer() for _ in range(n)]
        self._prompt_logprobs: list[TokenLogprob] = []
        self._with_logprobs = with_logprobs
        self._with_prompt_logprobs = with_prompt_logprobs

    @property
    def is_complete(self) -> bool:
        """Whether every sequence has ended."""
        return all(answer.finish is not None for answer in self._answers)

    def add(self, delta: TextDelta) -> None:
        """Take what came. The prompt's logprobs are the same for every sequence: those of the first are kept."""
        answer = self._answers[delta.index]
        answer.texts.append(delta.text)
        answer.tokens += delta.tokens
        answer.logprobs += delta.logprobs
        answer.finish = delta.finish
        if delta.index == 0:
            self._prompt_logprobs += delta.prompt_logprobs

    def build(self) -> RequestOutput:
        """The output, once ``is_complete``."""
        unscored = len(self._tokens) - len(self._prompt_logprobs)
        scores: list[PositionScores | None] = [*[None] * unscored, *_scores(self._prompt_logprobs)]
        return RequestOutput(
            prompt=self._prompt,
            prompt_token_ids=self._tokens.tolist(),
            prompt_logprobs=scores if self._with_prompt_logprobs else None,
            outputs=[self._completion(index, answer) for index, answer in enumerate(self._answers)],
            usage=[answer.finish.usage for answer in self._answers if answer.finish is not None],
        )

    def _completion(self, index: int, answer: _Answer) -> CompletionOutput:
        assert answer.finish is not None
        return CompletionOutput(
            index=index,
            text="".join(answer.texts),
            token_ids=answer.tokens,
            logprobs=list(_scores(answer.logprobs)) if self._with_logprobs else None,
            cumulative_logprob=sum(entry.logprob for entry in answer.logprobs) if self._with_logprobs else None,
            finish_reason=answer.finish.reason.value,
            stop_reason=answer.finish.stop_reason,
        )


def _scores(positions: Iterable[TokenLogprob]) -> Iterable[PositionScores]:
    for entry in positions:
        best = {top.token: TokenScore(top.logprob, rank, top.text) for rank, top in enumerate(entry.top, 1)}
        yield {entry.token: TokenScore(entry.logprob, entry.rank, entry.text)} | best
