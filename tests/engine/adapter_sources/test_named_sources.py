"""Adapters that the operator names by source: ``--lora-modules``, and which names are folders."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.adapter_sources.hub_stub import HubStub
from support.adapter_sources.source_files import WEIGHTS, adapter_files

from rootgraft.engine.adapter_sources.adapter_fetcher import AdapterFetcher
from rootgraft.engine.adapter_sources.named_sources import fetch_named, named_source
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.errors import ConfigError, RequestError

Make = Callable[..., AdapterFetcher]
LOCAL = "127.0.0.0/8"  # where the stub's storage lies
FILES = adapter_files()


def test_a_name_is_a_folder_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "here").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for root in (None, str(tmp_path)):
        assert named_source("org/here", root) is None
        assert str(named_source("org/there", root)) == "hf://org/there"
        assert str(named_source("hf://org/here", root)) == "hf://org/here"
        for path in ("here", "./org/there", "/org/there", "../there", "a/b/c"):
            assert named_source(path, root) is None
    with pytest.raises(RequestError):
        named_source("gs://bucket/a", None)


def config_of(*modules: str) -> EngineConfig:
    return EngineConfig(enable_lora=True, lora_modules=modules)


def test_modules_by_source_become_folders(hub: HubStub, fetcher: Make, tmp_path: Path) -> None:
    commit = hub.add("acme/support", FILES)
    config = config_of("a=acme/support", f"b={tmp_path}", "c=1", f"d=hf://acme/support@{commit}")
    fetched, adapters = fetch_named(config, fetcher(LOCAL))
    assert adapters.keys() == {"a", "d"} and str(adapters["a"].origin) == f"hf://acme/support@{commit}"
    folders = fetched.named_adapters
    assert list(folders) == ["a", "b", "c", "d"] and folders["b"] == str(tmp_path) and folders["c"] == "1"
    assert all((Path(folders[name]) / WEIGHTS).read_bytes() == FILES[WEIGHTS] for name in "ad")
    unchanged = config_of(f"b={tmp_path}")
    assert fetch_named(unchanged, fetcher()) == (unchanged, {})


def test_a_path_is_what_a_shell_means_by_it_then_what_is_below_the_folder(
    hub: HubStub, fetcher: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("ad/a0", "ad/ad/a1", "else/a2"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    given = ("a=ad/a0", "b=ad/a1", "c=a0", "d=else/a2", f"e={tmp_path}/ad/a0", "f=./ad/a0", "g=none")
    config = EngineConfig(enable_lora=True, lora_modules=given, lora_dir="ad")
    found, adapters = fetch_named(config, fetcher())
    assert adapters == {} and found.named_adapters == {
        "a": "a0",
        "b": "ad/a1",
        "c": "a0",
        "d": f"{tmp_path}/else/a2",
        "e": "a0",
        "f": "a0",
        "g": "none",
    }
    with pytest.raises(ConfigError, match=r"There is no folder ad/none, nor ad/ad/none here\. The Hub has no"):
        fetch_named(EngineConfig(enable_lora=True, lora_modules=("a=ad/none",), lora_dir="ad"), fetcher())


@pytest.mark.parametrize(
    "module, text",
    [
        ("a=acme/none", r"--lora-modules a: There is no folder acme/none here\. The Hub has no repository"),
        ("a=hf://acme/none", r"--lora-modules a: The Hub has no repository"),
        ("a=gs://bucket/b", r"--lora-modules a: An adapter's source must be org/name"),
        (
            "a=https://127.0.0.1:1/b",
            r"--lora-modules a: https://127.0.0.1:1/b cannot be downloaded now: .*no conn",
        ),
    ],
)
def test_the_first_that_cannot_be_fetched_is_named(hub: HubStub, fetcher: Make, module: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        fetch_named(config_of(module), fetcher())


def test_options_make_a_fetcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "allowed").mkdir()
    for name, content in FILES.items():
        (tmp_path / "allowed" / name).write_bytes(content)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    url = f"file://{tmp_path}/allowed"
    limits = {"max_adapter_bytes": len(FILES[WEIGHTS]), "max_adapter_cache_bytes": 1 << 20}
    for folder, place in ((None, tmp_path / "xdg" / "rootgraft" / "adapters"), (str(tmp_path / "c"), tmp_path / "c")):
        config = EngineConfig(enable_lora=True, adapter_sources=(url,), adapter_cache_dir=folder, **limits)
        fetcher = AdapterFetcher.of(config)
        assert place.exists()
        source = named_source(url, None)
        assert source is not None and fetcher.policy.allows(source)
        assert fetcher.fetch(source).folder.is_relative_to(place)
        fetcher.close()
    AdapterFetcher.of(EngineConfig(enable_lora=True, adapter_cache_dir=str(tmp_path / "unused")))
    assert not (tmp_path / "unused").exists()
    (tmp_path / "file").touch()
    config = EngineConfig(enable_lora=True, adapter_sources=(url,), adapter_cache_dir=str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"\(--adapter-cache-dir\) cannot be written: .*\. Try: ls -ld .*/file$"):
        AdapterFetcher.of(config)
    with pytest.raises(ConfigError, match="--adapter-sources must be"):
        AdapterFetcher.of(EngineConfig(enable_lora=True, adapter_sources=("http://host",)))


def test_who_reads_names_imports_no_http_client() -> None:
    """As each engine process does when it starts."""
    code = "import sys, rootgraft.engine.adapter_sources.named_sources; sys.exit('aiohttp' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0
