"""The table of speeds over fake servers: what is asked, what survives, how it goes on, and what is written."""

from __future__ import annotations

import json
import os
import shlex
import stat
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors import safe_open
from support.api.fake_openai import FakeServer
from support.models import small_gguf
from support.models.tiny_llama import save_tiny_llama

from benchmarks.condense import COLUMNS, MEDIAN, condense
from benchmarks.serve import alternate, table
from benchmarks.serve.alternate import PrecisionClass, ServedForm, Unavailable
from benchmarks.serve.installed_peers import find_llama_server, find_openvino, find_vllm
from benchmarks.serve.load_run import Adapters
from benchmarks.serve.make_adapters import random_factors, write_adapter, write_gguf_adapter
from benchmarks.serve.model_files import ModelForms, write_bfloat16
from benchmarks.serve.run_record import RecordMismatch, RunRecord
from benchmarks.serve.schemas import is_valid
from benchmarks.serve.table_report import results
from benchmarks.serve.workloads import NAMES, workload
from rootgraft.engine.checkpoint.gguf import GgufFile
from rootgraft.engine.checkpoint.read_config import read_model_config
from rootgraft.engine.loading.weight_readers import GgufWeights, SafetensorsFolder


@pytest.fixture(autouse=True)
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alternate, "REST", 0.0)


def run(tmp_path: Path, *argv: str) -> tuple[int, Path]:
    output = tmp_path / "table.json"
    return table.main(["--output", str(output), "--folder", str(tmp_path), *argv]), output


def test_the_same_requests_go_to_each_server_in_turn(fake_server: FakeServer, tmp_path: Path, capsys: Any) -> None:
    servers = ["--server", f"ours={fake_server.url}", "--server", f"peer={fake_server.url}"]
    code, output = run(tmp_path, *servers, "--workloads", "W1", "--repeats", "2", "--seed", "3")
    assert code == 0
    asked = [body for body in fake_server.asked if body["max_tokens"] == 128]
    assert {(body["temperature"], body["top_p"], body["top_k"], body["min_p"]) for body in asked} == {
        (1.0, 1.0, 0, 0.0)
    }
    expected = [talk.turns[0] for repeat in (0, 0, 1, 1) for talk in workload("W1", repeat, 3).conversations]
    assert [body["messages"][0]["content"] for body in asked] == expected
    document = json.loads(output.read_text())
    assert document["columns"] == COLUMNS
    comparison = document["comparisons"]["given"]
    assert (comparison["seed"], comparison["temperature"]) == (3, 1.0)
    assert [row[:3] for row in comparison["rows"]] == [
        *(["W1", server, MEDIAN] for server in ("ours", "peer")),
        *(["W1", server, repeat] for server in ("ours", "peer") for repeat in (0, 1)),
    ]
    assert {row[COLUMNS.index("completed")] for row in comparison["rows"]} == {2}
    assert "| W1: one stream |" in capsys.readouterr().out


def test_a_measurement_goes_on_where_it_was_broken_off(fake_server: FakeServer, tmp_path: Path, capsys: Any) -> None:
    argv = ["--server", f"ours={fake_server.url}", "--workloads", "W1"]
    run(tmp_path, *argv, "--repeats", "1")
    first = [body["messages"][0]["content"] for body in fake_server.asked if body["max_tokens"] == 128]
    run(tmp_path, *argv, "--repeats", "2")
    asked = [body["messages"][0]["content"] for body in fake_server.asked if body["max_tokens"] == 128]
    seed = json.loads((tmp_path / "table.runs.jsonl").read_text().splitlines()[0])["seed"]
    assert asked == first + [talk.turns[0] for talk in workload("W1", 1, seed).conversations]
    before = len(fake_server.asked)
    assert run(tmp_path, *argv, "--repeats", "2")[0] == 0
    assert len(fake_server.asked) == before
    assert run(tmp_path, *argv, "--seed", str(seed + 1))[0] == 2
    assert "was begun with seed" in capsys.readouterr().err


def test_prompts_of_two_runs_differ(fake_server: FakeServer, tmp_path: Path, capsys: Any) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        run(tmp_path / name, "--server", f"ours={fake_server.url}", "--workloads", "W1", "--repeats", "1")
    prompts = [body["messages"][0]["content"] for body in fake_server.asked if body["max_tokens"] == 128]
    assert len(set(prompts)) == len(prompts) == 4


def test_a_server_that_does_not_start_has_a_row_that_says_so(
    fake_server: FakeServer, tmp_path: Path, capsys: Any
) -> None:
    code = "import sys; sys.exit('no such instruction')"
    broken = shlex.join([sys.executable, "-P", "-c", code, "{port}"])
    servers = ["--server", f"ours={fake_server.url}", "--server", f"broken={broken}"]
    code, output = run(tmp_path, *servers, "--server", "absent=/no/such/program", "--workloads", "W1", "--repeats", "1")
    assert code == 0
    out = capsys.readouterr().out
    assert "| W1 | broken | did not start: it ended with exit code 1: no such instruction |" in out
    assert "No such file or directory: '/no/such/program'" in out
    comparison = json.loads(output.read_text())["comparisons"]["given"]
    assert comparison["failed"].keys() == {"broken", "absent"}
    assert {row[1] for row in comparison["rows"]} == {"ours"}


def test_a_server_that_refuses_loses_its_workload_alone(fake_server: FakeServer, tmp_path: Path, capsys: Any) -> None:
    fake_server.refuse = [None] * 5 + [503, 503]  # after the warm-up
    servers = ["--server", f"ours={fake_server.url}", "--workloads", "W1", "W2", "--repeats", "1"]
    assert run(tmp_path, *servers)[0] == 0
    out = capsys.readouterr().out
    assert "| W1 | ours | no answer in W1: HTTP 503" in out
    assert "| W2 | ours | " in out and "| 1 | 0 |" in out


def test_a_repeat_that_does_not_end_is_broken_off(
    fake_server: FakeServer, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alternate, "REPEAT_SECONDS", 0.2)
    fake_server.stall_after = 5
    assert run(tmp_path, "--server", f"ours={fake_server.url}", "--workloads", "W1", "--repeats", "3")[0] == 0
    assert "W1 did not end within 0 s" in capsys.readouterr().out


def test_over_its_budget_a_workload_is_not_repeated(fake_server: FakeServer, tmp_path: Path, capsys: Any) -> None:
    argv = ["--server", f"ours={fake_server.url}", "--workloads", "W1", "--repeats", "3", "--budget", "0"]
    assert run(tmp_path, *argv)[0] == 0
    assert len([body for body in fake_server.asked if body["max_tokens"] == 128]) == 2


@pytest.mark.parametrize("text", ["ours", "=command", "ours="])
def test_a_server_without_name_or_command_is_refused(text: str, tmp_path: Path, capsys: Any) -> None:
    assert run(tmp_path, "--server", text)[0] == 2
    assert "--server must be NAME=COMMAND" in capsys.readouterr().err


@pytest.fixture
def record(tmp_path: Path) -> RunRecord:
    about = {"date": "2026-11-26", "commit": "abc", "python": "3.11", "torch": "2", "cpu": "P", "cores": 2}
    about |= {"memory_gib": 8, "instructions": ["avx2"]}
    return RunRecord(tmp_path / "runs.jsonl", {"seed": 1, "versions": {"vLLM": "1"}, "machine": about}, same=())


def test_condensing_takes_tables_over_and_keeps_the_rest(tmp_path: Path, record: RunRecord) -> None:
    measured = PrecisionClass("bf16", "bfloat16", ("W1",), (ServedForm("rootgraft"),))
    (tmp_path / "table.json").write_text(json.dumps(results(record, [measured], [1.0])))
    (tmp_path / "2026-11-26-soak.json").write_text('{"hours": 1}')
    found = condense([tmp_path / "table.json", tmp_path / "2026-11-26-soak.json"])
    assert found["versions"] == {"vLLM": "1"} and found["comparisons"].keys() == {"bf16"}
    assert found["parts"] == {"soak": {"hours": 1}}


def test_a_record_of_other_settings_is_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    RunRecord(path, {"commit": "a", "seed": 1}, same=("commit",)).add(figures={}, server="x")
    continued = RunRecord(path, {"commit": "a", "seed": 2}, same=("commit",))
    assert continued.settings["seed"] == 1 and len(list(continued.entries("figures", server="x"))) == 1
    assert not list(continued.entries("figures", server="y")) and not list(continued.entries("failed"))
    with pytest.raises(RecordMismatch, match="commit a and not b"):
        RunRecord(path, {"commit": "b", "seed": 2}, same=("commit",))
    path.write_text("{")
    with pytest.raises(RecordMismatch, match="no record"):
        RunRecord(path, {"commit": "a"}, same=())


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_peers_are_found_or_it_is_said_how_to_get_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.defpath)
    for find, script in ((find_vllm, "vllm"), (find_llama_server, "llama_cpp"), (find_openvino, "openvino")):
        peer = find(None, tmp_path)
        assert f"bash benchmarks/serve/peers/install_{script}.sh" in str(peer.missing)
        with pytest.raises(Unavailable, match="not installed"):
            _ = peer.program
        assert "no program /no/such" in str(find("/no/such", tmp_path).missing)
    server = program(tmp_path / "llama.cpp" / "bin" / "llama-server", "echo 'version: 7 (abc)' >&2")
    assert (find_llama_server(None, tmp_path).program, find_llama_server(None, tmp_path).version) == (server, "7 (abc)")
    command = program(tmp_path / "vllm" / "bin" / "vllm", "")
    program(command.with_name("python"), "echo 0.32.0+cpu")
    assert (find_vllm(None, tmp_path).program, find_vllm(None, tmp_path).version) == (command, "0.32.0+cpu")
    program(command.with_name("python"), "echo 0.32.0")
    assert "no build for CPUs" in str(find_vllm(None, tmp_path).missing)
    program(tmp_path / "openvino" / "bin" / "python", "exit 1")
    assert "lacks openvino-genai" in str(find_openvino(None, tmp_path).missing)


def test_a_form_that_cannot_be_made_is_told_and_not_kept(tmp_path: Path) -> None:
    forms = ModelForms(tmp_path / "model.gguf", tmp_path / "forms")
    fail = program(tmp_path / "llama-quantize", 'echo "cannot requantise" >&2; touch "$3"; exit 1')
    with pytest.raises(Unavailable, match="llama-quantize failed: cannot requantise"):
        forms.other_gguf("Q8_0", fail)
    with pytest.raises(Unavailable, match="was not found"):
        forms.other_gguf("Q8_0", tmp_path / "none")
    made = program(tmp_path / "llama-quantize", 'echo "$4" > "$3"')
    assert forms.other_gguf("Q8_0", made).read_text() == "Q8_0\n"
    assert forms.other_gguf("Q8_0", tmp_path / "none").name == "Q8_0.gguf"


def test_a_bfloat16_copy_has_the_config_and_weights_of_the_file(tmp_path: Path) -> None:
    path = small_gguf.write(tmp_path / "model.gguf", small_gguf.tensors())
    write_bfloat16(path, tmp_path / "copy")
    expected, found = read_model_config(path), read_model_config(tmp_path / "copy")
    assert replace(found, eos_token_ids=(), bos_token_id=None) == replace(expected, eos_token_ids=(), bos_token_id=None)
    source, copy = GgufWeights(GgufFile.open(path), expected), SafetensorsFolder(tmp_path / "copy")
    assert source.shapes == copy.shapes
    for name, shape in source.shapes.items():
        ours, theirs = torch.empty(shape), torch.empty(shape)
        source.read(name, ours)
        copy.read(name, theirs)
        assert torch.equal(ours.bfloat16(), theirs.bfloat16()), name


def test_adapters_are_asked_for_by_name_or_number() -> None:
    by_name, by_number = Adapters(("a", "b")), Adapters(("a", "b"), by_number=True)
    assert [by_name.field(each) for each in (None, 1)] == [{}, {"model": "b"}]
    assert [by_number.field(each) for each in (None, 1)] == [
        {"lora": [{"id": 0, "scale": 0.0}]},
        {"lora": [{"id": 1, "scale": 1.0}]},
    ]
    assert Adapters((), by_number=True).field(None) == {}


def test_both_files_of_an_adapter_hold_the_same_factors(tmp_path: Path) -> None:
    """llama.cpp pairs neighbouring rows of a head where others pair the halves."""
    config = read_model_config(save_tiny_llama(tmp_path / "model"))
    factors = random_factors(config, 4, everywhere=True, seed=0)
    write_adapter(tmp_path / "a", factors, 4)
    write_gguf_adapter(tmp_path / "a.gguf", factors, 4, config)
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    stored = {each.name: torch.tensor(each.data) for each in reader.tensors}
    with safe_open(tmp_path / "a" / "adapter_model.safetensors", "pt") as file:
        assert len(stored) == len(list(file.keys()))
        name = "base_model.model.model.layers.1.{}.lora_{}.weight"
        assert torch.equal(stored["blk.1.attn_q.weight.lora_a"], file.get_tensor(name.format("self_attn.q_proj", "A")))
        assert torch.equal(stored["blk.1.ffn_down.weight.lora_b"], file.get_tensor(name.format("mlp.down_proj", "B")))
        for module, short in (("q_proj", "attn_q"), ("k_proj", "attn_k")):
            rows = file.get_tensor(name.format(f"self_attn.{module}", "B"))
            half = config.head_dim // 2
            pairs = [head + at for head in range(0, len(rows), 2 * half) for i in range(half) for at in (i, half + i)]
            assert torch.equal(stored[f"blk.1.{short}.weight.lora_b"], rows[pairs])


def test_answers_are_held_to_formats_too() -> None:
    schema = {"type": "object", "properties": {"due": {"type": "string", "format": "date"}}, "required": ["due"]}
    assert is_valid('{"due": "2026-02-28"}', schema)
    assert not any(is_valid(text, schema) for text in ('{"due": "2026-02-30"}', "{}", "no JSON"))


@pytest.mark.parametrize("name", NAMES)
def test_the_first_words_of_a_prompt_occur_in_no_other_repeat(name: str) -> None:
    def firsts(repeat: int) -> set[str]:
        loads = workload(name, repeat, 0, adapters=3).conversations
        return {(talk.system or talk.turns[0]).split()[1] for talk in loads}

    assert firsts(0).isdisjoint(firsts(1))
