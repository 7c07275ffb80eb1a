"""Messages between the API and the engine process, by subject; users import them from here.

    to the engine:    TokenTexts, ForgetTokens, Submit, PrepareGrammar, Abort, LoadAdapter, UnloadAdapter, ListAdapters,
                      TakeSnapshot, ResetCache, ReadKv, KvBlocks, NameKv, ReleaseSession, ExportSession, ImportSession, Shutdown
    from the engine:  Ready, then TokenOut, Done, Failed, AdapterChanged, Reply, Adapters, SnapshotTaken, Heartbeat,
                      FetchKv, KvBlocks, NamedKv, SessionReply

Every ``Submit`` ends in exactly one ``Done`` or ``Failed``; an ``Abort`` of a sequence that has ended is ignored.
``LoadAdapter``, ``UnloadAdapter`` and ``ResetCache`` are answered by ``Reply``, ``ListAdapters`` by ``Adapters``,
``TakeSnapshot`` by ``SnapshotTaken``, ``FetchKv`` and ``ReadKv`` by ``KvBlocks``, ``NameKv`` by ``NamedKv``; ``ReleaseSession``,
``ExportSession`` and ``ImportSession`` by ``SessionReply``, or ``Reply`` with their error.
"""

from .adapter_calls import AdapterChanged, Adapters, ListAdapters, LoadAdapter, Reply, UnloadAdapter
from .codec import Message, decode, encode
from .engine_state import Heartbeat, Ready, ResetCache, Shutdown, SnapshotTaken, TakeSnapshot
from .kv_transfers import FetchKv, KvBlocks, KvPrefix, NamedKv, NameKv, ReadKv
from .sequences import Abort, Done, Failed, Submit, TokenOut, failure_of
from .session_calls import ExportSession, ImportSession, ReleaseSession, SessionReply
from .vocabularies import ForgetTokens, PrepareGrammar, TokenTexts

__all__ = [
    "Abort",
    "AdapterChanged",
    "Adapters",
    "Done",
    "ExportSession",
    "Failed",
    "FetchKv",
    "ForgetTokens",
    "Heartbeat",
    "ImportSession",
    "KvBlocks",
    "KvPrefix",
    "ListAdapters",
    "LoadAdapter",
    "Message",
    "NameKv",
    "NamedKv",
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
