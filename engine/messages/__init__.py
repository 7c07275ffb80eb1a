"""Messages between the API and the engine process, by subject; users import them from here.

    to the engine:    TokenTexts, ForgetTokens, Submit, PrepareGrammar, Abort, LoadAdapter, UnloadAdapter, ListAdapters,
                      TakeSnapshot, ResetCache, ReadKv, KvBlocks, ListPrefixes, ReleaseSession, ExportSession,
                      ImportSession, Shutdown
    from the engine:  Ready, then TokenOut, Done, Failed, AdapterChanged, Reply, Adapters, SnapshotTaken, Heartbeat,
                      FetchKv, KvBlocks, CachedPrefixes, SessionReply

Every ``Submit`` ends in exactly one ``Done`` or ``Failed``; an ``Abort`` of a sequence that has ended is ignored.
``LoadAdapter``, ``UnloadAdapter`` and ``ResetCache`` are answered by ``Reply``, ``ListAdapters`` by ``Adapters``,
``TakeSnapshot`` by ``SnapshotTaken``, ``FetchKv`` and ``ReadKv`` by ``KvBlocks``, ``ListPrefixes`` by
``CachedPrefixes``; ``ReleaseSession``, ``ExportSession`` and ``ImportSession`` by ``SessionReply``, or ``Reply`` with
their error.
"""

from .adapter_calls import AdapterChanged, Adapters, ListAdapters, LoadAdapter, Reply, UnloadAdapter
from .codec import Message, decode, encode
from .engine_state import Heartbeat, Ready, ResetCache, Shutdown, SnapshotTaken, TakeSnapshot
from .kv_transfers import CachedPrefixes, FetchKv, KvBlocks, ListPrefixes, ReadKv
from .sequences import Abort, Done, Failed, Submit, TokenOut, failure_of
from .session_calls import ExportSession, ImportSession, ReleaseSession, SessionReply
from .vocabularies import ForgetTokens, PrepareGrammar, TokenTexts

__all__ = [
    "Abort",
    "AdapterChanged",
    "Adapters",
    "CachedPrefixes",
    "Done",
    "ExportSession",
    "Failed",
    "FetchKv",
    "ForgetTokens",
    "Heartbeat",
    "ImportSession",
    "KvBlocks",
    "ListAdapters",
    "ListPrefixes",
    "LoadAdapter",
    "Message",
    "PrepareGrammar",
    "ReadKv",
    "Ready",
    "ReleaseSession",
    "Reply",
    "ResetCache",
    "SessionReply",
    "Shutdown",
    "SnapshotTaken",
    "Submit",
    "TakeSnapshot",
    "TokenOut",
    "TokenTexts",
    "UnloadAdapter",
    "decode",
    "encode",
    "failure_of",
]
