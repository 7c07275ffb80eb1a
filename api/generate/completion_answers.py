"""Answers of completions, whole and in chunks. Choice ``prompt * n + i`` is the i-th answer to a prompt."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from ..observe.token_usage import UsageCount, finish_reason, min_completion_tokens, usage_body
from ..protocol.completions import CompletionRequest
from .collect import Answer
from .envelope import Envelope
from .logprob_formats import CompletionLogprobs, Unscored, prompt_logprobs
from .sse import DONE
from .streams import Deltas

if TYPE_CHECKING:
    from ...engine.serving.output_processor import TextDelta, TokenLogprob


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """A prompt as ``echo`` gives it back.

    Attributes:
        text: empty where no echo is asked for.
        unscored: its first tokens, which have no score: one, or ``logprob_start_len``. Empty where there is no echo.
        num_tokens: its length.
        silent: tokens that the text leaves out.
        lead: characters that its tokens have before the text (see ``CompletionLogprobs``).
    """

    text: str
    unscored: tuple[Unscored, ...]
    num_tokens: int
    silent: frozenset[int]
    lead: int = 0


class _Choice:
    """One choice while its pieces come: the echo goes before the first, ``max_tokens: 0`` leaves nothing after it."""

    def __init__(self, request: CompletionRequest, prompt: EchoedPrompt) -> None:
        self._request = request
        self._prompt = prompt
        self._begun = False
        self._logprobs = CompletionLogprobs(request.logprobs or 0, prompt.silent, prompt.lead)

    def piece(
        self, text: str, tokens: Sequence[TokenLogprob], scored_prompt: Sequence[TokenLogprob]
    ) -> tuple[str, dict[str, Any] | None]:
        """Text and logprobs to send for what came: the answer's text and tokens, and scores of the prompt's."""
        if self._request.max_tokens == 0:
            text, tokens = "", ()
        entries: list[TokenLogprob | Unscored] = [*scored_prompt, *tokens] if self._request.echo else [*tokens]
        if self._request.echo and not self._begun:
            self._begun = True
            text = self._prompt.text + text
            entries[:0] = self._prompt.unscored
        return text, None if self._request.logprobs is None else self._logprobs.piece(entries)


def completion_body(
    request: CompletionRequest,
    head: Envelope,
    prompts: Sequence[EchoedPrompt],
    answers: Mapping[tuple[int, int], Answer],
    usage: UsageCount,
) -> dict[str, Any]:
    """The whole answer."""
    choices = []
    for number, prompt in enumerate(prompts):
        for index in range(request.n):
            answer = answers[number, index]
            text, logprobs = _Choice(request, prompt).piece(
                "".join(answer.text), answer.logprobs, answer.prompt_logprobs
            )
            fields = _fields(number * request.n + index, text, logprobs, answer.reason, answer.stop_reason)
            if answer.min_tokens is not None:
                fields["min_completion_tokens"] = answer.min_tokens
            if request.prompt_logprobs is not None:
                scored = prompt_logprobs(answer.prompt_logprobs, request.prompt_logprobs, request.logprob_start_len)
                fields["prompt_logprobs"] = scored
            choices.append(fields)
    return {**head.fields(), "choices": choices, "usage": usage.body()}


def _fields(
    index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None, stop: str | int | None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason, "stop_reason": stop}


async def completion_events(
    request: CompletionRequest, head: Envelope, prompts: Sequence[EchoedPrompt], deltas: Deltas
) -> AsyncGenerator[bytes, None]:
    """The answer in events: text, the last of each choice with its finish reason, usage if asked for, DONE."""
    chunks = _Chunks(request, head, prompts)
    usage = UsageCount(drop_completion=request.max_tokens == 0)
    async with aclosing(deltas) as stream:
        async for number, several in stream:
            events = []
            for delta in several:
                events += chunks.of(number, delta)
                if delta.finish is not None:
                    usage.add(number, delta.finish.usage)
            if events:
                yield b"".join(events)
    end = head.event(choices=[], usage=usage.body()) if request.include_usage else b""
    yield end + DONE


class _Chunks:
    """Makes the chunks of one stream. Plain text is put together from prepared bytes."""

    def __init__(self, request: CompletionRequest, head: Envelope, prompts: Sequence[EchoedPrompt]) -> None:
        self._request = request
        self._head = head
        self._num_prompt = sum(prompt.num_tokens for prompt in prompts)
        self._num_tokens = 0
        self._choices = [_Choice(request, prompt) for prompt in prompts for _ in range(request.n)]
        self._start = head.event_start()
        self._end = b',"usage":null}\n\n' if request.include_usage else b"}\n\n"

    def of(self, number: int, delta: TextDelta) -> list[bytes]:
        """The events for a delta of this prompt: none if it only holds text back."""
        index = number * self._request.n + delta.index
        if self._request.max_tokens != 0:
            self._num_tokens += len(delta.tokens)
        text, logprobs = self._choices[index].piece(delta.text, delta.logprobs, delta.prompt_logprobs)
        finish: dict[str, Any] = {"finish_reason": None, "stop_reason": None}
        if delta.finish is not None:
            finish = {"finish_reason": finish_reason(delta.finish), "stop_reason": delta.finish.stop_reason}
            least = min_completion_tokens(delta.finish)
            if least is not None:
                finish["min_completion_tokens"] = least
        if not text and delta.finish is None and not (logprobs and logprobs["tokens"]):
            return []
        end = self._end
        if self._request.continuous_usage:
            end = b',"usage":' + orjson.dumps(usage_body(self._num_prompt, self._num_tokens)) + b"}\n\n"
        if logprobs is None and delta.finish is None:
            rest = b',"logprobs":null,"finish_reason":null}]'
        else:
            rest = b"," + orjson.dumps({"logprobs": logprobs, **finish})[1:] + b"]"
        return [b'%b%d,"text":%b%b%b' % (self._start, index, orjson.dumps(text), rest, end)]
