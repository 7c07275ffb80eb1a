"""Adapters in buckets: moto's S3 server, and s3fs as users have it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.adapter_sources.cut_proxy import CutProxy
from support.adapter_sources.file_server import FileServer
from support.adapter_sources.source_files import CONFIG, WEIGHTS, adapter_files, digest_of

from rootgraft.engine.adapter_sources.adapter_fetcher import AdapterFetcher
from rootgraft.engine.adapter_sources.source_uri import parse_source
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.errors import AdapterNotFound, AdapterUnavailable, ConfigError, RequestError

Make = Callable[..., AdapterFetcher]
FILES = adapter_files()
URL = "s3://adapters/acme/support"


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    from moto.server import ThreadedMotoServer  # both take seconds to import

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def s3(server: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The real client, with a bucket and an adapter in it."""
    import boto3

    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
    }.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    client.create_bucket(Bucket="adapters")
    put(client, "acme/support", FILES)
    yield client
    client.close()


def put(client: Any, folder: str, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        client.put_object(Bucket="adapters", Key=f"{folder}/{name}", Body=content)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_adapter_is_pinned_by_its_digest_and_found_again(s3: Any, fetcher: Make) -> None:
    make = fetcher("s3://adapters/acme")
    fetched = make.fetch(parse_source(URL))
    assert content(fetched.folder) == FILES and str(fetched.origin) == f"{URL}@sha256:{digest_of(FILES)}"
    newer = adapter_files(1)
    put(s3, "acme/support", newer)
    assert content(make.fetch(parse_source(URL)).folder) == newer
    assert content(make.fetch(fetched.origin).folder) == FILES  # no longer in the bucket, but in the cache


def test_a_download_goes_on_where_it_broke_off(
    s3: Any, server: Any, fetcher: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rootgraft.engine.adapter_sources.object_store_client._PART", 50_000)
    monkeypatch.setattr("s3fs.core.S3FileSystem.retries", 1)
    proxy = CutProxy(server.get_host_and_port(), 130_000)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
    make = fetcher()
    with pytest.raises(AdapterUnavailable, match="object store does not answer"):
        make.fetch(parse_source(URL))
    proxy.sent.clear()
    proxy.budget = 1 << 20
    assert content(make.fetch(parse_source(URL)).folder) == FILES
    ranges = [int(each) for each in re.findall(rb"[Rr]ange: bytes=(\d+)-", proxy.sent)]
    assert ranges[0] == 100_000 and ranges == sorted(ranges)
    proxy.close()


def test_what_is_not_there_is_not_found(s3: Any, fetcher: Make) -> None:
    s3.put_object(Bucket="adapters", Key=f"pickle/{CONFIG}", Body=FILES[CONFIG])
    s3.put_object(Bucket="adapters", Key="pickle/adapter_model.bin", Body=b"x")
    for url in ("s3://adapters/none", "s3://no-such-bucket/acme"):
        with pytest.raises(AdapterNotFound, match=f"no {CONFIG}"):
            fetcher().fetch(parse_source(url))
    with pytest.raises(RequestError, match="pickle, which can run any code"):
        fetcher().fetch(parse_source("s3://adapters/pickle"))
    with pytest.raises(RequestError, match="too large"):
        fetcher(most_bytes=len(FILES[WEIGHTS]) - 1).fetch(parse_source(URL))


def test_redirects_are_not_followed(s3: Any, fetcher: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint, elsewhere = FileServer(), FileServer()
    for name in FILES:
        endpoint.redirects[f"/adapters/acme/support/{name}"] = f"{elsewhere.origin}/{name}"
        elsewhere.files[f"/{name}"] = FILES[name]
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint.origin)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "secret")
    with pytest.raises((AdapterNotFound, AdapterUnavailable)):
        fetcher().fetch(parse_source(URL))
    assert endpoint.asked and not elsewhere.asked
    for server in (endpoint, elsewhere):
        server.close()


def test_a_missing_package_is_named(s3: Any, fetcher: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(RequestError, match=r"pip install 'rootgraft\[s3\]'"):
        fetcher().fetch(parse_source(URL))
    monkeypatch.setattr("rootgraft.engine.adapter_sources.adapter_fetcher.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--adapter-sources: .*rootgraft\[s3\]"):
        AdapterFetcher.of(EngineConfig(enable_lora=True, adapter_sources=("s3://adapters",)))
