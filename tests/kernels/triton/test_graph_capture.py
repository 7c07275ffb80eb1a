"""What a capture asks of CUDA, in which order; CUDA itself is played by a list of what was asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from rootgraft.kernels import backend, pass_graphs
from rootgraft.kernels.triton import graph_capture, launch
from rootgraft.kernels.triton.product_choice import is_measuring


class FakeStream:
    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    log: list[str] = []
    main, side = FakeStream(log, "main"), FakeStream(log, "side")

    class Graph:
        def replay(self) -> None:
            log.append("replay")

    @contextmanager
    def stream(which: FakeStream) -> Iterator[None]:
        log.append(f"on {which.name}")
        yield

    @contextmanager
    def graph(made: Any, *, pool: Any, stream: FakeStream, capture_error_mode: str) -> Iterator[None]:
        log.append(f"capture in {pool} on {stream.name}, {capture_error_mode}")
        yield
        log.append("captured")

    fakes = {"CUDAGraph": Graph, "stream": stream, "graph": graph}
    fakes |= {"graph_pool_handle": lambda: "pool", "Stream": lambda _: side, "current_stream": lambda _: main}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return log


def test_a_pass_is_run_then_captured_then_replayed(log: list[str]) -> None:
    capture = graph_capture.Capture(torch.device("cuda", 0))
    replays = [capture(lambda: log.append("measured" if is_measuring() else "pass")) for _ in range(2)]
    once = ["side waits for main", "on side", "measured", "capture in pool on side, thread_local", "pass", "captured"]
    assert log == [*once, "main waits for side"] * 2
    log.clear()
    replays[1]()
    replays[0]()
    assert log == ["replay", "replay"]


def test_only_what_reads_nothing_back_is_captured(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    cache = torch.zeros(4, 1, 16, 32, dtype=torch.bfloat16)
    assert pass_graphs.capture_for(cache) is None, "a CPU captures nothing"
    monkeypatch.setattr(launch, "DEVICE_TYPES", {"cuda", "cpu"})
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    assert isinstance(pass_graphs.capture_for(cache), graph_capture.Capture)
    assert pass_graphs.capture_for(cache.float()) is None, "fp32 runs in plain torch"
    assert pass_graphs.capture_for(torch.zeros(4, 1, 16, 24, dtype=torch.bfloat16)) is None, "heads of 24 too"
    monkeypatch.setattr(backend.LIBRARY, "enabled", False)
    assert pass_graphs.capture_for(cache) is None
