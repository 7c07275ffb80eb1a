"""Replica client: what a fleet needs of one replica. ``EngineClient`` is one, for a process of this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from ...engine.errors import EngineDead
from ...engine.messages import Heartbeat, Message, Ready, Submit, TokenTexts
from ...engine.snapshot import EngineSnapshot
from ...engine.types import AdapterInfo


class ReplicaClient(Protocol):
    """The engine of one replica; see ``EngineClient`` for each of these."""

    on_frame: Callable[[list[Message]], None]
    on_heartbeat: Callable[[Heartbeat], None]
    on_death: Callable[[EngineDead], None]
    stats: dict[str, float]

    @property
    def adapters(self) -> Mapping[str, AdapterInfo]: ...

    @property
    def silent_seconds(self) -> float: ...

    async def start(self) -> Ready: ...

    def describe_tokens(self, texts: TokenTexts) -> None: ...

    def submit(self, submits: Sequence[Submit]) -> None: ...

    def abort(self, ids: Iterable[int]) -> None: ...

    async def load_adapter(self, name: str, path: str, *, replace: bool = False, trusted: bool = False) -> None: ...

    async def unload_adapter(self, name: str) -> None: ...

    async def list_adapters(self) -> tuple[AdapterInfo, ...]: ...

    async def take_snapshot(self) -> EngineSnapshot: ...

    def kill(self) -> None: ...

    async def close(self) -> None: ...
