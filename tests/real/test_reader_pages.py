"""The examples of the pages for readers who come from elsewhere: command lines parse, and all others run.

Each page is run from its top to its end in one namespace, all pages against one server.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.api.real_server import RealServer, start
from support.machine.waits import HANG_SECONDS

from rootgraft.api.cli.flag_parser import parse
from rootgraft.api.config import ServerConfig
from rootgraft.engine.config import EngineConfig

ROOT = Path(__file__).parents[2]
PAGES = (
    "docs/guide/from-vllm.md",
    "docs/guide/from-ollama.md",
    "docs/guide/from-openai.md",
    "docs/guide/programs.md",
    "docs/guide/adapters.md",
)
WITH_PYTHON = ("README.md", "docs/guide/structured-outputs.md")
ADDRESS = "http://127.0.0.1:8000"
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SERVE = "rootgraft serve "


@dataclass(frozen=True)
class Example:
    """A block of code of a page."""

    language: str
    code: str

    @property
    def serves(self) -> bool:
        return self.code.startswith(_SERVE)


def examples(page: str) -> list[Example]:
    text = (ROOT / page).read_text("utf-8")
    return [Example(language, code) for language, code in _BLOCK.findall(text)]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_examples_of_kinds_that_are_run(page: str) -> None:
    found = examples(page)
    assert found and {example.language for example in found} <= {"sh", "python"}
    assert page in (ROOT / "README.md").read_text("utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_the_command_lines_of_servers_are_taken(page: str) -> None:
    for example in examples(page):
        if example.serves:
            words = shlex.split(example.code.removeprefix(_SERVE).replace("\\\n", " "))
            parse("rootgraft serve", "", (EngineConfig, ServerConfig), "model", words)


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    options = ("--served-model-name", "SmolLM2-135M-Instruct", "--enable-lora", "--lora-dir", "examples/adapters")
    running = start(*options, cwd=ROOT)
    yield running
    running.close()


@pytest.mark.heavy
@pytest.mark.filterwarnings("default")
def test_the_examples_run(server: RealServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.chdir(ROOT)
    url = str(server.http.base_url).rstrip("/")
    (tmp_path / "rootgraft").write_text(f'#!/bin/sh\nexec {sys.executable} -P -m rootgraft.api.cli.main "$@" $EXTRA\n')
    (tmp_path / "rootgraft").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    for page in PAGES:
        names: dict[str, Any] = {"__name__": page}
        for example in examples(page):
            code = example.code.replace(ADDRESS, url).replace("keys.toml", str(tmp_path / "keys.toml"))
            if example.language == "python":
                exec(compile(code, page, "exec"), names)
            elif not example.serves:
                extra = f"--url {url}/v1" if code.startswith("rootgraft complete") else ""
                environment = {**os.environ, "PATH": path, "EXTRA": extra}
                done = subprocess.run(
                    ["sh", "-ec", code], env=environment, capture_output=True, text=True, timeout=HANG_SECONDS
                )
                assert done.returncode == 0 and '"error"' not in done.stdout, (page, code, done.stdout, done.stderr)
                assert done.stdout, (page, code)
        if "llm" in names:
            names["llm"].close()  # what compiles its grammars would end with a warning, in whichever test comes then


@pytest.mark.heavy
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("page", WITH_PYTHON)
def test_the_python_of_a_page_runs(
    server: RealServer, page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {"__name__": page}
    codes = [example.code for example in examples(page) if example.language == "python"]
    for code in codes:
        exec(compile(code.replace(ADDRESS, str(server.http.base_url).rstrip("/")), page, "exec"), names)
        assert capsys.readouterr().out.strip(), code
    if "llm" in names:
        names["llm"].close()
    assert codes
