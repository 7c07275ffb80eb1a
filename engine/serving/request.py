"""Request in tokens: its fields, the limits that are checked, and the sequences that are submitted to the engine."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ...grammar.spec import GrammarSpec
from ...grammar.thought_rules import ThoughtRules
from ..errors import ContextTooLong, RequestError, shortened
from ..messages import Submit
from ..sampling_options import OPTIONS, without_aliases
from ..types import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_LENGTH,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_LOGPROBS,
    MAX_PIN_SECONDS,
    MAX_PREFIX_PINS,
    MAX_SEED,
    MAX_SESSION_NAME,
    MAX_STOP_TOKEN_IDS,
    MAX_TOKEN_COUNT,
    MIN_SEED,
    SESSION_SECONDS,
    Priority,
    SamplingParams,
)

MAX_N = 16
MAX_STOPS = 16
MAX_STOP_LENGTH = 256
MAX_TIMEOUT = 86400.0

# Type and inclusive bounds of the numbers in SamplingParams; a bound of None does not exist. If OpenAI has the field,
# the bounds are OpenAI's.
_BOUNDS: dict[str, tuple[type[int] | type[float], float, float | None]] = {
    **{option.name: (option.kind, option.low, option.high) for option in OPTIONS},
    "max_tokens": (int, 1, MAX_TOKEN_COUNT),
    "min_tokens": (int, 0, MAX_TOKEN_COUNT),
    "seed": (int, MIN_SEED, MAX_SEED),
    "logprobs": (int, 0, MAX_LOGPROBS),
    "prompt_logprobs": (int, 0, MAX_LOGPROBS),
    "logprob_start_len": (int, 0, MAX_TOKEN_COUNT),
    "pooled_from": (int, 0, MAX_TOKEN_COUNT),
    "num_label": (int, 0, MAX_TOKEN_COUNT),
}
_ABOVE_LOW = frozenset({"timeout", *(option.name for option in OPTIONS if option.is_above_low)})
_WITH_ALIASES = tuple(option.name for option in OPTIONS if option.aliases)
_OPTIONAL = ("seed", "logprobs", "prompt_logprobs", "timeout")


@dataclass(frozen=True, slots=True)
class TextRequest:
    """Request for ``n`` continuations of a prompt in tokens.

    Attributes:
        tokens: the prompt, ``array('i')``.
        stop: strings that end a sequence when they appear in its text.
        include_stop: whether the answer's text includes the stop string or the end token.
        n: number of sequences.
        adapter: name of a LoRA adapter, None for the base model.
        salt: the KV is shared only among requests of the same ``cache_tenant`` with the same salt.
        skip_special_tokens: whether the text of special tokens is left out.
        grammar: grammar of structured output, None for free text.
        tenant: tenant to whom fair scheduling charges the request.
        cache_tenant: tenant whose requests may share cached KV.
        priority: priority class.
        timeout: seconds after which the request ends, waiting or running; None for no timeout.
        session: name of the tenant's session to which the request belongs, so that the next request finds its KV; ""
            for none.
        session_seconds: seconds for which the session's KV is kept after the answer; 0 releases it.
        pin_seconds: seconds for which the prompt is pinned in the prefix cache, 0 for no pin.
        prefix_pins: prefixes of the prompt that are pinned: (tokens, seconds), at most ``MAX_PREFIX_PINS``.
        reasoning: settings of the reasoning before the answer, if it has a token budget or a grammar follows it; else
            None.
        shown_tokens: special tokens whose text is kept even if ``skip_special_tokens`` is set.
        generated: first tokens of the answer, if they are known already; the sequences continue after them.
    """

    tokens: array[int]
    params: SamplingParams
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    n: int = 1
    adapter: str | None = None
    salt: str = ""
    skip_special_tokens: bool = True
    grammar: GrammarSpec | None = None
    tenant: str = ""
    cache_tenant: str = ""
    priority: Priority = Priority.INTERACTIVE
    timeout: float | None = None
    session: str = ""
    session_seconds: float = SESSION_SECONDS
    pin_seconds: float = 0.0
    prefix_pins: tuple[tuple[int, float], ...] = ()
    reasoning: ThoughtRules | None = None
    shown_tokens: frozenset[int] = frozenset()
    generated: array[int] = field(default_factory=lambda: array("i"))

    def submits(self, ids: Iterator[int]) -> list[Submit]:
        """Return one ``Submit`` for each of the ``n`` sequences.

        Sequence i gets the request's seed plus i as a 64-bit seed.
        """
        seed = self.params.seed
        grammar = None if self.grammar is None else (self.grammar.kind.value, self.grammar.content)
        return [
            Submit(
                id=next(ids),
                tokens=self.tokens,
                params=self.params if seed is None else replace(self.params, seed=_wrapped(seed + index)),
                adapter=self.adapter,
                salt=self.salt,
                grammar=grammar,
                tenant=self.tenant,
                cache_tenant=self.cache_tenant,
                priority=self.priority,
                session=self.session,
                session_seconds=self.session_seconds,
                pin_seconds=self.pin_seconds,
                prefix_pins=self.prefix_pins,
                reasoning=self.reasoning,
                generated=self.generated,
            )
            for index in range(self.n)
        ]


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits of requests to a model.

    Every number of a request is checked here, and lower layers do not check it again.

    Attributes:
        max_model_len: largest number of tokens in prompt and answer together.
        vocab_size: exclusive upper bound of the token ids.
    """

    max_model_len: int
    vocab_size: int

    def check(self, request: TextRequest) -> TextRequest:
        """Return the request in the engine's form.

        An alias for "no effect" is replaced by the neutral value (top_k -1 becomes 0).

        Raises:
            ContextTooLong: the prompt leaves no room for an answer.
            RequestError: another field is out of bounds; the message has the field, its value and the bounds.
        """
        _check_kinds(request)
        params = request.params
        for name in _WITH_ALIASES:
            if (meant := without_aliases(name, getattr(params, name))) is not getattr(params, name):
                params = replace(params, **{name: meant})
        for name, bounds in _BOUNDS.items():
            _check_number(name, getattr(params, name), *bounds)
        num_prompt = len(request.tokens)
        self.check_room("max_tokens", params.max_tokens, num_prompt)
        _check_number("n", request.n, int, 1, MAX_N)
        _check_number("timeout", request.timeout, float, 0, MAX_TIMEOUT)
        _check_number("session_seconds", request.session_seconds, float, 0, MAX_PIN_SECONDS)
        _check_number("pin_seconds", request.pin_seconds, float, 0, MAX_PIN_SECONDS)
        _check_count("prefix_pins", request.prefix_pins, MAX_PREFIX_PINS)
        for num_tokens, seconds in request.prefix_pins:
            _check_number("prefix_pins", num_tokens, int, 0, num_prompt)
            _check_number("prefix_pins", seconds, float, 0, MAX_PIN_SECONDS)
        if (length := len(request.session)) > MAX_SESSION_NAME:
            raise _out_of_bounds("session", f"{length} characters long", f"at most {MAX_SESSION_NAME}")
        if params.min_tokens > params.max_tokens:
            raise _out_of_bounds("min_tokens", params.min_tokens, f"at most max_tokens ({params.max_tokens})")
        _check_stops(request.stop)
        self._check_tokens(params)
        if params.logprob_token_ids and params.logprobs is None:
            raise RequestError("logprob_token_ids needs logprobs of the answer.", param="logprob_token_ids")
        if params.allowed_token_ids and request.grammar is not None:
            raise RequestError(
                "allowed_token_ids cannot be used with an output format: give one of the two.",
                param="allowed_token_ids",
            )
        if params.bad_words and (params.allowed_token_ids or request.grammar is not None):
            other = "allowed_token_ids" if params.allowed_token_ids else "the form of the answer"
            raise RequestError(
                f"bad_words and {other} together might allow no token: give one of the two.", param="bad_words"
            )
        if not request.tokens:
            raise RequestError("The prompt is empty: it needs at least one token.", param="prompt")
        self._check_ids("prompt", request.tokens)
        self._check_ids("generated", request.generated)
        _check_scored(params, num_prompt)
        return request if params is request.params else replace(request, params=params)

    def default_max_tokens(self, num_prompt: int, most: int | None = None) -> int:
        """Return the default ``max_tokens``: the number of tokens that fit after a prompt, but at most ``most``.

        Raises:
            ContextTooLong: no token fits after the prompt.
        """
        if num_prompt >= self.max_model_len:
            raise ContextTooLong(num_prompt, 1, self.max_model_len)
        room = self.max_model_len - num_prompt
        return room if most is None else min(room, most)

    def check_room(self, field: str, max_tokens: int, num_prompt: int) -> None:
        """Check that an answer of ``max_tokens`` tokens, set by the field ``field``, fits after a prompt.

        Raises:
            ContextTooLong: no token fits.
            RequestError: fewer tokens fit.
        """
        if max_tokens <= (room := self.default_max_tokens(num_prompt)):
            return
        length, taken = f"maximum context length is {self.max_model_len} tokens", f"the prompt takes {num_prompt}"
        problem = f"'{field}' must be at most {room}, not {max_tokens}: this model's {length}, and {taken} of them."
        raise RequestError(problem, param=field)

    def _check_ids(self, field: str, tokens: array[int]) -> None:
        ids = np.frombuffer(tokens, np.intc)
        for extreme in (np.minimum, np.maximum) if tokens else ():
            self._check_token(field, int(extreme.reduce(ids)))

    def _check_tokens(self, params: SamplingParams) -> None:
        """Check the token ids and the lengths of the lists in the sampling parameters."""
        _check_count("stop_token_ids", params.stop_token_ids, MAX_STOP_TOKEN_IDS)
        _check_count("logit_bias", params.logit_bias, MAX_LOGIT_BIAS)
        _check_count("logprob_token_ids", params.logprob_token_ids, MAX_LOGPROB_TOKEN_IDS)
        _check_count("allowed_token_ids", params.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS)
        for name in ("stop_token_ids", "logprob_token_ids", "allowed_token_ids"):
            for token in getattr(params, name):
                self._check_token(name, token)
        _check_count("bad_words", params.bad_words, 2 * MAX_BAD_WORDS)
        for word in params.bad_words:
            if not word:
                raise RequestError("bad_words must hold words of at least one token.", param="bad_words")
            for token in word:
                self._check_token("bad_words", token)
        for token, bias in params.logit_bias:
            self._check_token("logit_bias", token)
            _check_number("logit_bias", bias, float, -100, 100)

    def _check_token(self, field: str, token: int) -> None:
        if type(token) is not int or not 0 <= token < self.vocab_size:
            raise _out_of_bounds(field, token, f"a token id from 0 to {self.vocab_size - 1}")


def _wrapped(seed: int) -> int:
    """Wrap a seed into the range of signed 64-bit integers."""
    return (seed - MIN_SEED) % (1 << 64) + MIN_SEED


def token_array(ids: Sequence[int]) -> array[int]:
    """Convert token ids to the form of ``TextRequest.tokens``.

    Raises RequestError for an entry that is not a token id.
    """
    try:
        if isinstance(ids, bytes) or bool in map(type, ids):
            raise TypeError("bytes and booleans are not token ids")
        return array("i", ids)
    except (TypeError, OverflowError):
        raise RequestError("A prompt of tokens must be a list of token ids.", param="prompt") from None


def spellings_of_bad_words(words: Sequence[str]) -> list[str]:
    """Return the texts whose tokens are banned for bad words: each word without and with a space before it, as in vLLM.

    Raises:
        RequestError: there are too many words, or a word is too long or consists of white space only.
    """
    if isinstance(words, str) or not all(isinstance(each, str) for each in words):
        raise RequestError("bad_words must be a list of strings.", param="bad_words")
    _check_count("bad_words", tuple(words), MAX_BAD_WORDS)
    for word in words:
        if len(word) > MAX_BAD_WORD_LENGTH:
            raise _out_of_bounds("bad_words", f"{len(word)} characters long", f"at most {MAX_BAD_WORD_LENGTH}")
        if not word.strip():
            raise RequestError("bad_words must hold words with more than white space.", param="bad_words")
    return [space + word.lstrip() for word in words for space in ("", " ")]


def check_parameter(name: str, value: object) -> None:
    """Raise RequestError if the value of a numeric field of ``SamplingParams`` is out of bounds."""
    _check_number(name, value, *_BOUNDS[name])


def _check_number(name: str, value: object, kind: type[int] | type[float], low: float, high: float | None) -> None:
    """Raise RequestError if ``value`` is not a number of ``kind`` within the bounds."""
    if value is None and name in _OPTIONAL:
        return
    fits = isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
    if not fits:
        what = "an integer" if kind is int else "a number"
        raise _out_of_bounds(name, value, f"{what}, {_bounds(name, low, high)}")
    assert isinstance(value, (int, float))
    inside = value > low if name in _ABOVE_LOW else value >= low
    if not (inside and (high is None or value <= high) and value != math.inf):
        raise _out_of_bounds(name, value, _bounds(name, low, high))


def _bounds(name: str, low: float, high: float | None) -> str:
    return f"{'above' if name in _ABOVE_LOW else 'at least'} {low}" + ("" if high is None else f" and at most {high}")


def _check_kinds(request: TextRequest) -> None:
    """Raise RequestError for a field whose type is wrong, because Python callers may pass any type."""
    kinds: dict[str, tuple[object, type]] = {
        "params": (request.params, SamplingParams),
        "session": (request.session, str),
    }
    if request.grammar is not None:
        kinds["grammar"] = (request.grammar, GrammarSpec)
    for name, (value, kind) in kinds.items():
        if not isinstance(value, kind):
            raise RequestError(f"{name} must be of type {kind.__name__}, not {type(value).__name__}.", param=name)


def _check_count(name: str, values: tuple[object, ...], most: int) -> None:
    if len(values) > most:
        raise _out_of_bounds(name, f"{len(values)} entries", f"at most {most} entries")


def _check_scored(params: SamplingParams, num_prompt: int) -> None:
    """Raise RequestError if ``logprob_start_len`` leaves no token of the prompt to score."""
    start = params.logprob_start_len
    if start and params.prompt_logprobs is None:
        raise RequestError("logprob_start_len needs logprobs of the prompt.", param="logprob_start_len")
    if start and start >= num_prompt:
        raise _out_of_bounds("logprob_start_len", start, f"less than the prompt's {num_prompt} tokens")


def _check_stops(stops: tuple[str, ...]) -> None:
    _check_count("stop", stops, MAX_STOPS)
    for stop in stops:
        if not isinstance(stop, str):
            raise _out_of_bounds("stop", stop, "a string or a list of strings")
        if not 1 <= len(stop) <= MAX_STOP_LENGTH:
            raise _out_of_bounds("stop", f"a string of {len(stop)} characters", f"1 to {MAX_STOP_LENGTH} characters")


def _out_of_bounds(name: str, value: object, right: str) -> RequestError:
    return RequestError(f"{name} must be {right}, not {shortened(str(value))}.", param=name)
