"""Each figure that decides is one that its part yields in full size: names are rehearsed without a device or memory.

Tensors are on torch's device without memory, times and the engine are made up.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import (
    adapter_files,
    checkpoint_files,
    engine_runs,
    expert_times,
    kernel_times,
    lora_times,
    product_times,
    quantised_times,
    run,
    sampling_times,
    server_times,
)
from benchmarks.gpu.engine_runs import StepTime
from benchmarks.gpu.measure import Ceilings, Line, Machine

META = Machine(torch.device("meta"), torch.bfloat16, tiny=False)
CEILINGS = Ceilings(copy=4e12, read=4e12, flops=8e14)
FIGURES: dict[str, Any] = {
    "requests": 4, "completed": 4, "errors": {}, "ttft_ms": {"p50": 20.0, "p99": 30.0},
    "itl_ms": {"p50": 4.0, "p99": 6.0}, "output_tokens_per_s": 100.0,
}  # fmt: skip


class MadeUpEngine:
    """An engine whose steps take a millisecond."""

    def __init__(self, machine: Machine, shape: engine_runs.Shape) -> None:
        self.machine, self.shape, self.kv_tokens = machine, shape, 1 << 40
        self.core = SimpleNamespace(stats=dict)

    def tokens(self, length: int) -> array[int]:
        return array("i", [0]) * length

    def longest_answer(self, *_: int) -> int:
        return 1

    def learn_bytes(self) -> None:
        return

    def first_token(self, _: array[int]) -> float:
        return 1e-3

    def answer_seconds(self, *_: Any) -> float:
        return 1e-3

    def decode_step(self, *_: Any, **__: Any) -> StepTime:
        return StepTime(1e-3, 1e-5)

    def answers(self, requests: Sequence[Any], *_: Any) -> list[Any]:
        return [SimpleNamespace(tokens=[1]) for _ in requests]


@contextmanager
def made_up(machine: Machine, shape: engine_runs.Shape, _: Path, **__: Any) -> Iterator[MadeUpEngine]:
    yield MadeUpEngine(machine, shape)


def ranks_of(_: Machine) -> Iterator[Line]:
    yield Line("ranks", "two ranks against one", 0.5, "of tolerance")


@pytest.fixture(autouse=True)
def faked(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (expert_times, kernel_times, lora_times, product_times, quantised_times, sampling_times):
        monkeypatch.setattr(module, "seconds", lambda *_: 1e-3)
    monkeypatch.setattr(engine_runs, "engine", made_up)
    monkeypatch.setattr(adapter_files, "write_adapter", lambda folder, *_, **__: folder)
    for name in ("write_mtp_model", "write_draft_head"):
        monkeypatch.setattr(checkpoint_files, name, lambda folder, *_: folder)
    monkeypatch.setattr(run.ceilings, "measure", lambda _: CEILINGS)
    monkeypatch.setattr(sampling_times, "steps", lambda *_: iter(()))
    # Names do not depend on the sizes, which would be made on the host.
    monkeypatch.setattr(quantised_times, "SHAPES", {"qkv": (64, 256)})
    monkeypatch.setattr(quantised_times, "HEAD", (64, 256))
    monkeypatch.setattr(quantised_times, "CACHED", 1)
    monkeypatch.setattr(kernel_times, "CACHED", 1)
    monkeypatch.setattr(product_times, "CACHED", 1)
    monkeypatch.setattr(lora_times, "MOST_LAYERS", 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 30, 1 << 31))


def lines_of(part: str) -> list[Line]:
    if part == "server":
        return server_lines()
    found: list[Line] = []
    for section in run.PARTS[part]:
        found += ranks_of(META) if section is run._ranks else section(META)
    return found


def server_lines() -> list[Line]:
    def levels(_: str, __: Any, clients: Sequence[int], *___: str) -> list[dict[str, Any]]:
        return [{"clients": count, "figures": FIGURES} for count in clients]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_times, "sweep", levels)
        load = server_times.FULL
        return [*server_times.levels("url", load), *server_times.churn("url", load, META)]


@pytest.mark.parametrize("part", sorted({part for part, _ in run.TARGETS}))
def test_every_figure_that_decides_is_measured(part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = run.Results(tmp_path / "out.json")
    for line in lines_of(part):
        assert line.part == part
        results.add(line)
    targets = [name for of, name in run.TARGETS if of == part]
    results.report([part])
    printed = capsys.readouterr().out.splitlines()[1:]
    assert len(printed) == len(targets)
    assert all(line.startswith(("REACHED", "MISSED")) for line in printed)
    assert all(any(f": {name}: " in line for line in printed) for name in targets)


def test_each_question_has_figures_that_decide() -> None:
    """Products, prompts and shared prefixes, adapters, packed weights, whole steps, drafts, the server and ranks."""
    asked = {"products", "kernels", "lora", "quantised", "end_to_end", "drafts", "server", "ranks", "sampling"}
    assert asked <= {part for part, _ in run.TARGETS} <= run.PARTS.keys()
