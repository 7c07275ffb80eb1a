"""``rootgraft key``: what it prints, and where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rootgraft.api.access.api_keys import KeyRing
from rootgraft.api.cli.main import main


def test_the_key_alone_is_on_standard_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "keys.toml")
    words = ["--adapters", "sql", "tickets", "--requests-per-minute", "60", "--priority", "batch"]
    assert main(["key", "add", "acme", "--api-key-file", file, *words]) == 0
    key = capsys.readouterr().out.strip()
    found = KeyRing((), Path(file)).find(key.encode())
    assert found is not None and found.adapters == {"sql", "tickets"} and found.requests_per_minute == 60
    assert main(["key", "add", "ops", "--api-key-file", file, "--scopes", "admin", "metrics", "--tenant", "us"]) == 0
    assert main(["key", "rotate", "acme", "--api-key-file", file]) == 0
    capsys.readouterr()
    assert main(["key", "list", "--api-key-file", file]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["NAME", "TENANT", "SCOPES", "PRIORITY", "REQUESTS/MIN", "TOKENS/MIN", "SHA-256", "ADAPTERS"]
    assert [row.split()[:2] for row in rows] == [["acme", "acme"], ["ops", "us"]]
    assert rows[0].endswith("sql, tickets") and rows[1].endswith("all")
    assert main(["key", "list", "--api-key-file", file, "--json"]) == 0
    assert [each["name"] for each in json.loads(capsys.readouterr().out)] == ["acme", "ops"]
    assert main(["key", "revoke", "acme", "--api-key-file", file]) == 0
    assert main(["key", "revoke", "acme", "--api-key-file", file]) == 1
    assert "has no key acme" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, says",
    [
        (["add", "a"], "--api-key-file must name the server's key file"),
        (["add", "a", "--api-key-file", "keys.ini"], "must end in .toml or .json"),
        (["add", "a/b", "--api-key-file", "k.toml"], "--name must be 1 to 64 letters, digits and ._@:-, not 'a/b'."),
        (["add", "a", "--api-key-file", "k.toml", "--tokens-per-minute", "0"], "--tokens-per-minute"),
    ],
)
def test_a_wrong_line_is_refused(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", *words]) == 2
    assert says in capsys.readouterr().err
