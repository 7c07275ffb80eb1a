"""Only the hidden states that somebody reads are computed to the end: those of a pass that computes all."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.random_bank import random_bank

from rootgraft.engine.batch import Batch, Row, RowStart
from rootgraft.engine.executor.cpu_graphs import CpuGraphs
from rootgraft.engine.executor.input_builder import HostInputs, InputBuilder
from rootgraft.engine.loading.load_model import load_model
from rootgraft.engine.models.decoder import DecoderModel
from rootgraft.engine.models.kv_pool import KvPool
from rootgraft.engine.types import SamplingParams
from rootgraft.kernels import ops
from rootgraft.lora.lora_step import AdapterBank

PAGE_SIZE, ROWS, WIDTH = 4, 4, 30  # tokens of a page, sequences, pages of each
CPU = torch.device("cpu")
TYPES = [torch.float32, torch.bfloat16]

# Tokens of a row in a step, whether the next is drawn, how many are drafts, how many have a target.
Part = tuple[int, bool, int, int]
PARTS = st.integers(1, 9).flatmap(
    lambda count: st.one_of(
        st.tuples(st.just(count), st.just(False), st.just(0), st.integers(0, count)),
        st.integers(0, count - 1).flatmap(
            lambda drafts: st.tuples(st.just(count), st.just(True), st.just(drafts), st.integers(0, count - 1 - drafts))
        ),
    )
)


class Growing:
    """Sequences of random tokens, each in pages of its own; with a bank two of them have an adapter."""

    def __init__(self, model: DecoderModel, bank: AdapterBank | None = None) -> None:
        self.random = random.Random(3)
        self.lengths = [0] * ROWS
        self.builder = InputBuilder(ROWS, WIDTH * PAGE_SIZE, PAGE_SIZE, CPU, bank)
        self.pool = KvPool(model.config, ROWS * WIDTH, PAGE_SIZE, model.dtype, CPU)
        slots = [-1, 0, 1, -1] if bank else [-1] * ROWS
        self.starts = tuple(RowStart(row, SamplingParams(), [], 0, (), 0, slot) for row, slot in enumerate(slots))

    def step(self, parts: list[Part | None]) -> HostInputs:
        """Of each sequence a part, or nothing."""
        rows = []
        for row, part in enumerate(parts):
            if part is None:
                continue
            count, draws, drafts, targets = part
            tokens = [self.random.randrange(97) for _ in range(count)]
            pages = tuple(range(row * WIDTH, (row + 1) * WIDTH))
            rows.append(Row(row, self.lengths[row], tokens, 0, pages, draws, 0, drafts, (1,) * targets))
            self.lengths[row] += count
        starts, self.starts = self.starts, ()
        return self.builder.build(Batch(tuple(rows), starts))


def whole_pass(model: DecoderModel, growing: Growing, step: HostInputs, pool: KvPool) -> torch.Tensor:
    """The hidden states of all tokens."""
    return model.forward(growing.builder.to_tensors(replace(step, kept=None)), pool)


def test_the_last_tokens_of_rows_are_kept(tiny_llama: Path) -> None:
    growing = Growing(load_model(tiny_llama, dtype=torch.float32, device=CPU, max_positions=128))
    step = growing.step([(5, True, 0, 0), (4, False, 0, 0), (6, True, 2, 2), (3, False, 0, 2)])
    assert step.kept is not None
    assert step.kept.tokens.tolist() == [4, 10, 11, 12, 13, 14, 16, 17]
    assert step.kept.query_start.tolist() == [0, 1, 1, 6, 8]
    assert (step.kept.max_query, step.num_kept, step.num_tokens) == (5, 8, 18)
    assert step.hidden_index(step.kept.tokens[2:5]).tolist() == [2, 3, 4]
    assert growing.step([(3, True, 2, 0), (1, True, 0, 0), None, (4, False, 0, 4)]).kept is None


@pytest.mark.parametrize("dtype", TYPES)
@settings(max_examples=25, deadline=None)
@given(steps=st.lists(st.lists(st.one_of(PARTS, st.none()), min_size=ROWS, max_size=ROWS).filter(any), max_size=4))
def test_kept_states_are_those_of_a_whole_pass(tiny_llama: Path, dtype: torch.dtype, steps: list[list[Part]]) -> None:
    model = load_model(tiny_llama, dtype=dtype, device=CPU, max_positions=128)
    growing = Growing(model)
    pool = KvPool(model.config, ROWS * WIDTH, PAGE_SIZE, dtype, CPU)
    for parts in steps:
        step = growing.step(parts)
        hidden = model.forward(growing.builder.to_tensors(step), growing.pool)
        whole = whole_pass(model, growing, step, pool)
        assert torch.equal(hidden, whole if step.kept is None else whole[torch.from_numpy(step.kept.tokens)])
        assert torch.equal(growing.pool.caches[0].k, pool.caches[0].k) and torch.equal(
            growing.pool.caches[0].v, pool.caches[0].v
        )


@pytest.mark.skipif(ops.native_kernels() is None, reason="no C++ compiler")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("has_adapters", [False, True])
def test_replayed_steps_keep_the_same(tiny_llama: Path, dtype: torch.dtype, has_adapters: bool) -> None:
    """The first step keeps nothing, so there is nothing to record yet."""
    model = load_model(tiny_llama, dtype=dtype, device=CPU, max_positions=128)
    bank = random_bank(model, tiny_llama) if has_adapters else None
    growing = Growing(model, bank)
    pool = KvPool(model.config, ROWS * WIDTH, PAGE_SIZE, dtype, CPU)
    replayed = CpuGraphs(model, growing.pool, growing.builder, ROWS)
    one: Part = (1, True, 0, 0)
    for parts in (
        [(6, False, 0, 0), (3, False, 0, 0), (5, False, 0, 0), (2, False, 0, 0)],
        [(9, True, 0, 0), (7, True, 0, 3), one, (4, False, 0, 0)],
        [one, one, one, one],
        [(3, True, 2, 0), (8, True, 0, 0), (20, False, 0, 0), one],
        [(7, False, 0, 0), (5, False, 0, 0), (6, False, 0, 0), None],
        [None, (12, True, 1, 0), (2, True, 0, 0), (3, True, 2, 0)],
    ):
        step = growing.step(parts)
        hidden = replayed.forward(step)
        whole = whole_pass(model, growing, step, pool)
        assert torch.equal(hidden, whole if step.kept is None else whole[torch.from_numpy(step.kept.tokens)])
        assert torch.equal(growing.pool.caches[0].k, pool.caches[0].k) and torch.equal(
            growing.pool.caches[0].v, pool.caches[0].v
        )
    assert len(replayed.recorded) == 1
