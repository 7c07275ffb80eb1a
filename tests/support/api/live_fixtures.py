"""One server for all tests of a folder, made new between them; servers with other options on demand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rootgraft.api.config import ServerConfig
from support.api.api_live import Live, make_state, serve
from support.api.real_server import RealServer, start


@pytest.fixture(scope="session")
def session_live() -> Iterator[Live]:
    yield from serve(make_state())


@pytest.fixture
def live(session_live: Live) -> Live:
    session_live.reset()
    return session_live


@pytest.fixture(scope="session")
def real_server() -> Iterator[RealServer]:
    """One server without options for all heavy tests that leave it as it was."""
    running = start()
    yield running
    running.close()


@pytest.fixture
def serve_with() -> Iterator[Any]:
    """Starts a server with options of the test's own."""
    running: list[Iterator[Live]] = []

    def started(options: ServerConfig) -> Live:
        server = serve(make_state(options))
        running.append(server)
        return next(server)

    yield started
    for server in running:
        next(server, None)
