"""``rootgraft run`` beside a server that has the model already: the chat is with that one, and no other is started."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest
from support.api.fake_openai import FakeServer
from support.engine.tiny_llm import write_model

from rootgraft.api.cli.chat import run_command
from rootgraft.api.cli.main import main
from rootgraft.api.http.run_record import RunRecord


def test_a_server_that_runs_is_taken(
    fake_server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_model(tmp_path)
    capsys.readouterr()
    url = fake_server.url.removesuffix("/v1")
    other = RunRecord(1, 0.0, "http://127.0.0.1:1", ("other",), status="ready", path="/elsewhere")
    ready = RunRecord(2, 0.0, url, ("mine",), status="ready", path=os.path.realpath(model))
    monkeypatch.setattr(run_command, "running_servers", lambda users: [other, ready])
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n"))
    monkeypatch.setattr(run_command, "in_terminal", lambda: True)
    assert main(["run", str(model)]) == 0
    told = capsys.readouterr()
    said = f"Using a running server that has the model; it keeps running after this chat: {url}\n"
    assert told.out == "Hello wörld\n" and told.err == said
    assert [each["model"] for each in fake_server.asked] == ["mine"]
