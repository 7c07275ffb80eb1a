"""Messages about sequences: their start, their tokens and their end."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from ...grammar.thought_rules import ThoughtRules
from ..errors import EngineError, GrammarRefused, RequestError
from ..types import (
    SESSION_SECONDS,
    AllowedLogprobs,
    FinishReason,
    Logprob,
    Priority,
    SamplingParams,
    SequenceStats,
    Usage,
)


@dataclass(frozen=True, slots=True)
class Submit:
    """Start one sequence. ``id`` is the client's, unique among its live sequences.

    Attributes:
        tokens: the prompt, ``array('i')``, at least one token, checked against the vocabulary.
        grammar: kind and content of the output's ``GrammarSpec``, None for free text.
        adapter: name of an adapter, None for the base model.
        salt: text that separates its KV from KV with other salts of the same ``cache_tenant``.
        tenant: tenant whose share of the engine the sequence uses.
        cache_tenant: the tenant that may share its KV; "" is a tenant like any other.
        priority: its priority class in the queue.
        session: name of the tenant's session to which the sequence belongs; "" for none.
        session_seconds: seconds for which the session is kept after the sequence's end; 0 releases its KV.
        pin_seconds: seconds for which its prompt is to be pinned; 0 for no pin.
        prefix_pins: prefixes of the prompt that are to be pinned, each as (number of tokens, seconds).
        reasoning: the thought before the answer; None if there is none or if nothing depends on where it ends.
        generated: the first tokens of its output, ``array('i')``, which another engine has drawn and sent. The sequence
            continues after them with the tokens that the other engine would have drawn next. Fewer than
            ``params.max_tokens``.
        vocabulary: vocabulary of the grammar, as in ``TokenTexts``.
        ends: end tokens of an adapter's own tokenizer, which end an answer in addition to the model's end tokens.
        tokenizer: identity of the tokenizer that has made the tokens and that its adapter must have; "" for the
            model's.
        peer_tokens: number of its first tokens whose KV another replica probably has, so that it may be requested
            there.
    """

    id: int
    tokens: array[int]
    params: SamplingParams
    adapter: str | None = None
    salt: str = ""
    grammar: tuple[str, bytes] | None = None
    tenant: str = ""
    cache_tenant: str = ""
    priority: Priority = Priority.INTERACTIVE
    session: str = ""
    session_seconds: float = SESSION_SECONDS
    pin_seconds: float = 0.0
    prefix_pins: tuple[tuple[int, float], ...] = ()
    reasoning: ThoughtRules | None = None
    generated: array[int] = field(default_factory=lambda: array("i"))
    vocabulary: str = ""
    ends: tuple[int, ...] = ()
    tokenizer: str = ""
    peer_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Abort:
    """End sequences. Each is answered by ``Done`` with reason abort."""

    ids: tuple[int, ...]


@dataclass(slots=True)
class TokenOut:
    """New tokens of one sequence, without a stop token that ends it: see ``Done.stop_token``.

    ``is_limited`` is true if the token budget (``max_tokens``, the length of the context) has changed a draw: after the
    token that would have been drawn without it, no end of the structured answer would have fitted in the budget.
    ``pooled`` has 32-bit floats if ``SamplingParams.pooling`` requests them. ``allowed`` has an entry for each of
    ``tokens`` and for a stop token after them, if ``SamplingParams.allowed_logprobs`` requests them.

    Instances must not be changed, although the dataclass is not frozen: creating a frozen one takes four times as long,
    and there is one for each token.
    """

    id: int
    tokens: tuple[int, ...]
    logprobs: tuple[Logprob, ...] = ()
    prompt_logprobs: tuple[Logprob, ...] = ()
    is_limited: bool = False
    pooled: bytes = b""
    allowed: tuple[AllowedLogprobs, ...] = ()

    def renumbered(self, number: int) -> TokenOut:
        """Return a copy with the number of another sequence."""
        return TokenOut(
            number, self.tokens, self.logprobs, self.prompt_logprobs, self.is_limited, self.pooled, self.allowed
        )


@dataclass(frozen=True, slots=True)
class Done:
    """The sequence has ended.

    Attributes:
        stop_token: the stop token that ended the sequence, or None. It counts as a completion token, but is not in any
            ``TokenOut``.
        stats: the engine's measurements of the sequence; None if it was never admitted.
        is_limited: whether the token budget has ended an answer under a grammar: either it has changed a draw in the
            last step, as in ``TokenOut``, or it was used up by an answer that was complete but could have continued.
    """

    id: int
    reason: FinishReason
    usage: Usage
    stop_token: int | None = None
    stats: SequenceStats | None = None
    is_limited: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """The sequence was refused or failed. ``kind`` names the class in ``errors`` that the client raises.

    Attributes:
        refusal: keyword, JSON Pointer and reason of a refused grammar.
    """

    id: int
    kind: str
    message: str
    param: str | None = None
    code: str | None = None
    refusal: tuple[str, str, str] | None = None


def failure_of(number: int, error: EngineError) -> Failed:
    """Return the message of an error for the client."""
    param, code = (error.param, error.code) if isinstance(error, RequestError) else (None, None)
    refusal = (error.keyword, error.pointer, error.reason) if isinstance(error, GrammarRefused) else None
    return Failed(number, type(error).__name__, str(error), param=param, code=code, refusal=refusal)
