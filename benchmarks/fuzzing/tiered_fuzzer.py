"""Fuzzers whose engines have tiers with room for few pages, over a disk that fails: every page of KV moves."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from support.engine.core_hooks import cache_of, evict_all, set_tiers, tiers_of, worker_of
from support.engine.faulty_files import cramped_tiers

from benchmarks.fuzzing.fake_fuzzer import FakeFuzzer
from benchmarks.fuzzing.fuzzer import Fuzzer
from rootgraft.engine.core.engine_core import EngineCore

_EVICTED = 0.1  # share of the steps before which the pool loses all pages that nobody uses
_RESTARTED = 0.02  # Share of the restarts before which the tiers start again with the existing files.
_COUNTED = ("kv_hits_disk", "kv_stored_disk", "kv_rejected_disk", "kv_errors_disk", "kv_evicted_disk", "kv_hits_host")


class TieredFuzzer(Fuzzer):
    """A mixin before a fuzzer: worlds with tiers.

    Attributes:
        inline: pages are written and read at once in all worlds; else on threads in half of them.
    """

    inline = False

    def make_core(self, world: Any) -> EngineCore:
        core = super().make_core(world)
        if cache_of(core).sharing:
            self._set_tiers(core, world, random.Random(f"{world} tiers"))
        return core

    def disturb(self, core: EngineCore, world: Any, rng: random.Random) -> None:
        super().disturb(core, world, rng)
        if cache_of(core).tiers is None:
            return
        if rng.random() < _EVICTED:
            evict_all(core)
        if rng.random() < _RESTARTED:
            self._count(core)
            self._set_tiers(core, world, rng)

    def _set_tiers(self, core: EngineCore, world: Any, rng: random.Random) -> None:
        if cache_of(core).tiers is not None:
            tiers_of(core).close()
        pages, folder = worker_of(core).kv_pages, self.folder / "kv" / str(world.options["block_size"])
        made = cramped_tiers(
            world.options,
            pages,
            Path(folder),
            rng,
            rate=rng.choice((0.0, 0.02, 0.2)),
            host_pages=rng.choice((0, 0, 3, 20)),
            disk_pages=rng.choice((5, 40, 400)),
            inline=rng.random() < 0.5 or self.inline,
            key=rng.choice((b"", bytes(32))),
        )
        set_tiers(core, made)

    def _together(self, world: Any, requests: Any) -> Any:
        core: list[EngineCore] = []
        make = self.make_core

        def kept(each: Any) -> EngineCore:
            core.append(make(each))
            return core[0]

        self.make_core = kept  # type: ignore[method-assign, assignment]
        try:
            return super()._together(world, requests)
        finally:
            del self.make_core
            if core and cache_of(core[0]).tiers is not None:
                self._count(core[0])

    def _count(self, core: EngineCore) -> None:
        stats = tiers_of(core).stats()
        for name in _COUNTED:
            self.counts[name] += int(stats.get(name, 0))


class TieredFakeFuzzer(TieredFuzzer, FakeFuzzer):
    """Over the device of integers."""

    option = " --tiers --fake"


class TieredModelFuzzer(TieredFuzzer, Fuzzer):
    """Over models that are computed."""

    option = " --tiers"
