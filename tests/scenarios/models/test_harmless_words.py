"""Words in a model's or an adapter's files that transformers and PEFT do not heed change no answer here either.

Each is written into the files of a tiny random model, which then loads in both, with the same logits.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.lora_driver import AdaptedRun
from support.models.lora_models import PeftOracle, decoder, make_adapter
from support.models.paged_run import run_whole
from support.models.peft_matrix import bank_of, off, prompt, reader
from support.models.tiny_models import save
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

from rootgraft.engine.checkpoint.families.family_table import BY_MODEL_TYPE
from rootgraft.engine.loading.load_model import load_model
from rootgraft.lora.errors import AdapterError

CPU = torch.device("cpu")
OWN_CODE = {"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": "modeling_x.XForCausalLM"}

CONFIG: dict[str, tuple[str, dict[str, Any]]] = {
    "norms described": ("qwen3", {"use_qk_norm": True}),
    "norms described, mixture": ("qwen3_moe", {"use_qk_norm": True, "qkv_bias": False}),
    "norms under another name": ("qwen3", {"qk_layernorm": True}),
    "biases described": ("qwen2", {"attention_bias": True}),
    "code of a class that is in the library": ("llama", {"auto_map": OWN_CODE}),
    "no architectures": ("llama", {"architectures": None}),
    "empty architectures": ("qwen3", {"architectures": []}),
    "early capitals": ("llama", {"architectures": ["LLaMAForCausalLM"]}),
    "end tokens without a token": ("llama", {"eos_token_id": [2, -1, 1_000_000]}),
    "GELU without its approximation": ("llama", {"hidden_act": "gelu"}),
    "begin token without a token": ("llama", {"bos_token_id": -1}),
}


def change(file: Path, changes: dict[str, Any]) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def assert_equals_transformers(folder: Path) -> None:
    tokens = list(range(3, 23))
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        )
        theirs = model(torch.tensor([tokens])).logits[0]
    ours = run_whole(load_model(folder, dtype=torch.float32, device=CPU), tokens)
    assert off(ours, theirs) < 1e-4


@pytest.mark.parametrize("case", CONFIG)
def test_config(case: str, tmp_path: Path) -> None:
    name, changes = CONFIG[case]
    save(name, tmp_path)
    change(tmp_path / "config.json", changes)
    assert_equals_transformers(tmp_path)


def test_byte_order_marks(tmp_path: Path) -> None:
    save("llama", tmp_path)
    for file in tmp_path.glob("*.json"):
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    ours = run_whole(load_model(tmp_path, dtype=torch.float32, device=CPU), [3, 4, 5])
    save("llama", tmp_path)
    assert torch.equal(ours, run_whole(load_model(tmp_path, dtype=torch.float32, device=CPU), [3, 4, 5]))


def test_a_type_names_the_class_that_transformers_has_for_it() -> None:
    """Types of which transformers' own class is another one (InternLM 3, IQuest-Coder: Llama) compute the same.

    Sarvam's is that of GLM-4.5, with tensors renamed.
    """
    wrong = {
        kind: NAMES[kind]
        for kind, family in BY_MODEL_TYPE.items()
        if kind in NAMES and NAMES[kind] not in (family.architecture, "LlamaForCausalLM")
    }
    wrappers = {f"gemma{number}": f"Gemma{number}ForConditionalGeneration" for number in (3, 4)}
    assert wrong == wrappers | {"sarvam_moe": "Glm4MoeForCausalLM"}


def with_cache_scales(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    scales = {f"model.layers.0.self_attn.{name}": torch.tensor(0.5) for name in ("k_scale", "v_scale")}
    nested = {f"model.layers.1.self_attn.{part}_proj.{part}_scale": torch.tensor(0.5) for part in "kv"}
    return tensors | scales | nested


TENSORS: dict[str, Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]] = {
    "scales of an FP8 cache": with_cache_scales,
    "F64": lambda tensors: {name: value.double() for name, value in tensors.items()},
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors(case: str, tmp_path: Path) -> None:
    save("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(TENSORS[case](load_file(file)), file, metadata={"format": "pt"})
    assert_equals_transformers(tmp_path)


TASKS = ("SEQ_2_SEQ_LM", "FEATURE_EXTRACTION", "SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS", None)


@pytest.mark.parametrize("case", [*TASKS, "byte order mark", "F64"])
def test_adapter(case: str | None, tmp_path: Path) -> None:
    """The factors are those that PEFT computes for the causal model."""
    folder = make_adapter("llama", tmp_path, tmp_path / "adapter", r=3, target_modules=["q_proj", "down_proj"])
    tokens = prompt(1)
    expected = PeftOracle("llama", tmp_path).logits(folder, tokens)
    config = folder / "adapter_config.json"
    if case == "byte order mark":
        config.write_bytes(b"\xef\xbb\xbf" + config.read_bytes())
    elif case == "F64":
        file = folder / "adapter_model.safetensors"
        save_file({name: value.double() for name, value in load_file(file).items()}, file)
    else:
        change(config, {"task_type": case})
    adapter = reader("llama", tmp_path).read(str(folder))
    run = AdaptedRun(decoder("llama", tmp_path), bank_of("llama", tmp_path, [adapter]), [0], [0])
    assert off(run.extend([tokens])[0], expected) < 1e-4


def in_shards(folder: Path, count: int) -> list[Path]:
    """Divide an adapter's tensors as transformers does, and take the one file away."""
    tensors = load_file(folder / "adapter_model.safetensors")
    (folder / "adapter_model.safetensors").unlink()
    files = [folder / f"adapter_model-{index:05}-of-{count:05}.safetensors" for index in range(1, count + 1)]
    for index, file in enumerate(files):
        save_file({name: tensors[name] for name in sorted(tensors)[index::count]}, file)
    places = {name: files[index % count].name for index, name in enumerate(sorted(tensors))}
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (folder / "adapter_model.safetensors.index.json").write_text(json.dumps(index))
    return files


def test_adapter_in_shards(tmp_path: Path) -> None:
    folder = make_adapter("llama", tmp_path, tmp_path / "adapter", r=3, target_modules=["q_proj", "down_proj"])
    own = reader("llama", tmp_path)
    whole = own.read(str(folder))
    files = in_shards(folder, 3)
    size = sum(tensor.nbytes for file in files for tensor in load_file(file).values())
    own.check(str(folder))
    assert own.read(str(folder)).digest == whole.digest
    room = size + files[2].stat().st_size - sum(tensor.nbytes for tensor in load_file(files[2]).values())
    assert replace(own, max_file_bytes=room).read(str(folder)).digest == whole.digest
    with pytest.raises(AdapterError, match="the limit is"):
        replace(own, max_file_bytes=room - 1).read(str(folder))
    second = files[1].read_bytes()
    files[1].write_bytes(files[0].read_bytes())
    with pytest.raises(AdapterError, match="is in two of the adapter's files"):
        own.read(str(folder))
    files[1].unlink()
    with pytest.raises(AdapterError, match="There is no adapter_model-00002-of-00003"):
        own.read(str(folder))
    files[1].write_bytes(second)
    (folder / "adapter_model-00001-of-00002.safetensors").write_bytes(second)
    with pytest.raises(AdapterError, match="according to their names they belong to 2, 3"):
        own.read(str(folder))
