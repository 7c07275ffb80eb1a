"""Overrides of config.json: what is computed is what transformers computes of the overridden configuration."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rootgraft import LLM, SamplingParams
from rootgraft.engine.checkpoint import config_overrides
from rootgraft.engine.checkpoint.base_digest import base_digest
from rootgraft.engine.checkpoint.config_overrides import resolve_served_model, with_overrides
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.errors import ConfigError, ModelError

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
REUSED = """
from rootgraft.engine.checkpoint.config_overrides import resolve_served_model
from rootgraft.engine.config import EngineConfig
model, length = sys.argv[1:]
config = EngineConfig(model=model, hf_overrides='{"max_position_embeddings": %s}' % length)
print(resolve_served_model(config).path, flush=True)
"""
TOKENS = [7 * place % 61 + 3 for place in range(96)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own for folders of links; that of compiled kernels is the usual one."""
    folder = tmp_path / "cache" / "rootgraft" / "models"
    monkeypatch.setattr(config_overrides, "cache_folder", lambda: folder)
    return tmp_path / "cache"


def config_of(folder: Path, **overrides: Any) -> EngineConfig:
    return EngineConfig(model=str(folder), hf_overrides=json.dumps(overrides))


def test_logprobs_are_those_of_the_overridden_model(tiny_llama: Path, tiny_folder: Path) -> None:
    content = json.loads((tiny_llama / "config.json").read_bytes())
    content.pop("rope_parameters", None)
    merged = content | {"rope_scaling": YARN, "max_position_embeddings": 128}
    reference = AutoModelForCausalLM.from_pretrained(
        tiny_llama, config=AutoConfig.for_model(**merged), dtype=torch.float32
    )
    with torch.no_grad():
        expected = reference(torch.tensor([TOKENS])).logits[0].log_softmax(-1)
    found = {}
    longer = {"max_position_embeddings": 128}
    asked: dict[str, dict[str, Any]] = {
        "as it is": {},
        "newer name": {"rope_parameters": YARN} | longer,
        "older name": {"rope_scaling": YARN} | longer,
    }
    for name, overrides in asked.items():
        llm = LLM(
            str(tiny_llama),
            tokenizer=str(tiny_folder),
            hf_overrides=overrides,
            dtype="float32",
            num_gpu_blocks_override=40,
        )
        [output] = llm.generate(
            [{"prompt_token_ids": TOKENS}], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False
        )
        llm.close()
        assert output.prompt_logprobs is not None
        found[name] = torch.tensor(
            [scores[token].logprob for token, scores in zip(TOKENS, output.prompt_logprobs, strict=True) if scores]
        )
    wanted = expected[:-1].gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0]
    assert (found["newer name"] - wanted).abs().max() < 1e-4
    assert torch.equal(found["older name"], found["newer name"])
    assert (found["as it is"] - wanted).abs().max() > 1e-3


def test_the_model_itself_stays_as_it_is(tiny_llama: Path, cache: Path) -> None:
    before = (tiny_llama / "config.json").read_bytes()
    plain = resolve_served_model(config_of(tiny_llama))
    assert plain.path == tiny_llama and plain.source is None
    files = resolve_served_model(config_of(tiny_llama, max_position_embeddings=64))
    assert files.name == plain.name and files.source == tiny_llama.resolve()
    assert json.loads((files.path / "config.json").read_bytes())["max_position_embeddings"] == 64
    assert (tiny_llama / "config.json").read_bytes() == before
    assert {each.name for each in files.path.iterdir()} == {each.name for each in tiny_llama.iterdir()}
    assert all((files.path / each.name).resolve() == each.resolve() for each in tiny_llama.glob("*.safetensors"))


def test_each_pair_of_model_and_overrides_has_its_folder(tiny_llama: Path, cache: Path) -> None:
    found = [
        resolve_served_model(config_of(tiny_llama, max_position_embeddings=length)).path for length in (64, 64, 96)
    ]
    assert found[0] == found[1] != found[2]
    assert len({base_digest(each) for each in (*found, tiny_llama)}) == 3, "KV and replicas tell them apart"
    assert len(list((cache / "rootgraft" / "overridden").iterdir())) == 2, "nothing is left of what was begun"


def test_folders_are_there_while_a_process_uses_them(tiny_llama: Path, cache: Path) -> None:
    """Whoever makes one removes those of processes that have ended."""
    held, made = (f"import sys\n{REUSED}{line}" for line in ("sys.stdin.read()", ""))
    command = [sys.executable, "-c"]
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
    with subprocess.Popen(
        [*command, held, str(tiny_llama), "32"], env=environment, stdin=PIPE, stdout=PIPE, text=True
    ) as using:
        assert using.stdout is not None
        first = Path(using.stdout.readline().strip())
        done = subprocess.run(
            [*command, made, str(tiny_llama), "48"], env=environment, stdout=PIPE, text=True, check=True
        )
        second = Path(done.stdout.strip())
        assert first.is_dir() and second.is_dir()
        own = resolve_served_model(config_of(tiny_llama, max_position_embeddings=64)).path
        assert first.is_dir() and own.is_dir() and not second.exists()
        using.communicate()
    other = resolve_served_model(config_of(tiny_llama, max_position_embeddings=96)).path
    assert own.is_dir() and other.is_dir() and not first.exists()
    shutil.rmtree(own.parent)
    assert resolve_served_model(config_of(tiny_llama, max_position_embeddings=64)).path == own and own.is_dir()


LINEAR = {"rope_type": "linear", "factor": 2.0}


THETA, ALONE = {"rope_theta": 5.0}, {"rope_theta": 5.0, "rope_type": "default"}
LOCAL = {"sliding_attention": {"rope_theta": 1.0}}


@pytest.mark.parametrize(
    ("content", "overrides", "merged"),
    [
        ({"rope_parameters": ALONE}, {"rope_scaling": LINEAR}, {"rope_parameters": THETA | LINEAR}),
        ({"rope_parameters": YARN | THETA}, {"rope_scaling": None}, {"rope_parameters": THETA}),
        (THETA | {"rope_scaling": YARN}, {"rope_parameters": LINEAR}, THETA | {"rope_parameters": LINEAR}),
        (THETA | {"rope_scaling": YARN}, {"rope_scaling": LINEAR}, THETA | {"rope_scaling": LINEAR}),
        (
            {"rope_parameters": {"full_attention": ALONE, **LOCAL}},
            {"rope_scaling": LINEAR},
            {"rope_parameters": {"full_attention": THETA | LINEAR, **LOCAL}},
        ),
        (
            {"text_config": {"rope_parameters": ALONE}},
            {"text_config": {"rope_scaling": LINEAR}},
            {"text_config": {"rope_parameters": THETA | LINEAR}},
        ),
        (
            {"rope_parameters": YARN},
            {"rope_scaling": LINEAR, "rope_parameters": YARN},
            {"rope_scaling": LINEAR, "rope_parameters": YARN},
        ),
    ],
)
def test_one_name_of_rotary_parameters_is_in_place_of_the_other(
    content: dict[str, Any], overrides: dict[str, Any], merged: dict[str, Any]
) -> None:
    assert with_overrides(content, overrides) == merged


def test_keys_inside_a_part_are_replaced_one_by_one() -> None:
    content = {"text_config": {"a": 1, "rope_scaling": {"x": 1}}, "rope_scaling": {"x": 1}, "b": 2}
    overrides = {"text_config": {"rope_scaling": {"y": 2}}, "rope_scaling": {"y": 2}, "c": None}
    assert with_overrides(content, overrides) == {
        "text_config": {"a": 1, "rope_scaling": {"y": 2}},
        "rope_scaling": {"y": 2},
        "b": 2,
        "c": None,
    }


@pytest.mark.parametrize("text", ["", "x", "[1]", '"a"', "1", "null", "[" * 5000])
def test_what_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--hf-overrides must be a JSON object of keys of config\.json"):
        EngineConfig(hf_overrides=text)


def test_a_gguf_file_has_no_config(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"m\.gguf is a GGUF file, which has no config\.json"):
        resolve_served_model(config_of(tmp_path / "m.gguf", a=1))


def test_a_cache_that_cannot_be_written_is_told(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(
        ModelError, match="--hf-overrides: the folder for the model with its overrides could not be created"
    ):
        resolve_served_model(config_of(tiny_llama, max_position_embeddings=64))


@pytest.mark.parametrize("overrides", [{"hidden_size": "x"}, {"rope_parameters": {"rope_type": "unheard"}}])
def test_overrides_are_checked_as_any_config(tiny_llama: Path, overrides: dict[str, Any]) -> None:
    with pytest.raises(ModelError):
        LLM(str(tiny_llama), hf_overrides=overrides)
