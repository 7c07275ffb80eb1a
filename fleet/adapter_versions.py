"""Adapter versions of a fleet: which name of the replicas a public name stands for, and which are to be unloaded.

A name that is replaced gets another name on the replicas (``sql``, then ``sql@2``): sequences of the version before go
on with it, also on another replica, until the last of them has ended.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from ..engine.types import AdapterInfo

MOST_NAME = 256
"""Characters of a name that the engine takes."""
MOST_COUNTED = 20_000
"""Public names whose loads are counted; those in use are always."""

BusyAdapters = tuple[tuple[str, ...], tuple[str, ...]]
"""Adapters with running and with waiting sequences, as in a heartbeat."""


@dataclass(frozen=True, slots=True)
class LoadedVersion:
    """What a replica needs to load a version.

    Attributes:
        name: its public name.
        version: its name on the replicas.
        path: its folder.
        trusted: the path may lead outside the folder of adapters.
        digest: of its content; "" where it is not known.
        loaded: when its load began, in seconds since 1970, whenever a replica loaded it.
        num_tokens: of the tokenizer in the folder, 0 without one.
    """

    name: str
    version: str
    path: str
    trusted: bool
    digest: str = ""
    loaded: float = field(default_factory=time.time)
    num_tokens: int = 0


class AdapterVersions:
    """Current versions and their folders by public name."""

    def __init__(self) -> None:
        self._current: dict[str, LoadedVersion] = {}
        # Loads of a public name, those that failed included; names that nobody uses are forgotten some time.
        self._counts: Counter[str] = Counter()
        self._loading: dict[str, str] = {}  # version -> public name
        self._retired: dict[str, LoadedVersion] = {}  # by version

    def begin(self, name: str, others: Iterable[str]) -> str:
        """Return the replicas' name for a load of a public name: none that is in use, nor one of ``others``."""
        used = {*others, *self._loading, *self._retired, *(each.version for each in self._current.values())}
        if len(self._counts) >= MOST_COUNTED:
            named = {*self._current, *self._loading.values(), *(each.name for each in self._retired.values())}
            self._counts = Counter({each: self._counts[each] for each in named})
        while True:
            self._counts[name] += 1
            version = name if self._counts[name] == 1 else _numbered(name, self._counts[name])
            if version not in used:
                self._loading[version] = name
                return version

    def end(self, version: str) -> None:
        """Note that a load has ended."""
        del self._loading[version]

    def add(self, loaded: LoadedVersion) -> None:
        """Let a name stand for a version; the one before it is retired."""
        name = loaded.name
        self.remove(name)
        self._counts[name] = max(1, self._counts[name])
        self._current[name] = loaded

    def remove(self, name: str) -> bool:
        """Retire the version of a name. Returns whether there was one."""
        before = self._current.pop(name, None)
        if before is not None:
            self._retired[before.version] = before
        return before is not None

    def has(self, name: str) -> bool:
        """Return whether a public name is loaded or being loaded."""
        return name in self._current or name in self._loading.values()

    def is_internal(self, name: str) -> bool:
        """Return whether a name is one that only the replicas have, of a version: no request may name it."""
        versions = {*self._loading, *self._retired, *(each.version for each in self._current.values())}
        return name in versions and name not in self._current

    @property
    def wanted(self) -> dict[str, LoadedVersion]:
        """Current versions, for a replica that joins."""
        return {each.version: each for each in self._current.values()}

    @property
    def retired(self) -> dict[str, LoadedVersion]:
        """Versions to unload once no sequence uses them."""
        return dict(self._retired)

    def forget(self, version: str) -> None:
        """Note that a retired version is unloaded."""
        self._retired.pop(version, None)

    def busy(self, replicas: Iterable[BusyAdapters]) -> BusyAdapters:
        """Return the public names of the adapters that have running and waiting sequences on any of ``replicas``."""
        names = {version: loaded.name for version, loaded in (self._retired | self.wanted).items()} | self._loading
        beats = tuple(replicas)
        running = _public_names((each for each, _ in beats), names)
        return running, _public_names((each for _, each in beats), names)

    def public_names(self, versions: Iterable[str]) -> tuple[str, ...]:
        """Return the public names of versions, in their order; without those that were replaced."""
        names = {each.version: name for name, each in self._current.items()}
        return tuple(names.get(version, version) for version in versions if version not in self._retired)

    def public(self, infos: Mapping[str, AdapterInfo]) -> dict[str, AdapterInfo]:
        """Return a replica's adapters under their public names, without retired versions."""
        current = {each.version: each for each in self._current.values()}
        hidden = self._retired.keys() | self._loading.keys()
        shown: dict[str, AdapterInfo] = {}
        for version, info in infos.items():
            if (loaded := current.get(version)) is not None:
                shown[loaded.name] = replace(info, name=loaded.name, loaded=loaded.loaded)
            elif version not in hidden:
                shown[version] = info
        return shown


def _numbered(name: str, number: int) -> str:
    """Return the name of a later version, which is as long as a name may be at most."""
    suffix = f"@{number}"
    return name[: MOST_NAME - len(suffix)].rstrip("/") + suffix


def _public_names(replicas: Iterable[Iterable[str]], names: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(sorted({names.get(version, version) for versions in replicas for version in versions}))
