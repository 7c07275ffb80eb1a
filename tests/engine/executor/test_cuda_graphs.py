"""Captured steps give what steps give that are run op by op, on the GPU's kernels, which the interpreter runs.

A capture is played by keeping the pass: a replay runs it again, over the memory that it was captured with.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engine.random_bank import random_bank
from support.kernels import triton_interpreter
from support.machine.thoroughness import is_thorough, taking_turns
from support.models.paged_run import pool
from support.models.tiny_models import save

from benchmarks.gpu.measure import launches
from rootgraft.engine.batch import Batch, Row, RowStart
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.executor import cuda_graphs
from rootgraft.engine.executor.cuda_graphs import CudaGraphs, Variant, graphs_for, sizes_up_to
from rootgraft.engine.executor.input_builder import InputBuilder
from rootgraft.engine.loading.load_model import load_model
from rootgraft.engine.models.decoder import DecoderModel
from rootgraft.engine.models.forward_inputs import ForwardInputs
from rootgraft.engine.models.kv_pool import KvPool
from rootgraft.engine.types import SamplingParams
from rootgraft.kernels import state_reference
from rootgraft.kernels.ops import use_native
from rootgraft.kernels.triton import shared_prefixes
from rootgraft.lora.lora_step import AdapterBank
from rootgraft.lora.own.own_weights import OwnRows, OwnStep, OwnWeights, TokenPart
from rootgraft.lora.published.saved_modules import NormWeights

# Attention leaves the memory of tokens that pad a step as it was, and what follows computes with it.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")

PAGE_SIZE, WIDTH, ROWS = 4, 12, 6  # tokens of a page, pages of a sequence, sequences
PAGES = 2 * ROWS * WIDTH
CPU = torch.device("cpu")
SEEDS = range(6 if is_thorough() else 1)  # a step takes seconds in the interpreter
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2}


def random_steps(seed: int) -> list[list[int]]:
    """Tokens of each sequence in each of three steps, 0 for those that are not in it."""
    rng, steps = random.Random(seed), list[list[int]]()
    while len(steps) < 3:
        counts = rng.choices((0, 1, 1, 3), k=ROWS)
        if any(counts):
            steps.append(counts)
    return steps


def keep(forward: Callable[[], None]) -> Callable[[], None]:
    """The pass itself, which runs again whenever it is called."""
    return forward


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a model as small as can be."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": 97,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    made = tmp_path_factory.mktemp("smallest")
    (made / "config.json").write_text(json.dumps(config))
    return made


@functools.cache
def model_of(folder: Path, dtype: torch.dtype = torch.float32) -> DecoderModel:
    return load_model(folder, dtype=dtype, device=CPU, max_positions=WIDTH * PAGE_SIZE, dummy=True)


@pytest.fixture
def low_gate(monkeypatch: pytest.MonkeyPatch, interpreted: None) -> None:
    """Two rows that share two pages read them together."""
    monkeypatch.setattr(shared_prefixes, "LEAST_SHARERS", 2)
    monkeypatch.setattr(shared_prefixes, "LEAST_TOKENS", 2 * PAGE_SIZE)
    monkeypatch.setattr(shared_prefixes, "LEAST_READS", 0)
    monkeypatch.setattr(shared_prefixes, "ITEM_KEYS", 2 * PAGE_SIZE)
    monkeypatch.setattr(shared_prefixes, "MOST_ITEMS", 4)
    monkeypatch.setattr(shared_prefixes, "MOST_RESULTS", 3)


def bank_of(model: DecoderModel, folder: Path) -> AdapterBank:
    return random_bank(model, folder, told=triton_interpreter.allow)


class World:
    """Sequences that all begin with the same pages, on a pool with graphs and on one without, or in plain torch."""

    def __init__(
        self, model: DecoderModel, bank: AdapterBank | None = None, common: int = 3, *, is_plain: bool = False
    ) -> None:
        self.model, self.is_plain = model, is_plain
        self.pools = [pool(model, PAGES, PAGE_SIZE, ROWS) for _ in range(2)]
        self.tolerance = TOLERANCE[model.dtype]
        states = model.config.has_states
        self.builder = InputBuilder(ROWS, WIDTH * PAGE_SIZE, PAGE_SIZE, CPU, bank, has_states=states)
        self.graphs = CudaGraphs(
            model, self.pools[0], self.builder, keep, max_rows=ROWS, max_tokens=2 * ROWS, max_rank=4
        )
        self.rng = np.random.default_rng(0)
        self.common = common
        self.pages = [[*range(common), *range(WIDTH * (row + 1), WIDTH * (row + 2) - common)] for row in range(ROWS)]
        self.lengths = [0] * ROWS
        self.slots = [-1, 0, 1, -1, 0, 1] if bank else [-1] * ROWS

    def start(self) -> None:
        """Compute the common pages with the first sequence; the others find them."""
        starts = tuple(RowStart(row, SamplingParams(), [], 0, (), 0, slot) for row, slot in enumerate(self.slots))
        count = self.common * PAGE_SIZE
        tokens = self.rng.integers(0, 97, count).tolist()
        self.compare(Batch((Row(0, 0, tokens, 0, tuple(self.pages[0]), False, 0),), starts))
        self.lengths = [count] * ROWS
        for row in range(1, ROWS):
            self.builder._pages[row, : len(self.pages[row])] = self.pages[row]

    def step(self, counts: list[int]) -> None:
        """Compute some tokens of each sequence, as many as fit."""
        rows = []
        for row, wanted in enumerate(counts):
            count = min(wanted, len(self.pages[row]) * PAGE_SIZE - self.lengths[row])
            if count:
                tokens = self.rng.integers(0, 97, count).tolist()
                rows.append(Row(row, self.lengths[row], tokens, 0, (), True, 0))
                self.lengths[row] += count
        if rows:
            self.compare(Batch(tuple(rows)))

    def compare(self, batch: Batch) -> None:
        """A step with graphs and one without give the same hidden states and the same KV."""
        arrays = self.builder.build(batch)
        actual = self.graphs.forward(arrays)
        use_native(not self.is_plain)
        try:
            expected = self.model.forward(self.builder.to_tensors(arrays), self.pools[1])
        finally:
            use_native(True)
        assert actual.shape == expected.shape
        pairs = [
            (actual, expected),
            (self.pools[0].caches[0].k, self.pools[1].caches[0].k),
            (self.pools[0].caches[0].v, self.pools[1].caches[0].v),
        ]
        for index, layer in enumerate(self.model.config.layers):
            if layer.recurrent is not None:  # the last state is for padding
                for ours, theirs in zip(*(self.states(pool, index) for pool in self.pools), strict=True):
                    pairs.append((ours[:-1], theirs[:-1]))
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs, rtol=self.tolerance, atol=self.tolerance)

    @staticmethod
    def states(pool: KvPool, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What a layer's convolution and scan keep of each row."""
        return pool.beside.get(layer) or (pool.k_layers[layer], pool.v_layers[layer])


def count_replays(world: World) -> list[Variant]:
    """A list that grows by the variant of each replay."""
    replayed: list[Variant] = []

    def counted(variant: Variant, replay: Callable[[], None]) -> None:
        replayed.append(variant)
        replay()

    for variant, replay in world.graphs._replays.items():
        world.graphs._replays[variant] = functools.partial(counted, variant, replay)
    return replayed


@pytest.mark.usefixtures("low_gate")
def test_decoding_drafts_adapters_and_shared_prefixes(folder: Path) -> None:
    model = model_of(folder)
    world = World(model, bank_of(model, folder))
    world.graphs.capture(world.graphs.variants)
    world.start()
    for counts in ([1, 1, 1, 0, 0, 0], [1, 3, 0, 1, 0, 0], [0, 0, 2, 0, 0, 0], [1, 0, 0, 1, 0, 0]):
        world.step(counts)


@pytest.mark.usefixtures("interpreted")
def test_recurrent_states(tmp_path: Path) -> None:
    """Padding changes no state of a row."""
    world = World(load_model(save("lfm2", tmp_path), dtype=torch.float32, device=CPU, max_positions=64))
    world.graphs.capture([each for each in world.graphs.variants if each.num_tokens in (2, 4, 8) and not each.shares])
    world.start()
    for counts in ([1, 1, 1, 0, 0, 0], [1, 3, 0, 1, 0, 2], [0, 0, 2, 0, 0, 0], [1, 0, 0, 1, 1, 0]):
        world.step(counts)


@pytest.mark.heavy
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    "family", taking_turns(["bamba", "falcon_h1", "qwen3_next", "kimi_linear", "bailing_hybrid"], 2)
)
def test_recurrent_scans(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured steps of state spaces and delta nets give what plain torch gives, whose ops, which read slots back, no
    captured step runs."""
    world = World(load_model(save(family, tmp_path), dtype=torch.float32, device=CPU, max_positions=64), is_plain=True)
    world.graphs.capture([each for each in world.graphs.variants if each.num_tokens in (2, 8) and not each.shares])
    world.start()
    for counts in ([1, 0, 1, 0, 0, 0], [1, 3, 0, 1, 0, 2]):
        world.step(counts)
    for name in ("causal_conv", "ssm_scan", "delta_scan", "gated_norm"):
        monkeypatch.setattr(state_reference, name, pytest.fail)
    world.graphs.forward(world.builder.build(Batch((Row(0, world.lengths[0], [5], 0, (), True, 0),))))


@pytest.mark.usefixtures("low_gate")
def test_in_the_types_of_a_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model in bf16 whose tensors say that they are on a GPU: kernels are chosen as there, fp32 y of adapters too."""
    model = model_of(folder, torch.bfloat16)
    world = World(model, bank_of(model, folder))
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    world.graphs.capture(world.graphs.variants)
    world.start()
    with launches() as launched:
        for counts in ([1, 1, 1, 0, 0, 0], [1, 3, 0, 1, 0, 0], [0, 0, 2, 0, 0, 0]):
            world.step(counts)
    within = {"_expand_gated", "_expand_rope_store", "_expand_add_norm"}
    assert launched >= {"_gather", "_shrink", "_expand", "_rms_norm", "_rope_store_kv", "decode", "extend"} | within


@pytest.mark.heavy
@pytest.mark.usefixtures("low_gate")
@pytest.mark.parametrize("seed", SEEDS)
def test_padded_steps_are_steps(folder: Path, seed: int) -> None:
    world = World(model_of(folder))
    world.graphs.capture(world.graphs.variants)
    world.start()
    for counts in [[1] * ROWS, *random_steps(seed)]:
        world.step(counts)


@pytest.mark.heavy
@pytest.mark.usefixtures("low_gate")
@pytest.mark.parametrize("seed", SEEDS)
def test_padded_steps_with_adapters_are_steps(folder: Path, seed: int) -> None:
    world = World(model_of(folder), bank_of(model_of(folder), folder))
    world.graphs.capture(world.graphs.variants)
    world.start()
    for counts in [[1] * ROWS, [1, 0, 0, 1, 0, 0], [0, 1, 0, 0, 0, 0], *random_steps(seed)]:
        world.step(counts)


@pytest.mark.usefixtures("low_gate")
def test_each_step_takes_its_least_variant(folder: Path) -> None:
    world = World(model_of(folder), bank_of(model_of(folder), folder))
    replayed: list[Variant] = []
    for variant in world.graphs.variants:
        world.graphs._replays[variant] = lambda variant=variant: replayed.append(variant)
    cases = {
        (1, 0, 0, 0, 0, 0): Variant(1, False, False, False),
        (1, 0, 0, 1, 0, 0): Variant(2, False, False, False),
        (0, 1, 0, 0, 0, 0): Variant(1, False, False, True),
        (5, 0, 0, 1, 0, 0): Variant(8, True, False, False),
        (3, 3, 0, 2, 1, 3): Variant(16, True, False, True),
    }
    builder = world.builder
    builder.build(
        Batch(
            (Row(0, 0, [1], 0, (0,), False, 0),),
            tuple(RowStart(row, SamplingParams(), [], 0, (), 0, slot) for row, slot in enumerate(world.slots)),
        )
    )
    for counts, variant in cases.items():
        rows = tuple(
            Row(row, 0, [1] * count, 0, tuple(world.pages[row]), True, 0) for row, count in enumerate(counts) if count
        )
        world.graphs.forward(builder.build(Batch(rows)))
        assert replayed[-1] == variant
    sharing_rows = tuple(Row(row, 4 * PAGE_SIZE, [1], 0, tuple(world.pages[row]), True, 0) for row in range(ROWS))
    world.graphs.forward(builder.build(Batch(sharing_rows)))
    assert replayed[-1] == Variant(8, False, True, True)


@pytest.mark.usefixtures("low_gate")
def test_what_no_variant_holds_is_run_op_by_op(folder: Path) -> None:
    world = World(model_of(folder))
    for variant in world.graphs.variants:
        world.graphs._replays[variant] = pytest.fail
    world.compare(Batch((Row(0, 0, [3] * 33, 0, tuple(world.pages[0]), True, 0),)))


@pytest.mark.heavy
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("family", taking_turns(["gpt_oss", "deepseek_v2_lite"], 2))
def test_adapters_on_experts_and_heads(family: str, tmp_path: Path) -> None:
    """Graphs with launches for them, and graphs without where a step has none."""
    base = save(family, tmp_path)
    model = load_model(base, dtype=torch.float32, device=CPU, max_positions=WIDTH * PAGE_SIZE)
    world = World(model, bank_of(model, base))
    assert world.builder.bank is not None and world.builder.bank.products
    kinds = [each for each in world.graphs.variants if each.num_tokens in (2, 8) and not each.shares]
    world.graphs.capture(kinds)
    world.start()
    replayed = count_replays(world)
    for counts in ([1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 0, 0], [1, 3, 1, 0, 0, 0], [0, 0, 3, 1, 0, 3]):
        world.step(counts)
    assert [variant.adapts_products for variant in replayed] == [True, False, True, False]
    assert all(variant.is_adapted for variant in replayed)


@pytest.mark.usefixtures("interpreted")
def test_own_embeddings(folder: Path) -> None:
    """All rows of an adapter, of some tokens and beyond the model's vocabulary, and steps without them in between."""
    model = model_of(folder)
    bank = bank_of(model, folder)
    generator = torch.Generator().manual_seed(2)

    def embedding(count: int, ids: list[int] | None) -> OwnWeights:
        rows = OwnRows(str(count), torch.randn(count, 32, generator=generator), None)
        return OwnWeights(embedding=TokenPart(rows, None if ids is None else torch.tensor(ids)))

    bank._own = [embedding(101, None), embedding(60, [*range(5, 65)])]
    world = World(model, bank)
    world.graphs.capture([each for each in world.graphs.variants if each.num_tokens in (2, 8) and not each.shares])
    world.start()
    replayed = count_replays(world)
    for counts in ([1, 1, 0, 0, 0, 0], [0, 1, 2, 2, 0, 0], [1, 0, 0, 1, 0, 0], [0, 1, 1, 0, 0, 0], [2, 0, 0, 3, 0, 0]):
        world.step(counts)
    world.compare(Batch((Row(1, world.lengths[1], [100, 7], 0, (), True, 0),)))
    assert [variant.num_tokens for variant in replayed] == [2, 8, 2, 2, 8, 2]


def test_own_norms_are_run_op_by_op(folder: Path) -> None:
    model = model_of(folder)
    world = World(model, bank_of(model, folder))
    own = OwnStep([(torch.tensor([0]), OwnWeights(norms={"norm": NormWeights(torch.ones(32), None)}))], 1)
    assert not world.graphs._holds_own(own)


def test_sizes_rise_to_what_is_asked_for() -> None:
    assert sizes_up_to(1) == [1]
    assert sizes_up_to(20) == [1, 2, 4, 8, 16, 24]
    assert sizes_up_to(64)[-1] == 64 and sizes_up_to(65)[-1] == 80
    for most in range(1, 513):
        sizes = sizes_up_to(most)
        assert sizes[-1] >= most and (len(sizes) == 1 or sizes[-2] < most)


def test_variants_are_those_that_a_step_can_ask_for(folder: Path) -> None:
    world = World(model_of(folder))
    variants = world.graphs.variants
    assert variants[0] == Variant(16, True, True, False)
    assert not any(variant.is_adapted for variant in variants)
    assert max(variant.num_tokens for variant in variants if not variant.is_mixed) == 8
    assert Variant(1, True, False, False) not in variants


def test_a_pass_knows_how_many_tokens_pad_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that they go to no expert."""
    world = World(model_of(folder))
    seen: list[ForwardInputs] = []

    def watched(self: DecoderModel, inputs: ForwardInputs, kv: Any) -> torch.Tensor:
        seen.append(inputs)
        return torch.zeros(len(inputs.token_ids), self.config.hidden_size)

    monkeypatch.setattr(DecoderModel, "forward", watched)
    monkeypatch.setattr(cuda_graphs, "capture_for", lambda *_: lambda run: run() or run)
    config = EngineConfig(max_num_batched_tokens=4, max_num_seqs=4)
    graphs = graphs_for(config, world.model, world.pools[0], world.builder)
    assert graphs is not None
    graphs.capture([each for each in graphs.variants if not each.shares])
    assert seen and all(inputs.num_tokens is not None for inputs in seen)
    for inputs in seen:
        assert inputs.num_tokens is not None and inputs.num_tokens.data_ptr() == inputs.query_start[-1].data_ptr()


def test_the_chunks_of_a_default_server_are_captured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(model_of(folder))
    monkeypatch.setattr(cuda_graphs, "capture_for", lambda *_: lambda run: run)
    largest = {}
    for most in (64, 640, 1024, 2048, 8192):
        config = EngineConfig(max_num_batched_tokens=most)
        graphs = graphs_for(config, world.model, world.pools[0], world.builder)
        assert graphs is not None
        largest[most] = max(variant.num_tokens for variant in graphs.variants)
        assert len({variant.num_tokens for variant in graphs.variants}) <= 43
    expected = {64: 64, 640: 640, 1024: 1024, 2048: 2048, 8192: 2048}
    assert largest == expected, "a larger step computes longer than it is launched"


def test_eager_steps_are_not_captured(folder: Path) -> None:
    world = World(model_of(folder))
    assert graphs_for(EngineConfig(), world.model, world.pools[0], world.builder) is None, "a CPU captures nothing"
    assert graphs_for(EngineConfig(enforce_eager=True), world.model, world.pools[0], world.builder) is None
