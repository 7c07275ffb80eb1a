"""``rootgraft run``: a model is served while its chat lasts, by its own server or one that runs already."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.engine.tiny_llm import write_model

from rootgraft.api.http.run_record import running_servers

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def run(model: Path, state: Path, questions: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rootgraft.api.cli.main", "run", str(model), "--max-tokens", "4"]
    environment = {**os.environ, "XDG_STATE_HOME": str(state), "XDG_RUNTIME_DIR": str(state)}
    return subprocess.run(command, cwd=ROOT, env=environment, input=questions, capture_output=True, text=True)


def test_a_model_is_served_while_the_chat_lasts(model: Path, tmp_path: Path) -> None:
    done = run(model, tmp_path, "one\n/model\ntwo\n")
    told = [line for line in done.stderr.splitlines() if not line.startswith("The answer was cut off after 4 tokens")]
    assert (done.returncode, told) == (0, [f"* {model.name}"])
    assert done.stdout.count("\n") >= 2
    assert not [each for each in running_servers() if each.path == os.path.realpath(model)]
    assert "POST" in (tmp_path / "rootgraft" / "run.log").read_text()


def test_what_the_server_refuses_is_told(model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in model.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = next(broken.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-8])
    done = run(broken, tmp_path, "one\n")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("rootgraft run: ") and done.stderr.count("\n") == 1 and weights.name in done.stderr
    assert done.stderr.endswith(f" The server's log: {tmp_path / 'rootgraft' / 'run.log'}\n")


def test_errors_within_the_chat_name_the_command_that_was_given(model: Path, tmp_path: Path) -> None:
    done = run(model, tmp_path, "/nothing\n/set max_tokens\n/set\n/system\n/save\n/set model x\n")
    first, nothing_set, no_system, *others = done.stderr.splitlines()
    assert done.returncode == 1
    assert first.startswith("rootgraft run: unknown command /nothing.") and "/help lists commands" in first
    assert "/set NAME VALUE" in nothing_set and "/system TEXT" in no_system
    assert others == [
        "rootgraft run: /save needs the path of a file: /save PATH.",
        "rootgraft run: model cannot be set: the chat sets it. /model NAME selects another one.",
    ]
