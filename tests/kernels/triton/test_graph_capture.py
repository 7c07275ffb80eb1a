"""What a capture asks of CUDA, in which order; CUDA itself is played by a list of what was asked."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.kernels.fake_streams import FakeStream, fake_streams

from rootgraft.kernels import backend, pass_graphs
from rootgraft.kernels.layouts import kv_forms
from rootgraft.kernels.triton import graph_capture, launch
from rootgraft.kernels.triton.graph_branch import start_beside
from rootgraft.kernels.triton.product_choice import is_measuring


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    log: list[str] = []
    made = itertools.cycle([FakeStream(log, "side"), FakeStream(log, "branch")])

    class Graph:
        def replay(self) -> None:
            log.append("replay")

    @contextmanager
    def graph(made: Any, *, pool: Any, stream: FakeStream, capture_error_mode: str) -> Iterator[None]:
        log.append(f"capture in {pool} of {capture_error_mode}")
        with torch.cuda.stream(stream):  # type: ignore[arg-type]
            yield
        log.append("captured")

    fakes = {"CUDAGraph": Graph, "graph": graph, "graph_pool_handle": lambda: "pool", "Stream": lambda _: next(made)}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    with fake_streams(log, FakeStream(log, "main")):
        yield log


def test_a_pass_is_run_then_captured_then_replayed(log: list[str]) -> None:
    """The first run measures products and has no branch, whose launches would take part of the device meanwhile."""
    capture = graph_capture.Capture(torch.device("cuda", 0))

    def forward() -> None:
        wait = start_beside(lambda: log.append("beside"))
        log.append("measured" if is_measuring() else "pass")
        wait()

    replays = [capture(forward) for _ in range(2)]
    run = ["side waits for main", "on side", "beside", "measured", "on main again"]
    branch = ["branch waits for side", "on branch", "beside", "on side again", "pass", "side waits for branch"]
    captured = ["capture in pool of thread_local", "on side", *branch, "on main again", "captured"]
    assert log == [*run, *captured, "main waits for side"] * 2
    log.clear()
    replays[1]()
    replays[0]()
    assert log == ["replay", "replay"]


def test_only_what_reads_nothing_back_is_captured(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    cache, dtype = torch.zeros(4, 1, 16, 32, dtype=torch.bfloat16), torch.bfloat16
    assert pass_graphs.capture_for([cache], dtype) is None, "a CPU captures nothing"
    monkeypatch.setattr(launch, "DEVICE_TYPES", {"cuda", "cpu"})
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    assert isinstance(pass_graphs.capture_for([cache], dtype), graph_capture.Capture)
    for rows in kv_forms.ROW_DTYPES:
        of_bytes = torch.zeros(4, 1, 16, 36, dtype=torch.int8).view(rows)
        assert isinstance(pass_graphs.capture_for([of_bytes], dtype), graph_capture.Capture), "KV of 8 bits"
    assert pass_graphs.capture_for([cache.float()], torch.float32) is None, "fp32 runs in plain torch"
    odd, large = (torch.zeros(4, 1, 16, dim, dtype=dtype) for dim in (24, 512))
    assert pass_graphs.capture_for([odd], dtype) is None, "heads of 24 too"
    assert pass_graphs.capture_for([cache, large], dtype) is None, "and larger heads in some layers"
    monkeypatch.setattr(backend.LIBRARY, "enabled", False)
    assert pass_graphs.capture_for([cache], dtype) is None
