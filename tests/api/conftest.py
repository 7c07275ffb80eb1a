"""One server for all tests of this folder, made new between them; servers with other options on demand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.api.api_live import Live, make_state, serve

from rootgraft.api.config import ServerConfig


@pytest.fixture(scope="session")
def session_live() -> Iterator[Live]:
    yield from serve(make_state())


@pytest.fixture
def live(session_live: Live) -> Live:
    session_live.reset()
    return session_live


@pytest.fixture
def serve_with() -> Iterator[Any]:
    """Starts a server with options of the test's own."""
    running: list[Iterator[Live]] = []

    def start(options: ServerConfig) -> Live:
        server = serve(make_state(options))
        running.append(server)
        return next(server)

    yield start
    for server in running:
        next(server, None)
