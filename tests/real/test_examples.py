"""Every example as its users run it, against a server on the real model; and ``select`` against whole scorings."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.api.real_server import RealServer, start

from rootgraft.programs import Session

pytestmark = [pytest.mark.heavy, pytest.mark.filterwarnings("default")]
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PLAIN = ("tree_of_thought", "judge_with_rubric", "map_reduce")
WITH_ADAPTERS = ("three_adapters", "triage")
ADAPTERS = ("pirate", "contact-card", "shell")
NEEDS = {"tool_agent": "agents", "extract_contacts": "instructor"}
INVOCATION = [1, 520, 9531, 198]  # <|im_start|>assistant and a line break: what every answer begins after


def activated(folder: Path, seed: int) -> Path:
    """An activated adapter with random weights."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"alora_invocation_tokens": INVOCATION}))
    rng = np.random.default_rng(seed)
    tensors = {}
    for layer in range(30):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = rng.normal(0, 0.05, (4, 576)).astype(np.float32)
        tensors[f"{name}.lora_B.weight"] = rng.normal(0, 0.05, (576, 4)).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("adapters")
    modules = [f"{name}={activated(folder / name, seed)}" for seed, name in enumerate(("first", "second"))]
    modules += [
        f"{name}={EXAMPLES / 'adapters' / name}" for name in ADAPTERS if (EXAMPLES / "adapters" / name).exists()
    ]
    running = start("--enable-lora", *(word for module in modules for word in ("--lora-modules", module)))
    yield running
    running.close()


def run(server: RealServer, name: str, *more: str) -> tuple[int, int]:
    """Run an example. Returns the prompt tokens that it says came from the cache, and all of them."""
    command = [sys.executable, EXAMPLES / f"{name}.py", str(server.client.base_url), *more]
    environment = {"PATH": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    said = re.findall(r"([0-9,]+) of ([0-9,]+) prompt tokens", done.stdout)
    cached, prompt = (int(each.replace(",", "")) for each in said[-1])
    return cached, prompt


@pytest.mark.parametrize("name", PLAIN)
def test_programs(server: RealServer, name: str) -> None:
    cached, prompt = run(server, name)
    assert cached > 0.1 * prompt


@pytest.mark.parametrize("name", NEEDS)
def test_other_peoples_libraries(server: RealServer, name: str) -> None:
    pytest.importorskip(NEEDS[name])
    cached, prompt = run(server, name)
    assert cached > 0.2 * prompt


@pytest.mark.parametrize("name", WITH_ADAPTERS)
def test_example_adapters(server: RealServer, name: str) -> None:
    if not (EXAMPLES / "adapters").exists():
        pytest.skip("there are no example adapters")
    cached, _ = run(server, name)
    assert cached > 0


def test_activated_adapters_go_on_from_what_the_base_model_computed(server: RealServer) -> None:
    cached, prompt = run(server, "activated_adapters", "first", "second")
    assert cached > 0.9 * prompt


def test_every_example_is_short_and_tested() -> None:
    tested = {*PLAIN, *NEEDS, *WITH_ADAPTERS, "activated_adapters"}
    ours = {path.stem: path.read_text() for path in EXAMPLES.glob("*.py") if "URL" in path.read_text()}
    assert ours.keys() == tested
    assert all(text.count("\n") < 60 for text in ours.values())


def test_select_gives_the_exact_log_likelihoods(server: RealServer) -> None:
    choices = [" Paris", " London", " the city of light"]
    with Session(str(server.client.base_url)) as session:
        session.user("What is the capital of France?").assistant("It is")
        asked = [{**session.messages[-1], "content": f"It is{choice}"} for choice in choices]
        assert session.select("city", choices) == " Paris"
    user = [{"role": "user", "content": "What is the capital of France?"}]
    for choice, answer in zip(choices, asked, strict=True):
        body = {"messages": [*user, answer], "continue_final_message": True, "add_generation_prompt": False}
        tokens = server.http.post("/tokenize", json=body).json()["tokens"]
        alone = server.http.post("/tokenize", json={"prompt": choice, "add_special_tokens": False}).json()
        echo = server.client.completions.create(model="small", prompt=tokens, max_tokens=0, echo=True, logprobs=0)
        logprobs = echo.choices[0].logprobs.token_logprobs[-len(alone["tokens"]) :]
        assert session.scores["city"][choice] == pytest.approx(math.fsum(logprobs), abs=1e-6)
