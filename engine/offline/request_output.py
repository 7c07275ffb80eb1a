"""Outputs of ``LLM`` in the shape of vLLM's ``RequestOutput``, and their builder."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from ..serving.output_processor import SequenceOutput, TextDelta, TokenLogprob
from ..types import Usage


@dataclass(frozen=True, slots=True)
class TokenScore:
    """Log-probability of a token at a position; rank 1 is the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


PositionScores = dict[int, TokenScore]
"""Scores at one position by token id: the position's token and the likeliest."""


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer.

    Attributes:
        index: which of the ``n`` answers to its prompt.
        token_ids: without the end token, which has no text and no score.
        logprobs: scores at each of ``token_ids``, None if not asked for.
        cumulative_logprob: sum of the log-probabilities of ``token_ids``, None if not asked for.
        finish_reason: ``"stop"``, ``"length"`` or ``"abort"``.
        stop_reason: the stop string or stop token id that ended the answer; None for the model's own end token;
            ``budget`` where a structured answer is whole but was cut short by ``max_tokens``.
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
        prompt: the text, None if it was given as token ids.
        prompt_logprobs: scores of the prompt's tokens (None for the first token and before ``logprob_start_len``);
            None if not asked for.
        usage: of each answer, in the order of ``outputs``.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[PositionScores | None] | None
    outputs: list[CompletionOutput]
    usage: list[Usage]


class OutputBuilder:
    """Builds a ``RequestOutput`` from the deltas of one request.

    Args:
        prompt: the prompt's text, if it was given as text.
        tokens: the prompt's tokens.
        n: number of sequences.
        with_logprobs, with_prompt_logprobs: whether they were asked for.
    """

    def __init__(
        self, prompt: str | None, tokens: array[int], n: int, *, with_logprobs: bool, with_prompt_logprobs: bool
    ) -> None:
        self._prompt = prompt
        self._tokens = tokens
        self._outputs = [SequenceOutput() for _ in range(n)]
        self._with_logprobs = with_logprobs
        self._with_prompt_logprobs = with_prompt_logprobs

    @property
    def is_complete(self) -> bool:
        return all(output.finish is not None for output in self._outputs)

    def add(self, delta: TextDelta) -> None:
        self._outputs[delta.index].add(delta)

    def build(self) -> RequestOutput:
        """Return the output, once ``is_complete``."""
        prompt_logprobs = self._outputs[0].prompt_logprobs  # the same for every sequence
        unscored = len(self._tokens) - len(prompt_logprobs)
        scores: list[PositionScores | None] = [*[None] * unscored, *_scores(prompt_logprobs)]
        return RequestOutput(
            prompt=self._prompt,
            prompt_token_ids=self._tokens.tolist(),
            prompt_logprobs=scores if self._with_prompt_logprobs else None,
            outputs=[self._completion(index, output) for index, output in enumerate(self._outputs)],
            usage=[output.finish.usage for output in self._outputs if output.finish is not None],
        )

    def _completion(self, index: int, output: SequenceOutput) -> CompletionOutput:
        assert output.finish is not None
        return CompletionOutput(
            index=index,
            text=output.text,
            token_ids=output.tokens,
            logprobs=list(_scores(output.logprobs)) if self._with_logprobs else None,
            cumulative_logprob=sum(entry.logprob for entry in output.logprobs) if self._with_logprobs else None,
            finish_reason=output.finish.reason.value,
            stop_reason=output.finish.told_stop_reason,
        )


def _scores(positions: Iterable[TokenLogprob]) -> Iterable[PositionScores]:
    for entry in positions:
        best = {top.token: TokenScore(top.logprob, rank, top.text) for rank, top in enumerate(entry.top, 1)}
        yield {entry.token: TokenScore(entry.logprob, entry.rank, entry.text)} | best
