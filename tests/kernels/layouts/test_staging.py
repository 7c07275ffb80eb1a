"""Copies between host and device: on a CPU the values themselves, on a GPU an event behind the copy is waited for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rootgraft.kernels.layouts.staging import HostCopy, refill, to_device

CPU = torch.device("cpu")


def test_values_of_any_layout_come_to_the_device_and_back():
    values = np.arange(12).reshape(3, 4)[:, ::2]
    there = to_device(values, CPU)
    assert HostCopy(there).wait().tolist() == values.tolist()
    refill(there, values + 1)
    assert there.tolist() == (values + 1).tolist()


def test_a_copy_from_a_gpu_is_waited_for_alone(monkeypatch: pytest.MonkeyPatch):
    """Into memory that cannot be moved, without waiting; then an event, and nothing but that is waited for."""
    calls: list[Any] = []

    class Pinned:
        def copy_(self, tensor: Any, *, non_blocking: bool) -> None:
            calls.append(("copy", tensor, non_blocking))

    class Event:
        def record(self, stream: str) -> None:
            calls.append(("record", stream))

        def synchronize(self) -> None:
            calls.append("synchronize")

    pinned = Pinned()
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, pin_memory: pinned if pin_memory else None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    tensor: Any = SimpleNamespace(device=torch.device("cuda:0"), shape=(2, 3), dtype=torch.float64)
    copy = HostCopy(tensor)
    assert calls == [("copy", tensor, True), ("record", "stream of cuda:0")]
    assert copy.wait() is pinned
    assert calls[2:] == ["synchronize"]
