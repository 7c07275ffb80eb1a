"""Codec of the messages: frames in msgpack.

A frame is a list of messages; all messages of a step are in one frame. A message is the array ``[tag, field, field,
...]``, with the fields in the order of its dataclass.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, cast, get_args

import msgpack

from ...grammar.thought_rules import ThoughtRules
from ...radix.namespace import Namespace, Path
from ..snapshot import EngineSnapshot, NamespaceView, NodeView, SequenceView, SlotView
from ..types import (
    AdapterInfo,
    AllowedLogprobs,
    FinishReason,
    KvPrefix,
    Logprob,
    Pooler,
    Priority,
    SamplingParams,
    SequenceStats,
    Usage,
)
from .adapter_calls import AdapterChanged, Adapters, ListAdapters, LoadAdapter, Reply, UnloadAdapter
from .engine_state import Heartbeat, Ready, ResetCache, Shutdown, SnapshotTaken, TakeSnapshot
from .kv_transfers import CachedPrefixes, FetchKv, KvBlocks, ListPrefixes, ReadKv
from .sequences import Abort, Done, Failed, Submit, TokenOut
from .session_calls import ExportSession, ImportSession, ReleaseSession, SessionReply
from .vocabularies import ForgetTokens, PrepareGrammar, TokenTexts

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
    | ResetCache
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
    | FetchKv
    | ReadKv
    | KvBlocks
    | ReleaseSession
    | ExportSession
    | ImportSession
    | SessionReply
    | ListPrefixes
    | CachedPrefixes
)

_TYPES: tuple[type[Any], ...] = get_args(Message)
_TAGS = {cls: tag for tag, cls in enumerate(_TYPES)}
_VALUES = (
    *(SamplingParams, ThoughtRules, Logprob, AllowedLogprobs, Usage, SequenceStats, AdapterInfo, Pooler),
    *(EngineSnapshot, NamespaceView, NodeView, SequenceView, SlotView, Namespace, Path, KvPrefix),
)
_FIELDS = {cls: tuple(f.name for f in fields(cls) if f.init) for cls in (*_TYPES, *_VALUES)}


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


def _allowed(rows: list[list[Any]]) -> tuple[AllowedLogprobs, ...]:
    return tuple(AllowedLogprobs(*row) for row in rows) if rows else ()


def _params(row: list[Any]) -> SamplingParams:
    values = dict(zip(_FIELDS[SamplingParams], row, strict=True))
    for name in ("stop_token_ids", "logprob_token_ids", "allowed_token_ids"):
        values[name] = tuple(values[name])
    values["bad_words"] = tuple(map(tuple, values["bad_words"]))
    values["logit_bias"] = tuple((i, b) for i, b in values["logit_bias"])
    return SamplingParams(**values)


def _tokens(data: bytes) -> array[int]:
    return array("i", data)


def _path(row: list[Any]) -> Path:
    namespace, switch_at, before = row
    return Path(Namespace(*namespace), switch_at, before and Namespace(*before))


def _prefixes(rows: list[list[Any]]) -> tuple[KvPrefix, ...]:
    return tuple(KvPrefix(_path(path), _tokens(tokens), first, adapter) for path, tokens, first, adapter in rows)


def _infos(rows: list[list[Any]]) -> tuple[AdapterInfo, ...]:
    return tuple(AdapterInfo(*row) for row in rows)


def _pooler(row: list[Any]) -> Pooler:
    values = dict(zip(_FIELDS[Pooler], row, strict=True))
    values["labels"], values["modes"] = tuple(values["labels"]), tuple(values["modes"])
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
    **dict.fromkeys(((FetchKv, "tokens"), (ReadKv, "tokens")), _tokens),
    (FetchKv, "path"): _path,
    (ReadKv, "path"): lambda row: _path(row) if row else None,
    (KvBlocks, "blocks"): tuple,
    (CachedPrefixes, "prefixes"): _prefixes,
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
    (TokenOut, "allowed"): _allowed,
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
