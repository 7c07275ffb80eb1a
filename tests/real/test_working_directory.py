"""The server and its children run no code from the folder that they are started in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.api.real_server import start

NAMES = ("engine", "radix", "lora", "grammar", "kernels", "fleet", "api", "programs", "tenancy")
MODULES = ("http.py", "json.py", "queue.py", "select.py", "numpy.py", "torch.py", "rootgraft.py")
SCRIPT = """
import asyncio
from rootgraft.engine.serving.engine_client import EngineClient
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.errors import EngineError
from rootgraft.grammar.compile.worker_handle import WorkerHandle
from rootgraft.grammar.vocabulary import Vocabulary
from pathlib import Path

async def main():
    client = EngineClient(EngineConfig(), Path("no-model"))
    try:
        await client.start()
    except EngineError as error:
        print(type(error).__name__, error)

asyncio.run(main())
for yields in (False, True):
    child = WorkerHandle(Vocabulary((b"a", b"b", b"<end>"), frozenset((2,)), (2,)), yields=yields)
    print(child.is_alive)
    child.kill()
"""


@pytest.fixture
def trapped_folder(tmp_path: Path) -> Path:
    """A folder with packages and modules of common names, each of which leaves a file when it is run."""
    trap = "import os, pathlib\npathlib.Path(os.environ['TRAPPED'], __name__ + '.ran').touch()\n"
    for name in NAMES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(trap)
    for name in MODULES:
        (tmp_path / name).write_text(trap)
    return tmp_path


def ran_traps(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("*.ran")]


def test_children_run_nothing_from_the_working_directory(trapped_folder: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT],
        cwd=trapped_folder,
        env={**os.environ, "TRAPPED": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran_traps(tmp_path) == []
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:] == ["True", "True"]
    assert done.stdout.startswith("ModelError")


@pytest.mark.heavy
def test_a_server_in_a_folder_of_traps_answers_with_a_schema(
    trapped_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAPPED", str(tmp_path))
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    server = start(cwd=trapped_folder)
    try:
        answer = server.client.chat.completions.create(
            model="small",
            messages=[{"role": "user", "content": "Name a number."}],
            max_tokens=40,
            response_format={"type": "json_schema", "json_schema": {"name": "number", "schema": schema}},
        )
    finally:
        server.close()
    assert isinstance(json.loads(answer.choices[0].message.content or "")["n"], int)
    assert ran_traps(tmp_path) == []
