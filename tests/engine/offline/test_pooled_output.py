"""Embeddings and classes offline: the numbers of transformers, pooled as the checkpoint's files say."""

from __future__ import annotations

import json
import warnings
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
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
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.errors import ContextTooLong, ModelError, RequestError
from rootgraft.engine.executor.worker import Worker
from rootgraft.engine.messages import Done, Submit, TokenOut
from rootgraft.engine.types import Priority
from rootgraft.engine.types import SamplingParams as EngineParams

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


Dense = tuple[list[int], list[str], bool]


def describe(
    folder: Path,
    pooling: dict[str, Any],
    *,
    normalizes: bool = True,
    prompts: Any = None,
    dense: Dense = ([], [], False),
) -> None:
    """Write the files of sentence-transformers; ``dense`` has the sizes, activations and biases of linear layers."""
    sizes, activations, has_bias = dense
    kinds = ["Transformer", "Pooling", *["Dense"] * len(activations), *(["Normalize"] if normalizes else [])]
    types = [f"sentence_transformers.models.{kind}" for kind in kinds]
    paths = ["", *(f"{at}_{kind}" for at, kind in enumerate(kinds) if at)]
    modules = [{"idx": at, "name": str(at), "path": paths[at], "type": each} for at, each in enumerate(types)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 100, "do_lower_case": False}))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts or {"prompts": {}}))
    generator = torch.Generator().manual_seed(3)
    for at, activation in enumerate(activations):
        (place := folder / f"{at + 2}_Dense").mkdir()
        shape = {"in_features": sizes[at], "out_features": sizes[at + 1], "bias": has_bias}
        named = shape | {"activation_function": f"torch.nn.modules.activation.{activation}"}
        (place / "config.json").write_text(json.dumps(named))
        tensors = {"linear.weight": torch.randn(sizes[at + 1], sizes[at], generator=generator)}
        if has_bias:
            tensors["linear.bias"] = torch.randn(sizes[at + 1], generator=generator)
        save_file(tensors, place / "model.safetensors")


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
    # sentence-transformers would read 100 tokens of it alone.
    with pytest.raises(ContextTooLong, match="100 tokens"):
        llm.embed([TEXTS[0], [5] * 101], use_tqdm=False)
    assert len(llm.embed([[5] * 100], use_tqdm=False)) == 1
    with pytest.raises(RequestError, match="prompt_name"):
        llm.embed("a", prompt_name="nobody", use_tqdm=False)
    with pytest.raises(RequestError, match="classification head"):
        llm.classify("a", use_tqdm=False)
    if kind is Qwen3ForCausalLM:
        assert llm.generate("the fox", use_tqdm=False)[0].outputs
    else:
        with pytest.raises(RequestError, match="no language head"):
            llm.generate("the fox", use_tqdm=False)


def pooled(mode: str, hidden: torch.Tensor, first: int) -> torch.Tensor:
    """The definitions of sentence-transformers, of the hidden states [n, H] from the token ``first`` on."""
    weights = torch.arange(first + 1, len(hidden) + 1, dtype=hidden.dtype)
    hidden = hidden[first:]
    return {
        "cls": hidden[0],
        "lasttoken": hidden[-1],
        "max": hidden.max(0).values,
        "mean": hidden.mean(0),
        "mean_sqrt_len_tokens": hidden.sum(0) / len(hidden) ** 0.5,
        "weightedmean": (hidden * weights[:, None]).sum(0) / weights.sum(),
    }[mode]


FORMS: list[tuple[dict[str, Any], list[str]]] = [
    ({"pooling_mode_mean_tokens": True}, ["mean"]),
    ({"pooling_mode": "mean", "include_prompt": False}, ["mean"]),
    ({"pooling_mode": "cls"}, ["cls"]),
    ({"pooling_mode_cls_token": True, "pooling_mode_lasttoken": True, "include_prompt": False}, ["cls", "lasttoken"]),
    (
        {"pooling_mode": ["weightedmean", "max", "mean_sqrt_len_tokens"], "include_prompt": False},
        ["weightedmean", "max", "mean_sqrt_len_tokens"],
    ),
    ({}, ["mean"]),
]


@pytest.mark.parametrize(("pooling", "modes"), FORMS)
def test_kinds_of_pooling(opened: Open, tmp_path: Path, pooling: dict[str, Any], modes: list[str]) -> None:
    """Prompts are computed in chunks, and texts that begin alike are in the cache already."""
    model = make(Qwen3Model, Qwen3Config, tmp_path, tie_word_embeddings=True, head_dim=16)
    describe(tmp_path, pooling, normalizes=False, prompts={"prompts": {"query": "the dog:"}})
    llm = opened(tmp_path, max_num_batched_tokens=16)
    texts = [*TEXTS, "the quick brown fox jumps over the lazy dog " * 3]
    for name, before in ((None, ""), ("query", "the dog:"), ("query", "the dog:")):
        left_out = len(tokens_of(llm, before)) if before and pooling.get("include_prompt") is False else 0
        for text, each in zip(texts, llm.embed(texts, use_tqdm=False, prompt_name=name), strict=True):
            with torch.no_grad():
                hidden = model(torch.tensor([tokens_of(llm, before + text)])).last_hidden_state[0]
            wanted = torch.cat([pooled(mode, hidden, left_out) for mode in modes])
            assert each.outputs.embedding == pytest.approx(wanted.tolist(), abs=1e-4, rel=1e-4)
            assert each.num_cached_tokens <= left_out
    # Only tokens that are not pooled came from the cache, and those did.
    assert (each.num_cached_tokens > 0) is bool(left_out)
    found = llm.embed({"prompt": texts[0]}, use_tqdm=False, prompt_name="query")[0]
    again = llm.embed(texts[0], use_tqdm=False, prompt_name="query")[0]
    assert found.outputs.embedding == pytest.approx(again.outputs.embedding, abs=1e-5)


@pytest.mark.parametrize("overlaps", [False, True])
def test_pooling_outlives_preemption(tmp_path: Path, overlaps: bool) -> None:
    """A prompt that gave way to another after some of its chunks is in the cache, and yet pooled as a whole."""
    model = make(Qwen3ForCausalLM, Qwen3Config, tmp_path, tie_word_embeddings=True, head_dim=16)
    describe(tmp_path, {"pooling_mode": "mean"}, normalizes=True)
    options: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "block_size": 4, "threads": 1}
    config = EngineConfig(dtype="float32", device="cpu", num_gpu_blocks_override=64, **options)
    worker = Worker(config, tmp_path)
    worker.overlaps = overlaps
    core = EngineCore(config, worker)
    tokens = [array("i", range(90 * at, 90 * at + 90)) for at in (1, 2)]
    params = EngineParams(max_tokens=1, temperature=0.0, ignore_eos=True, pooling="embed")
    try:
        core.handle([Submit(1, tokens[0], params, priority=Priority.BATCH)])
        messages = [*core.step(), *core.step()]
        core.handle([Submit(2, tokens[1], params, priority=Priority.REALTIME)])
        for _ in range(40):
            messages += core.step()
        pooled = {each.id: each.pooled for each in messages if isinstance(each, TokenOut)}
        [preempted] = [each.stats.preemptions for each in messages if isinstance(each, Done) and each.id == 1]
        assert preempted == 1
        for number, given in enumerate(tokens, 1):
            with torch.no_grad():
                hidden = model.model(torch.tensor([given.tolist()])).last_hidden_state[0]
            found = torch.frombuffer(bytearray(pooled[number]), dtype=torch.float32)
            assert torch.allclose(found, hidden.mean(0), rtol=1e-4, atol=1e-4)
    finally:
        core.close()


@pytest.mark.parametrize("has_bias", [True, False])
def test_dense_layers_stand_behind_the_pooling(opened: Open, tmp_path: Path, has_bias: bool) -> None:
    """As of EmbeddingGemma: mean, two linear layers, length 1."""
    model = make(Qwen3Model, Qwen3Config, tmp_path, tie_word_embeddings=True, head_dim=16)
    sizes, activations = [48, 96, 32], ["Tanh", "Identity"]
    describe(tmp_path, {"pooling_mode": "mean"}, dense=(sizes, activations, has_bias))
    llm = opened(tmp_path)
    for text, each in zip(TEXTS, llm.embed(TEXTS, use_tqdm=False), strict=True):
        with torch.no_grad():
            value = model(torch.tensor([tokens_of(llm, text)])).last_hidden_state[0].mean(0)
        for at, activation in enumerate(activations):
            held = load_file(tmp_path / f"{at + 2}_Dense" / "model.safetensors")
            value = torch.nn.functional.linear(value, held["linear.weight"], held.get("linear.bias"))
            value = value.tanh() if activation == "Tanh" else value
        wanted = torch.nn.functional.normalize(value, dim=0).tolist()
        assert each.outputs.embedding == pytest.approx(wanted, abs=1e-4)
    assert len(llm.embed("a", use_tqdm=False, dimensions=32)[0].outputs.embedding) == 32
    with pytest.raises(RequestError, match="at most 32"):
        llm.embed("a", use_tqdm=False, dimensions=33)


@pytest.mark.parametrize(
    ("pooling", "told"),
    [
        ({"pooling_mode": "attention"}, "attention"),
        ({"pooling_mode": ["mean", "median"]}, "median"),
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


@pytest.mark.parametrize("base", [LlamaForSequenceClassification, LlamaForCausalLM])
@pytest.mark.parametrize("listed", [False, True])
def test_an_adapter_brings_the_head_of_a_reranker(opened: Open, tmp_path: Path, base: Any, listed: bool) -> None:
    """Its one class scores pairs, whatever the model itself would do; also where a request has it loaded."""
    model = make(base, LlamaConfig, tmp_path / "base")
    trained = LlamaForSequenceClassification(LlamaConfig(**{**model.config.to_dict(), "num_labels": 1})).eval()
    trained.model.load_state_dict(model.model.state_dict())
    adapted = adapt(trained, tmp_path / "adapters" / "own", task_type="SEQ_CLS")
    llm = opened(tmp_path / "base", **({"lora_dir": str(tmp_path / "adapters")} if listed else {}))
    if not listed:
        llm.load_adapter("own", str(tmp_path / "adapters" / "own"))
    found = llm.score("the dog", TEXTS, use_tqdm=False, adapter="own")
    for text, each in zip(TEXTS, found, strict=True):
        with torch.no_grad():
            tokens = tokens_of(llm, "the dog") + tokens_of(llm, text)
            logit = adapted(input_ids=torch.tensor([tokens])).logits[0]
        assert each.outputs.score == pytest.approx(float(logit.sigmoid()), abs=1e-4)
    assert llm.encode("a", use_tqdm=False, adapter="own")[0].outputs.data.shape == (1,)
    if base is LlamaForCausalLM:
        assert llm.encode("a", use_tqdm=False)[0].outputs.data.shape == (48,)
    else:
        with pytest.raises(RequestError, match="2 classes"):
            llm.score("a", "b", use_tqdm=False)


def test_an_adapters_head_of_several_classes_is_asked_for_classes_alone(opened: Open, tmp_path: Path) -> None:
    model = make(LlamaForCausalLM, LlamaConfig, tmp_path / "base")
    trained = LlamaForSequenceClassification(LlamaConfig(**{**model.config.to_dict(), "num_labels": 3})).eval()
    adapt(trained, tmp_path / "adapter", task_type="SEQ_CLS")
    llm = opened(tmp_path / "base")
    llm.load_adapter("own", str(tmp_path / "adapter"))
    with pytest.raises(RequestError, match="3 classes"):
        llm.score("a", "b", use_tqdm=False, adapter="own")
    assert llm.encode("a", use_tqdm=False, adapter="own")[0].outputs.data.shape == (3,)


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


def test_scores_of_pairs_and_arrays(opened: Open, tmp_path: Path) -> None:
    """By a cross-encoder's head, by cosine, and in words, as vLLM's ``score`` and ``encode``."""
    head = make(LlamaForSequenceClassification, LlamaConfig, tmp_path / "head", num_labels=1)
    llm = opened(tmp_path / "head")
    for text, each in zip(TEXTS, llm.score("the dog", TEXTS, use_tqdm=False), strict=True):
        with torch.no_grad():
            logit = head(torch.tensor([tokens_of(llm, "the dog") + tokens_of(llm, text)])).logits[0]
        assert each.outputs.score == pytest.approx(float(logit.sigmoid()), abs=1e-4)
    assert llm.encode("a", use_tqdm=False)[0].outputs.data.shape == (1,)
    causal = make(Qwen3ForCausalLM, Qwen3Config, tmp_path / "causal", tie_word_embeddings=True, head_dim=16)
    asked_in_words = opened(tmp_path / "causal").score("a", ["b", "c"], use_tqdm=False)
    assert all(0 < each.outputs.score < 1 for each in asked_in_words)
    describe(tmp_path / "causal", {"pooling_mode": "mean"}, prompts={"prompts": {"query": "the dog:"}})
    llm = opened(tmp_path / "causal")
    scored = llm.score(["a fox", "a fox", "jumps"], TEXTS[:3], use_tqdm=False)

    def vector(text: str) -> torch.Tensor:
        with torch.no_grad():
            hidden = causal.model(torch.tensor([tokens_of(llm, text)])).last_hidden_state[0]
        return torch.nn.functional.normalize(hidden.mean(0), dim=0)

    for query, document, each in zip(["a fox", "a fox", "jumps"], TEXTS, scored, strict=False):
        wanted = float(vector("the dog:" + query) @ vector(document))
        assert each.outputs.score == pytest.approx(wanted, abs=1e-4)
    [found] = llm.encode(TEXTS[0], pooling_task="embed", use_tqdm=False)
    assert torch.allclose(torch.from_numpy(found.outputs.data), vector(TEXTS[0]), atol=1e-4)
    for wrong in ((["a", "b"], ["c"]), ("a", []), ("a", ["b", ""]), ("a", [[1]])):
        with pytest.raises(RequestError):
            llm.score(*wrong, use_tqdm=False)
    with pytest.raises(RequestError, match="pooling_task"):
        llm.encode("a", pooling_task="token_embed", use_tqdm=False)
