"""Value types of requests and results: sampling parameters, finish reasons, logprobs, usage, adapter info, prefixes.

All are built from ints, floats, strings, tuples and arrays, so that ``messages`` can encode them.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from typing import Final, Literal

from ..radix.namespace import Path
from .sampling_options import SamplingNumbers

MAX_LOGPROBS = 20
MIN_SEED, MAX_SEED = -(1 << 63), (1 << 63) - 1
MAX_TOKEN_COUNT = (1 << 63) - 1
"""Largest limit in tokens. A limit above the model's length, such as ``sys.maxsize``, means as many as fit."""
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 300
MAX_LOGPROB_TOKEN_IDS = 512
MAX_ALLOWED_TOKEN_IDS = 4096
MAX_BAD_WORDS = 256
MAX_BAD_WORD_LENGTH = 256
MAX_ALLOWED_LOGPROBS = 2048
MAX_SESSION_NAME = 256
MAX_PIN_SECONDS = 86400.0
SESSION_SECONDS = 300.0
"""Seconds for which a session's KV is kept after its last call, if the call does not set another time."""
MAX_PREFIX_PINS = 4
CALIBRATION_NAME: Final = r"[A-Za-z0-9_@:-][A-Za-z0-9._@:-]{0,63}"
"""Pattern of the names of calibrations, which are also names of files."""


class FinishReason(StrEnum):
    """Reason for the end of a sequence."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    TIMEOUT = "timeout"


Pooling = Literal["", "embed", "classify"]
PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]


@dataclass(frozen=True, slots=True)
class Pooler:
    """The outputs other than tokens that a model offers, according to its checkpoint's files.

    Attributes:
        generates: whether it has a language head.
        size: number of values of an embedding.
        modes: how hidden states become the embedding, in sentence-transformers' terms; the results of several are
            joined.
        includes_prompt: whether the tokens of a prompt before a text are pooled too.
        labels: names of the classes of its classification head; empty without a head.
        is_multi_label: whether classes are independent of each other.
        is_raw_score: whether the score of a pair of texts by a head of one class is its logit instead of a probability.
        is_embedder: whether the checkpoint has the files of an embedder of sentence-transformers.
        refusal: why its embeddings cannot be computed; "" if they can.
        normalizes: whether embeddings are scaled to length 1.
        prompts: texts that are put before a text to embed, by name.
        default_prompt: name of the prompt that is used if a request names none; "" for none.
        max_length: largest number of tokens of a text, 0 for the model's length.
    """

    generates: bool = True
    size: int = 0
    modes: tuple[PoolingMode, ...] = ("lasttoken",)
    includes_prompt: bool = True
    labels: tuple[str, ...] = ()
    is_multi_label: bool = False
    is_raw_score: bool = False
    is_embedder: bool = False
    refusal: str = ""
    normalizes: bool = True
    prompts: tuple[tuple[str, str], ...] = ()
    default_prompt: str = ""
    max_length: int = 0

    @property
    def pools_all(self) -> bool:
        """Whether an embedding needs the hidden states of all tokens, and not only that of the last one."""
        return self.modes != ("lasttoken",)

    def with_head(self, num_classes: int) -> Pooler:
        """Return what an adapter offers whose own classification head has ``num_classes`` rows, 0 without one.

        An adapter's files name no classes: a head as wide as the model's has the model's names, as in PEFT.
        """
        if num_classes in (0, len(self.labels)):
            return self
        labels = tuple(f"LABEL_{index}" for index in range(num_classes))
        return replace(self, labels=labels, generates=False)


class Priority(IntEnum):
    """Priority class: no sequence of a later class is admitted while one of an earlier class waits and fits.

    A sequence that has waited for long moves to the first class: see ``WaitingQueue``.
    """

    REALTIME = 0
    INTERACTIVE = 1
    BATCH = 2


@dataclass(frozen=True, slots=True)
class SamplingParams(SamplingNumbers):
    """Sampling parameters of one sequence. ``RequestLimits`` checks them; lower layers do not check again.

    They are applied in a fixed order: grammar mask, ``allowed_token_ids``, ``logit_bias``, penalties, ``min_tokens``
    and ``bad_words``, temperature, filters (``engine.sampling.top_k_top_p``), draw. Logprobs belong to the raw
    distribution, before any of these (vLLM's ``raw_logprobs``).

    Attributes:
        max_tokens: largest number of tokens to generate, at least 1; "as many as fit" is resolved before.
        seed: any 64-bit integer, which gives the same draws in any batch; None for a seed that the engine chooses.
        stop_token_ids: tokens that end the sequence like the model's own end tokens. ``ignore_eos`` does not affect
            them.
        logit_bias: (token id, bias) pairs, biases in [-100, 100].
        logprobs: number k of most likely tokens (0 to 20) whose logprobs are returned with that of the drawn token;
            None for no logprobs.
        prompt_logprobs: the same number for prompt tokens (the first one has no logprob).
        logprob_start_len: number of leading prompt tokens without ``prompt_logprobs``, whose KV may come from the
            prefix cache (as in SGLang); 0 and 1 are the same.
        logprob_token_ids: tokens whose logprobs are returned in place of the k best at each drawn position (vLLM's
            field).
        allowed_token_ids: the only tokens that may be drawn; None for all.
        bad_words: words as tokens. The last token of one is not drawn where the answer ends with the tokens before it.
        allowed_logprobs: whether to return ``AllowedLogprobs`` at each drawn position.
        pooling: the kind of output in place of tokens: pooled hidden states of the prompt, or the classification head's
            logits of the last hidden state; "" for tokens. One token is drawn nevertheless, and is not used.
        pooled_from: number of leading prompt tokens whose hidden states are not pooled.
        num_label: number of prompt tokens at the end that are a label whose logprobs are read. The invocation of an
            activated LoRA is sought only in the tokens before them, which are what the client has asked.
    """

    max_tokens: int = 16
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_start_len: int = 0
    logprob_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_logprobs: bool = False
    pooling: Pooling = ""
    pooled_from: int = 0
    num_label: int = 0

    @property
    def needs_counts(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)


@dataclass(frozen=True, slots=True)
class SamplingDefaults(SamplingNumbers):
    """Sampling parameters of requests that set none: the neutral ones, or those that the model's publisher recommends.

    Attributes:
        max_tokens: largest number of tokens of an answer. None for the default of ``SamplingParams`` offline, and for
            as many as fit in a chat.
    """

    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probabilities at one position.

    Attributes:
        token: the token at the position.
        logprob: natural logarithm of its probability.
        rank: 1 for the most likely token.
        top: the k best as (token, logprob), best first; with ``logprob_token_ids``, these tokens in their order.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class AllowedLogprobs:
    """Log-probabilities, at one position, of the tokens that the grammar's mask allows, relative to all allowed tokens.

    They belong to the raw distribution, before bias, penalties and temperature, without the tokens that the mask
    forbids.

    Attributes:
        token: the drawn token.
        ids: int32, the likeliest tokens, at most ``MAX_ALLOWED_LOGPROBS``; empty without a mask.
        logprobs: float32, natural logarithms of their probabilities.
    """

    token: int
    ids: bytes
    logprobs: bytes


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one sequence.

    Attributes:
        prompt: tokens of the prompt.
        cached: prompt tokens found in the prefix cache at first admission.
        completion: generated tokens.
        shortest: tokens of the shortest output that the grammar permits; None without a grammar, for free text with
            structured parts, and if none was found.
        drafted: generated tokens that were accepted drafts, and so took no step of their own.
        forced: generated tokens without a choice under the grammar; some may be drafted as well.
        forked: cached tokens that another running sequence shared at admission.
        pinned: prompt tokens pinned in the prefix cache at the end; whole pages.
        reasoning: generated tokens of the thought, without its marks; counted in the API process.
    """

    prompt: int
    cached: int
    completion: int
    shortest: int | None = None
    drafted: int = 0
    forced: int = 0
    forked: int = 0
    pinned: int = 0
    reasoning: int = 0


@dataclass(frozen=True, slots=True)
class SequenceStats:
    """Times and sizes of one sequence, measured in the engine. Times are in seconds, for vLLM's intervals.

    Attributes:
        queued: seconds from its arrival to its first step, including the compile of its grammar and the load of its
            adapter.
        prefill: seconds from its first step to its first token, or to its end if it has no token.
        decode: seconds from its first token to its end.
        preemptions: number of times that it was sent back to the queue.
        batch_size: mean number of rows in the steps in which it took part.
        kv_pages: number of pages of KV that it used at its end, including shared ones.
    """

    queued: float
    prefill: float
    decode: float
    preemptions: int
    batch_size: float
    kv_pages: int


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """State of an adapter under a name.

    Attributes:
        path: its folder, as given; its source while it is being downloaded.
        state: ``downloading``, ``loading``, ``ready``, or ``draining`` if the name was unloaded or replaced while
            sequences still use the adapter.
        tier: its present memory tier: ``device``, ``host``, ``disk`` or ``source``.
        rank: the largest rank of its modules. This and the following numbers are 0 while it is loading.
        bytes: memory of its factors, and of its own embedding, head and norms.
        activated: whether it is an activated LoRA, which applies from its invocation tokens on.
        pins: number of sequences that use it or wait for it; it is kept until they end.
        running: number of sequences that use it and have a row.
        requests: number of sequences that have named it since the name was loaded.
        hits: number of requests that found it on the device.
        digest: identity of its content; "" while it is loading.
        vocab_size: number of tokens of its own vocabulary, 0 for the base model's.
        loaded: time of its load in seconds since 1970; distinguishes two loads of the same content.
        num_classes: number of rows of its own classification head, 0 for the base model's.
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
    digest: str = ""
    vocab_size: int = 0
    loaded: float = 0.0
    num_classes: int = 0


@dataclass(frozen=True, slots=True)
class KvPrefix:
    """A prefix that is in the prefix cache.

    Attributes:
        path: its namespaces.
        tokens: its tokens, ``array('i')``.
        first: index of its first page that is not part of an earlier prefix in the list.
        adapter: the name of its adapter; None for the base model.
    """

    path: Path
    tokens: array[int]
    first: int
    adapter: str | None
