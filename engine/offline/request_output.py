"""Request outputs of ``LLM`` with the fields of vLLM's ``RequestOutput``, and the builder of these outputs."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from ...lora.request import LoRARequest
from ..serving.output_processor import SequenceOutput, TextDelta, TokenLogprob
from ..text.field_probabilities import FieldProbability, FieldReader
from ..types import Usage


@dataclass(frozen=True, slots=True)
class TokenScore:
    """Log-probability of a token at a position.

    Attributes:
        rank: 1 for the likeliest token; None for a token of ``logprob_token_ids`` that was not drawn, whose rank is not
            computed.
    """

    logprob: float
    rank: int | None
    decoded_token: str


PositionScores = dict[int, TokenScore]
"""Logprobs at one position by token id, for the token at the position and the likeliest tokens."""


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer.

    Attributes:
        index: index of the answer among the ``n`` answers to its prompt.
        token_ids: tokens of the answer without the end token, which has no text and no logprob.
        logprobs: logprobs at the position of each of ``token_ids``; None if not requested.
        cumulative_logprob: sum of the logprobs of ``token_ids``; None if not requested.
        finish_reason: ``"stop"``, ``"length"`` or ``"abort"``; None while the answer is not finished.
        field_probabilities: probabilities of the choices that a JSON Schema left to the model, None if not requested.
        stop_reason: the stop string or stop token id that ended the answer; None for the model's own end token;
            ``budget`` if the answer is a complete structured answer that ``max_tokens`` made shorter.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[PositionScores] | None
    cumulative_logprob: float | None
    finish_reason: str | None
    stop_reason: str | int | None
    lora_request: LoRARequest | None = None
    field_probabilities: list[FieldProbability] | None = None
    routed_experts: ClassVar[None] = None
    kv_transfer_params: ClassVar[None] = None
    sampling_mask: ClassVar[None] = None
    spec_decode_metrics: ClassVar[None] = None
    weight_versions: ClassVar[None] = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of the first answer to a prompt, in seconds. Fields that end in ``_ts`` are monotonic times, as in vLLM.

    Attributes:
        num_generation_tokens: number of the answer's tokens, including the end token.
        arrival_time: arrival of the request, in seconds since 1970.
        first_token_latency: seconds from the arrival to the first token.
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
        prompt: the text, None if the prompt was given as token ids.
        prompt_logprobs: logprobs of the prompt's tokens (None for the first token and before ``logprob_start_len``);
            None if not requested.
        usage: token counts of each answer that has ended, in the order of the answers.
        request_id: a number as text, which is unique in this LLM.
        num_cached_tokens: number of prompt tokens whose KV was in the prefix cache when the first answer began.
        metrics: measured times; None if the engine has measured none.
        lora_request: the ``LoRARequest`` that requested the adapter.
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
        with_logprobs, with_prompt_logprobs: whether these logprobs were requested.
        has_named: whether the logprobs of the answers are those of ``logprob_token_ids``, not of the likeliest tokens.
        request_id: id of the request.
        lora_request: the ``LoRARequest`` that requested the request's adapter.
        new_reader: creates a reader of an answer's field probabilities; None if they are not requested.
        observe: called with each delta as it arrives; None for no observer.
    """

    def __init__(
        self,
        prompt: str | None,
        tokens: array[int],
        n: int,
        *,
        with_logprobs: bool,
        with_prompt_logprobs: bool,
        has_named: bool = False,
        request_id: str = "",
        lora_request: LoRARequest | None = None,
        new_reader: Callable[[], FieldReader] | None = None,
        observe: Callable[[TextDelta], None] | None = None,
    ) -> None:
        self._observe = observe
        self._readers = None if new_reader is None else [new_reader() for _ in range(n)]
        self._request_id = request_id
        self._lora_request = lora_request
        self._arrival, self._queued = time.time(), time.monotonic()
        self._prompt = prompt
        self._tokens = tokens
        self._outputs = [SequenceOutput() for _ in range(n)]
        self._with_logprobs = with_logprobs
        self._with_prompt_logprobs = with_prompt_logprobs
        self._has_named = has_named

    @property
    def is_complete(self) -> bool:
        return all(output.finish is not None for output in self._outputs)

    def add(self, delta: TextDelta) -> TextDelta:
        """Add a delta of one of the answers. Returns the delta with the answer's new field probabilities."""
        if self._observe is not None:
            self._observe(delta)
        if self._readers is not None:
            reader = self._readers[delta.index]
            delta = replace(delta, allowed=(), fields=tuple(f for each in delta.allowed for f in reader.push(each)))
        self._outputs[delta.index].add(delta)
        return delta

    @property
    def pooled(self) -> bytes:
        """Pooled values of the prompt, as in ``TextDelta``."""
        return self._outputs[0].pooled

    def build(self) -> RequestOutput:
        """Return the final output. Must be called only once ``is_complete`` is true."""
        # All sequences have the same prompt logprobs.
        scores = self._prompt_scores(self._outputs[0].prompt_logprobs)
        return self._request_output(dict(enumerate(self._outputs)), scores)

    def build_part(self, new: Mapping[int, SequenceOutput], *, only_new: bool) -> RequestOutput:
        """Return an intermediate output or the last one, with only those answers that have new parts.

        Args:
            new: the new part of each answer, by the answer's index.
            only_new: whether texts, tokens and logprobs hold only the new parts.
        """
        parts = new if only_new else {index: self._outputs[index] for index in new}
        of_prompt = next((part.prompt_logprobs for part in parts.values() if part.prompt_logprobs), [])
        scores = None if only_new and not of_prompt else self._prompt_scores(of_prompt)
        return self._request_output({index: parts[index] for index in sorted(parts)}, scores)

    def _prompt_scores(self, scored: Sequence[TokenLogprob]) -> list[PositionScores | None] | None:
        if not self._with_prompt_logprobs:
            return None
        return [*[None] * (len(self._tokens) - len(scored)), *_scores(scored)]

    def _request_output(
        self, parts: Mapping[int, SequenceOutput], prompt_scores: list[PositionScores | None] | None
    ) -> RequestOutput:
        usage = [output.finish.usage for output in self._outputs if output.finish is not None]
        return RequestOutput(
            prompt=self._prompt,
            prompt_token_ids=self._tokens.tolist(),
            prompt_logprobs=prompt_scores,
            outputs=[self._completion(index, part) for index, part in parts.items()],
            usage=usage,
            request_id=self._request_id,
            finished=self.is_complete,
            num_cached_tokens=usage[0].cached if usage else 0,
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

    def _completion(self, index: int, part: SequenceOutput) -> CompletionOutput:
        """Return an answer with the texts, tokens and logprobs of ``part``."""
        whole = self._outputs[index]
        finish = whole.finish
        return CompletionOutput(
            index=index,
            text=part.text,
            token_ids=part.tokens.copy(),
            logprobs=list(_scores(part.logprobs, are_named=self._has_named)) if self._with_logprobs else None,
            cumulative_logprob=sum(entry.logprob for entry in whole.logprobs) if self._with_logprobs else None,
            finish_reason=None if finish is None else finish.reason.value,
            stop_reason=None if finish is None else finish.told_stop_reason,
            lora_request=self._lora_request,
            field_probabilities=None if self._readers is None else part.fields.copy(),
        )


def _scores(positions: Iterable[TokenLogprob], *, are_named: bool = False) -> Iterable[PositionScores]:
    """Return the logprobs by token id, the token at the position first.

    Args:
        are_named: whether the other tokens are those of ``logprob_token_ids``, in their order, not the likeliest ones.
    """
    for entry in positions:
        own = {entry.token: TokenScore(entry.logprob, entry.rank, entry.text)}
        others = {
            top.token: TokenScore(top.logprob, None if are_named else rank, top.text)
            for rank, top in enumerate(entry.top, 1)
        }
        # The token's own entry comes first in the dict, and its rank counts even if it is among the others.
        yield own | others | own
