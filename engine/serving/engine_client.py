"""Client of the engine process: starts the process, sends it messages, and dispatches the frames that it returns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import cast

from ...tenancy.current_tenant import CURRENT_TENANT
from .. import errors
from ..config import EngineConfig
from ..errors import EngineDead, EngineError
from ..ipc import FrameReader, frame
from ..messages import (
    Abort,
    AdapterChanged,
    Adapters,
    ExportSession,
    Failed,
    ForgetTokens,
    Heartbeat,
    ImportSession,
    KvBlocks,
    ListAdapters,
    ListPrefixes,
    LoadAdapter,
    Message,
    PrepareGrammar,
    ReadKv,
    Ready,
    ReleaseSession,
    ResetCache,
    SessionReply,
    Shutdown,
    SnapshotTaken,
    Submit,
    TakeSnapshot,
    TokenTexts,
    UnloadAdapter,
    decode,
    encode,
)
from ..snapshot import EngineSnapshot
from ..types import AdapterInfo
from .engine_spawn import EngineProcess, SpawnEngine, spawn_engine
from .pending_calls import REPLIES, CallReply, PendingCalls
from .process_watch import ENDED
from .submit_gatherer import SubmitGatherer
from .watchdog import HEARTBEAT_TIMEOUT, WATCHDOG_TIMEOUT
from .watched_process import ChildProcess, WatchedProcess

Call = (
    LoadAdapter
    | UnloadAdapter
    | ListAdapters
    | ResetCache
    | TakeSnapshot
    | ReleaseSession
    | ExportSession
    | ImportSession
)


class EngineClient(asyncio.Protocol):
    """Starts an engine process and exchanges messages with it over a socket. All methods belong to one event loop.

    Args:
        config: the engine's options.
        model_path: folder in Hugging Face format or GGUF file.
        heartbeat_timeout, watchdog_timeout: seconds after which the engine counts as hung, see ``Watchdog``. Loading is
            not watched.
        spawn: starts the process; None for ``spawn_engine``.
        process: process of the engine; None for a child of this process.

    Attributes:
        on_frame: called with each frame's messages about sequences and adapters, in order. Must be set before
            ``start``.
        on_heartbeat: called with each heartbeat, after the messages of its frame.
        on_death: called once if the engine hangs, or if its process ends before ``close`` is called.
        death: reason for the engine's end; None while it runs.
        stats: gauges and counters of the last heartbeat.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_path: Path,
        *,
        heartbeat_timeout: float = HEARTBEAT_TIMEOUT,
        watchdog_timeout: float = WATCHDOG_TIMEOUT,
        spawn: SpawnEngine | None = None,
        process: WatchedProcess | None = None,
    ) -> None:
        timeouts = (heartbeat_timeout, watchdog_timeout)
        self._process = process or ChildProcess(config, model_path, spawn or spawn_engine, *timeouts)
        self._process.watch.on_end = self._end_with
        self._connecting: asyncio.Task[object] | None = None
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader()
        self._ready: asyncio.Future[Ready] | None = None
        self._closing = False
        self._disconnected = asyncio.Event()
        self._adapters: dict[str, AdapterInfo] = {}
        self._calls = PendingCalls()
        self._gatherer = SubmitGatherer(self._send_held)
        self.on_frame: Callable[[list[Message]], None] = lambda messages: None
        self.on_heartbeat: Callable[[Heartbeat], None] = lambda heartbeat: None
        self.on_death: Callable[[EngineDead], None] = lambda error: None
        self.death: EngineDead | None = None
        self.stats: dict[str, float] = {}

    @property
    def is_alive(self) -> bool:
        return self._transport is not None and not self._transport.is_closing() and self.death is None

    @property
    def silent_seconds(self) -> float:
        """Seconds since the engine's last sign of life."""
        return self._process.watch.watchdog.silent_seconds

    @property
    def process(self) -> EngineProcess | None:
        """The engine's process; None before ``start``."""
        return self._process.process

    @property
    def place(self) -> str:
        """Place where the engine runs, as text for log and error messages."""
        return self._process.place

    @property
    def adapters(self) -> Mapping[str, AdapterInfo]:
        """Loaded adapters by name. The tier and the counts in an entry date from the adapter's last change."""
        return self._adapters

    async def start(self) -> Ready:
        """Start the process and wait until its model is loaded.

        Raises:
            ModelError, ConfigError: the engine's error, if the model or an option is wrong.
            EngineDead: the process ended without reporting an error; its standard error stream may tell the reason.
        """
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        ours, liveness = await self._process.start()
        self._process.watch.open(liveness)
        self._connecting = loop.create_task(loop.create_connection(lambda: self, sock=ours))
        try:
            # If ``start`` is cancelled, connecting must go on: uvloop would close the transport without calling
            # ``connection_lost``.
            await asyncio.shield(self._connecting)
            return await self._ready
        except asyncio.CancelledError:
            self._ready.cancel()
            raise

    def describe_tokens(self, message: TokenTexts | ForgetTokens) -> None:
        """Send the bytes of a vocabulary's tokens, which grammars need, or tell the engine to drop them."""
        self._send([message])

    def submit(self, submits: Sequence[Submit]) -> None:
        """Submit sequences. The sequences of one call arrive in one frame. Raises EngineDead if the engine is gone."""
        self._check_alive()
        self._gatherer.add(submits)

    def prepare_grammar(self, message: PrepareGrammar) -> None:
        """Compile a grammar before a sequence needs it. Raises EngineDead if the engine is gone."""
        self._send([message])

    def carry(self, messages: Sequence[ReadKv | KvBlocks | ListPrefixes]) -> None:
        """Send messages of the KV transfer between replicas: requests for KV or prefixes, or KV itself.

        Raises EngineDead.
        """
        self._send(messages)

    def abort(self, ids: Iterable[int]) -> None:
        """Abort sequences. Does nothing if the engine is gone, because the sequences ended with it."""
        if self.is_alive:
            self._send([Abort(tuple(ids))])

    async def load_adapter(
        self, name: str, path: str, *, replace: bool = False, trusted: bool = False, num_tokens: int = 0, of: str = ""
    ) -> None:
        """Load an adapter under a name. Returns when requests can name the adapter.

        The load counts against the current tenant's share of the loads in progress.

        Args:
            path: path of the adapter's folder.
            replace: whether the name may be in use; the new version then replaces the old one.
            trusted: whether the path may lead out of the folder of adapters.
            num_tokens: number of tokens of the tokenizer in the folder, 0 without a tokenizer. If the adapter has its
                own embedding, the embedding must have a row for each token.
            of: name of the adapter of which this one is a version, so that both count as one name. "" if it is no
                version.

        Raises:
            RequestError: the adapter cannot be loaded.
            EngineDead: the engine was gone before the call, or ended before its reply.
        """
        tenant = CURRENT_TENANT.get()
        await self._call(LoadAdapter(self._calls.new_id(), name, path, replace, trusted, num_tokens, of, tenant))

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter. Running requests keep its weights.

        Raises UnknownModel, and EngineDead like ``load_adapter``.
        """
        await self._call(UnloadAdapter(self._calls.new_id(), name))

    async def list_adapters(self) -> tuple[AdapterInfo, ...]:
        """Return all adapters. Raises RequestError if the engine runs without LoRA. Raises EngineDead."""
        reply = await self._call(ListAdapters(self._calls.new_id()))
        return reply.adapters if isinstance(reply, Adapters) else ()

    async def take_snapshot(self) -> EngineSnapshot:
        """Return a snapshot of the engine's state.

        The engine takes it after its current step, which may take seconds. Raises EngineDead.
        """
        reply = await self._call(TakeSnapshot(self._calls.new_id()))
        assert isinstance(reply, SnapshotTaken)
        return reply.snapshot

    async def reset_cache(self) -> None:
        """Remove all cached KV that no running sequence uses, of all tiers. Raises EngineDead like ``load_adapter``."""
        await self._call(ResetCache(self._calls.new_id()))

    async def release_session(self, tenant: str, session: str) -> bool:
        """End a tenant's session, so that its KV is evicted first.

        Returns whether the session existed. Raises EngineDead.
        """
        reply = await self._call(ReleaseSession(self._calls.new_id(), tenant, session))
        return isinstance(reply, SessionReply) and reply.count > 0

    async def export_session(self, tenant: str, session: str) -> tuple[int, bytes]:
        """Return the number of tokens whose KV a session holds, and the KV as a file. Returns (0, b"") without KV.

        Raises:
            RequestError: the model's KV cannot be exported, or the file would be too large.
            EngineDead: the engine was gone before the call, or ended before its reply.
        """
        reply = await self._call(ExportSession(self._calls.new_id(), tenant, session))
        return (reply.count, reply.data) if isinstance(reply, SessionReply) else (0, b"")

    async def import_session(self, data: bytes) -> int:
        """Import a session from a file.

        Returns the number of cached tokens, 0 if none fits. Raises like ``export_session``.
        """
        reply = await self._call(ImportSession(self._calls.new_id(), data))
        return reply.count if isinstance(reply, SessionReply) else 0

    def kill(self) -> None:
        """Kill the engine process, for example if it hangs. Does nothing if the process has ended."""
        self._process.kill()

    async def close(self) -> None:
        """Shut the engine down, wait at most ten seconds for the end of its process, and wait until its socket is
        closed.

        A process that hangs or still loads its model would not read a ``Shutdown`` message, so it is killed. A process
        whose ``start`` was cancelled is killed too.
        """
        self._closing = True
        if self._connecting is not None:
            await self._connecting
        if self.is_alive and not self._is_loading:
            self._send([Shutdown()])
        elif self._is_loading or self._transport is not None:
            self.kill()
        await asyncio.to_thread(self._process.reap)
        # The socket closes after the process has ended.
        if self._transport is not None:
            await self._disconnected.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # This is a cast and not an assertion, because uvloop's transports have the methods but not the base class.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Decode the frames in ``data`` and dispatch their messages."""
        for payload in self._reader.feed(data):
            messages = decode(payload)
            assert self._ready is not None
            if not self._ready.done():
                self._finish_start(messages.pop(0))
            heartbeat = messages.pop() if messages and isinstance(messages[-1], Heartbeat) else None
            if any(isinstance(message, (AdapterChanged, *REPLIES)) for message in messages):
                messages = [message for message in messages if not self._handle(message)]
            if messages:
                self._gatherer.see(messages)
                self.on_frame(messages)
            if isinstance(heartbeat, Heartbeat):
                self.stats = heartbeat.stats
                self.on_heartbeat(heartbeat)

    def connection_lost(self, error: Exception | None) -> None:
        """Treat the end of the connection as the end of the engine process."""
        self._transport = None
        self._disconnected.set()
        is_starting = self._ready is not None and not self._ready.done()
        self._end(EngineDead(self._process.fault_of_start() if is_starting else ENDED))

    def _end_with(self, reason: str) -> None:
        self._end(EngineDead(reason))

    def _end(self, death: EngineDead) -> None:
        """Fail, once, all that wait for the engine: ``start``, pending calls, and the streams through ``on_death``."""
        self._process.watch.stop()
        if self.death is not None:
            return
        self.death = death
        self._calls.fail(death)
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(death)
        elif not self._closing:
            self.on_death(death)

    @property
    def _is_loading(self) -> bool:
        return self._ready is not None and (self._ready.cancelled() or not self._ready.done())

    def _check_alive(self) -> asyncio.Transport:
        if not self.is_alive or self._transport is None:
            raise EngineDead("The engine is not running." if self.death is None else str(self.death))
        return self._transport

    def _send(self, messages: Sequence[Message]) -> None:
        """Send messages. Sequences that the gatherer holds back are sent first."""
        self._check_alive().write(frame(encode([*self._gatherer.take(), *messages])))

    def _send_held(self) -> None:
        # No error is raised: ``on_death`` has already reported an engine's death, and after ``close`` nobody waits.
        if self.is_alive:
            self._send(())

    async def _call(self, call: Call) -> CallReply:
        """Send a call and wait for its reply. Raises the error in the reply."""
        self._send([call])
        return await self._calls.reply_to(call.id)

    def _finish_start(self, message: Message) -> None:
        """Handle the engine's first message: ``Ready``, or ``Failed`` with the reason."""
        assert self._ready is not None
        if isinstance(message, Ready):
            self._process.watch.start()
            self._adapters = {info.name: info for info in message.adapters}
            self._ready.set_result(message)
        elif isinstance(message, Failed):
            self._closing = True
            kind: type[EngineError] = getattr(errors, message.kind)
            self._ready.set_exception(kind(message.message))

    def _handle(self, message: Message) -> bool:
        """Handle a reply to a call, or a change of an adapter. Returns whether ``message`` was a reply."""
        if isinstance(message, AdapterChanged):
            if message.info is None:
                self._adapters.pop(message.name, None)
            else:
                self._adapters[message.name] = message.info
        elif isinstance(message, REPLIES):
            self._calls.answer(message)
        return isinstance(message, REPLIES)
