"""Engine interface: what a server needs of an engine, whether one process, a fleet of replicas, or a remote replica."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from ..errors import EngineDead
from ..messages import Heartbeat, Message, Ready, Submit, TokenTexts
from ..snapshot import EngineSnapshot
from ..types import AdapterInfo


class EngineLike(Protocol):
    """An engine that takes sequences and returns their tokens; see ``EngineClient`` for each of these.

    All methods belong to one event loop.
    """

    on_frame: Callable[[list[Message]], None]
    on_heartbeat: Callable[[Heartbeat], None]
    on_death: Callable[[EngineDead], None]

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

    def describe_tokens(self, texts: TokenTexts) -> None: ...

    def submit(self, submits: Sequence[Submit]) -> None: ...

    def abort(self, ids: Iterable[int]) -> None: ...

    async def load_adapter(self, name: str, path: str, *, replace: bool = False, trusted: bool = False) -> None: ...

    async def unload_adapter(self, name: str) -> None: ...

    async def list_adapters(self) -> tuple[AdapterInfo, ...]: ...

    async def take_snapshot(self) -> EngineSnapshot: ...

    def kill(self) -> None: ...

    async def close(self) -> None: ...
