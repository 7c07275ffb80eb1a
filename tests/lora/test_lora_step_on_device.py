"""Adapters in slots of a device with kernels, which here the interpreter plays, against the CPU's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.kernels import triton_interpreter
from support.models.lora_folders import (
    DOWN,
    HIDDEN,
    OUT,
    Q,
    file_of,
    good_tensors,
    small_layout,
    small_reader,
    write_folder,
)

from rootgraft.kernels.triton import launch
from rootgraft.lora.lora_step import AdapterBank
from rootgraft.lora.prepare_factors import PreparedAdapter
from rootgraft.lora.segments import StaticSegments

CPU = torch.device("cpu")
SLOTS = [np.array(slots, np.int32) for slots in ([0, -1, 1, 1], [1, 1, 1, 1], [-1, -1, 0, -1])]


@pytest.fixture
def adapters(tmp_path: Path) -> list[PreparedAdapter]:
    folders = [write_folder(tmp_path / str(seed), None, file_of(good_tensors(seed))) for seed in range(3)]
    return [small_reader().read(str(folder)) for folder in folders]


def bank_of(adapters: list[PreparedAdapter]) -> AdapterBank:
    bank = AdapterBank(small_layout(), len(adapters))
    for slot, adapter in enumerate(adapters):
        bank.install(slot, adapter)
        triton_interpreter.allow(adapter.block)
    return bank


def inputs() -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Projections with x and y."""
    g = torch.Generator().manual_seed(0)
    widths = ((Q, HIDDEN, HIDDEN + OUT), (DOWN, OUT, HIDDEN))
    return [(name, torch.randn(4, k, generator=g), torch.randn(4, n, generator=g)) for name, k, n in widths]


def test_steps_on_the_device_and_replays_of_a_captured_one(adapters, interpreted, monkeypatch):
    def serve(*types: str) -> None:
        monkeypatch.setattr(launch, "DEVICE_TYPES", frozenset(types))

    bank, room = bank_of(adapters[:2]), StaticSegments(4, CPU)
    captured = bank.recorded_step(bank.reserve(8), room.segments(4))
    for of_tokens in SLOTS:
        room.fill(of_tokens)
        step = bank.step(of_tokens)
        serve("cuda")
        native = bank.step(of_tokens)
        serve("cuda", "cpu")
        assert step is not None and native is not None
        for name, x, y in inputs():
            results = [y.clone() for _ in range(3)]
            step.project(name, x, results[0])
            captured.project(name, x, results[1])
            serve("cuda")
            native.project(name, x, results[2])
            serve("cuda", "cpu")
            torch.testing.assert_close(results[0], results[2])
            torch.testing.assert_close(results[1], results[2])
        bank.install(0, adapters[2])
        triton_interpreter.allow(adapters[2].block)


def test_a_step_of_the_base_model_has_no_part(adapters, interpreted):
    assert bank_of(adapters[:1]).step(np.full(3, -1, np.int32)) is None
