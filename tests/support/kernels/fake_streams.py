"""Streams of CUDA played by a list of what was asked of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch


class FakeStream:
    """A stream whose waits are noted."""

    device = torch.device("cuda", 0)

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


@contextmanager
def fake_streams(log: list[str], current: FakeStream) -> Iterator[None]:
    """Let work go to fake streams, at first to this one; notes where that changes."""
    streams = [current]

    @contextmanager
    def on(stream: FakeStream) -> Iterator[None]:
        log.append(f"on {stream.name}")
        streams.append(stream)
        yield
        streams.pop()
        log.append(f"on {streams[-1].name} again")

    with (
        mock.patch.object(torch.cuda, "stream", on),
        mock.patch.object(torch.cuda, "current_stream", lambda _: streams[-1]),
    ):
        yield
