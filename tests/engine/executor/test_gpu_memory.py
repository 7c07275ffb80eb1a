"""The arithmetic of a GPU's memory, on a CUDA that keeps books and computes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rootgraft.engine.batch import Batch, StepResult
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.errors import ConfigError
from rootgraft.engine.executor import device, gpu_memory, kv_budget, worker
from rootgraft.engine.executor.gpu_memory import StepMemory

GIB = 2**30


class Books:
    """torch.cuda's figures: bytes on the device, reserved by torch, and reserved at most."""

    total = 10 * GIB

    def __init__(self, taken: int) -> None:
        self.taken, self.cached = taken, 0
        self.peak = taken

    def reserve(self, count: int) -> None:
        self.cached += count
        self.peak = max(self.peak, self.taken + self.cached)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fakes: dict[str, Any] = {
            "mem_get_info": lambda _: (self.total - self.taken - self.cached, self.total),
            "memory_reserved": lambda _: self.taken + self.cached,
            "max_memory_reserved": lambda _: self.peak,
            "reset_peak_memory_stats": lambda _: setattr(self, "peak", self.taken + self.cached),
            "empty_cache": lambda: setattr(self, "cached", 0),
            "synchronize": lambda _: None,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)


class FakeGraphs:
    """Passes of which the first takes 300 bytes and each other 20."""

    variants = tuple(range(11))

    def __init__(self, books: Books) -> None:
        self.books = books

    def capture(self, variants: list[int]) -> None:
        self.books.taken += 300 if variants == [0] else 20


@pytest.fixture
def books(monkeypatch: pytest.MonkeyPatch) -> Books:
    made = Books(taken=4 * GIB)
    made.install(monkeypatch)
    return made


def run_of(books: Books, seen: list[Batch]) -> Any:
    """A runner's ``run`` that needs 1000 bytes for a step."""

    def run(_self: Any, batch: Batch, masks: Any = None) -> StepResult:
        seen.append(batch)
        books.reserve(1000)
        return StepResult()

    return run


def load(tiny_llama: Path) -> Any:
    from rootgraft.engine.loading.load_model import load_model

    return load_model(tiny_llama, dtype=torch.float32, device=torch.device("cpu"), max_positions=100)


def test_steps_are_measured(tiny_llama, books, monkeypatch):
    seen: list[Batch] = []
    monkeypatch.setattr(gpu_memory.ModelRunner, "run", run_of(books, seen))
    monkeypatch.setattr(gpu_memory, "graphs_for", lambda *_: FakeGraphs(books))
    books.reserve(77)  # what loading left in torch's cache counts for nothing
    measured = gpu_memory.measure_steps(load(tiny_llama), EngineConfig(max_num_batched_tokens=64), None)
    assert measured == StepMemory(activations=1000, graphs=300 + 10 * 20)
    assert seen[0].num_tokens == 64, "the largest step"
    monkeypatch.setattr(gpu_memory, "graphs_for", lambda *_: None)
    assert gpu_memory.measure_steps(load(tiny_llama), EngineConfig(), None) == StepMemory(activations=1000)
    assert seen[-1].num_tokens == 100, "no longer than the model takes"


def test_the_pool_gets_what_is_left(tiny_llama, books, monkeypatch):
    cuda = torch.device("cuda", 0)
    config = EngineConfig(gpu_memory_utilization=0.75)
    steps = StepMemory(activations=GIB // 2, graphs=GIB // 4)
    left = device.kv_bytes(config, cuda) - steps.total
    assert left == 0.75 * 10 * GIB - 4 * GIB - GIB // 2 - GIB // 4
    assert kv_budget.pool_bytes(config, cuda, steps, slot_bytes=GIB) == left - GIB
    fixed = EngineConfig(kv_cache_memory=1.5)
    assert kv_budget.pool_bytes(fixed, cuda, StepMemory(), slot_bytes=GIB) == 1.5 * GIB, (
        "what is named is taken as it is"
    )
    assert kv_budget.pool_bytes(EngineConfig(gpu_memory_utilization=0.4), cuda, steps, slot_bytes=0) == 0


def test_a_pool_of_nothing_is_refused(tiny_llama):
    config = EngineConfig(num_gpu_blocks_override=2, block_size=1, device="cpu", dtype="float32", threads=1)
    with pytest.raises(ConfigError, match="KV pool"):
        worker.Worker(config, tiny_llama)
