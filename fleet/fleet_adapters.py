"""Adapters of a fleet: loads and unloads on all replicas, versions of names, and infos kept while no replica runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar
from weakref import WeakValueDictionary

from ..engine.errors import EngineDead, RequestError, UnknownModel
from ..engine.types import AdapterInfo
from .adapter_loading import load_on_all
from .adapter_versions import AdapterVersions, BusyAdapters, LoadedVersion
from .dispatcher import Dispatcher
from .replica_client import ReplicaClient
from .replica_roster import ReplicaRoster

T = TypeVar("T")


class FleetAdapters:
    """Adapters that requests can name, which are the same on all replicas.

    Args:
        roster: the replicas.
        dispatcher: dispatcher of the fleet, which is told to which version a name refers.

    Attributes:
        num_loading: number of loads in progress or waiting for a replica.
    """

    def __init__(self, roster: ReplicaRoster, dispatcher: Dispatcher) -> None:
        self._roster = roster
        self._dispatcher = dispatcher
        self._versions = AdapterVersions()
        self._last_seen: dict[str, AdapterInfo] = {}  # infos of replicas that are gone, by version
        # Of names that are being loaded or unloaded: their calls take effect in the order in which they came.
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self.num_loading = 0

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Count a load as in progress inside the block."""
        self.num_loading += 1
        try:
            yield
        finally:
            self.num_loading -= 1

    def begin(self, infos: Iterable[AdapterInfo]) -> None:
        """Record the adapters of the command line as loaded versions: every replica starts with them."""
        for info in infos:
            self._versions.add(LoadedVersion(info.name, info.name, info.path, True, info.digest, info.loaded))

    @property
    def infos(self) -> dict[str, AdapterInfo]:
        """Loaded adapters by name, each as one of the replicas reports it, or as it was last reported."""
        wanted = self._versions.wanted
        infos = {version: info for version, info in self._last_seen.items() if version in wanted}
        # A replica may lack some adapters.
        for member in self._roster:
            infos.update(member.client.adapters)
        return self._versions.public(infos)

    def remember(self, client: ReplicaClient) -> None:
        """Keep the adapters that an ending replica has reported: requests may name them while none runs."""
        wanted = self._versions.wanted
        kept = {**self._last_seen, **client.adapters}
        self._last_seen = {version: info for version, info in kept.items() if version in wanted}

    def check_public(self, names: Iterable[str]) -> None:
        """Raise UnknownModel for a name that is only the internal name of a version."""
        for name in names:
            if self._versions.is_internal(name):
                raise UnknownModel(name)

    def public_names(self, versions: Iterable[str]) -> tuple[str, ...]:
        """Return the public names of versions; replaced versions are left out."""
        return self._versions.public_names(versions)

    def busy(self) -> BusyAdapters:
        """Return the names of adapters that have running and waiting sequences on any replica."""
        return self._versions.busy(member.busy for member in self._roster)

    def wanted(self) -> Mapping[str, LoadedVersion]:
        """Return the versions that a replica must have: the current ones, and the versions of open sequences."""
        retired = self._versions.retired.items()
        used = {version: loaded for version, loaded in retired if self._dispatcher.uses_adapter(version)}
        return self._versions.wanted | used

    async def load(self, name: str, path: str, *, replace_name: bool, trusted: bool, num_tokens: int) -> None:
        """Load an adapter on all replicas; new requests use it once all have it. Raises as ``EngineClient``."""
        if not replace_name and (self._versions.has(name) or name in self.infos):
            raise RequestError(
                f"The adapter {name!r} is already loaded: unload it, or ask to replace it.", param="name"
            )
        version = self._versions.begin(name, {each for member in self._roster for each in member.client.adapters})
        loaded = LoadedVersion(name, version, path, trusted, num_tokens=num_tokens)
        try:
            async with self._turn(name):
                digest = await load_on_all(lambda: self._roster.clients.values(), loaded)
                self._versions.add(replace(loaded, digest=digest))
                self._dispatcher.name_adapter(name, version)
        finally:
            self._versions.end(version)

    async def unload(self, name: str) -> None:
        """Unload an adapter; running sequences keep it. A load in progress ends first. Raises UnknownModel."""
        async with self._turn(name):
            if not self._versions.remove(name):
                raise UnknownModel(name)
            self._dispatcher.name_adapter(name, None)
        await self.unload_retired()

    def _turn(self, name: str) -> asyncio.Lock:
        """Return the lock of a name, which calls about it hold one after another."""
        turn = self._turns.get(name)
        if turn is None:
            turn = self._turns[name] = asyncio.Lock()
        return turn

    async def list(self) -> tuple[AdapterInfo, ...]:
        """Return all adapters, as reported by the replica that has the most of them, or as last reported."""
        clients = sorted(self._roster.clients.values(), key=lambda client: len(client.adapters), reverse=True)
        try:
            infos = await ask_first(clients, lambda client: client.list_adapters())
        except EngineDead:
            return tuple(self.infos.values())
        return tuple(self._versions.public({info.name: info for info in infos}).values())

    @property
    def has_unused(self) -> bool:
        """Whether a replaced version has no sequence any more."""
        return any(not self._dispatcher.uses_adapter(version) for version in self._versions.retired)

    async def unload_retired(self) -> None:
        """Unload the retired versions that no sequence uses."""
        for version in self._versions.retired:
            if not self._dispatcher.uses_adapter(version):
                self._versions.forget(version)
                clients = self._roster.clients.values()
                await asyncio.gather(*(client.unload_adapter(version) for client in clients), return_exceptions=True)


async def ask_first(clients: Iterable[ReplicaClient], ask: Callable[[ReplicaClient], Awaitable[T]]) -> T:
    """Return the answer of the first replica that gives one; a replica that is lost meanwhile gives none.

    Raises:
        EngineDead: no replica is left.
    """
    for client in clients:
        try:
            return await ask(client)
        except EngineDead:
            continue
    raise EngineDead("No replica of the engine is running.")
