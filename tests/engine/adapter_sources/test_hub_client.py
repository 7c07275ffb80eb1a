"""Adapters of the Hub: a stub that the real ``huggingface_hub`` understands, pins, breaks, refusals, redirects."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
from support.adapter_sources.hub_stub import HubStub
from support.adapter_sources.source_files import CONFIG, WEIGHTS, adapter_files

from rootgraft.engine.adapter_sources.adapter_fetcher import AdapterFetcher
from rootgraft.engine.adapter_sources.source_uri import parse_source
from rootgraft.engine.errors import AdapterNotFound, AdapterUnavailable, RequestError

Make = Callable[..., AdapterFetcher]
NAME = "acme/support"
FILES = adapter_files()
LOCAL = "127.0.0.0/8"  # where the stub's storage lies


def lfs_path(files: dict[str, bytes]) -> str:
    return f"/lfs/{hashlib.sha256(files[WEIGHTS]).hexdigest()}"


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_real_client_understands_the_stub(hub: HubStub, tmp_path: Path) -> None:
    commit = hub.add(NAME, FILES)
    for name, expected in FILES.items():
        path = huggingface_hub.hf_hub_download(NAME, name, endpoint=hub.endpoint, cache_dir=tmp_path / "hf")
        assert Path(path).read_bytes() == expected and commit in path
    assert huggingface_hub.HfApi(endpoint=hub.endpoint).model_info(NAME).sha == commit
    with pytest.raises(huggingface_hub.errors.RepositoryNotFoundError):
        huggingface_hub.hf_hub_download("acme/none", CONFIG, endpoint=hub.endpoint, cache_dir=tmp_path / "hf")


def test_an_adapter_is_pinned_to_its_commit_and_downloaded_once(hub: HubStub, fetcher: Make) -> None:
    first = hub.add(NAME, FILES)
    make = fetcher("hf", LOCAL)
    fetched = make.fetch(parse_source(NAME))
    assert content(fetched.folder) == FILES and str(fetched.origin) == f"hf://{NAME}@{first}"
    again = make.fetch(parse_source(f"hf://{NAME}@main"))
    assert again.folder != fetched.folder and content(again.folder) == FILES
    assert len(hub.storage.gets(lfs_path(FILES))) == 1

    newer = adapter_files(1)
    second = hub.repositories[NAME].push(newer)
    moved = make.fetch(parse_source(NAME))
    assert content(moved.folder) == newer and moved.origin.revision == second
    assert content(fetched.folder) == FILES  # what is in use stays as it was


def test_what_is_in_the_cache_is_reused_by_the_next_start(hub: HubStub, fetcher: Make) -> None:
    commit = hub.add(NAME, FILES)
    before = fetcher("hf", LOCAL)
    before.fetch(parse_source(NAME))
    before.close()
    hub.server.asked.clear()
    after = fetcher("hf", LOCAL)
    assert content(after.fetch(parse_source(f"{NAME}@{commit}")).folder) == FILES
    assert not hub.server.asked  # a commit never changes: nobody is asked
    assert content(after.fetch(parse_source(NAME)).folder) == FILES
    assert {method for method, *_ in hub.server.asked} == {"HEAD"}


def test_a_silent_hub_leaves_what_was_seen_last(hub: HubStub, fetcher: Make) -> None:
    commit = hub.add(NAME, FILES)
    make = fetcher("hf", LOCAL)
    make.fetch(parse_source(NAME))
    hub.server.statuses = {f"/{NAME}/resolve/main/{CONFIG}": 503}
    assert str(make.fetch(parse_source(NAME)).origin) == f"hf://{NAME}@{commit}"
    with pytest.raises(AdapterUnavailable, match="the Hub answers 503"):
        hub.add("acme/other", FILES)
        hub.server.statuses = {f"/acme/other/resolve/main/{CONFIG}": 503}
        make.fetch(parse_source("acme/other"))


def test_a_download_goes_on_where_it_broke_off(hub: HubStub, fetcher: Make) -> None:
    hub.add(NAME, FILES)
    hub.storage.breaks[lfs_path(FILES)] = [50_000, 0, 100_000]
    assert content(fetcher("hf", LOCAL).fetch(parse_source(NAME)).folder) == FILES
    starts = [int(part.removeprefix("bytes=").removesuffix("-") or 0) for part in hub.storage.gets(lfs_path(FILES))]
    assert len(starts) == 4 and starts == sorted(starts) and 0 < starts[1] <= 50_000 < starts[3] <= 150_000


def test_the_next_start_goes_on_where_the_last_one_broke_off(hub: HubStub, fetcher: Make) -> None:
    hub.add(NAME, FILES)
    hub.storage.breaks[lfs_path(FILES)] = [100_000, *[0] * 9]
    before = fetcher("hf", LOCAL)
    with pytest.raises(AdapterUnavailable, match="cannot be downloaded now"):
        before.fetch(parse_source(NAME))
    before.close()
    hub.storage.breaks.clear()
    hub.storage.asked.clear()
    assert content(fetcher("hf", LOCAL).fetch(parse_source(NAME)).folder) == FILES
    (part,) = hub.storage.gets(lfs_path(FILES))
    assert 0 < int(part.removeprefix("bytes=").removesuffix("-")) <= 100_000


def test_damaged_content_never_gets_a_name(hub: HubStub, fetcher: Make, tmp_path: Path) -> None:
    hub.add(NAME, FILES)
    for name in (CONFIG, WEIGHTS):
        damaged = bytearray(FILES[name])
        damaged[-10] ^= 1
        hub.damage = {name: bytes(damaged)}
        with pytest.raises(AdapterUnavailable, match="changed during the download"):
            fetcher("hf", LOCAL).fetch(parse_source(NAME))
    assert not list((tmp_path / "cache" / "content").iterdir())
    assert not [path for path in (tmp_path / "cache" / "partial").iterdir() if path.is_dir()]


@pytest.mark.parametrize(
    "name, text",
    [
        ("acme/none", "no repository hf://acme/none"),
        ("acme/private", "private"),
        ("acme/gated", "is gated: ask for access"),
        (f"{NAME}@v9", "no revision v9"),
        ("acme/model", f"it has no {CONFIG}"),
        ("acme/empty", f"no {WEIGHTS}"),
    ],
)
def test_what_is_not_there_is_not_found(hub: HubStub, fetcher: Make, name: str, text: str) -> None:
    for each in (NAME, "acme/private", "acme/gated"):
        hub.add(each, FILES)
    hub.repositories["acme/private"].readers = hub.repositories["acme/gated"].readers = frozenset({"hf_right"})
    hub.repositories["acme/gated"].is_gated = True
    hub.add("acme/model", {"config.json": b"{}"})
    hub.add("acme/empty", {CONFIG: FILES[CONFIG]})
    with pytest.raises(AdapterNotFound, match=text):
        fetcher("hf", LOCAL).fetch(parse_source(name))


def test_the_token_goes_to_the_hub_alone(hub: HubStub, fetcher: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(NAME, FILES)
    hub.repositories[NAME].readers = frozenset({"hf_right"})
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert content(fetcher("hf", LOCAL).fetch(parse_source(NAME)).folder) == FILES
    assert {token for *_, token in hub.server.asked} == {"Bearer hf_right"}
    assert {token for *_, token in hub.storage.asked} == {""}


def test_a_pickle_and_other_options_are_refused_before_the_weights_come(hub: HubStub, fetcher: Make) -> None:
    hub.add("acme/pickle", {CONFIG: FILES[CONFIG], "adapter_model.bin": b"x"})
    with pytest.raises(RequestError, match="pickle, which can run any code"):
        fetcher("hf", LOCAL).fetch(parse_source("acme/pickle"))
    config = FILES[CONFIG].replace(b'"r": 4', b'"r": 4, "use_qalora": true')
    hub.add("acme/odd", {CONFIG: config, WEIGHTS: FILES[WEIGHTS]})
    with pytest.raises(RequestError, match="use_qalora"):
        fetcher("hf", LOCAL).fetch(parse_source("acme/odd"))
    fake = {CONFIG: FILES[CONFIG], WEIGHTS: b"\x80\x04pickle" * 9_000}
    hub.add("acme/fake", fake)
    with pytest.raises(RequestError, match="not in safetensors format, or are incomplete"):
        fetcher("hf", LOCAL).fetch(parse_source("acme/fake"))


def test_adapters_have_at_most_so_many_bytes(hub: HubStub, fetcher: Make) -> None:
    hub.add(NAME, FILES)
    size = len(FILES[WEIGHTS])
    with pytest.raises(RequestError, match=f"at most {size - 1:,} are downloaded"):
        fetcher("hf", LOCAL, most_bytes=size - 1).fetch(parse_source(NAME))
    assert not hub.storage.asked
    assert content(fetcher("hf", LOCAL, most_bytes=size).fetch(parse_source(NAME)).folder) == FILES


@pytest.mark.parametrize("target", ["http://169.254.169.254/latest/meta-data", "http://10.0.0.1/x", "http://[::1]:1/x"])
def test_the_hub_redirects_to_no_private_address(hub: HubStub, fetcher: Make, target: str) -> None:
    hub.add(NAME, FILES)
    hub.redirect = target
    with pytest.raises(RequestError, match="which is neither public nor in a network") as error:
        fetcher("hf").fetch(parse_source(NAME))
    assert error.value.code == "adapter_source_not_allowed"


def test_the_storage_of_a_hub_at_home_may_lie_in_a_listed_network(hub: HubStub, fetcher: Make) -> None:
    hub.add(NAME, FILES)
    with pytest.raises(RequestError, match=r"127\.0\.0\.1, which is neither public nor in a network"):
        fetcher("hf", "10.0.0.0/8").fetch(parse_source(NAME))
    assert not hub.storage.asked
    assert content(fetcher("hf", LOCAL).fetch(parse_source(NAME)).folder) == FILES


def test_a_client_that_blocks_holds_up_neither_the_timeout_nor_the_end(
    hub: HubStub, fetcher: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = threading.Event()
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda *_, **__: answer.wait())
    watchdog = threading.Timer(120, answer.set)  # without the cure, both wait for the client
    watchdog.daemon = True
    watchdog.start()
    with pytest.raises(AdapterUnavailable, match=r"within 0\.2 seconds"):
        fetcher("hf", LOCAL, seconds=0.2).fetch(parse_source(NAME))
    assert not answer.is_set()
    make = fetcher("hf", LOCAL)
    download = make.begin(parse_source(NAME))
    make.close()
    assert not answer.is_set()
    with pytest.raises(AdapterUnavailable, match="shutting down"):
        download.result.result()
    watchdog.cancel()
    answer.set()
