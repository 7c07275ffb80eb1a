"""A replica client whose engine core, over the fake device, lives in the same event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.errors import AdapterUnavailable, EngineDead, RequestError, UnknownModel
from rootgraft.engine.kv_cache.state_cache import StateSlots
from rootgraft.engine.messages import (
    Abort,
    ExportSession,
    ForgetTokens,
    Heartbeat,
    ImportSession,
    KvBlocks,
    ListPrefixes,
    Message,
    PrepareGrammar,
    ReadKv,
    Ready,
    ReleaseSession,
    SessionReply,
    Submit,
    TokenTexts,
    decode,
    encode,
)
from rootgraft.engine.types import AdapterInfo
from support.engine.fake_worker import FakeWorker

VOCAB = 11


class CoreClient:
    """Computes a step in each turn of the loop, or after so many seconds, while it has work and does not rest.

    Attributes:
        refused: folders of adapters that cannot be loaded.
        changed: folders that hold something else by now.
        submits: all that came.
        prepared: grammars that it was to compile ahead.
        trusted: of each load, whether its path was trusted.
        most_adapters: names that it takes; versions of one are one.
    """

    def __init__(
        self,
        *,
        base: str = "fake",
        refused: Sequence[str] = (),
        changed: Sequence[str] = (),
        fails: EngineDead | None = None,
        vocab_size: int = VOCAB,
        step_seconds: float = 0.0,
        rests: Callable[[], bool] = lambda: False,
        states: StateSlots | None = None,
        eos: tuple[int, ...] = (),
        disk: Path | None = None,
    ) -> None:
        worker = FakeWorker(400, 4, vocab_size=vocab_size, states=states, eos=eos)
        self._step_seconds = step_seconds
        self._rests = rests
        worker.base_digest = base
        options = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 32, "kv_peer_gib": 0.1}
        self.core = EngineCore(EngineConfig(**options, kv_disk=None if disk is None else str(disk)), worker)
        self.most_adapters = 1000
        self.public_names: dict[str, str] = {}  # by version
        self.refused = refused
        self.changed = changed
        self.fails = fails
        self.on_frame: Callable[[list[Message]], None] = lambda messages: None
        self.on_heartbeat: Callable[[Heartbeat], None] = lambda heartbeat: None
        self.on_death: Callable[[EngineDead], None] = lambda error: None
        self.stats: dict[str, float] = {}
        self.adapters: dict[str, AdapterInfo] = {}
        self.silent_seconds = 0.0
        self.submits: list[Submit] = []
        self.prepared: list[PrepareGrammar] = []
        self.trusted: list[tuple[str, bool]] = []
        self.place = "here"
        self.is_alive = True
        self.death: EngineDead | None = None
        self.closed = False
        self._running = False

    async def start(self) -> Ready:
        await asyncio.sleep(0)
        if self.fails is not None:
            raise self.fails
        return self.core.ready

    def describe_tokens(self, message: TokenTexts | ForgetTokens) -> None:
        self._handle([message])

    def submit(self, submits: Sequence[Submit]) -> None:
        self.submits += submits
        self._handle(list(submits))

    def prepare_grammar(self, message: PrepareGrammar) -> None:
        self.prepared.append(message)
        self._handle([message])

    def carry(self, messages: Sequence[ReadKv | KvBlocks | ListPrefixes]) -> None:
        self._handle(list(messages))

    def abort(self, ids: Iterable[int]) -> None:
        self._handle([Abort(tuple(ids))])

    async def load_adapter(
        self, name: str, path: str, *, replace: bool = False, trusted: bool = False, num_tokens: int = 0, of: str = ""
    ) -> None:
        await asyncio.sleep(0)
        names = {version: self.public_names.get(version, version) for version in self.adapters}
        if (of or name) not in names.values() and len({*names.values()}) >= self.most_adapters:
            raise AdapterUnavailable(f"{self.most_adapters} adapters are loaded, which is the limit.")
        self.public_names[name] = of or name
        if name in self.adapters and not replace:
            raise RequestError(f"The adapter {name!r} is already loaded.", param="name")
        if path in self.refused:
            raise RequestError(f"The adapter {path!r} cannot be loaded.", param="path")
        self.trusted.append((name, trusted))
        self.adapters[name] = AdapterInfo(name, path, "ready", "device", digest=path + "!" * (path in self.changed))

    async def unload_adapter(self, name: str) -> None:
        await asyncio.sleep(0)
        if self.adapters.pop(name, None) is None:
            raise UnknownModel(name)

    async def list_adapters(self) -> tuple[AdapterInfo, ...]:
        return tuple(self.adapters.values())

    async def take_snapshot(self) -> Any:
        return self

    async def reset_cache(self) -> None:
        if not self.is_alive:
            raise EngineDead("The engine is not running.")
        self.core.reset_cache()

    async def release_session(self, tenant: str, session: str) -> bool:
        return self._ask(ReleaseSession(0, tenant, session)).count > 0

    async def export_session(self, tenant: str, session: str) -> tuple[int, bytes]:
        reply = self._ask(ExportSession(0, tenant, session))
        return reply.count, reply.data

    async def import_session(self, data: bytes) -> int:
        return self._ask(ImportSession(0, data)).count

    def _ask(self, call: ReleaseSession | ExportSession | ImportSession) -> SessionReply:
        if not self.is_alive:
            raise EngineDead("The engine is not running.")
        return self.core.sessions.answer(call)

    def kill(self) -> None:
        self.is_alive = False

    def die(self) -> None:
        """End as a killed process does: nothing more is heard of it but its death."""
        self.kill()
        self.on_death(EngineDead("The engine process has ended."))

    async def close(self) -> None:
        self.is_alive, self.closed = False, True
        self.core.close()

    def _handle(self, messages: list[Message]) -> None:
        if not self.is_alive:
            raise EngineDead("The engine is not running.")
        self.core.handle(decode(encode(messages)))
        if not self._running:
            self._running = True
            asyncio.get_running_loop().call_later(self._step_seconds, self._step)

    def _step(self) -> None:
        self._running = self.is_alive and self.core.has_work
        if not self._running:
            return
        if self._rests():
            asyncio.get_running_loop().call_later(self._step_seconds, self._step)
            return
        messages = self.core.step()
        self.core.check()
        if messages:
            self.on_frame(messages)
        self.stats = self.core.stats()
        self.on_heartbeat(Heartbeat(self.stats, {}))
        asyncio.get_running_loop().call_later(self._step_seconds, self._step)
