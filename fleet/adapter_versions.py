"""Adapter versions of a fleet: the internal name of each public adapter name, and the versions to unload.

An adapter that is replaced under its public name gets another internal name on the replicas (``sql``, then ``sql@2``).
Sequences of the earlier version continue with it, even on another replica, until the last of them has ended.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from ..engine.types import AdapterInfo

MOST_NAME = 256
"""Largest number of characters of a name that the engine accepts."""
MOST_COUNTED = 20_000
"""Largest number of public names whose loads are counted. Beyond it, only the counts of names in use are kept."""

BusyAdapters = tuple[tuple[str, ...], tuple[str, ...]]
"""Adapters with running and with waiting sequences, as in a heartbeat."""


@dataclass(frozen=True, slots=True)
class LoadedVersion:
    """The data with which a replica loads a version.

    Attributes:
        name: public name of the version.
        version: internal name of the version, on the replicas.
        path: folder of the version.
        trusted: whether the path may be outside the folder of adapters.
        digest: digest of the content; "" if unknown.
        loaded: time at which its first load in the fleet began, in seconds since 1970.
        num_tokens: number of tokens of the tokenizer in the folder, 0 without a tokenizer.
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
        # Number of loads for each public name, failed loads included; unused names are removed from time to time.
        self._counts: Counter[str] = Counter()
        self._loading: dict[str, str] = {}  # version -> public name
        self._retired: dict[str, LoadedVersion] = {}  # by version

    def begin(self, name: str, others: Iterable[str]) -> str:
        """Return an internal name for a load of a public name: one not in use and not among ``others``."""
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
        """Record that a load has ended."""
        del self._loading[version]

    def add(self, loaded: LoadedVersion) -> None:
        """Let a public name mean this version; the version before it is retired."""
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
        """Return whether a name is only the internal name of a version: no request may use it."""
        versions = {*self._loading, *self._retired, *(each.version for each in self._current.values())}
        return name in versions and name not in self._current

    @property
    def wanted(self) -> dict[str, LoadedVersion]:
        """Return the current versions, which a joining replica must load."""
        return {each.version: each for each in self._current.values()}

    @property
    def retired(self) -> dict[str, LoadedVersion]:
        """Versions to unload once no sequence uses them."""
        return dict(self._retired)

    def forget(self, version: str) -> None:
        """Record that a retired version is unloaded."""
        self._retired.pop(version, None)

    def busy(self, replicas: Iterable[BusyAdapters]) -> BusyAdapters:
        """Return the public names of the adapters that have running and waiting sequences on any of ``replicas``."""
        names = {version: loaded.name for version, loaded in (self._retired | self.wanted).items()} | self._loading
        beats = tuple(replicas)
        running = _public_names((each for each, _ in beats), names)
        return running, _public_names((each for _, each in beats), names)

    def public_names(self, versions: Iterable[str]) -> tuple[str, ...]:
        """Return the public names of versions, in their order; replaced versions are left out."""
        names = {each.version: name for name, each in self._current.items()}
        return tuple(names.get(version, version) for version in versions if version not in self._retired)

    def public(self, infos: Mapping[str, AdapterInfo]) -> dict[str, AdapterInfo]:
        """Return a replica's adapters under their public names; retired versions are left out."""
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
    """Return the internal name of a later version, shortened to the limit of names."""
    suffix = f"@{number}"
    return name[: MOST_NAME - len(suffix)].rstrip("/") + suffix


def _public_names(replicas: Iterable[Iterable[str]], names: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(sorted({names.get(version, version) for versions in replicas for version in versions}))
