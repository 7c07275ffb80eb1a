"""Messages between the API and the engine process, encoded with msgpack.

    to the engine:    TokenTexts, ForgetTokens, Submit, PrepareGrammar, Abort, LoadAdapter, UnloadAdapter, ListAdapters,
                      TakeSnapshot, Shutdown
    from the engine:  Ready, then TokenOut, Done, Failed, AdapterChanged, Reply, Adapters, SnapshotTaken, Heartbeat

Every ``Submit`` ends in exactly one ``Done`` or ``Failed``; an ``Abort`` of a sequence that has ended is ignored.
``LoadAdapter`` and ``UnloadAdapter`` are answered by ``Reply``, ``ListAdapters`` by ``Adapters``, ``TakeSnapshot`` by
``SnapshotTaken``. A frame is a list of messages, those of a step together. A message is the array
``[tag, field, field, ...]`` in the order of its dataclass's fields.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, cast, get_args

import msgpack

from ..grammar.thought_rules import ThoughtRules
from .errors import EngineError, GrammarRefused, RequestError
from .snapshot import EngineSnapshot, NamespaceView, NodeView, SequenceView, SlotView
from .types import AdapterInfo, FinishReason, Logprob, Pooler, Priority, SamplingParams, SequenceStats, Usage


@dataclass(frozen=True, slots=True)
class TokenTexts:
    """A vocabulary as bytes, for grammars. Sent once, before the first ``Submit`` with a grammar over it.

    Attributes:
        lengths: bytes of each token, ``array('i')``.
        data: the bytes of all tokens, one after the other.
        special: ids of special tokens, which are no text.
        vocabulary: key of the tokenizer of an adapter, "" for the model's own.
        ends: tokens that end an answer, beside the model's.
    """

    lengths: array[int]
    data: bytes
    special: tuple[int, ...]
    vocabulary: str = ""
    ends: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ForgetTokens:
    """Give up the bytes of a vocabulary that no later ``Submit`` uses before they are sent again."""

    vocabulary: str


@dataclass(frozen=True, slots=True)
class Submit:
    """Start one sequence. ``id`` is the client's, unique among its live sequences.

    Attributes:
        tokens: the prompt, ``array('i')``, at least one token, checked against the vocabulary.
        grammar: kind and content of the output's ``GrammarSpec``, None for free text.
        adapter: name of an adapter, None for the base model.
        salt: separates its KV from that of other salts of the same ``cache_tenant``.
        tenant: whose share of the engine it uses.
        cache_tenant: the tenant that may share its KV; "" is a tenant like any other.
        priority: its priority class in the queue.
        session: name of the tenant's session whose call it is; "" for none.
        pin_seconds: how long its prompt is to be pinned, 0 for not at all.
        prefix_pins: beginnings of the prompt that are to be pinned: (tokens, seconds).
        reasoning: the thought before the answer, None where there is none or nothing depends on its end.
        generated: the first tokens of its output, ``array('i')``, which another engine drew and sent: the sequence goes
            on after them, with the tokens that the other would have drawn next. Fewer than ``params.max_tokens``.
        vocabulary: of the grammar, as in ``TokenTexts``.
        ends: tokens that end an answer, beside the model's: of an adapter's own tokenizer.
        tokenizer: identity of the tokenizer that its adapter must have, which made its tokens; "" for the model's.
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
    pin_seconds: float = 0.0
    prefix_pins: tuple[tuple[int, float], ...] = ()
    reasoning: ThoughtRules | None = None
    generated: array[int] = field(default_factory=lambda: array("i"))
    vocabulary: str = ""
    ends: tuple[int, ...] = ()
    tokenizer: str = ""


@dataclass(frozen=True, slots=True)
class PrepareGrammar:
    """Compile a grammar ahead of sequences that may come. Not answered, and ignored where many wait to be compiled."""

    kind: str
    content: bytes
    vocabulary: str = ""


@dataclass(frozen=True, slots=True)
class Abort:
    """End sequences. Each is answered by ``Done`` with reason abort."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Leave the step loop after the running step; live sequences get ``Failed``."""


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Load an adapter under a name. ``id`` is the client's, unique among its unanswered calls.

    Attributes:
        path: its folder, below the folder of adapters unless it is trusted, as that of a downloaded adapter.
        replace: whether the name may be in use; later sequences then get the new version.
        num_tokens: of the tokenizer in the folder, for which an embedding of its own must have rows; 0 without one.
        of: the name that it is a version of, with which it counts as one name; "" for ``name``.
    """

    id: int
    name: str
    path: str
    replace: bool = False
    trusted: bool = False
    num_tokens: int = 0
    of: str = ""


@dataclass(frozen=True, slots=True)
class UnloadAdapter:
    """Unload a name. Running sequences keep the adapter until they end."""

    id: int
    name: str


@dataclass(frozen=True, slots=True)
class ListAdapters:
    """List all adapters and their state."""

    id: int


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Take a debug snapshot."""

    id: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine is ready, with its derived limits.

    Attributes:
        summary: lines for the log: device, dtype, pool size, threads.
        adapters: loaded at the start.
        base_digest: of the base model: replicas with the same one answer for each other.
        pooler: what it gives beside tokens.
    """

    max_model_len: int
    vocab_size: int
    num_pages: int
    page_size: int
    summary: tuple[str, ...]
    adapters: tuple[AdapterInfo, ...] = ()
    base_digest: str = ""
    pooler: Pooler = field(default_factory=Pooler)


@dataclass(slots=True)
class TokenOut:
    """New tokens of one sequence, without a stop token that ends it: see ``Done.stop_token``.

    ``is_limited``: without a budget of tokens the model would have drawn another one for one of them.
    ``pooled``: 32-bit floats, where ``SamplingParams.pooling`` asks for them.

    Immutable by convention: a frozen dataclass takes four times as long to make, and there is one for each token.
    """

    id: int
    tokens: tuple[int, ...]
    logprobs: tuple[Logprob, ...] = ()
    prompt_logprobs: tuple[Logprob, ...] = ()
    is_limited: bool = False
    pooled: bytes = b""


@dataclass(frozen=True, slots=True)
class Done:
    """The sequence has ended.

    Attributes:
        stop_token: the stop token that ended it, else None: a completion token that is in no ``TokenOut``.
        stats: what the engine measured of it; None if it was never admitted.
        is_limited: whether the budget of tokens has ended the answer of a grammar: in its last step as in ``TokenOut``,
            or because a complete answer that could go on has used it up.
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


@dataclass(frozen=True, slots=True)
class AdapterChanged:
    """An adapter was loaded, replaced, or unloaded (None)."""

    name: str
    info: AdapterInfo | None


@dataclass(frozen=True, slots=True)
class Reply:
    """Result of ``LoadAdapter`` or ``UnloadAdapter``: None if done."""

    id: int
    failure: Failed | None


@dataclass(frozen=True, slots=True)
class Adapters:
    """Result of ``ListAdapters``, in order of the names' first load."""

    id: int
    adapters: tuple[AdapterInfo, ...]


@dataclass(frozen=True, slots=True)
class SnapshotTaken:
    """Result of ``TakeSnapshot``."""

    id: int
    snapshot: EngineSnapshot


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Gauges and counters, sent between two steps, at least twice a second while steps are short.

    One is also sent before a step that computes what ``waiting`` has named: what it names last no step has computed.

    Attributes:
        stats: name -> number, names as in ``EngineStats``.
        histograms: name -> observations since the last heartbeat.
        adapters: names of adapters that have running and that have waiting sequences, in order.
        waiting: sequences in the queue, and those whose grammar is being compiled.
    """

    stats: dict[str, float]
    histograms: dict[str, list[float]]
    adapters: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    waiting: tuple[int, ...] = ()


Message = (
    TokenTexts
    | ForgetTokens
    | Submit
    | PrepareGrammar
    | Abort
    | LoadAdapter
    | UnloadAdapter
    | ListAdapters
    | TakeSnapshot
    | Shutdown
    | Ready
    | TokenOut
    | Done
    | Failed
    | AdapterChanged
    | Reply
    | Adapters
    | SnapshotTaken
    | Heartbeat
)

_TYPES: tuple[type[Any], ...] = get_args(Message)
_TAGS = {cls: tag for tag, cls in enumerate(_TYPES)}
_VALUES = (
    *(SamplingParams, ThoughtRules, Logprob, Usage, SequenceStats, AdapterInfo, Pooler),
    *(EngineSnapshot, NamespaceView, NodeView, SequenceView, SlotView),
)
_FIELDS = {cls: tuple(f.name for f in fields(cls)) for cls in (*_TYPES, *_VALUES)}


def failure_of(number: int, error: EngineError) -> Failed:
    """Return the message of an error for the client."""
    param, code = (error.param, error.code) if isinstance(error, RequestError) else (None, None)
    refusal = (error.keyword, error.pointer, error.reason) if isinstance(error, GrammarRefused) else None
    return Failed(number, type(error).__name__, str(error), param=param, code=code, refusal=refusal)


def _plain(value: Any) -> Any:
    """msgpack's ``default``: arrays as bytes, value types as lists of their fields."""
    if isinstance(value, array):
        return value.tobytes()
    return [getattr(value, name) for name in _FIELDS[type(value)]]


def encode(messages: Sequence[Message]) -> bytes:
    """Encode one frame. TypeError for anything but messages."""
    rows = [[_TAGS[type(m)], *(getattr(m, name) for name in _FIELDS[type(m)])] for m in messages]
    return cast(bytes, msgpack.packb(rows, default=_plain))


def _logprobs(rows: list[list[Any]]) -> tuple[Logprob, ...]:
    return tuple(Logprob(t, lp, rank, tuple((i, v) for i, v in top)) for t, lp, rank, top in rows) if rows else ()


def _params(row: list[Any]) -> SamplingParams:
    values = dict(zip(_FIELDS[SamplingParams], row, strict=True))
    for name in ("stop_token_ids", "logprob_token_ids", "allowed_token_ids"):
        values[name] = tuple(values[name])
    values["logit_bias"] = tuple((i, b) for i, b in values["logit_bias"])
    return SamplingParams(**values)


def _tokens(data: bytes) -> array[int]:
    return array("i", data)


def _infos(rows: list[list[Any]]) -> tuple[AdapterInfo, ...]:
    return tuple(AdapterInfo(*row) for row in rows)


def _pooler(row: list[Any]) -> Pooler:
    values = dict(zip(_FIELDS[Pooler], row, strict=True))
    values["labels"] = tuple(values["labels"])
    values["prompts"] = tuple((name, text) for name, text in values["prompts"])
    return Pooler(**values)


def _snapshot(row: list[Any]) -> EngineSnapshot:
    values = dict(zip(_FIELDS[EngineSnapshot], row, strict=True))
    values["namespaces"] = tuple(NamespaceView(*each) for each in values["namespaces"])
    values["nodes"] = tuple(NodeView(*each) for each in values["nodes"])
    values["sequences"] = tuple(SequenceView(*each) for each in values["sequences"])
    values["adapters"] = _infos(values["adapters"])
    values["slots"] = tuple(SlotView(*each) for each in values["slots"])
    return EngineSnapshot(**values)


# Decoders of fields that msgpack cannot restore by itself, by message and field.
_DECODERS: dict[tuple[type[Any], str], Callable[[Any], Any]] = {
    **dict.fromkeys(((TokenTexts, "lengths"), (Submit, "tokens"), (Submit, "generated")), _tokens),
    **dict.fromkeys(((TokenTexts, "special"), (TokenTexts, "ends"), (Submit, "ends"), (Abort, "ids")), tuple),
    **dict.fromkeys(((Ready, "summary"), (TokenOut, "tokens"), (Heartbeat, "waiting")), tuple),
    (Submit, "grammar"): lambda pair: tuple(pair) if pair else None,
    (Submit, "params"): _params,
    (Submit, "priority"): Priority,
    (Submit, "prefix_pins"): lambda rows: tuple((tokens, seconds) for tokens, seconds in rows),
    (Submit, "reasoning"): lambda row: ThoughtRules(*row) if row else None,
    (Ready, "adapters"): _infos,
    (Ready, "pooler"): _pooler,
    (TokenOut, "logprobs"): _logprobs,
    (TokenOut, "prompt_logprobs"): _logprobs,
    (Done, "reason"): FinishReason,
    (Done, "usage"): lambda row: Usage(*row),
    (Done, "stats"): lambda row: SequenceStats(*row) if row else None,
    (Heartbeat, "adapters"): lambda rows: tuple(map(tuple, rows)),
    (Failed, "refusal"): lambda parts: tuple(parts) if parts else None,
    (AdapterChanged, "info"): lambda row: AdapterInfo(*row) if row else None,
    (Reply, "failure"): lambda row: Failed(*row) if row else None,
    (Adapters, "adapters"): _infos,
    (SnapshotTaken, "snapshot"): _snapshot,
}
# The same by index in the row, for speed: there is a row for each token.
_DECODERS_AT = {
    cls: [(index, _DECODERS[cls, name]) for index, name in enumerate(_FIELDS[cls]) if (cls, name) in _DECODERS]
    for cls in _TYPES
}


def decode(frame: bytes) -> list[Message]:
    """Decode a frame of ``encode``. ValueError for anything else."""
    try:
        return [_decode_one(row) for row in msgpack.unpackb(frame)]
    except (TypeError, IndexError, KeyError) as error:
        raise ValueError("not a frame of messages") from error


def _decode_one(row: list[Any]) -> Message:
    tag, *values = row
    cls = _TYPES[tag]
    if len(values) != len(_FIELDS[cls]):
        raise ValueError(f"a {cls.__name__} with {len(values)} fields")
    for index, decoder in _DECODERS_AT[cls]:
        values[index] = decoder(values[index])
    return cast(Message, cls(*values))
