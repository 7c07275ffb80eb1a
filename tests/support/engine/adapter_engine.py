"""An engine core with real adapter versions and slots over the fake device, its client, and the tokens to expect."""

from __future__ import annotations

import threading
import time
from array import array
from pathlib import Path

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.kv_cache.state_cache import StateSlots
from rootgraft.engine.messages import (
    AdapterChanged,
    Adapters,
    Done,
    Failed,
    LoadAdapter,
    Reply,
    Submit,
    TokenOut,
)
from rootgraft.engine.types import SamplingParams
from rootgraft.lora.adapter_pool import AdapterPool
from support.engine.core_hooks import adapter_pins, scheduler_of
from support.engine.fake_worker import FakeWorker, adapter_code, expected_tokens
from support.machine.waits import HANG_SECONDS
from support.models.lora_folders import file_of, good_config, good_tensors, small_reader, write_folder

PATIENCE = 5


def write(root: Path, name: str, seed: int, invocation: list[int] | None = None) -> str:
    config = good_config(alora_invocation_tokens=invocation) if invocation else good_config()
    return str(write_folder(root / name, config, file_of(good_tensors(seed))))


class Engine:
    """A core over a fake device, its client, and what each sequence should have got."""

    def __init__(
        self,
        root: Path | None = None,
        *,
        slots=2,
        num_pages=64,
        max_num_seqs=4,
        max_cpu_bytes=1 << 20,
        max_adapters=20,
        states: StateSlots | None = None,
        **options,
    ):
        reader = small_reader(root)
        self.gate = threading.Event()
        self.gate.set()
        gate = self.gate

        class Gated:
            layout = reader.layout

            def read(self, path, *, trusted=False):
                gate.wait()
                return reader.read(path, trusted=trusted)

            def read_again(self, path, digest, *, trusted=False):
                gate.wait()
                return reader.read_again(path, digest, trusted=trusted)

        self.pool = AdapterPool(
            Gated(), max_loras=slots, max_adapters=max_adapters, max_cpu_bytes=max_cpu_bytes, patience=PATIENCE
        )
        self.worker = FakeWorker(num_pages, 4, adapters=self.pool, states=states)
        config = EngineConfig(
            block_size=4,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=16,
            enable_lora=True,
            lora_dir=str(root) if root else None,
            **options,
        )
        self.core = EngineCore(config, self.worker)
        self.prompts: dict[int, list[int]] = {}
        self.codes: dict[int, tuple[int, int]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, Done | Failed] = {}
        self.replies: dict[int, Reply | Adapters] = {}
        self.names: dict[str, object] = {info.name: info for info in self.core.ready.adapters}

    def submit(
        self, prompt, adapter=None, salt="", cache_tenant="", tokenizer="", tenant="", session="", **params
    ) -> int:
        number = len(self.prompts)
        self.prompts[number], self.tokens[number] = list(prompt), []
        fields = {"adapter": adapter, "salt": salt, "cache_tenant": cache_tenant, "tokenizer": tokenizer}
        fields |= {"tenant": tenant, "session": session}
        self.core.handle([Submit(number, array("i", prompt), SamplingParams(**params), **fields)])
        version = adapter and self.pool.registry.get(adapter)
        self.codes[number] = (adapter_code(version.digest), 0) if version else (0, 0)
        return number

    def call(self, kind, *fields) -> Reply | Adapters:
        number = 1000 + len(self.replies)
        self.core.handle([kind(number, *fields)])
        self.wait(lambda: number in self.replies)
        return self.replies[number]

    def load(self, name: str, path: str, replace=False) -> None:
        assert self.call(LoadAdapter, name, path, replace).failure is None

    def step(self) -> None:
        for message in self.core.step():
            if isinstance(message, TokenOut):
                self.tokens[message.id] += message.tokens
            elif isinstance(message, (Done, Failed)):
                assert message.id not in self.ends, "ends twice"
                self.ends[message.id] = message
            elif isinstance(message, AdapterChanged):
                self.names.pop(message.name, None)
                if message.info:
                    self.names[message.name] = message.info
            else:
                self.replies[message.id] = message
        self.core.check()
        for sequence in scheduler_of(self.core).running:
            assert (sequence.slot >= 0) == (sequence.spec.adapter >= 0)
        assert self.pool.slots.num_pinned <= len(scheduler_of(self.core).running)

    def wait(self, condition) -> None:
        """Step until another thread has got there."""
        end = time.monotonic() + HANG_SECONDS
        while not condition():
            assert time.monotonic() < end, "does not come to it"
            self.step()

    def run(self) -> None:
        self.wait(lambda: not self.core.has_work)
        assert self.ends.keys() == self.prompts.keys()
        assert not adapter_pins(self.core) and self.pool.slots.num_pinned == 0
        assert all(version.pins == 0 for version in self.pool.registry)

    def check_tokens(self, number: int) -> None:
        code, first = self.codes[number]
        tokens = self.tokens[number]
        assert tokens == expected_tokens(self.prompts[number], len(tokens), self.worker.vocab_size, code, first)
