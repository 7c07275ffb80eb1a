"""`rootgraft search`, `show`, and `rm` by a short name."""

from __future__ import annotations

import json
from dataclasses import replace

import huggingface_hub
import pytest

from rootgraft.api.cli.machine import catalogue_command, model_list
from rootgraft.api.cli.main import main
from rootgraft.engine.checkpoint.catalogue import catalogue
from rootgraft.engine.checkpoint.model_cache import CachedModel
from rootgraft.engine.machine.resources import Memory

GIB = 1 << 30


@pytest.fixture(autouse=True)
def machine(monkeypatch) -> None:
    """A machine without a GPU, 8 GiB free of 10, and nothing downloaded."""
    monkeypatch.setattr(catalogue_command, "driver", lambda: None)
    monkeypatch.setattr(catalogue_command, "memory", lambda: Memory(10 * GIB, 10 * GIB, 8 * GIB))

    def nothing(*_: object, **__: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(huggingface_hub, "snapshot_download", nothing)


def test_search_says_what_fits_this_machine(capsys) -> None:
    assert main(["search", "qwen3", "--json"]) == 0
    fits = {row["name"]: row["fits"] for row in json.loads(capsys.readouterr().out)}
    assert fits["qwen3:8b"] and not fits["qwen3:8b-bf16"]
    assert main(["search"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [name for name in catalogue() if sum(line.startswith(f"{name} ") for line in lines) != 1] == []


def test_search_without_a_result_fails(capsys) -> None:
    assert main(["search", "no-such-model"]) == 1
    assert capsys.readouterr().err == "No model in the catalogue matches 'no-such-model'. Try: rootgraft search\n"


def test_show_says_how_to_get_a_model_and_how_to_serve_it(capsys, monkeypatch, tmp_path) -> None:
    assert main(["show", "gpt-oss:20b"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("no: rootgraft pull gpt-oss:20b")
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    assert main(["show", "gpt-oss:20b"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("yes: rootgraft serve gpt-oss:20b")


def test_show_of_an_unknown_name_offers_a_near_one(capsys) -> None:
    assert main(["show", "gpt-os:20b"]) == 1
    assert "the catalogue has no gpt-os:20b. Did you mean gpt-oss:20b?" in capsys.readouterr().err


def test_show_of_a_family_lists_its_sizes(capsys) -> None:
    assert main(["show", "smollm2"]) == 1
    told = capsys.readouterr().err
    assert "no smollm2; it has smollm2:135m, smollm2:360m, smollm2:1.7b. Try: rootgraft search" in told


def test_a_model_is_removed_by_its_short_name(capsys, monkeypatch, tmp_path) -> None:
    cached = CachedModel("Qwen/Qwen3-8B", "Qwen/Qwen3-8B", tmp_path, tmp_path, 100, "safetensors", 0.0)
    removed: list[str] = []
    monkeypatch.setattr(model_list, "cached_models", lambda: [cached, replace(cached, name="other/model")])
    monkeypatch.setattr(model_list, "remove", lambda model: removed.append(model.name))
    assert main(["rm", "qwen3:8b-bf16", "--yes"]) == 0
    assert removed == ["Qwen/Qwen3-8B"]
