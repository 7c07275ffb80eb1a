"""A device without memory for any part of a step: no token changes, at most one request fails, the engine goes on.

On a real model with a draft head or model, adapters, masks and scores. Errors are raised once at each place.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine.draft_engine import drafting_despite_others
from support.engine.drafted_requests import ASKS, Answer, answers, assert_same, load, make_core, save_drafted
from support.engine.injected_faults import Fault
from support.machine.thoroughness import is_thorough

from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.executor import draft_weights
from rootgraft.engine.executor.draft_worker import DraftWorker
from rootgraft.engine.executor.head_inputs import HeadInputs
from rootgraft.engine.executor.input_builder import InputBuilder
from rootgraft.engine.executor.model_runner import ModelRunner
from rootgraft.engine.models.decoder import DecoderModel
from rootgraft.engine.models.decoder_layer import DecoderLayer
from rootgraft.engine.models.draft_head import DraftHead
from rootgraft.engine.models.hidden_pool import HiddenPool
from rootgraft.engine.models.kv_pool import KvPool
from rootgraft.engine.sampling.sampler import Sampler
from rootgraft.lora.lora_step import AdapterBank

OF_A_STEP: tuple[tuple[type[Any], str], ...] = (
    (KvPool, "copy"),
    (InputBuilder, "build"),
    (InputBuilder, "to_tensors"),
    (AdapterBank, "recorded_step"),
    (AdapterBank, "head_step"),
    (DecoderModel, "embed"),
    (DecoderLayer, "store"),
    (DecoderLayer, "finish"),
    (DecoderModel, "logits"),
    (DecoderModel, "best"),
    (HiddenPool, "see"),
    (HiddenPool, "write_seen"),
    (ModelRunner, "launch"),
    (ModelRunner, "draw"),
    (Sampler, "start"),
    (Sampler, "draw"),
    (Sampler, "collect"),
)
OF_DRAFTS: tuple[tuple[type[Any], str], ...] = (
    (DraftWorker, "run"),
    (HeadInputs, "give"),
    (HeadInputs, "keep"),
    (DraftHead, "forward"),
    (DraftHead, "logits"),
)
OF_ADAPTERS: tuple[tuple[type[Any], str], ...] = ((AdapterBank, "bring"), (AdapterBank, "install"))

FAULTS = ((1, False), (7, True))
"""The call that raises, and whether it does so after its work."""


@pytest.fixture(scope="module")
def drafting() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        drafting_despite_others(patch, 2)
        # A tokenizer would say that both models have one vocabulary.
        patch.setattr(draft_weights, "has_tokenizer", lambda _: True)
        yield


@pytest.fixture(
    scope="module",
    params=[
        ("head", True),
        pytest.param(("head", False), marks=pytest.mark.heavy),
        pytest.param(("model", True), marks=pytest.mark.heavy),
    ],
    ids=str,
)
def cores(
    drafting: None, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[tuple[EngineCore, dict[int, Answer]]]:
    """A core with drafts, and the answers of one without."""
    kind, overlaps = request.param
    drafted = save_drafted(kind, tmp_path_factory.mktemp(kind))
    plain = make_core(drafted, drafts=False, overlaps=False)
    expected = answers(plain)
    plain.close()
    # Every pass is run op by op, as one with a rare adapter on a GPU is.
    core = make_core(drafted, drafts=True, overlaps=overlaps, enforce_eager=True)
    yield core, expected
    core.close()


def test_no_lack_of_memory_changes_an_answer(cores: tuple[EngineCore, dict[int, Answer]]) -> None:
    core, expected = cores
    assert_same(answers(core), expected)
    assert core.stats()["drafted_model"] > 0
    first, raised = 100, set[str]()
    for index, point in enumerate((*OF_A_STEP, *OF_DRAFTS)):
        for calls, late in FAULTS if is_thorough() else (FAULTS[index % 2],):
            fault = Fault(point, calls, torch.OutOfMemoryError("CUDA out of memory."), late=late)
            with fault.injected():
                found = answers(core, first=first)
            failed = {number for number, each in found.items() if each.end[0] == "CapacityError"}
            assert len(failed) <= (point not in OF_DRAFTS), (point, calls, late)
            assert_same(*({n: each for n, each in some.items() if n not in failed} for some in (found, expected)))
            if fault.was_raised:
                raised.add(f"{point[0].__name__}.{point[1]}")
            first += 100
    assert len(raised) > len(OF_A_STEP) // 2, raised
    assert_same(answers(core, first=first), expected)


def test_an_adapter_without_memory_fails_alone(drafting: None, tmp_path: Path) -> None:
    """Two adapters take turns in one slot: one is brought and installed, the other is cleared."""
    drafted = save_drafted("head", tmp_path)
    core = make_core(drafted, drafts=True, overlaps=True, slots=1)
    expected, first = answers(core), 100
    for point in OF_ADAPTERS:
        for calls in (0, 1):
            fault = Fault(point, calls, torch.OutOfMemoryError("CUDA out of memory."), late=False)
            with fault.injected():
                found = answers(core, first=first)
            assert fault.was_raised
            failed = {number for number, each in found.items() if each.end[0] != expected[number].end[0]}
            [lost] = {ASKS[number].adapter for number in failed}
            assert lost is not None
            assert_same(*({n: each for n, each in some.items() if n not in failed} for some in (found, expected)))
            load(core, drafted, [lost])
            assert_same(answers(core, first=first + 50), expected)
            first += 100
    core.close()
