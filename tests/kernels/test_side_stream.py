"""Work beside the steps: its stream and events, on a CUDA that notes what it is asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from rootgraft.kernels.side_stream import SideStream


class Notes:
    """A CUDA with one stream that serves and others; an event is reached when ``done`` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.done = False
        self.current = "serving"
        notes = self

        class Stream:
            def __init__(self, device: torch.device | None = None) -> None:
                self.name = "serving" if device is None else "side"

            def wait_event(self, _event: object) -> None:
                notes.calls.append(f"{self.name} waits")

        class Event:
            def record(self, stream: Stream) -> None:
                notes.calls.append(f"event on {stream.name}")

            def query(self) -> bool:
                return notes.done

        @contextmanager
        def within(stream: Stream) -> Iterator[None]:
            before, notes.current = notes.current, stream.name
            yield
            notes.current = before

        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "stream", within)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _device=None: Stream())


def test_work_of_a_gpu_is_beside_what_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    notes = Notes(monkeypatch)
    side = SideStream(torch.device("cuda", 0))
    with side.work():
        assert notes.current == "side"
    assert notes.current == "serving"
    mark = side.mark()
    assert notes.calls == ["event on side"] and not mark.is_reached
    notes.done = True
    assert mark.is_reached
    mark.hand_over()
    assert notes.calls[1:] == ["serving waits"]


def test_a_cpu_waits_for_nothing() -> None:
    side = SideStream(torch.device("cpu"))
    with side.work():
        value = torch.ones(2) + 1
    mark = side.mark()
    assert mark.is_reached
    mark.hand_over(value)
