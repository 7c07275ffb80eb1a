"""Models of the transformers library over our KV pool, against the library itself and PEFT on it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from support.models.library_models import MODELS, VOCAB, library_logits, make_library_adapter, save_library_model
from support.models.lora_driver import AdaptedRun
from support.models.paged_run import CPU, PagedRun, run_ragged
from torch import Tensor

from rootgraft.engine.checkpoint.families.family_table import BY_ARCHITECTURE
from rootgraft.engine.checkpoint.families.library_classes import LIBRARY_CLASSES
from rootgraft.engine.models.transformers.load_transformers_model import load_transformers_model
from rootgraft.engine.models.transformers.transformers_model import TransformersModel
from rootgraft.lora.lora_step import AdapterBank
from rootgraft.lora.read_adapter import AdapterReader

RANDOM = random.Random(7)
PROMPTS = [[RANDOM.randrange(VOCAB) for _ in range(length)] for length in (37, 1, 23)]
PAGE = 4


@pytest.fixture(scope="module", params=MODELS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, TransformersModel]:
    folder = save_library_model(request.param, tmp_path_factory.mktemp(request.param))
    return request.param, load_transformers_model(folder, dtype=torch.float32, device=CPU)


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())


def test_logits_in_ragged_chunks(served: tuple[str, TransformersModel]) -> None:
    name, model = served
    for prompt, logits in zip(PROMPTS, run_ragged(model, PROMPTS, PAGE, random.Random(1)), strict=True):
        assert_same(logits, library_logits(name, prompt))


def test_a_prefix_hit(served: tuple[str, TransformersModel]) -> None:
    """A row that begins with another's pages, beside one without."""
    name, model = served
    run = PagedRun(model, PAGE, 2, len(PROMPTS[0]))
    run.step({0: PROMPTS[0]})
    shared = 5
    run.table[1, :shared] = run.table[0, :shared]
    run.done[1] = shared * PAGE
    other = [*PROMPTS[0][: run.done[1]], *PROMPTS[2][:9]]
    assert_same(run.step({1: other[run.done[1] :]})[1], library_logits(name, other)[-9:])


def test_adapters_on_every_linear_module(served: tuple[str, TransformersModel], tmp_path: Path) -> None:
    """Two in one batch, in chunks, beside a row without one."""
    name, model = served
    layout = model.layout
    bank, reader = AdapterBank(layout, 2), AdapterReader(layout, max_rank=8)
    folders = [make_library_adapter(name, tmp_path / str(slot), slot) for slot in range(2)]
    for slot, folder in enumerate(folders):
        bank.install(slot, reader.read(str(folder)))
    run = AdaptedRun(model, bank, [1, -1, 0])
    pieces = [run.extend([PROMPTS[0][start : start + 13]] * 3) for start in range(0, len(PROMPTS[0]), 13)]
    second, plain, first = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    assert_same(plain, library_logits(name, PROMPTS[0]))
    assert_same(first, library_logits(name, PROMPTS[0], folders[0]))
    assert_same(second, library_logits(name, PROMPTS[0], folders[1]))
    assert (first - plain).abs().max() > 0.05


def test_the_list_of_tested_classes_is_that_of_these_models() -> None:
    assert tuple(sorted(MODELS)) == LIBRARY_CLASSES
    assert len(MODELS.keys() - BY_ARCHITECTURE.keys()) >= 15
