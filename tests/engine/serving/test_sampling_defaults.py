"""Sampling defaults of a model's files: what is read, what is left out, and who gets them offline."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from transformers import GenerationConfig

from rootgraft import LLM, SamplingParams
from rootgraft.engine.checkpoint.locate import ModelFiles
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.errors import ConfigError, ContextTooLong, ModelError
from rootgraft.engine.messages import Done, Message, Ready, Submit
from rootgraft.engine.serving.sampling_defaults import DefaultsRead, read_sampling_defaults
from rootgraft.engine.types import FinishReason, SamplingDefaults, Usage
from rootgraft.engine.types import SamplingParams as EngineParams

QWEN = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}  # of Qwen 2.5's files


def read(folder: Path, content: Any = None, mode: str = "auto") -> DefaultsRead:
    if content is not None:
        (folder / "generation_config.json").write_text(json.dumps(content))
    return read_sampling_defaults(EngineConfig(generation_config=mode), folder)


def test_what_the_file_recommends(tmp_path: Path) -> None:
    GenerationConfig(**QWEN, min_p=0.05, max_new_tokens=300, do_sample=True, eos_token_id=[2]).save_pretrained(tmp_path)
    found = read(tmp_path)
    assert found.defaults == SamplingDefaults(**QWEN, min_p=0.05, max_tokens=300)
    assert found.ignored == ()
    assert found.applied == (
        "sampling defaults of generation_config.json: temperature 0.7, top_p 0.8, top_k 20, min_p 0.05, "
        "repetition_penalty 1.05, max_new_tokens 300 (--generation-config vllm turns them off)"
    )


@pytest.mark.parametrize(
    "content", [{}, {"do_sample": True, "max_length": 20}, {"temperature": None, "eos_token_id": 2}]
)
def test_what_says_nothing_changes_nothing(tmp_path: Path, content: dict[str, Any]) -> None:
    assert read(tmp_path, content) == DefaultsRead(SamplingDefaults())


def test_neutral_defaults_on_demand(tmp_path: Path, smollm2_gguf: Path) -> None:
    assert read(tmp_path, QWEN, "vllm") == DefaultsRead(SamplingDefaults())
    assert read(tmp_path / "none") == read(smollm2_gguf) == DefaultsRead(SamplingDefaults())
    with pytest.raises(ConfigError, match="--generation-config must be one of auto, vllm, not mine"):
        EngineConfig(generation_config="mine")


@pytest.mark.parametrize(
    ("content", "defaults"),
    [
        ({"temperature": 0, "top_k": 0}, SamplingDefaults(temperature=0)),
        ({"temperature": 2, "top_p": 1, "min_p": 1}, SamplingDefaults(temperature=2, min_p=1)),
        ({"top_k": -1, "min_p": 0}, SamplingDefaults()),
        ({"top_k": 1 << 20, "top_p": 1e-9}, SamplingDefaults(top_k=1 << 20, top_p=1e-9)),
        ({"repetition_penalty": 2, "max_new_tokens": 1}, SamplingDefaults(repetition_penalty=2, max_tokens=1)),
    ],
)
def test_bounds_are_inclusive(tmp_path: Path, content: dict[str, Any], defaults: SamplingDefaults) -> None:
    found = read(tmp_path, content)
    assert found.defaults == defaults and found.ignored == ()


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("temperature", -0.1, "temperature must be at least 0 and at most 2, not -0.1"),
        ("temperature", 2.1, "temperature must be at least 0 and at most 2, not 2.1"),
        ("temperature", True, "temperature must be a number, at least 0"),
        ("temperature", "1", "temperature must be a number"),
        ("top_p", 0, "top_p must be above 0 and at most 1, not 0"),
        ("top_p", 1.1, "top_p must"),
        ("top_k", -2, "top_k must be at least 0"),
        ("top_k", (1 << 20) + 1, "top_k must"),
        ("top_k", 1.5, "top_k must be an integer"),
        ("min_p", -0.1, "min_p must"),
        ("min_p", 1.1, "min_p must"),
        ("repetition_penalty", 0, "repetition_penalty must be above 0"),
        ("repetition_penalty", 2.1, "repetition_penalty must"),
        ("max_new_tokens", 0, "max_new_tokens must be at least 1 and at most 9223372036854775807, not 0"),
        ("max_new_tokens", [5], "max_new_tokens must be an integer"),
        ("max_new_tokens", "x" * 1_000_000, "max_new_tokens must be an integer"),
    ],
)
def test_values_out_of_bounds_are_left_out_with_a_line(tmp_path: Path, key: str, value: Any, reason: str) -> None:
    others = {name: number for name, number in QWEN.items() if name != key}
    found = read(tmp_path, {**others, key: value})
    assert found.defaults == SamplingDefaults(**others)
    [line] = found.ignored
    assert line.startswith(f"generation_config.json: ignored: {reason}") and len(line) < 250
    assert f"{key} {value}" not in found.applied


def gguf_file(path: Path, **recommended: Any) -> Path:
    """A GGUF file with the writer's keys of sampling; a list in place of a number is written as an array."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in recommended.items():
        if isinstance(value, list):
            writer.add_array(f"general.sampling.{name}", value)
        else:
            getattr(writer, f"add_sampling_{name}")(value)
    writer.add_tensor("token_embd.weight", np.zeros((2, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_what_a_gguf_file_recommends(tmp_path: Path) -> None:
    """By the keys under which the converter writes what ``generation_config.json`` says."""
    path = gguf_file(tmp_path / "m.gguf", temp=0.7, top_p=0.8, top_k=20, min_p=0.05, penalty_repeat=1.05, mirostat=2)
    found = read_sampling_defaults(EngineConfig(), path)
    assert found.defaults == SamplingDefaults(**QWEN, min_p=0.05) and found.ignored == ()
    assert found.applied == (
        "sampling defaults of general.sampling: temperature 0.7, top_p 0.8, top_k 20, min_p 0.05, repetition_penalty "
        "1.05 (--generation-config vllm turns them off)"
    )
    neutral = DefaultsRead(SamplingDefaults())
    assert read_sampling_defaults(EngineConfig(generation_config="vllm"), path) == neutral
    assert read_sampling_defaults(EngineConfig(), gguf_file(tmp_path / "n.gguf")) == neutral


def test_values_of_a_gguf_file_out_of_bounds(tmp_path: Path) -> None:
    path = gguf_file(tmp_path / "m.gguf", temp=2.5, top_p=float("nan"), top_k=[1, 2], min_p=0.1)
    found = read_sampling_defaults(EngineConfig(), path)
    assert found.defaults == SamplingDefaults(min_p=0.1)
    starts = [f"general.sampling: ignored: {key} must be" for key in ("temperature", "top_p", "top_k")]
    assert [line[: len(start)] for line, start in zip(found.ignored, starts, strict=True)] == starts


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_malformed_file_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        read(tmp_path)


class NotingCore:
    """Ends each sequence at once and notes its parameters."""

    def __init__(self) -> None:
        self.ready = Ready(60, 420, 10, 16, ())
        self.params: list[SamplingParams] = []
        self.outbox: list[Message] = []

    def handle(self, messages: list[Message]) -> None:
        for message in messages:
            if isinstance(message, Submit):
                self.params.append(message.params)
                self.outbox.append(Done(message.id, FinishReason.LENGTH, Usage(1, 0, 0)))

    def step(self) -> list[Message]:
        messages, self.outbox = self.outbox, []
        return messages

    def take_observations(self) -> dict[str, list[float]]:
        return {}


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> NotingCore:
    core = NotingCore()
    monkeypatch.setattr(EngineCore, "load", lambda config, path: core)
    return core


def open_llm(monkeypatch: pytest.MonkeyPatch, folder: Path, source: Path, content: Any, **options: Any) -> LLM:
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "generation_config.json").write_text(json.dumps(content))
    files = ModelFiles(folder, "tiny")
    monkeypatch.setattr("rootgraft.engine.offline.offline_model.resolve_served_model", lambda config: files)
    return LLM(**options)


def test_offline_requests_without_parameters_get_them(
    core: NotingCore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_folder: Path
) -> None:
    llm = open_llm(monkeypatch, tmp_path, tiny_folder, {**QWEN, "max_new_tokens": 50})
    recommended = SamplingParams(**QWEN, max_tokens=50)
    assert llm.get_default_sampling_params() == recommended
    llm.generate([[5] * 10, [5] * 20], use_tqdm=False)  # the second prompt leaves room for 40
    llm.chat([{"role": "user", "content": "x"}], use_tqdm=False)
    llm.begin([5] * 10)
    assert [params.max_tokens for params in core.params] == [50, 40, core.params[2].max_tokens, 50]
    assert {(params.temperature, params.top_p, params.top_k) for params in core.params} == {(0.7, 0.8, 20)}
    given = SamplingParams(max_tokens=3)
    llm.generate([[5]] * 2, given, use_tqdm=False)
    llm.begin([5], given)
    assert core.params[4:] == [EngineParams(max_tokens=3)] * 3
    with pytest.raises(ContextTooLong):
        llm.generate([[5] * 60], use_tqdm=False)


def test_offline_engine_without_recommendations(
    core: NotingCore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_folder: Path, caplog: Any
) -> None:
    llm = open_llm(monkeypatch, tmp_path, tiny_folder, QWEN, generation_config="vllm")
    assert llm.get_default_sampling_params() == SamplingParams()
    llm.generate([[5]], use_tqdm=False)
    assert core.params == [EngineParams()]
    with caplog.at_level(logging.WARNING):
        llm = open_llm(monkeypatch, tmp_path, tiny_folder, {"temperature": 9, "top_k": 3})
    assert llm.get_default_sampling_params() == SamplingParams(top_k=3)
    assert "generation_config.json: ignored: temperature must be at least 0 and at most 2, not 9." in caplog.text
