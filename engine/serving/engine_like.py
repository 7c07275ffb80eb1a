"""Engine interface: what a server calls of an engine, be it a process, a fleet of replicas or a remote replica."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from ..errors import EngineDead
from ..messages import ForgetTokens, Heartbeat, Message, Ready, Submit, TokenTexts
from ..snapshot import EngineSnapshot
from ..types import AdapterInfo


class SequenceEngine(Protocol):
    """Interface for running sequences, of an engine or of one client's view of an engine.

    See ``EngineClient`` for the methods.

    All methods belong to one event loop.
    """

    on_frame: Callable[[list[Message]], None]
    on_death: Callable[[EngineDead], None]

    def describe_tokens(self, message: TokenTexts | ForgetTokens) -> None: ...

    def submit(self, submits: Sequence[Submit]) -> None: ...

    def abort(self, ids: Iterable[int]) -> None: ...


class EngineLike(SequenceEngine, Protocol):
    """Interface of an engine with its adapters, its start and its shutdown. See ``EngineClient`` for the methods."""

    on_heartbeat: Callable[[Heartbeat], None]

    @property
    def death(self) -> EngineDead | None: ...

    @property
    def is_alive(self) -> bool: ...

    @property
    def silent_seconds(self) -> float: ...

    @property
    def stats(self) -> dict[str, float]: ...

    @property
    def adapters(self) -> Mapping[str, AdapterInfo]: ...

    async def start(self) -> Ready: ...

    async def load_adapter(
        self, name: str, path: str, *, replace: bool = False, trusted: bool = False, num_tokens: int = 0
    ) -> None: ...

    async def unload_adapter(self, name: str) -> None: ...

    async def list_adapters(self) -> tuple[AdapterInfo, ...]: ...

    async def take_snapshot(self) -> EngineSnapshot: ...

    async def reset_cache(self) -> None: ...

    async def release_session(self, tenant: str, session: str) -> bool: ...

    async def export_session(self, tenant: str, session: str) -> tuple[int, bytes]: ...

    async def import_session(self, data: bytes) -> int: ...

    def kill(self) -> None: ...

    async def close(self) -> None: ...
