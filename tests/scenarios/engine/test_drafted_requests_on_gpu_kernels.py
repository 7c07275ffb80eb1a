"""Drafts with masks, adapters, draws, penalties and scores on the GPU's kernels, interpreted and captured.

Each answer is that of an engine without drafts on the CPU's kernels; with KV in 8 bits, that of one without drafts and
without captured passes. A capture is played by keeping the pass. The pool is so small that sequences are preempted.
The kinds of drafts take turns, since each takes ten seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.engine.draft_engine import drafting_despite_others
from support.engine.drafted_requests import ASKS, Answer, Drafted, answers, assert_same, make_core, save_drafted
from support.kernels import triton_interpreter
from support.machine.thoroughness import taking_turns

from rootgraft.engine.executor import cuda_graphs, draft_weights, worker_plan
from rootgraft.kernels.layouts import kv_forms
from rootgraft.lora.lora_step import AdapterBank
from rootgraft.lora.prepare_factors import PreparedAdapter

# Attention leaves the memory of tokens that pad a step as it was, and what follows computes with it.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")

FEW_PAGES = 10


@pytest.fixture
def drafting(monkeypatch: pytest.MonkeyPatch) -> None:
    drafting_despite_others(monkeypatch, 2)
    # A tokenizer would say that both models have one vocabulary.
    monkeypatch.setattr(draft_weights, "has_tokenizer", lambda _: True)
    install = AdapterBank.install

    def allowing(bank: AdapterBank, slot: int, adapter: PreparedAdapter) -> None:
        triton_interpreter.allow(adapter.block)
        install(bank, slot, adapter)

    monkeypatch.setattr(AdapterBank, "install", allowing)


def plain(drafted: Drafted) -> dict[int, Answer]:
    core = make_core(drafted, drafts=False, overlaps=False)
    found = answers(core)
    core.close()
    return found


def captured(drafted: Drafted, monkeypatch: pytest.MonkeyPatch) -> dict[int, Answer]:
    """Return the answers with drafts and captured passes."""
    replayed: list[None] = []

    def capture(forward: Callable[[], None]) -> Callable[[], None]:
        return lambda: replayed.append(forward())

    monkeypatch.setattr(cuda_graphs, "capture_for", lambda *_: capture)
    core = make_core(drafted, drafts=True, overlaps=True, num_pages=FEW_PAGES)
    found, stats = answers(core, at_once=True), core.stats()
    core.close()
    assert replayed and stats["drafted_model"] > 0 and stats["drafts_accepted_model"] > 0
    assert stats["preemptions"] > 0 and stats["prompt_tokens_cached"] > 0
    return found


@pytest.mark.parametrize(
    ("kind", "kv"),
    [
        *taking_turns([("head", None), ("mtp", None), ("model", None)], 3),
        *(pytest.param("head", kv, marks=pytest.mark.heavy) for kv in kv_forms.ROW_DTYPES),
    ],
    ids=str,
)
def test_answers_of_all_kinds_are_kept(
    kind: str,
    kv: torch.dtype | None,
    drafting: None,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafted = save_drafted(kind, tmp_path)
    if kv is not None:
        request.getfixturevalue("interpreted")
        monkeypatch.setattr(worker_plan, "choose_kv_dtype", lambda *_: kv)
    expected = plain(drafted)
    request.getfixturevalue("interpreted")
    found = captured(drafted, monkeypatch)
    assert len(found) == len(ASKS) and all(each.end[0] not in ("", "CapacityError") for each in found.values())
    assert_same(found, expected, 1e-3 if kv is None else 1e-2)
