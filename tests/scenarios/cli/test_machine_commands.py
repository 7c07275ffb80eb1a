# ruff: noqa: E501 (configs and tables)
"""`rootgraft list`, `rm` and `ps` over caches and records made for the test; `completion` in the real shells."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import huggingface_hub.constants
import pytest
from support.adapter_sources.source_files import adapter_files, digest_of
from support.machine.server_process import interrupt, replace_engine, run
from support.machine.waits import wait_until
from support.models.small_gguf import tensors, write

from rootgraft.api.cli import completion, flag_parser
from rootgraft.api.cli.commands import COMMANDS
from rootgraft.api.cli.machine.text_table import bytes_text, duration_text, text_table
from rootgraft.api.cli.main import main
from rootgraft.api.http import run_record
from rootgraft.api.http.run_record import RunRecord, RunRecordFile, running_servers, started_at
from rootgraft.engine.adapter_sources.download_cache import DownloadCache

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 32, "torch_dtype": "bfloat16",
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "hidden_act": "silu",
}  # fmt: skip


def add_to_hub(cache: Path, name: str, files: dict[str, Any]) -> Path:
    """A repository in the layout of the hub's client: blobs, and a snapshot of links to them."""
    repo = cache / f"models--{name.replace('/', '--')}"
    commit = "0123456789" * 4
    for folder in (repo / "blobs", repo / "refs", repo / "snapshots" / commit):
        folder.mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    for number, (file, content) in enumerate(files.items()):
        blob = repo / "blobs" / f"{number:040x}"
        blob.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        (repo / "snapshots" / commit / file).symlink_to(f"../../blobs/{blob.name}")
    return repo


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Our own cache and the hub's, with six models in them."""
    own, hub = tmp_path / "xdg" / "rootgraft" / "models", tmp_path / "hub"
    own.mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(hub))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    write(own / "SmolLM2-135M-Instruct.Q4_1.gguf", tensors())
    (own / "SmolLM2-135M-Instruct.Q4_1.gguf.verified.json").write_text("{}")
    add_to_hub(hub, "org/whole", {"config.json": LLAMA, "model.safetensors": b"x" * 5000, "tokenizer.json": {}})
    add_to_hub(hub, "org/half", {"config.json": LLAMA, "tokenizer.json": {}})
    add_to_hub(hub, "org/bert", {"config.json": {"architectures": ["BertModel"], "model_type": "bert"}})
    add_to_hub(hub, "org/adapter", {"adapter_config.json": {"base_model_name_or_path": "org/whole"}})
    add_to_hub(hub, "org/bits", {"model.gguf": (own / "SmolLM2-135M-Instruct.Q4_1.gguf").read_bytes()})
    return own, hub


def test_list_tells_size_format_and_what_a_model_is_served_with(
    caches: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["list", "--json"]) == 0
    models = {model["name"]: model for model in json.loads(capsys.readouterr().out)}
    assert list(models) == ["org/adapter", "org/bert", "org/bits", "org/half", "org/whole", "SmolLM2-135M-Instruct"]
    assert models["org/whole"]["format"] == "safetensors bfloat16" and not models["org/whole"]["fault"]
    assert models["org/whole"]["size"] > 5000
    assert models["org/half"]["fault"] == "model.safetensors is missing: rootgraft pull fetches the missing files"
    assert "BertModel" in models["org/bert"]["fault"]
    assert "serve org/whole with --enable-lora --lora-modules" in models["org/adapter"]["fault"]
    assert models["org/bits"]["format"].startswith("GGUF ") and models["org/bits"]["model"].endswith("model.gguf")
    assert models["SmolLM2-135M-Instruct"]["model"] == ""
    monkeypatch.setenv("COLUMNS", "90")
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 90 or len(line.split()) == 1 for line in lines), "only a word by itself may be longer"
    assert any(line.startswith("org/whole") and line.endswith("rootgraft serve org/whole") for line in lines)


def test_list_of_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    assert main(["list"]) == 0
    assert "Try: rootgraft pull" in capsys.readouterr().err


def test_downloaded_adapters_are_listed_and_removed(
    caches: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = adapter_files()
    for root in (tmp_path / "xdg" / "rootgraft" / "adapters", tmp_path / "other"):
        cache = DownloadCache(root, 1 << 24)
        with cache.partial("key") as partial:
            assert partial is not None
            for name, content in files.items():
                (partial / name).write_bytes(content)
            folder = cache.publish(partial, digest_of(files))
        for source in ("hf://acme/support", f"hf://acme/support@{'0' * 40}"):
            cache.note(source, "0" * 40, digest_of(files))
        monkeypatch.setenv("COLUMNS", "120")
        place = ["--adapter-cache-dir", str(root)] if root.name == "other" else []
        assert main(["list", *place]) == 0
        (line,) = (line for line in capsys.readouterr().out.splitlines() if "acme/support" in line)
        assert line.split()[0] == "hf://acme/support" and "in use" in line
        assert line.endswith("--lora-modules NAME=hf://acme/support")
        assert main(["rm", "acme/support", "--yes", *place]) == 1
        assert "is loaded by a server" in capsys.readouterr().err and cache.holds(digest_of(files))
        cache.release(folder)
        assert main(["rm", "acme/support", *place]) == 1  # there is no terminal
        assert main(["rm", "acme/support", "--yes", *place]) == 0
        assert "are free again" in capsys.readouterr().out
        assert not cache.holds(digest_of(files)) and not list((root / "versions").iterdir())
        cache.close()
        assert main(["list", "--json", *place]) == 0
        assert "hf://acme/support" not in {each["name"] for each in json.loads(capsys.readouterr().out)}


@pytest.mark.parametrize("name", ["org/whole", "SmolLM2-135M-Instruct"])
def test_rm_asks_and_removes_one_model_alone(
    caches: tuple[Path, Path], name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own, hub = caches
    before = {path for folder in caches for path in folder.rglob("*")}
    assert main(["rm", name]) == 1  # there is no terminal
    assert f"Try: rootgraft rm {name} --yes" in capsys.readouterr().err
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    for answer in ("", "n", "yess"):
        monkeypatch.setattr("builtins.input", lambda question, answer=answer: answer)
        assert main(["rm", name]) == 1
    assert {path for folder in caches for path in folder.rglob("*")} == before
    monkeypatch.setattr("builtins.input", lambda question: "y")
    assert main(["rm", name]) == 0
    gone = before - {path for folder in caches for path in folder.rglob("*")}
    mine = hub / "models--org--whole" if name == "org/whole" else own
    assert gone and all(mine == path or mine in path.parents for path in gone)
    assert not any(mine.glob("*"))
    assert main(["rm", name, "--yes"]) == 1
    assert f"there is no {name} in the caches" in capsys.readouterr().err


def test_rm_deletes_nothing_outside_of_the_caches(caches: tuple[Path, Path], tmp_path: Path, capsys: Any) -> None:
    own, hub = caches
    outside = add_to_hub(tmp_path / "elsewhere", "org/mine", {"config.json": LLAMA})
    (hub / "models--org--mine").symlink_to(outside)
    precious = tmp_path / "precious.gguf"
    shutil.copy(own / "SmolLM2-135M-Instruct.Q4_1.gguf", precious)
    (own / "link.gguf").symlink_to(precious)
    for name in ("org/mine", "link", "../../precious.gguf", str(precious), "org", ".", "/"):
        assert main(["rm", name, "--yes"]) == 1, name
    assert precious.exists() and (outside / "refs" / "main").exists()
    assert "is outside the cache" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["path", "more_paths"])
def test_rm_leaves_a_model_that_is_served(
    caches: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any, place: str
) -> None:
    _, hub = caches
    snapshot = next((hub / "models--org--whole" / "snapshots").iterdir())
    paths: Any = {"path": str(snapshot)} if place == "path" else {"path": "/srv/first", "more_paths": (str(snapshot),)}
    pid, folder = os.getpid(), run_record.run_folder()
    RunRecordFile(folder).write(
        RunRecord(pid, started_at(pid), "http://127.0.0.1:8000", ("a-name-of-its-own",), **paths)
    )
    assert main(["rm", "org/whole", "--yes"]) == 1
    assert f"served by process {pid} at http://127.0.0.1:8000. Try: kill {pid}" in capsys.readouterr().err
    assert (hub / "models--org--whole").exists()
    assert main(["rm", "org/half", "--yes"]) == 0


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("RUNTIME_DIRECTORY", raising=False)
    monkeypatch.setattr(run_record, "_EVERYONES", ())
    return tmp_path / "rootgraft"


def test_ps_while_a_server_runs(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: dict[str, Any] = {}

    def steps(http: Any) -> None:
        wait_until(lambda: engine.client is not None)
        (loading,) = running_servers()
        assert loading.status == "loading" and loading.path == os.path.realpath("model.gguf")
        engine.client.stats = {"running": 3.0, "waiting": 2.0, "pages": 10.0, "pages_available": 6.0}
        engine.loaded.set()
        wait_until(lambda: [record.running for record in running_servers()] == [3])
        monkeypatch.setenv("COLUMNS", "120")
        seen["code"] = main(["ps"])
        (seen["record"],) = running_servers()
        interrupt()

    engines = replace_engine(monkeypatch)
    engine = next(engines)
    assert run(steps) == 0
    next(engines, None)
    assert seen["code"] == 0 and not list(run_folder.iterdir())
    record = seen["record"]
    assert (record.pid, record.models, record.status) == (os.getpid(), ("org/small",), "ready")
    assert (record.running, record.waiting, record.kv_usage) == (3, 2, 0.4)
    assert record.path == os.path.abspath("model.gguf")
    out = capsys.readouterr().out
    assert out.splitlines()[1].split()[:7] == [str(os.getpid()), "org/small", "ready", "3", "2", "40%", "0"]
    assert out.splitlines()[1].endswith(f"  {record.url}")
    assert main(["ps"]) == 0
    assert "Try: rootgraft serve" in capsys.readouterr().err


def test_records_of_others_and_of_the_dead_are_left_out(run_folder: Path) -> None:
    file = RunRecordFile(run_folder)
    record = RunRecord(os.getpid(), started_at(os.getpid()), "http://x", ("a\x1b[2J",))
    file.write(record)
    assert [found.models for found in running_servers()] == [("a?[2J",)]
    for number, content in enumerate(
        (
            replace(record, started=record.started - 100),  # of an earlier process of this number
            replace(record, pid=1 << 30),
            "{",
            "[]",
            '{"pid": "x", "started": 1, "url": ""}',
        )
    ):
        text = (
            content
            if isinstance(content, str)
            else json.dumps({name: getattr(content, name) for name in ("pid", "started", "url")})
        )
        (run_folder / f"{number}.json").write_text(text)
    assert len(running_servers()) == 1


def test_a_server_removes_the_records_of_those_that_were_killed(run_folder: Path) -> None:
    """A thousand of them would hide the one that runs from `ps`, and from `rm`."""
    first = RunRecord(os.getpid(), started_at(os.getpid()), "http://x")
    neighbour = replace(first, pid=os.getppid(), started=started_at(os.getppid()))
    run_folder.mkdir(exist_ok=True)
    kept = {"notes.txt": "", "4711.json.old": "", "settings.json": "{}", f"{neighbour.pid}.json": neighbour}
    gone = {f"{1 << 30}.json": replace(first, pid=1 << 30), "1.json": replace(first, pid=1, started=7.0), "2.json": "{"}
    for name, content in (kept | gone).items():
        text = content if isinstance(content, str) else json.dumps(asdict(content))
        (run_folder / name).write_text(text)
    file = RunRecordFile(run_folder)
    file.write(first)
    names = {each.name for each in run_folder.iterdir()}
    assert names == {*kept, f"{os.getpid()}.json"}
    (run_folder / "1.json").write_text("{")
    file.write(replace(first, status="ready"))
    assert (run_folder / "1.json").exists()  # looked for once


def test_records_that_would_hang_or_crash_the_reader_are_left_out(run_folder: Path) -> None:
    file = RunRecordFile(run_folder)
    pid, started = os.getpid(), started_at(os.getpid())
    file.write(RunRecord(pid, started, "http://x"))
    whole = (run_folder / f"{pid}.json").read_text()
    (run_folder / "loop.json").symlink_to("loop.json")
    (run_folder / "zero.json").symlink_to("/dev/zero")
    (run_folder / "folder.json").mkdir()
    (run_folder / "deep.json").write_text("[" * 60_000)
    for number, fault in enumerate(("Infinity", "NaN", "-1", "1e300", '"x"')):
        (run_folder / f"{number}.json").write_text(whole.replace('"adapters": 0', f'"adapters": {fault}'))
    (run_folder / "large.json").write_text(whole + " " * (1 << 16))
    os.mkfifo(run_folder / "pipe.json")
    assert [record.url for record in running_servers()] == ["http://x"]
    assert [record.url for record in running_servers({os.getuid()})] == ["http://x"]
    assert not running_servers({os.getuid() + 1})


def test_a_full_disk_leaves_no_temporary_files(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_record.os, "replace", Mock(side_effect=OSError(28, "No space left on device")))
    RunRecordFile(run_folder).write(RunRecord(1, 0.0, "x"))
    assert not list(run_folder.iterdir())


def test_the_path_is_written_while_the_model_is_being_loaded(run_folder: Path) -> None:
    file, record = RunRecordFile(run_folder), RunRecord(os.getpid(), started_at(os.getpid()), "http://x")
    file.write(record)
    file.write(replace(record, path="/models/m"))  # at once, with the same status
    assert [found.path for found in running_servers()] == ["/models/m"]


def test_a_table_prints_no_control_characters() -> None:
    assert "\x1b" not in text_table(("A", "B"), [("\x1b[2J", "\x1b]0;title\x07")])


def test_a_record_that_cannot_be_written_harms_nobody(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    file = RunRecordFile(tmp_path / "file" / "folder")
    file.write(RunRecord(1, 0.0, "x"))
    file.remove()


def test_completion_knows_the_options_of_the_commands() -> None:
    flags = {
        flag.lstrip("-")
        for name, command in COMMANDS.items()
        for flag in flag_parser.command_parser(name, "", command.classes, command.positional)._option_string_actions
    }
    assert flags >= completion._FILES | completion._FOLDERS


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("completion")
    for shell in ("bash", "zsh", "fish"):
        with (folder / f"_{shell}").open("w") as out:
            program = f"import sys; from rootgraft.api.cli.main import main; sys.exit(main(['completion', '{shell}']))"
            subprocess.run([sys.executable, "-c", program], stdout=out, check=True)
    yield folder


ASKED = [
    ("rootgraft serv", {"serve"}),
    ("rootgraft serve --dtype b", {"bfloat16"}),
    ("rootgraft serve --max-num-s", {"--max-num-seqs"}),
    ("rootgraft bench s", {"serve", "step"}),
    ("rootgraft completion z", {"zsh"}),
]


@pytest.mark.parametrize(("line", "wanted"), ASKED)
def test_completion_in_bash(scripts: Path, line: str, wanted: set[str]) -> None:
    program = f"""
        source {scripts}/_bash
        COMP_WORDS=({line}); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
        _shtab_rootgraft rootgraft "${{COMP_WORDS[COMP_CWORD]}}" "${{COMP_WORDS[COMP_CWORD-1]}}"
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "--norc", "-c", program], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == wanted


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
@pytest.mark.parametrize(("line", "wanted"), ASKED)
def test_completion_in_fish(scripts: Path, line: str, wanted: set[str]) -> None:
    program = f"source {scripts}/_fish; complete -C '{line}'"
    done = subprocess.run(["fish", "--no-config", "-c", program], capture_output=True, text=True, check=True)
    assert {found.split("\t")[0] for found in done.stdout.splitlines()} == wanted


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_completion_in_zsh_is_well_formed(scripts: Path) -> None:
    subprocess.run(["zsh", "-n", f"{scripts}/_zsh"], check=True)
    assert (scripts / "_zsh").read_text().startswith("#compdef rootgraft\n")


def test_tables_sizes_and_times() -> None:
    table = text_table(("A", "B"), [("x", "one two three four five six seven")], width=24)
    assert table.splitlines() == ["A  B", "x  one two three four", "   five six seven"]
    assert [bytes_text(size) for size in (0, 999, 1000, 98_362_432, 4.1e9, 2e12)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "98 MB",
        "4.1 GB",
        "2.0 TB",
    ]
    assert [duration_text(span) for span in (0, 59, 61, 3600, 90061)] == [
        "0 s",
        "59 s",
        "1 min 1 s",
        "1 h 0 min",
        "1 d 1 h",
    ]


def test_the_page_of_commands_names_every_one() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "commands.md").read_text("utf-8")
    assert not [name for name in COMMANDS if f"`{name}`" not in page]
