"""Embeddings and classes offline: the numbers of transformers, pooled as the checkpoint's files say."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine.tiny_llm import CHAT_TEMPLATE, open_llm
from support.models.tiny_models import COMMON
from support.models.tiny_tokenizers import train_byte_level, write_folder
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MistralConfig,
    MistralModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3Model,
)

from rootgraft import LLM
from rootgraft.engine.errors import ModelError, RequestError

TEXTS = ["the quick brown fox", "a lazy dog", "the quick brown fox jumps over", "of"]


def make(kind: type[Any], config: type[Any], folder: Path, **fields: Any) -> Any:
    """Write a tiny model with a tokenizer, and return it."""
    vocab = train_byte_level().get_vocab_size()
    model = kind(config(**COMMON | {"vocab_size": vocab, "max_position_embeddings": 512} | fields)).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.25, generator=generator)
    model.save_pretrained(folder)
    special = {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>", "chat_template": CHAT_TEMPLATE}
    write_folder(folder, train_byte_level().to_str(), **special)
    return model


def describe(folder: Path, pooling: dict[str, Any], *, normalizes: bool = True, prompts: Any = None) -> None:
    """Write the files of sentence-transformers."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalizes else [])]
    types = [f"sentence_transformers.models.{kind}" for kind in kinds]
    paths = ["", *(f"{at}_{kind}" for at, kind in enumerate(kinds) if at)]
    modules = [{"idx": at, "name": str(at), "path": paths[at], "type": each} for at, each in enumerate(types)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 100, "do_lower_case": False}))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts or {"prompts": {}}))


@torch.no_grad()
def last_hidden(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    return getattr(model, "model", model)(torch.tensor([tokens])).last_hidden_state[0, -1]


def tokens_of(llm: LLM, text: str) -> list[int]:
    return list(llm.get_tokenizer().encode(text))


LAST = {"word_embedding_dimension": 64, "pooling_mode_cls_token": False, "pooling_mode_lasttoken": True}


@pytest.fixture
def opened() -> Any:
    llms: list[LLM] = []

    def open_(folder: Path, **options: Any) -> LLM:
        llms.append(open_llm(folder, **options))
        return llms[-1]

    yield open_
    for llm in llms:
        llm.close()


Open = Callable[..., LLM]


@pytest.mark.parametrize(
    ("kind", "config", "fields"),
    [
        (Qwen3Model, Qwen3Config, {"tie_word_embeddings": True, "head_dim": 16}),
        (Qwen3ForCausalLM, Qwen3Config, {"tie_word_embeddings": True, "head_dim": 16}),
        (MistralModel, MistralConfig, {}),
    ],
)
def test_embeddings_are_the_last_hidden_states(
    opened: Open, tmp_path: Path, kind: Any, config: Any, fields: dict[str, Any]
) -> None:
    model = make(kind, config, tmp_path, **fields)
    prompts = {"prompts": {"query": "the dog: ", "document": ""}, "default_prompt_name": None}
    describe(tmp_path, LAST, prompts=prompts)
    llm = opened(tmp_path)
    for name, before in ((None, ""), ("query", "the dog: "), ("document", "")):
        found = llm.embed(TEXTS, use_tqdm=False, prompt_name=name)
        for text, each in zip(TEXTS, found, strict=True):
            hidden = last_hidden(model, tokens_of(llm, before + text))
            wanted = torch.nn.functional.normalize(hidden, dim=0)
            assert each.outputs.embedding == pytest.approx(wanted.tolist(), abs=1e-4)
    # The prompts share their beginning, which the cache gives.
    assert llm.embed(TEXTS[2], use_tqdm=False)[0].num_cached_tokens > 0
    short = llm.embed(TEXTS[0], use_tqdm=False, dimensions=8)[0].outputs.embedding
    hidden = last_hidden(model, tokens_of(llm, TEXTS[0]))[:8]
    assert short == pytest.approx(torch.nn.functional.normalize(hidden, dim=0).tolist(), abs=1e-4)
    raw = llm.embed([tokens_of(llm, TEXTS[0])], use_tqdm=False, normalize=False)[0].outputs.embedding
    assert raw == pytest.approx(last_hidden(model, tokens_of(llm, TEXTS[0])).tolist(), rel=1e-3, abs=1e-4)
    for wrong in (0, len(raw) + 1):
        with pytest.raises(RequestError, match="dimensions"):
            llm.embed("a", dimensions=wrong, use_tqdm=False)
    with pytest.raises(RequestError, match="prompt_name"):
        llm.embed("a", prompt_name="nobody", use_tqdm=False)
    with pytest.raises(RequestError, match="classification head"):
        llm.classify("a", use_tqdm=False)
    if kind is Qwen3ForCausalLM:
        assert llm.generate("the fox", use_tqdm=False)[0].outputs
    else:
        with pytest.raises(RequestError, match="no language head"):
            llm.generate("the fox", use_tqdm=False)


@pytest.mark.parametrize(
    ("pooling", "told"),
    [
        ({"pooling_mode_mean_tokens": True}, "mean_tokens"),
        ({"pooling_mode_lasttoken": True, "pooling_mode_max_tokens": True}, "max_tokens"),
        ({"pooling_mode": "cls"}, "cls"),
    ],
)
def test_another_pooling_is_refused_by_name(opened: Open, tmp_path: Path, pooling: dict[str, Any], told: str) -> None:
    make(Qwen3Model, Qwen3Config, tmp_path, tie_word_embeddings=True, head_dim=16)
    describe(tmp_path, pooling, normalizes=False)
    with pytest.raises(RequestError, match=told):
        opened(tmp_path).embed("a", use_tqdm=False)


def test_a_default_prompt_that_is_none_is_told_at_the_start(opened: Open, tmp_path: Path) -> None:
    make(Qwen3Model, Qwen3Config, tmp_path, tie_word_embeddings=True, head_dim=16)
    describe(tmp_path, LAST, prompts={"prompts": {}, "default_prompt_name": "nobody"})
    with pytest.raises(ModelError, match="default_prompt_name"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("kind", "config", "fields"),
    [
        (LlamaForSequenceClassification, LlamaConfig, {"num_labels": 3}),
        (LlamaForSequenceClassification, LlamaConfig, {}),
        (Qwen3ForSequenceClassification, Qwen3Config, {"num_labels": 1, "head_dim": 16, "tie_word_embeddings": True}),
        (
            Qwen3ForSequenceClassification,
            Qwen3Config,
            {"num_labels": 4, "head_dim": 16, "problem_type": "multi_label_classification"},
        ),
    ],
)
def test_classes_are_those_of_transformers(
    opened: Open, tmp_path: Path, kind: Any, config: Any, fields: dict[str, Any]
) -> None:
    model = make(kind, config, tmp_path, **fields)
    llm = opened(tmp_path)
    for text, each in zip(TEXTS, llm.classify(TEXTS, use_tqdm=False), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([tokens_of(llm, text)])).logits[0]
        independent = len(logits) == 1 or "problem_type" in fields
        wanted = logits.sigmoid() if independent else logits.softmax(0)
        assert each.outputs.probs == pytest.approx(wanted.tolist(), abs=1e-4)
        assert each.outputs.num_classes == fields.get("num_labels", 2)
    with pytest.raises(RequestError, match="/v1/classify"):
        llm.generate("the fox", use_tqdm=False)


def adapt(model: Any, folder: Path, **fields: Any) -> Any:
    """Write an adapter of a model by PEFT, and return the adapted model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from peft import LoraConfig, get_peft_model

        adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **fields)).eval()
        generator = torch.Generator().manual_seed(9)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_" in name or "modules_to_save" in name:
                    parameter.normal_(0.0, 0.5, generator=generator)
        adapted.save_pretrained(folder)
    return adapted


@pytest.mark.parametrize("base", [LlamaForSequenceClassification, LlamaForCausalLM])
def test_an_adapter_brings_its_classification_head(opened: Open, tmp_path: Path, base: Any) -> None:
    """Trained on the same layers with a head of three classes, behind a checkpoint with one of two, or with none."""
    model = make(base, LlamaConfig, tmp_path / "base")
    trained = LlamaForSequenceClassification(LlamaConfig(**{**model.config.to_dict(), "num_labels": 3})).eval()
    trained.model.load_state_dict(model.model.state_dict())
    adapted = adapt(trained, tmp_path / "adapter", task_type="SEQ_CLS")
    llm = opened(tmp_path / "base")
    llm.load_adapter("own", str(tmp_path / "adapter"))
    found = llm.classify(TEXTS, use_tqdm=False, adapter="own")
    for text, each in zip(TEXTS, found, strict=True):
        with torch.no_grad():
            logits = adapted(input_ids=torch.tensor([tokens_of(llm, text)])).logits[0]
        assert each.outputs.probs == pytest.approx(logits.softmax(0).tolist(), abs=1e-4)
    if base is LlamaForCausalLM:
        with pytest.raises(RequestError, match="classification head"):
            llm.classify("a", use_tqdm=False)
    else:
        assert llm.classify("a", use_tqdm=False)[0].outputs.num_classes == 2


def test_an_adapter_of_an_embedder(opened: Open, tmp_path: Path) -> None:
    """PEFT names the modules of a bare model without ``model.``."""
    model = make(Qwen3Model, Qwen3Config, tmp_path / "base", tie_word_embeddings=True, head_dim=16)
    adapted = adapt(model, tmp_path / "adapter", task_type="FEATURE_EXTRACTION")
    llm = opened(tmp_path / "base")
    llm.load_adapter("own", str(tmp_path / "adapter"))
    for text, each in zip(TEXTS, llm.embed(TEXTS, use_tqdm=False, adapter="own"), strict=True):
        with torch.no_grad():
            hidden = adapted(input_ids=torch.tensor([tokens_of(llm, text)])).last_hidden_state[0, -1]
        assert each.outputs.embedding == pytest.approx(torch.nn.functional.normalize(hidden, dim=0).tolist(), abs=1e-4)
