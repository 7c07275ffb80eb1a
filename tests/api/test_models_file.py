"""Models files: several models in the file of --config; wrong ones are refused in a line before anything is started."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rootgraft.api.cli import main as command_line
from rootgraft.api.cli.flag_parser import parse_models
from rootgraft.api.config import ServerConfig
from rootgraft.api.models_file import ServedModel, check_models
from rootgraft.engine.checkpoint.base_digest import base_digest
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.errors import ConfigError

TWO = """
port: 8001
threads: 1
usage-ledger: usage.db
models:
  - model: org/small
    served-model-name: [small, tiny]
    replicas: 2
  - model: ./big
    served_model_name: big
    threads: 2
    enable-lora: true
    lora-modules: [sql=adapters/sql]
"""


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., list[ServedModel]]:
    def parsed(text: str, *words: str) -> list[ServedModel]:
        path = tmp_path / "fleet.yaml"
        path.write_text(text)
        argv = ["--config", str(path), *words]
        models = parse_models("rootgraft serve", "", (EngineConfig, ServerConfig), "model", argv)
        return [ServedModel(entry, *options) for entry, options in models]

    return parsed


def test_each_model_has_its_own_options_and_those_above(read: Any) -> None:
    small, big = read(TWO)
    assert (small.engine.model, big.engine.model) == ("org/small", "./big")
    assert (small.server.served_model_name, big.server.served_model_name) == (("small", "tiny"), ("big",))
    assert (small.server.replicas, big.server.replicas) == (2, 1)
    assert (small.engine.threads, big.engine.threads) == (1, 2)
    assert (small.engine.enable_lora, big.engine.enable_lora) == (False, True)
    assert {each.server.port for each in (small, big)} == {8001}


def test_the_command_line_counts_before_the_file(read: Any) -> None:
    assert [each.server.port for each in read(TWO, "--port", "9000")] == [9000, 9000]
    assert [each.engine.threads for each in read(TWO, "--threads", "4")] == [4, 4]


def test_a_plain_file_of_options_is_one_model(read: Any) -> None:
    (only,) = read("model: org/small\nport: 8002\nmax_num_seqs: 8\n")
    assert (only.engine.model, only.server.port, only.engine.max_num_seqs) == ("org/small", 8002, 8)
    assert only.entry.place == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: []", "models must be a list of 1 to 16 models"),
        ("models: {a: 1}", "models must be a list of 1 to 16 models"),
        ("models: [" + ", ".join(["{model: a}"] * 17) + "]", "models must be a list of 1 to 16 models"),
        ("models: [org/small]", "models[0] must contain options, such as 'model: org/name', not 'org/small'"),
        ("models: [{model: a, thread: 1}]", "models[0]: unknown option --thread. Did you mean --threads?"),
        ("models: [{model: a}, {model: b, threads: x}]", "models[1]: --threads: must be a whole number"),
        ("models: [{model: a, threads: -1}]", "models[0]: --threads must be at least"),
        ("models: [{model: a, port: 1}]", "models[0]: --port belongs to the whole server: move it out of 'models'"),
        (
            "models: [{model: a, api-key: x}]",
            "models[0]: --api-key belongs to the whole server: move it out of 'models'",
        ),
        ("models: [{model: a, digest: 12}]", "models[0].digest must have 32 hexadecimal digits in quotes, not 12"),
        ("models: [{model: a, config: b}]", "models[0]: --config belongs to the whole server"),
        ("model: a\nmodels: [{model: b}]", "--model belongs to a single model: move it into an entry of 'models'"),
        ("lora-modules: [a=b]\nmodels: [{model: b}]", "--lora-modules belongs to a single model"),
        ("prot: 1\nmodels: [{model: b}]", "unknown option --prot. Did you mean --port?"),
    ],
)
def test_wrong_files_are_refused_by_place(text: str, message: str, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(text)
    assert command_line.main(["serve", "--config", str(path)]) == 2
    error = capsys.readouterr().err
    assert message in error and f"--config {path}: " in error and error.count("\n") == 1


def test_a_model_on_the_command_line_does_not_go_with_several(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(TWO)
    assert command_line.main(["serve", "org/other", "--config", str(path)]) == 2
    assert "--model belongs to a single model" in capsys.readouterr().err
    assert command_line.main(["run-batch", "-i", "a", "-o", "b", "--config", str(path)]) == 2
    assert "only rootgraft serve accepts a file with several models" in capsys.readouterr().err


def checked(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, text: str) -> str:
    """Return the error of a file with the real models of tests; the server itself must not be started."""
    monkeypatch.setattr("rootgraft.api.http.server.serve_models", lambda *_: pytest.fail("it was started"))
    path = tmp_path / "fleet.yaml"
    path.write_text(text)
    assert command_line.main(["serve", "--config", str(path)]) == 1
    return str(capsys.readouterr().err)


@pytest.mark.parametrize("has_list", [True, False])
def test_a_hangup_waits_until_the_server_can_read_the_file_again(
    *, has_list: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_llama: Path
) -> None:
    """The server's modules take a second to import. Without a list it is a terminal's end, and ends what starts."""
    blocked: list[bool] = []

    def serve_models(*_: Any) -> int:
        blocked.append(signal.SIGHUP in signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        return 0

    monkeypatch.setattr("rootgraft.api.http.server.serve_models", serve_models)
    preloaded = SimpleNamespace(spawn=None)
    monkeypatch.setattr("rootgraft.engine.serving.engine_spawn.EnginePreload", lambda: nullcontext(preloaded))
    path = tmp_path / "fleet.yaml"
    path.write_text(f"models: [{{model: {tiny_llama}}}]" if has_list else f"model: {tiny_llama}")
    assert command_line.main(["serve", "--config", str(path)]) == 0
    assert blocked == [has_list]
    assert signal.SIGHUP not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_two_models_of_one_name(tmp_path: Path, capsys: Any, monkeypatch: Any, tiny_llama: Path) -> None:
    text = f"models: [{{model: {tiny_llama}}}, {{model: {tiny_llama}}}]"
    error = checked(tmp_path, capsys, monkeypatch, text)
    assert f"models[1].served-model-name: models[0] also has the name {tiny_llama.name}" in error
    assert error.count("\n") == 1


def test_a_digest_that_does_not_match(tmp_path: Path, capsys: Any, monkeypatch: Any, tiny_llama: Path) -> None:
    found, other = base_digest(tiny_llama), "0" * 32
    entries = f"{{model: {tiny_llama}, served-model-name: a, digest: '{found}'}}"
    text = f"models: [{entries}, {{model: {tiny_llama}, served-model-name: b, digest: '{other}'}}]"
    error = checked(tmp_path, capsys, monkeypatch, text)
    assert "models[1].digest: the content of" in error and f"has the digest {found}, not {other}" in error


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[{model: a, served-model-name: x}, {model: b, served-model-name: [y, x]}]", "models[0] also has the name x"),
        ("[{model: a, served-model-name: x}, {model: b, served-model-name: y, enable-lora: true, lora-modules: [x=p]}]",
         "models[1].lora-modules: models[0] also has the name x"),
        ("[{model: a, enable-lora: true, model-catalog: c.db}, {model: b, enable-lora: true, model-catalog: c.db}]",
         "models[1].model-catalog: models[0] also has the catalogue c.db"),
    ],
)  # fmt: skip
def test_what_two_models_cannot_share(read: Any, text: str, message: str) -> None:
    models = read(f"models: {text}")
    names = [model.server.served_model_name or (str(place),) for place, model in enumerate(models)]
    with pytest.raises(ConfigError) as refused:
        check_models(models, names)
    assert message in str(refused.value)


def test_a_model_that_is_not_there_is_named_by_its_entry(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    error = checked(tmp_path, capsys, monkeypatch, f"models: [{{model: {tmp_path / 'none'}}}]")
    assert "fleet.yaml: models[0]: --model: there is no folder or file" in error and error.count("\n") == 1
