"""Embeddings, classes and rankings over HTTP: OpenAI's client, and the numbers of transformers on tiny models."""

from __future__ import annotations

import base64
import json
import struct
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from support.api.real_server import RealServer, tiny_server
from support.engine.tiny_llm import CHAT_TEMPLATE
from support.machine.waits import HANG_SECONDS
from support.models.tiny_models import COMMON
from support.models.tiny_tokenizers import train_byte_level, write_folder
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from rootgraft.engine.text.tokenizer import Tokenizer

OPTIONS = ("--served-model-name", "tiny", "--num-gpu-blocks-override", "200")
TEXTS = ["the quick brown fox", "a lazy dog", "jumps over"]


def write(kind: type[Any], folder: Path, **fields: Any) -> Any:
    """Write a tiny model with a tokenizer, and return it."""
    config = LlamaConfig(
        **COMMON | {"vocab_size": train_byte_level().get_vocab_size(), "max_position_embeddings": 512} | fields
    )
    model = kind(config).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.25, generator=generator)
    model.save_pretrained(folder)
    special = {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>", "chat_template": CHAT_TEMPLATE}
    write_folder(folder, train_byte_level().to_str(), **special)
    return model


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("causal")
    return folder, write(LlamaForCausalLM, folder)


@pytest.fixture(scope="module")
def server(causal: tuple[Path, Any]) -> Iterator[RealServer]:
    with tiny_server(causal[0], *OPTIONS) as started:
        yield started


@torch.no_grad()
def embedded(model: Any, tokens: Sequence[int], dimensions: int | None = None) -> list[float]:
    hidden = model.model(torch.tensor([tokens])).last_hidden_state[0, -1][:dimensions]
    return torch.nn.functional.normalize(hidden, dim=0).tolist()


def test_embeddings_are_those_of_transformers(client: openai.OpenAI, causal: tuple[Path, Any]) -> None:
    """The client asks for base64 of its own accord; floats, fewer dimensions and token ids are alike."""
    folder, model = causal
    tokenizer = Tokenizer.load(folder)
    tokens = [list(tokenizer.encode(text, True)) for text in TEXTS]
    for dimensions in (None, 5):
        given: Any = {} if dimensions is None else {"dimensions": dimensions}
        for texts in (TEXTS, tokens):
            found = client.embeddings.create(model="tiny", input=texts, **given)
            assert [each.index for each in found.data] == [0, 1, 2]
            for each, one in zip(found.data, tokens, strict=True):
                assert each.embedding == pytest.approx(embedded(model, one, dimensions), abs=1e-4)
            assert found.usage.prompt_tokens == found.usage.total_tokens == sum(map(len, tokens))
    one = client.embeddings.create(model="tiny", input=TEXTS[0], encoding_format="float")
    assert one.data[0].embedding == pytest.approx(embedded(model, tokens[0]), abs=1e-4)
    many = client.embeddings.create(model="tiny", input=TEXTS * 200, encoding_format="float")
    assert len(many.data) == 600
    assert many.data[599].embedding == pytest.approx(embedded(model, tokens[2]), abs=1e-4)


def test_base64_is_of_little_endian_floats(url: str, causal: tuple[Path, Any]) -> None:
    folder, model = causal
    body = {"input": TEXTS[1], "encoding_format": "base64"}
    data = httpx.post(f"{url}/v1/embeddings", json=body, trust_env=False, timeout=HANG_SECONDS).json()["data"][0][
        "embedding"
    ]
    raw = base64.b64decode(data)
    tokens = list(Tokenizer.load(folder).encode(TEXTS[1], True))
    assert list(struct.unpack(f"<{len(raw) // 4}f", raw)) == pytest.approx(embedded(model, tokens), abs=1e-4)


def test_a_ranking_is_by_the_probability_of_yes(url: str, causal: tuple[Path, Any]) -> None:
    folder, model = causal
    tokenizer = Tokenizer.load(folder)
    instruction = "Given a web search query, retrieve relevant passages that answer the query"
    scores = []
    for text in TEXTS:
        prompt = (
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
            'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
            f"<Instruct>: {instruction}\n<Query>: the fox\n<Document>: {text}<|im_end|>\n<|im_start|>assistant\n"
        )
        found = []
        for answer in ("yes", "no"):
            tokens, ending = list(tokenizer.encode(prompt, False)), list(tokenizer.encode(answer, False))
            with torch.no_grad():
                logprobs = model(torch.tensor([[*tokens, *ending]])).logits[0].log_softmax(-1)
            found.append(sum(float(logprobs[len(tokens) + at - 1, token]) for at, token in enumerate(ending)))
        scores.append(torch.tensor(found).softmax(0)[0].item())
    order = sorted(range(3), key=lambda index: -scores[index])
    body = {"query": "the fox", "documents": [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]], "model": "tiny"}
    results = httpx.post(f"{url}/v1/rerank", json=body, trust_env=False, timeout=HANG_SECONDS).json()["results"]
    assert [each["index"] for each in results] == order
    assert [each["relevance_score"] for each in results] == pytest.approx([scores[at] for at in order], abs=1e-4)
    assert [each["document"]["text"] for each in results] == [TEXTS[at] for at in order]
    few = {**body, "top_n": 1, "return_documents": False}
    [best] = httpx.post(f"{url}/v1/rerank", json=few, trust_env=False, timeout=HANG_SECONDS).json()["results"]
    assert best == {"index": order[0], "relevance_score": results[0]["relevance_score"]}


def test_a_model_without_a_classification_head_says_so(url: str) -> None:
    reply = httpx.post(f"{url}/v1/classify", json={"input": "a"}, trust_env=False, timeout=HANG_SECONDS)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "model")


def test_classes_are_those_of_transformers(tmp_path: Path) -> None:
    labels = {0: "spam", 1: "ham", 2: "other"}
    model = write(LlamaForSequenceClassification, tmp_path, id2label=labels, num_labels=3)
    assert len(json.loads((tmp_path / "config.json").read_text())["id2label"]) == 3
    tokenizer = Tokenizer.load(tmp_path)
    with tiny_server(tmp_path, *OPTIONS) as started:
        found = started.http.post("/v1/classify", json={"input": TEXTS}).json()
        for text, each in zip(TEXTS, found["data"], strict=True):
            with torch.no_grad():
                wanted = model(torch.tensor([list(tokenizer.encode(text, True))])).logits[0].softmax(0)
            assert each["probs"] == pytest.approx(wanted.tolist(), abs=1e-4)
            assert (each["label"], each["num_classes"]) == (labels[int(wanted.argmax())], 3)
        refused = started.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
        ranked = started.http.post("/v1/rerank", json={"query": "a", "documents": ["b"]})
        assert ranked.status_code == 400


@pytest.mark.parametrize("raw", [False, True])
def test_a_cross_encoder_scores_pairs(tmp_path: Path, raw: bool) -> None:
    """A head of one class reads both texts. Its score is a probability, unless the checkpoint says else."""
    model = write(LlamaForSequenceClassification, tmp_path, num_labels=1)
    if raw:
        config = json.loads((tmp_path / "config.json").read_text())
        config["sentence_transformers"] = {"activation_fn": "torch.nn.modules.linear.Identity"}
        (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    scores = []
    for text in TEXTS:
        with torch.no_grad():
            logit = model(torch.tensor([tokenizer("the fox", text)["input_ids"]])).logits[0]
        scores.append(float(logit if raw else logit.sigmoid()))
    with tiny_server(tmp_path, *OPTIONS) as started:
        for path in ("/score", "/v1/score"):
            found = started.http.post(path, json={"text_1": "the fox", "text_2": TEXTS}).json()
            assert [each["score"] for each in found["data"]] == pytest.approx(scores, abs=1e-4)
            assert {each["object"] for each in found["data"]} == {"score"}
        several = {"queries": ["a", "the fox"], "documents": [TEXTS[1], TEXTS[0]]}
        assert started.http.post("/v1/score", json=several).json()["data"][1]["score"] == pytest.approx(scores[0], 1e-4)
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            ranked = started.http.post(path, json={"query": "the fox", "documents": TEXTS}).json()["results"]
            order = sorted(range(3), key=lambda index: -scores[index])
            assert [each["index"] for each in ranked] == order
            assert [each["relevance_score"] for each in ranked] == pytest.approx([scores[at] for at in order], abs=1e-4)
        asked = {"query": "a", "documents": ["b"], "instruction": "c"}
        refused = started.http.post("/v1/rerank", json=asked)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "instruction")
        pooled = started.http.post("/pooling", json={"input": TEXTS[0]}).json()["data"][0]
        assert len(pooled["data"]) == 1 and 0 < pooled["data"][0] < 1


def test_an_adapter_brings_the_head_of_a_reranker(tmp_path: Path) -> None:
    """Behind a causal model; the first request that names it has it loaded, and knows its head already."""
    model = write(LlamaForCausalLM, tmp_path / "base")
    adapted = {}
    for name, classes in (("ranker", 1), ("sorter", 3)):
        trained = LlamaForSequenceClassification(
            LlamaConfig(**{**model.config.to_dict(), "num_labels": classes})
        ).eval()
        trained.model.load_state_dict(model.model.state_dict())
        adapted[name] = with_head(trained, tmp_path / "adapters" / name)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    scores = []
    for text in TEXTS:
        with torch.no_grad():
            logit = adapted["ranker"](input_ids=torch.tensor([tokenizer("the fox", text)["input_ids"]])).logits[0]
        scores.append(float(logit.sigmoid()))
    lora = ("--enable-lora", "--lora-dir", str(tmp_path / "adapters"))
    with tiny_server(tmp_path / "base", *OPTIONS, *lora) as started:
        asked = {"query": "the fox", "documents": TEXTS, "model": "ranker"}
        ranked = started.http.post("/v1/rerank", json=asked).json()["results"]
        order = sorted(range(3), key=lambda index: -scores[index])
        assert [each["index"] for each in ranked] == order
        assert [each["relevance_score"] for each in ranked] == pytest.approx([scores[at] for at in order], abs=1e-4)
        for path in ("/score", "/v1/score"):
            pairs = {"text_1": "the fox", "text_2": TEXTS, "model": "ranker"}
            found = started.http.post(path, json=pairs).json()["data"]
            assert [each["score"] for each in found] == pytest.approx(scores, abs=1e-4)
        refused = started.http.post("/v1/rerank", json={**asked, "model": "sorter"})
        assert refused.status_code == 400 and "3 classes" in refused.json()["error"]["message"]
        pooled = started.http.post("/pooling", json={"input": TEXTS[0], "model": "sorter"}).json()["data"][0]
        assert len(pooled["data"]) == 3 and sum(pooled["data"]) == pytest.approx(1)
        listed = started.http.get("/v1/adapters").json()["data"]
        assert {each["name"]: each["num_classes"] for each in listed} == {"ranker": 1, "sorter": 3}
        nobody = started.http.post("/v1/rerank", json={**asked, "model": "nobody"})
        assert (nobody.status_code, nobody.json()["error"]["param"]) == (404, "model")
        assert started.http.post("/v1/rerank", json={**asked, "model": "tiny"}).status_code == 200


def with_head(model: Any, folder: Path) -> Any:
    """Write an adapter of a classifier with its whole head, by PEFT, and return the adapted model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from peft import LoraConfig, get_peft_model

        adapted = get_peft_model(
            model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="SEQ_CLS")
        ).eval()
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.normal_(0.0, 0.5, generator=generator)
    adapted.save_pretrained(folder)
    return adapted


PROMPTS = {"query": "the dog:", "document": "a:"}


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RealServer, Any, Tokenizer]]:
    """A model whose embedding is the mean of what stands behind the prompt."""
    folder = tmp_path_factory.mktemp("embedder")
    model = write(LlamaForCausalLM, folder)
    kinds = ["Transformer", "Pooling", "Normalize"]
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [{"path": path, "type": f"x.{kind}"} for path, kind in zip(paths, kinds, strict=True)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "mean", "include_prompt": False}))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": PROMPTS}))
    with tiny_server(folder, *OPTIONS) as started:
        yield started, model.model, Tokenizer.load(folder)


@torch.no_grad()
def mean_embedding(model: Any, tokenizer: Tokenizer, before: str, text: str) -> torch.Tensor:
    hidden = model(torch.tensor([list(tokenizer.encode(before + text, True))])).last_hidden_state[0]
    left_out = len(tokenizer.encode(before, True)) if before else 0
    return torch.nn.functional.normalize(hidden[left_out:].mean(0), dim=0)


def test_a_mean_without_the_prompt(embedder: tuple[RealServer, Any, Tokenizer]) -> None:
    server, *oracle = embedder
    for name, before in ((None, ""), ("query", PROMPTS["query"])):
        body = {"input": TEXTS, "prompt_name": name}
        for found, text in zip(server.http.post("/v1/embeddings", json=body).json()["data"], TEXTS, strict=True):
            wanted = mean_embedding(*oracle, before, text)
            assert found["embedding"] == pytest.approx(wanted.tolist(), abs=1e-4)
    pooled = server.http.post("/pooling", json={"input": TEXTS, "dimensions": 7, "encoding_format": "base64"}).json()
    for found, text in zip(pooled["data"], TEXTS, strict=True):
        wanted = torch.nn.functional.normalize(mean_embedding(*oracle, "", text)[:7], dim=0)
        raw = struct.unpack("<7f", base64.b64decode(found["data"]))
        assert list(raw) == pytest.approx(wanted.tolist(), abs=1e-4)
        assert found["object"] == "pooling"
    refused = server.http.post("/pooling", json={"input": "a", "task": "classify"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")


def test_an_embedder_scores_by_cosine(embedder: tuple[RealServer, Any, Tokenizer]) -> None:
    server, *oracle = embedder
    query = mean_embedding(*oracle, PROMPTS["query"], "the fox")
    scores = [float(query @ mean_embedding(*oracle, PROMPTS["document"], text)) for text in TEXTS]
    found = server.http.post("/v1/score", json={"text_1": "the fox", "text_2": [*TEXTS, TEXTS[0]]}).json()
    assert [each["score"] for each in found["data"]] == pytest.approx([*scores, scores[0]], abs=1e-4)
    ranked = server.http.post("/v1/rerank", json={"query": "the fox", "documents": TEXTS, "top_n": 2}).json()
    assert [each["relevance_score"] for each in ranked["results"]] == pytest.approx(sorted(scores)[:0:-1], abs=1e-4)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ({"text_1": "a", "text_2": ["c", ""]}, "text_2[1]"),
        ({"text_1": "a", "text_2": []}, "text_2"),
        ({"text_1": "a"}, "text_2"),
        ({"text_1": "a", "text_2": "b", "label_token_ids": [1]}, "label_token_ids"),
        ({"text_1": "a", "text_2": ["fox " * 600]}, "text_2[0]"),
        ({"text_1": "fox " * 600, "text_2": ["a"]}, "text_1"),
    ],
)
def test_wrong_pairs_are_told(embedder: tuple[RealServer, Any, Tokenizer], body: dict[str, Any], param: str) -> None:
    for path in ("/score", "/v1/score"):
        reply = embedder[0].http.post(path, json=body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text
