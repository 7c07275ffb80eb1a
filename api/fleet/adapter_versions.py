"""Adapter versions of a fleet: which name of the replicas a public name stands for, and which are to be unloaded.

A name that is replaced gets another name on the replicas (``sql``, then ``sql@2``): sequences of the version before go
on with it, also on another replica, until the last of them has ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from ...engine.types import AdapterInfo


class AdapterVersions:
    """Current versions and their folders by public name."""

    def __init__(self) -> None:
        self._current: dict[str, tuple[str, str]] = {}  # version and folder
        self._counts: Counter[str] = Counter()
        self._retired: set[str] = set()

    def next_version(self, name: str) -> str:
        """Return the replicas' name for the next load of a public name."""
        return name if name not in self._counts else f"{name}@{self._counts[name] + 1}"

    def add(self, name: str, version: str, path: str) -> None:
        """Let a name stand for a version; the one before it is retired."""
        self.remove(name)
        self._counts[name] += 1
        self._current[name] = version, path

    def remove(self, name: str) -> bool:
        """Retire the version of a name. Returns whether there was one."""
        before = self._current.pop(name, None)
        if before is not None:
            self._retired.add(before[0])
        return before is not None

    def version(self, name: str) -> str | None:
        """Return the version that a name stands for."""
        found = self._current.get(name)
        return None if found is None else found[0]

    @property
    def wanted(self) -> dict[str, str]:
        """Current versions with their folders, for a replica that joins."""
        return dict(self._current.values())

    @property
    def retired(self) -> frozenset[str]:
        """Versions to unload once no sequence uses them."""
        return frozenset(self._retired)

    def forget(self, version: str) -> None:
        """Note that a retired version is unloaded."""
        self._retired.discard(version)

    def public(self, infos: Mapping[str, AdapterInfo]) -> dict[str, AdapterInfo]:
        """Return a replica's adapters under their public names, without retired versions."""
        names = {version: name for name, (version, _) in self._current.items()}
        shown = {version: names.get(version, version) for version in infos if version not in self._retired}
        return {name: replace(infos[version], name=name) for version, name in shown.items()}
