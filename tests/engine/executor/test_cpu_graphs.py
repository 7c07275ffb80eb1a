"""Replayed steps compute, bit for bit, what steps run op by op compute."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from support.models.tiny_models import save

from rootgraft.engine.batch import Batch, Row
from rootgraft.engine.executor import cpu_graphs
from rootgraft.engine.executor.cpu_graphs import CpuGraphs
from rootgraft.engine.executor.input_builder import InputBuilder
from rootgraft.engine.loading.load_model import load_model
from rootgraft.engine.models.kv_pool import KvPool
from rootgraft.kernels import ops

pytestmark = pytest.mark.skipif(ops.native_kernels() is None, reason="no C++ compiler")

PAGES, PAGE_SIZE, ROWS = 40, 4, 4
CPU = torch.device("cpu")


class Rows:
    """Sequences that grow by random tokens, each in pages of its own."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lengths = [0] * ROWS

    def batch(self, counts: tuple[int, ...]) -> Batch:
        rows = []
        for row, count in enumerate(counts):
            start, width = self.lengths[row], PAGES // ROWS
            tokens = [self.random.randrange(64) for _ in range(count)]
            pages = tuple(range(row * width, (row + 1) * width))
            rows.append(Row(row, start, tokens, 0, pages, draws=count > 0, num_generated=0))
            self.lengths[row] += count
        return Batch(tuple(rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replayed_steps_are_bitwise_the_same(tiny_llama: Path, dtype: torch.dtype) -> None:
    model = load_model(tiny_llama, dtype=dtype, device=CPU, max_positions=64)
    pools = [KvPool(model.config, PAGES, PAGE_SIZE, dtype, CPU) for _ in range(2)]
    builder = InputBuilder(ROWS, PAGES // ROWS * PAGE_SIZE, PAGE_SIZE, CPU)
    replayed = CpuGraphs(model, pools[0], builder, ROWS)
    rows = Rows(0)
    for counts in [(3, 5), (1,), (1, 1, 1, 1), (1,), (1, 3), (2, 0, 7), (1, 1, 1, 1), (9,), (1, 1, 2)]:
        inputs = builder.build(rows.batch(counts))
        hidden = replayed.forward(inputs)
        assert torch.equal(hidden, model.forward(builder.to_tensors(inputs), pools[1]))
    assert torch.equal(pools[0].caches[0].k, pools[1].caches[0].k) and torch.equal(
        pools[0].caches[0].v, pools[1].caches[0].v
    )
    assert replayed.recorded == [frozenset()]


def test_mixtures_are_recorded_and_route_anew(tmp_path: Path) -> None:
    model = load_model(save("gpt_oss", tmp_path), dtype=torch.float32, device=CPU, max_positions=64)
    pools = [KvPool(model.config, PAGES, PAGE_SIZE, torch.float32, CPU) for _ in range(2)]
    builder = InputBuilder(ROWS, PAGES // ROWS * PAGE_SIZE, PAGE_SIZE, CPU)
    replayed = CpuGraphs(model, pools[0], builder, ROWS)
    rows = Rows(3)
    for counts in [(3, 5), (1,), (1, 1, 1, 1), (1, 3), (2, 0, 7), (9,), (1, 1, 2)]:
        inputs = builder.build(rows.batch(counts))
        assert torch.equal(replayed.forward(inputs), model.forward(builder.to_tensors(inputs), pools[1]))
    assert replayed.recorded == [frozenset()]


def test_a_step_of_more_tokens_than_there_is_room_for(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_graphs, "_MOST_TOKENS", 4)
    model = load_model(tiny_llama, dtype=torch.float32, device=CPU, max_positions=64)
    pools = [KvPool(model.config, PAGES, PAGE_SIZE, torch.float32, CPU) for _ in range(2)]
    builder = InputBuilder(ROWS, PAGES // ROWS * PAGE_SIZE, PAGE_SIZE, CPU)
    replayed = CpuGraphs(model, pools[0], builder, ROWS)
    rows = Rows(1)
    for counts in [(5,), (4,), (2, 3), (1, 3), (1,)]:
        inputs = builder.build(rows.batch(counts))
        assert torch.equal(replayed.forward(inputs), model.forward(builder.to_tensors(inputs), pools[1]))


def test_a_model_on_plain_torch_is_never_recorded(tiny_llama: Path) -> None:
    ops.use_native(False)
    try:
        model = load_model(tiny_llama, dtype=torch.float32, device=CPU, max_positions=64)
        builder = InputBuilder(ROWS, PAGES // ROWS * PAGE_SIZE, PAGE_SIZE, CPU)
        replayed = CpuGraphs(model, KvPool(model.config, PAGES, PAGE_SIZE, torch.float32, CPU), builder, ROWS)
        rows = Rows(2)
        for _ in range(5):
            replayed.forward(builder.build(rows.batch((1,))))
        assert not replayed.recorded
    finally:
        ops.use_native(True)
