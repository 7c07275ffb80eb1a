"""Outputs of ``LLM`` in the shape of vLLM's ``RequestOutput``, and their builder."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from ...lora.request import LoRARequest
from ..serving.output_processor import SequenceOutput, TextDelta, TokenLogprob
from ..text.field_probabilities import FieldProbability, FieldReader
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
        field_probabilities: of the choices that a JSON Schema left, None if not asked for.
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
    lora_request: LoRARequest | None = None
    field_probabilities: list[FieldProbability] | None = None
    routed_experts: ClassVar[None] = None
    kv_transfer_params: ClassVar[None] = None
    sampling_mask: ClassVar[None] = None
    spec_decode_metrics: ClassVar[None] = None
    weight_versions: ClassVar[None] = None

    def finished(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """When the first answer to a prompt began and ended. Seconds; ``_ts`` are of the monotonic clock, as in vLLM.

    Attributes:
        num_generation_tokens: its tokens, the end token included.
        arrival_time: when the request came, since 1970.
        first_token_latency: from there to its first token.
    """

    num_generation_tokens: int
    arrival_time: float
    queued_ts: float
    scheduled_ts: float
    first_token_ts: float
    last_token_ts: float
    first_token_latency: float


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """All answers to one prompt.

    Attributes:
        prompt: the text, None if it was given as token ids.
        prompt_logprobs: scores of the prompt's tokens (None for the first token and before ``logprob_start_len``);
            None if not asked for.
        usage: of each answer, in the order of ``outputs``.
        request_id: a number that no other request of this LLM has, as text.
        num_cached_tokens: tokens of the prompt whose KV the first answer found in the prefix cache.
        metrics: None where the engine has measured nothing.
        lora_request: the adapter, as it was asked for by ``lora_request``.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[PositionScores | None] | None
    outputs: list[CompletionOutput]
    usage: list[Usage]
    request_id: str = ""
    finished: bool = True
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    lora_request: LoRARequest | None = None
    encoder_prompt: ClassVar[None] = None
    encoder_prompt_token_ids: ClassVar[None] = None
    kv_transfer_params: ClassVar[None] = None
    ec_transfer_params: ClassVar[None] = None
    prompt_token_id_logprobs: ClassVar[None] = None
    num_cache_creation_tokens: ClassVar[None] = None


class OutputBuilder:
    """Builds a ``RequestOutput`` from the deltas of one request.

    Args:
        prompt: the prompt's text, if it was given as text.
        tokens: the prompt's tokens.
        n: number of sequences.
        with_logprobs, with_prompt_logprobs: whether they were asked for.
        request_id: of the request.
        lora_request: its adapter, as it was asked for.
        new_reader: makes a reader of an answer's field probabilities, None if they are not asked for.
    """

    def __init__(
        self,
        prompt: str | None,
        tokens: array[int],
        n: int,
        *,
        with_logprobs: bool,
        with_prompt_logprobs: bool,
        request_id: str = "",
        lora_request: LoRARequest | None = None,
        new_reader: Callable[[], FieldReader] | None = None,
    ) -> None:
        self._readers = None if new_reader is None else [new_reader() for _ in range(n)]
        self._request_id = request_id
        self._lora_request = lora_request
        self._arrival, self._queued = time.time(), time.monotonic()
        self._prompt = prompt
        self._tokens = tokens
        self._outputs = [SequenceOutput() for _ in range(n)]
        self._with_logprobs = with_logprobs
        self._with_prompt_logprobs = with_prompt_logprobs

    @property
    def is_complete(self) -> bool:
        return all(output.finish is not None for output in self._outputs)

    def add(self, delta: TextDelta) -> None:
        """Add a piece of one of the answers, with what it says of the answer's fields."""
        if self._readers is not None:
            reader = self._readers[delta.index]
            delta = replace(delta, allowed=(), fields=tuple(f for each in delta.allowed for f in reader.push(each)))
        self._outputs[delta.index].add(delta)

    @property
    def pooled(self) -> bytes:
        """What is pooled of the prompt, as in ``TextDelta``."""
        return self._outputs[0].pooled

    def build(self) -> RequestOutput:
        """Return the output, once ``is_complete``."""
        # They are the same for every sequence.
        prompt_logprobs = self._outputs[0].prompt_logprobs
        unscored = len(self._tokens) - len(prompt_logprobs)
        scores: list[PositionScores | None] = [*[None] * unscored, *_scores(prompt_logprobs)]
        usage = [output.finish.usage for output in self._outputs if output.finish is not None]
        return RequestOutput(
            prompt=self._prompt,
            prompt_token_ids=self._tokens.tolist(),
            prompt_logprobs=scores if self._with_prompt_logprobs else None,
            outputs=[self._completion(index, output) for index, output in enumerate(self._outputs)],
            usage=usage,
            request_id=self._request_id,
            num_cached_tokens=usage[0].cached,
            metrics=self._metrics(self._outputs[0]),
            lora_request=self._lora_request,
        )

    def _metrics(self, output: SequenceOutput) -> RequestMetrics | None:
        stats = None if output.finish is None else output.finish.stats
        if output.finish is None or stats is None:
            return None
        scheduled = self._queued + stats.queued
        return RequestMetrics(
            num_generation_tokens=output.finish.usage.completion,
            arrival_time=self._arrival,
            queued_ts=self._queued,
            scheduled_ts=scheduled,
            first_token_ts=scheduled + stats.prefill,
            last_token_ts=scheduled + stats.prefill + stats.decode,
            first_token_latency=stats.queued + stats.prefill,
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
            lora_request=self._lora_request,
            field_probabilities=None if self._readers is None else output.fields,
        )


def _scores(positions: Iterable[TokenLogprob]) -> Iterable[PositionScores]:
    for entry in positions:
        best = {top.token: TokenScore(top.logprob, rank, top.text) for rank, top in enumerate(entry.top, 1)}
        yield {entry.token: TokenScore(entry.logprob, entry.rank, entry.text)} | best
