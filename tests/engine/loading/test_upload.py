"""Copies of weights through pinned buffers: on a device that reads a buffer as late as it may."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rootgraft.engine.loading.upload import PinnedBuffers, upload

CPU = torch.device("cpu")


class LateDevice:
    """A device that does a copy from the host when an event behind it is waited for, and not before."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.waiting: list[Callable[[], Any]] = []
        device, inner, make = self, torch.Tensor.copy_, torch.empty

        class Event:
            def __init__(self) -> None:
                self.behind = 0

            def record(self, _stream: Any) -> None:
                self.behind = len(device.waiting)

            def synchronize(self) -> None:
                for index in range(self.behind):
                    device.waiting[index]()
                    device.waiting[index] = lambda: None

        def copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            if non_blocking:
                self.waiting.append(lambda: inner(target, source))
                return target
            return inner(target, source)

        def pinned(*sizes: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
            return make(*sizes, **options)

        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "current_stream", lambda _: None)
        patch.setattr(torch.Tensor, "copy_", copy)
        patch.setattr(torch, "empty", pinned)

    def finish(self) -> None:
        for each in self.waiting:
            each()


@settings(max_examples=30, deadline=None)
@given(
    counts=st.lists(st.integers(0, 70), min_size=1, max_size=5), size=st.sampled_from([16, 64, 1024]),
    source=st.sampled_from([torch.float32, torch.bfloat16]), target=st.sampled_from([torch.float32, torch.bfloat16]),
    transposed=st.booleans(),
)  # fmt: skip
def test_no_buffer_is_filled_before_it_was_read(
    counts: list[int], size: int, source: torch.dtype, target: torch.dtype, transposed: bool
) -> None:
    """Tensors of many pieces one after another, in another type or order; the source changes afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        device = LateDevice(patch)
        buffers = PinnedBuffers(CPU, size)
        pairs = []
        for number, count in enumerate(counts):
            values = (torch.arange(3.0 * count).view(3, count) + number).to(source)
            shape = (count, 3) if transposed else (3, count)
            given_ = values.t() if transposed else values
            expected = given_.to(target).clone()
            out = torch.zeros(shape, dtype=target)
            buffers.fill(out, given_)
            values.fill_(-1)
            pairs.append((out, expected))
        device.finish()
    for out, expected in pairs:
        assert torch.equal(out, expected)


def test_on_a_cpu_a_tensor_is_copied() -> None:
    out = torch.zeros(2, 3, dtype=torch.bfloat16)
    upload(out, torch.ones(2, 3))
    assert (out == 1).all()
