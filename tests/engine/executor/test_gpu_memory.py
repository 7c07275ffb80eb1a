"""The arithmetic of a GPU's memory, on a CUDA that keeps books and computes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.engine.random_bank import random_bank

from rootgraft.engine.batch import Batch, StepResult
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.errors import ConfigError
from rootgraft.engine.executor import device, draft_worker, gpu_memory, kv_budget, worker
from rootgraft.engine.executor.draft_weights import DraftModel
from rootgraft.engine.executor.gpu_memory import StepMemory
from rootgraft.lora.prepare_factors import NORM_BYTES

GIB = 2**30


class Books:
    """torch.cuda's figures: bytes on the device, reserved by torch, and reserved at most."""

    total = 10 * GIB

    def __init__(self, taken: int, others: int = 0) -> None:
        self.taken, self.cached, self.others = taken, 0, others
        self.peak = taken

    def reserve(self, count: int) -> None:
        self.cached += count
        self.peak = max(self.peak, self.taken + self.cached)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fakes: dict[str, Any] = {
            "mem_get_info": lambda _: (self.total - self.others - self.taken - self.cached, self.total),
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
    capturer = None

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


def test_the_worst_draw_and_adapters_are_measured(tiny_llama, books, monkeypatch):
    """Of the most lines, by rows with every option that takes memory; adapters of the largest rank in every product."""
    drawn: list[tuple[Any, ...]] = []
    adapted: list[dict[str, int]] = []

    def sample(self: Any, logits: torch.Tensor, rows: Any, masks: Any) -> None:
        books.reserve(9000)
        drawn.append((logits.shape, len(masks.positions), [row.num_positions for row in rows], self._rows.copy()))

    def forward(_self: Any, inputs: Any, _kv: Any) -> torch.Tensor:
        if inputs.lora is not None:
            adapted.append({name: table.total_rank for name, table in inputs.lora._tables.items()})
            books.reserve(500)
        return torch.zeros(1, 64)

    model = load(tiny_llama)
    bank = random_bank(model, tiny_llama)
    before = {name: table.total_rank for name, table in bank._tables.items()}
    monkeypatch.setattr(gpu_memory.ModelRunner, "run", run_of(books, []))
    monkeypatch.setattr(gpu_memory, "graphs_for", lambda *_: None)
    monkeypatch.setattr(gpu_memory.Sampler, "sample", sample)
    monkeypatch.setattr(type(model), "forward", forward)
    config = EngineConfig(max_num_seqs=5, max_num_batched_tokens=12, enable_lora=True, max_lora_rank=32)
    measured = gpu_memory.measure_steps(model, config, bank)
    assert measured == StepMemory(activations=1000 + 500 + 9000 + NORM_BYTES)
    ((shape, num_masks, positions, rows),) = drawn
    assert shape == (5 + config.max_drafts, model.config.vocab_size) and num_masks == sum(positions) == shape[0]
    assert (rows["num_logprobs"] == 20).all() and (rows["temperature"] > 0).all()
    assert {(row["top_p"] < 1, row["min_p"] > 0) for row in rows} == {(True, False), (False, True)}
    (ranks,) = adapted
    assert ranks == {name: 32 * len(table.sizes) for name, table in bank._tables.items()}
    assert before == {name: table.total_rank for name, table in bank._tables.items()}, "no launch became wider"


def test_the_steps_of_a_draft_model_are_measured_too(tiny_llama, books, monkeypatch):
    """Of as many tokens as it may catch up with in one, and with logits as wide as the target's."""
    seen: list[Batch] = []
    shapes: list[Any] = []
    monkeypatch.setattr(gpu_memory.ModelRunner, "run", run_of(books, seen))
    monkeypatch.setattr(gpu_memory, "graphs_for", lambda *_: FakeGraphs(books))
    monkeypatch.setattr(gpu_memory.Sampler, "sample", lambda _, logits, *others: shapes.append(logits.shape))
    draft, config = DraftModel(load(tiny_llama), "digest"), EngineConfig(max_num_seqs=5, max_num_batched_tokens=4096)
    measured = draft_worker.measure_draft(config, draft, 1000)
    assert measured == StepMemory(activations=1000, graphs=300 + 10 * 20)
    assert seen[0].num_tokens == 100, "no longer than the model takes"
    assert shapes == [(5, 1000)], "a draw for each row"
    assert draft_worker.draft_steps(config).most_tokens == 256 + 5
    assert measured.beside(StepMemory(activations=7, graphs=2)) == StepMemory(activations=1007, graphs=502)
    assert draft_worker.measure_draft(EngineConfig(kv_cache_memory=1), draft, 1000) is None


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


CUDA = torch.device("cuda", 0)


@given(share=st.floats(0.05, 1), own=st.integers(0, 9 * GIB), others=st.integers(0, 9 * GIB))
def test_a_share_of_a_gpu_is_this_processs_own(share: float, own: int, others: int) -> None:
    """Whatever other processes have, an engine gets its share less what it has itself, or what is free."""
    config = EngineConfig(gpu_memory_utilization=share)
    with pytest.MonkeyPatch.context() as patch:
        books = Books(own, min(others, Books.total - own))
        books.install(patch)
        room = device.gpu_room(config, CUDA)
        free = books.total - books.taken - books.others
        assert room == int(min(share * books.total - own, free))
        books.others = 0  # they end
        assert device.gpu_room(config, CUDA) == int(min(share * books.total - own, books.total - own)) >= room


def test_two_engines_of_a_gpu_get_the_same(books, monkeypatch):
    """Each has half of nine tenths. The second one's pool once was what its weights are less than nothing."""
    config = EngineConfig(gpu_memory_utilization=0.45)
    books.taken = GIB  # the weights of the first
    first = device.kv_bytes(config, CUDA)
    books.others, books.taken = GIB + first, GIB  # the first one fills its share, and the second has its weights
    assert device.kv_bytes(config, CUDA) == first == int(3.5 * GIB)


def test_weights_get_what_the_least_pool_leaves(tiny_llama, books):
    from rootgraft.engine.checkpoint.read_config import read_model_config
    from rootgraft.engine.models.kv_pool import bytes_per_page

    model, dtype = read_model_config(tiny_llama), torch.bfloat16
    books.taken, books.others = 0, 2 * GIB
    page = bytes_per_page(model, 16, dtype)

    def room(**options: Any) -> int:
        return kv_budget.weight_room(EngineConfig(**options), model, CUDA, dtype)

    assert room() == 8 * GIB - 3 * page, "what is free"
    assert room(gpu_memory_utilization=0.5) == 5 * GIB - 3 * page, "its share"
    assert room(max_model_len=160) == 8 * GIB - 12 * page
    assert room(kv_cache_memory=1.5, gpu_memory_utilization=0.1) == 6.5 * GIB, "a pool that is named counts as it is"
    assert room(num_gpu_blocks_override=100, gpu_memory_utilization=0.1) == 8 * GIB - 100 * page
    assert room(kv_cache_memory=100) == 0
    assert kv_budget.weight_room(EngineConfig(), None, CUDA, dtype) == 8 * GIB
