"""The adapters in ``examples/``: small, clean, and good for what they say, seen through the engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import compare_adapters
import pytest
from adapters_data import Task, tasks

from rootgraft import LLM
from rootgraft.lora.config import read_config
from rootgraft.lora.safetensors_file import read_tensors

TASKS = {task.name: task for task in tasks()}


def files(name: str) -> tuple[Path, Path]:
    folder = compare_adapters.ADAPTERS / name
    return folder / "adapter_config.json", folder / "adapter_model.safetensors"


@pytest.mark.parametrize("name", compare_adapters.NAMES)
def test_what_is_shipped(name: str) -> None:
    config, weights = files(name)
    assert {file.name for file in config.parent.iterdir()} == {config.name, weights.name}
    assert weights.stat().st_size < 3_000_000
    assert json.loads(config.read_text())["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert "/root" not in config.read_text() and "/home" not in config.read_text()
    read_config(config.read_bytes())
    assert all(tensor.abs().max() > 0 for tensor in read_tensors(weights, 3_000_000).values())


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_held_out_sentences_were_not_learned(task: Task) -> None:
    learned = {example.prompt.lower() for example in task.train}
    assert len(task.held_out) >= 20
    assert not learned & {example.prompt.lower() for example in task.held_out}
    answered = [example for example in task.train if task.solves(example.answer, example.answer)]
    assert len(answered) >= 0.8 * len(task.train)
    assert tasks() == tuple(TASKS.values())


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    loaded = compare_adapters.load()
    yield loaded
    loaded.close()


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "least", "most"), [("pirate", 0.9, 0.3), ("contact-card", 0.6, 0.2), ("shell", 0.7, 0.2)]
)
def test_each_adapter_does_what_it_is_for(llm: LLM, name: str, least: float, most: float) -> None:
    """Of held-out sentences it solves most, and the base model few, although that is told in words what to do."""
    task = replace(TASKS[name], held_out=TASKS[name].held_out[:12])
    adapted, told = (compare_adapters.solved(llm, task, adapter) / len(task.held_out) for adapter in (name, None))
    assert adapted >= least and told <= most, (adapted, told)
