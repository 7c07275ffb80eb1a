"""Small frozen values that travel from a request to the sampler and back: parameters, reasons, logprobs, usage.

Everything here is built from ints, floats, strings and tuples, so that ``messages`` can put it on the wire.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum

MAX_LOGPROBS = 20
MAX_TOP_K = 1 << 20
MAX_SEED = (1 << 63) - 1
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 300
MAX_SESSION_NAME = 256
MAX_PIN_SECONDS = 86400.0


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    TIMEOUT = "timeout"


class Priority(IntEnum):
    """The bands of the queue: nobody of a later one starts while somebody of an earlier one waits and fits.

    A sequence that has waited for long in its band goes over to the first: see ``queue.WaitingQueue``.
    """

    REALTIME = 0
    INTERACTIVE = 1
    BATCH = 2


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one sequence are chosen. Checked by ``Frontend``; trusted below it.

    The order is fixed: grammar mask, ``logit_bias``, penalties, ``min_tokens``, temperature, ``top_k``, ``top_p``,
    ``min_p``, draw. Logprobs are of the raw distribution, before any of these (vLLM's ``raw_logprobs``).

    Attributes:
        max_tokens: most tokens to generate, at least 1. ``Frontend`` has resolved "as many as fit".
        temperature: 0 is greedy.
        top_k: 0 is off. Ties at the k-th logit are all kept.
        seed: None draws from a seed of the engine's own; a given seed gives the same draws in any batch.
        stop_token_ids: end the sequence like the model's own end tokens, unless ``ignore_eos`` is set for those.
        logit_bias: (token id, bias) pairs, biases in [-100, 100].
        logprobs: None for none; k for the chosen token's and the k best (0 to 20).
        prompt_logprobs: the same for the tokens of the prompt (the first has none).
        logprob_start_len: leading tokens of the prompt that ``prompt_logprobs`` leaves out, so that their KV may come
            from the cache (SGLang's field of that name); 0 and 1 are the same.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_start_len: int = 0

    @property
    def needs_counts(self) -> bool:
        """Whether any penalty is on, so that token counts must be kept."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probabilities at one position.

    Attributes:
        token: the token that stands there.
        logprob: its natural logarithm of probability.
        rank: 1 for the most likely token.
        top: the k best as (token, logprob), best first.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one sequence, as counted by the engine.

    Attributes:
        prompt: tokens of the prompt.
        cached: those of them whose KV was found in the prefix cache at first admission.
        completion: generated tokens.
        shortest: generated tokens that the shortest answer takes which the sequence's grammar permits; None without a
            grammar, for free text with structured parts, and where none was found.
        drafted: those of the generated tokens that had been drafted, and so came without a step of their own.
        forced: those of the generated tokens that a grammar left no choice about; some may be drafted as well.
        forked: those of the cached tokens that another running sequence used when this one was admitted.
        pinned: those of the prompt's tokens that its end has pinned in the cache; whole pages.
    """

    prompt: int
    cached: int
    completion: int
    shortest: int | None = None
    drafted: int = 0
    forced: int = 0
    forked: int = 0
    pinned: int = 0


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """What a name stands for.

    Attributes:
        path: its folder, as it was given.
        state: ``loading``; ``ready`` for requests that name it; ``draining`` if the name stands for something else by
            now, or for nothing, and sequences still use it.
        tier: where it is now: ``device``, ``host`` or ``disk``.
        rank: the largest of its modules. Like all that follows, 0 while it is loading.
        bytes: memory of its factors.
        activated: an activated LoRA, which works from its invocation tokens on.
        pins: sequences that use it or wait to; it is kept until they end.
        running: those of them that have a row.
        requests: sequences that have named it since the name was loaded.
        hits: those of them that found it on the device.
    """

    name: str
    path: str
    state: str
    tier: str
    rank: int = 0
    bytes: int = 0
    activated: bool = False
    pins: int = 0
    running: int = 0
    requests: int = 0
    hits: int = 0
