"""Published models: each config is read as a start reads it, and every form of it has an answer with a reason."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
from huggingface_hub.utils import validate_repo_id

from rootgraft.engine.checkpoint.families.library_classes import TESTED_CLASSES
from rootgraft.engine.checkpoint.hf_config import model_config
from rootgraft.engine.checkpoint.published_models import (
    _GGUF_TYPES,
    FORMS,
    PLAIN,
    form_answers,
    own_form,
    published_models,
)
from rootgraft.engine.checkpoint.read_config import read_model_config
from rootgraft.engine.errors import ModelError, UnknownArchitecture

ANSWERS = {name: form_answers(config) for name, config in published_models().items()}


def test_names_are_those_of_the_hub_in_order() -> None:
    names = list(published_models())
    assert names == sorted(names, key=str.lower) and len(names) > 80
    for name in names:
        validate_repo_id(name)


def test_an_answer_is_what_a_start_says_of_the_same_file(tmp_path: Path) -> None:
    for name, config in published_models().items():
        (tmp_path / "config.json").write_text(json.dumps(config))
        first = ANSWERS[name][0]
        try:
            read_model_config(tmp_path)
        except UnknownArchitecture as error:
            by_library = error.architecture in TESTED_CLASSES
            assert first.how == ("by the transformers library" if by_library and first.form == PLAIN else "")
            assert (
                first.loads or first.fault == str(error) or (by_library and "only with 16-bit weights" in first.fault)
            )
        except ModelError as error:
            assert first.fault == str(error) and not first.how
        else:
            assert first.loads and first.how


@pytest.mark.parametrize(
    ("name", "forms"),
    [
        ("Qwen/Qwen3-8B", "yyyy" + "y" * 9),
        ("google/gemma-4-12B-it", "yyyy" + "y" * 9),
        ("google/gemma-4-26B-A4B", "yyyy" + "n" * 9),
        ("Qwen/Qwen3-VL-30B-A3B-Instruct", "ynnn" + "y" * 9),
        ("zai-org/GLM-5.2", "yyyy" + "n" * 9),
        ("Qwen/Qwen3.5-27B", "yyyy" + "y" * 9),
        ("mistralai/Mistral-7B-Instruct-v0.3", "yyyy" + "y" * 9),
        ("google/gemma-3-27b-it", "yyyy" + "y" * 9),
        ("microsoft/Phi-3-mini-4k-instruct", "yyyy" + "y" * 9),
        ("MiniMaxAI/MiniMax-M2.5", "y"),
        ("MiniMaxAI/MiniMax-M3", "yyyy" + "n" * 9),
        ("MiniMaxAI/MiniMax-M3-MXFP8", "y"),
        ("Qwen/Qwen3-32B-FP8-Static-PerTensor", "y"),
        ("nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16", "yyyy" + "n" * 9),
        ("nvidia/DeepSeek-V3.1-NVFP4", "y"),
        ("deepseek-ai/DeepSeek-V3.2", "y"),
        ("google/gemma-3n-E4B-it", "ynnn" + "n" * 9),
        ("zai-org/GLM-4.7-Flash", "yyyy" + "y" * 9),
        ("XiaomiMiMo/MiMo-V2-Flash", "y"),
        ("deepseek-ai/DeepSeek-V4-Pro", "n"),
    ],
)
def test_forms_of_well_known_repositories(name: str, forms: str) -> None:
    assert "".join("y" if answer.loads else "n" for answer in ANSWERS[name]) == forms, ANSWERS[name]
    assert len(forms) == (len(FORMS) if own_form(published_models()[name]) == PLAIN else 1)


def test_quantised_forms_are_named_as_their_configs_name_them() -> None:
    assert own_form(published_models()["nvidia/DeepSeek-V3.1-NVFP4"]) == "modelopt NVFP4"
    assert own_form(published_models()["deepseek-ai/DeepSeek-V3"]) == "fp8"
    assert own_form({"text_config": {"quantization_config": {"quant_method": "awq"}}}) == "awq"
    assert own_form({"quantization_config": None}) == PLAIN


@pytest.mark.parametrize(("fmt", "fault"), [("e4m3", None), ("float8_e4m3fn", None), ("e5m2", "fmt must be")])
def test_names_of_the_eight_bit_float(fmt: str, fault: str | None) -> None:
    config = dict(published_models()["deepseek-ai/DeepSeek-V3"])
    config["quantization_config"] = config["quantization_config"] | {"fmt": fmt}
    if fault is None:
        assert model_config(config).quantization is not None
    else:
        with pytest.raises(ModelError, match=fault):
            model_config(config)


def test_quantisations_of_a_file_name_types_that_ggml_has() -> None:
    names = {each.name for each in gguf.GGMLQuantizationType}
    assert all(names.issuperset(types) for types in _GGUF_TYPES.values())
    # The library's table of files' kinds has each of them.
    kinds = {each.name.removeprefix("MOSTLY_") for each in gguf.LlamaFileType}
    assert kinds.issuperset(_GGUF_TYPES)
