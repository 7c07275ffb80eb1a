"""Adapters at https:// URLs: certificates, breaks, lies about sizes, redirects, addresses, digests."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import wait
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import SplitResult

import pytest
from support.adapter_sources.file_server import FileServer
from support.adapter_sources.source_files import CONFIG, WEIGHTS, adapter_files, digest_of
from support.api.small_disk import mounted

from rootgraft.engine.adapter_sources.adapter_fetcher import AdapterFetcher
from rootgraft.engine.adapter_sources.checked_http import CheckedHttp
from rootgraft.engine.adapter_sources.remote_files import TransferBroken
from rootgraft.engine.adapter_sources.source_policy import is_public
from rootgraft.engine.adapter_sources.source_uri import parse_source
from rootgraft.engine.adapter_sources.web_client import WebClient
from rootgraft.engine.errors import AdapterNotFound, AdapterUnavailable, RequestError

Make = Callable[..., AdapterFetcher]
LOCAL = "127.0.0.0/8"
FILES = adapter_files()
DIGEST = digest_of(FILES)


@pytest.fixture
def url(web: FileServer) -> str:
    """An adapter on the server."""
    web.files |= {f"/a/{name}": content for name, content in FILES.items()}
    return f"{web.origin}/a"


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_adapter_is_pinned_by_its_digest(web: FileServer, url: str, fetcher: Make) -> None:
    make = fetcher(web.origin, LOCAL)
    fetched = make.fetch(parse_source(url))
    assert content(fetched.folder) == FILES and str(fetched.origin) == f"{url}@sha256:{DIGEST}"
    web.asked.clear()
    make.fetch(parse_source(url))
    assert {method for method, *_ in web.asked} == {"HEAD"}  # the ETags are the same
    web.asked.clear()
    make.fetch(parse_source(f"{url}@sha256:{DIGEST}"))
    assert not web.asked


def test_other_content_than_the_digest_gets_no_name(web: FileServer, url: str, fetcher: Make, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=f"other content: its SHA-256 is {DIGEST}") as error:
        fetcher(web.origin, LOCAL).fetch(parse_source(f"{url}@sha256:{'0' * 64}"))
    assert error.value.code == "adapter_digest_mismatch"
    assert not list((tmp_path / "cache" / "content").iterdir())


def test_a_download_goes_on_where_it_broke_off(web: FileServer, url: str, fetcher: Make) -> None:
    web.breaks[f"/a/{WEIGHTS}"] = [70_000, 70_000]
    assert content(fetcher(web.origin, LOCAL).fetch(parse_source(url)).folder) == FILES
    parts = web.gets(f"/a/{WEIGHTS}")
    assert len(parts) == 3 and all(part.startswith("bytes=") for part in parts[1:])


def test_a_server_without_ranges_is_read_from_the_begin(web: FileServer, url: str, fetcher: Make) -> None:
    web.no_ranges = True
    web.breaks[f"/a/{WEIGHTS}"] = [70_000]
    assert content(fetcher(web.origin, LOCAL).fetch(parse_source(url)).folder) == FILES


def test_a_full_disk_is_told_and_the_download_goes_on_once_there_is_space(
    web: FileServer, url: str, fetcher: Make, tmp_path: Path
) -> None:
    with mounted(tmp_path / "cache", 1 << 20) as disk:
        if disk is None:
            pytest.skip("this user may not mount a file system")
        make = fetcher(web.origin, LOCAL)
        for leave in (0, 8, 16):
            disk.fill(leave)
            with pytest.raises(AdapterUnavailable, match="the disk of the cache is full"):
                make.fetch(parse_source(url))
            disk.free()
        fetched = make.fetch(parse_source(url))
        assert content(fetched.folder) == FILES
        make.close()


def test_a_file_that_changes_meanwhile_is_no_mixture(web: FileServer, url: str, fetcher: Make) -> None:
    web.breaks[f"/a/{WEIGHTS}"] = [70_000]
    event = web.holds[f"/a/{WEIGHTS}"] = threading.Event()
    make = fetcher(web.origin, LOCAL)
    download = make.begin(parse_source(url))
    while not web.gets(f"/a/{WEIGHTS}"):
        time.sleep(0.01)
    newer = adapter_files(1)
    web.files |= {f"/a/{name}": each for name, each in newer.items()}
    event.set()
    assert content(download.result.result().folder) == newer


@pytest.mark.parametrize("claimed, text", [(1 << 40, "too large"), (300_000, "broke off")])
def test_lies_about_the_size(web: FileServer, url: str, fetcher: Make, claimed: int, text: str) -> None:
    web.claims[f"/a/{WEIGHTS}"] = claimed
    with pytest.raises((RequestError, AdapterUnavailable), match=text):
        fetcher(web.origin, LOCAL).fetch(parse_source(f"{url}@sha256:{DIGEST}"))


def test_truncated_and_malformed_weights_are_no_adapter(web: FileServer, url: str, fetcher: Make) -> None:
    whole = FILES[WEIGHTS]
    for weights in (whole[:-1000], whole + b"0" * 8, whole[:8] + b"{" * len(whole[8:]), whole[:7], b""):
        web.files[f"/a/{WEIGHTS}"] = weights
        with pytest.raises(RequestError, match="weights are not in safetensors format, or are incomplete") as error:
            fetcher(web.origin, LOCAL).fetch(parse_source(url))
        assert error.value.code == "adapter_not_supported"


@pytest.mark.parametrize(
    "status, kind, text",
    [
        (401, AdapterNotFound, "may not be read: the server answers 401"),
        (403, AdapterNotFound, "may not be read: the server answers 403"),
        (404, AdapterNotFound, f"no {CONFIG}"),
        (410, AdapterNotFound, f"no {CONFIG}"),
        (429, AdapterUnavailable, "the server answers 429"),
        (503, AdapterUnavailable, "the server answers 503"),
        (418, RequestError, "The server answers 418"),
    ],
)
def test_statuses(web: FileServer, url: str, fetcher: Make, status: int, kind: type[Exception], text: str) -> None:
    web.statuses[f"/a/{CONFIG}"] = status
    with pytest.raises(kind, match=text):
        fetcher(web.origin, LOCAL).fetch(parse_source(url))


def test_a_private_address_needs_a_listed_network(web: FileServer, url: str, fetcher: Make) -> None:
    """That the operator lists a host does not say that its name may come to stand for this machine."""
    for entries in ((web.origin,), (web.origin, "10.0.0.0/8")):
        with pytest.raises(RequestError, match="which is neither public nor in a network") as error:
            fetcher(*entries).fetch(parse_source(url))
        assert error.value.code == "adapter_source_not_allowed"
    assert not web.asked
    assert content(fetcher().fetch(parse_source(url), trusted=True).folder) == FILES  # the operator's word


@pytest.mark.parametrize(
    "target",
    [
        "https://127.0.0.1:1/a",
        "https://169.254.169.254/latest/meta-data/",
        "http://169.254.169.254/latest/meta-data/",
        "https://localhost.evil.example/a",
        "https://user@localhost/a",
        "file:///etc/passwd",
        "https://[::1]/a",
        "//elsewhere.example/a",
        "https://localhost:99999/a",
        "https://[::1",
    ],
)
@pytest.mark.parametrize("trusted", [True, False])
def test_redirects_lead_to_listed_places_alone(
    web: FileServer, url: str, fetcher: Make, target: str, trusted: bool
) -> None:
    web.redirects[f"/a/{CONFIG}"] = target
    with pytest.raises(RequestError, match="redirects to") as error:
        fetcher(web.origin, LOCAL).fetch(parse_source(url), trusted=trusted)
    assert error.value.code == "adapter_source_not_allowed"


def test_redirects_to_listed_places_are_followed_up_to_five_times(web: FileServer, url: str, fetcher: Make) -> None:
    make = fetcher(web.origin, LOCAL)
    for number in range(5):
        web.redirects[f"/{number}/{CONFIG}"] = f"{web.origin}/{number - 1 if number else 'a'}/{CONFIG}?signature=x"
        web.files[f"/{number}/{WEIGHTS}"] = FILES[WEIGHTS]
    assert content(make.fetch(parse_source(f"{web.origin}/4")).folder) == FILES
    web.redirects[f"/a/{CONFIG}"] = f"/b/{CONFIG}"
    web.files[f"/b/{CONFIG}"] = FILES[CONFIG]
    with pytest.raises(RequestError, match="more than 5 times"):
        make.fetch(parse_source(f"{web.origin}/4"))


def test_a_redirect_to_a_listed_host_at_a_private_address_is_refused(
    web: FileServer, url: str, fetcher: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    _resolve(monkeypatch, {"cdn.example": ["10.1.2.3"]})
    web.redirects[f"/a/{CONFIG}"] = "https://cdn.example/a"
    with pytest.raises(RequestError, match=r"cdn.example has the address 10\.1\.2\.3"):
        fetcher(web.origin, "https://cdn.example", LOCAL).fetch(parse_source(url))


def test_a_name_that_is_bound_to_another_address_meanwhile_is_not_followed_there(
    web: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is checked is the address of the socket itself: there is no second question to the name server."""
    answers = ["127.0.0.9", "127.0.0.1"] * 8
    _resolve(monkeypatch, {"rebound.example": answers}, one_by_one=True)
    http = CheckedHttp(lambda address: address == "127.0.0.9", _nowhere)

    async def ask() -> None:
        async with http.request("GET", f"https://rebound.example:{web.port}/a") as response:
            await response.read()

    for number in range(6):
        with pytest.raises(TransferBroken if number % 2 == 0 else RequestError):
            asyncio.run(ask())
    assert len(answers) == 10 and not web.asked


def test_a_proxy_connects_and_addresses_in_urls_are_checked_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = FileServer(files={"/a": b"content"})
    monkeypatch.setenv("http_proxy", proxy.origin)
    monkeypatch.setenv("no_proxy", "direct.example")
    _resolve(monkeypatch, {"direct.example": ["10.1.2.3"]})
    http = CheckedHttp(is_public, _nowhere, plain=True)

    async def ask(url: str) -> bytes:
        async with http.request("GET", url) as response:
            return await response.read()

    assert asyncio.run(ask("http://nobody-here-knows.example/a")) == b"content"
    for host in ("10.1.2.3", "169.254.169.254", "[::ffff:127.0.0.1]", "direct.example"):
        with pytest.raises(RequestError, match="which is neither public nor in a network"):
            asyncio.run(ask(f"http://{host}/a"))
    assert len(proxy.asked) == 1
    proxy.close()


def _nowhere(_target: SplitResult) -> bool:
    return False


def _resolve(monkeypatch: pytest.MonkeyPatch, names: dict[str, list[str]], *, one_by_one: bool = False) -> None:
    """Let some names stand for these addresses, each in its turn with ``one_by_one``."""
    real = socket.getaddrinfo

    def getaddrinfo(host: str, *rest: Any, **options: Any) -> Any:
        if host not in names:
            return real(host, *rest, **options)
        found = [names[host].pop(0)] if one_by_one else names[host]
        port = rest[0] if rest else options.get("port")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in found]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def test_an_unknown_certificate_is_not_accepted(
    web: FileServer, url: str, fetcher: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(AdapterUnavailable, match="its certificate is not accepted"):
        fetcher(web.origin, LOCAL).fetch(parse_source(url))


def test_compressed_bodies_are_refused(web: FileServer, url: str, fetcher: Make) -> None:
    web.headers["Content-Encoding"] = "gzip"
    with pytest.raises(RequestError, match="compressed"):
        fetcher(web.origin, LOCAL).fetch(parse_source(url))


def test_time_is_limited_and_what_has_come_is_kept(web: FileServer, url: str, fetcher: Make) -> None:
    event = web.holds[f"/a/{WEIGHTS}"] = threading.Event()
    for seconds in (1, 5, 25):  # until something has come within them
        late = fetcher(web.origin, LOCAL, seconds=seconds).begin(parse_source(url))
        with pytest.raises(AdapterUnavailable, match=rf"within {seconds} seconds \(--adapter-download-timeout\)"):
            late.result.result()
        if late.progress.done:
            break
    event.set()
    web.asked.clear()
    assert content(fetcher(web.origin, LOCAL).fetch(parse_source(url)).folder) == FILES
    assert all(part for part in web.gets(f"/a/{WEIGHTS}"))


def test_closing_ends_downloads_at_once(web: FileServer, url: str, fetcher: Make) -> None:
    web.holds[f"/a/{WEIGHTS}"] = threading.Event()
    make = fetcher(web.origin, LOCAL)
    download = make.begin(parse_source(url))
    while not download.progress.done:
        time.sleep(0.01)
    assert download.progress.total == len(FILES[WEIGHTS]) and download.progress.state == "downloading"
    make.close()
    with pytest.raises(AdapterUnavailable, match="shutting down"):
        download.result.result(0)


def test_simultaneous_downloads_of_one_adapter_read_it_once(web: FileServer, url: str, fetcher: Make) -> None:
    """Two fetchers are two processes to the cache, as their locks are those of files."""
    event = web.holds[f"/a/{WEIGHTS}"] = threading.Event()
    makers = [fetcher(web.origin, LOCAL), fetcher(web.origin, LOCAL)]
    downloads = [each.begin(parse_source(url)) for each in makers]
    while not any(each.progress.state.startswith("waiting") for each in downloads):
        time.sleep(0.01)
    event.set()
    wait([each.result for each in downloads])
    assert all(content(each.result.result().folder) == FILES for each in downloads)
    assert len(web.gets(f"/a/{WEIGHTS}")) == 1


def test_numbers_of_the_weights_header_that_are_none_are_no_adapter(web: FileServer, url: str, fetcher: Make) -> None:
    header = b'{"a":{"data_offsets":[0,1e999]}}'
    web.files[f"/a/{WEIGHTS}"] = len(header).to_bytes(8, "little") + header + b"0" * 1000
    with pytest.raises(RequestError, match="weights are not in safetensors format, or are incomplete"):
        fetcher(web.origin, LOCAL).fetch(parse_source(url))


def test_headers_that_cannot_be_sent_back_are_no_validators() -> None:
    class Http:
        @asynccontextmanager
        async def request(self, _method: str, _url: str) -> AsyncIterator[Any]:
            yield SimpleNamespace(status=200, headers={"ETag": '"\udcff"', "Content-Length": "5"})

    client = WebClient(Http(), parse_source("https://host/a"))  # type: ignore[arg-type]
    assert not asyncio.run(client.find()).weights.can_resume


def test_a_fault_in_the_fetcher_is_an_error_and_keeps_nothing(
    web: FileServer, url: str, fetcher: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("rootgraft.engine.adapter_sources.adapter_fetcher.content_digest", fail)
    with pytest.raises(AdapterUnavailable, match="cannot be downloaded: ZeroDivisionError"):
        fetcher(web.origin, LOCAL).fetch(parse_source(url))
    assert not [path for path in (tmp_path / "cache" / "partial").iterdir() if path.is_dir()]


@pytest.mark.parametrize("path", ["/b", "/a/%2e%2e/b", "/a/..;/b", "/a/..;x=1/b", "/a/../b", "/ab"])
def test_redirects_stay_below_the_listed_folder(web: FileServer, url: str, fetcher: Make, path: str) -> None:
    web.redirects[f"/a/{CONFIG}"] = f"{path}/{CONFIG}"
    web.files |= {f"{each}/{CONFIG}": FILES[CONFIG] for each in (path, "/b", "/ab")}
    for entries, trusted in (((url, LOCAL), False), ((), True)):
        with pytest.raises(RequestError, match="redirects to") as error:
            fetcher(*entries).fetch(parse_source(url), trusted=trusted)
        assert error.value.code == "adapter_source_not_allowed"
    assert not [each for each in web.asked if not each[1].startswith("/a/" + CONFIG)]


def test_the_operators_own_source_may_lead_below_itself(web: FileServer, url: str, fetcher: Make) -> None:
    web.redirects[f"/a/{CONFIG}"] = f"/a/v2/{CONFIG}"
    web.files[f"/a/v2/{CONFIG}"] = FILES[CONFIG]
    assert content(fetcher().fetch(parse_source(url), trusted=True).folder) == FILES
