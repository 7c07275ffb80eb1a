"""Completion answers: builds completion bodies and chunks. Choice ``prompt * n + i`` is the i-th answer to a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from ...engine.serving.output_processor import end_tokens
from ..observe.token_usage import UsageCount, finish_fields, usage_body
from ..protocol.completions import CompletionRequest
from .envelope import Envelope
from .logprob_formats import CompletionLogprobs, Unscored, field_probabilities, prompt_logprobs

if TYPE_CHECKING:
    from ...engine.serving.output_processor import SequenceOutput, TextDelta, TokenLogprob


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """A prompt in the form that ``echo`` returns.

    Attributes:
        text: text of the prompt; empty without echo.
        unscored: tokens at the beginning without logprobs: the first token, or the first ``logprob_start_len`` tokens.
            Empty without echo.
        num_tokens: length of the prompt in tokens.
        silent: tokens whose text is left out.
        lead: number of characters of the first tokens that are missing in the text (see ``CompletionLogprobs``).
        tokens: the tokens of the prompt, for ``return_token_ids``; else empty.
    """

    text: str
    unscored: tuple[Unscored, ...]
    num_tokens: int
    silent: frozenset[int]
    lead: int = 0
    tokens: Sequence[int] = ()


class _Choice:
    """Text and logprobs of one choice, in pieces.

    The first piece begins with the echo; with ``max_tokens`` 0 it is the only one.
    """

    def __init__(self, request: CompletionRequest, prompt: EchoedPrompt) -> None:
        self._request = request
        self._prompt = prompt
        self._begun = False
        self._logprobs = CompletionLogprobs(request.num_top, prompt.silent, prompt.lead)

    def piece(
        self, text: str, tokens: Sequence[TokenLogprob], scored_prompt: Sequence[TokenLogprob]
    ) -> tuple[str, dict[str, Any] | None]:
        """Return the text and logprobs to send, from the answer's new text and tokens and the prompt's logprobs."""
        text, entries = self._entries(text, tokens, scored_prompt)
        return text, None if self._request.logprobs is None else self._logprobs.piece(entries)

    def whole(self, output: SequenceOutput) -> tuple[str, dict[str, Any] | None]:
        """Return the text and the serialized logprobs of a whole answer."""
        text, entries = self._entries(output.text, output.logprobs, output.prompt_logprobs)
        return text, None if self._request.logprobs is None else self._logprobs.written(entries)

    def _entries(
        self, text: str, tokens: Sequence[TokenLogprob], scored_prompt: Sequence[TokenLogprob]
    ) -> tuple[str, list[TokenLogprob | Unscored]]:
        """Return the text and the tokens to send. With ``echo``, the first ones include the prompt."""
        if self._request.max_tokens == 0:
            text, tokens = "", ()
        entries: list[TokenLogprob | Unscored] = [*scored_prompt, *tokens] if self._request.echo else [*tokens]
        if self._request.echo and not self._begun:
            self._begun = True
            text = self._prompt.text + text
            entries[:0] = self._prompt.unscored
        return text, entries


def completion_body(
    request: CompletionRequest,
    envelope: Envelope,
    prompts: Sequence[EchoedPrompt],
    outputs: Mapping[tuple[int, int], SequenceOutput],
    usage: UsageCount,
) -> dict[str, Any]:
    """Return the body of a whole response."""
    choices = []
    for number, prompt in enumerate(prompts):
        for index in range(request.n):
            output = outputs[number, index]
            text, logprobs = _Choice(request, prompt).whole(output)
            fields = {"index": number * request.n + index, "text": text, "logprobs": logprobs}
            fields |= finish_fields(output.finish)
            if request.prompt_logprobs is not None:
                scored = prompt_logprobs(output.prompt_logprobs, request.prompt_logprobs, request.logprob_start_len)
                fields["prompt_logprobs"] = scored
            if request.return_token_ids:
                ids = [] if request.max_tokens == 0 else output.token_ids
                fields |= {"prompt_token_ids": list(prompt.tokens), "token_ids": ids}
            if request.field_probabilities:
                fields["field_probabilities"] = field_probabilities(output.fields)
            choices.append(fields)
    return {**envelope.fields(), "choices": choices, "usage": usage.body()}


class CompletionChunks:
    """Serializes the chunks of one stream. Chunks with plain text are joined from prepared bytes, which is faster."""

    def __init__(self, request: CompletionRequest, envelope: Envelope, prompts: Sequence[EchoedPrompt]) -> None:
        self.envelope, self.include_usage = envelope, request.include_usage
        self._request = request
        self._num_prompt = sum(prompt.num_tokens for prompt in prompts)
        self._num_tokens = 0
        self._choices = [_Choice(request, prompt) for prompt in prompts for _ in range(request.n)]
        # The prompt's tokens of each choice, kept until they are sent with the choice's first chunk.
        self._prompt_ids = {
            index: list(prompts[index // request.n].tokens)
            for index in range(len(self._choices))
            if request.return_token_ids
        }
        self._start = envelope.event_start()
        self._end = b',"usage":null}\n\n' if request.include_usage else b"}\n\n"

    def events(self, delta: TextDelta) -> bytes:
        """Return the event for a delta; empty while the delta's text is held back."""
        index = delta.prompt * self._request.n + delta.index
        if self._request.max_tokens != 0:
            self._num_tokens += len(delta.tokens) + len(end_tokens(delta.finish))
        text, logprobs = self._choices[index].piece(delta.text, delta.logprobs, delta.prompt_logprobs)
        ids = self._token_ids(index, delta)
        if delta.fields:
            ids["field_probabilities"] = field_probabilities(delta.fields)
        if (
            not text
            and delta.finish is None
            and not (logprobs and logprobs["tokens"])
            and not (ids.get("token_ids") or delta.fields)
        ):
            return b""
        end = self._end
        if self._request.continuous_usage:
            end = b',"usage":' + orjson.dumps(usage_body(self._num_prompt, self._num_tokens)) + b"}\n\n"
        if logprobs is None and delta.finish is None and not ids:
            rest = b',"logprobs":null,"finish_reason":null}]'
        else:
            unfinished = {"finish_reason": None, "stop_reason": None}
            finish = unfinished if delta.finish is None else finish_fields(delta.finish)
            rest = b"," + orjson.dumps({"logprobs": logprobs, **finish, **ids})[1:] + b"]"
        return b'%b%d,"text":%b%b%b' % (self._start, index, orjson.dumps(text), rest, end)

    def _token_ids(self, index: int, delta: TextDelta) -> dict[str, Any]:
        """Return the fields of ``return_token_ids`` for a delta.

        The prompt's tokens are included once for each choice.
        """
        if not self._request.return_token_ids:
            return {}
        ids = [] if self._request.max_tokens == 0 else [*delta.tokens, *end_tokens(delta.finish)]
        if not ids and delta.finish is None:
            return {}
        return {"token_ids": ids, "prompt_token_ids": self._prompt_ids.pop(index, None)}
