"""Messages between the API and the engine process, by subject; users import them from here.

    to the engine:    TokenTexts, ForgetTokens, Submit, PrepareGrammar, Abort, LoadAdapter, UnloadAdapter, ListAdapters,
                      TakeSnapshot, ResetCache, ReadKv, KvBlocks, Shutdown
    from the engine:  Ready, then TokenOut, Done, Failed, AdapterChanged, Reply, Adapters, SnapshotTaken, Heartbeat,
                      FetchKv, KvBlocks

Every ``Submit`` ends in exactly one ``Done`` or ``Failed``; an ``Abort`` of a sequence that has ended is ignored.
``LoadAdapter``, ``UnloadAdapter`` and ``ResetCache`` are answered by ``Reply``, ``ListAdapters`` by ``Adapters``,
``TakeSnapshot`` by ``SnapshotTaken``, ``FetchKv`` and ``ReadKv`` by ``KvBlocks``.
"""

from .adapter_calls import AdapterChanged, Adapters, ListAdapters, LoadAdapter, Reply, UnloadAdapter
from .codec import Message, decode, encode
from .engine_state import Heartbeat, Ready, ResetCache, Shutdown, SnapshotTaken, TakeSnapshot
from .kv_transfers import FetchKv, KvBlocks, ReadKv
from .sequences import Abort, Done, Failed, Submit, TokenOut, failure_of
from .vocabularies import ForgetTokens, PrepareGrammar, TokenTexts

__all__ = [
    "Abort",
    "AdapterChanged",
    "Adapters",
    "Done",
    "Failed",
    "FetchKv",
    "ForgetTokens",
    "Heartbeat",
    "KvBlocks",
    "ListAdapters",
    "LoadAdapter",
    "Message",
    "PrepareGrammar",
    "ReadKv",
    "Ready",
    "Reply",
    "ResetCache",
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
