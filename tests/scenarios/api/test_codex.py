"""The Codex CLI as an agent: its freeform ``apply_patch``, its functions and their outputs over three turns.

Its package is looked for in the repository's root: npm install @openai/codex
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.api.api_live import Live
from support.machine.waits import HANG_SECONDS

CODEX = Path(__file__).parents[3] / "node_modules" / ".bin" / "codex"
MODEL = "gpt-5.5"
"""A name for which Codex sends the freeform tool."""
CONFIG = """
model = "{model}"
model_provider = "rootgraft"

[model_providers.rootgraft]
name = "rootgraft"
base_url = "{url}/v1"
wire_api = "responses"
"""
WRITTEN = "*** Begin Patch\n*** Add File: hello.txt\n+held by a grammar\n*** End Patch\n"


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


TURNS = (call("apply_patch", input=WRITTEN), call("exec_command", cmd="cat hello.txt"), "All is done.")


@pytest.mark.heavy
@pytest.mark.skipif(not CODEX.exists(), reason="the package @openai/codex of Node is not installed")
def test_a_task_of_three_turns(live: Live, tmp_path: Path) -> None:
    home, folder = tmp_path / "home", tmp_path / "work"
    for each in (home, folder):
        each.mkdir()
    (home / "config.toml").write_text(CONFIG.format(model=MODEL, url=live.url))
    engine = live.async_engine
    engine.set_max_len(1 << 20)
    engine.say = lambda request, index: TURNS[len(engine.seen) - 1]
    names, live.state.models.names = live.state.models.names, (MODEL,)
    proxies = ("http_proxy", "https_proxy", "all_proxy")
    environment = {name: value for name, value in os.environ.items() if name.lower() not in proxies}
    command = [CODEX, "exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    try:
        ran = subprocess.run(
            [*command, "-C", folder, "Write hello.txt."],
            env={**environment, "CODEX_HOME": str(home)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
            check=False,
        )
    finally:
        live.state.models.names = names
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert (folder / "hello.txt").read_text() == "held by a grammar\n"
    items = [event["item"] for line in ran.stdout.splitlines() if "item" in (event := json.loads(line))]
    assert items[-1]["text"] == TURNS[-1], ran.stdout
    assert any("held by a grammar" in each.get("aggregated_output", "") for each in items)
    first, *_, last = engine.seen
    assert len(engine.seen) == len(TURNS) and first.grammar is not None
    assert "begin_patch" in first.grammar.text, "the grammar that Codex sends holds the text"
    assert "held by a grammar" in bytes(token for token in last.tokens if token < 256).decode()
