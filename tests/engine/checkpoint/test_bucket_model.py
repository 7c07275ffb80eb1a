"""Base models in buckets: moto's S3 server, and s3fs as users have it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.adapter_sources.cut_proxy import CutProxy

from rootgraft.api.cli.main import main
from rootgraft.engine.checkpoint import bucket_model
from rootgraft.engine.checkpoint.locate import ModelFiles, resolve_model
from rootgraft.engine.checkpoint.model_cache import cached_models
from rootgraft.engine.errors import ConfigError, ModelError

pytestmark = pytest.mark.heavy

URL = "s3://models/org/tiny"
FILES = {
    "config.json": json.dumps({"model_type": "llama"}).encode(),
    "model.safetensors": bytes(range(256)) * 1024,
    "tokenizer.json": b"{}",
}
OTHERS = {
    "pytorch_model.bin": b"pickle",
    "modeling.py": b"code",
    "consolidated.safetensors": b"x",
    "onnx/a.json": b"{}",
}


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    from moto.server import ThreadedMotoServer  # both take seconds to import

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def s3(server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """The real client, with a bucket and a model in it, and an empty cache here."""
    import boto3

    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    client.create_bucket(Bucket="models")
    put(client, "org/tiny", FILES | OTHERS)
    yield client
    client.close()


def put(client: Any, folder: str, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        client.put_object(Bucket="models", Key=f"{folder}/{name}", Body=content)


def content(files: ModelFiles) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in files.path.iterdir()}


def test_a_folder_is_downloaded_once_for_each_version_and_only_what_a_model_has(s3: Any) -> None:
    told: list[tuple[str, int, int]] = []
    first = resolve_model(URL, progress=lambda *each: told.append(each))
    assert content(first) == FILES and first.name == "tiny"
    assert {name for name, done, size in told if done == size} == FILES.keys()
    told.clear()
    assert resolve_model(f"{URL}/", progress=lambda *each: told.append(each)) == first and not told
    newer = FILES | {"model.safetensors": b"new"}
    put(s3, "org/tiny", newer)
    second = resolve_model(URL)
    assert content(second) == newer and content(first) == FILES, "a process may still read the old one"
    assert resolve_model(URL, on_machine=True) == second


def test_a_gguf_file_is_a_model(s3: Any) -> None:
    put(s3, "org", {"tiny-Q4_1.gguf": b"GGUF and more"})
    found = resolve_model("s3://models/org/tiny-Q4_1.gguf")
    assert (found.path.name, found.name, found.path.read_bytes()) == ("tiny-Q4_1.gguf", "tiny-Q4_1", b"GGUF and more")


def test_what_was_seen_last_counts_while_the_store_does_not_answer(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("s3fs.core.S3FileSystem.retries", 1)
    seen = resolve_model(URL)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert resolve_model(URL) == seen
    with pytest.raises(ModelError, match="the object store does not answer for s3://models/other/m"):
        resolve_model("s3://models/other/m")


def test_a_download_goes_on_where_it_broke_off(s3: Any, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_model, "PART_BYTES", 50_000)
    monkeypatch.setattr("s3fs.core.S3FileSystem.retries", 1)
    proxy = CutProxy(server.get_host_and_port(), 130_000)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
    try:
        with pytest.raises(ModelError, match="The part that was downloaded is kept"):
            resolve_model(URL)
        proxy.budget = 1 << 20
        told: list[int] = []
        assert content(resolve_model(URL, progress=lambda name, done, size: told.append(done))) == FILES
    finally:
        proxy.close()
    assert min(done for done in told if done > 20) > 100_000


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("s3://models/nothing", "there is no model at s3://models/nothing"),
        ("s3://nobucket/tiny", "there is no model at s3://nobucket/tiny"),
        ("s3://models/org/tiny/modeling.py", "is a file, but not a .gguf file"),
        ("s3://models", "is not s3://BUCKET/FOLDER"),
        ("s3://models/../tiny", "is not s3://BUCKET/FOLDER"),
        ("s3://models/a?b", "is not s3://BUCKET/FOLDER"),
        ("s3://models/" + "a" * 1020, "is not s3://BUCKET/FOLDER"),
        ("s3://models/org/tiny/onnx", "has no config.json"),
    ],
)
def test_what_is_no_model_is_refused_by_name(s3: Any, model: str, message: str) -> None:
    with pytest.raises(ModelError, match=message.replace("?", r"\?")):
        resolve_model(model)


def test_a_revision_and_what_was_never_downloaded_are_refused(s3: Any) -> None:
    with pytest.raises(ConfigError, match="--revision"):
        resolve_model(URL, revision="main")
    with pytest.raises(ModelError, match="Try: rootgraft pull s3://models/org/tiny"):
        resolve_model(URL, on_machine=True)


def test_models_of_buckets_are_listed_and_removed(
    s3: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = resolve_model(URL)
    put(s3, "org", {"tiny-Q4_1.gguf": b"GGUF and more"})
    resolve_model("s3://models/org/tiny-Q4_1.gguf")
    folder, file = [each for each in cached_models() if each.name.startswith("s3://")]
    assert (folder.name, folder.model, folder.size > 1024 * 256) == (URL, URL, True)
    assert (file.name, file.format) == ("s3://models/org/tiny-Q4_1.gguf", "GGUF")
    assert main(["rm", URL, "--yes"]) == 0
    assert f"Removed {URL}" in capsys.readouterr().out
    assert not found.path.exists() and [each.name for each in cached_models()] == [file.name]
    with pytest.raises(ModelError, match="is not on this machine"):
        resolve_model(URL, on_machine=True)
    put(s3, "org/tiny", {"model.safetensors": b"cut"})
    monkeypatch.setattr("s3fs.core.S3File.read", lambda *_: b"")
    with pytest.raises(ModelError, match="The part that was downloaded is kept"):
        resolve_model(URL)
    cut = next(each for each in cached_models() if each.name == URL)
    assert cut.fault == "its download is incomplete: rootgraft pull fetches the rest"
