"""What is collected of this folder, and clients of the ``server`` of a module."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import httpx
    import openai
    from support.api.real_server import RealServer


@pytest.fixture
def url(server: RealServer) -> str:
    """Address of the module's server."""
    return server.url


@pytest.fixture
def client(server: RealServer) -> openai.OpenAI:
    """OpenAI's client of the module's server."""
    return server.client


@pytest.fixture
def http(server: RealServer) -> httpx.Client:
    """HTTP client of the module's server."""
    return server.http


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out by default what takes seconds to collect, as requests are made from the document then."""
    left_out = collection_path.name == "test_openapi_fuzz.py" and config.getoption("markexpr") == "not heavy"
    return left_out or None
