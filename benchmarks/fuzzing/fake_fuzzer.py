"""Fuzzer of the control plane: worlds over the tests' device of integers, with everything at once.

A model that is computed has recurrent states or longrope or a draft model; here one world may have them all, with
adapters that are replaced under their name, clocks that jump and pages that are evicted all at once, and a request
takes a few milliseconds. The device's cells hold hashes, so that a wrong page, state or adapter changes every later
token.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import pytest
from support.engine.adapter_engine import PATIENCE, write
from support.engine.core_hooks import evict_all, set_clock, set_pins_clock, set_queue_clock
from support.engine.draft_engine import FakeDraft, compute_all_drafts, drafting_despite_others
from support.engine.fake_worker import FakeWorker
from support.models.lora_folders import small_reader
from support.models.lora_models import VOCAB

from benchmarks.fuzzing.fuzzer import EOS, Fuzzer, Run, compile_in_process
from benchmarks.fuzzing.worlds import ADAPTERS, INVOCATION, MAX_LEN, Request, draw_request, draw_stems
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.kv_cache.state_cache import StateSlots
from rootgraft.engine.messages import LoadAdapter, TakeSnapshot, UnloadAdapter
from rootgraft.lora.adapter_pool import AdapterPool
from rootgraft.radix.namespace import ENDLESS

SWITCHED = "switched"
VERSIONS = ("first", "second", "third", "activated")  # Versions for which the name stands in turn.


@dataclass(frozen=True)
class FakeWorld:
    """A cramped engine over the fake device.

    Attributes:
        options: of ``EngineConfig``.
        num_pages: of the KV pool.
        rope_switch: tokens beyond which a sequence is computed by other rotary embeddings.
        states: slots of recurrent states; None for a model without, which may have drafts.
        draft: pages of the draft model and how often it is right; None if absent.
        despite_others: the draft model drafts for each row, whatever the other sources promise.
        max_loras, max_cpu_bytes: slots of adapters, and host memory for them.
        jumps: the clocks of queue, pins and steps are a fake one, which jumps.
    """

    options: dict[str, Any]
    num_pages: int
    rope_switch: int
    states: StateSlots | None
    draft: tuple[int, float] | None
    despite_others: bool
    max_loras: int
    max_cpu_bytes: int
    jumps: bool
    overlaps: bool
    slow_masks: bool
    stems: tuple[tuple[int, ...], ...]

    @property
    def model(self) -> int:
        return self.rope_switch

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in vars(self).items() if name != "stems")


def draw_fake_world(seed: str) -> FakeWorld:
    rng = random.Random(seed)
    page, rows = rng.choice((1, 2, 4, 8, 16)), rng.randint(1, 8)
    states = rng.random() < 0.25
    speculation = {"method": rng.choice(("auto", "auto", "ngram")), "num_speculative_tokens": rng.choice((1, 4, 16))}
    options = {
        "block_size": page,
        "max_num_seqs": rows,
        "max_num_batched_tokens": rng.randint(max(rows, 4), 40),
        "speculative_config": json.dumps(speculation),
        "enable_prefix_caching": rng.random() < 0.85,
        "target_itl_ms": rng.choice(("0", "0", "1", "20")),
    }
    return FakeWorld(
        options=options,
        num_pages=-(-(MAX_LEN + rng.choice((6, 30, 200))) // page) + 3,
        rope_switch=rng.choice((ENDLESS, ENDLESS, 20, 40)),
        states=StateSlots(rows, rng.randint(0, 8), page * rng.choice((1, 2, 5)), rng.choice((0, 3, 9)))
        if states
        else None,
        draft=(rng.choice((30, 100, 1000)), rng.choice((0.0, 0.5, 1.0))) if not states and rng.random() < 0.5 else None,
        despite_others=rng.random() < 0.5,
        max_loras=rng.randint(1, 3),
        max_cpu_bytes=rng.choice((1 << 20, 2000)),
        jumps=rng.random() < 0.3,
        overlaps=rng.random() < 0.5,
        slow_masks=rng.random() < 0.3,
        stems=draw_stems(rng),
    )


class FakeFuzzer(Fuzzer):
    """Runs worlds over the fake device. The folder gets its adapters."""

    option = " --fake"

    def __init__(self, folder: Any) -> None:
        super().__init__(folder)
        for number, name in enumerate((*ADAPTERS, *VERSIONS[:-1])):
            write(folder, name, number, INVOCATION if name == "activated" else None)
        self._calls = count(1 << 40)
        self._version: str | None = None  # The version for which SWITCHED stands in the running world.
        self._now = 0.0

    def draw_world(self, seed: str) -> FakeWorld:
        return draw_fake_world(seed)

    def draw_request(self, world: Any, seed: str, number: int, arrival: int) -> Request:
        """Draw one whose adapter may be the name that is loaded anew for it."""
        request, rng = draw_request(world, seed, number, arrival), random.Random(f"{seed} {number} version")
        if rng.random() < 0.7:
            return request
        submits = tuple(replace(submit, adapter=SWITCHED) for submit in request.submits)
        return replace(request, submits=submits, version=rng.choice((*VERSIONS, *[self._usual(seed)] * 4)))

    def _usual(self, seed: str) -> str:
        return random.Random(f"{seed} usual").choice(VERSIONS)

    def make_core(self, world: Any) -> EngineCore:
        page = world.options["block_size"]
        draft = world.draft and FakeDraft(world.draft[0] + -(-MAX_LEN // page), page, world.draft[1], 1, VOCAB)
        worker = FakeWorker(
            world.num_pages, page, vocab_size=VOCAB, max_model_len=MAX_LEN, eos=(EOS,), overlaps=world.overlaps,
            adapters=self._pool(world.max_loras, world.max_cpu_bytes), rope_switch=world.rope_switch,
            states=world.states, draft=draft,
        )  # fmt: skip
        core = self._core(worker, **world.options)
        self._version, self._now = None, 0.0
        if world.jumps:
            for set_one in (set_clock, set_queue_clock, set_pins_clock):
                set_one(core, lambda: self._now)
        return core

    def make_alone(self, world: Any) -> EngineCore:
        worker = FakeWorker(
            MAX_LEN // 16 + 4, 16, vocab_size=VOCAB, max_model_len=MAX_LEN, eos=(EOS,),
            adapters=self._pool(len(ADAPTERS) + len(VERSIONS), 1 << 20), rope_switch=world.rope_switch,
        )  # fmt: skip
        options = {"speculative_config": '{"method": "off"}', "enable_prefix_caching": False, "target_itl_ms": "0"}
        return self._core(worker, block_size=16, max_num_seqs=1, max_num_batched_tokens=512, **options)

    def _pool(self, max_loras: int, max_cpu_bytes: int) -> AdapterPool:
        reader = small_reader(self.folder)
        return AdapterPool(reader, max_loras=max_loras, max_adapters=20, max_cpu_bytes=max_cpu_bytes, patience=PATIENCE)

    def _core(self, worker: FakeWorker, **options: Any) -> EngineCore:
        config = EngineConfig(enable_lora=True, lora_dir=str(self.folder), **options)
        return compile_in_process(EngineCore(config, worker), config)

    def faults(self, world: Any) -> AbstractContextManager[Any]:
        return self._with_drafts(world)

    @contextmanager
    def _with_drafts(self, world: Any) -> Iterator[None]:
        """Let drafts be computed whatever they cost: the device takes no time that they could save."""
        with super().faults(world), pytest.MonkeyPatch.context() as patch:
            if world.draft and world.despite_others:
                drafting_despite_others(patch, 3)
            else:
                compute_all_drafts(patch)
            yield

    def arrive(self, run: Run, request: Request) -> None:
        """Have the name stand for the request's version first; what runs keeps the one that it began with."""
        rng = random.Random(f"{request.number} arrival")
        if request.version and request.version != self._version:
            if self._version and rng.random() < 0.3:
                self._call(run, UnloadAdapter, SWITCHED)
            self._call(run, LoadAdapter, SWITCHED, str(self.folder / request.version), True)
            self._version = request.version
        if rng.random() < 0.05:
            run.core.handle([TakeSnapshot(next(self._calls))])
        super().arrive(run, request)

    def _call(self, run: Run, kind: Any, *fields: Any) -> None:
        number = next(self._calls)
        run.core.handle([kind(number, *fields)])
        while number not in run.replied:
            run.step()

    def disturb(self, core: EngineCore, world: Any, rng: random.Random) -> None:
        """Evict all pages before a few steps, and let the clocks jump, also back."""
        super().disturb(core, world, rng)
        self._now += rng.choice((3.0, -2.0, 400.0)) if rng.random() < 0.01 else 0.01
        if rng.random() < 0.01 and world.states is None:
            evict_all(core)
