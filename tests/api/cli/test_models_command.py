"""``rootgraft models`` against a server on fakes, over a real socket."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.api.api_live import Live

from rootgraft.api.cli.main import main
from rootgraft.api.config import ServerConfig


@pytest.fixture
def run(serve_with: Any, capsys: pytest.CaptureFixture[str]) -> Any:
    server: Live = serve_with(ServerConfig(api_key=("secret",)))

    def command(line: str, *, key: str = "secret") -> tuple[int, str]:
        code = main(["models", *line.split(), "--url", f"{server.url}/v1", "--api-key", key])
        told = capsys.readouterr()
        return code, told.out + told.err

    return command


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("promote sql", "--name must include a version, such as sql@3f2a9c"),
        ("promote", "--name must be NAME@DIGEST"),
        ("rollback", "--name must be a name that rootgraft models list shows"),
        ("rollback @3f2a9c", "--name must be NAME or NAME@DIGEST, not @3f2a9c"),
        ("remove sql@", "--name must be NAME or NAME@DIGEST, not sql@"),
        ("canary sql@3f2a9c --weight 0", "--weight must be at least 1, not 0"),
        ("canary sql@3f2a9c --weight 100", "--weight must be at most 99, not 100"),
        ("add sql", "--source must be given"),
        ("add --source file:///a", "--name must be given"),
    ],
)
def test_wrong_lines_are_refused_before_a_server_is_asked(line: str, message: str, capsys: Any) -> None:
    assert main(["models", *line.split(), "--url", "http://127.0.0.1:1"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_the_server_s_refusal_is_told_in_a_line(run: Any) -> None:
    code, told = run("list", key="wrong")
    assert code == 1 and "The server returned HTTP 401: The API key is missing or wrong" in told
    code, told = run("promote sql@3f2a9c")
    assert code == 1 and "HTTP 400: This server has no model catalogue" in told and told.count("\n") == 1
    code, told = run("remove tiny")
    assert code == 1 and "tiny is the only base model" in told


def test_the_list_is_a_table_or_json(run: Any) -> None:
    code, told = run("list")
    assert code == 0 and told.splitlines()[0].split() == ["NAME", "VERSION", "WEIGHT", "STATE", "ADDED", "SOURCE"]
    assert told.splitlines()[1].split()[:4] == ["tiny", "100", "%", "ready"]
    code, told = run("list --json")
    assert [each["id"] for each in json.loads(told)["data"]] == ["tiny"]
