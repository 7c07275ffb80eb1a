"""The kernels that steps of the engine launch on a GPU, counted on a model without memory: none is missing.

Model, adapters, input buffers and sampler are the engine's own, so tensors have the types that they have on a GPU.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from support.kernels.fake_streams import FakeStream, fake_streams
from support.kernels.meta_gpu import GPU, posing_gpu
from support.models.lora_models import LINEARS, VOCAB, base, make_adapter
from support.speculation.eagle_heads import save_head

from rootgraft.engine.batch import Batch, Masks, PageCopy, Row, RowStart
from rootgraft.engine.checkpoint.read_config import open_checkpoint
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.executor import cuda_graphs, load_weights
from rootgraft.engine.executor.draft_worker import measure_draft
from rootgraft.engine.executor.gpu_memory import measure_steps
from rootgraft.engine.executor.worker import Worker
from rootgraft.engine.loading.base_layout import base_layout
from rootgraft.engine.models.draft_head import DraftHead
from rootgraft.engine.types import SamplingParams
from rootgraft.kernels.collectives import ALONE
from rootgraft.kernels.pass_graphs import host_wait
from rootgraft.kernels.triton.graph_branch import branching
from rootgraft.lora.prepare_factors import NORM_BYTES
from rootgraft.lora.read_adapter import AdapterReader

LAYERS, ROWS, PAGE = 2, 4, 16
GREEDY = SamplingParams(temperature=0.0)
PASS = {"_rms_norm": 2 * LAYERS + 1, "_rope_store_kv": LAYERS, "decode": LAYERS, "_gated_activation": LAYERS}
DRAW = dict.fromkeys(("_stats", "_deviations", "_sums", "_levels", "_pick", "_draw"), 1)
EDIT_STAGES = 3  # biases, penalties and bans
# An adapter of all modules: each projection of the layers and the head, and the gather of the embedding. Expansions are
# launches of their own for embedding and head alone: in a layer each is within the launch that reads its result, so
# that a layer has nine launches beside its four products, where it had twelve.
WITHIN = {"_expand_rope_store": LAYERS, "_expand_add_norm": 2 * LAYERS, "_expand_gated": LAYERS}
ADAPTED = {"_gather": 1, "_shrink": 4 * LAYERS + 1, "_expand": 2} | WITHIN
ADAPTED_PASS = {"_rms_norm": 1, "decode": LAYERS} | ADAPTED


@pytest.fixture(scope="module")
def folder(bases: Path) -> Path:
    """A base and an adapter of all its modules."""
    base("native_llama", bases)
    modules = [*LINEARS, "embed_tokens", "lm_head"]
    make_adapter("native_llama", bases, bases / "of_all_modules", r=4, target_modules=modules)
    return bases


class World:
    """A worker on the GPU of meta tensors, with the adapter in slot 0; captured passes are run again at a replay."""

    def __init__(self, folder: Path, launched: list[str], *, eager: bool, head: Path | None = None) -> None:
        self.launched = launched
        self.num_replays, self.is_captured = 0, not eager
        config = EngineConfig(
            dtype="bfloat16", max_num_seqs=ROWS, block_size=PAGE, num_gpu_blocks_override=40, enable_lora=True,
            max_loras=1, max_lora_rank=8, enforce_eager=eager,
            speculative_config=json.dumps({"model": str(head)} if head else {"method": "off"}),
        )  # fmt: skip

        def capture(forward: Callable[[], None]) -> Callable[[], None]:
            assert host_wait(forward) is None, "a capture would fail"

            def replay() -> None:
                self.num_replays += 1
                forward()

            return replay

        path, self.config = folder / "native_llama", config
        with (
            mock.patch.object(load_weights, "choose_device", lambda _: GPU),
            mock.patch.object(cuda_graphs, "capture_for", lambda *_: capture),
        ):
            weights = load_weights.load_weights(config, open_checkpoint(path), path, GPU, ALONE)
            self.worker = Worker(config, path, weights=weights)
        self.draft = weights.draft
        self.worker.overlaps = True
        assert self.worker.adapters is not None
        layout = base_layout(self.worker.model, folder / "native_llama", dummy=False)
        self.worker.adapters.bank.install(0, AdapterReader(layout, 8).read(str(folder / "of_all_modules")))

    def step(
        self, params: SamplingParams, *, slot: int = -1, masked: bool = False, copies: tuple[PageCopy, ...] = ()
    ) -> Counter[str]:
        """A step of one token in each row; returns the launches by kernel."""
        starts = tuple(RowStart(row, params, [1, 2], 2, (), row, slot) for row in range(ROWS))
        rows = tuple(Row(row, 1, [2], 0, (row,), True, 0) for row in range(ROWS))
        words = np.ones((ROWS, -(-VOCAB // 32)), np.int32)
        masks = Masks(tuple(range(ROWS)), words, (-1,) * ROWS)
        # The first step gives rows their adapter; the second is the one that is counted.
        for batch in (Batch(rows, starts), Batch(rows, copies=copies)):
            self.launched.clear()
            step = self.worker.launch(batch)
            step.draw((lambda: masks) if masked else None)
            assert len(step.result().rows) == ROWS
        return Counter(self.launched)


@contextmanager
def reading_zeros() -> Iterator[list[str]]:
    """A GPU of meta tensors, of which the host reads zeros at the end of a step."""
    tolist = torch.Tensor.tolist

    def zeros(tensor: torch.Tensor) -> Any:
        return tolist(torch.zeros_like(tensor, device="cpu") if tensor.device == GPU else tensor)

    with posing_gpu() as launched, mock.patch.object(torch.Tensor, "tolist", zeros):
        yield launched


@pytest.fixture(params=[False, True], ids=["captured", "eager"])
def world(folder: Path, request: pytest.FixtureRequest) -> Iterator[World]:
    with reading_zeros() as launched:
        made = World(folder, launched, eager=request.param)
        yield made
        assert bool(made.num_replays) != request.param


def test_a_step_of_the_base_model(world: World) -> None:
    """A captured draw is the same for all rows; in an eager step of greedy rows the largest logit is all it takes."""
    assert world.step(GREEDY) == (PASS | DRAW if world.is_captured else PASS)


def test_masks(world: World) -> None:
    """The captured draw with masks has the stages of single logits as well, whose list is empty here."""
    edits = {"_edit": EDIT_STAGES} if world.is_captured else {}
    assert world.step(GREEDY, masked=True) == PASS | DRAW | {"_mask": 1} | edits


@pytest.mark.parametrize("params", [{"top_k": 5}, {"top_p": 0.9, "min_p": 0.1}, {"top_n_sigma": 1.0}])
def test_draws(world: World, params: dict[str, float]) -> None:
    assert world.step(SamplingParams(**params)) == PASS | DRAW


def test_an_adapter_of_every_module(world: World) -> None:
    """Embedding and head included: their y, the residual stream and the logits, is fp32."""
    assert world.step(GREEDY, slot=0) == ADAPTED_PASS


def test_half_of_an_adapters_launches_run_beside_products(world: World) -> None:
    """Where a pass has a branch: those that read a product's input. What adds to the result waits for each."""
    beside, waited = "on branch", "main waits for branch"
    with (
        fake_streams(world.launched, FakeStream(world.launched, "main")),
        branching(FakeStream(world.launched, "branch")),  # type: ignore[arg-type]
    ):
        found = world.step(GREEDY, slot=0)
        order = list(world.launched)
    begun = [at for at, name in enumerate(order) if name == beside]
    joined = [at for at, name in enumerate(order) if name == waited]
    assert {name: found[name] for name in ADAPTED} == ADAPTED
    assert len(begun) == len(joined) == found["_shrink"]
    assert all(order[at + 1 : at + 3] == ["_shrink", "on main again"] for at in begun)
    assert all(order[at + 1] in ("_expand", *WITHIN) for at in joined)


def test_all_together(world: World) -> None:
    copies = (PageCopy(0, 20, 5),)
    found = world.step(SamplingParams(top_k=5, logprobs=2), slot=0, masked=True, copies=copies)
    assert found == ADAPTED_PASS | DRAW | {"_mask": 1, "_copy_page": 1}


def test_a_head_that_drafts(folder: Path, tmp_path: Path) -> None:
    """Of known tokens, and behind drafts of its own: one layer in a captured pass, and a captured draw."""
    with reading_zeros() as launched:
        world = World(folder, launched, eager=False, head=save_head(tmp_path / "head", folder / "native_llama"))
        assert world.step(GREEDY) == PASS | DRAW, "the fused hidden states are a product of cuBLAS"
        draft = world.worker.draft
        assert draft is not None
        head = draft._runner._model
        assert isinstance(head, DraftHead) and head.target_ids is not None
        for tensor in (head.target_ids, head.embedding, head.states.given, head.states.left):
            assert isinstance(tensor, torch.Tensor) and tensor.device == GPU
        starts = tuple(RowStart(row, GREEDY, [1, 2, 3], 3, (), row) for row in range(ROWS))
        rows = tuple(Row(row, 0, [2, 3], 0, (row,), True, 0) for row in range(ROWS))
        draft.run(Batch(rows, starts), [(row,) for row in range(ROWS)])
        launched.clear()
        before = world.num_replays
        rows = tuple(Row(row, 2, [4], 0, (), True, 1) for row in range(ROWS))
        draft.run(Batch(rows), [(row,) if row % 2 else () for row in range(ROWS)])
        assert world.num_replays == before + 2
        found = Counter(launched)
        # The activation of so narrow an MLP is left to torch.
        assert found.pop("_rms_norm") and found == {"_rope_store_kv": 1, "decode": 1} | DRAW


def test_the_memory_of_all_steps_is_measured(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model with adapters and of the head that drafts for it: every pass and draw that a GPU's start runs."""
    told: dict[str, Any] = {"memory_reserved": 0, "max_memory_reserved": 1 << 20, "mem_get_info": (1 << 30, 1 << 31)}
    for name in ("empty_cache", "reset_peak_memory_stats", "synchronize", *told):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: told.get(name))
    with reading_zeros() as launched:
        world = World(folder, launched, eager=False, head=save_head(tmp_path / "head", folder / "native_llama"))
        config = replace(world.config, num_gpu_blocks_override=None)
        draft, adapters = world.draft, world.worker.adapters
        assert draft is not None and adapters is not None
        captured: list[bool] = []

        def capture(forward: Callable[[], None]) -> Callable[[], None]:
            captured.append(host_wait(forward) is None)
            return forward

        monkeypatch.setattr(cuda_graphs, "capture_for", lambda *_: capture)
        launched.clear()
        steps = measure_steps(world.worker.model, config, adapters.bank, hidden=draft.hidden_pool)
        assert steps is not None and steps.activations == (1 << 20) + NORM_BYTES
        assert set(launched) >= {"extend", "_shrink", "_draw", "_mask"} and captured == [True] * 4
        assert measure_draft(config, draft, world.worker.vocab_size) is not None
        assert captured == [True] * 8, "the two largest passes and draws of each"
