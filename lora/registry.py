"""Registry of adapter names, their versions, and the sequences that pin them.

    load ---> current ---- replaced or unloaded ----> retired ---- last pin gone ----> ended
                 |  new sequences pin it                 |  running ones continue with it

A name refers to its current version; a sequence pins the version that was current when it was submitted.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from .errors import AdapterError, AdapterLimit
from .prepare_factors import PreparedAdapter
from .sum_parts import SumPart

MOST_SUMS = 64
"""Largest number of weighted sums of adapters that have a name at the same time."""


@dataclass(frozen=True, slots=True)
class OwnParts:
    """The weights and sizes of the base model that an adapter replaces with its own.

    Attributes:
        has_matrix: whether the adapter has a whole embedding or head.
        vocab_size: number of tokens of the adapter's vocabulary; None for the base model's.
        num_classes: number of rows of the adapter's classification head; 0 without one.
    """

    has_matrix: bool = False
    vocab_size: int | None = None
    num_classes: int = 0

    @classmethod
    def of(cls, adapter: PreparedAdapter) -> OwnParts:
        """Return the weights and sizes of the model that an adapter replaces."""
        if (own := adapter.own) is None:
            return cls()
        return cls(adapter.has_matrix, own.vocab_size, 0 if own.score is None else len(own.score))


@dataclass(slots=True, eq=False)
class AdapterVersion:
    """One load of an adapter. Only ``AdapterRegistry`` changes it.

    Attributes:
        load_id: id of this load, which is never reused.
        digest: identity of the content; versions with equal digests share KV.
        path: folder of the adapter.
        trusted: whether the path may be outside of the folder of adapters.
        invocation_tokens: invocation tokens of an activated LoRA; empty for an ordinary adapter.
        rank: the largest rank of a module.
        num_bytes: size of the adapter's factors and own weights in bytes.
        own: weights and sizes of the base model that the adapter replaces.
        tokenizer: identity of the tokenizer of its sequences; "" for the base model's.
        loaded: time of the load, in seconds since 1970.
        pins: number of running and waiting sequences that use this version.
        retired: whether this is no longer the current version of its name.
        public: name that counts towards the limit on names. Versions with the same public name count once.
        parts: parts of a weighted sum of adapters, which has a separate limit; empty for an adapter.
    """

    name: str
    load_id: int
    digest: str
    path: str
    trusted: bool
    invocation_tokens: tuple[int, ...]
    rank: int
    num_bytes: int
    own: OwnParts
    tokenizer: str = ""
    loaded: float = 0.0
    pins: int = 0
    retired: bool = False
    public: str = ""
    parts: tuple[SumPart, ...] = ()


class AdapterRegistry:
    """Names and versions, which only this class changes. Every operation except iteration takes constant time.

    A weighted sum loses its name when the version of one of its parts is dropped. If there are too many sums, the least
    recently used sum of the tenant with the most sums loses its name.

    Args:
        max_adapters: largest number of names; names with the same public name count once.
    """

    def __init__(self, max_adapters: int) -> None:
        self.max_adapters = max_adapters
        self._current: dict[str, AdapterVersion] = {}
        self._alive: dict[int, AdapterVersion] = {}
        # Number of current versions of each public name.
        self._publics: Counter[str] = Counter()
        self._digests: Counter[str] = Counter()
        # Tenants by name. The most recently used name is at the end.
        self._sums: OrderedDict[str, str] = OrderedDict()
        self._ended: list[AdapterVersion] = []
        self._next_id = 0

    def add(
        self,
        name: str,
        path: str,
        adapter: PreparedAdapter,
        *,
        trusted: bool = False,
        tokenizer: str = "",
        public: str = "",
    ) -> AdapterVersion:
        """Make an adapter the current version of a name. The previous version is retired.

        Args:
            tokenizer: identity of the tokenizer of its sequences.
            public: public name, as in ``AdapterVersion``; "" for ``name``.

        Raises:
            AdapterLimit: the limit of names is reached.
        """
        public = public or name
        self.check_room(name, public)
        version = self._enter(name, path, adapter, trusted=trusted, tokenizer=tokenizer, public=public)
        self._publics[public] += 1
        return version

    def _enter(
        self,
        name: str,
        path: str,
        adapter: PreparedAdapter,
        *,
        trusted: bool,
        tokenizer: str,
        public: str = "",
        parts: tuple[SumPart, ...] = (),
    ) -> AdapterVersion:
        version = AdapterVersion(
            name,
            self._next_id,
            adapter.digest,
            path,
            trusted,
            adapter.invocation_tokens,
            adapter.rank,
            adapter.num_bytes,
            OwnParts.of(adapter),
            tokenizer,
            loaded=time.time(),
            public=public,
            parts=parts,
        )
        self._next_id += 1
        self._alive[version.load_id] = version
        self._digests[version.digest] += 1
        before = self._current.get(name)
        self._current[name] = version
        if before is not None:
            self._retire(before)
        return version

    def add_sum(
        self, name: str, adapter: PreparedAdapter, parts: tuple[SumPart, ...], *, tokenizer: str, tenant: str
    ) -> AdapterVersion:
        """Make a weighted sum of adapters the current version of a name.

        Args:
            tokenizer: identity of the tokenizer of all parts.
            tenant: tenant whose request has named the sum.

        Raises:
            AdapterLimit: a part has been replaced or unloaded.
        """
        for part in parts:
            current = self.get(part.name)
            if current is None or current.digest != part.digest:
                raise AdapterLimit(f"The adapter {part.name!r} was replaced or unloaded meanwhile: try again.")
        while len(self._sums) >= MOST_SUMS and name not in self._sums:
            most = Counter(self._sums.values()).most_common(1)[0][0]
            self.remove(next(each for each, owner in self._sums.items() if owner == most))
        version = self._enter(name, name, adapter, trusted=False, tokenizer=tokenizer, parts=parts)
        self._sums[name] = tenant
        return version

    def use(self, version: AdapterVersion) -> None:
        """Record a use of a weighted sum, for the order in which sums lose their names."""
        if version.name in self._sums:
            self._sums.move_to_end(version.name)

    def check_room(self, name: str, public: str = "") -> None:
        """Raise ``AdapterLimit`` if the limit on names leaves no room for this name or its public name."""
        is_new = name not in self._current and (public or name) not in self._publics
        if is_new and len(self._publics) >= self.max_adapters:
            raise AdapterLimit(
                f"{self.max_adapters} adapters are loaded, which is the limit (--max-adapters): unload one with "
                "/v1/unload_lora_adapter, or start the server with a higher limit."
            )

    def get(self, name: str) -> AdapterVersion | None:
        return self._current.get(name)

    def version(self, load_id: int) -> AdapterVersion | None:
        return self._alive.get(load_id)

    def remove(self, name: str) -> AdapterVersion:
        """Remove a name and retire its current version.

        Raises:
            AdapterError: there is no such name.
        """
        version = self._current.pop(name, None)
        if version is None:
            raise AdapterError(f"There is no adapter {name!r}.", "name")
        self._retire(version)
        return version

    def pin(self, version: AdapterVersion) -> None:
        """Add a pin to a version. Raises ValueError if it is retired."""
        if version.retired:
            raise ValueError(f"version {version.load_id} of {version.name} is retired")
        version.pins += 1

    def unpin(self, version: AdapterVersion) -> None:
        """Remove a pin from a version. Raises ValueError if it has none."""
        if not version.pins:
            raise ValueError(f"version {version.load_id} of {version.name} has no pins")
        version.pins -= 1
        self._end_if_unused(version)

    def take_ended(self) -> list[AdapterVersion]:
        """Return the versions that have ended since the last call, so that their slots and memory can be freed."""
        ended, self._ended = self._ended, []
        return ended

    def is_alive(self, digest: str) -> bool:
        """Return whether a version with this content exists. If not, the content's KV can be dropped."""
        return self._digests[digest] > 0

    def __iter__(self) -> Iterator[AdapterVersion]:
        """Iterate over the current versions, in the order in which their names were first loaded."""
        return iter(tuple(self._current.values()))

    def __len__(self) -> int:
        return len(self._current)

    @property
    def draining(self) -> tuple[AdapterVersion, ...]:
        """Retired versions that sequences still use, the oldest first."""
        return tuple(version for version in self._alive.values() if version.retired)

    def check(self) -> None:
        """Raise AssertionError if names and versions contradict each other."""
        for name, version in self._current.items():
            assert version.name == name and not version.retired, f"{name} stands for {version}"
        assert self._publics == Counter(version.public for version in self._current.values() if not version.parts)
        assert set(self._sums) == {name for name, version in self._current.items() if version.parts}
        for name in self._sums:
            for part in self._current[name].parts:
                assert self._current[part.name].digest == part.digest, f"{name} has an old {part.name}"
        for version in self._alive.values():
            assert version.pins or not version.retired, f"{version} should have ended"
        assert self._digests == Counter(version.digest for version in self._alive.values())

    def _retire(self, version: AdapterVersion) -> None:
        version.retired = True
        if version.parts:
            self._sums.pop(version.name, None)
        else:
            self._publics[version.public] -= 1
            if not self._publics[version.public]:
                del self._publics[version.public]
            for name in [name for name in self._sums if version.name in _part_names(self._current[name])]:
                self.remove(name)
        self._end_if_unused(version)

    def _end_if_unused(self, version: AdapterVersion) -> None:
        if not version.retired or version.pins:
            return
        del self._alive[version.load_id]
        self._digests[version.digest] -= 1
        if not self._digests[version.digest]:
            del self._digests[version.digest]
        self._ended.append(version)


def _part_names(version: AdapterVersion) -> set[str]:
    return {part.name for part in version.parts}
