"""The text side of one sequence: messages of the engine in, pieces of text out. It does no input or output itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .. import errors
from ..errors import EngineError, GrammarRefused, RequestError
from ..messages import Done, Failed, TokenOut
from ..text.detokenizer import Detokenizer
from ..text.stop_strings import StopStrings
from ..text.tokenizer import Tokenizer
from ..types import FinishReason, Logprob, Usage
from .request import TextRequest


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """One of the likeliest tokens at a position. ``bytes`` are exact; ``text`` may hold U+FFFD for a part of one."""

    token: int
    text: str
    bytes: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The token at a position, its log-probability, its rank (1 is the likeliest) and the likeliest, best first."""

    token: int
    text: str
    bytes: bytes
    logprob: float
    rank: int
    top: tuple[TopLogprob, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """How a sequence ended.

    Attributes:
        usage: tokens as the engine counts them; after a stop string, up to the token that completed it.
        stop_reason: the stop string or the one of ``stop_token_ids`` that ended it; None for the model's own end
            token and for every other reason (vLLM's field of that name).
    """

    reason: FinishReason
    usage: Usage
    stop_reason: str | int | None = None


@dataclass(slots=True)
class TextDelta:
    """What one message added to one of a request's sequences. Not frozen, for ``TokenOut``'s reason.

    Attributes:
        index: which of the request's ``n`` sequences.
        text: characters that are certain. They lag behind ``tokens`` while a character or stop string is incomplete.
        tokens: the new tokens, without one that ends the sequence (an end token has no text).
        logprobs: of ``tokens``, if they were asked for.
        prompt_logprobs: of the prompt's tokens from the second on, if they were asked for.
        finish: set in the sequence's last delta.
    """

    index: int
    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish: Finish | None = None


class OutputProcessor:
    """One sequence of a request.

    When a stop string is found, ``stopped`` becomes true and the caller must abort the sequence. What the engine still
    sends of it is ignored, but for its ``Done``, which tells what only the engine knows (the cached tokens) and gives
    the last delta.

    Args:
        stops: the automaton of the request's stop strings, None if it has none.
        index: which of the request's sequences this is.
    """

    def __init__(self, tokenizer: Tokenizer, request: TextRequest, stops: StopStrings | None, index: int = 0) -> None:
        self._tokenizer = tokenizer
        self._request = request
        self._index = index
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=request.skip_special_tokens)
        self._matcher = stops.matcher() if stops is not None else None
        self._num_tokens = 0
        self._stop: str | None = None
        self._expired = False

    @property
    def stopped(self) -> bool:
        """Whether a stop string has been found."""
        return self._stop is not None

    def expire(self) -> None:
        """Its time is up: the caller aborts it, and the ``Done`` that follows ends it with ``TIMEOUT``."""
        self._expired = True

    def push(self, message: TokenOut | Done) -> TextDelta | None:
        """The delta that ``message`` makes, None if it makes none."""
        if isinstance(message, Done):
            return self._finish(message)
        if self.stopped:
            return None
        text, taken = self._read(message.tokens)
        return TextDelta(
            self._index,
            text,
            message.tokens[:taken],
            token_logprobs(self._tokenizer, message.logprobs[:taken]),
            token_logprobs(self._tokenizer, message.prompt_logprobs),
        )

    def _read(self, tokens: tuple[int, ...]) -> tuple[str, int]:
        """The text of ``tokens`` up to a stop string, and how many of them belong to it."""
        if self._matcher is None:
            self._num_tokens += len(tokens)
            return self._detokenizer.push(tokens), len(tokens)
        texts = []
        for taken, token in enumerate(tokens, 1):
            self._num_tokens += 1
            texts.append(self._match(self._detokenizer.push((token,))))
            if self.stopped:
                return "".join(texts), taken
        return "".join(texts), len(tokens)

    def _match(self, text: str) -> str:
        """The part of ``text``, and of what was held back before, that may leave."""
        if self._matcher is None:
            return text
        armed = self._num_tokens > self._request.params.min_tokens
        certain, self._stop = self._matcher.feed(text, armed=armed)
        return certain + self._stop if self._stop and self._request.include_stop else certain

    def _finish(self, done: Done) -> TextDelta:
        text = "" if self.stopped else self._rest(done.stop_token)
        return TextDelta(self._index, text, finish=self._how(done))

    def _rest(self, stop_token: int | None) -> str:
        """The text that was held back, and that of the token that ended the sequence if it was asked for."""
        shown = (stop_token,) if stop_token is not None and self._request.include_stop else ()
        text = self._match(self._detokenizer.push(shown) + self._detokenizer.finish())
        return text if self.stopped or self._matcher is None else text + self._matcher.finish()

    def _how(self, done: Done) -> Finish:
        if self._stop is not None:
            usage = replace(done.usage, completion=self._num_tokens)
            return Finish(FinishReason.STOP, usage, self._stop)
        if self._expired and done.reason is FinishReason.ABORT:
            return Finish(FinishReason.TIMEOUT, done.usage)
        asked = done.stop_token in self._request.params.stop_token_ids
        return Finish(done.reason, done.usage, done.stop_token if asked else None)


def token_logprobs(tokenizer: Tokenizer, positions: Sequence[Logprob]) -> tuple[TokenLogprob, ...]:
    """The engine's logprobs with the texts and bytes of their tokens."""
    if not positions:
        return ()
    return tuple(
        TokenLogprob(
            entry.token,
            *_text_and_bytes(tokenizer, entry.token),
            entry.logprob,
            entry.rank,
            tuple(TopLogprob(token, *_text_and_bytes(tokenizer, token), value) for token, value in entry.top),
        )
        for entry in positions
    )


def _text_and_bytes(tokenizer: Tokenizer, token: int) -> tuple[str, bytes]:
    data = tokenizer.token_bytes(token)
    return data.decode(errors="replace"), data


def error_of(failed: Failed) -> EngineError:
    """The exception that ``failed`` stands for, of the class in ``errors`` that it names."""
    if failed.refusal is not None:
        return GrammarRefused(*failed.refusal, param=failed.param)
    kind = getattr(errors, failed.kind, EngineError)
    error: EngineError = kind.__new__(kind)  # subclasses take other arguments than the text
    if isinstance(error, RequestError):
        RequestError.__init__(error, failed.message, param=failed.param, code=failed.code)
    else:
        error.__init__(failed.message)  # type: ignore[misc]
    return error
