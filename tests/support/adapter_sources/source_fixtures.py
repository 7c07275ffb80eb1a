"""Servers of adapters, and fetchers with a cache of their own."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trustme

from rootgraft.engine.adapter_sources.adapter_fetcher import AdapterFetcher
from rootgraft.engine.adapter_sources.partial_download import DownloadLimits
from rootgraft.engine.adapter_sources.source_policy import SourcePolicy
from support.adapter_sources.file_server import FileServer
from support.adapter_sources.hub_stub import HubStub


@pytest.fixture(autouse=True)
def plain_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """No proxies, and short pauses."""
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("rootgraft.engine.adapter_sources.partial_download._FIRST_PAUSE", 0.001)


@pytest.fixture(scope="session")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def web(authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    """An https server of localhost, whose certificate is accepted."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost", "127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(tmp_path / "authority.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "authority.pem"))
    server = FileServer(context)
    yield server
    server.close()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubStub]:
    """A Hub that ``huggingface_hub`` takes for the Hub."""
    from huggingface_hub import constants

    stub = HubStub()
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, stub.endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", stub.endpoint)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield stub
    stub.close()


@pytest.fixture
def fetcher(tmp_path: Path) -> Iterator[Callable[..., AdapterFetcher]]:
    """Makes fetchers, all with one cache."""
    made: list[AdapterFetcher] = []

    def make(
        *entries: str, most_bytes: int = 1 << 20, most_cache_bytes: int = 1 << 24, seconds: float = 30.0
    ) -> AdapterFetcher:
        limits = DownloadLimits(most_bytes, seconds)
        made.append(AdapterFetcher(SourcePolicy(entries), tmp_path / "cache", most_cache_bytes, limits))
        return made[-1]

    yield make
    for each in made:
        each.close()
