"""What the two processes say to each other: small messages, in msgpack, never pickle.

    to the engine:    TokenTexts, Submit, Abort, LoadAdapter, UnloadAdapter, ListAdapters, TakeSnapshot, Shutdown
    from the engine:  Ready, then TokenOut, Done, Failed, AdapterChanged, Reply, Adapters, SnapshotTaken, Heartbeat

Every ``Submit`` ends in exactly one ``Done`` or ``Failed``; an ``Abort`` of a sequence that has ended is ignored.
Every ``LoadAdapter`` and ``UnloadAdapter`` is answered by one ``Reply``, every ``ListAdapters`` by one ``Adapters``,
every ``TakeSnapshot`` by one ``SnapshotTaken``.
A frame on the socket is a list of messages: what belongs to one step travels together. A message is the array
``[tag, field, field, ...]`` in the order of its dataclass's fields.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast, get_args

import msgpack

from .errors import EngineError, GrammarRefused, RequestError
from .snapshot import EngineSnapshot, NamespaceView, NodeView, SequenceView, SlotView
from .types import AdapterInfo, FinishReason, Logprob, Priority, SamplingParams, Usage


@dataclass(frozen=True, slots=True)
class TokenTexts:
    """What the tokens are as bytes, which grammars need to know. Sent once, before the first ``Submit`` with one.

    Attributes:
        lengths: bytes of each token, ``array('i')``.
        data: the bytes of all tokens, one after the other.
        special: ids of tokens that are no text.
    """

    lengths: array[int]
    data: bytes
    special: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Submit:
    """Start one sequence. ``id`` is the client's, unique among its live sequences.

    Attributes:
        tokens: the prompt, ``array('i')``, at least one token, checked against the vocabulary.
        grammar: kind and content of the ``GrammarSpec`` that the answer follows, None for free text.
        adapter: name of an adapter, None for the base model.
        salt: sets its KV apart from that of other salts of the same ``cache_tenant``.
        tenant: whose share of the engine it uses up.
        cache_tenant: who alone may share its KV; "" is a tenant like any other here.
        priority: its band in the queue.
        session: name of a session of the tenant's, whose next call will go on from this one; "" for none.
        pin_seconds: how long its prompt is to stay in the cache, 0 for no longer than others.
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


@dataclass(frozen=True, slots=True)
class Abort:
    """The client no longer wants these sequences. No answer follows but their ``Done`` with reason abort."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Leave the loop after the running step; sequences still alive get ``Failed``."""


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Load an adapter under a name. ``id`` is the client's, unique among its calls that have no answer yet.

    Attributes:
        path: its folder, below the folder of adapters if there is one.
        replace: the name may be in use; sequences that come later then get the new version.
    """

    id: int
    name: str
    path: str
    replace: bool = False


@dataclass(frozen=True, slots=True)
class UnloadAdapter:
    """Let a name stand for nothing. Sequences that use the adapter go on to their end."""

    id: int
    name: str


@dataclass(frozen=True, slots=True)
class ListAdapters:
    """Tell all adapters as they stand."""

    id: int


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Show yourself as you stand."""

    id: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine is up. Facts that only it knows.

    Attributes:
        summary: lines for the log: device, dtype, pool size, threads.
        adapters: those that were loaded at the start.
    """

    max_model_len: int
    vocab_size: int
    num_pages: int
    page_size: int
    summary: tuple[str, ...]
    adapters: tuple[AdapterInfo, ...] = ()


@dataclass(slots=True)
class TokenOut:
    """New tokens of one sequence. A token that ends it is not among them: ``Done.stop_token`` names it.

    Nobody changes one. It is not frozen because there is one for each token, and frozen ones take four times as long
    to make.
    """

    id: int
    tokens: tuple[int, ...]
    logprobs: tuple[Logprob, ...] = ()
    prompt_logprobs: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Done:
    """The sequence has ended.

    Attributes:
        stop_token: the token that ended it (the model's own end token or one of ``stop_token_ids``), else None. It
            counts as a completion token but is part of no ``TokenOut``.
    """

    id: int
    reason: FinishReason
    usage: Usage
    stop_token: int | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The sequence was refused or broke. ``kind`` names the class in ``errors`` that the client raises.

    Attributes:
        refusal: keyword, JSON Pointer and reason of a grammar that is refused.
    """

    id: int
    kind: str
    message: str
    param: str | None = None
    code: str | None = None
    refusal: tuple[str, str, str] | None = None


@dataclass(frozen=True, slots=True)
class AdapterChanged:
    """A name stands for something new, or for nothing (None)."""

    name: str
    info: AdapterInfo | None


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a call about adapters: it is done, or why it cannot be."""

    id: int
    failure: Failed | None


@dataclass(frozen=True, slots=True)
class Adapters:
    """The answer to ``ListAdapters``, in order of the names' first load."""

    id: int
    adapters: tuple[AdapterInfo, ...]


@dataclass(frozen=True, slots=True)
class SnapshotTaken:
    """The answer to ``TakeSnapshot``."""

    id: int
    snapshot: EngineSnapshot


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The step loop is alive. Sent at least twice a second while it is; carries the gauges and counters.

    Attributes:
        stats: flat name -> number, names as in ``stats.EngineStats``.
        histograms: name -> observations since the last heartbeat.
    """

    stats: dict[str, float]
    histograms: dict[str, list[float]]


Message = (
    TokenTexts
    | Submit
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
_VALUES = (SamplingParams, Logprob, Usage, AdapterInfo, EngineSnapshot, NamespaceView, NodeView, SequenceView, SlotView)
_FIELDS = {cls: tuple(f.name for f in fields(cls)) for cls in (*_TYPES, *_VALUES)}


def failure_of(number: int, error: EngineError) -> Failed:
    """A refusal as the client is told of it."""
    param, code = (error.param, error.code) if isinstance(error, RequestError) else (None, None)
    refusal = (error.keyword, error.pointer, error.reason) if isinstance(error, GrammarRefused) else None
    return Failed(number, type(error).__name__, str(error), param=param, code=code, refusal=refusal)


def _plain(value: Any) -> Any:
    """msgpack's ``default``: an array becomes its bytes, a value type the list of its fields."""
    if isinstance(value, array):
        return value.tobytes()
    return [getattr(value, name) for name in _FIELDS[type(value)]]


def encode(messages: Sequence[Message]) -> bytes:
    """One frame. Raises TypeError for anything that is not a message."""
    rows = [[_TAGS[type(m)], *(getattr(m, name) for name in _FIELDS[type(m)])] for m in messages]
    return cast(bytes, msgpack.packb(rows, default=_plain))


def _logprobs(rows: list[list[Any]]) -> tuple[Logprob, ...]:
    return tuple(Logprob(t, lp, rank, tuple((i, v) for i, v in top)) for t, lp, rank, top in rows) if rows else ()


def _params(row: list[Any]) -> SamplingParams:
    values = dict(zip(_FIELDS[SamplingParams], row, strict=True))
    values["stop_token_ids"] = tuple(values["stop_token_ids"])
    values["logit_bias"] = tuple((i, b) for i, b in values["logit_bias"])
    return SamplingParams(**values)


def _tokens(data: bytes) -> array[int]:
    tokens = array("i")
    tokens.frombytes(data)
    return tokens


def _infos(rows: list[list[Any]]) -> tuple[AdapterInfo, ...]:
    return tuple(AdapterInfo(*row) for row in rows)


def _snapshot(row: list[Any]) -> EngineSnapshot:
    values = dict(zip(_FIELDS[EngineSnapshot], row, strict=True))
    values["namespaces"] = tuple(NamespaceView(*each) for each in values["namespaces"])
    values["nodes"] = tuple(NodeView(*each) for each in values["nodes"])
    values["sequences"] = tuple(SequenceView(*each) for each in values["sequences"])
    values["adapters"] = _infos(values["adapters"])
    values["slots"] = tuple(SlotView(*each) for each in values["slots"])
    return EngineSnapshot(**values)


# How the fields that msgpack cannot rebuild by itself are rebuilt, by message and field.
_REBUILD: dict[tuple[type[Any], str], Callable[[Any], Any]] = {
    (TokenTexts, "lengths"): _tokens,
    (TokenTexts, "special"): tuple,
    (Submit, "tokens"): _tokens,
    (Submit, "grammar"): lambda pair: tuple(pair) if pair else None,
    (Submit, "params"): _params,
    (Submit, "priority"): Priority,
    (Abort, "ids"): tuple,
    (Ready, "summary"): tuple,
    (Ready, "adapters"): _infos,
    (TokenOut, "tokens"): tuple,
    (TokenOut, "logprobs"): _logprobs,
    (TokenOut, "prompt_logprobs"): _logprobs,
    (Done, "reason"): FinishReason,
    (Done, "usage"): lambda row: Usage(*row),
    (Failed, "refusal"): lambda parts: tuple(parts) if parts else None,
    (AdapterChanged, "info"): lambda row: AdapterInfo(*row) if row else None,
    (Reply, "failure"): lambda row: Failed(*row) if row else None,
    (Adapters, "adapters"): _infos,
    (SnapshotTaken, "snapshot"): _snapshot,
}
# The same by place in the row: a row comes for each token.
_REBUILD_AT = {
    cls: [(place, _REBUILD[cls, name]) for place, name in enumerate(_FIELDS[cls]) if (cls, name) in _REBUILD]
    for cls in _TYPES
}


def decode(frame: bytes) -> list[Message]:
    """The messages of a frame that ``encode`` made. Raises ValueError for anything else."""
    try:
        return [_decode_one(row) for row in msgpack.unpackb(frame)]
    except (TypeError, IndexError, KeyError) as error:
        raise ValueError("not a frame of messages") from error


def _decode_one(row: list[Any]) -> Message:
    tag, *values = row
    cls = _TYPES[tag]
    if len(values) != len(_FIELDS[cls]):
        raise ValueError(f"a {cls.__name__} with {len(values)} fields")
    for place, rebuild in _REBUILD_AT[cls]:
        values[place] = rebuild(values[place])
    return cast(Message, cls(*values))
