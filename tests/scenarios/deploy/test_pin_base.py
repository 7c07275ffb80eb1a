"""The base image's digest as a registry tells it, which is asked as Docker asks: token, platforms, redirects."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from support.adapter_sources.file_server import FileServer

DEPLOY = Path(__file__).parents[3] / "deploy"
INDEX = json.dumps({"schemaVersion": 2, "manifests": [{"platform": {"architecture": "amd64"}}]}).encode()
DIGEST = f"sha256:{hashlib.sha256(INDEX).hexdigest()}"
TEXT = "# a comment\nARG BASE=python:3.11@sha256:0\n\nFROM ${BASE} AS build\n"


@pytest.fixture(scope="module")
def pin_base() -> Any:
    spec = importlib.util.spec_from_file_location("pin_base", DEPLOY / "pin_base.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Registry:
    """A registry that gives manifests to who has fetched a token for the repository."""

    def __init__(self) -> None:
        self.server = FileServer(extra=self.answer)
        self.headers = {"Docker-Content-Digest": DIGEST}
        self.scheme = "Bearer"
        self.accepted: list[str] = []

    async def answer(self, request: web.Request) -> web.Response | None:
        if request.path == "/token":
            assert dict(request.query) == {"service": "a registry", "scope": "repository:library/python:pull"}
            return web.json_response({"token": "for everybody"})
        if request.path != "/v2/library/python/manifests/3.12":
            return None
        if request.headers.get("Authorization") != "Bearer for everybody":
            scope = 'service="a registry",scope="repository:library/python:pull"'
            challenge = f'{self.scheme} realm="{self.server.origin}/token",{scope}'
            return web.Response(status=401, headers={"WWW-Authenticate": challenge})
        self.accepted.append(request.headers["Accept"])
        return web.Response(body=INDEX, headers=self.headers)

    @property
    def image(self) -> str:
        return f"localhost:{self.server.port}/library/python:3.12"


@pytest.fixture
def registry() -> Iterator[Registry]:
    made = Registry()
    yield made
    made.server.close()


def test_the_digest_of_all_platforms_is_written(pin_base: Any, registry: Registry, tmp_path: Path) -> None:
    (file := tmp_path / "Dockerfile").write_text(TEXT)
    assert pin_base.pin(file, registry.image) == f"{registry.image}@{DIGEST}"
    assert file.read_text() == TEXT.replace("python:3.11@sha256:0", f"{registry.image}@{DIGEST}")
    assert registry.accepted[0].startswith("application/vnd.oci.image.index.v1+json")


def test_a_registry_that_tells_no_digest_gives_that_of_its_bytes(pin_base: Any, registry: Registry) -> None:
    registry.headers = {}
    assert pin_base.newest_digest(pin_base.ImageName.parse(registry.image)) == DIGEST


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"headers": {"Docker-Content-Digest": "sha256:" + "0" * 64}}, "reports sha256:0000"),
        ({"scheme": "Basic"}, "asks for credentials: Basic"),
    ],
)
def test_what_is_not_sure_is_not_written(
    pin_base: Any, registry: Registry, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    (file := tmp_path / "Dockerfile").write_text(TEXT)
    vars(registry).update(change)
    with pytest.raises(SystemExit, match=message):
        pin_base.pin(file, registry.image)
    assert file.read_text() == TEXT


def test_an_unknown_tag_and_a_file_without_a_base(pin_base: Any, registry: Registry, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="manifests/4 answers 404"):
        pin_base.newest_digest(pin_base.ImageName.parse(registry.image.replace("3.12", "4")))
    (file := tmp_path / "Dockerfile").write_text("FROM scratch\n")
    with pytest.raises(SystemExit, match="must have one line ARG BASE=, not 0"):
        pin_base.pin(file, registry.image)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("python", "https://registry-1.docker.io/v2/library/python/manifests/latest"),
        ("docker.io/python:3.12", "https://registry-1.docker.io/v2/library/python/manifests/3.12"),
        ("some/one:1", "https://registry-1.docker.io/v2/some/one/manifests/1"),
        ("quay.io/a/b/c:v1.2", "https://quay.io/v2/a/b/c/manifests/v1.2"),
        ("inner:5000/python", "https://inner:5000/v2/python/manifests/latest"),
        ("127.0.0.1:5000/python", "http://127.0.0.1:5000/v2/python/manifests/latest"),
    ],
)
def test_names_are_read_as_docker_reads_them(pin_base: Any, text: str, url: str) -> None:
    assert pin_base.ImageName.parse(text).url == url


@pytest.mark.parametrize("text", ["", "Python", f"python@{DIGEST}", "python:", "a b", "quay.io/", "python:3.12|x"])
def test_other_names_are_refused(pin_base: Any, text: str) -> None:
    with pytest.raises(SystemExit, match="is not an image"):
        pin_base.ImageName.parse(text)


def test_make_calls_it(pin_base: Any) -> None:
    makefile = (DEPLOY.parent / "Makefile").read_text("utf-8")
    assert "$(PYTHON) deploy/pin_base.py $(BASE_IMAGE)" in makefile
    base = makefile.split("BASE_IMAGE ?= ")[1].split("\n")[0]
    assert base == pin_base.IMAGE and pin_base.DOCKERFILE == DEPLOY / "Dockerfile"
