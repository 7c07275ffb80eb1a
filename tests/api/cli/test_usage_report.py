"""``rootgraft usage``: sums, prices and formats of a ledger that a server wrote."""

from __future__ import annotations

import csv
import io
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from rootgraft.api.access.key_file import add_key
from rootgraft.api.cli.main import main
from rootgraft.api.observe.usage_ledger import LedgerFile, UsageRecord

ROWS = (
    ("2026-10-31", "a1", "base", 100, 40, 10),
    ("2026-11-01", "a1", "base", 10, 0, 1),
    ("2026-11-01", "a2", "sql", 1000, 500, 200),
    ("2026-11-02", "b", "base", 7, 7, 3),
    ("2026-11-02", "", "sql", 1, 0, 1),
)


@pytest.fixture
def ledger(tmp_path: Path) -> str:
    file = LedgerFile(tmp_path / "us age.sqlite")
    file.add(
        UsageRecord(str(number), datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp(), *rest)
        for number, (day, *rest) in enumerate(ROWS)
    )
    file.close()
    return str(tmp_path / "us age.sqlite")


def usage(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, object]]:
    assert main(["usage", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_sums_by_everything(ledger: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = tmp_path / "keys.toml"
    for name, tenant in (("a1", "acme"), ("a2", "acme")):
        add_key(keys, name, {"tenant": tenant})
    prompts = {
        by: {row[by]: row["prompt_tokens"] for row in usage(capsys, ledger, "--by", by, "--api-key-file", str(keys))}
        for by in ("day", "month", "key", "model", "adapter", "tenant")
    }
    assert prompts == {
        "day": {"2026-10-31": 100, "2026-11-01": 1010, "2026-11-02": 8},
        "month": {"2026-10": 100, "2026-11": 1018},
        "key": {"": 1, "a1": 110, "a2": 1000, "b": 7},
        "model": {"base": 117, "sql": 1001},
        "adapter": {"base": 117, "sql": 1001},
        "tenant": {"": 1, "acme": 1110, "b": 7},
    }
    some = usage(capsys, ledger, "--by", "day", "--since", "2026-11-01", "--until", "2026-11-01")
    assert some == [
        {"day": "2026-11-01", "requests": 2, "prompt_tokens": 1010, "cached_tokens": 500, "completion_tokens": 201}
    ]


def test_prices(ledger: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text(
        '[models."*"]\nprompt = 1\ncompletion = 2.5\n[models.sql]\nprompt = 10\ncached = 1\ncompletion = 0\n'
    )
    costs = {row["model"]: row["cost"] for row in usage(capsys, ledger, "--prices", str(prices))}
    assert costs == {"base": (117 + 2.5 * 14) / 1e6, "sql": (501 * 10 + 500) / 1e6}


def test_prices_are_of_the_model_that_answered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also in place of another one, and as a version of the catalogue, unless these have prices of their own."""
    file = LedgerFile(tmp_path / "ledger.sqlite")
    version = "@1a2b3c4d5e6f"
    models = (
        "small",
        "small (for big)",
        f"sql{version}",
        f"sql{version} (for big)",
        f"own{version}",
        "big",
        "sql@main",
    )
    now = datetime(2026, 11, 1, tzinfo=UTC).timestamp()
    file.add(UsageRecord(model, now, "a", model, 1_000_000, 0, 0) for model in models)
    file.close()
    prices = tmp_path / "prices.toml"
    costs = {"*": 1, "small": 2, "sql": 3, f"own{version}": 4, "own": 5}
    prices.write_text("".join(f'[models."{name}"]\nprompt = {cost}\ncompletion = 0\n' for name, cost in costs.items()))
    found = {
        row["model"]: row["cost"] for row in usage(capsys, str(tmp_path / "ledger.sqlite"), "--prices", str(prices))
    }
    assert found == dict(zip(models, (2, 2, 3, 3, 4, 1, 1), strict=True))


def test_a_table_and_csv(ledger: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["usage", ledger, "--csv", "--by", "key"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(row["key"], row["requests"]) for row in rows] == [("", "1"), ("a1", "2"), ("a2", "1"), ("b", "1")]
    assert main(["usage", ledger, "--by", "key"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["KEY", "REQUESTS", "PROMPT", "TOKENS", "CACHED", "TOKENS", "COMPLETION", "TOKENS"]
    assert lines[0].startswith("(no key)") and "1,000" in lines[2]


def test_a_ledger_that_a_server_has_open_is_read(ledger: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = LedgerFile(Path(ledger))
    file.add([UsageRecord("new", datetime(2026, 11, 3, tzinfo=UTC).timestamp(), "c", "base", 5, 0, 5)])
    assert [row["key"] for row in usage(capsys, ledger, "--by", "key")] == ["", "a1", "a2", "b", "c"]
    file.close()


@pytest.mark.parametrize(
    "words, says",
    [
        (["none.sqlite"], "none.sqlite cannot be read: No such file"),
        ([__file__], "cannot be read: file is not a database"),
        (["{ledger}", "--prices", __file__], "is not valid TOML"),
        (["{ledger}", "--prices", "{prices}"], 'has no price for base, and none for "*"'),
        (["{ledger}", "--prices", "{wrong}"], "models.base.prompt"),
    ],
)
def test_files_that_cannot_be_used(words: list[str], says: str, ledger: str, tmp_path: Path, capsys) -> None:
    prices, wrong = tmp_path / "prices.toml", tmp_path / "wrong.toml"
    prices.write_text("[models.sql]\nprompt = 1\ncompletion = 1\n")
    wrong.write_text("[models.base]\nprompt = -1\ncompletion = 1\n")
    places = {"ledger": ledger, "prices": str(prices), "wrong": str(wrong)}
    assert main(["usage", *(word.format(**places) if word[0] == "{" else word for word in words)]) == 1
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "words, says",
    [
        ([], "--usage-ledger must name"),
        (["x", "--by", "tenant"], "--by tenant needs --api-key-file"),
        (["x", "--since", "2026-13-01"], "--since must be a day such as 2026-11-01, not 2026-13-01."),
        (["x", "--until", "20261101"], "--until must be a day"),
        (["x", "--csv", "--json"], "--csv and --json cannot be used together"),
    ],
)
def test_wrong_lines(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["usage", *words]) == 2
    assert says in capsys.readouterr().err


def test_options_are_named_as_they_are_written(ledger: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["usage", "--help"]) == 0
    assert "The same as --usage-ledger." in capsys.readouterr().out
    assert main(["usage", ledger, "--usage-ledger", "other"]) != 0
    assert "--usage-ledger other contradict each other." in capsys.readouterr().err
