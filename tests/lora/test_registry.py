"""Names, versions and pins; host memory in bytes; against plain models of both."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.machine.thoroughness import repeats

from rootgraft.kernels.lora_ops import Factors
from rootgraft.lora.errors import AdapterError, AdapterLimit
from rootgraft.lora.host_cache import HostCache
from rootgraft.lora.prepare_factors import PreparedAdapter
from rootgraft.lora.registry import MOST_SUMS, AdapterRegistry, AdapterVersion
from rootgraft.lora.sum_parts import SumPart

NAMES = st.sampled_from("abcd")
DIGESTS = st.sampled_from("1234567")


def prepared(digest: str, size: int = 1) -> PreparedAdapter:
    """One of ``4 * size`` bytes."""
    part = Factors(torch.zeros(0, 1), torch.zeros(0), (0,), torch.zeros(size))
    return PreparedAdapter({"p": part}, digest, (), 1, part.num_bytes, part.b.view(torch.uint8))


class Registry(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.registry = AdapterRegistry(3)
        self.current: dict[str, AdapterVersion] = {}
        self.pinned: list[AdapterVersion] = []
        self.seen: set[int] = set()
        self.ended: list[AdapterVersion] = []

    @rule(name=NAMES, digest=DIGESTS)
    def add(self, name, digest):
        if name not in self.current and sum(not each.parts for each in self.current.values()) == 3:
            with pytest.raises(AdapterError, match="3 adapters"):
                self.registry.add(name, "path", prepared(digest))
            return
        version = self.registry.add(name, "path", prepared(digest))
        assert version.load_id not in self.seen
        self.seen.add(version.load_id)
        self.drop_sums(name)
        self.current[name] = version

    @rule(names=st.lists(NAMES, min_size=1, max_size=2, unique=True), weight=st.sampled_from([0.5, 2.0]))
    def add_sum(self, names, weight):
        """A weighted sum is no name of the limit, and goes with the version of any part."""
        name = "+".join(f"{weight}*{each}" for each in names)
        parts = tuple(
            SumPart(each, "path", False, self.current[each].digest if each in self.current else "?", weight)
            for each in names
        )
        if any(each not in self.current for each in names):
            with pytest.raises(AdapterLimit, match="meanwhile"):
                self.registry.add_sum(name, prepared("s"), parts, tokenizer="", tenant="")
            return
        version = self.registry.add_sum(name, prepared("s"), parts, tokenizer="", tenant="")
        self.seen.add(version.load_id)
        self.current[name] = version

    def drop_sums(self, part):
        for name, version in list(self.current.items()):
            if part in {each.name for each in version.parts}:
                del self.current[name]

    @rule(name=NAMES)
    def remove(self, name):
        if name in self.current:
            assert self.registry.remove(name) is self.current.pop(name)
            self.drop_sums(name)
        else:
            with pytest.raises(AdapterError, match="no adapter"):
                self.registry.remove(name)

    @rule(name=NAMES)
    def pin(self, name):
        version = self.registry.get(name)
        assert version is self.current.get(name)
        if version is not None:
            self.registry.pin(version)
            self.pinned.append(version)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data):
        self.registry.unpin(self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1))))

    @rule()
    def take_ended(self):
        ended = self.registry.take_ended()
        assert not set(ended) & set(self.ended)
        self.ended += ended

    @invariant()
    def agrees(self):
        self.registry.check()
        assert {version.name: version for version in self.registry} == self.current
        alive = {*self.current.values(), *self.pinned}
        for version in alive:
            assert self.registry.version(version.load_id) is version
            assert version.pins == self.pinned.count(version)
            assert version.retired == (version not in self.current.values())
            assert self.registry.is_alive(version.digest)
            assert version not in self.ended
        for digest in "1234567":
            assert self.registry.is_alive(digest) == any(version.digest == digest for version in alive)


TestRegistry = Registry.TestCase
TestRegistry.settings = settings(max_examples=repeats(100), stateful_step_count=40)


def test_every_version_ends_once():
    registry = AdapterRegistry(2)
    first = registry.add("a", "path", prepared("1"))
    registry.pin(first)
    second = registry.add("a", "path", prepared("2"))
    assert registry.take_ended() == []
    registry.remove("a")
    assert registry.take_ended() == [second]
    registry.unpin(first)
    assert registry.take_ended() == [first]
    assert registry.take_ended() == []


def test_sums_are_bounded():
    """The tenant that has the most of them loses the one that was used longest ago."""
    registry = AdapterRegistry(1)
    parts = (SumPart("a", "path", False, registry.add("a", "path", prepared("1")).digest, 0.5),)

    def add(name, tenant):
        return registry.add_sum(name, prepared(name), parts, tokenizer="", tenant=tenant)

    theirs = add("theirs", "b")
    sums = [add(f"sum{number}", "a") for number in range(MOST_SUMS - 1)]
    assert not any(each.retired for each in sums)
    registry.use(sums[0])
    add("one more", "b")
    assert [each.name for each in sums if each.retired] == ["sum1"]
    assert not theirs.retired
    registry.check()
    assert registry.take_ended() == [sums[1]]


def test_pins_are_checked():
    registry = AdapterRegistry(2)
    version = registry.add("a", "path", prepared("1"))
    with pytest.raises(ValueError, match="no pins"):
        registry.unpin(version)
    registry.remove("a")
    with pytest.raises(ValueError, match="retired"):
        registry.pin(version)


class Cache(RuleBasedStateMachine):
    """Against a list in order of use. Sizes follow from the digest: ``4 * digest`` bytes, of 40."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = HostCache(40)
        self.order: list[str] = []
        self.pins: list[str] = []

    def size(self, digest: str) -> int:
        return 4 * int(digest)

    def shrink(self, keep: str | None) -> None:
        for digest in list(self.order):
            if sum(map(self.size, self.order)) > 40 and digest not in self.pins and digest != keep:
                self.order.remove(digest)

    @rule(digest=DIGESTS)
    def put(self, digest):
        self.cache.put(prepared(digest, int(digest)))
        self.order = [other for other in self.order if other != digest] + [digest]
        self.shrink(digest)

    @rule(digest=DIGESTS)
    def get(self, digest):
        found = self.cache.get(digest)
        assert (found is not None) == (digest in self.order)
        if found:
            assert found.digest == digest
            self.order.remove(digest)
            self.order.append(digest)

    @rule(digest=DIGESTS)
    def pin(self, digest):
        if digest in self.order:
            self.cache.pin(digest)
            self.pins.append(digest)
        else:
            with pytest.raises(KeyError):
                self.cache.pin(digest)

    @rule(digest=DIGESTS)
    def unpin(self, digest):
        if digest not in self.pins:
            with pytest.raises(KeyError):
                self.cache.unpin(digest)
            return
        self.cache.unpin(digest)
        self.pins.remove(digest)
        if digest not in self.pins:
            self.shrink(None)

    @rule(digest=DIGESTS)
    def drop(self, digest):
        self.cache.drop(digest)
        if digest not in self.pins and digest in self.order:
            self.order.remove(digest)

    @invariant()
    def agrees(self):
        assert len(self.cache) == len(self.order)
        assert all(digest in self.cache for digest in self.order)
        assert self.cache.num_bytes == sum(map(self.size, self.order))
        assert set(self.pins) <= set(self.order)


TestCache = Cache.TestCase
TestCache.settings = settings(max_examples=repeats(100), stateful_step_count=40)
