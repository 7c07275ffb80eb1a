"""Output processor: converts the messages on one sequence to text deltas with stop strings and logprobs. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from .. import errors
from ..errors import EngineError, GrammarRefused, RequestError
from ..messages import Done, Failed, TokenOut
from ..text.detokenizer import Detokenizer
from ..text.field_probabilities import FieldProbability
from ..text.stop_strings import StopStrings
from ..text.tokenizer import Tokenizer
from ..types import AllowedLogprobs, FinishReason, Logprob, SequenceStats, Usage
from .request import TextRequest

BUDGET = "budget"
"""Stop reason of a structured answer that is complete, but that would be another one without the token budget."""


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """One of the likeliest tokens at a position.

    ``bytes`` is exact; ``text`` contains U+FFFD where the bytes are not whole characters.
    """

    token: int
    text: str
    bytes: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The token at a position with its logprob, its rank (1 for the likeliest) and the likeliest tokens, best first."""

    token: int
    text: str
    bytes: bytes
    logprob: float
    rank: int
    top: tuple[TopLogprob, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """End of a sequence: the reason, the token counts and measurements.

    Attributes:
        usage: the engine's token counts. If a stop string ended the sequence, tokens after the stop string are not
            counted.
        stop_reason: the stop string or the token of ``stop_token_ids`` that ended the sequence; None for the model's
            own end token, also if ``stop_token_ids`` names it, and for every other reason (as in vLLM's field of this
            name). With ``ignore_eos``, a named end token is like any other.
        stats: the engine's measurements of the sequence.
        is_limited: whether the token budget changed a structured answer: without the budget, the model would have
            sampled other tokens.
        stop_token: the token that ended the sequence, either the model's end token or a requested one; None if no token
            ended it.
    """

    reason: FinishReason
    usage: Usage
    stop_reason: str | int | None = None
    stats: SequenceStats | None = None
    is_limited: bool = False
    stop_token: int | None = None

    @property
    def ended_by_budget(self) -> bool:
        """Whether the answer is complete only because the token budget has ended it."""
        return self.is_limited and self.reason is FinishReason.STOP and self.stop_reason is None

    @property
    def told_stop_reason(self) -> str | int | None:
        """The stop reason that clients receive: ``budget`` if the token budget ended the answer."""
        return BUDGET if self.ended_by_budget else self.stop_reason


@dataclass(slots=True)
class TextDelta:
    """The part of a sequence's output that one message adds.

    The dataclass is not frozen, because an object is created for each message, and a frozen one takes four times as
    long to create.

    Attributes:
        index: index of the sequence among the request's ``n`` sequences.
        text: new text that later tokens cannot change. It lags behind ``tokens`` while a character or a possible stop
            string is incomplete.
        reasoning: reasoning text, after the API has separated it from ``text``.
        tokens: the new tokens, without the end token, which has no text.
        logprobs: logprobs of ``tokens``, if requested.
        prompt_logprobs: logprobs of the prompt's tokens from the second one on, if requested.
        finish: set in the sequence's last delta.
        prompt: index of the request among the requests that run together.
        pooled: 32-bit floats, if ``SamplingParams.pooling`` requests them.
        allowed: for each position, logprobs of the tokens that the grammar allowed, including the end token; if
            requested.
        fields: probabilities of the completed fields of a JSON answer, after the API has computed them.
        pieces: the new text by token, if there are several tokens with logprobs; else empty.
    """

    index: int
    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish: Finish | None = None
    prompt: int = 0
    reasoning: str = ""
    pooled: bytes = b""
    allowed: tuple[AllowedLogprobs, ...] = ()
    fields: tuple[FieldProbability, ...] = ()
    pieces: tuple[str, ...] = ()

    def by_token(self) -> list[TextDelta]:
        """Return the delta as one delta for each token, so that each logprob is beside the text of its token.

        A delta without ``pieces`` is returned unchanged.
        """
        if not self.pieces:
            return [self]
        parts = [
            TextDelta(self.index, text, (token,), (logprob,), prompt=self.prompt)
            for text, token, logprob in zip(self.pieces, self.tokens, self.logprobs, strict=True)
        ]
        parts[0].prompt_logprobs = self.prompt_logprobs
        last = parts[-1]
        last.finish, last.pooled, last.allowed, last.fields = self.finish, self.pooled, self.allowed, self.fields
        return parts


@dataclass(slots=True)
class SequenceOutput:
    """The whole output of one sequence, collected from its deltas. ``finish`` is None before its end."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    pooled: bytes = b""
    finish: Finish | None = None
    fields: list[FieldProbability] = field(default_factory=list)
    allowed: list[AllowedLogprobs] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def reasoning(self) -> str:
        return "".join(self.thoughts)

    @property
    def token_ids(self) -> list[int]:
        """The tokens, including the token that ended the sequence."""
        return [*self.tokens, *end_tokens(self.finish)]

    def add(self, delta: TextDelta) -> None:
        """Append a delta."""
        self.texts.append(delta.text)
        self.thoughts.append(delta.reasoning)
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.prompt_logprobs += delta.prompt_logprobs
        self.pooled += delta.pooled
        self.fields += delta.fields
        self.allowed += delta.allowed
        self.finish = delta.finish


def end_tokens(finish: Finish | None) -> tuple[int, ...]:
    """Return the token that ended a sequence as a tuple, which is empty if no token ended it."""
    return () if finish is None or finish.stop_token is None else (finish.stop_token,)


class OutputProcessor:
    """Detokenization and stop check of one sequence.

    When a stop string is found, ``stopped`` becomes true, the caller must abort the sequence, and later tokens are
    ignored. The last delta follows from the sequence's ``Done`` message, because only the engine knows some of the
    counts (cached tokens).

    Args:
        stops: the automaton of the request's stop strings, None if it has none.
        index: index of the sequence among the request's sequences.
        prompt: index of the request among the requests that run together.
    """

    def __init__(
        self, tokenizer: Tokenizer, request: TextRequest, stops: StopStrings | None, index: int = 0, prompt: int = 0
    ) -> None:
        self.prompt = prompt
        self._tokenizer = tokenizer
        self._request = request
        self._index = index
        self._detokenizer = Detokenizer(
            tokenizer, skip_special_tokens=request.skip_special_tokens, shown=request.shown_tokens
        )
        self._matcher = stops.matcher() if stops is not None else None
        self._num_tokens = 0
        self._stop: str | None = None
        self._expired = self._is_limited = False

    @property
    def stopped(self) -> bool:
        return self._stop is not None

    @property
    def is_ending(self) -> bool:
        """Whether a stop string or the timeout has ended the sequence, so that the engine has been told to abort it."""
        return self.stopped or self._expired

    def expire(self) -> None:
        """Record that the timeout has passed: ``Done``, which follows the abort, gives the reason ``TIMEOUT``."""
        self._expired = True

    def push(self, message: TokenOut | Done) -> TextDelta | None:
        """Return the delta of a message; None for a message after a stop string."""
        if isinstance(message, Done):
            return self._finish(message)
        if self.stopped:
            return None
        self._is_limited |= message.is_limited
        texts, count = self._read(message.tokens)
        return TextDelta(
            self._index,
            "".join(texts),
            message.tokens[:count],
            token_logprobs(self._tokenizer, message.logprobs[:count]),
            token_logprobs(self._tokenizer, message.prompt_logprobs),
            prompt=self.prompt,
            pooled=message.pooled,
            allowed=message.allowed[: count if self.stopped else None],
            pieces=tuple(texts) if 1 < count <= len(message.logprobs) else (),
        )

    def _read(self, tokens: tuple[int, ...]) -> tuple[list[str], int]:
        """Return the text of ``tokens`` up to a stop string, and the number of tokens up to the stop string.

        The text is one piece for each token, or a single piece if neither stop strings nor logprobs need more.
        """
        if self._matcher is None and self._request.params.logprobs is None:
            self._num_tokens += len(tokens)
            return [self._detokenizer.push(tokens)], len(tokens)
        texts = []
        for count, token in enumerate(tokens, 1):
            self._num_tokens += 1
            texts.append(self._match(self._detokenizer.push((token,))))
            if self.stopped:
                return texts, count
        return texts, len(tokens)

    def _match(self, text: str) -> str:
        """Match stop strings. Returns the text in which no stop string can begin any more; the matcher holds back the
        rest.
        """
        if self._matcher is None:
            return text
        armed = self._num_tokens > self._request.params.min_tokens
        certain, self._stop = self._matcher.feed(text, armed=armed)
        return certain + self._stop if self._stop and self._request.include_stop else certain

    def _finish(self, done: Done) -> TextDelta:
        text = "" if self.stopped else self._rest(done.stop_token)
        return TextDelta(self._index, text, finish=self._end(done), prompt=self.prompt)

    def _rest(self, stop_token: int | None) -> str:
        """Return the text held back and, with ``include_stop``, the text of the token that ended the sequence."""
        shown = (stop_token,) if stop_token is not None and self._request.include_stop else ()
        text = self._match(self._detokenizer.push(shown) + self._detokenizer.finish())
        return text if self.stopped or self._matcher is None else text + self._matcher.finish()

    def _end(self, done: Done) -> Finish:
        if self._stop is not None:
            return Finish(FinishReason.STOP, _cut(done.usage, self._num_tokens), self._stop, done.stats)
        if self._expired and done.reason is FinishReason.ABORT:
            return Finish(FinishReason.TIMEOUT, done.usage, stats=done.stats)
        params = self._request.params
        # As in vLLM, the model's own end token is no requested one, unless only the request lets it end the answer.
        is_own = done.stop_token in self._tokenizer.eos_ids and not params.ignore_eos
        stop_reason = done.stop_token if done.stop_token in params.stop_token_ids and not is_own else None
        return Finish(
            done.reason, done.usage, stop_reason, done.stats, self._is_limited or done.is_limited, done.stop_token
        )


def _cut(usage: Usage, completion: int) -> Usage:
    """Return the usage of an answer cut after ``completion`` tokens.

    The counts of draft and forced tokens are limited to this number.
    """
    drafted, forced = min(usage.drafted, completion), min(usage.forced, completion)
    return replace(usage, completion=completion, drafted=drafted, forced=forced)


def token_logprobs(tokenizer: Tokenizer, positions: Sequence[Logprob]) -> tuple[TokenLogprob, ...]:
    """Return the engine's logprobs with the texts and bytes of the tokens added."""
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
    """Return the exception that ``failed`` describes. Its class is the class of ``errors`` that ``failed`` names."""
    if failed.refusal is not None:
        return GrammarRefused(*failed.refusal, param=failed.param)
    kind = getattr(errors, failed.kind, EngineError)
    # The constructor is not called, because the constructors of subclasses do not accept the finished text.
    error: EngineError = kind.__new__(kind)
    if isinstance(error, RequestError):
        RequestError.__init__(error, failed.message, param=failed.param, code=failed.code)
    else:
        error.__init__(failed.message)  # type: ignore[misc]
    return error
